"""`replay_pass` as one kernel: cell, norm and gate (see `mlstm/replay.py` for the equations).

As in `replay.py`, each program has a tile of one head's C, cut along d_hv. The queries of a row are
the rows of small matrix products: with C, with the ring's tokens, and with the new tokens. A tile
is read once for all of them, so a pass moves hardly more bytes than a step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xlstm7b.mlstm import MLSTMState
from xlstm7b.mlstm.replay import Pass, Ring
from xlstm7b.mlstm.triton.chunk_gates import log_sigmoid
from xlstm7b.mlstm.triton.launch_params import Tile, overlap_launch, padded
from xlstm7b.mlstm.triton.replay import (
    dot_narrow,
    fold_n,
    folded_rows,
    most_held,
    precision,
)
from xlstm7b.mlstm.triton.step import take_counters


@triton.jit
def pass_kernel(
    q, k, v, i, f, gate, norm_weight, C, n, m, ring_k, ring_v, ring_i, ring_f,
    folded, seen, lengths, h, raw, arrived,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    i_stride_t, i_stride_h, f_stride_t, f_stride_h, gate_stride_t, gate_stride_h,
    C_stride_b, n_stride_b, m_stride_b, ring_k_stride_b, ring_v_stride_b, ring_i_stride_b,
    scale, eps, norm_eps, NH, DK: tl.constexpr, DV: tl.constexpr, T: tl.constexpr,
    SIZE: tl.constexpr, ENTRIES: tl.constexpr, INTERVAL: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, FOLDED: tl.constexpr,
    NORMED: tl.constexpr, PADDED_V: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one head's C, and the same elements of h of all T tokens.

    ROWS is T, padded for `tl.dot`; ENTRIES, padded likewise, are those of the ring that can be in
    use before the pass. Vectors over them are in the order of age: 0 is the token before the pass.
    Vectors over new tokens are in the order of the text.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // NH, row % NH
    # A row that reads nothing has a head and a ring of size 0.
    length = tl.load(lengths + batch).to(tl.int32)
    is_live = (length > 0).to(tl.int32)
    width_k, width_v = DK * is_live, DV * is_live
    before, first = tl.load(folded + batch), tl.load(seen + batch)
    in_ring = (first - before).to(tl.int32) * is_live
    crosses = (first + batch) // INTERVAL > (before + batch) // INTERVAL
    folds = tl.where(crosses, is_live, 0) != 0
    d_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = d_v < width_v
    C_head = C + batch * C_stride_b + head * DK * DV + d_v[None, :]
    n_head, m_head = n + batch * n_stride_b + head * DK, m + batch * m_stride_b + head
    ring_k_head = ring_k + batch * ring_k_stride_b + head * SIZE * DK
    ring_v_head = ring_v + batch * ring_v_stride_b + head * SIZE * DV
    ring_i_head = ring_i + batch * ring_i_stride_b + head * SIZE
    ring_f_head = ring_f + batch * ring_i_stride_b + head * SIZE

    # 1. All that the previous launch does not write is loaded before it ends: C first.
    d_k = tl.arange(0, BLOCK_K)
    in_k = d_k < width_k
    C_t = tl.load(C_head + d_k[:, None] * DV, mask=in_k[:, None] & in_v[None, :], other=0.0)
    age = tl.arange(0, ENTRIES)
    held = age < in_ring
    newest = ((first + SIZE - 1) % SIZE).to(tl.int32)
    entry = (newest - age + SIZE) % SIZE
    K_at = ring_k_head + entry[:, None] * DK
    K_t = tl.load(K_at + d_k[None, :], mask=held[:, None] & in_k[None, :], other=0.0)
    V_at = ring_v_head + entry[:, None] * DV + d_v[None, :]
    V_old = tl.load(V_at, mask=held[:, None] & in_v[None, :], other=0.0).to(tl.float32)
    i_old = tl.load(ring_i_head + entry, mask=held, other=-float("inf"))
    log_old = log_sigmoid(tl.load(ring_f_head + entry, mask=held, other=float("inf")))
    m_old = tl.load(m_head)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()

    # 2. The new tokens' v and gates, and their entries of the ring. This launch reads none of them.
    t = tl.arange(0, ROWS)
    is_new = t < length
    token = batch * T + t
    new_entry = ((first + t) % SIZE).to(tl.int32)
    new_v = is_new[:, None] & in_v[None, :]
    v_at = v + token[:, None] * v_stride_t + head * v_stride_h + d_v[None, :]
    V_new = tl.load(v_at, mask=new_v, other=0.0)
    i_new = tl.load(i + token * i_stride_t + head * i_stride_h, mask=is_new, other=-float("inf"))
    tl.store(ring_v_head + new_entry[:, None] * DV + d_v[None, :], V_new, mask=new_v)
    if tile == 0:
        f_new = tl.load(f + token * f_stride_t + head * f_stride_h, mask=is_new, other=0.0)
        tl.store(ring_i_head + new_entry, i_new, mask=is_new)
        tl.store(ring_f_head + new_entry, f_new, mask=is_new)

    # 3. The weights of the tokens for each query: w_tj and a_t. All sums are over what they need,
    #    never differences of sums.
    f_at = f + token * f_stride_t + head * f_stride_h
    since = tl.cumsum(log_sigmoid(tl.load(f_at, mask=is_new, other=float("inf"))), 0)
    log_next = log_sigmoid(tl.load(f_at + f_stride_t, mask=t + 1 < length, other=float("inf")))
    up_to_t = tl.where(t[None, :] < t[:, None], log_next[None, :], 0.0)
    g_new = tl.cumsum(up_to_t, 1, reverse=True)  # Σ over the tokens after j up to t
    g_new = tl.where(t[None, :] <= t[:, None], g_new + i_new[None, :], -float("inf"))
    g_old = i_old + tl.sum(tl.where(age[None, :] < age[:, None], log_old[None, :], 0.0), 1)
    decayed, largest = tl.sum(log_old, 0) + m_old, tl.max(g_old, 0)
    m_new = tl.maximum(since + tl.maximum(decayed, largest), tl.max(g_new, 1))
    decay = tl.exp(since + decayed - m_new)
    weight_old = tl.exp(since[:, None] + g_old[None, :] - m_new[:, None])
    weight_new = tl.exp(g_new - m_new[:, None])

    # 4. Products of the queries with C, n and all k.
    q_rows = q + token[:, None] * q_stride_t + head * q_stride_h
    k_rows = k + token[:, None] * k_stride_t + head * k_stride_h
    k_to = ring_k_head + new_entry[:, None] * DK
    is_stored = t < tl.where(tile == 0, length, 0)
    from_state = tl.zeros([ROWS, BLOCK_V], tl.float32)
    scores_old = tl.zeros([ROWS, ENTRIES], tl.float32)
    scores_new = tl.zeros([ROWS, ROWS], tl.float32)
    n_q = tl.zeros([ROWS, BLOCK_K], tl.float32)
    from_state, scores_old, scores_new, n_q = _add_block(
        from_state, scores_old, scores_new, n_q, q_rows, k_rows, k_to, n_head, C_t, K_t,
        d_k, in_k, is_new, is_stored, PRECISION,
    )  # fmt: skip
    for start in tl.range(BLOCK_K, DK, BLOCK_K, num_stages=STAGES):
        d_k = start + tl.arange(0, BLOCK_K)
        in_k = d_k < width_k
        C_t = tl.load(C_head + d_k[:, None] * DV, mask=in_k[:, None] & in_v[None, :], other=0.0)
        K_t = tl.load(K_at + d_k[None, :], mask=held[:, None] & in_k[None, :], other=0.0)
        from_state, scores_old, scores_new, n_q = _add_block(
            from_state, scores_old, scores_new, n_q, q_rows, k_rows, k_to, n_head, C_t, K_t,
            d_k, in_k, is_new, is_stored, PRECISION,
        )  # fmt: skip

    # 5. h before the norm.
    from_old, from_new = weight_old * scale * scores_old, weight_new * scale * scores_new
    n_q = decay * scale * tl.sum(n_q, 1) + tl.sum(from_old, 1) + tl.sum(from_new, 1)
    numerator = (decay * scale)[:, None] * from_state
    numerator = dot_narrow(from_old, V_old, numerator, True, PRECISION)
    numerator = dot_narrow(from_new, V_new.to(tl.float32), numerator, True, PRECISION)
    size = tl.maximum(tl.abs(n_q), tl.exp(-m_new)) + eps
    raw_at = raw + (token[:, None] * NH + head) * DV + d_v[None, :]
    tl.store(raw_at, numerator / size[:, None], mask=(t < T)[:, None] & (d_v < DV)[None, :])

    # What the checkpoint becomes where the row is folded: the tokens before the pass.
    m_fold = tl.maximum(decayed, largest)
    decay_fold, weight_fold = tl.exp(decayed - m_fold), tl.exp(g_old - m_fold)

    # 6. The program that is last in its head normalises it, and folds n and m.
    tl.debug_barrier()  # all threads have read and written their part
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived + row, 0)
        if folds:
            fold_n(n_head, K_at, None, age, held, weight_fold, decay_fold, DK, FOLDED)
            tl.store(m_head, m_fold)
        all_v = tl.arange(0, PADDED_V)
        in_all_v = all_v < DV
        norm_v = tl.load(norm_weight + head * DV + all_v, mask=in_all_v, other=0.0).to(tl.float32)
        for start in tl.range(0, T, NORMED):
            some_t = start + tl.arange(0, NORMED)
            inside = (some_t < T)[:, None] & in_all_v[None, :]
            tokens = (batch * T + some_t)[:, None]
            at = (tokens * NH + head) * DV + all_v[None, :]
            # .cg skips the L1 cache, which may not have what other programs wrote.
            x = tl.load(raw + at, mask=inside, other=0.0, cache_modifier=".cg")
            gate_at = gate + tokens * gate_stride_t + head * gate_stride_h + all_v[None, :]
            gate_v = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
            centred = tl.where(inside, x - (tl.sum(x, 1) / DV)[:, None], 0.0)
            factor = tl.rsqrt(tl.sum(centred * centred, 1) / DV + norm_eps)
            x = centred * factor[:, None] * norm_v[None, :]
            tl.store(h + at, x * tl.sigmoid(gate_v), mask=inside)

    # 7. Fold the tile of C.
    if folds:
        V_in = weight_fold[:, None] * V_old
        _fold_tile(C_head, K_at, held, in_v, V_in, decay_fold, DK, DV, FOLDED, PRECISION, STAGES)


@triton.jit
def _fold_tile(
    C_head, K_at, held, in_v, V_in, decay,
    DK: tl.constexpr, DV: tl.constexpr, FOLDED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """C ← decay C + Σ_j k_j (w_j v_j)ᵀ, for the rows w_j v_j of V_in.

    The tile is read a second time, most of it from the L2 cache.
    """
    for start in tl.range(0, DK, FOLDED, num_stages=STAGES):
        d_k = start + tl.arange(0, FOLDED)
        in_k = d_k < DK
        K_in = tl.load(K_at + d_k[None, :], mask=held[:, None] & in_k[None, :], other=0.0)
        C_block, mask = C_head + d_k[:, None] * DV, in_k[:, None] & in_v[None, :]
        C_new = decay * tl.load(C_block, mask=mask, other=0.0).to(tl.float32)
        C_new = dot_narrow(tl.trans(K_in.to(tl.float32)), V_in, C_new, False, PRECISION)
        tl.store(C_block, C_new, mask=mask)


@triton.jit
def _add_block(
    from_state, scores_old, scores_new, n_q, q_rows, k_rows, k_to, n_head, C_t, K_t,
    d_k, in_k, is_new, is_stored, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the share of the elements d_k of each head to the products of the queries.

    Also writes these elements of new k to the ring, where `is_stored`.
    """
    mask = is_new[:, None] & in_k[None, :]
    q_t = tl.load(q_rows + d_k[None, :], mask=mask, other=0.0)
    k_t = tl.load(k_rows + d_k[None, :], mask=mask, other=0.0)
    n_t = tl.load(n_head + d_k, mask=in_k, other=0.0)
    tl.store(k_to + d_k[None, :], k_t, mask=is_stored[:, None] & in_k[None, :])
    wide = q_t.to(tl.float32)
    scores_old = tl.dot(q_t, tl.trans(K_t), scores_old, input_precision=PRECISION)
    scores_new = tl.dot(q_t, tl.trans(k_t), scores_new, input_precision=PRECISION)
    if C_t.dtype == q_t.dtype:
        from_state = tl.dot(q_t, C_t, from_state, input_precision=PRECISION)
    else:
        from_state = dot_narrow(wide, C_t.to(tl.float32), from_state, False, PRECISION)
    return from_state, scores_old, scores_new, n_q + wide * n_t[None, :]


@triton.jit
def advance_pass_kernel(
    folded, seen, lengths, kept, rows,
    INTERVAL: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`Pass.advance` in one program."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.arange(0, BLOCK)
    mask = row < rows
    first = tl.load(seen + row, mask=mask, other=0)
    before = tl.load(folded + row, mask=mask, other=0)
    is_live = tl.load(lengths + row, mask=mask, other=0) > 0
    crosses = (first + row) // INTERVAL > (before + row) // INTERVAL
    tl.store(folded + row, first, mask=mask & is_live & crosses)
    tl.store(seen + row, first + tl.load(kept + row, mask=mask, other=0), mask=mask)


def launch_pass(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState, ring: Ring,
    rows: Pass, gate: Tensor, norm_weight: Tensor, norm_eps: float, eps: float, tile: Tile,
    overlap: bool = False,
) -> Tensor:  # fmt: skip
    """Returns h of T tokens of each row, [B, T, NH, d_hv]. Updates rings, and states that are due.

    With `overlap` the kernel reads state, ring, cursors and lengths before the previous kernel has
    ended: see `launch_step`.
    """
    batch, length, heads, d_k = q.shape
    d_v, size = v.shape[-1], ring.k.shape[2]
    assert rows.interval + 2 * length <= size + 1
    for part in (*state, *ring):
        assert part[:1].is_contiguous()
    q, k, v, i, f, gate = (x.flatten(0, 1) for x in (q, k, v, i, f, gate))
    h = torch.empty(batch, length, heads, d_v, dtype=v.dtype, device=v.device)
    raw = torch.empty(batch, length, heads, d_v, dtype=torch.float32, device=v.device)
    pass_kernel[(triton.cdiv(d_v, tile.d_out), batch * heads)](
        q, k, v, i, f, gate, norm_weight, *state, *ring, *rows[:3], h, raw,
        take_counters(batch * heads, q.device),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *i.stride(), *f.stride(),
        *gate.stride()[:2], *(part.stride(0) for part in (*state, *ring[:3])),
        d_k**-0.5, eps, norm_eps, heads, DK=d_k, DV=d_v, T=length,
        SIZE=size, ENTRIES=padded(most_held(size, rows.interval)), INTERVAL=rows.interval,
        BLOCK_K=tile.d_in, BLOCK_V=tile.d_out, FOLDED=folded_rows(tile, d_k),
        NORMED=min(tile.warps, triton.next_power_of_2(length)), PADDED_V=padded(d_v),
        ROWS=padded(length),
        PRECISION=precision(q.dtype), STAGES=tile.stages, **tile.options(),
        **overlap_launch(overlap),
    )  # fmt: skip
    return h


def launch_advance_pass(rows: Pass, kept: Tensor, overlap: bool = False) -> None:
    """`Pass.advance` as one launch, with `overlap` before the previous one ends."""
    count = len(rows.seen)
    advance_pass_kernel[(1,)](
        *rows[:3], kept, count, INTERVAL=rows.interval,
        BLOCK=max(16, triton.next_power_of_2(count)), num_warps=1, **overlap_launch(overlap),
    )  # fmt: skip
