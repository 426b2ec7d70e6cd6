"""Chat templates: rendered as `transformers` does, in a sandbox, and with errors that name them."""

import json
from pathlib import Path

import pytest

from xlstm7b.chat_format import ChatTemplate, load_chat_template

MESSAGES = [{"role": "user", "content": "a <b> ü"}, {"role": "assistant", "content": "c"}]


def test_a_template_renders_as_transformers_does() -> None:
    source = """{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {{- bos_token + message.role + ": " + message.content + "\\n" }}
    {% endfor %}
    {{ messages[0] | tojson }}
    {% if add_generation_prompt %}
assistant:
    {%- endif %}
"""
    tokens = {"bos_token": "<s>"}
    template = ChatTemplate(source, tokens)
    closed, opened = (
        template.render(MESSAGES, add_generation_prompt=started) for started in (False, True)
    )
    assert closed == (
        '<s>user: a <b> ü\n\n<s>assistant: c\n\n    {"role": "user", "content": "a <b> ü"}\n'
    )
    assert opened == closed + "assistant:"
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for started, text in ((False, closed), (True, opened)):
        (theirs,), _ = utils.render_jinja_template(
            [MESSAGES], chat_template=source, add_generation_prompt=started, **tokens
        )
        assert text == theirs


def test_a_template_cannot_leave_its_sandbox() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(ValueError, match=r"^the chat template fails: "):
            ChatTemplate(source, {}).render(MESSAGES)


def test_an_exception_of_a_template_is_shown() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}", {})
    with pytest.raises(ValueError, match=r"^the chat template fails: Roles must alternate$"):
        template.render(MESSAGES)
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES).isdecimal()


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, None),
        ({"tokenizer_config.json": {"chat_template": None}}, None),
        ({"tokenizer_config.json": {"chat_template": "A{{ eos_token }}"}}, "A"),
        ({"tokenizer_config.json": {"chat_template": "A{{ eos_token }}", "eos_token": "E"}}, "AE"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": "{{ pad_token }}",
                    "pad_token": {"content": "P", "special": True},
                }
            },
            "P",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use"}, 3]}}, None),
        ({"chat_template.jinja": "J"}, "J"),
        ({"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "A"}}, "J"),
    ],
)
def test_load_chat_template(tmp_path: Path, files: dict[str, object], want: str | None) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    template = load_chat_template(tmp_path)
    assert (None if template is None else template.render(MESSAGES)) == want


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer_config.json", "[1]", " is not a JSON object"),
        ("tokenizer_config.json", "{", " is not a readable JSON file: "),
        ("tokenizer_config.json", '{"chat_template": 3}', ": chat_template is not a string"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', ": the chat template cannot be"),
        ("chat_template.jinja", "{% generation %}", ": the chat template cannot be read: "),
    ],
)
def test_a_damaged_chat_template_is_named(
    tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"^{tmp_path / name}{sentence}"):
        load_chat_template(tmp_path)
