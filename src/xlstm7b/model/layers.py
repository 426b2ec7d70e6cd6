"""The residual block and the layers it is made of. Parameters have the names of the checkpoint."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState, headwise_norm, mlstm_sequence, mlstm_step
from xlstm7b.mlstm.autocast import to_autocast, without_autocast
from xlstm7b.model.init import normal_, residual_std, small_std
from xlstm7b.registry import STANDARD, find, register


@register("block", STANDARD["block"])
class Block(nn.Module):
    """The block (post up-projection): z = x + mLSTM(RMSNorm(x)); y = z + SwiGLU(RMSNorm(z))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        norm = find("norm", config.norm)
        self.norm_mlstm = norm(config.embedding_dim, config.norm_eps)
        self.mlstm_layer = find("layer", config.layer)(config)
        self.norm_ffn = norm(config.embedding_dim, config.norm_eps)
        self.ffn = SwiGLU(config.embedding_dim, config.ffn_dim, config.num_blocks)

    def forward(
        self, x: Tensor, state: MLSTMState | None, resets: Tensor | None, padded: Tensor | None
    ) -> tuple[Tensor, MLSTMState]:
        x = to_autocast(x)
        y, state = self.mlstm_layer(self.norm_mlstm(x), state, resets, padded)
        z = x + y
        return z + self.ffn(self.norm_ffn(z)), state

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

    The number of heads comes from the shape of the gates, not from the config. So the same code
    runs under tensor parallelism, where a layer has only some of the heads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, igate_bias = config.embedding_dim, config.igate_bias_init_range
        std, residual = small_std(width), residual_std(width, config.num_blocks)
        self.q = Linear(width, config.qk_dim, std=std)
        self.k = Linear(width, config.qk_dim, std=std)
        self.v = Linear(width, config.v_dim, std=std)
        self.ogate_preact = Linear(width, config.v_dim, std=0)
        # The input gate starts nearly closed (paper, "Negative Input Gate Bias Initialization"),
        # the forget gates open, over a range of time scales.
        gate = find("gate", config.gate)
        self.igate_preact = gate(width, config.num_heads, biases=(igate_bias, igate_bias))
        self.fgate_preact = gate(width, config.num_heads, biases=(3.0, 6.0))
        self.multihead_norm = NormWeight(config.v_dim, config.cell_norm_eps)
        self.out_proj = Linear(config.v_dim, width, std=residual)
        self.gate_soft_cap = config.gate_soft_cap
        self.eps = config.eps

    def forward(
        self, x: Tensor, state: MLSTMState | None, resets: Tensor | None, padded: Tensor | None
    ) -> tuple[Tensor, MLSTMState]:
        i = soft_cap(self.igate_preact(x), self.gate_soft_cap)
        f = soft_cap(self.fgate_preact(x), self.gate_soft_cap)
        if padded is not None:
            i = i.masked_fill(padded[..., None], -torch.inf)
            f = f.masked_fill(padded[..., None], torch.inf)
        heads = (i.shape[-1], -1)
        q, k, v = self.qkv(x, heads)
        gate = self.ogate_preact(x).unflatten(-1, heads)
        norm_weight, norm_eps = self.multihead_norm(), self.multihead_norm.eps
        if x.shape[1] == 1 and resets is None and state is not None:
            q, k, v, i, f, gate = (part.squeeze(1) for part in (q, k, v, i, f, gate))
            h, state = mlstm_step(
                q,
                k,
                v,
                i,
                f,
                state,
                gate=gate,
                norm_weight=norm_weight,
                norm_eps=norm_eps,
                eps=self.eps,
            )
            h = h.unsqueeze(1)
        else:
            h, state = mlstm_sequence(q, k, v, i, f, state=state, resets=resets, eps=self.eps)
            h = headwise_norm(h, norm_weight, norm_eps) * torch.sigmoid(gate)
        return self.out_proj(h.flatten(-2)), state

    def qkv(self, x: Tensor, heads: tuple[int, int]) -> tuple[Tensor, ...]:
        """q, k, v as [B, T, NH, d]. `heads` is (NH, −1). For subclasses that change them."""
        return tuple(layer(x).unflatten(-1, heads) for layer in (self.q, self.k, self.v))


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
        return linear(x, self.weight)  # autocast casts the weight, and keeps it until its end


class Float32Linear(Linear):
    """A linear layer without bias that returns float32: for the logits."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_float32(to_autocast(x), to_autocast(self.weight))


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


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap): limits x to ±cap (paper, "Gate Soft-Capping" and logit soft-cap)."""
    return cap * torch.tanh(x / cap)


# True if this CPU has matrix instructions for the dtype; without them PyTorch is very slow.
# Computed at import, because torch.compile cannot trace these calls.
_CPU_HAS_MATMUL = {
    torch.bfloat16: torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ in x's dtype."""
    if x.device.type == "cpu" and weight.dtype.itemsize == 2:
        if weight.dtype == torch.bfloat16 and x.numel() == weight.shape[1]:
            # For one row the time is that of reading W. `mv` does it several times faster.
            return torch.mv(weight, x.flatten()).view(*x.shape[:-1], -1)
        if not _CPU_HAS_MATMUL[weight.dtype]:
            with without_autocast(x.device):
                return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)


def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, summed and returned in float32 for 16-bit weights, else in the weights' dtype."""
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
    return F.pad(rows, (0, 0, 0, -len(rows) % 8))


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _linear_float32_backward(grad, *ctx.saved_tensors)
    return gradients


_linear_float32.register_autograd(_backward, setup_context=_setup_context)
