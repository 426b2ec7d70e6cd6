"""Rows times a quantised weight matrix, on tensor cores: Yᵀ = W Xᵀ for X [B, K], W [N, K].

The time is that of reading the codes, as long as turning them into bfloat16 takes fewer
instructions than the memory leaves time for. So codes are never converted one by one. They are
loaded as 16-bit words (`quantize/gpu.py` has their order) and taken apart by bit operations on two
words at a time. These give exact bfloat16 numbers, in the registers in which the tensor cores want
them:

    int4   four codes in a word. 0x4300 | code is 128 + code as a bfloat16; 136 is subtracted.
    int8   two codes in a word. 0x4B000000 | code is 2²³ + code as a float32; 2²³ + 128 is
           subtracted.
    fp8    two codes in a word. The bits of an e4m3 number, shifted, are a bfloat16 of 2⁻¹²⁰
           times it.

Sums are float32, and so are the products with the scales: one for each row (int8, fp8), or for each
row and group (int4). The work after the product is that of `few_rows.py`.

For more than 64 rows the matrix is dequantised, and cuBLAS multiplies.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xlstm7b.generate.kernels.overlap import overlap_options, prefetch_rows
from xlstm7b.generate.kernels.pointwise import mask_gates
from xlstm7b.model.head_kernels import soft_cap
from xlstm7b.quantize.gpu import words_in_block
from xlstm7b.quantize.weight import QuantizedWeight

MAX_ROWS = 64


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
        PREFETCH=min(tile.prefetch, 2 * W.data.shape[1]), THREADS=32 * tile.warps, ASM=_has_asm(x),
        num_warps=tile.warps, num_stages=tile.stages, **overlap_options(x.device),
    )  # fmt: skip
    return out, out_gates


def tile_for(batch: int, rows: int) -> CodesTile:
    if batch > 16:
        return CodesTile(64, 4, 3)
    return CodesTile(16, 1, 4, 512) if rows < 8192 else CodesTile(32, 1, 4, 512)


def _has_asm(x: Tensor) -> bool:
    """Whether codes are decoded by machine instructions. Without, it works for every dtype."""
    return x.is_cuda and x.dtype == torch.bfloat16


def dequantize(W: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K]."""
    rows, columns = W.shape
    out = torch.empty(rows, columns, dtype=dtype, device=W.device)
    words = words_in_block(W.scheme)
    grid = triton.cdiv(rows, 16), W.data.shape[1] // words
    dequantize_kernel[grid](
        W.data, W.scale, out, rows,
        K=columns, CODE=W.scheme.name, ROWS=16, WORDS=words, WIDTH=W.data.shape[1],
        ASM=_has_asm(out), num_warps=4,
    )  # fmt: skip
    return out


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
    b = tl.arange(0, BATCH)
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
        y = _float_product(x, W_gates, row, B, N_GATES, K, 64, ROWS, BATCH, PRECISION)
        y += tl.load(bias + row, mask=row < N_GATES, other=0.0).to(tl.float32)[:, None]
        if HAS_CAP:
            y = soft_cap(y, cap)
        if HAS_LIVE:
            is_live = tl.load(live + b, mask=b < B, other=0) != 0
            y = mask_gates(y, is_live[None, :], row[:, None], N_GATES)
        inside = (row < N_GATES)[:, None] & (b < B)[None, :]
        tl.store(out_gates + b[None, :] * N_GATES + row[:, None], y, mask=inside)
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
        inside = (row < N)[:, None] & (b < B)[None, :]
        at = b[None, :] * N + row[:, None]
        if HAS_RESIDUAL:
            y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_CAP and not HAS_GATES:
            y = soft_cap(y, cap)
        tl.store(out + at, y, mask=inside)


@triton.jit
def _float_product(
    x, W, row, B, N, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """W[row] Xᵀ [ROWS, BATCH] for a W that is not quantised."""
    b = tl.arange(0, BATCH)
    acc = tl.zeros([ROWS, BATCH], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        in_k = (k < K) | (K % BLOCK == 0)
        w = tl.load(
            W + row[:, None] * K + k[None, :], mask=(row < N)[:, None] & in_k[None, :], other=0.0
        )
        acc = tl.dot(w, _load_x(x, k, b, B, K, K % BLOCK == 0), acc, input_precision=PRECISION)
    return acc


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
            w0, w1, w2, w3 = _decode_int4(w, x.dtype.element_ty, ASM)
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
        w0, w1 = _decode_bytes(w, CODE, x.dtype.element_ty, ASM)
        k = block * 2 * WORDS + c
        acc = tl.dot(w0, _load_x(x, k, b, B, K, even), acc, input_precision=PRECISION)
        acc = tl.dot(w1, _load_x(x, k + WORDS, b, B, K, even), acc, input_precision=PRECISION)
    return acc * s0.to(tl.float32)[:, None]


@triton.jit
def dequantize_kernel(
    W, scale, out, N,
    K: tl.constexpr, CODE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    WIDTH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One block of ROWS rows of a matrix [N, K]."""
    block, c = tl.program_id(1), tl.arange(0, WORDS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_row, wide_row = row < N, row.to(tl.int64)[:, None]
    at = wide_row * WIDTH + block * WORDS + c[None, :]
    w = tl.load(W + at, mask=in_row[:, None], other=0)
    targets, scales = out + wide_row * K, scale + row
    if CODE == "int4":
        w0, w1, w2, w3 = _decode_int4(w, out.dtype.element_ty, ASM)
        k, scales = block * 4 * WORDS + c, scales + block * 4 * N
        _store_group(targets, scales, w0, k, in_row, K)
        _store_group(targets, scales + N, w1, k + WORDS, in_row, K)
        _store_group(targets, scales + 2 * N, w2, k + 2 * WORDS, in_row, K)
        _store_group(targets, scales + 3 * N, w3, k + 3 * WORDS, in_row, K)
    else:
        w0, w1 = _decode_bytes(w, CODE, out.dtype.element_ty, ASM)
        k = block * 2 * WORDS + c
        _store_group(targets, scales, w0, k, in_row, K)
        _store_group(targets, scales, w1, k + WORDS, in_row, K)


@triton.jit
def _store_group(targets, scales, w, k, in_row, K: tl.constexpr):
    s = tl.load(scales, mask=in_row, other=0.0).to(tl.float32)
    inside = in_row[:, None] & (k < K)[None, :]
    tl.store(targets + k[None, :], w.to(tl.float32) * s[:, None], mask=inside)


@triton.jit
def _decode_int4(w, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The four codes of each 16-bit word, less 8."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, m, o, s;
            mov.b32 m, 0x000F000F; mov.b32 o, 0x43004300; mov.b32 s, 0x43084308;
            shr.u32 a, $4, 4; shr.u32 b, $4, 8; shr.u32 c, $4, 12;
            lop3.b32 $0, $4, m, o, 0xEA; lop3.b32 $1, a, m, o, 0xEA;
            lop3.b32 $2, b, m, o, 0xEA; lop3.b32 $3, c, m, o, 0xEA;
            sub.rn.bf16x2 $0, $0, s; sub.rn.bf16x2 $1, $1, s;
            sub.rn.bf16x2 $2, $2, s; sub.rn.bf16x2 $3, $3, s; }""",
            "=r,=r,=r,=r,r", [w],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    u = w.to(tl.int32)
    return (
        ((u & 15) - 8).to(DTYPE),
        (((u >> 4) & 15) - 8).to(DTYPE),
        (((u >> 8) & 15) - 8).to(DTYPE),
        (((u >> 12) & 15) - 8).to(DTYPE),
    )


@triton.jit
def _decode_bytes(w, CODE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The numbers in the low and in the high byte of each 16-bit word."""
    if ASM:
        if CODE == "int8":
            return tl.inline_asm_elementwise(
                """{ .reg .b32 t, m, p, q; .reg .f32 f, g, o;
                xor.b32 t, $2, 0x80808080; mov.b32 m, 0x4B000000; mov.f32 o, 0f4B000080;
                prmt.b32 p, t, m, 0x7650; prmt.b32 q, t, m, 0x7652;
                mov.b32 f, p; mov.b32 g, q; sub.rn.f32 f, f, o; sub.rn.f32 g, g, o;
                cvt.rn.bf16x2.f32 $0, g, f;
                prmt.b32 p, t, m, 0x7651; prmt.b32 q, t, m, 0x7653;
                mov.b32 f, p; mov.b32 g, q; sub.rn.f32 f, f, o; sub.rn.f32 g, g, o;
                cvt.rn.bf16x2.f32 $1, g, f; }""",
                "=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, h;
            mov.b32 h, 0x7B807B80;
            shl.b32 a, $2, 4; shl.b32 b, $2, 8;
            and.b32 a, a, 0x07F007F0; lop3.b32 a, b, 0x80008000, a, 0xEA;
            mul.rn.bf16x2 $0, a, h;
            shr.u32 a, $2, 4; and.b32 a, a, 0x07F007F0; lop3.b32 a, $2, 0x80008000, a, 0xEA;
            mul.rn.bf16x2 $1, a, h; }""",
            "=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    u = w.to(tl.int32)
    if CODE == "int8":
        return ((u << 24) >> 24).to(DTYPE), (u >> 8).to(DTYPE)
    return _e4m3(u, DTYPE), _e4m3(u >> 8, DTYPE)


@triton.jit
def _e4m3(code, DTYPE: tl.constexpr):
    """The e4m3 numbers in the low bytes: shifted, their bits are a float32 of 2⁻¹²⁰ times them."""
    bits = ((code & 128) << 24) | ((code & 127) << 20)
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)
