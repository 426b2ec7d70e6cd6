"""/v1/responses through the OpenAI client and as raw events, and what the server stores."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, error_of, serving
from pydantic import BaseModel
from tool_chats import tool_format, tool_generator

from xlstm7b.generate import Generator
from xlstm7b.serve.protocol import ApiError, Limits
from xlstm7b.serve.responses import ResponseBody, ResponseWriter, StoredResponses

PATH = "/v1/responses"
ADD = {
    "type": "function",
    "name": "add",
    "description": "The sum of two numbers",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A model that answers "@ok" without tools, calls one if there is one, then answers "ok"."""
    with serving(tool_generator(), chat_format=tool_format()) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def events(live: LiveServer, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names must be their types."""
    with live.client.stream("POST", PATH, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in found] == names
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def test_text(client: openai.OpenAI, live: LiveServer) -> None:
    done = client.responses.create(
        model="tiny", input="Hi", instructions="Be brief.", metadata={"run": "1"}
    )
    assert (done.output_text, done.status, done.error) == ("@ok", "completed", None)
    assert done.id.startswith("resp_")
    assert done.output[0].id.startswith("msg_")
    assert (done.instructions, done.metadata, done.model) == ("Be brief.", {"run": "1"}, "tiny")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat = live.post("/v1/chat/completions", messages=messages)
    assert done.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert done.usage.output_tokens == chat["usage"]["completion_tokens"] == 3
    cut = client.responses.create(model="tiny", input="Hi", max_output_tokens=2)
    assert (cut.output_text, cut.status) == ("@o", "incomplete")
    assert cut.incomplete_details.reason == "max_output_tokens"
    parts = [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    same = client.responses.create(model="tiny", input=items)
    assert same.usage.input_tokens == done.usage.input_tokens


def test_events_of_text(live: LiveServer) -> None:
    found = events(live, input="Hi")
    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * (len(found) - 8),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in found if "delta" in event) == "@ok"
    assert found[0]["response"]["status"] == "in_progress"
    assert found[2]["item"] == {**found[-2]["item"], "status": "in_progress", "content": []}
    last = found[-1]["response"]
    assert (last["status"], last["output"]) == ("completed", [found[-2]["item"]])
    assert last["output"][0]["content"][0]["text"] == "@ok"
    assert events(live, input="Hi", max_output_tokens=1)[-1]["type"] == "response.incomplete"


def test_events_of_calls(live: LiveServer) -> None:
    found = events(live, input="Hi", tools=[ADD], parallel_tool_calls=False)
    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * (len(found) - 6),
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    added, *deltas, done, _, _ = found[2:]
    assert (added["item"]["name"], added["item"]["arguments"]) == ("add", "")
    assert "".join(event["delta"] for event in deltas) == done["arguments"] == '{"a":3,"b":3}'
    (item,) = found[-1]["response"]["output"]
    assert item == {**added["item"], "status": "completed", "arguments": done["arguments"]}
    assert {event["item_id"] for event in [*deltas, done]} == {item["id"]}


def test_speculation_is_counted_as_in_a_chat() -> None:
    generator = tool_generator()
    body = {"input": "Hi", "temperature": 0}
    with serving(
        generator,
        chat_format=tool_format(),
        speculate=copy.deepcopy(generator.model),
        cache_bytes=0,
    ) as live:
        chat = live.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
        counts = chat["usage"]["completion_tokens_details"]
        assert counts["accepted_prediction_tokens"] > 0
        done = live.post(PATH, **body)
        streamed = events(live, **body)[-1]["response"]
        for response in (done, streamed):
            assert response["output"][0]["content"][0]["text"] == "@ok"
            details = response["usage"]["output_tokens_details"]
            assert details == {"reasoning_tokens": 0, **counts}
        drafted = live.metric("spec_decode_num_draft_tokens_total")
        without = live.post(PATH, **body, speculate=False)
        assert without["output"][0]["content"][0]["text"] == "@ok"
        assert without["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
        assert live.metric("spec_decode_num_draft_tokens_total") == drafted


def test_top_k(generator: Generator) -> None:
    """With 1, sampling is greedy. -1 means all tokens, as in a chat."""
    with serving(generator) as live:

        def text(**sampling: Any) -> str:
            done = live.post(PATH, input="Hi", max_output_tokens=20, **sampling)
            return done["output"][0]["content"][0]["text"]

        assert text(temperature=2, top_k=1) == text(temperature=0)
        assert text(temperature=0, top_k=-1) == text(temperature=0)


class Pet(BaseModel):
    legs: int


def test_the_helpers_of_the_openai_client(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="Hi") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "@ok"
    assert kinds[-1] == "response.completed"
    with client.responses.stream(model="tiny", input="Hi", text_format=Pet) as stream:
        assert stream.get_final_response().output_parsed == Pet(legs=3)
    parsed = client.responses.parse(model="tiny", input="Hi", text_format=Pet)
    assert parsed.output_parsed == Pet(legs=3)
    raw = client.responses.create(model="tiny", input="Hi", tools=[ADD], stream=True)
    assert [event.type for event in raw][-1] == "response.completed"


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_conversation_with_a_tool(client: openai.OpenAI, is_stored: bool) -> None:
    options = {"model": "tiny", "tools": [ADD], "store": is_stored}
    first = client.responses.create(input="Hi", parallel_tool_calls=False, **options)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "add",
        {"a": 3, "b": 3},
    )
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "6"}
    if is_stored:
        last = client.responses.create(input=[result], previous_response_id=first.id, **options)
    else:
        talk = [{"role": "user", "content": "Hi"}, call, result]
        last = client.responses.create(input=talk, **options)
    assert last.output_text == "ok"
    named = {"type": "function", "name": "add"}
    forced = client.responses.create(input="Hi", tool_choice=named, **options)
    assert [item.type for item in forced.output] == ["function_call"]
    plain = client.responses.create(input="Hi", tool_choice="none", **options)
    assert plain.output_text == "@ok"


def test_previous_responses(client: openai.OpenAI, live: LiveServer) -> None:
    first = client.responses.create(model="tiny", input="One", instructions="Not carried over.")
    second = client.responses.create(model="tiny", input="Two", previous_response_id=first.id)
    whole = [
        {"role": "user", "content": "One"},
        *first.output,
        {"role": "user", "content": "Two"},
    ]
    same = client.responses.create(model="tiny", input=whole, store=False)
    assert second.usage.input_tokens == same.usage.input_tokens
    assert second.previous_response_id == first.id
    by_id = [whole[0], {"type": "item_reference", "id": first.output[0].id}, whole[2]]
    again = client.responses.create(model="tiny", input=by_id)
    assert again.usage.input_tokens == same.usage.input_tokens
    assert client.responses.retrieve(first.id) == first
    assert client.responses.delete(first.id) is None
    for gone in (first.id, same.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError, match="there is no response") as raised:
            client.responses.create(model="tiny", input="a", previous_response_id=gone)
        assert raised.value.param == "previous_response_id"
    assert client.responses.retrieve(second.id).output_text == "@ok"  # stands by itself
    assert live.client.get(f"{PATH}/{second.id}?stream=true").status_code == 400


def test_input_tokens_are_counted_as_in_the_usage(client: openai.OpenAI, live: LiveServer) -> None:
    first = client.responses.create(model="tiny", input="One")
    running = live.metric("prompt_tokens_total")
    for body in (
        {"input": "Hi"},
        {"input": "Two", "instructions": "Be brief.", "previous_response_id": first.id},
        {"input": [{"role": "user", "content": "a"}], "tools": [ADD], "tool_choice": "required"},
    ):
        counted = client.responses.input_tokens.count(model="tiny", **body)
        assert counted.object == "response.input_tokens"
        assert live.metric("prompt_tokens_total") == running  # nothing was generated
        done = client.responses.create(model="tiny", **body)
        assert counted.input_tokens == done.usage.input_tokens
        running = live.metric("prompt_tokens_total")
    message = live.refused(f"{PATH}/input_tokens", 404, input="a", model="messages")
    assert message == "there is no model 'messages'; this server has 'tiny'"
    assert "is missing" in live.refused(f"{PATH}/input_tokens", 400)


def test_input_items_are_what_a_response_answers(client: openai.OpenAI, live: LiveServer) -> None:
    options = {"model": "tiny", "tools": [ADD], "parallel_tool_calls": False}
    first = client.responses.create(input="Hi", instructions="Be brief.", **options)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "6"}
    parts = [{"type": "input_text", "text": "O"}, {"type": "input_text", "text": "K?"}]
    more = [
        result,
        {"role": "assistant", "content": "It is 6."},
        {"role": "user", "content": parts},
    ]
    last = client.responses.create(input=more, previous_response_id=first.id, **options)

    def shown(items: list) -> list[tuple]:
        contents = [getattr(item, "content", None) or [] for item in items]
        return [
            (item.type, getattr(item, "role", None), "".join(part.text for part in content))
            for item, content in zip(items, contents, strict=True)
        ]

    (item,) = client.responses.input_items.list(first.id)
    assert shown([item]) == [("message", "user", "Hi")]
    items = [*client.responses.input_items.list(last.id, order="asc")]
    assert shown(items) == [
        ("message", "user", "Hi"),
        ("function_call", None, ""),
        ("function_call_output", None, ""),
        ("message", "assistant", "It is 6."),
        ("message", "user", "OK?"),
    ]
    assert (items[1].name, items[1].arguments) == ("add", call.arguments)
    assert (items[1].call_id, items[2].call_id, items[2].output) == (*[call.call_id] * 2, "6")
    # They are read as input again, and pages of them are all of them.
    again = [item.model_dump(exclude_none=True) for item in items]
    same = client.responses.create(input=again, store=False, **options)
    assert same.usage.input_tokens == last.usage.input_tokens
    paged = [*client.responses.input_items.list(last.id, limit=2)]
    assert paged == [*reversed(items)]
    page = live.client.get(f"{PATH}/{last.id}/input_items?limit=2").json()
    assert (page["has_more"], page["last_id"]) == (True, paged[1].id)
    for query, status, param in (("limit=0", 400, "limit"), ("after=x", 404, "after")):
        answer = live.client.get(f"{PATH}/{last.id}/input_items?{query}")
        assert (answer.status_code, error_of(answer)["param"]) == (status, param)
    assert live.client.get(f"{PATH}/resp_none/input_items").status_code == 404


def test_the_store_is_bounded() -> None:
    def response(number: int) -> dict[str, Any]:
        return {"id": f"r{number}", "output": [{"id": f"i{number}"}]}

    size = len(json.dumps(response(1))) + len(json.dumps(["x" * 100]))
    stored = StoredResponses(3 * size)
    for number in range(1, 4):
        stored.add(response(number), ["x" * 100])
    stored.find("r1")
    stored.add(response(4), ["x" * 100])  # drops r2, the least recently used
    stored.add(response(5), ["x" * 1000])  # larger than the bound
    kept = []
    for number in range(1, 6):
        with suppress(ApiError):
            kept.append(stored.find(f"r{number}").response["id"])
            stored.find_item(f"i{number}", "input")
    assert kept == ["r1", "r3", "r4"]
    with pytest.raises(ApiError, match="'i2', which is no output of a stored response"):
        stored.find_item("i2", "input")


def test_conversations_are_dropped_within_the_bound() -> None:
    limits = Limits(stored_bytes=6000)
    with serving(tool_generator(), chat_format=tool_format(), limits=limits) as live:
        ids = [live.post(PATH, input="a" * 1000)["id"] for _ in range(9)]
        found = [live.client.get(f"{PATH}/{one}").status_code for one in ids]
        assert found == sorted(found, reverse=True)
        assert 0 < found.count(200) < 9


CALL = {"type": "function_call", "call_id": "x", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "y", "output": "6"}
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "is missing"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": 5}, "input", "must be a string or a list"),
        ({"input": [{"role": "user"}]}, "input.0.content", "is missing"),
        ({"input": [{**USER, "output": "b"}]}, "input.0.output", "not a field of the type message"),
        ({"input": [{"type": "reasoning"}]}, "input.0.type", 'must be "message", "function_call"'),
        ({"input": [{**USER, "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", ""),
        ({"input": [USER, OUTPUT]}, "input.1.call_id", "is 'y', which is no open call"),
        ({"input": [USER, CALL, OUTPUT]}, "input.2.call_id", "is 'y', which is no open call"),
        ({"input": [USER, {**OUTPUT, "call_id": "messages.9"}]}, "input.1.call_id", "'messages.9'"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must"),
        (
            {"input": "a", "tools": [ADD], "tool_choice": {"type": "function", "name": "messages"}},
            "tool_choice",
            "tool_choice names 'messages', but the functions in tools are: 'add'",
        ),
        (
            {"input": "a", "tools": [{**ADD, "name": "max_tokens"}] * 2},
            "tools.1.name",
            "tools.1.name is 'max_tokens', like that of another function",
        ),
        ({"input": [{**CALL, "arguments": "x"}]}, "input.0.arguments", "must be a JSON object"),
        ({"input": [{**CALL, "name": "a b"}]}, "input.0.name", "letters, digits"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type", 'must be "function"'),
        ({"input": "a", "tools": [ADD, ADD]}, "tools.1.name", "like that of another function"),
        (
            {"input": "a", "tools": [{**ADD, "parameters": {"not": {}}}]},
            "tools.0.parameters",
            'tools.0.parameters has keywords that are not supported: "not"',
        ),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "text.format.schema",
            "text.format.schema has keywords",
        ),
        (
            {"input": "a", "text": {"format": {"type": "json_schema"}}},
            "text.format.schema",
            "must be a JSON schema",
        ),
        (
            {"input": "a", "text": {"format": {"type": "text", "schema": {}}}},
            "text.format.schema",
            "needs the type json_schema",
        ),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": {}, "form": 1}}},
            "text.format.form",
            "not a field that this server knows",
        ),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "must be between 1 and"),
        ({"input": "a", "temperature": -1}, "temperature", "0 or a positive number"),
        ({"input": "a", "top_k": -2}, "top_k", "top_k must be"),
        ({"input": "a", "speculate": "lookup"}, "speculate", "must be true or false"),
        ({"input": "a", "truncation": "auto"}, "truncation", 'must be "disabled"'),
        ({"input": "a", "background": True}, "background", "must be false"),
        ({"input": "a", "conversation": "x"}, "conversation", "not a field that this server knows"),
        ({"input": "a", "include": ["file_search_call.results"]}, "include.0", "must be"),
    ],
)
def test_refusals(live: LiveServer, body: dict, param: str, message: str) -> None:
    answer = live.client.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("name", ["messages", "response_format", "messages.0.tool_call_id"])
def test_quoted_text_is_not_renamed(live: LiveServer, name: str) -> None:
    answer = live.client.post(PATH, json={"input": "a", "model": name})
    assert answer.status_code == 404
    message = f"there is no model {name!r}; this server has 'tiny'"
    assert error_of(answer)["message"] == message


def test_references_to_what_is_not_stored(live: LiveServer) -> None:
    answer = live.client.post(PATH, json={"input": [{"type": "item_reference", "id": "msg_x"}]})
    assert answer.status_code == 404
    assert error_of(answer)["param"] == "input.0.id"


@pytest.mark.parametrize("error", [ApiError(400, "it leads nowhere"), ZeroDivisionError()])
def test_a_stream_that_fails_says_so(error: Exception) -> None:
    async def chunks() -> AsyncIterator[dict[str, Any]]:
        delta = {"role": "assistant", "content": "a"}
        yield {"choices": [{"delta": delta, "finish_reason": None}], "usage": None}
        raise error

    found = []

    async def read() -> None:
        writer = ResponseWriter(ResponseBody(input="a"), "tiny", [], StoredResponses(1000))
        async for event in writer.events(chunks()):
            found.append(event)  # noqa: PERF401

    with pytest.raises(type(error)):  # for the log
        asyncio.run(read())
    last = found[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    message = "it leads nowhere" if isinstance(error, ApiError) else "internal server error"
    assert last["response"]["error"]["message"] == message


def test_small_routes(live: LiveServer) -> None:
    assert live.client.get("/version").json() == {"version": live.app.version}
    (model,) = live.client.get("/v1/models").json()["data"]
    assert model["max_model_len"] == live.service.limits.prompt_tokens
    described = live.client.get("/tokenizer_info").json()
    assert described["tokenizer_class"] == "ByteTokenizer"
    assert described["vocab_size"] == 320
    assert described["chat_template"] == tool_format().source
    refused = httpx.post(f"{live.url}/v1/embeddings", json={"model": "tiny", "input": "a"})
    assert refused.status_code == 404
    assert error_of(refused)["message"] == (
        "this server has no embeddings: its model only writes text"
    )


def test_continue_final_message(live: LiveServer) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes, o"}]
    body = {"messages": talk, "continue_final_message": True}
    for more in ({}, {"add_generation_prompt": False}):
        done = live.post("/v1/chat/completions", **body, **more)
        assert done["choices"][0]["message"]["content"] == "k"
        assert done["usage"]["prompt_tokens"] == 1 + len("user: Hi<end>\nassistant?Yes, o")
    for more, param in (
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": talk[:1]}, "continue_final_message"),
    ):
        answer = live.client.post("/v1/chat/completions", json={**body, **more})
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)


def test_stop_tokens_and_stop_strings(live: LiveServer) -> None:
    user = [{"role": "user", "content": "Hi"}]
    routes = {"/v1/chat/completions": {"messages": user}, "/v1/completions": {"prompt": "Hi?"}}
    for path, body in routes.items():
        for stream in (False, True):

            def text(path: str = path, stream: bool = stream, **body: Any) -> str:
                if not stream:
                    (choice,) = live.post(path, **body)["choices"]
                    return choice.get("text") or choice["message"]["content"]
                choices = [chunk["choices"][0] for chunk in live.stream(path, **body)]
                return "".join(
                    one["text"] if "text" in one else one["delta"]["content"] for one in choices
                )

            assert text(**body, stop_token_ids=[2 + ord("k")]) == "@o"
            assert text(**body, stop_token_ids=[7, 2 + ord("o")], ignore_eos=True) == "@"
            assert text(**body, stop_token_ids=[7]) == "@ok"  # the end of text still counts
            assert text(**body, stop="o") == "@"
            assert text(**body, stop=["x", "ok"], include_stop_str_in_output=True) == "@ok"
            assert text(**body, stop=["o"], include_stop_str_in_output=True) == "@o"
