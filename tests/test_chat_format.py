"""Chat templates: rendered as `transformers` does, in a sandbox, and with errors that name them."""

import json
from pathlib import Path

import pytest
from commands import CHATML
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm7b.chat_format import ChatTemplate, PlainFormat, load_chat_template

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
        ("chat_template.jinja", "\xff", " is not UTF-8 text: "),
    ],
)
def test_a_damaged_chat_template_is_named(
    tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{tmp_path / name}{sentence}"):
        load_chat_template(tmp_path)


# Conversations for training


def say(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    said = [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]
    return said if system is None else [{"role": "system", "content": system}, *said]


def counted(template: ChatTemplate, messages: list[dict[str, str]]) -> list[str]:
    """The parts that count in the loss. All parts together are the start of the rendered text."""
    segments, _ = template.conversation(messages)
    assert template.render(messages).startswith("".join(text for text, _ in segments))
    return [text for text, counts in segments if counts]


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (CHATML, ["b<|im_end|>", "d<|im_end|>"]),
        (PlainFormat.template, [" b\nUser:", " d"]),
        (MARKED, ["b</s>", "d</s>"]),  # the end counts also if it is not marked
        (MARKED.replace("</s>", "").replace("{% endgen", "</s>{% endgen"), ["b</s>", "d</s>"]),
        # The end is marked by itself.
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}<bot>{% generation %}"
            "{{ m.content }}{% endgeneration %}{% generation %}</s>\n{% endgeneration %}"
            "{% else %}{{ m.content }}</s>\n{% endif %}{% endfor %}",
            ["b</s>", "\n", "d</s>", "\n"],
        ),
        # The end of text follows the last message only.
        (f"{CHATML.replace('{% if', '{{ eos_token }}{% if')}", ["b<|im_end|>", "d<|im_end|>"]),
        # Nothing is written after an answer.
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["b", "d"]),
        # The start of an answer is not the generation prompt, and holds the answer's words.
        (
            "{% for m in messages %}<{{ m.role }}, a or b>{{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<assistant>think{% endif %}",
            ["b</s>", "d</s>"],
        ),
    ],
)
def test_every_answer_counts_and_so_does_its_end(source: str, want: list[str]) -> None:
    template = ChatTemplate(source, {"eos_token": "<|eos|>"})
    assert counted(template, say("a", "b", "c", "d")) == want
    assert counted(template, say("a", "b", "c", "d", "left out")) == want
    assert template.conversation(say("a", "b", "c", "d")).has_all_answers


def test_templates_that_change_earlier_turns_count_the_last_answer() -> None:
    """Such as those that leave out the reasoning of earlier answers."""
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        {},
    )
    talk = say("a", "x</think>b", "c", "y</think>d")
    conversation = template.conversation(talk)
    assert conversation == ([("<user>a</s><assistant>b</s><user>c</s><assistant>", False),
                             ("y</think>d</s>", True)], False)  # fmt: skip
    # Its text is the prompt of generation, and then the answer.
    assert template.render(talk[:3], add_generation_prompt=True) == conversation.segments[0][0]
    assert template.conversation(say("a", "b", "c", "d")).has_all_answers
    # Or those that end only the last answer.
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant={% else %}</s>{% endif %}",
        {},
    )
    assert counted(template, say("a", "b", "c", "d")) == ["d;</s>"]
    assert not template.conversation(say("a", "b", "c", "d")).has_all_answers


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "does not write",
        ),
        (
            "{{ messages[-1].content | length }}: {{ messages[-1].content }}",
            "where the answer star",
        ),
        (
            "{% generation %}{% endgeneration %}".join(["{% if 0 %}", "{% endif %}"]),
            "marks no answ",
        ),
        (
            "{% filter upper %}{% generation %}\ufdd0{% endgeneration %}{% endfilter %}",
            "changes wh",
        ),
    ],
)
def test_templates_whose_answers_cannot_be_found(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^the chat template .*{message}"):
        ChatTemplate(source, {}).conversation(say("a", "b"))


def test_a_template_is_given_what_transformers_gives_it() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (
        "{{ tools is none }} {{ documents is none }} {{ x is defined }} "
        "{{ messages | tojson(indent=1, sort_keys=true, separators=(',', ':')) }}"
        "{% for m in messages %}{% generation %}\n{{ m.content }}\n{% endgeneration %}\n"
        "{% endfor %}"
    )
    (theirs,), (spans,) = utils.render_jinja_template(
        [MESSAGES], chat_template=source, return_assistant_tokens_mask=True
    )
    template = ChatTemplate(source, {})
    assert template.render(MESSAGES) == theirs
    assert counted(template, MESSAGES) == [theirs[start:end] for start, end in spans]


TURN = st.text(st.sampled_from(" \n<>|abuserAssistant:é"), max_size=12)


@settings(deadline=None)
@given(
    turns=st.lists(TURN, min_size=2, max_size=7),
    source=st.sampled_from([CHATML, PlainFormat.template, MARKED]),
)
def test_any_answers_are_found(turns: list[str], source: str) -> None:
    template = ChatTemplate(source, {})
    messages = say(*turns)
    answers = [turn if source == MARKED else turn.strip() for turn in turns[1::2]]
    end = {CHATML: "<|im_end|>", MARKED: "</s>"}.get(source, "\nUser:")
    first = " " if source == PlainFormat.template else ""
    want = [f"{first}{answer}{end}" for answer in answers]
    if source == PlainFormat.template:
        want[-1] = want[-1].removesuffix(end)
    assert counted(template, messages) == want


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["system", "user", "assistant", "tool"]),
            st.text("ab \n:\ufdd0\ufdd1") | st.sampled_from(["User: a\nUser:", "Assistant: b"]),
        ),
        max_size=6,
    )
)
def test_the_marks_of_the_plain_format_are_around_the_answers(turns: list[tuple[str, str]]) -> None:
    """They are those found without marks, which takes time with the square of the messages."""
    messages = [{"role": role, "content": content} for role, content in turns]
    messages.append({"role": "assistant", "content": "b"})
    plain = ChatTemplate(PlainFormat.template, {})
    unmarked = ChatTemplate(PlainFormat.template + "{# another source #}", {})
    assert plain.conversation(messages) == unmarked.conversation(messages)
    for options in ({}, {"add_generation_prompt": True}):
        assert plain.render(messages, **options) == unmarked.render(messages, **options)
