"""A chat template with tools, and a model that uses them."""

from functools import cache

from models import bigram_model

from xlstm7b.chat_format import ChatFormat, ChatTemplate
from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer

# A call is `@ {"name": "add", "arguments": {"a": 3}}`. An answer after a result starts differently.
TEMPLATE = (
    "{% if tools %}Functions: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}"
    "{% if message.role == 'assistant' %}"
    "{{ '!' if messages[loop.index0 - 1].role == 'tool' else '?' }}{% else %}: {% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '@ ' if loop.first else ', ' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant"
    "{{ '!' if messages[-1].role == 'tool' else '?' }}{% endif %}"
)
# It calls a function with threes, and answers "ok" after a result. Without tools it answers "@ok".
FOLLOWERS = {
    "?": "@",
    "@": "o",
    "!": "o",
    "o": "k",
    "k": "\0",
    "{": '"}',
    '"': ":},",
    ":": '3"',
    "3": '},"',
    "}": '"\0<',
    ",": '"',
    "[": "]",
}


def tool_format() -> ChatFormat:
    return ChatFormat(ChatTemplate(TEMPLATE, {}))


@cache
def tool_generator() -> Generator:
    return Generator(bigram_model(FOLLOWERS), ByteTokenizer())
