"""The recurrent form of the mLSTM: the paper's equations, one token at a time.

    m_t = max(logσ(f̃_t) + m_{t−1}, ĩ_t)
    f_t = exp(logσ(f̃_t) + m_{t−1} − m_t)          i_t = exp(ĩ_t − m_t)
    C_t = f_t C_{t−1} + i_t k_t v_tᵀ               n_t = f_t n_{t−1} + i_t k_t
    h̃_t = C_tᵀ (q_t/√d_qk) / (max(|n_tᵀ q_t/√d_qk|, exp(−m_t)) + ε)

In float64 it is the reference that every other form is tested against. All arithmetic is in the
gates' dtype.
"""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor


class MLSTMState(NamedTuple):
    """The state of one layer. Its size does not depend on the number of tokens read.

    C and n are stored divided by exp(m), which keeps them in range: the values that the equations
    without stabiliser would have are C·exp(m) and n·exp(m). No gradient flows through m.

    C may be kept in bfloat16, n and m not: m carries the decay, and the logσ(6) = −0.0025 of an
    open forget gate is lost beside an m in bfloat16.
    """

    C: Tensor  # [B, NH, d_qk, d_hv]
    n: Tensor  # [B, NH, d_qk]
    m: Tensor  # [B, NH]

    @classmethod
    def zeros(
        cls,
        batch: int,
        heads: int,
        d_qk: int,
        d_hv: int,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
    ) -> Self:
        """The state before the first token: C_0 = n_0 = m_0 = 0. C has this dtype."""
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        assert isinstance(dtype, torch.dtype)
        shape, wide = (batch, heads, d_qk, d_hv), torch.promote_types(dtype, torch.float32)
        parts = ((4, dtype), (3, wide), (2, wide))
        return cls(*(torch.zeros(shape[:n], dtype=kind, device=device) for n, kind in parts))

    def detach(self) -> Self:
        """The same tensors without their history: gradients stop here."""
        return type(self)(*(part.detach() for part in self))


def recurrent_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState,
    *,
    eps: float = 1e-6,
    inplace: bool = False,
) -> tuple[Tensor, MLSTMState]:
    """One token for every row and head: q, k [B, NH, d_qk], v [B, NH, d_hv], i, f [B, NH].

    With `inplace`, the tensors of `state` are overwritten and returned.
    """
    q_scaled, k, value = q.to(i.dtype) * q.shape[-1] ** -0.5, k.to(i.dtype), v.to(i.dtype)
    C, n, m = (part.to(i.dtype) for part in state)
    # m cancels from every result except for ε, so gradients are exact with m as a constant.
    decayed = F.logsigmoid(f) + m.detach()
    m_new = torch.maximum(decayed, i).detach()
    f_act = torch.exp(decayed - m_new)[..., None]
    k_in = torch.exp(i - m_new)[..., None] * k
    if inplace:  # C is large: it is read and written once less. In bfloat16 this C is a copy.
        C = C.mul_(f_act[..., None]).addcmul_(k_in[..., None], value[..., None, :])
    else:
        C = torch.addcmul(f_act[..., None] * C, k_in[..., None], value[..., None, :])
    n = torch.addcmul(k_in, f_act, n)
    numerator = (q_scaled[..., None, :] @ C).squeeze(-2)
    denominator = torch.maximum((q_scaled * n).sum(-1).abs(), torch.exp(-m_new)) + eps
    h = (numerator / denominator[..., None]).to(v.dtype)
    new = MLSTMState(C, n, m_new)
    if inplace:
        for old_part, new_part in zip(state, new, strict=True):
            if new_part is not old_part:
                old_part.copy_(new_part)
        new = state
    return h, new


def recurrent_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    state: MLSTMState,
    resets: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, MLSTMState]:
    """`recurrent_step` for each token. The state is set to 0 before a document's first token."""
    outputs = []
    for t in range(q.shape[1]):
        if resets is not None:
            kept = ~resets[:, t, None]
            state = MLSTMState(
                torch.where(kept[..., None, None], state.C, 0),
                torch.where(kept[..., None], state.n, 0),
                torch.where(kept, state.m, 0),
            )
        h, state = recurrent_step(q[:, t], k[:, t], v[:, t], i[:, t], f[:, t], state, eps=eps)
        outputs.append(h)
    return torch.stack(outputs, dim=1), state
