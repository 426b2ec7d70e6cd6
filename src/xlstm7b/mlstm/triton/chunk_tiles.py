"""The kernel for the matrix products of a chunk. h, dv, dq and dk differ only in their operands.

For a tile of positions a, all tiles b of the same chunk, and the state at a boundary of the chunk:

    out_a = Σ_b M_ab z_b + weight_a · (x_a · state)  [+ weight'_a · vector]
    M_ab  = a function of A = x_a · x'_b, times the gate weight W_ts = exp(b_t − b_s + ĩ_s − m_t)

    out  a is    x    x'   z    state   M without W                    weight
    h    t       q    k    v    C       scale · A                      scale · from_state
    dv   s       k    q    dh   dC      scale · A / den_t              to_state
    dq   t       dh   v    k    Cᵀ, n   scale · (A / den_t + slope_t)  scale · from_state / den_t
    dk   s       v    dh   q    dCᵀ, dn scale · (A / den_t + slope_t)  to_state

t is the query's position, s ≤ t the key's, and slope_t the gradient of the normaliser n·q.
`inverse` and `slope` are 1/den_t and slope_t, both times scale. docs/kernels.md derives the table.
"""

import triton
import triton.language as tl


@triton.jit
def tile_kernel(
    x, x_other, z, state, vector, row_weight, vector_weight, own,
    b, i, m, start, inverse, slope, out, row_result,
    x_stride_b, x_stride_t, x_stride_h, o_stride_b, o_stride_t, o_stride_h,
    z_stride_b, z_stride_t, z_stride_h, i_stride_b, i_stride_t, i_stride_h,
    own_stride_b, own_stride_t, own_stride_h, out_stride_b, out_stride_t, out_stride_h,
    scale, eps, T, NH, NC, ROWS,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, STATE_STRIDE_IN: tl.constexpr,
    STATE_STRIDE_OUT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, QUERY_ROWS: tl.constexpr,
    OF_SCORES: tl.constexpr, EVEN_T: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_T, BLOCK_OUT] of h (QUERY_ROWS), dv, dq (QUERY_ROWS, OF_SCORES) or dk.

    `vector` is n or dn at the boundaries; for h it is the state's part of n·q at each position.
    `row_result` receives n·q for h, and q·dq or k·dk for dq and dk, computed in float32 before dq
    and dk are rounded: the gradients of the gates need those digits.

    One long function: a kernel keeps its tiles in registers, so it cannot be split into launches.
    """
    tiles_out: tl.constexpr = (D_OUT + BLOCK_OUT - 1) // BLOCK_OUT
    tile_out, tile_a = tl.program_id(0) % tiles_out, tl.program_id(0) // tiles_out
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // NH, row % NH
    IS_H: tl.constexpr = QUERY_ROWS and not OF_SCORES
    chunk = tile_a * BLOCK_T // CHUNK
    t_a = tile_a * BLOCK_T + tl.arange(0, BLOCK_T)
    inside_a = (t_a < T) | EVEN_T
    d_in, d_out = tl.arange(0, BLOCK_IN), tile_out * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    in_out = (d_out < D_OUT) | (D_OUT % BLOCK_OUT == 0)
    wide_a = t_a.to(tl.int64)
    x_rows = x + batch * x_stride_b + head * x_stride_h + wide_a[:, None] * x_stride_t
    at_a = row * T + t_a
    slot = row * (NC + 1) + chunk  # queries read the state before the chunk
    if not QUERY_ROWS:
        slot += 1  # keys write to the state after it

    acc = tl.zeros([BLOCK_T, BLOCK_OUT], tl.float32)
    for first in range(0, D_IN, BLOCK_IN):
        d = first + d_in
        in_in = (d < D_IN) | (D_IN % BLOCK_IN == 0)
        x_a = tl.load(x_rows + d[None, :], mask=inside_a[:, None] & in_in[None, :], other=0.0)
        part = tl.load(
            state + slot * D_IN * D_OUT
            + d[:, None] * STATE_STRIDE_IN + d_out[None, :] * STATE_STRIDE_OUT,
            mask=in_in[:, None] & in_out[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(x_a.to(OPERAND), part.to(OPERAND), acc, input_precision=PRECISION)
    weight_a = tl.load(row_weight + at_a, mask=inside_a, other=0.0)
    if IS_H:
        weight_a *= scale
        normaliser = tl.load(vector + at_a, mask=inside_a, other=0.0)
    acc *= weight_a[:, None]
    if OF_SCORES:
        n_out = tl.load(vector + slot * D_OUT + d_out, mask=in_out, other=0.0)
        acc += tl.load(vector_weight + at_a, mask=inside_a, other=0.0)[:, None] * n_out[None, :]

    i_head = i + batch * i_stride_b + head * i_stride_h
    b_a = tl.load(b + at_a, mask=inside_a, other=0.0)
    if QUERY_ROWS:
        gate_a = -tl.load(m + at_a, mask=inside_a, other=0.0)
        start_a = tl.load(start + at_a, mask=inside_a, other=0)
    else:
        b_a = -b_a
        gate_a = tl.load(i_head + wide_a * i_stride_t, mask=inside_a, other=float("-inf"))
    if OF_SCORES and QUERY_ROWS:
        inverse_a = tl.load(inverse + at_a, mask=inside_a, other=0.0)
        slope_a = tl.load(slope + at_a, mask=inside_a, other=0.0)
    if QUERY_ROWS:
        first_b, end_b = chunk * CHUNK // BLOCK_T, tile_a + 1
    else:
        first_b = tile_a
        end_b = tl.minimum((chunk + 1) * CHUNK // BLOCK_T, tl.cdiv(T, BLOCK_T))
    for tile_b in range(first_b, end_b):
        t_b = tile_b * BLOCK_T + tl.arange(0, BLOCK_T)
        inside_b = (t_b < T) | EVEN_T
        wide_b = t_b.to(tl.int64)
        o_rows = x_other + batch * o_stride_b + head * o_stride_h + wide_b[None, :] * o_stride_t
        A = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
        for first in range(0, D_IN, BLOCK_IN):
            d = first + d_in
            in_in = (d < D_IN) | (D_IN % BLOCK_IN == 0)
            x_a = tl.load(x_rows + d[None, :], mask=inside_a[:, None] & in_in[None, :], other=0.0)
            x_b = tl.load(o_rows + d[:, None], mask=in_in[:, None] & inside_b[None, :], other=0.0)
            A = tl.dot(x_a.to(OPERAND), x_b.to(OPERAND), A, input_precision=PRECISION)
        at_b = row * T + t_b
        b_b = tl.load(b + at_b, mask=inside_b, other=0.0)
        if QUERY_ROWS:
            b_b = -b_b
            gate_b = tl.load(i_head + wide_b * i_stride_t, mask=inside_b, other=float("-inf"))
            visible = (t_b[None, :] <= t_a[:, None]) & (t_b[None, :] >= start_a[:, None])
        else:
            gate_b = -tl.load(m + at_b, mask=inside_b, other=0.0)
            start_b = tl.load(start + at_b, mask=inside_b, other=T)  # no key sees what is after T
            visible = (t_b[None, :] >= t_a[:, None]) & (start_b[None, :] <= t_a[:, None])
        if PRECISION == "ieee":  # the large terms b cancel first, so no digits are lost
            log_W = (b_a[:, None] + b_b[None, :]) + (gate_a[:, None] + gate_b[None, :])
        else:
            log_W = (b_a + gate_a)[:, None] + (b_b + gate_b)[None, :]
        W = tl.exp(tl.where(visible, log_W, float("-inf")))
        if IS_H:
            M = A * W * scale
            normaliser += tl.sum(M, 1)
        elif not OF_SCORES:
            M = A * W * tl.load(inverse + at_b, mask=inside_b, other=0.0)[None, :]
        elif QUERY_ROWS:
            M = (A * inverse_a[:, None] + slope_a[:, None]) * W
        else:
            inverse_b = tl.load(inverse + at_b, mask=inside_b, other=0.0)
            slope_b = tl.load(slope + at_b, mask=inside_b, other=0.0)
            M = (A * inverse_b[None, :] + slope_b[None, :]) * W
        z_b = tl.load(
            z + batch * z_stride_b + head * z_stride_h
            + wide_b[:, None] * z_stride_t + d_out[None, :],
            mask=inside_b[:, None] & in_out[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(M.to(OPERAND), z_b.to(OPERAND), acc, input_precision=PRECISION)

    in_tile = inside_a[:, None] & in_out[None, :]
    if IS_H:
        floor = tl.exp(-tl.load(m + at_a, mask=inside_a, other=0.0))
        acc = acc / (tl.maximum(tl.abs(normaliser), floor) + eps)[:, None]
        if tile_out == 0:
            tl.store(row_result + at_a, normaliser, mask=inside_a)
    if OF_SCORES:
        own_rows = own + batch * own_stride_b + head * own_stride_h + wide_a[:, None] * own_stride_t
        own_a = tl.load(own_rows + d_out[None, :], mask=in_tile, other=0.0).to(tl.float32)
        product = tl.sum(own_a * acc, 1)
        tl.store(row_result + (tile_out * ROWS + row) * T + t_a, product, mask=inside_a)
    out_rows = out + batch * out_stride_b + head * out_stride_h + wide_a[:, None] * out_stride_t
    tl.store(out_rows + d_out[None, :], acc, mask=in_tile)
