"""The chunkwise form of the mLSTM in plain PyTorch: any device, any sequence length.

Inside a chunk it is the quadratic form of `parallel.py`, for all chunks at once. Between chunks it
is recurrent: one state update for each chunk. With b_t the sum of log forget gates from the chunk's
first token (or the last reset in the chunk) to t, and (C, n, m) the state before the chunk:

    D_ts = b_t − b_s + ĩ_s        m_t = max(b_t + m, max_s D_ts)
    intra_t = Σ_s exp(D_ts − m_t) (q_t·k_s) v_s        inter_t = exp(b_t + m − m_t) Cᵀ q_t

At a reset the sums start again: s runs over the document of t only, and after a reset the state
counts as 0. Terms of other documents are masked before they are summed, never subtracted from a
sum. So no bit of a document's result depends on the documents before it. A forget gate of −∞ is
such a boundary too, of one head. Only m differs: after a reset it starts from 0, here from −∞.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.mlstm.recurrent import MLSTMState

CHUNK_SIZE = 64


def chunkwise_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    state: MLSTMState,
    resets: Tensor | None = None,
    eps: float = 1e-6,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, MLSTMState]:
    """Time is linear in T. Extra memory is T · chunk_size numbers for each row and head."""
    batch, length = i.shape[:2]
    size = min(chunk_size, length)
    # An int under torch.compile too, as the loops below are unrolled. Then only the padding has a
    # symbolic length, not every tensor after it, and compilation takes half the time.
    chunks = len(range(-(-length // size)))
    padding = chunks * size - length

    def chunked(x: Tensor, fill: float = 0.0) -> Tensor:
        """[B, T, NH, …] → [B, NH, chunks, size, …]; the last chunk is padded with `fill`."""
        if padding:
            # Not F.pad: under torch.compile its backward pass expects other strides than it gets.
            x = torch.cat([x, x.new_full((batch, padding, *x.shape[2:]), fill)], dim=1)
        return x.reshape(batch, chunks, size, *x.shape[2:]).movedim(3, 1).contiguous()

    # Padding has closed input gates and open forget gates, so it does not change the state.
    q_c, k_c, v_c = (chunked(x.to(i.dtype)) for x in (q, k, v))
    i_c, log_f = chunked(i, -torch.inf), chunked(F.logsigmoid(f))
    q_c = q_c * q.shape[-1] ** -0.5
    C, n, m = (part.to(i.dtype) for part in state)

    forgets = log_f == -torch.inf
    log_f = log_f.masked_fill(forgets, 0)  # so that b stays finite
    boundary = forgets
    if resets is not None:
        boundary = forgets | F.pad(resets, (0, padding)).view(batch, 1, chunks, size)
    part_of = boundary.cumsum(-1, dtype=torch.int32)
    carried = part_of == 0
    visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    visible = visible & (part_of[..., :, None] == part_of[..., None, :])
    fresh_m = i.new_full((), -torch.inf)
    if resets is None:
        b = log_f.cumsum(-1)
    else:
        b = torch.where(visible, log_f[..., None, :], 0).sum(-1)
        fresh_m = torch.where((visible & forgets[..., None, :]).any(-1), fresh_m, 0)
    D = torch.where(visible, b[..., :, None] - b[..., None, :] + i_c[..., None, :], -torch.inf)

    m_start, m_t = _stabilisers(b.detach(), D.detach(), carried, m.detach(), fresh_m)
    from_state = torch.where(carried, torch.exp(b + m_start - m_t), 0)
    from_token = torch.exp(D - m_t[..., None])

    S = (q_c @ k_c.mT) * from_token
    numerator, normaliser = S @ v_c, S.sum(-1)
    q_c = q_c * from_state[..., None]
    k_c = k_c * from_token[..., -1, :, None]  # each token's weight in the state after the chunk
    kept = from_state[..., -1]
    inter, inter_normaliser = [], []
    for c in range(chunks):
        inter.append(q_c[:, :, c] @ C)
        inter_normaliser.append((q_c[:, :, c] @ n[..., None]).squeeze(-1))
        C = kept[:, :, c, None, None] * C + k_c[:, :, c].mT @ v_c[:, :, c]
        n = kept[:, :, c, None] * n + k_c[:, :, c].sum(-2)
    numerator = numerator + torch.stack(inter, dim=2)
    normaliser = normaliser + torch.stack(inter_normaliser, dim=2)

    denominator = torch.maximum(normaliser.abs(), torch.exp(-m_t)) + eps
    h = (numerator / denominator[..., None]).to(v.dtype)
    h = h.movedim(1, 3).flatten(1, 2)[:, :length]
    return h, MLSTMState(C, n, m_t[..., -1, -1])


def _stabilisers(
    b: Tensor, D: Tensor, carried: Tensor, m: Tensor, fresh_m: Tensor
) -> tuple[Tensor, Tensor]:
    """The m that each position's part of its chunk starts from, and m at each position.

    m is the same as in the recurrent form. A part that does not continue the state starts from
    `fresh_m`.
    """
    fresh_m = fresh_m.expand(b.shape)
    highest = D.amax(-1)
    m_before = []
    for c in range(b.shape[2]):
        m_before.append(m)
        start = torch.where(carried[:, :, c, -1], m, fresh_m[:, :, c, -1])
        m = torch.maximum(b[:, :, c, -1] + start, highest[:, :, c, -1])
    m_start = torch.where(carried, torch.stack(m_before, dim=2)[..., None], fresh_m)
    return m_start, torch.maximum(b + m_start, highest)
