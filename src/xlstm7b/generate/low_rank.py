"""Low-rank additions to the products of `FusedModel`: those of the model, or one adapter per row.

Several adapters are computed together: x is multiplied with the A of all of them, each row keeps
the results of its own adapter, and what is left is multiplied with the B of all. For the few
adapters of a server this takes less time than to gather a matrix for each row.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import Adapter, LowRank
from xlstm7b.model.layers import linear
from xlstm7b.model.lora import lora_layers

# The layers of each product, in the order in which `FusedModel` stacks their weights.
_PRODUCTS = {
    "projections": ("mlstm_layer.q", "mlstm_layer.k", "mlstm_layer.v", "mlstm_layer.ogate_preact"),
    "out": ("mlstm_layer.out_proj",),
    "up": ("ffn.proj_up_gate", "ffn.proj_up"),
    "down": ("ffn.proj_down",),
}


class LowRankPart(NamedTuple):
    """The addition to some columns of a product: those of one layer."""

    columns: slice
    ranks: slice  # the rows of A for this layer
    B: Tensor  # [N, ranks], times the scales


class LowRankProduct(NamedTuple):
    """The addition to one product x Wᵀ."""

    A: Tensor  # [R, K], for all layers and adapters
    parts: tuple[LowRankPart, ...]
    owners: int  # number of the tensor in `LowRanks.owners` with the adapter of each row of A


class BlockLowRanks(NamedTuple):
    """The additions to the products of one block. None: there is none."""

    projections: LowRankProduct | None = None
    out: LowRankProduct | None = None
    up: LowRankProduct | None = None
    down: LowRankProduct | None = None


Masks = Sequence[Tensor] | None


class LowRanks:
    """The additions of all blocks: of the model's own LoRA layers, or of several adapters.

    Adapter n of the list has the number n + 1. Number 0 is none.
    """

    def __init__(
        self, model: XLSTM, adapters: Sequence[Adapter], device: torch.device, dtype: torch.dtype
    ) -> None:
        own = {
            path: LowRank(layer.lora_A.detach(), layer.lora_B.detach(), layer.scale)
            for path, layer in lora_layers(model)
        }
        if own and adapters:
            raise ValueError("a model with LoRA layers of its own cannot have other adapters")
        self.mixed, self._device, self._dtype = bool(adapters), device, dtype
        self._wide = torch.promote_types(dtype, torch.float32)  # for the products with scales
        self.owners: list[Tensor] = []
        sources: list[Mapping[str, LowRank]] = [one.layers for one in adapters] or [own]
        config = model.config
        shapes = config.block_parameter_shapes()
        self._widths = {
            path: shapes[f"{path}.weight"][0] for paths in _PRODUCTS.values() for path in paths
        }
        known = {
            f"backbone.blocks.{block}.{path}"
            for block in range(config.num_blocks)
            for path in self._widths
        }
        for adapter in adapters:
            for path in sorted(adapter.layers.keys() - known):
                raise ValueError(
                    f"{adapter.folder} changes {path}, which no adapter of an engine or server "
                    "may change: merge it into the weights with `xlstm7b merge`"
                )
        self.blocks = [
            BlockLowRanks(
                *(
                    self._product(f"backbone.blocks.{block}.", paths, sources)
                    for paths in _PRODUCTS.values()
                )
            )
            for block in range(config.num_blocks)
        ]

    def __bool__(self) -> bool:
        return any(product is not None for block in self.blocks for product in block)

    def weights(self) -> Iterator[Tensor]:
        """All numbers of the model's own additions."""
        for block in () if self.mixed else self.blocks:
            for product in filter(None, block):
                yield from (product.A, *(part.B for part in product.parts))

    def masks(self, numbers: Tensor | None) -> Masks:
        """For each row with the adapter of this number [R]: 1 at the rows of A that are its own."""
        if numbers is None or not self.mixed:
            return None
        return [(owner == numbers[:, None]).to(self._dtype) for owner in self.owners]

    def _product(
        self, prefix: str, paths: Sequence[str], sources: Sequence[Mapping[str, LowRank]]
    ) -> LowRankProduct | None:
        parts: list[LowRankPart] = []
        all_A: list[Tensor] = []
        owners: list[int] = []
        column = 0
        for path in paths:
            found = [
                (number, source[prefix + path])
                for number, source in enumerate(sources, 1)
                if prefix + path in source
            ]
            columns = slice(column, column + self._widths[path])
            column = columns.stop
            if found:
                start = len(owners)
                all_A += [layer.A for _, layer in found]
                owners += [number for number, layer in found for _ in layer.A]
                B = torch.cat([layer.scale * layer.B.to(self._wide) for _, layer in found], dim=1)
                parts.append(LowRankPart(columns, slice(start, len(owners)), self._to_device(B)))
        if not parts:
            return None
        A = self._to_device(torch.cat([part.to(self._wide) for part in all_A]))
        return LowRankProduct(A, tuple(parts), self._owner_number(owners))

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)

    def _owner_number(self, owners: Sequence[int]) -> int:
        """Blocks with the same adapters share one tensor, and so one mask for each step."""
        wanted = torch.tensor(owners, device=self._device)
        for number, owner in enumerate(self.owners):
            if torch.equal(owner, wanted):
                return number
        self.owners.append(wanted)
        return len(self.owners) - 1


def add_low_rank(y: Tensor, x: Tensor, product: LowRankProduct | None, masks: Masks) -> None:
    """y += x Aᵀ Bᵀ, in place; with masks, for each row the A and B of its own adapter."""
    if product is None:
        return
    z = linear(x, product.A)
    if masks is not None:
        z *= masks[product.owners]
    for part in product.parts:
        target, inputs = y[:, part.columns], z[:, part.ranks]
        if y.is_cuda:
            target.addmm_(inputs, part.B.mT)
        else:
            target += linear(inputs, part.B)
