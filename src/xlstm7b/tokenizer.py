"""Text to token ids and back: `tokenizer.json` files, byte-level ids, and decoding of streams."""

import codecs
import hashlib
import json
import re
import shutil
from array import array
from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from xlstm7b import hub
from xlstm7b.config import ModelConfig

_BYTE_VOCABULARY = 320  # 0 end of text, 1 padding, 256 bytes, the rest unused (a multiple of 64)
_FIRST_BYTE = 2
_LONG_TEXT = 4096  # characters. Such a text is encoded as a batch, which lets other threads run
_WORD_END = re.compile(r"(?<=[A-Za-z])[ \t\r\n]")
_SENTENCEPIECE_STEPS = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}  # of decoders
_TRAINED_WITH = "fingerprint"  # in the tokenizer_config.json of an export
# The names of special tokens, for a tokenizer.json that comes without a tokenizer_config.json.
_USUAL_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>"),
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    "pad": ("<|padding|>", "<pad>", "<|pad|>"),
}


class SpecialIds(NamedTuple):
    """The special ids that a tokenizer names; None where it has none."""

    bos: int | None  # the first token of a text
    eos: int | None  # the end of text, which follows every document in training data
    pad: int | None


class Tokenizer(Protocol):
    """Adds no special tokens: `with_first_token` puts the model's first token before a prompt."""

    vocab_size: int
    cuts_after_words: bool
    """True if text can be cut between an ASCII letter and white space without changing the ids."""
    prefix: bytes = b""
    """What `encode` puts before a text and `decode` removes: in SentencePiece's style, a space."""

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """The ids of a text. With `continues` it follows other text: no prefix is put before it."""

    def decode(self, ids: Sequence[int], *, continues: bool = False) -> str:
        """The text of these ids. Special ids have no text; invalid UTF-8 becomes U+FFFD."""
        text = b"".join(map(self.token_bytes, ids))
        return (text if continues else text.removeprefix(self.prefix)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of one id. They may start or end inside a character."""


AnyTokenizer: TypeAlias = "ByteTokenizer | FileTokenizer"


def open_tokenizer(tokenizer: str | Path, *, special_tokens: bool = True) -> AnyTokenizer:
    """The tokenizer of a `tokenizer.json`, its folder or a hub id, or "bytes".

    For `special_tokens`, see `FileTokenizer`.
    """
    file = tokenizer_file(tokenizer)
    if file is None:
        return ByteTokenizer()
    loaded = FileTokenizer(file, special_tokens=special_tokens)
    # An export of a byte-level model has a file for other programs. Here its ids are bytes.
    is_bytes = loaded.vocab_size == _byte_file()[0] and loaded.fingerprint == _byte_file()[1]
    return ByteTokenizer() if is_bytes else loaded


def load_tokenizer(
    path: str | Path | None,
    vocab_size: int,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
) -> AnyTokenizer:
    """The tokenizer for a model with this vocabulary: a `tokenizer.json`, its folder or a hub id.

    A folder without the file is that of a byte-level model, if the model has 320 ids. `revision`
    and `subfolder` are those of a hub id; a local folder may have a `subfolder` too.
    """
    if path is not None and (revision or subfolder):
        path = hub.locate(path, hub.TOKENIZER_FILES, revision=revision, subfolder=subfolder)
    if path is None or (Path(path).is_dir() and not (Path(path) / "tokenizer.json").exists()):
        if vocab_size == _BYTE_VOCABULARY:
            return ByteTokenizer()
        raise ValueError(
            f"{path or 'this model'} has no tokenizer.json, which a vocabulary of {vocab_size} "
            f"needs (only a vocabulary of {_BYTE_VOCABULARY}, bytes, works without a file)"
        )
    tokenizer = open_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{tokenizer_file(path)} has ids up to {tokenizer.vocab_size - 1}, "
            f"but the model's vocabulary ends at {vocab_size - 1}"
        )
    return tokenizer


def model_tokenizer(
    folder: Path, config: ModelConfig, chosen: str | Path | None = None
) -> AnyTokenizer:
    """The tokenizer of a checkpoint folder, or another one that was chosen for it.

    `ValueError` if an export says that the model was trained with another one, or other ids.
    """
    described = read_object(folder / "tokenizer_config.json")
    trained = described.get(_TRAINED_WITH)
    if trained and not chosen and not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} was trained with the tokenizer {str(trained)[:12]}, but holds no "
            "tokenizer.json: give it with --tokenizer"
        )
    if chosen is not None and Path(chosen).is_dir() and not any(Path(chosen).glob("config.*")):
        tokenizer_file(chosen)  # only the folder of a byte-level model may lack a tokenizer.json
    tokenizer = load_tokenizer(chosen or folder, config.vocab_size)
    check_trained(folder, tokenizer, config, chosen or folder)
    return tokenizer


def check_trained(
    folder: Path, tokenizer: AnyTokenizer, config: ModelConfig, source: str | Path
) -> None:
    """`ValueError` if the export in `folder` was trained with another tokenizer, or other ids.

    `source` is where the tokenizer is. A folder that is no export has no fingerprint to check.
    """
    described = read_object(folder / "tokenizer_config.json")
    trained = described.get(_TRAINED_WITH)
    if not trained:
        return
    if trained != tokenizer.fingerprint:
        raise ValueError(
            f"{folder} was trained with the tokenizer {str(trained)[:12]}, but {source} "
            f"holds the tokenizer {tokenizer.fingerprint[:12]}"
        )
    for name in ("bos", "eos"):
        text, token = (
            token_text(described.get(f"{name}_token")),
            getattr(config, f"{name}_token_id"),
        )
        if text is None:
            continue
        found = tokenizer.backend().token_to_id(text)
        if found is None:
            raise ValueError(
                f"{folder / 'tokenizer_config.json'} names {name}_token {text!r}, which the "
                f"tokenizer in {source} lacks"
            )
        if found != token:
            raise ValueError(
                f"{folder} was trained with {name}_token {text!r}, whose id is {found}, but the "
                f"model's config.json says {name}_token_id = {token}"
            )


def other_end(folder: Path, tokenizer: AnyTokenizer, config: ModelConfig) -> int | None:
    """The id of the `eos_token` that an adapter's folder names, if it is not the model's own.

    None if the folder names none, or one that the model cannot generate. The ids are those of the
    folder's own tokenizer.json, or of `tokenizer` if it has none. An id that is another token of
    `tokenizer`, the model's, does not count.
    """
    text = token_text(_described(folder).get("eos_token"))
    if text is None:
        return None
    file = folder / "tokenizer.json"
    own = FileTokenizer(file) if file.is_file() else tokenizer
    found: int | None = own.backend().token_to_id(text)
    if found is None or found == config.eos_token_id or found >= config.vocab_size:
        return None
    return found if tokenizer.backend().id_to_token(found) in (None, text) else None


def tokenizer_file(tokenizer: str | Path) -> Path | None:
    """The path of a tokenizer.json, given the file, its folder or a hub id. None for "bytes"."""
    name, path = str(tokenizer), Path(tokenizer)
    if name == "bytes":
        return None
    if not name:  # else it would be the current folder
        raise ValueError("a tokenizer is needed, and the one given is empty")
    if not path.exists() and hub.parse(name) and not name.endswith(".json"):
        path = hub.locate(name, hub.TOKENIZER_FILES)
    if path.is_dir() and not (path / "tokenizer.json").exists() and any(path.glob("*.model")):
        raise ValueError(
            f"{path} holds no tokenizer.json; save_pretrained of transformers' AutoTokenizer "
            "writes one from the other files"
        )
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no tokenizer at {file}")
    return file


def copy_tokenizer(tokenizer: str | Path, folder: Path) -> None:
    """Copies a tokenizer.json and the files that describe it into a folder; nothing for bytes."""
    file = tokenizer_file(tokenizer)
    if file is None:
        return
    shutil.copyfile(file, folder / "tokenizer.json")
    if file.name == "tokenizer.json":
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            if file.with_name(name).is_file():
                shutil.copyfile(file.with_name(name), folder / name)


def tokenizer_fingerprint(tokenizer: str | Path) -> str:
    """A hash of everything that decides a text's ids; "bytes" for bytes."""
    return open_tokenizer(tokenizer).fingerprint


def with_first_token(config: ModelConfig, prompt: Sequence[int]) -> list[int]:
    """The prompt with the model's first token, if it was trained with one and the prompt lacks it.

    That is `bos_token_id` of the config, unless `force_bos_token_insert` is false.
    """
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
    fingerprint = "bytes"
    special = SpecialIds(bos=0, eos=0, pad=1)

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        return [byte + _FIRST_BYTE for byte in text.encode()]

    def encode_batch(
        self, texts: Sequence[str], continues: Sequence[bool] | None = None
    ) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_offsets(
        self, text: str, *, continues: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, and for each token the first of its characters in the text, and their end."""
        offsets = [(n, n + 1) for n, letter in enumerate(text) for _ in letter.encode()]
        return self.encode(text), offsets

    def token_bytes(self, token: int) -> bytes:
        byte = token - _FIRST_BYTE
        return bytes([byte]) if 0 <= byte < 256 else b""

    def backend(self) -> Any:
        """The same tokenizer for the `tokenizers` library: a BPE without merges.

        It differs in one point: a special token that is written out in a text, such as
        "<|endoftext|>", becomes its id, as in every `tokenizer.json`.
        """
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        specials = ["<|endoftext|>", "<|padding|>"]
        letters = {letter: byte + _FIRST_BYTE for letter, byte in _byte_of_letter().items()}
        vocabulary = {**{text: token for token, text in enumerate(specials)}, **letters}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.add_special_tokens(specials)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return backend


class FileTokenizer(Tokenizer):
    """A `tokenizer.json`, read by the library `tokenizers`.

    Byte-level ones (GPT-2, GPT-NeoX, Llama 3, Qwen, …) and SentencePiece's style (Llama 2, Gemma,
    …) are supported. There the text of a token does not depend on the tokens around it, except for
    the space that SentencePiece puts before a text (`prefix`). Without `special_tokens`,
    "<|endoftext|>" and the like in a text are encoded as ordinary text.
    """

    def __init__(self, path: Path, *, special_tokens: bool = True) -> None:
        import tokenizers

        self.path = path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain exceptions
            raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error
        # The file may ask to truncate or pad texts. Here the ids are always those of the text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not special_tokens
        try:
            to_bytes, self.prefix = _decoding(json.loads(self._tokenizer.to_str())["decoder"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        self._bytes = {token: to_bytes(piece) for piece, token in vocabulary.items()}
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            self._bytes[token] = b"" if added.special else to_bytes(added.content)
        self.vocab_size = max(self._bytes, default=-1) + 1
        self.cuts_after_words = _cuts_after_words(self._tokenizer)
        self._variants: dict[tuple[bool, bool], Any] = {(False, False): self._tokenizer}

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of everything that decides a text's ids, however the file is formatted."""
        return _fingerprint(self._tokenizer)

    @cached_property
    def special(self) -> SpecialIds:
        """The special ids, as the files beside the tokenizer.json name them.

        Without such files they are found by their usual names, and a tokenizer without a first
        token of its own has its end of text as one, as GPT-2 does.
        """
        named = _described(self.path.parent) if self.path.name == "tokenizer.json" else {}
        found = {kind: token_text(named.get(f"{kind}_token")) for kind in _USUAL_NAMES}
        if not found["bos"] and not found["eos"]:
            added = self._tokenizer.get_added_tokens_decoder().values()
            specials = {token.content for token in added if token.special}
            for kind, names in _USUAL_NAMES.items():
                found[kind] = next((name for name in names if name in specials), None)
            found["bos"] = found["bos"] or found["eos"]
        ids = {}
        for kind, text in found.items():
            ids[kind] = None if text is None else self._tokenizer.token_to_id(text)
            if text is not None and ids[kind] is None:
                raise ValueError(
                    f"{self.path.parent} names {kind}_token {text!r}, which {self.path.name} lacks"
                )
        return SpecialIds(**ids)

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        ids: list[int] = []
        for backend, _, part in self._parts(text, continues):
            if len(part) > _LONG_TEXT:
                (encoding,) = backend.encode_batch_fast([part], add_special_tokens=False)
            else:
                encoding = backend.encode(part, add_special_tokens=False)
            ids += encoding.ids
        return ids

    def _parts(
        self, text: str, continues: bool, *, has_offsets: bool = False
    ) -> list[tuple[Any, int, str]]:
        """The parts of a text: the tokenizer for each, its first character, and itself.

        A text that continues another has no space before it. But SentencePiece's space also comes
        after each special token, in every text: there the second part starts.
        """
        usual = self._variant(False, has_offsets=has_offsets)
        if not continues or self._variant(True) is self._tokenizer:
            return [(usual, 0, text)]
        found = self._added_token.search(text)
        cut = found.start() if found else len(text)
        first = self._variant(True, has_offsets=has_offsets)
        return [(first, 0, text[:cut]), (usual, cut, text[cut:])]

    @cached_property
    def _added_token(self) -> re.Pattern[str]:
        """The tokens that are found in a text before it is split."""
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        keeps_special = self._tokenizer.encode_special_tokens  # as ordinary text
        found = [token.content for token in tokens if not (token.special and keeps_special)]
        return re.compile("|".join(map(re.escape, found)) or r"(?!)")

    def encode_batch(
        self, texts: Sequence[str], continues: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """`encode` for several texts, in 3/4 of the time: it does not compute character offsets.

        `continues` says of each text whether it continues the one before it.
        """
        if continues is None or self._variant(True) is self._tokenizer:
            continues = [False] * len(texts)
        usual = [text for text, each in zip(texts, continues, strict=True) if not each]
        found = iter(self._tokenizer.encode_batch_fast(usual, add_special_tokens=False))
        return [
            self.encode(text, continues=True) if each else list(next(found).ids)
            for text, each in zip(texts, continues, strict=True)
        ]

    def encode_offsets(
        self, text: str, *, continues: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, and for each token the first of its characters in the text, and their end."""
        ids, offsets = list[int](), list[tuple[int, int]]()
        for backend, start, part in self._parts(text, continues, has_offsets=True):
            encoding = backend.encode(part, add_special_tokens=False)
            ids += encoding.ids
            offsets += [(start + first, start + end) for first, end in encoding.offsets]
        return ids, offsets

    def _variant(self, continues: bool, *, has_offsets: bool = False) -> Any:
        """The tokenizer for texts that continue others: it puts no space before a text.

        Or the one whose offsets are those of whole tokens: a post-processor may cut spaces off.
        """
        key = continues, has_offsets
        if key not in self._variants:
            written = json.loads(self._tokenizer.to_str())
            changed = dict(written)
            if continues:
                for part in ("normalizer", "pre_tokenizer"):
                    changed[part] = _without_prefix(written[part])
            if has_offsets:
                changed["post_processor"] = None
            backend = self._tokenizer
            if changed != written:
                backend = type(backend).from_str(json.dumps(changed))
                backend.encode_special_tokens = self._tokenizer.encode_special_tokens
            self._variants[key] = backend
        return self._variants[key]

    def token_bytes(self, token: int) -> bytes:
        # Some ids have no text, because the model's vocabulary is padded to 50304.
        return self._bytes.get(token, b"")

    def backend(self) -> Any:
        """The tokenizer of the `tokenizers` library."""
        return self._tokenizer


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer without what puts a space before a text; None if it is that."""
    match (part or {}).get("type"):
        case "Sequence":
            kinds = "normalizers" if "normalizers" in part else "pretokenizers"
            kept = [kept for inner in part[kinds] if (kept := _without_prefix(inner)) is not None]
            return {**part, kinds: kept}
        case "Prepend":
            return None
        case "Metaspace":
            return {**part, "prepend_scheme": "never"}
        case "ByteLevel":
            return {**part, "add_prefix_space": False}
    return part


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def _described(folder: Path) -> dict[str, Any]:
    """What the files beside a tokenizer.json say about it."""
    return {
        **read_object(folder / "special_tokens_map.json"),
        **read_object(folder / "tokenizer_config.json"),
    }


def token_text(token: Any) -> str | None:
    """The text of a special token in a `tokenizer_config.json`, where it may be an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _fingerprint(backend: Any) -> str:
    written = json.loads(backend.to_str())
    deciding = ("model", "normalizer", "pre_tokenizer", "added_tokens")
    content = json.dumps({name: written[name] for name in deciding}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


@cache
def _byte_file() -> tuple[int, str]:
    """Number of ids and fingerprint of the `tokenizer.json` that stands for bytes."""
    backend = ByteTokenizer().backend()
    return backend.get_vocab_size(), _fingerprint(backend)


def write_tokenizer(
    folder: Path, tokenizer: AnyTokenizer, config: ModelConfig, chat_template: str
) -> list[Path]:
    """Writes the tokenizer of a model with this config, and its chat template.

    `transformers` then has the ids of this package: the model's first token and the text's. The
    tokenizer's fingerprint is written too: `model_tokenizer` checks it. The template is written to
    `tokenizer_config.json`, which all programs read, and to `chat_template.jinja`, which comes
    first in `transformers`.
    """
    backend = tokenizer.backend()
    written = json.loads(backend.to_str())
    # `transformers` takes the first token from this part of the file, not from add_bos_token.
    parts = written["post_processor"] or {}
    parts = parts["processors"] if parts.get("type") == "Sequence" else [parts]
    parts = [part for part in parts if part.get("type") == "ByteLevel"]
    has_first, first = config.force_bos_token_insert, config.bos_token_id
    # `transformers` removes the padding from decoded text, so it must not be a token of text.
    added = backend.get_added_tokens_decoder().get(config.pad_token_id)
    padding = config.pad_token_id if added is not None and added.special else config.eos_token_id
    if has_first:
        parts.append(_first_token_processor(backend, first))
    written["post_processor"] = {"type": "Sequence", "processors": parts} if parts else None
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": backend.id_to_token(first) if has_first else None,
        "eos_token": backend.id_to_token(config.eos_token_id),
        "pad_token": backend.id_to_token(padding),
        "add_bos_token": has_first,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
        _TRAINED_WITH: tokenizer.fingerprint,
    }
    files = {"tokenizer.json": written, "tokenizer_config.json": described}
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    return [*(folder / name for name in files), write_chat_template(folder, chat_template)]


def write_chat_template(folder: Path, source: str) -> Path:
    path = folder / "chat_template.jinja"
    path.write_text(source, encoding="utf-8")
    return path


def write_fingerprint(folder: Path, fingerprint: str) -> Path:
    """Writes a `tokenizer_config.json` for an export whose tokenizer was not found."""
    described = {"tokenizer_class": "PreTrainedTokenizerFast", _TRAINED_WITH: fingerprint}
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    return folder / "tokenizer_config.json"


def _first_token_processor(backend: Any, token: int) -> dict[str, Any]:
    """The part of a `tokenizer.json` that puts a token before a text, and before two texts."""
    name = backend.id_to_token(token)
    if name is None:
        raise ValueError(f"bos_token_id is {token}, but the tokenizer has no such id")
    first: dict[str, Any] = {"SpecialToken": {"id": name, "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, a],
        "pair": [first, a, b],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }


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


def _decoding(decoder: Any) -> tuple[Callable[[str], bytes], bytes]:
    """How the decoder of a `tokenizer.json` turns a piece into bytes, and the prefix it removes."""
    steps = [decoder] if decoder else []
    while any(step["type"] == "Sequence" for step in steps):
        steps = [part for step in steps for part in step.get("decoders", [step])]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        byte_of = _byte_of_letter()

        def from_letters(piece: str) -> bytes:
            if all(letter in byte_of for letter in piece):
                return bytes(byte_of[letter] for letter in piece)
            return piece.encode()  # outside the alphabet: plain text, such as a run of spaces

        return from_letters, b""
    has_regex = any("Regex" in step.get("pattern", {}) for step in steps)
    if not {"Metaspace", "Replace"} & {*kinds} or {*kinds} - _SENTENCEPIECE_STEPS or has_regex:
        raise ValueError(
            "only byte-level tokenizers and those in SentencePiece's style are supported, but its "
            f"decoder is {' + '.join(kinds) or None}"
        )
    replaced, strips = {}, False
    for step in steps:
        match step["type"]:
            case "Metaspace":
                replaced[step["replacement"]] = " "
                strips |= step["prepend_scheme"] != "never"
            case "Replace":
                replaced[step["pattern"]["String"]] = step["content"]
            case "Strip":
                strips |= step["start"] > 0

    def to_bytes(piece: str) -> bytes:
        if "ByteFallback" in kinds and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        for old, new in replaced.items():
            piece = piece.replace(old, new)
        return piece.encode()

    return to_bytes, b" " if strips else b""


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


class StreamDecoder:
    """Decodes ids one by one. The text never changes later and never has half a character.

    The results of all pushes and the flush, joined, are `decode` of all ids as text that continues
    other text.
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

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        ids, start = array("i"), 0
        if self._tokenizer.cuts_after_words:  # then there is no prefix
            while cut := _WORD_END.search(text, start + self._segment_length):
                segment, start = text[start : cut.start()], cut.start()
                is_long = len(segment) > 2 * self._segment_length
                ids.extend(self._tokenizer.encode(segment) if is_long else self._cached(segment))
        return [*ids, *self._tokenizer.encode(text[start:], continues=continues)]
