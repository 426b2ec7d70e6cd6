"""One row times a weight matrix: bound by reading the weights, everything else rides along.

y = W x for x [K], W [N, K]. RMSNorm of x, bias, soft-cap, SiLU(gate) · up and the residual add are
done on the way in and out, in float32. Few programs, all on the chip at once, go through the rows
in turn, each with its next weights under way; so the launch behind can be on the chip as well, its
first weights loaded, when this one ends.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xlstm7b.generate.triton.launch import overlap, prefetch_rows
from xlstm7b.generate.triton.pointwise import shut_gates
from xlstm7b.model.triton.head import soft_cap


@dataclass(frozen=True, order=True)
class RowTile:
    """Rows and columns of the weights a program has at a time; programs a multiprocessor."""

    rows: int
    columns: int
    warps: int
    programs: int
    ahead: int = 0  # more groups of rows that are asked for before the launch in front has ended


@triton.jit
def _load_tile(
    W, W_gates, index, N, N_GATES,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_GATES: tl.constexpr,
):  # fmt: skip
    """Tile `index` of W, and behind W's of W_gates, counted along a row first."""
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    group = index // blocks
    k = index % blocks * BLOCK + tl.arange(0, BLOCK)
    row = group * ROWS + tl.arange(0, ROWS)
    limit = N
    weights = W
    if HAS_GATES:  # noqa: SIM102 (decided when compiled, and the next is not)
        if group >= tl.cdiv(N, ROWS):
            row -= tl.cdiv(N, ROWS) * ROWS
            limit = N_GATES
            weights = W_gates
    inside = (row < limit)[:, None] & ((k < K) | (K % BLOCK == 0))[None, :]
    at = weights + row.to(tl.int64)[:, None] * K + k[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_x(x, norm, start, K: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr):
    """x from `start` on, times the norm's weight; RMSNorm's factor is applied to the sums."""
    k = start + tl.arange(0, BLOCK)
    inside = (k < K) | (K % BLOCK == 0)
    x_k = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        x_k *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
    return x_k


@triton.jit
def _rms_factor(x, eps, K: tl.constexpr, BLOCK: tl.constexpr):
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x_k = tl.load(x + k, mask=(k < K) | (K % BLOCK == 0), other=0.0).to(tl.float32)
        squares += x_k * x_k
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def row_kernel(
    x, norm, W, W_gates, bias, live, residual, out, out_gates,
    eps, cap, N, N_GATES,
    K: tl.constexpr, HAS_NORM: tl.constexpr, HAS_GATES: tl.constexpr, HAS_LIVE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_CAP: tl.constexpr, SWIGLU: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = W x [N]; with SWIGLU, W is [2 N, K]: SiLU of the first half's product, times the other.

    With HAS_GATES the rows behind W's are W_gates': float32, biased, soft-capped, and where the row
    is not live, shut (input gates, the first half) or open (forget gates).
    """
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    own_groups = tl.cdiv(N, ROWS)
    groups = own_groups
    if HAS_GATES:
        groups += tl.cdiv(N_GATES, ROWS)
    first, stride = tl.program_id(0), tl.num_programs(0)
    steps = tl.cdiv(groups - first, stride) * blocks
    up = W + tl.full((), K, tl.int64) * N
    w = _load_tile(W, W_gates, first * blocks, N, N_GATES, K, ROWS, BLOCK, HAS_GATES)
    if SWIGLU:
        w_up = _load_tile(up, W_gates, first * blocks, N, N_GATES, K, ROWS, BLOCK, False)
    if OVERLAP:
        if AHEAD > 0:
            thread = tl.arange(0, THREADS)
            ahead = (first + (1 + thread // ROWS) * stride) * ROWS + thread % ROWS
            wanted = (thread < AHEAD * ROWS) & (ahead < N)
            row_bytes: tl.constexpr = K * W.dtype.element_ty.primitive_bitwidth // 8
            prefetch_rows(W, ahead.to(tl.int64) * K, wanted, row_bytes)
        gdc_wait()
        gdc_launch_dependents()

    x_k = _load_x(x, norm, 0, K, BLOCK, HAS_NORM)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    acc_up = acc
    factor = 1.0
    for step in range(steps):
        group, block = first + step // blocks * stride, step % blocks
        index = (first + (step + 1) // blocks * stride) * blocks + (step + 1) % blocks
        if blocks > 1:
            x_k = _load_x(x, norm, block * BLOCK, K, BLOCK, HAS_NORM)
        acc += w.to(tl.float32) * x_k[None, :]
        w = _load_tile(W, W_gates, index, N, N_GATES, K, ROWS, BLOCK, HAS_GATES)
        if SWIGLU:
            acc_up += w_up.to(tl.float32) * x_k[None, :]
            w_up = _load_tile(up, W_gates, index, N, N_GATES, K, ROWS, BLOCK, False)
        if HAS_NORM:  # noqa: SIM102 (decided when compiled, and the next is not)
            if step == 0:  # with the next weights under way, and not in their way
                factor = _rms_factor(x, eps, K, BLOCK)
        if block == blocks - 1:
            row = group * ROWS + tl.arange(0, ROWS)
            y = tl.sum(acc, 1) * factor
            acc = tl.zeros([ROWS, BLOCK], tl.float32)
            if SWIGLU:
                y = y * tl.sigmoid(y) * (tl.sum(acc_up, 1) * factor)
                acc_up = acc
            of_gates = False
            if HAS_GATES:
                of_gates = group >= own_groups
            if of_gates:
                row -= own_groups * ROWS
                inside = row < N_GATES
                y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
                y = soft_cap(y, cap)
                if HAS_LIVE:
                    y = shut_gates(y, tl.load(live) != 0, row, N_GATES)
                tl.store(out_gates + row, y, mask=inside)
            else:
                if HAS_RESIDUAL:
                    y += tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)
                if HAS_CAP:
                    y = soft_cap(y, cap)
                tl.store(out + row, y, mask=row < N)


def tile_for(rows: int, columns: int, swiglu: bool) -> RowTile:
    """Measured on an H200 by `python -m xlstm7b.bench.tune_generation`; `ahead` in whole tokens.

    A square matrix is the output projection's, which follows the cell: that one leaves the memory
    idle for long enough to ask for most of these weights.
    """
    block = min(4096, triton.next_power_of_2(columns))
    if swiglu:
        return RowTile(2, block, 4, 6)
    if columns > block:
        return RowTile(4, block, 8, 2)
    if rows == columns:
        return RowTile(4, block, 8, 2, ahead=3)
    return RowTile(4, block, 4, 6)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def multiply_row(
    x: Tensor, W: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, swiglu: bool = False,
    residual: Tensor | None = None, gates: tuple[Tensor, Tensor] | None = None,
    live: Tensor | None = None, cap: float = 0.0, out_dtype: torch.dtype | None = None,
    tile: RowTile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """W x for x [1, K] as [1, N], and the gates [1, N_GATES] in float32 (else an unused tensor).

    `residual` is added to in place and returned. `cap` caps the gates if there are any, else out.
    """
    columns = W.shape[1]
    rows = len(W) // 2 if swiglu else len(W)
    tile = tile or tile_for(rows, columns, swiglu)
    out = residual
    if out is None:
        out = torch.empty(1, rows, dtype=out_dtype or x.dtype, device=x.device)
    groups, gate_rows = triton.cdiv(rows, tile.rows), 0
    W_gates, bias, out_gates = W, x, x
    if gates is not None:
        W_gates, bias = gates
        gate_rows = len(W_gates)
        groups += triton.cdiv(gate_rows, tile.rows)
        out_gates = torch.empty(1, gate_rows, dtype=torch.float32, device=x.device)
    programs = min(groups, tile.programs * _multiprocessors(x.device))
    row_kernel[(programs,)](
        x, x if norm is None else norm, W, W_gates, bias, x if live is None else live, out, out,
        out_gates, eps, cap or 1.0, rows, gate_rows,
        K=columns, HAS_NORM=norm is not None, HAS_GATES=gates is not None,
        HAS_LIVE=live is not None, HAS_RESIDUAL=residual is not None,
        HAS_CAP=cap > 0 and gates is None, SWIGLU=swiglu, ROWS=tile.rows,
        BLOCK=tile.columns, THREADS=32 * tile.warps,
        AHEAD=0 if columns * W.itemsize % 16 else tile.ahead,  # whole rows, in units of 16 bytes
        num_warps=tile.warps, **overlap(x.device),
    )  # fmt: skip
    return out, out_gates
