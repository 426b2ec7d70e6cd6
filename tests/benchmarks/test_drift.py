"""The loss of a decoded text is that of a pass over it."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from naive_scoring import save_byte_model
from typer.testing import CliRunner

import drift
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer


def test_the_loss_is_that_of_a_pass_over_the_text(tmp_path: Path) -> None:
    folder = save_byte_model(tmp_path / "model")
    text, file = tmp_path / "text.txt", tmp_path / "drift.jsonl"
    text.write_text("The sea was calm. " * 8)
    words = [str(folder), str(text), "--device", "cpu", "--dtype", "float32"]
    result = CliRunner().invoke(drift.app, [*words, "--tokens", "40", "--json", str(file)])
    assert result.exit_code == 0, result.exception
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = [(row["shape"]["states"], row["shape"]["replay"]) for row in rows]
    assert kinds == [*product(("float32", "bfloat16"), ("off", "on"))]
    model = XLSTM.from_pretrained(folder)
    ids = torch.tensor(ByteTokenizer().encode(text.read_text())[: 3 * 41]).view(3, 41)
    with torch.no_grad():
        want = float(F.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten()))
    for row, largest in zip(rows, (1e-4, 1e-4, 1e-2, 1e-2), strict=True):
        assert row["value"] == pytest.approx(want, rel=largest)

    assert "fewer --tokens" in str(
        CliRunner().invoke(drift.app, [*words, "--tokens", "144"]).exception
    )
    text.write_bytes(b"\xff")
    assert "is not UTF-8 text" in str(CliRunner().invoke(drift.app, words).exception)
