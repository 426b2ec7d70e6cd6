"""`mlstm_sequence` by Triton kernels: the launches in order, registered as PyTorch operators."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from xlstm7b.mlstm import MLSTMState
from xlstm7b.mlstm.triton import chunk_gates
from xlstm7b.mlstm.triton.chunk_states import (
    carry_states_kernel,
    chunk_sums_kernel,
    scan_states_kernel,
    state_normaliser_kernel,
    state_products_kernel,
)
from xlstm7b.mlstm.triton.chunk_tiles import tile_kernel
from xlstm7b.mlstm.triton.launch_params import (
    CARRY,
    ROWS_TO_FILL,
    Tile,
    arithmetic,
    padded,
    plan,
    state_dtype,
)


def triton_sequence(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *,
    state: MLSTMState, resets: Tensor | None = None, eps: float = 1e-6,
) -> tuple[Tensor, MLSTMState]:  # fmt: skip
    """`mlstm_sequence` by the chunkwise kernels."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    C, n, m = (part.float().contiguous() for part in state)
    if resets is not None:
        resets = resets.contiguous()
    h, C, n, m, *_ = mlstm_chunkwise(q, k, v, i, f, C, n, m.detach(), resets, eps)
    return h, MLSTMState(C, n, m)


@torch.library.custom_op("xlstm7b::mlstm_chunkwise", mutates_args=())
def mlstm_chunkwise(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C_first: Tensor, n_first: Tensor, m_first: Tensor, resets: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns h and the last C, n, m; and for the backward pass n·q [B, NH, T] and C, n at the
    chunk boundaries."""
    chosen = plan(q.shape[-1], v.shape[-1], q.dtype)
    # 1. The weights of states and tokens, from the gates.
    weights, m_last = _weights(i, f, m_first, resets, chosen.chunk)
    # 2. The states at the chunk boundaries.
    (C, n), last = _scan(
        k, v, weights.to_state, weights.to_state, weights.decay, (C_first, n_first),
        chosen.states, chosen.chunk,
    )  # fmt: skip
    # 3. n·q: the part that comes from the state before the chunk.
    batch, length, heads, d_qk = q.shape
    scale, block = d_qk**-0.5, 32
    state_share = torch.empty_like(weights.b)
    state_normaliser_kernel[(triton.cdiv(length, block), batch * heads)](
        q, n, weights.from_state, state_share, *q.stride()[:3], scale, length, heads,
        n.shape[2] - 1, DK=d_qk, CHUNK=chosen.chunk, BLOCK_T=block, PADDED_K=padded(d_qk),
        enable_fp_fusion=False,
    )  # fmt: skip
    # 4. h, and all of n·q.
    unused = weights.b
    h, normaliser = _tiles(
        q, k, v, (C, state_share), weights, i, chosen.h, chosen.chunk, scale, eps,
        query_rows=True, of_scores=False, row_weight=weights.from_state, vector_weight=unused,
        inverse=unused, slope=unused, own=q,
    )  # fmt: skip
    return h, *last, m_last, normaliser[0], C, n


@mlstm_chunkwise.register_fake
def _(q, k, v, i, f, C_first, n_first, m_first, resets, eps):
    batch, length, heads, d_qk = q.shape
    d_hv = v.shape[-1]
    boundaries = batch, heads, triton.cdiv(length, plan(d_qk, d_hv, q.dtype).chunk) + 1, d_qk
    kept = q.new_empty(*boundaries, d_hv, dtype=state_dtype(q.dtype, d_qk, d_hv))
    return (
        v.new_empty(v.shape), C_first.new_empty(C_first.shape), n_first.new_empty(n_first.shape),
        m_first.new_empty(m_first.shape), i.new_empty(batch, heads, length), kept,
        i.new_empty(boundaries),
    )  # fmt: skip


@torch.library.custom_op("xlstm7b::mlstm_chunkwise_backward", mutates_args=())
def mlstm_chunkwise_backward(
    dh: Tensor, dC: Tensor, dn: Tensor, h: Tensor, normaliser: Tensor, C: Tensor, n: Tensor,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, m_first: Tensor,
    resets: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, i, f, C_first, n_first. C and n are those at the chunk boundaries."""
    chosen = plan(q.shape[-1], v.shape[-1], q.dtype)
    chunk, scale = chosen.chunk, q.shape[-1] ** -0.5
    batch, length, heads, _ = q.shape
    rows, chunks = batch * heads, triton.cdiv(length, chunk)
    # 1. The weights of the gates, computed again.
    weights, _ = _weights(i, f, m_first, resets, chunk)
    # 2. The gradient through the denominator.
    inverse, slope, q_weight, n_weight = i.new_empty(4, batch, heads, length).unbind()
    chunk_gates.row_gradients_kernel[(triton.cdiv(length, 32), rows)](
        h, dh, weights.m, normaliser, weights.from_state, inverse, slope, q_weight, n_weight,
        *h.stride()[:3], *dh.stride()[:3], scale, eps, length, heads, v.shape[-1],
        BLOCK_T=32, BLOCK_D=min(128, triton.next_power_of_2(v.shape[-1])),
    )  # fmt: skip
    # 3. The gradients of the states, from the last chunk to the first.
    gradients, first = _scan(
        q, dh, q_weight, n_weight, weights.decay, (dC, dn), chosen.state_gradients, chunk,
        reverse=True,
    )  # fmt: skip
    d_qk, d_hv = q.shape[-1], v.shape[-1]
    # 4. ⟨C, dC⟩ + ⟨n, dn⟩ at the boundaries.
    products = i.new_empty(batch, heads, chunks + 1)
    state_products_kernel[(chunks + 1, rows)](
        C, n, *gradients, products, DK=d_qk, DV=d_hv, BLOCK=4096, PADDED_K=padded(d_qk),
        num_warps=8,
    )  # fmt: skip

    def tiles(
        x: Tensor, x_other: Tensor, z: Tensor, own: Tensor, state: tuple[Tensor, Tensor],
        tile: Tile, row_weight: Tensor, vector_weight: Tensor, **kind: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return _tiles(
            x, x_other, z, state, weights, i, tile, chunk, scale, eps, own=own, inverse=inverse,
            slope=slope, row_weight=row_weight, vector_weight=vector_weight, **kind,
        )  # fmt: skip

    # 5. dv, dk, dq.
    to_state = weights.to_state
    dv, _ = tiles(
        k, q, dh, v, gradients, chosen.dv, to_state, to_state, query_rows=False, of_scores=False
    )
    dk, k_dk = tiles(
        v, dh, q, k, gradients, chosen.dk, to_state, to_state, query_rows=False, of_scores=True
    )
    dq, q_dq = tiles(
        dh, v, k, q, (C, n), chosen.dq, q_weight, n_weight, query_rows=True, of_scores=True
    )
    # 6. di, df.
    di, df = (torch.empty(i.shape, dtype=i.dtype, device=i.device) for _ in range(2))
    chunk_gates.gate_gradients_kernel[(chunks, rows)](
        f, weights.start, q_dq, k_dk, products, di, df,
        *f.stride(), length, heads, chunks, rows, len(q_dq), len(k_dk), CHUNK=chunk,
    )  # fmt: skip
    return dq, dk, dv, di, df, *first


@mlstm_chunkwise_backward.register_fake
def _(dh, dC, dn, h, normaliser, C, n, q, k, v, i, f, m_first, resets, eps):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, i, f, dC, dn))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, i, f, _, _, m_first, resets, ctx.eps = inputs
    h, _, _, *kept = output
    _, *for_backward = kept
    ctx.save_for_backward(h, *for_backward, q, k, v, i, f, m_first, resets)
    ctx.mark_non_differentiable(*kept)


def _backward(ctx: Any, dh: Tensor, dC: Tensor, dn: Tensor, *_: object) -> tuple[Any, ...]:
    dh = dh if dh.stride(-1) == 1 else dh.contiguous()
    gradients = mlstm_chunkwise_backward(
        dh, dC.contiguous(), dn.contiguous(), *ctx.saved_tensors, ctx.eps
    )
    return *gradients, None, None, None


mlstm_chunkwise.register_autograd(_backward, setup_context=_setup)


class _Weights(NamedTuple):
    """What the kernels of `chunk_gates.py` compute: [B, NH, T] each, but decay is [B, NH, NC]."""

    b: Tensor
    m: Tensor
    from_state: Tensor
    to_state: Tensor
    decay: Tensor
    start: Tensor  # int32, the latest boundary in the chunk, or −1


def _weights(
    i: Tensor, f: Tensor, m_first: Tensor, resets: Tensor | None, chunk: int
) -> tuple[_Weights, Tensor]:
    batch, length, heads = i.shape
    rows, chunks = batch * heads, triton.cdiv(length, chunk)
    b, top, m, from_state, to_state = i.new_empty(5, batch, heads, length).unbind()
    decay, m_chunk = i.new_empty(batch, heads, chunks), i.new_empty(batch, heads, chunks + 1)
    start = torch.empty(b.shape, dtype=torch.int32, device=i.device)
    chunk_gates.sum_gates_kernel[(chunks, rows)](
        i, f, start if resets is None else resets, b, top, start, *i.stride(), *f.stride(), length,
        heads, CHUNK=chunk, HAS_RESETS=resets is not None,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(chunks))
    chunk_gates.chain_stabilisers_kernel[(rows,)](
        b, top, start, m_first, m_chunk, length, chunks, CHUNK=chunk, BLOCK=block
    )
    chunk_gates.weights_kernel[(chunks, rows)](
        i, b, top, start, m_chunk, m, from_state, to_state, decay,
        *i.stride(), length, heads, chunks, CHUNK=chunk,
    )  # fmt: skip
    return _Weights(b, m, from_state, to_state, decay, start), m_chunk[..., -1].clone()


def _scan(
    x: Tensor, y: Tensor, x_weight: Tensor, n_weight: Tensor, decay: Tensor,
    first: tuple[Tensor, Tensor], tile: Tile, chunk: int, *, reverse: bool = False,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    """C and n at all boundaries [B, NH, NC + 1, …], and the last ones in float32."""
    batch, length, heads, d_k = x.shape
    d_v, chunks, rows = y.shape[-1], decay.shape[-1], batch * heads
    C = x.new_empty(batch, heads, chunks + 1, d_k, d_v, dtype=state_dtype(x.dtype, d_k, d_v))
    n = decay.new_empty(batch, heads, chunks + 1, d_k)
    last = decay.new_empty(batch, heads, d_k, d_v), decay.new_empty(batch, heads, d_k)
    tiles = triton.cdiv(d_k, tile.d_in), triton.cdiv(d_v, tile.d_out)
    options = {
        "DK": d_k, "DV": d_v, "CHUNK": chunk, "BLOCK_T": tile.t, "BLOCK_K": tile.d_in,
        "BLOCK_V": tile.d_out, "REVERSE": reverse, "EVEN_T": length % chunk == 0,
        **arithmetic(x.dtype, d_k, d_v), **tile.options(),
    }  # fmt: skip
    strides = *x.stride()[:3], *y.stride()[:3]
    if rows >= ROWS_TO_FILL:
        scan_states_kernel[(*tiles, rows)](
            x, y, x_weight, n_weight, decay, *first, C, n, *last, *strides, length, heads, chunks,
            **options,
        )  # fmt: skip
        return (C, n), last
    chunk_sums_kernel[(tiles[0] * tiles[1], chunks, rows)](
        x, y, x_weight, n_weight, C, n, *strides, length, heads, chunks, **options
    )
    block = min(CARRY.d_out, padded(d_k * d_v))
    carry_states_kernel[(triton.cdiv(d_k * d_v, block) + 1, rows)](
        decay, *first, C, n, *last, chunks, DK=d_k, DV=d_v, BLOCK=block, REVERSE=reverse,
        **CARRY.options(),
    )  # fmt: skip
    return (C, n), last


def _tiles(
    x: Tensor, x_other: Tensor, z: Tensor, state: tuple[Tensor, Tensor], weights: _Weights,
    i: Tensor, tile: Tile, chunk: int, scale: float, eps: float, *, query_rows: bool,
    of_scores: bool, row_weight: Tensor, vector_weight: Tensor, inverse: Tensor, slope: Tensor,
    own: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One of h, dv, dq, dk, and its `row_result`. `state` is C and the kernel's `vector`."""
    batch, length, heads, d_in = x.shape
    d_out, rows = z.shape[-1], batch * heads
    out = torch.empty(batch, length, heads, d_out, dtype=z.dtype, device=z.device)
    tiles_out = triton.cdiv(d_out, tile.d_out)
    results = weights.b.new_empty(tiles_out if of_scores else 1, batch, heads, length)
    C, n = state
    tile_kernel[(tiles_out * triton.cdiv(length, tile.t), rows)](
        x, x_other, z, C, n, row_weight, vector_weight, own,
        weights.b, i, weights.m, weights.start, inverse, slope, out, results,
        *x.stride()[:3], *x_other.stride()[:3], *z.stride()[:3], *i.stride(), *own.stride()[:3],
        *out.stride()[:3], scale, eps, length, heads, C.shape[2] - 1, rows,
        D_IN=d_in, D_OUT=d_out,
        STATE_STRIDE_IN=1 if of_scores else d_out, STATE_STRIDE_OUT=d_in if of_scores else 1,
        CHUNK=chunk, BLOCK_T=tile.t, BLOCK_IN=tile.d_in, BLOCK_OUT=tile.d_out,
        QUERY_ROWS=query_rows, OF_SCORES=of_scores,
        EVEN_T=length % tile.t == 0, **arithmetic(x.dtype, d_in, d_out), **tile.options(),
    )  # fmt: skip
    return out, results
