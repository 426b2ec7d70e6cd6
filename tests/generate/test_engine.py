"""Every text as if it were alone, whatever else goes on."""

import random
import time
from dataclasses import replace

import pytest
import torch
from engines import ROUNDING, Listener, advance, idle, random_generator, running
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error

from xlstm7b.generate import Request, SamplingSettings
from xlstm7b.generate.engine import Engine, Piece

GENERATOR = random_generator()
PROMPTS = ["Once upon a time", "A", "é", "The quick brown fox jumps over the lazy dog.", "A b"]
LONG = random.Random(0).choices(range(2, 258), k=200)


def greedy(prompt, tokens: int = 12, **more) -> Request:
    return Request(prompt, SamplingSettings(max_new_tokens=tokens, temperature=0, **more))


def alone(request: Request):
    return GENERATOR.run([request])[0]


def assert_same(told: Listener, want) -> None:
    got = told.completion()
    assert (got.text, got.token_ids) == (want.text, want.token_ids)
    assert (got.finish_reason, got.prompt_tokens) == (want.finish_reason, want.prompt_tokens)
    assert "".join(piece.text for piece in told.pieces) == want.text
    assert told.token_ids == want.token_ids
    if want.logprobs is not None:
        assert got.logprobs == pytest.approx(want.logprobs, abs=ROUNDING)
        assert [x for piece in told.pieces for x in piece.logprobs] == got.logprobs
    if want.top_logprobs is not None:
        assert [[*top] for top in got.top_logprobs] == [[*top] for top in want.top_logprobs]
        assert [top for piece in told.pieces for top in piece.top_logprobs] == got.top_logprobs


@pytest.mark.parametrize("options", [
    {}, {"piece_tokens": 5}, {"piece_tokens": 16, "cache_bytes": 1 << 20, "cache_interval": 24},
    {"slots": 3, "cache_bytes": 1 << 20, "cache_interval": 7},
])  # fmt: skip
def test_greedy_texts_alone_and_in_a_full_batch_cold_and_warm(options):
    requests = [greedy(prompt) for prompt in [*PROMPTS, LONG, LONG[:150]]]
    want = [alone(request) for request in requests]
    with running(GENERATOR, **options) as engine:
        for request, one in zip(requests, want, strict=True):
            told = Listener()
            engine.submit(request, told)
            assert_same(told, one)
        for _ in range(2):
            many = [Listener() for _ in requests * 3]
            for told, request in zip(many, requests * 3, strict=True):
                engine.submit(request, told)
            for told, one in zip(many, want * 3, strict=True):
                assert_same(told, one)
        assert engine.stats().running == engine.stats().waiting == 0
    assert idle(engine)


def test_a_stored_state_changes_no_bit():
    """Prompts are cut at the same places, whether a state spares reading the first of them."""
    asked = greedy([*LONG[:170], 65], logprobs=3)
    options = {"piece_tokens": 16, "cache_interval": 32}
    found = []
    for before in ([], [LONG], [asked.prompt, LONG]):
        with running(GENERATOR, cache_bytes=1 << 20, **options) as engine:
            for prompt in before:
                told = Listener()
                engine.submit(greedy(prompt), told)
                told.completion()
            others = [Listener() for _ in range(7 * bool(before))]
            told = Listener()
            engine.submit(asked, told)
            for other in others:
                engine.submit(greedy("Meanwhile"), other)
            completion = told.completion()
            for other in others:
                other.completion()
            found.append((completion.token_ids, completion.logprobs, completion.top_logprobs))
            assert told.pieces[0].cached_tokens == [0, 160, 172][len(before)]
    assert found[0] == found[1] == found[2]


request_settings = st.fixed_dictionaries({
    "max_new_tokens": st.integers(1, 14),
    "temperature": st.sampled_from([0.0, 0.0, 1.0, 3.0]),
    "top_k": st.sampled_from([0, 5]),
    "top_p": st.sampled_from([1.0, 0.7]),
    "repetition_penalty": st.sampled_from([1.0, 3.0]),
    "logit_bias": st.sampled_from([{}, {65: 30.0}]),
    "seed": st.integers(0, 99),
    "logprobs": st.sampled_from([None, 0, 4]),
})  # fmt: skip
texts = st.tuples(
    st.integers(0, 60),  # of LONG; what begins alike can be shared
    st.sampled_from([(), (), (), (7,), (8, 9)]),  # what follows
    request_settings,
    st.sampled_from([(), ("e",)]),
    st.integers(0, 3),  # rounds until the next
    st.one_of(st.none(), st.none(), st.integers(0, 12)),  # rounds until it is cancelled
)


@settings(max_examples=25)
@given(
    asked=st.lists(texts, min_size=1, max_size=10),
    slots=st.integers(1, 5),
    piece=st.sampled_from([4, 16, 512]),
    cache=st.sampled_from([0, 1 << 15, 1 << 22]),
)
def test_any_arrivals_and_cancels(asked, slots, piece, cache):
    engine = Engine(GENERATOR, slots=slots, piece_tokens=piece, cache_bytes=cache, cache_interval=8)
    cancels: dict[int, list] = {}
    all_told, now = [], 0
    for length, end, chosen, stops, pause, cancelled in asked:
        request = Request([*LONG[:length], *end], SamplingSettings(**chosen), stops)
        told = Listener()
        job = engine.submit(request, told)
        all_told.append((request, told, job, cancelled))
        if cancelled is not None:
            cancels.setdefault(now + cancelled, []).append(job)
        for _ in range(pause):
            for due in cancels.pop(now, ()):
                due.cancel()
            advance(engine)
            now += 1
    while any(not job.finished for *_, job, _ in all_told):
        for due in cancels.pop(now, ()):
            due.cancel()
        if not all(job.finished for *_, job, _ in all_told):
            advance(engine)
        now += 1
        assert now < 3000
    for request, told, _, cancelled in all_told:
        want = alone(request)
        if told.ended.is_set():
            assert_same(told, want)
        else:
            assert cancelled is not None
            assert told.token_ids == want.token_ids[: len(told.token_ids)]
    engine._scheduler.step(())
    assert idle(engine)


def test_a_long_prompt_does_not_hold_up_running_texts():
    engine = Engine(GENERATOR, slots=4, piece_tokens=128)
    told, long, short = Listener(), Listener(), Listener()
    engine.submit(greedy("A", 400, eos_token_id=()), told)
    advance(engine, 2)
    engine.submit(greedy(LONG * 25, 3), long)
    engine.submit(greedy("Short", 3), short)
    rounds, read = 0, engine.stats().prompt_tokens
    while not long.pieces:
        before = len(told.token_ids)
        advance(engine)
        rounds += 1
        assert len(told.token_ids) == before + 1
        # A piece, and a rest that is too short for a turn of its own.
        assert 0 < engine.stats().prompt_tokens - read <= 128 + 64
        read = engine.stats().prompt_tokens
        # The short prompt gets its turn between the long one's pieces.
        assert bool(short.pieces) == (rounds >= 2)
    assert rounds == 5001 // 128 + 1  # the last 9 tokens go with the piece before them
    assert long.pieces[0].token_ids == (alone(greedy(LONG * 25, 1)).token_ids[0],)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("slots", [2, 16])
def test_a_shared_prompt_is_read_once(slots, cache_bytes):
    engine = Engine(
        GENERATOR, slots=slots, piece_tokens=32, cache_bytes=cache_bytes, cache_interval=64
    )
    many = [Listener() for _ in range(9)]
    request = Request(LONG, SamplingSettings(max_new_tokens=5, seed=3))
    for place, told in enumerate(many):
        engine.submit(request.nth(place), told)
    advance(engine, 60)
    assert engine.stats().prompt_tokens == 201
    assert engine.stats().cached_tokens == 8 * 201
    for place, told in enumerate(many):
        assert_same(told, alone(request.nth(place)))


def test_a_shared_beginning_is_read_once():
    engine = Engine(GENERATOR, slots=8, piece_tokens=32, cache_bytes=1 << 22, cache_interval=64)
    many = [Listener() for _ in range(5)]
    for place, told in enumerate(many):
        engine.submit(greedy([*LONG, *[70 + place] * place], 3), told)
    advance(engine, 60)
    # All of it is the first text's; 192 is where it was stored on the way.
    assert engine.stats().prompt_tokens == 201 + 1 + 2 + 3 + 4
    for place, told in enumerate(many):
        assert_same(told, alone(greedy([*LONG, *[70 + place] * place], 3)))


@pytest.mark.parametrize("at_once", [False, True])
def test_where_texts_part_is_stored(at_once):
    """A system prompt ends anywhere: the second text to have it shows where."""
    engine = Engine(GENERATOR, slots=8, cache_bytes=1 << 22)
    many = [Listener() for _ in range(5)]
    requests = [greedy([*LONG, *[70 + place] * 30], 3) for place in range(5)]
    for told, request in zip(many, requests, strict=True):
        engine.submit(request, told)
        if not at_once:
            advance(engine, 20)
    advance(engine, 60)
    # With id 0 they share 201 tokens, and three blocks of 64.
    assert [told.pieces[0].cached_tokens for told in many] == [0, 0, 192, 192, 192]
    assert engine.stats().prompt_tokens == 2 * 231 + 3 * (231 - 192)
    for told, request in zip(many, requests, strict=True):
        assert_same(told, alone(request))


def test_a_state_stored_on_the_way_ends_no_turn():
    engine = Engine(GENERATOR, slots=8, cache_bytes=1 << 22, cache_interval=100)
    for place in range(3):
        told = Listener()
        engine.submit(greedy([*LONG, *[70 + place] * 30], 3), told)
        advance(engine)
        assert len(told.token_ids) == 1
        advance(engine, 5)


def test_a_growing_chat_is_read_once(tmp_path):
    history, options = [*LONG], {"cache_bytes": 1 << 14, "cache_folder": tmp_path}
    for turn in range(3):  # an engine each: what the last one left in the folder is found
        with running(GENERATOR, **options) as engine:
            for _ in range(2):
                told = Listener()
                engine.submit(greedy(history, 10), told)
                answer = told.completion()
                assert_same(told, alone(greedy(history, 10)))
                # Id 0 comes first; the last text, and what was said then, need not be read.
                expected = 1 + len(history) - 3 if len(history) > 200 else 0
                assert told.pieces[0].cached_tokens == expected
                history += [*answer.token_ids, 70 + turn, 71, 72]
            more = [Listener() for _ in range(6)]
            for place, other in enumerate(more):
                engine.submit(greedy([80 + place], 2), other)  # pushes the chat out of memory
                other.completion()
                folder = engine._scheduler.cache._folder
                while len(folder._written) < len(folder._unwritten):  # the disk
                    time.sleep(0.01)


def test_states_given_and_kept():
    first, second = Listener(), Listener()
    with running(GENERATOR, cache_bytes=1 << 20) as engine:
        engine.submit(greedy(LONG, 9), first, keep_state=True)
        state = first.completion().state
        want = GENERATOR.run([greedy(LONG, 9)], keep_state=True)[0]
        assert state.tokens_seen == want.state.tokens_seen == [210]
        assert error(state.logits, want.state.logits) < 3e-5
        go_on = Request([], SamplingSettings(temperature=0, max_new_tokens=9))
        for request in (go_on, greedy("More", 9)):
            second = Listener()
            engine.submit(request, second, state=state)
            assert_same(second, GENERATOR.run([request], state=want.state)[0])
        read, on_top = Listener(), Listener()
        engine.read(LONG, read)
        place = read.completion().state
        assert (read.completion().text, place.tokens_seen) == ("", [201])
        assert error(place.logits, GENERATOR.read([LONG]).logits) < 3e-5
        engine.read("Yes", on_top, state=place)
        assert on_top.completion().state.tokens_seen == [204]
        assert error(
            on_top.completion().state.logits, GENERATOR.read([[*LONG, *b"[gu"]]).logits
        ) < 3e-5  # fmt: skip
        with pytest.raises(ValueError, match="rows"):
            engine.submit(go_on, second, state=place.fork(2))


def test_penalties_know_what_came_before():
    penalised = {"presence_penalty": 5.0, "repetition_penalty": 1.3, "eos_token_id": ()}
    before = alone(greedy("Once", 8, **penalised))
    request = greedy([*b"Once"], 8, **penalised)
    request = replace(request, already_read=(7,), already_generated=(*before.token_ids,))
    told = Listener()
    with running(GENERATOR) as engine:
        engine.submit(request, told)
        assert_same(told, alone(request))
    assert not {*told.token_ids} & {*before.token_ids}


@pytest.mark.parametrize("length", [1, 2, 41, 190])
def test_logprobs_of_a_texts_own_tokens(length):
    told = Listener()
    with running(GENERATOR, piece_tokens=16) as engine:
        engine.submit_logprobs(LONG[:length], 3, told)
        assert told.completion().prompt_tokens == length + 1
        with pytest.raises(ValueError, match="logprobs"):
            engine.submit_logprobs(LONG, 21, told)
        alone_told = Listener()
        engine.submit_logprobs([0], 3, alone_told)
        assert alone_told.completion().prompt_tokens == 1
        assert alone_told.token_ids == []
        read, on = engine.stats().prompt_tokens, Listener()
        request = greedy(LONG[:length], 4, logprobs=3)
        engine.submit(request, on, score_prompt=True)
        on.completion()
        assert engine.stats().prompt_tokens == read + length + 1
    assert told.token_ids == LONG[:length]
    # The same scores, and then the text as it is without them.
    own, generated = Piece.joined(on.pieces).parts()
    scored = Piece.joined(told.pieces)
    assert own.token_ids == scored.token_ids
    assert own.logprobs == pytest.approx(scored.logprobs, abs=ROUNDING)
    assert [{*top} for top in own.top_logprobs] == [{*top} for top in scored.top_logprobs]
    assert generated.completion == on.completion()
    assert [*generated.token_ids] == alone(request).token_ids
    assert generated.logprobs == pytest.approx(alone(request).logprobs, abs=ROUNDING)
    fused, state = GENERATOR.model, GENERATOR.read([[0]]).memory.clone()
    state.zero_()
    with torch.inference_mode():
        # In the engine's pieces: where n·q nearly cancels, others round to something else.
        pieces = torch.tensor([[0, *LONG[: length - 1]]]).split(16, dim=1)
        logits = [fused.logits(fused.vectors(piece, state)[0]) for piece in pieces]
        want = torch.cat(logits).log_softmax(-1)
    own = [x for piece in told.pieces for x in piece.logprobs]
    picked = want.gather(1, torch.tensor(LONG[:length])[:, None])[:, 0]
    assert own == pytest.approx(picked.tolist(), abs=1e-5)
    tops = [top for piece in told.pieces for top in piece.top_logprobs]
    assert [[*top] for top in tops] == want.topk(3).indices.tolist()
