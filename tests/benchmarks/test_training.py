"""benchmarks/training.py: a step of tiny models."""

import json
import sys
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from training import NAMES, app
from xlstm7b.cli import main
from xlstm7b.config import SIZES


@pytest.mark.long
@pytest.mark.parametrize("system", NAMES)
def test_a_step_is_timed(system, tmp_path, monkeypatch):
    if system != "xlstm7b":
        pytest.importorskip("transformers")
    if system == "xlstm" and find_spec("xlstm") is None:
        pytest.skip("xlstm is not installed")
    monkeypatch.setitem(SIZES, "tiny", SIZES["tiny"] | {"num_blocks": 1})
    file = tmp_path / "a.jsonl"
    arguments = [system, "--cases", "tiny:2x32", "--steps", "1", "--device", "cpu", "--here"]
    outcome = CliRunner().invoke(app, [*arguments, "--json", str(file), "--call", "a"])
    assert outcome.exit_code == 0, outcome.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["what"], row["unit"]) for row in rows] == [
        ("first step", "s"),
        ("training", "tok/s"),
    ]
    for row in rows:
        assert row["value"] > 0
        assert row["system"] == NAMES[system]
        assert row["shape"] == {"model": "tiny", "batch": 2, "length": 32}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "there is no system 'nosuch'"),
        (
            ["--cases", "tiny:2"],
            "a case is SIZE:SEQUENCESxTOKENS such as 160m:16x4096, not",
        ),
        (["--cases", "nosuch:2x32"], "nosuch"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
    ],
)
def test_mistakes_are_one_sentence(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training.py", *arguments])
    with pytest.raises(SystemExit) as end:
        main(app)
    assert end.value.code == 2
    assert said in capsys.readouterr().err
