"""The mLSTM cell's kernels on a GPU, beside those of other libraries.

(Not called kernels.py: transformers would take it for the package of that name.)

A constant number of tokens goes through the cell in bf16, as many short or few long sequences,
forward and forward + backward; single steps run over rotating states in a CUDA graph.

`mlstm_kernels` does the same work. FLA's simple GLA is the same recurrence without input gate,
normaliser and stabiliser; its gated delta rule updates a state of the same size. `sdpa` is
PyTorch's causal attention (FlashAttention) at the same width.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from options import chosen, numbers
from processes import (
    Call,
    Case,
    Here,
    Json,
    Timeout,
    exit_if_failed,
    measure_alone,
    measure_here,
    repeated,
    results_file,
)
from xlstm7b.bench.kernels import (
    DIRECTIONS,
    STATES_IN_TURN,
    our_step,
    random_inputs,
    sequence_limit,
    step_limit,
    time_steps,
)
from xlstm7b.bench.measure import find_peaks, measure, release
from xlstm7b.bench.results import OURS, Results
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, option
from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import mlstm_sequence

NAMES = {
    OURS: OURS,
    "mlstm_kernels": "mlstm_kernels",
    "sdpa": "FlashAttention (SDPA)",
    "fla": "simple GLA (FLA)",
    "gated_deltanet": "gated delta rule (FLA)",
}
_STEPS = (OURS, "mlstm_kernels")  # the others have no single step to compare
_GPU_MILLISECONDS = 200  # of one timing
_SDPA_HEAD_DIM = 128

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def cell(
    context: typer.Context,
    systems: Annotated[
        list[str] | None,
        typer.Argument(help=f"What to measure: {', '.join(NAMES)}. By default all of them."),
    ] = None,
    size: Annotated[str, option("Size of the model whose heads are timed.")] = "7b",
    tokens: Annotated[int, option("Tokens of all sequences.")] = 65536,
    lengths: Annotated[
        str, option("Lengths of the sequences, in tokens.")
    ] = "2048,4096,8192,16384,32768,65536",
    batches: Annotated[str, option("Batch sizes of single steps.")] = "1,8,64",
    timeout: Timeout = 300.0,
    json: Json = None,
    call: Call = None,
    here: Here = False,
) -> None:
    """Times the mLSTM cell's kernels on a GPU, beside those of other libraries."""
    names = chosen("system", systems, NAMES)
    ModelConfig.named(size)
    shapes: list[dict[str, int | str]] = []
    for length in numbers("lengths", lengths):
        if tokens % length:
            raise ValueError(f"sequences of {length} do not divide {tokens} tokens")
        shapes.append({"model": size, "batch": tokens // length, "length": length})
    steps: list[dict[str, int | str]] = [
        {"model": size, "batch": batch} for batch in numbers("batches", batches)
    ]
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a GPU")
    with results_file(json) as file:
        packages = ("mlstm_kernels", "fla-core")
        results = Results("kernels", "cuda", file=file, call=call, packages=packages)
        for name in names:
            cases = [Case((way,), each, NAMES[name]) for way in DIRECTIONS for each in shapes]
            if name in _STEPS:
                cases += [Case(("step",), each, NAMES[name]) for each in steps]
            if here:
                measure_here(cases, partial(partial, _measure, name, results), results)
                continue
            command = repeated(
                __file__, context, systems=[name], json=file, call=results.call, here=True
            )
            measure_alone(cases, command, timeout, results)
        exit_if_failed(results)


def _measure(name: str, results: Results, case: Case) -> None:
    release("cuda")
    config, batch = ModelConfig.named(str(case.shape["model"])), int(case.shape["batch"])
    peaks, is_ours = find_peaks("cuda", torch.bfloat16), name == OURS
    if case.whats == ("step",):
        step = (our_step if is_ours else _mlstm_kernels_step)(batch, config)
        value, unit, limit = 1e6 * time_steps(step), "µs", 1e6 * step_limit(batch, config, peaks)
    else:
        (direction,), length = case.whats, int(case.shape["length"])
        value = 1e3 * _time(direction, *_sequence(name, batch, length, config))
        unit, limit = "ms", 1e3 * sequence_limit(batch * length, direction, config, peaks)
    own_limit = limit if is_ours else None
    results.add(case.whats[0], case.shape, value, unit, system=case.system, limit=own_limit)


def _time(direction: str, call: Callable[[], Tensor], inputs: list[Tensor]) -> float:
    """Forward as inference runs it, or forward + backward as training does."""
    if direction == "forward":
        with torch.no_grad():
            return measure(call, "cuda", gpu_milliseconds=_GPU_MILLISECONDS)
    gradient = torch.randn_like(call())

    def both() -> object:
        return torch.autograd.grad(call(), inputs, gradient)

    return measure(both, "cuda", gpu_milliseconds=_GPU_MILLISECONDS)


def _sequence(
    name: str, batch: int, length: int, config: ModelConfig
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A forward call and its differentiable inputs."""
    q, k, v, _, f = inputs = random_inputs(batch, length, config)
    if name == OURS:
        return (lambda: mlstm_sequence(*inputs)[0]), inputs
    if name == "mlstm_kernels":
        from mlstm_kernels.torch.chunkwise import mlstm_chunkwise__limit_chunk

        parts = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs]
        options: dict[str, Any] = {"chunk_size": 64, "autocast_kernel_dtype": torch.bfloat16}
        return (lambda: mlstm_chunkwise__limit_chunk(*parts, **options)), parts
    if name == "fla":
        from fla.ops.simple_gla import chunk_simple_gla

        decay = F.logsigmoid(f).detach().requires_grad_()
        return (lambda: chunk_simple_gla(q, k, v, decay)[0]), [q, k, v, decay]
    if name == "gated_deltanet":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        decay, rate = (gate(f).detach().requires_grad_() for gate in (F.logsigmoid, torch.sigmoid))
        parts = [q, k, v, decay, rate]
        return (lambda: chunk_gated_delta_rule(*parts, use_qk_l2norm_in_kernel=True)[0]), parts
    shape = batch, config.v_dim // _SDPA_HEAD_DIM, length, _SDPA_HEAD_DIM
    q, k, v = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in "qkv")
    return (lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)), [q, k, v]


def _mlstm_kernels_step(batch: int, config: ModelConfig) -> Callable[[int], object]:
    """The step of mlstm_kernels, which has no norm and no output gate."""
    from mlstm_kernels.torch.recurrent.triton_step import mlstm_recurrent_step__triton_fw

    q, k, v, i, f = (part.detach()[:, 0] for part in random_inputs(batch, 1, config))
    shape = batch, config.num_heads, config.d_qk, config.d_hv
    states = [
        [torch.zeros(part, device="cuda") for part in (shape, shape[:3], (*shape[:2], 1))]
        for _ in range(STATES_IN_TURN)
    ]

    def step(index: int) -> object:
        C, n, m = states[index]
        gates = i[..., None], f[..., None]
        return mlstm_recurrent_step__triton_fw(C, n, m, q, k, v, *gates, C, n, m)

    return step


if __name__ == "__main__":
    main(app)
