"""The engine: each request gets the output that it would get alone, whatever else runs."""

import gc
import random
import sys
import threading
import tracemalloc
from dataclasses import replace

import pytest
import torch
from engines import (
    ROUNDING,
    Driver,
    ImmediateExecutor,
    assert_same_completion,
    copy_of,
    gpu_like_engine,
    greedy,
    is_idle,
    new_engine,
    run_alone,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import assert_state_after, spread_model
from torch.utils._python_dispatch import TorchDispatchMode

from xlstm7b.generate import Completion, Engine, Request, RequestStatus, SamplingParams
from xlstm7b.generate.fused import FusedModel
from xlstm7b.model import XLSTM, ModelState

MODEL = spread_model()
both_engines = pytest.mark.parametrize("make_engine", [new_engine, gpu_like_engine])
PROMPTS = ["Once upon a time", "A", "é", "The quick brown fox jumps over the lazy dog.", "A b"]
LONG = random.Random(0).choices(range(2, 258), k=200)


COMPLETIONS: dict[str, Completion] = {}


def alone(request: Request) -> Completion:
    """One run for all equal requests that neither have nor return a state."""
    if request.state is not None or request.keep_state or request.prefill_only:
        return run_alone(MODEL, copy_of(request))
    given = request.prompt, request.previous_prompt, request.previous_output
    key = repr((given, request.params, request.prompt_logprobs, request.adapter))
    if key not in COMPLETIONS:
        COMPLETIONS[key] = run_alone(MODEL, copy_of(request))
    return COMPLETIONS[key]


def run_one(engine: Engine, request: Request) -> Completion:
    driver = Driver(engine)
    driver.add(request)
    driver.finish()
    return driver.completion(request)


# The same output, alone and in a batch


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_tokens": 5},
        {"prefill_tokens": 16, "cache_bytes": 1 << 20, "cache_interval": 24},
        {"slots": 3, "cache_bytes": 1 << 20, "cache_interval": 7},
        {"slots": 2, "prefill_tokens": 1, "cache_bytes": 1 << 20, "cache_interval": 1},
    ],
)
@both_engines
def test_greedy_output_is_the_same_alone_and_batched_and_cold_and_warm(make_engine, options):
    requests = [greedy(prompt) for prompt in [*PROMPTS, LONG, LONG[:150]]]
    want = [alone(request) for request in requests]
    engine = make_engine(MODEL, **options)
    for request, one in zip(requests, want, strict=True):
        assert_same_completion(run_one(engine, copy_of(request)), one)
    for _ in range(2):
        driver = Driver(engine)
        many = driver.add_all(copy_of(request) for request in requests * 2)
        driver.finish()
        for request, one in zip(many, want * 2, strict=True):
            assert_same_completion(driver.completion(request), one)
    assert is_idle(engine)


def test_a_model_without_a_first_token():
    model = spread_model(force_bos_token_insert=False)
    requests = [greedy(prompt) for prompt in [*PROMPTS, LONG, LONG[:150]]]
    want = [run_alone(model, copy_of(request)) for request in requests]
    assert [one.prompt_tokens for one in want] == [16, 1, 2, 44, 3, 200, 150]
    driver = Driver(new_engine(model, slots=3, prefill_tokens=16, cache_bytes=1 << 20))
    for cached in ([0, 0, 0, 0, 1, 0, 0], [16, 1, 2, 44, 3, 200, 150]):  # "A b" starts with "A"
        many = driver.add_all(copy_of(request) for request in requests)
        driver.finish()
        for request, one in zip(many, want, strict=True):
            assert_same_completion(driver.completion(request), one)
        assert [request.cached_tokens for request in many] == cached
    with pytest.raises(ValueError, match=r"^the prompt is empty, and this model has no"):
        driver.add(greedy(""))
    assert is_idle(driver.engine)


def test_a_stored_state_changes_no_bit():
    """Prompts are cut at the same positions, whether or not a stored state saves the first."""
    asked = greedy([*LONG[:170], 65], logprobs=3)
    found = []
    for before, cached in (([], 0), ([LONG], 161), ([asked.prompt, LONG], 172)):
        engine = new_engine(MODEL, cache_bytes=1 << 20, prefill_tokens=16, cache_interval=32)
        for prompt in before:
            run_one(engine, greedy(prompt))
        driver = Driver(engine)
        request = driver.add(copy_of(asked))
        driver.add_all(greedy("Meanwhile") for _ in range(7 * bool(before)))
        driver.finish()
        completion = driver.completion(request)
        found.append((completion.token_ids, completion.logprobs, completion.top_logprobs))
        assert completion.cached_tokens == cached
    assert found[0] == found[1] == found[2]


@settings(max_examples=15)
@given(
    length=st.integers(1, 120),
    first=st.integers(1, 200),
    others=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=6),
    chunks=st.integers(1, 4),
)
def test_neither_the_cache_nor_other_requests_change_a_bit(length, first, others, chunks):
    """On a CPU, with states stored where prompts are cut anyway."""
    asked = greedy(LONG[:length], 6, logprobs=2)
    found = []
    for warm in (False, True):
        engine = new_engine(
            MODEL, slots=4, prefill_tokens=16, cache_bytes=1 << 22, cache_interval=16 * chunks
        )
        driver = Driver(engine)
        if warm:
            # Another prompt with the same start, but not the same end.
            run_one(engine, greedy([*LONG[: min(first, length - 1)], 1], 1))
            for tokens, steps in others:
                driver.add(greedy([3, *LONG[:tokens]], 3))
                driver.step(steps)
        request = driver.add(copy_of(asked))
        driver.finish()
        got = driver.completion(request)
        found.append((got.token_ids, got.logprobs, got.top_logprobs))
    assert found[0] == found[1]


request_params = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 14),
        "temperature": st.sampled_from([0.0, 0.0, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([1.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 3.0]),
        "logit_bias": st.sampled_from([{}, {65: 30.0}]),
        "seed": st.integers(0, 99),
        "logprobs": st.sampled_from([None, 0, 4]),
        "stop_strings": st.sampled_from([(), ("e",)]),
    }
)
arrivals = st.tuples(
    st.integers(0, 60),  # tokens of LONG, so that prompts share prefixes
    st.sampled_from([(), (), (), (7,), (8, 9)]),  # tokens after them
    request_params,
    st.sampled_from([None, None, None, "keep_state", "prefill_only", "prompt_logprobs", "scores"]),
    st.integers(0, 3),  # steps until the next request arrives
    st.one_of(st.none(), st.none(), st.integers(0, 12)),  # steps until it is aborted
)


def arriving(length, end, params, kind) -> Request:
    options = {
        None: {},
        "keep_state": {"keep_state": True},
        "prefill_only": {"prefill_only": True},
        "prompt_logprobs": {"prompt_logprobs": 2},
        "scores": {"prompt_logprobs": 2, "prefill_only": True},
    }[kind]
    return Request([*LONG[:length], *end], SamplingParams(**params), **options)


@pytest.mark.long
@settings(max_examples=35)
@given(
    asked=st.lists(arrivals, min_size=1, max_size=10),
    slots=st.integers(1, 5),
    chunk=st.sampled_from([4, 16, 512]),
    cache=st.sampled_from([0, 1 << 15, 1 << 22]),
    make_engine=st.sampled_from([new_engine, gpu_like_engine]),
)
def test_any_arrivals_and_aborts(asked, slots, chunk, cache, make_engine):
    engine = make_engine(
        MODEL, slots=slots, prefill_tokens=chunk, cache_bytes=cache, cache_interval=8
    )
    driver = Driver(engine)
    aborts: dict[int, list[Request]] = {}
    step = 0

    def advance() -> None:
        nonlocal step
        for request in aborts.pop(step, ()):
            engine.abort(request)
            assert request.finished
            returned = len(driver.outputs[request])
            ended.setdefault(request, returned)
        driver.step()
        step += 1

    ended: dict[Request, int] = {}
    requests = []
    for length, end, params, kind, pause, abort_after in asked:
        request = driver.add(arriving(length, end, params, kind))
        requests.append(request)
        if abort_after is not None:
            aborts.setdefault(step + abort_after, []).append(request)
        for _ in range(pause):
            advance()
    while not all(request.finished for request in requests) or engine.has_requests:
        advance()
        assert step < 3000
    for request in requests:
        if request in ended:
            assert len(driver.outputs[request]) == ended[request]  # nothing came after the abort
        want = alone(request)
        if request.status is RequestStatus.ABORTED:
            assert driver.token_ids(request) == want.token_ids[: len(driver.token_ids(request))]
        else:
            assert request.status is RequestStatus.FINISHED
            assert_same_completion(driver.completion(request), want)
    assert is_idle(engine)


# How prompts are read


def test_a_long_prompt_does_not_hold_up_running_requests():
    driver = Driver(new_engine(MODEL, slots=4, prefill_tokens=128))
    engine = driver.engine
    running = driver.add(greedy("A", 400, eos_token_id=()))
    driver.step(2)
    long, short = driver.add(greedy(LONG * 25, 3)), driver.add(greedy("Short", 3))
    steps, read = 0, engine.stats().prompt_tokens
    while not driver.outputs[long]:
        before = len(driver.token_ids(running))
        driver.step()
        steps += 1
        assert len(driver.token_ids(running)) == before + 1
        # A chunk, and a rest that is too short for a step of its own.
        assert 0 < engine.stats().prompt_tokens - read <= 128 + 64
        read = engine.stats().prompt_tokens
        # The short prompt gets its turn between the long one's chunks.
        assert bool(driver.outputs[short]) == (steps >= 2)
    assert steps == 5000 // 128 + 1  # the last 8 tokens go with the chunk before them
    assert driver.token_ids(long)[0] == alone(greedy(LONG * 25, 1)).token_ids[0]


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("slots", [2, 16])
@both_engines
def test_a_shared_prompt_is_read_once(make_engine, slots, cache_bytes):
    driver = Driver(
        make_engine(
            MODEL, slots=slots, prefill_tokens=32, cache_bytes=cache_bytes, cache_interval=64
        )
    )
    request = Request(LONG, SamplingParams(max_new_tokens=5, seed=3))
    many = driver.add_all(request.with_seed_offset(n) for n in range(9))
    driver.finish()
    stats = driver.engine.stats()
    assert stats.prompt_tokens == 201  # with the first token
    assert stats.cached_tokens == 8 * 201  # the first token counts as cached
    assert [one.cached_tokens for one in many] == [0] + [201] * 8
    for n, one in enumerate(many):
        assert_same_completion(driver.completion(one), alone(request.with_seed_offset(n)))


def test_a_prompt_whose_first_reader_is_aborted_is_read_once_more():
    driver = Driver(new_engine(MODEL, slots=4, prefill_tokens=32))
    first, second, third = driver.add_all(greedy(LONG, 5) for _ in range(3))
    driver.step(3)
    assert (second.status, second.position) == (RequestStatus.PREFILL, -1)  # waits for the first
    driver.engine.abort(first)
    driver.finish()
    assert driver.engine.stats().prompt_tokens == 1 + 3 * 32 + 201
    assert third.cached_tokens == 201
    for request in (second, third):
        assert_same_completion(driver.completion(request), alone(request))


@both_engines
def test_a_shared_prefix_is_read_once(make_engine):
    driver = Driver(
        make_engine(MODEL, slots=8, prefill_tokens=32, cache_bytes=1 << 22, cache_interval=64)
    )
    many = driver.add_all(greedy([*LONG, *[70 + n] * n], 3) for n in range(5))
    driver.finish()
    # The first request's prompt is the prefix; its state is stored at the end.
    assert driver.engine.stats().prompt_tokens == 201 + 1 + 2 + 3 + 4
    for request in many:
        assert_same_completion(driver.completion(request), alone(request))


@pytest.mark.parametrize("at_once", [False, True])
@both_engines
def test_a_state_is_stored_where_prompts_start_to_differ(make_engine, at_once):
    """A system prompt ends anywhere: the second request that has it shows where."""
    driver = Driver(make_engine(MODEL, slots=8, cache_bytes=1 << 22))
    many = []
    for n in range(5):
        many.append(driver.add(greedy([*LONG, *[70 + n] * 30], 3)))
        if not at_once:
            driver.step(20)
    driver.finish()
    # They share 200 tokens: three blocks of 64, after the first token.
    assert [request.cached_tokens for request in many] == [0, 0, 193, 193, 193]
    assert driver.engine.stats().prompt_tokens == 2 * 231 + 3 * (231 - 193)
    for request in many:
        assert_same_completion(driver.completion(request), alone(request))


@both_engines
def test_storing_a_state_does_not_end_a_turn(make_engine):
    driver = Driver(make_engine(MODEL, slots=8, cache_bytes=1 << 22, cache_interval=100))
    for n in range(3):
        request = driver.add(greedy([*LONG, *[70 + n] * 30], 3))
        driver.step()
        assert len(driver.token_ids(request)) == 1
        driver.finish()


def test_a_growing_chat_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr("xlstm7b.generate.prefix_cache.ThreadPoolExecutor", ImmediateExecutor)
    history, options = [*LONG], {"cache_bytes": 1 << 14, "cache_folder": tmp_path}
    hits, others = 0, iter(range(100))
    for turn in range(3):  # an engine each: it finds the files that the last one wrote
        engine = new_engine(MODEL, **options)
        for _ in range(2):
            request = greedy(history, 10)
            answer = run_one(engine, request)
            assert_same_completion(answer, alone(request))
            # The first token, the last prompt and its answer need not be read again.
            expected = 1 + len(history) - 3 if len(history) > 200 else 0
            assert request.cached_tokens == answer.cached_tokens == expected
            history += [*answer.token_ids, 70 + turn, 71, 72]
            for _ in range(6):
                run_one(engine, greedy([80 + next(others)], 2))  # evicts the chat from memory
        hits += engine.stats().cache_hits["disk"]
        engine.close()
    assert hits == 5


# States


@both_engines
def test_states_given_and_kept(make_engine):
    engine = make_engine(MODEL, cache_bytes=1 << 20)
    first = run_one(engine, copy_of(greedy(LONG, 9), keep_state=True))
    want = alone(copy_of(greedy(LONG, 9), keep_state=True))
    assert first.state.tokens_seen == want.state.tokens_seen == [210]
    assert error(first.state.logits, want.state.logits) < 3e-5
    for request in (greedy([], 9), greedy("More", 9)):
        got = run_one(engine, copy_of(request, state=first.state))
        assert_same_completion(got, alone(copy_of(request, state=want.state)))
        assert got.cached_tokens == 0
    assert first.state.tokens_seen == [210]  # it was copied
    read = run_one(engine, Request(LONG, prefill_only=True))
    assert (read.text, read.token_ids, read.finish_reason) == ("", [], "length")
    assert_state_after(read.state, MODEL, [0, *LONG], 3e-5)
    on_top = run_one(engine, Request("Yes", prefill_only=True, state=read.state))
    assert_state_after(on_top.state, MODEL, [0, *LONG, *b"[gu"], 3e-5)
    with pytest.raises(ValueError, match=r"^a request continues one state, not 2$"):
        engine.add_request(Request([], state=read.state.fork(2)))
    other = XLSTM(replace(MODEL.config, num_blocks=3))
    with pytest.raises(ValueError, match=r"^this state was saved by another model: it has num_bl"):
        new_engine(other, slots=1).add_request(Request([], state=read.state))


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("slots", [1, 3, 8])
@both_engines
def test_a_kept_state_has_read_exactly_the_output_however_it_finished(
    make_engine, slots, cache_bytes
):
    """Requests that finish early do not change while the others go on."""
    long = SamplingParams(max_new_tokens=20, temperature=0, eos_token_id=())
    full = [alone(Request(prompt, long)) for prompt in PROMPTS]
    eos, stop = full[1].token_ids[6], full[3].text[3:5]
    cases = [
        (replace(long, max_new_tokens=5), "length"),
        (replace(long, eos_token_id=[eos, 1]), "stop"),
        (long, "length"),
        (replace(long, stop_strings=(stop,)), "stop"),
        (replace(long, max_new_tokens=1), "length"),
    ]
    driver = Driver(make_engine(MODEL, slots=slots, cache_bytes=cache_bytes))
    requests = driver.add_all(
        Request(prompt, params, keep_state=True)
        for prompt, (params, _) in zip(PROMPTS, cases, strict=True)
    )
    driver.finish()
    got = [driver.completion(request) for request in requests]
    assert [one.finish_reason for one in got] == [reason for _, reason in cases]
    assert got[0].token_ids == full[0].token_ids[:5]
    assert got[1].token_ids == full[1].token_ids[: full[1].token_ids.index(eos)]
    assert got[2].token_ids == full[2].token_ids
    assert got[3].text == full[3].text[: full[3].text.index(stop)]
    assert 0 < len(got[3].token_ids) < 20
    assert got[4].token_ids == full[4].token_ids[:1]
    for request, one in zip(requests, got, strict=True):
        assert_state_after(one.state, MODEL, [*request.prompt_token_ids, *one.token_ids], 3e-5)
        continued = alone(copy_of(greedy([], 12), state=one.state))
        whole = alone(greedy([*request.prompt_token_ids, *one.token_ids], 12))
        assert continued.token_ids == whole.token_ids
    assert is_idle(driver.engine)
    driver.add_all(Request(prompt, long) for prompt in PROMPTS)
    driver.finish()
    assert all(driver.completion(request).state is None for request in [*driver.outputs][5:])


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("steps", range(1, 14))
@both_engines
def test_finish_ends_a_request_after_its_latest_token(make_engine, steps, keep_state):
    driver = Driver(make_engine(MODEL, slots=2))
    request = driver.add(copy_of(greedy("A"), keep_state=keep_state))
    other = driver.add(greedy("Other", 20))
    driver.step(steps)
    tokens = driver.token_ids(request)
    driver.engine.finish(request)
    driver.engine.finish(request)  # once more changes nothing
    driver.finish()
    completion = driver.completion(request)
    assert completion.token_ids == alone(greedy("A")).token_ids[:steps]
    # The last output waits until the state has read its token. A GPU is one step ahead.
    waits = keep_state and steps == 12 and make_engine is new_engine
    assert tokens == (completion.token_ids[:-1] if waits else completion.token_ids)
    assert completion.finish_reason == ("length" if steps >= 12 else "stop")
    if keep_state:
        assert_state_after(
            completion.state, MODEL, [*request.prompt_token_ids, *completion.token_ids], 3e-5
        )
    assert_same_completion(driver.completion(other), alone(other))
    assert is_idle(driver.engine)


def test_finish_changes_nothing_for_requests_that_have_no_output():
    driver = Driver(new_engine(MODEL, slots=1, prefill_tokens=16))
    reading, waiting = driver.add(greedy(LONG, 3)), driver.add(greedy("A", 3))
    driver.step()
    for request in (reading, waiting):
        driver.engine.finish(request)
        assert not request.finished
    driver.finish()
    for request in (reading, waiting):
        driver.engine.finish(request)
        assert_same_completion(driver.completion(request), alone(request))
    assert is_idle(driver.engine)


def test_penalties_count_tokens_that_the_state_has_read():
    penalties = {"presence_penalty": 5.0, "repetition_penalty": 1.3, "eos_token_id": ()}
    before = alone(greedy("Once", 8, **penalties))
    request = copy_of(
        greedy([*b"Once"], 8, **penalties),
        previous_prompt=(7,),
        previous_output=(*before.token_ids,),
    )
    got = run_one(new_engine(MODEL), request)
    assert_same_completion(got, alone(request))
    assert not {*got.token_ids} & {*before.token_ids}


# Log-probabilities of prompts


@pytest.mark.parametrize("length", [1, 2, 41, 190])
@both_engines
def test_log_probabilities_of_a_prompt(make_engine, length):
    driver = Driver(make_engine(MODEL, prefill_tokens=16))
    engine = driver.engine
    scored = driver.add(Request(LONG[:length], prompt_logprobs=3, prefill_only=True))
    driver.finish()
    completion = driver.completion(scored)
    assert completion.prompt_tokens == length + 1
    assert completion.token_ids == []
    first_only = driver.add(Request([0], prompt_logprobs=3, prefill_only=True))
    driver.finish()
    assert driver.completion(first_only).prompt_tokens == 1
    assert first_only.status is RequestStatus.FINISHED
    assert all(output.prompt_logprobs == () for output in driver.outputs[first_only])
    read = engine.stats().prompt_tokens
    continued = driver.add(copy_of(greedy(LONG[:length], 4, logprobs=3), prompt_logprobs=3))
    driver.finish()
    assert engine.stats().prompt_tokens == read + length + 1
    assert is_idle(engine)

    def prompt_scores(request: Request) -> tuple[list[float], list[dict[int, float]]]:
        outputs = driver.outputs[request]
        return (
            [x for output in outputs for x in output.prompt_logprobs],
            [top for output in outputs for top in output.prompt_top_logprobs],
        )

    # The same scores, and then the output as it is without them.
    own, tops = prompt_scores(scored)
    own_again, tops_again = prompt_scores(continued)
    assert own_again == pytest.approx(own, abs=ROUNDING)
    assert [{*top} for top in tops_again] == [{*top} for top in tops]
    assert_same_completion(
        driver.completion(continued), alone(greedy(LONG[:length], 4, logprobs=3))
    )

    fused, state = FusedModel(MODEL), ModelState.zeros(MODEL.config, 1)
    with torch.inference_mode():
        # In the chunks of a CPU: where n·q nearly cancels, others round differently.
        chunks = torch.tensor([[0, *LONG[: length - 1]]]).split(16, dim=1)
        logits = [fused.logits(fused.vectors(chunk, state)[0]) for chunk in chunks]
        want = torch.cat(logits).log_softmax(-1)
    picked = want.gather(1, torch.tensor(LONG[:length])[:, None])[:, 0]
    tolerance = 1e-5 if make_engine is new_engine else ROUNDING
    assert own == pytest.approx(picked.tolist(), abs=tolerance)
    assert [[*top] for top in tops] == want.topk(3).indices.tolist()
    values = torch.tensor([[*top.values()] for top in tops])
    torch.testing.assert_close(values, want.topk(3).values, rtol=0, atol=tolerance)


def test_log_probabilities_without_any_top_tokens():
    driver = Driver(new_engine(MODEL))
    request = driver.add(Request("A prompt", prompt_logprobs=0, prefill_only=True))
    driver.finish()
    (output, last) = driver.outputs[request]
    assert len(output.prompt_logprobs) == 8
    assert output.prompt_top_logprobs == ({},) * 8
    assert last.completion.state is None


def test_log_probabilities_of_a_prompt_on_top_of_a_state():
    """The first token has none; the others are those of the whole text."""
    driver = Driver(new_engine(MODEL, slots=3))
    state = run_one(driver.engine, Request(LONG[:50], prefill_only=True)).state
    on_top, whole = driver.add_all(
        Request(prompt, prompt_logprobs=1, prefill_only=True, state=start)
        for prompt, start in ((LONG[50:90], state), (LONG[:90], None))
    )
    driver.finish()
    got, want = (driver.outputs[request][0].prompt_logprobs for request in (on_top, whole))
    assert (len(got), len(want)) == (39, 90)
    assert got == pytest.approx(want[51:], abs=ROUNDING)


@pytest.mark.parametrize("wanted", [-1, 21, 2.5, True])
def test_a_wrong_number_of_prompt_log_probabilities(wanted):
    engine = new_engine(MODEL, slots=1)
    with pytest.raises(ValueError, match=f"^prompt_logprobs must be .*, not {wanted}$"):
        engine.add_request(Request(LONG, prompt_logprobs=wanted))
    assert not engine.has_requests


# Aborts, errors, mistakes


@pytest.mark.long
@both_engines
def test_many_aborts_leave_memory_flat(make_engine):
    chance = random.Random(0)
    model = spread_model(num_blocks=1)
    engine = make_engine(model, slots=8, prefill_tokens=16, cache_bytes=1 << 16)

    def aborts(rounds: int) -> None:
        for _ in range(rounds):
            driver = Driver(engine)
            requests = driver.add_all(greedy("x" * chance.randrange(40), 50) for _ in range(10))
            driver.step(chance.randrange(12))
            for request in requests:
                engine.abort(request)
            assert is_idle(engine)

    tracemalloc.start()  # before the first round: its objects are replaced later
    aborts(10)
    gc.collect()
    before = tracemalloc.take_snapshot()
    aborts(40)
    gc.collect()
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    grown = sum(line.size_diff for line in after.compare_to(before, "filename"))
    assert grown < 100_000
    assert engine.stats().cache_bytes["device"] <= 1 << 16


@both_engines
def test_no_output_follows_an_abort(make_engine):
    driver = Driver(make_engine(MODEL, slots=1))
    job, waiting = driver.add_all([greedy("A", 100_000, eos_token_id=()), greedy("B")])
    driver.step(3)
    assert (job.status, waiting.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    assert 0 < job.added <= job.admitted <= job.first_token
    driver.engine.abort(job)
    count = len(driver.outputs[job])
    driver.finish()
    assert_same_completion(driver.completion(waiting), alone(waiting))
    assert len(driver.outputs[job]) == count
    assert (job.status, waiting.status) == (RequestStatus.ABORTED, RequestStatus.FINISHED)
    assert is_idle(driver.engine)


@pytest.mark.parametrize("keep_state", [False, True])
@both_engines
def test_a_request_that_is_ended_and_then_aborted_returns_nothing(make_engine, keep_state):
    driver = Driver(make_engine(MODEL, slots=2))
    request, other = driver.add_all([copy_of(greedy("A"), keep_state=keep_state), greedy("B")])
    driver.step(2)
    driver.engine.finish(request)
    driver.engine.abort(request)
    count = len(driver.outputs[request])
    driver.finish()
    assert len(driver.outputs[request]) == count
    assert_same_completion(driver.completion(other), alone(other))
    assert is_idle(driver.engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 50])
@both_engines
def test_an_abort_at_any_time_frees_the_slot(make_engine, steps):
    driver = Driver(make_engine(MODEL, slots=1, prefill_tokens=64, cache_bytes=1 << 20))
    request = driver.add(copy_of(greedy(LONG, 5), keep_state=True))
    next_one = driver.add(greedy("A"))
    driver.step(steps)
    for _ in range(2):
        driver.engine.abort(request)
    driver.finish()
    assert_same_completion(driver.completion(next_one), alone(next_one))
    assert request.state is None
    assert is_idle(driver.engine)


def test_an_abort_before_a_request_was_added():
    engine, request = new_engine(MODEL, slots=1), greedy("A")
    engine.abort(request)
    assert request.status is RequestStatus.ABORTED
    with pytest.raises(ValueError, match=r"^a request can be added once; build a new one$"):
        engine.add_request(request)


@pytest.mark.parametrize("method", ["abort", "finish"])
@both_engines
def test_a_request_of_another_engine_is_left_alone(make_engine, method):
    first, second = (Driver(make_engine(MODEL, slots=2)) for _ in range(2))
    requests = [driver.add(greedy("A")) for driver in (first, second)]
    for driver in (first, second):
        driver.step(2)
    getattr(second.engine, method)(requests[0])
    for driver, request in zip((first, second), requests, strict=True):
        driver.finish()
        assert_same_completion(driver.completion(request), alone(request))
        assert is_idle(driver.engine)


@pytest.mark.parametrize("params", [{}, {"logprobs": 2}, {"seed": 1}])
@both_engines
@torch.no_grad()
def test_logits_that_are_not_numbers_fail_one_request(make_engine, params):
    model = spread_model()
    model.backbone.embeddings.weight[ord("~") + 2] = torch.nan
    driver = Driver(make_engine(model, slots=2, cache_bytes=1 << 20))
    broken, sound = driver.add_all([greedy("a~b", **params), greedy("B")])
    driver.step()
    later = driver.add(greedy("A"))
    driver.finish()
    assert isinstance(driver.error(broken), FloatingPointError)
    assert "the model's logits are not numbers" in str(driver.error(broken))
    assert [output.token_ids for output in driver.outputs[broken]] == [()]
    assert broken.status is RequestStatus.FAILED
    for request in (sound, later):
        assert_same_completion(driver.completion(request), alone(request))
    assert is_idle(driver.engine)


@pytest.mark.parametrize("options", [{}, {"prefill_only": True}])
@pytest.mark.parametrize("prompt", ["a~b", "a" * 1100 + "~b" + "a" * 1100])
@both_engines
@torch.no_grad()
def test_prompt_logprobs_that_are_not_numbers_fail_one_request(make_engine, prompt, options):
    model = spread_model()
    model.backbone.embeddings.weight[ord("~") + 2] = torch.nan
    driver = Driver(make_engine(model, slots=2, cache_bytes=1 << 20))
    scored = Request(prompt, SamplingParams(max_new_tokens=4), prompt_logprobs=1, **options)
    broken, sound = driver.add_all([scored, greedy("B")])
    driver.finish()
    assert "the model's logits are not numbers" in str(driver.error(broken))
    assert broken.status is RequestStatus.FAILED
    assert_same_completion(driver.completion(sound), alone(sound))
    assert is_idle(driver.engine)


def test_a_fault_of_the_model_is_raised(monkeypatch):
    driver = Driver(new_engine(MODEL, slots=2))
    driver.add_all(greedy("A", 50, eos_token_id=()) for _ in range(4))
    driver.step(3)
    monkeypatch.setattr(FusedModel, "step", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver.step()


def test_mistakes_are_named():
    for name in ("slots", "prefill_tokens", "cache_interval"):
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, not 0$"):
            new_engine(MODEL, **{name: 0})
    with pytest.raises(ValueError, match=r"^state_dtype must be float32 or bfloat16, not torch"):
        new_engine(MODEL, state_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^state_dtype must be float32 or bfloat16, not 'half'$"):
        new_engine(MODEL, state_dtype="half")
    for dtype in (torch.float32, torch.bfloat16):
        assert new_engine(MODEL, state_dtype=str(dtype)[6:]).state_dtype == dtype
    engine = new_engine(MODEL, slots=1)
    for request, sentence in (
        (greedy("A", 0), "max_new_tokens must be at least 1, not 0"),
        (greedy([5, 320]), "token 320 is outside the vocabulary of 320"),
        (Request("A", previous_prompt=[320]), "token 320 is outside the vocabulary of 320"),
        (Request("A", previous_output=[-1]), "token -1 is outside the vocabulary of 320"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            engine.add_request(request)
    assert not engine.has_requests
    request = engine.add_request(greedy("A"))
    with pytest.raises(ValueError, match=r"^a request can be added once; build a new one$"):
        engine.add_request(request)


# Costs


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """How many rows each decode step computed."""
    rows, step = [], FusedModel.step

    def counted(self, tokens, *arguments, **options):
        rows.append(len(tokens))
        return step(self, tokens, *arguments, **options)

    monkeypatch.setattr(FusedModel, "step", counted)
    return rows


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_no_decode_step_is_wasted(decoded, tokens, keep_state):
    """The first token comes from the prompt; the last is read only if the state is wanted."""
    engine = new_engine(MODEL, slots=4)
    engine.warm_up()  # reads the first token
    decoded.clear()
    request = copy_of(greedy("A prompt", tokens, eos_token_id=()), keep_state=keep_state)
    assert len(run_one(engine, request).token_ids) == tokens
    assert decoded == [4] * (tokens - 1 + keep_state)
    assert engine.stats().generated_tokens == tokens


def test_one_token_prompts_are_read_together(decoded):
    driver = Driver(new_engine(MODEL, slots=4))
    driver.engine.warm_up()
    decoded.clear()
    driver.add_all(greedy([70 + n], 1) for n in range(4))
    driver.finish()
    assert decoded == [4]


def test_stats():
    driver = Driver(new_engine(MODEL, slots=2, prefill_tokens=64, cache_bytes=1 << 20))
    stats = driver.engine.stats()
    assert (stats.slots, stats.running, stats.waiting, stats.steps) == (2, 0, 0, 0)
    driver.add_all(greedy(LONG, 4, eos_token_id=()) for _ in range(5))
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting) == (0, 5)
    driver.step()
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting, stats.steps) == (2, 3, 1)
    driver.finish()
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.cached_tokens) == (201, 20, 804)
    assert stats.cache_hits == {"device": 4, "host": 0, "disk": 0}
    assert stats.cache_bytes["device"] > 0
    assert 0 < stats.model_seconds < stats.seconds
    assert 0 < stats.request_seconds < 60


def test_requests_may_be_prepared_in_other_threads():
    engine, made = new_engine(MODEL, slots=4), []

    def prepare(n: int) -> None:
        made.append(greedy("Text " * n, 5).prepare(engine.config, engine.tokenizer))

    threads = [threading.Thread(target=prepare, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    driver = Driver(engine)
    driver.add_all(made)
    driver.finish()
    for request in made:
        assert_same_completion(driver.completion(request), alone(request))


# Slots that move to the front, as on a GPU: there a decode step computes a few numbers of slots,
# and does a few kinds of work.


KINDS = (
    {"temperature": 0.0},
    {"temperature": 2.0, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 5.0, "frequency_penalty": 0.5},
    {"temperature": 3.0, "logit_bias": {70: 20.0}, "min_new_tokens": 1},
)


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 25), st.integers(0, 3)), min_size=1, max_size=14),
    st.integers(0, 99),
    st.booleans(),
)
def test_requests_that_move_to_lower_slots_get_the_same_output(work, seed, keep_state):
    driver = Driver(gpu_like_engine(MODEL, slots=8, prefill_tokens=8))
    requests = []
    for tokens, kind in work:
        params = SamplingParams(max_new_tokens=tokens, seed=seed, **KINDS[kind])
        requests.append(driver.add(Request("x" * tokens, params, keep_state=keep_state)))
        driver.step(2)
    driver.finish()
    for request in requests:
        got = driver.completion(request)
        assert_same_completion(got, alone(request))
        if keep_state:
            assert_state_after(got.state, MODEL, [*request.prompt_token_ids, *got.token_ids], 3e-5)
    assert is_idle(driver.engine)


def test_few_requests_make_small_decode_steps(decoded):
    driver = Driver(gpu_like_engine(MODEL, slots=8))
    *_, last = driver.add_all(
        greedy("Some text", tokens, eos_token_id=()) for tokens in (2, 2, 2, 2, 2, 2, 40)
    )
    driver.step()
    decoded.clear()  # a graph's first use runs it twice
    driver.step(10)
    # Seven slots at first; then one, the last of them, which moves to the front.
    assert last.slot == 0
    assert decoded[-1] == 1
    assert 8 not in decoded[2:]
    driver.finish()
    assert_same_completion(driver.completion(last), alone(last))


def test_a_step_does_little_work_outside_the_model(monkeypatch):
    """As many tensor operations for 64 requests as for 8, and few calls for each request."""
    depth = operations = calls = 0

    def inside(work):
        def call(*arguments, **options):
            nonlocal depth
            depth += 1
            result = work(*arguments, **options)
            depth -= 1
            return result

        return call

    class CountOperations(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            nonlocal operations
            operations += not depth
            return operation(*args, **(kwargs or {}))

    def count_calls(frame, event, function):
        nonlocal calls
        calls += not depth and event in ("call", "c_call")

    for name in ("step", "read", "logits"):
        monkeypatch.setattr(FusedModel, name, inside(getattr(FusedModel, name)))
    found = {}
    for slots in (8, 64):
        driver = Driver(new_engine(MODEL, slots=slots))
        requests = driver.add_all(
            Request("What is the time?", SamplingParams(seed=n, max_new_tokens=90, eos_token_id=()))
            for n in range(slots)
        )
        while not all(driver.token_ids(request) for request in requests):
            driver.step()
        operations = calls = 0
        with CountOperations():
            driver.step()
        sys.setprofile(count_calls)
        driver.step()
        sys.setprofile(None)
        found[slots] = operations, calls
    assert found[64][0] == found[8][0] < 100
    assert found[64][1] - found[8][1] < 50 * (64 - 8)  # 34 for each request
