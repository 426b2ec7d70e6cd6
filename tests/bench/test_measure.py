"""Timers, failures and peaks."""

import random
import time
from collections.abc import Callable
from typing import cast

import pytest
import torch

from xlstm7b.bench import measure as measure_module
from xlstm7b.bench.measure import (
    UnsteadyError,
    attempt,
    find_peaks,
    measure,
    measure_decoding,
    measure_steps,
    percentile,
    random_model,
    reason,
)
from xlstm7b.bench.results import Results
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator


@pytest.fixture(autouse=True)
def _short_timings() -> None:
    """Replaces that of conftest.py: here the timers are as they are."""


def test_the_time_of_a_step_leaves_out_what_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run(steps: int) -> None:
        nonlocal now
        now += 0.5 + 0.002 * steps

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert measure_steps(run, "cpu", seconds=1, base=8) == pytest.approx((0.002, 0), abs=1e-9)


def test_first_steps_that_do_less_work_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first 30 steps the sequences start one after another: a step of few costs less."""
    now = 0.0

    def run(steps: int) -> None:
        nonlocal now
        now += sum(0.02 * min(1.0, 0.5 + step / 60) for step in range(steps))

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    timing = measure_steps(run, "cpu", seconds=0.3, base=8)
    assert timing.seconds == pytest.approx(0.02, rel=0.003)
    assert timing.spread <= 0.03


@pytest.mark.parametrize("noise", [0.0, 0.004, 0.1])
def test_decoding_is_timed_in_one_call(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 sequences, 16 start in each step, and every 16th step takes twice as long."""
    now, ran, draw = 0.0, 0, random.Random(0)

    class Fake:
        device, batch_size = "cpu", 512

        def generate(
            self,
            prompts: None,
            *,
            max_new_tokens: int,
            should_stop: Callable[[], bool] = lambda: False,
            **sampling: object,
        ) -> None:
            nonlocal now, ran
            for step in range(max_new_tokens):
                started = min(1.0, (step + 1) / 32)
                now += (0.01 + 0.01 * started) * (2 if step % 16 == 9 else 1)
                now += noise * draw.random()
                ran += 1
                if should_stop():
                    break

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    generator = cast(Generator, Fake())
    if noise > 0.01:
        monkeypatch.setattr(measure_module, "MOST_SPREAD", 1e-9)
        with pytest.raises(UnsteadyError, match="differ by"):
            measure_decoding(generator, None, seconds=0.3)
        return
    timing = measure_decoding(generator, None, seconds=0.3)
    assert timing.seconds == pytest.approx(0.02 * 17 / 16 + noise / 2, rel=0.01)
    assert timing.spread <= (0.01 if noise else 1e-9)
    assert ran < 700


@pytest.mark.parametrize("base", [0, 8])
@pytest.mark.parametrize("noise", [0.003, 1.0])
def test_unsteady_steps_are_repeated_then_refused(
    base: int, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, draw = 0.0, random.Random(0)

    def run(steps: int) -> None:
        nonlocal now
        now += 0.002 * steps + draw.random() * noise

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    if noise > 0.1:
        with pytest.raises(UnsteadyError, match="differ by"):
            measure_steps(run, "cpu", seconds=0.1, base=base)
        return
    # 3 ms are 3% of the first 50 steps, and less than 1% of 500
    timing = measure_steps(run, "cpu", seconds=0.1, base=base)
    assert timing.seconds == pytest.approx(0.002, rel=0.02)
    assert 0 < timing.spread <= 0.01


def test_percentiles() -> None:
    values = [n / 100 for n in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 90, 99)] == [0.5, 0.9, 0.99]
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("seconds", "counted"), [(0.25, 3), (0.5, 2), (1.5, 1)])
def test_long_calls_are_timed_less_often(
    seconds: float, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, calls = [0.0], [0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call() -> None:
        calls[0] += 1
        now[0] += 60 if calls[0] == 1 else seconds  # the first one compiles

    assert measure(call, "cpu", enough=1.0) == seconds
    assert calls[0] == 1 + counted


def test_what_fails_is_a_line_and_is_not_tried_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results, calls = Results("generation", "cpu"), list[int]()

    def fails(error: Exception) -> Callable[[], None]:
        def work() -> None:
            calls.append(1)
            raise error

        return work

    shape = {"batch": 512}
    for _ in range(2):
        attempt(results, "decode", shape, fails(torch.OutOfMemoryError("CUDA\nout of memory")))
        attempt(results, "steps", shape, fails(UnsteadyError("timings differ")))
        attempt(results, "slots", shape, fails(ValueError("a\nb")), ValueError)
    assert len(calls) == 3
    assert results.failed
    errors = [row["error"] for row in results.rows]
    assert errors == ["out of memory", "timings differ", "ValueError: a b"]
    assert "failed: out of memory" in capsys.readouterr().out
    with pytest.raises(RuntimeError):
        attempt(results, "more", shape, fails(RuntimeError("a bug of ours")))


def test_a_reason_has_no_advice() -> None:
    cuda = torch.AcceleratorError("CUDA error: misaligned address\nSearch for it in the manual")
    compiler = RuntimeError("the compiler failed:\n  no such register")
    assert reason(cuda) == "AcceleratorError: CUDA error: misaligned address"
    assert reason(compiler) == "RuntimeError: the compiler failed: no such register"


def test_peaks_are_measured() -> None:
    flops, bandwidth = find_peaks("cpu", torch.float32)
    assert flops > 1e8
    assert bandwidth > 1e8


def test_a_quantised_model_keeps_no_memory_of_its_first_weights() -> None:
    model = random_model("tiny", dtype="float32", device="cpu", quantize="int4")
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    padding = 256 * len(list(model.parameters()))
    parameters = sum(p.nbytes for p in model.parameters())
    assert sum(storage.nbytes() for storage in storages.values()) <= parameters + padding


def test_weights_are_random_in_their_dtype_and_the_default_stays() -> None:
    model = random_model("tiny", device="cpu")
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    gates = [p for name, p in model.named_parameters() if name.endswith("gate_preact.weight")]
    assert len(gates) == 3 * model.config.num_blocks
    assert all(gate.abs().sum() > 0 for gate in gates)
    again = random_model("tiny", device="cpu")
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    wide = random_model("wide", device="cpu", config=ModelConfig(64, 1, 1, vocab_size=320))
    assert wide.config.embedding_dim == 64
