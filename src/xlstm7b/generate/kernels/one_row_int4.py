"""One row times an int4 weight matrix, on integer tensor cores: y = W x for x [K], W [N, K].

Turning codes into floats takes more instructions than the memory leaves time for, so they stay
integers. A byte w has two codes, each 8 more than its number. `w & 15` is the low one, and
`(w & 240) ^ 128` is 16 times the number of the high one, as signed bytes: one instruction for four
codes. The 8 that the low codes have too much is in the value that the sums start from.

x becomes integers too. In each group of columns it is rounded to 16 bits relative to the largest
magnitude, which changes it by 2⁻¹⁶ of that at most, and q = 256 d₁ + d₀ gives two signed bytes.
Sums over a group are exact. So the result is closer to float64 than a product in bfloat16 would be.
`digits_kernel` does this, with RMSNorm, and also computes the gates, whose few weights are not
quantised.

The tensor cores multiply rows of codes by 8 columns. They are the two digits of the four groups of
a block: column 2 j + d has digit d of group j, and zeros in the rows of the other groups. So one
matrix [rows, 8] has the sums of four groups, and a thread has both digits of a group side by side.

Each warp has another part of K (`Int4Tile.split`). The codes go from memory to the registers in
which the tensor cores want them, without shared memory: warps wait for each other only at the end.
For that, the elements of the tensors that are loaded have the order in which Triton gives them to
threads (`_shares`). With another order the results would be the same, but Triton would move the
codes between threads.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xlstm7b.generate.kernels.few_rows import store_gates
from xlstm7b.generate.kernels.overlap import overlap_options
from xlstm7b.model.head_kernels import soft_cap
from xlstm7b.quantize.gpu import words_in_block
from xlstm7b.quantize.kernels import has_asm
from xlstm7b.quantize.weight import QuantizedWeight

LARGEST: tl.constexpr = tl.constexpr(32512)  # magnitude of a q, so that 256 d₁ + d₀ has it


@dataclass(frozen=True, order=True)
class Int4Tile:
    """Launch parameters of `multiply_row_int4`."""

    rows: int  # of W in one tile, 16 or more; for SwiGLU half of them are of W_up
    split: int  # parts of K, one for each warp
    ahead: int = 1  # blocks that a warp loads at a time, first before the previous launch has ended
    registers: int | None = None  # the most that a thread may have; None: the compiler decides


def takes_row(x: Tensor, W: QuantizedWeight) -> bool:
    """Whether `multiply_row_int4` computes x Wᵀ. For a float32 x it would not be exact enough."""
    return len(x) == 1 and x.dtype != torch.float32 and W.scheme.name == "int4"


def multiply_row_int4(
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
    tile: Int4Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """x Wᵀ [1, N] for x [1, K], and the gates [1, 2 NH].

    The options are those of `one_row.multiply_row`.
    """
    columns, group = x.shape[1], words_in_block(W.scheme)
    assert takes_row(x, W)
    assert W.layout == "gpu"
    rows = len(W) // 2 if swiglu else len(W)
    tile = tile or tile_for(W)
    codes = W.data.view(torch.uint8)
    blocks = codes.shape[1] // (2 * group)
    digits = torch.empty(blocks, 8, group, dtype=torch.int16, device=x.device)
    starts = torch.empty(blocks, 8, dtype=torch.int32, device=x.device)
    factors = torch.empty(blocks, 4, dtype=torch.float32, device=x.device)
    W_gates, bias = (x, x) if gates is None else gates
    gate_rows = 0 if gates is None else len(W_gates)
    out_gates = torch.empty(1, gate_rows, dtype=torch.float32, device=x.device)
    digits_kernel[(gate_rows + blocks,)](
        x, x if norm is None else norm, W_gates, bias, x if live is None else live,
        digits, starts, factors, out_gates, eps, cap or 1.0, gate_rows,
        K=columns, GROUP=group, BLOCK=triton.next_power_of_2(columns),
        HAS_NORM=norm is not None, HAS_GATES=gates is not None, HAS_LIVE=live is not None,
        HAS_CAP=cap is not None, num_warps=4, **overlap_options(x.device),
    )  # fmt: skip
    out = residual
    if out is None:
        out = torch.empty(1, rows, dtype=out_dtype or x.dtype, device=x.device)
    tiles = triton.cdiv(rows, tile.rows // 2 if swiglu else tile.rows)
    row_int4_kernel[(tiles,)](
        codes, W.scale, digits.view(torch.int8), starts, factors, out, out, cap or 1.0, rows,
        WIDTH=codes.shape[1], BYTES=2 * group, HAS_RESIDUAL=residual is not None,
        HAS_CAP=cap is not None and gates is None, SWIGLU=swiglu, ROWS=tile.rows, SPLIT=tile.split,
        AHEAD=tile.ahead, ASM=has_asm(x),
        num_warps=tile.split, num_stages=1, maxnreg=tile.registers, **overlap_options(x.device),
    )  # fmt: skip
    return out, out_gates


def tile_for(W: QuantizedWeight) -> Int4Tile:
    """The fastest tiles of `bench tune --quantize int4` on an H200.

    In bfloat16 they compile without spilled registers. A block of 128 words takes as many as two of
    64.
    """
    words = words_in_block(W.scheme)
    if len(W) >= 8192:
        return Int4Tile(16, 4, 1, 80 if words < 128 else 128)
    # Few rows: more warps, and more loads at a time, keep the memory busy.
    return Int4Tile(16, 8, 2 if words < 128 and W.data.shape[1] > 8 * words else 1, 128)


@triton.jit
def digits_kernel(
    x, norm, W_gates, bias, live, digits, starts, factors, out_gates, eps, cap, N_GATES,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_GATES: tl.constexpr, HAS_LIVE: tl.constexpr, HAS_CAP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One gate, or the digits of RMSNorm(x) in one block, per program: first the gates.

    out_gates [1, N_GATES] = masked soft-cap(RMSNorm(x) W_gatesᵀ + bias). digits [blocks, 8, GROUP]
    are words of two bytes, as those of W: digit d of group j is 4 (j % 2) + 2 (j // 2) + d of 8,
    and the other byte of the word is 0. starts [blocks, 8] is what the sums of the columns start
    from, factors [blocks, 4] what the sums of the groups are multiplied by.
    """
    if OVERLAP:
        gdc_launch_dependents()  # `row_int4_kernel` only reads weights before it waits for this one
    is_gate = False
    if HAS_GATES:
        is_gate = tl.program_id(0) < N_GATES
    if is_gate:
        y = _gate(x, norm, W_gates + tl.program_id(0) * K, eps, K, BLOCK, HAS_NORM, OVERLAP)
        row, y = tl.program_id(0) + tl.arange(0, 1), y + tl.zeros([1, 1], tl.float32)
        store_gates(y, row, bias, live, out_gates, cap, 1, N_GATES, HAS_CAP, HAS_LIVE, 1)
    else:
        _store_digits(
            x, norm, digits, starts, factors, eps, tl.program_id(0) - N_GATES,
            K, GROUP, BLOCK, HAS_NORM, OVERLAP,
        )  # fmt: skip


@triton.jit
def _gate(
    x, norm, W, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """RMSNorm(x) · W, for W [K]."""
    k = tl.arange(0, BLOCK)
    w = tl.load(W + k, mask=k < K, other=0.0).to(tl.float32)
    if HAS_NORM:
        w *= tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    y = tl.sum(v * w, 0)
    if HAS_NORM:
        y *= _rms_factor(v, eps, K)
    return y


@triton.jit
def _store_digits(
    x, norm, digits, starts, factors, eps, block,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Each of the four warps has one group."""
    j, c = tl.arange(0, 4), tl.arange(0, GROUP)
    k = (block * 4 + j)[:, None] * GROUP + c[None, :]
    weight = tl.full(k.shape, 1.0, tl.float32)
    if HAS_NORM:
        weight = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32) * weight
    size = 1.0
    if HAS_NORM:
        all_k = tl.arange(0, BLOCK)
        wide = tl.load(x + all_k, mask=all_k < K, other=0.0).to(tl.float32)
        size = _rms_factor(wide, eps, K)
    largest = tl.max(tl.abs(v), 1)
    step = tl.where(largest > 0, largest, 1.0) / LARGEST
    # The largest of numbers and a NaN is a number. The sum is NaN.
    factor = (step + 0 * tl.sum(v, 1)) * size
    tl.store(factors + block * 4 + j, tl.where(j % 2 == 0, factor, factor / 16))
    q = tl.floor(v / step[:, None] + 0.5).to(tl.int32)
    high = (q + 128) >> 8
    low = q - (high << 8)
    shift = (j // 2 * 8)[:, None]  # groups 0 and 1 are in the low bytes, 2 and 3 in the high
    words = digits + (block * 8 + j % 2 * 4 + j // 2 * 2)[:, None] * GROUP + c[None, :]
    tl.store(words, ((low & 255) << shift).to(tl.int16))
    tl.store(words + GROUP, ((high & 255) << shift).to(tl.int16))
    too_much = tl.where(j % 2 == 0, -8, 0)
    tl.store(starts + block * 8 + j * 2, too_much * tl.sum(low, 1))
    tl.store(starts + block * 8 + j * 2 + 1, too_much * tl.sum(high, 1))


@triton.jit
def _rms_factor(x, eps, K: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, 0) / K + eps)


@triton.jit
def row_int4_kernel(
    W, scale, digits, starts, factors, residual, out, cap, N,
    WIDTH: tl.constexpr, BYTES: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_CAP: tl.constexpr,
    SWIGLU: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [N] = W x, for x as `digits_kernel` wrote it. One program per ROWS rows of W.

    With SWIGLU half of the ROWS rows are of W_gate and half of W_up.
    """
    OUT: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    blocks: tl.constexpr = WIDTH // BYTES
    tiles = _load_codes(W, scale, 0, N, WIDTH, BYTES, ROWS, OUT, SPLIT, AHEAD)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([SPLIT, ROWS, 4], tl.float32)
    for i in tl.static_range(AHEAD):
        acc += _product(
            tiles[i], digits, starts, factors, i * SPLIT,
            blocks, BYTES, ROWS, SPLIT, AHEAD, ASM, OVERLAP,
        )  # fmt: skip
    for first in range(AHEAD * SPLIT, blocks, AHEAD * SPLIT):
        tiles = _load_codes(W, scale, first, N, WIDTH, BYTES, ROWS, OUT, SPLIT, AHEAD)
        for i in tl.static_range(AHEAD):
            acc += _product(
                tiles[i], digits, starts, factors, first + i * SPLIT,
                blocks, BYTES, ROWS, SPLIT, AHEAD, ASM, OVERLAP,
            )  # fmt: skip
    y = tl.sum(tl.sum(acc, 2), 0)
    if SWIGLU:
        y, up = tl.split(tl.trans(tl.reshape(y, [2, OUT])))
        y = y * tl.sigmoid(y) * up
    at = tl.program_id(0) * OUT + tl.arange(0, OUT)
    if HAS_RESIDUAL:
        y += tl.load(residual + at, mask=at < N, other=0.0).to(tl.float32)
    if HAS_CAP:
        y = soft_cap(y, cap)
    tl.store(out + at, y, mask=at < N)


@triton.jit
def _load_codes(
    W, scale, first, N,
    WIDTH: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr,
    SPLIT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """AHEAD times the codes of SPLIT blocks, from `first` on, for `_rows`, and their scales.

    Scales are [SPLIT, ROWS / 8, 8, 4]. After the last block follow copies of it.
    """
    pieces: tl.constexpr = BYTES // 64
    beside, r, part, i = _shares(ROWS // 8 * pieces, SPLIT)
    codes = W + _row(i // pieces * 8 + r, N, OUT).to(tl.int64) * WIDTH
    codes += i % pieces * 64 + beside * 16
    group, r, scale_part, i = _shares(ROWS // 8, SPLIT)
    scales = scale + _row(i * 8 + r, N, OUT)
    tiles = ()
    for step in tl.static_range(AHEAD):
        block = _block(first + step * SPLIT + part, WIDTH // BYTES)
        at = (codes + block * BYTES)[:, None] + tl.arange(0, 16)[None, :]
        w = tl.load(at, eviction_policy="evict_first")
        block = _block(first + step * SPLIT + scale_part, WIDTH // BYTES)
        s = tl.load(scales + (block * 4 + group) * (N * (ROWS // OUT)))
        tile = w, tl.permute(tl.reshape(s, [ROWS // 8, SPLIT, 8, 4]), 1, 0, 2, 3)
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _row(r, N, OUT: tl.constexpr):
    """The row of W that is row r of the program's tile. After the last follow copies of it."""
    return tl.minimum(tl.program_id(0) * OUT + r % OUT, N - 1) + r // OUT * N


@triton.jit
def _block(block, BLOCKS: tl.constexpr):
    """After the last block follow copies of it: nothing needs a mask."""
    return tl.minimum(block, BLOCKS - 1)


@triton.jit
def _shares(COUNT: tl.constexpr, SPLIT: tl.constexpr):
    """What each thread loads, COUNT times: the thread of 4, of 8 times 4, the warp, the number.

    Triton gives the elements of a tensor to threads in this order, the first coordinate fastest.
    """
    e = tl.arange(0, COUNT * SPLIT * 32)
    return e % 4, e // 4 % 8, e // 32 % SPLIT, e // (32 * SPLIT)


@triton.jit
def _product(
    tile, digits, starts, factors, first,
    BLOCKS: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    AHEAD: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The products [SPLIT, ROWS, 4] of each group with x, in the blocks first, first + 1, …"""
    w, s = tile
    group, _, part, _ = _shares(1, SPLIT)
    in_x = (first + part < BLOCKS) | (BLOCKS % (AHEAD * SPLIT) == 0)
    at = factors + _block(first + part, BLOCKS) * 4 + group
    factor = tl.reshape(tl.load(at, mask=in_x, other=0.0), [SPLIT, 1, 8, 4])
    s = tl.reshape(s.to(tl.float32) * factor, [SPLIT, ROWS, 4])
    beside, column, part, piece = _shares(BYTES // 64, SPLIT)
    at = digits + (_block(first + part, BLOCKS) * 8 + column // 4 * 2 + column % 2) * BYTES
    at = (at + piece * 64 + beside * 16)[:, None] + tl.arange(0, 16)[None, :]
    is_high = (column // 2 % 2 == 1)[:, None]
    x_low = _columns(tl.load(at, mask=~is_high, other=0), BYTES, SPLIT)
    x_high = _columns(tl.load(at + 4 * BYTES, mask=is_high, other=0), BYTES, SPLIT)
    if OVERLAP:
        # The compiler would put each load right before its use, and wait for every one. It moves no
        # load over this, which has no other effect the second time. The sums need the load below.
        gdc_launch_dependents()
    block = _block(first + tl.arange(0, SPLIT), BLOCKS)[:, None, None]
    start = tl.load(starts + block * 8 + tl.arange(0, 8)[None, None, :])
    low, high = _decode(w, ASM)
    sums = tl.broadcast_to(start, [SPLIT, ROWS, 8])
    sums = tl.dot(_rows(low, BYTES, ROWS, SPLIT), x_low, sums, out_dtype=tl.int32)
    sums = tl.dot(_rows(high, BYTES, ROWS, SPLIT), x_high, sums, out_dtype=tl.int32)
    sums, high_sums = tl.split(tl.reshape(sums, [SPLIT, ROWS, 4, 2]))
    return (high_sums * 256 + sums).to(tl.float32) * s


@triton.jit
def _rows(w, BYTES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """What `_shares` loaded, as [SPLIT, ROWS, BYTES]. A thread has every fourth of 4 bytes."""
    w = tl.reshape(w, [ROWS // 8, BYTES // 64, SPLIT, 8, 4, 4, 4])
    return tl.reshape(tl.permute(w, 2, 0, 3, 1, 5, 4, 6), [SPLIT, ROWS, BYTES])


@triton.jit
def _columns(x, BYTES: tl.constexpr, SPLIT: tl.constexpr):
    """What `_shares` loaded, as [SPLIT, BYTES, 8], with the bytes in the order of `_rows`."""
    x = tl.reshape(x, [BYTES // 64, SPLIT, 8, 4, 4, 4])
    return tl.reshape(tl.permute(x, 1, 0, 4, 3, 5, 2), [SPLIT, BYTES, 8])


@triton.jit
def _decode(w, ASM: tl.constexpr):
    """The low codes, and 16 times the numbers of the high codes."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ and.b32 $0, $2, 0x0F0F0F0F;
            lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A; }""",
            "=r,=r,r", [w], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return (w & 15).to(tl.int8), ((w & 240) ^ 128).to(tl.int8, bitcast=True)
