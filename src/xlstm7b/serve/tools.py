"""Tools: functions are described in the prompt, and the model's calls are read from its answer.

A chat template that supports tools writes descriptions, calls and results itself. Whether it does
is found out by rendering a conversation with tools. For other templates there is a format of our
own (`DEFAULT_CALLS`). A grammar makes every call well-formed: it names a function of the request,
and the arguments match its schema.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlstm7b.chat_format import ChatFormat, without_prefix
from xlstm7b.generate.params import SamplingParams
from xlstm7b.generate.structured import WHITE_SPACE
from xlstm7b.serve.protocol import (
    ApiError,
    ChatBody,
    ChosenTool,
    Function,
    Json,
    Message,
    Tool,
    is_json,
    is_name,
)
from xlstm7b.tokenizer import Tokenizer


@dataclass(frozen=True)
class CallFormat:
    """The text around calls: opening NAME middle ARGUMENTS (separator NAME middle ARGUMENTS)*
    closing. Without a separator, an answer has at most one call.
    """

    opening: str
    middle: str
    separator: str
    closing: str

    @property
    def trigger(self) -> str:
        """The text that starts a call: the opening up to its first white space."""
        return self.opening.split()[0]

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """These calls: names and arguments."""
        written = [f"{name}{self.middle}{arguments}" for name, arguments in calls]
        return self.opening + self.separator.join(written) + self.closing


DEFAULT_CALLS = CallFormat(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    '}\n</tool_call>\n<tool_call>\n{"name": "',
    "}\n</tool_call>",
)
_INTRODUCTION = """\
You can call functions. Each line below describes one: its name, what it does, and a JSON schema of
its arguments.

{functions}

To call a function, write its name and its arguments in this form, and nothing after it:

{example}

The next message has the result, between <tool_response> and </tool_response>."""


class ToolFormat:
    """How one chat format writes tools, calls and results."""

    def __init__(self, chat_format: ChatFormat, tokenizer: Tokenizer) -> None:
        self._chat_format = chat_format
        found = _find_calls(chat_format)
        self.is_in_template = found is not None and _is_text(found, tokenizer)
        self.calls = found if found is not None and self.is_in_template else DEFAULT_CALLS

    def write(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[Json], list[Json] | None]:
        """The messages and the tools in the form that the chat format takes."""
        if not self.is_in_template:
            return self._to_plain(messages, tools), None
        calls = [call for message in messages for call in message.tool_calls or ()]
        names: dict[str | None, str] = {call.id: call.function.name for call in calls}
        described = [tool.model_dump(exclude_none=True) for tool in tools]
        return [_to_template(message, names) for message in messages], described or None

    def _to_plain(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Json]:
        """Messages without tools: functions are described in the system message, an answer holds
        its calls as text, and results are a user's message.
        """
        plain, is_after_result = list[Json](), False
        for message in messages:
            turn: Json = message.to_template()
            if message.tool_calls:
                calls = [(one.function.name, one.function.arguments) for one in message.tool_calls]
                turn["content"] += "\n" * bool(turn["content"]) + self.calls.write(calls)
            elif message.role == "tool":
                result = f"<tool_response>\n{turn['content']}\n</tool_response>"
                if is_after_result:  # one message: templates may want turns to alternate
                    plain[-1]["content"] += f"\n{result}"
                    continue
                turn = {"role": "user", "content": result}
            plain.append(turn)
            is_after_result = message.role == "tool"
        if tools:
            functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
            introduction = _INTRODUCTION.format(
                functions="\n".join(json.dumps(one, ensure_ascii=False) for one in functions),
                example=self.calls.write([("NAME", "ARGUMENTS")]),
            )
            if plain[0]["role"] == "system":
                plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{introduction}"}
            else:
                plain.insert(0, {"role": "system", "content": introduction})
        return plain

    def grammar(self, body: ChatBody) -> str:
        """The Lark grammar of an answer that may, or must, call one of the offered functions.

        An answer is any text, or JSON if the body wants that, until the trigger. Then calls follow.
        The end of text, or the format's stop string, may follow these.
        """
        form, calls = body.form(), self.calls
        trigger = _quoted(calls.trigger)
        if body.must_call:
            rules = [f"start: {trigger} calls"]
        elif form is None:
            rules = [
                "start: TEXT | to_trigger calls",
                "TEXT: /(.|\\n)*/",
                f"to_trigger[lazy]: TEXT {trigger}",
            ]
        else:
            schema = _schema_of(form)
            if calls.trigger.startswith("{"):
                message = f"{form[0]} cannot be combined with tools: calls start like JSON, too"
                raise ApiError(400, message, param=form[0])
            rules = [f"start: answer | {trigger} calls", f"answer: {_json_rule(schema)}"]
        opening, again, closing = calls.opening[len(calls.trigger) :], "", _quoted(calls.closing)
        if calls.separator and _may_repeat(body):
            # The lexer takes the longest text that it knows, so what both start with is apart.
            after = without_prefix(calls.separator, calls.closing)
            last = without_prefix(calls.closing, calls.separator)
            shared = _quoted(calls.separator.removesuffix(after))
            again = f"({shared} {_quoted(after)} call)*"
            closing = f"{shared} {_quoted(last)}"
            if self._chat_format.stop_string:  # where nothing can follow, the answer ends by itself
                closing += f" {_quoted(self._chat_format.stop_string)}?"
        functions = [
            f"{_quoted(one.name)} {_quoted(calls.middle)} {_json_rule(_arguments_schema(one))}"
            for one in body.offered_tools
        ]
        rules += [
            f"calls: {_quoted(opening)} call {again} {closing}",
            f"call: {' | '.join(functions)}",
        ]
        return "\n".join(rules)


def _may_repeat(body: ChatBody) -> bool:
    """True if an answer may have several calls."""
    return body.parallel_tool_calls is not False and not isinstance(body.tool_choice, ChosenTool)


def _schema_of(form: tuple[str, Json]) -> Json:
    """The JSON schema of an answer that calls nothing."""
    name, given = form
    try:
        wanted = SamplingParams(structured_outputs=given).structured_outputs or {}
    except ValueError as error:
        message = str(error).replace("structured_outputs.json", name)
        raise ApiError(400, message, param=name) from error
    if "json" not in wanted:
        raise ApiError(400, f"{name} cannot be combined with tools", param=name)
    schema: Json = json.loads(wanted["json"])
    return schema


def _arguments_schema(function: Function) -> Json:
    """The schema of a function's arguments.

    Unless it says otherwise, the arguments are only those that it names: programs pass them on to a
    function that takes no others.
    """
    if function.parameters is None:
        return {"type": "object", "additionalProperties": False}
    try:
        schema: Json = _without_descriptions(function.parameters)
    except RecursionError:
        schema = function.parameters
    named_elsewhere = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}
    if "properties" in schema and named_elsewhere.isdisjoint(schema):
        schema = {"additionalProperties": False, **schema}
    return {**schema, "type": "object"}


def _without_descriptions(schema: Any) -> Any:
    """A schema as a grammar needs it. Descriptions are most of the text of many tools."""
    if isinstance(schema, list):
        return [_without_descriptions(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: part if name in ("const", "enum") else _without_descriptions(part)
        for name, part in schema.items()
        # A property of this name has a schema, which is no string.
        if name != "description" or not isinstance(part, str)
    }


def _json_rule(schema: Json) -> str:
    own = schema.get("x-guidance")  # llguidance's options
    options = {"whitespace_pattern": WHITE_SPACE, **(own if isinstance(own, dict) else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _quoted(text: str) -> str:
    """A string of a Lark grammar; nothing for an empty one."""
    return json.dumps(text) if text else ""


# What a template writes


def _find_calls(chat_format: ChatFormat) -> CallFormat | None:
    """How the chat template writes calls, or None if it cannot write tools, calls and results.

    It writes one conversation with two calls, or with one if it refuses two. The format is the text
    around the names and the arguments.
    """
    for count in (2, 1):
        try:
            return _read_calls(chat_format, count)
        except ValueError:  # of the template, or because something is missing
            continue
    return None


def _read_calls(chat_format: ChatFormat, count: int) -> CallFormat:
    """The format of `count` calls, or a `ValueError`."""
    names = [f"probe_function_{number}" for number in range(count)]
    arguments = [{f"probe_key_{number}": f"probe value {number}"} for number in range(count)]
    ids = [f"probe{number:04}" for number in range(count)]  # some templates want nine characters
    empty = {"type": "object", "properties": {}}
    functions = [
        {"name": name, "description": f"About {name}.", "parameters": empty} for name in names
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    calls = [
        {"id": own_id, "type": "function", "function": {"name": name, "arguments": given}}
        for own_id, name, given in zip(ids, names, arguments, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": own_id, "name": name, "content": f"result of {name}"}
        for own_id, name in zip(ids, names, strict=True)
    ]
    asked = {"role": "user", "content": "Hello"}
    prompt = chat_format.render([asked], tools=tools)
    if not all(f"About {name}." in prompt for name in names):
        raise ValueError("functions are not described")
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    text = chat_format.render([asked, answer, *results], tools=tools)
    if not text.startswith(prompt) or not chat_format.stop_string:
        raise ValueError("the answer does not continue the prompt")
    # The text around names and arguments, in the order in which it is written.
    around, position = list[str](), len(prompt)
    for name, given in zip(names, arguments, strict=True):
        at = text.index(name, position)
        start = text.index("{", at)
        found, end = json.JSONDecoder().raw_decode(text, start)
        if found != given:
            raise ValueError("arguments are not written as JSON")
        around += [text[position:at], text[at + len(name) : start]]
        position = end
    closing = text[position : text.index(chat_format.stop_string, position)].rstrip()
    after = text[position + len(closing) :]
    if not all(f"result of {name}" in after for name in names):
        raise ValueError("results are not written")
    if any(own_id in part for own_id in ids for part in (*around, closing)):
        raise ValueError("calls are written with their ids")
    opening, middle, *others = around
    if others[1:] not in ([], [middle]):
        raise ValueError("calls are not written alike")
    if not opening.strip() or is_name(middle):
        raise ValueError("nothing shows where a call or its arguments start")
    return CallFormat(opening.lstrip(), middle, others[0] if others else "", closing)


def _is_text(calls: CallFormat, tokenizer: Tokenizer) -> bool:
    """True if the model writes this as text, without special tokens, which have none."""
    written = calls.write([("name", "{}"), ("name", "{}")])
    return tokenizer.decode(tokenizer.encode(written, continues=True), continues=True) == written


def _to_template(message: Message, names: Mapping[str | None, str]) -> Json:
    """A message in the form that templates with tools take. `names` of functions are by call id."""
    turn: Json = message.to_template()
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.loads(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        turn["tool_call_id"] = message.tool_call_id
        turn["name"] = message.name or names.get(message.tool_call_id)
    return turn


# What a client sends


def check_messages(messages: Sequence[Message]) -> None:
    """Raises an `ApiError` for a call without JSON arguments, or for a result without its call."""
    unanswered = set[str]()
    for number, message in enumerate(messages):
        path = f"messages.{number}"
        if message.role != "tool":
            unanswered = {call.id for call in message.tool_calls or ()}
            if unanswered and message.role != "assistant":
                raise _refusal(f"{path}.tool_calls", "needs the role assistant")
            for index, call in enumerate(message.tool_calls or ()):
                if not _is_object(call.function.arguments):
                    field = f"{path}.tool_calls.{index}.function.arguments"
                    raise _refusal(field, "must be a JSON object, as text")
            if message.tool_call_id is not None:
                raise _refusal(f"{path}.tool_call_id", "needs the role tool")
        elif message.tool_call_id not in unanswered:
            given = message.tool_call_id
            problem = "is missing"
            if given is not None:
                problem = f"is {given[:80]!r}, which is no open call of the message before"
            raise _refusal(f"{path}.tool_call_id", problem)
        else:
            unanswered.remove(message.tool_call_id)


def check_tools(tools: Sequence[Tool], tool_choice: str | ChosenTool | None = None) -> None:
    """Raises an `ApiError` for tools that contradict each other or `tool_choice`."""
    names = [tool.function.name for tool in tools]
    for number, tool in enumerate(tools):
        field, name = f"tools.{number}.function", tool.function.name
        if name in names[:number]:
            raise _refusal(f"{field}.name", f"is {name!r}, like that of another function")
        schema = tool.function.parameters or {}
        if schema.get("type", "object") != "object" or not is_json(schema):
            raise _refusal(f"{field}.parameters", 'must be a JSON schema with the type "object"')
    if isinstance(tool_choice, ChosenTool) and tool_choice.function.name not in names:
        wanted = tool_choice.function.name[:80]
        known = ", ".join(map(repr, names))[:400] or "none"
        raise _refusal("tool_choice", f"names {wanted!r}, but the functions in tools are: {known}")
    if tool_choice == "required" and not names:
        raise _refusal("tool_choice", 'is "required", but there are no tools')


def schemas_of(body: ChatBody) -> Iterator[tuple[str, Json]]:
    """The field and the schema of each part of the grammar, to find the one that is refused."""
    form = body.form()
    if form is not None and not body.must_call:
        yield form[0], _schema_of(form)
    names = [tool.function.name for tool in body.tools or ()]
    for function in body.offered_tools:
        number = names.index(function.name)
        yield f"tools.{number}.function.parameters", _arguments_schema(function)


def _refusal(field: str, problem: str) -> ApiError:
    return ApiError(400, f"{field} {problem}", param=field)


def _is_object(text: str) -> bool:
    """True for the text of a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and is_json(value)


# What the model answers


class AnswerReader:
    """Splits an answer into its text and its calls, piece by piece."""

    def __init__(self, calls: CallFormat) -> None:
        self._calls, self._rest = calls, ""
        self._before_name: str | None = None  # what stands before the next name; None: text
        self._arguments: _ObjectEnd | None = None  # while arguments are read
        self._count, self._is_complete = 0, False  # of calls; True after the last whole call

    def push(self, piece: str, *, is_last: bool = False) -> tuple[str, list[Json]]:
        """New text, and what is new in calls as OpenAI streams it."""
        self._rest += piece
        text, deltas = "", list[Json]()
        if self._before_name is None:
            text = self._take_text(is_last)
        if self._before_name is not None:
            while (delta := self._next_delta()) is not None:
                deltas.append(delta)
        return text, deltas

    def read(self, answer: str) -> tuple[str, list[Json]]:
        """The text and the calls of a whole answer."""
        text, deltas = self.push(answer, is_last=True)
        calls = list[Json]()
        for delta in deltas:
            if "id" in delta:
                del delta["index"]
                calls.append(delta)
            else:
                calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
        return text, calls

    def finish_reason(self, reason: str) -> str:
        """Why the answer ended. A call that was cut off does not count."""
        return "tool_calls" if reason == "stop" and self._is_complete else reason

    def _take_text(self, is_last: bool) -> str:
        """Text up to a call. White space before a call is not part of it."""
        trigger = self._calls.trigger
        at = self._rest.find(trigger)
        if at >= 0:
            text, self._rest = self._rest[:at].rstrip(), self._rest[at:]
            self._before_name = self._calls.opening
            return text
        end = len(self._rest)
        if not is_last:
            starts = range(min(len(trigger) - 1, end), 0, -1)
            end -= next((n for n in starts if self._rest.endswith(trigger[:n])), 0)
            end = len(self._rest[:end].rstrip())
        text, self._rest = self._rest[:end], self._rest[end:]
        return text

    def _next_delta(self) -> Json | None:
        if self._arguments is not None:
            end = self._arguments.find(self._rest)
            given, self._rest = self._rest[:end], self._rest[end:]
            if self._arguments.is_found:
                self._arguments, self._is_complete = None, True
                self._before_name = self._calls.separator
            return {"index": self._count - 1, "function": {"arguments": given}} if given else None
        if not self._before_name or not self._rest.startswith(self._before_name):
            return None
        start = len(self._before_name)
        end = self._rest.find(self._calls.middle, start)
        if end < 0:
            return None
        name, self._rest = self._rest[start:end], self._rest[end + len(self._calls.middle) :]
        self._arguments, self._is_complete = _ObjectEnd(), False
        self._count += 1
        function = {"name": name, "arguments": ""}
        own_id = f"call_{secrets.token_hex(12)}"
        return {"index": self._count - 1, "id": own_id, "type": "function", "function": function}


class _ObjectEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._is_string, self._is_escaped = 0, False, False
        self.is_found = False

    def find(self, piece: str) -> int:
        """How many characters of this piece belong to the object."""
        for position, letter in enumerate(piece, 1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped, self._is_string = letter == "\\", letter != '"'
            elif letter == '"':
                self._is_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_found = True
                    return position
        return len(piece)
