"""The work between two products: norms, soft-caps, gates. Each is one pass over memory.

`one_row.py` and `few_rows.py` do most of it themselves; these are for larger batches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xlstm7b.generate.kernels.overlap import overlap_options, wait_for_previous
from xlstm7b.mlstm.triton.launch_params import fitting_stages
from xlstm7b.model.head_kernels import soft_cap


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + ε) in x's dtype, times the weight; computed in float32 or wider.

    x is [R, d] with any row stride.
    """
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    rms_norm_kernel[(rows,)](
        x, weight, out, eps, x.stride(0), D=width, BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8, **overlap_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def rms_norm_kernel(
    x, weight, out, eps, x_stride, D: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """One row per program."""
    d = tl.arange(0, BLOCK)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    x_d = tl.load(x + row * x_stride + d, mask=d < D, other=0.0)
    tl.store(out + row * D + d, normalise(x_d, w, eps, D), mask=d < D)


@triton.jit
def normalise(x, w, eps, D: tl.constexpr):
    """RMSNorm of one row in float32, for x and weights w as they were loaded."""
    wide = x.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    return wide.to(x.dtype).to(tl.float32) * w.to(tl.float32)


def gate_product(
    x: Tensor, W: Tensor, bias: Tensor, cap: float | None, live: Tensor | None
) -> Tensor:
    """x Wᵀ + bias in float32, soft-capped and masked, for x [R, d] and W [2 NH, d]."""
    rows, width = x.shape
    assert x.is_contiguous()
    assert W.is_contiguous()
    out = torch.empty(rows, len(W), dtype=torch.float32, device=x.device)
    stage_bytes = 8 * (16 + 16) * 128  # of rows and gates, for all parts
    gate_product_kernel[triton.cdiv(rows, 16), triton.cdiv(len(W), 16)](
        x, W, bias, out if live is None else live, out, cap or 1.0, rows, len(W), D=width,
        ROWS=16, GATES=16, PARTS=8, BLOCK=128 // x.itemsize,
        HAS_CAP=cap is not None, HAS_LIVE=live is not None, num_warps=8,
        num_stages=fitting_stages(4, stage_bytes, x.device), **overlap_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def gate_product_kernel(
    x, W, bias, live, out, cap, R, N_GATES, D: tl.constexpr,
    ROWS: tl.constexpr, GATES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_LIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """GATES gates of ROWS rows per program. Each warp sums over its own part of the width."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate = tl.program_id(1) * GATES + tl.arange(0, GATES)
    part, d = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = (D + PARTS * BLOCK - 1) // (PARTS * BLOCK) * BLOCK  # of a part
    x_row = x + row.to(tl.int64)[None, :, None] * D
    W_gate = W + gate[None, None, :] * D
    sums = tl.zeros((PARTS, ROWS, GATES), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = part[:, None] * WIDTH + start + d[None, :]
        inside = at < D
        x_d = tl.load(
            x_row + at[:, None, :], mask=inside[:, None, :] & (row < R)[None, :, None], other=0.0
        )
        w_d = tl.load(
            W_gate + at[:, :, None],
            mask=inside[:, :, None] & (gate < N_GATES)[None, None, :],
            other=0.0,
        )
        sums = tl.dot(x_d, w_d, sums, input_precision="ieee")
    y = tl.sum(sums, 0)
    y += tl.load(bias + gate, mask=gate < N_GATES, other=0.0).to(tl.float32)[None, :]
    if HAS_CAP:
        y = soft_cap(y, cap)
    if HAS_LIVE:
        is_live = tl.load(live + row, mask=row < R, other=0) != 0
        y = mask_gates(y, is_live[:, None], gate[None, :], N_GATES)
    tl.store(
        out + row[:, None] * N_GATES + gate[None, :],
        y,
        mask=(row < R)[:, None] & (gate < N_GATES)[None, :],
    )


def cap_logits(logits: Tensor, cap: float) -> None:
    """Soft-caps contiguous logits in float32, in place."""
    size, block = logits.numel(), 2048
    cap_logits_kernel[(triton.cdiv(size, block),)](logits, cap, size, BLOCK=block)


@triton.jit
def cap_logits_kernel(logits, cap, SIZE, BLOCK: tl.constexpr):
    """BLOCK elements per program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    y = tl.load(logits + at, mask=inside, other=0.0)
    tl.store(logits + at, soft_cap(y, cap), mask=inside)


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """The rows of the table [V, d] that tokens [R] name. A token below 0 has that of token 0.

    Tokens must be below V: unlike PyTorch, nothing checks it.
    """
    return _launch_embed(tokens, table, None, None)


def embed_live(tokens: Tensor, table: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """`embed`, and which rows [R] are live: those whose token is not below 0.

    Adds 1 to `seen` [R] for each live row, in place, if it is given.
    """
    live = torch.empty(len(tokens), dtype=torch.bool, device=tokens.device)
    return _launch_embed(tokens, table, live, seen), live


def _launch_embed(
    tokens: Tensor, table: Tensor, live: Tensor | None, seen: Tensor | None
) -> Tensor:
    rows, width = len(tokens), table.shape[1]
    assert seen is None or seen.is_contiguous()
    out = torch.empty(rows, width, dtype=table.dtype, device=table.device)
    embed_kernel[(triton.cdiv(width, 1024), rows)](
        tokens.contiguous(), table, out, out if live is None else live,
        out if seen is None else seen, table.stride(0), width,
        HAS_LIVE=live is not None, HAS_SEEN=seen is not None, BLOCK=1024,
        **overlap_options(out.device),
    )  # fmt: skip
    return out


@triton.jit
def embed_kernel(
    tokens, table, out, live, seen, table_stride, width,
    HAS_LIVE: tl.constexpr, HAS_SEEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of one row per program. The first program of a row also writes `live`."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    token = tl.load(tokens + row).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(table + tl.maximum(token, 0) * table_stride + at, mask=inside)
    tl.store(out + row * width + at, x, mask=inside)
    if HAS_LIVE:  # noqa: SIM102 (this is decided when compiled, the next line at run time)
        if tl.program_id(0) == 0:
            tl.store(live + row, token >= 0)
            if HAS_SEEN:
                tl.store(seen + row, tl.load(seen + row) + (token >= 0).to(tl.int64))


def pass_tokens(pending: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens [B, T] of a pass: those pending [B], then their drafts; and how many are real."""
    batch, length = len(pending), 1 + drafts.shape[1]
    tokens = torch.empty(batch, length, dtype=pending.dtype, device=pending.device)
    lengths = torch.empty_like(pending)
    pass_tokens_kernel[(batch,)](
        pending, drafts, tokens, lengths, drafts.stride(0), length,
        PADDED=triton.next_power_of_2(length), num_warps=1, **overlap_options(pending.device),
    )  # fmt: skip
    return tokens, lengths


@triton.jit
def pass_tokens_kernel(
    pending, drafts, tokens, lengths, drafts_stride, T,
    PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    wait_for_previous(OVERLAP)
    row, t = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    first = tl.load(pending + row)
    draft = tl.load(drafts + row * drafts_stride + t - 1, mask=(t > 0) & (t < T), other=-1)
    tl.store(tokens + row * T + t, tl.where(t == 0, first, draft), mask=t < T)
    real = 1 + tl.sum((draft >= 0).to(tl.int64), 0)
    tl.store(lengths + row, tl.where(first >= 0, real, 0))


def keep_logits(logits: Tensor, kept: Tensor, last: Tensor, every: Tensor | None = None) -> None:
    """Copies logits [B, T, V]: of position `kept` − 1 of each row to `last` [B, V], all to `every`.

    A row that keeps no position leaves `last` as it is.
    """
    batch, length, width = logits.shape
    assert logits.is_contiguous()
    assert last.is_contiguous()
    every_stride = 0
    if every is not None:
        assert every[:1].is_contiguous()
        every_stride = every.stride(0)
    keep_logits_kernel[(triton.cdiv(width, 4096), batch * length)](
        logits, kept, last, logits if every is None else every, every_stride, length, width,
        EVERY=every is not None, BLOCK=4096, **overlap_options(logits.device),
    )  # fmt: skip


@triton.jit
def keep_logits_kernel(
    logits, kept, last, every, every_stride, T, V,
    EVERY: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of one position per program."""
    wait_for_previous(OVERLAP)
    row, t = tl.program_id(1).to(tl.int64) // T, tl.program_id(1) % T
    is_last = tl.load(kept + row).to(tl.int32) == t + 1
    if EVERY or is_last:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        y = tl.load(logits + (row * T + t) * V + at, mask=at < V)
        if is_last:
            tl.store(last + row * V + at, y, mask=at < V)
        if EVERY:
            tl.store(every + row * every_stride + t * V + at, y, mask=at < V)


@triton.jit
def mask_gates(y, is_live, gate, N_GATES):
    """Gates of a row that is not live: input gates −∞, forget gates +∞. The state stays as it is.

    `gate` is the column of y. The first half of the N_GATES columns are input gates.
    """
    return tl.where(is_live, y, tl.where(gate < N_GATES // 2, float("-inf"), float("inf")))


def head_norm(h: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """Headwise norm of h [R, NH, d_hv], times σ(gate) for gate [R, NH · d_hv].

    h is contiguous; gate may have any row stride.
    """
    rows, heads, width = h.shape
    out = torch.empty(rows, heads * width, dtype=h.dtype, device=h.device)
    head_norm_kernel[(rows * heads,)](
        h, weight, gate, out, eps, gate.stride(0), heads, D=width,
        BLOCK=triton.next_power_of_2(width), num_warps=2 if width <= 512 else 4,
    )  # fmt: skip
    return out


@triton.jit
def head_norm_kernel(
    h, weight, gate, out, eps, gate_stride, NH, D: tl.constexpr, BLOCK: tl.constexpr
):
    """One head of one row per program: LayerNorm without bias, times the weight, times σ(gate)."""
    head = tl.program_id(0) % NH
    row = (tl.program_id(0) // NH).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    x = tl.load(h + (row * NH + head) * D + d, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + head * D + d, mask=inside, other=0.0).to(tl.float32)
    x = normalise_head(x, w, inside, eps, D, 0)
    at = gate + row * gate_stride + head * D + d
    x *= tl.sigmoid(tl.load(at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + (row * NH + head) * D + d, x, mask=inside)


@triton.jit
def normalise_head(x, w, inside, eps, D: tl.constexpr, AXIS: tl.constexpr):
    """LayerNorm without bias along an axis of D numbers, times w. x and w are 0 if not `inside`."""
    centred = tl.where(inside, x - tl.sum(x, AXIS, keep_dims=True) / D, 0.0)
    variance = tl.sum(centred * centred, AXIS, keep_dims=True) / D
    return centred * tl.rsqrt(variance + eps) * w


def silu_and_multiply(x: Tensor) -> Tensor:
    """SiLU(x[:, :F]) · x[:, F:] for x [R, 2 F]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = 2048
    silu_and_multiply_kernel[(triton.cdiv(out.numel(), block),)](
        x, out, out.numel(), width, BLOCK=block, **overlap_options(x.device)
    )
    return out


@triton.jit
def silu_and_multiply_kernel(x, out, SIZE, F, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """BLOCK elements of the result [R, F] per program."""
    wait_for_previous(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate_at = x + at // F * 2 * F + at % F
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + F, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, gate * tl.sigmoid(gate) * up, mask=inside)
