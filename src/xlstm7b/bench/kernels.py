"""`xlstm7b bench kernels`: checks the cell's Triton kernels against float64, then times them.

A constant number of tokens goes through the cell as many short or few long sequences, forward and
forward + backward, in bf16. Single steps run over rotating states in a CUDA graph. The limit is the
least time that any chunkwise kernel needs (`accounting.cell_floor`) at the GPU's measured peaks.

Peers: `mlstm_kernels` does the same work. FLA's simple_gla (`fla`) is the same recurrence without
input gate, normaliser and stabiliser; its gated delta rule (`gated_deltanet`) updates a state of
the same size. `sdpa` is PyTorch's causal attention (FlashAttention) at the same width.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton  # noqa: F401 (fails here, not in the middle of the work)
from torch import Tensor

from xlstm7b.accounting import cell_floor, state_bytes
from xlstm7b.bench.cases import Column, Part, Result
from xlstm7b.bench.measure import attempt, capture, find_peaks, measure
from xlstm7b.bench.peers import in_process
from xlstm7b.bench.plans import Kernels
from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState, mlstm_sequence, mlstm_step
from xlstm7b.mlstm.triton.launch_params import plan as launch_plan

STATES_IN_TURN = 32  # more than the L2 cache holds, as in a model of 32 blocks
LARGEST_ERROR = 2e-2
_GPU_MILLISECONDS = 200  # of one timing
_SDPA_HEAD_DIM = 128

_MS, _LIMIT = Column("ms", "seconds", 1e3, 4), Column("limit, ms", "limit", 1e3, 4)
_COLUMNS = ("batch", "tokens", _MS, _LIMIT, "% of limit", "GB/s", "TFLOP/s", "speed of ours, ×")
PARTS = {
    "sequence": Part("the cell over whole sequences, bf16", _COLUMNS, plot=("tokens", "ms")),
    "step": Part("one step of the cell, float32 state", _COLUMNS),
}


def results(plan: Kernels) -> Iterator[Result]:
    peaks = find_peaks("cuda", torch.bfloat16, plan.peak_tflops, plan.peak_tbs)
    for size in plan.sizes:
        errors = check_kernels(ModelConfig.named(size))
        print(f"{size}: relative errors", *(f"{name} {e:.1e}" for name, e in errors.items()))
        if not max(errors.values()) < LARGEST_ERROR:
            raise ValueError(f"the kernels give wrong results on this GPU: {errors}")
        for case in cases(plan, size):
            yield with_limit(case, time_ours(case), peaks)
        for peer in plan.peers:
            yield from _peer_results(plan, [replace(case, name=peer) for case in cases(plan, size)])


def _peer_results(plan: Kernels, waiting: list[Result]) -> Iterator[Result]:
    """All cases of a peer in one process. After a crash the next cases run in a new one."""
    left, began = plan.timeout, time.monotonic()
    while waiting:
        rows = [case.to_dict() for case in waiting]
        for result in in_process(waiting[0], time_peer, max(0.0, left), cases=rows):
            yield replace(waiting[0], seconds=result.seconds, error=result.error)
            del waiting[0]
        left = plan.timeout - (time.monotonic() - began)


def cases(plan: Kernels, size: str) -> Iterator[Result]:
    for length in plan.lengths:
        for work in ("forward", "forward + backward"):
            yield Result("sequence", "ours", work, size, plan.tokens // length, length)
    for batch in plan.batches:
        yield Result("step", size=size, batch=batch, length=1)


def check_kernels(config: ModelConfig, batch: int = 1, length: int = 1000) -> dict[str, float]:
    """Relative errors of h and of each gradient against float64, on random inputs."""
    parts = random_inputs(batch, length, config)
    weight = torch.randn_like(parts[2])

    def outcome(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [
            p.detach().to(torch.promote_types(p.dtype, dtype)).requires_grad_() for p in parts
        ]
        h, _ = mlstm_sequence(*leaves, backend=backend)
        return [h.detach(), *torch.autograd.grad((h * weight).sum(), leaves)]

    got, want = outcome("auto", torch.bfloat16), outcome("chunkwise", torch.float64)
    names = ("h", "dq", "dk", "dv", "di", "df")
    return {
        name: float((a.double() - b).norm() / b.norm())
        for name, a, b in zip(names, got, want, strict=True)
    }


def random_inputs(batch: int, length: int, config: ModelConfig) -> list[Tensor]:
    """bf16 q, k, v and float32 gates like those of a trained model."""
    shape = batch, length, config.num_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    widths = (config.d_qk, config.d_qk, config.d_hv)
    q, k, v = (normal(*shape, width).bfloat16().requires_grad_() for width in widths)
    return [q, k, v, (normal(*shape) - 6).requires_grad_(), (normal(*shape) + 4).requires_grad_()]


def time_ours(case: Result) -> float:
    config = ModelConfig.named(case.size)
    if case.part == "step":
        return time_steps(our_step(case.batch, config))
    parts = random_inputs(case.batch, case.length, config)
    return _time_sequence(case.work, lambda: mlstm_sequence(*parts)[0], parts)


def _time_sequence(work: str, call: Callable[[], Tensor], inputs: list[Tensor]) -> float:
    """Forward as inference runs it, or forward + backward as training does."""
    if work == "forward":
        with torch.no_grad():
            return measure(call, "cuda", gpu_milliseconds=_GPU_MILLISECONDS)
    gradient = torch.randn_like(call())

    def both() -> object:
        return torch.autograd.grad(call(), inputs, gradient)

    return measure(both, "cuda", gpu_milliseconds=_GPU_MILLISECONDS)


def time_steps(step: Callable[[int], object]) -> float:
    """Seconds of `step(index)` in a CUDA graph of `STATES_IN_TURN` steps, each on its own state."""
    replay = capture(lambda: [step(index) for index in range(STATES_IN_TURN)])
    return measure(replay, "cuda", gpu_milliseconds=_GPU_MILLISECONDS) / STATES_IN_TURN


def our_step(batch: int, config: ModelConfig) -> Callable[[int], object]:
    """A step with headwise norm and output gate that updates a float32 state in place."""
    q, k, v, i, f = (part.detach()[:, 0] for part in random_inputs(batch, 1, config))
    gate, norm_weight = torch.randn_like(v), torch.ones(config.v_dim, device=v.device).bfloat16()
    shape = batch, config.num_heads, config.d_qk, config.d_hv
    states = [MLSTMState.zeros(*shape, device=v.device) for _ in range(STATES_IN_TURN)]
    return lambda index: mlstm_step(
        q, k, v, i, f, states[index], gate=gate, norm_weight=norm_weight, inplace=True
    )


def with_limit(case: Result, seconds: float, peaks: tuple[float, float]) -> Result:
    """The case with its time, the limit of that time, FLOP/s and bytes/s."""
    config = ModelConfig.named(case.size)
    if case.part == "step":
        moved = 2 * case.batch * state_bytes(config)["total"] / config.num_blocks
        works = [{"flops": 0.0, "bytes": moved}]
    else:
        heads = config.num_heads, config.d_qk, config.d_hv
        chunk = launch_plan(config.d_qk, config.d_hv, torch.bfloat16).chunk
        floors = cell_floor(case.batch * case.length, chunk, *heads, causal=0.5)
        works = [floors[direction] for direction in case.work.split(" + ")]  # type: ignore[misc]
    limit = sum(max(work["flops"] / peaks[0], work["bytes"] / peaks[1]) for work in works)
    return replace(
        case,
        seconds=seconds,
        flops_per_second=sum(work["flops"] for work in works) / seconds or None,
        bytes_per_second=sum(work["bytes"] for work in works) / seconds,
        limit=limit,
        percent_of_limit=100 * limit / seconds,
    )


# Peers


def time_peer(cases: list[dict[str, Any]]) -> Iterator[Result]:
    """Times cases in another library. Runs in its own process: the compiler may crash."""
    for values in cases:
        yield attempt(Result.from_dict(values), _time_peer, Exception)


def _time_peer(case: Result) -> Result:
    config = ModelConfig.named(case.size)
    if case.part == "step":
        if case.name != "mlstm_kernels":
            raise RuntimeError(f"{case.name} has no single step to compare")
        return replace(case, seconds=time_steps(_mlstm_kernels_step(case.batch, config)))
    call, inputs = _peer_call(case.name, case.batch, case.length, config)
    return replace(case, seconds=_time_sequence(case.work, call, inputs))


def _peer_call(
    peer: str, batch: int, length: int, config: ModelConfig
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A peer's forward call and its differentiable inputs."""
    q, k, v, i, f = random_inputs(batch, length, config)
    if peer == "mlstm_kernels":
        from mlstm_kernels.torch.chunkwise import mlstm_chunkwise__limit_chunk

        parts = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v, i, f)]
        options: dict[str, Any] = {"chunk_size": 64, "autocast_kernel_dtype": torch.bfloat16}
        return (lambda: mlstm_chunkwise__limit_chunk(*parts, **options)), parts
    if peer == "fla":
        from fla.ops.simple_gla import chunk_simple_gla

        decay = F.logsigmoid(f).detach().requires_grad_()
        return (lambda: chunk_simple_gla(q, k, v, decay)[0]), [q, k, v, decay]
    if peer == "gated_deltanet":
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
