"""What continuous batching costs, tried on a small model."""

import json
import sys
from pathlib import Path

import pytest

from xlstm7b.bench import engine


def test_both_parts(
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.json"
    arguments = [*small, "--streams", "4", "--texts", "10"]
    arguments += ["--prompt-tokens", "20", "--new-tokens", "8"]
    arguments += ["--piece-tokens", "16,64", "--prefix-tokens", "600", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["engine", *arguments])
    engine.main()
    *streams, prefix = json.loads(path.read_text())["results"]
    assert [line["piece_tokens"] for line in streams] == [16, 64]
    for line in streams:
        assert (line["streams"], line["texts"], line["new_tokens"]) == (4, 10, 8)
        assert 0 < line["first_token_seconds"] < line["engine_seconds"]
        assert 0 < line["outside_model"] < 1
    share = 100 * streams[0]["batch_seconds"] / streams[0]["engine_seconds"]
    assert f"{share:.1f}% of the speed of whole batches" in capsys.readouterr().out
    assert prefix["tokens"] == 600
    assert 0 < prefix["later"] <= prefix["slowest"]
