"""Runs over RULER's tasks: scores, interruptions, and folders of other runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import names_in
from ruler_cases import Empty, Oracle, count_bpe, sources

from xlstm7b.evaluate.results import compare
from xlstm7b.evaluate.ruler.questions import Question, Questions
from xlstm7b.evaluate.ruler.report import model_names, plot_scores, to_table
from xlstm7b.evaluate.ruler.runner import Model, Plan, Run, read_scores
from xlstm7b.evaluate.ruler.tasks import TASKS, Sources

IDENTITY = {"model_fingerprint": "abc", "seed": 42, "haystack": None}
SMALL = Plan(("niah_single_1", "fwe"), (1024, 2048), 5, 42)
SLOW = """
import sys, time
from pathlib import Path
from ruler_cases import Oracle
from test_ruler_runner import SMALL, answer

class Slow(Oracle):
    def answer(self, prompts, max_new_tokens):
        time.sleep(0.2)
        return super().answer(prompts, max_new_tokens)

answer(Path(sys.argv[1]), Slow())
"""


def answer(
    folder: Path, model: Model | None, plan: Plan = SMALL, identity: Any = IDENTITY, **given: Any
) -> dict[str, Any]:
    def load() -> Model:
        assert model is not None, "there is nothing to load a model for"
        return model

    data = given.get("data", sources())
    run = Run(folder, plan, data, count_bpe(), identity=identity, about={"model": "me"})
    return run.answer(load, batch_size=2)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("model", "score"), [(Oracle(), 100.0), (Empty(), 0.0)])
def test_the_perfect_and_the_empty_model(tmp_path: Path, model: Model, score: float) -> None:
    document = answer(tmp_path, model, Plan(tuple(TASKS), (6144, 8192), 3, 42))
    assert document["left_out"] == {}
    assert list(document["results"]) == [*TASKS, "average"]
    for row in document["results"].values():
        assert row == {"6144,none": score, "8192,none": score}
    assert len(names_in(tmp_path)) == 2 * 13 + 1


def test_answers_and_scores_are_written(tmp_path: Path) -> None:
    class HalfRight(Oracle):
        def answer(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
            assert max_new_tokens == 128
            right = super().answer(prompts, max_new_tokens)
            return [text.split("; ")[0] + " ü" for text in right]

    plan = Plan(("niah_multiquery", "qa_1"), (4096,), 3, 42)
    document = answer(tmp_path, HalfRight(), plan, data=Sources(sources().haystack))
    lines = [json.loads(line) for line in (tmp_path / "niah_multiquery-4096.jsonl").open()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["answer"] == line["references"][0] + " ü"
        assert line["score"] == 25
        assert line["length"] == count_bpe()(line["prompt"]) + 128
    stored = json.loads((tmp_path / "scores.json").read_text())
    assert stored == {**document, "lengths": [4096]}
    assert stored["results"]["niah_multiquery"] == stored["results"]["average"]
    assert stored["results"]["average"] == {"4096,none": 25}
    assert stored["left_out"] == {"qa_1": "no --squad is given"}
    assert (stored["model"], stored["seed"], stored["samples"]) == ("me", 42, 3)
    assert to_table(document).splitlines() == [
        "                     4096",
        "niah_multiquery      25.0",
        "qa_1                    –",
        "average              25.0",
        "– qa_1 is not in the average: no --squad is given",
    ]


def test_the_harness_reads_the_scores(tmp_path: Path) -> None:
    utils = pytest.importorskip("lm_eval.utils", reason="lm_eval is not installed")
    plan = Plan(("niah_single_1", "qa_1"), (1024,), 1, 42)
    answer(tmp_path, Oracle(), plan, data=Sources())
    table = utils.make_table(json.loads((tmp_path / "scores.json").read_text()))
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    shown = {row[1]: (row[5], row[6], row[7]) for row in rows if len(row) > 7}
    assert shown["niah_single_1"] == shown["average"] == ("1024", "↑", "100")


def test_a_question_too_long_is_found_at_the_start(tmp_path: Path) -> None:
    """One of many needs a document that leaves no room."""
    documents = ["A short one.", "Another.", "word " * 2000]
    asked = [Question(f"What is {n}?", ("x",), (n,), ()) for n in (0, 1, 2)]
    data = Sources(squad=Questions(asked, documents))
    with pytest.raises(ValueError, match="1024 tokens for qa_1 are too few: "):
        answer(tmp_path / "run", None, Plan(("qa_1",), (1024,), 3, 42), data=data)
    assert not (tmp_path / "run").exists()
    two = Run(tmp_path / "run", Plan(("qa_1",), (1024,), 2, 42), data, count_bpe(),
              identity=IDENTITY, about={})  # fmt: skip
    assert two.total == 2


def test_only_what_is_missing_is_asked(tmp_path: Path) -> None:
    whole, oracle = tmp_path / "whole", Oracle()
    answer(whole, oracle)
    assert oracle.asked == 20
    parts, oracle = tmp_path / "parts", Oracle()
    answer(parts, oracle, Plan(("fwe",), (2048,), 3, 42))
    answer(parts, oracle)
    assert oracle.asked == 20
    assert contents(parts) == contents(whole)
    answer(parts, None)
    assert contents(parts) == contents(whole)
    fewer = answer(parts, None, Plan(("fwe",), (2048,), 1, 42))
    assert fewer["results"]["average"] == {"2048,none": 100}
    assert len(read_scores(parts / "fwe-2048.jsonl")) == 5


@pytest.mark.parametrize("cut", [1, 40, 1000])
def test_a_cut_line_is_written_again(tmp_path: Path, cut: int) -> None:
    whole, oracle = tmp_path / "whole", Oracle()
    answer(whole, Oracle())
    answer(tmp_path / "cut", Oracle())
    path = tmp_path / "cut" / "fwe-1024.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    answer(tmp_path / "cut", oracle)
    assert oracle.asked == 1
    assert contents(tmp_path / "cut") == contents(whole)


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    searched = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(searched)}
    process = subprocess.Popen([sys.executable, "-c", SLOW, killed], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (killed / "fwe-1024.jsonl").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    oracle = Oracle()
    answer(killed, oracle)
    assert 10 <= oracle.asked <= 15
    answer(tmp_path / "whole", Oracle())
    assert contents(killed) == contents(tmp_path / "whole")


def test_other_runs_are_refused(tmp_path: Path) -> None:
    answer(tmp_path, Oracle())
    before = contents(tmp_path)
    for name, value, said in (
        ("model_fingerprint", "abd", "another model fingerprint"),
        ("seed", 43, "another seed"),
    ):
        with pytest.raises(ValueError, match=f"was begun with {said}: choose another --output"):
            answer(tmp_path, None, identity={**IDENTITY, name: value})
    assert contents(tmp_path) == before
    # What played no part till now may be added, and is then kept.
    for _ in range(2):
        answer(tmp_path, None, identity={**IDENTITY, "haystack": "h"})
        answer(tmp_path, None)
        with pytest.raises(ValueError, match="another haystack"):
            answer(tmp_path, None, identity={**IDENTITY, "haystack": "i"})
    (tmp_path / "fwe-1024.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"fwe-1024\.jsonl is damaged in line 1"):
        answer(tmp_path, None)
    (tmp_path / "scores.json").write_text("[]")
    with pytest.raises(ValueError, match=r"scores\.json is damaged"):
        answer(tmp_path, None)
    (tmp_path / "scores.json").unlink()
    with pytest.raises(ValueError, match="holds something else than a run"):
        answer(tmp_path, None)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(("nia",), (4096,), 1, 42), "there is no task 'nia'; there are: niah_single_1, "),
        (Plan(("vt",), (0,), 1, 42), "a length must be at least 1, not 0"),
        (Plan(("vt",), (4096,), 0, 42), "a number of samples must be at least 1, not 0"),
        (Plan(("vt",), (4096, 4096), 1, 42), "name every length once, and at least one"),
        (Plan((), (4096,), 1, 42), "name every task once, and at least one"),
        (Plan(("qa_1", "qa_2"), (4096,), 1, 42), "nothing can be made: no --squad is given"),
        (Plan(("vt",), (600,), 1, 42), "600 tokens for vt are too few: "),
    ],
)
def test_mistakes(tmp_path: Path, plan: Plan, said: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (its text is compared whole)
        answer(tmp_path / "run", None, plan, data=Sources())
    assert str(raised.value).startswith(said)
    assert not (tmp_path / "run").exists()


def test_scores_of_models_are_compared_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name, model in (("a", Oracle()), ("b", Empty())):
        answer(tmp_path / name, model)
    paths = [tmp_path / "a" / "scores.json", tmp_path / "b" / "scores.json"]
    lines = compare(paths)
    assert len(lines) == 6
    assert {(line.task, line.metric) for line in lines if line.task == "average"} == {
        ("average", "1024"),
        ("average", "2048"),
    }
    assert all(line.differences == [-100] for line in lines)
    assert model_names(paths) == ["me, a", "me, b"]
    assert model_names(paths[:1]) == ["me"]
    plot_scores(paths, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert names_in(tmp_path) == {"a", "b", "plot.png"}
    (tmp_path / "a" / "scores.json").write_text('{"results": {"average": {}}}')
    with pytest.raises(ValueError, match=r"a/scores\.json holds no average to draw"):
        plot_scores(paths, tmp_path / "plot.png")
