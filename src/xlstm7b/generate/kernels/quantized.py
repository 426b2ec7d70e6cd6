"""Rows times a quantised weight matrix, on tensor cores: Yᵀ = W Xᵀ for X [B, K], W [N, K].

The time is that of reading the codes, as long as turning them into bfloat16 takes fewer
instructions than the memory leaves time for. `quantize/kernels.py` does that, in the registers in
which the tensor cores want the numbers.

Sums are float32, and so are the products with the scales: one for each row (int8, fp8), or for each
row and group (int4). The work after the product is that of `few_rows.py`. For up to 16 rows RMSNorm
is part of the kernel too: W (x · norm) times a factor, whose sum of squares is a second product, of
x with itself.

For more than 64 rows, matrices are dequantised first, but those in fp8: see `fp8.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xlstm7b.generate.kernels.few_rows import (
    MAX_ROWS,
    load_x,
    product,
    rms_factors,
    store_gates,
    store_rows,
)
from xlstm7b.generate.kernels.overlap import overlap_options, prefetch_rows
from xlstm7b.generate.kernels.pointwise import rms_norm
from xlstm7b.quantize.gpu import words_in_block
from xlstm7b.quantize.kernels import decode_bytes, decode_int4, has_asm
from xlstm7b.quantize.weight import QuantizedWeight


@dataclass(frozen=True, order=True)
class CodesTile:
    """Launch parameters of `multiply_codes`."""

    rows: int  # of W in one tile; for SwiGLU half of them are of W_up
    warps: int
    stages: int
    prefetch: int = 0  # bytes of each row to load into L2 before the previous launch has ended


def multiply_codes(
    x: Tensor,
    W: QuantizedWeight,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
    gates: tuple[Tensor, Tensor] | None = None,
    live: Tensor | None = None,
    cap: float | None = None,
    out_dtype: torch.dtype | None = None,
    tile: CodesTile | None = None,
) -> tuple[Tensor, Tensor]:
    """x Wᵀ [B, N] for x [B, K], B ≤ 64, and the gates [B, 2 NH].

    The options are those of `one_row.multiply_row`, with B rows.
    """
    batch, columns = x.shape
    assert batch <= MAX_ROWS
    assert W.layout == "gpu"
    assert x.is_contiguous()
    if norm is not None and not _takes_norm(x):
        x, norm = rms_norm(x, norm, eps), None
    rows = len(W) // 2 if swiglu else len(W)
    tile = tile or tile_for(batch, rows)
    out = residual
    if out is None:
        out = torch.empty(batch, rows, dtype=out_dtype or x.dtype, device=x.device)
    programs, gate_rows = triton.cdiv(rows, tile.rows // 2 if swiglu else tile.rows), 0
    W_gates, bias, out_gates = x, x, x
    if gates is not None:
        W_gates, bias = gates
        gate_rows = len(W_gates)
        programs += triton.cdiv(gate_rows, tile.rows)
        out_gates = torch.empty(batch, gate_rows, dtype=torch.float32, device=x.device)
    codes_kernel[(programs,)](
        x, x if norm is None else norm, W.data, W.scale, W_gates, bias,
        x if live is None else live, out, out, out_gates, eps, cap or 1.0, batch, rows, gate_rows,
        K=columns, CODE=W.scheme.name, HAS_NORM=norm is not None,
        HAS_GATES=gates is not None, HAS_LIVE=live is not None,
        HAS_RESIDUAL=residual is not None, HAS_CAP=cap is not None, SWIGLU=swiglu,
        BATCH=max(8, triton.next_power_of_2(batch)),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ROWS=tile.rows, WORDS=words_in_block(W.scheme), WIDTH=W.data.shape[1],
        PREFETCH=min(tile.prefetch, 2 * W.data.shape[1]), THREADS=32 * tile.warps, ASM=has_asm(x),
        num_warps=tile.warps, num_stages=tile.stages, **overlap_options(x.device),
    )  # fmt: skip
    return out, out_gates


def _takes_norm(x: Tensor) -> bool:
    """Whether RMSNorm of x is part of the product's launch, or a launch of its own.

    For more rows the tensor cores take x from shared memory, where it would have to be written
    again. In float16, x that is not divided by its size yet could overflow.
    """
    return len(x) <= 16 and x.dtype != torch.float16


def tile_for(batch: int, rows: int) -> CodesTile:
    """A tile by the kernel's instructions and registers: `bench tune --quantize` measures them."""
    if batch > 16:
        return CodesTile(64, 4, 3)
    return CodesTile(16, 1, 4, 512) if rows < 8192 else CodesTile(32, 1, 4, 512)


@triton.jit
def codes_kernel(
    x, norm, W, scale, W_gates, bias, live, residual, out, out_gates,
    eps, cap, B, N, N_GATES,
    K: tl.constexpr, CODE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_GATES: tl.constexpr,
    HAS_LIVE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_CAP: tl.constexpr,
    SWIGLU: tl.constexpr, BATCH: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, WIDTH: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [B, N] = x Wᵀ and out_gates [B, N_GATES] = masked soft-cap(x W_gatesᵀ + bias).

    One program per ROWS rows of W; the programs after those compute W_gates. With SWIGLU half of
    the ROWS rows are of W_gate and half of W_up.
    """
    program = tl.program_id(0)
    OUT: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    row = program * OUT + tl.arange(0, OUT)
    if OVERLAP:
        if PREFETCH > 0:
            thread = tl.arange(0, THREADS)
            mine, wanted = _weight_rows(program, thread, N, OUT)
            prefetch_rows(W, mine.to(tl.int64) * WIDTH, wanted & (thread < ROWS), PREFETCH)
        gdc_wait()
        gdc_launch_dependents()
    W_programs = tl.cdiv(N, OUT)
    is_gate = False
    if HAS_GATES:
        is_gate = program >= W_programs
    if is_gate:
        row -= W_programs * OUT
        y = product(x, norm, W_gates, eps, row, B, N_GATES, K, HAS_NORM, 64, OUT, BATCH, PRECISION)
        store_gates(y, row, bias, live, out_gates, cap, B, N_GATES, HAS_CAP, HAS_LIVE, BATCH)
    else:
        w_row, in_row = _weight_rows(program, tl.arange(0, ROWS), N, OUT)
        y = _product(
            x, norm, W, scale, eps, w_row, in_row, B, N * (ROWS // OUT),
            K, CODE, HAS_NORM, BATCH, PRECISION, ROWS, WORDS, WIDTH, ASM,
        )  # fmt: skip
        if SWIGLU:
            y, up = tl.split(tl.permute(tl.reshape(y, [2, OUT, BATCH]), 1, 2, 0))
            y = y * tl.sigmoid(y) * up
        store_rows(y, row, residual, out, cap, B, N, HAS_RESIDUAL, HAS_CAP and not HAS_GATES, BATCH)


@triton.jit
def _weight_rows(program, r, N, OUT: tl.constexpr):
    """The row of W that is row r of a program's tile, and whether there is one."""
    row = program * OUT + r % OUT
    return row + r // OUT * N, row < N


@triton.jit
def _product(
    x, norm, W, scale, eps, row, in_row, B, total,
    K: tl.constexpr, CODE: tl.constexpr, HAS_NORM: tl.constexpr, BATCH: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """(scale · W)[row] Xᵀ [ROWS, BATCH] for a W of `total` rows; 0 where `in_row` is false."""
    b, c = tl.arange(0, BATCH), tl.arange(0, WORDS)
    blocks: tl.constexpr = WIDTH // WORDS
    even: tl.constexpr = WIDTH * (4 if CODE == "int4" else 2) == K
    words = W + row.to(tl.int64)[:, None] * WIDTH + c[None, :]
    scales = scale + row
    acc = tl.zeros([ROWS, BATCH], tl.float32)
    squares = tl.zeros([BATCH, BATCH], tl.float32)
    s0 = tl.load(scales, mask=in_row, other=0.0)
    if CODE == "int4":
        s1 = tl.load(scales + total, mask=in_row, other=0.0)
        s2 = tl.load(scales + 2 * total, mask=in_row, other=0.0)
        s3 = tl.load(scales + 3 * total, mask=in_row, other=0.0)
        for block in range(blocks):
            w = tl.load(words + block * WORDS, mask=in_row[:, None], other=0)
            w0, w1, w2, w3 = decode_int4(w, x.dtype.element_ty, ASM)
            k = block * 4 * WORDS + c
            x0, squares = load_x(x, norm, squares, k, b, B, K, even, HAS_NORM, PRECISION)
            k += WORDS
            x1, squares = load_x(x, norm, squares, k, b, B, K, even, HAS_NORM, PRECISION)
            k += WORDS
            x2, squares = load_x(x, norm, squares, k, b, B, K, even, HAS_NORM, PRECISION)
            k += WORDS
            x3, squares = load_x(x, norm, squares, k, b, B, K, even, HAS_NORM, PRECISION)
            # The next block's scales are loaded now, so that nothing waits for them.
            following = scales + (block + 1) * 4 * total
            more = in_row & (block + 1 < blocks)
            t0 = tl.load(following, mask=more, other=0.0)
            t1 = tl.load(following + total, mask=more, other=0.0)
            t2 = tl.load(following + 2 * total, mask=more, other=0.0)
            t3 = tl.load(following + 3 * total, mask=more, other=0.0)
            acc += tl.dot(w0, x0, input_precision=PRECISION) * s0.to(tl.float32)[:, None]
            acc += tl.dot(w1, x1, input_precision=PRECISION) * s1.to(tl.float32)[:, None]
            acc += tl.dot(w2, x2, input_precision=PRECISION) * s2.to(tl.float32)[:, None]
            acc += tl.dot(w3, x3, input_precision=PRECISION) * s3.to(tl.float32)[:, None]
            s0, s1, s2, s3 = t0, t1, t2, t3
    else:
        for block in range(blocks):
            w = tl.load(words + block * WORDS, mask=in_row[:, None], other=0)
            w0, w1 = decode_bytes(w, CODE, x.dtype.element_ty, ASM)
            k = block * 2 * WORDS + c
            x0, squares = load_x(x, norm, squares, k, b, B, K, even, HAS_NORM, PRECISION)
            k += WORDS
            x1, squares = load_x(x, norm, squares, k, b, B, K, even, HAS_NORM, PRECISION)
            acc = tl.dot(w0, x0, acc, input_precision=PRECISION)
            acc = tl.dot(w1, x1, acc, input_precision=PRECISION)
        acc *= s0.to(tl.float32)[:, None]
    if HAS_NORM:
        acc *= rms_factors(squares, eps, K, BATCH)
    return acc
