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
        """The state before any text: one buffer, in which a row's blocks lie side by side."""
        shape = (config.num_heads, config.d_qk, config.d_hv)
        buffer = [
            torch.zeros(batch, config.num_blocks, *shape[:dims], dtype=dtype, device=device)
            for dims in (3, 2, 1)
        ]
        return cls(
            tuple(MLSTMState(*parts) for parts in zip(*(b.unbind(1) for b in buffer), strict=True)),
            torch.zeros(batch, dtype=torch.long, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def rows(self, start: int, end: int) -> Self:
        """Rows start … end − 1, as views."""
        return self._map(lambda x: x[start:end])

    def zero_(self) -> None:
        """Forgets every text, in place."""
        torch._foreach_zero_(self._memories())
        self.tokens_seen.zero_()

    def copy_(self, other: Self) -> None:
        """Takes another state's values, in place, in this one's dtype."""
        torch._foreach_copy_(self._memories(), other._memories())
        self.tokens_seen.copy_(other.tokens_seen)

    def clone(self) -> Self:
        """A copy that shares no memory with this one, in a buffer like that of `zeros`."""
        parts = (torch.stack(part, dim=1).unbind(1) for part in zip(*self.blocks, strict=True))
        return self._replace(
            blocks=tuple(MLSTMState(*block) for block in zip(*parts, strict=True)),
            tokens_seen=self.tokens_seen.clone(),
        )

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

    def _tensors(self) -> list[Tensor]:
        return [*self._memories(), self.tokens_seen]

    def _memories(self) -> list[Tensor]:
        """Of one dtype, so that a GPU does many in one launch."""
        return [part for block in self.blocks for part in block]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self._replace(
            blocks=tuple(MLSTMState(*map(change, block)) for block in self.blocks),
            tokens_seen=change(self.tokens_seen),
        )
