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
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from xlstm7b.data.loader import Batch, Loader, validation_batches
from xlstm7b.data.shards import ShardFolder, open_folder
from xlstm7b.model import XLSTM
from xlstm7b.model.init import init_parameter
from xlstm7b.train.activations import checkpoint_activations
from xlstm7b.train.checkpoint import Checkpoints, steps
from xlstm7b.train.metrics import Metrics
from xlstm7b.train.optimizer import (
    build_optimizer,
    clip_gradients,
    gradient_norm,
    set_learning_rate,
)
from xlstm7b.train.parallel import build_mesh, parallelize
from xlstm7b.train.recipe import Recipe

Report = Callable[[dict[str, Any]], None]


class Update(NamedTuple):
    """What one step did."""

    loss: float
    gradient_norm: float
    tokens: int  # targets that counted
    applied: bool  # False where loss or gradient were not finite, and nothing was changed
    stop: bool  # whether some process was asked to stop


@contextmanager
def process_group(device_type: str) -> Iterator[None]:
    """The one that `torchrun` describes, or one of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    try:
        yield
        dist.barrier()  # nobody hangs up while another still talks
    finally:
        dist.destroy_process_group()


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
        if recipe.data.validation:
            self._validation = open_folder(recipe.data.validation)
        rank = dist.get_rank() // self.layout.tp  # tensor-parallel neighbours read the same text
        self.loader = Loader(
            self._sources,
            context_length=recipe.data.context_length,
            global_batch=recipe.ramp.sequences(recipe.start_step),
            rank=rank,
            world_size=self.layout.data_parallel,
            seed=recipe.run.seed,
            start_sample=recipe.ramp.sequences_before(recipe.start_step),
            packing="stream" if recipe.data.packing == "windows" else "best_fit",
            vocab_size=recipe.model.vocab_size,
            pin_memory=device_type == "cuda",
        )
        self.model = self._build()
        model: Any = self.model  # FSDP has given it methods of its own
        self._sync_gradients: Callable[[bool], None] = model.set_requires_gradient_sync
        self._reshard: Callable[[], None] = model.reshard
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            keep_last=recipe.run.keep_last,
            keep_every=recipe.run.keep_every,
        )
        self.step = recipe.start_step
        self._asked_to_stop = False

    def _build(self) -> XLSTM:
        recipe = self.recipe
        auto = "bfloat16" if self.device.type == "cuda" else "float32"
        precision = auto if recipe.run.precision == "auto" else recipe.run.precision
        with torch.device("meta"):
            model = XLSTM(recipe.model)
        blocks: Any = model.backbone.blocks
        for block in blocks:
            checkpoint_activations(block, recipe.run.activation_checkpointing)
            if recipe.run.compile and self.device.type == "cuda":
                block.compile(fullgraph=True)
        mesh = build_mesh(self.layout, self.device.type)
        parallelize(model, mesh, getattr(torch, precision))
        model.to_empty(device=self.device)
        whole: dict[str, Any] = {}
        if dist.get_rank() == 0:  # so that every layout starts from the same numbers
            whole = self._first_weights()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole, options=options)
        return model

    def _first_weights(self) -> dict[str, Tensor]:
        recipe = self.recipe
        if recipe.init_from and not recipe.start_step:
            source = XLSTM.from_pretrained(recipe.init_from, dtype=torch.float32, device="cpu")
            if source.config != recipe.model:
                raise ValueError(f"the model in {recipe.init_from} is not of the recipe's shape")
            return dict(source.state_dict())
        torch.manual_seed(recipe.run.seed)
        weights = {}
        for name, shape in recipe.model.parameter_shapes().items():
            weights[name] = torch.empty(shape)
            init_parameter(name, weights[name], recipe.model)
        return weights

    def resume(self) -> bool:
        """Goes on from the last checkpoint of this folder, or of the run that a stage follows."""
        found = steps(self.checkpoints.folder)
        if found:
            run = self.checkpoints.load(found[-1], self.model, self.optimizer)
            self.loader.load_state_dict(run["loader"])
            self.step = run["step"]
        elif self.recipe.start_step:
            before = Path(self.recipe.init_from) / "checkpoints"
            if self.recipe.start_step not in steps(before):
                raise ValueError(f"{before} has no checkpoint of step {self.recipe.start_step}")
            earlier = Checkpoints(before, keep_last=1, keep_every=0)
            earlier.load(self.recipe.start_step, self.model, self.optimizer)
        return bool(found)

    def train(self, report: Report) -> None:
        """Runs to the recipe's last step, to the time limit or until SIGTERM; saves at the end."""
        run = self.recipe.run
        deadline = time.monotonic() + 3600 * run.time_limit if run.time_limit else math.inf
        metrics = None
        if dist.get_rank() == 0:
            metrics = Metrics(
                self.folder / "metrics.jsonl",
                start=self.step,
                interval=run.log_every,
                tensorboard=run.tensorboard,
            )
        saved = self.step
        with self._stopping_on_sigterm():
            while self.step < run.steps:
                began = time.perf_counter()
                self._asked_to_stop |= time.monotonic() > deadline
                update = self.update()
                if not update.applied and run.nan_policy == "stop":
                    raise FloatingPointError(
                        f"loss {update.loss} and gradient norm {update.gradient_norm} at step "
                        f"{self.step - 1}; the last good checkpoint is of step {saved}"
                    )
                line = {
                    "step": self.step - 1,
                    "loss": update.loss,
                    "gradient_norm": update.gradient_norm,
                    "learning_rate": self.recipe.learning_rate(self.step - 1),
                    "tokens": update.tokens,
                    "tokens_per_second": update.tokens / (time.perf_counter() - began),
                    "applied": update.applied,
                }
                if run.validate_every and self.step % run.validate_every == 0:
                    line |= self.validate()
                if metrics is not None:
                    metrics.write(**line)
                    if self.step % run.log_every == 0:
                        line |= metrics.over_interval()
                    report(line)
                self.checkpoints.finish(wait=False)
                at_end = update.stop or self.step == run.steps
                if at_end or (run.save_every and self.step % run.save_every == 0):
                    self._save()
                    saved = self.step
                if update.stop:
                    break
        self.checkpoints.finish()
        self.loader.close()
        if metrics is not None:
            metrics.close()

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
        total = torch.zeros((), dtype=torch.float64, device=self.device)  # read once, at the end
        for index in range(count):
            self._sync_gradients(index == count - 1)
            rows = slice(index * size, (index + 1) * size)
            loss = self._summed_loss(batch, rows)
            (loss * scale).backward()
            total += loss.detach()
        dist.all_reduce(total)
        mean_loss = total.item() / self.layout.tp / max(targets, 1.0)
        parameters = list(self.model.parameters())
        norm = gradient_norm(parameters)
        finite = math.isfinite(mean_loss) and math.isfinite(norm.item())
        if finite:
            clip_gradients(parameters, recipe.optimizer.clip, norm)
            set_learning_rate(self.optimizer, recipe.learning_rate(step))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return Update(mean_loss, norm.item(), round(targets), finite, counts[1].item() > 0)

    def _summed_loss(self, batch: Batch, rows: slice) -> Tensor:
        tokens, targets, resets, mask = (
            batch[name][rows].to(self.device, non_blocking=True)
            for name in ("tokens", "targets", "resets", "mask")
        )
        logprobs, _ = self.model.token_logprobs(tokens, targets, resets=resets)
        return -(logprobs * mask).sum()

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Mean loss over held-out text, in all and by eighths of the context."""
        assert self._validation is not None
        recipe, length = self.recipe, self.recipe.data.context_length
        rows = recipe.batch.micro_batch * self.layout.data_parallel
        batches = validation_batches(
            self._validation, length, rows, rank=dist.get_rank() // self.layout.tp,
            world_size=self.layout.data_parallel, vocab_size=recipe.model.vocab_size,
        )  # fmt: skip
        most = recipe.data.validation_sequences
        sums = torch.zeros(2, length, dtype=torch.float64, device=self.device)
        for index, batch in enumerate(batches):
            if most and index * rows >= most:
                break
            tokens, targets, resets, mask = (
                batch[name].to(self.device) for name in ("tokens", "targets", "resets", "mask")
            )
            logprobs, _ = self.model.token_logprobs(tokens, targets, resets=resets)
            sums[0] -= (logprobs.double() * mask).sum(0)
            sums[1] += mask.sum(0)
        self._reshard()  # which the backward pass does where there is one
        dist.all_reduce(sums)
        losses, counts = sums.cpu()
        eighths = [
            (loss.sum() / count.sum().clamp(min=1)).item()
            for loss, count in zip(losses.chunk(8), counts.chunk(8), strict=True)
        ]
        whole = (losses.sum() / counts.sum().clamp(min=1)).item()
        return {"validation_loss": whole, "validation_loss_by_position": eighths}

    def _save(self) -> None:
        run = {"loader": self.loader.state_dict(), "recipe": self.recipe.to_dict()}
        self.checkpoints.start(self.step, self.model, self.optimizer, run)

    @contextmanager
    def _stopping_on_sigterm(self) -> Iterator[None]:
        def ask(number: int, frame: FrameType | None) -> None:
            self._asked_to_stop = True

        before = signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
