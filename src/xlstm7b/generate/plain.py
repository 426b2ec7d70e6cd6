"""The work between tokens and logits in plain PyTorch: any device. `triton/` has the same by name.

Every function takes rows x [R, d]: a batch's single tokens, or all tokens of a piece of prompt.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.mlstm import MLSTMState, headwise_norm, mlstm_step
from xlstm7b.model.layers import linear, linear_float32, soft_cap


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + ε), cast back, times the weight."""
    wide = x if x.dtype.itemsize >= 4 else x.float()
    return F.rms_norm(wide, x.shape[-1:], eps=eps).to(x.dtype) * weight


def project(
    x: Tensor, norm: Tensor, eps: float, W: Tensor, W_gates: Tensor, bias: Tensor, cap: float,
    live: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """W · RMSNorm(x), and the gates' pre-activations [R, 2 NH] in float32, soft-capped.

    A row that is not `live` has shut input and open forget gates: it leaves the state as it is.
    """
    x = rms_norm(x, norm, eps)
    gates = soft_cap(linear_float32(x, W_gates, bias), cap)
    if live is not None:
        i, f = gates.chunk(2, -1)
        i.masked_fill_(~live[:, None], -torch.inf)
        f.masked_fill_(~live[:, None], torch.inf)
    return linear(x, W), gates


def step_cell(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState, gate: Tensor,
    norm: Tensor, norm_eps: float, eps: float,
) -> Tensor:  # fmt: skip
    """One token through the cell, its norm and gate: h [B, NH, d_hv]; the state in place."""
    h, _ = mlstm_step(
        q, k, v, i, f, state, gate=gate, norm_weight=norm, norm_eps=norm_eps, eps=eps, inplace=True
    )
    return h


def head_norm(h: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """Headwise norm of h [R, NH, d_hv], times σ(gate [R, NH · d_hv])."""
    return headwise_norm(h, weight, eps).flatten(1) * torch.sigmoid(gate)


def add_product(x: Tensor, y: Tensor, W: Tensor) -> None:
    """x += W · y, in place: the residual stream."""
    x += linear(y, W)


def swiglu(x: Tensor, norm: Tensor, eps: float, W: Tensor) -> Tensor:
    """SiLU(W_gate · RMSNorm(x)) ⊙ W_up · RMSNorm(x), the two matrices stacked in W."""
    gate, up = linear(rms_norm(x, norm, eps), W).chunk(2, -1)
    return F.silu(gate) * up


def head(x: Tensor, norm: Tensor, eps: float, W: Tensor, cap: float) -> Tensor:
    """Soft-capped logits in float32."""
    return soft_cap(linear_float32(rms_norm(x, norm, eps), W), cap)
