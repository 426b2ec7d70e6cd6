"""RULER runs: scores, interruptions, and folders of other runs."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import names_in
from ruler_cases import EmptyModel, PerfectModel, count_bpe, datasets

from xlstm7b.evaluate.results import comparison_table
from xlstm7b.evaluate.ruler.datasets import Datasets, Question, Questions
from xlstm7b.evaluate.ruler.run import (
    Answer,
    Plan,
    Run,
    model_names,
    plot_scores,
    read_scores,
    score_table,
)
from xlstm7b.evaluate.ruler.tasks import TASKS

SOURCE = os.environ.get("XLSTM7B_RULER")
READER = """
import json

def read_manifest(path):
    return [json.loads(line) for line in open(path, encoding="utf-8")]

write_manifest = None
"""
IDENTITY = {"model_fingerprint": "abc", "seed": 42, "haystack": None}
SMALL = Plan(("niah_single_1", "fwe"), (1024, 2048), 5, 42)
SLOW = """
import sys, time
from pathlib import Path
from ruler_cases import PerfectModel
from test_run import run

class SlowModel(PerfectModel):
    def __call__(self, prompts, max_new_tokens):
        time.sleep(0.2)
        return super().__call__(prompts, max_new_tokens)

run(Path(sys.argv[1]), SlowModel())
"""


def run(
    folder: Path,
    model: Answer | None,
    plan: Plan = SMALL,
    identity: Any = IDENTITY,
    data: Datasets | None = None,
    count: Callable[[str], int] | None = None,
) -> dict[str, Any]:
    """Runs a plan. With no model, every sample must be answered already."""

    def load() -> Answer:
        assert model is not None, "no model should be loaded"
        return model

    counted = count or count_bpe()
    started = Run(
        folder, plan, data or datasets(), counted, identity=identity, about={"model": "me"}
    )
    return started.answer(load, batch_size=2)


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_perfect_and_an_empty_model(tmp_path: Path) -> None:
    document = run(tmp_path, PerfectModel(), Plan(tuple(TASKS), (6144, 8192), 2, 42))
    assert document["left_out"] == {}
    assert list(document["results"]) == [*TASKS, "average"]
    for row in document["results"].values():
        assert row == {"6144,none": 100, "8192,none": 100}
    assert names_in(tmp_path) == {"6144", "8192", "scores.json"}
    assert names_in(tmp_path / "6144") == {f"{name}.jsonl" for name in TASKS}
    document = run(tmp_path / "empty", EmptyModel())
    assert document["results"]["average"] == {"1024,none": 0, "2048,none": 0}


def test_answers_and_scores_are_written(tmp_path: Path) -> None:
    class OneValueModel(PerfectModel):
        def __call__(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
            assert max_new_tokens == 128
            right = super().__call__(prompts, max_new_tokens)
            return [text.split("; ")[0] + " ü" for text in right]

    plan = Plan(("niah_multiquery", "qa_1"), (4096,), 3, 42)
    document = run(tmp_path, OneValueModel(), plan, data=Datasets(datasets().haystack))
    lines = [json.loads(line) for line in (tmp_path / "4096" / "niah_multiquery.jsonl").open()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["pred"] == line["outputs"][0] + " ü"
        assert line["others"] == {"score": 0.25}
        assert line["length"] == count_bpe()(line["input"]) + 128
    stored = json.loads((tmp_path / "scores.json").read_text())
    assert stored == {**document, "lengths": [4096]}
    assert stored["results"]["niah_multiquery"] == stored["results"]["average"]
    assert stored["results"]["average"] == {"4096,none": 25}
    assert stored["left_out"] == {"qa_1": "no --squad is given"}
    assert (stored["model"], stored["seed"], stored["samples"]) == ("me", 42, 3)
    assert score_table(document).splitlines() == [
        "                 4096",
        "niah_multiquery  25.0",
        "qa_1                –",
        "average          25.0",
        "– qa_1 is not in the average: no --squad is given",
    ]


def test_the_harness_reads_the_scores(tmp_path: Path) -> None:
    utils = pytest.importorskip("lm_eval.utils", reason="lm_eval is not installed")
    plan = Plan(("niah_single_1", "qa_1"), (1024,), 1, 42)
    run(tmp_path, PerfectModel(), plan, data=Datasets())
    table = utils.make_table(json.loads((tmp_path / "scores.json").read_text()))
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    shown = {row[1]: (row[5], row[6], row[7]) for row in rows if len(row) > 7}
    assert shown["niah_single_1"] == shown["average"] == ("1024", "↑", "100")


def test_a_question_too_long_is_found_at_the_start(tmp_path: Path) -> None:
    """One of the questions needs a document that is longer than the prompt may be."""
    documents = [*map(str, range(12)), "word " * 2000]
    questions = [Question(f"Is it {n}?", ("x",), (n,), tuple(range(2, 12))) for n in (0, 1, 12)]
    data = Datasets(squad=Questions(questions, documents))
    with pytest.raises(ValueError, match="a length of 1024 is too short for qa_1: "):
        run(tmp_path / "run", None, Plan(("qa_1",), (1024,), 3, 42), data=data)
    assert not (tmp_path / "run").exists()
    plan = Plan(("qa_1",), (1024,), 2, 42)
    two = Run(tmp_path / "run", plan, data, count_bpe(), identity=IDENTITY, about={})
    assert two.total == 2


def test_only_missing_samples_are_answered(tmp_path: Path) -> None:
    whole, model = tmp_path / "whole", PerfectModel()
    run(whole, model)
    assert model.prompts == 20
    parts, model = tmp_path / "parts", PerfectModel()
    run(parts, model, Plan(("fwe",), (2048,), 3, 42))
    run(parts, model)
    assert model.prompts == 20
    assert contents(parts) == contents(whole)
    run(parts, None)
    assert contents(parts) == contents(whole)
    fewer = run(parts, None, Plan(("fwe",), (2048,), 1, 42))
    assert fewer["results"]["average"] == {"2048,none": 100}
    assert len(read_scores(parts / "2048" / "fwe.jsonl")) == 5


@pytest.mark.parametrize("cut", [1, 40, 1000])
def test_an_incomplete_line_is_answered_again(tmp_path: Path, cut: int) -> None:
    whole, model = tmp_path / "whole", PerfectModel()
    run(whole, PerfectModel())
    run(tmp_path / "cut", PerfectModel())
    path = tmp_path / "cut" / "1024" / "fwe.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    run(tmp_path / "cut", model)
    assert model.prompts == 1
    assert contents(tmp_path / "cut") == contents(whole)


def test_a_killed_run_continues(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    searched = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(searched)}
    process = subprocess.Popen([sys.executable, "-c", SLOW, killed], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (killed / "1024" / "fwe.jsonl").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    model = PerfectModel()
    run(killed, model)
    assert 10 <= model.prompts <= 15
    run(tmp_path / "whole", PerfectModel())
    assert contents(killed) == contents(tmp_path / "whole")


@pytest.mark.skipif(SOURCE is None, reason="XLSTM7B_RULER names no checkout of NVIDIA/RULER")
def test_the_official_evaluation_reads_the_answers(tmp_path: Path) -> None:
    """Its evaluate.py gives the scores that we give. It only needs a stand-in for NeMo's reader."""

    class ForgetfulModel(PerfectModel):
        def __call__(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
            right = super().__call__(prompts, max_new_tokens)
            return [f"\x02 {text[: 3 + 5 * n]}\n" for n, text in enumerate(right)]

    document = run(tmp_path / "run", ForgetfulModel(), Plan(tuple(TASKS), (8192,), 3, 42))
    stand_in = tmp_path / "nemo" / "collections" / "asr" / "parts" / "utils"
    stand_in.mkdir(parents=True)
    (stand_in / "manifest_utils.py").write_text(READER)
    script = Path(str(SOURCE)).absolute() / "scripts" / "eval" / "evaluate.py"
    command = [sys.executable, str(script), "--data_dir", str(tmp_path / "run" / "8192")]
    subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        timeout=300,
    )
    _, tasks, scores, _ = csv.reader((tmp_path / "run" / "8192" / "summary.csv").open())
    theirs = dict(zip(tasks[1:], map(float, scores[1:]), strict=True))
    ours = {name: row["8192,none"] for name, row in document["results"].items()}
    assert len({*theirs.values()}) > 3
    assert {**theirs, "average": ours["average"]} == ours
    run(tmp_path / "run", None, Plan(tuple(TASKS), (8192,), 3, 42))  # its files do no harm


def test_a_folder_keeps_the_identity_of_its_run(tmp_path: Path) -> None:
    run(tmp_path, PerfectModel())
    before = contents(tmp_path)
    for name, value in (("model_fingerprint", "abd"), ("seed", 43)):
        with pytest.raises(ValueError, match=f"{name.replace('_', ' ')} .*, not {value}"):
            run(tmp_path, None, identity={**IDENTITY, name: value})
    assert contents(tmp_path) == before
    # An entry that was None so far may be added, and is then kept.
    for _ in range(2):
        run(tmp_path, None, identity={**IDENTITY, "haystack": "h"})
        run(tmp_path, None)
        with pytest.raises(ValueError, match="haystack h, not i"):
            run(tmp_path, None, identity={**IDENTITY, "haystack": "i"})
    (tmp_path / "1024" / "fwe.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"fwe\.jsonl is damaged in line 1"):
        run(tmp_path, None)
    (tmp_path / "scores.json").write_text("[]")
    with pytest.raises(ValueError, match=r"scores\.json is not a results file"):
        run(tmp_path, None)
    (tmp_path / "scores.json").unlink()
    with pytest.raises(ValueError, match="has files, but not of a RULER run"):
        run(tmp_path, None)


def test_scores_of_models_are_compared_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name, model in (("a", PerfectModel()), ("b", EmptyModel())):
        run(tmp_path / name, model)
    paths = [tmp_path / "a" / "scores.json", tmp_path / "b" / "scores.json"]
    lines = [line.split() for line in comparison_table(paths).splitlines()]
    assert [line[1] for line in lines[1:] if line[0] == "average"] == ["1024", "2048"]
    assert [line[2:] for line in lines[1:]] == [["100.0000", "0.0000", "-100.0000"]] * 6
    assert model_names(paths) == ["me, a", "me, b"]
    assert model_names(paths[:1]) == ["me"]
    plot_scores(paths, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert names_in(tmp_path) == {"a", "b", "plot.png"}
    (tmp_path / "a" / "scores.json").write_text('{"results": {"average": {}}}')
    with pytest.raises(ValueError, match=r"a/scores\.json has no RULER scores to draw"):
        plot_scores(paths, tmp_path / "plot.png")
