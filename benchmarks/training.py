"""Training of xLSTM here, beside the authors' package and transformers.

Ours is the trainer of `xlstm7b train`. The others train with PyTorch's cross-entropy over all
logits, AdamW over float32 weights and, on a GPU, bfloat16 autocast, compiled as a whole with the
loss. `optimized` is transformers after this package's `optimize`. Nothing is recomputed. The text
is random.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from options import chosen
from peers import authors_xlstm, transformers_xlstm
from processes import (
    Call,
    Here,
    Json,
    exit_if_failed,
    measure_alone,
    measure_here,
    repeated,
    results_file,
)
from processes import Case as Measured
from xlstm7b.accounting import H100_FLOPS
from xlstm7b.bench.measure import release, synchronize
from xlstm7b.bench.results import OURS, Results
from xlstm7b.bench.training import Case, our_step, step_seconds
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, listed, option
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_device

NAMES = {each: each for each in (OURS, "xlstm", "transformers")}
NAMES["optimized"] = "transformers, optimized"

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def training(
    context: typer.Context,
    systems: Annotated[
        list[str] | None,
        typer.Argument(help=f"What to measure: {', '.join(NAMES)}. By default all of them."),
    ] = None,
    cases: Annotated[
        str, option("Models with the batch of a step: SIZE:SEQUENCESxTOKENS.")
    ] = "160m:16x4096,400m:16x4096,1.4b:4x8192,7b:1x2048",
    steps: Annotated[int, option("Number of steps to time; their median is shown.")] = 10,
    device: Annotated[str | None, option("cuda or cpu.", default="a GPU if there is one")] = None,
    timeout: Annotated[float, option("Time limit for each case of a system, in seconds.")] = 300.0,
    json: Json = None,
    call: Call = None,
    here: Here = False,
) -> None:
    """Times training steps of xLSTM here, in the authors' package and in transformers."""
    names = chosen("system", systems, NAMES)
    parsed = {text: _parse(text) for text in listed(cases)}
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, not {steps}")
    kind = to_device(device).type
    with results_file(json) as file:
        packages = ("xlstm", "mlstm_kernels", "transformers")
        results = Results("training", kind, file=file, call=call, packages=packages)
        for text, case in parsed.items():
            for name in names:
                whats = ("first step", "peak memory", "MFU", "training")
                measured = Measured(
                    whats if kind == "cuda" else whats[::3], case.shape, NAMES[name]
                )
                if here:
                    start = partial(partial, _measure, name, case, steps, results)
                    measure_here([measured], start, results)
                    continue
                command = repeated(
                    __file__,
                    context,
                    systems=[name],
                    cases=text,
                    json=file,
                    call=results.call,
                    here=True,
                )
                measure_alone([measured], command, timeout, results)
        exit_if_failed(results)


def _parse(text: str) -> Case:
    match = re.fullmatch(r"([^:]+):([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"a case is SIZE:SEQUENCESxTOKENS such as 160m:16x4096, not {text!r}")
    ModelConfig.named(match[1])
    return Case(match[1], int(match[2]), int(match[3]))


def _measure(name: str, case: Case, steps: int, results: Results, measured: Measured) -> None:
    device = results.device
    release(device)
    make = our_step(case, steps, device) if name == OURS else _peer_step(name, case, device)
    with make as step:
        times = step_seconds(step, steps)
    add = partial(results.add, system=measured.system)
    add("first step", case.shape, times.first, "s")
    if device == "cuda":
        add("peak memory", case.shape, torch.cuda.max_memory_allocated() / 1e9, "GB")
        add("MFU", case.shape, 100 * case.flops / times.seconds / H100_FLOPS, "%")
    note = "compiled" if device == "cuda" and name != OURS else None
    speed = case.tokens / times.seconds
    add("training", case.shape, speed, "tok/s", spread=times.spread, note=note)


@contextmanager
def _peer_step(name: str, case: Case, device: str) -> Iterator[Callable[[], float]]:
    """float32 weights under bfloat16 autocast on a GPU, compiled with the loss."""
    config, is_xlstm = ModelConfig.named(case.size), name == "xlstm"
    if is_xlstm:
        model: Any = authors_xlstm(config, "float32", device, mode="train")
    else:
        model = transformers_xlstm(config, "float32", device)
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
        text = torch.randint(config.vocab_size, (case.batch, case.length + 1), device=device)
        loss = compiled(text[:, :-1], text[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return loss.item()

    yield step


if __name__ == "__main__":
    main(app)
