"""ModelState: everything a model remembers of its rows' texts, of one size for any length."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState


class ModelState(NamedTuple):
    """One cell memory a block, and how many tokens each row has read."""

    blocks: tuple[MLSTMState, ...]
    tokens_seen: Tensor  # int64 [B]

    @classmethod
    def zeros(
        cls,
        config: ModelConfig,
        batch: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Self:
        """The state before any text."""
        shape = (batch, config.num_heads, config.d_qk, config.d_hv)
        return cls(
            tuple(
                MLSTMState.zeros(*shape, dtype=dtype, device=device)
                for _ in range(config.num_blocks)
            ),
            torch.zeros(batch, dtype=torch.long, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.tokens_seen.nbytes + sum(part.nbytes for block in self.blocks for part in block)

    def clone(self) -> Self:
        """A copy that shares no memory with this one."""
        return self._map(torch.Tensor.clone)

    def fork(self, n: int) -> Self:
        """n copies of each row, side by side: row r becomes rows r·n … r·n + n − 1."""
        if n < 1:
            raise ValueError(f"a state forks into at least 1 copy, not {n}")
        return self._map(lambda x: x.repeat_interleave(n, dim=0))

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The given rows, in the given order; a row may be taken several times."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.tokens_seen.device)
        batch = self.tokens_seen.shape[0]
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < batch:
            raise ValueError(f"rows must lie between 0 and {batch - 1}, not {index.tolist()}")
        return self._map(lambda x: x.index_select(0, index))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self._replace(
            blocks=tuple(MLSTMState(*map(change, block)) for block in self.blocks),
            tokens_seen=change(self.tokens_seen),
        )
