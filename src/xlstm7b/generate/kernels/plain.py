"""The operations of generation in plain PyTorch, for any device.

`gpu.py` has the same functions for CUDA devices. x [R, d] are rows of the residual stream: one
token of each request, or all tokens of a prefill batch. Weights W [N, K] are stacked as in
`FusedBlock`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.mlstm import MLSTMState, headwise_norm, mlstm_step
from xlstm7b.mlstm.replay import Cursor, Ring, replay_step
from xlstm7b.model.layers import linear, linear_float32, soft_cap
from xlstm7b.quantize.weight import QuantizedWeight


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
    """RMSNorm(x) Wᵀ, and the gates' pre-activations [R, 2 NH] in float32, soft-capped.

    A row that is not `live` [R] (padding, an idle slot) gets input gates of −∞ and forget gates of
    +∞. With these the cell leaves its state unchanged.
    """
    x = rms_norm(x, norm, eps)
    gates = soft_cap(linear_float32(x, W_gates, bias), cap)
    if live is not None:
        i, f = gates.chunk(2, -1)
        i.masked_fill_(~live[:, None], -torch.inf)
        f.masked_fill_(~live[:, None], torch.inf)
    return linear(x, W), gates


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
    """One token through the cell, headwise norm and gate: h [B, NH, d_hv]. Updates the state."""
    h, _ = mlstm_step(
        q, k, v, i, f, state, gate=gate, norm_weight=norm, norm_eps=norm_eps, eps=eps, inplace=True
    )
    return h


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
    """As `step_cell`, from a ring: writes one entry of it, and the state of rows that are due."""
    h = replay_step(q, k, v, i, f, state, ring, cursor, eps=eps)
    return headwise_norm(h, norm, norm_eps) * torch.sigmoid(gate)


def advance(cursor: Cursor) -> None:
    """Counts the current token, after the last block."""
    cursor.advance()


def head_norm(h: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """Headwise norm of h [R, NH, d_hv], times σ(gate) for gate [R, NH · d_hv]."""
    return headwise_norm(h, weight, eps).flatten(1) * torch.sigmoid(gate)


def add_product(x: Tensor, y: Tensor, W: Tensor | QuantizedWeight) -> None:
    """x += y Wᵀ, in place: adds to the residual stream."""
    x += linear(y, W)


def swiglu(x: Tensor, norm: Tensor, eps: float, W: Tensor | QuantizedWeight) -> Tensor:
    """SiLU(RMSNorm(x) W_gateᵀ) ⊙ RMSNorm(x) W_upᵀ, for W = [W_gate; W_up]."""
    return silu_and_multiply(multiply(rms_norm(x, norm, eps), W))


def multiply(x: Tensor, W: Tensor | QuantizedWeight) -> Tensor:
    """x Wᵀ."""
    return linear(x, W)


def silu_and_multiply(x: Tensor) -> Tensor:
    """SiLU(x[:, :F]) · x[:, F:] for x [R, 2 F]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def head(
    x: Tensor, norm: Tensor, eps: float, W: Tensor | QuantizedWeight, cap: float | None
) -> Tensor:
    """Logits RMSNorm(x) Wᵀ in float32, soft-capped."""
    return soft_cap(linear_float32(rms_norm(x, norm, eps), W), cap)


def gather_states(states: MLSTMState, slots: Tensor) -> MLSTMState:
    """The states of these slots [R], as a new batch."""
    return type(states)(*(x.index_select(0, slots) for x in states))


def scatter_states(batch: MLSTMState, states: MLSTMState, slots: Tensor) -> None:
    """Writes the states of a batch to these slots [R], in the slots' dtype."""
    for x, value in zip(states, batch, strict=True):
        x.index_copy_(0, slots, value.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + ε) in x's dtype, times the weight; computed in float32 or wider."""
    wide = x if x.dtype.itemsize >= 4 else x.float()
    return F.rms_norm(wide, x.shape[-1:], eps=eps).to(x.dtype) * weight
