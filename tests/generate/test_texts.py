"""A text as it grows: what is given out is certain, whatever tokens and stop strings there are."""

import codecs
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator
from xlstm7b.generate.sampling import SamplingSettings
from xlstm7b.generate.texts import GrowingText, Speeds, peak_memory
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer


class Pieces:
    """A tokenizer whose ids stand for pieces of text, some of them broken in mid-character."""

    whole = ("", "a", "b", "ab", "aab", "ba", "\n", "é", "€", "a€b", "😀", "bb")
    table = (*(piece.encode() for piece in whole), b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0")
    vocab_size = len(table)
    cuts_after_words = False

    def encode(self, text: str) -> list[int]:
        raise AssertionError

    def decode(self, ids) -> str:
        return b"".join(self.table[token] for token in ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self.table[token]


EOS = 0  # of no text in either tokenizer
PIECES = Pieces()
BYTES = ByteTokenizer()
STOPS = st.lists(st.text("ab\né€😀\ufffd", min_size=1, max_size=4), max_size=3)
NO_SPEED = Speeds(1, 1.0, 1.0, 1)


def grown(tokenizer, tokens, stops=(), most=1000, asked_at=None) -> tuple[GrowingText, list[str]]:
    row = SamplingSettings(max_new_tokens=most, eos_token_id=EOS)
    text, pushes = GrowingText(tokenizer, row, stops), []
    for index, token in enumerate(tokens):
        pushes.append(text.push(token))
        if index == asked_at and text.finish_reason is None:
            pushes[-1] += text.finish("stop")
        if text.finish_reason is not None:
            return text, pushes
    return text, [*pushes, text.finish("length")]


def reference(tokenizer, tokens, stops, most, asked_at) -> tuple[str, list[int], str]:
    """All is decoded anew at every token, and the text cut where the first stop string is found."""
    for count in range(1, len(tokens) + 1):
        if tokens[count - 1] == EOS:
            return tokenizer.decode(tokens[: count - 1]), tokens[: count - 1], "stop"
        so_far = b"".join(map(tokenizer.token_bytes, tokens[:count]))
        certain = codecs.getincrementaldecoder("utf-8")("replace").decode(so_far)
        places = [certain.find(stop) for stop in stops if stop in certain]
        if places:
            return certain[: min(places)], tokens[:count], "stop"
        if count == most or count - 1 == asked_at:
            reason = "length" if count == most else "stop"
            return tokenizer.decode(tokens[:count]), tokens[:count], reason
    return tokenizer.decode(tokens), tokens, "length"


def assert_as_reference(tokenizer, tokens, stops, most=1000, asked_at=None) -> None:
    text, pushes = grown(tokenizer, tokens, stops, most, asked_at)
    want, ids, reason = reference(tokenizer, tokens, stops, most, asked_at)
    completion = text.completion(NO_SPEED, None)
    assert "".join(pushes) == completion.text == want
    assert completion.token_ids == ids
    assert completion.finish_reason == reason


@settings(max_examples=500)
@given(
    tokens=st.lists(st.integers(0, PIECES.vocab_size - 1), max_size=20),
    stops=STOPS,
    most=st.integers(1, 20),
    asked_at=st.none() | st.integers(0, 20),
)
@example(tokens=[3, 4, 1], stops=["aba", "bab"], most=20, asked_at=None)
@example(tokens=[1, 1, 1, 2], stops=["aaab"], most=4, asked_at=None)
@example(tokens=[12, 13], stops=["é"], most=2, asked_at=1)
def test_any_tokens_and_stop_strings(tokens, stops, most, asked_at):
    assert_as_reference(PIECES, tokens, stops, most, asked_at)


@settings(max_examples=300)
@given(
    text=st.text("ab\né€😀", max_size=15),
    broken=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 319)), max_size=2),
    stops=STOPS,
)
def test_any_bytes_and_stop_strings(text, broken, stops):
    tokens = BYTES.encode(text)
    for place, token in broken:
        tokens.insert(place, token)
    assert_as_reference(BYTES, tokens, stops)


@settings(max_examples=300)
@given(text=st.text(max_size=20), stops=STOPS)
def test_what_is_given_out_is_never_taken_back(text, stops):
    """While a text grows, all that was given out begins the final text, in whole characters."""
    tokens, out = BYTES.encode(text), ""
    final = reference(BYTES, tokens, stops, 1000, None)[0]
    growing = GrowingText(BYTES, SamplingSettings(max_new_tokens=1000, eos_token_id=0), stops)
    for token in tokens:
        out += growing.push(token)
        assert final.startswith(out)
        assert "\ufffd" not in out or "\ufffd" in text
        if growing.finish_reason is not None:
            break
        # Only what may begin a stop string is held back, and half a character.
        held_back = len(BYTES.decode(growing.token_ids)) - len(out)
        assert held_back <= max(map(len, stops), default=1)
    if growing.finish_reason is None:
        out += growing.finish("length")
    assert out == final


def test_a_stop_string_across_tokens_is_held_back_and_cut():
    """`ab€b`, of which the second token may begin two stop strings and the third ends one."""
    text, pushes = grown(PIECES, [1, 2, 8, 2, 1], ["b€b", "b€€"])
    assert pushes == ["a", "", "", ""]
    assert text.finish_reason == "stop"
    assert text.completion(NO_SPEED, None).text == "a"
    assert text.token_ids == [1, 2, 8, 2]
    text, pushes = grown(PIECES, [1, 2, 8, 1], ["b€b", "b€€"])
    assert pushes == ["a", "", "", "b€a", ""]


def test_the_earliest_of_several_stop_strings_cuts():
    assert grown(PIECES, [9], ["b", "€"])[1] == ["a"]
    assert grown(PIECES, [9], ["€", "a"])[1] == [""]
    assert grown(PIECES, [1, 4], ["b", "aaa"])[1] == ["", ""]
    # Found as tokens come: the first to be whole wins, though the other began before it.
    assert grown(PIECES, [1, 2, 6], ["ab\n", "b"])[1] == ["", "a"]


def test_end_of_text_gives_what_was_held_back():
    text, pushes = grown(PIECES, [1, 2, EOS], ["bb"])
    assert pushes == ["a", "", "b"]
    assert text.finish_reason == "stop"
    assert text.token_ids == [1, 2]
    assert grown(PIECES, [12, EOS])[1] == ["", "\ufffd"]
    assert grown(PIECES, [12, 13, EOS])[1] == ["", "é", ""]
    assert grown(PIECES, [1, 12], most=2)[1] == ["a", "\ufffd"]


def test_completion_has_logprobs_if_wanted():
    for wanted, logprobs, top in (
        (None, None, None),
        (0, [-0.5, -1.0], None),
        (2, [-0.5, -1.0], [{3: -0.25, 1: -0.5}, {7: -0.125, 5: -2.0}]),
    ):
        row = SamplingSettings(max_new_tokens=2, logprobs=wanted)
        text = GrowingText(PIECES, row)
        text.push(1, -0.5, [-0.25, -0.5], [3, 1])
        text.push(2, -1.0, [-0.125, -2.0], [7, 5])
        completion = text.completion(Speeds(6, 2.0, 0.25, 99), None)
        assert (completion.logprobs, completion.top_logprobs) == (logprobs, top)
        assert completion.prompt_tokens == 6
        assert completion.prompt_tokens_per_second == 3.0
        assert completion.tokens_per_second == 4.0  # the first token came with the prompt
        assert completion.peak_memory == 99
        assert completion.finish_reason == "length"


def test_peak_memory_is_no_less_than_what_is_in_use():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    in_use = pages * resource.getpagesize()
    assert in_use // 2 < peak_memory(torch.device("cpu")) < 1 << 40


def test_an_unfinished_text_has_no_completion():
    text = GrowingText(PIECES, SamplingSettings())
    text.push(1)
    with pytest.raises(AssertionError):
        text.completion(NO_SPEED, None)


# In a generator


GREEDY = {"temperature": 0, "max_new_tokens": 12}


def speaker(text: str, **changes) -> Generator:
    """A model that surely says one byte of the text after the other, all different, in a circle."""
    model, said = XLSTM(ModelConfig(320, 1, 1, vocab_size=320, **changes)), text.encode()
    assert len(set(said)) == len(said)
    with torch.no_grad():
        model.backbone.blocks[0].mlstm_layer.out_proj.weight.zero_()
        model.backbone.blocks[0].ffn.proj_down.weight.zero_()
        model.backbone.embeddings.weight.copy_(torch.eye(320))
        model.lm_head.weight.zero_()
        for byte, successor in zip(said, said[1:] + said[:1], strict=True):
            model.lm_head.weight[successor + 2, byte + 2] = 100
    return Generator(model, ByteTokenizer())


def test_end_of_text():
    generator = speaker("abc", eos_token_id=ord("c") + 2)
    (completion,) = generator.generate("a", **GREEDY)
    assert (completion.text, completion.finish_reason) == ("b", "stop")
    (completion,) = generator.generate("b", **GREEDY)
    assert (completion.text, completion.token_ids, completion.tokens_per_second) == ("", [], 0)
    (completion,) = generator.generate("a", **GREEDY, eos_token_id=())
    assert (completion.text, completion.finish_reason) == ("bcabcabcabca", "length")
    (completion,) = generator.generate("a", **GREEDY, eos_token_id=[5, ord("a") + 2])
    assert (completion.text, completion.finish_reason) == ("bc", "stop")
    # Not before min_new_tokens: what is said instead has no successor, and id 0 is the likeliest.
    (completion,) = generator.generate("a", **GREEDY, min_new_tokens=12)
    assert completion.token_ids == [ord("b") + 2] + [0] * 11
    assert completion.finish_reason == "length"


def streamed(generator: Generator, prompt: str, **settings) -> list[str]:
    pieces = [*generator.stream(prompt, **{**GREEDY, **settings})]
    completion = generator.generate(prompt, **{**GREEDY, **settings})[0]
    assert pieces[-1].completion.token_ids == completion.token_ids
    texts = [piece.text for piece in pieces]
    assert "".join(texts) == completion.text
    return texts


def test_stop_strings_are_never_shown():
    """The model says aé€b😀 in a circle: 11 bytes, most of them parts of characters."""
    generator = speaker("aé€b😀")
    assert streamed(generator, "a") == ["", "é", "", "", "€", "b", "", "", "", "😀", "a", "\ufffd"]
    assert streamed(generator, "a", stop_strings="b😀") == [
        "",
        "é",
        "",
        "",
        "€",
        "",
        "",
        "",
        "",
        "",
    ]
    assert streamed(generator, "a", stop_strings=["😀a", "€c"]) == ["", "é", "", "", "", "€b",
                                                                    "", "", "", "", ""]  # fmt: skip
    assert streamed(generator, "a", stop_strings=["b", "é€"]) == [""] * 5
    assert streamed(generator, "a", stop_strings=("😀", "€b")) == ["", "é", "", "", "", ""]
    assert streamed(generator, "a", stop_strings="bc", max_new_tokens=6)[4:] == ["€", "b"]
    (completion,) = generator.generate("a", stop_strings="é€", **GREEDY)
    assert (completion.text, len(completion.token_ids)) == ("", 5)
    assert completion.finish_reason == "stop"
