"""The stack of residual blocks and the layers it is made of, as modules over vectors [B, T, dim].

Parameters have the names of the released checkpoint.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState, headwise_norm, mlstm_sequence, mlstm_step
from xlstm7b.mlstm.autocast import to_autocast, without_autocast
from xlstm7b.model.init import check_initialised, normal_, residual_std, small_std
from xlstm7b.model.model_state import BlockState, ModelState
from xlstm7b.quantize import cpu
from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.weight import QuantizedWeight
from xlstm7b.registry import STANDARD, find, register
from xlstm7b.report import counted


class MLSTMStack(nn.Module):
    """Residual blocks and a last norm over vectors [B, T, dim]: `y, state = stack(x)`.

    Args:
        dim: Width of the vectors.
        num_heads: Heads of each mLSTM layer.
        num_blocks: Number of blocks.
        dropout: Of what each half of a block adds to the residual stream.
        embeddings: A module that is applied to the input first, such as the embedding of a language
            model. Its parameters come before those of the blocks.
        options: Other fields of `ModelConfig` that shape a block, such as `ffn_proj_factor`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 4,
        num_blocks: int = 2,
        *,
        dropout: float = 0.0,
        embeddings: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        config = ModelConfig(dim, num_blocks, num_heads, **options)
        self.dim = dim
        self.embeddings = embeddings
        block = find("block", config.block)
        block_options = {"dropout": dropout} if dropout else {}  # not every block has it
        self.blocks = nn.ModuleList(
            block.from_config(config, **block_options) for _ in range(num_blocks)
        )
        self.out_norm = find("norm", config.norm)(dim, config.norm_eps)
        # A module that makes a `ModelState` for a number of rows, which then start from it instead
        # of from zeros: see `initial_state.py`.
        self.initial_state: nn.Module | None = None
        check_initialised(self)

    @classmethod
    def from_config(
        cls, config: ModelConfig, *, dropout: float = 0.0, embeddings: nn.Module | None = None
    ) -> Self:
        return cls(**_arguments(config), dropout=dropout, embeddings=embeddings)

    def forward(
        self,
        x: Tensor,
        state: ModelState | None = None,
        *,
        resets: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Returns vectors [B, T, dim] and the state after the last position.

        Args:
            x: Vectors [B, T, dim], or what `embeddings` takes.
            state: The state after earlier positions, or None at the start. It is not changed. With
                a state and T = 1 the cell is computed as one step.
            resets: bool [B, T], True at the first position of each sequence that starts in a row.
            lengths: int [B], from 0 to T, if rows are padded on the right. The returned state is
                the one at each row's length; vectors after it are meaningless, and x may hold
                anything there, NaN too. A row of length 0 returns its state unchanged. The range is
                only checked on a CPU, because reading values from a GPU would wait for it.
        """
        if self.embeddings is not None:
            x = self.embeddings(x)
        _check_vectors(x, self.dim)
        batch, length = x.shape[:2]
        if state is None and self.initial_state is not None:
            state = self.initial_state(batch)
        # Without a state, each layer makes its own, for the heads that it has.
        before: Sequence[BlockState | None] = [None] * len(self.blocks)
        seen = torch.zeros(batch, dtype=torch.long, device=x.device)
        if state is not None:
            before, seen = state.blocks, state.tokens_seen
            if (len(before), len(seen)) != (len(self.blocks), batch):
                had = f"{counted(len(before), 'block')} and {counted(len(seen), 'row')}"
                has = f"{counted(len(self.blocks), 'block')} and the input {counted(batch, 'row')}"
                raise ValueError(f"the state has {had}, the model {has}")
        after = []
        for block, cell_state in zip(self.blocks, before, strict=True):
            x, cell_state = block(x, cell_state, resets=resets, lengths=lengths)
            after.append(cell_state)
        seen = seen + (length if lengths is None else lengths)
        return self.out_norm(x), ModelState(tuple(after), seen)


@register("block", STANDARD["block"])
class MLSTMBlock(nn.Module):
    """The block (post up-projection): z = x + mLSTM(RMSNorm(x)); y = z + SwiGLU(RMSNorm(z)).

    `y, state = block(x)` with x [B, T, dim]. The arguments are those of `MLSTMStack`; `num_blocks`
    is the number of blocks of the whole model. It only scales the first weights.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 4,
        *,
        num_blocks: int = 1,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, not {dropout}")
        config = ModelConfig(dim, num_blocks, num_heads, **options)
        norm = find("norm", config.norm)
        self.norm_mlstm = norm(dim, config.norm_eps)
        self.mlstm_layer = find("layer", config.layer).from_config(config)
        self.norm_ffn = norm(dim, config.norm_eps)
        self.ffn = SwiGLU(dim, config.ffn_dim, num_blocks)
        self.dropout = dropout

    @classmethod
    def from_config(cls, config: ModelConfig, *, dropout: float = 0.0) -> Self:
        return cls(**_arguments(config), dropout=dropout)

    def forward(
        self,
        x: Tensor,
        state: MLSTMState | None = None,
        *,
        resets: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, MLSTMState]:
        x = to_autocast(x)
        if lengths is not None and torch.is_grad_enabled():
            # The layer does this too. Here it is for the gradients of the SwiGLU's weights.
            x = without_padding(x, padding(lengths, *x.shape[:2]))
        y, state = self.mlstm_layer(self.norm_mlstm(x), state, resets=resets, lengths=lengths)
        z = x + self._drop(y)
        return z + self._drop(self.ffn(self.norm_ffn(z))), state

    def _drop(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    @staticmethod
    def zero_state(
        config: ModelConfig,
        batch: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> MLSTMState:
        """The state before the first token."""
        shape = batch, config.num_heads, config.d_qk, config.d_hv
        return MLSTMState.zeros(*shape, dtype=dtype, device=device)


@register("layer", STANDARD["layer"])
class MLSTMLayer(nn.Module):
    """Projections and gates around the cell: h = σ(õ) ⊙ Norm(h̃), then the output projection.

    `y, state = layer(x)` with x [B, T, dim]. The arguments are those of `MLSTMBlock`, without
    dropout. The number of heads comes from the shape of the gates, not from the config. So the same
    code runs under tensor parallelism, where a layer has only some of the heads.
    """

    def __init__(
        self, dim: int, num_heads: int = 4, *, num_blocks: int = 1, **options: Any
    ) -> None:
        super().__init__()
        config = ModelConfig(dim, num_blocks, num_heads, **options)
        self.dim = dim
        std, residual = small_std(dim), residual_std(dim, num_blocks)
        self.q = Linear(dim, config.qk_dim, std=std)
        self.k = Linear(dim, config.qk_dim, std=std)
        self.v = Linear(dim, config.v_dim, std=std)
        self.ogate_preact = Linear(dim, config.v_dim, std=0)
        self.igate_preact, self.fgate_preact = make_gates(config, dim)
        self.multihead_norm = find("head_norm", config.head_norm)(
            config.v_dim, config.cell_norm_eps
        )
        self.out_proj = Linear(config.v_dim, dim, std=residual)
        self.gate_soft_cap = config.gate_soft_cap
        self.eps = config.eps

    @classmethod
    def from_config(cls, config: ModelConfig) -> Self:
        return cls(**_arguments(config))

    def forward(
        self,
        x: Tensor,
        state: MLSTMState | None = None,
        *,
        resets: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, MLSTMState]:
        _check_vectors(x, self.dim)
        padded = None if lengths is None else padding(lengths, *x.shape[:2])
        if padded is not None:
            x = without_padding(x, padded)
        i = soft_cap(self.igate_preact(x), self.gate_soft_cap)
        f = soft_cap(self.fgate_preact(x), self.gate_soft_cap)
        if padded is not None:
            if resets is not None and resets.shape != padded.shape:
                raise ValueError(
                    f"resets must have the shape {list(padded.shape)}, not {list(resets.shape)}"
                )
            resets = None if resets is None else resets & ~padded
            i = i.masked_fill(padded[..., None], -torch.inf)
            f = f.masked_fill(padded[..., None], torch.inf)
        heads = (i.shape[-1], -1)
        q, k, v = self.qkv(x, heads)
        gate = self.ogate_preact(x).unflatten(-1, heads)
        norm = self.multihead_norm
        norm_weight, norm_eps = norm(), norm.eps
        if x.shape[1] == 1 and resets is None and state is not None:
            q, k, v, i, f, gate = (part.squeeze(1) for part in (q, k, v, i, f, gate))
            fused: dict[str, Any] = {}
            if type(norm) is HeadLayerNorm:  # the step's kernel computes it too
                fused = {"gate": gate, "norm_weight": norm_weight, "norm_eps": norm_eps}
            h, state = mlstm_step(q, k, v, i, f, state, eps=self.eps, **fused)
            if not fused:
                h = norm.normalise(h, norm_weight, norm_eps) * torch.sigmoid(gate)
            h = h.unsqueeze(1)
        else:
            h, state = mlstm_sequence(q, k, v, i, f, state=state, resets=resets, eps=self.eps)
            h = norm.normalise(h, norm_weight, norm_eps) * torch.sigmoid(gate)
        return self.out_proj(h.flatten(-2)), state

    def qkv(self, x: Tensor, heads: tuple[int, int]) -> tuple[Tensor, ...]:
        """q, k, v as [B, T, NH, d]. `heads` is (NH, −1). For subclasses that change them."""
        return tuple(layer(x).unflatten(-1, heads) for layer in (self.q, self.k, self.v))


def make_gates(config: ModelConfig, width: int) -> tuple[nn.Module, nn.Module]:
    """The input and the forget gate of a layer; they read vectors of this width.

    The input gate starts nearly closed (paper, "Negative Input Gate Bias Initialization"), the
    forget gates open, over a range of time scales.
    """
    igate, fgate = find("gate", config.input_gate or config.gate), find("gate", config.gate)
    biases = config.igate_bias_init_range, config.igate_bias_init_range
    return (
        igate(width, config.num_heads, biases=biases),
        fgate(width, config.num_heads, biases=(3.0, 6.0)),
    )


def padding(lengths: Tensor, batch: int, length: int) -> Tensor:
    """bool [B, T], True at positions after a row's length. `ValueError` for bad lengths."""
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape {[batch]}, not {list(lengths.shape)}")
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(f"lengths must be integers, not {lengths.dtype}")
    can_check = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
    if can_check and ((lengths < 0) | (lengths > length)).any():
        raise ValueError(f"lengths must be between 0 and {length}, not {lengths.tolist()}")
    return torch.arange(length, device=lengths.device) >= lengths[:, None]


def without_padding(x: Tensor, padded: Tensor) -> Tensor:
    """x with zeros where `padded` is True: a NaN there, times 0, would be NaN in every sum."""
    return x.masked_fill(padded[..., None], 0)


def _check_vectors(x: Tensor, dim: int) -> None:
    if x.dim() != 3 or 0 in x.shape or x.shape[2] != dim or not x.is_floating_point():
        kind = f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
        raise ValueError(f"x must be vectors [B, T, {dim}] with B and T of at least 1, not {kind}")


def _arguments(config: ModelConfig) -> dict[str, Any]:
    """The fields of a config as arguments of the modules above."""
    arguments = dict(vars(config))
    return {"dim": arguments.pop("embedding_dim"), **arguments}


class SwiGLU(nn.Module):
    """W_down (SiLU(W_gate x) ⊙ W_up x)."""

    def __init__(self, width: int, up_width: int, num_blocks: int) -> None:
        super().__init__()
        self.proj_up_gate = Linear(width, up_width, std=small_std(width))
        self.proj_up = Linear(width, up_width, std=small_std(width))
        self.proj_down = Linear(up_width, width, std=residual_std(width, num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj_down(F.silu(self.proj_up_gate(x)) * self.proj_up(x))
        return y


class NormWeight(nn.Module):
    """The weight of a norm. The norm itself is computed elsewhere.

    It is a module that is called, so that tensor parallelism can return a part of the weight.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1.0)

    def forward(self) -> Tensor:
        return to_autocast(self.weight)


@register("norm", STANDARD["norm"])
class RMSNorm(NormWeight):
    """x / √(mean(x²) + ε) · w. The reduction is in float32; the weight is applied in x's dtype."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        wide = x if x.dtype.itemsize >= 4 else x.float()
        return F.rms_norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype) * to_autocast(self.weight)


@register("norm", "layer_norm")
class LayerNorm(NormWeight):
    """(x − mean) / √(variance + ε) · w, without a bias. The dtypes are those of `RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        wide = x if x.dtype.itemsize >= 4 else x.float()
        return F.layer_norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype) * to_autocast(self.weight)

    @staticmethod
    def flops(config: ModelConfig, tokens: int) -> int:
        return tokens * 3 * config.embedding_dim  # as every norm in `accounting`


@register("head_norm", STANDARD["head_norm"])
class HeadLayerNorm(NormWeight):
    """LayerNorm without bias over each head's output: h [..., NH, d_hv], weight [NH · d_hv].

    The module holds the weight, and `normalise` computes the norm from it. Under tensor parallelism
    the weight is only the part for this process's heads.
    """

    normalise = staticmethod(headwise_norm)


@register("head_norm", "rms_norm")
class HeadRMSNorm(NormWeight):
    """RMSNorm over each head's output. The shapes are those of `HeadLayerNorm`."""

    @staticmethod
    def normalise(h: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = h if h.dtype.itemsize >= 4 else h.float()
        return F.rms_norm(wide, h.shape[-1:], eps=eps).to(h.dtype) * weight.view(h.shape[-2:])


class Embedding(nn.Embedding):
    """The input embedding. Its first weights are N(0, √(2/(5d)))."""

    def reset_parameters(self) -> None:
        normal_(self.weight, small_std(self.embedding_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, to_autocast(self.weight))


class Linear(nn.Linear):
    """A linear layer without bias, in the weights' dtype. Its first weights are N(0, std)."""

    def __init__(self, in_features: int, out_features: int, *, std: float) -> None:
        self.std = std  # the base class calls reset_parameters()
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        normal_(self.weight, self.std)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return linear(to_autocast(x), to_autocast(self.weight))
        return linear(x, self.weight)  # autocast casts the weight


class Float32Linear(Linear):
    """A linear layer without bias that returns float32: for the logits."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_float32(to_autocast(x), to_autocast(self.weight))


class QuantizedLinear(nn.Module):
    """Takes the place of a `Linear` or, with `wide`, of a `Float32Linear`.

    The weight is no parameter, and is set after the layer is made. With `has_gradient` the gradient
    flows to the input, through the dequantised weight (`freeze` in `lora.py` sets it). Without, the
    product has no gradient, and the fastest operator is used.
    """

    weight: QuantizedWeight
    has_gradient = False

    def __init__(self, in_features: int, out_features: int, *, wide: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.wide = in_features, out_features, wide

    def forward(self, x: Tensor) -> Tensor:
        if self.has_gradient:  # without one too, so that validation computes what training does
            weight, x = self.weight, to_autocast(x)
            kind = weight.scheme.name, weight.scheme.group_size, weight.shape[1], weight.layout
            y: Tensor = _dequantized_product(x, weight.data, weight.scale, *kind)
            return y.float() if self.wide and y.dtype.itemsize == 2 else y
        with torch.no_grad():
            x = to_autocast(x)
            return linear_float32(x, self.weight) if self.wide else linear(x, self.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # Moves the weight to another device. A cast does not touch codes and scales.
        if "weight" in vars(self):
            self.weight = self.weight.to(fn(torch.empty(0, device=self.weight.device)).device)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]


@register("gate", STANDARD["gate"])
class GateLinear(nn.Linear):
    """A linear layer that returns float32: for the gates' pre-activations, one for each head.

    At first they do not depend on the input: the weights are 0, and the biases of the heads go in
    equal steps from the first of `biases` to the second.
    """

    def __init__(self, in_features: int, heads: int, *, biases: tuple[float, float]) -> None:
        self.biases = biases  # the base class calls reset_parameters()
        super().__init__(in_features, heads)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        # On the CPU: the same bits for every device, and fast for the meta device.
        self.bias.copy_(torch.linspace(*self.biases, len(self.bias), device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = map(to_autocast, (x, self.weight, self.bias))
        return linear_float32(x, weight, bias)


@register("gate", "fixed")
class FixedGate(nn.Module):
    """Pre-activations that are not trained: always those that a `GateLinear` starts with.

    It has no parameters, so there is nothing to decay, shard or save.
    """

    def __init__(self, in_features: int, heads: int, *, biases: tuple[float, float]) -> None:
        super().__init__()
        self.heads, self.biases = heads, biases

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        values = torch.linspace(*self.biases, self.heads, dtype=dtype, device=x.device)
        return values.repeat(*x.shape[:-1], 1)

    @staticmethod
    def flops(config: ModelConfig, tokens: int) -> int:
        return 0


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap): limits x to ±cap (paper, "Gate Soft-Capping" and logit soft-cap).

    A cap of None is none: x as it is.
    """
    if cap is None:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return cap * torch.tanh(x / cap)
    return (x / cap).tanh_().mul_(cap)


# True if this CPU has matrix instructions for the dtype; without them PyTorch is very slow.
# Computed at import, because torch.compile cannot trace these calls.
_CPU_HAS_MATMUL = {
    torch.bfloat16: torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}


def linear(x: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """x Wᵀ in x's dtype."""
    if isinstance(weight, QuantizedWeight):
        return _quantized_product(x, weight).to(x.dtype)
    if x.device.type == "cpu" and weight.dtype.itemsize == 2:
        if weight.dtype == torch.bfloat16 and x.numel() == weight.shape[1]:
            # For one row the time is that of reading W. `mv` does it several times faster.
            return torch.mv(weight, x.flatten()).view(*x.shape[:-1], -1)
        if not _CPU_HAS_MATMUL[weight.dtype]:
            with without_autocast(x.device):
                return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)


def linear_float32(
    x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None
) -> Tensor:
    """x Wᵀ + b, summed and returned in float32 for 16-bit weights, else in the weights' dtype."""
    if isinstance(weight, QuantizedWeight):
        assert bias is None
        return _quantized_product(x, weight, wide=True)
    if weight.dtype.itemsize >= 4:
        return F.linear(x, weight, bias)
    y: Tensor = _linear_float32(x, weight)
    return y if bias is None else y + bias.float()


def product_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ for x [R, K], summed and returned in float32 (float64 stays). It has no gradient."""
    if weight.dtype.itemsize >= 4:
        return F.linear(x, weight)
    with without_autocast(x.device):
        if x.is_cuda:
            return torch.mm(x, weight.mT, out_dtype=torch.float32)
        # Part by part: a float32 copy of the whole head would take too much memory.
        parts = [F.linear(x.float(), rows.float()) for rows in weight.split(_WIDENED_ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


_WIDENED_ROWS = 8192


def _quantized_product(x: Tensor, weight: QuantizedWeight, *, wide: bool = False) -> Tensor:
    """x Wᵀ; with `wide` in float32 or wider. It has no gradient."""
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    y: Tensor | None
    with without_autocast(x.device):
        if weight.layout == "bfloat16":  # codes without their scales
            y = linear(rows.bfloat16(), weight.data).float() * weight.scale.float().mT
        else:
            y = cpu.product(rows, weight)
        if y is None:
            multiply = product_float32 if wide else linear
            if weight.layout == "gpu":
                y = multiply(rows, weight.dequantize(x.dtype))
            else:  # only some rows of the weight are floats at a time
                y = torch.cat([multiply(rows, tile) for tile in cpu.tiles(weight, x.dtype)], dim=-1)
        elif wide:
            y = y.to(torch.promote_types(y.dtype, torch.float32))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)


@torch.library.custom_op("xlstm7b::dequantized_product", mutates_args=())
def _dequantized_product(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    scheme: str,
    group_size: int,
    columns: int,
    layout: str,
) -> Tensor:
    """x Wᵀ with the dequantised weight, which is freed at once. The gradient is that of x alone.

    One operator, so that selective checkpointing can keep its output and compilers do not see how
    the weight is unpacked.
    """
    shape = len(data), columns
    weight = QuantizedWeight(Scheme(scheme, group_size), shape, data, scale, layout)
    return linear(x, weight.dequantize(x.dtype))


@_dequantized_product.register_fake
def _(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    scheme: str,
    group_size: int,
    columns: int,
    layout: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(data))


@torch.library.custom_op("xlstm7b::dequantized_product_backward", mutates_args=())
def _dequantized_product_backward(
    grad: Tensor,
    data: Tensor,
    scale: Tensor,
    scheme: str,
    group_size: int,
    columns: int,
    layout: str,
) -> Tensor:
    shape = len(data), columns
    weight = QuantizedWeight(Scheme(scheme, group_size), shape, data, scale, layout)
    return linear(grad, weight.dequantize(grad.dtype).mT)


@_dequantized_product_backward.register_fake
def _(
    grad: Tensor,
    data: Tensor,
    scale: Tensor,
    scheme: str,
    group_size: int,
    columns: int,
    layout: str,
) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], columns)


def _setup_dequantized(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, data, scale, *ctx.kind = inputs
    ctx.save_for_backward(data, scale)


def _backward_dequantized(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx: Tensor = _dequantized_product_backward(grad, *ctx.saved_tensors, *ctx.kind)
    return dx, None, None, None, None, None, None


_dequantized_product.register_autograd(_backward_dequantized, setup_context=_setup_dequantized)


@torch.library.custom_op("xlstm7b::linear_float32", mutates_args=())
def _linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """`product_float32` for x [..., K], with a gradient."""
    y = product_float32(x.flatten(0, -2), _pad_rows(weight))
    return y[:, : len(weight)].contiguous().view(*x.shape[:-1], len(weight))


@_linear_float32.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight), dtype=torch.float32)


@torch.library.custom_op("xlstm7b::linear_float32_backward", mutates_args=())
def _linear_float32_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and W, by products in their dtype."""
    rows = _pad_rows(grad.flatten(0, -2).mT.to(x.dtype))
    dx = linear(rows.mT, _pad_rows(weight).mT).view(x.shape)
    return dx, linear(rows, x.flatten(0, -2).mT)[: len(weight)].clone()


@_linear_float32_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _pad_rows(rows: Tensor) -> Tensor:
    """Pads to a multiple of 8 rows, the alignment that fast GPU matrix products need.

    The gates have one row per head, often fewer than 8.
    """
    missing = -len(rows) % 8
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows  # `pad` always copies


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _linear_float32_backward(grad, *ctx.saved_tensors)
    return gradients


_linear_float32.register_autograd(_backward, setup_context=_setup_context)
