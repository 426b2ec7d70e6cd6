"""The model as generation runs it: fused weights, a state updated in place, logits where needed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.generate import plain
from xlstm7b.mlstm import MLSTMState, mlstm_sequence
from xlstm7b.model import XLSTM, ModelState


class FusedBlock(NamedTuple):
    """One block's weights: what reads the same vector is one matrix."""

    norm_mlstm: Tensor
    projections: Tensor  # q, k, v, õ
    gates: Tensor  # ĩ, f̃
    gate_bias: Tensor
    head_norm: Tensor
    out: Tensor
    norm_ffn: Tensor
    up: Tensor  # gate, up
    down: Tensor


class FusedModel:
    """An `XLSTM` for generation. The model's parameters become views of the fused ones.

    Training it further, or saving it, goes on working; moving it elsewhere parts the two.
    """

    def __init__(self, model: XLSTM) -> None:
        self.config = model.config
        self.embedding = model.backbone.embeddings.weight.data
        self.out_norm = model.backbone.out_norm.weight.data
        self.head = model.lm_head.weight.data
        self.device, self.dtype = self.head.device, self.head.dtype
        self.blocks = [_fuse_block(block) for block in model.backbone.blocks]
        heads = self.config.d_qk, self.config.d_hv
        self.operations: Any = plain
        small = self.dtype.itemsize <= 4 and all(16 <= d <= 1024 for d in heads)
        if self.device.type == "cuda" and small:
            from xlstm7b.generate.triton import operations

            self.operations = operations

    def step(self, tokens: Tensor, state: ModelState, live: Tensor) -> Tensor:
        """Reads one token a row [B] into the state, where `live`; float32 logits [B, V]."""
        x = F.embedding(tokens, self.embedding)
        for block, memory in zip(self.blocks, state.blocks, strict=True):
            self._block(x, block, memory, live, None)
        state.tokens_seen.add_(live)
        return self.logits(x)

    def read(self, tokens: Tensor, state: ModelState, lengths: Tensor | None = None) -> Tensor:
        """Reads tokens [B, T] into the state; vectors [B, d] at each row's last, for `logits`.

        With `lengths` rows are padded on the right; a row of length 0 stays as it is.
        """
        batch, length = tokens.shape
        last = torch.full((batch,), length - 1, device=tokens.device)
        if lengths is not None:
            last = (lengths - 1).clamp(min=0)
        vectors = self.vectors(tokens, state, lengths)
        return vectors[torch.arange(batch, device=tokens.device), last]

    def vectors(self, tokens: Tensor, state: ModelState, lengths: Tensor | None = None) -> Tensor:
        """Reads tokens as `read` does; the vectors [B, T, d] at all of them."""
        batch, length = tokens.shape
        x = F.embedding(tokens.flatten(), self.embedding)
        live = None
        if lengths is not None:
            live = (torch.arange(length, device=tokens.device) < lengths[:, None]).flatten()
        for block, memory in zip(self.blocks, state.blocks, strict=True):
            self._block(x, block, memory, live, batch)
        state.tokens_seen.add_(length if lengths is None else lengths)
        return x.view(batch, length, -1)

    def logits(self, x: Tensor) -> Tensor:
        config = self.config
        logits: Tensor = self.operations.head(
            x, self.out_norm, config.norm_eps, self.head, config.output_logit_soft_cap
        )
        return logits

    def _block(
        self, x: Tensor, block: FusedBlock, memory: MLSTMState, live: Tensor | None,
        batch: int | None,
    ) -> None:  # fmt: skip
        """One block over the rows of x, in place: a sequence of `batch` texts, or single tokens."""
        h = self._mlstm(x, block, memory, live, batch)
        self.operations.add_product(x, h, block.out)
        del h
        y = self.operations.swiglu(x, block.norm_ffn, self.config.norm_eps, block.up)
        self.operations.add_product(x, y, block.down)

    def _mlstm(
        self, x: Tensor, block: FusedBlock, memory: MLSTMState, live: Tensor | None,
        batch: int | None,
    ) -> Tensor:  # fmt: skip
        projected, gates = self.operations.project(
            x, block.norm_mlstm, self.config.norm_eps, block.projections, block.gates,
            block.gate_bias, self.config.gate_soft_cap, live,
        )  # fmt: skip
        cell = self._step_cell if batch is None else self._sequence_cell
        return cell(projected, gates, block.head_norm, memory, batch or len(x))

    def _heads(self, projected: Tensor, gates: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
        """q, k, v, õ as [*shape, NH, d] and ĩ, f̃ as [*shape, NH]: views."""
        config = self.config
        widths = [config.qk_dim, config.qk_dim, config.v_dim, config.v_dim]
        parts = projected.view(*shape, -1).split(widths, dim=-1)
        heads = (config.num_heads, -1)
        return [
            *(part.unflatten(-1, heads) for part in parts),
            *gates.view(*shape, 2, -1).unbind(-2),
        ]

    def _step_cell(
        self, projected: Tensor, gates: Tensor, norm: Tensor, memory: MLSTMState, batch: int
    ) -> Tensor:
        q, k, v, gate, i, f = self._heads(projected, gates, (batch,))
        h: Tensor = self.operations.step_cell(
            q, k, v, i, f, memory, gate, norm, self.config.cell_norm_eps, self.config.eps
        )
        return h.flatten(1)

    def _sequence_cell(
        self, projected: Tensor, gates: Tensor, norm: Tensor, memory: MLSTMState, batch: int
    ) -> Tensor:
        q, k, v, gate, i, f = self._heads(projected, gates, (batch, len(projected) // batch))
        h, new = mlstm_sequence(q, k, v, i, f, state=memory, eps=self.config.eps)
        h, gate = h.contiguous().flatten(0, 1), gate.flatten(0, 1).flatten(1)
        for part, new_part in zip(memory, new, strict=True):
            part.copy_(new_part)
        out: Tensor = self.operations.head_norm(h, norm, self.config.cell_norm_eps, gate)
        return out


def _fuse_block(block: Any) -> FusedBlock:
    layer, ffn = block.mlstm_layer, block.ffn
    i, f = layer.igate_preact, layer.fgate_preact
    assert i.bias is not None
    assert f.bias is not None
    return FusedBlock(
        block.norm_mlstm.weight.data,
        fuse([layer.q.weight, layer.k.weight, layer.v.weight, layer.ogate_preact.weight]),
        fuse([i.weight, f.weight]),
        fuse([i.bias, f.bias]),
        layer.multihead_norm.weight.data,
        layer.out_proj.weight.data,
        block.norm_ffn.weight.data,
        fuse([ffn.proj_up_gate.weight, ffn.proj_up.weight]),
        ffn.proj_down.weight.data,
    )


@torch.inference_mode(False)  # whoever is in it: the parameters must stay trainable
def fuse(parameters: Sequence[Tensor]) -> Tensor:
    """Several parameters as one tensor, stacked along the first axis; they become views of it.

    Those that lie side by side already, as after loading, are not moved. Else one copy is made and
    the old memory let go.
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
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([*map(len, parameters)]), strict=True):
        parameter.data = part
    return whole
