"""Text ↔ ids: a `tokenizer.json`, or bytes with no file needed, text as it streams, and chats."""

import codecs
import hashlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn, Protocol

_BYTE_VOCABULARY = 320  # 0 end of text, 1 padding, 256 bytes, and room up to a multiple of 64
_FIRST_BYTE = 2
_WORD_END = re.compile(r"(?<=[A-Za-z])[ \t\r\n]")


class Tokenizer(Protocol):
    """Neither adds nor expects special ids by itself: whoever wants id 0 in front prepends it."""

    vocab_size: int
    cuts_after_words: bool
    """Whether text may be cut between an ASCII letter and white space: the ids stay the same."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids. Special ids have none; bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """What one id adds to the text, in UTF-8, of which it may end or begin in mid-character."""


class ByteTokenizer:
    """Every UTF-8 byte is a token, its value + 2. Id 0 ends a text, id 1 is padding."""

    vocab_size = _BYTE_VOCABULARY
    cuts_after_words = True

    def encode(self, text: str) -> list[int]:
        return [byte + _FIRST_BYTE for byte in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        byte = token - _FIRST_BYTE
        return bytes([byte]) if 0 <= byte < 256 else b""


class FileTokenizer:
    """A byte-level `tokenizer.json` (GPT-NeoX, GPT-2, Llama 3, …), read by `tokenizers`.

    Byte-level, because only there does text grow token by token: other kinds look at neighbours.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error
        if not isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(
                f"{path} is not a byte-level tokenizer (its decoder is "
                f"{type(self._tokenizer.decoder).__name__}), the only kind that is supported"
            )
        # A file may ask for texts to be cut or padded; ids must stand for the text as it is.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        byte_of = _byte_of_letter()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        self._bytes = {token: _to_bytes(piece, byte_of) for piece, token in vocabulary.items()}
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            self._bytes[token] = b"" if added.special else _to_bytes(added.content, byte_of)
        self.vocab_size = max(self._bytes, default=-1) + 1
        self.cuts_after_words = _cuts_after_words(self._tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of what decides a text's ids, in whatever way the file is written."""
        written = json.loads(self._tokenizer.to_str())
        deciding = ("model", "normalizer", "pre_tokenizer", "added_tokens")
        content = json.dumps({name: written[name] for name in deciding}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode` each, in three quarters of the time: it keeps no places in the text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        # Ids without a piece are real: the model's vocabulary is padded to 50304.
        return self._bytes.get(token, b"")


def _cuts_after_words(backend: Any) -> bool:
    """True of GPT-2's way to split a text, which never looks back, nor joins a letter and a space.

    What would reach over the cut: spaces put in front, other normal forms, added tokens with spaces
    in them or that take the space around them.
    """
    import tokenizers

    splits = backend.pre_tokenizer
    return (
        isinstance(splits, tokenizers.pre_tokenizers.ByteLevel)
        and splits.use_regex
        and not splits.add_prefix_space
        and (
            backend.normalizer is None or isinstance(backend.normalizer, tokenizers.normalizers.NFC)
        )
        and not any(
            _WORD_END.search(added.content) or added.lstrip or added.rstrip
            for added in backend.get_added_tokens_decoder().values()
        )
    )


def _byte_of_letter() -> dict[str, int]:
    """Byte-level vocabularies spell each byte as one printable letter (GPT-2's alphabet).

    Bytes that print in Latin-1 are themselves; the other 68, in order, are U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + i): byte for i, byte in enumerate(others)},
    }


def _to_bytes(piece: str, byte_of: dict[str, int]) -> bytes:
    """A piece that is not all in the alphabet was added as plain text, such as runs of spaces."""
    if all(letter in byte_of for letter in piece):
        return bytes(byte_of[letter] for letter in piece)
    return piece.encode()


class CachingEncoder:
    """Texts into ids, what several texts begin with only once: the ids are `encode`'s.

    A text is cut at the first end of a word after every 2048 characters, so that texts that begin
    alike are cut alike, and the ids of the latest pieces are remembered. Where words are so far
    apart that a piece gets twice as long, it is not: what is kept has a bound, some 70 MB.
    """

    _PIECE, _PIECES = 2048, 1024

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids_of = lru_cache(self._PIECES)(lambda piece: array("i", tokenizer.encode(piece)))

    def encode(self, text: str) -> list[int]:
        ids, start = array("i"), 0
        if self._tokenizer.cuts_after_words:
            while cut := _WORD_END.search(text, start + self._PIECE):
                piece, start = text[start : cut.start()], cut.start()
                is_long = len(piece) > 2 * self._PIECE
                ids.extend(self._tokenizer.encode(piece) if is_long else self._ids_of(piece))
        return [*ids, *self._tokenizer.encode(text[start:])]


class StreamDecoder:
    """Ids one by one into text that never changes and never breaks a character.

    What the pushes and the flush return, joined, is `decode` of all the ids; a push costs the same
    however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this id makes certain: nothing while a character is incomplete."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left when no id follows: U+FFFD for half a character. A new text may follow."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(path: str | Path | None, vocab_size: int) -> Tokenizer:
    """The tokenizer at `path`, a `tokenizer.json` or its folder, for a model of this vocabulary.

    With no such file, a model of 320 ids speaks bytes.
    """
    file = None if path is None else Path(path)
    if file is not None and file.is_dir():
        file = file / "tokenizer.json" if (file / "tokenizer.json").exists() else None
    if file is None:
        if vocab_size == _BYTE_VOCABULARY:
            return ByteTokenizer()
        raise ValueError(
            f"{path or 'this model'} has no tokenizer.json, which a vocabulary of {vocab_size} "
            f"needs (only one of {_BYTE_VOCABULARY} ids, bytes, needs none)"
        )
    if not file.exists():
        raise ValueError(f"there is no tokenizer at {file}")
    tokenizer = FileTokenizer(file)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{file} has ids up to {tokenizer.vocab_size - 1}, "
            f"but the model's vocabulary ends at {vocab_size - 1}"
        )
    return tokenizer


class ChatTemplate:
    """How a model was taught to write a conversation down: a Jinja template.

    It comes with the weights and not from the user: it runs in Jinja's sandbox.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # As transformers sets it up, for which templates are written.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False
    ) -> str:
        """The text of messages, which have a "role" and a "content"; and of an answer's start."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program: there is no telling
            raise ValueError(f"the chat template fails: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template that is in a checkpoint's folder, if one is."""
    path = folder / "tokenizer_config.json"
    described: Any = {}
    if path.is_file():
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a readable JSON file: {error}") from error
        if not isinstance(described, dict):
            raise ValueError(f"{path} is not a JSON object")
    source = described.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):  # several, by name
        named = {str(part.get("name")): part for part in source if isinstance(part, dict)}
        source = named.get("default", {}).get("template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{path}: chat_template is not a text")
    tokens = {}
    for name, token in described.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    try:
        return ChatTemplate(source, tokens)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
