"""Fixtures of the command line: the program in this process, and a model for it."""

import io
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
from commands import Cli, Outcome
from models import spelling_model

from xlstm7b.cli import main
from xlstm7b.model import XLSTM


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="session", autouse=True)
def _commands_made_once() -> Iterator[None]:
    """typer would make all commands and their options anew for each call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs `main` like the console script, on a terminal or with `stdin` as a pipe."""

    def call(*arguments: object, stdin: str | bytes | None = None) -> Outcome:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        piped = None if content is None else io.TextIOWrapper(io.BytesIO(content), "utf-8")
        monkeypatch.setattr(sys, "stdin", piped or Terminal())
        monkeypatch.setattr(sys, "argv", ["xlstm7b", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Outcome(ended.value.code or 0, *capsys.readouterr())

    return call


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights fails the test."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(XLSTM, "from_pretrained", load)


@pytest.fixture(scope="session")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with bytes as tokens that generates letters. Other tokens have logit 0."""
    folder = tmp_path_factory.mktemp("speller")
    spelling_model("abcdefghijklmnopqrstuvwxyzäöü").save_pretrained(folder)
    return folder


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """transformers prints nothing on stderr."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()
