"""UnfusedModel: generation through the model's own `forward`. Slow, but right for any model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from xlstm7b.devices import as_current
from xlstm7b.generate.kernels import plain
from xlstm7b.generate.kernels.plain import gather_states, scatter_states
from xlstm7b.model import XLSTM, ModelState

if TYPE_CHECKING:
    from xlstm7b.generate.fused import Slots


class UnfusedModel:
    """An `XLSTM` for generation that calls the model itself, in evaluation mode.

    For adapters, hooks, changed layers and subclasses, which `FusedModel` refuses. It has the same
    methods, but where `FusedModel` returns vectors, this returns logits: only the model's own
    `forward` knows how to make one from the other. Rows cannot have adapters of their own:
    `adapter_of` is always None.
    """

    uses_graphs = False  # a layer may do what a CUDA graph cannot record
    uses_kernels = False
    operations = plain
    adapter_count = 0

    def __init__(self, model: XLSTM) -> None:
        self.model, self.config = model, model.config
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype

    def weights(self) -> Iterator[Tensor]:
        """All weights, and the logits after some tokens.

        The logits tell models apart that have the same weights and compute different things.
        """
        yield from (weight.detach() for weight in self.model.parameters())
        yield from self.model.buffers()
        tokens = torch.arange(8, device=self.device)[None] % self.config.vocab_size
        with torch.inference_mode(), as_current(self.device), evaluation_mode(self.model):
            yield self.model(tokens)[0]

    def step(
        self,
        tokens: Tensor,
        state: ModelState,
        adapter_of: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Reads one token per row [B] into the state; logits [B, V], as `FusedModel.step`."""
        live = tokens >= 0
        logits = self._read(tokens.clamp(min=0)[:, None], state, live.long(), None, "last")
        if out is None:
            return logits
        plain.keep_logits(logits[:, None], live, out)
        return out

    def read(
        self,
        tokens: Tensor,
        state: ModelState,
        lengths: Tensor | None = None,
        slots: "Slots | None" = None,
        adapter_of: Tensor | None = None,
    ) -> Tensor:
        """Reads tokens [B, T] into the state; logits [B, V] at each row's last token."""
        return self._read(tokens, state, lengths, slots, "last")

    def vectors(
        self,
        tokens: Tensor,
        state: ModelState,
        lengths: Tensor | None = None,
        slots: "Slots | None" = None,
        adapter_of: Tensor | None = None,
    ) -> Tensor:
        """Reads tokens as `read` does; logits [B, T, V] at all of them."""
        return self._read(tokens, state, lengths, slots, "all")

    def logits(self, x: Tensor) -> Tensor:
        """The logits that `read` and `vectors` returned, as they are."""
        return x

    def _read(
        self,
        tokens: Tensor,
        state: ModelState,
        lengths: Tensor | None,
        slots: "Slots | None",
        which: Literal["all", "last"],
    ) -> Tensor:
        before = state
        if slots is not None:
            before = ModelState(
                tuple(gather_states(block, slots.source) for block in state.blocks),
                state.tokens_seen.index_select(0, slots.source),
            )
        logits: Tensor
        with evaluation_mode(self.model):
            logits, after = self.model(tokens, before, lengths=lengths, logits=which)
        if slots is None:
            state.copy_(after)
        else:
            for block, memory in zip(after.blocks, state.blocks, strict=True):
                scatter_states(block, memory, slots.target)
            state.tokens_seen.index_copy_(0, slots.target, after.tokens_seen)
        return logits


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turns dropout off. Afterwards every module is in the mode that it was in before."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
