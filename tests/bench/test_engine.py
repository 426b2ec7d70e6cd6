"""The engine's benchmark on a small model."""

from dataclasses import replace
from typing import Any

import pytest

from xlstm7b.bench.engine import Benchmark, Load, drive, random_adapters
from xlstm7b.bench.measure import RandomModel
from xlstm7b.bench.results import Results
from xlstm7b.generate import Engine, RequestStatus
from xlstm7b.tokenizer import ByteTokenizer

TINY = RandomModel("tiny", "cpu", "float32")
LOAD = Load(4, 10, 20, (8, 8), prefill_tokens=16)


@pytest.fixture
def benchmark() -> Benchmark:
    return Benchmark(Results("engine", "cpu"), TINY, TINY.make(), ByteTokenizer())


def values(benchmark: Benchmark) -> dict[str, float]:
    return {row["what"]: row["value"] for row in benchmark.results.rows}


def test_requests_at_the_same_time(benchmark: Benchmark) -> None:
    benchmark.streams(LOAD)
    rows = benchmark.results.rows
    shape = TINY.shape(streams=4, requests=10, prompt=20, output=8, **{"prefill tokens": 16})
    assert [(row["what"], row["shape"], row["unit"]) for row in rows] == [
        ("first token", shape, "ms"),
        ("between tokens, p50", shape, "ms"),
        ("between tokens, p99", shape, "ms"),
        ("outside the model", shape, "%"),
        ("output", shape, "tok/s"),
    ]
    assert rows[-1]["limit"] > 0
    found = values(benchmark)
    seconds = 80 / found["output"]  # 10 outputs of 8 tokens
    assert 0 < found["first token"] < 1e3 * seconds
    assert 0 < found["between tokens, p50"] <= found["between tokens, p99"] < 1e3 * seconds
    assert 0 < found["outside the model"] < 100


def test_a_shared_prefix(benchmark: Benchmark) -> None:
    benchmark.prefix(600, int(1e9))
    rows = benchmark.results.rows
    assert [(row["what"], row["shape"]["request"], row["unit"]) for row in rows] == [
        ("first token", "first", "ms"),
        ("first token", "second", "ms"),
        ("first token", "later, median", "ms"),
        ("first token", "later, slowest", "ms"),
    ]
    assert {row["shape"]["prefix"] for row in rows} == {600}
    assert 0 < rows[2]["value"] <= rows[3]["value"]


def test_requests_with_adapters_in_turn(benchmark: Benchmark) -> None:
    load = replace(LOAD, requests=6, adapters=2)
    benchmark.streams(load)
    assert benchmark.results.rows[-1]["shape"]["adapters"] == 2
    adapters = random_adapters(TINY.config, 2)
    requests = load.make(320, adapters)
    assert [request.adapter for request in requests] == adapters * 3


def test_requests_with_a_schema_are_compared_with_the_same_without(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    load, ran = replace(LOAD, requests=6, new_tokens=(7, 20)), []

    def counting(engine: Engine, requests: Any, streams: int) -> list[list[float]]:
        times = drive(engine, requests, streams)
        ran.append([len(each) - 1 for each in times])
        return times

    monkeypatch.setattr("xlstm7b.bench.engine.drive", counting)
    benchmark.grammar(load)
    row = benchmark.results.rows[-1]
    assert row["shape"]["format"] == "JSON schema"
    assert row["shape"]["output"] == "7-20"
    assert row["limit"] > 0
    lengths = [request.params.max_new_tokens for request in load.make(320)]
    assert ran[1] == ran[3] == lengths  # no output ends early


def test_lengths_are_drawn_from_a_range_and_streams_are_kept_up() -> None:
    load = Load(3, 12, 5, (2, 6))
    requests, again = load.make(320), load.make(320)
    lengths = [request.params.max_new_tokens for request in requests]
    assert lengths == [request.params.max_new_tokens for request in again]
    assert (min(lengths), max(lengths)) == (2, 6)

    engine, most = Engine(TINY.make(), ByteTokenizer(), slots=8), 0
    step = engine.step

    def counting_step() -> Any:
        nonlocal most
        most = max(most, sum(request.added > 0 and not request.finished for request in requests))
        return step()

    engine.step = counting_step  # type: ignore[method-assign]
    times = drive(engine, requests, 3)
    assert most == 3
    assert [len(each) for each in times] == [1 + length for length in lengths]
    assert all(each == sorted(each) for each in times)
    assert {request.status for request in requests} == {RequestStatus.FINISHED}
