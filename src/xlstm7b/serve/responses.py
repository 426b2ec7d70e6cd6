"""/v1/responses: OpenAI's newer form of a conversation, on top of /v1/chat/completions.

A body becomes the body of a chat, and what the chat answers becomes a response or its events. The
server stores the text of conversations, so that `previous_response_id` continues one. The states
of their prompts are in the prefix cache, or are computed again.
"""

import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query
from pydantic import ConfigDict, Field, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xlstm7b.serve.body_errors import invalid_body
from xlstm7b.serve.handlers import Service, count_prompt_tokens, generate
from xlstm7b.serve.off_loop import BodyRoute, off_loop
from xlstm7b.serve.protocol import (
    MAX_MESSAGES,
    ApiError,
    Body,
    CacheSalt,
    ChatBody,
    EmptyList,
    FunctionName,
    Json,
    JsonObject,
    Metadata,
    Text,
    is_json,
)

router = APIRouter(route_class=BodyRoute)

# 1. Bodies


class Part(Body):
    """A part of a message's content, or of a function's output."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: EmptyList | None = None
    logprobs: EmptyList | None = None


_Content = Text | Annotated[list[Part], Field(fail_fast=True, max_length=1024)]


class Item(Body):
    """One entry of the input. `_ITEM_FIELDS` says which fields each type has."""

    type: Literal["message", "function_call", "function_call_output", "item_reference"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Content | None = None
    call_id: Text | None = None
    name: str | None = None
    arguments: Text | None = None
    output: _Content | None = None
    # Without effect, except for the id of a reference:
    id: str | None = None
    status: str | None = None
    phase: str | None = None


_ITEM_FIELDS = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "item_reference": {"id"},
}
_FREE_FIELDS = {"type", "id", "status", "phase"}


class FunctionTool(Body):
    """A function that the model may call: the fields of a chat's tool, one level higher."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class _ChosenTool(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of the text. `schema` is that of `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    strict: bool | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None  # without effect


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None  # without effect


class ResponseBody(Body):
    """POST /v1/responses"""

    model: str | None = None
    input: Text | Annotated[list[Item], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    # Not in OpenAI's API; those of a chat:
    top_k: int | None = None
    speculate: bool | None = None
    cache_salt: CacheSalt | None = None
    # Returned, without another effect:
    metadata: Metadata | None = None
    user: Text | None = None
    # Accepted, without effect:
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: JsonObject | None = None
    # Accepted only with the values that change nothing:
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=8)] | None = (
        None
    )
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None


class ItemsQuery(Body):
    """GET /v1/responses/ID/input_items"""

    model_config = ConfigDict(extra="forbid", strict=False)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None  # the last id of the page before


# 2. Stored conversations


class StoredResponse(NamedTuple):
    response: Json
    messages: list[Json]  # of the chat, with the answer, without instructions
    size: int  # bytes


class StoredResponses:
    """Responses by their id. The least recently used are dropped when they take too many bytes.

    Not thread-safe: only the event loop calls it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._stored = OrderedDict[str, StoredResponse]()
        self._items = dict[str, Json]()  # outputs by their own ids

    def add(self, response: Json, messages: list[Json]) -> None:
        # Conversations share messages. Each counts as if it were alone.
        size = len(json.dumps(messages)) + len(json.dumps(response))
        if size > self._max_bytes:
            return
        self._stored[response["id"]] = StoredResponse(response, messages, size)
        self._items |= {item["id"]: item for item in response["output"]}
        self._bytes += size
        while self._bytes > self._max_bytes:
            self.delete(next(iter(self._stored)))

    def find(self, response_id: str, param: str | None = None) -> StoredResponse:
        if response_id not in self._stored:
            message = f"there is no response {response_id[:80]!r}: it was not stored, or deleted"
            raise ApiError(404, message, param=param)
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def find_item(self, item_id: str, param: str) -> Json:
        if item_id not in self._items:
            message = f"{param} is {item_id[:80]!r}, which is no output of a stored response"
            raise ApiError(404, message, param=param)
        return self._items[item_id]

    def delete(self, response_id: str) -> None:
        response, _, size = self.find(response_id)
        del self._stored[response_id]
        self._bytes -= size
        for item in response["output"]:
            del self._items[item["id"]]


# 3. Routes


@router.post("/v1/responses", response_model=None)
async def respond(body: ResponseBody, http: HttpRequest) -> Response:
    """Answer a conversation, which the server stores."""
    service: Service = http.app.state.service
    stored: StoredResponses = http.app.state.responses
    messages, sources = _conversation(body, stored)
    with _own_fields(sources):
        size = http.scope["xlstm7b.body_bytes"] + 64 * len(messages)
        chat = await off_loop(partial(_to_chat, body, messages), size)
        writer = ResponseWriter(body, service.find_model(body.model).id, messages, stored)
        return await generate(service, chat, http, writer)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponseBody, http: HttpRequest) -> dict[str, Any]:
    """The input tokens that a response to this body would have. Nothing is generated."""
    messages, sources = _conversation(body, http.app.state.responses)
    with _own_fields(sources):
        chat = _to_chat(body, messages)
        count = await count_prompt_tokens(http.app.state.service, chat)
    return {"object": "response.input_tokens", "input_tokens": count}


@router.get("/v1/responses/{response_id}")
async def find_response(response_id: str, http: HttpRequest) -> dict[str, Any]:
    """A stored response."""
    if http.query_params.get("stream", "false") != "false":
        raise ApiError(400, "a stored response cannot be streamed", param="stream")
    stored: StoredResponses = http.app.state.responses
    return stored.find(response_id).response


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str, query: Annotated[ItemsQuery, Query()], http: HttpRequest
) -> dict[str, Any]:
    """What a stored response answers: its input, after the earlier ones and their outputs."""
    stored: StoredResponses = http.app.state.responses
    items = [*_to_items(response_id, stored.find(response_id).messages[:-1])]
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            message = f"after: there is no item {query.after[:80]!r} in this list"
            raise ApiError(404, message, param="after")
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, http: HttpRequest) -> dict[str, Any]:
    """Delete a stored response."""
    stored: StoredResponses = http.app.state.responses
    stored.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


# 4. From a body to that of a chat


def _conversation(body: ResponseBody, stored: StoredResponses) -> tuple[list[Json], list[str]]:
    """The messages before the answer, without instructions, and the field of each chat message."""
    messages = list[Json]()
    if body.previous_response_id is not None:
        field = "previous_response_id"
        messages += stored.find(body.previous_response_id, field).messages
    sources = ["instructions"] * (body.instructions is not None)
    sources += ["previous_response_id"] * len(messages)
    for source, message in _to_messages(body, stored):
        sources.append(source)
        messages.append(message)
    return messages, sources


def _to_messages(body: ResponseBody, stored: StoredResponses) -> Iterator[tuple[str, Json]]:
    """The input as messages of a chat, each with the field that it comes from.

    An answer and the calls after it are one message.
    """
    if isinstance(body.input, str):
        yield "input", {"role": "user", "content": body.input}
        return
    answer: Json | None = None  # to which calls are added
    for number, item in enumerate(body.input):
        field = f"input.{number}"
        _check_fields(item, field)
        if item.type == "item_reference":
            item = Item.model_validate(stored.find_item(item.id or "", f"{field}.id"))
        if item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if answer is None:
                answer = {"role": "assistant", "content": None, "tool_calls": []}
                yield field, answer
            answer["tool_calls"].append(call)
            continue
        if item.type == "function_call_output":
            output = _text(item.output)
            message: Json = {"role": "tool", "tool_call_id": item.call_id, "content": output}
        else:
            message = {"role": item.role, "content": _text(item.content)}
        answer = None
        if message["role"] == "assistant":
            answer = message
            answer["tool_calls"] = []
        yield field, message


def _check_fields(item: Item, field: str) -> None:
    needed, given = _ITEM_FIELDS[item.type], item.model_fields_set
    for name in sorted(needed - given):
        raise ApiError(400, f"{field}.{name} is missing", param=f"{field}.{name}")
    for name in sorted(given - needed - _FREE_FIELDS):
        message = f"{field}.{name} is not a field of the type {item.type}"
        raise ApiError(400, message, param=f"{field}.{name}")


def _text(content: str | list[Part] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _to_chat(body: ResponseBody, messages: list[Json]) -> ChatBody:
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    if not messages:
        raise ApiError(400, "input must not be empty", param="input")
    tools = [
        {"type": "function", "function": tool.model_dump(exclude={"type"})}
        for tool in body.tools or ()
    ]
    choice: Any = body.tool_choice
    if isinstance(choice, _ChosenTool):
        choice = {"type": "function", "function": {"name": choice.name}}
    wanted: Json | None = None
    if body.text is not None and body.text.format is not None:
        given = body.text.format
        wanted = {"type": given.type}
        field = "text.format.schema"
        if given.type != "json_schema" and given.schema_ is not None:
            raise ApiError(400, f"{field} needs the type json_schema", param=field)
        if not is_json(given.schema_):
            raise ApiError(400, f"{field} is not JSON", param=field)
        if given.type == "json_schema":
            wanted["json_schema"] = {"name": given.name, "schema": given.schema_}
    chat = {
        "model": body.model,
        "messages": messages,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": wanted,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "speculate": body.speculate,
        "cache_salt": body.cache_salt,
        "stream": body.stream,
        "stream_options": {"include_usage": True},
    }
    try:
        return ChatBody.model_validate(chat)
    except ValidationError as error:
        located = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise invalid_body(located, chat) from error


_RENAMED = (  # fields of a chat, and those of a response that they come from
    (r"^messages$", "input"),
    (r"\btool_call_id$", "call_id"),
    (r"^response_format\.json_schema\b", "text.format"),
    (r"^response_format\b", "text.format"),
    (r"^tools\.(\d+)\.function\b", r"tools.\1"),
    (r"^max_tokens$", "max_output_tokens"),
)


@contextmanager
def _own_fields(sources: list[str]) -> Iterator[None]:
    """Errors about the chat name the fields of this route. `sources` of the chat's messages."""
    try:
        yield
    except ApiError as error:
        _rename_field(error, sources)
        raise


def _rename_field(error: ApiError, sources: list[str]) -> None:
    # A message starts with its field or does not name it. The rest may quote the client: it stays.
    if error.param is None:
        return
    in_message = r"^messages\.(\d+)(\.tool_calls\.\d+)?(\.function)?"
    field = re.sub(in_message, lambda found: sources[int(found[1])], error.param)
    for chat_name, own_name in _RENAMED:
        field = re.sub(chat_name, own_name, field)
    if error.message.startswith(error.param):
        error.message = field + error.message.removeprefix(error.param)
    error.param = field


def _to_items(response_id: str, messages: list[Json]) -> Iterator[Json]:
    """Messages of a chat as items, as `_to_messages` reads them."""
    number, name = 0, response_id.removeprefix("resp_")

    def item(kind: str, prefix: str, **fields: Any) -> Json:
        nonlocal number
        number += 1
        return {"id": f"{prefix}_{name}_{number}", "type": kind, "status": "completed", **fields}

    for message in messages:
        text, calls = message["content"], message.get("tool_calls", ())
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            yield item("function_call_output", "fco", call_id=call_id, output=text)
        elif message["role"] != "assistant":
            content = [{"type": "input_text", "text": text}]
            yield item("message", "msg", role=message["role"], content=content)
        elif text or not calls:
            content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
            yield item("message", "msg", role="assistant", content=content)
        for call in calls:
            yield item("function_call", "fc", call_id=call["id"], **call["function"])


# 5. From the chat's answer to a response


class ResponseWriter:
    """Writes what a chat answers as a response, whole or as events."""

    def __init__(
        self, body: ResponseBody, model: str, messages: list[Json], stored: StoredResponses
    ) -> None:
        self._messages, self._stored = messages, stored
        self._number = 0  # of the next event
        self._output = list[Json]()
        wanted = (body.text or TextOptions()).format or TextFormat(type="text")
        choice = body.tool_choice
        self._response: Json = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice.model_dump() if isinstance(choice, Body) else choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def whole(self, content: Json) -> Json:
        (choice,) = content["choices"]
        message = choice["message"]
        calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", ()))]
        for _ in self._read({"content": message["content"], "tool_calls": calls}):
            pass
        for _ in self._end(choice["finish_reason"], content["usage"]):
            pass
        return self._response

    async def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Json]:
        yield self._event("response.created", response={**self._response})
        yield self._event("response.in_progress", response={**self._response})
        reason = ""
        try:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    for event in self._read(choice["delta"]):
                        yield event
                    reason = choice["finish_reason"] or reason
                if chunk["usage"] is not None:
                    for event in self._end(reason, chunk["usage"]):
                        yield event
        except Exception as error:
            known = error if isinstance(error, ApiError) else ApiError(500, "internal server error")
            code = "server_error" if known.status >= 500 else "invalid_prompt"
            failure = {"code": code, "message": known.message}
            self._response |= {"status": "failed", "error": failure}
            yield self._event("response.failed", response=self._response)
            raise

    def _read(self, delta: Json) -> Iterator[Json]:
        """The events of a piece of the chat's answer, which is added to the output."""
        if delta.get("content"):
            yield from self._add_text(delta["content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._close_item()
                item = {"id": f"fc_{secrets.token_hex(24)}", "type": "function_call"}
                item |= {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                yield self._open_item(item)
            if given := call["function"]["arguments"]:
                self._output[-1]["arguments"] += given
                yield self._item_event("response.function_call_arguments.delta", delta=given)

    def _add_text(self, text: str) -> Iterator[Json]:
        if not self._output:
            item = {"id": f"msg_{secrets.token_hex(24)}", "type": "message"}
            yield self._open_item(item | {"role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._item_event("response.content_part.added", content_index=0, part={**part})
            self._output[-1]["content"].append(part)
        self._output[-1]["content"][0]["text"] += text
        if text:
            yield self._item_event(
                "response.output_text.delta", content_index=0, delta=text, logprobs=[]
            )

    def _end(self, reason: str, usage: Json) -> Iterator[Json]:
        """The last events. The response is complete and is stored."""
        if not self._output:
            yield from self._add_text("")
        is_cut = reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._close_item(status)
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    **usage.get("completion_tokens_details", {}),
                },
                "total_tokens": usage["total_tokens"],
            },
        }
        if self._response["store"]:
            self._stored.add(self._response, [*self._messages, self._answer()])
        yield self._event(f"response.{status}", response=self._response)

    def _answer(self) -> Json:
        """The output as a message of a chat."""
        answer: Json = {"role": "assistant", "content": ""}
        for item in self._output:
            if item["type"] == "message":
                answer["content"] = item["content"][0]["text"]
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
        return answer

    def _open_item(self, item: Json) -> Json:
        item["status"] = "in_progress"
        self._output.append(item)
        shown = {**item, "content": []} if item["type"] == "message" else {**item}
        index = len(self._output) - 1
        return self._event("response.output_item.added", output_index=index, item=shown)

    def _close_item(self, status: str = "completed") -> Iterator[Json]:
        """The last events of the item that is being written, if there is one."""
        if not self._output:
            return
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            done = {"content_index": 0, "text": part["text"], "logprobs": []}
            yield self._item_event("response.output_text.done", **done)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            given = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **given)
        index = len(self._output) - 1
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _item_event(self, name: str, /, **fields: Any) -> Json:
        """An event of the item that is being written."""
        item = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(name, **item, **fields)

    def _event(self, name: str, /, **fields: Any) -> Json:
        self._number += 1
        return {"type": name, "sequence_number": self._number - 1, **fields}
