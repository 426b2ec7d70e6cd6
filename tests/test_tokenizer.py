"""Tokenizers: bytes, a byte-level BPE trained here, and GPT-NeoX's where its file is at hand."""

import json
import os
from pathlib import Path
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from xlstm7b.tokenizer import (
    ByteTokenizer,
    CachingEncoder,
    ChatTemplate,
    FileTokenizer,
    StreamDecoder,
    Tokenizer,
    load_chat_template,
    load_tokenizer,
)

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog lets it.",
    "  Leading spaces,\ttabs\nand new lines.   ",
    "Grüße aus Linz: naïve façade, Übermut, 日本語のテキスト, 한국어, עברית.",
    "👩‍👩‍👧‍👦 family, 🇦🇹 flag, 👍🏽 thumb, 🦊🦊🦊 foxes",
]
NEOX = os.environ.get("XLSTM7B_TOKENIZER")


def small_backend() -> Backend:
    """Byte-level BPE as GPT-NeoX has it: specials first, runs of spaces added at the end."""
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
    whole = tokenizer.decode(ids)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == whole
    assert len(pieces[-1]) <= 1  # held back: never more than part of one character


# Bytes


def test_bytes() -> None:
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
def test_bytes_stream_is_decode(ids: list[int]) -> None:
    check_stream(ByteTokenizer(), ids)


# A tokenizer.json


def test_file_has_its_special_ids(small: FileTokenizer) -> None:
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
def test_file_decodes_as_its_library_does(small: FileTokenizer, ids: list[int]) -> None:
    assert small.decode(ids) == BACKEND.decode(ids, skip_special_tokens=True)
    check_stream(small, ids)


def test_leading_spaces_are_kept(small: FileTokenizer) -> None:
    for text in (" the dog", "the dog", "  the", "     x", " "):
        assert "".join(stream(small, small.encode(text))) == text


def test_specials_neither_print_nor_break_a_character(small: FileTokenizer) -> None:
    token_of = {small.token_bytes(token): token for token in range(2, small.vocab_size)}
    letters = [token_of[bytes([byte])] for byte in "a🦊".encode()]
    ids = [token for letter in letters for token in (0, letter, 1)]
    assert small.decode(ids) == "a🦊"
    assert [piece for piece in stream(small, ids) if piece] == ["a", "🦊"]


def test_a_character_comes_whole_and_at_once() -> None:
    tokenizer = ByteTokenizer()
    assert stream(tokenizer, tokenizer.encode("🦊é!")) == ["", "", "", "🦊", "", "é", "!", ""]
    # Half a character is given up when the next id rules it out, or at the end.
    assert stream(tokenizer, [0xE2 + 2, 67, 0xF0 + 2]) == ["", "\ufffdA", "", "\ufffd"]


def test_stream_starts_anew_after_a_flush() -> None:
    decoder = StreamDecoder(ByteTokenizer())
    assert decoder.push(0xE2 + 2) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(0x82 + 2) == "\ufffd"
    assert decoder.flush() == ""


def test_a_push_looks_at_one_token_only() -> None:
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


def test_load_from_file_and_folder(path: Path) -> None:
    for place in (path, str(path), path.parent, str(path.parent)):
        assert load_tokenizer(place, 50304).encode("fox") == BACKEND.encode("fox").ids


def test_bytes_where_there_is_no_file(tmp_path: Path) -> None:
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
    backend = Backend(models.BPE())
    backend.decoder = decoders.Metaspace()
    backend.save(str(file))
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a byte-level .*Metaspace"):
        load_tokenizer(file, 50304)


@pytest.mark.skipif(
    NEOX is None, reason="XLSTM7B_TOKENIZER does not point to GPT-NeoX-20B's tokenizer.json"
)
def test_gpt_neox() -> None:
    """It normalises text to NFC, so that is what comes back."""
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


# Chat templates

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


def test_a_template_that_refuses() -> None:
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
            {"tokenizer_config.json": {"chat_template": "{{ pad_token }}",
                                       "pad_token": {"content": "P", "special": True}}},
            "P",
        ),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "T"},
                                                         {"name": "default", "template": "D"}]}},
            "D",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use"}, 3]}}, None),
        ({"chat_template.jinja": "J"}, "J"),
        ({"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "A"}}, "J"),
    ],
)  # fmt: skip
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
        ("tokenizer_config.json", '{"chat_template": 3}', ": chat_template is not a text"),
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


# Texts that begin alike


@pytest.fixture(scope="module")
def all_kinds(small: FileTokenizer) -> list[Tokenizer]:
    return [ByteTokenizer(), small, *([FileTokenizer(Path(NEOX))] if NEOX else [])]


def in_small_pieces(tokenizer: Tokenizer) -> CachingEncoder:
    encoder = CachingEncoder(tokenizer)
    encoder._PIECE = 5
    return encoder


@given(st.lists(st.text("aBé\u0301 \n\r\t.'s0→日") | st.sampled_from(LINES), max_size=12))
def test_cut_texts_have_the_same_ids(all_kinds: list[Tokenizer], parts: list[str]) -> None:
    text = "".join(parts)
    for tokenizer in all_kinds:
        assert tokenizer.cuts_after_words
        encoder = in_small_pieces(tokenizer)
        for _ in range(2):
            assert encoder.encode(text) == tokenizer.encode(text)


def test_what_texts_begin_with_is_tokenized_once(
    small: FileTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return list(BACKEND.encode(text, add_special_tokens=False).ids)

    monkeypatch.setattr(small, "encode", encode)
    encoder = CachingEncoder(small)
    book = "".join(f"{n} words of a book.\r\n" for n in range(2000))
    texts = [book + end for end in ("One question?", "Another?")]
    for text in texts:
        assert encoder.encode(text) == BACKEND.encode(text, add_special_tokens=False).ids
    *pieces, again = asked
    assert len(pieces) == len(texts[0]) // 2048 + 1
    assert "".join(pieces[:-1]) + again == texts[1]
    assert all(2048 <= len(piece) < 2080 for piece in pieces[:-1])


def test_long_pieces_are_not_kept(small: FileTokenizer) -> None:
    """Else texts without words would fill the memory, megabytes each."""
    encoder = CachingEncoder(small)
    text = "." * 10_000 + "end of a word, " + "word " * 1000
    assert encoder.encode(text) == small.encode(text)
    assert encoder._ids_of.cache_info().currsize == 2  # of the words alone


@pytest.mark.parametrize("kind", ["space", "whole", "token", "strips", "lowercase", "another"])
def test_tokenizers_that_are_not_cut(kind: str, tmp_path: Path) -> None:
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
    assert in_small_pieces(tokenizer).encode(text) == tokenizer.encode(text)
