"""Kernels for the gates: the weights that the matrix kernels need, and the gates' gradients.

All arrays are [B, NH, T], float32 and contiguous. For position t in a chunk:

    b_t   = Σ logσ(f̃) from the chunk's start, or the latest boundary's if later, to t
    top_t = max_s (b_t − b_s + ĩ_s)                      s ≤ t since the boundary, in this chunk
    m_t   = max(b_t + m, top_t)                          m: the state's; see below for a boundary
    from_state_t = exp(b_t + m − m_t)                    0 after a boundary
    to_state_s   = exp(b_last − b_s + ĩ_s − m_last)      0 before a boundary

A boundary is the first token of a document, or a token with a forget gate of −∞. After a boundary
the state's m has no effect: m_t = top_t. In a document that starts in this chunk, m starts from 0,
so top_t is at least b_t. After a forget gate of −∞ it starts from −∞, and that gate is 0 in b.
"""

import triton
import triton.language as tl


@triton.jit
def log_sigmoid(x):
    """logσ(x) = min(x, 0) − log1p(exp(−|x|)), with full relative precision.

    An open forget gate has logσ ≈ −1e-7, which would be lost in log(1 + x). So log1p(e) is computed
    as 2 artanh(z) with z = e / (2 + e) ≤ 1/3, by its series.
    """
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    s = z * z
    series = 1.0 / 13 + s * (1.0 / 15)
    series = 1.0 / 11 + s * series
    series = 1.0 / 9 + s * series
    series = 1.0 / 7 + s * series
    series = 1.0 / 5 + s * series
    series = 1.0 / 3 + s * series
    return tl.minimum(x, 0.0) - 2.0 * z * (1.0 + s * series)


@triton.jit
def _add_in_document(left, left_boundary, right, right_boundary):
    return tl.where(right_boundary > 0, right, left + right), left_boundary | right_boundary


@triton.jit
def _max_in_document(left, left_boundary, right, right_boundary):
    return tl.where(
        right_boundary > 0, right, tl.maximum(left, right)
    ), left_boundary | right_boundary


@triton.jit
def _latest(left, right):
    return tl.maximum(left, right)


@triton.jit
def _chain(left_decay, left_top, right_decay, right_top):
    """Composes the maps m ↦ max(decay + m, top) of two successive stretches of tokens."""
    return left_decay + right_decay, tl.maximum(left_top + right_decay, right_top)


@triton.jit
def sum_gates_kernel(
    i, f, resets, b, top, start,
    i_stride_b, i_stride_t, i_stride_h, f_stride_b, f_stride_t, f_stride_h,
    T, NH, CHUNK: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """b and top of one chunk and head. `start` is the latest boundary up to t, or −1."""
    batch, head = tl.program_id(1) // NH, tl.program_id(1) % NH
    place = tl.arange(0, CHUNK)
    t = tl.program_id(0) * CHUNK + place
    inside = t < T
    wide_batch, wide_t = batch.to(tl.int64), t.to(tl.int64)
    f_t = tl.load(
        f + wide_batch * f_stride_b + wide_t * f_stride_t + head * f_stride_h,
        mask=inside, other=float("inf"),
    )  # fmt: skip
    i_t = tl.load(
        i + wide_batch * i_stride_b + wide_t * i_stride_t + head * i_stride_h,
        mask=inside, other=float("-inf"),
    )  # fmt: skip
    out = (wide_batch * NH + head) * T + t
    forgets = (f_t == float("-inf")).to(tl.int32)
    boundary = forgets
    if HAS_RESETS:
        boundary |= tl.load(resets + wide_batch * T + t, mask=inside, other=0).to(tl.int32)
    # Twice the place of the latest boundary, plus 1 if a forget gate made it.
    latest = tl.associative_scan(tl.where(boundary > 0, 2 * place + forgets, -1), 0, _latest)
    log_f = tl.where(forgets > 0, 0.0, log_sigmoid(f_t))
    b_t, _ = tl.associative_scan((log_f, boundary), 0, _add_in_document)
    highest, _ = tl.associative_scan((i_t - b_t, boundary), 0, _max_in_document)
    top_t = b_t + highest
    if HAS_RESETS:
        top_t = tl.where((latest >= 0) & (latest % 2 == 0), tl.maximum(b_t, top_t), top_t)
    start_t = tl.where(latest >= 0, tl.program_id(0) * CHUNK + latest // 2, -1)
    tl.store(b + out, b_t, mask=inside)
    tl.store(top + out, top_t, mask=inside)
    tl.store(start + out, start_t, mask=inside)


@triton.jit
def chain_stabilisers_kernel(
    b, top, start, m_first, m_chunk,
    T, NC, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m before each chunk and after the last one [B, NH, NC + 1], by a scan over the chunks."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.load(m_first + row)
    tl.store(m_chunk + row * (NC + 1), m)
    for first in range(0, NC, BLOCK):
        c = first + tl.arange(0, BLOCK)
        inside = c < NC
        last = tl.minimum((c + 1) * CHUNK, T) - 1
        decay = tl.load(b + row * T + last, mask=inside, other=0.0)
        highest = tl.load(top + row * T + last, mask=inside, other=float("-inf"))
        boundary = tl.load(start + row * T + last, mask=inside, other=-1)
        decay = tl.where(boundary >= 0, float("-inf"), decay)
        decay, highest = tl.associative_scan((decay, highest), 0, _chain)
        m_c = tl.maximum(decay + m, highest)
        tl.store(m_chunk + row * (NC + 1) + 1 + c, m_c, mask=inside)
        m = tl.sum(tl.where(c == tl.minimum(first + BLOCK, NC) - 1, m_c, 0.0), 0)


@triton.jit
def weights_kernel(
    i, b, top, start, m_chunk, m, from_state, to_state, decay,
    i_stride_b, i_stride_t, i_stride_h,
    T, NH, NC, CHUNK: tl.constexpr,
):  # fmt: skip
    """m_t, the weights from and to the state, and the chunk's decay of the state."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // NH, row % NH
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = t < T
    last = tl.minimum((chunk + 1) * CHUNK, T) - 1
    b_t = tl.load(b + row * T + t, mask=inside, other=0.0)
    top_t = tl.load(top + row * T + t, mask=inside, other=0.0)
    i_t = tl.load(
        i + batch * i_stride_b + t.to(tl.int64) * i_stride_t + head * i_stride_h,
        mask=inside, other=float("-inf"),
    )  # fmt: skip
    b_last = tl.load(b + row * T + last)
    m_before = tl.load(m_chunk + row * (NC + 1) + chunk)
    m_after = tl.load(m_chunk + row * (NC + 1) + chunk + 1)
    start_t = tl.load(start + row * T + t, mask=inside, other=-1)
    start_last = tl.load(start + row * T + last)
    # Select before exp: after a boundary the exponent may overflow.
    log_from_state = tl.where(start_t < 0, b_t + m_before, float("-inf"))
    m_t = tl.maximum(log_from_state, top_t)
    tl.store(m + row * T + t, m_t, mask=inside)
    tl.store(from_state + row * T + t, tl.exp(log_from_state - m_t), mask=inside)
    log_to_state = tl.where(start_t == start_last, b_last - b_t + i_t - m_after, float("-inf"))
    tl.store(to_state + row * T + t, tl.exp(log_to_state), mask=inside)
    shrink = tl.where(start_last < 0, b_last + m_before - m_after, float("-inf"))
    tl.store(decay + row * NC + chunk, tl.exp(shrink))


@triton.jit
def row_gradients_kernel(
    h, dh, m, normaliser, from_state, inverse, slope, q_weight, n_weight,
    h_stride_b, h_stride_t, h_stride_h, dh_stride_b, dh_stride_t, dh_stride_h,
    scale, eps, T, NH, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """For each position: scale / denominator, scale · d(n·q), and both times from_state.

    h = numerator / (max(|n·q|, exp(−m)) + ε). Where |n·q| is the larger of the two, its gradient is
    −(dh·h) / denominator · sign(n·q), else 0.
    """
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // NH, row % NH
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    inside = t < T
    product = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (d < D)[None, :]
        h_at = h + batch * h_stride_b + head * h_stride_h + t[:, None] * h_stride_t + d[None, :]
        dh_at = (
            dh + batch * dh_stride_b + head * dh_stride_h + t[:, None] * dh_stride_t + d[None, :]
        )
        h_t = tl.load(h_at, mask=mask, other=0.0).to(tl.float32)
        product += tl.sum(h_t * tl.load(dh_at, mask=mask, other=0.0).to(tl.float32), 1)
    m_t = tl.load(m + row * T + t, mask=inside, other=0.0)
    n_q = tl.load(normaliser + row * T + t, mask=inside, other=0.0)
    floor = tl.exp(-m_t)
    inverse_t = 1.0 / (tl.maximum(tl.abs(n_q), floor) + eps)
    sign = tl.where(n_q > 0, 1.0, -1.0)
    slope_t = tl.where(tl.abs(n_q) > floor, -product * inverse_t * sign, 0.0)
    weight = tl.load(from_state + row * T + t, mask=inside, other=0.0)
    tl.store(inverse + row * T + t, scale * inverse_t, mask=inside)
    tl.store(slope + row * T + t, scale * slope_t, mask=inside)
    tl.store(q_weight + row * T + t, weight * scale * inverse_t, mask=inside)
    tl.store(n_weight + row * T + t, weight * scale * slope_t, mask=inside)


@triton.jit
def gate_gradients_kernel(
    f, start, q_dq, k_dk, c_dc, di, df,
    f_stride_b, f_stride_t, f_stride_h,
    T, NH, NC, ROWS, Q_PARTS, K_PARTS, CHUNK: tl.constexpr,
):  # fmt: skip
    """dĩ and df̃ [B, T, NH] of one chunk and head.

    dĩ_s = k_s·dk_s and db_t = q_t·dq_t − k_t·dk_t. The gradient of logσ(f̃_t) is the sum of db from
    t to the next boundary or to the end of the chunk. If no boundary comes before that end,
    ⟨C, dC⟩ + ⟨n, dn⟩ at the end of the chunk is added. The same number can be computed from the
    start: the product at the start of the chunk minus the sum of db before t. Each way adds up the
    rounding errors of its own terms. If no boundary is in the chunk, a mix of both, weighted by
    position, has the smallest error.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // NH, row % NH
    # Positions in reverse order, because the sums run over later positions.
    t = chunk * CHUNK + CHUNK - 1 - tl.arange(0, CHUNK)
    inside = t < T
    last = tl.minimum((chunk + 1) * CHUNK, T) - 1
    q_sum = tl.zeros([CHUNK], tl.float32)
    k_sum = tl.zeros([CHUNK], tl.float32)
    for part in range(Q_PARTS):
        q_sum += tl.load(q_dq + (part * ROWS + row) * T + t, mask=inside, other=0.0)
    for part in range(K_PARTS):
        k_sum += tl.load(k_dk + (part * ROWS + row) * T + t, mask=inside, other=0.0)
    db = q_sum - k_sum
    before = tl.load(c_dc + row * (NC + 1) + chunk)
    after = tl.load(c_dc + row * (NC + 1) + chunk + 1)
    share = (t - chunk * CHUNK).to(tl.float32) / (last + 1 - chunk * CHUNK).to(tl.float32)
    mixed = share * after + (1 - share) * (before - tl.sum(db, 0))
    # A sum stops where the next position is a boundary.
    start_t = tl.load(start + row * T + t, mask=inside, other=-1)
    start_next = tl.load(start + row * T + t + 1, mask=inside & (t < last), other=-1)
    start_last = tl.load(start + row * T + last)
    cut = (start_next == t + 1).to(tl.int32)
    crossing = tl.where(start_t == start_last, after, 0.0)
    crossing = tl.where(start_last >= 0, crossing, mixed)
    d_log, _ = tl.associative_scan((db, cut), 0, _add_in_document)
    d_log += crossing
    # The forget gate at a boundary has no effect.
    d_log = tl.where(start_t == t, 0.0, d_log)
    wide_t = t.to(tl.int64)
    f_t = tl.load(
        f + batch * f_stride_b + wide_t * f_stride_t + head * f_stride_h,
        mask=inside, other=0.0,
    )  # fmt: skip
    out = (batch * T + wide_t) * NH + head
    tl.store(di + out, k_sum, mask=inside)
    tl.store(df + out, d_log / (1.0 + tl.exp(f_t)), mask=inside)
