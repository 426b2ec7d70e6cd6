"""What evaluating costs, tried on a small model."""

import json
import sys
from pathlib import Path

import pytest

from xlstm7b.bench import evaluation


def test_both_parts(
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.json"
    arguments = [*small, "--questions", "6", "--lengths", "64,128", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["evaluation", *arguments])
    evaluation.main()
    read = json.loads(path.read_text())
    grouped, alone = read["grouping"]
    assert (grouped["grouped"], alone["grouped"]) == (True, False)
    assert alone["tokens"] > 10 * grouped["tokens"]
    assert read["largest_difference"] < 1e-3
    assert read["largest_difference_by_rounding"] < 1e-3
    assert str(tmp_path) not in path.read_text()
    assert [line["length"] for line in read["prompts"]] == [64, 128]
    assert all(line["microseconds_per_token"] > 0 for line in read["prompts"])
    out = capsys.readouterr().out
    assert f"{alone['tokens'] / grouped['tokens']:.1f} times fewer tokens" in out
