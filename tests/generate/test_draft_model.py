"""Drafts by a small model: they change no token, and its states are always those of the text.

A model that drafts for itself is right at every greedy token, as long as its states are right. So
all its drafts must be accepted, whatever happens to other requests.
"""

import copy
import random
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import (
    ROUNDING,
    Driver,
    GraphDraftRunner,
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
from models import spread_model
from speculation_cases import grammar_requests, many_requests

from xlstm7b.accounting import parameter_counts, ring_bytes
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Engine, Generator, Request, SamplingParams, SavedState
from xlstm7b.generate.chat import Chat
from xlstm7b.generate.draft_model import (
    CONTEXT,
    LONGEST,
    DraftRunner,
    ModelDrafter,
    open_speculation,
)
from xlstm7b.generate.drafts import DraftCost
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.replay import INTERVAL
from xlstm7b.generate.runner import ModelRunner, PrefillRow
from xlstm7b.generate.state import state_bytes
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

MODEL = spread_model()
SAME = copy.deepcopy(MODEL)
OTHER = spread_model(embedding_dim=32, num_blocks=1)  # hardly ever right


def noisy(share: float = 0.03) -> XLSTM:
    """The model with other weights: right about every second time."""
    torch.manual_seed(1)
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += share * parameter.std() * torch.randn_like(parameter)
    return model


def with_letters(model: XLSTM) -> XLSTM:
    """The same model, but all tokens other than the letters a to z have logit 0."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.lm_head.weight[:99] = 0
        changed.lm_head.weight[125:] = 0
    return changed


NOISY = noisy()
DRAFTS = {"same": SAME, "noisy": NOISY, "other": OTHER}
DRAFT_COST = ModelRunner.draft_cost


@pytest.fixture(autouse=True)
def _free_drafts(monkeypatch):
    """On a GPU, drafts for models as small as these would not pay."""
    monkeypatch.setattr(ModelRunner, "draft_cost", lambda *_: DraftCost())


both_engines = pytest.mark.parametrize(
    "make_engine",
    [new_engine, gpu_like_engine, pytest.param(partial(gpu_like_engine, replay=True), id="replay")],
)


# The runner


@cache
@torch.no_grad()
def following(tokens: tuple[int, ...]) -> list[int]:
    """The tokens that greedily follow a text."""
    logits, state = MODEL(torch.tensor([tokens]), logits="last")
    found = []
    for _ in range(LONGEST):
        found.append(int(logits.argmax()))
        logits, state = MODEL(torch.tensor([found[-1:]]), state, logits="last")
    return found


@settings(max_examples=12)
@given(data=st.data(), slots=st.integers(1, 20), runner_type=st.sampled_from(["cpu", "gpu-like"]))
def test_drafts_are_greedy_and_change_no_state(data, slots, runner_type):
    kind = {"cpu": DraftRunner, "gpu-like": GraphDraftRunner}[runner_type]
    runner = kind(FusedModel(SAME), slots)
    texts: dict[int, tuple[int, ...]] = {}
    slot_numbers = st.integers(0, slots - 1)
    for _ in range(6):
        chosen = data.draw(st.sets(slot_numbers, min_size=1, max_size=4), label="read")
        tokens = {slot: data.draw(st.sampled_from([(5,), (9, 70), (8,) * 9])) for slot in chosen}
        runner.prefill([PrefillRow(slot, tokens[slot], slot not in texts) for slot in chosen])
        for slot in chosen:
            texts[slot] = (*texts.get(slot, (0,)), *tokens[slot])
        before = {slot: runner.saved(slot) for slot in texts}
        lengths = data.draw(
            st.dictionaries(
                st.sampled_from(sorted(texts)), st.integers(1, LONGEST), min_size=1, max_size=4
            ),
            label="draft",
        )
        assert runner.draft(lengths) == {
            slot: following(texts[slot])[:length] for slot, length in lengths.items()
        }
        for slot, state in before.items():
            assert_equal_states(runner.saved(slot), state)
            assert state.tokens_seen == [len(texts[slot])]


def assert_equal_states(got: SavedState, want: SavedState) -> None:
    assert got.tokens_seen == want.tokens_seen
    assert torch.equal(got.logits, want.logits)
    for block, want_block in zip(got.model_state.blocks, want.model_state.blocks, strict=True):
        assert all(map(torch.equal, block, want_block))


# The engine


@cache
def wanted_outputs() -> list:
    return [run_alone(MODEL, request) for request in many_requests()]


def is_plain_greedy(request: Request) -> bool:
    """Then a model that drafts for itself is always right, up to the end of the text."""
    return request.params == SamplingParams(
        max_new_tokens=request.params.max_new_tokens,
        temperature=0,
        seed=request.params.seed,
        eos_token_id=request.params.eos_token_id,
    )


@both_engines
@pytest.mark.parametrize(
    ("draft", "slots"), [("noisy", 1), ("same", 5), ("noisy", 5), ("other", 5)]
)
def test_outputs_and_states_are_those_without_drafts(make_engine, draft, slots):
    requests = many_requests()
    driver = Driver(make_engine(MODEL, slots=slots, speculate=DRAFTS[draft]))
    driver.add_all(requests)
    driver.finish()
    assert is_idle(driver.engine)
    assert not driver.engine._drafter._texts
    for request, want in zip(requests, wanted_outputs(), strict=True):
        got = driver.completion(request)
        assert_same_completion(got, want)
        assert 0 <= got.accepted_tokens <= got.drafted_tokens
        if draft == "same" and is_plain_greedy(request):
            assert got.accepted_tokens == got.drafted_tokens
            assert got.drafted_tokens > 20 or len(got.token_ids) < 30
    stats = driver.engine.stats()
    assert stats.drafted_tokens == sum(request.drafted_tokens for request in requests) > 30
    assert stats.accepted_tokens == sum(request.accepted_tokens for request in requests)
    share = stats.accepted_tokens / stats.drafted_tokens
    low, high = {"same": (0.5, 1), "noisy": (0.2, 0.9), "other": (0, 0.1)}[draft]
    assert low <= share <= high


@both_engines
def test_requests_are_aborted_in_the_middle_of_a_verification(make_engine):
    requests = many_requests()
    engine = make_engine(MODEL, slots=4, speculate=NOISY)
    driver, verify, draw = Driver(engine), engine._runner.verify, random.Random(1)
    aborted, passes = set[Request](), 0

    def aborting(*arguments):
        nonlocal passes
        results = verify(*arguments)
        passes += 1
        if passes % 3 == 0 and engine._scheduler.running:
            aborted.add(draw.choice(engine._scheduler.running))
            for request in aborted:
                engine.abort(request)
        return results

    engine._runner.verify = aborting
    driver.add_all(requests)
    driver.finish()
    assert is_idle(engine)
    assert not engine._drafter._texts
    assert 5 < len(aborted) < len(requests) - 5
    for request, want in zip(requests, wanted_outputs(), strict=True):
        if request in aborted:
            got = driver.token_ids(request)
            assert got == want.token_ids[: len(got)]
        else:
            assert_same_completion(driver.completion(request), want)


@both_engines
def test_drafts_with_grammars(make_engine):
    """Of a model that likes some letters. Where a grammar allows none of them, drafting rests."""
    requests = grammar_requests()[:5]
    for number in range(3):
        form = {"regex": "[a-z]{30,}"}
        params = SamplingParams(
            max_new_tokens=40, temperature=number / 2, seed=number, structured_outputs=form
        )
        requests.append(Request([8, number], params))
    requests.append(endless([9], 60, structured_outputs={"regex": "[0-9]+"}))
    model, draft = with_letters(MODEL), with_letters(NOISY)
    wanted = [run_alone(model, copy_of(request)) for request in requests]
    engine = make_engine(model, slots=3, speculate=draft)
    driver, drafts, drafted = Driver(engine), engine._drafter._runner.draft, []

    def drafting(lengths):
        drafted.append(lengths)
        return drafts(lengths)

    engine._drafter._runner.draft = drafting
    driver.add_all(requests[:-1])
    driver.finish()
    drafted.clear()
    driver.add(requests[-1])
    driver.finish()
    assert 0 < len(drafted) < 20
    assert is_idle(engine)
    for request, want in zip(requests, wanted, strict=True):
        assert_same_completion(driver.completion(request), want)
    assert all(request.accepted_tokens > 5 for request in requests[5:8])
    assert requests[-1].accepted_tokens == 0


def endless(prompt, tokens: int = 40, **params) -> Request:
    return greedy(prompt, tokens, eos_token_id=(), **params)


@both_engines
def test_drafts_are_right_after_moves_between_slots(make_engine):
    """Short requests end; the request in the last slot moves to the front."""
    requests = [endless([5, n], 60 if n == 8 else 12) for n in range(9)]
    engine = make_engine(MODEL, slots=9, speculate=SAME)
    driver = Driver(engine)
    driver.add_all(requests)
    driver.step()
    assert requests[8].slot == 8
    driver.step(6)
    assert requests[8].slot == (8 if make_engine is new_engine else 0)
    driver.finish()
    got = driver.completion(requests[8])
    assert got.token_ids == run_alone(MODEL, copy_of(requests[8])).token_ids
    assert got.accepted_tokens == got.drafted_tokens > 40


@both_engines
def test_a_prompt_from_the_cache_is_read_by_the_draft_model(make_engine):
    """In pieces, while the request generates without drafts."""
    engine = make_engine(MODEL, slots=2, speculate=SAME, cache_bytes=1 << 24, prefill_tokens=16)
    driver = Driver(engine)
    prompt = [7 + n % 90 for n in range(200)]
    first, again = endless(prompt), endless(prompt)
    want = run_alone(MODEL, copy_of(first)).token_ids
    for request in (first, again):
        driver.add(request)
        driver.finish()
        assert driver.completion(request).token_ids == want
        assert request.accepted_tokens == request.drafted_tokens > 10
    assert again.cached_tokens == 201
    other = driver.add(endless(prompt))
    driver.step(8)
    assert other.drafted_tokens == 0
    assert len(engine._drafter._texts[other].unread) > 64
    driver.finish()
    assert other.drafted_tokens > 10


def test_of_a_long_prompt_the_latest_tokens_are_read():
    engine = new_engine(MODEL, slots=1, speculate=SAME)
    request = endless([9] * CONTEXT + [5, 6], 20)
    Driver(engine).add(request)
    engine._drafter.start(request, [0, *[9] * CONTEXT, 5, 6])
    assert len(engine._drafter._texts[request].unread) == CONTEXT
    engine._drafter.start(request, [0, 5, 6])
    assert engine._drafter._texts[request].unread == [5, 6]  # 0 is read before every text


@both_engines
def test_stop_strings_end_an_output_within_a_pass(make_engine):
    """The stored state is that after the stop string, and drafts after it are right."""
    model = with_letters(MODEL)
    engine = make_engine(model, slots=3, speculate=with_letters(SAME), cache_bytes=1 << 22)
    driver, saved, moved_back = Driver(engine), engine._runner.saved, []

    def saving(slot: int, back: int = 0) -> SavedState:
        moved_back.append(back)
        return saved(slot, back)

    engine._runner.saved = saving
    requests, wanted = [], []
    for number in range(3):
        longer = run_alone(model, endless([9, number]))
        stop = longer.text[9 + 5 * number : 12 + 5 * number]
        request = copy_of(endless([9, number], stop_strings=(stop,)), keep_state=True)
        wanted.append(run_alone(model, copy_of(request)))
        requests.append(driver.add(request))
    driver.finish()
    assert max(moved_back) > 0
    for request, want in zip(requests, wanted, strict=True):
        got = driver.completion(request)
        assert_same_completion(got, want)
        assert got.finish_reason == "stop"
        again = driver.add(endless([*request.prompt_token_ids[1:], *got.token_ids]))
        driver.finish()
        assert again.cached_tokens == len(again.prompt_token_ids)
        assert again.accepted_tokens == again.drafted_tokens > 10
        fresh = run_alone(model, copy_of(again))
        assert driver.completion(again).token_ids == fresh.token_ids
    assert is_idle(engine)


def test_requests_without_drafts_in_the_same_batch():
    requests = many_requests()
    for request in requests[::2]:
        request.speculate = False
    driver = Driver(new_engine(MODEL, slots=6, speculate=SAME))
    driver.add_all(requests)
    driver.finish()
    for request, want in zip(requests, wanted_outputs(), strict=True):
        assert_same_completion(driver.completion(request), want)
        assert request.drafted_tokens == 0 or request.speculate
    assert any(request.accepted_tokens for request in requests)


def test_after_a_loaded_state_the_draft_model_knows_the_new_tokens_only():
    """Unless it is told what the state has read."""
    generator = Generator(MODEL, ByteTokenizer(), speculate=SAME)
    state = generator.read([[4, 8, 70, 71, 72]])
    options = {"state": state, "max_new_tokens": 60, "temperature": 0, "eos_token_id": ()}
    *_, plain = generator.stream([6], **options)
    *_, told = generator.stream([6], **options, history=[0, 4, 8, 70, 71, 72])
    assert plain.completion.token_ids == told.completion.token_ids
    assert plain.completion.accepted_tokens < told.completion.accepted_tokens
    assert told.completion.accepted_tokens == told.completion.drafted_tokens


def test_a_model_without_a_first_token():
    model = spread_model(force_bos_token_insert=False)
    engine = new_engine(model, slots=2, speculate=copy.deepcopy(model))
    driver = Driver(engine)
    request = driver.add(endless([5, 6, 7]))
    driver.finish()
    got = driver.completion(request)
    assert got.token_ids == run_alone(model, copy_of(request)).token_ids
    assert got.accepted_tokens == got.drafted_tokens > 20


def test_drafts_stop_where_they_do_not_pay():
    """Most tokens are then generated by steps that run ahead."""
    request = endless([5, 6], 100)
    driver = Driver(gpu_like_engine(MODEL, slots=1, speculate=OTHER))
    driver.add(request)
    driver.finish()
    assert driver.completion(request).token_ids == run_alone(MODEL, copy_of(request)).token_ids
    assert request.drafted_tokens < 30


def test_drafts_that_cannot_pay_are_not_made(monkeypatch, caplog):
    """The draft model takes as long as the model. On a CPU costs are not known."""
    monkeypatch.setattr(ModelRunner, "draft_cost", DRAFT_COST)
    for make_engine, drafts in ((gpu_like_engine, False), (new_engine, True)):
        request = endless([5, 6])
        driver = Driver(make_engine(MODEL, slots=2, speculate=SAME))
        driver.add(request)
        driver.finish()
        assert driver.completion(request).token_ids == run_alone(MODEL, copy_of(request)).token_ids
        assert bool(request.drafted_tokens) == drafts
        assert is_idle(driver.engine)
    assert caplog.messages == [
        "the draft model is too slow for this model: no draft would pay, so none is made"
    ]


def test_what_drafts_of_a_160m_cost_a_7b():
    def runner(size: str) -> Any:
        config = ModelConfig.named(size)
        count = parameter_counts(config)["total"]
        weights = [torch.empty(count, dtype=torch.bfloat16, device="meta")]
        found = SimpleNamespace(_on_gpu=True, config=config)
        found.model = SimpleNamespace(weights=lambda: weights)
        found._step_seconds = partial(ModelRunner._step_seconds, found)
        return found

    large, small = runner("7b"), runner("160m")
    assert DRAFT_COST(large, small) == pytest.approx((0.75, 0.07), abs=0.03)
    assert DRAFT_COST(large) == pytest.approx((0.47, 0), abs=0.03)


def test_the_engine_waits_only_for_drafts_that_pay():
    """A pass takes 3.5 steps. 4 drafts of one request do not pay for two; those of both do."""
    drafter = ModelDrafter(FakeRunner(), 512, DraftCost(2.5))
    short, long = Request([5]), Request([5])
    for slot, (request, length) in enumerate(((short, 2), (long, 1000))):
        request.slot = slot
        drafter.start(request, [7] * length)
    assert drafter.wants_to_draft({short: 8})
    assert not drafter.wants_to_draft({short: 8, long: 0})
    assert drafter.wants_to_draft({short: 8, long: 8})
    both = {short: 8, long: 8}
    assert drafter.propose(both) == {}  # a part of the long text is not read yet
    assert drafter.propose(both) == {short: [1] * 4, long: [1] * 4}


def test_few_requests_with_drafts_do_not_hold_up_a_batch(monkeypatch):
    """Drafts of one request gain less than a batch of five loses."""
    monkeypatch.setattr(ModelRunner, "draft_cost", lambda *_: DraftCost(2.0))
    for others, drafts in ((0, True), (4, False)):
        driver = Driver(gpu_like_engine(MODEL, slots=5, speculate=SAME))
        request = endless([5, 6])
        many = [endless([5, n]) for n in range(others)]
        for one in many:
            one.speculate = False
        driver.add_all([request, *many])
        driver.finish()
        assert bool(request.drafted_tokens) == drafts


class FakeRunner:
    """A draft model that takes no time. What it drafts is not looked at."""

    config = MODEL.config

    def prefill(self, rows: list[PrefillRow]) -> None:
        pass

    def draft(self, lengths: dict[int, int]) -> dict[int, list[int]]:
        return {slot: [1] * length for slot, length in lengths.items()}


@pytest.mark.parametrize(("batch", "most"), [(1, 8), (2, 8), (8, 7), (16, 3), (32, 1)])
def test_a_batch_drafts_again_when_drafts_become_right(batch, most):
    """At first 3 of 10 drafts are right, which does not pay; after 500 steps, all."""
    draw = random.Random(0)
    drafter = ModelDrafter(FakeRunner(), 512, DraftCost(0.65, 0.07))
    requests = [Request([5]) for _ in range(batch)]
    for slot, request in enumerate(requests):
        request.slot = slot
        drafter.start(request, [5])
    seconds, generated = 0.0, 0
    for step in range(1500):
        p = 0.3 if step < 500 else 1.0
        drafts = drafter.propose(dict.fromkeys(requests, most))
        longest = max(map(len, drafts.values()), default=0)
        for request in requests:
            drafted = len(drafts.get(request, ()))
            accepted = next((n for n in range(drafted) if draw.random() > p), drafted)
            drafter.record(request, [1] * (accepted + 1), drafted, accepted)
            generated += (accepted + 1) * (step >= 1000)
        seconds += (step >= 1000) * (1 + bool(longest) * 0.65 + 0.07 * longest)
    assert generated / batch / seconds > 0.9 * (most + 1) / (1.65 + 0.07 * most)


def test_warm_up_records_all_graphs_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    engine = gpu_like_engine(MODEL, slots=3, speculate=SAME)
    engine.warm_up()
    graphs = engine._drafter._runner._graphs
    recorded, driver = {*graphs}, Driver(engine)
    many = driver.add_all(endless([5, n] * (1 + 30 * n)) for n in range(6))
    driver.finish()
    assert {*graphs} == recorded
    for request in many:
        assert request.accepted_tokens == request.drafted_tokens > 20
        want = run_alone(MODEL, copy_of(request))
        assert driver.completion(request).token_ids == want.token_ids


# Generator and chat


def test_a_generator_speculates():
    options = {"max_new_tokens": 40, "seed": 1, "eos_token_id": (), "num_return_sequences": 3}
    plain = Generator(MODEL, ByteTokenizer())
    drafting = Generator(MODEL, ByteTokenizer(), speculate=NOISY)
    for temperature in (0.0, 0.7):
        want, got = (
            one.generate("The sea", temperature=temperature, **options) for one in (plain, drafting)
        )
        assert [one.token_ids for one in got] == [one.token_ids for one in want]
        assert all(one.accepted_tokens for one in got)


def test_a_chat_speculates():
    options = {"max_new_tokens": 30, "temperature": 0, "eos_token_id": ()}
    plain, drafting = (
        Chat(Generator(MODEL, ByteTokenizer(), speculate=draft), **options)
        for draft in (None, SAME)
    )
    for text in ("one two", "three"):
        want, got = ([*chat.say(text)][-1].completion for chat in (plain, drafting))
        assert got.token_ids == want.token_ids
        assert got.state.tokens_seen == want.state.tokens_seen
        assert got.accepted_tokens == got.drafted_tokens > 20


def test_a_folder_of_a_draft_model(tmp_path: Path):
    for name, model in {"model": MODEL, "draft": SAME}.items():
        model.save_pretrained(tmp_path / name)
    options = {"max_new_tokens": 30, "temperature": 0, "eos_token_id": ()}
    plain, drafting = (
        Generator.from_pretrained(tmp_path / "model", device="cpu", speculate=speculate)
        for speculate in (None, tmp_path / "draft")
    )
    want, got = (one.generate("The sea", **options)[0] for one in (plain, drafting))
    assert got.token_ids == want.token_ids
    assert got.accepted_tokens == got.drafted_tokens > 15
    lookup = Generator.from_pretrained(tmp_path / "model", device="cpu", speculate="lookup")
    assert lookup.speculate == "lookup"


# What is refused


def test_refusals(tmp_path: Path):
    with pytest.raises(ValueError, match="vocabulary of 384 tokens, the model one of 320"):
        Engine(MODEL, ByteTokenizer(), slots=1, speculate=spread_model(vocab_size=384))
    with pytest.raises(ValueError, match="the draft model is on meta, the model on cpu"):
        Generator(MODEL, ByteTokenizer(), speculate=copy.deepcopy(MODEL).to("meta"))
    with pytest.raises(ValueError, match="speculation needs the fused path"):
        Engine(MODEL, ByteTokenizer(), slots=1, speculate=SAME, fused=False)
    hooked = copy.deepcopy(MODEL)
    hooked.backbone.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"draft model cannot .*blocks\.0 has hooks") as error:
        Generator(MODEL, ByteTokenizer(), speculate=hooked)
    assert str(error.value).endswith("undo this change of the draft model, or give another one")
    MODEL.save_pretrained(tmp_path / "model")
    spread_model(vocab_size=384).save_pretrained(tmp_path / "wide")
    bytes_tokenizer = ByteTokenizer()
    for name, message in {
        "missing": "there is no draft model: .*missing' is neither a folder nor",
        "wide": "vocabulary of 384 tokens, the model one of 320",
    }.items():
        with pytest.raises(ValueError, match=message):
            Generator.from_pretrained(tmp_path / "model", speculate=str(tmp_path / name))
    for other in (True, MODEL):
        message = f"a folder, a hub id or None, not {type(other).__name__}$"
        with pytest.raises(ValueError, match=message):
            Generator.from_pretrained(tmp_path / "model", speculate=other)
    # The same size, but other ids.
    backend = bytes_tokenizer.backend()
    backend.add_tokens(["sea"])
    MODEL.save_pretrained(tmp_path / "words")
    backend.save(str(tmp_path / "words" / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"words cannot be the draft model: .* and bytes"):
        open_speculation(tmp_path / "words", MODEL.config, bytes_tokenizer)


def test_weights_that_cannot_draft(tmp_path: Path):
    """Their folder is named as that of the draft model."""
    MODEL.save_pretrained(tmp_path / "model")
    broken = copy.deepcopy(MODEL)
    broken.lm_head.weight.data[3, 5] = float("nan")
    broken.save_pretrained(tmp_path / "nan")
    message = r"nan cannot be the draft model: lm_head\.weight has values that are not finite"
    with pytest.raises(ValueError, match=message):
        Generator.from_pretrained(tmp_path / "model", speculate=tmp_path / "nan")
    SAME.save_pretrained(tmp_path / "cut")
    (file,) = (tmp_path / "cut").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"cut cannot be the draft model: .*safetensors"):
        Generator.from_pretrained(tmp_path / "model", speculate=tmp_path / "cut")


@torch.no_grad()
def test_a_draft_model_whose_logits_are_not_numbers():
    """As after an overflow: all drafts would be wrong, without a word."""
    broken = copy.deepcopy(SAME)
    broken.lm_head.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"^the draft model's logits are not numbers: its weights"):
        new_engine(MODEL, slots=1, speculate=broken)


def test_bytes_of_a_slot():
    """The draft model's states are counted."""
    lookup, drafting = (
        new_engine(MODEL, slots=1, speculate=one).slot_bytes for one in ("lookup", OTHER)
    )
    own = state_bytes(OTHER.config) + ring_bytes(OTHER.config, INTERVAL, 4)
    assert drafting - lookup == own + 16 * 320


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("draft", "slots"), [("same", 1), ("same", 5), ("noisy", 12)])
def test_a_gpu_has_the_same_tokens_with_drafts(draft, slots):
    """In float32, where the logits of `random_model` have no near ties."""
    requests = [*many_requests(), *grammar_requests()]
    wanted = [run_alone(MODEL, copy_of(request)) for request in requests]
    model, small = (copy.deepcopy(one).cuda() for one in (MODEL, DRAFTS[draft]))
    engine = new_engine(model, slots=slots, speculate=small)
    if slots == 5:
        engine.warm_up()
    driver = Driver(engine)
    driver.add_all(requests)
    driver.finish()
    for request, want in zip(requests, wanted, strict=True):
        got = driver.completion(request)
        assert got.token_ids == want.token_ids
        if want.state is not None:
            assert error(got.state.logits.cpu(), want.state.logits) < 10 * ROUNDING
        if draft == "same" and is_plain_greedy(request):
            assert got.accepted_tokens == got.drafted_tokens
    assert is_idle(engine)
