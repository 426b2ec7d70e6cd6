"""1 to 8 rows times an int4 matrix, or 1 times an int8 one, on integer tensor cores: Yᵀ = W Xᵀ.

X is [B, K], W [N, K]. Turning codes into floats takes more instructions than the memory leaves time
for, so they stay integers. An int8 code is its number. A byte w of int4 has two codes, each 8 more
than its number: `w & 15` is the low one, and `(w & 240) ^ 128` is 16 times the number of the high
one, as signed bytes: one instruction for four codes. The 8 that the low codes have too much is in
the value that the sums start from.

x becomes integers too. In each group of columns a row is rounded to 16 bits relative to the largest
magnitude, which changes it by 2⁻¹⁶ of that at most, and q = 256 d₁ + d₀ gives two signed bytes.
Sums over a group are exact. So the result is closer to float64 than a product in bfloat16 would be.
`digits_kernel` does this, with RMSNorm, and also computes the gates, whose few weights are not
quantised.

The tensor cores multiply rows of codes by 8 columns. A block of codes has four groups (int4) or two
(int8), and every word of two bytes has one code of each.

- One row: the columns are the two digits of the groups. Column 2 j + d has digit d of group j, and
  zeros in the rows of the other groups. So one matrix [rows, 8] has the sums of all groups, and a
  thread has both digits of a group side by side. With two groups, the last four columns are zeros.
- 2 to 8 rows: the columns are the rows of x. The bytes of a thread's words are sorted first, so
  that each operand has the codes of one group. Its product with the high digits, times 256, is what
  its product with the low digits starts from. Missing rows are zeros.

Each warp has another part of K (`IntegersTile.split`). The codes go from memory to the registers in
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
from xlstm7b.generate.kernels.overlap import overlap_options, prefetch_rows
from xlstm7b.generate.kernels.quantized import store_products
from xlstm7b.mlstm.triton.launch_params import sums_apart
from xlstm7b.quantize.gpu import codes_in_word, words_in_block
from xlstm7b.quantize.kernels import has_asm
from xlstm7b.quantize.weight import QuantizedWeight

MAX_BATCH = 8
LARGEST: tl.constexpr = tl.constexpr(32512)  # magnitude of a q, so that 256 d₁ + d₀ has it


@dataclass(frozen=True, order=True)
class IntegersTile:
    """Launch parameters of `multiply_integers`."""

    rows: int  # of W in one tile, 16 or more; for SwiGLU half of them are of W_up
    split: int  # parts of K, one for each warp
    ahead: int = 1  # blocks that a warp loads at a time, first before the previous launch has ended
    registers: int | None = None  # the most that a thread may have; None: the compiler decides
    prefetch: int = 0  # bytes of each row to load into L2, after those that are loaded at once


def takes_integers(x: Tensor, W: QuantizedWeight) -> bool:
    """Whether `multiply_integers` computes x Wᵀ. For a float32 x it would not be exact enough."""
    rows = {"int4": MAX_BATCH, "int8": 1}.get(W.scheme.name, 0)
    return len(x) <= rows and x.dtype != torch.float32


def multiply_integers(
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
    tile: IntegersTile | None = None,
) -> tuple[Tensor, Tensor]:
    """x Wᵀ [B, N] for x [B, K], and the gates [B, 2 NH]. B is at most 8 for int4, and 1 for int8.

    The options are those of `one_row.multiply_row`, with B rows. `live` is for the gates only.
    """
    (batch, columns), group, groups = x.shape, words_in_block(W.scheme), codes_in_word(W.scheme)
    assert takes_integers(x, W)
    assert W.layout == "gpu"
    assert x.is_contiguous()
    rows = len(W) // 2 if swiglu else len(W)
    tile = tile or tile_for(batch, W)
    codes = W.data.view(torch.uint8 if W.scheme.name == "int4" else torch.int8)
    blocks = codes.shape[1] // (2 * group)
    padded_batch = 1 if batch == 1 else MAX_BATCH
    digits = torch.empty(
        blocks, 4 * groups if batch == 1 else 64, group, dtype=torch.int8, device=x.device
    )
    starts = torch.empty(
        blocks, 2 * groups if batch == 1 else 16, dtype=torch.int32, device=x.device
    )
    factors = torch.empty(blocks, groups, padded_batch, dtype=torch.float32, device=x.device)
    W_gates, bias = (x, x) if gates is None else gates
    gate_rows = 0 if gates is None else len(W_gates)
    out_gates = torch.empty(batch, gate_rows, dtype=torch.float32, device=x.device)
    digits_kernel[(gate_rows + blocks, padded_batch)](
        x, x if norm is None else norm, W_gates, bias, x if live is None else live,
        digits.view(torch.int16) if batch == 1 else digits, starts, factors, out_gates,
        eps, cap or 1.0, batch, gate_rows,
        K=columns, GROUP=group, GROUPS=groups, BLOCK=triton.next_power_of_2(columns),
        HAS_NORM=norm is not None, HAS_GATES=gates is not None, HAS_LIVE=live is not None,
        HAS_CAP=cap is not None, BATCH=padded_batch, num_warps=4, **overlap_options(x.device),
    )  # fmt: skip
    out = residual
    if out is None:
        out = torch.empty(batch, rows, dtype=out_dtype or x.dtype, device=x.device)
    tiles = triton.cdiv(rows, tile.rows // 2 if swiglu else tile.rows)
    integers_kernel[(tiles,)](
        codes, W.scale, digits, starts, factors, out, out, cap or 1.0, batch,
        N=rows, WIDTH=codes.shape[1], BYTES=2 * group, GROUPS=groups,
        HAS_RESIDUAL=residual is not None, HAS_CAP=cap is not None and gates is None,
        SWIGLU=swiglu, BATCH=padded_batch,
        ROWS=tile.rows, SPLIT=tile.split, AHEAD=tile.ahead,
        PREFETCH=max(0, min(tile.prefetch, codes.shape[1] - tile.ahead * tile.split * 2 * group)),
        ASM=has_asm(x),
        num_warps=tile.split, num_stages=1, maxnreg=tile.registers, **overlap_options(x.device),
    )  # fmt: skip
    return out, out_gates


def tile_for(batch: int, W: QuantizedWeight) -> IntegersTile:
    """The fastest tiles on an H200, by `benchmarks/tune.py --quantize int4` for groups of 64.

    Those of int8, and `prefetch`, were chosen by the speed of whole tokens. `prefetch` helps at 8
    rows, where few rows of W leave the memory idle. A block of 128 words takes as many registers as
    two of 64.
    """
    words = words_in_block(W.scheme)
    if W.scheme.name == "int8":
        if 8192 <= len(W) < 32768:
            return IntegersTile(32, 8, 1, 128)
        return IntegersTile(16, 16, 1, 64) if max(W.shape) <= 8192 else IntegersTile(16, 8, 2, 80)
    if batch > 1:
        if len(W) < 8192:
            return IntegersTile(16, 8, 1, 128 if words < 128 else None, prefetch=2048)
        if words == 128:
            return IntegersTile(16, 4)
        return IntegersTile(16, 4, 1, 80 if len(W) < 16384 else 128)
    if len(W) >= 8192:
        return IntegersTile(16, 4, 1, 80 if words < 128 else 128)
    # Few rows: more warps, and more loads at a time, keep the memory busy.
    return IntegersTile(16, 8, 2 if words < 128 and W.data.shape[1] > 8 * words else 1, 128)


@triton.jit
def digits_kernel(
    x, norm, W_gates, bias, live, digits, starts, factors, out_gates, eps, cap, B, N_GATES,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_GATES: tl.constexpr, HAS_LIVE: tl.constexpr, HAS_CAP: tl.constexpr,
    BATCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One gate of a row, or the digits of RMSNorm(x) in one block, per program: first the gates.

    out_gates [B, N_GATES] = masked soft-cap(RMSNorm(x) W_gatesᵀ + bias). For the digits, starts and
    factors see `_store_row` and `_store_rows`. Rows from B on are zeros.
    """
    if OVERLAP:
        gdc_launch_dependents()  # `integers_kernel` only reads weights before it waits for this one
    b = tl.program_id(1)
    is_gate = False
    if HAS_GATES:
        is_gate = tl.program_id(0) < N_GATES
    if is_gate:
        if b < B:
            gate = tl.program_id(0) + tl.arange(0, 1)
            y = _gate(
                x + b * K, norm, W_gates + tl.program_id(0) * K, eps, K, BLOCK, HAS_NORM, OVERLAP
            )
            y += tl.zeros([1, 1], tl.float32)
            live += b
            out_gates += b * N_GATES
            store_gates(y, gate, bias, live, out_gates, cap, 1, N_GATES, HAS_CAP, HAS_LIVE, 1)
    else:
        block = tl.program_id(0) - N_GATES
        size = tl.where(b < B, K, 0)
        q, factor = _round(
            x + b * K, norm, eps, block, size, K, GROUP, GROUPS, BLOCK, HAS_NORM, OVERLAP
        )
        if BATCH == 1:
            _store_row(digits, starts, factors, q, factor, block, GROUP, GROUPS)
        else:
            _store_rows(digits, starts, factors, q, factor, block, b, GROUP)


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
def _round(
    x, norm, eps, block, size,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The integers q [GROUPS, GROUP] of a block of RMSNorm(x), and their groups' factors [GROUPS].

    The int4 codes of odd groups are multiplied by 16, so those factors are divided by it. Each of
    the four warps has one int4 group.
    """
    j, c = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    k = (block * GROUPS + j)[:, None] * GROUP + c[None, :]
    weight = tl.full(k.shape, 1.0, tl.float32)
    if HAS_NORM:
        weight = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    v = tl.load(x + k, mask=k < size, other=0.0).to(tl.float32) * weight
    rms = 1.0
    if HAS_NORM:
        all_k = tl.arange(0, BLOCK)
        wide = tl.load(x + all_k, mask=all_k < size, other=0.0).to(tl.float32)
        rms = _rms_factor(wide, eps, K)
    largest = tl.max(tl.abs(v), 1)
    step = tl.where(largest > 0, largest, 1.0) / LARGEST
    # The largest of numbers and a NaN is a number. The sum is NaN.
    factor = (step + 0 * tl.sum(v, 1)) * rms
    q = tl.floor(v / step[:, None] + 0.5).to(tl.int32)
    return q, tl.where(j % (GROUPS // 2) == 0, factor, factor / 16)


@triton.jit
def _rms_factor(x, eps, K: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, 0) / K + eps)


@triton.jit
def _store_row(
    digits, starts, factors, q, factor, block, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """The only row.

    The codes of group j are in byte `byte` of the words of W, and for int4 in half `half` of it.
    digits [blocks, 2 GROUPS, GROUP] are words of two bytes, as those of W: digit d of group j is
    4 half + 2 byte + d of 2 GROUPS, and the other byte of the word is 0. starts [blocks, 2 GROUPS]
    is what the sums of the columns start from, factors [blocks, GROUPS] what the sums of the groups
    are multiplied by.
    """
    j, c = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    byte, half = j // (GROUPS // 2), j % (GROUPS // 2)
    tl.store(factors + block * GROUPS + j, factor)
    low, high = _split(q)
    shift = (byte * 8)[:, None]
    words = digits + (block * (2 * GROUPS) + half * 4 + byte * 2)[:, None] * GROUP + c[None, :]
    tl.store(words, ((low & 255) << shift).to(tl.int16))
    tl.store(words + GROUP, ((high & 255) << shift).to(tl.int16))
    too_much = tl.where((half == 0) & (GROUPS == 4), -8, 0)
    tl.store(starts + block * (2 * GROUPS) + j * 2, too_much * tl.sum(low, 1))
    tl.store(starts + block * (2 * GROUPS) + j * 2 + 1, too_much * tl.sum(high, 1))


@triton.jit
def _store_rows(digits, starts, factors, q, factor, block, b, GROUP: tl.constexpr):
    """Row b of 8.

    digits [blocks, digit, j % 2, c // 32, b, c // 8 % 4, j // 2, c % 8] of column c of group j: a
    warp loads 512 bytes at a time, a thread 16 of them. starts and factors
    [blocks, j // 2, b // 2, j % 2, b % 2] are what the sums of the groups start from, and what they
    are multiplied by.
    """
    j, c = tl.arange(0, 4), tl.arange(0, GROUP)
    at = b // 2 * 4 + j // 2 * 2 + b % 2
    tl.store(factors + block * 32 + j % 2 * 16 + at, factor)
    tl.store(starts + block * 16 + at, -8 * tl.sum(q, 1), mask=j % 2 == 0)
    low, high = _split(q)
    group = digits + block * (64 * GROUP) + b * 64 + j % 2 * (16 * GROUP) + j // 2 * 8
    column = c // 32 * 512 + c // 8 % 4 * 16 + c % 8
    tl.store(group[:, None] + column[None, :], low.to(tl.int8))
    tl.store(group[:, None] + column[None, :] + 32 * GROUP, high.to(tl.int8))


@triton.jit
def _split(q):
    """The low and the high digit: q = 256 high + low."""
    high = (q + 128) >> 8
    return q - (high << 8), high


@triton.jit
def integers_kernel(
    W, scale, digits, starts, factors, residual, out, cap, B,
    N: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_CAP: tl.constexpr, SWIGLU: tl.constexpr, BATCH: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr, PREFETCH: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [B, N] = x Wᵀ, for x as `digits_kernel` wrote it. One program per ROWS rows of W.

    With SWIGLU half of the ROWS rows are of W_gate and half of W_up.
    """
    OUT: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    blocks: tl.constexpr = WIDTH // BYTES
    tiles = _load_codes(W, scale, 0, N, WIDTH, BYTES, GROUPS, BATCH, ROWS, OUT, SPLIT, AHEAD)
    row_scales = 1.0
    if GROUPS == 2:
        row_scales = tl.load(scale + _row(tl.arange(0, ROWS), N, OUT)).to(tl.float32)[:, None]
    if OVERLAP:
        if PREFETCH > 0:
            # The rows one after another, so each warp has some of them.
            share: tl.constexpr = (ROWS + SPLIT - 1) // SPLIT
            thread = tl.arange(0, 32 * SPLIT)
            r = thread // 32 * share + thread % 32
            rest = _row(r, N, OUT).to(tl.int64) * WIDTH + AHEAD * SPLIT * BYTES
            prefetch_rows(W, rest, (thread % 32 < share) & (r < ROWS), PREFETCH)
        gdc_wait()
        gdc_launch_dependents()
    if BATCH == 1:
        acc = tl.zeros([SPLIT, ROWS, 4], tl.float32)
    else:
        acc = tl.zeros([2, SPLIT, ROWS // 8, 8, 4, 2], tl.float32)
    for i in tl.static_range(AHEAD):
        acc = _product(
            acc, tiles[i], digits, starts, factors, i * SPLIT,
            blocks, BYTES, GROUPS, BATCH, ROWS, SPLIT, AHEAD, ASM, OVERLAP,
        )  # fmt: skip
    for first in range(AHEAD * SPLIT, blocks, AHEAD * SPLIT):
        tiles = _load_codes(
            W, scale, first, N, WIDTH, BYTES, GROUPS, BATCH, ROWS, OUT, SPLIT, AHEAD
        )
        for i in tl.static_range(AHEAD):
            acc = _product(
                acc, tiles[i], digits, starts, factors, first + i * SPLIT,
                blocks, BYTES, GROUPS, BATCH, ROWS, SPLIT, AHEAD, ASM, OVERLAP,
            )  # fmt: skip
    if BATCH == 1:
        y = tl.sum(tl.sum(acc, 2), 0)[:, None] * row_scales
    else:
        y = tl.reshape(tl.sum(tl.sum(acc, 0), 0), [ROWS, BATCH])
    row = tl.program_id(0) * OUT + tl.arange(0, OUT)
    store_products(y, row, residual, out, cap, B, N, HAS_RESIDUAL, HAS_CAP, SWIGLU, BATCH)


@triton.jit
def _load_codes(
    W, scale, first,
    N: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr,
    BATCH: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """AHEAD times the codes of SPLIT blocks, from `first` on, and for int4 their scales.

    For one row a thread has the scales of one group, [SPLIT, ROWS / 8, 8, 4 groups]. For more it
    has those of all: `_scales` of the even and of the odd groups. After the last block follow
    copies of it.
    """
    pieces: tl.constexpr = BYTES // 64
    eights: tl.constexpr = ROWS // 8
    beside, r, part, i = _shares(eights * pieces, SPLIT)
    codes = W + _row(i // pieces * 8 + r, N, OUT).to(tl.int64) * WIDTH
    codes += i % pieces * 64 + beside * 16
    group, r, scale_part, i = _shares(eights if BATCH == 1 else 2 * eights, SPLIT)
    if BATCH > 1:
        group = i // eights * 2
    scales = scale + _row(i % eights * 8 + r, N, OUT)
    tiles = ()
    for step in tl.static_range(AHEAD):
        block = _block(first + step * SPLIT + part, WIDTH // BYTES)
        at = (codes + block * BYTES)[:, None] + tl.arange(0, 16)[None, :]
        w = tl.load(at, eviction_policy="evict_first")
        block = _block(first + step * SPLIT + scale_part, WIDTH // BYTES)
        at = scales + (block * 4 + group) * (N * (ROWS // OUT))
        if GROUPS == 2:
            tile = (w,)
        elif BATCH == 1:
            tile = w, tl.permute(tl.reshape(tl.load(at), [eights, SPLIT, 8, 4]), 1, 0, 2, 3)  # type: ignore[assignment]
        else:
            even, odd = tl.load(at), tl.load(at + N * (ROWS // OUT))
            tile = w, _scales(even, ROWS, SPLIT), _scales(odd, ROWS, SPLIT)  # type: ignore[assignment]
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _scales(s, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """The scales of two groups as `_group_sums` has its sums: the same for all rows of x."""
    s = tl.permute(tl.reshape(s, [2, ROWS // 8, SPLIT, 8, 4]), 0, 2, 1, 3, 4)
    return tl.expand_dims(s, 5)


@triton.jit
def _row(r, N: tl.constexpr, OUT: tl.constexpr):
    """The row of W that is row r of the program's tile. After the last follow copies of it."""
    row = tl.program_id(0) * OUT + r % OUT
    if N % OUT != 0:
        row = tl.minimum(row, N - 1)
    return row + r // OUT * N


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
    acc, tile, digits, starts, factors, first,
    BLOCKS: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr, BATCH: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`acc` plus the products of the blocks first, first + 1, … with x.

    For one row `acc` is [SPLIT, ROWS, 4 groups]. For more it is [2, SPLIT, ROWS / 8, 8, 4, 2]: two
    sums that are to be added, each for all rows of W and all 8 of x.
    """
    even: tl.constexpr = BLOCKS % (AHEAD * SPLIT) == 0
    if BATCH == 1:
        acc = _row_product(
            acc, tile, digits, starts, factors, first,
            BLOCKS, BYTES, GROUPS, ROWS, SPLIT, even, ASM, OVERLAP,
        )  # fmt: skip
    else:
        acc = _rows_product(
            acc, tile, digits, starts, factors, first,
            BLOCKS, BYTES, ROWS, SPLIT, even, ASM, OVERLAP,
        )  # fmt: skip
    return acc


@triton.jit
def _row_product(
    acc, tile, digits, starts, factors, first,
    BLOCKS: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    group, _, part, _ = _shares(1, SPLIT)
    in_x = ((first + part < BLOCKS) | EVEN) & (group < GROUPS)
    at = factors + _block(first + part, BLOCKS) * GROUPS + group
    factor = tl.reshape(tl.load(at, mask=in_x, other=0.0), [SPLIT, 1, 8, 4])
    if GROUPS == 4:
        factor = tile[1].to(tl.float32) * factor
    factor = tl.broadcast_to(factor, [SPLIT, ROWS // 8, 8, 4])
    halves: tl.constexpr = GROUPS // 2  # of a byte with codes of their own
    beside, column, part, piece = _shares(BYTES // 64, SPLIT)
    at = _block(first + part, BLOCKS) * (2 * GROUPS) + column // (2 * halves) * 2 + column % 2
    at = (digits + at * BYTES + piece * 64 + beside * 16)[:, None] + tl.arange(0, 16)[None, :]
    half = (column // 2 % halves)[:, None]
    in_group = (column < 2 * GROUPS)[:, None]
    x_low = _columns(tl.load(at, mask=in_group & (half == 0), other=0), BYTES, SPLIT)
    if halves == 2:
        x_high = _columns(tl.load(at + 4 * BYTES, mask=half == 1, other=0), BYTES, SPLIT)
    if OVERLAP:
        # The compiler would put each load right before its use, and wait for every one. It moves no
        # load over this, which has no other effect the second time. The sums need the load below.
        gdc_launch_dependents()
    block = _block(first + tl.arange(0, SPLIT), BLOCKS)[:, None, None]
    column = tl.arange(0, 8)[None, None, :]
    at = starts + block * (2 * GROUPS) + column
    start = tl.load(at, mask=column + 0 * block < 2 * GROUPS, other=0)
    sums = tl.broadcast_to(start, [SPLIT, ROWS, 8])
    if halves == 2:
        low, high = _decode(tile[0], ASM)
        low_sums = tl.dot(_rows(low, BYTES, ROWS, SPLIT), x_low, sums, out_dtype=tl.int32)
        if sums_apart():  # not from 0: the compiler would join such sums
            low_sums -= sums
            sums = tl.dot(_rows(high, BYTES, ROWS, SPLIT), x_high, sums, out_dtype=tl.int32)
            sums += low_sums
        else:
            sums = tl.dot(_rows(high, BYTES, ROWS, SPLIT), x_high, low_sums, out_dtype=tl.int32)
    else:
        sums = tl.dot(_rows(tile[0], BYTES, ROWS, SPLIT), x_low, sums, out_dtype=tl.int32)
    sums, high_sums = tl.split(tl.reshape(sums, [SPLIT, ROWS, 4, 2]))
    return acc + (high_sums * 256 + sums).to(tl.float32) * tl.reshape(factor, [SPLIT, ROWS, 4])


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


@triton.jit
def _rows_product(
    acc, tile, digits, starts, factors, first,
    BLOCKS: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    w, even_scales, odd_scales = tile
    if OVERLAP:
        # The codes and scales come from far: their loads are not moved after this, as above.
        gdc_launch_dependents()
    beside, _, part, _ = _shares(1, SPLIT)
    block = _block(first + part, BLOCKS)
    in_x = ((first + part < BLOCKS) | EVEN)[:, None]
    at = factors + (block * 32 + beside * 4)[:, None] + tl.arange(0, 4)[None, :]
    even_factors = _for_sums(tl.load(at, mask=in_x, other=0.0), SPLIT)
    odd_factors = _for_sums(tl.load(at + 16, mask=in_x, other=0.0), SPLIT)
    at = starts + (block * 16 + beside * 4)[:, None] + tl.arange(0, 4)[None, :]
    start = _for_sums(tl.load(at), SPLIT)
    beside, column, part, piece = _shares(BYTES // 64, SPLIT)
    at = digits + _block(first + part, BLOCKS) * (32 * BYTES)
    at = (at + piece * 512 + column * 64 + beside * 16)[:, None] + tl.arange(0, 16)[None, :]
    even_low = _group_columns(tl.load(at), BYTES, SPLIT)
    even_high = _group_columns(tl.load(at + 16 * BYTES), BYTES, SPLIT)
    odd_low = _group_columns(tl.load(at + 8 * BYTES), BYTES, SPLIT)
    odd_high = _group_columns(tl.load(at + 24 * BYTES), BYTES, SPLIT)
    # Of every 8 bytes first those of groups 0 and 1, then those of groups 2 and 3.
    w = tl.reshape(tl.permute(tl.reshape(w, [w.shape[0], 2, 4, 2]), 0, 1, 3, 2), w.shape)
    even, odd = _decode(w, ASM)
    sums = _group_sums(even, even_low, even_high, start, BYTES, ROWS, SPLIT)
    acc += sums.to(tl.float32) * (even_scales.to(tl.float32) * even_factors)
    zero = tl.zeros_like(start)
    sums = _group_sums(odd, odd_low, odd_high, zero, BYTES, ROWS, SPLIT)
    acc += sums.to(tl.float32) * (odd_scales.to(tl.float32) * odd_factors)
    return acc


@triton.jit
def _for_sums(v, SPLIT: tl.constexpr):
    """Starts or factors as `_group_sums` has its sums: the same for all rows of W."""
    v = tl.permute(tl.reshape(v, [SPLIT, 8, 4, 2, 2]), 3, 0, 1, 2, 4)
    return tl.expand_dims(v, 2)


@triton.jit
def _group_columns(x, BYTES: tl.constexpr, SPLIT: tl.constexpr):
    """What `_shares` loaded of two groups, as [2 groups · SPLIT, columns, 8 rows of x]."""
    x = tl.reshape(x, [BYTES // 64, SPLIT, 8, 4, 2, 2, 4])
    return tl.reshape(tl.permute(x, 4, 1, 0, 5, 3, 6, 2), [2 * SPLIT, BYTES // 2, 8])


@triton.jit
def _group_sums(
    w, x_low, x_high, start,
    BYTES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The sums of two groups, from `start` on: [2 groups, SPLIT, ROWS / 8, 8, 4, 2].

    The last two axes are the 8 rows of x. A thread has two of those, for one of 8 rows of W.
    """
    w = tl.reshape(w, [ROWS // 8, BYTES // 64, SPLIT, 8, 4, 2, 2, 4])
    w = tl.reshape(tl.permute(w, 6, 2, 0, 3, 1, 5, 4, 7), [2 * SPLIT, ROWS, BYTES // 2])
    shape: tl.constexpr = [2, SPLIT, ROWS // 8, 8, 4, 2]
    sums = tl.dot(w, x_high, out_dtype=tl.int32)
    sums = sums * 256 + tl.reshape(tl.broadcast_to(start, shape), sums.shape)
    return tl.reshape(tl.dot(w, x_low, sums, out_dtype=tl.int32), shape)
