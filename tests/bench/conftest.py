"""Models and timings that take little time: what is measured here is never a speed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from xlstm7b.bench import generation, measure
from xlstm7b.config import SIZES
from xlstm7b.generate import Generator


@pytest.fixture(autouse=True)
def _fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in a "tiny", not four."""
    monkeypatch.setitem(SIZES, "tiny", SIZES["tiny"] | {"num_blocks": 2})


@pytest.fixture(autouse=True)
def _short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is timed once. The timers' own tests are in test_measure.py."""
    monkeypatch.setattr(generation, "measure", _timed_once)
    monkeypatch.setattr(generation, "measure_decoding", _four_tokens)
    monkeypatch.setattr(measure, "find_peaks", lambda *_: (1e12, 1e11))


def _timed_once(call: Callable[[], object], device: str, **_: object) -> float:
    return _measure(call, device, repeats=1)


def _four_tokens(
    generator: Generator, prompts: Sequence[Sequence[int]] | None, *, seconds: float, **named: Any
) -> measure.Timing:
    def generate() -> object:
        return generator.generate(prompts, max_new_tokens=4, **named)

    return measure.Timing(_measure(generate, "cpu", repeats=1) / 4, 0.0)


_measure = measure.measure
