"""A run's checkpoints: written aside by all processes at once, renamed when whole.

A folder `step-00001000` holds PyTorch's distributed checkpoint, which any number of processes on
any layout can read, and `run.json`. What has that name is complete: a run that dies while it saves
leaves a folder of another name. The format's metadata is a pickle, so read only what you trust;
what users exchange is what `export` writes.
"""

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM

_NAME = re.compile(r"step-(\d{8})")


class Checkpoints:
    """Those of one run. One save may be under way while training goes on."""

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
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            (aside / "run.json").write_text(json.dumps({"step": step, **run}), encoding="utf-8")
        dist.barrier()
        weights, averages = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": averages}
        saving = async_save(state, checkpoint_id=aside, process_group=self._group)
        self._pending = saving, step

    def finish(self, *, wait: bool = True) -> None:
        """Renames what was being written, once every process has; old ones go."""
        if self._pending is None:
            return
        saving, step = self._pending
        done = torch.tensor(int(wait or saving.done()))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if not done:
            return
        saving.result()
        dist.barrier()
        self._pending = None
        if dist.get_rank() == 0:
            self._aside(step).replace(self.folder / f"step-{step:08}")
            for old in steps(self.folder)[: -self._keep_last]:
                if not self._keep_every or old % self._keep_every:
                    shutil.rmtree(self.folder / f"step-{old:08}")
        dist.barrier()

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Puts a checkpoint's values into model and optimizer; returns what `run.json` says."""
        path = self.folder / f"step-{step:08}"
        weights, averages = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": averages}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=averages)
        return read_run(path)

    def _aside(self, step: int) -> Path:
        return self.folder / f"writing-{step:08}"


def steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def read_run(checkpoint: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    return run


def read_model(checkpoint: Path, config: ModelConfig) -> XLSTM:
    """A checkpoint's weights as a model on this process's CPU, whatever layout wrote them."""
    model = XLSTM.empty(config, dtype=torch.float32, device="cpu")
    with warnings.catch_warnings():  # that this is a single process, which it is meant to be
        warnings.simplefilter("ignore", UserWarning)
        load({"model": model.state_dict()}, checkpoint_id=checkpoint, no_dist=True)
    return model
