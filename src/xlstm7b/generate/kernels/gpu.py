"""The operations of `plain.py` for CUDA devices, with Triton kernels.

One row and few rows have kernels of their own, which also do the work around the products. For many
rows cuBLAS is faster. Weights and states have at most 32 bits, and rows are contiguous. Quantised
weights have the layout "gpu".
"""

from typing import Any

import torch
from torch import Tensor

from xlstm7b.generate.kernels import MAX_ROWS, fp8, pointwise
from xlstm7b.generate.kernels.few_rows import multiply_rows
from xlstm7b.generate.kernels.integers import multiply_integers, takes_integers
from xlstm7b.generate.kernels.one_row import multiply_row
from xlstm7b.generate.kernels.overlap import can_overlap
from xlstm7b.generate.kernels.pointwise import (
    embed,
    embed_live,
    keep_logits,
    pass_tokens,
    rms_norm,
    silu_and_multiply,
)
from xlstm7b.generate.kernels.quantized import multiply_codes
from xlstm7b.generate.kernels.slot_states import gather_states, scatter_states
from xlstm7b.mlstm import MLSTMState
from xlstm7b.mlstm.replay import Cursor, Pass, Ring
from xlstm7b.mlstm.triton.launch_params import pass_tile, replay_tile, step_tile
from xlstm7b.mlstm.triton.replay import launch_advance, launch_order, launch_replay, step_tokens
from xlstm7b.mlstm.triton.replay_pass import launch_advance_pass, launch_pass
from xlstm7b.mlstm.triton.step import launch_step
from xlstm7b.model.layers import product_float32
from xlstm7b.quantize.gpu import Fp8Rows
from xlstm7b.quantize.weight import QuantizedWeight

__all__ = [
    "add_product",
    "advance",
    "advance_pass",
    "embed",
    "embed_live",
    "gather_states",
    "head",
    "head_norm",
    "keep_logits",
    "multiply",
    "ordered",
    "pass_cell",
    "pass_tokens",
    "project",
    "replay_cell",
    "rms_norm",
    "scatter_states",
    "silu_and_multiply",
    "step_cell",
    "swiglu",
]

_ORDERED_ROWS = 16


def project(
    x: Tensor,
    norm: Tensor,
    eps: float,
    W: Tensor | QuantizedWeight,
    W_gates: Tensor,
    bias: Tensor,
    cap: float | None,
    live: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm(x) Wᵀ, and the gates' pre-activations [R, 2 NH] in float32, soft-capped."""
    if len(x) <= MAX_ROWS:
        gates = W_gates, bias
        return _multiply(x, W, norm=norm, eps=eps, gates=gates, live=live, cap=cap)
    if fp8.has_fp8_product(W, x):
        normed = torch.empty_like(x)
        projected = fp8.multiply_fp8(fp8.rms_norm_fp8(x, norm, eps, W, normed), W)
    else:
        normed = rms_norm(x, norm, eps)
        projected = _product(normed, W)
    return projected, pointwise.gate_product(normed, W_gates, bias, cap, live)


def step_cell(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState,
    gate: Tensor,
    norm: Tensor,
    norm_eps: float,
    eps: float,
) -> Tensor:
    """One token through the cell, headwise norm and gate: h [B, NH, d_hv]. Updates the state.

    It may read the state before the previous launch has ended. That launch must be the projection,
    which does not write to the state.
    """
    tile = step_tile(q.shape[0] * q.shape[1], q.shape[-1], v.shape[-1])
    return launch_step(
        q, k, v, i, f, *state, gate, norm, norm_eps, eps, tile, can_overlap(q.device)
    )


def replay_cell(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState,
    ring: Ring,
    cursor: Cursor,
    gate: Tensor,
    norm: Tensor,
    norm_eps: float,
    eps: float,
) -> Tensor:
    """As `step_cell`, from a ring: writes one entry of it, and the state of rows that are due.

    It may read state, ring and cursor before the previous launch has ended, as `step_cell` does.
    """
    rows, tokens = q.shape[0] * q.shape[1], step_tokens(ring.k.shape[2], cursor)
    tile = replay_tile(rows, tokens, q.shape[-1], v.shape[-1], state.C.dtype)
    return launch_replay(
        q, k, v, i, f, state, ring, cursor, gate, norm, norm_eps, eps, tile, can_overlap(q.device)
    )


def ordered(cursor: Cursor) -> Cursor:
    """The cursor with an order of its rows, if the operations gain by one.

    The programs of few rows all run at once.
    """
    if len(cursor.seen) < _ORDERED_ROWS or cursor.folds_all:
        return cursor
    return cursor._replace(order=launch_order(cursor, can_overlap(cursor.seen.device)))


def advance(cursor: Cursor) -> None:
    """Counts the current token, after the last block."""
    launch_advance(cursor, can_overlap(cursor.seen.device))


def pass_cell(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState,
    ring: Ring,
    rows: Pass,
    gate: Tensor,
    norm: Tensor,
    norm_eps: float,
    eps: float,
) -> Tensor:
    """As `replay_cell`, with T tokens of each row: h [B, T, NH, d_hv]. Writes up to T entries.

    It may read state, ring, cursors and lengths before the previous launch has ended.
    """
    tile = pass_tile(q.shape[0] * q.shape[2], q.shape[-1], v.shape[-1])
    return launch_pass(
        q, k, v, i, f, state, ring, rows, gate, norm, norm_eps, eps, tile, can_overlap(q.device)
    )


def advance_pass(rows: Pass, kept: Tensor) -> None:
    """Counts the first `kept` [B] tokens of a pass, after the last block."""
    launch_advance_pass(rows, kept, can_overlap(kept.device))


def head_norm(
    h: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor,
    reader: Tensor | QuantizedWeight | None = None,
) -> Tensor | Fp8Rows:
    """Headwise norm of h [R, NH, d_hv], times σ(gate) for gate [R, NH · d_hv]."""
    if fp8.has_fp8_product(reader, h):
        return fp8.head_norm_fp8(h, weight, eps, gate, reader)
    return pointwise.head_norm(h, weight, eps, gate)


def add_product(x: Tensor, y: Tensor | Fp8Rows, W: Tensor | QuantizedWeight) -> None:
    """x += y Wᵀ, in place: adds to the residual stream."""
    if isinstance(y, Fp8Rows):
        assert isinstance(W, QuantizedWeight)
        x += fp8.multiply_fp8(y, W)
    elif len(x) <= (16 if isinstance(W, Tensor) else MAX_ROWS):  # above, cuBLAS is faster
        _multiply(y, W, residual=x)
    elif isinstance(W, Tensor):
        x.addmm_(y, W.mT)
    else:
        x += _product(y, W)


def swiglu(
    x: Tensor,
    norm: Tensor,
    eps: float,
    W: Tensor | QuantizedWeight,
    reader: Tensor | QuantizedWeight | None = None,
) -> Tensor | Fp8Rows:
    """SiLU(RMSNorm(x) W_gateᵀ) ⊙ RMSNorm(x) W_upᵀ, for W = [W_gate; W_up]."""
    if len(x) <= MAX_ROWS:
        return _multiply(x, W, norm=norm, eps=eps, swiglu=True)[0]
    # Prefill uses most memory here. In one expression, so that the normalised x is freed first.
    if fp8.has_fp8_product(W, x):
        y = fp8.multiply_fp8(fp8.rms_norm_fp8(x, norm, eps, W), W)
    else:
        y = _product(rms_norm(x, norm, eps), W)
    if fp8.has_fp8_product(reader, y):
        return fp8.silu_and_multiply_fp8(y, reader)
    return silu_and_multiply(y)


def multiply(x: Tensor, W: Tensor | QuantizedWeight) -> Tensor:
    """x Wᵀ."""
    return _multiply(x, W)[0] if len(x) <= MAX_ROWS else _product(x, W)


def head(
    x: Tensor,
    norm: Tensor,
    eps: float,
    W: Tensor | QuantizedWeight,
    cap: float | None,
    out: Tensor | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """Logits RMSNorm(x) Wᵀ in float32, soft-capped.

    With `out` [R, V], contiguous, they are written there, where a row is `live` [R].
    """
    assert out is None or live is not None
    if len(x) <= MAX_ROWS:
        options: dict[str, Any] = {"norm": norm, "eps": eps, "cap": cap}
        if out is not None and isinstance(W, Tensor):
            assert out.is_contiguous()
            return _multiply(x, W, **options, out=out, live=live)[0]
        logits = _multiply(x, W, **options, out_dtype=torch.float32)[0]
    else:
        x = rms_norm(x, norm, eps)
        logits = product_float32(x, W if isinstance(W, Tensor) else W.dequantize(x.dtype))
        if cap is not None:
            pointwise.cap_logits(logits, cap)
    if out is None:
        return logits
    assert live is not None
    keep_logits(logits[:, None], live, out)
    return out


def _multiply(x: Tensor, W: Tensor | QuantizedWeight, **options: Any) -> tuple[Tensor, Tensor]:
    """One of the functions `multiply_…`, with its options."""
    if isinstance(W, QuantizedWeight):
        return (multiply_integers if takes_integers(x, W) else multiply_codes)(x, W, **options)
    return multiply_row(x, W, **options) if len(x) == 1 else multiply_rows(x, W, **options)


def _product(x: Tensor, W: Tensor | QuantizedWeight) -> Tensor:
    """x Wᵀ for many rows."""
    if isinstance(W, Tensor):
        return x @ W.mT
    if fp8.has_fp8_product(W, x):
        return fp8.multiply_fp8(fp8.round_rows(x, W), W)
    return x @ W.dequantize(x.dtype).mT
