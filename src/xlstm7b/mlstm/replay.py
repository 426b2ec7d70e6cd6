"""Replay decoding: steps that read the state and do not write it.

A layer keeps its state as of an earlier token (the checkpoint C, n, m) and a ring with k, v, ĩ, f̃
of the tokens since. With these tokens numbered j = 1 … r, the current one last:

    g_j = Σ_{l>j} logσ(f̃_l)                        g_0 the sum over all of them
    m_r = max(g_0 + m, max_j(g_j + ĩ_j))
    a = exp(g_0 + m − m_r)                         w_j = exp(g_j + ĩ_j − m_r)
    S_j = q·k_j/√d_qk
    h̃ = (a Cᵀq/√d_qk + Σ_j w_j S_j v_j) / (max(|a nᵀq/√d_qk + Σ_j w_j S_j|, exp(−m_r)) + ε)
    fold:  C ← a C + Σ_j w_j k_j v_jᵀ              n ← a n + Σ_j w_j k_j             m ← m_r

This is the chunkwise form with a chunk that is not full yet. A step writes one entry of the ring.
Every `interval` tokens a row is folded: its checkpoint becomes the current state. C is the largest
part of the state, so a step moves about half of the bytes that `recurrent_step` moves.

Here are the equations in plain PyTorch, for tests and CPUs. All arithmetic is in the gates' dtype.
"""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.mlstm.recurrent import MLSTMState


class Ring(NamedTuple):
    """The latest tokens of one layer. Token t of a row, counted from 0, is entry t % R."""

    k: Tensor  # [B, NH, R, d_qk]
    v: Tensor  # [B, NH, R, d_hv]
    i: Tensor  # [B, NH, R]
    f: Tensor  # [B, NH, R]

    @classmethod
    def zeros(
        cls,
        batch: int,
        heads: int,
        size: int,
        d_qk: int,
        d_hv: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> Self:
        """A ring for `size` tokens. k and v have this dtype, the gates are at least float32."""
        wide = torch.promote_types(dtype, torch.float32)
        parts = (((size, d_qk), dtype), ((size, d_hv), dtype), ((size,), wide), ((size,), wide))
        return cls(*(torch.zeros(batch, heads, *s, dtype=kind, device=device) for s, kind in parts))


class Cursor(NamedTuple):
    """Where each row [B] is in its rings. All layers of a model have the same."""

    folded: Tensor  # tokens that the checkpoint has read, int64; the ring holds those since
    seen: Tensor  # tokens that the row has read, int64
    live: Tensor  # bool: whether the row reads a token now
    interval: int  # tokens from one fold to the next; no more than the ring holds

    def is_due(self) -> Tensor:
        """True for rows [B] that are folded after the current token.

        Row r is folded when the number of its tokens plus r is a multiple of the interval. So rows
        that start together are not folded in the same step.
        """
        rows = torch.arange(len(self.seen), device=self.seen.device)
        return self.live & ((self.seen + 1 + rows) % self.interval == 0)

    def advance(self) -> None:
        """Counts the current token, in place. Call it after the last layer."""
        due = self.is_due()
        self.seen.add_(self.live)
        self.folded.copy_(torch.where(due, self.seen, self.folded))


def replay_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState,
    ring: Ring,
    cursor: Cursor,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """One token for every row and head, as `recurrent_step`. Returns h.

    `state` is the checkpoint. The token is added to the ring of rows that are live, and rows that
    are due are folded, in place. Other rows keep their ring and checkpoint; their h is garbage.
    """
    size = ring.k.shape[2]
    entry = torch.arange(size, device=q.device) == (cursor.seen % size)[:, None]
    written = (entry & cursor.live[:, None])[:, None]
    for part, new in zip(ring, (k, v, i, f), strict=True):
        mask = written if part.dim() == 3 else written[..., None]
        part.copy_(torch.where(mask, new[:, :, None].to(part.dtype), part))
    tokens = _Tokens.of(state, ring, cursor.folded, cursor.seen + cursor.live)
    q_scaled = q.to(i.dtype) * q.shape[-1] ** -0.5
    C, n = state.C.to(i.dtype), state.n.to(i.dtype)
    from_ring = tokens.weight * (tokens.k @ q_scaled[..., None]).squeeze(-1)
    numerator = tokens.decay[..., None] * (q_scaled[..., None, :] @ C).squeeze(-2)
    numerator += (from_ring[..., None, :] @ tokens.v).squeeze(-2)
    n_q = tokens.decay * (q_scaled * n).sum(-1) + from_ring.sum(-1)
    denominator = torch.maximum(n_q.abs(), torch.exp(-tokens.m)) + eps
    h: Tensor = (numerator / denominator[..., None]).to(v.dtype)
    due = cursor.is_due()
    for part, new in zip(state, tokens.folded_into(state), strict=True):
        part.copy_(torch.where(due.view(-1, *[1] * (part.dim() - 1)), new.to(part.dtype), part))
    return h


def folded_state(state: MLSTMState, ring: Ring, folded: Tensor, seen: Tensor) -> MLSTMState:
    """The state after the tokens folded … seen − 1 of each row: a copy of the checkpoint, folded.

    It has the checkpoint's dtypes. Any `seen` works for which the ring has all tokens since the
    checkpoint: a copy may end before the latest token.
    """
    new = _Tokens.of(state, ring, folded, seen).folded_into(state)
    return MLSTMState(*(part.to(old.dtype) for part, old in zip(new, state, strict=True)))


class _Tokens(NamedTuple):
    """The tokens of a ring, the newest first, and what the equations give for them."""

    k: Tensor  # [B, NH, R, d_qk]
    v: Tensor  # [B, NH, R, d_hv]
    weight: Tensor  # w_j [B, NH, R]; 0 for entries that hold no token of this text
    decay: Tensor  # a [B, NH]
    m: Tensor  # m_r [B, NH]

    @classmethod
    def of(cls, state: MLSTMState, ring: Ring, folded: Tensor, seen: Tensor) -> Self:
        """The tokens folded … seen − 1 of each row [B]."""
        size, kind = ring.k.shape[2], ring.i.dtype
        token = seen[:, None] - 1 - torch.arange(size, device=seen.device)
        held = (token >= folded[:, None])[:, None]
        entry = (token % size)[:, None]
        # Entries of earlier texts may be NaN. A product with 0 would keep that.
        k, v = (
            part.take_along_dim(entry[..., None], 2).to(kind).masked_fill(~held[..., None], 0)
            for part in (ring.k, ring.v)
        )
        i = ring.i.take_along_dim(entry, 2).masked_fill(~held, -torch.inf)
        log_f = F.logsigmoid(ring.f.take_along_dim(entry, 2)).masked_fill(~held, 0)
        # Summed from the newest token back. Differences of sums from the oldest on would have the
        # rounding errors of the whole sum.
        sums = log_f.cumsum(-1)
        g = F.pad(sums[..., :-1], (1, 0))
        decayed = sums[..., -1] + state.m.to(kind)
        m = torch.maximum(decayed, (g + i).amax(-1))
        return cls(k, v, torch.exp(g + i - m[..., None]), torch.exp(decayed - m), m)

    def folded_into(self, state: MLSTMState) -> MLSTMState:
        """The checkpoint with all of these tokens folded into it, in the gates' dtype."""
        C, n = state.C.to(self.m.dtype), state.n.to(self.m.dtype)
        k_in = self.weight[..., None] * self.k
        return MLSTMState(
            self.decay[..., None, None] * C + k_in.mT @ self.v,
            self.decay[..., None] * n + k_in.sum(-2),
            self.m,
        )
