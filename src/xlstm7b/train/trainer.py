"""Training: batches in, updates, checkpoints out, on one process or many.

Every process runs this. There is always a process group, of one process where `torchrun` started
none, so that there is one way to do it: FSDP2 keeps float32 masters and computes in bfloat16.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xlstm7b.data.loader import Batch, Loader, check_tokenizers
from xlstm7b.data.shards import ShardFolder, open_folder
from xlstm7b.train.build import build_model, check_tokenizer
from xlstm7b.train.checkpoint import Checkpoints, steps
from xlstm7b.train.gates import gate_statistics
from xlstm7b.train.metrics import Metrics
from xlstm7b.train.optimizer import (
    build_optimizer,
    clipped_step,
    gradient_norm,
    set_learning_rate,
)
from xlstm7b.train.parallel import reshard
from xlstm7b.train.processes import in_first_process
from xlstm7b.train.recipe import Recipe
from xlstm7b.train.validation import held_out_loss

_MOST_SKIPS = 20  # in a row: a run that is given so many comes back no more
Report = Callable[[dict[str, Any]], None]


class Update(NamedTuple):
    """What one step did."""

    loss: float
    gradient_norm: float
    tokens: int  # targets that counted
    applied: bool  # False where loss or gradient were not finite, and nothing was changed
    stop: bool  # whether some process was asked to stop


class Trainer:
    """One run in its folder: `checkpoints/`, `metrics.jsonl`, `recipe.json`."""

    def __init__(self, recipe: Recipe, folder: Path, device_type: str) -> None:
        self.recipe, self.folder = recipe, folder
        self.device = torch.device(device_type)
        self.layout = recipe.layout(dist.get_world_size())
        self._sources = {
            name: (open_folder(source.path), source.weight)
            for name, source in recipe.data.sources.items()
        }
        self._validation: ShardFolder | None = None
        folders = {name: folder for name, (folder, _) in self._sources.items()}
        if recipe.data.validation:
            self._validation = folders["data.validation"] = open_folder(recipe.data.validation)
        check_tokenizers(folders, recipe.model.vocab_size)
        self._tokenizer = next(iter(folders.values())).tokenizer_fingerprint
        rank = dist.get_rank() // self.layout.tp  # tensor-parallel neighbours read the same text
        self.loader = Loader(
            self._sources,
            context_length=recipe.data.context_length,
            global_batch=recipe.ramp.sequences(recipe.start_step),
            rank=rank,
            world_size=self.layout.data_parallel,
            seed=recipe.run.seed,
            stage=recipe.start_step,
            packing="stream" if recipe.data.packing == "windows" else "best_fit",
            vocab_size=recipe.model.vocab_size,
            pin_memory=device_type == "cuda",
        )
        # What is loaded from a checkpoint of a run needs no other weights before.
        is_new = not recipe.start_step and not steps(folder / "checkpoints")
        init_from = recipe.init_from if is_new else ""
        if init_from:
            check_tokenizer(init_from, self._tokenizer)
        self.model = build_model(recipe, self.layout, self.device, init_from=init_from)
        model: Any = self.model  # FSDP has given it methods of its own
        self._sum_over_copies: Callable[[bool], None] = model.set_requires_all_reduce
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            keep_last=recipe.run.keep_last,
            keep_every=recipe.run.keep_every,
        )
        self.step = recipe.start_step
        self.best: dict[str, Any] | None = None  # the step with the lowest held-out loss
        # The same text over the whole run, so that intervals can be compared.
        self._watched_text = self.loader.first_window()
        self._asked_to_stop = False
        self.skipped = self._skipped_in_a_row = 0  # steps that were not applied

    def resume(self) -> bool:
        """Goes on from the last checkpoint of this folder, or of the run that a stage follows."""
        found = steps(self.checkpoints.folder)
        if found and found[-1] > self.recipe.run.steps:
            raise ValueError(
                f"the run in {self.folder} is at step {found[-1]} already, which is behind the "
                f"last one asked for, run.steps ({self.recipe.run.steps})"
            )
        if found:
            run = self.checkpoints.load(found[-1], self.model, self.optimizer)
            self.loader.load_state_dict(run["loader"])
            self.step, self.best = run["step"], run["best"] if self.recipe.run.keep_best else None
        elif self.recipe.start_step:
            before = Path(self.recipe.init_from) / "checkpoints"
            if self.recipe.start_step not in steps(before):
                raise ValueError(f"{before} has no checkpoint of step {self.recipe.start_step}")
            earlier = Checkpoints(before, keep_last=1, keep_every=0)
            run = earlier.load(self.recipe.start_step, self.model, self.optimizer)
            if run.get("tokenizer", self._tokenizer) != self._tokenizer:
                raise ValueError(
                    f"the run in {self.recipe.init_from} read text of another tokenizer than this"
                )
        return bool(found)

    def train(self, report: Report) -> None:
        """Runs to the last step, to the time limit, until SIGTERM or Ctrl-C; saves at the end."""
        run = self.recipe.run
        deadline = time.monotonic() + 3600 * run.time_limit if run.time_limit else math.inf
        metrics = in_first_process(
            Metrics,
            self.folder / "metrics.jsonl",
            start=self.step,
            interval=run.log_every,
            tensorboard=run.tensorboard,
        )
        try:
            with self._stopping_on_signals():
                while self.step < run.steps and not self._take_step(deadline, metrics, report):
                    pass
                self.checkpoints.finish()
        except BaseException as error:
            self.checkpoints.settle()
            if isinstance(error, OSError | FloatingPointError):
                raise type(error)(f"{error}; {self.checkpoints.last()}") from error
            raise
        self.loader.close()
        if metrics is not None:
            metrics.close()

    def _take_step(self, deadline: float, metrics: Metrics | None, report: Report) -> bool:
        """One step and all that is due behind it; whether the run was asked to stop."""
        run = self.recipe.run
        began = time.perf_counter()
        self._asked_to_stop |= time.monotonic() > deadline
        update = self.update()
        if update.applied:
            self._skipped_in_a_row = 0
        else:
            self._count_skip(update)
        line = {
            "step": self.step - 1,
            "loss": update.loss,
            "gradient_norm": update.gradient_norm,
            "learning_rate": self.recipe.learning_rate(self.step - 1),
            "tokens": update.tokens,
            "tokens_per_second": update.tokens / (time.perf_counter() - began),
            "applied": update.applied,
        }
        if self.device.type == "cuda":
            line["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        if run.validate_every and self.step % run.validate_every == 0:
            line |= self.validate()
        if self.step % run.log_every == 0:
            line |= self._watch_gates()
        in_first_process(self._write_down, line, metrics, report)
        self.checkpoints.finish(wait=False)
        at_end = update.stop or self.step == run.steps
        is_best = self.best is not None and self.best["step"] == self.step
        # What cannot learn any more does not push out what could.
        is_due = update.applied and run.save_every and self.step % run.save_every == 0
        if at_end or is_best or is_due:
            self._save()
        return update.stop

    def _count_skip(self, update: Update) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self.recipe.run.nan_policy == "skip" and self._skipped_in_a_row < _MOST_SKIPS:
            return
        self.checkpoints.finish()
        row = f", the last of {n} in a row" if (n := self._skipped_in_a_row) > 1 else ""
        raise FloatingPointError(
            f"loss {update.loss} and gradient norm {update.gradient_norm} at step "
            f"{self.step - 1}{row}"
        )

    def update(self) -> Update:
        """One step: every target of the global batch counts alike, whoever computes it."""
        recipe, step = self.recipe, self.step
        sequences = recipe.ramp.sequences(step)
        if sequences != self.loader.global_batch:
            self.loader.set_global_batch(sequences)
        batch = next(self.loader)
        size, count = recipe.micro_batches(step, self.layout)
        asked = float(self._asked_to_stop)
        counts = torch.tensor([float(batch["mask"].sum()), asked], dtype=torch.float64)
        dist.all_reduce(counts)
        targets = counts[0].item() / self.layout.tp
        # FSDP takes the mean over data-parallel processes; this makes it the mean over targets.
        scale = self.layout.data_parallel / max(targets, 1.0)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in range(count):
            self._sum_over_copies(index == count - 1)
            rows = slice(index * size, (index + 1) * size)
            loss = self._loss(batch, rows, scale)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        loss = total / self.layout.world
        norm = gradient_norm(self.model.parameters()).to(self.device)
        is_bad = ~(loss.isfinite() & norm.isfinite())
        set_learning_rate(self.optimizer, recipe.learning_rate(step))
        clipped_step(self.optimizer, recipe.optimizer.clip, norm, is_bad)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        # The only wait for the device in a step, when all of it is under way.
        mean_loss, whole_norm, skipped = torch.stack([loss, norm, is_bad]).tolist()
        return Update(mean_loss, whole_norm, round(targets), not skipped, counts[1].item() > 0)

    def _loss(self, batch: Batch, rows: slice, scale: float) -> Tensor:
        tokens, targets, resets, mask = (
            batch[name][rows].to(self.device, non_blocking=True)
            for name in ("tokens", "targets", "resets", "mask")
        )
        return self.model.loss(tokens, targets, mask * scale, resets=resets)

    def validate(self) -> dict[str, Any]:
        """Loss on held-out text; where it is the lowest so far, this step is the best."""
        assert self._validation is not None
        found = held_out_loss(self.model, self._validation, self.recipe, self.layout, self.device)
        reshard(self.model)
        loss = found["validation_loss"]
        if self.recipe.run.keep_best and loss < (self.best or {}).get("validation_loss", math.inf):
            self.best = {"step": self.step, "validation_loss": loss}
        return found

    def _watch_gates(self) -> dict[str, Any]:
        gates = gate_statistics(self.model, self._watched_text, self.device)
        reshard(self.model)
        return gates

    def _write_down(self, line: dict[str, Any], metrics: Metrics | None, report: Report) -> None:
        assert metrics is not None, "the first process has them"
        metrics.write(**line)
        if self.step % self.recipe.run.log_every == 0:
            line = line | metrics.over_interval()
        report(line)

    def _save(self) -> None:
        run = {
            "loader": self.loader.state_dict(),
            "recipe": self.recipe.to_dict(),
            "best": self.best,
            "tokenizer": self._tokenizer,
        }
        self.checkpoints.start(self.step, self.model, self.optimizer, run)

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        def ask(number: int, frame: FrameType | None) -> None:
            self._asked_to_stop = True
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if dist.get_rank() == 0:  # not by print, which may have been interrupted
                    os.write(2, b"\nsaving after this step; Ctrl-C again to stop at once\n")

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
