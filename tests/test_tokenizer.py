"""Tokenizers: bytes, small ones of every kind, and GPT-NeoX's if its file is available."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import KINDS
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from xlstm7b.config import ModelConfig
from xlstm7b.hub import TOKENIZER_FILES, HubName
from xlstm7b.tokenizer import (
    ByteTokenizer,
    CachingEncoder,
    FileTokenizer,
    StreamDecoder,
    Tokenizer,
    check_tokens,
    load_tokenizer,
    open_tokenizer,
    tokenizer_file,
    tokenizer_fingerprint,
    with_first_token,
)

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog lets it.",
    "  Leading spaces,\ttabs\nand new lines.   ",
    "Grüße aus Linz: naïve façade, Übermut, 日本語のテキスト, 한국어, עברית.",
    "👩‍👩‍👧‍👦 family, 🇦🇹 flag, 👍🏽 thumb, 🦊🦊🦊 foxes",
]
NEOX = os.environ.get("XLSTM7B_NEOX_TOKENIZER")


def small_backend() -> Backend:
    """Byte-level BPE like GPT-NeoX: special tokens first, runs of spaces added at the end."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens([AddedToken("    "), AddedToken("  "), AddedToken("→")])
    return backend


BACKEND = small_backend()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    BACKEND.save(str(file))
    return file


@pytest.fixture(scope="module")
def small(path: Path) -> FileTokenizer:
    return FileTokenizer(path)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*map(decoder.push, ids), decoder.flush()]


def check_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    whole = tokenizer.decode(ids, continues=True)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == whole
    # Before the flush, at most one incomplete character is held back. Python's decoder also holds
    # back the first two bytes of a surrogate, which is invalid UTF-8: they become two U+FFFD.
    surrogate = re.search(rb"\xed[\xa0-\xbf]\Z", b"".join(map(tokenizer.token_bytes, ids)))
    assert len(pieces[-1]) <= (2 if surrogate else 1)
    assert set(pieces[-1]) <= {"\ufffd"}


# Bytes


def test_ids_of_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 320
    assert tokenizer.encode("A\x00é") == [67, 2, 197, 171]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([0, 67, 1, 258, 319, 68, 0, -1]) == "AB"
    assert tokenizer.decode([67, 197]) == "A\ufffd"


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert all(2 <= token < 258 for token in ids)
    assert tokenizer.decode(ids) == text
    assert "".join(stream(tokenizer, ids)) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 319) | st.sampled_from([0xE2 + 2, 0xED + 2, 0xF0 + 2, 0x9F + 2])))
def test_streamed_bytes_equal_decode(ids: list[int]) -> None:
    check_stream(ByteTokenizer(), ids)


# A tokenizer.json


def test_special_ids_have_no_text(small: FileTokenizer) -> None:
    assert small.token_bytes(0) == small.token_bytes(1) == b""
    assert small.encode("<|endoftext|>a<|padding|>")[::2] == [0, 1]
    assert small.vocab_size == BACKEND.get_vocab_size()
    assert small.decode([0, *small.encode("fox"), 1, 10_000]) == "fox"


@settings(deadline=None)
@given(text=st.text() | st.sampled_from(LINES) | st.text(alphabet=" →🦊é<|>"))
def test_file_round_trip(small: FileTokenizer, text: str) -> None:
    ids = small.encode(text)
    assert small.decode(ids) == "".join(stream(small, ids)) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 420)))
def test_a_file_decodes_as_its_library_does(small: FileTokenizer, ids: list[int]) -> None:
    assert small.decode(ids) == BACKEND.decode(ids, skip_special_tokens=True)
    check_stream(small, ids)


# Every kind of tokenizer


class Kind(NamedTuple):
    folder: Path
    ours: FileTokenizer
    theirs: Backend


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    folder = KINDS[request.param](tmp_path_factory.mktemp("kinds") / request.param)
    ours = FileTokenizer(folder / "tokenizer.json")
    return Kind(folder, ours, Backend.from_file(str(folder / "tokenizer.json")))


# Unigram's pre-tokenizer puts no space before a text that has one, so there it would be lost.
# Without special tokens that are written out, such as <s>: their ids have no text.
plain = (st.text() | st.sampled_from(LINES)).filter(lambda text: not re.search(r"<\S+>", text))
texts = plain.filter(lambda text: not text.startswith((" ", "▁")))


@settings(deadline=None)
@given(text=texts.map(lambda text: normalize("NFC", text.replace("▁", "_"))))
def test_every_kind_has_the_ids_and_the_text_of_its_library(kind: Kind, text: str) -> None:
    ids = kind.ours.encode(text)
    assert ids == kind.theirs.encode(text, add_special_tokens=False).ids
    assert kind.ours.encode_batch([text, text], [False, True])[0] == ids
    assert kind.ours.decode(ids) == kind.theirs.decode(ids) == text
    check_stream(kind.ours, ids)


@settings(deadline=None)
@given(first=texts, second=plain)
def test_a_text_that_continues_another_has_no_space_before_it(
    kind: Kind, first: str, second: str
) -> None:
    first, second = (normalize("NFC", text.replace("▁", "_")) for text in (first, second))
    ids = kind.ours.encode(second, continues=True)
    assert kind.ours.encode_batch([second, first], [True, False])[0] == ids
    assert kind.ours.decode(ids, continues=True) == second
    assert "".join(stream(kind.ours, ids)) == second
    assert kind.ours.decode([*kind.ours.encode(first), *ids]) == (
        first + second if first else kind.ours.decode(ids)
    )


@pytest.mark.parametrize("continues", [False, True])
def test_a_special_token_has_the_same_text_after_it_in_every_way_of_encoding(
    kind: Kind, continues: bool
) -> None:
    end = kind.ours.backend().id_to_token(kind.ours.special.eos)
    text = f"{LINES[0]}{end}{LINES[1]}"
    ids = kind.ours.encode(text, continues=continues)
    assert kind.ours.encode_batch([text, text], [continues, False])[0] == ids
    found, offsets = kind.ours.encode_offsets(text, continues=continues)
    assert found == ids
    at = ids.index(kind.ours.special.eos)
    assert offsets[at] == (len(LINES[0]), len(LINES[0]) + len(end))
    assert offsets[-1][1] == len(text)
    whole = kind.ours.encode(f"{LINES[2]}{text}")
    assert ids[at:] == whole[whole.index(kind.ours.special.eos) :]


def test_special_ids_of_every_kind(kind: Kind) -> None:
    last = kind.ours.vocab_size - 1
    want = {
        "gpt2": (last, last, None),
        "llama3": (last - 1, last, None),
        "qwen": (None, last - 2, last - 2),
        "sentencepiece": (1, 2, None),
        "unigram": (1, 2, None),
    }
    assert kind.ours.special == want[kind.folder.name]
    assert all(not kind.ours.token_bytes(token) for token in kind.ours.special if token is not None)


def test_special_ids_of_a_bare_file(kind: Kind, tmp_path: Path) -> None:
    """They are found by their usual names. Without a first token, the end of text is one."""
    file = shutil.copyfile(kind.folder / "tokenizer.json", tmp_path / "tokenizer.json")
    bos, eos, _ = FileTokenizer(file).special
    assert eos == kind.ours.special.eos
    assert bos == (eos if kind.folder.name == "qwen" else kind.ours.special.bos)


def test_a_special_token_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    folder = KINDS["gpt2"](tmp_path / "gpt2")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(ValueError, match=f"^{folder} names eos_token '<end>', which tokenizer"):
        _ = FileTokenizer(folder / "tokenizer.json").special


def test_hub_ids_are_downloaded_without_weights(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: HubName, patterns: Sequence[str]) -> Path:
        asked.append((str(name), patterns))
        return kind.folder

    monkeypatch.setattr("xlstm7b.hub.download", download)
    for name in ("someone/a-model", "someone/a-model@v1/sub"):
        assert open_tokenizer(name).fingerprint == kind.ours.fingerprint
        assert asked.pop() == (name, TOKENIZER_FILES)
    size = kind.ours.vocab_size
    loaded = load_tokenizer("someone/a-model", size, revision="v1", subfolder="sub")
    assert loaded.fingerprint == kind.ours.fingerprint
    assert asked == [("someone/a-model@v1/sub", TOKENIZER_FILES)]
    with pytest.raises(ValueError, match=r"^there is no tokenizer at data/tokenizer\.json$"):
        open_tokenizer("data/tokenizer.json")
    assert len(asked) == 1


def test_a_folder_with_only_a_sentencepiece_model_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ValueError, match=rf"^{tmp_path} holds no tokenizer\.json; save_pretrained"):
        open_tokenizer(tmp_path)


def test_leading_spaces_are_kept(small: FileTokenizer) -> None:
    for text in (" the dog", "the dog", "  the", "     x", " "):
        assert "".join(stream(small, small.encode(text))) == text


def test_special_ids_do_not_break_a_character(small: FileTokenizer) -> None:
    token_of = {small.token_bytes(token): token for token in range(2, small.vocab_size)}
    letters = [token_of[bytes([byte])] for byte in "a🦊".encode()]
    ids = [token for letter in letters for token in (0, letter, 1)]
    assert small.decode(ids) == "a🦊"
    assert [piece for piece in stream(small, ids) if piece] == ["a", "🦊"]


def test_a_character_is_streamed_when_it_is_complete() -> None:
    tokenizer = ByteTokenizer()
    assert stream(tokenizer, tokenizer.encode("🦊é!")) == ["", "", "", "🦊", "", "é", "!", ""]
    # An incomplete character becomes U+FFFD when the next id cannot complete it, or at the end.
    assert stream(tokenizer, [0xE2 + 2, 67, 0xF0 + 2]) == ["", "\ufffdA", "", "\ufffd"]


def test_a_stream_starts_again_after_a_flush() -> None:
    decoder = StreamDecoder(ByteTokenizer())
    assert decoder.push(0xE2 + 2) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(0x82 + 2) == "\ufffd"
    assert decoder.flush() == ""


def test_a_push_decodes_one_token() -> None:
    class Counting(ByteTokenizer):
        seen = 0

        def token_bytes(self, token: int) -> bytes:
            self.seen += 1
            return super().token_bytes(token)

    tokenizer = Counting()
    stream(tokenizer, [0xE2 + 2] * 1000)
    assert tokenizer.seen == 1000


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    backend = small_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert (
        FileTokenizer(tmp_path / "tokenizer.json").encode(LINES[0]) == BACKEND.encode(LINES[0]).ids
    )


# Loading


def test_a_tokenizer_loads_from_file_and_folder(path: Path) -> None:
    for place in (path, str(path), path.parent, str(path.parent)):
        assert load_tokenizer(place, 50304).encode("fox") == BACKEND.encode("fox").ids


def test_without_a_file_only_the_byte_vocabulary_works(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(None, 320), ByteTokenizer)
    assert isinstance(load_tokenizer(tmp_path, 320), ByteTokenizer)
    with pytest.raises(
        ValueError, match=f"{tmp_path} has no tokenizer.json, which a vocabulary of"
    ):
        load_tokenizer(tmp_path, 50304)
    with pytest.raises(ValueError, match=r"this model has no tokenizer\.json"):
        load_tokenizer(None, 50304)
    with pytest.raises(ValueError, match=r"there is no tokenizer at .*absent"):
        load_tokenizer(tmp_path / "absent", 320)


def test_a_tokenizer_larger_than_the_model_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json has ids up to \d+, but .* ends at 319"):
        load_tokenizer(path.parent, 320)
    assert load_tokenizer(path, BACKEND.get_vocab_size()).vocab_size == BACKEND.get_vocab_size()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"{}", b"[1]", b'{"model": 3}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer\.json: "):
        load_tokenizer(file, 50304)


def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    for decoder, named in (
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Fuse(), decoders.CTC()]), r"Fuse \+ CTC"),
        (decoders.Replace(Regex("_"), " "), "Replace"),
        (None, "None"),
    ):
        backend = Backend(models.BPE())
        if decoder is not None:
            backend.decoder = decoder
        backend.save(str(file))
        sentence = "only byte-level tokenizers and those in SentencePiece's style are supported"
        with pytest.raises(ValueError, match=f"^{file}: {sentence}, but its decoder is {named}$"):
            load_tokenizer(file, 50304)


@pytest.mark.skipif(
    NEOX is None, reason="XLSTM7B_NEOX_TOKENIZER does not point to GPT-NeoX-20B's tokenizer.json"
)
def test_gpt_neox_text_round_trips() -> None:
    """It normalises text to NFC."""
    assert NEOX is not None
    tokenizer = load_tokenizer(NEOX, 50304)
    assert tokenizer.encode("<|endoftext|>") == [0]
    assert tokenizer.encode("!") == [2]
    symbols = "".join(map(chr, range(0x2000, 0x3000)))
    for text in (*LINES, "        def f(x):\n\treturn x", normalize("NFC", symbols)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode([0, *ids]) == text
        check_stream(tokenizer, ids)
    backend = Backend.from_file(NEOX)
    for start in range(0, 50304, 100):
        ids = list(range(start, start + 100))
        assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)
        check_stream(tokenizer, ids)


def test_the_file_and_the_fingerprint_of_a_tokenizer(path: Path, tmp_path: Path) -> None:
    assert tokenizer_file("bytes") is None
    assert tokenizer_fingerprint("bytes") == "bytes"
    assert tokenizer_file(path) == tokenizer_file(path.parent) == path
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(json.loads(path.read_text()), indent=7))  # formatted differently
    assert tokenizer_fingerprint(other) == tokenizer_fingerprint(path)
    changed = small_backend()
    changed.add_tokens([AddedToken("=>")])
    changed.save(str(other))
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(path)
    with pytest.raises(ValueError, match=rf"^there is no tokenizer at {tmp_path / 'none'}$"):
        tokenizer_file(tmp_path / "none")
    with pytest.raises(ValueError, match="a tokenizer is needed, and the one given is empty"):
        tokenizer_file("")


# Prompts


def test_the_first_token_is_added_once() -> None:
    config = ModelConfig(64, 1, 2, vocab_size=320)
    assert with_first_token(config, [5, 6]) == with_first_token(config, [0, 5, 6]) == [0, 5, 6]
    assert with_first_token(config, []) == [0]
    without = replace(config, force_bos_token_insert=False)
    assert with_first_token(without, [5, 6]) == [5, 6]
    with pytest.raises(ValueError, match=r"^the prompt is empty, and this model has"):
        with_first_token(without, [])


def test_ids_outside_the_vocabulary_are_refused() -> None:
    config = ModelConfig(64, 1, 2, vocab_size=320)
    check_tokens(config, [])
    check_tokens(config, [0, 319])
    for bad in (320, -1):
        with pytest.raises(ValueError, match=f"^token {bad} is outside the vocabulary of 320$"):
            check_tokens(config, [0, bad, 999])


# Texts with a common start


@pytest.fixture(scope="module")
def all_kinds(small: FileTokenizer) -> list[Tokenizer]:
    return [ByteTokenizer(), small, *([FileTokenizer(Path(NEOX))] if NEOX else [])]


@given(st.lists(st.text("aBé\u0301 \n\r\t.'s0→日") | st.sampled_from(LINES), max_size=12))
def test_text_in_segments_has_the_same_ids(all_kinds: list[Tokenizer], parts: list[str]) -> None:
    text = "".join(parts)
    for tokenizer in all_kinds:
        assert tokenizer.cuts_after_words
        encoder = CachingEncoder(tokenizer, segment_length=5)
        for _ in range(2):
            assert encoder.encode(text) == tokenizer.encode(text)


@pytest.fixture
def encoded(small: FileTokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the small tokenizer was asked to encode."""
    texts = []

    def encode(text: str, *, continues: bool = False) -> list[int]:
        texts.append(text)
        return list(BACKEND.encode(text, add_special_tokens=False).ids)

    monkeypatch.setattr(small, "encode", encode)
    return texts


def test_a_common_start_is_tokenized_once(small: FileTokenizer, encoded: list[str]) -> None:
    encoder = CachingEncoder(small)
    book = "".join(f"{n} words of a book.\r\n" for n in range(2000))
    texts = [book + end for end in ("One question?", "Another?")]
    for text in texts:
        assert encoder.encode(text) == BACKEND.encode(text, add_special_tokens=False).ids
    *segments, again = encoded
    assert len(segments) == len(texts[0]) // 2048 + 1
    assert "".join(segments[:-1]) + again == texts[1]
    assert all(2048 <= len(segment) < 2080 for segment in segments[:-1])


def test_long_segments_are_not_kept(small: FileTokenizer, encoded: list[str]) -> None:
    """Otherwise texts without words would fill the memory, megabytes each."""
    encoder = CachingEncoder(small)
    text = "." * 10_000 + "end of a word, " + "word " * 1000
    want = BACKEND.encode(text, add_special_tokens=False).ids
    assert encoder.encode(text) == want
    assert len(encoded) == 4
    assert encoder.encode(text) == want
    assert encoded[4:] == [encoded[0], encoded[3]]  # the long segment, and the end of the text


@pytest.mark.parametrize("kind", ["space", "whole", "token", "strips", "lowercase", "another"])
def test_tokenizers_whose_text_cannot_be_cut(kind: str, tmp_path: Path) -> None:
    backend = small_backend()
    byte_level = pre_tokenizers.ByteLevel
    match kind:
        case "space":
            backend.pre_tokenizer = byte_level(add_prefix_space=True)
        case "whole":
            backend.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=False)
        case "another":
            backend.pre_tokenizer = pre_tokenizers.Sequence([byte_level(add_prefix_space=False)])
        case "token":
            backend.add_tokens([AddedToken("end of")])
        case "strips":
            backend.add_tokens([AddedToken("end", rstrip=True)])
        case "lowercase":
            backend.normalizer = normalizers.Lowercase()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert not tokenizer.cuts_after_words
    text = "The end\n of a line\n" * 3
    assert CachingEncoder(tokenizer, segment_length=5).encode(text) == tokenizer.encode(text)
