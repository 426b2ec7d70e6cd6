"""What evaluating costs, tried on a small model."""

import json
import sys
from pathlib import Path

import pytest

from xlstm7b.bench import evaluation
from xlstm7b.config import SIZES


def test_both_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = {"embedding_dim": 64, "num_blocks": 2, "num_heads": 2, "vocab_size": 320}
    monkeypatch.setitem(SIZES, "small", small)
    path = tmp_path / "out.json"
    arguments = ["--size", "small", "--device", "cpu", "--dtype", "float32", "--questions", "6"]
    arguments += ["--lengths", "64,128", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["evaluation", *arguments])
    evaluation.main()
    read = json.loads(path.read_text())
    grouped, alone = read["grouping"]
    assert (grouped["grouped"], alone["grouped"]) == (True, False)
    assert alone["tokens"] > 10 * grouped["tokens"]
    assert read["largest_difference"] < 1e-3
    assert [line["length"] for line in read["prompts"]] == [64, 128]
    assert all(line["microseconds_per_token"] > 0 for line in read["prompts"])
    out = capsys.readouterr().out
    assert f"{alone['tokens'] / grouped['tokens']:.1f} times fewer tokens" in out
