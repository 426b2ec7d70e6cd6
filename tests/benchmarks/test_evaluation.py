"""What evaluating costs, on a small model."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import evaluation
from xlstm7b.config import SIZES


def test_both_parts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"embedding_dim": 64, "num_blocks": 1, "num_heads": 2, "vocab_size": 320}
    monkeypatch.setitem(SIZES, "tiny", shape)
    file = tmp_path / "evaluation.jsonl"
    words = ["--size", "tiny", "--device", "cpu", "--dtype", "float32", "--questions", "6"]
    words += ["--lengths", "64,128", "--json", str(file)]
    result = CliRunner().invoke(evaluation.app, words)
    assert result.exit_code == 0, result.exception
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    grouped, single = (row["value"] for row in rows if row["what"] == "tokens read")
    assert single > 10 * grouped
    differences = [row["value"] for row in rows if row["what"].startswith("difference")]
    assert len(differences) == 2
    assert max(differences) < 1e-3  # by rounding
    prompts = [row["shape"]["prompt"] for row in rows if row["what"] == "first token"]
    assert prompts == [64, 128]
    mistake = CliRunner().invoke(evaluation.app, [*words, "--lengths", "0"])
    assert "--lengths takes numbers" in str(mistake.exception)
