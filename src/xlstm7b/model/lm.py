"""XLSTM, the language model: embedding → blocks → RMSNorm → linear head → soft-cap."""

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, Unpack, overload

import torch
from torch import Tensor, nn

from xlstm7b.checkpoint import open_checkpoint, save_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.devices import float_dtype, to_device
from xlstm7b.model.head import head_logprobs, head_loss
from xlstm7b.model.init import check_initialised, check_no_buffers, small_std
from xlstm7b.model.layers import (
    Embedding,
    Float32Linear,
    Linear,
    MLSTMStack,
    QuantizedLinear,
    padding,
    soft_cap,
)
from xlstm7b.model.model_state import ModelState
from xlstm7b.quantize import cpu, gpu
from xlstm7b.quantize.config import Quantization, Scheme
from xlstm7b.quantize.weight import QuantizedWeight

if TYPE_CHECKING:
    from xlstm7b.model.publish import Options

_IGNORED = -100  # a target that does not count, as in `torch.nn.functional.cross_entropy`


class Backbone(MLSTMStack):
    """The model without its head: a stack that reads token ids."""

    embeddings: Embedding


class XLSTM(nn.Module):
    """The language model. Its parameters have the names of the released checkpoint.

    A new model has the training initialisation, or no data under `torch.device("meta")`. A model
    with quantised weights has `QuantizedLinear` layers, and cannot be trained.
    """

    lm_head: Float32Linear | QuantizedLinear

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
        self._check_ids("targets", targets)
        x, state = self._hidden(tokens, state, resets, lengths)
        cap = self.config.output_logit_soft_cap
        logprobs = head_logprobs(x, self.lm_head.weight, targets, cap)
        if lengths is not None:
            logprobs = logprobs.masked_fill(padding(lengths, *tokens.shape), 0)
        return logprobs, state

    @overload
    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        *,
        resets: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        *,
        state: ModelState,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]: ...

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        *,
        state: ModelState | None = None,
        resets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ModelState]:
        """−Σ weights · log p(targets) over [B, T], for training: one float32 number.

        A target of −100 does not count, as in PyTorch. Without `weights` it is the mean over the
        targets that count, 0 if none does.

        With weights it equals the sum over `token_logprobs`, with one product with the head less.
        With a `state` the new state is returned too, for truncated backpropagation through time:
        start from `ModelState.zeros`, and call `state.detach()` before the next part.
        """
        _check_shape("targets", targets, tokens)
        counts = targets != _IGNORED
        targets = targets.where(counts, 0)
        self._check_ids("targets", targets)
        if weights is None:
            weights = counts.float() / counts.sum().clamp(min=1)
        _check_shape("weights", weights, tokens)
        if not weights.is_floating_point():
            raise ValueError(f"weights must be floating-point numbers, not {weights.dtype}")
        if any(not layer.has_gradient for layer in self.quantized_layers()):
            raise ValueError("a model with quantised weights cannot be trained: load a float one")
        x, after = self._hidden(tokens, state, resets, None)
        cap = self.config.output_logit_soft_cap
        loss = head_loss(x, self.lm_head.weight, targets, weights.where(counts, 0), cap)
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
        self._check_ids("tokens", tokens)
        result: tuple[Tensor, ModelState] = self.backbone(
            tokens, state, resets=resets, lengths=lengths
        )
        return result

    def _check_ids(self, name: str, ids: Tensor) -> None:
        """`ValueError` for ids outside of the vocabulary. Only on a CPU: a GPU would wait."""
        if ids.device.type != "cpu" or torch.compiler.is_compiling():
            return
        size = self.config.vocab_size
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            wrong = ids[(ids < 0) | (ids >= size)][0]
            raise ValueError(
                f"{name} must be ids from 0 to {size - 1}, as the model's vocabulary, "
                f"and one is {wrong}"
            )

    def num_parameters(self) -> int:
        """The number of parameters; a quantised weight counts as many as it stands for."""
        return sum(math.prod(shape) for shape in self.config.parameter_shapes().values())

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        *,
        dtype: torch.dtype | str,
        device: torch.device | str | None = None,
        quantized: Collection[str] = (),
    ) -> Self:
        """A model with uninitialised parameters, all in one block of memory.

        The matrices in `quantized` get a `QuantizedLinear` without a weight.

        Separate tensors would take more memory than they hold: PyTorch's GPU allocator rounds large
        tensors up, and its CPU allocator on ARM leaves gaps.
        """
        dtype = float_dtype(dtype)
        with torch.device("meta"):
            model = cls(config).to(dtype)
        model.replace_quantized(quantized)
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
        revision: str | None = None,
        subfolder: str | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        quantize: str | Quantization | None = None,
    ) -> Self:
        """Loads a checkpoint folder or hub id. Tensors are cast one by one while they are read.

        A hub id is user/repo, user/repo@revision or either with /subfolder; `revision` and
        `subfolder` say the same. Of a local folder, `subfolder` is a folder in it.
        `dtype` is by default the stored one, `device` PyTorch's default. Quantised weights stay so.
        `quantize` rounds float weights while they are read: "int8", "int4" or "fp8", or a
        `Quantization` with another group size or head. A device that cannot be used is a
        `ValueError` before anything is read.
        """
        if device is not None:
            device = to_device(device)
        checkpoint = open_checkpoint(folder_or_hub_id, revision=revision, subfolder=subfolder)
        dtype = dtype or checkpoint.dtype
        schemes: dict[str, Scheme] = dict(checkpoint.schemes)
        if quantize is not None:
            if schemes:
                raise ValueError(f"the weights in {checkpoint.folder} are quantised already")
            schemes = schemes_of(checkpoint.config, quantize)
        if not schemes:
            model = cls.empty(checkpoint.config, dtype=dtype, device=device)
            checkpoint.copy_into(dict(model.named_parameters()))
            return model
        model = cls.empty(checkpoint.config, dtype=dtype, device=device, quantized=schemes)
        packed = model.packed_schemes(schemes, None if quantize else checkpoint.scale)
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in checkpoint.weights():
                if name in parameters:
                    assert isinstance(tensor, Tensor)
                    parameters[name].copy_(tensor)
                    continue
                if isinstance(tensor, Tensor):
                    tensor = QuantizedWeight.quantize(tensor.to(device), schemes[name])
                model.set_quantized(name, tensor, packed)
        return model

    @property
    def is_quantized(self) -> bool:
        """True if a layer has quantised weights."""
        return bool(self.quantized_layers())

    def quantized_layers(self) -> list[QuantizedLinear]:
        return [module for module in self.modules() if isinstance(module, QuantizedLinear)]

    def replace_quantized(self, names: Collection[str]) -> None:
        """Puts a `QuantizedLinear` without a weight in the place of each of these matrices."""
        for name in names:
            path = name.removesuffix(".weight")
            layer = self.get_submodule(path)
            if not isinstance(layer, Linear):
                raise ValueError(f"{name} is quantised, which is not supported for this layer")
            wide = isinstance(layer, Float32Linear)
            rows, columns = layer.weight.shape
            self.set_submodule(path, QuantizedLinear(columns, rows, wide=wide))

    def packed_schemes(
        self, schemes: Mapping[str, Scheme], scale_of: Callable[[str], Tensor] | None = None
    ) -> set[str]:
        """The schemes whose matrices `set_quantized` is to put in the order of a CPU operator.

        Scales that this package did not make are looked at: `scale_of` returns those of a matrix.
        """
        embedding = self.backbone.embeddings.weight
        if embedding.is_cuda or embedding.dtype == torch.float64:
            return set()  # in float64 the product is that of the dequantised weights
        shapes, none = self.config.parameter_shapes(), torch.empty(0)
        without_codes = []
        for name, scheme in schemes.items():
            rows, columns = shapes[name]
            scale = none if scale_of is None else scale_of(name)
            without_codes.append(QuantizedWeight(scheme, (rows, columns), none, scale))
        return cpu.packed_schemes(without_codes)

    def set_quantized(self, name: str, weight: QuantizedWeight, packed: Collection[str]) -> None:
        """Sets a quantised matrix, in the order in which this device's products read it.

        `packed` is from `packed_schemes`. Packing one matrix at a time, as soon as it is read,
        keeps the peak of memory low.
        """
        layer = self.get_submodule(name.removesuffix(".weight"))
        embedding = self.backbone.embeddings.weight
        assert isinstance(layer, QuantizedLinear)
        weight = weight.to(embedding.device)
        if embedding.is_cuda and embedding.dtype != torch.float64:
            weight = gpu.prepare(weight)
        layer.weight = cpu.prepare(weight, packed)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder that this package and `transformers` can load."""
        if self.is_quantized:
            raise ValueError(
                "a model with quantised weights cannot be saved: `xlstm7b quantize` writes a folder"
            )
        save_checkpoint(folder, self.config, self.named_parameters())

    def push_to_hub(self, repo: str, **options: "Unpack[Options]") -> str:
        """Uploads what `save_pretrained` writes; `options` are those of `publish.Options`.

        A model has no tokenizer. To publish both, push a folder (`publish.push_to_hub`).
        """
        from xlstm7b.model.publish import push_saved

        return push_saved(self.save_pretrained, "model", repo, **options)


def schemes_of(config: ModelConfig, quantize: str | Quantization) -> dict[str, Scheme]:
    """The scheme of every parameter that is quantised: the matrices of all layers but the gates."""
    if isinstance(quantize, str):
        quantize = Quantization.named(quantize)
    with torch.device("meta"):
        model = XLSTM(config)
    schemes = {}
    for path, layer in model.named_modules():
        scheme = quantize.scheme_of(path) if isinstance(layer, Linear) else None
        if scheme is not None:
            schemes[f"{path}.weight"] = scheme
            scheme.check(f"{path}.weight", tuple(layer.weight.shape))
    return schemes


def _check_shape(name: str, values: Tensor, tokens: Tensor) -> None:
    if values.shape != tokens.shape:
        raise ValueError(
            f"{name} {list(values.shape)} and tokens {list(tokens.shape)} differ in shape"
        )
