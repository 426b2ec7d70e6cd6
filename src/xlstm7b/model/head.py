"""Log-probabilities and the loss from hidden vectors, without a [tokens × vocabulary] tensor.

The head runs on a part of the rows (tokens) at a time, forward and backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xlstm7b.kernel_verdicts import is_wrong
from xlstm7b.mlstm import has_kernels
from xlstm7b.mlstm.autocast import to_autocast
from xlstm7b.model.layers import linear, linear_float32, product_float32, soft_cap
from xlstm7b.quantize.weight import QuantizedWeight

MAX_LOGITS = 1 << 26  # float32 logits in memory at once: 256 MiB
GPU_MAX_LOGITS = 4 * MAX_LOGITS


def head_logprobs(
    x: Tensor, weight: Tensor | QuantizedWeight, targets: Tensor, cap: float | None
) -> Tensor:
    """float32 log-probabilities of `targets` [...] from the head. x is [..., d].

    `cap` is the soft-cap of the logits, or None. A quantised head gives a gradient to x alone.
    """
    if isinstance(weight, QuantizedWeight) and weight.layout in ("stored", "gpu"):
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        # On a GPU always: the many products of the other way take long.
        weight = weight.dequantize(x.dtype) if needs_gradient or weight.is_cuda else weight
    if isinstance(weight, QuantizedWeight):
        return _quantized_logprobs(to_autocast(x.detach()), weight, targets, cap)
    apply: Callable[..., Tensor] = _HeadLogprobs.apply
    return apply(to_autocast(x), to_autocast(weight), targets, cap)


def head_loss(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    targets: Tensor,
    weights: Tensor,
    cap: float | None,
) -> Tensor:
    """−Σ weights · log p(targets), as one float32 number, for training.

    The weights are known in the forward pass, so the gradient is computed there, from the logits
    that the loss needs. `head_logprobs` has to compute the logits again in the backward pass. A
    head that is frozen or quantised gets no gradient, and none is computed.
    """
    x = to_autocast(x)
    if isinstance(weight, QuantizedWeight):
        weight = weight.dequantize(x.dtype)
    apply: Callable[..., Tensor] = _HeadLoss.apply
    return apply(x, to_autocast(weight), targets, weights, cap)


class _HeadLogprobs(torch.autograd.Function):
    """Keeps one number per row for the backward pass, which computes the logits again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> Tensor:
        shape, x, targets = targets.shape, x.flatten(0, -2), targets.flatten()
        chosen, log_sums = [], []
        for rows in _row_slices(x, weight):
            products = product_float32(x[rows], weight)
            chosen_part, log_sum = _log_sums(products, targets[rows], cap)
            chosen.append(chosen_part)
            log_sums.append(log_sum)
        sums = torch.cat(log_sums)
        ctx.save_for_backward(x, weight, targets, sums)
        ctx.cap = cap
        # The difference of two views is not a view itself. FSDP warns about views.
        return torch.cat(chosen).view(shape) - sums.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, targets, log_sums = ctx.saved_tensors
        shape, grad = (*grad.shape, x.shape[-1]), grad.flatten()
        grad_x, grad_weight = torch.empty_like(x), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=grad.dtype)
        for rows in _row_slices(x, weight):
            products = product_float32(x[rows], weight)
            d_products = _gradients(
                products, targets[rows], log_sums[rows], grad[rows], ctx.cap, x.dtype
            )
            grad_x[rows] = linear(d_products, weight.mT)
            if grad_weight is not None:
                grad_weight += product_float32(d_products.mT, x[rows].mT)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_x.view(shape), grad_weight, None, None


class _HeadLoss(torch.autograd.Function):
    """Computes the gradients of x and of the head in the forward pass, and keeps them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, cap: float | None
    ) -> Tensor:
        shape, x, targets, weights = x.shape, x.flatten(0, -2), targets.flatten(), weights.flatten()
        grad_x, grad_weight = torch.empty_like(x), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=weights.dtype)
        loss = weights.new_zeros(())
        # Few large slices, because each is added to the whole gradient of the head.
        for rows in _row_slices(x, weight, large=grad_weight is not None):
            products = product_float32(x[rows], weight)
            chosen, log_sum = _log_sums(products, targets[rows], cap)
            loss += ((log_sum - chosen) * weights[rows]).sum()
            d_products = _gradients(products, targets[rows], log_sum, -weights[rows], cap, x.dtype)
            grad_x[rows] = linear(d_products, weight.mT)
            if grad_weight is not None:
                grad_weight += product_float32(d_products.mT, x[rows].mT)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_x.view(shape), grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_x, grad_weight = (
            None if kept is None else kept * grad.to(kept.dtype) for kept in ctx.saved_tensors
        )
        return grad_x, grad_weight, None, None, None


def _quantized_logprobs(
    x: Tensor, weight: QuantizedWeight, targets: Tensor, cap: float | None
) -> Tensor:
    x, flat, parts = x.flatten(0, -2), targets.flatten(), []
    for rows in _row_slices(x, weight):
        chosen, log_sum = _log_sums(linear_float32(x[rows], weight), flat[rows], cap)
        parts.append(chosen - log_sum)
    return torch.cat(parts).view(targets.shape)


def _row_slices(x: Tensor, weight: Tensor | QuantizedWeight, *, large: bool = True) -> list[slice]:
    """Slices of the rows of x [R, d]. The logits of one slice are in memory at a time."""
    limit = GPU_MAX_LOGITS if weight.is_cuda and large else MAX_LOGITS
    rows = max(1, limit // len(weight))
    if weight.is_cuda:
        rows = max(128, rows // 128 * 128)  # whole tiles of the matrix products
    return [slice(start, start + rows) for start in range(0, len(x), rows)]


def _uses_kernels(products: Tensor) -> bool:
    if products.dtype != torch.float32 or not has_kernels(products.device):
        return False
    return not is_wrong("loss", products.device)


def _log_sums(products: Tensor, targets: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """From x Wᵀ: the soft-capped logits of the targets, and log Σ exp of each row's logits."""
    if _uses_kernels(products):
        from xlstm7b.model import head_kernels

        return head_kernels.log_sums(products, targets, cap)
    logits = soft_cap(products, cap)
    return logits.gather(1, targets[:, None]).squeeze(1), logits.logsumexp(1)


def _gradients(
    products: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    cap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of x Wᵀ: (onehot − softmax) through the soft-cap (1 − tanh²), times grad."""
    if _uses_kernels(products):
        from xlstm7b.model import head_kernels

        return head_kernels.gradients(products, targets, log_sums, grad, cap, dtype)
    logits = soft_cap(products, cap)
    slope = -torch.exp(logits - log_sums[:, None])
    slope.scatter_add_(1, targets[:, None], torch.ones_like(slope[:, :1]))
    factor = 1 if cap is None else 1 - (logits / cap).square_()
    slope *= factor * grad[:, None]
    return slope.to(dtype)
