"""Speculation with drafts that are right as often as wanted, and on texts."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import write_config
from naive_scoring import save_byte_model
from typer.testing import CliRunner

import speculation
from xlstm7b.bench.measure import Timing
from xlstm7b.config import SIZES, ModelConfig

SMALL = ["--device", "cpu", "--dtype", "float32", "--batches", "2"]


def rows(arguments: list[str], file: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(speculation.app, [*arguments, *SMALL, "--json", str(file)])
    assert result.exit_code == 0, result.exception or result.output
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_drafts_that_are_right_as_often_as_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_once(run: Callable[[int], object], *_: object, **__: object) -> Timing:
        run(60)
        return Timing(0.001, 0.01)

    monkeypatch.setattr(speculation, "measure_steps", run_once)
    shape = {"embedding_dim": 64, "num_blocks": 1, "num_heads": 2, "vocab_size": 320}
    monkeypatch.setitem(SIZES, "tiny", shape)
    found = rows(["drafts", "--size", "tiny"], tmp_path / "drafts.jsonl")
    assert [row["value"] for row in found if row["what"] == "decode"] == [2000] * 6
    kinds = {
        (row["shape"]["drafts"], row["shape"].get("right")): row["value"]
        for row in found
        if row["what"] == "accepted drafts"
    }
    assert kinds["adaptive", 0] == kinds["up to 15", 0] == 0
    assert 0 < kinds["up to 15", 0.5] < kinds["up to 15", 0.8] < 100
    assert kinds["up to 15", 1] == 100


def test_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a trained model in a folder; here it drafts for itself."""

    def seconds(call: partial[object], *_: object, **__: object) -> float:
        """1 ms for each step of a batch of two."""
        batches = len(call.args[0]) / 2
        assert batches == 2
        return 0.001 * call.keywords["max_new_tokens"] * batches

    monkeypatch.setattr(speculation, "measure", seconds)
    monkeypatch.setattr(speculation, "_PROMPTS", 3)
    folder = str(save_byte_model(tmp_path / "model"))
    words = ["texts", folder, "--tokens", "8"]
    found = rows([*words, "--draft", folder], tmp_path / "texts.jsonl")
    speeds = [row for row in found if row["what"] == "decode"]
    assert [(row["shape"]["drafts"], row["shape"]["text"]) for row in speeds] == [
        (way, kind)
        for way in ("none", "lookup", "draft model")
        for kind in ("copy", "code", "question", "prose")
    ]
    assert all(row["value"] == pytest.approx(2000) for row in speeds)
    assert [row["value"] for row in found if row["what"] == "equal outputs"] == [100] * 8
    for row in found:
        if row["what"] == "accepted drafts" and row["shape"]["drafts"] == "draft model":
            assert row["value"] == 100 or row["shape"]["text"] == "prose"

    values = ModelConfig.from_file(Path(folder) / "config.json").to_dict()
    wide, other = (
        str(write_config(tmp_path / name, ModelConfig.from_dict({**values, **changed})))
        for name, changed in (("wide", {"vocab_size": 384}), ("other", {"block": "previous"}))
    )
    short = tmp_path / "short"
    short.write_text("One. Two.")
    for arguments, message in (
        ([*words, "--draft", wide], "wide cannot be the draft model"),
        ([*words, "--draft", other], "other has block = 'previous', which speculation does not"),
        (["texts", other], "other has block = 'previous', which speculation does not"),
        ([*words, "--text", str(short)], "short has 2 sentences: the texts need 12"),
        (["texts", folder, "--tokens", "1"], "--tokens must be at least 2, not 1"),
        (["drafts", "--batches", "no"], "--batches takes numbers of at least 1"),
    ):
        result = CliRunner().invoke(speculation.app, arguments)
        assert message in str(result.exception)
