"""`bench training`: cases, figures, and that a failure is recorded."""

import math

import pytest
import torch

from xlstm7b.accounting import training_flops
from xlstm7b.bench import training
from xlstm7b.bench.results import Results
from xlstm7b.bench.training import Case, measure_training, our_step, step_seconds
from xlstm7b.config import ModelConfig


def test_the_figures_of_a_case() -> None:
    case = Case("7b", 4, 8192, 2)
    assert case.tokens == 65536
    assert case.flops == 8 * training_flops(ModelConfig.named("7b"), 8192)
    assert case.shape == {"model": "7b", "batch": 4, "length": 8192, "micro-batches": 2}
    tuned = Case("7b", 1, 2048, activations="products", method="lora", quantize="int4")
    assert tuned.shape == {
        **{"model": "7b", "batch": 1, "length": 2048, "recomputed": "products"},
        **{"method": "lora", "weights": "int4"},
    }
    assert Case("7b", 1, 2048, method="state").flops < tuned.flops < Case("7b", 1, 2048).flops


def test_the_first_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, times = 0.0, iter([60.0, 9.0, 1.0, 1.2, 1.1])

    def step() -> float:
        nonlocal now
        now += next(times)
        return 5.0

    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    assert step_seconds(step, 3) == pytest.approx((1.1, 0.1 / 1.1, 60.0))
    times = iter([1.0] * 5)
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        step_seconds(lambda: math.nan, 3)


@pytest.mark.parametrize(
    "case",
    [
        Case("tiny", 2, 64, 2, activations="block"),
        Case("tiny", 1, 64, method="lora"),
        Case("tiny", 2, 64, method="state"),
        Case("tiny", 1, 64, activations="products", method="lora", quantize="int4"),
    ],
)
def test_training_on_a_cpu(case: Case) -> None:
    results = Results("training", "cpu")
    measure_training(results, case, 1)
    rows = [(row["what"], row["shape"], row["unit"]) for row in results.rows]
    assert rows == [("first step", case.shape, "s"), ("training", case.shape, "tok/s")]


def test_new_logits_have_the_loss_of_new_weights() -> None:
    """Their variance is 2/5: log 320, and half of that."""
    with our_step(Case("tiny", 2, 64), 1, "cpu") as step:
        assert step() == pytest.approx(math.log(320) + 0.2, abs=0.25)


def test_a_case_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training, "our_step", fails)
    results = Results("training", "cpu")
    measure_training(results, Case("tiny", 1, 16), 1)
    assert results.rows[0]["error"] == "out of memory"
    assert results.failed
