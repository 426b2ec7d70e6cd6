"""The speed of batches from prepared shards."""

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

import loader
from xlstm7b.data.shards import ShardWriter, write_manifest


def test_batches_are_timed(tmp_path: Path) -> None:
    folder, file = tmp_path / "shards", tmp_path / "loader.jsonl"
    folder.mkdir()
    with ShardWriter(folder / "00000.ds", vocab_size=320) as writer:
        for _ in range(20):
            writer.add(np.arange(100))
    write_manifest(folder, [writer.entry], vocab_size=320, tokenizer_fingerprint="random")
    words = [str(folder), "--lengths", "16,32", "--batches", "2", "--seconds", "0.02"]
    result = CliRunner().invoke(loader.app, [*words, "--json", str(file)])
    assert result.exit_code == 0, result.exception
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["shape"]["packing"], row["shape"]["length"]) for row in rows] == [
        *(("windows", 16), ("windows", 32), ("best-fit", 16), ("best-fit", 32))
    ]
    assert all(row["value"] > 0 for row in rows)
    mistake = CliRunner().invoke(loader.app, [*words, "--seconds", "0"])
    assert "--seconds must be above 0" in str(mistake.exception)
