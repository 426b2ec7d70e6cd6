"""`generate` of the xLSTM of transformers, with and without `optimize`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import inside_transformers
from xlstm7b.bench.measure import Timing
from xlstm7b.config import SIZES


def test_generate_with_and_without_optimize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")

    def run_once(run: Callable[[int], object], *_: object, **__: object) -> Timing:
        run(2)
        return Timing(0.5, 0.01)

    monkeypatch.setattr(inside_transformers, "measure_steps", run_once)
    monkeypatch.setitem(SIZES, "tiny", SIZES["tiny"] | {"num_blocks": 1})
    file = tmp_path / "transformers.jsonl"
    words = ["--size", "tiny", "--device", "cpu", "--dtype", "float32", "--batches", "1"]
    words += ["--here", "--json", str(file)]
    result = CliRunner().invoke(inside_transformers.app, words)
    assert result.exit_code == 0, result.exception or result.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["system"] for row in rows] == ["xlstm7b", "transformers"]
    assert all(row["value"] == 2 for row in rows)
    mistake = CliRunner().invoke(inside_transformers.app, ["vllm"])
    assert "there is no system 'vllm'" in str(mistake.exception)
