"""What evaluating costs, on a small model."""

from typing import Any

from xlstm7b.bench import cases
from xlstm7b.bench.plans import Evaluation


def test_both_parts_are_measured(small: dict[str, Any]) -> None:
    grouped, alone, *prompts = cases.run(Evaluation.of(**small, questions=6, lengths=[64, 128]))
    assert (grouped.part, alone.part) == ("grouping", "grouping")
    assert alone.figures["tokens"] > 10 * grouped.figures["tokens"]
    assert alone.figures["tokens_ratio"] == alone.figures["tokens"] / grouped.figures["tokens"]
    assert grouped.figures["largest_difference"] < 1e-3
    assert alone.figures["largest_difference"] < 1e-3  # by rounding, between two batch sizes
    assert [(result.part, result.length) for result in prompts] == [
        ("prompts", 64),
        ("prompts", 128),
    ]
    assert all(result.figures["seconds_per_token"] > 0 for result in prompts)
    assert prompts[0].figures["of_shortest"] == 1
