"""The checkpoints of a run: saved in the background, loaded on any layout, exported as weights.

A folder `step-00001000` holds a PyTorch distributed checkpoint, which any number of processes can
load on any layout, and `run.json`. A folder with that name is complete: a run that dies while it
saves leaves a folder `writing-…`. The format's metadata is a pickle, so load only checkpoints that
you trust. To share weights, export them.

Every `run.json` names the step with the lowest validation loss. So the latest checkpoint knows the
best one, and the best one is deleted only after a better one is complete.
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from xlstm7b.chat_format import template_source
from xlstm7b.checkpoint import resolve, save_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import (
    load_tokenizer,
    open_tokenizer,
    tokenizer_file,
    tokenizer_fingerprint,
    write_fingerprint,
    write_tokenizer,
)
from xlstm7b.train.processes import any_process, in_first_process
from xlstm7b.train.recipe import Recipe

_NAME = re.compile(r"step-(\d{8})")


class CheckpointManager:
    """Saves and loads the checkpoints of one run. One save may run while training continues.

    A save that fails in one process is an `OSError` in all of them.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_every: int) -> None:
        self.folder, self._keep_last, self._keep_every = folder, keep_last, keep_every
        # The background save communicates while training does, so it needs a group of its own.
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[Any, int] | None = None

    def start_save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> None:
        """Copies the state, then writes it in the background until `finish_save`."""
        self.finish_save()
        aside = self._aside(step)

        def prepare() -> None:
            self._remove_unfinished()
            aside.mkdir(parents=True)
            (aside / "run.json").write_text(json.dumps({"step": step, **run}), encoding="utf-8")

        with self._explain_failure(step):
            in_first_process(prepare)
        weights, averages = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": averages}
        saving = async_save(state, checkpoint_id=aside, process_group=self._group)
        self._pending = saving, step

    def finish_save(self, *, wait: bool = True) -> None:
        """Once every process has written its part, renames the folder and deletes old ones."""
        if self._pending is None:
            return
        saving, step = self._pending
        if not wait and any_process(not saving.done()):
            return
        failure = saving.exception()
        self._pending = None
        with self._explain_failure(step):
            if any_process(failure is not None):
                in_first_process(self._remove_unfinished)
                raise OSError(_reason(failure) if failure else "another process could not write")
            in_first_process(self._complete, step)

    def finish_save_after_failure(self) -> None:
        """Completes or removes the save that was running when training failed.

        No collectives here: other ranks may have died. When the first process has finished a save,
        all processes have.
        """
        if self._pending is None:
            return
        saving, step = self._pending
        failure = saving.exception()
        self._pending = None
        if dist.get_rank() == 0:
            if failure is None:
                self._complete(step)
            else:
                self._remove_unfinished()

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Loads a checkpoint into model and optimizer. Returns its `run.json`."""
        path = self.folder / f"step-{step:08}"
        run = read_run(path)
        settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        weights, averages = get_state_dict(model, optimizer)
        with _name_damage(path):
            load({"model": weights, "optimizer": averages}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=averages)
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)  # the recipe's settings, not those of the checkpoint
        return run

    def describe_last(self) -> str:
        """For error messages: which checkpoint is the last good one."""
        found = saved_steps(self.folder)
        return f"the last good checkpoint is of step {found[-1]}" if found else "none is saved yet"

    def _complete(self, step: int) -> None:
        self._aside(step).replace(self.folder / f"step-{step:08}")
        best = best_step(self.folder)
        for old in saved_steps(self.folder)[: -self._keep_last]:
            if old != best and (not self._keep_every or old % self._keep_every):
                shutil.rmtree(self.folder / f"step-{old:08}")

    def _aside(self, step: int) -> Path:
        return self.folder / f"writing-{step:08}"

    def _remove_unfinished(self) -> None:
        for unfinished in self.folder.glob("writing-*"):
            shutil.rmtree(unfinished)

    @contextmanager
    def _explain_failure(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            # PyTorch's error does not say that a disk is full.
            free = shutil.disk_usage(there).free / 2**30
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self.folder}, "
                f"where {free:.2f} GiB are free ({error})"
            ) from error


def saved_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def best_step(folder: Path) -> int | None:
    """The step with the lowest validation loss, if the run keeps it."""
    best = read_run(folder / f"step-{saved_steps(folder)[-1]:08}").get("best")
    return best["step"] if best else None


def read_run(checkpoint: Path) -> dict[str, Any]:
    """The `run.json` of a checkpoint."""
    with _name_damage(checkpoint):
        run: dict[str, Any] = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    return run


def read_model(checkpoint: Path, config: ModelConfig) -> XLSTM:
    """The weights of a checkpoint as a model on the CPU, in this process alone."""
    model = XLSTM.empty(config, dtype=torch.float32, device="cpu")
    with warnings.catch_warnings(), _name_damage(checkpoint):
        warnings.simplefilter("ignore", UserWarning)  # PyTorch warns of a single process
        load({"model": model.state_dict()}, checkpoint_id=checkpoint, no_dist=True)
    return model


def export_run(
    run: Path,
    target: Path,
    *,
    step: int | Literal["best"] | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | None = None,
) -> int:
    """Writes a checkpoint, by default the last, as a Hugging Face folder. Returns its step.

    "best" is the step with the lowest validation loss. `tokenizer` is a tokenizer.json, its folder,
    a hub id or "bytes"; by default that of `init_from` or of the data. The folder gets the
    tokenizer with the model's first token, a chat template, and the tokenizer's fingerprint.
    """
    folder = run / "checkpoints"
    found = saved_steps(folder)
    if not found:
        raise ValueError(f"{run} holds no checkpoint to export")
    if step == "best":
        step = best_step(folder)
        if step is None:
            raise ValueError(f"{run} has no best checkpoint: it kept none by validation loss")
    step = found[-1] if step is None else step
    if step not in found:
        raise ValueError(
            f"{run} has no checkpoint of step {step}; its checkpoints are of the steps {found}"
        )
    checkpoint = folder / f"step-{step:08}"
    saved = read_run(checkpoint)
    recipe = Recipe.from_dict(saved["recipe"])
    fingerprint = saved.get("tokenizer")  # earlier versions did not save it
    found_tokenizer = _find_tokenizer(recipe, tokenizer, fingerprint)
    parameters = read_model(checkpoint, recipe.model).named_parameters()
    with TemporaryDirectory() as aside:
        if found_tokenizer is not None:
            file = tokenizer_file(found_tokenizer)
            template = template_source(Path(aside) if file is None else file.parent)
            opened = open_tokenizer(found_tokenizer)
            companions = write_tokenizer(Path(aside), opened, recipe.model, template)
        else:
            companions = [write_fingerprint(Path(aside), fingerprint)] if fingerprint else []
        save_checkpoint(target, recipe.model, parameters, dtype=dtype, companions=companions)
    return step


def _find_tokenizer(
    recipe: Recipe, chosen: str | Path | None, fingerprint: str | None
) -> str | Path | None:
    """The chosen tokenizer, if it is the run's; otherwise that of `init_from` or of the data."""
    if chosen is not None:
        opened = open_tokenizer(chosen)
        if fingerprint not in (None, opened.fingerprint):
            raise ValueError(
                f"the run was trained with the tokenizer {str(fingerprint)[:12]}, but {chosen} is "
                f"the tokenizer {opened.fingerprint[:12]}"
            )
        load_tokenizer(chosen, recipe.model.vocab_size)
        return chosen
    # The folders may not exist any more, or hold another tokenizer.
    places = [Path(source.path) for source in recipe.data.sources.values()]
    if recipe.init_from and not recipe.start_step:
        with suppress(ValueError, OSError):
            places.insert(0, resolve(recipe.init_from))
    for place in places:
        if (place / "tokenizer.json").is_file():
            with suppress(ValueError, OSError):
                if fingerprint in (None, tokenizer_fingerprint(place)):
                    return place
    return "bytes" if fingerprint == "bytes" else None


@contextmanager
def _name_damage(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, OSError, ValueError) as error:
        raise ValueError(
            f"{checkpoint} is damaged ({_reason(error)}): remove it to continue from an earlier one"
        ) from error


def _reason(failure: BaseException) -> str:
    """The first line of the first error in any process."""
    if isinstance(failure, CheckpointException):
        failure = next(error for error, _ in failure.failures.values())
    return next(iter(str(failure).splitlines()), type(failure).__name__)
