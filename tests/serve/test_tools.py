"""Tools: formats of chat templates, grammars, answers whole and streamed, and refusals."""

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from live_server import LiveServer, error_of, serving
from tool_chats import TEMPLATE, tool_format, tool_generator

from xlstm7b.chat_format import ChatFormat, ChatTemplate, PlainFormat
from xlstm7b.config import ModelConfig
from xlstm7b.generate.structured import Matcher, compile_grammar, next_masks
from xlstm7b.serve import handlers
from xlstm7b.serve.protocol import ApiError, ChatBody, Message, Tool
from xlstm7b.serve.tools import (
    DEFAULT_CALLS,
    AnswerReader,
    CallFormat,
    ToolFormat,
    check_messages,
)
from xlstm7b.tokenizer import ByteTokenizer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
ADD = {
    "name": "add",
    "description": "The sum of two numbers",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
SAY = {
    "name": "say.it",
    "parameters": {
        "type": "object",
        "properties": {"text": {"$ref": "#/$defs/text"}},
        "required": ["text"],
        "$defs": {"text": {"type": "string"}},
    },
}
TOOLS = [{"type": "function", "function": one} for one in (ADD, SAY)]
CHOSEN = {"type": "function", "function": {"name": "add"}}
CONFIG, BYTES = ModelConfig(128, 1, 2, vocab_size=320), ByteTokenizer()

TURNS = "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
END = "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
DESCRIBED = "{% if tools %}{{ tools | tojson }}{% endif %}"
EACH_CALL = "{% for call in message.tool_calls or [] %}"
ARGUMENTS = "{{ call.function.arguments | tojson }}"
TAGGED = (  # as of Hermes and Qwen
    DESCRIBED + TURNS + EACH_CALL + '{{ "\\n" }}<call>\n{"name": "{{ call.function.name }}", '
    '"arguments": ' + ARGUMENTS + "}\n</call>{% endfor %}" + END
)  # fmt: skip
LISTED = (  # as of Mistral
    DESCRIBED + TURNS + EACH_CALL + "{{ '[CALLS] [' if loop.first else ', ' }}"
    '{"name": "{{ call.function.name }}", "arguments": ' + ARGUMENTS + "}"
    "{{ ']' if loop.last }}{% endfor %}" + END
)  # fmt: skip
SINGLE = (  # as of Llama
    DESCRIBED + TURNS
    + "{% if message.tool_calls and message.tool_calls | length > 1 %}"
    "{{ raise_exception('only one call') }}{% endif %}" + EACH_CALL
    + '{"name": "{{ call.function.name }}", "parameters": ' + ARGUMENTS + "}{% endfor %}" + END
)  # fmt: skip
FOUND = {
    TAGGED: CallFormat(
        '<call>\n{"name": "',
        '", "arguments": ',
        '}\n</call>\n<call>\n{"name": "',
        "}\n</call>",
    ),
    LISTED: CallFormat('[CALLS] [{"name": "', '", "arguments": ', '}, {"name": "', "}]"),
    SINGLE: CallFormat('{"name": "', '", "parameters": ', "", "}"),
    TEMPLATE: CallFormat('@ {"name": "', '", "arguments": ', '}, {"name": "', "}"),
}
NOT_USABLE = {
    "no tools": TURNS + END,
    "no calls": DESCRIBED + TURNS + END,
    "no descriptions": TAGGED.removeprefix(DESCRIBED),
    "no results": TAGGED.replace(
        "{{ message.content }}", "{% if message.role != 'tool' %}{{ message.content }}{% endif %}"
    ),
    "no JSON": TAGGED.replace(ARGUMENTS, "{{ call.function.arguments.items() | list }}"),
    "JSON in JSON": TAGGED.replace(ARGUMENTS, "{{ call.function.arguments | tojson | tojson }}"),
    "ids": TAGGED.replace("}\n</call>", ', "id": "{{ call.id }}"}\n</call>'),
    "nothing between name and arguments": TAGGED.replace('", "arguments": ', ""),
    "nothing before a name": TAGGED.replace('<call>\n{"name": "', ""),
}  # fmt: skip


def template(source: str) -> ChatFormat:
    return ChatFormat(ChatTemplate(source, {}))


@pytest.mark.parametrize("source", FOUND)
def test_the_format_of_a_template_is_found_by_rendering(source: str) -> None:
    found = ToolFormat(template(source), BYTES)
    assert found.is_in_template
    assert found.calls == FOUND[source]


@pytest.mark.parametrize(
    ("name", "want"),
    [("qwen2_5", DEFAULT_CALLS), ("qwen3", DEFAULT_CALLS), ("llama3_1", FOUND[SINGLE])],
)
def test_formats_of_known_templates_are_found(name: str, want: CallFormat) -> None:
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("needs trl's templates")
    source = (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    chat_format = ChatFormat(ChatTemplate(source, {"bos_token": "", "eos_token": "</s>"}))
    found = ToolFormat(chat_format, BYTES)
    assert found.is_in_template
    assert found.calls == want


@pytest.mark.parametrize("source", NOT_USABLE.values(), ids=NOT_USABLE)
def test_other_templates_get_the_default_format(source: str) -> None:
    found = ToolFormat(template(source), BYTES)
    assert not found.is_in_template
    assert found.calls == DEFAULT_CALLS


def test_markers_that_are_special_tokens_have_no_text() -> None:
    class Special(ByteTokenizer):
        def token_bytes(self, token: int) -> bytes:
            return b"" if token == 2 + ord(">") else super().token_bytes(token)

    assert not ToolFormat(template(TAGGED), Special()).is_in_template


TALK = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="1 + 2, and 3 + 4?"),
    Message(
        role="assistant",
        content="Let me see.",
        tool_calls=[
            {"id": "x1", "function": {"name": "add", "arguments": '{"a": 1, "b":  2}'}},
            {"id": "x2", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}},
        ],
    ),
    Message(role="tool", tool_call_id="x1", content="3"),
    Message(role="tool", tool_call_id="x2", content=[{"type": "text", "text": "7"}]),
]


def prompt(chat_format: ChatFormat, messages: list[Message], tools: list[Tool]) -> str:
    written, described = ToolFormat(chat_format, BYTES).write(messages, tools)
    return chat_format.render(written, add_generation_prompt=True, tools=described)


def test_prompts_in_the_default_format() -> None:
    offered = ChatBody(messages=USER, tools=TOOLS).tools or []
    text = prompt(PlainFormat(), TALK, offered)
    head, _, rest = text.partition("\n\nUser: ")
    assert head.startswith("Be brief.\n\nYou can call functions.")
    assert json.dumps(ADD) in head.splitlines()
    assert rest == (
        "1 + 2, and 3 + 4?\n"
        "Assistant: Let me see.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b":  2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>\n'
        "User: <tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>\n"
        "Assistant:"
    )
    without = prompt(PlainFormat(), TALK[1:2], offered)
    assert without.startswith("You can call functions.")


def test_prompts_of_a_template() -> None:
    offered = ChatBody(messages=USER, tools=TOOLS).tools or []
    text = prompt(template(TAGGED), TALK, offered)
    head, _, rest = text.partition("<system>")
    assert json.loads(head) == TOOLS
    assert rest == (
        "Be brief.</s><user>1 + 2, and 3 + 4?</s><assistant>Let me see.\n"
        '<call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</call>\n'
        '<call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</call></s>'
        "<tool>3</s><tool>7</s><assistant>"
    )


def follow(tool_format: ToolFormat, text: str, **fields: Any) -> tuple[str, bool]:
    """How much of an answer the grammar allows, and whether it may end there."""
    body = ChatBody(messages=USER, tools=TOOLS, **fields)
    grammar = compile_grammar({"grammar": tool_format.grammar(body)}, CONFIG, BYTES)
    matcher = Matcher(grammar, (0,))
    for position, token in enumerate(BYTES.encode(text)):
        mask = next_masks([matcher])[0]
        if not mask[token // 32] >> (token % 32) & 1:
            return text[:position], bool(mask[0] & 1)
        matcher.advance(token)
    return text, bool(next_masks([matcher])[0][0] & 1)


FORMATS = {name: ToolFormat(template(name), BYTES) for name in FOUND}
FORMATS["default"] = ToolFormat(PlainFormat(), BYTES)
each_format = pytest.mark.parametrize("found", FORMATS.values())
ONE, TWO = [("add", '{"a":1,\n"b": 2}')], [("add", '{"a": 1,"b":2}'), ("say.it", '{"text":"}\\""}')]


@each_format
def test_grammars(found: ToolFormat) -> None:
    one, cut = found.calls.write(ONE), found.calls.opening
    for answer in ("", "Hello", "So: " + one, one, found.calls.trigger[:-1]):
        assert follow(found, answer) == (answer, True)
    assert follow(found, cut) == (cut, False)
    assert follow(found, f"So {cut}zzz")[0] == f"So {cut}"  # no such function
    wrong = found.calls.write([("add", '{"a": 1, "c": 2}')])
    assert follow(found, wrong)[0] == wrong[: wrong.index('c": 2')]
    for choice in ("required", CHOSEN):
        assert follow(found, one, tool_choice=choice) == (one, True)
        assert follow(found, "So: " + one, tool_choice=choice) == ("", False)
    assert follow(found, cut + "say.it", tool_choice=CHOSEN) == (cut, False)
    if found.calls.separator:
        two = found.calls.write(TWO)
        shown = two[: two.index("say.it")]
        assert follow(found, two) == (two, True)
        assert len(follow(found, two, parallel_tool_calls=False)[0]) < len(shown)
        stop = found._chat_format.stop_string
        assert follow(found, two + stop) == (two + stop, True)
        assert follow(found, two + "x") == (two, True)


@pytest.mark.parametrize("found", [FORMATS["default"], FORMATS[TAGGED], FORMATS[LISTED]])
def test_an_answer_is_json_or_calls(found: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    one = found.calls.write(ONE)
    for answer in ('{"n": 1}', one):
        assert follow(found, answer, response_format=wanted) == (answer, True)
    assert follow(found, "Hello", response_format=wanted) == ("", False)
    with pytest.raises(ApiError, match="calls start like JSON, too"):
        follow(FORMATS[SINGLE], "", response_format=wanted)


NAMES = st.from_regex(r"[\w.:/-]{1,9}", fullmatch=True, alphabet=st.characters(codec="ascii"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)
CALLS = st.lists(st.tuples(NAMES, OBJECTS), max_size=3)


@settings(max_examples=200)
@given(
    found=st.sampled_from([*FORMATS.values()]),
    text=st.text(max_size=20),
    calls=CALLS,
    cuts=st.lists(st.integers(0, 400), max_size=9),
)
@example(found=FORMATS["default"], text="Hi <to \n", calls=[("f", {})], cuts=[4, 6, 9, 10])
def test_answers_are_read_piece_by_piece(
    found: ToolFormat, text: str, calls: list[tuple[str, dict]], cuts: list[int]
) -> None:
    calls = calls if found.calls.separator else calls[:1]
    written = [(name, json.dumps(arguments)) for name, arguments in calls]
    answer = text + (found.calls.write(written) if calls else "")
    assume(answer.find(found.calls.trigger) == (len(text) if calls else -1))
    whole, whole_calls = AnswerReader(found.calls).read(answer)
    assert whole == (text.rstrip() if calls else text)
    assert [tuple(call["function"].values()) for call in whole_calls] == written
    assert len({call["id"] for call in whole_calls}) == len(calls)
    reader, places = AnswerReader(found.calls), [0, *sorted(cuts), len(answer)]
    pieces = [answer[start:end] for start, end in pairwise(places)]
    streamed, deltas = "", list[dict]()
    for number, piece in enumerate(pieces):
        more, new = reader.push(piece, is_last=number == len(pieces) - 1)
        streamed, deltas = streamed + more, deltas + new
    assert streamed == whole
    assert reader.finish_reason("stop") == ("tool_calls" if calls else "stop")
    assert reader.finish_reason("length") == "length"
    for number, (name, arguments) in enumerate(written):
        first, *others = [one for one in deltas if one["index"] == number]
        assert first["function"] == {"name": name, "arguments": ""}
        assert {*first} == {"index", "id", "type", "function"}
        assert all({*one} == {"index", "function"} for one in others)
        assert "".join(one["function"]["arguments"] for one in others) == arguments


# Through the server


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A model that calls a function if it can, and says ok after a result."""
    with serving(tool_generator(), chat_format=tool_format()) as server:
        yield server


def message_of(live: LiveServer, **body: Any) -> dict[str, Any]:
    (choice,) = live.post(CHAT, **{"messages": USER, "tools": TOOLS, **body})["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == ("tool_calls" if "tool_calls" in message else "stop")
    return message


def test_a_conversation_with_a_tool(live: LiveServer) -> None:
    message = message_of(live, tools=TOOLS[:1])
    assert (message["role"], message["content"]) == ("assistant", None)
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 3, "b": 3}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "6"}
    last = message_of(live, messages=[*USER, message, result], tools=TOOLS[:1])
    assert last == {"role": "assistant", "content": "ok", "refusal": None}
    again = [*USER, message, result, last, *USER]
    assert message_of(live, messages=again)["tool_calls"]
    assert message_of(live, messages=again, tools=None)["content"] == "@ok"


def test_a_past_call_without_arguments() -> None:
    """Some clients write no text where there are no arguments."""
    function = {"name": "add", "arguments": ""}
    message = Message.model_validate(
        {"role": "assistant", "tool_calls": [{**CALLED, "function": function}]}
    )
    check_messages([message])
    assert message.tool_calls
    assert message.tool_calls[0].function.arguments == "{}"


def test_tool_choice(live: LiveServer) -> None:
    asked = [*USER, *message_and_result(live)]
    assert message_of(live, messages=asked)["content"] == "ok"
    for choice in ("required", CHOSEN):
        calls = message_of(live, messages=asked, tool_choice=choice)["tool_calls"]
        for call in calls:
            tool = {"add": ADD, "say.it": SAY}[call["function"]["name"]]
            given = json.loads(call["function"]["arguments"])
            assert jsonschema_rs.is_valid(tool["parameters"], given)
    assert [call["function"]["name"] for call in calls] == ["add"]
    assert message_of(live, tool_choice="none")["content"] == "@ok"
    assert message_of(live, tool_choice="auto")["tool_calls"]
    assert len(message_of(live, parallel_tool_calls=False)["tool_calls"]) == 1


def message_and_result(live: LiveServer) -> list[dict[str, Any]]:
    message = message_of(live, tool_choice=CHOSEN)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "6"}
        for call in message["tool_calls"]
    ]
    return [message, *results]


def test_streams(live: LiveServer) -> None:
    body = {"messages": USER, "tools": TOOLS, "temperature": 0}
    want = message_of(live, **body)["tool_calls"]
    chunks = [chunk["choices"][0] for chunk in live.stream(CHAT, **body)]
    deltas = [chunk["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert deltas[0]["content"] is None
    (first,) = deltas[0]["tool_calls"]
    assert first["id"].startswith("call_")
    assert first["function"] == {"name": want[0]["function"]["name"], "arguments": ""}
    pieces = [piece for delta in deltas[1:-1] for piece in delta["tool_calls"]]
    assert {piece["index"] for piece in pieces} == {*range(len(want))}
    assert all({*piece} == {"index", "function"} for piece in pieces if piece["index"] == 0)
    given = [one["function"]["arguments"] for one in pieces if one["index"] == 0]
    assert "".join(given) == want[0]["function"]["arguments"]
    assert len(given) > 5
    assert (deltas[-1], chunks[-1]["finish_reason"]) == ({}, "tool_calls")
    assert {chunk["finish_reason"] for chunk in chunks[:-1]} == {None}
    plain = live.stream(CHAT, messages=[*USER, *message_and_result(live)], tools=TOOLS)
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in plain]
    assert "".join(texts) == "ok"


def test_with_other_fields(live: LiveServer) -> None:
    answer = live.post(
        CHAT, messages=USER, tools=TOOLS[:1], parallel_tool_calls=False, n=2, logprobs=True,
        stop=["x"], seed=1,
    )  # fmt: skip
    assert [len(choice["message"]["tool_calls"]) for choice in answer["choices"]] == [1, 1]
    tokens = [len(choice["logprobs"]["content"]) for choice in answer["choices"]]
    assert sum(tokens) == answer["usage"]["completion_tokens"]
    (cut,) = live.post(CHAT, messages=USER, tools=TOOLS[:1], max_tokens=40)["choices"]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":3,"b'
    (cut,) = live.post(CHAT, messages=USER, tools=TOOLS[:1], stop=["3"])["choices"]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":'
    for schema in ("json_object", "json_schema"):
        wanted = {"type": schema, "json_schema": {"schema": {"type": "object"}}}
        wanted = wanted if schema == "json_schema" else {"type": schema}
        (choice,) = live.post(CHAT, messages=USER, tools=TOOLS, response_format=wanted)["choices"]
        assert choice["finish_reason"] in ("stop", "tool_calls")


def test_a_chat_without_tools_needs_nothing_of_them(live: LiveServer, monkeypatch) -> None:
    for name in ("AnswerReader", "check_messages", "check_tools", "schemas_of"):
        monkeypatch.setattr(handlers, name, None)
    monkeypatch.setattr(ToolFormat, "write", None)
    talk = [*USER, {"role": "assistant", "content": "Yes."}, *USER]
    answer = live.client.post(CHAT, json={"messages": talk, "max_tokens": 2})
    assert answer.status_code == 200
    answer = live.client.post(CHAT, json={"messages": talk, "tools": TOOLS})
    assert answer.status_code == 500  # they are what a chat with tools calls


def test_the_openai_client_runs_tools(live: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        strict = {**ADD, "strict": True}
        strict["parameters"] = {**ADD["parameters"], "additionalProperties": False}
        options = {"model": "tiny", "tools": [{"type": "function", "function": strict}]}
        with client.chat.completions.stream(messages=USER, **options) as stream:
            names = [event.name for event in stream if event.type.startswith("tool_calls")]
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        assert {*names} == {"add"}
        assert call.function.parsed_arguments == {"a": 3, "b": 3}
        answer = client.chat.completions.parse(messages=USER, **options).choices[0].message
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "6"}
        done = client.chat.completions.create(messages=[*USER, answer, result], **options)
        assert done.choices[0].message.content == "ok"


def test_the_default_format_through_the_server() -> None:
    with serving(tool_generator()) as live:
        body = {"tools": TOOLS, "tool_choice": CHOSEN}
        first = live.post(CHAT, messages=USER, **body)
        message = first["choices"][0]["message"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 3, "b": 3}
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "6"}
        second = live.post(CHAT, messages=[*USER, message, result], **body)
        assert second["choices"][0]["finish_reason"] == "tool_calls"
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"]


CALLED = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ASSISTANT = {"role": "assistant", "tool_calls": [CALLED]}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "6"}


def tool(**function: Any) -> list[dict[str, Any]]:
    return [*TOOLS, {"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": 5}, "tools", "must be a list"),
        ({"tools": [*TOOLS, {"type": "custom"}]}, "tools.2.type", 'must be "function"'),
        ({"tools": tool(name="a b")}, "tools.2.function.name", "letters, digits and"),
        ({"tools": tool(name="")}, "tools.2.function.name", "letters, digits and"),
        ({"tools": tool(name="add")}, "tools.2.function.name", "like that of another function"),
        ({"tools": tool(x=1)}, "tools.2.function.x", "is not a field that this server knows"),
        (
            {"tools": tool(parameters={"type": "string"})},
            "tools.2.function.parameters",
            'must be a JSON schema with the type "object"',
        ),
        (
            {"tools": tool(parameters={"properties": {"a": {"not": {}}}})},
            "tools.2.function.parameters",
            'has keywords that are not supported: "not"',
        ),
        (
            {"tools": tool(parameters={"properties": {"a": {"enum": []}},
                                       "required": ["a"]})},
            "tools.2.function.parameters",
            "matches no JSON at all",
        ),
        ({"tools": tool(parameters={"title": "x" * 70000})}, "tools", "at most 65536 characters"),
        ({"tools": [*TOOLS] * 65}, "tools", "must have at most 128 entries, not 130"),
        ({"tool_choice": "any"}, "tool_choice", 'must be "none", "auto" or "required"'),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "but there are no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "names 'sub', but the functions in tools are: 'add', 'say.it'",
        ),
        ({"messages": [*USER, RESULT]}, "messages.1.tool_call_id", "is 'x', which is no open call"),
        ({"messages": [ASSISTANT, RESULT, RESULT]}, "messages.2.tool_call_id", "no open call"),
        ({"messages": [ASSISTANT, *USER, RESULT]}, "messages.2.tool_call_id", "no open call"),
        ({"messages": [ASSISTANT, {"role": "tool"}]}, "messages.1.tool_call_id", "is missing"),
        ({"messages": [{**USER[0], "tool_call_id": "x"}]}, "messages.0.tool_call_id", "role tool"),
        ({"messages": [{**USER[0], "tool_calls": [CALLED]}]}, "messages.0.tool_calls", "assistant"),
        *[
            (
                {"messages": [{"role": "assistant", "tool_calls": [
                    {**CALLED, "function": {"name": "add", "arguments": wrong}}]}]},
                "messages.0.tool_calls.0.function.arguments",
                "must be a JSON object, as text",
            )
            for wrong in (" ", "[]", "{", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 99999)
        ],
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "combined with tools"),
        ({"guided_json": "{"}, "guided_json", "guided_json is not JSON"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            'has keywords that are not supported: "not"',
        ),
    ],
)  # fmt: skip
def test_refusals(live: LiveServer, body: dict, param: str, message: str) -> None:
    answer = live.client.post(CHAT, json={"messages": USER, "tools": TOOLS, **body})
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert message in error["message"]


def test_descriptions_do_not_count_as_grammar() -> None:
    """They are in the prompt. The limit of 65,536 characters is for what decides the arguments."""
    const = {"const": {"description": "y"}}
    properties = {"description": {"type": "integer", "description": "x" * 70000}, "const": const}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    function = {"name": "f", "parameters": {**schema, "x-guidance": {"whitespace_flexible": False}}}
    tools = [{"type": "function", "function": function}]
    body = {"messages": USER, "tools": tools, "tool_choice": "required"}
    grammar = ToolFormat(PlainFormat(), BYTES).grammar(ChatBody(**body))
    call = '{"name": "f", "arguments": {"description":3,"const":{"description":"y"}}}'
    matcher = Matcher(compile_grammar({"grammar": grammar}, CONFIG, BYTES), [0])
    for token in BYTES.encode(f"<tool_call>\n{call}\n</tool_call>", continues=True):
        matcher.advance(token)
    with serving(tool_generator()) as live:
        tokens = live.post("/tokenize", messages=USER, tools=tools)["tokens"]
        assert "x" * 70000 in live.post("/detokenize", tokens=tokens)["prompt"]


def test_json_that_other_programs_cannot_read_is_refused(live: LiveServer) -> None:
    for odd in ('"\\ud800"', "NaN", "Infinity"):
        body = json.dumps({"messages": USER, "tools": tool(parameters={"title": "odd"})})
        headers = {"content-type": "application/json"}
        answer = live.client.post(CHAT, content=body.replace('"odd"', odd), headers=headers)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "tools.2.function.parameters"


def test_tools_need_llguidance(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    message = live.refused(CHAT, 400, messages=USER, tools=TOOLS)
    assert message == "tools needs llguidance: pip install 'xlstm7b[serve]'"


def test_tools_and_saved_states(tmp_path: Any) -> None:
    with serving(tool_generator(), chat_format=tool_format(), states=tmp_path) as live:
        talk = [*USER, ASSISTANT, RESULT]
        saved = live.post("/v1/states", messages=talk)
        state = {"messages": USER, "state": saved["id"]}
        assert "state that has read text" in live.refused(CHAT, 400, **state, tools=TOOLS)
        assert live.post(CHAT, **state)["choices"][0]["message"]["content"] == "@ok"
        assert live.post("/tokenize", messages=talk)["count"] > 20
        wrong = live.client.post("/tokenize", json={"messages": [*USER, RESULT]})
        assert error_of(wrong)["param"] == "messages.1.tool_call_id"


@pytest.mark.parametrize("template", [None, TAGGED])
def test_tokenize_counts_tools_as_usage_does(template: str | None) -> None:
    chat_format = None if template is None else ChatFormat(ChatTemplate(template, {}))
    with serving(tool_generator(), chat_format=chat_format) as live:
        options = {"messages": USER, "tools": TOOLS}
        tokens = live.post("/tokenize", **options)["tokens"]
        usage = live.post(CHAT, **options, max_tokens=1)["usage"]
        assert usage["prompt_tokens"] == len(tokens)
        assert "The sum of two numbers" in live.post("/detokenize", tokens=tokens)["prompt"]
        assert live.post("/tokenize", messages=USER, tools=[])["count"] < len(tokens)
        ended = live.post("/tokenize", **options, add_generation_prompt=False)["tokens"]
        assert ended == tokens[: len(ended)] != tokens
        assert "needs messages" in live.refused("/tokenize", 400, prompt="a", tools=TOOLS)
        twice = live.refused("/tokenize", 400, messages=USER, tools=[*TOOLS, TOOLS[0]])
        assert twice == "tools.2.function.name is 'add', like that of another function"
