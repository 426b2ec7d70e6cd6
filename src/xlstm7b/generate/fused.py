"""FusedModel: an XLSTM for generation. Stacked weights, states updated in place."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.devices import as_current
from xlstm7b.generate.fusable import difference
from xlstm7b.generate.kernels import plain
from xlstm7b.generate.kernels.choice import operations_for
from xlstm7b.generate.low_rank import (
    BlockLowRanks,
    LowRanks,
    Masks,
    add_low_rank,
)
from xlstm7b.generate.replay import Rings, StepWay
from xlstm7b.generate.unfused import evaluation_mode
from xlstm7b.mlstm import MLSTMState, mlstm_sequence
from xlstm7b.mlstm.replay import Cursor, Pass, Ring
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.model.adapter import Adapter
from xlstm7b.model.layers import QuantizedLinear
from xlstm7b.quantize.weight import QuantizedWeight, stack

_FFN_ROWS = 2048  # rows of the feed-forward at a time: its wide vectors are prefill's memory peak
# Tokens that a new FusedModel and its model both read, to compare their logits. On a GPU as many as
# the shortest prefill has, so that no kernel is compiled for this alone.
_CHECKED_TOKENS, _CHECKED_TOKENS_GPU = 4, 64


class FusedBlock(NamedTuple):
    """The weights of one block. Matrices that multiply the same vector are stacked into one."""

    norm_mlstm: Tensor
    projections: Tensor | QuantizedWeight  # q, k, v, õ
    gates: Tensor  # ĩ, f̃
    gate_bias: Tensor
    head_norm: Tensor
    out: Tensor | QuantizedWeight
    norm_ffn: Tensor
    up: Tensor | QuantizedWeight  # gate, up
    down: Tensor | QuantizedWeight


class Slots(NamedTuple):
    """Which rows of a state a batch [B] starts from, and which rows it is written to."""

    source: Tensor
    target: Tensor


class FusedModel:
    """An `XLSTM` for generation. The model's parameters become views of the stacked ones.

    So the model can still be trained and saved. Moving it to another device separates the two.

    It computes from the weights alone, by the mathematics of `XLSTM`. A model with other layers or
    hooks is a `ValueError` that names the layer; `UnfusedModel` runs those. LoRA layers of the
    model are added to its products. With `adapters`, each row of a batch may have one of them:
    `adapter_of` [B] in a call has their numbers, from 1, and 0 for none.
    """

    uses_graphs = True

    def __init__(self, model: XLSTM, adapters: Sequence[Adapter] = ()) -> None:
        _refuse(difference(model))
        self.config = model.config
        self.embedding = model.backbone.embeddings.weight.data
        self.out_norm = model.backbone.out_norm.weight.data
        self.head = _fuse_linear([model.lm_head])
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.blocks = [_fuse_block(block) for block in model.backbone.blocks]
        self.low_ranks = LowRanks(model, adapters, self.device, self.dtype)
        self.adapter_count = len(adapters)
        self.operations: Any = plain
        heads = self.config.d_qk, self.config.d_hv
        supported = self.dtype.itemsize <= 4 and all(16 <= d <= 1024 for d in heads)
        # `plain` takes quantised weights of any layout, and dequantises them as it goes.
        supported &= all(
            layer.weight.layout == "gpu"
            for layer in model.modules()
            if isinstance(layer, QuantizedLinear)
        )
        if supported:
            self.operations = operations_for(self.device)
        self._compare_logits(model)

    @property
    def uses_kernels(self) -> bool:
        """True if replay decoding uses GPU kernels, not plain PyTorch."""
        return self.operations.replay_cell is not plain.replay_cell

    def weights(self) -> Iterator[Tensor]:
        """All weights, without those of adapters that a row may have."""
        for weight in (*chain.from_iterable(self.blocks), self.embedding, self.out_norm, self.head):
            if isinstance(weight, QuantizedWeight):
                yield from (weight.data, weight.scale)
            else:
                yield weight
        yield from self.low_ranks.weights()

    def step(
        self,
        tokens: Tensor,
        state: ModelState,
        adapter_of: Tensor | None = None,
        rings: Rings | None = None,
        way: StepWay = "replay",
        out: Tensor | None = None,
    ) -> Tensor:
        """Reads one token per row [B] into the state; float32 logits [B, V].

        A row whose token is below 0 keeps its state, and its logits are garbage. With `rings`,
        `way` says how the tokens are read. With `out` the logits are written there, but not those
        of such a row.
        """
        counted = state.tokens_seen if rings is None else None
        x, live = self.operations.embed_live(tokens, self.embedding, counted)
        masks = self.low_ranks.masks(adapter_of)
        cursor = None
        if rings is not None:
            folds_all = way != "replay"
            cursor = Cursor(rings.folded, state.tokens_seen, live, rings.interval, None, folds_all)
        if rings is None or cursor is None or way == "write":
            # One look at `live` saves an operator in each block. A GPU would wait for it.
            masked = None if live.device.type == "cpu" and live.all() else live
            for number, memory in enumerate(state.blocks):
                self._block(x, number, memory, masked, batch=None, slots=None, masks=masks)
        else:
            cursor = self.operations.ordered(cursor)
            for number, memory in enumerate(state.blocks):
                ring = rings.blocks[number], cursor
                self._block(x, number, memory, live, None, None, masks, ring)
        if cursor is not None:
            self.operations.advance(cursor)
        return self.logits(x, out, live)

    def read_drafts(
        self,
        tokens: Tensor,
        state: ModelState,
        rows: Pass,
        rings: Rings,
        adapter_of: Tensor | None = None,
    ) -> Tensor:
        """Reads up to T tokens per row [B, T] into the rings; float32 logits [B, T, V].

        `rows.lengths` [B] says how many tokens a row reads; logits after others are garbage. The
        cursors do not move: `advance` counts the tokens that are kept.
        """
        batch, length = tokens.shape
        x = self.operations.embed(tokens.flatten(), self.embedding)
        masks = self.low_ranks.masks(_repeated(adapter_of, length))
        for number, memory in enumerate(state.blocks):
            ring = rings.blocks[number], rows
            self._block(x, number, memory, None, batch, None, masks, ring)
        return self.logits(x).view(batch, length, -1)

    def advance(self, rows: Pass, kept: Tensor) -> None:
        """Counts the first `kept` [B] tokens of each row that `read_drafts` has read."""
        self.operations.advance_pass(rows, kept)

    def read(
        self,
        tokens: Tensor,
        state: ModelState,
        lengths: Tensor | None = None,
        slots: "Slots | None" = None,
        adapter_of: Tensor | None = None,
    ) -> Tensor:
        """Reads tokens [B, T] into the state; vectors [B, d] at each row's last token.

        With `lengths` [B] rows are padded on the right; a row of length 0 keeps its state. With
        `slots`, row r of the tokens starts from one row of the state and is written to another.
        """
        batch, length = tokens.shape
        last = torch.full((batch,), length - 1, device=tokens.device)
        if lengths is not None:
            last = (lengths - 1).clamp(min=0)
        vectors = self.vectors(tokens, state, lengths, slots, adapter_of)
        return vectors[torch.arange(batch, device=tokens.device), last]

    def vectors(
        self,
        tokens: Tensor,
        state: ModelState,
        lengths: Tensor | None = None,
        slots: "Slots | None" = None,
        adapter_of: Tensor | None = None,
    ) -> Tensor:
        """Reads tokens as `read` does; vectors [B, T, d] at all of them."""
        batch, length = tokens.shape
        x = F.embedding(tokens.flatten(), self.embedding)
        live = None
        if lengths is not None:
            live = (torch.arange(length, device=tokens.device) < lengths[:, None]).flatten()
        masks = self.low_ranks.masks(_repeated(adapter_of, length))
        for number, memory in enumerate(state.blocks):
            self._block(x, number, memory, live, batch, slots, masks)
        seen, read = state.tokens_seen, length if lengths is None else lengths
        if slots is None:
            seen.add_(read)
        else:
            seen.index_copy_(0, slots.target, seen.index_select(0, slots.source) + read)
        return x.view(batch, length, -1)

    def logits(self, x: Tensor, out: Tensor | None = None, live: Tensor | None = None) -> Tensor:
        """Soft-capped float32 logits [R, V] from vectors [R, d]; in `out`, if it is given."""
        eps, cap = self.config.norm_eps, self.config.output_logit_soft_cap
        logits: Tensor = self.operations.head(x, self.out_norm, eps, self.head, cap, out, live)
        return logits

    def _block(
        self,
        x: Tensor,
        number: int,
        memory: MLSTMState,
        live: Tensor | None,
        batch: int | None,
        slots: "Slots | None",
        masks: Masks = None,
        ring: tuple[Ring, Cursor | Pass] | None = None,
    ) -> None:
        """One block over the rows of x, in place: `batch` sequences, or (None) single tokens."""
        block, added = self.blocks[number], self._additions(number, masks)
        h = self._mlstm(x, block, memory, live, batch, slots, added, masks, ring)
        self.operations.add_product(x, h, block.out)
        add_low_rank(x, h, added.out, masks)
        del h
        for start in range(0, len(x), _FFN_ROWS):
            rows = x[start : start + _FFN_ROWS]
            own = masks and [mask[start : start + _FFN_ROWS] for mask in masks]
            y = self._swiglu(rows, block, added, own)
            self.operations.add_product(rows, y, block.down)
            add_low_rank(rows, y, added.down, own)
            del y

    def _additions(self, number: int, masks: Masks) -> BlockLowRanks:
        """The low-rank additions of a block. Without masks, none of several adapters is used."""
        if self.low_ranks.mixed and masks is None:
            return BlockLowRanks()
        return self.low_ranks.blocks[number]

    def _swiglu(self, x: Tensor, block: FusedBlock, added: BlockLowRanks, masks: Masks) -> Tensor:
        norm, eps = block.norm_ffn, self.config.norm_eps
        y: Tensor
        if added.up is None:
            reader = block.down if added.down is None else None
            y = self.operations.swiglu(x, norm, eps, block.up, reader)
            return y
        x = self.operations.rms_norm(x, norm, eps)
        y = self.operations.multiply(x, block.up)
        add_low_rank(y, x, added.up, masks)
        y = self.operations.silu_and_multiply(y)
        return y

    def _mlstm(
        self,
        x: Tensor,
        block: FusedBlock,
        memory: MLSTMState,
        live: Tensor | None,
        batch: int | None,
        slots: "Slots | None",
        added: BlockLowRanks,
        masks: Masks,
        ring: tuple[Ring, Cursor | Pass] | None,
    ) -> Tensor:
        config = self.config
        projected, gates = self.operations.project(
            x,
            block.norm_mlstm,
            config.norm_eps,
            block.projections,
            block.gates,
            block.gate_bias,
            config.gate_soft_cap,
            live,
        )
        if added.projections is not None:
            rows = self.operations.rms_norm(x, block.norm_mlstm, config.norm_eps)
            add_low_rank(projected, rows, added.projections, masks)
        if batch is None:
            q, k, v, gate, i, f = self._heads(projected, gates, (len(x),))
            end = gate, block.head_norm, config.cell_norm_eps, config.eps
            h: Tensor
            if ring is None:
                h = self.operations.step_cell(q, k, v, i, f, memory, *end)
            else:
                h = self.operations.replay_cell(q, k, v, i, f, memory, *ring, *end)
            return h.flatten(1)
        q, k, v, gate, i, f = self._heads(projected, gates, (batch, len(x) // batch))
        if ring is not None:
            end = gate, block.head_norm, config.cell_norm_eps, config.eps
            h = self.operations.pass_cell(q, k, v, i, f, memory, *ring, *end)
            return h.flatten(0, 1).flatten(1)
        before = memory
        if slots is not None:
            before = self.operations.gather_states(memory, slots.source)
        h, after = mlstm_sequence(q, k, v, i, f, state=before, eps=config.eps)
        if slots is None:
            for part, new_part in zip(memory, after, strict=True):
                part.copy_(new_part)
        else:
            self.operations.scatter_states(after, memory, slots.target)
        h, gate = h.contiguous().flatten(0, 1), gate.flatten(0, 1).flatten(1)
        reader = block.out if added.out is None else None
        normed: Tensor = self.operations.head_norm(
            h, block.head_norm, config.cell_norm_eps, gate, reader
        )
        return normed

    def _heads(self, projected: Tensor, gates: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
        """q, k, v, õ as [*shape, NH, d] and ĩ, f̃ as [*shape, NH]: views."""
        config = self.config
        pairs = projected.split([2 * config.qk_dim, 2 * config.v_dim], dim=-1)
        heads = (*shape, 2, config.num_heads, -1)
        q_k, v_gate = (pair.view(heads).unbind(-3) for pair in pairs)
        return [*q_k, *v_gate, *gates.view(*shape, 2, -1).unbind(-2)]

    @torch.inference_mode()
    def _compare_logits(self, model: XLSTM) -> None:
        """`ValueError` if the model's own `forward` gives other logits.

        The layers have the right types by now. This finds functions and classes that were patched.
        """
        count = _CHECKED_TOKENS_GPU if self.device.type == "cuda" else _CHECKED_TOKENS
        tokens = torch.arange(count, device=self.device)[None] % self.config.vocab_size
        with as_current(self.device), evaluation_mode(model):
            want = model.forward(tokens, logits="last")[0]  # its state is freed at once
            state = ModelState.zeros(self.config, 1, device=self.device)
            # Each block gets the model's own vectors: rounding would add up over many blocks.
            x = F.embedding(tokens, self.embedding)
            for number, block in enumerate(model.backbone.blocks):
                rows, before = x[0].clone(), x[0]
                self._block(rows, number, state.blocks[number], None, 1, None)
                x, _ = block(x)
                if not self._is_close(rows, x[0], before):
                    _refuse(f"backbone.blocks.{number} does not compute what its class did")
            if not self._is_close(self.logits(x[:, -1]), want):
                _refuse("the embedding, the last norm, the head or the soft-cap is not XLSTM's own")

    def _is_close(self, got: Tensor, want: Tensor, before: Tensor | None = None) -> bool:
        """True if two results differ by rounding only, or if the model's own is not finite.

        With `before`, what was added to it is compared. The sum was rounded too.
        """
        largest = 0.1 if self.dtype.itemsize == 2 else 0.01
        added = want if before is None else want - before
        limit = largest * added.norm() + 2 * torch.finfo(self.dtype).eps * want.norm()
        return bool(((got - want).norm() <= limit) | ~want.isfinite().all())


def _repeated(adapter_of: Tensor | None, length: int) -> Tensor | None:
    """The adapters of all tokens, from those of the rows."""
    return None if adapter_of is None else adapter_of[:, None].expand(-1, length).flatten()


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(
            f"{reason}, which the fused path would ignore: give Generator or Engine fused=False, "
            "which calls the model itself and is slower"
        )


def _fuse_block(block: Any) -> FusedBlock:
    layer, ffn = block.mlstm_layer, block.ffn
    i, f = layer.igate_preact, layer.fgate_preact
    assert i.bias is not None
    assert f.bias is not None
    return FusedBlock(
        block.norm_mlstm.weight.data,
        _fuse_linear([layer.q, layer.k, layer.v, layer.ogate_preact]),
        fuse([i.weight, f.weight]),
        fuse([i.bias, f.bias]),
        layer.multihead_norm.weight.data,
        _fuse_linear([layer.out_proj]),
        block.norm_ffn.weight.data,
        _fuse_linear([ffn.proj_up_gate, ffn.proj_up]),
        _fuse_linear([ffn.proj_down]),
    )


def _fuse_linear(layers: Sequence[Any]) -> Tensor | QuantizedWeight:
    """The weights of these layers, stacked; theirs become parts of the stack."""
    layers = [getattr(layer, "base_layer", layer) for layer in layers]  # without LoRA
    weights = [layer.weight for layer in layers]
    if not any(isinstance(layer, QuantizedLinear) for layer in layers):
        whole: Tensor = weights[0].data
        return fuse(weights) if len(weights) > 1 else whole
    kinds = {(getattr(w, "scheme", None), getattr(w, "layout", None)) for w in weights}
    if len(kinds) > 1:
        _refuse("layers that read the same vector are quantised in different schemes")
    return stack(weights, fuse([weight.data for weight in weights]))


def fuse(parameters: Sequence[Tensor]) -> Tensor:
    """Parameters stacked along the first axis into one tensor; they become views of it.

    Parameters that are already adjacent in memory, as after loading, are not copied. Otherwise one
    copy is made and the old memory is freed.
    """
    first = parameters[0].data
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    adjacent = True
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == storage
        adjacent &= same and parameter.data_ptr() == end and parameter.is_contiguous()
        end += parameter.nbytes
    if adjacent:
        shape = sum(map(len, parameters)), *first.shape[1:]
        return first.as_strided(shape, first.stride())
    # Parameters must stay trainable, unless they were created in inference mode.
    with torch.inference_mode(parameters[0].is_inference()):
        stacked = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, stacked.split([*map(len, parameters)]), strict=True):
            parameter.data = part
    return stacked
