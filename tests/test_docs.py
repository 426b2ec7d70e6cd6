"""The documentation of the paper's results: its commands exist, and its links lead somewhere."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from ablations import ABLATIONS
from recall import EXPERIMENTS
from xlstm7b.cli import app

DOCS = Path(__file__).parent.parent / "docs"
PAPER = (DOCS / "paper.md").read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """The arguments of every `xlstm7b` in a code block or in backquotes, without duplicates."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"^    xlstm7b (.*)$|`xlstm7b ([^`]*)`", joined, re.M)
    return [shlex.split(line, comments=True) for line in dict.fromkeys(a or b for a, b in found)]


@cache
def program() -> Any:
    return typer.main.get_command(app)


def check_command(arguments: list[str]) -> None:
    """Every word up to the command itself is one, and it has all the options that are given."""
    command = program()
    words = iter(arguments)
    for word in words:
        if word not in command.commands:  # of `eval`, `run` may be left out
            command, words = command.commands["run"], iter([word, *words])
            break
        command = command.commands[word]
        if not hasattr(command, "commands"):
            break
    known = {option for parameter in command.params for option in parameter.opts}
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    assert given <= known, f"{command.name} has no {', '.join(given - known)}"


@pytest.mark.parametrize("arguments", commands(PAPER), ids=" ".join)
def test_commands_of_the_paper_exist(arguments: list[str]) -> None:
    check_command(arguments)


def test_every_experiment_is_in_the_paper() -> None:
    shown = set(re.findall(r"python experiments/(\w+)\.py ([\w-]+)", PAPER))
    named = {"ablations": ABLATIONS, "recall": EXPERIMENTS}
    assert shown == {(script, name) for script, names in named.items() for name in names}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "7b", "--colour"], "info has no --colour"),
        (["eval", "FOLDER", "--shots", "5"], "run has no --shots"),
        (["bench", "generation", "--part", "first"], "generation has no --part"),
    ],
)
def test_a_wrong_option_is_found(arguments: list[str], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_command(arguments)


def test_links_of_the_paper_lead_somewhere() -> None:
    """To files of the repository, and to headings as GitHub names them."""

    def anchors(text: str) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", text, re.M)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}

    links = re.findall(r"\]\(([^)]*)\)", PAPER)
    assert len(links) > 20
    for link in links:
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = DOCS / name if name else DOCS / "paper.md"
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link
