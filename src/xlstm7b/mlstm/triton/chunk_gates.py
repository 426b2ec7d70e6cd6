"""Kernels for the gates: the weights that the matrix kernels need, and the gates' gradients.

All arrays are [B, NH, T], float32 and contiguous. For position t in a chunk and in a document:

    b_t   = Σ logσ(f̃) from the chunk's start, or the document's if later, to t
    top_t = max_s (b_t − b_s + ĩ_s)                      s ≤ t in t's document, in this chunk
    m_t   = max(b_t + m, top_t)                          m: the state's, 0 after a boundary
    from_state_t = exp(b_t + m − m_t)                    0 after a boundary
    to_state_s   = exp(b_last − b_s + ĩ_s − m_last)      0 before a boundary

A boundary is the first token of a document.
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
def _chain(left_decay, left_top, right_decay, right_top):
    """Composes the maps m ↦ max(decay + m, top) of two successive stretches of tokens."""
    return left_decay + right_decay, tl.maximum(left_top + right_decay, right_top)


@triton.jit
def sum_gates_kernel(
    i, f, resets, b, top, document,
    i_stride_b, i_stride_t, i_stride_h, f_stride_b, f_stride_t, f_stride_h,
    T, NH, CHUNK: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """b and top of one chunk and head. `document` counts the boundaries so far in the chunk."""
    batch, head = tl.program_id(1) // NH, tl.program_id(1) % NH
    t = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
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
    boundary = tl.zeros([CHUNK], tl.int32)
    if HAS_RESETS:
        boundary = tl.load(resets + wide_batch * T + t, mask=inside, other=0).to(tl.int32)
        boundaries = tl.cumsum(boundary, 0)
        if head == 0:
            tl.store(document + wide_batch * T + t, boundaries, mask=inside)
    b_t, _ = tl.associative_scan((log_sigmoid(f_t), boundary), 0, _add_in_document)
    highest, _ = tl.associative_scan((i_t - b_t, boundary), 0, _max_in_document)
    tl.store(b + out, b_t, mask=inside)
    tl.store(top + out, b_t + highest, mask=inside)


@triton.jit
def chain_stabilisers_kernel(
    b, top, document, m_first, m_chunk,
    T, NH, NC, CHUNK: tl.constexpr, BLOCK: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """m before each chunk and after the last one [B, NH, NC + 1], by a scan over the chunks."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.load(m_first + row)
    tl.store(m_chunk + row * (NC + 1), m)
    for start in range(0, NC, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < NC
        last = tl.minimum((c + 1) * CHUNK, T) - 1
        decay = tl.load(b + row * T + last, mask=inside, other=0.0)
        highest = tl.load(top + row * T + last, mask=inside, other=float("-inf"))
        if HAS_RESETS:
            boundaries = tl.load(document + (row // NH) * T + last, mask=inside, other=0)
            highest = tl.where(boundaries > 0, tl.maximum(decay, highest), highest)
            decay = tl.where(boundaries > 0, float("-inf"), decay)
        decay, highest = tl.associative_scan((decay, highest), 0, _chain)
        m_c = tl.maximum(decay + m, highest)
        tl.store(m_chunk + row * (NC + 1) + 1 + c, m_c, mask=inside)
        m = tl.sum(tl.where(c == tl.minimum(start + BLOCK, NC) - 1, m_c, 0.0), 0)


@triton.jit
def weights_kernel(
    i, b, top, document, m_chunk, m, from_state, to_state, decay,
    i_stride_b, i_stride_t, i_stride_h,
    T, NH, NC, CHUNK: tl.constexpr, HAS_RESETS: tl.constexpr,
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
    m_start = tl.zeros([CHUNK], tl.float32) + m_before
    in_first, in_last, kept = t >= 0, t >= 0, 1.0
    if HAS_RESETS:
        document_t = tl.load(document + batch * T + t, mask=inside, other=0)
        document_last = tl.load(document + batch * T + last)
        in_first, in_last = document_t == 0, document_t == document_last
        m_start = tl.where(in_first, m_start, 0.0)
        kept = tl.where(document_last == 0, 1.0, 0.0)
    m_t = tl.maximum(b_t + m_start, top_t)
    tl.store(m + row * T + t, m_t, mask=inside)
    from_state_t = tl.where(in_first, tl.exp(b_t + m_start - m_t), 0.0)
    tl.store(from_state + row * T + t, from_state_t, mask=inside)
    log_to_state = tl.where(in_last, b_last - b_t + i_t - m_after, float("-inf"))
    tl.store(to_state + row * T + t, tl.exp(log_to_state), mask=inside)
    # Select before exp: with a boundary in the chunk the exponent may overflow.
    shrink = tl.where(kept > 0, b_last + m_before - m_after, float("-inf"))
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
    f, resets, q_dq, k_dk, c_dc, di, df,
    f_stride_b, f_stride_t, f_stride_h,
    T, NH, NC, ROWS, Q_PARTS, K_PARTS,
    CHUNK: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """dĩ and df̃ [B, T, NH] of one chunk and head.

    dĩ_s = k_s·dk_s and db_t = q_t·dq_t − k_t·dk_t. The gradient of logσ(f̃_t) is the sum of db from
    t to the end of the document or of the chunk. If the document continues in the next chunk,
    ⟨C, dC⟩ + ⟨n, dn⟩ at the end of the chunk is added. The same number can be computed from the
    start: the product at the start of the chunk minus the sum of db before t. Each way adds up the
    rounding errors of its own terms. If no document starts in the chunk, a mix of both, weighted by
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
    crossing = mixed
    boundary = tl.zeros([CHUNK], tl.int32)
    cut = boundary
    if HAS_RESETS:
        # A sum stops at the last position of a document: the next position is a boundary.
        boundary = tl.load(resets + batch * T + t, mask=inside, other=0).to(tl.int32)
        follows = inside & (t < last)
        cut = tl.load(resets + batch * T + t + 1, mask=follows, other=0).to(tl.int32)
        boundaries_after = tl.cumsum(cut, 0)
        crossing = tl.where(boundaries_after > 0, 0.0, after)
        crossing = tl.where(tl.sum(boundary, 0) > 0, crossing, mixed)
    d_log, _ = tl.associative_scan((db, cut), 0, _add_in_document)
    d_log += crossing
    # The forget gate of a document's first token has no effect.
    d_log = tl.where(boundary > 0, 0.0, d_log)
    wide_t = t.to(tl.int64)
    f_t = tl.load(
        f + batch * f_stride_b + wide_t * f_stride_t + head * f_stride_h,
        mask=inside, other=0.0,
    )  # fmt: skip
    out = (batch * T + wide_t) * NH + head
    tl.store(di + out, k_sum, mask=inside)
    tl.store(df + out, d_log / (1.0 + tl.exp(f_t)), mask=inside)
