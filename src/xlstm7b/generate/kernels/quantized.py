"""Rows times a quantised weight matrix, on tensor cores: Yᵀ = W Xᵀ for X [B, K], W [N, K].

The time is that of reading the codes, as long as turning them into bfloat16 takes fewer
instructions than the memory leaves time for. `quantize/kernels.py` does that, in the registers in
which the tensor cores want the numbers.

One warp alone would mostly wait for its own instructions. So each multiprocessor gets many warps:
those of a program share its rows, and each adds up another part of K (`CodesTile.split`). At the
end their sums are added, always in the same order. In the code this is a product of tensors with
the parts as first axis, which Triton gives to one warp each. The parts take turns block by block:
part p has the blocks p, p + split, p + 2 · split, …

For more than 16 rows of x that would take too much shared memory. There the parts of K are programs
(`CodesTile.programs`). The one that finishes last adds up their sums, in the same order too.

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

from xlstm7b.generate.kernels import MAX_ROWS
from xlstm7b.generate.kernels.few_rows import store_gates, store_rows
from xlstm7b.generate.kernels.overlap import overlap_options, prefetch_rows, wait_for_previous
from xlstm7b.generate.kernels.pointwise import rms_norm
from xlstm7b.gpus import shared_memory
from xlstm7b.mlstm.triton.launch_params import fitting_stages, sums_apart
from xlstm7b.mlstm.triton.step import take_counters
from xlstm7b.quantize.gpu import codes_in_word, words_in_block
from xlstm7b.quantize.kernels import centre_int4, decode_bytes, decode_int4, has_asm
from xlstm7b.quantize.weight import QuantizedWeight


@dataclass(frozen=True, order=True)
class CodesTile:
    """Launch parameters of `multiply_codes`."""

    rows: int  # of W in one tile; for SwiGLU half of them are of W_up
    warps: int  # as many as `split`, unless that is 1
    stages: int
    prefetch: int = 0  # bytes of each row to load into L2 before the previous launch has ended
    split: int = 1  # parts of K, one for each warp; 1: the warps share the rows instead
    registers: int | None = None  # the most that a thread may have; None: the compiler decides
    programs: int = 1  # for the same rows: each has its own parts of K


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

    The options are those of `one_row.multiply_row`, with B rows. `live` is for the gates only.
    """
    batch, columns = x.shape
    assert batch <= MAX_ROWS
    assert W.layout == "gpu"
    assert x.is_contiguous()
    rows = len(W) // 2 if swiglu else len(W)
    tile = tile or tile_for(x, W, gates is not None)
    assert tile.split in (1, tile.warps)
    if norm is not None and not _takes_norm(x, tile):
        x, norm = rms_norm(x, norm, eps), None
    padded_batch = max(8, triton.next_power_of_2(batch))
    words = words_in_block(W.scheme)
    x_bytes = codes_in_word(W.scheme) * padded_batch * x.itemsize  # for each word of W
    stage_bytes = tile.split * words * (tile.rows * W.data.itemsize + x_bytes)
    if batch > 32 and stage_bytes > shared_memory(x.device):  # the largest groups, in float32
        parts = [
            multiply_codes(
                x[part], W, norm=norm, eps=eps, swiglu=swiglu, gates=gates, cap=cap,
                residual=None if residual is None else residual[part],
                live=None if live is None else live[part], out_dtype=out_dtype, tile=tile,
            )
            for part in (slice(32), slice(32, None))
        ]  # fmt: skip
        return torch.cat([out for out, _ in parts]), torch.cat([gates for _, gates in parts])
    out = residual
    if out is None:
        out = torch.empty(batch, rows, dtype=out_dtype or x.dtype, device=x.device)
    tiles, gate_rows = triton.cdiv(rows, tile.rows // 2 if swiglu else tile.rows), 0
    W_gates, bias, out_gates = x, x, x
    if gates is not None:
        W_gates, bias = gates
        gate_rows = len(W_gates)
        tiles += triton.cdiv(gate_rows, tile.rows)
        out_gates = torch.empty(batch, gate_rows, dtype=torch.float32, device=x.device)
    sums, arrived = x, x
    if tile.programs > 1:
        size = tiles, tile.programs, tile.rows, padded_batch
        sums = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = take_counters(tiles, x.device)
    codes_kernel[(tiles, tile.programs)](
        x, x if norm is None else norm, W.data, W.scale, W_gates, bias,
        x if live is None else live, out, out, out_gates, sums, arrived,
        eps, cap or 1.0, batch, rows, gate_rows,
        K=columns, CODE=W.scheme.name, HAS_NORM=norm is not None,
        HAS_GATES=gates is not None, HAS_LIVE=live is not None,
        HAS_RESIDUAL=residual is not None, HAS_CAP=cap is not None, SWIGLU=swiglu,
        BATCH=padded_batch,
        ONE=batch == 1, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ROWS=tile.rows, SPLIT=tile.split, PROGRAMS=tile.programs,
        WORDS=words, WIDTH=W.data.shape[1],
        PREFETCH=min(tile.prefetch, 2 * W.data.shape[1]), THREADS=32 * tile.warps, ASM=has_asm(x),
        num_warps=tile.warps, num_stages=fitting_stages(tile.stages, stage_bytes, x.device),
        maxnreg=tile.registers, **overlap_options(x.device),
    )  # fmt: skip
    return out, out_gates


def _takes_norm(x: Tensor, tile: CodesTile) -> bool:
    """Whether RMSNorm of x is part of the product's launch, or a launch of its own.

    For more rows the tensor cores take x from shared memory, where it would have to be written
    again. In float16, x that is not divided by its size yet could overflow. A program that has only
    a part of K does not know the size of x.
    """
    return len(x) <= 16 and x.dtype != torch.float16 and tile.programs == 1


def tile_for(x: Tensor, W: QuantizedWeight, has_gates: bool) -> CodesTile:
    """The fastest tiles of `benchmarks/tune.py --quantize int4` on an H200, for 1, 8 and 64 rows.

    In bfloat16 they compile without spilled registers.
    """
    batch, rows = len(x), len(W)
    words = words_in_block(W.scheme)
    if x.dtype == torch.float32:  # not on tensor cores: large tiles would not fit the registers
        return CodesTile(16, 8, 2, programs=1 if rows >= 8192 else 2)
    if batch > 16:
        # Few tiles would leave multiprocessors idle.
        return CodesTile(64, 4, 3 if words < 128 else 2, programs=1 if rows >= 8192 else 4)
    large = rows >= 8192 if batch == 1 else words < 128
    tile_rows = 32 if large else 16
    # With gates, the kernel would take 214 registers. With 168, three programs run at a time.
    registers = 168 if has_gates and tile_rows == 32 and batch <= 8 else None
    return CodesTile(tile_rows, 4, 3, 512, 4, registers)


@triton.jit
def codes_kernel(
    x, norm, W, scale, W_gates, bias, live, residual, out, out_gates, sums, arrived,
    eps, cap, B, N, N_GATES,
    K: tl.constexpr, CODE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_GATES: tl.constexpr,
    HAS_LIVE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_CAP: tl.constexpr,
    SWIGLU: tl.constexpr, BATCH: tl.constexpr, ONE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, PROGRAMS: tl.constexpr, WORDS: tl.constexpr,
    WIDTH: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr, ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [B, N] = x Wᵀ and out_gates [B, N_GATES] = masked soft-cap(x W_gatesᵀ + bias).

    PROGRAMS programs per ROWS rows: first those of W_gates, then those of W. With SWIGLU half of
    the ROWS rows are of W_gate and half of W_up. ONE: x has one row.
    """
    program, share = tl.program_id(0), tl.program_id(1)
    if HAS_GATES:
        program -= tl.cdiv(N_GATES, ROWS)
    OUT: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    row = program * OUT + tl.arange(0, OUT)
    if OVERLAP and PREFETCH > 0:
        thread = tl.arange(0, THREADS)
        mine, in_W = _weight_rows(program, thread, N, OUT)
        wanted = in_W & (program >= 0) & (share == 0) & (thread < ROWS)
        prefetch_rows(W, mine.to(tl.int64) * WIDTH, wanted, PREFETCH)
    wait_for_previous(OVERLAP)
    is_gate = False
    if HAS_GATES:
        is_gate = program < 0
    if is_gate:
        gate = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        y = _gate_product(
            x, norm, W_gates, eps, gate, share, B, N_GATES,
            K, HAS_NORM, BATCH, ONE, PRECISION, ROWS, SPLIT, PROGRAMS,
        )  # fmt: skip
        y, is_last = _sum_programs(y, sums, arrived, share, ROWS, BATCH, PROGRAMS)
        if is_last:
            store_gates(y, gate, bias, live, out_gates, cap, B, N_GATES, HAS_CAP, HAS_LIVE, BATCH)
    else:
        w_row, in_row = _weight_rows(program, tl.arange(0, ROWS), N, OUT)
        y = _product(
            x, norm, W, scale, eps, w_row, in_row, share, B, N * (ROWS // OUT),
            K, CODE, HAS_NORM, BATCH, ONE, PRECISION, ROWS, SPLIT, PROGRAMS, WORDS, WIDTH, ASM,
        )  # fmt: skip
        y, is_last = _sum_programs(y, sums, arrived, share, ROWS, BATCH, PROGRAMS)
        if is_last:
            capped: tl.constexpr = HAS_CAP and not HAS_GATES
            store_products(y, row, residual, out, cap, B, N, HAS_RESIDUAL, capped, SWIGLU, BATCH)


@triton.jit
def store_products(
    y, row, residual, out, cap, B, N,
    HAS_RESIDUAL: tl.constexpr, HAS_CAP: tl.constexpr, SWIGLU: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """`store_rows`. With SWIGLU, y has as many rows of W_gate, then of W_up."""
    if SWIGLU:
        y, up = tl.split(tl.permute(tl.reshape(y, [2, row.shape[0], BATCH]), 1, 2, 0))
        y = y * tl.sigmoid(y) * up
    store_rows(y, row, residual, out, out, cap, B, N, HAS_RESIDUAL, HAS_CAP, False, BATCH)


@triton.jit
def _sum_programs(
    y, sums, arrived, share,
    ROWS: tl.constexpr, BATCH: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The sum of y [ROWS, BATCH] over the programs of a tile, and whether this one has it.

    `arrived` counts the programs that have stored their y in `sums`. The last one adds them up.
    """
    is_last = True
    if PROGRAMS > 1:
        tile = tl.program_id(0)
        at = tl.arange(0, ROWS)[:, None] * BATCH + tl.arange(0, BATCH)[None, :]
        tile_sums = sums + tile * (PROGRAMS * ROWS * BATCH) + at
        tl.store(tile_sums + share * (ROWS * BATCH), y)
        tl.debug_barrier()  # all threads have stored their part
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PROGRAMS - 1
        if is_last:
            tl.store(arrived + tile, 0)
            # .cg skips the L1 cache, which may not have what other programs wrote.
            y = tl.load(tile_sums, cache_modifier=".cg")
            for other in tl.static_range(1, PROGRAMS):
                y += tl.load(tile_sums + other * (ROWS * BATCH), cache_modifier=".cg")
    return y, is_last


@triton.jit
def _weight_rows(program, r, N, OUT: tl.constexpr):
    """The row of W that is row r of a program's tile, and whether there is one."""
    row = program * OUT + r % OUT
    return row + r // OUT * N, row < N


@triton.jit
def _product(
    x, norm, W, scale, eps, row, in_row, share, B, total,
    K: tl.constexpr, CODE: tl.constexpr, HAS_NORM: tl.constexpr, BATCH: tl.constexpr,
    ONE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """(scale · W)[row] Xᵀ [ROWS, BATCH] for a W of `total` rows; 0 where `in_row` is false.

    Of K, only the parts of program `share` of PROGRAMS.
    """
    c = tl.arange(0, WORDS)
    part = _parts(SPLIT) + share * SPLIT
    blocks: tl.constexpr = WIDTH // WORDS
    parts: tl.constexpr = SPLIT * PROGRAMS
    all_parts: tl.constexpr = blocks % parts == 0
    even: tl.constexpr = WIDTH * (4 if CODE == "int4" else 2) == K and all_parts
    words = W + (row.to(tl.int64)[:, None] * WIDTH + c[None, :] + part * WORDS)
    acc = _zeros(ROWS, BATCH, SPLIT)
    apart: tl.constexpr = sums_apart()
    squares = _no_squares(WORDS, BATCH, ONE, SPLIT)
    if CODE == "int4":
        # (W - zero) Xᵀ is W Xᵀ plus a product of X with a constant matrix. For few rows of x the
        # tensor cores have time for that one, and it is the same for all rows of W.
        centred: tl.constexpr = BATCH > 16 or x.dtype.element_ty == tl.float32 or apart
        less_zero = tl.full(words.shape, -136 if ASM else -8, x.dtype.element_ty)
        in_scale = in_row[:, None]
        scales = scale + (row[:, None] + part * (4 * total))
        s0 = tl.load(scales, mask=in_scale & (part < blocks), other=0.0)
        s1 = tl.load(scales + total, mask=in_scale & (part < blocks), other=0.0)
        s2 = tl.load(scales + 2 * total, mask=in_scale & (part < blocks), other=0.0)
        s3 = tl.load(scales + 3 * total, mask=in_scale & (part < blocks), other=0.0)
        for first in range(0, blocks, parts):
            block = first + part
            in_w = in_row[:, None] & ((block < blocks) | all_parts)
            w = tl.load(words + first * WORDS, mask=in_w, other=0)
            w0, w1, w2, w3 = decode_int4(w, x.dtype.element_ty, ASM)
            k = block * (4 * WORDS) + c[:, None]
            x0, squares = _load_x(x, norm, squares, k, B, K, even, HAS_NORM, BATCH, ONE, PRECISION)
            k += WORDS
            x1, squares = _load_x(x, norm, squares, k, B, K, even, HAS_NORM, BATCH, ONE, PRECISION)
            k += WORDS
            x2, squares = _load_x(x, norm, squares, k, B, K, even, HAS_NORM, BATCH, ONE, PRECISION)
            k += WORDS
            x3, squares = _load_x(x, norm, squares, k, B, K, even, HAS_NORM, BATCH, ONE, PRECISION)
            # The next block's scales are loaded now, so that nothing waits for them.
            following = scales + (first + parts) * 4 * total
            more = in_scale & (block + parts < blocks)
            t0 = tl.load(following, mask=more, other=0.0)
            t1 = tl.load(following + total, mask=more, other=0.0)
            t2 = tl.load(following + 2 * total, mask=more, other=0.0)
            t3 = tl.load(following + 3 * total, mask=more, other=0.0)
            acc += _group_product(w0, x0, less_zero, centred, PRECISION, ASM) * s0.to(tl.float32)
            acc += _group_product(w1, x1, less_zero, centred, PRECISION, ASM) * s1.to(tl.float32)
            acc += _group_product(w2, x2, less_zero, centred, PRECISION, ASM) * s2.to(tl.float32)
            acc += _group_product(w3, x3, less_zero, centred, PRECISION, ASM) * s3.to(tl.float32)
            s0, s1, s2, s3 = t0, t1, t2, t3
        y = _sum_parts(acc, SPLIT)
    else:
        acc_odd = acc
        for first in range(0, blocks, parts):
            block = first + part
            in_w = in_row[:, None] & ((block < blocks) | all_parts)
            w = tl.load(words + first * WORDS, mask=in_w, other=0)
            w0, w1 = decode_bytes(w, CODE, x.dtype.element_ty, ASM)
            k = block * (2 * WORDS) + c[:, None]
            x0, squares = _load_x(x, norm, squares, k, B, K, even, HAS_NORM, BATCH, ONE, PRECISION)
            k += WORDS
            x1, squares = _load_x(x, norm, squares, k, B, K, even, HAS_NORM, BATCH, ONE, PRECISION)
            acc = tl.dot(w0, x0, acc, input_precision=PRECISION)
            if apart:
                acc_odd = tl.dot(w1, x1, acc_odd, input_precision=PRECISION)
            else:
                acc = tl.dot(w1, x1, acc, input_precision=PRECISION)
        s = tl.load(scale + row, mask=in_row, other=0.0).to(tl.float32)
        y = _sum_parts(acc, SPLIT) * s[:, None]
        if apart:  # each times s, because the compiler would join sums that are added
            y += _sum_parts(acc_odd, SPLIT) * s[:, None]
    if HAS_NORM:
        y *= _rms_factors(squares, eps, K, BATCH, ONE, SPLIT)
    return y


@triton.jit
def _group_product(
    w, x, less_zero, CENTRED: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr
):
    """The product of one group's numbers, for w from `decode_int4`."""
    if CENTRED:
        y = tl.dot(centre_int4(w, ASM), x, input_precision=PRECISION)
    else:
        y = tl.dot(less_zero, x, input_precision=PRECISION)
        y = tl.dot(w, x, y, input_precision=PRECISION)
    return y


@triton.jit
def _gate_product(
    x, norm, W, eps, row, share, B, N,
    K: tl.constexpr, HAS_NORM: tl.constexpr, BATCH: tl.constexpr, ONE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """`_product` for a W that is not quantised, and that has rows below N."""
    c, first = tl.arange(0, 64), (_parts(SPLIT) + share * SPLIT) * 64
    stride: tl.constexpr = 64 * SPLIT * PROGRAMS
    even: tl.constexpr = K % stride == 0
    w_rows = W + row.to(tl.int64)[:, None] * K
    acc = _zeros(ROWS, BATCH, SPLIT)
    squares = _no_squares(64, BATCH, ONE, SPLIT)
    for start in range(0, K, stride):
        k = start + first + c[None, :]
        w = tl.load(w_rows + k, mask=(row < N)[:, None] & ((k < K) | even), other=0.0)
        k = start + first + c[:, None]
        x_k, squares = _load_x(x, norm, squares, k, B, K, even, HAS_NORM, BATCH, ONE, PRECISION)
        acc = tl.dot(w, x_k, acc, input_precision=PRECISION)
    y = _sum_parts(acc, SPLIT)
    if HAS_NORM:
        y *= _rms_factors(squares, eps, K, BATCH, ONE, SPLIT)
    return y


@triton.jit
def _load_x(
    x, norm, squares, k, B,
    K: tl.constexpr, EVEN: tl.constexpr, HAS_NORM: tl.constexpr, BATCH: tl.constexpr,
    ONE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x[:, k] as [parts, len(k), BATCH], and `squares`. EVEN: every k is below K.

    With HAS_NORM, x is multiplied by the weight of RMSNorm but not by its factors, and its squares
    are added to `squares`, for `_rms_factors`. For several rows they are the diagonal of a product
    [BATCH, BATCH] of x with itself: the tensor cores do that with the numbers in the registers in
    which the product needs them. That would be two such products in an iteration: see `sums_apart`.

    ONE: the only row is loaded once, and all columns of the result are this row.
    """
    b = tl.arange(0, 1 if ONE else BATCH)[None, :]
    in_k = (k < K) | EVEN
    x_k = tl.load(x + b * K + k, mask=(b < B) & in_k, other=0.0)
    if HAS_NORM:
        if ONE or sums_apart():
            squares += x_k.to(tl.float32) * x_k.to(tl.float32)
        else:
            squares = tl.dot(tl.trans(x_k), x_k, squares, input_precision=PRECISION)
        x_k *= tl.load(norm + k, mask=in_k, other=0.0).to(x_k.dtype)
    if ONE:
        x_k = tl.broadcast_to(x_k, x_k.shape[:-1] + [BATCH])  # noqa: RUF005
    return x_k, squares


@triton.jit
def _no_squares(COLUMNS: tl.constexpr, BATCH: tl.constexpr, ONE: tl.constexpr, SPLIT: tl.constexpr):
    """The first `squares` of `_load_x`, for COLUMNS columns at a time."""
    return _zeros(COLUMNS if ONE or sums_apart() else BATCH, 1 if ONE else BATCH, SPLIT)


@triton.jit
def _rms_factors(
    squares, eps, K: tl.constexpr, BATCH: tl.constexpr, ONE: tl.constexpr, SPLIT: tl.constexpr
):
    """1 / √(mean(x²) + ε) of each row [1, BATCH], or of the only row [1, 1]."""
    squares = _sum_parts(squares, SPLIT)
    if not (ONE or sums_apart()):
        b = tl.arange(0, BATCH)
        squares = tl.where(b[:, None] == b[None, :], squares, 0.0)
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]


@triton.jit
def _parts(SPLIT: tl.constexpr):
    """The numbers of the parts of K, as [SPLIT, 1, 1]. A single part has no axis: [1, 1]."""
    part = tl.arange(0, SPLIT)[:, None]
    return part if SPLIT == 1 else part[:, :, None]


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr):
    """Sums of every part, to start from."""
    if SPLIT == 1:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    else:
        sums = tl.zeros([SPLIT, ROWS, COLUMNS], tl.float32)
    return sums


@triton.jit
def _sum_parts(sums, SPLIT: tl.constexpr):
    if SPLIT > 1:
        sums = tl.sum(sums, 0)
    return sums
