"""Runs an experiment: one run after another in this process, each in its own folder.

Everything is checked before anything is written. After each run `results.json` is written. So the
same call continues: runs with a result are skipped, and an unfinished one resumes from its last
checkpoint.
"""

import gc
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from xlstm7b import __version__
from xlstm7b.data.loader import check_tokenizers
from xlstm7b.data.prepare import prepare
from xlstm7b.data.shards import ShardFolder, open_folder
from xlstm7b.experiment.file import TRAIN, VALID, Experiment
from xlstm7b.experiment.results import (
    NAME,
    Record,
    Results,
    check_same,
    comparable,
    data_record,
    find_same,
    measured,
)
from xlstm7b.experiment.tasks import check_tasks, find_task
from xlstm7b.files import locked_folder, replacing
from xlstm7b.report import machine
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.processes import first_line, process_group
from xlstm7b.train.recipe import Recipe
from xlstm7b.train.run_checkpoints import read_model, read_run, saved_steps, step_folder
from xlstm7b.train.trainer import Report, Trainer

_SMOKE_FILES = 12  # of Python's own sources, as text for --smoke
Progress = Callable[[Recipe, int, str], AbstractContextManager[Report]]
"""Called with a recipe, the first step and the device; yields what each step's metrics go to."""


def run_experiment(
    experiment: Experiment,
    output: Path,
    *,
    runs: Sequence[str] | None = None,
    data: Path | None = None,
    settings: Sequence[str] = (),
    reuse: Sequence[Path] = (),
    smoke: bool = False,
    device: str = "cpu",
    progress: Progress = lambda recipe, step, device: nullcontext(lambda line: None),
    recorded: Callable[[dict[str, Record]], None] = lambda records: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Record]:
    """Trains the runs that have no result yet. Returns the records of all runs, by name.

    `data` is a folder with the prepared folders `train` and `valid`. `settings` change the recipe
    of every run. `runs` are the runs to train; the earlier runs that they continue are trained too.
    `reuse` are folders of other experiments: their finished runs of the same recipe, seed and data
    are taken over. Runs that measure a speed are not: those of one figure come from one machine.
    Settings or data that are not those of the runs with a result are a `ValueError`.
    If a run was stopped, by a signal or a time limit, no further run begins.
    """
    # 1. Check everything.
    results = Results(output, experiment)
    for folder in reuse:
        if not (folder / NAME).is_file():
            raise ValueError(f"--reuse: {folder} has no {NAME}")
    if smoke and data is not None:
        raise ValueError("--smoke makes its own data: leave out --data")
    makes_data = smoke or experiment.data is not None
    source = output / "data" if makes_data else data
    texts = data if makes_data else None
    if texts is not None and not texts.exists():
        raise ValueError(f"there is no {texts}")
    chosen = experiment.with_earlier(experiment.runs if runs is None else runs)
    recipes = {  # also of the runs that have a result, because one figure shows all of them
        name: experiment.recipe_of(
            name, data=source or Path("DATA"), output=output, smoke=smoke, settings=settings
        )
        for name in experiment.runs
        if name in chosen or results.is_final(name)
    }
    folders = None if makes_data or data is None else _open(data)
    evaluation = experiment.task("evaluate", smoke=smoke)
    data_task = experiment.task("data", smoke=smoke)
    check_tasks(data_task, evaluation)
    to_train = {name: recipes[name] for name in chosen}
    waiting = _waiting(experiment, results, to_train, output)
    fixed: dict[str, Record] = {}  # what may not change after a run has its result
    for name, recipe in recipes.items():
        fixed[name] = {"recipe": comparable(recipe.to_dict())}
        if evaluation is not None:
            fixed[name]["evaluate"] = evaluation[1]
        if data_task is not None:
            fixed[name]["data_task"] = data_task[1]
            if waiting:  # a figure can be drawn without the texts
                fixed[name]["texts"] = texts.name if texts else None
        if folders is not None:
            fixed[name]["data"] = data_record(folders)
        results.check_same(name, fixed[name])
        if name in waiting:
            _check_unfinished(output / name, fixed[name])
            if folders is not None:
                check_tokenizers(folders, recipe.model)
    if not waiting:
        return results.runs
    if source is None:
        raise ValueError(
            "--data is missing: a folder with the prepared folders train and valid (see "
            "`xlstm7b prepare`)"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("an experiment trains in one process: start it without torchrun")
    taken = {
        name: record
        for name in waiting
        for folder in reuse
        if not experiment.runs[name].speed_only
        and (record := find_same(folder / NAME, fixed[name])) is not None
    }
    # 2. Make the data, if the experiment does.
    with locked_folder(output, "running an experiment in"):
        for name, record in taken.items():
            results.add(name, {**record, **fixed[name]})
            say(f"{name}: taken from a run with the same recipe and data")
        waiting = _waiting(experiment, results, to_train, output)
        data_task = experiment.task("data", smoke=smoke, texts=texts)
        if waiting and data_task is not None:
            find_task(data_task[0]).write_task(source, data_task[1])
        elif waiting and smoke and not source.exists():
            with replacing(source, lambda name: True) as aside:
                _write_smoke_data(aside)
        # 3. Train.
        compiled = None
        for position, name in enumerate(waiting, 1):
            recipe, folder, run = recipes[name], output / name, experiment.runs[name]
            say(f"run {position} of {len(waiting)}: {name}")
            # Graphs are shared by runs with one model, whose number of graphs is limited.
            model = replace(recipe.model, igate_bias_init_range=0.0)
            if device == "cuda" and model != compiled:
                torch.compiler.reset()
                compiled = model
            began = time.monotonic()
            if run.after and results.status(run.after) != "finished":
                outcome = _Outcome("failed", [], f"the run {run.after} has not finished")
            else:
                train = _measure_speed if run.speed_only else _train
                outcome = train(recipe, folder, device, progress)
                _free(device)
            if outcome.status == "stopped":
                say(f"{name}: stopped at step {outcome.step} of {recipe.run.steps}")
                break
            record = {
                "status": outcome.status,
                **outcome.failure,
                **measured(recipe, outcome.lines),
                "machine": {**machine(device), "xlstm7b": __version__},
                "data": data_record(_open(Path(recipe.data.sources["data"].path).parent)),
                **fixed[name],
            }
            task = experiment.task("evaluate", smoke=smoke, texts=texts)
            is_continued = any(later.after == name for later in experiment.runs.values())
            if task is not None and outcome.status == "finished" and not is_continued:
                record["evaluation"] = _evaluate(recipe, folder, device, *task)
            results.add(name, record)
            recorded(results.runs)
            _drop_checkpoints(experiment, results, output, waiting[position:])
            say(f"{name}: {outcome.describe()}, {time.monotonic() - began:.0f} s")
    return results.runs


def _waiting(
    experiment: Experiment, results: Results, recipes: dict[str, Recipe], output: Path
) -> list[str]:
    """The runs to train, in order: those without a result, and earlier runs that they continue.

    An earlier run that has finished is trained again if its last checkpoint is missing, as on
    another machine to which only `results.json` was copied.
    """
    waiting = {name for name in recipes if not results.is_final(name)}
    for name in reversed(recipes):  # a run comes after the one that it continues
        earlier, start = experiment.runs[name].after, recipes[name].start_step
        if name not in waiting or not earlier or saved_steps(output / name / "checkpoints"):
            continue
        last = step_folder(output / earlier / "checkpoints", start)
        if results.status(earlier) == "finished" and not last.is_dir():
            waiting.add(earlier)
    return [name for name in recipes if name in waiting]


def _drop_checkpoints(
    experiment: Experiment, results: Results, output: Path, left: Sequence[str]
) -> None:
    """Removes weights and averages that are not needed any more: they take gigabytes for each run.

    A run that a later one continues is needed until that one has its result. `left` are the runs
    that will still be trained.
    """
    unfinished = {name for name in experiment.runs if name in left or not results.is_final(name)}
    needed = unfinished | {experiment.runs[name].after for name in unfinished}
    for name in experiment.runs:
        if name not in needed:
            shutil.rmtree(output / name / "checkpoints", ignore_errors=True)


def _open(data: Path) -> dict[str, ShardFolder]:
    missing = [name for name in (TRAIN, VALID) if not (data / name).is_dir()]
    if missing:
        raise ValueError(
            f"{data} has no folder {missing[0]}: --data is a folder with the prepared folders "
            f"{TRAIN} and {VALID}"
        )
    return {name: open_folder(data / name) for name in (TRAIN, VALID)}


def _check_unfinished(folder: Path, now: dict[str, Any]) -> None:
    """Raises a `ValueError` if this folder has checkpoints of another recipe."""
    found = saved_steps(folder / "checkpoints")
    if found:
        saved = read_run(step_folder(folder / "checkpoints", found[-1]))["recipe"]
        check_same(f"the run in {folder}", {"recipe": comparable(saved)}, now)


def _write_smoke_data(folder: Path) -> None:
    """A few files of Python's own sources, as bytes."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_SMOKE_FILES]
    for name, part in ((TRAIN, sources[1:]), (VALID, sources[:1])):
        prepare(part, folder / name, "bytes", text_endings=[".py"])


class _Outcome(NamedTuple):
    """How a run ended, and its metrics."""

    status: str  # finished, diverged, failed, or stopped before the last step
    lines: list[dict[str, Any]]
    reason: str = ""

    @property
    def step(self) -> int:
        """Steps that were completed, which is also the number of the one that failed."""
        return self.lines[-1]["step"] + 1 if self.lines else 0

    @property
    def failure(self) -> dict[str, Any]:
        return {"step": self.step, "reason": self.reason} if self.reason else {}

    def describe(self) -> str:
        if self.reason:
            return f"{self.status} at step {self.step}: {self.reason}"
        held_out = self.lines[-1].get("validation_loss")
        shown = "" if held_out is None else f", held-out loss {held_out:.4f}"
        return f"{self.status}{shown}"


def _train(recipe: Recipe, folder: Path, device: str, progress: Progress) -> _Outcome:
    """Trains or continues a run."""
    status, reason = "finished", ""
    try:
        found = saved_steps(folder / "checkpoints")
        first = found[-1] if found else recipe.start_step
        trainer = Trainer(recipe, folder, device)
        with progress(recipe, first, device) as report:
            trainer.train(report)
        if trainer.step < recipe.run.steps:
            status = "stopped"
    except FloatingPointError as error:
        status, reason = "diverged", str(error)
    except torch.OutOfMemoryError as error:
        status, reason = "failed", first_line(error)
    lines = read_metrics(folder / "metrics.jsonl")
    # A few bad steps in a row do not stop the trainer. Losses that are not finite are None.
    losses = [lines[-1].get(key, 0.0) for key in ("loss", "validation_loss")] if lines else []
    if status == "finished" and None in losses:
        status, reason = "diverged", "the loss of the last step is not finite"
    return _Outcome(status, lines, reason)


def _measure_speed(recipe: Recipe, folder: Path, device: str, progress: Progress) -> _Outcome:
    """Makes the run's updates, and neither validates nor saves: the model may be too large."""
    lines: list[dict[str, Any]] = []
    try:
        with process_group(device), progress(recipe, 0, device) as report:
            trainer = Trainer(recipe, folder, device)
            try:
                while trainer.step < recipe.run.steps:
                    _, line = trainer.measured_update()
                    lines.append(line)
                    report(line)
            finally:
                trainer.loader.close()
    except torch.OutOfMemoryError as error:
        return _Outcome("failed", lines, first_line(error))
    return _Outcome("finished", lines)


def _free(device: str) -> None:
    """Gives the memory of a model back before the next one is built."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _evaluate(
    recipe: Recipe, folder: Path, device: str, name: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Measures the last checkpoint as a model of its own, without the trainer's shards."""
    checkpoint = step_folder(folder / "checkpoints", recipe.run.steps)
    model = read_model(checkpoint, recipe.model).to(device).eval()
    result: dict[str, Any] = find_task(name).evaluate(model, settings)
    del model
    _free(device)
    return result
