"""Many rows times a matrix in fp8, by the tensor cores' fp8 products: for prompts.

The rows are rounded to fp8 too, with one scale for each. The kernels that make them (RMSNorm,
SwiGLU, the headwise norm) round them while they are in registers. So a row is read and written
once, and its largest number is known before the first is stored: one program has the whole row.
"""

from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from xlstm7b.generate.kernels import MAX_ROWS
from xlstm7b.generate.kernels.pointwise import head_norm, normalise, normalise_head
from xlstm7b.quantize.gpu import Fp8Rows, words_in_block
from xlstm7b.quantize.weight import QuantizedWeight


def has_fp8_product(W: Tensor | QuantizedWeight | None, x: Tensor) -> TypeGuard[QuantizedWeight]:
    """Whether the rows x are multiplied with W in fp8."""
    return (
        isinstance(W, QuantizedWeight)
        and W.scheme.name == "fp8"
        and len(W) % 16 == 0
        and len(x) > MAX_ROWS
        and x.dtype == torch.bfloat16
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
    )


def multiply_fp8(x: Fp8Rows, W: QuantizedWeight) -> Tensor:
    """x Wᵀ [R, N] in bfloat16."""
    matrix = W.data.view(torch.float8_e4m3fn)
    product: Tensor = torch._scaled_mm(
        x.codes, matrix.mT, scale_a=x.scale, scale_b=W.scale, out_dtype=torch.bfloat16
    )
    return product


def round_rows(x: Tensor, W: QuantizedWeight) -> Fp8Rows:
    """x [R, K]."""
    out = Fp8Rows.empty(len(x), W)
    round_rows_kernel[(len(x),)](x, *out, K=x.shape[1], **_options(W))
    return out


@triton.jit
def round_rows_kernel(
    x, codes, scale, K: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """One row per program."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x_k = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    _store(x_k, codes, scale, row, WIDTH, WORDS, BLOCK)


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, W: QuantizedWeight, normed: Tensor | None = None
) -> Fp8Rows:
    """`pointwise.rms_norm` of contiguous x [R, K]. `normed` [R, K] gets it too, in x's dtype."""
    out = Fp8Rows.empty(len(x), W)
    rms_norm_fp8_kernel[(len(x),)](
        x, weight, x if normed is None else normed, *out, eps,
        D=x.shape[1], HAS_NORMED=normed is not None, **_options(W),
    )  # fmt: skip
    return out


@triton.jit
def rms_norm_fp8_kernel(
    x, weight, normed, codes, scale, eps, D: tl.constexpr, HAS_NORMED: tl.constexpr,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    y = normalise(tl.load(x + row * D + d, mask=d < D, other=0.0), w, eps, D)
    if HAS_NORMED:
        tl.store(normed + row * D + d, y, mask=d < D)
    _store(y, codes, scale, row, WIDTH, WORDS, BLOCK)


def silu_and_multiply_fp8(x: Tensor, W: QuantizedWeight) -> Fp8Rows:
    """`pointwise.silu_and_multiply` of x [R, 2 K]."""
    out = Fp8Rows.empty(len(x), W)
    silu_and_multiply_fp8_kernel[(len(x),)](x, *out, K=x.shape[1] // 2, **_options(W))
    return out


@triton.jit
def silu_and_multiply_fp8_kernel(
    x, codes, scale, K: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """One row per program."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * K + k, mask=k < K, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * K + K + k, mask=k < K, other=0.0).to(tl.float32)
    _store(gate * tl.sigmoid(gate) * up, codes, scale, row, WIDTH, WORDS, BLOCK)


def head_norm_fp8(
    h: Tensor, weight: Tensor, eps: float, gate: Tensor, W: QuantizedWeight
) -> Fp8Rows:
    """`pointwise.head_norm`."""
    rows, heads, width = h.shape
    padded_heads = triton.next_power_of_2(heads)
    if width != triton.next_power_of_2(width) or padded_heads * width < 2 * words_in_block(
        W.scheme
    ):
        return round_rows(head_norm(h, weight, eps, gate), W)  # a row is no tile of whole heads
    out = Fp8Rows.empty(rows, W)
    head_norm_fp8_kernel[(rows,)](
        h, weight, gate, *out, eps, gate.stride(0), heads, D=width,
        **_options(W) | {"BLOCK": padded_heads * width},
    )  # fmt: skip
    return out


@triton.jit
def head_norm_fp8_kernel(
    h, weight, gate, codes, scale, eps, gate_stride, NH,
    D: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program: all heads of it."""
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK // D)
    at = head[:, None] * D + tl.arange(0, D)[None, :]
    inside = at < NH * D
    x = tl.load(h + row * NH * D + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    y = normalise_head(x, w, inside, eps, D, 1)
    y *= tl.sigmoid(tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32))
    _store(tl.reshape(y, [BLOCK]), codes, scale, row, WIDTH, WORDS, BLOCK)


def _options(W: QuantizedWeight) -> dict[str, int]:
    """Launch options of a kernel that has a whole row in one program."""
    width = 2 * W.data.shape[1]
    block = triton.next_power_of_2(width)
    warps = min(16, max(4, block // 512))
    return {"WIDTH": width, "WORDS": words_in_block(W.scheme), "BLOCK": block, "num_warps": warps}


@triton.jit
def _store(y, codes, scale, row, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """y / scale in fp8, for the scale that makes the largest of y [BLOCK] 448.

    In each block of 2 · WORDS columns, those of the two halves take turns, as in `quantize/gpu.py`.
    """
    largest = tl.maximum(tl.max(tl.abs(y), 0), 1e-30)
    tl.store(scale + row, largest / 448)
    rounded = (y * (448 / largest)).to(tl.float8e4nv)
    halves = tl.reshape(rounded, [BLOCK // (2 * WORDS), 2, WORDS])
    at = tl.arange(0, BLOCK)
    in_order = tl.reshape(tl.permute(halves, 0, 2, 1), [BLOCK])
    tl.store(codes + row * WIDTH + at, in_order, mask=at < WIDTH)
