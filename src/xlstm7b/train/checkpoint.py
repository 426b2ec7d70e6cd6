"""A run's checkpoints: written aside by all processes at once, renamed when whole.

A folder `step-00001000` holds PyTorch's distributed checkpoint, which any number of processes on
any layout can read, and `run.json`. What has that name is complete: a run that dies while it saves
leaves a folder of another name. The format's metadata is a pickle, so read only what you trust;
what users exchange is what `export` writes.

Which step had the lowest held-out loss is a part of what every checkpoint's `run.json` says: the
last one knows the best, and that one is deleted only after another is whole.
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.train.processes import any_process, in_first_process

_NAME = re.compile(r"step-(\d{8})")


class Checkpoints:
    """Those of one run. One save may be under way while training goes on.

    A save that fails is an `OSError` in every process, whichever of them could not write.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_every: int) -> None:
        self.folder, self._keep_last, self._keep_every = folder, keep_last, keep_every
        # What saves in the background talks while training does: it needs a group of its own,
        # and nobody else may use it.
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[Any, int] | None = None

    def start(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> None:
        """Copies the state and writes it in the background; `finish` makes it count."""
        self.finish()
        aside = self._aside(step)

        def prepare() -> None:
            self._sweep()
            aside.mkdir(parents=True)
            (aside / "run.json").write_text(json.dumps({"step": step, **run}), encoding="utf-8")

        with self._naming(step):
            in_first_process(prepare)
        weights, averages = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": averages}
        saving = async_save(state, checkpoint_id=aside, process_group=self._group)
        self._pending = saving, step

    def finish(self, *, wait: bool = True) -> None:
        """Renames what was being written, once every process has; old ones go."""
        if self._pending is None:
            return
        saving, step = self._pending
        if not wait and any_process(not saving.done()):
            return
        failure = saving.exception()
        self._pending = None
        with self._naming(step):
            if any_process(failure is not None):
                in_first_process(self._sweep)
                raise OSError(_reason(failure) if failure else "another process could not write")
            in_first_process(self._count, step)

    def settle(self) -> None:
        """The run has failed: what is being written still counts if all of it comes, or is removed.

        Nobody is asked, who may be dead: to the first process, a save is done when it is to all.
        """
        if self._pending is None:
            return
        saving, step = self._pending
        failure = saving.exception()
        self._pending = None
        if dist.get_rank() == 0:
            if failure is None:
                self._count(step)
            else:
                self._sweep()

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Puts a checkpoint's values into model and optimizer; returns what `run.json` says."""
        path = self.folder / f"step-{step:08}"
        run = read_run(path)
        settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        weights, averages = get_state_dict(model, optimizer)
        with _naming_damage(path):
            load({"model": weights, "optimizer": averages}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=averages)
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)  # the recipe's, which may have changed, not the checkpoint's
        return run

    def last(self) -> str:
        """The last good checkpoint, in words."""
        found = steps(self.folder)
        return f"the last good checkpoint is of step {found[-1]}" if found else "none is saved yet"

    def _count(self, step: int) -> None:
        self._aside(step).replace(self.folder / f"step-{step:08}")
        best = best_step(self.folder)
        for old in steps(self.folder)[: -self._keep_last]:
            if old != best and (not self._keep_every or old % self._keep_every):
                shutil.rmtree(self.folder / f"step-{old:08}")

    def _aside(self, step: int) -> Path:
        return self.folder / f"writing-{step:08}"

    def _sweep(self) -> None:
        """Removes what a save that failed, or was killed, has left."""
        for unfinished in self.folder.glob("writing-*"):
            shutil.rmtree(unfinished)

    @contextmanager
    def _naming(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            free = shutil.disk_usage(there).free / 2**30  # PyTorch does not say that a disk is full
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self.folder}, "
                f"where {free:.2f} GiB are free ({error})"
            ) from error


def steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def best_step(folder: Path) -> int | None:
    """The step with the lowest held-out loss, if the run keeps it."""
    best = read_run(folder / f"step-{steps(folder)[-1]:08}").get("best")
    return best["step"] if best else None


def read_run(checkpoint: Path) -> dict[str, Any]:
    with _naming_damage(checkpoint):
        run: dict[str, Any] = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    return run


def read_model(checkpoint: Path, config: ModelConfig) -> XLSTM:
    """A checkpoint's weights as a model on this process's CPU, whatever layout wrote them."""
    model = XLSTM.empty(config, dtype=torch.float32, device="cpu")
    with warnings.catch_warnings(), _naming_damage(checkpoint):
        # That this is a single process, which it is meant to be.
        warnings.simplefilter("ignore", UserWarning)
        load({"model": model.state_dict()}, checkpoint_id=checkpoint, no_dist=True)
    return model


@contextmanager
def _naming_damage(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, OSError, ValueError) as error:
        raise ValueError(
            f"{checkpoint} is damaged ({_reason(error)}): remove it to go on from an earlier one"
        ) from error


def _reason(failure: BaseException) -> str:
    """The first line of what went wrong first, in any process."""
    if isinstance(failure, CheckpointException):
        failure = next(error for error, _ in failure.failures.values())
    return next(iter(str(failure).splitlines()), type(failure).__name__)
