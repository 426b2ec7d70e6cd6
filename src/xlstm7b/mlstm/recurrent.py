"""The mLSTM one step at a time, equation by equation: the oracle for every other form.

    m_t = max(logσ(f̃_t) + m_{t−1}, ĩ_t)
    f_t = exp(logσ(f̃_t) + m_{t−1} − m_t)          i_t = exp(ĩ_t − m_t)
    C_t = f_t C_{t−1} + i_t k_t v_tᵀ               n_t = f_t n_{t−1} + i_t k_t
    h̃_t = C_tᵀ (q_t/√d_qk) / (max(|n_tᵀ q_t/√d_qk|, exp(−m_t)) + ε)

All arithmetic is in the gates' dtype (float32, or float64 for the oracle).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.mlstm.state import MLSTMState


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState, *, eps: float = 1e-6
) -> tuple[Tensor, MLSTMState]:
    """One token for every row and head: q, k [B, NH, d_qk], v [B, NH, d_hv], i, f [B, NH]."""
    q_scaled, k, value = q.to(i.dtype) * q.shape[-1] ** -0.5, k.to(i.dtype), v.to(i.dtype)
    C, n, m = (part.to(i.dtype) for part in state)
    # m cancels from every result (all but ε), so treating it as a constant leaves gradients exact.
    decayed = F.logsigmoid(f) + m.detach()
    m_new = torch.maximum(decayed, i).detach()
    f_act = torch.exp(decayed - m_new)[..., None]
    k_in = torch.exp(i - m_new)[..., None] * k
    C = torch.addcmul(f_act[..., None] * C, k_in[..., None], value[..., None, :])
    n = torch.addcmul(k_in, f_act, n)
    numerator = (q_scaled[..., None, :] @ C).squeeze(-2)
    denominator = torch.maximum((q_scaled * n).sum(-1).abs(), torch.exp(-m_new)) + eps
    h = (numerator / denominator[..., None]).to(v.dtype)
    return h, MLSTMState(C, n, m_new)


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
    """The whole sequence by `recurrent_step`; the state is set to 0 before a reset's update."""
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
