"""Request: what is checked before it runs. OutputText: only text that is certain is returned."""

import codecs
import random
import resource
from pathlib import Path

import pytest
import torch
from engines import Driver, new_engine, token_lists
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import spread_model

from xlstm7b.config import ModelConfig
from xlstm7b.generate import Completion, Request, RequestOutput, RequestStatus, SamplingParams
from xlstm7b.generate.engine import peak_memory
from xlstm7b.generate.request import BAD_LOGITS, BLOCK, HashedTokens, OutputText, _StopStrings
from xlstm7b.generate.state import SavedState
from xlstm7b.model import ModelState
from xlstm7b.tokenizer import ByteTokenizer


class PieceTokenizer:
    """Its ids stand for pieces of text, some of which are parts of a character."""

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


EOS = 0  # has no text in either tokenizer
PIECES = PieceTokenizer()
BYTES = ByteTokenizer()
STOPS = st.lists(st.text("ab\né€😀\ufffd", min_size=1, max_size=4), max_size=3)


def pushed(
    tokenizer, tokens, stops=(), max_new_tokens=1000, stopped_at=None
) -> tuple[OutputText, list[str]]:
    """The output after these tokens, and the text that each of them returned.

    `stopped_at`: the caller ends it after the token with this index.
    """
    params = SamplingParams(
        max_new_tokens=max_new_tokens, eos_token_id=EOS, stop_strings=tuple(stops)
    )
    output, returned = OutputText(tokenizer, params), []
    for index, token in enumerate(tokens):
        returned.append(output.push(token))
        if index == stopped_at and output.finish_reason is None:
            returned[-1] += output.finish("stop")
        if output.finish_reason is not None:
            return output, returned
    return output, [*returned, output.finish("length")]


def reference(tokenizer, tokens, stops, max_new_tokens, stopped_at) -> tuple[str, list[int], str]:
    """Decodes everything again at every token, and cuts at the first stop string."""

    def ended(ids, reason):
        whole = tokenizer.decode(ids)  # with U+FFFD for an incomplete character
        places = [whole.find(stop) for stop in stops if stop in whole]
        return (whole[: min(places)], ids, "stop") if places else (whole, ids, reason)

    for count in range(1, len(tokens) + 1):
        if tokens[count - 1] == EOS:
            return ended(tokens[: count - 1], "stop")
        so_far = b"".join(map(tokenizer.token_bytes, tokens[:count]))
        certain = codecs.getincrementaldecoder("utf-8")("replace").decode(so_far)
        places = [certain.find(stop) for stop in stops if stop in certain]
        if places:
            return certain[: min(places)], tokens[:count], "stop"
        if count == max_new_tokens or count - 1 == stopped_at:
            return ended(tokens[:count], "length" if count == max_new_tokens else "stop")
    return ended(tokens, "length")


def assert_as_reference(tokenizer, tokens, stops, max_new_tokens=1000, stopped_at=None) -> None:
    output, returned = pushed(tokenizer, tokens, stops, max_new_tokens, stopped_at)
    text, ids, reason = reference(tokenizer, tokens, stops, max_new_tokens, stopped_at)
    assert "".join(returned) == output.text == text
    assert output.token_ids == ids
    assert output.finish_reason == reason


@settings(max_examples=500)
@given(
    tokens=st.lists(st.integers(0, PIECES.vocab_size - 1), max_size=20),
    stops=STOPS,
    max_new_tokens=st.integers(1, 20),
    stopped_at=st.none() | st.integers(0, 20),
)
@example(tokens=[3, 4, 1], stops=["aba", "bab"], max_new_tokens=20, stopped_at=None)
@example(tokens=[1, 1, 1, 2], stops=["aaab"], max_new_tokens=4, stopped_at=None)
@example(tokens=[12, 13], stops=["é"], max_new_tokens=2, stopped_at=1)
def test_any_tokens_and_stop_strings(tokens, stops, max_new_tokens, stopped_at):
    assert_as_reference(PIECES, tokens, stops, max_new_tokens, stopped_at)


@settings(max_examples=500)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=7), max_size=6),
    parts=st.lists(st.text("aab", max_size=5), max_size=12),
)
@example(stops=["aabaa", "ab"], parts=["aa", "b"])
@example(stops=["abab", "bb"], parts=["aba", "bb"])
def test_stop_strings_are_found_as_by_a_naive_search(stops, parts):
    found, node, text = _StopStrings(stops), 0, ""
    for part in parts:
        node, cut = found.find(node, part)
        before, text = len(text), text + part
        places = [text.find(stop) for stop in stops if stop in text]
        assert cut == (min(places) - before if places else None)
        if places:
            return
        starts = (stop[:length] for stop in stops for length in range(len(stop)))
        longest = max((len(start) for start in starts if text.endswith(start)), default=0)
        assert found.depths[node] == longest


class CountingDict(dict):
    lookups = 0

    def get(self, key):
        self.lookups += 1
        return super().get(key)


def test_the_search_for_stop_strings_takes_constant_time():
    """Two steps a character, however many and long they are. The text keeps breaking off."""
    found = _StopStrings(["a" * 255 + end for end in "bcdefghijklmnopq"])
    found._next = CountingDict(found._next)
    text, node = ("a" * 254 + "x") * 100, 0
    for start in range(0, len(text), 7):
        node, cut = found.find(node, text[start : start + 7])
        assert cut is None
    assert found._next.lookups <= 2 * len(text)


def test_a_stop_string_of_half_a_character():
    """U+FFFD stands for a character that is incomplete when the output ends."""
    output, returned = pushed(PIECES, [1, 2, 12], ["\ufffd"], max_new_tokens=3)
    assert "".join(returned) == output.text == "ab"
    assert output.finish_reason == "stop"
    assert pushed(PIECES, [1, 2, 12], ["b\ufffd"])[1] == ["a", "", "", ""]
    assert pushed(PIECES, [1, 2, 12, EOS], ["b\ufffd"])[1] == ["a", "", "", ""]


@settings(max_examples=300)
@given(
    text=st.text("ab\né€😀", max_size=15),
    broken=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 319)), max_size=2),
    stops=STOPS,
)
def test_any_bytes_and_stop_strings(text, broken, stops):
    tokens = BYTES.encode(text)
    for index, token in broken:
        tokens.insert(index, token)
    assert_as_reference(BYTES, tokens, stops)


@settings(max_examples=150)
@given(text=st.text(max_size=20), stops=STOPS)
def test_returned_text_is_never_taken_back(text, stops):
    """At any time, the returned text is the start of the final text, in whole characters."""
    tokens, returned = BYTES.encode(text), ""
    final = reference(BYTES, tokens, stops, 1000, None)[0]
    params = SamplingParams(max_new_tokens=1000, eos_token_id=0, stop_strings=tuple(stops))
    output = OutputText(BYTES, params)
    for token in tokens:
        returned += output.push(token)
        assert final.startswith(returned)
        assert "\ufffd" not in returned or "\ufffd" in text
        if output.finish_reason is not None:
            break
        # Only the start of a stop string is held back, and a part of a character.
        held_back = len(BYTES.decode(output.token_ids)) - len(returned)
        assert held_back <= max(map(len, stops), default=1)
    if output.finish_reason is None:
        returned += output.finish("length")
    assert returned == final


def test_a_stop_string_across_tokens_is_held_back_and_cut():
    """`ab€b`: the second token may start two stop strings, and the fourth completes one."""
    output, returned = pushed(PIECES, [1, 2, 8, 2, 1], ["b€b", "b€€"])
    assert returned == ["a", "", "", ""]
    assert output.finish_reason == "stop"
    assert output.text == "a"
    assert output.token_ids == [1, 2, 8, 2]
    output, returned = pushed(PIECES, [1, 2, 8, 1], ["b€b", "b€€"])
    assert returned == ["a", "", "", "b€a", ""]


def test_the_earliest_of_several_stop_strings_cuts():
    assert pushed(PIECES, [9], ["b", "€"])[1] == ["a"]
    assert pushed(PIECES, [9], ["€", "a"])[1] == [""]
    assert pushed(PIECES, [1, 4], ["b", "aaa"])[1] == ["", ""]
    # As tokens come, the first to be complete wins, even if the other starts before it.
    assert pushed(PIECES, [1, 2, 6], ["ab\n", "b"])[1] == ["", "a"]


def test_the_end_of_text_returns_what_was_held_back():
    output, returned = pushed(PIECES, [1, 2, EOS], ["bb"])
    assert returned == ["a", "", "b"]
    assert output.finish_reason == "stop"
    assert output.token_ids == [1, 2]
    assert pushed(PIECES, [12, EOS])[1] == ["", "\ufffd"]
    assert pushed(PIECES, [12, 13, EOS])[1] == ["", "é", ""]
    assert pushed(PIECES, [1, 12], max_new_tokens=2)[1] == ["a", "\ufffd"]


@pytest.mark.parametrize(
    ("wanted", "top"),
    [(None, [{}, {}]), (0, [{}, {}]), (2, [{3: -0.25, 1: -0.5}, {7: -0.125, 5: -2.0}])],
)
def test_as_many_log_probabilities_as_wanted(wanted, top):
    """Another request of the batch may want more of them."""
    output = OutputText(PIECES, SamplingParams(max_new_tokens=2, logprobs=wanted))
    output.push(1, -0.5, [-0.25, -0.5, -0.75], [3, 1, 2])
    output.push(2, -1.0, [-0.125, -2.0, -3.0], [7, 5, 6])
    assert output.logprobs == [-0.5, -1.0]
    assert output.top_logprobs == top
    assert output.finish_reason == "length"


@pytest.mark.parametrize(("token", "logprob"), [(BAD_LOGITS, 0.0), (3, float("nan"))])
def test_logits_that_are_not_numbers_raise(token, logprob):
    output = OutputText(PIECES, SamplingParams())
    output.push(1)
    with pytest.raises(FloatingPointError, match=r"^the model's logits are not numbers: its wei"):
        output.push(token, logprob)
    assert (output.text, output.token_ids, output.finish_reason) == ("a", [1], None)


# Completions and outputs


@pytest.mark.parametrize("wanted", [None, 0, 2])
def test_a_completion_has_log_probabilities_if_wanted(wanted):
    driver = Driver(new_engine(spread_model(), slots=1))
    params = SamplingParams(max_new_tokens=3, eos_token_id=(), logprobs=wanted)
    request = driver.add(Request("A prompt", params))
    driver.finish()
    completion = driver.completion(request)
    assert (completion.logprobs is None) == (wanted is None)
    assert (completion.top_logprobs is None) == (not wanted)
    if wanted is not None:
        assert len(completion.logprobs) == 3
    if wanted:
        assert [len(top) for top in completion.top_logprobs] == [2] * 3
    assert completion.prompt_tokens == 9
    assert completion.finish_reason == "length"
    reading, generating = (
        request.first_token - request.admitted,
        driver.outputs[request][-1].completion.tokens_per_second,
    )
    assert completion.prompt_tokens_per_second == pytest.approx(9 / reading)
    assert generating > 0
    assert "state" not in repr(completion)  # it would be long


def test_peak_memory_is_at_least_what_is_in_use():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    in_use = pages * resource.getpagesize()
    assert in_use // 2 < peak_memory(torch.device("cpu")) < 1 << 40


def test_merged_outputs_are_one_output():
    request, completion = Request("A"), Completion("abc", [1, 2, 3], "stop", 1, 1.0, 1.0, 1)
    outputs = [
        RequestOutput(request, prompt_logprobs=(-1.0, -2.0), prompt_top_logprobs=({1: -1.0}, {})),
        RequestOutput(request, prompt_logprobs=(-3.0,), prompt_top_logprobs=({2: -3.0},)),
        RequestOutput(request, "a", (1,), (-0.5,), ({1: -0.5},)),
        RequestOutput(request, "", (2,), (-0.6,), ({2: -0.6},)),
        RequestOutput(request, "bc", (3,), (-0.7,), ({3: -0.7},), completion=completion),
    ]
    merged = RequestOutput.merge(outputs)
    assert merged == RequestOutput(
        request,
        "abc",
        (1, 2, 3),
        (-0.5, -0.6, -0.7),
        ({1: -0.5}, {2: -0.6}, {3: -0.7}),
        (-1.0, -2.0, -3.0),
        ({1: -1.0}, {}, {2: -3.0}),
        completion,
    )
    assert merged.finished
    assert not RequestOutput.merge(outputs[:-1]).finished
    assert RequestOutput.merge(outputs[:1]) is outputs[0]
    error = RequestOutput(request, error=FloatingPointError("no numbers"))
    failed = RequestOutput.merge([outputs[2], error])
    assert (failed.text, failed.error, failed.finished) == ("a", error.error, True)
    # In parts or at once is the same.
    assert RequestOutput.merge([RequestOutput.merge(outputs[:3]), *outputs[3:]]) == merged


# Requests

CONFIG = ModelConfig(64, 1, 1, vocab_size=320)
BARE = ModelConfig(64, 1, 1, vocab_size=320, force_bos_token_insert=False)


def state_of(config: ModelConfig, rows: int = 1) -> SavedState:
    return SavedState(config, ModelState.zeros(config, rows), torch.zeros(rows, 320))


def test_a_prompt_is_encoded_and_gets_the_first_token():
    for prompt in ("AB", [67, 68], (0, 67, 68)):
        request = Request(prompt)
        assert not request.prepared
        assert request.prepare(CONFIG, BYTES) is request
        assert request.prepared
        assert request.prompt_token_ids == [0, 67, 68]
        # The engine starts after the first token, which all prompts have.
        assert [*request.read_token_ids] == [67, 68]
        assert request.starts_after_bos
        assert len(request.hashed) == 2
    bare = Request([67, 68]).prepare(BARE, BYTES)
    assert bare.prompt_token_ids == bare.read_token_ids == [67, 68]
    assert (bare.starts_after_bos, len(bare.hashed)) == (False, 2)
    other = ModelConfig(64, 1, 1, vocab_size=320, bos_token_id=2)
    assert Request((0, 67)).prepare(other, BYTES).prompt_token_ids == [2, 0, 67]
    empty = Request("").prepare(CONFIG, BYTES)
    assert (empty.prompt_token_ids, [*empty.read_token_ids]) == ([0], [])


def test_a_prompt_on_top_of_a_state_gets_no_first_token():
    request = Request("AB", state=state_of(CONFIG)).prepare(CONFIG, BYTES)
    assert request.prompt_token_ids == [*request.read_token_ids] == [67, 68]
    assert (request.starts_after_bos, request.hashed) == (False, None)
    assert Request("", state=state_of(BARE)).prepare(BARE, BYTES).prompt_token_ids == []


def test_a_prompt_that_is_scored_is_read_from_the_first_token():
    request = Request("AB", prompt_logprobs=0).prepare(CONFIG, BYTES)
    assert [*request.read_token_ids] == [0, 67, 68]
    assert (request.starts_after_bos, request.hashed) == (False, None)
    # Nothing follows the last token, so it need not be read.
    request = Request("AB", prompt_logprobs=0, prefill_only=True).prepare(CONFIG, BYTES)
    assert request.prompt_token_ids == [0, 67, 68]
    assert [*request.read_token_ids] == [0, 67]


def test_a_prompt_that_is_not_shareable_is_not_hashed():
    request = Request("AB").prepare(CONFIG, BYTES, shareable=False)
    assert request.hashed is None
    assert [*request.read_token_ids] == [67, 68]


def test_the_models_end_of_text_is_the_default():
    config = ModelConfig(64, 1, 1, vocab_size=320, eos_token_id=7)
    assert Request("A").prepare(config, BYTES).params.eos_token_ids == (7,)
    for given_ids in ((), [5], 5):
        params = SamplingParams(eos_token_id=given_ids)
        assert Request("A", params).prepare(config, BYTES).params == params


def test_a_request_is_prepared_once():
    request = Request("A").prepare(CONFIG, BYTES)
    output, tokens = request.output, request.prompt_token_ids
    request.prepare(CONFIG, BYTES)
    assert request.output is output
    assert request.prompt_token_ids is tokens
    with pytest.raises(ValueError, match="prepared for another model; build a new one"):
        request.prepare(BARE, BYTES)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request("a\udcff"), r"the prompt is not valid Unicode: '\\udcff' at character 1"),
        (Request([5, 320]), "token 320 is outside the vocabulary of 320"),
        (Request([-1]), "token -1 is outside the vocabulary of 320"),
        *(
            (Request(prompt, state=state_of(CONFIG)), "a prompt must be a string or a list of ids")
            for prompt in (None, 5, [1.5], ["A"], b"A", [[5]])
        ),
        *(
            (Request("A", **{name: [1.5]}), "previous_prompt and previous_output must be lists .*")
            for name in ("previous_prompt", "previous_output")
        ),
        (Request("A", previous_prompt=[320]), "token 320 is outside the vocabulary of 320"),
        (Request("A", previous_output=[320]), "token 320 is outside the vocabulary of 320"),
        (Request("A", SamplingParams(top_p=2)), "top_p must be above 0 and at most 1, not 2"),
        (Request("A", prompt_logprobs=21), "prompt_logprobs must be between 0 and 20, not 21"),
        (Request("A", state=state_of(CONFIG, 2)), "a request continues one state, not 2"),
        (Request("A", state=state_of(CONFIG, 0)), "a request continues one state, not 0"),
        (
            Request("A", state=state_of(BARE)),
            "this state was saved by another model: it has force_bos_token_insert False, the "
            "loaded model True",
        ),
    ],
)
def test_mistakes_raise_before_anything_runs(request_, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        request_.prepare(CONFIG, BYTES)
    assert not request_.prepared


def test_an_empty_prompt_without_a_first_token():
    with pytest.raises(ValueError, match=r"^the prompt is empty, and this model has no first"):
        Request("").prepare(BARE, BYTES)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    ("seed", "offset", "expected"), [(None, 3, None), (5, 0, 5), (5, 3, 8), (2**64 - 1, 2, 1)]
)
def test_a_request_with_another_seed(prepared, seed, offset, expected):
    state = state_of(CONFIG)
    request = Request(
        "AB", SamplingParams(seed=seed), state=state, keep_state=True, previous_prompt=[1]
    )
    if prepared:
        request.prepare(CONFIG, BYTES)
    made = request.with_seed_offset(offset)
    assert made is not request
    assert (made.params.seed, request.params.seed) == (expected, seed)
    assert (made.state, made.keep_state, made.previous_prompt) == (state, True, (1,))
    made.prepare(CONFIG, BYTES)
    request.prepare(CONFIG, BYTES)
    assert made.prompt_token_ids == request.prompt_token_ids
    # Each has its own output.
    made.output.push(67)
    assert (made.output.token_ids, request.output.token_ids) == ([67], [])


def test_only_three_statuses_are_final():
    request = Request("A")
    assert request.status is RequestStatus.WAITING
    final = set()
    for status in RequestStatus:
        request.status = status
        if request.finished:
            final.add(status)
    assert final == {RequestStatus.FINISHED, RequestStatus.ABORTED, RequestStatus.FAILED}


# Hashes of prefixes

LONG = random.Random(1).choices(range(320), k=400)


@given(first=token_lists, second=token_lists)
def test_tokens_that_continue_others_are_hashed_as_a_whole(first, second):
    whole = HashedTokens(first + second, salt=b"salt")
    parts = HashedTokens(second, after=HashedTokens(first, salt=b"salt"))
    assert parts.salt == whole.salt == b"salt"
    assert len(parts) == len(whole) == len(first + second)
    assert parts.prefix_bytes(len(parts)) == whole.prefix_bytes(len(whole))
    for length in range(0, len(whole) + 1, 7):
        assert parts.key(length) == whole.key(length)
    copy = HashedTokens.from_bytes(whole.prefix_bytes(len(whole)), b"salt")
    assert copy.key(len(copy)) == whole.key(len(whole))


@given(first=token_lists, second=token_lists, length=st.integers(0, 300))
def test_a_shared_prefix_is_the_same_tokens(first, second, length):
    one, other = HashedTokens(first), HashedTokens(second)
    shared = length <= min(len(first), len(second)) and first[:length] == second[:length]
    assert one.has_prefix(other, length) == other.has_prefix(one, length) == shared


@given(prompt=token_lists, longer_than=st.integers(0, 240), data=st.data())
def test_lengths_are_those_whose_key_has_a_known_hash(prompt, longer_than, data):
    hashed = HashedTokens(prompt)
    hashes = [hashed.key(BLOCK * blocks)[0] for blocks in range(len(prompt) // BLOCK + 1)]
    assert hashed.block_hashes() == hashes[1:]
    known = dict.fromkeys(data.draw(st.lists(st.sampled_from([*hashes, b"another"]))))
    expected = [n for n in range(len(prompt), longer_than, -1) if hashed.key(n)[0] in known]
    assert [*hashed.lengths(longer_than, known.keys())] == expected
    every = dict.fromkeys(hashes).keys()
    assert [*hashed.lengths(longer_than, every)] == [*range(len(prompt), longer_than, -1)]


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_one_token_changes_every_key_after_it(length):
    tokens = LONG[: length + 1]
    changed = [*tokens[:-1], tokens[-1] + 1]
    one, other = HashedTokens(tokens), HashedTokens(changed)
    assert one.key(length) == other.key(length)
    assert one.key(length + 1) != other.key(length + 1)
    more = HashedTokens(LONG, after=one), HashedTokens(LONG, after=other)
    assert all(more[0].key(n) != more[1].key(n) for n in range(length + 1, len(more[0])))


def test_a_lookup_visits_known_hashes_only():
    """So that each chunk of a long prompt does not compare all of the prompt's blocks."""
    prompt = HashedTokens(range(1 << 14))
    known = {prompt.key(64 * blocks)[0]: 1 for blocks in (3, 7)} | {b"another": 1}
    assert [*prompt.lengths(0, known.keys())] == [*range(511, 447, -1), *range(255, 191, -1)]
    assert [*prompt.lengths(256, known.keys())] == [*range(511, 447, -1)]
