"""The parts of the kernels' benchmark that need no GPU: cases, limits, wrong kernels."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
import torch

from xlstm7b.accounting import cell_floor, state_bytes
from xlstm7b.bench import kernels
from xlstm7b.bench.results import Results
from xlstm7b.config import ModelConfig
from xlstm7b.mlstm.triton import launch_params

SEVEN = ModelConfig.named("7b")
PEAKS = 768e12, 4.27e12
OPTIONS = {"peaks": PEAKS, "tokens": 64, "lengths": [16, 64], "batches": [1, 8]}


def measured(monkeypatch: pytest.MonkeyPatch, error: float) -> Results:
    """The results of kernels that take 1 ms and have this error."""
    monkeypatch.setattr(kernels, "check_kernels", lambda config: {"h": 1e-3, "dq": error})
    monkeypatch.setattr(kernels, "time_sequence", lambda *_: 1e-3)
    monkeypatch.setattr(kernels, "time_steps", lambda step: 1e-3)
    monkeypatch.setattr(kernels, "our_step", lambda *_: None)
    results = Results("kernels", "cpu")
    kernels.measure_kernels(results, "7b", **OPTIONS)
    return results


def test_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(monkeypatch, 1e-3).rows
    assert [(row["what"], row["shape"], row["value"], row["unit"]) for row in rows] == [
        ("forward", {"model": "7b", "batch": 4, "length": 16}, 1, "ms"),
        ("forward + backward", {"model": "7b", "batch": 4, "length": 16}, 1, "ms"),
        ("forward", {"model": "7b", "batch": 1, "length": 64}, 1, "ms"),
        ("forward + backward", {"model": "7b", "batch": 1, "length": 64}, 1, "ms"),
        ("step", {"model": "7b", "batch": 1}, 1000, "µs"),
        ("step", {"model": "7b", "batch": 8}, 1000, "µs"),
    ]
    assert all(row["limit"] > 0 for row in rows)


@pytest.mark.parametrize("error", [0.03, float("nan")])
def test_wrong_kernels_are_not_timed(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(monkeypatch, error)
    (row,) = results.rows
    assert row["what"] == "check"
    assert row["error"].startswith("the kernels give wrong results: ")
    assert results.failed


def test_limits() -> None:
    moved = 2 * 64 * state_bytes(SEVEN)["total"] / 32
    assert kernels.step_limit(64, SEVEN, PEAKS) == pytest.approx(moved / 4.27e12)
    chunk = launch_params.plan(256, 512, torch.bfloat16).chunk
    floors = cell_floor(65536, chunk, 8, 256, 512, causal=0.5)
    for direction, parts in (("forward", 1), ("forward + backward", 2)):
        want = sum(
            max(floor["flops"] / PEAKS[0], floor["bytes"] / PEAKS[1])
            for floor in (floors["forward"], floors["backward"])[:parts]
        )
        assert kernels.sequence_limit(65536, direction, SEVEN, PEAKS) == pytest.approx(want)
