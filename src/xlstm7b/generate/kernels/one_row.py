"""One row times a weight matrix: y = W x for x [K], W [N, K].

The time is that of reading W, so the same kernel also does, in float32, the work before and after
the product: RMSNorm of x, bias, soft-cap, SiLU(gate) · up, and adding to the residual stream.

The launch has few programs, all on the GPU at once. Each goes through several groups of rows and
loads the next tile of W while it sums the current one. So the memory is always busy, and there is
room for the next launch to start and load its first weights before this one ends (`overlap.py`).
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from xlstm7b.generate.kernels.overlap import overlap_options, prefetch_rows, wait_for_previous
from xlstm7b.generate.kernels.pointwise import mask_gates
from xlstm7b.model.head_kernels import soft_cap


@dataclass(frozen=True, order=True)
class RowTile:
    """Launch parameters of `multiply_row`."""

    rows: int  # of W in one tile: a group
    columns: int  # of W in one tile
    warps: int
    programs: int  # per multiprocessor
    prefetch: int = 0  # groups after the first to load into L2 before the previous launch has ended


def multiply_row(
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
    tile: RowTile | None = None,
) -> tuple[Tensor, Tensor]:
    """x Wᵀ [1, N] for x [1, K], W [N, K]; and, with `gates`, gate pre-activations in float32.

    norm, eps: x is normalised first (RMSNorm).
    swiglu: W is [2 N, K]; the result is SiLU(x W[:N]ᵀ) · (x W[N:]ᵀ).
    residual [1, N]: the product is added to it in place; it is also the result.
    gates: W_gates [2 NH, K] and bias [2 NH]. Without them, ignore the second result.
    live [1]: if it is false, the gates leave the state unchanged (`mask_gates`). If it is false and
        there are no gates, the product is not written.
    cap: soft-cap of the gates if there are any, else of the product. None: no soft-cap.
    out [1, N]: where the product is written. It is also the result.
    """
    columns = W.shape[1]
    rows = len(W) // 2 if swiglu else len(W)
    tile = tile or tile_for(rows, columns, swiglu)
    assert residual is None or out is None
    out = out if residual is None else residual
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
        HAS_CAP=cap is not None, SWIGLU=swiglu, ROWS=tile.rows,
        BLOCK=tile.columns, THREADS=32 * tile.warps,
        PREFETCH=0 if columns * W.itemsize % 16 else tile.prefetch,  # rows of whole 16 bytes only
        num_warps=tile.warps, **overlap_options(x.device),
    )  # fmt: skip
    return out, out_gates


def tile_for(rows: int, columns: int, swiglu: bool) -> RowTile:
    """The fastest tile on an H200, by `benchmarks/tune.py`.

    `prefetch` was chosen by the speed of whole tokens. A square matrix is the output projection,
    which follows the cell. The cell leaves the memory idle long enough to prefetch most of it.
    """
    block = min(4096, triton.next_power_of_2(columns))
    if swiglu:
        return RowTile(2, block, 4, 6)
    if columns > block:
        return RowTile(4, block, 8, 2)
    if rows == columns:
        return RowTile(4, block, 8, 2, prefetch=3)
    return RowTile(4, block, 4, 6)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def row_kernel(
    x, norm, W, W_gates, bias, live, residual, out, out_gates,
    eps, cap, N, N_GATES,
    K: tl.constexpr, HAS_NORM: tl.constexpr, HAS_GATES: tl.constexpr, HAS_LIVE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_CAP: tl.constexpr, SWIGLU: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [N] = W x and out_gates [N_GATES] = masked soft-cap(W_gates x + bias).

    A group is ROWS rows of W, or of W_gates after the last group of W. Program p computes the
    groups p, p + programs, p + 2 · programs, …, each in `blocks` tiles of BLOCK columns. RMSNorm is
    W (x · norm) times a factor: x is read once, and the factor is applied to the finished sums.
    One long function: the loop carries the tile that is being loaded from step to step.
    """
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    W_groups = tl.cdiv(N, ROWS)
    groups = W_groups
    if HAS_GATES:
        groups += tl.cdiv(N_GATES, ROWS)
    first, stride = tl.program_id(0), tl.num_programs(0)
    steps = tl.cdiv(groups - first, stride) * blocks
    W_up = W + tl.full((), K, tl.int64) * N

    # 1. Load the first tile, before the previous launch has written x.
    w = _load_tile(W, W_gates, first * blocks, N, N_GATES, K, ROWS, BLOCK, HAS_GATES)
    if SWIGLU:
        w_up = _load_tile(W_up, W_gates, first * blocks, N, N_GATES, K, ROWS, BLOCK, False)
    if OVERLAP and PREFETCH > 0:
        thread = tl.arange(0, THREADS)
        later_row = (first + (1 + thread // ROWS) * stride) * ROWS + thread % ROWS
        wanted = (thread < PREFETCH * ROWS) & (later_row < N)
        row_bytes: tl.constexpr = K * W.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(W, later_row.to(tl.int64) * K, wanted, row_bytes)
    wait_for_previous(OVERLAP)

    # 2. Add up tile after tile; load the next tile before the sums of this one are needed.
    x_k = _load_x(x, norm, 0, K, BLOCK, HAS_NORM)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    acc_up = acc
    factor = 1.0
    for step in range(steps):
        group, block = first + step // blocks * stride, step % blocks
        next_tile = (first + (step + 1) // blocks * stride) * blocks + (step + 1) % blocks
        if blocks > 1:
            x_k = _load_x(x, norm, block * BLOCK, K, BLOCK, HAS_NORM)
        acc += w.to(tl.float32) * x_k[None, :]
        w = _load_tile(W, W_gates, next_tile, N, N_GATES, K, ROWS, BLOCK, HAS_GATES)
        if SWIGLU:
            acc_up += w_up.to(tl.float32) * x_k[None, :]
            w_up = _load_tile(W_up, W_gates, next_tile, N, N_GATES, K, ROWS, BLOCK, False)
        if HAS_NORM:  # noqa: SIM102 (this is decided when compiled, the next line at run time)
            if step == 0:  # only now: it runs while the second tile is being loaded
                factor = _rms_factor(x, eps, K, BLOCK)

        # 3. After the last tile of a group: finish its rows and store them.
        if block == blocks - 1:
            row = group * ROWS + tl.arange(0, ROWS)
            y = tl.sum(acc, 1) * factor
            acc = tl.zeros([ROWS, BLOCK], tl.float32)
            if SWIGLU:
                y = y * tl.sigmoid(y) * (tl.sum(acc_up, 1) * factor)
                acc_up = acc
            is_gate = False
            if HAS_GATES:
                is_gate = group >= W_groups
            if is_gate:
                row -= W_groups * ROWS
                inside = row < N_GATES
                y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
                if HAS_CAP:
                    y = soft_cap(y, cap)
                if HAS_LIVE:
                    y = mask_gates(y, tl.load(live) != 0, row, N_GATES)
                tl.store(out_gates + row, y, mask=inside)
            else:
                if HAS_RESIDUAL:
                    y += tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)
                if HAS_CAP and not HAS_GATES:
                    y = soft_cap(y, cap)
                stored = N
                if HAS_LIVE and not HAS_GATES:
                    stored = tl.where(tl.load(live) != 0, N, 0)
                tl.store(out + row, y, mask=row < stored)


@triton.jit
def _load_tile(
    W, W_gates, tile, N, N_GATES,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_GATES: tl.constexpr,
):  # fmt: skip
    """Tile number `tile` of W, or of W_gates after the last of W. Columns count fastest.

    Zeros outside the matrices: a program's last step loads a tile that may not exist.
    """
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    group = tile // blocks
    k = tile % blocks * BLOCK + tl.arange(0, BLOCK)
    row = group * ROWS + tl.arange(0, ROWS)
    limit = N
    weights = W
    if HAS_GATES:  # noqa: SIM102 (this is decided when compiled, the next line at run time)
        if group >= tl.cdiv(N, ROWS):
            row -= tl.cdiv(N, ROWS) * ROWS
            limit = N_GATES
            weights = W_gates
    inside = (row < limit)[:, None] & ((k < K) | (K % BLOCK == 0))[None, :]
    at = weights + row.to(tl.int64)[:, None] * K + k[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_x(x, norm, start, K: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr):
    """BLOCK elements of x from `start`, times the weight of RMSNorm but not its factor."""
    k = start + tl.arange(0, BLOCK)
    inside = (k < K) | (K % BLOCK == 0)
    x_k = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        x_k *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
    return x_k


@triton.jit
def _rms_factor(x, eps, K: tl.constexpr, BLOCK: tl.constexpr):
    """1 / √(mean(x²) + ε)."""
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x_k = tl.load(x + k, mask=(k < K) | (K % BLOCK == 0), other=0.0).to(tl.float32)
        squares += x_k * x_k
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)
