"""`xlstm7b bench training`: how fast a model trains, and how much memory that takes.

Each case runs in its own process, with the trainer of `xlstm7b train`: loader, forward,
backward, clipping, AdamW over float32 weights, bfloat16 computation on a GPU. The text is random.
MFU counts `accounting.training_flops`, without recomputation, against the peak of an H100. LoRA
has a base of random weights in a temporary folder.

Peers train with PyTorch's cross-entropy over all logits and without recomputation; on a GPU they
are compiled as a whole. `xlstm` is the authors' package, `transformers` has its own xLSTM, and
`optimized` is that with this package's forward pass (`bench transformers`).
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.accounting import (
    H100_FLOPS,
    lora_training_flops,
    state_tuning_flops,
    training_flops,
)
from xlstm7b.bench.cases import Column, Part, Result
from xlstm7b.bench.measure import synchronize
from xlstm7b.bench.peers import in_process, load_transformers, load_xlstm
from xlstm7b.bench.plans import Training, TrainingCase
from xlstm7b.checkpoint import save_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.data.shards import ShardWriter, write_manifest
from xlstm7b.model.lm import schemes_of
from xlstm7b.quantize.config import Quantization, Scheme
from xlstm7b.quantize.weight import QuantizedWeight
from xlstm7b.train.processes import process_group
from xlstm7b.train.recipe import Batch, Data, Lora, Recipe, Run, Schedule, Source, StateTuning
from xlstm7b.train.trainer import Trainer

_WARM_UP = 2  # steps that are not counted: they compile

_COLUMNS = (
    "batch",
    "tokens",
    Column("micro-batches", "micro_batches"),
    "tok/s",
    "ms",
    Column("MFU, %", "mfu", 100, 1),
    "GB",
    Column("first step, s", "first_step", digits=1),
    "speed of ours, ×",
)
_TITLE = f"one step of training; MFU of {H100_FLOPS / 1e12:.0f} TFLOP/s (H100, H200 in bf16)"
PARTS = {"training": Part(_TITLE, _COLUMNS, plot=("tokens", "tok/s"))}


def results(plan: Training) -> Iterator[Result]:
    for text in plan.cases:
        case = TrainingCase.parse(text)
        for name in ("ours",) if case.trained else ("ours", *plan.peers):
            # Peers cannot recompute activations.
            same = case if name == "ours" else replace(case, activations="none")
            job = {"name": name, "case": asdict(same), "steps": plan.steps, "device": plan.device}
            yield from in_process(row(same, name), train, plan.timeout, **job)


def row(case: TrainingCase, name: str) -> Result:
    """The case without figures."""
    recomputes = "" if case.activations == "none" else f"recomputes {case.activations}"
    work = ", ".join(filter(None, (case.trained, recomputes)))
    figures = {"micro_batches": case.micro_batches}
    return Result("training", name, work, case.size, case.batch, case.length, figures=figures)


def train(name: str, case: dict[str, Any], steps: int, device: str) -> Iterator[Result]:
    """Trains in this process: `_WARM_UP` steps that are not counted, then `steps`."""
    parsed = TrainingCase(**case)
    if name == "ours":
        yield _train_ours(parsed, steps, device)
    else:
        yield _train_peer(name, parsed, steps, device)


def _timed(
    case: TrainingCase, name: str, step: Callable[[], float], steps: int, device: str
) -> Result:
    """`step` trains on one batch, waits for the device, and returns the loss."""
    times, losses = [], []
    for _ in range(_WARM_UP + steps):
        began = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - began)
    blank = row(case, name)
    figures = {"first_step": times[0], "losses": losses}
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
    result = replace(blank, memory=memory, figures=blank.figures | figures)
    return with_speed(result, case, median(times[_WARM_UP:]), has_mfu=device == "cuda")


def with_speed(result: Result, case: TrainingCase, seconds: float, *, has_mfu: bool) -> Result:
    """The result with the time of one step, and what follows from it."""
    speed = case.tokens / seconds
    figures = dict(result.figures)
    if has_mfu:
        config, lora = ModelConfig.named(case.size), Lora()
        flops = training_flops(config, case.length)
        if case.trained.startswith("lora"):
            flops = lora_training_flops(config, case.length, lora.targets, lora.rank)
        elif case.trained:
            flops = state_tuning_flops(config, case.length)
        figures["mfu"] = flops / case.length * speed / H100_FLOPS
    return replace(result, seconds=seconds, tokens_per_second=speed, figures=figures)


def _train_ours(case: TrainingCase, steps: int, device: str) -> Result:
    """The trainer, on a folder of random documents."""
    with tempfile.TemporaryDirectory() as folder, process_group(device):
        recipe = _recipe(case, steps, Path(folder) / "data")
        trainer = Trainer(recipe, Path(folder), device)
        try:
            return _timed(case, "ours", lambda: trainer.update().loss, steps, device)
        finally:
            trainer.loader.close()


def _recipe(case: TrainingCase, steps: int, data: Path) -> Recipe:
    model, is_state = ModelConfig.named(case.size), case.trained.startswith("state")
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
    if case.trained:
        _write_base(base, model, case.trained)
    return Recipe(
        name="bench",
        init_from=str(base) if case.trained else "",
        lora=Lora() if case.trained.startswith("lora") else None,
        state_tuning=StateTuning() if is_state else None,
        model=model,
        data=Data(
            case.length,
            {"random": Source(str(data))},
            packing="documents" if is_state else "windows",
        ),
        batch=Batch(case.batch * case.micro_batches, micro_batch=case.batch),
        schedule=Schedule(warmup=0),
        run=Run(_WARM_UP + steps, activation_checkpointing=case.activations),  # type: ignore[arg-type]
    )


def _write_base(folder: Path, config: ModelConfig, trained: str) -> None:
    """A checkpoint of noise, the same in every matrix: to draw all numbers would take minutes."""
    _, _, bits = trained.partition("-")
    quantization = Quantization.named(bits) if bits else None
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


def _train_peer(name: str, case: TrainingCase, steps: int, device: str) -> Result:
    """float32 weights under bfloat16 autocast on a GPU, compiled with the loss."""
    config, is_xlstm = ModelConfig.named(case.size), name == "xlstm"
    if is_xlstm:
        model = load_xlstm(config, torch.float32, device, mode="train")
    else:
        model = load_transformers(config, torch.float32, device)
    if name == "optimized":
        from xlstm7b.integrations.transformers import optimize

        model = optimize(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens)[0] if is_xlstm else model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    compiled = torch.compile(loss_of) if device == "cuda" else loss_of

    def step() -> float:
        total = 0.0
        for _ in range(case.micro_batches):
            text = torch.randint(config.vocab_size, (case.batch, case.length + 1), device=device)
            loss = compiled(text[:, :-1], text[:, 1:]) / case.micro_batches
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return total

    return _timed(case, name, step, steps, device)
