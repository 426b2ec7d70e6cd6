"""The xLSTM of `transformers`, as it is and with `xlstm7b.integrations.transformers.optimize`.

`model.generate`, greedy, one token at a time. Each model has random weights and a process of its
own. training.py measures training with `optimize`.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer

from options import chosen, numbers
from peers import TransformersXLSTM
from processes import (
    Call,
    Case,
    Here,
    Json,
    Timeout,
    measure_alone,
    measure_here,
    repeated,
    results_file,
)
from xlstm7b.bench.measure import measure_steps, random_prompts, release
from xlstm7b.bench.results import OURS, Results
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, Device, option
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_device, to_dtype

SYSTEMS = (OURS, TransformersXLSTM.system)
_PROMPT = 16  # tokens

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def inside_transformers(
    context: typer.Context,
    systems: Annotated[
        list[str] | None,
        typer.Argument(help="xlstm7b is transformers with `optimize`. By default both."),
    ] = None,
    batches: Annotated[str, option("Batch sizes to generate.")] = "1,8",
    seconds: Annotated[float, option("Length of one timing, in seconds, about.")] = 1.0,
    size: Annotated[str, option("Size of the model.")] = "7b",
    dtype: Annotated[str, option("Dtype of the weights: float32 or bfloat16.")] = "bfloat16",
    device: Device = None,
    timeout: Timeout = 300.0,
    json: Json = None,
    call: Call = None,
    here: Here = False,
) -> None:
    """Time `generate` of the xLSTM of transformers, with and without `optimize`."""
    names, sizes = chosen("system", systems, SYSTEMS), numbers("batches", batches)
    on = to_device(device)
    ModelConfig.named(size)
    to_dtype(dtype, ("float32", "bfloat16"))
    with results_file(json) as file:
        packages = TransformersXLSTM.packages
        results = Results("inside transformers", on.type, file=file, call=call, packages=packages)
        for system in names:
            shape = {"model": size, "weights": dtype, "states": dtype}
            cases = [Case(("generate",), shape | {"batch": n}, system) for n in sizes]
            if here:
                measure_here(
                    cases, partial(start, system, size, dtype, on.type, seconds, results), results
                )
                continue
            print(f"\n== {system}", flush=True)
            command = repeated(
                __file__, context, systems=[system], json=file, call=results.call, here=True
            )
            measure_alone(cases, command, timeout, results)
        if any("error" in row for row in results.rows if row["call"] == results.call):
            raise typer.Exit(1)


def start(
    system: str, size: str, dtype: str, device: str, seconds: float, results: Results
) -> Callable[[Case], None]:
    """Builds a model. Returns what measures one case of it."""
    peer = TransformersXLSTM(size, device, dtype)
    model: Any = peer.model
    if system == OURS:
        from xlstm7b.integrations.transformers import optimize

        model = optimize(model)

    def run(case: Case) -> None:
        release(device)
        batch = int(case.shape["batch"])
        ids = random_prompts(peer.vocab_size, batch, _PROMPT)
        prompts = torch.tensor(ids, device=device)

        def generate(tokens: int) -> None:
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )

        step = measure_steps(generate, device, seconds=seconds, base=8)
        if device == "cuda":
            memory = 1e-9 * torch.cuda.max_memory_allocated()
            results.add("peak memory", case.shape, memory, "GB", system=system)
        speed = batch / step.seconds
        results.add("generate", case.shape, speed, "tok/s", system=system, spread=step.spread)

    return run


if __name__ == "__main__":
    main(app)
