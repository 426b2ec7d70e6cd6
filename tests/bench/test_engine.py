"""The engine's benchmark on a small model."""

from typing import Any

import pytest

from xlstm7b.bench import cases
from xlstm7b.bench.engine import drive, make_requests, random_adapters
from xlstm7b.bench.measure import plan_model
from xlstm7b.bench.plans import Engine as Plan
from xlstm7b.generate import Engine, RequestStatus
from xlstm7b.tokenizer import ByteTokenizer


def test_both_parts_are_measured(small: dict[str, Any]) -> None:
    plan = Plan.of(
        **small,
        streams=4,
        requests=10,
        prompt_tokens=20,
        new_tokens="8",
        prefill_tokens=[16, 64],
        prefix_tokens=600,
    )
    *streams, nothing, second, later, slowest = cases.run(plan)
    assert [result.figures["prefill_tokens"] for result in streams] == [16, 64]
    for result in streams:
        assert (result.part, result.batch, result.length) == ("streams", 4, 20)
        assert result.seconds is not None
        assert 0 < result.figures["first_token_seconds"] < result.seconds
        assert 0 < result.figures["gap_p50"] <= result.figures["gap_p99"] < result.seconds
        assert 0 < result.figures["outside_model"] < 1
        assert result.tokens_per_second is not None
        assert round(result.tokens_per_second * result.seconds) == 10 * 8
        assert result.limit is not None
        share = 100 * result.tokens_per_second / result.limit
        assert result.percent_of_limit == share
    rows = nothing, second, later, slowest
    assert [(row.part, row.work, row.length) for row in rows] == [
        ("prefix", "nothing cached", 600),
        ("prefix", "second request", 600),
        ("prefix", "later requests, median", 600),
        ("prefix", "later requests, slowest", 600),
    ]
    assert later.seconds is not None
    assert slowest.seconds is not None
    assert 0 < later.seconds <= slowest.seconds


def test_requests_with_adapters_in_turn(small: dict[str, Any]) -> None:
    options = {"streams": 4, "requests": 6, "prompt_tokens": 9, "new_tokens": "3"}
    plan = Plan.of(**small, **options, adapters=2, parts=["streams"])
    (result,) = cases.run(plan)
    assert result.work == "prefill of 512, 2 adapters"
    assert result.tokens_per_second is not None
    adapters = random_adapters(plan.config, 2)
    requests = make_requests(plan, adapters)
    assert [request.adapter for request in requests] == adapters * 3


def test_requests_with_a_schema_are_compared_with_the_same_without(small: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    options = {"streams": 4, "requests": 6, "prompt_tokens": 9, "new_tokens": "7-20"}
    plan = Plan.of(**small, **options, parts=["grammar"])
    (result,) = cases.run(plan)
    assert (result.part, result.batch, result.length) == ("grammar", 4, 9)
    assert result.seconds is not None
    assert result.tokens_per_second is not None
    lengths = [request.params.max_new_tokens for request in make_requests(plan)]
    assert round(result.tokens_per_second * result.seconds) == sum(lengths)  # no output ends early
    assert result.limit is not None
    assert result.percent_of_limit == 100 * result.tokens_per_second / result.limit


def test_lengths_are_drawn_from_a_range_and_streams_are_kept_up(small: dict[str, Any]) -> None:
    plan = Plan.of(**small, streams=3, requests=12, prompt_tokens=5, new_tokens="2-6")
    requests, again = make_requests(plan), make_requests(plan)
    lengths = [request.params.max_new_tokens for request in requests]
    assert lengths == [request.params.max_new_tokens for request in again]
    assert (min(lengths), max(lengths)) == (2, 6)

    engine, most = Engine(plan_model(plan), ByteTokenizer(), slots=8), 0
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
