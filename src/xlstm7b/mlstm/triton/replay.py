"""`replay_step` as one kernel: cell, norm and gate (see `mlstm/replay.py` for the equations).

Each program has a tile of one head's C, cut along d_hv, as in `step.py`. It reads the tile, adds
the share of the ring's tokens and writes its part of one entry. It writes the tile only where the
row is folded. Every program reads n and the k of the whole ring: the tiles of a head run next to
each other, so most find them in the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xlstm7b.mlstm import MLSTMState
from xlstm7b.mlstm.replay import Cursor, Ring
from xlstm7b.mlstm.triton.chunk_gates import log_sigmoid
from xlstm7b.mlstm.triton.launch_params import Tile, overlap_launch, padded, sums_apart
from xlstm7b.mlstm.triton.step import take_counters


@triton.jit
def replay_kernel(
    q, k, v, i, f, gate, norm_weight, C, n, m, ring_k, ring_v, ring_i, ring_f,
    folded, seen, live, order, h, raw, arrived,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h,
    i_stride_b, i_stride_h, f_stride_b, f_stride_h, gate_stride_b, gate_stride_h,
    C_stride_b, n_stride_b, m_stride_b, ring_k_stride_b, ring_v_stride_b, ring_i_stride_b,
    scale, eps, norm_eps, NH, DK: tl.constexpr, DV: tl.constexpr,
    SIZE: tl.constexpr, ENTRIES: tl.constexpr, MULTIPLE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    FOLDED: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    HAS_ORDER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one head's C, and the same elements of h.

    ENTRIES is padded to a power of two. Vectors over tokens are in the order of age: 0 is the
    current token, which comes from k, v, i and f, 1 the one before it.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // NH, row % NH
    if HAS_ORDER:
        batch = tl.load(order + batch)
        row = batch * NH + head
    # A row that is not live has a head and a ring of size 0: nothing of it is read or written.
    is_live = tl.load(live + batch).to(tl.int32)
    width_k, width_v = DK * is_live, DV * is_live
    token, before = tl.load(seen + batch), tl.load(folded + batch)
    in_ring = (token - before).to(tl.int32) * is_live
    crosses = (token + 1 + batch) // MULTIPLE > (before + batch) // MULTIPLE
    folds = tl.where(crosses, is_live, 0) != 0
    d_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = d_v < width_v
    C_head = C + batch * C_stride_b + head * DK * DV + d_v[None, :]
    n_head, m_head = n + batch * n_stride_b + head * DK, m + batch * m_stride_b + head
    q_head = q + batch * q_stride_b + head * q_stride_h
    k_head = k + batch * k_stride_b + head * k_stride_h
    ring_k_head = ring_k + batch * ring_k_stride_b + head * SIZE * DK
    ring_v_head = ring_v + batch * ring_v_stride_b + head * SIZE * DV
    ring_i_head = ring_i + batch * ring_i_stride_b + head * SIZE
    ring_f_head = ring_f + batch * ring_i_stride_b + head * SIZE

    # All that the previous launch does not write is loaded before it ends: C first. A row that is
    # folded reads it later.
    d_k = tl.arange(0, BLOCK_K)
    in_k = d_k < tl.where(folds, 0, width_k)
    C_t = tl.load(C_head + d_k[:, None] * DV, mask=in_k[:, None] & in_v[None, :], other=0.0)
    age = tl.arange(0, ENTRIES)
    held = (age >= 1) & (age <= in_ring)
    newest = (token % SIZE).to(tl.int32)  # the entry of the current token
    entry = (newest - age + SIZE) % SIZE
    K_at = ring_k_head + entry[:, None] * DK
    K_t = tl.load(K_at + d_k[None, :], mask=held[:, None] & in_k[None, :], other=0.0)
    V_at = ring_v_head + entry[:, None] * DV + d_v[None, :]
    V_t = tl.load(V_at, mask=held[:, None] & in_v[None, :], other=0.0)
    i_tokens = tl.load(ring_i_head + entry, mask=held, other=-float("inf"))
    f_tokens = tl.load(ring_f_head + entry, mask=held, other=float("inf"))
    all_k = tl.arange(0, PADDED_K)
    in_all = all_k < width_k
    n_old = tl.load(n_head + all_k, mask=in_all, other=0.0)
    m_old = tl.load(m_head)
    all_v = tl.arange(0, PADDED_V)
    in_all_v = all_v < DV
    norm_v = tl.load(norm_weight + head * DV + all_v, mask=in_all_v, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    gate_at = gate + batch * gate_stride_b + head * gate_stride_h + all_v
    gate_v = tl.load(gate_at, mask=in_all_v, other=0.0).to(tl.float32)
    v_new = tl.load(v + batch * v_stride_b + head * v_stride_h + d_v, mask=in_v, other=0.0)
    q_all = tl.load(q_head + all_k, mask=in_all, other=0.0).to(tl.float32)
    k_new = tl.load(k_head + all_k, mask=in_all, other=0.0)
    i_new = tl.load(i + batch * i_stride_b + head * i_stride_h)
    f_new = tl.load(f + batch * f_stride_b + head * f_stride_h)

    # The new entry. No program of this launch reads it.
    tl.store(ring_v_head + newest * DV + d_v, v_new, mask=in_v)
    if tile == 0 and is_live != 0:
        tl.store(ring_k_head + newest * DK + all_k, k_new, mask=in_all)
        tl.store(ring_i_head + newest, i_new)
        tl.store(ring_f_head + newest, f_new)

    # The weights of the tokens. g is summed from the newest token back.
    log_f = log_sigmoid(tl.where(age == 0, f_new, f_tokens))
    g = tl.sum(tl.where(age[None, :] < age[:, None], log_f[None, :], 0.0), 1)
    g_i = g + tl.where(age == 0, i_new, i_tokens)
    decayed = tl.sum(log_f, 0) + m_old
    m_new = tl.maximum(decayed, tl.max(g_i, 0))
    decay, weight = tl.exp(decayed - m_new), tl.exp(g_i - m_new)

    V_t = tl.where(age[:, None] == 0, v_new[None, :], V_t).to(tl.float32)
    if folds:  # one step in MULTIPLE does this
        V_in = weight[:, None] * V_t
        from_state, scores = _read_and_fold(
            q_head, C_head, K_at, k_head, age, held, in_v, V_in, decay,
            DK, DV, FOLDED, min(PARTS, FOLDED), PRECISION,
        )  # fmt: skip
    else:
        # Each thread adds up its own products. They are joined once, at the end.
        from_state = tl.zeros([PARTS, BLOCK_V], tl.float32)
        products = tl.zeros([ENTRIES, BLOCK_K], tl.float32)
        from_state, products = _add_block(from_state, products, q_head, C_t, K_t, d_k, in_k)
        for start in tl.range(BLOCK_K, DK, BLOCK_K, num_stages=STAGES):
            d_k = start + tl.arange(0, BLOCK_K)
            in_k = d_k < width_k
            mask = in_k[:, None] & in_v[None, :]
            C_t = tl.load(C_head + d_k[:, None] * DV, mask=mask, other=0.0)
            K_t = tl.load(K_at + d_k[None, :], mask=held[:, None] & in_k[None, :], other=0.0)
            from_state, products = _add_block(from_state, products, q_head, C_t, K_t, d_k, in_k)
        from_state, scores = tl.sum(from_state, 0), tl.sum(products, 1)
    scores = tl.where(age == 0, tl.sum(k_new.to(tl.float32) * q_all, 0), scores)
    from_token = weight * scale * scores
    n_q = decay * scale * tl.sum(n_old * q_all, 0) + tl.sum(from_token, 0)
    numerator = decay * scale * from_state + tl.sum(from_token[:, None] * V_t, 0)
    h_t = numerator / (tl.maximum(tl.abs(n_q), tl.exp(-m_new)) + eps)
    tl.store(raw + row * DV + d_v, h_t, mask=d_v < DV)

    tl.debug_barrier()  # all threads have read and written their part
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived + row, 0)
        if folds:
            fold_n(n_head, K_at, k_head, age, held, weight, decay, DK, FOLDED)
            tl.store(m_head, m_new)
        # .cg skips the L1 cache, which may not have what other programs wrote.
        x = tl.load(raw + row * DV + all_v, mask=in_all_v, other=0.0, cache_modifier=".cg")
        centred = tl.where(in_all_v, x - tl.sum(x, 0) / DV, 0.0)
        x = centred * tl.rsqrt(tl.sum(centred * centred, 0) / DV + norm_eps) * norm_v
        tl.store(h + row * DV + all_v, x * tl.sigmoid(gate_v), mask=in_all_v)


@triton.jit
def _add_block(from_state, products, q_head, C_t, K_t, d_k, in_k):
    """Adds the products of the elements d_k of q with C and with the ring's k."""
    PARTS: tl.constexpr = from_state.shape[0]
    q_t = tl.load(q_head + d_k, mask=in_k, other=0.0).to(tl.float32)
    q_C = q_t[:, None] * C_t.to(tl.float32)
    q_C = tl.reshape(q_C, [C_t.shape[0] // PARTS, PARTS, C_t.shape[1]])
    return from_state + tl.sum(q_C, 0), products + K_t.to(tl.float32) * q_t[None, :]


@triton.jit
def _read_and_fold(
    q_head, C_head, K_at, newest, age, held, in_v, V_in, decay,
    DK: tl.constexpr, DV: tl.constexpr, FOLDED: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """qᵀC of the tile and q·k_j of the ring; C ← decay C + Σ_j k_j (w_j v_j)ᵀ, for V_in of w_j v_j.

    In one loop, so that C is read once.
    """
    from_state = tl.zeros([PARTS, V_in.shape[1]], tl.float32)
    products = tl.zeros([V_in.shape[0], FOLDED], tl.float32)
    for start in tl.range(0, DK, FOLDED, num_stages=1):  # more stages need more registers
        d_k = start + tl.arange(0, FOLDED)
        in_k = d_k < DK
        mask = in_k[:, None] & in_v[None, :]
        C_t = tl.load(C_head + d_k[:, None] * DV, mask=mask, other=0.0)
        K_t = tl.load(K_at + d_k[None, :], mask=held[:, None] & in_k[None, :], other=0.0)
        from_state, products = _add_block(from_state, products, q_head, C_t, K_t, d_k, in_k)
        k_in = tl.load(newest + d_k, mask=in_k, other=0.0)
        K_in = tl.where(age[:, None] == 0, k_in[None, :], K_t).to(tl.float32)
        C_new = dot_narrow(tl.trans(K_in), V_in, decay * C_t.to(tl.float32), False, PRECISION)
        tl.store(C_head + d_k[:, None] * DV, C_new, mask=mask)
    return tl.sum(from_state, 0), tl.sum(products, 1)


@triton.jit
def fold_n(n_head, K_at, newest, age, held, weight, decay, DK: tl.constexpr, FOLDED: tl.constexpr):
    """n ← decay n + Σ_j w_j k_j, over the ring's tokens and, if given, the one at `newest`."""
    for start in range(0, DK, FOLDED):
        d_k = start + tl.arange(0, FOLDED)
        in_k = d_k < DK
        K_in = tl.load(K_at + d_k[None, :], mask=held[:, None] & in_k[None, :], other=0.0)
        if newest is not None:
            k_in = tl.load(newest + d_k, mask=in_k, other=0.0)
            K_in = tl.where(age[:, None] == 0, k_in[None, :], K_in)
        n_new = decay * tl.load(n_head + d_k, mask=in_k, other=0.0)
        n_new += tl.sum(weight[:, None] * K_in.to(tl.float32), 0)
        tl.store(n_head + d_k, n_new, mask=in_k)


@triton.jit
def dot_narrow(a, b, total, SPLIT_A: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b, where one of them holds 16-bit numbers: b if SPLIT_A, else a.

    TF32 has their digits, so two products have nearly those of float32: with the leading digits of
    the other factor, and with the rest of it.
    """
    if PRECISION == "ieee":
        total = tl.dot(a, b, total, input_precision="ieee")
    else:
        if SPLIT_A:
            high = _leading_digits(a)
            low_a, low_b, high_a, high_b = a - high, b, high, b
        else:
            high = _leading_digits(b)
            low_a, low_b, high_a, high_b = a, b - high, a, high
        total = tl.dot(low_a, low_b, total, input_precision="tf32")
        if sums_apart():  # subtracted, because the compiler would join sums that are added
            total -= tl.dot(-high_a, high_b, input_precision="tf32")
        else:
            total = tl.dot(high_a, high_b, total, input_precision="tf32")
    return total


@triton.jit
def _leading_digits(x):
    """x without the last 13 bits of float32: a number of TF32."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def advance_kernel(
    folded, seen, live, rows, MULTIPLE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """`Cursor.advance` in one program."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.arange(0, BLOCK)
    mask = row < rows
    is_live = tl.load(live + row, mask=mask, other=0) != 0
    tokens = tl.load(seen + row, mask=mask, other=0) + is_live.to(tl.int64)
    before = tl.load(folded + row, mask=mask, other=0)
    crosses = (tokens + row) // MULTIPLE > (before + row) // MULTIPLE
    tl.store(seen + row, tokens, mask=mask)
    tl.store(folded + row, tokens, mask=mask & is_live & crosses)


@triton.jit
def order_kernel(
    folded, seen, live, order, rows,
    MULTIPLE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`launch_order` in one program."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.arange(0, BLOCK)
    mask = row < rows
    tokens = tl.load(seen + row, mask=mask, other=0)
    before = tl.load(folded + row, mask=mask, other=0)
    crosses = (tokens + 1 + row) // MULTIPLE > (before + row) // MULTIPLE
    is_due = (tl.load(live + row, mask=mask, other=0) != 0) & crosses
    due = is_due.to(tl.int32)
    count = tl.sum(due, 0)
    step = tl.maximum(1, tl.minimum(rows // 64, rows // tl.maximum(count, 1)))
    # `step` − 1 rows that are not folded follow each one that is, as long as there are any.
    other, between = tl.cumsum(1 - due, 0) - 1, tl.maximum(1, step - 1)
    at = tl.where(
        other < count * (step - 1), other // between * step + 1 + other % between, other + count
    )
    at = tl.where(is_due, (tl.cumsum(due, 0) - 1) * step, at)
    tl.store(order + at, row.to(tl.int64), mask=mask)


def precision(dtype: torch.dtype) -> str:
    """How `dot_narrow` multiplies, for tokens of this dtype."""
    return "ieee" if dtype == torch.float32 else "tf32"


def most_held(size: int, interval: int) -> int:
    """The most tokens since the checkpoint before a pass, or before a step that folds all rows.

    A row that has `interval` of them is folded. With a size for passes of T tokens, the latest pass
    may have added T (see `Pass`).
    """
    return interval - 1 + (size + 1 - interval) // 2


def step_tokens(size: int, cursor: Cursor) -> int:
    """The most tokens since the checkpoint in a step, with the current one.

    Only a step that folds all rows may come after a pass.
    """
    before = most_held(size, cursor.interval) if cursor.folds_all else cursor.interval - 1
    return 1 + before


def launch_replay(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState, ring: Ring,
    cursor: Cursor, gate: Tensor, norm_weight: Tensor, norm_eps: float, eps: float, tile: Tile,
    overlap: bool = False,
) -> Tensor:  # fmt: skip
    """Returns h of one token, [B, NH, d_hv]. Updates the ring, and the state of rows that are due.

    Unless `cursor.folds_all`, a live row has fewer than `interval` tokens since the checkpoint: the
    kernel reads no more of them.
    With `overlap` the kernel reads state, ring and cursor before the previous kernel has ended: see
    `launch_step`.
    """
    batch, heads, d_k = q.shape
    d_v, size = v.shape[-1], ring.k.shape[2]
    assert cursor.interval <= size
    for part in (*state, *ring):
        assert part[:1].is_contiguous()
    h = torch.empty(batch, heads, d_v, dtype=v.dtype, device=v.device)
    raw = torch.empty(batch, heads, d_v, dtype=torch.float32, device=v.device)
    replay_kernel[(triton.cdiv(d_v, tile.d_out), batch * heads)](
        q, k, v, i, f, gate, norm_weight, *state, *ring, *cursor[:3], cursor.order, h, raw,
        take_counters(batch * heads, q.device),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *i.stride(), *f.stride(),
        *gate.stride()[:2], *(part.stride(0) for part in (*state, *ring[:3])),
        d_k**-0.5, eps, norm_eps, heads, DK=d_k, DV=d_v,
        SIZE=size, ENTRIES=padded(step_tokens(size, cursor)), MULTIPLE=cursor.multiple,
        BLOCK_K=tile.d_in, BLOCK_V=tile.d_out, PADDED_K=padded(d_k), PADDED_V=padded(d_v),
        FOLDED=min(32, folded_rows(tile, d_k)), PRECISION=precision(q.dtype),
        PARTS=min(tile.d_in, threads_of_column(tile, state.C.itemsize)), STAGES=tile.stages,
        HAS_ORDER=cursor.order is not None, **tile.options(), **overlap_launch(overlap),
    )  # fmt: skip
    return h


def folded_rows(tile: Tile, d_k: int) -> int:
    """How many rows of C are folded at a time: a thread holds up to 32 elements.

    A step folds at most 32 rows: it folds seldom, and more of them need more shared memory.
    """
    return max(16, min(1024 * tile.warps // tile.d_out, padded(d_k)))


def threads_of_column(tile: Tile, itemsize: int) -> int:
    """How many threads share a column of a tile that is loaded in pieces of 16 bytes.

    That many neighbouring rows are in different threads. Rows that far apart are in one thread.
    """
    return max(1, 32 * tile.warps * (16 // itemsize) // tile.d_out)


def launch_advance(cursor: Cursor, overlap: bool = False) -> None:
    """`Cursor.advance` as one launch, with `overlap` before the previous one ends."""
    rows = len(cursor.seen)
    advance_kernel[(1,)](
        *cursor[:3], rows, MULTIPLE=cursor.multiple, BLOCK=max(16, triton.next_power_of_2(rows)),
        num_warps=1, **overlap_launch(overlap),
    )  # fmt: skip


def launch_order(cursor: Cursor, overlap: bool = False) -> Tensor:
    """The rows [B], int64, in the order in which their programs start.

    With `overlap` the kernel is launched before the previous one ends.

    Programs that fold (`is_due`) take the longest. They start early, so that they are not the last
    to end. Up to 127 rows they come first. With more, one row in B // 64 of the first is folded:
    fewer tiles are written at the same time, and the others are read meanwhile.
    """
    rows = len(cursor.seen)
    order = torch.empty_like(cursor.seen)
    order_kernel[(1,)](
        *cursor[:3], order, rows, MULTIPLE=cursor.multiple,
        BLOCK=max(16, triton.next_power_of_2(rows)), num_warps=4, **overlap_launch(overlap),
    )  # fmt: skip
    return order
