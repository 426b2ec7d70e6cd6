"""Experiments: their files, runs that stop, diverge and continue, results and figures."""

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_runs import spoil_loss

from xlstm7b.data.prepare import prepare
from xlstm7b.data.shards import ShardWriter, write_manifest
from xlstm7b.experiment import (
    Experiment,
    draw,
    experiment_names,
    load_experiment,
    run_experiment,
)
from xlstm7b.experiment.figures import over_previous
from xlstm7b.experiment.results import check_same, comparable, measured, ratios, results_table
from xlstm7b.experiment.tasks import TASKS
from xlstm7b.model import XLSTM
from xlstm7b.train import make_plan
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.trainer import Trainer

FILE = """
title = "Two seeds"
paper = "none"
recipe = "quickstart"
set = [
    "model={embedding_dim=64,num_blocks=1,num_heads=2,vocab_size=320}",
    "data.context_length=32",
    "data.validation_sequences=2",
    "batch.sequences=2",
    "batch.micro_batch=2",
    "schedule.warmup=1",
    "schedule.cooldown=1",
    "run.steps=4",
]
[runs.one]
label = "seed 1"
seed = 1
[runs.two]
label = "seed 2"
set = ["optimizer.lr=1e-3"]
seed = 2
[figure]
kind = "loss"
"""
# The same with a checkpoint after each step. Saving takes longer than a step of these models.
SAVED_OFTEN = FILE.replace('"run.steps=4"', '"run.steps=4", "run.save_every=1"')


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("so much depends upon a red wheel barrow " * 40)
    for part in ("train", "valid"):
        prepare([text], folder / part)
    return folder


def write(folder: Path, text: str = FILE, *, name: str = "seeds") -> str:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return str(path)


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def test_every_experiment_of_the_package_is_found_and_has_recipes_that_fit() -> None:
    assert "input-gate-bias" in experiment_names()
    for name in experiment_names():
        experiment = load_experiment(name)
        for run in experiment.runs:
            recipe = experiment.recipe_of(run, data=Path("books"), output=Path("out"))
            assert make_plan(recipe, gpus=1).memory["total"] < 130e9  # one H200 has 150 GB
            assert recipe.run.steps <= 300 or experiment.data
            assert recipe.run.seed == experiment.runs[run].seed


@pytest.mark.parametrize("name", experiment_names())
def test_smoke_trains_every_run_and_draws_the_figure(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name)
    found = run_experiment(experiment, tmp_path / "out", smoke=True)
    assert list(found) == list(experiment.runs)
    for run in found.values():
        assert run["status"] == "finished"
        assert run["tokens_per_second"] > 0
        assert all(map(math.isfinite, run["curve"]["loss"]))
    assert results(tmp_path / "out")["runs"] == json.loads(json.dumps(found))
    draw(experiment, found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_records_what_was_trained_and_measured(data: Path, tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path))
    out = tmp_path / "out"
    found = run_experiment(experiment, out, data=data)
    assert sorted(path.name for path in out.iterdir()) == ["one", "results.json", "two"]
    written = results(out)
    assert (written["experiment"], written["title"]) == ("seeds", "Two seeds")
    one, two = written["runs"]["one"], written["runs"]["two"]
    assert (one["seed"], two["seed"], one["steps"]) == (1, 2, 4)
    assert (one["recipe"]["optimizer"]["lr"], two["recipe"]["optimizer"]["lr"]) == (5e-3, 1e-3)
    assert one["curve"]["step"] == [0, 1, 2, 3]
    assert one["curve"]["learning_rate"][0] == 0
    assert one["curve"]["loss"] != two["curve"]["loss"]
    assert one["held_out"]["step"] == [3]
    assert one["held_out_perplexity"] == pytest.approx(math.exp(one["held_out_loss"]))
    seconds = [line["seconds"] for line in read_metrics(out / "one" / "metrics.jsonl")]
    assert one["seconds_per_step"] == median(seconds[2:])
    assert one["parameters"] == sum(
        p.numel() for p in XLSTM(experiment.recipe_of("one", data=data, output=out).model)
        .parameters()
    )  # fmt: skip
    assert one["data"]["train"]["tokens"] == 1601
    assert "torch" in one["machine"]
    assert str(data) not in json.dumps(written)  # results can be published
    # The curve is that of the trainer, and no weights are left.
    log = (out / "one" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in log]
    assert one["curve"]["loss"] == pytest.approx(losses, rel=1e-5)
    assert not (out / "one" / "checkpoints").exists()
    lines = results_table(experiment, found).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["one", "finished"], ["two", "finished"]]


def test_stopped_experiment_continues_where_it_was(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load_experiment(write(tmp_path, SAVED_OFTEN))
    whole = run_experiment(experiment, tmp_path / "whole", data=data)
    out, trained = tmp_path / "out", []
    update = Trainer.update

    def counted(self: Trainer) -> Any:
        trained.append((self.folder.name, self.step))
        return update(self)

    monkeypatch.setattr(Trainer, "update", counted)
    # The time limit has passed after the first step of each call.
    short = {"data": data, "settings": ["run.time_limit=1e-9"]}
    assert run_experiment(experiment, out, **short) == {}
    assert list(run_experiment(experiment, out, data=data, runs=["one"])) == ["one"]
    assert list(run_experiment(experiment, out, **short)) == ["one"]
    found = run_experiment(experiment, out, data=data)
    assert trained == [(name, step) for name in ("one", "two") for step in range(4)]
    for name, run in found.items():
        assert run["curve"] == whole[name]["curve"]
        assert run["held_out_loss"] == whole[name]["held_out_loss"]
    # All runs have a result: nothing is trained, and no data is needed.
    assert run_experiment(experiment, out) == found
    assert len(trained) == 8


def test_run_that_diverges_is_recorded_and_the_next_one_trains(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load_experiment(write(tmp_path))
    train = Trainer.train

    def spoiled(self: Trainer, report: Any) -> None:
        if self.folder.name == "one":
            spoil_loss(self, math.nan, [2, 3])
        train(self, report)

    monkeypatch.setattr(Trainer, "train", spoiled)
    found = run_experiment(
        experiment, tmp_path / "out", data=data, settings=["run.nan_policy=stop"]
    )
    assert (found["one"]["status"], found["one"]["step"]) == ("diverged", 2)
    assert found["one"]["reason"].startswith("loss nan and gradient norm nan at step 2")
    assert found["one"]["curve"]["step"] == [0, 1]
    assert found["one"]["held_out_loss"] is None
    assert found["two"]["status"] == "finished"
    draw(experiment, found, tmp_path / "figure.svg")
    # It has a result: it is not trained again.
    monkeypatch.setattr(Trainer, "__init__", None)
    assert run_experiment(experiment, tmp_path / "out", settings=["run.nan_policy=stop"]) == found


def test_run_that_does_not_fit_is_tried_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, out = load_experiment(write(tmp_path)), tmp_path / "out"
    update, is_full = Trainer.update, True

    def limited(self: Trainer) -> Any:
        if is_full and self.folder.name == "one":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return update(self)

    monkeypatch.setattr(Trainer, "update", limited)
    found = run_experiment(experiment, out, data=data)
    one = found["one"]
    assert (one["status"], one["reason"], one["step"]) == ("failed", "CUDA out of memory.", 0)
    assert found["two"]["status"] == "finished"
    is_full = False
    assert run_experiment(experiment, out, data=data)["one"]["status"] == "finished"


@pytest.mark.parametrize("finished", [True, False])
def test_changed_experiment_is_refused(finished: bool, data: Path, tmp_path: Path) -> None:
    experiment, out = load_experiment(write(tmp_path)), tmp_path / "out"
    stop = [] if finished else ["run.time_limit=1e-9"]
    run_experiment(experiment, out, data=data, settings=stop)
    before = sorted(out.rglob("*"))
    what = f"the run one in {out}" if finished else f"the run in {out / 'one'}"
    for setting, message in (
        ("optimizer.lr=1e-3", f"{what} has optimizer.lr 0.005, not 0.001"),
        ("run.seed=3", f"{what} has run.seed 1, not 3"),
        ("run.steps=5", f"{what} has run.steps 4, not 5"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}: choose another --output$"):
            run_experiment(experiment, out, data=data, settings=[setting])
    assert sorted(out.rglob("*")) == before
    other = load_experiment(write(tmp_path, name="other"))
    with pytest.raises(ValueError, match=r"holds (the experiment seeds|files that are not)"):
        run_experiment(other if finished else load_experiment("schedule"), out, data=data)


def test_results_on_other_data_are_refused(data: Path, tmp_path: Path) -> None:
    experiment, out = load_experiment(write(tmp_path)), tmp_path / "out"
    run_experiment(experiment, out, data=data)
    text = tmp_path / "other.txt"
    text.write_text("glazed with rain water " * 40)
    for part in ("train", "valid"):
        prepare([text], tmp_path / "other" / part)
    with pytest.raises(ValueError, match=r"has data\.train\.tokens 1601, not 921"):
        run_experiment(experiment, out, data=tmp_path / "other")


def test_runs_of_one_figure_have_the_same_settings_and_data(data: Path, tmp_path: Path) -> None:
    experiment, out = load_experiment(write(tmp_path)), tmp_path / "out"
    run_experiment(experiment, out, data=data, runs=["one"])
    with pytest.raises(ValueError, match=r"the run one in .* has run\.steps 4, not 5"):
        run_experiment(experiment, out, data=data, runs=["two"], settings=["run.steps=5"])
    text = tmp_path / "other.txt"
    text.write_text("glazed with rain water " * 40)
    for part in ("train", "valid"):
        prepare([text], tmp_path / "other" / part)
    with pytest.raises(ValueError, match=r"the run one in .* has data\.train\.tokens 1601"):
        run_experiment(experiment, out, data=tmp_path / "other", runs=["two"])


def test_runs_of_another_experiment_are_taken_over(data: Path, tmp_path: Path) -> None:
    first, out = load_experiment(write(tmp_path)), tmp_path / "out"
    trained = run_experiment(first, out, data=data, runs=["two"])["two"]
    other, said = load_experiment(write(tmp_path, name="other")), []
    found = run_experiment(other, tmp_path / "other-out", data=data, reuse=[out], say=said.append)
    assert found["two"]["curve"] == trained["curve"]
    assert found["two"]["recipe"]["name"] == "other-two"
    assert "two: taken from a run with the same recipe and data" in said
    assert not (tmp_path / "other-out" / "two").exists()
    assert (tmp_path / "other-out" / "one").is_dir()  # of another seed, so it was trained
    third = run_experiment(
        other, tmp_path / "third", data=data, reuse=[out, tmp_path / "other-out"]
    )
    assert {name: run["curve"] for name, run in third.items()} == {
        name: run["curve"] for name, run in found.items()
    }
    with pytest.raises(ValueError, match=r"^--reuse: .*missing has no results\.json$"):
        run_experiment(other, tmp_path / "x", data=data, reuse=[tmp_path / "missing"])
    # If all runs are taken from elsewhere, no data is made.
    run_experiment(first, tmp_path / "smoke", runs=["two"], smoke=True)
    reused = tmp_path / "reused"
    run_experiment(other, reused, runs=["two"], smoke=True, reuse=[tmp_path / "smoke"])
    assert [path.name for path in reused.iterdir()] == ["results.json"]


def test_second_stage_continues_an_earlier_run(data: Path, tmp_path: Path) -> None:
    text = SAVED_OFTEN.replace('label = "seed 2"', 'label = "more"\nafter = "one"')
    experiment, out = load_experiment(write(tmp_path, text)), tmp_path / "out"
    found = run_experiment(experiment, out, data=data, runs=["one"])
    assert (out / "one" / "checkpoints").is_dir()  # needed by the second stage
    found = run_experiment(experiment, out, data=data)
    assert found["two"]["curve"]["step"] == [4, 5, 6, 7]
    assert found["two"]["held_out_loss"] < found["one"]["held_out_loss"]
    assert not (out / "one" / "checkpoints").exists()
    # The earlier run is trained too, even if the later one alone is asked for.
    alone = run_experiment(experiment, tmp_path / "alone", data=data, runs=["two"])
    assert {name: run["curve"] for name, run in alone.items()} == {
        name: run["curve"] for name, run in found.items()
    }


def test_a_run_whose_last_loss_is_not_finite_has_diverged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer skips such steps, and ends as usual if there are few of them."""
    train = Trainer.train

    def spoiled(self: Trainer, report: Any) -> None:
        spoil_loss(self, math.nan, [self.recipe.run.steps - 1])
        train(self, report)

    monkeypatch.setattr(Trainer, "train", spoiled)
    found = run_experiment(load_experiment(write(tmp_path)), tmp_path / "out", data=data)
    assert {run["status"] for run in found.values()} == {"diverged"}
    assert found["one"]["reason"] == "the loss of the last step is not finite"


def test_second_stage_of_a_run_that_diverged_fails(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FILE.replace('label = "seed 2"', 'label = "more"\nafter = "one"')
    experiment = load_experiment(write(tmp_path, text))
    monkeypatch.setattr(Trainer, "update", raise_diverged)
    found = run_experiment(experiment, tmp_path / "out", data=data)
    assert found["one"]["status"] == "diverged"
    assert (found["two"]["status"], found["two"]["reason"]) == (
        "failed",
        "the run one has not finished",
    )


def raise_diverged(trainer: Trainer) -> Any:
    raise FloatingPointError("loss nan")


def test_results_alone_are_enough_to_go_on_with_other_runs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some runs on one machine, then `results.json` alone is copied to another for the rest."""
    text = FILE + "[runs.three]\nlabel = 'more'\nafter = 'two'\nseed = 2\n"
    text += "[runs.four]\nlabel = 'still more'\nafter = 'three'\nseed = 2\n"
    experiment = load_experiment(write(tmp_path, text))
    whole = run_experiment(experiment, tmp_path / "whole", data=data)
    here, there = tmp_path / "here", tmp_path / "there"
    run_experiment(experiment, here, data=data, runs=["one", "three"])
    there.mkdir()
    (there / "results.json").write_bytes((here / "results.json").read_bytes())
    trained = []
    train = Trainer.train

    def noted(self: Trainer, report: Any) -> None:
        trained.append(self.folder.name)
        train(self, report)

    monkeypatch.setattr(Trainer, "train", noted)
    found = run_experiment(experiment, there, data=data)
    assert trained == ["two", "three", "four"]  # "four" needs their checkpoints
    assert list(found) == ["one", "two", "three", "four"]
    for name, run in found.items():
        assert run["curve"] == whole[name]["curve"]
    assert not list(there.glob("*/checkpoints"))
    draw(experiment, found, tmp_path / "figure.png")


# Tasks


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A task "double": data of one repeated token; the "accuracy" is the number of heads."""
    calls: list[Any] = []
    module: Any = ModuleType("double")

    def write_task(folder: Path, settings: dict[str, Any]) -> None:
        calls.append(settings)
        for part in ("train", "valid"):
            path = folder / str(settings["length"]) / part
            if path.exists():
                continue
            path.mkdir(parents=True)
            with ShardWriter(path / "00000.ds", vocab_size=320) as writer:
                for _ in range(20):
                    writer.add(np.full(31, 7))
            write_manifest(path, [writer.entry], vocab_size=320, tokenizer_fingerprint="double")

    def evaluate(model: XLSTM, settings: dict[str, Any]) -> dict[str, Any]:
        calls.append(settings)
        assert type(model) is XLSTM
        assert not model.training
        points = {n: {"accuracy": 1 / model.config.num_heads} for n in settings["lengths"]}
        return {
            "recall": points,
            "needle": {n: p | {"low": 0, "high": 1} for n, p in points.items()},
        }

    module.write_task, module.evaluate = write_task, evaluate
    module.check_settings = lambda data, evaluate: None
    monkeypatch.setitem(sys.modules, "double", module)
    monkeypatch.setitem(TASKS, "double", "double")
    return calls


def test_tasks_make_the_data_and_measure_the_models(task: list[Any], tmp_path: Path) -> None:
    text = FILE.replace('kind = "loss"', 'kind = "accuracy"').replace(
        'set = ["optimizer.lr=1e-3"]', 'set = ["model.num_heads=4"]'
    )
    text += """
    [data]
    task = "double"
    length = 32
    [evaluate]
    task = "double"
    lengths = ["512", "1024"]
    [smoke.evaluate]
    lengths = ["16"]
    """
    experiment, out = load_experiment(write(tmp_path, text)), tmp_path / "out"
    found = run_experiment(experiment, out)
    assert task == [{"length": 32}, *[{"lengths": ["512", "1024"]}] * 2]
    assert found["two"]["evaluation"]["recall"]["512"] == {"accuracy": 0.25}
    draw(experiment, found, tmp_path / "figure.png")
    assert run_experiment(experiment, out) == found
    changed = load_experiment(write(tmp_path, text.replace('"512", "1024"', '"512"')))
    with pytest.raises(ValueError, match=r"has evaluate\.lengths"):
        run_experiment(changed, out)
    task.clear()
    found = run_experiment(experiment, tmp_path / "smoke", smoke=True)
    assert task == [{"length": 32}, *[{"lengths": ["16"]}] * 2]
    task.clear()
    book = tmp_path / "book.txt"
    book.write_text("a book")
    run_experiment(experiment, tmp_path / "texts", data=book, runs=["one"])
    assert [settings["texts"] for settings in task] == [[str(book)]] * 2
    # On another machine, where only the results are: the other run needs the same data.
    there = tmp_path / "there"
    there.mkdir()
    (there / "results.json").write_bytes((tmp_path / "texts" / "results.json").read_bytes())
    assert run_experiment(experiment, there, runs=["one"])["one"]["texts"] == "book.txt"
    with pytest.raises(ValueError, match=r"the run one in .* has texts 'book\.txt', not None"):
        run_experiment(experiment, there)
    changed = load_experiment(write(tmp_path, text.replace("length = 32", "length = 32\nseed = 2")))
    with pytest.raises(ValueError, match=r"has data_task\.seed None, not 2"):
        run_experiment(changed, there, data=book)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("[data]\ntask='recall'\n[evaluate]\ntask='recall'\nlenght=3", "unknown setting lenght"),
        ("[data]\ntask='recall'\nshortest=8\n", "shortest must be greater than or equal to 16"),
        (
            "[data]\ntask='recall'\nkeys=64\n[evaluate]\ntask='recall'",
            r"keys must be the same in \[data\] and \[evaluate\], not 64 and 128",
        ),
    ],
)
def test_wrong_settings_of_tasks_are_refused_before_training(
    tables: str, message: str, tmp_path: Path
) -> None:
    experiment = load_experiment(write(tmp_path, FILE + tables))
    with pytest.raises(ValueError, match=f"^recall: {message}"):
        run_experiment(experiment, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_time_of_a_step_does_not_depend_on_padding(data: Path, tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path))
    recipe = experiment.recipe_of("one", data=data, output=tmp_path / "out")
    line = {"step": 0, "loss": 1.0, "gradient_norm": 1.0, "learning_rate": 0.1, "applied": True}
    for tokens in (64, 16):  # of 64 positions; the others are padding
        timed = [line | {"seconds": 0.5, "tokens_per_second": tokens / 0.5}] * 4
        assert measured(recipe, timed)["seconds_per_step"] == 0.5


def test_leftovers_of_a_killed_call_do_not_stop_the_next(tmp_path: Path) -> None:
    (tmp_path / "out" / ".data.saving-12345678").mkdir(parents=True)
    (tmp_path / "out" / ".results.json.12345678").write_text("{")
    runs = run_experiment(load_experiment("pre-norm"), tmp_path / "out", smoke=True, runs=[])
    assert runs == {}


RECORD = {
    "status": "finished",
    "recipe": {},
    "parameters": 1,
    **dict.fromkeys(("held_out_loss", "held_out_perplexity", "tokens_per_second")),
    **dict.fromkeys(("seconds_per_step", "peak_memory_bytes")),
    "curve": {"step": [], "loss": [], "gradient_norm": [], "learning_rate": []},
    "held_out": {"step": [], "loss": []},
}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "it is not JSON (Expecting value"),
        ('{"experiment": "seeds", "ru', "it is not JSON (Unterminated string"),
        ("\xff", "it is not JSON ("),
        ("[" * 99999, "it is not JSON ("),
        ("5", "the file must be an object"),
        ("[]", "the file must be an object"),
        ('{"one": {}}', "experiment is missing"),
        ('{"experiment": 5, "runs": {}}', "experiment must be a valid string"),
        ('{"experiment": "seeds"}', "runs is missing"),
        ('{"experiment": "seeds", "runs": []}', "runs must be an object"),
        (5, "runs.one must be an object"),
        (["status", "recipe", "curve"], "runs.one must be an object"),
        ({}, "runs.one.status is missing"),
        ({"status": "done"}, "runs.one.status must be 'finished', 'diverged' or 'failed'"),
        ({**RECORD, "recipe": 5}, "runs.one.recipe must be an object"),
        ({**RECORD, "curve": {"step": [0]}}, "runs.one.curve.loss is missing"),
        ({**RECORD, "held_out_loss": "3"}, "runs.one.held_out_loss must be a valid number"),
        ({**RECORD, "evaluation": {"a": {"x": {}}}}, "runs.one.evaluation.a.x.[key] "),
    ],
)
def test_damaged_results_are_named(content: object, sentence: str, tmp_path: Path) -> None:
    experiment, path = load_experiment(write(tmp_path)), tmp_path / "out" / "results.json"
    path.parent.mkdir()
    if not isinstance(content, str):
        content = json.dumps({"experiment": "seeds", "runs": {"one": content}})
    path.write_bytes(content.encode("latin-1"))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged: {sentence}")) as raised:
        run_experiment(experiment, path.parent, smoke=True)
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == before
    assert [*path.parent.iterdir()] == [path]


def test_the_sample_record_of_the_tests_is_complete(tmp_path: Path) -> None:
    experiment, path = load_experiment(write(tmp_path)), tmp_path / "results.json"
    path.write_text(json.dumps({"experiment": "seeds", "runs": {"one": RECORD}}))
    with pytest.raises(ValueError, match=r"the run one in .*: choose another --output"):
        run_experiment(experiment, tmp_path, smoke=True)


# Files


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('kind = "loss"', 'kind = "pie"', "experiment.figure.kind must be 'loss', 'schedule', "),
        ('label = "seed 1"', "", "experiment.runs.one.label is missing"),
        ("seed = 1", "sed = 1", "unknown setting experiment.runs.one.sed; did you mean seed"),
        ('label = "seed 1"', 'label = "seed 2"', "several runs have the label 'seed 2'"),
        ("[runs.one]", "[runs.data]", "'data' cannot be the name of a run"),
        ("[runs.one]", '[runs."../x"]', "'../x' cannot be the name of a run"),
        ("seed = 2", 'after = "two"', "runs.two.after must be an earlier run, not 'two'"),
        ("[figure]", "[data]\n[figure]", "data.task must be one of recall, not None"),
        ('kind = "loss"', 'kind = "accuracy"', 'figure.kind "accuracy" needs [evaluate]'),
        ("[figure]", "[figure", "is not a TOML file"),
        ("title", "titel", "unknown setting experiment.titel; did you mean title"),
    ],
)
def test_mistakes_in_a_file_are_named(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, FILE.replace(before, after, 1))
    with pytest.raises(ValueError, match=f"^experiment {path}.*{re.escape(message)}"):
        load_experiment(path)


def test_recipe_of_a_file_is_found_beside_it_and_its_mistakes_name_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "quickstart"\n[batch]\nsequences = 6')
    path = write(tmp_path, FILE.replace('"quickstart"', '"./mine.toml"'))
    folders = {"data": tmp_path, "output": tmp_path}
    assert load_experiment(path).recipe_of("one", **folders).batch.sequences == 2
    assert load_experiment(path).recipe_of("one", **folders, smoke=True).batch.sequences == 4
    path = write(tmp_path, FILE.replace("optimizer.lr=1e-3", "optimizer.lr=-1"))
    with pytest.raises(ValueError, match=r"^seeds, run two: recipe quickstart: optimizer\.lr must"):
        load_experiment(path).recipe_of("two", **folders)


@pytest.mark.parametrize("steps", [3, 4, 7])
def test_held_out_loss_is_measured_at_the_last_step(steps: int, tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path))
    settings = [f"run.steps={steps}", "run.validate_every=2"]
    recipe = experiment.recipe_of("one", data=tmp_path, output=tmp_path, settings=settings)
    assert recipe.run.validate_every == (2 if steps == 4 else steps)


# Figures


@given(
    st.lists(st.none() | st.floats(-1e3, 1e3), max_size=30),
    st.integers(1, 12),
)
def test_curves_are_over_the_previous_steps_only(values: list[float | None], window: int) -> None:
    means, maxima = over_previous(values, window, fmean), over_previous(values, window, max)
    assert len(means) == len(maxima) == len(values)
    for step in range(len(values)):
        recent = [x for x in values[: step + 1][-window:] if x is not None]
        if recent:
            assert means[step] == pytest.approx(sum(recent) / len(recent))
            assert maxima[step] == max(recent)
        else:
            assert math.isnan(means[step])


def test_speed_is_relative_to_the_first_run_of_its_group(tmp_path: Path) -> None:
    text = FILE
    for name, group in (("three", "big"), ("four", "big")):
        text += f"[runs.{name}]\nlabel = '{name}'\ngroup = '{group}'\n"
    experiment = load_experiment(write(tmp_path, text))
    speeds = {"one": 10, "two": 30, "three": 2, "four": 7}
    found = {name: {"tokens_per_second": speed} for name, speed in speeds.items()}
    assert ratios(experiment, found) == {"one": 1, "two": 3, "three": 1, "four": 3.5}
    del found["three"]
    assert ratios(experiment, found) == {"one": 1, "two": 3}


def test_speeds_on_a_cpu_are_not_compared(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path))
    speeds = {"tokens_per_second": 1234.0, "seconds_per_step": 0.0567}
    for kind, shown in (("gpu", True), ("cpu", False)):
        machine = {"machine": {"date": "2026-11-19", kind: "a processor"}}
        found = {name: {**RECORD, **speeds, **machine} for name in ("one", "two")}
        text = results_table(experiment, found)
        assert ("1,234" in text, "56.7" in text, "1.00" in text) == (shown,) * 3
        assert ratios(experiment, found) == ({"one": 1, "two": 1} if shown else {})


def svg_text(experiment: Experiment, found: dict[str, Any], folder: Path) -> str:
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text, not as outlines
        draw(experiment, found, folder / "figure.svg")
    return (folder / "figure.svg").read_text()


def test_speed_is_drawn_without_the_first_run_of_its_group(tmp_path: Path) -> None:
    text = FILE.replace('kind = "loss"', 'kind = "speed"')
    experiment = load_experiment(write(tmp_path, text))
    found = {"two": {"tokens_per_second": 12345, "seconds_per_step": 0.5}}
    drawn = svg_text(experiment, found, tmp_path)
    assert "12,345 tok/s, 500 ms" in drawn
    assert "seed 2" in drawn


def test_accuracy_is_drawn_with_that_of_guessing(tmp_path: Path) -> None:
    text = FILE.replace('kind = "loss"', 'kind = "accuracy"\n[evaluate]\ntask = "recall"')
    experiment = load_experiment(write(tmp_path, text))
    points = {str(n): {"accuracy": 0.5, "chance": 0.25} for n in (64, 2048)}
    found = {name: {"evaluation": {"recall 4": points}} for name in ("one", "two")}
    drawn = svg_text(experiment, found, tmp_path)
    assert drawn.count("guessing: 0.25") == 1
    assert ">2K<" in drawn


@pytest.mark.parametrize("name", experiment_names())
def test_published_results_can_be_continued(name: str) -> None:
    """A setting that a later version adds, and that changes no run, does not make them others."""
    file = Path(__file__).parents[2] / "docs/benchmarks/experiments" / name / "results.json"
    if not file.exists():
        pytest.skip("not published")
    experiment = load_experiment(name)
    for run, record in json.loads(file.read_text())["runs"].items():
        recipe = experiment.recipe_of(run, data=Path("data"), output=Path("out"))
        now = {"recipe": comparable(recipe.to_dict())}
        check_same(run, {"recipe": record["recipe"]}, now)
