"""The parallel form of the mLSTM: one matrix product over all pairs of positions.

Time and memory grow with T², so it is for tests and for study. It unrolls the recurrence. With
F_ts = Σ_{r=s+1…t} logσ(f̃_r) and (C_0, n_0, m_0) the state before the sequence:

    D_ts = F_ts + ĩ_s         g_t = Σ_{r≤t} logσ(f̃_r) + m_0         m_t = max(g_t, max_s D_ts)
    numerator_t   = Σ_s exp(D_ts − m_t) (q_t·k_s) v_s + exp(g_t − m_t) C_0ᵀ q_t
    denominator_t = max(|Σ_s exp(D_ts − m_t) (q_t·k_s) + exp(g_t − m_t) n_0·q_t|, exp(−m_t)) + ε

s runs over the positions up to t in the same document as t. After a reset, C_0, n_0 and m_0 are 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.mlstm.recurrent import MLSTMState


def parallel_sequence(
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
    """All positions at once. Inside this function heads come before time: [B, NH, T, …]."""
    length = q.shape[1]
    q_t, k_s, v_s = (x.to(i.dtype).transpose(1, 2) for x in (q, k, v))
    q_t = q_t * q.shape[-1] ** -0.5
    i_s, log_f = i.transpose(1, 2), F.logsigmoid(f).transpose(1, 2)
    C_0, n_0, m_0 = (part.to(i.dtype) for part in state)
    m_0 = m_0.detach()

    past = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    document = torch.zeros_like(i[:, :, 0], dtype=torch.long)
    if resets is not None:
        document = resets.cumsum(1)
    visible = (past & (document[:, :, None] == document[:, None, :]))[:, None]
    in_first = (document == 0)[:, None]

    # Summed from s + 1 to t directly. A difference of two cumulative sums would lose digits.
    F_ts = torch.where(past.tril(-1), log_f[..., :, None], 0).cumsum(-2)
    D = torch.where(visible, F_ts + i_s[..., None, :], -torch.inf)
    g = torch.where(visible, log_f[..., None, :], 0).sum(-1) + torch.where(
        in_first, m_0[..., None], 0
    )
    m = torch.maximum(g, D.amax(-1)).detach()
    from_state = torch.where(in_first, torch.exp(g - m), 0)[..., None] * q_t

    S = (q_t @ k_s.mT) * torch.exp(D - m[..., None])
    numerator = S @ v_s + from_state @ C_0
    normaliser = S.sum(-1) + (from_state @ n_0[..., None]).squeeze(-1)
    denominator = torch.maximum(normaliser.abs(), torch.exp(-m)) + eps
    h = (numerator / denominator[..., None]).to(v.dtype).transpose(1, 2)

    # The final state has the weights of the last position.
    k_in = torch.exp(D[..., -1, :] - m[..., -1, None])[..., None] * k_s
    f_act = torch.where(in_first[..., -1], torch.exp(g[..., -1] - m[..., -1]), 0)
    C = f_act[..., None, None] * C_0 + k_in.mT @ v_s
    n = f_act[..., None] * n_0 + k_in.sum(-2)
    return h, MLSTMState(C, n, m[..., -1])
