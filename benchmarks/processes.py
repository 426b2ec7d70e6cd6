"""Runs each system of a benchmark in a process of its own, which starts with no memory in use.

Such a process appends a line to the results' file for each figure, as soon as it is measured. So
one that crashes or hangs loses nothing, and another can go on where it stopped.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from xlstm7b.bench.measure import reason, synchronize
from xlstm7b.bench.results import Results, Shape
from xlstm7b.cli.options import option

Json = Annotated[Path | None, option("Append the results to this JSON Lines file.")]
Call = Annotated[
    str | None,
    option(
        "Name of this call. Figures of one call may be compared. With a name that the file has, "
        "only what is missing is measured.",
        default="a random one",
    ),
]
Timeout = Annotated[float, option("Time limit for each system, in seconds.")]
Here = Annotated[
    bool, option("Measure in this process, without a time limit, not in one for each system.")
]


class Case(NamedTuple):
    """What is measured at once: one figure, or several of one shape and system."""

    whats: tuple[str, ...]
    shape: Shape
    system: str

    def is_in(self, results: Results) -> bool:
        """A result's shape may have more values, such as the batch that was found."""
        return all(
            any(
                (row["call"], row["what"], row["system"]) == (results.call, what, self.system)
                and self.shape.items() <= row["shape"].items()
                for row in results.rows
            )
            for what in self.whats
        )

    def fail(self, results: Results, error: object) -> None:
        for what in self.whats:
            results.fail(what, self.shape, error, system=self.system)


def measure_here(
    cases: Sequence[Case], start: Callable[[], Callable[[Case], None]], results: Results
) -> None:
    """Measures the cases that are missing. `start` builds what measures one of them.

    An error fails one case. If it has broken the GPU's context, this process ends with it.
    """
    missing = [case for case in cases if not case.is_in(results)]
    if not missing:
        return
    try:
        measure = start()
    except Exception as error:
        for case in missing:
            case.fail(results, reason(error))
        return
    for case in missing:
        try:
            measure(case)
        except Exception as error:
            case.fail(results, reason(error))
            if torch.cuda.is_available():
                synchronize("cuda")


def measure_alone(
    cases: Sequence[Case], command: Sequence[str], timeout: float, results: Results
) -> None:
    """Runs `command`, which measures the cases that are missing with `measure_here`.

    If it crashes, the case that it was at is recorded as failed, and it runs again. After `timeout`
    seconds in all it is stopped: another run with the same call measures the cases after that one.
    """
    end = time.monotonic() + timeout
    while any(not case.is_in(results) for case in cases):
        error = _run(command, end - time.monotonic())
        results.reread()
        missing = [case for case in cases if not case.is_in(results)]
        if missing:
            is_late = time.monotonic() >= end
            missing[0].fail(results, f"stopped after {timeout:g} s" if is_late else error)
            if is_late:
                return


def _run(command: Sequence[str], seconds: float) -> str:
    """The error with which a process ends, or what it exits with."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        try:
            code = subprocess.run(command, stderr=errors, timeout=max(0, seconds)).returncode
        except subprocess.TimeoutExpired:
            return "stopped"
        errors.seek(0)
        return _last_error(errors.read()) or f"exit code {code}"


def _last_error(stderr: str) -> str:
    """The last line that names an exception, else the last line."""
    lines = stderr.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines or [""])[-1]


def repeated(script: str, context: typer.Context, **changed: object) -> list[str]:
    """The command of a script with what was given, and some of it changed.

    Lists are arguments. True is an option without a value.
    """
    arguments: list[str] = []
    options: list[str] = []
    given = {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }
    flags = {each.name: max(each.opts, key=len) for each in context.command.params}
    for name, value in {**given, **changed}.items():
        if isinstance(value, list):
            arguments += value
        else:
            options += [flags[name]] if value is True else [flags[name], str(value)]
    return [sys.executable, script, *arguments, *options]


@contextmanager
def results_file(file: Path | None) -> Iterator[Path]:
    """The file to which all processes append; a temporary one if none is wanted."""
    if file is not None:
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "results.jsonl"


def exit_if_failed(results: Results) -> None:
    """Exit code 1 if something of this call could not be measured."""
    if any("error" in row for row in results.rows if row["call"] == results.call):
        raise typer.Exit(1)
