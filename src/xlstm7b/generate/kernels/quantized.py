"""Rows times a quantised weight matrix, on tensor cores: Yᵀ = W Xᵀ for X [B, K], W [N, K].

The time is that of reading the codes, as long as turning them into bfloat16 takes fewer
instructions than the memory leaves time for. `quantize/kernels.py` does that, in the registers in
which the tensor cores want the numbers.

Sums are float32, and so are the products with the scales: one for each row (int8, fp8), or for each
row and group (int4). The work after the product is that of `few_rows.py`.

For more than 64 rows an fp8 matrix is multiplied as it is, and the rows are rounded to fp8 too.
Other matrices are dequantised first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xlstm7b.generate.kernels.few_rows import MAX_ROWS, product, store_gates, store_rows
from xlstm7b.generate.kernels.overlap import overlap_options, prefetch_rows
from xlstm7b.quantize.gpu import words_in_block
from xlstm7b.quantize.kernels import decode_bytes, decode_int4, has_asm
from xlstm7b.quantize.weight import QuantizedWeight


@dataclass(frozen=True, order=True)
class CodesTile:
    """Launch parameters of `multiply_codes`."""

    rows: int  # of W in one tile
    warps: int
    stages: int
    prefetch: int = 0  # bytes of each row to load into L2 before the previous launch has ended


def multiply_codes(
    x: Tensor,
    W: QuantizedWeight,
    *,
    swiglu: bool = False,
    residual: Tensor | None = None,
    gates: tuple[Tensor, Tensor] | None = None,
    live: Tensor | None = None,
    cap: float | None = None,
    out_dtype: torch.dtype | None = None,
    tile: CodesTile | None = None,
) -> tuple[Tensor, Tensor]:
    """x Wᵀ [B, N] for x [B, K], B ≤ 64, and the gates [B, 2 NH].

    The options are those of `few_rows.multiply_rows`.
    """
    batch, columns = x.shape
    assert batch <= MAX_ROWS
    assert W.layout == "gpu"
    rows = len(W) // 2 if swiglu else len(W)
    tile = tile or tile_for(batch, rows)
    out = residual
    if out is None:
        out = torch.empty(batch, rows, dtype=out_dtype or x.dtype, device=x.device)
    programs, gate_rows = triton.cdiv(rows, tile.rows), 0
    W_gates, bias, out_gates = x, x, x
    if gates is not None:
        W_gates, bias = gates
        gate_rows = len(W_gates)
        programs += triton.cdiv(gate_rows, tile.rows)
        out_gates = torch.empty(batch, gate_rows, dtype=torch.float32, device=x.device)
    codes_kernel[(programs,)](
        x, W.data, W.scale, W_gates, bias, x if live is None else live, out, out,
        out_gates, cap or 1.0, batch, rows, gate_rows,
        K=columns, CODE=W.scheme.name, HAS_GATES=gates is not None, HAS_LIVE=live is not None,
        HAS_RESIDUAL=residual is not None, HAS_CAP=cap is not None, SWIGLU=swiglu,
        BATCH=max(8, triton.next_power_of_2(batch)),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ROWS=tile.rows, WORDS=words_in_block(W.scheme), WIDTH=W.data.shape[1],
        PREFETCH=min(tile.prefetch, 2 * W.data.shape[1]), THREADS=32 * tile.warps, ASM=has_asm(x),
        num_warps=tile.warps, num_stages=tile.stages, **overlap_options(x.device),
    )  # fmt: skip
    return out, out_gates


def tile_for(batch: int, rows: int) -> CodesTile:
    if batch > 16:
        return CodesTile(64, 4, 3)
    return CodesTile(16, 1, 4, 512) if rows < 8192 else CodesTile(32, 1, 4, 512)


def multiply_fp8(x: Tensor, W: QuantizedWeight) -> Tensor:
    """x Wᵀ [R, N] for a W in fp8, by the tensor cores' fp8 products. x is rounded to fp8."""
    codes, scale = round_rows(x, W)
    matrix = W.data.view(torch.float8_e4m3fn)
    product: Tensor = torch._scaled_mm(
        codes, matrix.mT, scale_a=scale, scale_b=W.scale, out_dtype=x.dtype
    )
    return product


def has_fp8_product(x: Tensor, W: QuantizedWeight) -> bool:
    """Whether `multiply_fp8` takes these."""
    return (
        W.scheme.name == "fp8"
        and len(W) % 16 == 0
        and x.dtype == torch.bfloat16
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
    )


def round_rows(x: Tensor, W: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """x [R, K] as fp8 in the order of W's columns, filled up with zeros, and scales [R, 1]."""
    rows, columns = x.shape
    width = 2 * W.data.shape[1]
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    round_rows_kernel[(rows,)](
        x, codes, scale, K=columns, WIDTH=width, WORDS=words_in_block(W.scheme),
        BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return codes, scale


@triton.jit
def codes_kernel(
    x, W, scale, W_gates, bias, live, residual, out, out_gates,
    cap, B, N, N_GATES,
    K: tl.constexpr, CODE: tl.constexpr, HAS_GATES: tl.constexpr, HAS_LIVE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_CAP: tl.constexpr, SWIGLU: tl.constexpr,
    BATCH: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    WIDTH: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr, ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [B, N] = x Wᵀ and out_gates [B, N_GATES] = masked soft-cap(x W_gatesᵀ + bias).

    One program per ROWS rows of W; the programs after those compute W_gates.
    """
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    if OVERLAP:
        if PREFETCH > 0:
            thread = tl.arange(0, THREADS)
            mine = program * ROWS + thread
            wanted = (thread < ROWS) & (mine < N)
            prefetch_rows(W, mine.to(tl.int64) * WIDTH, wanted, PREFETCH)
        gdc_wait()
        gdc_launch_dependents()
    W_programs = tl.cdiv(N, ROWS)
    is_gate = False
    if HAS_GATES:
        is_gate = program >= W_programs
    if is_gate:
        row -= W_programs * ROWS
        y = product(x, W_gates, row, B, N_GATES, K, 64, ROWS, BATCH, PRECISION)
        store_gates(y, row, bias, live, out_gates, cap, B, N_GATES, HAS_CAP, HAS_LIVE, BATCH)
    else:
        total = N
        if SWIGLU:
            total = 2 * N
        y = _product(
            x, W, scale, row, 0, B, N, total,
            K, CODE, BATCH, PRECISION, ROWS, WORDS, WIDTH, ASM,
        )  # fmt: skip
        if SWIGLU:
            up = _product(
                x, W, scale, row, N, B, N, total,
                K, CODE, BATCH, PRECISION, ROWS, WORDS, WIDTH, ASM,
            )  # fmt: skip
            y = y * tl.sigmoid(y) * up
        store_rows(y, row, residual, out, cap, B, N, HAS_RESIDUAL, HAS_CAP and not HAS_GATES, BATCH)


@triton.jit
def _load_x(x, k, b, B, K: tl.constexpr, EVEN: tl.constexpr):
    """x[b, k] as [len(k), BATCH]."""
    inside = (b < B)[None, :] & ((k < K) | EVEN)[:, None]
    return tl.load(x + b[None, :] * K + k[:, None], mask=inside, other=0.0)


@triton.jit
def _product(
    x, W, scale, row, first, B, N, total,
    K: tl.constexpr, CODE: tl.constexpr, BATCH: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """(scale · W)[first + row] Xᵀ [ROWS, BATCH]. W has `total` rows, N of them from `first` on."""
    b, c = tl.arange(0, BATCH), tl.arange(0, WORDS)
    in_row = row < N
    blocks: tl.constexpr = WIDTH // WORDS
    even: tl.constexpr = WIDTH * (4 if CODE == "int4" else 2) == K
    words = W + (first + row).to(tl.int64)[:, None] * WIDTH + c[None, :]
    scales = scale + first + row
    acc = tl.zeros([ROWS, BATCH], tl.float32)
    s0 = tl.load(scales, mask=in_row, other=0.0)
    if CODE == "int4":
        s1 = tl.load(scales + total, mask=in_row, other=0.0)
        s2 = tl.load(scales + 2 * total, mask=in_row, other=0.0)
        s3 = tl.load(scales + 3 * total, mask=in_row, other=0.0)
        for block in range(blocks):
            w = tl.load(words + block * WORDS, mask=in_row[:, None], other=0)
            w0, w1, w2, w3 = decode_int4(w, x.dtype.element_ty, ASM)
            k = block * 4 * WORDS + c
            x0 = _load_x(x, k, b, B, K, even)
            x1 = _load_x(x, k + WORDS, b, B, K, even)
            x2 = _load_x(x, k + 2 * WORDS, b, B, K, even)
            x3 = _load_x(x, k + 3 * WORDS, b, B, K, even)
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
        return acc
    for block in range(blocks):
        w = tl.load(words + block * WORDS, mask=in_row[:, None], other=0)
        w0, w1 = decode_bytes(w, CODE, x.dtype.element_ty, ASM)
        k = block * 2 * WORDS + c
        acc = tl.dot(w0, _load_x(x, k, b, B, K, even), acc, input_precision=PRECISION)
        acc = tl.dot(w1, _load_x(x, k + WORDS, b, B, K, even), acc, input_precision=PRECISION)
    return acc * s0.to(tl.float32)[:, None]


@triton.jit
def round_rows_kernel(
    x, out, scale, K: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: x / scale in fp8, for the scale that makes its largest number 448."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    block, place = at // (2 * WORDS), at % (2 * WORDS)
    k = block * 2 * WORDS + place % 2 * WORDS + place // 2  # the column at each byte of W
    x_k = tl.load(x + row * K + k, mask=(k < K) & (at < WIDTH), other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x_k), 0), 1e-30)
    tl.store(scale + row, largest / 448)
    tl.store(out + row * WIDTH + at, (x_k * (448 / largest)).to(tl.float8e4nv), mask=at < WIDTH)
