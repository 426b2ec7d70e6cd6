"""Triton kernels that take quantised weights apart, in the order of `gpu.py`.

Codes are never converted one by one. They are loaded as 16-bit words and taken apart by bit
operations on two words at a time, which give exact bfloat16 numbers:

    int4   four codes in a word. 0x4300 | code is 128 + code as a bfloat16; 136 is subtracted from
           it, or 136 times the sum of the inputs from the product.
    int8   two codes in a word. 0x4B000000 | code is 2²³ + code as a float32; 2²³ + 128 is
           subtracted.
    fp8    two codes in a word. The bits of an e4m3 number, shifted, are a bfloat16 of 2⁻¹²⁰
           times it.

Before Hopper, `fma` is the only arithmetic on pairs of bfloat16. x y − 0 is x y, also in the sign
of a zero, and Hopper has one instruction for both. x + (−1) y is x − y, but on Hopper it takes a
register more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from xlstm7b.quantize.gpu import words_in_block
from xlstm7b.quantize.weight import QuantizedWeight


def has_asm(x: Tensor) -> bool:
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
        ASM=has_asm(out), num_warps=4,
    )  # fmt: skip
    return out


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
        w0, w1, w2, w3 = decode_int4(w, out.dtype.element_ty, ASM)
        k, scales = block * 4 * WORDS + c, scales + block * 4 * N
        _store_group(targets, scales, centre_int4(w0, ASM), k, in_row, K)
        _store_group(targets, scales + N, centre_int4(w1, ASM), k + WORDS, in_row, K)
        _store_group(targets, scales + 2 * N, centre_int4(w2, ASM), k + 2 * WORDS, in_row, K)
        _store_group(targets, scales + 3 * N, centre_int4(w3, ASM), k + 3 * WORDS, in_row, K)
    else:
        w0, w1 = decode_bytes(w, CODE, out.dtype.element_ty, ASM)
        k = block * 2 * WORDS + c
        _store_group(targets, scales, w0, k, in_row, K)
        _store_group(targets, scales, w1, k + WORDS, in_row, K)


@triton.jit
def _store_group(targets, scales, w, k, in_row, K: tl.constexpr):
    s = tl.load(scales, mask=in_row, other=0.0).to(tl.float32)
    inside = in_row[:, None] & (k < K)[None, :]
    tl.store(targets + k[None, :], w.to(tl.float32) * s[:, None], mask=inside)


@triton.jit
def decode_int4(w, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The four codes of each 16-bit word; with ASM 128 more. See `centre_int4`."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, m, o;
            mov.b32 m, 0x000F000F; mov.b32 o, 0x43004300;
            shr.u32 a, $4, 4; shr.u32 b, $4, 8; shr.u32 c, $4, 12;
            lop3.b32 $0, $4, m, o, 0xEA; lop3.b32 $1, a, m, o, 0xEA;
            lop3.b32 $2, b, m, o, 0xEA; lop3.b32 $3, c, m, o, 0xEA; }""",
            "=r,=r,=r,=r,r", [w],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    u = w.to(tl.int32)
    return (
        (u & 15).to(DTYPE),
        ((u >> 4) & 15).to(DTYPE),
        ((u >> 8) & 15).to(DTYPE),
        ((u >> 12) & 15).to(DTYPE),
    )


@triton.jit
def centre_int4(w, ASM: tl.constexpr):
    """What `decode_int4` returns, less 8, or less 136 with ASM: the numbers."""
    if ASM:
        if cuda_capability_geq(9, 0):
            return tl.inline_asm_elementwise(
                "{ .reg .b32 z; mov.b32 z, 0x43084308; sub.rn.bf16x2 $0, $1, z; }",
                "=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            """{ .reg .b32 z, m; mov.b32 z, 0x43084308; mov.b32 m, 0xBF80BF80;
            fma.rn.bf16x2 $0, z, m, $1; }""",
            "=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return w - 8


@triton.jit
def decode_bytes(w, CODE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
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
            """{ .reg .b32 a, b, h, z;
            mov.b32 h, 0x7B807B80; mov.b32 z, 0x80008000;
            shl.b32 a, $2, 4; shl.b32 b, $2, 8;
            and.b32 a, a, 0x07F007F0; lop3.b32 a, b, 0x80008000, a, 0xEA;
            fma.rn.bf16x2 $0, a, h, z;
            shr.u32 a, $2, 4; and.b32 a, a, 0x07F007F0; lop3.b32 a, $2, 0x80008000, a, 0xEA;
            fma.rn.bf16x2 $1, a, h, z; }""",
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
