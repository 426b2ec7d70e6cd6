"""The recurrence over chunks: the state before every chunk, in either direction of time.

Forward, C ← decay · C + Σ_s to_state_s k_s v_sᵀ gives the states. Backward, with q for k and dh for
v, the same recurrence from the last chunk to the first gives their gradients.
"""

import triton
import triton.language as tl


@triton.jit
def scan_states_kernel(
    x, y, x_weight, n_weight, decay, C_first, n_first, C_chunk, n_chunk, C_last, n_last,
    other_C, other_n, products,
    x_stride_b, x_stride_t, x_stride_h, y_stride_b, y_stride_t, y_stride_h,
    T, NH, NC, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    REVERSE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_K, BLOCK_V] of one head's state through all its chunks.

    C_chunk and n_chunk [B, NH, NC + 1, …] get the state before chunk c (in the direction of time
    taken) at c, so the forward direction's end lies at NC. In reverse, `products` gets this tile's
    share of ⟨C, dC⟩ + ⟨n, dn⟩ of the state behind each chunk, for the gates' gradients.
    """
    tile_k, tile_v, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = row // NH, row % NH
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = k < DK, v < DV
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
            tl.store(C_chunk + slot * DK * DV + tile, C, mask=in_tile)
            if tile_v == 0:
                tl.store(n_chunk + slot * DK + k, n, mask=in_k)
            if REVERSE:
                other = tl.load(other_C + (slot + 1) * DK * DV + tile, mask=in_tile, other=0.0)
                product = tl.sum(tl.sum(C * other.to(tl.float32), 1), 0)
                if tile_v == 0:
                    other_vector = tl.load(other_n + (slot + 1) * DK + k, mask=in_k, other=0.0)
                    product += tl.sum(n * other_vector, 0)
                part = tile_k * tl.num_programs(1) + tile_v
                parts = tl.num_programs(0) * tl.num_programs(1)
                tl.store(products + (row * NC + chunk) * parts + part, product)
            shrink = tl.load(decay + row * NC + chunk)
            C *= shrink
            n *= shrink
        t = chunk * CHUNK + (step % tiles_a_chunk) * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = t < T
        wide_t = t.to(tl.int64)
        x_t = tl.load(
            x_head + wide_t[None, :] * x_stride_t, mask=in_k[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        y_t = tl.load(
            y_head + wide_t[:, None] * y_stride_t, mask=inside[:, None] & in_v[None, :], other=0.0
        ).to(OPERAND)
        weight = tl.load(x_weight + row * T + t, mask=inside, other=0.0)
        weight_n = tl.load(n_weight + row * T + t, mask=inside, other=0.0)
        C = tl.dot((x_t * weight[None, :]).to(OPERAND), y_t, C, input_precision=PRECISION)
        n += tl.sum(x_t * weight_n[None, :], 1)
    tl.store(C_last + row * DK * DV + tile, C, mask=in_tile)
    if tile_v == 0:
        tl.store(n_last + row * DK + k, n, mask=in_k)
    if not REVERSE:
        slot = row * (NC + 1) + NC
        tl.store(C_chunk + slot * DK * DV + tile, C, mask=in_tile)
        if tile_v == 0:
            tl.store(n_chunk + slot * DK + k, n, mask=in_k)
