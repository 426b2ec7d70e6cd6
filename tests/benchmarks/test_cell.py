"""benchmarks/cell.py: its kernels on a GPU, and mistakes."""

import json
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("triton")
from typer.testing import CliRunner

from cell import NAMES, app
from xlstm7b.cli import main

NEEDS = {"mlstm_kernels": "mlstm_kernels", "fla": "fla", "gated_deltanet": "fla"}


@pytest.mark.gpu
@pytest.mark.parametrize("system", NAMES)
def test_kernels_are_timed(system, tmp_path):
    if system in NEEDS and find_spec(NEEDS[system]) is None:
        pytest.skip(f"{NEEDS[system]} is not installed")
    file = tmp_path / "a.jsonl"
    sizes = ["--size", "160m", "--tokens", "512", "--lengths", "256", "--batches", "1"]
    CliRunner().invoke(app, [system, *sizes, "--json", str(file), "--here"])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    whats = ["forward", "forward + backward", "step"][: 3 if len(rows) == 3 else 2]
    assert [row["what"] for row in rows] == whats
    for row in rows:  # FLA's backward passes refuse some versions of Triton
        assert row.get("value", 0) > 0 or "Triton" in row["error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "there is no system 'nosuch'"),
        (["--size", "nosuch"], "nosuch"),
        (["--lengths", "3"], "sequences of 3 do not divide 65536 tokens"),
        (["--batches", "0"], "--batches takes numbers of at least 1"),
    ],
)
def test_mistakes_are_one_sentence(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cell.py", *arguments])
    with pytest.raises(SystemExit) as end:
        main(app)
    assert end.value.code == 2
    assert said in capsys.readouterr().err
