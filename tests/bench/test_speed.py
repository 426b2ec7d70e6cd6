"""`xlstm7b experiment speed`: what it measures of each model, and how it goes on after failures."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
from xlstm7b.bench import generation, speed
from xlstm7b.bench.cases import Result
from xlstm7b.bench.plans import SPEED_PARTS, Speed
from xlstm7b.bench.speed_figures import draw
from xlstm7b.cli import app

PLAN = Speed.of(device="cpu", peak_tflops=1.0, peak_tbs=0.1)


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Result]]:
    """The results of every model that transformers alone can build, and of ours.

    Without the check of its decoding, which has tests of its own and takes most of the time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "check", lambda *_: {"equal_tokens": 16})
        return {
            name: list(speed.measure_model(name, SPEED_PARTS, PLAN.to_dict()))
            for name in speed.SMOKE_RUNS
        }


@pytest.mark.parametrize("name", speed.SMOKE_RUNS)
def test_every_figure_is_complete(name: str, measured: dict[str, list[Result]]) -> None:
    results = measured[name]
    assert [result.error for result in results if result.error] == []
    assert {result.name for result in results} == {name}
    begun = [(r.part, r.work) for r in results if r.part in ("began", "ended")]
    assert begun == [(p, part) for part in SPEED_PARTS for p in ("began", "ended")]
    if name != "ours":
        assert all(r.figures["equal_tokens"] == 16 for r in results if r.part == "check")
    rows = {part: [r for r in results if r.part == part] for part in SPEED_PARTS}
    assert [(r.batch, r.length) for r in rows["context"]] == [(1, 0), (1, 40), (1, 80)]
    lengths = [(r.length, r.figures["new"]) for r in rows["first"]]
    assert lengths == [(1, 1), (1, 3), (20, 1), (20, 3)]
    assert [(r.batch, r.length) for r in rows["prefill"]] == [(1, 64), (2, 32)]
    assert [(r.batch, r.length) for r in rows["full"]] == [(2, 20), (2, 40)]
    timed = [(r.length, r.seconds) for r in rows["generated"] if r.seconds is not None]
    assert [length for length, _ in timed] == [4, 20]
    assert timed[0][1] < timed[1][1]
    assert {r.length for r in rows["generated"] if r.memory} == {4, 20, 40, 80}
    for result in [*rows["context"], *rows["first"], *rows["prefill"], *rows["full"]]:
        assert result.seconds is not None
        assert result.seconds > 0
        assert result.work  # the engine
    for result in (*rows["context"], *rows["full"]):
        assert result.tokens_per_second == pytest.approx(result.batch / result.seconds)


def test_a_slow_path_is_named(measured: dict[str, list[Result]]) -> None:
    for name in ("falcon-mamba", "codestral-mamba"):
        rows = [r for r in measured[name] if r.part in SPEED_PARTS]
        assert all("slow path" in row.work for row in rows)


Script = dict[str, list[tuple[list[str], str | None]]]


def pretend(monkeypatch: pytest.MonkeyPatch, script: Script) -> list[tuple[str, list[str]]]:
    """Processes that follow a script: the parts each one ends, then why it crashes, if it does."""
    calls = []

    def process(
        case: Result, function: Callable[..., Any], timeout: float, /, **job: Any
    ) -> Iterator[Result]:
        name, parts = job["model"], job["parts"]
        calls.append((name, list(parts)))
        ended, error = script[name].pop(0)
        yield Result("machine", name, figures={"machine": {"gpu": "none"}})
        for part in ended:
            yield Result("began", name, part)
            yield Result(part, name, "engine", batch=1, length=8, seconds=1.0)
            yield Result("ended", name, part)
        rest = [part for part in parts if part not in ended]
        if error and rest and error != "at once":
            yield Result("began", name, rest[0])
        if error:
            yield Result("end", name, error=error)

    monkeypatch.setattr(speed, "in_process", process)
    return calls


def run(output: Path, *names: str, plan: Speed = PLAN, again: bool = False) -> dict[str, Any]:
    return speed.run_speed(output, names, plan, again=again, say=lambda line: None)


def test_a_crash_ends_one_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(SPEED_PARTS)
    calls = pretend(monkeypatch, {"llama2": [(every[:2], "Segfault"), (every[3:], None)]})
    found = run(tmp_path, "llama2")["llama2"]
    assert calls == [("llama2", every), ("llama2", every[3:])]
    assert found["status"] == "finished"
    assert found["figures"][every[2]] == [
        {"part": every[2], "name": "llama2", "batch": 0, "length": 0, "error": "Segfault"}
    ]
    assert all("error" not in row for part in every[3:] for row in found["figures"][part])
    assert found["figures"]["context"][0]["engine"] == "engine"
    saved = json.loads((tmp_path / speed.NAME).read_text())
    assert saved["runs"]["llama2"] == found
    run(tmp_path, "llama2")  # nothing is missing
    assert len(calls) == 2


def test_a_figure_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails if it had all the time, and is measured again if others before it took the time."""
    every, late = list(SPEED_PARTS), "stopped after 480 s"
    script: Script = {"llama2": [(every[:2], late), ([], late), (every[3:], None)]}
    calls = pretend(monkeypatch, script)
    assert run(tmp_path, "llama2")["llama2"]["status"] == "stopped"
    found = run(tmp_path, "llama2")["llama2"]
    assert calls == [("llama2", every), ("llama2", every[2:]), ("llama2", every[3:])]
    assert found["status"] == "finished"
    assert found["figures"][every[2]][0]["error"] == late


def test_a_model_that_cannot_start_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pretend(monkeypatch, {"xlstm": [([], "at once")], "ours": [(list(SPEED_PARTS), None)]})
    found = run(tmp_path, "xlstm", "ours")
    assert (found["xlstm"]["status"], found["xlstm"]["reason"]) == ("failed", "at once")
    assert found["ours"]["status"] == "finished"
    run(tmp_path, "xlstm", "ours")
    assert len(calls) == 2


def test_one_model_is_measured_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(SPEED_PARTS)
    script: Script = {"ours": [(every, None), (every, None)], "llama2": [(every, None)]}
    calls = pretend(monkeypatch, script)
    first = run(tmp_path, "ours", "llama2")
    before = json.dumps(first["llama2"])
    second = run(tmp_path, "ours", again=True)
    assert calls == [("ours", every), ("llama2", every), ("ours", every)]
    assert json.dumps(second["llama2"]) == before


def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = list(SPEED_PARTS)

    def stopped(case: Result, *_: Any, **job: Any) -> Iterator[Result]:
        yield Result("machine", "llama3", figures={})
        yield Result("began", "llama3", every[0])
        yield Result(every[0], "llama3", batch=1, length=8, seconds=1.0)
        yield Result("ended", "llama3", every[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "in_process", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "llama3")
    calls = pretend(monkeypatch, {"llama3": [(every[1:], None)]})
    found = run(tmp_path, "llama3", again=True)["llama3"]
    assert calls == [("llama3", every[1:])]
    assert (found["status"], list(found["figures"])) == ("finished", every)


def test_other_settings_need_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {"ours": [(list(SPEED_PARTS), None)]})
    run(tmp_path, "ours")
    with pytest.raises(ValueError, match=r"have first 3, not 5: choose another --output"):
        run(tmp_path, "llama2", plan=Speed.of(device="cpu", first=5, peak_tflops=1.0, peak_tbs=0.1))
    (tmp_path / speed.NAME).write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        run(tmp_path, "ours")


@given(
    step=st.floats(1e-4, 1.0),
    slope=st.floats(0, 1e-3),
    counts=st.lists(st.integers(2, 64), min_size=1, max_size=4, unique=True),
)
def test_sums_of_steps(step: float, slope: float, counts: list[int]) -> None:
    """Steps that grow linearly: the sum is exact but for the last step's half."""
    contexts = [0, 64, 128, 1024]
    rows = [{"length": n, "seconds": step + slope * n} for n in contexts]
    real = [{"length": n, "seconds": n * step + slope * n * n / 2} for n in sorted(counts)]
    longer = [{"length": n, "memory": 1} for n in (128, 1024)]
    *measured, a, b = speed.with_sums([*real, *longer], rows)
    assert measured == real
    for row in (a, b):
        n = row["length"]
        assert row["summed"]
        assert row["memory"] == 1
        assert row["seconds"] == pytest.approx(n * step + slope * n * n / 2, rel=1e-6)


def test_nothing_is_summed_without_steps() -> None:
    rows = [{"length": 4, "seconds": 1.0}, {"length": 128, "memory": 1}]
    assert speed.with_sums(rows, [{"length": 128, "error": "out of memory"}]) == rows


def test_the_largest_batch_shrinks_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "free_memory", lambda device: 1000)
    tried = []

    def timed(case: Result) -> Result:
        tried.append(case.batch)
        if case.batch > 70:
            raise torch.OutOfMemoryError
        return Result("full", batch=case.batch, seconds=1.0)

    plan = Speed.of(device="cpu", most_rows=500)
    result = speed.largest_batch(Result("full"), 10, plan, timed)
    assert tried == [90, 78, 68]
    assert result.batch == 68
    none = speed.largest_batch(Result("full"), 2000, plan, timed)
    assert none.error == "out of memory"


def test_figures_from_results_with_failures(
    tmp_path: Path, measured: dict[str, list[Result]]
) -> None:
    runs: dict[str, Any] = {}
    for name, results in measured.items():
        figures = {
            part: [r.to_dict() | {"engine": r.work} for r in results if r.part == part]
            for part in SPEED_PARTS
        }
        runs[name] = {"figures": figures, "machine": {"gpu": "a GPU"}}
    runs["llama2"]["figures"]["context"][-1] = {"length": 80, "error": "out of memory"}
    runs["xlstm"] = {"figures": {}, "status": "failed", "reason": "not installed"}
    cell = [
        {"name": name, "work": work, "length": length, "seconds": 1e-3}
        for name in ("ours", "sdpa")
        for work in ("forward", "forward + backward")
        for length in (32, 64)
    ]
    runs["kernels"] = {"figures": {"cell": cell}}
    drawn = draw(runs, tmp_path)
    assert sorted(drawn) == sorted(f"speed-{part}" for part in (*SPEED_PARTS, "cell"))
    assert len(list(tmp_path.glob("*.png"))) == len(list(tmp_path.glob("*.svg"))) == 6
    assert "not vLLM" in (tmp_path / "speed-context.svg").read_text()


# The command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["experiment", "speed", *arguments])


def test_the_command_measures_in_a_process_and_draws(tmp_path: Path) -> None:
    result = invoke("--smoke", "--runs", "codestral-mamba", "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / speed.NAME).read_text())["runs"]["codestral-mamba"]
    assert found["status"] == "finished"
    assert found["packages"]["transformers"]
    assert [row["equal_tokens"] for row in found["check"]] == [16]
    assert [row.get("summed") for row in found["figures"]["generated"]] == [None, None, True, True]
    assert "speed-full.png" in result.output
    (tmp_path / "out" / "speed-full.png").unlink()
    drawn = invoke(
        "--device", "cpu", "--output", str(tmp_path / "out")
    )  # as on a machine with no GPU
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "out" / "speed-full.png").is_file()
    assert json.loads((tmp_path / "out" / speed.NAME).read_text())["runs"] == {
        "codestral-mamba": found
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--smoke", "--runs", "llama4"], "speed has no run 'llama4'"),
        (["--smoke", "--steps", "3"], "speed trains nothing"),
        (["--device", "cpu"], "on a CPU, try it with --smoke"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = invoke(*arguments, "--output", str(tmp_path / "out"))
    assert result.exit_code != 0
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_the_runs_are_listed() -> None:
    assert "Codestral-Mamba 7B" in invoke("--list").output
    assert "speed" in CliRunner().invoke(app, ["experiment", "--list"]).output
