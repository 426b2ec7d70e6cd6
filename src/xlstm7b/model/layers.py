"""The small parts: soft-cap, RMSNorm, linear layers with a stated output precision, SwiGLU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """a · tanh(x / a): keeps x within ±a (paper, "Gate Soft-Capping" and logit soft-cap)."""
    return cap * torch.tanh(x / cap)


# Whether this CPU has matrix instructions for a 16-bit dtype; PyTorch crawls without. Asked once,
# and not within a function: torch.compile could not see through it.
_CPU_MULTIPLIES = {
    torch.bfloat16: torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ in x's dtype."""
    if x.device.type == "cpu" and weight.dtype.itemsize == 2:
        if weight.dtype == torch.bfloat16 and x.numel() == weight.shape[1]:
            # One row is bound by reading W, which `mv` does several times faster than `F.linear`.
            return torch.mv(weight, x.flatten()).view(*x.shape[:-1], -1)
        if not _CPU_MULTIPLIES[weight.dtype]:
            return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)


_ROWS_A_PIECE = 8192


def product_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ for x [R, K], accumulated and returned in float32 (float64 stays)."""
    if weight.dtype.itemsize >= 4:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.mT, out_dtype=torch.float32)
    # Widened by pieces: a vocabulary's whole head in float32 would be a second copy of it.
    pieces = [F.linear(x.float(), rows.float()) for rows in weight.split(_ROWS_A_PIECE)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


@torch.library.custom_op("xlstm7b::linear_float32", mutates_args=())
def _linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """`product_float32` for x [..., K]: PyTorch's own has no gradient."""
    y = product_float32(x.flatten(0, -2), _whole_tiles(weight))
    return y[:, : len(weight)].contiguous().view(*x.shape[:-1], len(weight))


@_linear_float32.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight), dtype=torch.float32)


@torch.library.custom_op("xlstm7b::linear_float32_backward", mutates_args=())
def _linear_float32_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and W, by products in their dtype."""
    rows = _whole_tiles(grad.flatten(0, -2).mT.to(x.dtype))
    dx = linear(rows.mT, _whole_tiles(weight).mT).view(x.shape)
    return dx, linear(rows, x.flatten(0, -2).mT)[: len(weight)].clone()


@_linear_float32_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _whole_tiles(rows: Tensor) -> Tensor:
    """Gates are few: with 8 rows of them, memory is aligned as GPUs' fast products want it."""
    return F.pad(rows, (0, 0, 0, -len(rows) % 8))


def _keep_factors(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _linear_float32_backward(grad, *ctx.saved_tensors)
    return gradients


_linear_float32.register_autograd(_backward, setup_context=_keep_factors)


def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, accumulated and returned in float32 (float64 stays) whatever the weights' dtype."""
    if weight.dtype.itemsize >= 4:
        return F.linear(x, weight, bias)
    y: Tensor = _linear_float32(x, weight)
    return y if bias is None else y + bias.float()


class Linear(nn.Linear):
    """A linear layer without bias, in the weights' dtype."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Left to `model/init.py`, which knows the whole model."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Float32Linear(nn.Linear):
    """A linear layer whose result leaves in float32: the gates' pre-activations and the head."""

    def reset_parameters(self) -> None:
        """Left to `model/init.py`, which knows the whole model."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_float32(x, self.weight, self.bias)


class NormWeight(nn.Module):
    """The scale of a norm, under the name the checkpoint gives it.

    A module that is called for it, so that tensor parallelism can hand out its own part.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self) -> Tensor:
        return self.weight


class RMSNorm(NormWeight):
    """x / √(mean(x²) + ε) · w: the reduction in float32, cast back, then the weight."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        wide = x if x.dtype.itemsize >= 4 else x.float()
        return F.rms_norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


class SwiGLU(nn.Module):
    """W_down (SiLU(W_gate x) ⊙ W_up x)."""

    def __init__(self, width: int, up_width: int) -> None:
        super().__init__()
        self.proj_up_gate = Linear(width, up_width)
        self.proj_up = Linear(width, up_width)
        self.proj_down = Linear(up_width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj_down(F.silu(self.proj_up_gate(x)) * self.proj_up(x))
        return y
