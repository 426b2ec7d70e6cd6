"""benchmarks/processes.py: a process that crashes or hangs, and what comes after it."""

import json
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

import processes
from processes import Case, measure_alone, measure_here, repeated, results_file
from xlstm7b.bench.results import Results

CASES = [Case(("decode", "peak memory"), {"context": n}, "peer") for n in range(3)]
# Measures each case that the file lacks. It crashes or hangs at the second one.
SCRIPT = """
import json, pathlib, sys, time
path, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
lines = path.read_text().splitlines() if path.exists() else []
done = {json.loads(line)["shape"]["context"] for line in lines}
for context in range(3):
    if context in done:
        continue
    if context == 1:
        if mode == "crash":
            raise RuntimeError("illegal memory access")
        if mode == "exit":
            raise SystemExit(3)
        time.sleep(60)
    with path.open("a") as file:
        for what in ("decode", "peak memory"):
            row = {"what": what, "shape": {"context": context, "batch": 4}, "system": "peer"}
            print(json.dumps(row | {"call": "a", "value": 1.0, "unit": "s"}), file=file)
"""


@pytest.mark.parametrize(
    ("mode", "error", "contexts"),
    [
        ("crash", "RuntimeError: illegal memory access", [0, 1, 2]),
        ("exit", "exit code 3", [0, 1, 2]),
        ("hang", "stopped after 2 s", [0, 1]),
    ],
)
def test_a_broken_process_fails_one_case(mode, error, contexts, tmp_path):
    file = tmp_path / "a.jsonl"
    results = Results("speed", "cpu", file=file, call="a")
    command = [sys.executable, "-S", "-c", SCRIPT, str(file), mode]
    measure_alone(CASES, command, 2.0 if mode == "hang" else 60.0, results)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted({row["shape"]["context"] for row in rows}) == contexts
    failed = [row for row in rows if "error" in row]
    assert [(row["what"], row["shape"]) for row in failed] == [
        (what, {"context": 1}) for what in CASES[1].whats
    ]
    assert failed[0]["error"] == error


def test_a_system_that_cannot_be_built_fails_all_its_cases(tmp_path):
    results = Results("speed", "cpu", file=tmp_path / "a.jsonl", call="a")

    def start():
        raise ImportError("no module")

    measure_here(CASES, start, results)
    assert [row["error"] for row in results.rows] == ["ImportError: no module"] * 6
    measure_here(CASES, start, results)  # all are known
    assert len(results.rows) == 6


def test_an_error_fails_one_case(tmp_path):
    results = Results("speed", "cpu", file=tmp_path / "a.jsonl", call="a")

    def measure(case):
        if case is CASES[1]:
            raise torch.OutOfMemoryError
        for what in case.whats:
            results.add(what, case.shape, 1.0, "s", system=case.system)

    measure_here(CASES, lambda: measure, results)
    assert ["error" in row for row in results.rows] == [False] * 2 + [True] * 2 + [False] * 2
    assert results.rows[2]["error"] == "out of memory"


def test_a_command_is_repeated_with_what_was_given():
    app, found = typer.Typer(), []

    @app.command()
    def script(context: typer.Context, names: list[str], more: int = 1, here: bool = False) -> None:
        found.extend(repeated("a.py", context, names=names[:1], here=True))

    CliRunner().invoke(app, ["x", "y", "--more", "2"])
    assert found == [sys.executable, "a.py", "x", "--more", "2", "--here"]


def test_without_a_file_the_results_are_passed_on_in_a_temporary_one(tmp_path):
    with results_file(None) as file:
        assert file.parent.is_dir()
    assert not file.parent.exists()
    with results_file(tmp_path / "b") as file:
        assert file == tmp_path / "b"
    assert processes.Case(("a",), {}, "b").is_in(Results("speed", "cpu")) is False
