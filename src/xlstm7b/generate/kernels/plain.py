"""The operations of generation in plain PyTorch, for any device.

`gpu.py` has the same functions for CUDA devices. x [R, d] are rows of the residual stream: one
token of each request, or all tokens of a prefill batch. Weights W [N, K] are stacked as in
`FusedBlock`.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.mlstm import MLSTMState, headwise_norm, mlstm_step
from xlstm7b.mlstm.replay import Cursor, Pass, Ring, replay_pass, replay_step
from xlstm7b.model.layers import linear, linear_float32, soft_cap
from xlstm7b.quantize.gpu import Fp8Rows
from xlstm7b.quantize.weight import QuantizedWeight


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """The rows of the table [V, d] that tokens [R] name. A token below 0 has that of token 0."""
    return F.embedding(tokens.clamp(min=0), table)


def embed_live(tokens: Tensor, table: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """`embed`, and which rows [R] are live: those whose token is not below 0.

    Adds 1 to `seen` [R] for each live row, in place, if it is given.
    """
    live = tokens >= 0
    if seen is not None:
        seen.add_(live)
    return embed(tokens, table), live


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
        gates = torch.where(live[:, None], gates, _idle_gates(len(bias), gates.dtype, x.device))
    return linear(x, W), gates


@cache
@torch.inference_mode(False)
def _idle_gates(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gates [2 NH] of a row that is not live."""
    return torch.tensor([-torch.inf, torch.inf], dtype=dtype, device=device).repeat_interleave(
        count // 2
    )


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

    These are the equations of `mlstm_step`, with fewer operators: on a CPU, the time of a small
    model is that of starting them. √d_qk is applied to the denominator, which is smaller than q.
    """
    C, n, m = state
    if not (q.dtype == i.dtype == C.dtype == n.dtype == m.dtype):
        return mlstm_step(
            q, k, v, i, f, state, gate=gate, norm_weight=norm, norm_eps=norm_eps, eps=eps,
            inplace=True,
        )[0]  # fmt: skip
    root = math.sqrt(q.shape[-1])
    decayed = F.logsigmoid(f).add_(m)
    torch.maximum(decayed, i, out=m)
    f_act = decayed.sub_(m).exp_().unsqueeze(-1)
    k_in = k * (i - m).exp_().unsqueeze(-1)
    n.mul_(f_act).add_(k_in)
    C.mul_(f_act.unsqueeze(-1)).addcmul_(k_in.unsqueeze(-1), v.unsqueeze(-2))
    smallest = (math.log(root) - m).exp_()
    size = torch.maximum((q * n).sum(-1).abs_(), smallest).add_(root * eps)
    h = (q.unsqueeze(-2) @ C).squeeze(-2).div_(size.unsqueeze(-1))
    normed = F.group_norm(h.flatten(1), h.shape[1], norm, eps=norm_eps)
    return normed.view_as(h).mul_(torch.sigmoid(gate))


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


def ordered(cursor: Cursor) -> Cursor:
    """The cursor with an order of its rows, if the operations gain by one."""
    return cursor


def advance(cursor: Cursor) -> None:
    """Counts the current token, after the last block."""
    cursor.advance()


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
    """As `replay_cell`, with T tokens of each row: h [B, T, NH, d_hv]. Writes up to T entries."""
    h = replay_pass(q, k, v, i, f, state, ring, rows, eps=eps)
    return headwise_norm(h, norm, norm_eps) * torch.sigmoid(gate)


def advance_pass(rows: Pass, kept: Tensor) -> None:
    """Counts the first `kept` [B] tokens of a pass, after the last block."""
    rows.advance(kept)


def head_norm(
    h: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor,
    reader: Tensor | QuantizedWeight | None = None,
) -> Tensor | Fp8Rows:
    """Headwise norm of h [R, NH, d_hv], times σ(gate) for gate [R, NH · d_hv].

    `reader` is the matrix that multiplies the result next (`add_product`), if only that reads it:
    `gpu.py` rounds the result for it. Here it changes nothing.
    """
    return headwise_norm(h, weight, eps).flatten(1) * torch.sigmoid(gate)


def add_product(x: Tensor, y: Tensor | Fp8Rows, W: Tensor | QuantizedWeight) -> None:
    """x += y Wᵀ, in place: adds to the residual stream."""
    assert isinstance(y, Tensor)
    x += linear(y, W)


def swiglu(
    x: Tensor,
    norm: Tensor,
    eps: float,
    W: Tensor | QuantizedWeight,
    reader: Tensor | QuantizedWeight | None = None,
) -> Tensor | Fp8Rows:
    """SiLU(RMSNorm(x) W_gateᵀ) ⊙ RMSNorm(x) W_upᵀ, for W = [W_gate; W_up].

    `reader` is as in `head_norm`.
    """
    return silu_and_multiply(multiply(rms_norm(x, norm, eps), W))


def multiply(x: Tensor, W: Tensor | QuantizedWeight) -> Tensor:
    """x Wᵀ."""
    return linear(x, W)


def silu_and_multiply(x: Tensor) -> Tensor:
    """SiLU(x[:, :F]) · x[:, F:] for x [R, 2 F]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


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
    logits = soft_cap(linear_float32(rms_norm(x, norm, eps), W), cap)
    if out is None:
        return logits
    assert live is not None
    keep_logits(logits[:, None], live, out)
    return out


def pass_tokens(pending: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens [B, T] of a pass: those pending [B], then their drafts; and how many are real."""
    lengths = torch.where(pending >= 0, 1 + (drafts >= 0).sum(1), 0)
    return torch.cat([pending[:, None], drafts], 1), lengths


def keep_logits(logits: Tensor, kept: Tensor, last: Tensor, every: Tensor | None = None) -> None:
    """Copies logits [B, T, V]: of position `kept` − 1 of each row to `last` [B, V], all to `every`.

    A row that keeps no position leaves `last` as it is.
    """
    if every is not None:
        every.copy_(logits)
    chosen = logits[:, 0]
    if logits.shape[1] > 1:
        position = (kept - 1).clamp(min=0)[:, None, None]
        chosen = logits.take_along_dim(position, 1)[:, 0]
    torch.where((kept > 0)[:, None], chosen, last, out=last)


def gather_states(states: MLSTMState, slots: Tensor) -> MLSTMState:
    """The states of these slots [R], as a new batch."""
    return type(states)(*(x.index_select(0, slots) for x in states))


def scatter_states(batch: MLSTMState, states: MLSTMState, slots: Tensor) -> None:
    """Writes the states of a batch to these slots [R], in the slots' dtype."""
    for x, value in zip(states, batch, strict=True):
        x.index_copy_(0, slots, value.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + ε) in x's dtype, times the weight; computed in float32 or wider."""
    if x.dtype.itemsize < 4:
        return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight
    # 5 operators; on a CPU, `F.rms_norm` calls 19.
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean = torch.addcmul(_constant(eps, x.dtype, x.device), size, size, value=1 / x.shape[-1])
    return mean.rsqrt_().mul(x).mul_(weight)


@cache
@torch.inference_mode(False)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)
