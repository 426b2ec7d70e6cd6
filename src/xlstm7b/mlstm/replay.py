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

`replay_pass` reads several tokens of a row at once, of which the last may be drafts. All queries
read the same checkpoint and ring, each only the tokens up to its own. A pass folds only tokens
before it. So rejected drafts are dropped by not counting them, and no state is copied.

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
    order: Tensor | None = None  # int64: the rows in the order in which a kernel starts them
    folds_all: bool = False  # all live rows are folded after the current token

    @property
    def multiple(self) -> int:
        """A row is folded when its tokens reach a multiple of this number: see `is_due`."""
        return 1 if self.folds_all else self.interval

    def is_due(self) -> Tensor:
        """True for rows [B] that are folded after the current token.

        Row r is folded when the number of its tokens plus r reaches a multiple of the interval. So
        rows that start together are not folded in the same step, and a step finds fewer tokens in
        a ring than the interval has. A pass may leave more: then the next step must fold all rows.
        """
        return self.live & _crosses(self.folded, self.seen + 1, self.multiple)

    def advance(self) -> None:
        """Counts the current token, in place. Call it after the last layer."""
        if self.live.device.type == "cpu" and not self.folds_all:  # a GPU would wait for it
            held = (self.seen - self.folded)[self.live]
            assert (held < self.interval).all(), "the step after a pass must fold all rows"
        due = self.is_due()
        self.seen.add_(self.live)
        self.folded.copy_(torch.where(due, self.seen, self.folded))


class Pass(NamedTuple):
    """Where each row [B] is in its rings when it reads up to T tokens at once.

    A ring of interval + 2 T entries is large enough: less than interval + T tokens since the
    checkpoint, and T new ones.
    """

    folded: Tensor  # tokens that the checkpoint has read, int64
    seen: Tensor  # tokens that the row has read before this pass, int64
    lengths: Tensor  # tokens that it reads now, int64: 0 to T
    interval: int

    def is_due(self) -> Tensor:
        """True for rows [B] whose tokens before this pass are folded in it.

        As with `Cursor`, rows that start together are not folded in the same pass.
        """
        return (self.lengths > 0) & _crosses(self.folded, self.seen, self.interval)

    def advance(self, kept: Tensor) -> None:
        """Counts the first `kept` [B] tokens of the pass, in place. The others are dropped.

        Call it after the last layer. Rows that read nothing keep 0.
        """
        self.folded.copy_(torch.where(self.is_due(), self.seen, self.folded))
        self.seen.add_(kept)


def _crosses(folded: Tensor, seen: Tensor, multiple: int) -> Tensor:
    """True for rows [B] that pass a multiple of this number from one count to the other."""
    rows = torch.arange(len(seen), device=seen.device)
    return (seen + rows) // multiple > (folded + rows) // multiple


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
    Unless all rows are folded, a live row has fewer than `interval` tokens since the checkpoint.
    """
    read = cursor.live.long()
    _write(ring, cursor.seen, read, *(x[:, None] for x in (k, v, i, f)))
    tokens = _Tokens.of(state, ring, cursor.folded, (cursor.seen + read)[:, None])
    h = tokens.outputs(q[:, None], state, eps)[:, 0].to(v.dtype)
    due = cursor.is_due()
    if _may_hold(due):
        _fold(state, tokens, due)
    return h


def replay_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState,
    ring: Ring,
    rows: Pass,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """T tokens for every row and head, q … f as [B, T, NH, …]. Returns h [B, T, NH, d_hv].

    The first `rows.lengths` tokens of each row are added to its ring. h of the others is garbage.
    Rows that are due are folded, in place, up to the token before the pass. `Pass.advance` counts
    the tokens that are kept.
    """
    _write(ring, rows.seen, rows.lengths, k, v, i, f)
    number = 1 + torch.arange(q.shape[1], device=q.device)
    read = rows.seen[:, None] + torch.minimum(number, rows.lengths[:, None])
    h = _Tokens.of(state, ring, rows.folded, read).outputs(q, state, eps).to(v.dtype)
    due = rows.is_due()
    if _may_hold(due):
        _fold(state, _Tokens.of(state, ring, rows.folded, rows.seen[:, None]), due)
    return h


def folded_state(state: MLSTMState, ring: Ring, folded: Tensor, seen: Tensor) -> MLSTMState:
    """The state after the tokens folded … seen − 1 of each row: a copy of the checkpoint, folded.

    It has the checkpoint's dtypes. Any `seen` works for which the ring has all tokens since the
    checkpoint: a copy may end before the latest token.
    """
    new = _Tokens.of(state, ring, folded, seen[:, None]).folded_into(state)
    return MLSTMState(*(part.to(old.dtype) for part, old in zip(new, state, strict=True)))


def _write(ring: Ring, seen: Tensor, lengths: Tensor, *tokens: Tensor) -> None:
    """Writes the first `lengths` [B] of new tokens [B, T, NH, …] to the ring, after `seen`."""
    size = ring.k.shape[2]
    # For each entry, the number of the new token that it gets.
    number = (torch.arange(size, device=seen.device) - seen[:, None]) % size
    written = (number < lengths[:, None])[:, None]
    index = number.clamp(max=tokens[0].shape[1] - 1)[:, None]
    for part, new in zip(ring, tokens, strict=True):
        wide = (..., *[None] * (part.dim() - 3))
        entries = new.transpose(1, 2).take_along_dim(index[wide], 2).to(part.dtype)
        part.copy_(torch.where(written[wide], entries, part))


def _may_hold(condition: Tensor) -> bool:
    """False if it holds for no row. On a GPU it may always hold: nothing waits for the answer."""
    return condition.is_cuda or bool(condition.any())


def _fold(state: MLSTMState, tokens: "_Tokens", due: Tensor) -> None:
    """Folds tokens into the state of rows that are due, in place."""
    for part, new in zip(state, tokens.folded_into(state), strict=True):
        part.copy_(torch.where(due.view(-1, *[1] * (part.dim() - 1)), new.to(part.dtype), part))


class _Tokens(NamedTuple):
    """The tokens of a ring, the newest first, and what the equations give for T queries."""

    k: Tensor  # [B, NH, R, d_qk]
    v: Tensor  # [B, NH, R, d_hv]
    weight: Tensor  # w_j [B, NH, T, R]; 0 for entries that a query does not see
    decay: Tensor  # a [B, NH, T]
    m: Tensor  # m_r [B, NH, T]

    @classmethod
    def of(cls, state: MLSTMState, ring: Ring, folded: Tensor, seen: Tensor) -> Self:
        """Query t of a row sees its tokens folded … seen[t] − 1. `seen` [B, T] does not fall."""
        size, kind = ring.k.shape[2], ring.i.dtype
        token = seen[:, -1:] - 1 - torch.arange(size, device=seen.device)
        held = (token >= folded[:, None])[:, None]
        visible = held[:, :, None] & (token[:, None] < seen[..., None])[:, None]
        entry = (token % size)[:, None]
        # Entries of earlier texts may be NaN. A product with 0 would keep that.
        k, v = (
            part.take_along_dim(entry[..., None], 2).to(kind).masked_fill(~held[..., None], 0)
            for part in (ring.k, ring.v)
        )
        i, f = (part.take_along_dim(entry, 2)[:, :, None] for part in (ring.i, ring.f))
        i, log_f = i.where(visible, -torch.inf), F.logsigmoid(f).where(visible, 0)
        # Summed from the newest token back. Differences of sums from the oldest on would have the
        # rounding errors of the whole sum.
        sums = log_f.cumsum(-1)
        g = F.pad(sums[..., :-1], (1, 0))
        decayed = sums[..., -1] + state.m.to(kind)[..., None]
        m = torch.maximum(decayed, (g + i).amax(-1))
        return cls(k, v, torch.exp(g + i - m[..., None]), torch.exp(decayed - m), m)

    def outputs(self, q: Tensor, state: MLSTMState, eps: float) -> Tensor:
        """h [B, T, NH, d_hv] of queries [B, T, NH, d_qk], in the gates' dtype."""
        kind = self.m.dtype
        q_scaled = q.transpose(1, 2).to(kind) * q.shape[-1] ** -0.5
        from_ring = self.weight * (q_scaled @ self.k.mT)
        numerator = self.decay[..., None] * (q_scaled @ state.C.to(kind)) + from_ring @ self.v
        n_q = self.decay * (q_scaled @ state.n.to(kind)[..., None]).squeeze(-1) + from_ring.sum(-1)
        denominator = torch.maximum(n_q.abs(), torch.exp(-self.m)) + eps
        h: Tensor = (numerator / denominator[..., None]).transpose(1, 2)
        return h

    def folded_into(self, state: MLSTMState) -> MLSTMState:
        """The checkpoint with what the last query sees folded into it, in the gates' dtype."""
        C, n = state.C.to(self.m.dtype), state.n.to(self.m.dtype)
        decay, k_in = self.decay[..., -1], self.weight[:, :, -1, :, None] * self.k
        return MLSTMState(
            decay[..., None, None] * C + k_in.mT @ self.v,
            decay[..., None] * n + k_in.sum(-2),
            self.m[..., -1],
        )
