"""Replay decoding in the runner and the engine: nothing outside of them can tell.

On a CPU, in float64 and with the equations in PyTorch. The kernel has tests of its own.
"""

import copy

import pytest
import torch
from engines import (
    Driver,
    GraphRunner,
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

from xlstm7b import accounting
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Engine, Generator, Request, SamplingParams
from xlstm7b.generate import runner as runner_module
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.replay import INTERVAL, Rings, default_replay_slots
from xlstm7b.generate.runner import ModelRunner, PrefillRow, fitting_slots
from xlstm7b.generate.unfused import UnfusedModel
from xlstm7b.tokenizer import ByteTokenizer

torch.manual_seed(0)
EXACT = random_model()
FUSED = FusedModel(copy.deepcopy(EXACT))
MODEL = spread_model()
ENDLESS = SamplingParams(temperature=0, eos_token_id=())


def exact_runner(slots: int, least: int = 1, interval: int = 3) -> GraphRunner:
    """A runner whose decode steps of `least` slots or more replay."""
    runner = GraphRunner(FUSED, slots, state_dtype=torch.float64, replay=True)
    runner._rings = Rings.zeros(FUSED.config, slots, dtype=torch.float64, interval=interval)
    runner._replay_from = least
    runner._parts = {n: runner._part(n) for n in runner._parts}
    return runner


def assert_has_read(runner: ModelRunner, slot: int, tokens: list[int]) -> None:
    """The slot holds the state after these tokens."""
    assert_state_after(runner.saved(slot), EXACT, tokens)


@settings(max_examples=40)
@given(
    data=st.data(),
    slots=st.integers(1, 6),
    least=st.sampled_from([1, 3]),
    interval=st.integers(1, 5),
)
def test_any_order_of_calls(data, slots, least, interval):
    """Slots start, stop, move and start again, in steps by replay and others."""
    runner, texts = exact_runner(slots, least, interval), dict[int, list[int]]()
    for _ in range(14):
        free = [slot for slot in range(slots) if slot not in texts]
        action = data.draw(st.sampled_from(["start", "stop", "move", "decode", "decode", "decode"]))
        if action == "start" and free:
            slot, length = data.draw(st.sampled_from(free)), data.draw(st.integers(1, 4))
            prompt = [data.draw(st.integers(1, 90)) for _ in range(length)]
            runner.prefill([PrefillRow(slot, prompt, True)])
            assert_has_read(runner, slot, [0, *prompt])
            runner.start(slot, ENDLESS, seed=0)
            ((token,),) = runner.sample([slot]).lists()
            texts[slot] = [0, *prompt, token]
        elif action == "stop" and texts:
            slot = data.draw(st.sampled_from(sorted(texts)))
            runner.stop(slot)
            del texts[slot]
        elif action == "move" and texts and free:
            source, target = max(texts), min(free)
            runner.move(source, target)
            texts[target] = texts.pop(source)
        elif texts:
            highest = max(texts)
            (tokens,) = runner.decode(highest).lists()
            for slot in texts:
                texts[slot].append(tokens[slot])
    for slot, text in texts.items():
        assert_has_read(runner, slot, text[:-1])


def test_the_states_are_folded_before_a_step_that_writes_them():
    runner = exact_runner(6, least=4, interval=16)
    prompts = [[n + 1] * (3 + n) for n in range(6)]
    runner.prefill([PrefillRow(slot, prompt, True) for slot, prompt in enumerate(prompts)])
    texts = [[0, *prompt] for prompt in prompts]
    for slot in range(6):
        runner.start(slot, ENDLESS, seed=0)
    (tokens,) = runner.sample(range(6)).lists()
    for highest in (5, 5, 5, 1, 1, 5, 5, 3, 0, 5):
        for slot in range(highest + 1, 6):
            runner._sampler.pending[slot] = -1  # a step of few slots has no others that are live
        for slot in range(6):
            runner._sampler.pending[slot] = tokens[slot] if slot <= highest else -1
        (new,) = runner.decode(highest).lists()
        for slot in range(highest + 1):
            texts[slot].append(tokens[slot])
            tokens[slot] = new[slot]
        assert runner._replaying == (runner.bucket(highest + 1) >= 4)
        for slot in range(6):
            assert_has_read(runner, slot, texts[slot])


def requests() -> list[Request]:
    prompts = ["The sea was", "A", "x" * 40, "The sea is"]
    return [
        copy_of(greedy(prompt, tokens), keep_state=tokens % 2 == 1)
        for prompt in prompts
        for tokens in (1, 5, 17, 40)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 16},
        {"slots": 3, "cache_bytes": 1 << 20, "cache_interval": 7},
        {"slots": 5, "prefill_tokens": 2, "state_dtype": torch.bfloat16},
    ],
)
def test_outputs_and_states_are_those_of_the_plain_step(options):
    """In a crowd, with some requests aborted; a kept state is continued by another engine."""
    driver = Driver(gpu_like_engine(MODEL, replay=True, **options))
    dropped = driver.add_all(greedy(f"{n} bottles", 30) for n in range(3))
    many = driver.add_all(requests())
    for request in dropped:
        driver.step(9)
        driver.engine.abort(request)
    driver.finish()
    assert driver.engine._runner._replaying
    assert is_idle(driver.engine)
    dtype = options.get("state_dtype", torch.float32)
    for request in many:
        got, want = driver.completion(request), run_alone(MODEL, copy_of(request))
        if dtype == torch.float32:
            assert got.token_ids == want.token_ids
        if request.keep_state:
            read = len(request.prompt_token_ids) + len(got.token_ids)
            assert got.state.tokens_seen == [read]
            assert got.state.model_state.blocks[0].C.dtype == dtype
            more = greedy("", 6)
            text = Request([*request.prompt_token_ids[1:], *got.token_ids], more.params)
            continued = run_alone(MODEL, copy_of(more, prompt=[], state=got.state))
            if dtype == torch.float32:
                assert continued.token_ids == run_alone(MODEL, text).token_ids


def test_cpus_and_other_models_write_the_state():
    engine = new_engine(MODEL, slots=40)
    assert engine._runner._rings is None
    with pytest.raises(ValueError, match="replay decoding needs the fused path"):
        ModelRunner(UnfusedModel(MODEL), 40, replay=True)
    assert ModelRunner(UnfusedModel(MODEL), 40)._rings is None
    assert ModelRunner(FUSED, 40, replay=False)._rings is None


def test_a_generator_with_replay_on_a_cpu():
    """`replay=True` works there too, for tests, with the equations in PyTorch."""
    plain, replay = (
        Generator(MODEL, ByteTokenizer(), replay=replay).generate(
            ["The sea", "A"], max_new_tokens=20, temperature=0
        )
        for replay in (None, True)
    )
    assert [one.token_ids for one in plain] == [one.token_ids for one in replay]


def test_bytes_of_rings():
    seven = ModelConfig.named("7b")
    assert accounting.ring_bytes(seven, INTERVAL) == pytest.approx(6.3e6, rel=0.01)
    rings = Rings.zeros(FUSED.config, 3, dtype=torch.float64)
    held = sum(part.nbytes for block in rings.blocks for part in block)
    assert held == 3 * accounting.ring_bytes(FUSED.config, INTERVAL, 8)
    with pytest.raises(ValueError, match="do not fit"):
        fitting_slots(seven, torch.device("cpu"), torch.float32, 4, 0, ring_bytes=1 << 50)


@pytest.mark.parametrize(("batch", "plain", "replay"), [(64, 17.2, 9.4), (256, 68.8, 37.5)])
def test_state_traffic_of_a_step(batch, plain, replay):
    seven = ModelConfig.named("7b")
    weights = (
        accounting.decode_bytes(seven, batch) - 2 * batch * accounting.state_bytes(seven)["total"]
    )
    for interval, gigabytes in ((None, plain), (INTERVAL, replay)):
        moved = accounting.decode_bytes(seven, batch, replay_interval=interval) - weights
        assert moved / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "slots"), [((256, 2, 4), 20), ((1024, 1, 2), 4)])
def test_replay_on_a_gpu_equals_float64(size, slots):
    """A float32 model: the states after 40 tokens, by replay and by the plain step.

    Many slots of small heads, and a few with heads of a 7B.
    """
    torch.manual_seed(0)
    model = random_model(ModelConfig(*size, vocab_size=320), gate_std=0.1)
    prompts = [[2 + n] * (1 + n % 7) for n in range(slots)]
    errors = {}
    for replay in (False, True):
        runner = ModelRunner(FusedModel(copy.deepcopy(model).float().cuda()), slots, replay=replay)
        assert (runner._rings is not None) == replay
        runner.prefill([PrefillRow(slot, prompt, True) for slot, prompt in enumerate(prompts)])
        for slot in range(slots):
            runner.start(slot, ENDLESS, seed=0)
        (tokens,) = runner.sample(range(slots)).lists()
        texts = [[0, *prompt] for prompt in prompts]
        for _ in range(40):
            for slot in range(slots):
                texts[slot].append(tokens[slot])
            (tokens,) = runner.decode(slots - 1).lists()
        errors[replay] = []
        for slot in range(slots):
            saved = runner.saved(slot)
            assert saved.tokens_seen == [len(texts[slot])]
            with torch.no_grad():
                want, state = model(torch.tensor([texts[slot]]), logits="last")
            off = [error(saved.logits.cpu(), want)]
            for block, want_block in zip(saved.model_state.blocks, state.blocks, strict=True):
                off += [error(x.cpu(), y) for x, y in zip(block, want_block, strict=True)]
            assert max(off) < 1e-4
            errors[replay].append(sum(off))
    assert sum(errors[True]) < 1.5 * sum(errors[False])


def test_how_many_slots_replay_takes_depends_on_the_size_of_the_state() -> None:
    slots = {
        size: default_replay_slots(ModelConfig.named(size))
        for size in ("160m", "400m", "1.4b", "2.7b", "7b")
    }
    assert slots == {"160m": 100, "400m": 56, "1.4b": 2, "2.7b": 2, "7b": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_switches_between_replay_and_the_plain_step(monkeypatch, state_dtype):
    """Requests of very different lengths: the batch shrinks below the threshold and grows again."""
    torch.manual_seed(0)
    model = spread_model(embedding_dim=256, num_heads=4).to("cuda", torch.bfloat16)
    monkeypatch.setattr(runner_module, "default_replay_slots", lambda config: 16)
    found = []
    for replay in (False, None):
        engine = Engine(model, ByteTokenizer(), slots=40, state_dtype=state_dtype, replay=replay)
        driver, switched = Driver(engine), set()
        for wave in range(3):
            many = driver.add_all(
                Request(
                    [2 + n, 5, 9],
                    SamplingParams(max_new_tokens=3 + 2 * n, seed=n, eos_token_id=(), logprobs=0),
                    keep_state=n % 6 == 0,
                )
                for n in range(30)
            )
            while engine.has_requests and not (wave < 2 and len(engine._scheduler.running) == 4):
                driver.step()
                switched.add(engine._runner._replaying)
        driver.finish()
        assert switched == ({False} if replay is False else {False, True})
        assert is_idle(engine)
        found.append([driver.completion(request) for request in many])
    for plain, replayed in zip(*found, strict=True):
        assert len(plain.token_ids) == len(replayed.token_ids)
        assert plain.logprobs[0] == pytest.approx(replayed.logprobs[0], abs=0.1)
        assert (plain.state is None) == (replayed.state is None)
        if plain.state is not None:
            assert plain.state.tokens_seen == replayed.state.tokens_seen
