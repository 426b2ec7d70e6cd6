"""Structured output over HTTP: OpenAI's field, vLLM's fields, and refusals that say why."""

import gc
import json
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from live_server import LiveServer, error_of, wait_for
from pydantic import BaseModel, Field

from xlstm7b.generate import Request, SamplingParams, structured
from xlstm7b.generate.structured import Grammar, Matcher
from xlstm7b.serve.handlers import GrammarsInUse
from xlstm7b.serve.protocol import ApiError

USER = [{"role": "user", "content": "Who?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
WRAPPED = {"name": "person", "description": "A person", "schema": SCHEMA, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": WRAPPED}
ROUTES = [("/v1/completions", {"prompt": "Who?"}), ("/v1/chat/completions", {"messages": USER})]
both_routes = pytest.mark.parametrize(("path", "body"), ROUTES)


def text_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


@both_routes
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ],
)
def test_json_schemas(live: LiveServer, path: str, body: dict, form: dict) -> None:
    answer = live.post(path, **body, **form, max_tokens=80, seed=1, n=3)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text_of(choice)))
    want = live.post(path, **body, **form, max_tokens=80, seed=3)["choices"][0]
    assert text_of(want) == text_of(answer["choices"][2])  # choice n has seed + n


@both_routes
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-x?"}}, "[0-9]{3}-x?"),
        ({"guided_regex": "[0-9]{3}-x?"}, "[0-9]{3}-x?"),
        ({"structured_outputs": {"choice": [" yes", " no"]}}, " yes| no"),
        ({"guided_choice": [" yes", " no"]}, " yes| no"),
        ({"structured_outputs": {"grammar": 'start: "a" ("," "b")~2'}}, "a,b,b"),
        ({"guided_grammar": 'start: "a" ("," "b")~2'}, "a,b,b"),
    ],
)
def test_regexes_choices_and_grammars(
    live: LiveServer, path: str, body: dict, form: dict, pattern: str
) -> None:
    choice = live.post(path, **body, **form, max_tokens=20)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, text_of(choice))
    chunks = live.stream(path, **body, **form, max_tokens=20)
    parts = [chunk["choices"][0] for chunk in chunks]
    text = "".join(part["delta"]["content"] if "delta" in part else part["text"] for part in parts)
    assert re.fullmatch(pattern, text)
    assert parts[-1]["finish_reason"] == "stop"


def test_json_object(live: LiveServer) -> None:
    form = {"type": "json_object"}
    answer = live.post(
        "/v1/chat/completions", messages=USER, response_format=form, max_tokens=50, n=4, seed=0,
        logit_bias={str(2 + ord("}")): 5},
    )  # fmt: skip
    finished = [one for one in answer["choices"] if one["finish_reason"] == "stop"]
    assert finished
    assert all(isinstance(json.loads(text_of(one)), dict) for one in finished)
    for kind in ("json_object", "text"):
        live.post("/v1/completions", prompt="a", response_format={"type": kind}, max_tokens=1)


def test_with_other_fields(live: LiveServer) -> None:
    answer = live.post(
        "/v1/chat/completions",
        messages=USER,
        response_format=FORMAT,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=1,
        logit_bias={str(token): -100 for token in range(320)},
        min_tokens=60,
        ignore_eos=True,
        max_tokens=80,
    )
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(text_of(choice)))
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    cut = live.post("/v1/completions", prompt="a", guided_regex="a{9}", stop="aaa", max_tokens=20)
    assert (cut["choices"][0]["text"], cut["choices"][0]["finish_reason"]) == ("", "stop")
    cut = live.post("/v1/completions", prompt="a", guided_regex="a{9}", max_tokens=4)
    assert (cut["choices"][0]["text"], cut["choices"][0]["finish_reason"]) == ("aaaa", "length")


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=9)


def test_the_openai_client_parses(live: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        for _ in range(3):
            answer = client.chat.completions.parse(
                model="tiny", messages=USER, response_format=Pet, max_tokens=200
            )
            assert isinstance(answer.choices[0].message.parsed, Pet)
        with client.chat.completions.stream(
            model="tiny", messages=USER, response_format=Pet, max_tokens=200
        ) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)
        extra = {"structured_outputs": {"choice": ["red", "blue"]}}
        answer = client.completions.create(model="tiny", prompt="a", extra_body=extra)
        assert answer.choices[0].text in ("red", "blue")


@both_routes
@pytest.mark.parametrize(
    ("form", "param", "message"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema must be a JSON schema: an object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema",
            "response_format.json_schema has an unknown field 'x'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            'response_format.json_schema.schema has keywords that are not supported: "not"',
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            'response_format.type must be "text", "json_object" or ',
        ),
        (
            {"guided_json": {"type": "integer", "minimum": 5, "maximum": 2}},
            "guided_json",
            "guided_json matches no JSON at all: minimum (5) is greater than maximum (2)",
        ),
        ({"guided_json": "{"}, "guided_json", "guided_json is not JSON: Expecting property name"),
        ({"guided_regex": "("}, "guided_regex", "guided_regex has an invalid regex: unclosed"),
        ({"guided_choice": []}, "guided_choice", "guided_choice must be a list of strings, none"),
        (
            {"guided_grammar": "start: x"},
            "guided_grammar",
            'guided_grammar is not valid: at 1(8): unknown name: "x"',
        ),
        (
            {"structured_outputs": {"json": {"type": "integer", "multipleOf": 982451653}}},
            "structured_outputs.json",
            "structured_outputs.json is too complex: fuel exhausted",
        ),
        (
            {"structured_outputs": {"regex": "a" * 70000}},
            "structured_outputs.regex",
            "structured_outputs.regex must have at most 65536 characters, not 70000",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "structured_outputs must have exactly one of json (a schema)",
        ),
        (
            {"structured_outputs": 5},
            "structured_outputs",
            "structured_outputs must be an object, not 5",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "guided_regex and response_format cannot be combined",
        ),
    ],
)
def test_refusals_name_the_field_and_say_why(
    live: LiveServer, path: str, body: dict, form: dict, param: str, message: str
) -> None:
    answer = live.client.post(path, json={**body, **form})
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert error["message"].startswith(message)


def test_a_grammar_that_leads_nowhere(live: LiveServer) -> None:
    lark = 'start: "ab" rest\nrest: rest "c"'
    body = {"prompt": "a", "guided_grammar": lark}
    assert "cannot be followed" in live.refused("/v1/completions", 400, **body)
    answer = live.client.post("/v1/completions", json={**body, "stream": True})
    assert 'data: {"error"' in answer.text
    assert live.is_idle()


def test_hostile_grammars_do_not_hold_up_others(live: LiveServer) -> None:
    hostile = [{"guided_regex": f"(a{{{1000 + n}}}){{1000}}"} for n in range(3)]
    with ThreadPoolExecutor(3) as threads:
        refused = [
            threads.submit(live.refused, "/v1/completions", 400, prompt="a", **form)
            for form in hostile
        ]
        assert live.post("/v1/completions", prompt="a", max_tokens=2)["choices"]
        assert live.client.get("/health").status_code == 200
        assert all("regex" in future.result() for future in refused)


def test_no_place_to_compile_a_grammar_in_time(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four grammars take long. A valid one of the same client waits, and may come again later."""
    released, compile_form = threading.Event(), structured._compile

    def slow(vocabulary: Any, form: str, value: Any) -> Grammar:
        assert "slow" not in str(value) or released.wait(20)
        return compile_form(vocabulary, form, value)

    monkeypatch.setattr(structured, "_compile", slow)
    body = {"prompt": "a", "max_tokens": 2}
    with ThreadPoolExecutor(4) as threads:
        hostile = [
            threads.submit(live.post, "/v1/completions", **body, guided_regex=f"(slow){{{n}}}")
            for n in range(4)
        ]
        wait_for(lambda: structured._Place._taken == 3)
        wait_for(lambda: structured._Place._changed._waiters)
        monkeypatch.setattr(structured, "_PLACE_SECONDS", 0.1)
        refused = live.client.post("/v1/completions", json={**body, "guided_regex": "ab"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert "too many other grammars are being compiled" in error_of(refused)["message"]
        released.set()
        assert all(future.result()["choices"] for future in hostile)
    monkeypatch.setattr(structured, "_PLACE_SECONDS", 10.0)
    assert live.post("/v1/completions", **body, guided_regex="ab")["choices"]


def test_large_grammars_are_limited_in_all(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(grammars: GrammarsInUse, *regexes: str) -> AbstractContextManager[None]:
        requests = []
        for regex in regexes:
            params = SamplingParams(structured_outputs={"regex": regex})
            requests.append(Request("a", params).prepare(service.config, service.tokenizer))
            seconds = 0.1 if regex.startswith("large") else 0.001
            monkeypatch.setattr(requests[-1].matcher.grammar, "cpu_seconds", seconds)
        return grammars.count(requests)

    service, grammars = live.service, GrammarsInUse(cpu_seconds=0.25)
    with count(grammars, "large1"), count(grammars, "large2"):
        with pytest.raises(ApiError, match="too much memory") as raised, count(grammars, "large3"):
            pass
        assert (raised.value.status, raised.value.headers) == (429, {"retry-after": "1"})
        with count(grammars, "large1", "small"), count(grammars, *[f"a{n}" for n in range(99)]):
            pass  # one that is in use, and small ones
    with count(grammars, "large3", "large4"):
        pass
    # Over HTTP, also with tools, whose schemas become one grammar.
    monkeypatch.setattr(service.grammars, "_limit", 0.0)
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    forced = {"tools": [tool], "tool_choice": "required", "max_tokens": 99}
    heavy = {"guided_regex": "(a{150}){150}"}
    assert live.post("/v1/chat/completions", messages=USER, **forced)["choices"]
    assert "simpler schema" in live.refused("/v1/completions", 429, prompt="a", **heavy)
    monkeypatch.setattr(service.grammars, "_limit", 9.0)
    assert live.post("/v1/completions", prompt="a", max_tokens=2, **heavy)["choices"]
    assert not service.grammars._uses


def test_many_aborted_requests_leave_nothing_behind(live: LiveServer) -> None:
    """Streams and whole answers, with 25 schemas: more than the 16 that are kept."""
    aborted = live.metric("request_aborts_total")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"

    def abort(count: int) -> None:
        for number in range(count):
            kind = number % 25
            schema = {"name": "a", "schema": {"type": "array", "minItems": kind}}
            form = {"response_format": {"type": "json_schema", "json_schema": schema}}
            body = {"messages": USER, "max_tokens": 50_000, "stream": kind % 4 > 0, **form}
            content = json.dumps(body).encode()
            fields = f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
            if not body["stream"]:
                wait_for(live.is_idle)
            with live.connect() as connection:
                connection.sendall(head + fields.encode() + content)
                if body["stream"]:
                    assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
                else:
                    wait_for(lambda: not live.is_idle())
        wait_for(live.is_idle)

    abort(100)
    before = resident_bytes()
    abort(400)
    wait_for(lambda: live.metric("request_aborts_total") == aborted + 500)
    assert resident_bytes() - before < 16 << 20
    gc.collect()
    left = Counter(type(found) for found in gc.get_objects())
    assert left[Matcher] == 0
    assert left[Grammar] <= 16
    assert not live.service.grammars._uses
    # No slot is lost: all four answer at once.
    answer = live.post("/v1/completions", prompt="a", max_tokens=80, n=4, guided_json=SCHEMA)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 4


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
