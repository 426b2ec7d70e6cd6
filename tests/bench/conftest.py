"""Models that take little time, and benchmarks that start no processes."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from xlstm7b.bench import generation, measure, peer_models, texts, training, transformers
from xlstm7b.bench.cases import Result
from xlstm7b.config import SIZES
from xlstm7b.generate import Generator


@pytest.fixture(autouse=True)
def _fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in a "tiny", not four: what is measured here is never a speed."""
    monkeypatch.setitem(SIZES, "tiny", SIZES["tiny"] | {"num_blocks": 2})


@pytest.fixture(autouse=True)
def _short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding is timed once and for a few steps. The timers' own tests are in test_cases.py."""
    for module in (measure, generation, texts):
        monkeypatch.setattr(module, "measure", _timed_once)
    for module in (measure, peer_models, transformers):
        monkeypatch.setattr(module, "measure_steps", _four_steps)
    monkeypatch.setattr(generation, "measure_decoding", _four_tokens)


def _timed_once(call: Callable[[], object], device: str, **_: object) -> float:
    return _measure(call, device, repeats=1)


def _four_steps(
    run: Callable[[int], object], device: str, *, base: int = 0, **_: object
) -> measure.Timing:
    return measure.Timing(_measure(lambda: run(base + 4), device, repeats=1) / (base + 4), 0.0)


def _four_tokens(
    generator: Generator, prompts: Sequence[Sequence[int]] | None, *, seconds: float, **named: Any
) -> measure.Timing:
    def generate() -> object:
        return generator.generate(prompts, max_new_tokens=4, **named)

    return measure.Timing(_measure(generate, "cpu", repeats=1) / 4, 0.0)


_measure = measure.measure


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a plan that name it."""
    shape = {"embedding_dim": 128, "num_blocks": 2, "num_heads": 2, "vocab_size": 320}
    monkeypatch.setitem(SIZES, "small", shape)
    return {"size": "small", "device": "cpu", "dtype": "float32"}


@pytest.fixture
def same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks run in this process, which has loaded all packages. test_cases.py tests others."""

    def run(
        case: Result, function: Callable[..., Iterator[Result]], timeout: float, /, **arguments: Any
    ) -> Iterator[Result]:
        try:
            yield from function(**json.loads(json.dumps(arguments)))
        except ImportError as error:
            yield replace(case, error=str(error))

    for module in (generation, training):
        monkeypatch.setattr(module, "in_process", run)
