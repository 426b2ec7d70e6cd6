"""`xlstm7b bench training`: how fast a model trains, and how much memory that takes.

It uses the trainer of `xlstm7b train`: loader, forward, backward, clipping, AdamW over float32
weights, bfloat16 computation on a GPU. The text is random. MFU counts
`accounting.training_flops`, without recomputation, against the GPU's peak in bf16 if that is known.
LoRA and state tuning have a base of random weights in a temporary folder.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xlstm7b.accounting import (
    lora_training_flops,
    peak_flops,
    state_tuning_flops,
    training_flops,
)
from xlstm7b.bench.measure import attempt, reset_peak
from xlstm7b.bench.results import Results, Shape
from xlstm7b.checkpoint import save_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.data.shards import ShardWriter, write_manifest
from xlstm7b.model.lm import schemes_of
from xlstm7b.quantize.config import Quantization, Scheme
from xlstm7b.quantize.weight import QuantizedWeight
from xlstm7b.train.processes import process_group
from xlstm7b.train.recipe import Batch, Data, Lora, Recipe, Run, Schedule, Source, StateTuning
from xlstm7b.train.trainer import Trainer

WARM_UP = 2  # steps that are not counted: they compile


@dataclass(frozen=True)
class Case:
    """A model, the batches of a step, and how it is trained."""

    size: str
    batch: int
    length: int
    micro_batches: int = 1
    activations: str = "none"  # which of them are recomputed
    method: str = "full"  # "lora" (rank 16) and "state" train on frozen weights
    quantize: str | None = None  # int8 or int4, of frozen weights

    @property
    def shape(self) -> Shape:
        own: dict[str, int | str] = {"model": self.size, "batch": self.batch, "length": self.length}
        if self.micro_batches > 1:
            own["micro-batches"] = self.micro_batches
        if self.activations != "none":
            own["recomputed"] = self.activations
        if self.method != "full":
            own |= {"method": self.method, "weights": self.quantize or "bfloat16"}
        return own

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.length * self.micro_batches

    @property
    def flops(self) -> float:
        """FLOPs of one step, without recomputation."""
        config, lora = ModelConfig.named(self.size), Lora()
        if self.method == "lora":
            flops = lora_training_flops(config, self.length, lora.targets, lora.rank)
        elif self.method == "state":
            flops = state_tuning_flops(config, self.length)
        else:
            flops = training_flops(config, self.length)
        return self.batch * self.micro_batches * flops


class StepTimes(NamedTuple):
    """The time of one training step."""

    seconds: float  # the median
    spread: float  # half the range, relative to `seconds`
    first: float  # of the first step, which compiles


def step_seconds(step: Callable[[], float], steps: int) -> StepTimes:
    """Times a function that trains on one batch, waits for the device, and returns the loss.

    `WARM_UP` steps are not counted. A loss that is not finite is a `FloatingPointError`.
    """
    times = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - began)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
    counted = times[WARM_UP:]
    seconds = median(counted)
    return StepTimes(seconds, (max(counted) - min(counted)) / 2 / seconds, times[0])


def measure_training(results: Results, case: Case, steps: int) -> None:
    """Tokens per second, peak memory, MFU and the time of the first step."""
    on_gpu = results.device.startswith("cuda")

    def work() -> None:
        torch.compiler.reset()  # else a second size is compiled for any shape, which is slower
        reset_peak(results.device)
        with our_step(case, steps, results.device) as step:
            times = step_seconds(step, steps)
        results.add("first step", case.shape, times.first, "s")
        if on_gpu:
            peak = 1e-9 * torch.cuda.max_memory_allocated()
            results.add("peak memory", case.shape, peak, "GB")
            if limit := peak_flops(torch.cuda.get_device_name()):
                mfu = case.flops / times.seconds / limit
                results.add("MFU", case.shape, 100 * mfu, "%")
        speed = case.tokens / times.seconds
        results.add("training", case.shape, speed, "tok/s", spread=times.spread)

    attempt(results, "training", case.shape, work, FloatingPointError)


@contextmanager
def our_step(case: Case, steps: int, device: str) -> Iterator[Callable[[], float]]:
    """A step of the trainer, on a folder of random documents for this many steps."""
    with tempfile.TemporaryDirectory() as folder, process_group(device):
        trainer = Trainer(_recipe(case, steps, Path(folder) / "data"), Path(folder), device)
        try:
            yield lambda: trainer.update().loss
        finally:
            trainer.loader.close()


def _recipe(case: Case, steps: int, data: Path) -> Recipe:
    model, is_state = ModelConfig.named(case.size), case.method == "state"
    draw = np.random.default_rng(0)
    data.mkdir()
    with ShardWriter(data / "00000.ds", vocab_size=model.vocab_size) as writer:
        left = (steps + 4) * case.tokens
        while left > 0:
            # With its end of text, a document of state tuning fills a sequence.
            length = min(int(draw.integers(100, 4000)), left)
            length = case.length - 1 if is_state else length
            writer.add(draw.integers(2, model.vocab_size, length))
            left -= length + 1
    write_manifest(
        data, [writer.entry], vocab_size=model.vocab_size, tokenizer_fingerprint="random"
    )
    base = data.with_name("base")
    if case.method != "full":
        _write_base(base, model, case.quantize)
    return Recipe(
        name="bench",
        init_from=str(base) if case.method != "full" else "",
        lora=Lora() if case.method == "lora" else None,
        state_tuning=StateTuning() if is_state else None,
        model=model,
        data=Data(
            case.length,
            {"random": Source(str(data))},
            packing="documents" if is_state else "windows",
        ),
        batch=Batch(case.batch * case.micro_batches, micro_batch=case.batch),
        schedule=Schedule(warmup=0),
        run=Run(WARM_UP + steps, activation_checkpointing=case.activations),  # type: ignore[arg-type]
    )


def _write_base(folder: Path, config: ModelConfig, quantize: str | None) -> None:
    """A checkpoint of noise, the same in every matrix: to draw all numbers would take minutes."""
    quantization = Quantization.named(quantize) if quantize else None
    schemes = {} if quantization is None else schemes_of(config, quantization)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))

    @cache  # a 7B has matrices of seven shapes
    def matrix(shape: tuple[int, ...], scheme: Scheme | None) -> Tensor | QuantizedWeight:
        count = torch.Size(shape).numel()
        values = noise.repeat(-(-count // len(noise)))[:count].view(shape)
        if scheme is None:
            return (values * 0.02 if len(shape) > 1 else torch.ones(shape)).bfloat16()
        groups = shape[1] // scheme.group_size if scheme.group_size else 1
        scale = torch.full((shape[0], groups), 0.01, dtype=torch.bfloat16)
        return QuantizedWeight.from_codes((2 * values).round().clamp(-7, 7), scale, scheme)

    shapes = config.parameter_shapes().items()
    tensors = ((name, matrix(shape, schemes.get(name))) for name, shape in shapes)
    save_checkpoint(folder, config, tensors, quantization=quantization)
