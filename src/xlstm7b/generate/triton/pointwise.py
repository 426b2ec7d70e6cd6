"""What stands between the products: norms, soft-caps, gates. One pass over memory each."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xlstm7b.generate.triton.launch import overlap
from xlstm7b.model.triton.head import soft_cap


@triton.jit
def shut_gates(y, is_live, gate, N_GATES):
    """Where a row is not live: input gates (the first half) shut, forget gates open."""
    return tl.where(is_live, y, tl.where(gate < N_GATES // 2, float("-inf"), float("inf")))


@triton.jit
def rms_norm_kernel(
    x, weight, out, eps, x_stride, D: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """A row: x / √(mean(x²) + ε), cast back, times the weight."""
    d = tl.arange(0, BLOCK)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x_d = tl.load(x + row * x_stride + d, mask=d < D, other=0.0)
    wide = x_d.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    y = wide.to(x_d.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row * D + d, y, mask=d < D)


@triton.jit
def cap_gates_kernel(
    gates, bias, live, cap, SIZE, N_GATES, HAS_LIVE: tl.constexpr, BLOCK: tl.constexpr
):
    """Bias and soft-cap over [R, N_GATES] in place; rows not live leave the state alone."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    row, gate = at // N_GATES, at % N_GATES
    y = tl.load(gates + at, mask=inside, other=0.0)
    y = soft_cap(y + tl.load(bias + gate, mask=inside, other=0.0).to(tl.float32), cap)
    if HAS_LIVE:
        y = shut_gates(y, tl.load(live + row, mask=inside, other=0) != 0, gate, N_GATES)
    tl.store(gates + at, y, mask=inside)


@triton.jit
def head_norm_kernel(
    h, weight, gate, out, eps, gate_stride, NH, D: tl.constexpr, BLOCK: tl.constexpr
):
    """A row's head: LayerNorm without bias, times the weight, times σ(gate)."""
    head = tl.program_id(0) % NH
    row = (tl.program_id(0) // NH).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    x = tl.load(h + (row * NH + head) * D + d, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, 0) / D, 0.0)
    x = centred * tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    x *= tl.load(weight + head * D + d, mask=inside, other=0.0).to(tl.float32)
    at = gate + row * gate_stride + head * D + d
    x *= tl.sigmoid(tl.load(at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + (row * NH + head) * D + d, x, mask=inside)


@triton.jit
def swiglu_kernel(x, out, SIZE, F, BLOCK: tl.constexpr):
    """SiLU of a row's first F numbers times its other F."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate_at = x + at // F * 2 * F + at % F
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + F, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, gate * tl.sigmoid(gate) * up, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over x [R, d]."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    rms_norm_kernel[(rows,)](
        x, weight, out, eps, x.stride(0), D=width, BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8, **overlap(x.device),
    )  # fmt: skip
    return out


def cap_gates(gates: Tensor, bias: Tensor, cap: float, live: Tensor | None) -> None:
    """Turns products [R, 2 NH] into pre-activations, in place."""
    size, block = gates.numel(), 1024
    cap_gates_kernel[(triton.cdiv(size, block),)](
        gates, bias, gates if live is None else live, cap, size, gates.shape[1],
        HAS_LIVE=live is not None, BLOCK=block,
    )  # fmt: skip


def head_norm(h: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """Headwise norm of h [R, NH, d_hv] times σ(gate), gate [R, NH · d_hv] with any row stride."""
    rows, heads, width = h.shape
    out = torch.empty(rows, heads * width, dtype=h.dtype, device=h.device)
    head_norm_kernel[(rows * heads,)](
        h, weight, gate, out, eps, gate.stride(0), heads, D=width,
        BLOCK=triton.next_power_of_2(width), num_warps=2 if width <= 512 else 4,
    )  # fmt: skip
    return out


def swiglu(x: Tensor) -> Tensor:
    """[R, 2 F] → [R, F]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = 2048
    swiglu_kernel[(triton.cdiv(out.numel(), block),)](x, out, out.numel(), width, BLOCK=block)
    return out
