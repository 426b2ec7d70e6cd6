"""XLSTM: embedding → blocks → RMSNorm → linear head → soft-cap."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor, nn

from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState
from xlstm7b.model.block import Block
from xlstm7b.model.init import init_parameters
from xlstm7b.model.layers import Float32Linear, RMSNorm, soft_cap
from xlstm7b.model.logprobs import head_logprobs, head_loss
from xlstm7b.model.state import ModelState
from xlstm7b.weights import open_checkpoint, save_checkpoint


class Embedding(nn.Embedding):
    """A table of vectors, left to `model/init.py` to fill."""

    def reset_parameters(self) -> None:
        """Left to `model/init.py`, which knows the whole model."""


class Backbone(nn.Module):
    """Everything but the head, under the checkpoint's names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = Embedding(config.vocab_size, config.embedding_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.out_norm = RMSNorm(config.embedding_dim, config.norm_eps)


class XLSTM(nn.Module):
    """The language model. Parameters carry the names of the released checkpoint.

    A new model holds the training initialisation; under `torch.device("meta")` it holds nothing.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = Float32Linear(config.embedding_dim, config.vocab_size, bias=False)
        if not self.lm_head.weight.is_meta:  # where there is nothing to fill, and PyTorch is slow
            init_parameters(self, config)

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        *,
        resets: Tensor | None = None,
        lengths: Tensor | None = None,
        logits: Literal["all", "last"] = "all",
    ) -> tuple[Tensor, ModelState]:
        """float32 logits [B, T, V], or [B, V] at each row's last token, and the state behind it.

        tokens [B, T]; `state` is what earlier tokens left (None: nothing yet) and is not changed.
        `resets` [B, T] is True on a document's first token. With `lengths` [B] rows are padded on
        the right: the state returned is the one at each row's own length, and what the logits hold
        past it means nothing. A row of length 0 returns its state unchanged. Lengths are at most T,
        which is checked on a CPU alone: to look at them would be to wait for a GPU.
        """
        if logits not in ("all", "last"):
            raise ValueError(f'logits must be "all" or "last", not {logits!r}')
        x, state, _ = self._read(tokens, state, resets, lengths)
        if logits == "last":
            if lengths is None:
                x = x[:, -1]
            else:
                x = x[torch.arange(len(x), device=x.device), (lengths - 1).clamp(min=0)]
        x = self.lm_head(self.backbone.out_norm(x))
        return soft_cap(x, self.config.output_logit_soft_cap), state

    def token_logprobs(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: ModelState | None = None,
        *,
        resets: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        """float32 log p(targets[b, t] | tokens[b, …t]) as [B, T], 0 past a row's length.

        The head runs in pieces, forward and backward: memory does not grow by tokens × vocabulary.
        """
        if targets.shape != tokens.shape:
            raise ValueError(
                f"targets {list(targets.shape)} and tokens {list(tokens.shape)} differ in shape"
            )
        x, state, padded = self._read(tokens, state, resets, lengths)
        logprobs = head_logprobs(
            self.backbone.out_norm(x),
            self.lm_head.weight,
            targets,
            self.config.output_logit_soft_cap,
        )
        return logprobs if padded is None else logprobs.masked_fill(padded, 0), state

    def loss(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, *, resets: Tensor | None = None
    ) -> Tensor:
        """−Σ weights · log p(targets) over [B, T], as training wants it: one number, float32.

        What `token_logprobs` gives, at the price of one product with the head less.
        """
        x, _, _ = self._read(tokens, None, resets, None)
        cap = self.config.output_logit_soft_cap
        return head_loss(self.backbone.out_norm(x), self.lm_head.weight, targets, weights, cap)

    def _read(
        self,
        tokens: Tensor,
        state: ModelState | None,
        resets: Tensor | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, ModelState, Tensor | None]:
        """Hidden vectors before the last norm, the new state, and which positions are padding."""
        if tokens.dim() != 2 or tokens.shape[1] < 1 or tokens.is_floating_point():
            raise ValueError(f"tokens must be whole numbers [B, T], not {list(tokens.shape)}")
        batch, length = tokens.shape
        # Without a state each layer starts its own, for the heads that it has.
        before: Sequence[MLSTMState | None] = [None] * self.config.num_blocks
        seen = torch.zeros(batch, dtype=torch.long, device=tokens.device)
        if state is not None:
            before, seen = state.blocks, state.tokens_seen
            if len(seen) != batch:
                raise ValueError(f"the state has {len(seen)} rows, the tokens have {batch}")
        padded = None
        if lengths is not None:
            if lengths.shape != (batch,):
                raise ValueError(f"lengths must have shape {[batch]}, not {list(lengths.shape)}")
            looked_at = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
            if looked_at and ((lengths < 0) | (lengths > length)).any():
                raise ValueError(f"lengths must be between 0 and {length}, not {lengths.tolist()}")
            padded = torch.arange(length, device=tokens.device) >= lengths[:, None]
            resets = None if resets is None else resets & ~padded
        seen = seen + (length if lengths is None else lengths)
        x = self.backbone.embeddings(tokens)
        blocks = []
        for block, memory in zip(self.backbone.blocks, before, strict=True):
            x, memory = block(x, memory, resets, padded)
            blocks.append(memory)
        return x, ModelState(tuple(blocks), seen), padded

    @classmethod
    def empty(
        cls, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Self:
        """A model whose parameters hold nothing yet, in one block of memory.

        Allocated one by one they would take more than they hold: PyTorch's allocator for GPUs
        rounds large tensors up, the one for CPUs on ARM leaves gaps, which huge pages make real.
        """
        with torch.device("meta"):
            model = cls(config).to(dtype)
        parameters = dict(model.named_parameters())
        sizes = [-(-p.numel() // 64) * 64 for p in parameters.values()]  # aligned, as PyTorch's own
        block = torch.empty(sum(sizes), dtype=dtype, device=device)
        places = zip(parameters.items(), block.split(sizes), strict=True)
        model.load_state_dict(
            {name: place[: p.numel()].view(p.shape) for (name, p), place in places}, assign=True
        )
        return model

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Reads a checkpoint folder or hub id, casting each tensor on its way into the model.

        `dtype` defaults to the one stored, `device` to PyTorch's default.
        """
        checkpoint = open_checkpoint(folder_or_hub_id)
        model = cls.empty(checkpoint.config, dtype=dtype or checkpoint.dtype, device=device)
        checkpoint.copy_into(dict(model.named_parameters()))
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder that this package and `transformers` read."""
        save_checkpoint(folder, self.config, self.named_parameters())
