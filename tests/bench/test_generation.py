"""What the generation benchmark measures on a CPU, and its limits; never a speed."""

from pathlib import Path
from typing import Any

import pytest

from xlstm7b import accounting
from xlstm7b.bench import generation
from xlstm7b.bench.generation import START_TOKENS, Benchmark, Limits, measure_start
from xlstm7b.bench.measure import RandomModel
from xlstm7b.bench.results import Results, read_rows
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator
from xlstm7b.model import XLSTM

SEVEN = ModelConfig.named("7b")


def benchmark(
    file: Path | None = None,
    call: str | None = None,
    replay: bool | None = None,
    dtype: str = "float32",
    **options: str,
) -> Benchmark:
    random = RandomModel("tiny", "cpu", dtype, **options)
    limits = Limits(random.config, (1e12, 1e11), dtype, **options, device="cpu", replay=replay)
    results = Results("generation", "cpu", file=file, call=call)
    return Benchmark(results, random, random.make(), limits)


def test_every_part_is_complete() -> None:
    small = benchmark()
    small.contexts([0, 20])
    small.decode([1, 3])
    small.first([1, 70], 3)
    small.prefill([64, 32], 64)
    rows = small.results.rows
    sampled = {"sampling": "temperature 0.8, top_p 0.95"}
    first, second = {"batch": 1, "context": 0}, {"batch": 1, "context": 20}
    short = {"batch": 1, "context": START_TOKENS}
    three = {"batch": 3, "context": START_TOKENS}
    model = {"model": "tiny", "weights": "float32", "states": "float32"}
    assert [(row["what"], row["shape"], row["unit"]) for row in rows] == [
        (what, model | shape, unit)
        for what, shape, unit in (
            ("peak memory", first, "GB"),
            ("decode", first, "tok/s"),
            ("read", second, "s"),
            ("peak memory", second, "GB"),
            ("decode", second, "tok/s"),
            ("peak memory", short, "GB"),
            ("decode", short, "tok/s"),
            ("peak memory", short | sampled, "GB"),
            ("decode", short | sampled, "tok/s"),
            ("peak memory", three, "GB"),
            ("decode", three, "tok/s"),
            ("first token", {"prompt": 1}, "ms"),
            ("first 3 tokens", {"prompt": 1}, "ms"),
            ("first token", {"prompt": 70}, "ms"),
            ("first 3 tokens", {"prompt": 70}, "ms"),
            ("prefill", {"batch": 1, "prompt": 64}, "tok/s"),
            ("prefill", {"batch": 2, "prompt": 32}, "tok/s"),
        )
    ]
    assert all(row["value"] > 0 and row["limit"] > 0 for row in rows)
    assert all(("spread" in row) == (row["what"] == "decode") for row in rows)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    benchmark(file, "one").contexts([0, 20])
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 5
    file.write_text("".join(lines[:2]))
    benchmark(file, "one").contexts([0, 20])
    assert [(row["what"], row["shape"]["context"]) for row in read_rows(file)] == [
        *(("peak memory", 0), ("decode", 0)),
        *(("read", 20), ("peak memory", 20), ("decode", 20)),
    ]


@pytest.mark.parametrize(("scheme", "gigabytes"), [("int8", 6.66), ("fp8", 6.66), ("int4", 3.64)])
def test_quantised_weights(scheme: str, gigabytes: float) -> None:
    """Their decoding is measured, and its limit counts the bytes of their codes and scales."""
    narrow = benchmark(quantize=scheme, state_dtype="bfloat16")
    narrow.decode([3])
    for row in narrow.results.rows:
        assert (row["shape"]["weights"], row["shape"]["states"]) == (scheme, "bfloat16")
        assert row["value"] > 0
    embedding = 2 * SEVEN.vocab_size * SEVEN.embedding_dim  # it stays bfloat16
    state = accounting.state_bytes(SEVEN)["total"]
    want = gigabytes * 1e9 + embedding + state
    assert Limits(SEVEN, quantize=scheme).memory() == pytest.approx(want, rel=0.01)


def test_replay_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with_replay, make, chosen = benchmark(replay=True), generation.make_generator, []

    def chooses(*given: Any, replay: bool | None, **named: Any) -> Generator:
        chosen.append(replay)
        return make(*given, replay=replay, **named)

    monkeypatch.setattr(generation, "make_generator", chooses)
    with_replay.decode([2])
    assert chosen == [True]
    assert {row["shape"]["replay"] for row in with_replay.results.rows} == {"on"}


def test_a_saved_model_starts(tmp_path: Path) -> None:
    XLSTM(ModelConfig.named("tiny")).save_pretrained(tmp_path / "tiny")
    results = Results("generation", "cpu")
    measure_start(results, tmp_path / "tiny", RandomModel("7b", "cpu", "float32"))
    (row,) = results.rows
    assert (row["what"], row["unit"]) == ("start", "s")
    assert row["shape"] == {"folder": "tiny", "weights": "float32"}


def test_limits_of_the_7b_on_an_h200() -> None:
    limits = Limits(SEVEN)  # with the peaks of an H200
    plain = Limits(SEVEN, replay=False)
    assert plain.decode() == pytest.approx(4.27e12 / accounting.decode_bytes(SEVEN))
    assert plain.decode() == pytest.approx(314, rel=0.01)
    narrow = Limits(SEVEN, state_dtype="bfloat16", replay=False)
    moved = accounting.decode_bytes(SEVEN, 256, state_itemsize=2)
    assert narrow.decode(256) == pytest.approx(256 * 4.27e12 / moved)
    assert Limits(SEVEN, quantize="int8").decode() > 1.5 * limits.decode()

    least = accounting.least_prefill_seconds(SEVEN, 768e12, 4.27e12, 8192, 8)
    assert limits.prefill(8192, 8) == pytest.approx(65536 / least)
    assert limits.prefill(8192, 8) == pytest.approx(59_000, rel=0.02)  # 13 GFLOPs a token
    both = accounting.least_prefill_seconds(SEVEN, 768e12, 4.27e12, 2048) + 99 / plain.decode()
    assert plain.first(2048, 100) == pytest.approx(both)

    assert limits.decode(64) == pytest.approx(12_100, rel=0.01)  # by replay
    assert limits.decode(64) == Limits(SEVEN, replay=True).decode(64)
    assert limits.decode(64) > 1.3 * plain.decode(64)
    on_cpu = Limits(SEVEN, device="cpu")
    assert on_cpu.decode(64) == plain.decode(64)
    small = ModelConfig.named("160m")
    assert Limits(small).decode(64) == Limits(small, replay=False).decode(64)
    assert Limits(small).decode(128) == Limits(small, replay=True).decode(128)
    weights = 2 * accounting.parameter_counts(SEVEN)["total"]
    states = 64 * accounting.state_bytes(SEVEN)["total"]
    assert limits.memory(64) == weights + states
