"""Any request gets an answer in OpenAI's form, and never a 500."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer, error_of, serving
from schemathesis.checks import not_a_server_error

from xlstm7b.generate import Generator
from xlstm7b.serve.protocol import Limits

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 400),
    st.integers(),
    st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**400, float("nan"), float("inf"), 1e308]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["\ud800", "\x00", "tiny", "state-" + "0" * 24]),
)
VALUES = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3)
)
TEXT = st.text(max_size=9)
PROMPT = TEXT | st.lists(st.integers(0, 319), max_size=9)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
TALK = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXT}), min_size=1, max_size=3)
SAMPLING = {
    "n": st.integers(1, 3),
    "stop": st.text(min_size=1, max_size=2) | st.lists(st.text(min_size=1), max_size=3),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "temperature": st.floats(0, 1e300),
    "top_p": st.floats(1e-300, 1),
    "top_k": st.integers(-1, 10**30),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-100, 100),
    "frequency_penalty": st.floats(-100, 100),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.dictionaries(st.integers(0, 319).map(str), st.floats(-1e300, 100), max_size=3),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 2),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "max_completion_tokens": st.sampled_from([-1, 2]),
    "cache_prompt": st.booleans(),
    "skip_special_tokens": st.just(True),
    "stop_token_ids": st.lists(st.integers(0, 319), max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "use_beam_search": st.just(False),
    "model": st.just("tiny"),
    "user": TEXT,
}
SCHEMA = st.sampled_from(
    [
        {},
        {"type": "object"},
        {"type": "string", "pattern": "a|b"},
        {"enum": [1, "x", None]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "integer", "minimum": 5, "maximum": 2},
    ]
)
FORMS: dict[str, Any] = {
    "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object"])})
    | st.fixed_dictionaries(
        {
            "type": st.just("json_schema"),
            "json_schema": st.fixed_dictionaries({"name": TEXT, "schema": SCHEMA | VALUES}),
        }
    ),
    "guided_json": SCHEMA | TEXT | st.dictionaries(TEXT, VALUES, max_size=3),
    "guided_regex": TEXT,
    "guided_choice": st.lists(TEXT, max_size=3),
    "guided_grammar": TEXT | TEXT.map(lambda text: f"start: {text}"),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "json_object", "regex", "choice", "grammar", "x"]),
        st.booleans() | SCHEMA | TEXT | VALUES,
        max_size=2,
    ),
}
SAMPLING |= FORMS
LABEL = {
    "name": TEXT,
    "tags": st.lists(TEXT, max_size=3),
    "expires_in": st.integers(0, 10**8),
}
NAME = st.sampled_from(["f", "g"])
FUNCTION = {"name": NAME, "parameters": SCHEMA | VALUES | st.none()}
CALL = {"name": NAME, "arguments": st.sampled_from(["{}", '{"a": 1}', "x"]) | TEXT}
CHOICE = st.sampled_from(["none", "auto", "required"])
TOOLS: dict[str, Any] = {
    "tools": st.lists(
        st.fixed_dictionaries(
            {"type": st.just("function"), "function": st.fixed_dictionaries(FUNCTION)}
        ),
        max_size=3,
    ),
    "tool_choice": CHOICE
    | st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": NAME})}
    ),
    "parallel_tool_calls": st.booleans(),
}
WITH_CALLS = st.tuples(
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {"id": st.just("x"), "function": st.fixed_dictionaries(CALL)}
                ),
                max_size=2,
            ),
        }
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "tool_call_id": st.sampled_from("xy"), "content": TEXT}
    ),
).map(list)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "item_reference"]
        ),
        "role": ROLES,
        "content": TEXT,
        "call_id": st.sampled_from("xy"),
        "output": TEXT,
        **CALL,
    },
)
# The required and the optional fields of each route.
ROUTES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/completions": (
        {"prompt": PROMPT | st.lists(PROMPT, max_size=2), "max_tokens": st.just(2)},
        {
            **SAMPLING,
            "best_of": st.integers(1, 3),
            "echo": st.booleans(),
            "logprobs": st.integers(0, 20),
            "save_state": st.booleans(),
        },
    ),
    "/v1/chat/completions": (
        {"messages": TALK, "max_tokens": st.just(2)},
        {
            **SAMPLING,
            **TOOLS,
            "messages": TALK | WITH_CALLS,
            "logprobs": st.just(True),
            "top_logprobs": st.integers(0, 20),
            "continue_final_message": st.booleans(),
            "add_generation_prompt": st.booleans(),
        },
    ),
    "/v1/responses": (
        {"input": TEXT | TALK | st.lists(ITEM, max_size=3), "max_output_tokens": st.just(2)},
        {
            "instructions": TEXT,
            "previous_response_id": TEXT,
            "store": st.booleans(),
            "stream": st.booleans(),
            "temperature": st.floats(0, 1e300),
            "top_p": st.floats(1e-300, 1),
            "text": st.fixed_dictionaries(
                {"format": st.fixed_dictionaries({"type": TEXT, "schema": SCHEMA | VALUES})}
            )
            | st.just({"format": {"type": "json_object"}}),
            "tools": st.lists(
                st.fixed_dictionaries({"type": st.just("function"), **FUNCTION}), max_size=3
            ),
            "tool_choice": CHOICE,
            "parallel_tool_calls": st.booleans(),
            "metadata": st.dictionaries(TEXT, TEXT, max_size=2),
            "model": st.just("tiny"),
        },
    ),
    "/tokenize": (
        {"prompt": PROMPT},
        {"model": st.just("tiny"), "add_special_tokens": st.booleans()},
    ),
    "/markdown": ({"texts": st.lists(st.text(max_size=9))}, {"texts": st.just([])}),
    "/detokenize": ({"tokens": st.lists(st.integers(0, 319))}, {"model": st.just("tiny")}),
    "/v1/states": (
        {"messages": TALK},
        {"model": st.just("tiny"), **LABEL, "stream": st.booleans()},
    ),
}


@pytest.fixture(scope="module")
def live(generator: Generator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """With short answers, because some of the bodies ask for long ones."""
    limits = Limits(new_tokens=8, choices=8)
    with serving(generator, limits=limits, states=tmp_path_factory.mktemp("states")) as server:
        yield server


@st.composite
def path_and_body(draw: st.DrawFn) -> tuple[str, Any]:
    """A valid request, one with an odd value, or an odd value instead of a body."""
    path = draw(st.sampled_from([*ROUTES]))
    needed, others = ROUTES[path]
    chosen = draw(st.lists(st.sampled_from([*others]), max_size=5, unique=True))
    body = {name: draw({**needed, **others}[name]) for name in [*needed, *chosen]}
    if draw(st.booleans()):
        body[draw(st.sampled_from([*needed, *others, "state"]))] = draw(VALUES)
    return path, draw(st.sampled_from([body] * 9 + [None])) or draw(VALUES)


def test_malformed_bodies_are_refused_or_answered(live: LiveServer) -> None:
    answers = Counter[int]()

    @settings(max_examples=500, suppress_health_check=[*HealthCheck])
    @given(path_and_body=path_and_body())
    def check(path_and_body: tuple[str, Any]) -> None:
        path, body = path_and_body
        headers = {"content-type": "application/json"}
        answer = live.client.post(path, content=json.dumps(body), headers=headers)
        assert answer.status_code in (200, 400, 404, 409), answer.text
        if answer.status_code != 200:
            message = error_of(answer)["message"]
            assert not re.search("Input should|should have|Field required|permitted", message)
        assert 'data: {"error"' not in answer.text
        answers[answer.status_code] += 1

    check()
    assert answers[200] > 100
    assert answers[400] > 100
    assert live.client.get("/health").json() == {"status": "ok"}


def test_any_form_of_the_output_is_refused_or_answered(live: LiveServer) -> None:
    answers = Counter[int]()

    @settings(max_examples=200, suppress_health_check=[*HealthCheck])
    @given(data=st.data(), name=st.sampled_from([*FORMS]), stream=st.booleans())
    def check(data: st.DataObject, name: str, stream: bool) -> None:
        form = {name: data.draw(FORMS[name] | VALUES)}
        body = {"prompt": "a", "max_tokens": 3, "stream": stream, **form}
        headers = {"content-type": "application/json"}
        answer = live.client.post("/v1/completions", content=json.dumps(body), headers=headers)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            error = error_of(answer)
            assert error["param"].partition(".")[0] == name
            assert name in error["message"]
        answers[answer.status_code] += 1

    check()
    assert min(answers[200], answers[400]) > 30
    assert live.client.get("/health").json() == {"status": "ok"}


def test_states_with_any_fields_queries_and_content(live: LiveServer) -> None:
    """PUT, PATCH and GET, with states that are there and ids that are not."""
    known = live.post("/v1/states", prompt="a")["id"]
    live.post("/v1/states", prompt="a", name="b", tags=["c"])
    file = live.client.get(f"/v1/states/{known}/content").content
    ids = st.sampled_from([known, known[:-1], "state-" + "0" * 24, "../x", "", "é"])
    odd_text = ODD.map(str).filter(str.isprintable)
    queries = st.dictionaries(
        st.sampled_from([*LABEL, "model", "state", "stream", "limit", "after", "tag", "x"]),
        st.sampled_from(["tiny", known, "true", "0", "7", "-1", "", "é", "9" * 5000]) | odd_text,
        max_size=3,
    )
    kinds = st.sampled_from(["text/plain", "text/plain; charset=x", "", "application/json", "é/b"])
    contents = st.binary(max_size=40) | st.just(file) | st.integers(0, 4000).map(lambda n: file[:n])
    bodies = st.fixed_dictionaries({}, optional={name: LABEL[name] | VALUES for name in LABEL})
    answers = Counter[int]()

    @settings(max_examples=150, suppress_health_check=[*HealthCheck])
    @given(query=queries, kind=kinds, content=contents, state_id=ids, body=bodies)
    def check(query: Any, kind: str, content: bytes, state_id: str, body: Any) -> None:
        path = f"/v1/states/{quote(state_id, safe='')}"
        encoded = kind.encode()
        for answer in (
            live.client.put(
                "/v1/states", params=query, content=content, headers={"content-type": encoded}
            ),
            live.client.get("/v1/states", params=query),
            live.client.get(path, params=query),
            live.client.get(f"{path}/content", params=query),
            live.client.patch(
                path, content=json.dumps(body), headers={"content-type": "application/json"}
            ),
        ):
            assert answer.status_code in (200, 400, 404, 405, 409), answer.text
            if answer.status_code != 200:
                message = error_of(answer)["message"]
                assert not re.search("Input should|should have|Field required|permitted", message)
            answers[answer.status_code] += 1

    check()
    assert min(answers[200], answers[400], answers[404]) > 30
    assert live.client.get("/health").json() == {"status": "ok"}
    assert live.client.get(f"/v1/states/{known}").json()["status"] == "ok"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "Expecting property name enclosed in double quotes at character 2"),
        (b'{"prompt":\n hello}', "Expecting value at character 13"),
        (b'{"prompt": "a"} x', "Extra data at character 17"),
        (b'{"prompt": "\xff"}', "'utf-8' codec can't decode byte 0xff in position 12"),
        (b"[" * 200_000, "maximum recursion depth exceeded"),
        (b'{"n": ' + b"9" * 5000 + b"}", "Exceeds the limit (4300 digits)"),
    ],
)
def test_what_is_not_json_is_said_with_its_position(
    live: LiveServer, content: bytes, problem: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = live.client.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["message"].startswith(f"the body is not JSON: {problem}")
    assert (error["type"], error["param"]) == ("invalid_request_error", None)


@settings(max_examples=100)
@given(path=st.sampled_from([*ROUTES]), content=st.binary(max_size=200))
def test_random_bytes(live: LiveServer, path: str, content: bytes) -> None:
    answer = live.client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error_of(answer)


HALF = "half of a surrogate pair: \ud800"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": HALF}, "prompt"),
        ("/v1/completions", {"prompt": ["a", HALF]}, "prompt.1"),
        ("/v1/completions", {"prompt": "a", "stop": [HALF]}, "stop.0"),
        ("/v1/completions", {"prompt": "a", HALF: 1}, None),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": HALF}]},
            "messages.0.content",
        ),
        ("/tokenize", {"prompt": HALF}, "prompt"),
        ("/v1/states", {"prompt": HALF}, "prompt"),
        ("/v1/responses", {"input": HALF}, "input"),
        ("/v1/responses", {"input": "a", "instructions": HALF}, "instructions"),
        ("/v1/responses", {"input": "a", "user": HALF}, "user"),
        ("/v1/responses", {"input": "a", "metadata": {"a": HALF}}, "metadata.a"),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "text", "name": HALF}}},
            "text.format.name",
        ),
        (
            "/v1/responses",
            {
                "input": "a",
                "text": {"format": {"type": "json_schema", "schema": {"title": HALF}}},
                "tools": [{"type": "function", "name": "f"}],
                "tool_choice": "required",
            },
            "text.format.schema",
        ),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"a": HALF}}]},
            "tools.0.parameters",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f", "description": HALF}}],
            },
            "tools.0.function.description",
        ),
    ],
)
def test_halves_of_surrogate_pairs_are_refused(
    live: LiveServer, path: str, body: dict, param: str | None
) -> None:
    """JSON can hold them, UTF-8 cannot."""
    headers = {"content-type": "application/json"}
    answer = live.client.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_every_operation_of_the_openapi_schema(live: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    tried = 0
    for operation in schema.get_all_operations():
        call = operation.ok()

        @settings(max_examples=25, suppress_health_check=[*HealthCheck])
        @given(case=call.as_strategy())
        def check(case: schemathesis.Case) -> None:
            answer = case.call(base_url=live.url, timeout=30)
            case.validate_response(answer, checks=[not_a_server_error])

        check()
        tried += 1
    assert tried == 24
    assert live.post("/v1/completions", prompt="a", max_tokens=2)["choices"]


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "TRACE"])
def test_other_methods_and_paths(live: LiveServer, method: str) -> None:
    for path in ("/v1/completions", "/nowhere", "/v1/states/", "//", "/page/../app.js"):
        answer = httpx.request(method, f"{live.url}{path}")
        assert answer.status_code in (404, 405, 200), (path, answer.text)
    put = httpx.request("PUT", f"{live.url}/v1/completions")
    assert put.headers["allow"] == "POST"
    assert error_of(put)["message"] == "/v1/completions takes POST, not PUT"
    delete = httpx.delete(f"{live.url}/v1/states")
    assert (delete.status_code, delete.headers["allow"]) == (405, "GET, POST, PUT")
    assert error_of(delete)["message"] == "/v1/states takes GET, POST, PUT, not DELETE"
    lost = httpx.get(f"{live.url}/nowhere")
    assert error_of(lost)["message"] == "there is nothing at /nowhere"
    for path in ("/health", "/", "/style.css"):
        head = httpx.head(f"{live.url}{path}")
        assert (head.status_code, head.content) == (200, b"")
