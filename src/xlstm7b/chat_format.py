"""Turns chat messages into text, for training data, `xlstm7b chat`, the server and `eval`.

All of them must write the same text. Otherwise a fine-tuned model would get prompts that differ
from those it was trained on. The format is that of `transformers`: a Jinja template, in the file
`chat_template.jinja` or in `tokenizer_config.json`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from xlstm7b.tokenizer import Tokenizer, read_object, token_text

Messages = Sequence[Mapping[str, Any]]
"""Each message has a "role" (system, user or assistant) and a "content".

Templates that know tools also take the role "tool", and "tool_calls" of the assistant.
"""

ANSWER = "\N{WHITE SQUARE}an answer\N{WHITE SQUARE}"  # a placeholder for an answer
_QUESTION = "\N{WHITE SQUARE}a question\N{WHITE SQUARE}"  # a placeholder for a user's message
_START, _END = "\ufdd0", "\ufdd1"  # noncharacters around what a template marks


class Conversation(NamedTuple):
    """The text of a conversation up to the end of its last answer, for training."""

    segments: list[tuple[str, bool]]
    """The parts of the text, and whether the assistant writes each: it then counts in the loss."""
    has_all_answers: bool
    """False if only the last answer counts: the template changes earlier turns when it adds one."""


class ChatTemplate:
    """A Jinja chat template. It runs in Jinja's sandbox, because it comes with the weights."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # The settings of transformers, for which templates are written.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self._generation: Any = _generation_tag(environment)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        # It writes the same text, and its marks make `conversation` take less time.
        self._is_plain = source == PlainFormat.template
        try:
            self._template = environment.from_string(
                PlainFormat.marked_template if self._is_plain else source
            )
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)
        if self._is_plain:
            self._special_tokens.pop("eos_token", None)  # only the marked template writes it

    @property
    def key(self) -> tuple[str, dict[str, str]]:
        """Everything that determines the texts."""
        return self.source, self._special_tokens

    def __reduce__(self) -> tuple[Any, ...]:  # for other processes: Jinja's objects stay here
        return ChatTemplate, self.key

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of messages. `variables` are more names that the template may read."""
        known = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,  # transformers defines these two, and templates test them
            "documents": None,
            **self._special_tokens,
        }
        try:
            return self._template.render(known | dict(variables or {}))
        except Exception as error:  # a template is a program: it can raise anything
            raise ValueError(f"the chat template fails: {error}") from error

    @cached_property
    def answer_end(self) -> str:
        """The text that ends an answer, such as "<|im_end|>", without white space around it.

        It is what the template writes after every answer: both at the end of a text and before the
        user's next message. For a template that writes nothing there, it is how that message
        begins. Empty if there is no such text.
        """
        asked = [_message("user", "Hello"), _message("assistant", ANSWER)]
        last = self.render(asked).rpartition(ANSWER)[2]
        whole = self.render([*asked, _message("user", _QUESTION)])
        earlier = whole.partition(ANSWER)[2].partition(_QUESTION)[0]
        if not last.strip():
            return earlier.rstrip()
        if not earlier.startswith(last.rstrip()):
            # The end of text may follow the last answer only. Two tokens may start alike ("<").
            shared = last[: len(last) - len(without_prefix(last, earlier))]
            last = shared[: max(map(shared.rfind, " \n>]")) + 1].strip() or last
        return last.strip()

    def conversation(self, messages: Messages) -> Conversation:
        """The conversation up to the last answer. Answers, each with its end, count in the loss.

        They are what the template marks with `{% generation %}`. Without such marks, answer n is
        what messages 1 … n add to the prompt of messages 1 … n − 1. If the template does not write
        all messages as a continuation of the first n (it may drop the reasoning of earlier
        answers), only the last answer counts, after a text that is its prompt in generation.
        """
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        if not messages:
            raise ValueError("no message has the role 'assistant'")
        whole = self.render(messages)
        has_all, has_marks = True, self._generation.is_used
        if self._is_plain and (_START in whole or _END in whole):
            has_marks = False  # a message has these characters, so that no marks can be found
        if has_marks:
            spans = self._marked_spans(messages, whole)
        else:
            spans = []
            for number, message in enumerate(messages, 1):
                if message["role"] != "assistant":
                    continue
                text = whole if number == len(messages) else self.render(messages[:number])
                start, end = self._last_span(messages[:number], text)
                if not whole.startswith(text[:end]):
                    spans, has_all = [self._last_span(messages, whole)], False
                    break
                spans.append((start, end))
        segments, position = list[tuple[str, bool]](), 0
        for start, end in spans:
            if self.answer_end and whole.startswith(self.answer_end, end):
                end += len(self.answer_end)
            start = max(start, position)  # the end may be marked by itself
            segments += [(whole[position:start], False), (whole[start:end], True)]
            position = max(end, position)
        return Conversation(segments, has_all)

    def _last_span(self, messages: Messages, text: str) -> tuple[int, int]:
        """Start and end in `text`, which is all messages, of the last one, an answer.

        It starts where generation does. The white space that the template writes after it is left
        out.
        """
        *earlier, answer = messages
        marked = self.render([*earlier, {**answer, "content": ANSWER}])
        before, mark, after = marked.rpartition(ANSWER)
        if not mark:
            raise ValueError("the chat template does not write the assistant's messages")
        end = len(text.rstrip())
        if text.endswith(after):
            at = after.find(self.answer_end)
            is_ended = at >= 0 and not after[:at].strip()
            end = len(text) - len(after)
            end += at + len(self.answer_end) if is_ended else len(after.rstrip())
        starts = [before]
        with suppress(ValueError):  # a template may need a message before an answer
            starts.insert(0, self.render(earlier, add_generation_prompt=True))
        for start in starts:
            if text.startswith(start) and len(start) <= end:
                return len(start), end
        raise ValueError(
            "the chat template changes the text before the last answer with the answer's words, so "
            "it is unknown where the answer starts: mark answers in the template with "
            "{% generation %} … {% endgeneration %}"
        )

    def _marked_spans(self, messages: Messages, whole: str) -> list[tuple[int, int]]:
        self._generation.is_marking = True
        try:
            marked = self.render(messages)
        finally:
            self._generation.is_marking = False
        if marked.replace(_START, "").replace(_END, "") != whole or _START in whole:
            raise ValueError("the chat template changes what it marks with {% generation %}")
        before, *parts = marked.split(_START)
        spans, position = list[tuple[int, int]](), len(before)
        for part in parts:
            answer, _, rest = part.partition(_END)
            spans.append((position, position + len(answer)))
            position += len(answer) + len(rest)
        if not spans:
            raise ValueError("the chat template marks no answer with {% generation %}")
        return spans


class ChatFormat:
    """How a conversation is written as one text: by a chat template, one turn at a time.

    A chat continues from the state after the earlier turns. So each turn may only append text, and
    that text must not depend on the turn's position. Any other template is a `ValueError`.
    """

    def __init__(self, template: ChatTemplate, system: str | None = None) -> None:
        self._template = template
        opening = [] if system is None else [_message("system", system)]
        user, answer = _message("user", "Hello"), _message("assistant", ANSWER)
        twice = self.render([*opening, user, _message("assistant", "Hi"), user, answer, user])
        once = self.render([*opening, user, answer, user])
        start = self.first_prompt(system, "Hello")
        # White space between prompt and answer is the model's to write.
        starts_alike = once.startswith(start) and once[len(start) :].lstrip().startswith(ANSWER)
        if not starts_alike or not twice.endswith(ANSWER + self.next_prompt("Hello")):
            raise ValueError(
                "the chat template does not just add to a text with each turn, "
                "so a chat cannot continue from a saved state"
            )
        # The text after an answer, without white space. The model writes it to end its answer.
        self.stop_string = template.answer_end

    @property
    def source(self) -> str:
        """The template, in Jinja's language."""
        return self._template.source

    def first_prompt(self, system: str | None, text: str) -> str:
        """The prompt for the user's first message, up to the start of the answer."""
        opening = [] if system is None else [_message("system", system)]
        return self.render([*opening, _message("user", text)])

    def next_prompt(self, text: str) -> str:
        """The text after an answer, up to the next one: end of turn, user's message, new turn."""
        answer = _message("assistant", ANSWER)
        whole = self.render([_message("user", "Hello"), answer, _message("user", text)])
        return whole.partition(ANSWER)[2]  # the first one: the user's text may contain it too

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A whole conversation. With `add_generation_prompt`, the start of an answer is added.

        `tools` are functions that the model may call, for templates that know them. `variables` are
        more names that the template may read, such as "enable_thinking".
        """
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )

    def render_open(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation whose last message goes on: it ends with the text of that message."""
        *earlier, last = messages
        marked = self.render(
            [*earlier, {**last, "content": ANSWER}],
            add_generation_prompt=False,
            tools=tools,
            variables=variables,
        )
        before, mark, _ = marked.rpartition(ANSWER)
        if not mark:
            raise ValueError("the chat template does not write the last message")
        return before + str(last["content"])


class PlainFormat(ChatFormat):
    """The format for a model without a chat template: "User: …" and "Assistant: …" lines.

    An answer ends where the next line starts with "User:". White space around it is left out. The
    first token is not in its texts (`with_first_token` adds it), but `template` writes it, for
    other programs.
    """

    template = (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
        "{% elif message.role == 'user' %}{{ 'User: ' + message.content + '\\n' }}"
        "{% elif message.role == 'assistant' %}"
        "{{ 'Assistant: ' + (message.content | trim) + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    # The same with answers marked for trainers. An answer ends with what `prepare` counts in the
    # loss: "User:" of the message after it, or the end of text.
    marked_template = (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
        "{% elif message.role == 'user' %}"
        "{% if loop.first or loop.previtem.role != 'assistant' %}{{ 'User:' }}{% endif %}"
        "{{ ' ' + message.content + '\\n' }}"
        "{% elif message.role == 'assistant' %}"
        "{% set is_last = loop.last and not add_generation_prompt %}"
        "{% set is_asked = not loop.last and loop.nextitem.role == 'user' %}"
        "{% set end = '\\nUser:' if is_asked else is_last and eos_token or '' %}"
        "{{ 'Assistant:' }}{% generation %}{{ ' ' + (message.content | trim) + end }}"
        "{% endgeneration %}{{ '' if end else '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )

    def __init__(self) -> None:
        super().__init__(ChatTemplate(self.template, {}))


def answer_ends(
    chat_format: ChatFormat, tokenizer: Tokenizer, eos_token_id: int
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """The stop strings and end-of-text ids of an answer. None: the model's own end-of-text id."""
    ids = tokenizer.encode(chat_format.stop_string, continues=True)
    # A single id may be a special token. It has no text, so a stop string would not find it.
    ends = (eos_token_id, *ids) if len(ids) == 1 else None
    return (chat_format.stop_string,) if chat_format.stop_string else (), ends


def without_prefix(text: str, other: str) -> str:
    """The text without its longest common prefix with `other`."""
    shared = 0
    for mine, theirs in zip(text, other, strict=False):
        if mine != theirs:
            break
        shared += 1
    return text[shared:]


def load_chat_template(
    folder: Path, named_tokens: Mapping[str, str] | None = None
) -> ChatTemplate | None:
    """The chat template in a folder of a checkpoint or a tokenizer; None without one.

    `named_tokens` are special tokens that the folder's own files may not name, such as
    {"eos_token": "</s>"}.
    """
    source, described, path = _read_template(folder)
    if source is None:
        return None
    tokens = dict(named_tokens or {})
    for name, token in described.items():
        text = token_text(token)
        if name.endswith("_token") and text is not None:
            tokens[name] = text
    try:
        # `PlainFormat` writes no first token.
        return ChatTemplate(source, {} if source == PlainFormat.template else tokens)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def template_source(folder: Path) -> str:
    """The chat template for weights in this folder: the folder's own, else the plain format's."""
    source, _, _ = _read_template(folder)
    return PlainFormat.template if source is None else source


def marked_source(source: str) -> str:
    """A chat template as an export has it: the plain format gets its marks."""
    return PlainFormat.marked_template if source == PlainFormat.template else source


def _read_template(folder: Path) -> tuple[str | None, dict[str, Any], Path]:
    """The source of a folder's chat template, what names its tokens, and the source's file."""
    path = folder / "tokenizer_config.json"
    described = {**read_object(folder / "special_tokens_map.json"), **read_object(path)}
    source: Any = described.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        path = folder / "chat_template.jinja"
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if isinstance(source, list):  # several templates with names
        named = {str(part.get("name")): part for part in source if isinstance(part, dict)}
        source = named.get("default", {}).get("template")
    if source is not None and not isinstance(source, str):
        raise ValueError(f"{path}: chat_template is not a string")
    # Data, runs and earlier exports know the plain format without its marks.
    source = PlainFormat.template if source == PlainFormat.marked_template else source
    return source, described, path


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of transformers: Jinja's own escapes `<` and `'`, as for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _generation_tag(environment: Any) -> Any:
    """Adds the block `{% generation %}` … `{% endgeneration %}`, which marks answers."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 (of Jinja's class)
        is_used = False  # by the template
        is_marking = False

        def parse(self, parser: Parser) -> nodes.Node:
            self.is_used = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            return f"{_START}{caller()}{_END}" if self.is_marking else caller()

    environment.add_extension(GenerationTag)
    return environment.extensions[GenerationTag.identifier]


def _raise(message: str) -> NoReturn:
    raise ValueError(message)
