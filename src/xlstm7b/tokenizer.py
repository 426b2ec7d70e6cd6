"""Text to token ids and back: `tokenizer.json` files, byte-level ids, and decoding of streams."""

import codecs
import hashlib
import json
import re
from array import array
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from xlstm7b.config import ModelConfig

_BYTE_VOCABULARY = 320  # 0 end of text, 1 padding, 256 bytes, the rest unused (a multiple of 64)
_FIRST_BYTE = 2
_WORD_END = re.compile(r"(?<=[A-Za-z])[ \t\r\n]")


class Tokenizer(Protocol):
    """Adds no special tokens: `with_first_token` puts id 0 in front of a prompt."""

    vocab_size: int
    cuts_after_words: bool
    """True if text can be cut between an ASCII letter and white space without changing the ids."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids. Special ids have no text; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of one id. They may start or end inside a character."""


def load_tokenizer(path: str | Path | None, vocab_size: int) -> Tokenizer:
    """The tokenizer for a model with this vocabulary. `path` is a `tokenizer.json` or its folder.

    Without a file, a model with 320 ids uses bytes.
    """
    file = None if path is None else Path(path)
    if file is not None and file.is_dir():
        file = file / "tokenizer.json" if (file / "tokenizer.json").exists() else None
    if file is None:
        if vocab_size == _BYTE_VOCABULARY:
            return ByteTokenizer()
        raise ValueError(
            f"{path or 'this model'} has no tokenizer.json, which a vocabulary of {vocab_size} "
            f"needs (only a vocabulary of {_BYTE_VOCABULARY}, bytes, works without a file)"
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


def tokenizer_file(tokenizer: str | Path) -> Path | None:
    """The path of a tokenizer.json, given the file or its folder. None for "bytes"."""
    if str(tokenizer) == "bytes":
        return None
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no tokenizer at {file}")
    return file


def tokenizer_fingerprint(tokenizer: str | Path) -> str:
    """A hash of everything that decides a text's ids; "bytes" for bytes."""
    file = tokenizer_file(tokenizer)
    return "bytes" if file is None else FileTokenizer(file).fingerprint


def with_first_token(config: ModelConfig, prompt: Sequence[int]) -> list[int]:
    """The prompt with id 0 in front, if the model was trained with it and the prompt lacks it."""
    first = [config.bos_token_id]
    if config.force_bos_token_insert and list(prompt[:1]) != first:
        return first + list(prompt)
    if not prompt:
        raise ValueError("the prompt is empty, and this model has no first token of its own")
    return list(prompt)


def check_tokens(config: ModelConfig, tokens: Sequence[int]) -> None:
    """Raises a `ValueError` that names the first id outside the vocabulary."""
    if not tokens or 0 <= min(tokens) <= max(tokens) < config.vocab_size:
        return  # fast: a prompt may have millions of ids
    for token in tokens:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {config.vocab_size}")


class ByteTokenizer(Tokenizer):
    """Every UTF-8 byte is a token: the byte's value + 2. Id 0 ends a text, id 1 is padding."""

    vocab_size = _BYTE_VOCABULARY
    cuts_after_words = True

    def encode(self, text: str) -> list[int]:
        return [byte + _FIRST_BYTE for byte in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def token_bytes(self, token: int) -> bytes:
        byte = token - _FIRST_BYTE
        return bytes([byte]) if 0 <= byte < 256 else b""


class FileTokenizer(Tokenizer):
    """A byte-level `tokenizer.json` (GPT-NeoX, GPT-2, Llama 3, …), read by `tokenizers`.

    Only byte-level tokenizers are supported: there the text of a token does not depend on the
    tokens around it. Without `special_tokens`, "<|endoftext|>" and the like in a text are encoded
    as ordinary text.
    """

    def __init__(self, path: Path, *, special_tokens: bool = True) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain exceptions
            raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error
        if not isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(
                f"{path} is not a byte-level tokenizer (its decoder is "
                f"{type(self._tokenizer.decoder).__name__}); only byte-level ones are supported"
            )
        # The file may ask to truncate or pad texts. Here the ids are always those of the text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not special_tokens
        byte_of = _byte_of_letter()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        self._bytes = {token: _to_bytes(piece, byte_of) for piece, token in vocabulary.items()}
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            self._bytes[token] = b"" if added.special else _to_bytes(added.content, byte_of)
        self.vocab_size = max(self._bytes, default=-1) + 1
        self.cuts_after_words = _cuts_after_words(self._tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of everything that decides a text's ids, however the file is formatted."""
        written = json.loads(self._tokenizer.to_str())
        deciding = ("model", "normalizer", "pre_tokenizer", "added_tokens")
        content = json.dumps({name: written[name] for name in deciding}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for several texts, in 3/4 of the time: it does not compute character offsets."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def token_bytes(self, token: int) -> bytes:
        # Some ids have no text, because the model's vocabulary is padded to 50304.
        return self._bytes.get(token, b"")


def _cuts_after_words(backend: Any) -> bool:
    """True for GPT-2's pre-tokenizer, which always splits between a letter and white space.

    False if anything looks across that position: a space added in front, another normalizer than
    NFC, or added tokens that contain spaces or strip them.
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
    """Byte-level vocabularies write each byte as one printable letter (GPT-2's alphabet).

    Bytes that are printable in Latin-1 stand for themselves. The other 68 are U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + i): byte for i, byte in enumerate(others)},
    }


def _to_bytes(piece: str, byte_of: dict[str, int]) -> bytes:
    """The bytes of a token. Tokens outside the alphabet are plain text, such as runs of spaces."""
    if all(letter in byte_of for letter in piece):
        return bytes(byte_of[letter] for letter in piece)
    return piece.encode()


class StreamDecoder:
    """Decodes ids one by one. The text never changes later and never has half a character.

    The results of all pushes and the flush, joined, are `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The new text after this id; empty while a character is incomplete."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character. Then a new text may start."""
        return self._utf8.decode(b"", final=True)


class CachingEncoder:
    """`encode` that tokenizes the common start of several texts only once.

    A text is cut at the first end of a word after every `segment_length` characters, so texts with
    the same start have the same first segments. The ids of the last 1024 segments are kept. A
    segment of more than twice that length (a text without words) is not kept, so the cache stays
    below about 70 MB.
    """

    def __init__(self, tokenizer: Tokenizer, segment_length: int = 2048) -> None:
        self._tokenizer = tokenizer
        self._segment_length = segment_length
        self._cached = lru_cache(1024)(lambda segment: array("i", tokenizer.encode(segment)))

    def encode(self, text: str) -> list[int]:
        ids, start = array("i"), 0
        if self._tokenizer.cuts_after_words:
            while cut := _WORD_END.search(text, start + self._segment_length):
                segment, start = text[start : cut.start()], cut.start()
                is_long = len(segment) > 2 * self._segment_length
                ids.extend(self._tokenizer.encode(segment) if is_long else self._cached(segment))
        return [*ids, *self._tokenizer.encode(text[start:])]
