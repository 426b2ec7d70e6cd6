"""2 to 64 rows times a weight matrix, on tensor cores: Yᵀ = W Xᵀ for X [B, K], W [N, K].

The time is still that of reading W. W is the tall operand of the tensor cores, and X is padded to
16, 32 or 64 rows. As in `one_row.py`, the same kernel does the work after the product. RMSNorm is a
launch of its own here (`pointwise.py`).
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from xlstm7b.generate.kernels import MAX_ROWS
from xlstm7b.generate.kernels.overlap import overlap_options, wait_for_previous
from xlstm7b.generate.kernels.pointwise import mask_gates, rms_norm
from xlstm7b.mlstm.triton.launch_params import fitting_stages
from xlstm7b.model.head_kernels import soft_cap


@dataclass(frozen=True, order=True)
class RowsTile:
    """Launch parameters of `multiply_rows`."""

    rows: int  # of W in one tile
    columns: int  # of W in one tile
    warps: int
    stages: int


def multiply_rows(
    x: Tensor,
    W: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
    gates: tuple[Tensor, Tensor] | None = None,
    live: Tensor | None = None,
    cap: float | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    tile: RowsTile | None = None,
) -> tuple[Tensor, Tensor]:
    """x Wᵀ [B, N] for x [B, K], B ≤ 64, and the gates [B, 2 NH].

    The options are those of `multiply_row`, with B rows.
    """
    batch, columns = x.shape
    assert batch <= MAX_ROWS
    if norm is not None:
        x = rms_norm(x, norm, eps)
    rows = len(W) // 2 if swiglu else len(W)
    tile = tile or tile_for(batch, rows, W.dtype, swiglu)
    assert residual is None or out is None
    out = out if residual is None else residual
    if out is None:
        out = torch.empty(batch, rows, dtype=out_dtype or x.dtype, device=x.device)
    programs, gate_rows = triton.cdiv(rows, tile.rows), 0
    W_gates, bias, out_gates = W, x, x
    if gates is not None:
        W_gates, bias = gates
        gate_rows = len(W_gates)
        programs += triton.cdiv(gate_rows, tile.rows)
        out_gates = torch.empty(batch, gate_rows, dtype=torch.float32, device=x.device)
    padded_batch = max(16, triton.next_power_of_2(batch))
    stage_bytes = (tile.rows * (2 if swiglu else 1) + padded_batch) * tile.columns * x.itemsize
    rows_kernel[(programs,)](
        x, W, W_gates, bias, x if live is None else live, out, out, out_gates,
        cap or 1.0, batch, rows, gate_rows,
        K=columns, HAS_GATES=gates is not None, HAS_LIVE=live is not None,
        HAS_RESIDUAL=residual is not None, HAS_CAP=cap is not None, SWIGLU=swiglu,
        BATCH=padded_batch, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ROWS=tile.rows, BLOCK=tile.columns, num_warps=tile.warps,
        num_stages=fitting_stages(tile.stages, stage_bytes, x.device),
        **overlap_options(x.device),
    )  # fmt: skip
    return out, out_gates


def tile_for(batch: int, rows: int, dtype: torch.dtype, swiglu: bool) -> RowsTile:
    """The fastest tile on an H200, by `benchmarks/tune.py`.

    float32 has fewer stages: twice the bytes must fit into the same shared memory. With SwiGLU, two
    tiles of W must.
    """
    if batch > 16:
        tile = RowsTile(64, 128, 8, 5) if rows < 8192 else RowsTile(64, 128, 4, 3)
        tile = RowsTile(64, 64, 4, 4) if swiglu else tile
    elif rows < 8192:
        tile = RowsTile(16, 256, 1, 4)
    else:
        tile = RowsTile(32, 64, 2, 5) if swiglu else RowsTile(32, 128, 2, 4)
    return tile if dtype.itemsize == 2 else replace(tile, stages=3)


@triton.jit
def rows_kernel(
    x, W, W_gates, bias, live, residual, out, out_gates,
    cap, B, N, N_GATES,
    K: tl.constexpr, HAS_GATES: tl.constexpr, HAS_LIVE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_CAP: tl.constexpr, SWIGLU: tl.constexpr, BATCH: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [B, N] = x Wᵀ and out_gates [B, N_GATES] = masked soft-cap(x W_gatesᵀ + bias).

    One program per ROWS rows of W; the programs after those compute W_gates.
    """
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    limit = N
    weights = W
    is_gate = False
    if HAS_GATES:
        W_programs = tl.cdiv(N, ROWS)
        is_gate = program >= W_programs
        if is_gate:
            row -= W_programs * ROWS
            limit = N_GATES
            weights = W_gates
    wait_for_previous(OVERLAP)
    y, y_up = product(x, weights, row, B, limit, K, SWIGLU, BLOCK, ROWS, BATCH, PRECISION)
    if SWIGLU:
        y = y * tl.sigmoid(y) * y_up
    if is_gate:
        store_gates(y, row, bias, live, out_gates, cap, B, N_GATES, HAS_CAP, HAS_LIVE, BATCH)
    else:
        capped: tl.constexpr = HAS_CAP and not HAS_GATES
        masked: tl.constexpr = HAS_LIVE and not HAS_GATES
        store_rows(y, row, residual, live, out, cap, B, N, HAS_RESIDUAL, capped, masked, BATCH)


@triton.jit
def store_gates(
    y, row, bias, live, out_gates, cap, B, N_GATES,
    HAS_CAP: tl.constexpr, HAS_LIVE: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """out_gates[:, row] = masked soft-cap(y + bias), for y [ROWS, BATCH]."""
    b = tl.arange(0, BATCH)
    y += tl.load(bias + row, mask=row < N_GATES, other=0.0).to(tl.float32)[:, None]
    if HAS_CAP:
        y = soft_cap(y, cap)
    if HAS_LIVE:
        is_live = tl.load(live + b, mask=b < B, other=0) != 0
        y = mask_gates(y, is_live[None, :], row[:, None], N_GATES)
    inside = (row < N_GATES)[:, None] & (b < B)[None, :]
    tl.store(out_gates + b[None, :] * N_GATES + row[:, None], y, mask=inside)


@triton.jit
def store_rows(
    y, row, residual, live, out, cap, B, N,
    HAS_RESIDUAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_LIVE: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """out[:, row] = soft-cap(y + residual[:, row]), for y [ROWS, BATCH].

    With HAS_LIVE, only the rows of out that are `live`.
    """
    b = tl.arange(0, BATCH)
    is_stored = b < B
    if HAS_LIVE:
        is_stored &= tl.load(live + b, mask=b < B, other=0) != 0
    inside = (row < N)[:, None] & is_stored[None, :]
    at = b[None, :] * N + row[:, None]
    if HAS_RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_CAP:
        y = soft_cap(y, cap)
    tl.store(out + at, y, mask=inside)


@triton.jit
def product(
    x, W, row, B, N,
    K: tl.constexpr, SWIGLU: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BATCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W[row] Xᵀ and, with SWIGLU, W[N + row] Xᵀ, each [ROWS, BATCH] in float32.

    Both in one loop, so that X is read once.
    """
    b = tl.arange(0, BATCH)
    w_rows = W + row.to(tl.int64)[:, None] * K
    up_rows = w_rows + tl.full((), K, tl.int64) * N
    acc = tl.zeros([ROWS, BATCH], tl.float32)
    acc_up = tl.zeros([ROWS, BATCH], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        in_k = (k < K) | (K % BLOCK == 0)
        inside_w = (row < N)[:, None] & in_k[None, :]
        w = tl.load(w_rows + k[None, :], mask=inside_w, other=0.0)
        inside = (b < B)[None, :] & in_k[:, None]
        x_k = tl.load(x + b[None, :] * K + k[:, None], mask=inside, other=0.0)
        acc = tl.dot(w, x_k, acc, input_precision=PRECISION)
        if SWIGLU:
            w_up = tl.load(up_rows + k[None, :], mask=inside_w, other=0.0)
            acc_up = tl.dot(w_up, x_k, acc_up, input_precision=PRECISION)
    return acc, acc_up
