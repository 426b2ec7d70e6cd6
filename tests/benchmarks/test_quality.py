"""benchmarks/quality.py: the loss that it measures, and mistakes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quality import app, read_parts
from xlstm7b import XLSTM
from xlstm7b.bench.results import read_rows
from xlstm7b.cli import main
from xlstm7b.config import ModelConfig
from xlstm7b.tokenizer import ByteTokenizer

CONFIG = ModelConfig(128, 1, 2, vocab_size=320)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A model with random weights, and a text of two documents."""
    torch.manual_seed(0)
    model = XLSTM(CONFIG)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # predictions that are not all equal
    model.save_pretrained(tmp_path / "tiny")
    documents = ["so much depends upon a red wheel barrow " * 4, "glazed with rain water " * 4]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    return tmp_path / "tiny", text


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["quality.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main(app)
    return ended.value.code


def test_losses_are_those_of_the_model(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, text = files
    file = tmp_path / "quality.jsonl"
    command = (folder, text, "--tokens", 18, "--rows", 3, "--device", "cpu", "--json", file)
    kinds = ("--weights", "float32,bfloat16,fp8,int8,int4", "--call", "a")
    assert not run(monkeypatch, *command, *kinds)
    found = {
        tuple(row["shape"][name] for name in ("weights", "states")): row["value"]
        for row in read_rows(file)
    }
    parts = read_parts(text, ByteTokenizer(), CONFIG, 18, 3)
    with torch.inference_mode():
        logits, _ = XLSTM.from_pretrained(folder)(parts[:, :-1])
    reference = float(F.cross_entropy(logits.flatten(0, 1), parts[:, 1:].flatten()))
    assert len(found) == 5 * 2
    for (weights, states), loss in found.items():
        exactly = (weights, states) == ("float32", "float32")
        assert loss == pytest.approx(reference, rel=1e-4 if exactly else 0.05)
    rounded = {found[weights, "float32"] for weights in ("bfloat16", "fp8", "int8", "int4")}
    assert len(rounded) == 4
    before = file.read_bytes()
    assert not run(monkeypatch, *command, *kinds)
    assert file.read_bytes() == before


def test_parts_are_of_all_documents_and_begin_with_the_first_token(files: Any) -> None:
    parts = read_parts(files[1], ByteTokenizer(), CONFIG, 16, 15)
    assert parts.shape == (15, 17)
    assert (parts[:, 0] == 0).all()
    read = [ByteTokenizer().decode(part[1:].tolist()) for part in parts]
    assert "".join(read).startswith("so much depends upon a red wheel barrow so much ")
    assert read[10] == "glazed with rain"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "16"], "{} has only 15 parts of 16 tokens: give a longer text, or lower "),
        (["--weights", "int3"], "--weights takes float32, bfloat16, fp8, int8, int4, not 'int3'"),
        (["--rows", "0"], "--tokens and --rows must be at least 1"),
    ],
)
def test_mistakes_are_named(
    options: list[str],
    message: str,
    files: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *files, "--tokens", 16, *options) == 2
    assert capsys.readouterr().err.startswith(f"xlstm7b: {message.format(files[1])}")
