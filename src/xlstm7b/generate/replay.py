"""Rings: the latest tokens of every slot, for replay decoding (see `mlstm/replay.py`).

Only `ModelRunner` and `FusedModel` know of them. A state that leaves the runner is a copy with the
ring's tokens folded in.
"""

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.mlstm.recurrent import MLSTMState
from xlstm7b.mlstm.replay import Ring, folded_state
from xlstm7b.model import ModelState

# Tokens from one fold to the next. Twice as many would save 0.5% of a step's bytes and double the
# rings.
INTERVAL = 16
_DRAFTS_RING = 48  # tokens of a ring, with drafts

# A slot has a large state if C of one block has at least _LARGE bytes in float32. A GPU decodes by
# replay if C of one block has this many bytes in all slots: _LARGE_PAYS for large states, else
# _SMALL_PAYS. See `default_replay_slots`.
_LARGE, _LARGE_PAYS, _SMALL_PAYS = 2 << 20, 4 << 20, 28 << 20

# How a step reads its tokens. "replay": into the rings, and into the states every few tokens.
# "fold": into the states, with all that is in the rings. "write": into the states; the rings of
# rows that are live are empty.
StepWay = Literal["replay", "fold", "write"]


class Rings(NamedTuple):
    """One ring for each block, and how many tokens the state of each row has read.

    This number is right after every step. So the ring of a row holds the tokens since then.
    """

    blocks: tuple[Ring, ...]
    folded: Tensor  # int64 [B]
    interval: int

    @classmethod
    def zeros(
        cls,
        config: ModelConfig,
        batch: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        interval: int = INTERVAL,
        size: int | None = None,
    ) -> Self:
        """Rings for `size` tokens, by default as many as the interval, with k and v in this dtype.

        In memory, the rows of a block follow each other.
        """
        joined = Ring.zeros(
            config.num_blocks * batch,
            config.num_heads,
            size or interval,
            config.d_qk,
            config.d_hv,
            dtype=dtype,
            device=device,
        )
        blocks = (config.num_blocks, batch)
        parts = zip(*(part.unflatten(0, blocks).unbind(0) for part in joined), strict=True)
        folded = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(tuple(Ring(*own) for own in parts), folded, interval)

    def rows(self, start: int, end: int) -> Self:
        """The rows start … end − 1, as views."""
        blocks = tuple(Ring(*(part[start:end] for part in block)) for block in self.blocks)
        return self._replace(blocks=blocks, folded=self.folded[start:end])


def default_replay_slots(config: ModelConfig) -> int:
    """From how many slots on a GPU decodes by replay, if nothing else is asked for.

    It is 1 for a 7B, 2 for a 1.4B and 100 for a 160M. A step by replay saves the time to write C.
    But the cell of each block takes up to 7 µs longer on an H200 if it folds a row. With many rows
    the GPU computes others meanwhile. With few rows most steps fold none.
    """
    slot = 4 * config.num_heads * config.d_qk * config.d_hv
    least = _LARGE_PAYS if slot >= _LARGE else _SMALL_PAYS
    return -(-least // slot)


def default_interval(config: ModelConfig, slots: int, device: str) -> int | None:
    """The interval of decode steps of this many slots, by default; None: they write the states."""
    return INTERVAL if device == "cuda" and slots >= default_replay_slots(config) else None


def ring_sizes(drafts: int) -> dict[str, int]:
    """The interval and size of rings, for `Rings.zeros`, if passes read up to this many drafts.

    The interval is as long as such a ring allows (`mlstm.Pass`).
    """
    if not drafts:
        return {"interval": INTERVAL, "size": INTERVAL}
    return {"interval": _DRAFTS_RING - 2 * (drafts + 1), "size": _DRAFTS_RING}


def folded_copy(state: ModelState, rings: Rings, back: int = 0) -> ModelState:
    """A copy of some rows, with the tokens of their rings folded into it, but the last `back`.

    All blocks are folded together: few launches on a GPU.
    """
    count = len(state.blocks)
    shape = len(state.tokens_seen), count

    def joined(blocks: tuple[tuple[Tensor, ...], ...]) -> list[Tensor]:
        return [torch.stack(part, dim=1).flatten(0, 1) for part in zip(*blocks, strict=True)]

    tokens_seen = state.tokens_seen - back
    folded, seen = (x[:, None].expand(shape).flatten() for x in (rings.folded, tokens_seen))
    ring = Ring(*joined(rings.blocks))
    new = folded_state(MLSTMState(*joined(state.blocks)), ring, folded, seen)
    parts = zip(*(part.unflatten(0, shape).unbind(1) for part in new), strict=True)
    return ModelState(tuple(MLSTMState(*own) for own in parts), tokens_seen)
