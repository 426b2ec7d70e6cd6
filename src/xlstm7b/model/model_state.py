"""ModelState: the state of the whole model for a batch of sequences."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils import _pytree

from xlstm7b.config import ModelConfig
from xlstm7b.devices import float_dtype
from xlstm7b.mlstm import MLSTMState
from xlstm7b.registry import find

# The state of a block: a NamedTuple of tensors, each with the batch first. The class of the block
# makes it (`zero_state`); the standard one is `MLSTMState`.
BlockState = Any


class ModelState(NamedTuple):
    """One state for each block, and how many tokens each row has read.

    A row is one sequence of the batch. The size of a row does not depend on its number of tokens.
    """

    blocks: tuple[BlockState, ...]
    tokens_seen: Tensor  # int64 [B]

    @classmethod
    def zeros(
        cls,
        config: ModelConfig,
        batch: int,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
    ) -> Self:
        """The state before the first token. In memory, the rows of a block follow each other.

        C has this dtype. n and m are at least float32 (see `MLSTMState`). The class of a block says
        which parts of other states have it.
        """
        blocks = (config.num_blocks, batch)
        block = find("block", config.block)
        kind = float_dtype(dtype)
        joined = block.zero_state(config, config.num_blocks * batch, dtype=kind, device=device)
        parts = zip(*(part.unflatten(0, blocks).unbind(0) for part in joined), strict=True)
        tokens_seen = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(tuple(type(joined)(*own) for own in parts), tokens_seen)

    @classmethod
    def cat(cls, states: Sequence[Self]) -> Self:
        """The rows of all states, in their order."""
        if not states:
            raise ValueError("there must be at least one state to join")
        shapes = {(len(state.blocks), *state.blocks[0][0].shape[1:]) for state in states}
        if len(shapes) > 1:
            raise ValueError(
                "states of different models cannot be joined: their blocks, heads, d_qk and d_hv "
                f"are {' and '.join(map(str, sorted(shapes)))}"
            )
        blocks = zip(*(state.blocks for state in states), strict=True)
        return cls(
            tuple(type(block[0])(*map(torch.cat, zip(*block, strict=True))) for block in blocks),
            torch.cat([state.tokens_seen for state in states]),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts: list[Tensor] = [part for block in self.blocks for part in block]
        return self.tokens_seen.nbytes + sum(part.nbytes for part in parts)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The state on another device. Tensors that are there already are not copied.

        From a GPU to the CPU, tensors are copied to pinned memory: such copies are fast, and so is
        the way back. With `non_blocking` the call does not wait for the copies. Then synchronize
        the stream before you read the state on the CPU.
        """
        device = torch.device(device)
        if not self.tokens_seen.is_cuda or device.type != "cpu":
            return self._map(lambda x: x.to(device, non_blocking=non_blocking))
        copy = self._map(
            lambda x: torch.empty_like(x, device=device, pin_memory=True).copy_(
                x, non_blocking=True
            )
        )
        if not non_blocking:
            torch.cuda.current_stream(self.tokens_seen.device).synchronize()
        return copy

    def detach(self) -> Self:
        """The same tensors without their history: gradients stop here."""
        return self._map(Tensor.detach)

    def clone(self) -> Self:
        """A copy that shares no memory with this state, in the memory layout of `zeros`."""
        parts = (torch.stack(part).unbind() for part in zip(*self.blocks, strict=True))
        kind = type(self.blocks[0])
        return self._replace(
            blocks=tuple(kind(*block) for block in zip(*parts, strict=True)),
            tokens_seen=self.tokens_seen.clone(),
        )

    def fork(self, n: int) -> Self:
        """n copies of each row: row r becomes the rows r·n … r·n + n − 1."""
        if n < 1:
            raise ValueError(f"the number of copies must be at least 1, not {n}")
        return self._map(lambda x: x.repeat_interleave(n, dim=0))

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """A copy of these rows, in this order. A row may be selected several times."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.tokens_seen.device)
        batch = self.tokens_seen.shape[0]
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < batch:
            raise ValueError(f"rows must be between 0 and {batch - 1}, not {index.tolist()}")
        return self._map(lambda x: x.index_select(0, index))

    def rows(self, start: int, end: int) -> Self:
        """The rows start … end − 1, as views."""
        return self._map(lambda x: x[start:end])

    def zero_(self) -> None:
        """Sets the state of every row to that before the first token, in place."""
        for tensors in self._cell_tensors():
            torch._foreach_zero_(tensors)
        self.tokens_seen.zero_()

    def copy_(self, other: Self) -> None:
        """Copies the values of another state, in place; this state's dtypes stay."""
        for ours, theirs in zip(self._cell_tensors(), other._cell_tensors(), strict=True):
            torch._foreach_copy_(ours, theirs)
        self.tokens_seen.copy_(other.tokens_seen)

    def _cell_tensors(self) -> list[list[Tensor]]:
        """A list for each part (all C, all n, all m): of one dtype, for few launches on a GPU."""
        return [list(part) for part in zip(*self.blocks, strict=True)]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self._replace(
            blocks=tuple(type(block)(*map(change, block)) for block in self.blocks),
            tokens_seen=change(self.tokens_seen),
        )


def register_state(kind: type) -> None:
    """For `torch.export.save` and `load` of modules that take and return this NamedTuple."""
    torch.serialization.add_safe_globals([kind])
    _pytree._register_namedtuple(kind, serialized_type_name=f"xlstm7b.{kind.__name__}")


register_state(MLSTMState)
register_state(ModelState)
