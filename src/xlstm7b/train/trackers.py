"""Trackers: where a run's metrics go besides `metrics.jsonl`: TensorBoard, W&B, MLflow, your own.

A recipe names them (`run.trackers`), or Python gives them (`Trainer(recipe, trackers=[…])`). Only
the first process has trackers. Each has a thread, so a tracker that waits for a network does not
slow training, and one that fails is a warning.

A start of a run hands every tracker the lines of `metrics.jsonl` before its own steps, and then its
own. A tracker takes those that it does not have yet. So a step that it missed arrives with the next
start, and after a crash no step arrives twice.
"""

import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

from xlstm7b.files import write_json
from xlstm7b.train.hooks import check_given, describe_error, load_named
from xlstm7b.train.recipe import TRACKERS, Recipe
from xlstm7b.train.run_settings import flatten

_MOST_WAITING = 10_000  # steps: a tracker that is further behind is given up
_LAST_SECONDS = 60.0  # for trackers to finish after the last step


class TrackedRun(NamedTuple):
    """The run that a tracker opens."""

    name: str  # that of the folder
    folder: Path
    settings: dict[str, Any]  # the recipe, as tables of plain values
    step: int  # the first step of this start
    logged: int  # earlier starts have logged the steps before this one, if nothing was lost


class Tracker:
    """The base of all trackers. All methods are called in one thread, and may take their time."""

    id: str | None = None
    """What `start` may set: the service's name for the run. It is saved in the run's folder, and
    set again before `start` when the run is continued."""

    def start(self, run: TrackedRun) -> int:
        """Opens the run, or continues it. Returns the first step that the tracker wants."""
        return run.step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called once for each step, in order. All numbers are finite."""
        raise NotImplementedError

    def finish(self, *, failed: bool) -> None:
        """Called after the last step of this start. `failed` is True after an error."""


class TensorBoard(Tracker):
    """Writes event files to the folder `tensorboard` of the run."""

    def __init__(self) -> None:
        self._module = _import("torch.utils.tensorboard", TRACKERS["tensorboard"])

    def start(self, run: TrackedRun) -> int:
        folder = run.folder / "tensorboard"
        is_new = not any(folder.glob("events.*"))
        first = 0 if is_new else run.step
        # Events from this step on, which a crashed start has written, are not shown any more.
        self._writer = self._module.SummaryWriter(str(folder), purge_step=first)
        settings = json.dumps(run.settings, indent=4)
        self._writer.add_text("recipe", f"```json\n{settings}\n```", run.step)
        return first

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # else a killed process would lose two minutes

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """Logs to W&B, as `wandb login` and the variables `WANDB_…` say. Files are in `wandb`.

    W&B does not take a step twice. The steps that a crashed start logged stay as they are.
    """

    def __init__(self) -> None:
        self._wandb = _import("wandb", TRACKERS["wandb"])
        if self._wandb.setup().settings.mode not in ("online", "shared"):
            return
        try:
            self._wandb.login(verify=False)  # it may ask for the key; the network may be down
        except self._wandb.Error as error:
            raise ValueError(
                f"the tracker wandb cannot log in ({describe_error(error)}): run `wandb login`, "
                "set WANDB_API_KEY, or set WANDB_MODE=offline"
            ) from error

    def start(self, run: TrackedRun) -> int:
        is_resumed = self.id is not None
        settings = self._wandb.Settings(console="off", reinit="create_new")
        opened = self._run = self._wandb.init(
            id=self.id,
            name=None if is_resumed else run.name,  # it may have been renamed since
            dir=run.folder,
            config=run.settings,
            resume="allow",
            allow_val_change=True,
            settings=settings,
        )
        self.id = opened.id
        if opened.offline:  # what `wandb sync` will add to is not known here
            return run.logged if is_resumed else 0
        return int(opened.starting_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow(Tracker):
    """Logs to the store of `MLFLOW_TRACKING_URI`, by default MLflow's own: `mlflow.db` here.

    MLflow keeps each number that it gets, so no step is logged twice. Settings become parameters,
    which MLflow cannot change: they are those of the first start.
    """

    def __init__(self) -> None:
        self._mlflow = _import("mlflow", TRACKERS["mlflow"])

    def start(self, run: TrackedRun) -> int:
        is_new = self.id is None
        opened = self._mlflow.start_run(run_id=self.id, run_name=run.name if is_new else None)
        self.id = opened.info.run_id
        if is_new:
            settings = flatten(run.settings).items()
            self._mlflow.log_params({_mlflow_name(name): str(value) for name, value in settings})
        return int(opened.data.metrics.get("step", -1)) + 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        named = {_mlflow_name(name): value for name, value in metrics.items()}
        self._mlflow.log_metrics({**named, "step": step}, step=step)

    def finish(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w./ :-]", "_", name)


def _import(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"run.trackers needs a package ({error}): pip install 'xlstm7b[{extra}]'"
        ) from error


_CLASSES = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


class Trackers:
    """The trackers of one run, each with its thread."""

    def __init__(self, names: Sequence[str], trackers: Sequence[Tracker]) -> None:
        own = load_named("tracker", [name for name in names if name not in _CLASSES], Tracker)
        made = dict(own)
        made |= {name: _CLASSES[name]() for name in names if name in _CLASSES}
        given = check_given("trackers", trackers, Tracker)
        for name, tracker in given:
            if name in made:
                raise ValueError(f"a run can have one tracker {name}, not two")
            made[name] = tracker
        self._trackers = made
        self._workers: list[_Worker] = []

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def start(
        self,
        folder: Path,
        recipe: Recipe,
        step: int,
        *,
        is_new: bool,
        lines: Sequence[dict[str, Any]],
    ) -> None:
        """Starts the threads. `lines` are all those of `metrics.jsonl`: a crash leaves later ones.

        With `is_new` there was no checkpoint to continue from, so the trackers begin new runs.
        """
        record = _Record(folder / "trackers.json", is_new=is_new)
        if lines and not is_new:
            record.steps = max(record.steps, lines[-1]["step"] + 1)
        run = TrackedRun(folder.resolve().name, folder, recipe.to_dict(), step, record.steps)
        kept = [line for line in lines if line["step"] < step]
        self._workers = [
            _Worker(name, tracker, run, record, kept) for name, tracker in self._trackers.items()
        ]
        for worker in self._workers:
            worker.start()

    def log(self, line: dict[str, Any]) -> None:
        for worker in self._workers:
            worker.put(line)

    def finish(self, *, failed: bool) -> None:
        """Waits for the threads, a minute at most."""
        for worker in self._workers:
            worker.end(failed=failed)
        until = time.monotonic() + _LAST_SECONDS
        for worker in self._workers:
            worker.wait(until - time.monotonic())


class _Record:
    """`trackers.json`: how many steps were logged, and the ids of the trackers' runs."""

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self._path, self._lock = path, Lock()
        self.steps = 0
        self.ids: dict[str, str] = {}
        if is_new or not path.is_file():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self.steps, self.ids = int(found["steps"]), dict(found["ids"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({describe_error(error)}): remove it, and the trackers begin "
                "new runs"
            ) from error

    def save(self, name: str, tracker: Tracker) -> None:
        with self._lock:
            if tracker.id is not None:
                self.ids[name] = tracker.id
            write_json(self._path, {"steps": self.steps, "ids": self.ids})


class _Worker(Thread):
    """Calls one tracker. Its first error is a warning, and the end of it."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        record: _Record,
        kept: Sequence[dict[str, Any]],
    ) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self._tracker_name, self._tracker = name, tracker
        self._tracked_run, self._record = run, record
        tracker.id = record.ids.get(name)
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        for line in kept:
            self._lines.put(line)
        self._most_waiting = len(kept) + _MOST_WAITING
        self._failed = self._is_given_up = False

    def run(self) -> None:
        try:
            first = self._tracker.start(self._tracked_run)
            self._record.save(self._tracker_name, self._tracker)
            for line in iter(self._lines.get, None):
                if line["step"] >= first:
                    self._tracker.log(line["step"], _numbers(line))
            self._tracker.finish(failed=self._failed)
        except (Exception, SystemExit) as error:
            self._warn(f"failed ({describe_error(error)})")

    def put(self, line: dict[str, Any]) -> None:
        if self._lines.qsize() >= self._most_waiting and not self._is_given_up:
            self._warn(f"is {_MOST_WAITING:,} steps behind")
        if not self._is_given_up:
            self._lines.put(line)

    def end(self, *, failed: bool) -> None:
        self._failed = failed
        self._lines.put(None)

    def wait(self, seconds: float) -> None:
        if not self._is_given_up:
            self.join(max(0.0, seconds))
        if self.is_alive() and not self._is_given_up:
            self._warn(f"has not finished in {_LAST_SECONDS:.0f} s")

    def _warn(self, what: str) -> None:
        self._is_given_up = True
        print(
            f"the tracker {self._tracker_name} {what}: it lacks steps that metrics.jsonl has; "
            "training is not affected",
            file=sys.stderr,
        )


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of metrics. A list becomes NAME/0, NAME/1, …"""
    found: dict[str, float] = {}
    for name, value in line.items():
        parts = value if isinstance(value, list) else [value]
        for at, part in enumerate(parts):
            if name != "step" and part is not None and math.isfinite(part):
                found[f"{name}/{at}" if isinstance(value, list) else name] = float(part)
    return found
