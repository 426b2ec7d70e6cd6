"""The scripts of experiments/, run in this process."""

import sys
from collections.abc import Callable

import pytest
import typer
from commands import Outcome

from xlstm7b.cli import main

Script = Callable[..., Outcome]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """Runs a script's app with the arguments of a command line."""

    def call(app: typer.Typer, *arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(app)
        return Outcome(ended.value.code or 0, *capsys.readouterr())

    return call
