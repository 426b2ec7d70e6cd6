"""Kernels for the states at the chunk boundaries, in both directions of time.

Forward, C ← decay · C + Σ_s to_state_s k_s v_sᵀ from chunk to chunk gives the state at every
boundary. Backward, the same recurrence from the last chunk to the first, with q for k and dh for v,
gives the gradients of the states. Boundary c is before chunk c.

If there are enough rows (batch × heads) to fill the GPU, `scan_states_kernel` goes through the
chunks in one pass. Otherwise `chunk_sums_kernel` sums all chunks in parallel, and
`carry_states_kernel` turns the sums into states, in place.
"""

import triton
import triton.language as tl


@triton.jit
def _add_tile(
    C, n, x_head, y_head, x_weight, n_weight, t, in_k, in_v, x_stride_t, y_stride_t, T, with_n,
    EVEN_T: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C + Σ_t weight_t x_t y_tᵀ and, if `with_n`, n + Σ_t weight'_t x_t."""
    inside = (t < T) | EVEN_T
    wide_t = t.to(tl.int64)
    x_t = tl.load(
        x_head + wide_t[None, :] * x_stride_t, mask=in_k[:, None] & inside[None, :], other=0.0
    ).to(tl.float32)
    y_t = tl.load(
        y_head + wide_t[:, None] * y_stride_t, mask=inside[:, None] & in_v[None, :], other=0.0
    ).to(OPERAND)
    weight = tl.load(x_weight + t, mask=inside, other=0.0)
    C = tl.dot((x_t * weight[None, :]).to(OPERAND), y_t, C, input_precision=PRECISION)
    if with_n:
        weight_n = tl.load(n_weight + t, mask=inside, other=0.0)
        n += tl.sum(x_t * weight_n[None, :], 1)
    return C, n


@triton.jit
def scan_states_kernel(
    x, y, x_weight, n_weight, decay, C_first, n_first, C_boundary, n_boundary, C_last, n_last,
    x_stride_b, x_stride_t, x_stride_h, y_stride_b, y_stride_t, y_stride_h,
    T, NH, NC, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    REVERSE: tl.constexpr, EVEN_T: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one tile [BLOCK_K, BLOCK_V] of one head's state through all chunks."""
    tile_k, tile_v, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = row // NH, row % NH
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = (k < DK) | (DK % BLOCK_K == 0), (v < DV) | (DV % BLOCK_V == 0)
    in_tile = in_k[:, None] & in_v[None, :]
    tile = k[:, None] * DV + v[None, :]
    x_head = x + batch * x_stride_b + head * x_stride_h + k[:, None]
    y_head = y + batch * y_stride_b + head * y_stride_h + v[None, :]
    C = tl.load(C_first + row * DK * DV + tile, mask=in_tile, other=0.0).to(tl.float32)
    n = tl.load(n_first + row * DK + k, mask=in_k, other=0.0).to(tl.float32)
    tiles_a_chunk: tl.constexpr = CHUNK // BLOCK_T
    for step in range(NC * tiles_a_chunk):
        chunk = step // tiles_a_chunk
        if REVERSE:
            chunk = NC - 1 - chunk
        if step % tiles_a_chunk == 0:
            slot = row * (NC + 1) + chunk
            if REVERSE:
                slot += 1
            shrink = tl.load(decay + row * NC + chunk)
            tl.store(C_boundary + slot * DK * DV + tile, C, mask=in_tile)
            C *= shrink
            if tile_v == 0:
                tl.store(n_boundary + slot * DK + k, n, mask=in_k)
                n *= shrink
        t = chunk * CHUNK + (step % tiles_a_chunk) * BLOCK_T + tl.arange(0, BLOCK_T)
        C, n = _add_tile(
            C, n, x_head, y_head, x_weight + row * T, n_weight + row * T, t, in_k, in_v,
            x_stride_t, y_stride_t, T, tile_v == 0, EVEN_T, OPERAND, PRECISION,
        )  # fmt: skip
    tl.store(C_last + row * DK * DV + tile, C, mask=in_tile)
    end = row * (NC + 1)
    if not REVERSE:
        end += NC
    tl.store(C_boundary + end * DK * DV + tile, C, mask=in_tile)
    if tile_v == 0:
        tl.store(n_last + row * DK + k, n, mask=in_k)
        tl.store(n_boundary + end * DK + k, n, mask=in_k)


@triton.jit
def chunk_sums_kernel(
    x, y, x_weight, n_weight, C_boundary, n_boundary,
    x_stride_b, x_stride_t, x_stride_h, y_stride_b, y_stride_t, y_stride_h,
    T, NH, NC, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    REVERSE: tl.constexpr, EVEN_T: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of Σ_t weight_t x_t y_tᵀ over one chunk, stored at the boundary that it leads to."""
    tiles_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    tile_k, tile_v = tl.program_id(0) // tiles_v, tl.program_id(0) % tiles_v
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = row // NH, row % NH
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = (k < DK) | (DK % BLOCK_K == 0), (v < DV) | (DV % BLOCK_V == 0)
    x_head = x + batch * x_stride_b + head * x_stride_h + k[:, None]
    y_head = y + batch * y_stride_b + head * y_stride_h + v[None, :]
    C = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    n = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, CHUNK, BLOCK_T):
        t = chunk * CHUNK + start + tl.arange(0, BLOCK_T)
        C, n = _add_tile(
            C, n, x_head, y_head, x_weight + row * T, n_weight + row * T, t, in_k, in_v,
            x_stride_t, y_stride_t, T, tile_v == 0, EVEN_T, OPERAND, PRECISION,
        )  # fmt: skip
    boundary = row * (NC + 1) + chunk
    if not REVERSE:
        boundary += 1
    tile = k[:, None] * DV + v[None, :]
    tl.store(C_boundary + boundary * DK * DV + tile, C, mask=in_k[:, None] & in_v[None, :])
    if tile_v == 0:
        tl.store(n_boundary + boundary * DK + k, n, mask=in_k)


@triton.jit
def carry_states_kernel(
    decay, C_first, n_first, C_boundary, n_boundary, C_last, n_last,
    NC, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Turns the chunks' sums into states. Each program has a block of C; the last one has n."""
    row = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        start = tl.program_id(0) * BLOCK
        _carry(decay, C_first, C_boundary, C_last, row, start, NC, DK * DV, BLOCK, REVERSE)
    else:
        for start in range(0, DK, BLOCK):
            _carry(decay, n_first, n_boundary, n_last, row, start, NC, DK, BLOCK, REVERSE)


@triton.jit
def _carry(
    decay, first, boundary, last, row, start,
    NC, SIZE: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    inside = (at < SIZE) | (SIZE % BLOCK == 0)
    state = tl.load(first + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    boundaries = boundary + row * (NC + 1) * SIZE + at
    origin = boundaries
    if REVERSE:
        origin += NC * tl.full((), SIZE, tl.int64)
    tl.store(origin, state, mask=inside)
    for step in range(NC):
        chunk = step
        target = boundaries + (step + 1) * tl.full((), SIZE, tl.int64)
        if REVERSE:
            chunk = NC - 1 - step
            target = boundaries + chunk * tl.full((), SIZE, tl.int64)
        added = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        state = state * tl.load(decay + row * NC + chunk) + added
        tl.store(target, state, mask=inside)
    tl.store(last + row * SIZE + at, state, mask=inside)


@triton.jit
def state_products_kernel(
    C, n, dC, dn, products, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    PADDED_K: tl.constexpr,
):  # fmt: skip
    """⟨C, dC⟩ + ⟨n, dn⟩ at every boundary [B, NH, NC + 1], for the gradients of the gates."""
    boundary = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    k = tl.arange(0, PADDED_K)
    n_c = tl.load(n + boundary * DK + k, mask=k < DK, other=0.0)
    dn_c = tl.load(dn + boundary * DK + k, mask=k < DK, other=0.0)
    product = tl.zeros([BLOCK], tl.float32)
    for start in range(0, DK * DV, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < DK * DV) | (DK * DV % BLOCK == 0)
        C_c = tl.load(C + boundary * DK * DV + at, mask=inside, other=0.0)
        dC_c = tl.load(dC + boundary * DK * DV + at, mask=inside, other=0.0)
        product += C_c.to(tl.float32) * dC_c.to(tl.float32)
    tl.store(products + boundary, tl.sum(product, 0) + tl.sum(n_c * dn_c, 0))


@triton.jit
def state_normaliser_kernel(
    q, n_chunk, from_state, normaliser, q_stride_b, q_stride_t, q_stride_h,
    scale, T, NH, NC, DK: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, PADDED_K: tl.constexpr,
):  # fmt: skip
    """The part of n·q that comes from the state before the chunk, [B, NH, T].

    It is a separate launch because of a compiler error: with q used both in a pipelined product and
    in registers, Triton 3.6 on Hopper gives some wrong rows, others in every run (docs/kernels.md).

    It is launched without fusion of products and sums. All threads of a warp store a row's sum to
    the same place in shared memory. With fusion the sums of its two halves differ in the last bit.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // NH, row % NH
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < T
    k = tl.arange(0, PADDED_K)
    slot = row * (NC + 1) + tile * BLOCK_T // CHUNK
    n = tl.load(n_chunk + slot * DK + k, mask=k < DK, other=0.0)
    q_rows = q + batch * q_stride_b + head * q_stride_h + t.to(tl.int64)[:, None] * q_stride_t
    q_t = tl.load(q_rows + k[None, :], mask=inside[:, None] & (k < DK)[None, :], other=0.0)
    weight = scale * tl.load(from_state + row * T + t, mask=inside, other=0.0)
    n_q = weight * tl.sum(q_t.to(tl.float32) * n[None, :], 1)
    tl.store(normaliser + row * T + t, n_q, mask=inside)
