"""XLSTM, the language model: embedding → blocks → RMSNorm → linear head → soft-cap."""

from pathlib import Path
from typing import Literal, Self, overload

import torch
from torch import Tensor, nn

from xlstm7b.checkpoint import open_checkpoint, save_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.model.head import head_logprobs, head_loss
from xlstm7b.model.init import check_initialised, check_no_buffers, small_std
from xlstm7b.model.layers import Embedding, Float32Linear, MLSTMStack, padding, soft_cap
from xlstm7b.model.model_state import ModelState


class Backbone(MLSTMStack):
    """The model without its head: a stack that reads token ids."""

    embeddings: Embedding


class XLSTM(nn.Module):
    """The language model. Its parameters have the names of the released checkpoint.

    A new model has the training initialisation, or no data under `torch.device("meta")`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        embeddings = Embedding(config.vocab_size, config.embedding_dim)
        self.backbone = Backbone.from_config(config, embeddings=embeddings)
        std = small_std(config.embedding_dim)
        self.lm_head = Float32Linear(config.embedding_dim, config.vocab_size, std=std)
        check_initialised(self)
        check_no_buffers(self)

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        *,
        resets: Tensor | None = None,
        lengths: Tensor | None = None,
        logits: Literal["all", "last"] = "all",
    ) -> tuple[Tensor, ModelState]:
        """Returns float32 logits and the state after the last token.

        Args:
            tokens: Token ids [B, T].
            state: The state after earlier tokens, or None at the start. It is not changed.
            resets: bool [B, T], True at the first token of each document.
            lengths: int [B], from 0 to T, if rows are padded on the right. The returned state is
                the one at each row's length; logits after it are meaningless. A row of length 0
                returns its state unchanged. The range is only checked on a CPU, because reading
                values from a GPU would wait for it.
            logits: "all" returns [B, T, V], "last" returns [B, V] at each row's last token.
        """
        if logits not in ("all", "last"):
            raise ValueError(f'logits must be "all" or "last", not {logits!r}')
        x, state = self._hidden(tokens, state, resets, lengths)
        if logits == "last":
            if lengths is None:
                x = x[:, -1]
            else:
                x = x[torch.arange(len(x), device=x.device), (lengths - 1).clamp(min=0)]
        return soft_cap(self.lm_head(x), self.config.output_logit_soft_cap), state

    def token_logprobs(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: ModelState | None = None,
        *,
        resets: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        """float32 log p(targets[b, t] | tokens[b, …t]) as [B, T], 0 after a row's length.

        The head runs on a part of the tokens at a time, forward and backward, so the logits of all
        tokens are never in memory together.
        """
        _check_shape("targets", targets, tokens)
        x, state = self._hidden(tokens, state, resets, lengths)
        cap = self.config.output_logit_soft_cap
        logprobs = head_logprobs(x, self.lm_head.weight, targets, cap)
        if lengths is not None:
            logprobs = logprobs.masked_fill(padding(lengths, *tokens.shape), 0)
        return logprobs, state

    @overload
    def loss(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, *, resets: Tensor | None = None
    ) -> Tensor: ...

    @overload
    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor,
        *,
        state: ModelState,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]: ...

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor,
        *,
        state: ModelState | None = None,
        resets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ModelState]:
        """−Σ weights · log p(targets) over [B, T], for training: one float32 number.

        It equals the sum over `token_logprobs`, with one product with the head less. With a `state`
        the new state is returned too, for truncated backpropagation through time: start from
        `ModelState.zeros`, and call `state.detach()` before the next part.
        """
        _check_shape("targets", targets, tokens)
        _check_shape("weights", weights, tokens)
        if not weights.is_floating_point():
            raise ValueError(f"weights must be floating-point numbers, not {weights.dtype}")
        x, after = self._hidden(tokens, state, resets, None)
        cap = self.config.output_logit_soft_cap
        loss = head_loss(x, self.lm_head.weight, targets, weights, cap)
        return loss if state is None else (loss, after)

    def _hidden(
        self,
        tokens: Tensor,
        state: ModelState | None,
        resets: Tensor | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, ModelState]:
        """Hidden vectors after the last norm, and the new state."""
        if tokens.dim() != 2 or 0 in tokens.shape or tokens.is_floating_point():
            kind = f"{tokens.dtype} {list(tokens.shape)}".removeprefix("torch.")
            raise ValueError(
                f"tokens must be integers [B, T] with B and T of at least 1, not {kind}"
            )
        result: tuple[Tensor, ModelState] = self.backbone(
            tokens, state, resets=resets, lengths=lengths
        )
        return result

    @classmethod
    def empty(
        cls, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Self:
        """A model with uninitialised parameters, all in one block of memory.

        Separate tensors would take more memory than they hold: PyTorch's GPU allocator rounds large
        tensors up, and its CPU allocator on ARM leaves gaps.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be one of torch's, as torch.bfloat16, not {dtype!r}")
        with torch.device("meta"):
            model = cls(config).to(dtype)
        parameters = dict(model.named_parameters())
        sizes = [-(-p.numel() // 64) * 64 for p in parameters.values()]  # aligned as in PyTorch
        memory = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
        filled = {
            name: part[: p.numel()].view(p.shape)
            for (name, p), part in zip(parameters.items(), memory, strict=True)
        }
        model.load_state_dict(filled, assign=True)
        return model

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Loads a checkpoint folder or hub id. Tensors are cast one by one while they are read.

        `dtype` is by default the stored one, `device` PyTorch's default.
        """
        checkpoint = open_checkpoint(folder_or_hub_id)
        model = cls.empty(checkpoint.config, dtype=dtype or checkpoint.dtype, device=device)
        checkpoint.copy_into(dict(model.named_parameters()))
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder that this package and `transformers` can load."""
        save_checkpoint(folder, self.config, self.named_parameters())


def _check_shape(name: str, values: Tensor, tokens: Tensor) -> None:
    if values.shape != tokens.shape:
        raise ValueError(
            f"{name} {list(values.shape)} and tokens {list(tokens.shape)} differ in shape"
        )
