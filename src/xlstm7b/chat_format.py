"""Turns chat messages into prompt text, for training data, `xlstm7b chat` and the server.

All three must use the same format. Otherwise a fine-tuned model would get prompts that differ from
those it was trained on.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from xlstm7b.tokenizer import Tokenizer, read_object, token_text

Messages = Sequence[Mapping[str, str]]
"""Each message has a "role" (system, user or assistant) and a "content"."""


class ChatFormat(Protocol):
    """How a conversation is written as one text."""

    stop_string: str
    """The text after an answer, without white space. The model writes it to end its answer."""

    def first_prompt(self, system: str | None, text: str) -> str:
        """The prompt for the user's first message, up to the start of the answer."""
        opening = [] if system is None else [_message("system", system)]
        return self.render([*opening, _message("user", text)])

    def next_prompt(self, text: str) -> str:
        """The text after an answer, up to the next one: end of turn, user's message, new turn."""

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """A whole conversation. With `add_generation_prompt`, the start of an answer is added."""


class PlainFormat(ChatFormat):
    """The format for a model without a chat template: "User: …" and "Assistant: …" lines."""

    stop_string = "\nUser:"
    template = (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
        "{% elif message.role == 'user' %}{{ 'User: ' + message.content + '\\n' }}"
        "{% elif message.role == 'assistant' %}"
        "{{ 'Assistant: ' + (message.content | trim) + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    """What `render` does, as a chat template for other programs, with the first token."""

    def next_prompt(self, text: str) -> str:
        return f"\nUser: {text}\nAssistant:"

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        text = "".join(segment for segment, _ in self.segments(messages))
        return f"{text}Assistant:" if add_generation_prompt else text

    def segments(self, messages: Messages) -> Iterator[tuple[str, bool]]:
        """The conversation in parts, and for each part whether the assistant wrote it.

        Fine-tuning computes the loss on the assistant's parts only. A part ends after "Assistant:",
        where generation starts, so that each part can be tokenized by itself. White space around an
        answer is left out.
        """
        before = ""
        for message in messages:
            content = message["content"]
            match message["role"]:
                case "system":
                    before += f"{content}\n\n"
                case "user":
                    before += f"User: {content}\n"
                case "assistant":
                    yield f"{before}Assistant:", False
                    yield f" {content.strip()}", True
                    before = "\n"
        if before:
            yield before, False


class ChatTemplate:
    """A Jinja chat template. It runs in Jinja's sandbox, because it comes with the weights."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # The settings of transformers, for which templates are written.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program: it can raise anything
            raise ValueError(f"the chat template fails: {error}") from error


class TemplateFormat(ChatFormat):
    """The format of a chat template, one turn at a time.

    A chat continues from the state after the earlier turns. So each turn may only append text, and
    that text must not depend on the turn's position. Any other template is a `ValueError`.
    """

    _ANSWER = "\N{WHITE SQUARE}an answer\N{WHITE SQUARE}"  # a placeholder for an answer

    def __init__(self, template: ChatTemplate, system: str | None = None) -> None:
        self._template = template
        opening = [] if system is None else [_message("system", system)]
        user, answer = _message("user", "Hello"), _message("assistant", self._ANSWER)
        twice = template.render(
            [*opening, user, _message("assistant", "Hi"), user, answer, user],
            add_generation_prompt=True,
        )
        once = template.render([*opening, user, answer, user], add_generation_prompt=True)
        starts_alike = once.startswith(self.first_prompt(system, "Hello") + self._ANSWER)
        if not starts_alike or not twice.endswith(self._ANSWER + self.next_prompt("Hello")):
            raise ValueError(
                "the chat template does not just add to a text with each turn, "
                "so a chat cannot continue from a saved state"
            )
        closed = template.render([*opening, user, answer])
        self.stop_string = closed.rpartition(self._ANSWER)[2].strip()

    def next_prompt(self, text: str) -> str:
        answer = _message("assistant", self._ANSWER)
        whole = self.render([_message("user", "Hello"), answer, _message("user", text)])
        return whole.partition(self._ANSWER)[2]  # the first one: the user's text may contain it too

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)


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


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template in a checkpoint folder. None without one, and for the plain format's."""
    source, described, path = _read_template(folder)
    if source is None or source == PlainFormat.template:
        return None
    tokens = {
        name: text
        for name, token in described.items()
        if name.endswith("_token") and (text := token_text(token)) is not None
    }
    try:
        return ChatTemplate(source, tokens)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def template_source(folder: Path) -> str:
    """The chat template to write beside weights: the folder's own, else the plain format's."""
    source, _, _ = _read_template(folder)
    return PlainFormat.template if source is None else source


def _read_template(folder: Path) -> tuple[str | None, dict[str, Any], Path]:
    """The source of a folder's chat template, its tokenizer_config.json, and the source's file."""
    path = folder / "tokenizer_config.json"
    described = read_object(path)
    source: Any = described.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):  # several templates with names
        named = {str(part.get("name")): part for part in source if isinstance(part, dict)}
        source = named.get("default", {}).get("template")
    if source is not None and not isinstance(source, str):
        raise ValueError(f"{path}: chat_template is not a string")
    return source, described, path


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise ValueError(message)
