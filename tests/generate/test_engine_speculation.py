"""Speculation changes no token: any drafts, greedy and sampled, alone and in a crowd.

Most tests draft with an oracle, which knows the output and is wrong now and then. A random model
hardly repeats itself, so lookup alone would find little.
"""

import copy
import random
import types
from collections.abc import Sequence
from functools import cache, partial
from typing import ClassVar

import pytest
import torch
from engines import (
    ROUNDING,
    Driver,
    GraphRunner,
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
from models import assert_state_after, random_model, spread_model
from speculation_cases import grammar_requests, many_requests

import forced_drafts
from xlstm7b.generate import Completion, Engine, Generator, Request, SamplingParams, SavedState
from xlstm7b.generate.chat import Chat
from xlstm7b.generate.drafts import MAX_DRAFT, DraftCost, LookupText, SuffixIndex
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.replay import INTERVAL, Rings, ring_sizes
from xlstm7b.generate.runner import ModelRunner, PrefillRow
from xlstm7b.generate.structured import Matcher, compile_grammar, draft_masks, next_masks
from xlstm7b.generate.unfused import UnfusedModel
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

torch.manual_seed(0)
EXACT = random_model()
FUSED = FusedModel(copy.deepcopy(EXACT))
MODEL = spread_model()
ENDLESS = SamplingParams(temperature=0, eos_token_id=(), max_new_tokens=1000)
both_engines = pytest.mark.parametrize("make_engine", [new_engine, gpu_like_engine])


# The runner


def exact_runner(
    slots: int, interval: int = 3, kind: type[ModelRunner] = GraphRunner
) -> ModelRunner:
    runner = kind(FUSED, slots, state_dtype=torch.float64, drafts=MAX_DRAFT)
    size = interval + 2 * MAX_DRAFT + 1
    runner._rings = Rings.zeros(
        FUSED.config, slots, dtype=torch.float64, interval=interval, size=size
    )
    runner._parts = {n: runner._part(n) for n in runner._parts}
    runner._replay_from = 1
    return runner


def assert_has_read(runner: ModelRunner, slot: int, tokens: Sequence[int], back: int = 0) -> None:
    """The slot holds the state after these tokens, and the one before the last `back` of them."""
    assert_state_after(runner.saved(slot, back), EXACT, tokens[: len(tokens) - back])


@cache
@torch.no_grad()
def continued(prompt: tuple[int, ...], count: int = 120) -> list[int]:
    """The tokens that greedily follow a prompt."""
    logits, state = EXACT(torch.tensor([prompt]), logits="last")
    tokens = []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits, state = EXACT(torch.tensor([tokens[-1:]]), state, logits="last")
    return tokens


@settings(max_examples=30)
@given(
    data=st.data(),
    slots=st.integers(1, 5),
    interval=st.integers(1, 5),
    kind=st.sampled_from([ModelRunner, GraphRunner]),
    replay_from=st.sampled_from([0, 3, 16]),
)
def test_any_order_of_calls(data, slots, interval, kind, replay_from):
    """Slots start, stop, move and start again; drafts are right up to any place.

    Steps without drafts come in between. They write the states on a CPU, and of few slots.
    """
    runner = exact_runner(slots, interval, kind)
    runner._replay_from = replay_from
    read = dict[int, tuple[tuple[int, ...], int]]()  # by slot: the prompt, and how much after it
    for _ in range(12):
        free = [slot for slot in range(slots) if slot not in read]
        action = data.draw(st.sampled_from(["start", "stop", "move", "step", *["pass"] * 3]))
        if action == "start" and free:
            slot = data.draw(st.sampled_from(free))
            prompt = (0, *data.draw(st.sampled_from([(1,), (2, 9), (5, 5, 5, 5)])))
            runner.prefill([PrefillRow(slot, prompt[1:], True)])
            runner.start(slot, ENDLESS, seed=0)
            assert runner.sample([slot]).lists() == [continued(prompt)[:1]]
            read[slot] = prompt, 0
        elif action == "stop" and read:
            slot = data.draw(st.sampled_from(sorted(read)))
            runner.stop(slot)
            del read[slot]
        elif action == "move" and read and free:
            source, target = max(read), min(free)
            runner.move(source, target)
            read[target] = read.pop(source)
        elif action == "step" and read:
            (found,) = runner.decode(max(read)).lists()
            for slot, (prompt, count) in read.items():
                assert found[slot] == continued(prompt)[count + 1]
                read[slot] = prompt, count + 1
                assert_has_read(runner, slot, [*prompt, *continued(prompt)[: count + 1]])
        elif read:
            drafts, right = {}, {}
            for slot, (prompt, count) in read.items():
                length = data.draw(st.integers(0, MAX_DRAFT))
                right[slot] = data.draw(st.integers(0, length))
                draft = continued(prompt)[count + 1 : count + 1 + length]
                draft[right[slot] :] = [(token + 1) % 90 for token in draft[right[slot] :]]
                drafts[slot] = draft
            (found,) = runner.verify(max(read), drafts).lists()
            for slot, (prompt, count) in read.items():
                new = [token for token in found[slot] if token != -1]
                assert new == continued(prompt)[count + 1 : count + 2 + right[slot]]
                read[slot] = prompt, count + len(new)
                back = data.draw(st.integers(0, right[slot]))
                text = [*prompt, *continued(prompt)[: count + len(new)]]
                assert_has_read(runner, slot, text, back)
    for slot, (prompt, count) in read.items():
        assert_has_read(runner, slot, [*prompt, *continued(prompt)[:count]])


@pytest.mark.parametrize(
    ("replay_from", "want"),
    [(16, ["write", "fold", "write", "fold"]), (1, ["replay", "fold"] * 2)],
)
def test_the_first_step_after_a_pass_folds_the_rings(replay_from, want):
    """Then few slots write their states again. No state is copied."""
    runner = exact_runner(2)
    runner._replay_from = replay_from
    runner.prefill([PrefillRow(slot, (1,), True) for slot in range(2)])
    for slot in range(2):
        runner.start(slot, ENDLESS, seed=0)
    runner.sample([0, 1])
    text, read, ways = continued((0, 1)), 0, []
    run = runner._run
    runner._run = lambda key, work: (ways.append(key[-1]), run(key, work))
    for action in ("step", "pass", "step", "step", "pass", "pass", "step"):
        if action == "step":
            runner.decode(1)
            read += 1
        else:
            runner.verify(1, {0: text[read + 1 : read + 4], 1: text[read + 1 : read + 4]})
            ways.pop()
            read += 4
        for slot in range(2):
            assert_has_read(runner, slot, [0, 1, *text[:read]])
    assert ways == want


def test_a_ring_is_never_too_small():
    """All drafts are right, and every pass drafts as much as it can."""
    runner, prompts = exact_runner(3), [(0, 1), (0, 2, 9), (0, 5, 5, 5)]
    runner.prefill([PrefillRow(slot, prompt[1:], True) for slot, prompt in enumerate(prompts)])
    for slot in range(3):
        runner.start(slot, ENDLESS, seed=0)
    runner.sample([0, 1, 2])
    read = 13 * (MAX_DRAFT + 1)
    texts = [continued(prompt, read + 1) for prompt in prompts]
    for start in range(1, read, MAX_DRAFT + 1):
        drafts = {slot: text[start : start + MAX_DRAFT] for slot, text in enumerate(texts)}
        (found,) = runner.verify(2, drafts).lists()
        assert found == [text[start : start + MAX_DRAFT + 1] for text in texts]
    for slot, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert_has_read(runner, slot, [*prompt, *text[:read]])


# The engine


class Oracle:
    """Drafts the output that it was told, with mistakes."""

    texts: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # outputs by what is known at first
    accuracy = 0.8
    unindexed = 0
    accepted_share = 1000.0  # a pass always pays
    draw = random.Random(0)

    def __init__(self, known: Sequence[int]) -> None:
        self.text, self.at = self.texts[tuple(known)], 0
        self.wanted = MAX_DRAFT

    def propose(self, most: int) -> list[int]:
        if not self.wanted:
            return []
        length = min(most, self.draw.choice([0, 1, 2, MAX_DRAFT, MAX_DRAFT]))
        draft = self.text[self.at : self.at + length]
        draft += [3] * (length - len(draft))
        return [t if self.draw.random() < self.accuracy else (t + 1) % 320 for t in draft]

    def record(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        assert [*tokens] == self.text[self.at : self.at + len(tokens)]
        assert 0 <= accepted <= drafted <= MAX_DRAFT
        self.at += len(tokens)
        self.wanted = MAX_DRAFT if self.draw.random() < 0.8 else 0


def alone(request: Request, longer: Sequence[int] = ()) -> Completion:
    """The output without speculation. The oracle is told of it, or of a longer one."""
    plain = copy_of(request)
    completion = run_alone(MODEL, plain)
    known = [*plain.previous_prompt, *plain.previous_output, *plain.prompt_token_ids]
    Oracle.texts[tuple(known)] = [*(longer or completion.token_ids)]
    return completion


@cache
def wanted_outputs() -> list[Completion]:
    return [alone(request) for request in many_requests()]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> type[Oracle]:
    """All drafts are read: they cost nothing."""
    monkeypatch.setattr("xlstm7b.generate.drafts.LookupText", Oracle)
    monkeypatch.setattr(ModelRunner, "draft_cost", lambda *_: DraftCost())
    monkeypatch.setattr(Oracle, "draw", random.Random(0))
    return Oracle


@pytest.mark.parametrize(
    "make_engine",
    [new_engine, gpu_like_engine, pytest.param(partial(gpu_like_engine, replay=True), id="replay")],
)
@pytest.mark.parametrize("accuracy", [0.0, 0.8, 1.0])
def test_outputs_and_states_are_those_without_drafts(make_engine, accuracy, oracle, monkeypatch):
    monkeypatch.setattr(oracle, "accuracy", accuracy)
    wanted, requests = wanted_outputs(), many_requests()
    driver = Driver(make_engine(MODEL, slots=5, speculate="lookup"))
    driver.add_all(requests)
    driver.finish()
    assert is_idle(driver.engine)
    for request, want in zip(requests, wanted, strict=True):
        got = driver.completion(request)
        assert_same_completion(got, want)
        assert 0 <= got.accepted_tokens <= got.drafted_tokens
        assert got.accepted_tokens < max(1, len(got.token_ids))
    stats = driver.engine.stats()
    outputs = [driver.completion(request) for request in requests]
    assert stats.drafted_tokens == sum(one.drafted_tokens for one in outputs) > 100
    assert stats.accepted_tokens == sum(one.accepted_tokens for one in outputs)
    assert stats.generated_tokens == sum(len(one.token_ids) for one in outputs)
    assert (stats.accepted_tokens > 0) == (accuracy > 0)


@both_engines
def test_a_request_alone(make_engine, oracle, monkeypatch):
    """Much is generated in few steps."""
    monkeypatch.setattr(oracle, "accuracy", 1.0)
    engine = make_engine(MODEL, slots=1, speculate="lookup")
    for request, want in [*zip(many_requests(), wanted_outputs(), strict=True)][2::3]:
        driver, before = Driver(engine), engine.stats().steps
        driver.add(request)
        driver.finish()
        assert_same_completion(driver.completion(request), want)
        if len(want.token_ids) == 30:
            assert engine.stats().steps - before < 25
    assert is_idle(engine)


@both_engines
def test_requests_are_aborted_in_the_middle_of_a_verification(make_engine, oracle):
    """One after the launch of each third pass, others between steps."""
    requests = many_requests()
    wanted = [alone(request) for request in requests]
    engine = make_engine(MODEL, slots=4, speculate="lookup")
    driver, verify, draw = Driver(engine), engine._runner.verify, random.Random(1)
    aborted, passes = set[Request](), 0

    def abort(request: Request) -> None:
        engine.abort(request)
        aborted.add(request)

    def aborting(*arguments):
        nonlocal passes
        results = verify(*arguments)
        passes += 1
        if passes % 3 == 0 and engine._scheduler.running:
            abort(draw.choice(engine._scheduler.running))
        return results

    engine._runner.verify = aborting
    driver.add_all(requests)
    while engine.has_requests:
        driver.step()
        if draw.random() < 0.05 and engine._scheduler.running:
            abort(draw.choice(engine._scheduler.running))
    assert is_idle(engine)
    finished = [request for request in requests if request not in aborted]
    assert len(aborted) > 5
    assert len(finished) > 5
    for request, want in zip(requests, wanted, strict=True):
        if request in finished:
            assert_same_completion(driver.completion(request), want)
        else:
            got = driver.token_ids(request)
            assert got == want.token_ids[: len(got)]


def requests_with_stops(*, keep_states: bool) -> tuple[list[Request], list[Completion]]:
    """Requests that end at a stop string, and their outputs. The oracle drafts beyond the end.

    With `keep_states`, every second request wants its final state.
    """
    letters = dict.fromkeys(range(99, 125), 30.0)  # a to z
    requests, wanted = [], []
    for number in range(6):
        params = SamplingParams(
            max_new_tokens=40, seed=number, temperature=8.0, logit_bias=letters, eos_token_id=()
        )
        longer = run_alone(MODEL, Request([9, number], params))
        stop = longer.text[5 + 4 * number : 7 + 4 * number]
        params = SamplingParams(**{**vars(params), "stop_strings": (stop,)})
        keep_state = keep_states and number % 2 == 0
        requests.append(Request([9, number], params, keep_state=keep_state))
        wanted.append(alone(requests[-1], longer.token_ids))
    return requests, wanted


@both_engines
@pytest.mark.parametrize("accuracy", [0.9, 1.0])
def test_stop_strings_end_an_output_within_a_pass(make_engine, accuracy, oracle, monkeypatch):
    """The state is that after the stop string, although later tokens were read too."""
    monkeypatch.setattr(oracle, "accuracy", accuracy)
    requests, wanted = requests_with_stops(keep_states=True)
    engine = make_engine(MODEL, slots=3, speculate="lookup", cache_bytes=1 << 22)
    driver, saved, moved_back = Driver(engine), engine._runner.saved, []

    def saving(slot: int, back: int = 0) -> SavedState:
        moved_back.append(back)
        return saved(slot, back)

    engine._runner.saved = saving
    driver.add_all(requests)
    driver.finish()
    assert max(moved_back) > 0
    for request, want in zip(requests, wanted, strict=True):
        assert want.finish_reason == "stop"
        got = driver.completion(request)
        assert_same_completion(got, want)
        # The cache has the state after the output: with its tokens as a prompt, all is cached.
        again = Request([*request.prompt_token_ids[1:], *got.token_ids], greedy("").params)
        fresh = alone(copy_of(again, params=greedy("", 8).params))
        again = copy_of(again, params=greedy("", 8).params)
        driver.add(again)
        driver.finish()
        found = driver.completion(again)
        assert found.cached_tokens == len(again.prompt_token_ids)
        assert found.token_ids == fresh.token_ids
    assert is_idle(engine)


def test_requests_without_drafts_in_the_same_batch(oracle, monkeypatch):
    monkeypatch.setattr(oracle, "accuracy", 1.0)
    requests = many_requests()
    wanted = [alone(request) for request in requests]
    for request in requests[::2]:
        request.speculate = False
    driver = Driver(new_engine(MODEL, slots=6, speculate="lookup"))
    driver.add_all(requests)
    driver.finish()
    for request, want in zip(requests, wanted, strict=True):
        got = driver.completion(request)
        assert_same_completion(got, want)
        assert got.drafted_tokens == 0 or request.speculate
    assert any(request.accepted_tokens for request in requests)


@both_engines
@pytest.mark.parametrize("accuracy", [0.8, 1.0])
def test_drafts_with_grammars(make_engine, accuracy, oracle, monkeypatch):
    """Each position has the mask of its own tokens."""
    monkeypatch.setattr(oracle, "accuracy", accuracy)
    requests = grammar_requests()
    wanted = [alone(request) for request in requests]
    driver = Driver(make_engine(MODEL, slots=3, speculate="lookup"))
    driver.add_all(requests)
    driver.finish()
    assert is_idle(driver.engine)
    for request, want in zip(requests, wanted, strict=True):
        assert_same_completion(driver.completion(request), want)
    accepted = [r.accepted_tokens for r in requests if r.params.structured_outputs is not None]
    assert sum(accepted) > 20
    assert len([count for count in accepted if count]) > 5


def test_masks_after_drafts_are_those_after_the_same_tokens():
    pytest.importorskip("llguidance")
    form = {"regex": "ab(cd|ce)(fg)?"}
    grammar = compile_grammar(form, MODEL.config, ByteTokenizer())
    matcher = Matcher(grammar, [0])
    text = [2 + byte for byte in b"abcdfg"]
    masks = draft_masks(matcher, text)
    assert len(masks) == 5  # after the last one nothing can follow
    for count in range(1, 6):
        other = Matcher(grammar, [0])
        for token in text[:count]:
            other.advance(token)
        assert torch.equal(masks[count - 1], next_masks([other])[0])
    assert len(draft_masks(matcher, [*text[:3], 5, *text[3:]])) == 3
    assert len(draft_masks(matcher, [300])) == 0
    assert torch.equal(next_masks([matcher]), next_masks([Matcher(grammar, [0])]))


@both_engines
def test_a_request_is_ended_by_the_caller(make_engine, oracle, monkeypatch):
    monkeypatch.setattr(oracle, "accuracy", 1.0)
    request = copy_of(greedy([5, 6], 60, eos_token_id=()), keep_state=True)
    want = alone(request).token_ids
    driver = Driver(make_engine(MODEL, slots=2, speculate="lookup"))
    driver.add(request)
    driver.step(4)
    returned = len(driver.token_ids(request))
    driver.engine.finish(request)
    driver.engine.finish(request)
    driver.finish()
    got = driver.completion(request)
    assert 0 < returned <= len(got.token_ids) < 60
    assert got.token_ids == want[: len(got.token_ids)]
    assert got.state.tokens_seen == [len(request.prompt_token_ids) + len(got.token_ids)]


# Lookup


@both_engines
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lookup_copies_what_the_text_had_before(make_engine, temperature):
    """The drafts come from `previous_prompt`, which holds the whole output."""
    params = SamplingParams(max_new_tokens=80, temperature=temperature, seed=3, eos_token_id=())
    want = run_alone(MODEL, Request([4, 8], params))
    request = Request([4, 8], params, previous_prompt=[4, 8, *want.token_ids])
    other = Request([4, 9], params)
    driver = Driver(make_engine(MODEL, slots=2, speculate="lookup"))
    driver.engine._drafter._cost = DraftCost(0.3)  # as with a large model
    driver.add_all([request, other])
    driver.finish()
    got = driver.completion(request)
    assert got.token_ids == want.token_ids
    assert got.accepted_tokens > 40
    assert driver.completion(other).token_ids == run_alone(MODEL, copy_of(other)).token_ids


def test_in_a_batch_of_a_small_model_drafts_of_a_few_requests_do_not_pay():
    """One request copies its output, which is in `previous_prompt`. Three others repeat nothing."""
    params = [SamplingParams(max_new_tokens=80, seed=seed, eos_token_id=()) for seed in range(3, 7)]
    wanted = [run_alone(MODEL, Request([4, 8], each)) for each in params]
    known = [4, 8, *wanted[0].token_ids]
    engine = gpu_like_engine(MODEL, slots=4, speculate="lookup")
    assert engine._runner.draft_cost().fixed > 3
    driver = Driver(engine)
    copying = Request([4, 8], params[0], previous_prompt=known)
    requests = [copying, *(Request([4, 8], each) for each in params[1:])]
    driver.add_all(requests)
    driver.finish()
    for request, want in zip(requests, wanted, strict=True):
        assert driver.completion(request).token_ids == want.token_ids
    assert driver.completion(copying).drafted_tokens < 15
    alone = copy_of(copying)
    driver.add(alone)
    driver.finish()
    assert driver.completion(alone).accepted_tokens > 40


def test_steps_run_ahead_while_drafts_do_not_pay(oracle, monkeypatch):
    """On a GPU the host then does not wait for the last token."""
    monkeypatch.setattr(oracle, "draw", types.SimpleNamespace(random=lambda: 1, choice=max))
    request = greedy([5, 6], 20, eos_token_id=())
    want = alone(request)
    driver = Driver(gpu_like_engine(MODEL, slots=1, speculate="lookup"))
    driver.add(request)
    driver.step(4)
    assert len(driver.engine._in_flight) == 1
    driver.finish()
    assert_same_completion(driver.completion(request), want)


def test_outputs_of_a_pass_are_processed_while_the_next_one_runs(oracle, monkeypatch):
    """Unless the text must be known first: see `Engine._needs_text_first`."""
    monkeypatch.setattr(oracle, "accuracy", 1.0)
    monkeypatch.setattr(oracle, "draw", types.SimpleNamespace(random=lambda: 0.0, choice=max))
    stop = {"stop_strings": ("never",)}
    for options, keep_state, in_flight in (({}, True, 1), (stop, False, 1), (stop, True, 0)):
        request = copy_of(greedy([5, 6], 99, eos_token_id=(), **options), keep_state=keep_state)
        want = alone(request)
        driver = Driver(gpu_like_engine(MODEL, slots=1, speculate="lookup"))
        driver.add(request)
        for _ in range(4):
            driver.step()
            assert len(driver.engine._in_flight) == in_flight
        assert request.drafted_tokens == (3 if in_flight else 4) * MAX_DRAFT
        driver.finish()
        assert_same_completion(driver.completion(request), want)
        assert is_idle(driver.engine)


@both_engines
def test_stop_strings_without_a_final_state(make_engine, oracle, monkeypatch):
    """On a GPU the next pass runs already when the stop string is found."""
    monkeypatch.setattr(oracle, "accuracy", 1.0)
    requests, wanted = requests_with_stops(keep_states=False)
    driver = Driver(make_engine(MODEL, slots=3, speculate="lookup"))
    driver.add_all(requests)
    driver.finish()
    assert is_idle(driver.engine)
    for request, want in zip(requests, wanted, strict=True):
        got = driver.completion(request)
        assert_same_completion(got, want)
        assert got.finish_reason == "stop"
        assert got.accepted_tokens < len(got.token_ids)


def test_large_batches_have_fewer_drafts_on_a_gpu(oracle, monkeypatch):
    """A pass reads at most 64 tokens: with more than 32 slots, nothing is drafted."""
    monkeypatch.setattr(oracle, "accuracy", 1.0)
    monkeypatch.setattr(oracle, "draw", types.SimpleNamespace(random=lambda: 0.0, choice=max))
    runner = gpu_like_engine(MODEL, slots=64, speculate="lookup")._runner
    assert [runner.most_drafts(slots - 1) for slots in (1, 4, 5, 8, 9, 16, 17, 32, 33)] == [
        15, 15, 7, 7, 3, 3, 1, 1, 0,
    ]  # fmt: skip
    requests = [greedy([5, n], 5 if n < 30 else 50, eos_token_id=()) for n in range(36)]
    wanted = [alone(request) for request in requests]
    engine = gpu_like_engine(MODEL, slots=36, speculate="lookup")
    driver, verify, passes = Driver(engine), engine._runner.verify, []

    def counting(highest, drafts, masks):
        passes.append((engine._runner.bucket(highest + 1), max(map(len, drafts.values()))))
        return verify(highest, drafts, masks)

    engine._runner.verify = counting
    driver.add_all(requests)
    driver.step(3)
    assert not passes
    assert len(engine._in_flight) == 1  # it runs ahead
    for request in requests[:30]:
        engine.abort(request)
    driver.finish()
    assert {(8, 7)} <= {*passes}
    assert all(bucket * (drafts + 1) <= 64 for bucket, drafts in passes)
    for request, want in zip(requests[30:], wanted[30:], strict=True):
        assert_same_completion(driver.completion(request), want)


def test_a_step_waits_for_the_last_token_only_within_a_repetition():
    text = [*range(10, 20), 30, 31, *range(10, 16)]
    for length, repeats in ((12, False), (14, False), (15, True), (18, True)):
        known = LookupText(text[:length])
        known.index(length)
        assert (known.wanted > 0) == repeats


@pytest.mark.parametrize("make_engine", [new_engine, gpu_like_engine])
def test_a_long_prompt_is_indexed_in_several_steps(make_engine, monkeypatch):
    """Also one whose state is in the prefix cache: then the output starts before its drafts."""
    monkeypatch.setattr(ModelRunner, "draft_cost", lambda *_: DraftCost())
    appended, append = [], SuffixIndex.append
    monkeypatch.setattr(
        SuffixIndex, "append", lambda index, token: (appended.append(token), append(index, token))
    )
    prompt = random.Random(0).choices(range(10, 300), k=3000)
    options = {"logit_bias": {7: 100.0}, "min_new_tokens": 40}  # a repetition
    want = run_alone(MODEL, greedy(prompt, 40, **options))
    engine = make_engine(MODEL, slots=2, speculate="lookup", cache_bytes=1 << 24)
    driver = Driver(engine)
    for _ in range(2):
        request = driver.add(greedy(prompt, 40, **options))
        largest = steps = 0
        while not request.finished:
            before = len(appended)
            driver.step(1)
            largest = max(largest, len(appended) - before)
            steps += bool(request.output.token_ids)
        assert 0 < largest <= 1024 + MAX_DRAFT + 1
        assert driver.completion(request).token_ids == want.token_ids
        assert driver.completion(request).accepted_tokens > 10
        assert steps < 40
    assert driver.completion(request).cached_tokens > 2900


def test_a_generator_speculates():
    options = {"max_new_tokens": 40, "seed": 1, "eos_token_id": (), "num_return_sequences": 2}
    plain = Generator(MODEL, ByteTokenizer())
    lookup = Generator(MODEL, ByteTokenizer(), speculate="lookup")
    for prompt in ("abc" * 20, "The sea"):
        want, got = (generator.generate(prompt, **options) for generator in (plain, lookup))
        assert [one.token_ids for one in got] == [one.token_ids for one in want]
    biased = {**options, "logit_bias": {70: 100.0}, "num_return_sequences": 1}  # one letter
    (got,) = lookup.generate("abc", **biased)
    assert got.token_ids == [70] * 40
    assert got.accepted_tokens > 20
    outputs = [*lookup.stream("abc", **{k: v for k, v in biased.items() if "return" not in k})]
    assert "".join(output.text for output in outputs) == got.text
    assert len(outputs) < 30


def test_a_chat_drafts_from_earlier_turns():
    """And gives the answers of a chat without speculation."""
    options = {"max_new_tokens": 30, "temperature": 0, "eos_token_id": ()}
    plain, lookup = (
        Chat(Generator(MODEL, ByteTokenizer(), speculate=speculate), **options)
        for speculate in (None, "lookup")
    )
    texts = ["one two", "three", "one two"]
    for text in texts:
        want, got = ([*chat.say(text)][-1].completion for chat in (plain, lookup))
        assert got.token_ids == want.token_ids
        assert got.state.tokens_seen == want.state.tokens_seen
    read = lookup._now.history
    assert len(read) == lookup.stats().tokens_read
    assert bytes(token - 2 for token in read[1:] if 2 <= token < 258).count(b"one two") >= 2
    lookup.undo()
    assert read[: len(lookup._now.history)] == lookup._now.history
    lookup.clear()
    assert lookup._now.history == ()


def test_drafts_are_found_in_the_history():
    """The tokens that a state has read. They change no output, not even with penalties."""
    generator = Generator(MODEL, ByteTokenizer(), speculate="lookup")
    state, options = generator.read([[4, 8]]), {"max_new_tokens": 60, "seed": 2}
    options |= {"eos_token_id": (), "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    *_, plain = generator.stream([6], state=state, **options)
    history = [4, 8, 6, *plain.completion.token_ids]
    *_, last = generator.stream([6], state=state, history=history, **options)
    assert last.completion.token_ids == plain.completion.token_ids
    assert last.completion.accepted_tokens > 30
    for wrong in ("text", [1.5], [1 << 40]):
        with pytest.raises(ValueError, match=r"history must be a list of ids|vocabulary"):
            generator.stream([6], state=state, history=wrong, **options)


@pytest.mark.parametrize("wrong", ["no", 0, None])
def test_a_request_speculates_or_not(wrong: object):
    generator = Generator(MODEL, ByteTokenizer(), speculate="lookup")
    with pytest.raises(ValueError, match="speculate must be true or false, not"):
        generator.run([Request([4, 8], SamplingParams(max_new_tokens=4), speculate=wrong)])


def test_refusals():
    with pytest.raises(ValueError, match="must be \"lookup\", a model or None, not 'ngram'"):
        Engine(MODEL, ByteTokenizer(), speculate="ngram")
    with pytest.raises(ValueError, match='speculate must be "lookup", a model or None'):
        Generator(MODEL, ByteTokenizer(), speculate=True)
    with pytest.raises(ValueError, match="speculation needs the fused path"):
        Engine(MODEL, ByteTokenizer(), slots=1, speculate="lookup", fused=False)
    with pytest.raises(ValueError, match="speculation needs replay decoding"):
        Engine(MODEL, ByteTokenizer(), slots=1, speculate="lookup", replay=False)
    assert ModelRunner(UnfusedModel(MODEL), 2)._drafting is None


def test_a_generator_refuses_when_it_is_built():
    other = spread_model(block="previous", qk_dim_factor=2.0, v_dim_factor=2.0)
    for model, options, message in (
        (MODEL, {"speculate": "lookup", "replay": False}, "speculation needs replay decoding"),
        (MODEL, {"speculate": MODEL, "fused": False}, "which fused=False turns off"),
        (MODEL, {"replay": True, "fused": False}, "replay decoding needs the fused path"),
        (other, {"speculate": "lookup"}, "does not know block = 'previous' of this model"),
    ):
        with pytest.raises(ValueError, match=message):
            Generator(model, ByteTokenizer(), **options)


def test_bytes_of_a_slot():
    """Rings and the logits of all positions are counted."""
    plain, replay, lookup = (
        new_engine(MODEL, slots=1, **options).slot_bytes
        for options in ({}, {"replay": True}, {"speculate": "lookup"})
    )
    sizes = ring_sizes(MAX_DRAFT)
    assert sizes["size"] >= sizes["interval"] + 2 * MAX_DRAFT + 1
    rings = (replay - plain) * sizes["size"] // INTERVAL
    assert lookup - plain == rings + 4 * (MAX_DRAFT + 1) * MODEL.config.vocab_size


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("slots", [1, 5, 12])
def test_a_gpu_has_the_same_tokens_with_drafts(oracle, slots, warm):
    """In float32, where the logits of `random_model` have no near ties."""
    requests = [*many_requests(), *grammar_requests()]
    requests = [copy_of(request, keep_state=True) for request in requests]
    wanted = [alone(request) for request in requests]
    model: XLSTM = copy.deepcopy(MODEL).cuda()
    engine = new_engine(model, slots=slots, speculate="lookup")
    assert engine._runner.model.uses_kernels
    if warm:
        engine.warm_up()
    driver = Driver(engine)
    driver.add_all(requests)
    driver.finish()
    for request, want in zip(requests, wanted, strict=True):
        got = driver.completion(request)
        assert got.token_ids == want.token_ids
        assert got.state.tokens_seen == want.state.tokens_seen
        assert error(got.state.logits.cpu(), want.state.logits) < 10 * ROUNDING
        for block, want_block in zip(
            got.state.model_state.blocks, want.state.model_state.blocks, strict=True
        ):
            for part, want_part in zip(block, want_block, strict=True):
                assert error(part.cpu(), want_part) < 10 * ROUNDING
    assert engine.stats().accepted_tokens > 50
    assert is_idle(engine)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_a_gpu_in_bfloat16(state_dtype, share, monkeypatch):
    """Outputs that rounding does not change: the token after t is t + 1."""
    torch.manual_seed(0)
    # Nearly no draft would pay for such a small model.
    monkeypatch.setattr(ModelRunner, "draft_cost", lambda *_: DraftCost())
    model = spread_model(embedding_dim=512, num_heads=4, num_blocks=3).to("cuda", torch.bfloat16)
    forced_drafts.make_predictable(model)
    forced = partial(forced_drafts.ForcedDrafts, 320, share, False)
    monkeypatch.setattr("xlstm7b.generate.drafts.LookupText", forced)
    engine = new_engine(model, slots=8, speculate="lookup", state_dtype=state_dtype)
    driver = Driver(engine)
    many = driver.add_all(greedy([7, 3 * n], 10 + 3 * n, eos_token_id=()) for n in range(20))
    driver.finish()
    for request in many:
        start, count = request.prompt_token_ids[-1], request.params.max_new_tokens
        assert driver.completion(request).token_ids == forced_drafts.following(start, count, 320)
    stats = engine.stats()
    assert stats.drafted_tokens > 200
    assert (stats.accepted_tokens == 0) == (share == 0)
    assert (stats.accepted_tokens == stats.drafted_tokens) == (share == 1)
