"""`results.json` of an experiment: one record for each run, and what may not change between them.

A record has the run's recipe, model size, data, machine, the curve of every step, the held-out
loss, speed and memory. `status` is

    finished   trained to its last step
    diverged   loss or gradient were not finite; `step` and `reason` say when and why
    failed     it did not fit into memory, or the run that it continues did not finish; the next
               call tries it again
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from xlstm7b.accounting import parameter_counts
from xlstm7b.data.shards import ShardFolder
from xlstm7b.experiment.file import Experiment
from xlstm7b.files import json_bytes, write_json
from xlstm7b.report import read_results, table
from xlstm7b.train.recipe import Recipe
from xlstm7b.train.run_settings import differences

NAME = "results.json"
_FINAL = ("finished", "diverged")
_SLOW_STEPS = 2  # the first steps compile: they do not count in the speed
_FREE = ("save_every", "keep_last", "keep_every", "keep_best", "time_limit", "tensorboard")
Record = dict[str, Any]


class Results:
    """The records in an experiment's folder. Nothing is written before the first `add`."""

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self._path, self._experiment = folder / NAME, experiment
        self.runs: dict[str, Record] = {}
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file, not a folder: choose another --output")
        if not self._path.is_file():
            known = {*experiment.runs, "data"}
            # Hidden files may be those of a call that was killed while it wrote.
            found = [path.name for path in folder.glob("[!.]*")]
            if not known.issuperset(found):
                raise ValueError(
                    f"{folder} holds files that are not of this experiment: choose another --output"
                )
            return
        self.runs = _read(self._path, experiment.name)

    def status(self, run: str) -> str | None:
        return self.runs.get(run, {}).get("status")

    def is_final(self, run: str) -> bool:
        return self.status(run) in _FINAL

    def check_same(self, run: str, now: Mapping[str, Any]) -> None:
        """Raises a `ValueError` if a final record is of another recipe or of other data."""
        if self.is_final(run):
            check_same(f"the run {run} in {self._path.parent}", self.runs[run], now)

    def add(self, run: str, record: Record) -> None:
        """Writes the file with this record."""
        self.runs[run] = json.loads(json_bytes(record))  # as it will be read: lists, no tuples
        in_order = {name: self.runs[name] for name in self._experiment.runs if name in self.runs}
        others = {name: old for name, old in self.runs.items() if name not in in_order}
        about = {
            "experiment": self._experiment.name,
            "title": self._experiment.title,
            "paper": self._experiment.paper,
        }
        write_json(self._path, {**about, "runs": in_order | others})


class _Curve(BaseModel):
    step: list[int]
    loss: list[float | None]
    gradient_norm: list[float | None]
    learning_rate: list[float]


class _HeldOut(BaseModel):
    step: list[int]
    loss: list[float]


class _Point(BaseModel):
    accuracy: float
    low: float = 0.0
    high: float = 0.0
    chance: float = 0.0


class _Record(BaseModel):
    """What tables and figures show of a record, and what decides whether a run is trained."""

    status: Literal["finished", "diverged", "failed"]
    recipe: dict[str, Any]
    parameters: int
    held_out_loss: float | None
    held_out_perplexity: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    peak_memory_bytes: int | None
    curve: _Curve
    held_out: _HeldOut
    machine: dict[str, str] = {}
    evaluation: dict[str, dict[Annotated[str, Field(pattern=r"^\d+$")], _Point]] = {}


class _File(BaseModel):
    experiment: str
    runs: dict[str, _Record]


def _read(path: Path, experiment: str | None = None) -> dict[str, Record]:
    """The records of a file, which must be of the experiment of this name if one is given."""
    records: dict[str, Record] = read_results(path, _File, experiment)["runs"]
    return records


def find_same(results: Path, now: Mapping[str, Any]) -> Record | None:
    """A final record in this file with the same recipe, data and evaluation, whatever its name."""
    wanted = {**now, "recipe": {**now["recipe"], "name": None}}
    for record in _read(results).values():
        found = {**record, "recipe": {**record["recipe"], "name": None}}
        if record["status"] in _FINAL and not _changes(found, wanted):
            return record
    return None


def check_same(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that names the first setting that differs, if both have it."""
    for name, (old, new) in _changes(before, now).items():
        shown = name.removeprefix("recipe.")
        raise ValueError(f"{what} has {shown} {old!r}, not {new!r}: choose another --output")


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    parts = ("recipe", "data", "data_task", "texts", "evaluate")
    shared = [part for part in parts if part in before and part in now]
    plain = json.loads(json.dumps(dict(now)))  # tuples become lists, as in the file
    return differences(
        {part: before[part] for part in shared}, {part: plain[part] for part in shared}
    )


def comparable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without what may differ when a run is continued: folders, and when it saves."""
    data = {k: v for k, v in recipe["data"].items() if k not in ("sources", "validation", "verify")}
    run = {k: v for k, v in recipe["run"].items() if k not in _FREE}
    left_out = ("init_from",) if recipe["start_step"] else ()
    return {k: v for k, v in recipe.items() if k not in left_out} | {"data": data, "run": run}


def data_record(folders: Mapping[str, ShardFolder]) -> dict[str, Any]:
    """Numbers that differ between sets of prepared folders."""
    return {
        name: {
            "tokens": folder.tokens,
            "documents": folder.documents,
            "tokenizer": folder.tokenizer_fingerprint,
        }
        for name, folder in folders.items()
    }


def measured(recipe: Recipe, lines: Sequence[Mapping[str, Any]]) -> Record:
    """The record's numbers, from the lines of the run's metrics."""
    validated = [line for line in lines if line.get("validation_loss") is not None]
    applied = [line for line in lines if line["applied"]]
    timed = applied[_SLOW_STEPS:] or applied
    speeds = [line["tokens_per_second"] for line in timed]
    seconds = [line["seconds"] for line in timed if "seconds" in line]  # not in older runs
    memory = [line["peak_memory_bytes"] for line in lines if "peak_memory_bytes" in line]
    return {
        "parameters": parameter_counts(recipe.model)["total"],
        "seed": recipe.run.seed,
        "steps": recipe.run.steps,
        "held_out_loss": validated[-1]["validation_loss"] if validated else None,
        "held_out_perplexity": perplexity(validated[-1]["validation_loss"]) if validated else None,
        "tokens_per_second": median(speeds) if speeds else None,
        "seconds_per_step": median(seconds) if seconds else None,
        "peak_memory_bytes": max(memory, default=None),
        "curve": {
            name: [_rounded(line[name]) for line in lines]
            for name in ("step", "loss", "gradient_norm", "learning_rate")
        },
        "held_out": {
            "step": [line["step"] for line in validated],
            "loss": [_rounded(line["validation_loss"]) for line in validated],
        },
    }


def perplexity(loss: float) -> float:
    """exp(loss); infinite for the loss of a model that has diverged."""
    return math.exp(loss) if loss < 700 else math.inf


def _rounded(value: float | None) -> float | None:
    """Six digits: a curve needs no more."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def results_table(experiment: Experiment, runs: Mapping[str, Record]) -> str:
    """One line for each run that has a record. Speeds are those of GPUs."""
    header = ["run", "status", "parameters", "loss", "held-out", "perplexity", "tok/s", "×"]
    header += ["ms/step", "GB"]
    speedups = ratios(experiment, runs)
    rows = []
    for name in experiment.runs:
        if name not in runs:
            continue
        found = runs[name]
        last = next((loss for loss in reversed(found["curve"]["loss"]) if loss is not None), None)
        status = found["status"]
        if "step" in found:
            status += f" at step {found['step']}"
        on_cpu = _is_on_cpu(found)
        speed = None if on_cpu else found["tokens_per_second"]
        seconds = None if on_cpu else found["seconds_per_step"]
        memory = found["peak_memory_bytes"]
        rows.append(
            [
                name,
                status,
                f"{found['parameters']:,}",
                _shown(last, ".4f"),
                _shown(found["held_out_loss"], ".4f"),
                _shown(found["held_out_perplexity"], ".2f"),
                _shown(speed, ",.0f"),
                _shown(speedups.get(name), ".2f"),
                _shown(seconds and 1000 * seconds, ",.1f"),
                _shown(memory and memory / 1e9, ".1f"),
            ]
        )
    return table(header, rows)


def accuracy_table(experiment: Experiment, runs: Mapping[str, Record]) -> str:
    """The accuracy of each run that was evaluated, by task and length."""
    found = {name: runs[name].get("evaluation", {}) for name in experiment.runs if name in runs}
    lengths = {
        int(length) for tasks in found.values() for task in tasks.values() for length in task
    }
    rows = [
        [
            name,
            task,
            *(_shown(by_length.get(str(n), {}).get("accuracy"), ".3f") for n in sorted(lengths)),
        ]
        for name, tasks in found.items()
        for task, by_length in tasks.items()
    ]
    return table(["run", "accuracy", *(f"{length:,}" for length in sorted(lengths))], rows)


def _shown(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def ratios(experiment: Experiment, runs: Mapping[str, Record]) -> dict[str, float]:
    """The speed of each run, relative to the first run of its group. None for runs on a CPU."""
    first: dict[str, float | None] = {}
    found = {}
    for name, run in experiment.runs.items():
        record = runs.get(name, {})
        speed = None if _is_on_cpu(record) else record.get("tokens_per_second")
        base = first.setdefault(run.group, speed)
        if base and speed:
            found[name] = speed / base
    return found


def _is_on_cpu(record: Record) -> bool:
    """There a speed depends on whatever else the machine does, so speeds are not compared."""
    return "cpu" in record.get("machine", {})
