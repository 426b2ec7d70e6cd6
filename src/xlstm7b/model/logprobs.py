"""log p(target) from hidden vectors, the head in pieces: no [tokens × vocabulary] tensor, ever."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xlstm7b.mlstm import has_kernels
from xlstm7b.model.layers import linear, product_float32, soft_cap

_LOGITS_A_PIECE = 1 << 26  # float32 logits at a time: 256 MiB, and on GPUs four times as many


def head_logprobs(x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    """float32 log-probabilities of `targets` [...] under the soft-capped head; x is [..., d]."""
    apply: Callable[..., Tensor] = _HeadLogprobs.apply
    return apply(x, weight, targets, cap)


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, cap: float) -> Tensor:
    """−Σ weights · log p(targets), as one float32 number, for training.

    With the weights known beforehand each piece's gradient is taken as soon as its logits are
    there: they are computed once, where `head_logprobs` computes them again for its gradient.
    """
    apply: Callable[..., Tensor] = _HeadLoss.apply
    return apply(x, weight, targets, weights, cap)


class _HeadLogprobs(torch.autograd.Function):
    """Keeps one number a token for the backward, which computes each piece's logits again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
        shape, x, targets = targets.shape, x.flatten(0, -2), targets.flatten()
        chosen, log_sums = [], []
        for piece in _pieces(x, weight):
            products = product_float32(x[piece], weight)
            chosen_piece, log_sum = _log_sums(products, targets[piece], cap)
            chosen.append(chosen_piece)
            log_sums.append(log_sum)
        sums = torch.cat(log_sums)
        ctx.save_for_backward(x, weight, targets, sums)
        ctx.cap = cap
        return torch.cat(chosen).view(shape) - sums.view(shape)  # no view: FSDP warns of one

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, targets, log_sums = ctx.saved_tensors
        shape, grad = (*grad.shape, x.shape[-1]), grad.flatten()
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=grad.dtype)
        for piece in _pieces(x, weight):
            slopes = product_float32(x[piece], weight)
            slopes = _slopes(slopes, targets[piece], log_sums[piece], grad[piece], ctx.cap, x.dtype)
            grad_x[piece] = linear(slopes, weight.mT)
            grad_weight += product_float32(slopes.mT, x[piece].mT)
        return grad_x.view(shape), grad_weight.to(weight.dtype), None, None


class _HeadLoss(torch.autograd.Function):
    """Keeps the two gradients, of x and of the head."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, cap: float
    ) -> Tensor:
        shape, x, targets, weights = x.shape, x.flatten(0, -2), targets.flatten(), weights.flatten()
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=weights.dtype)
        loss = weights.new_zeros(())
        for piece in _pieces(x, weight):
            products = product_float32(x[piece], weight)
            chosen, log_sum = _log_sums(products, targets[piece], cap)
            loss += ((log_sum - chosen) * weights[piece]).sum()
            slopes = _slopes(products, targets[piece], log_sum, -weights[piece], cap, x.dtype)
            grad_x[piece] = linear(slopes, weight.mT)
            grad_weight += product_float32(slopes.mT, x[piece].mT)
        ctx.save_for_backward(grad_x.view(shape), grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        return (
            grad_x * grad.to(grad_x.dtype),
            grad_weight * grad.to(grad_weight.dtype),
            None,
            None,
            None,
        )


def _pieces(x: Tensor, weight: Tensor) -> list[slice]:
    """Rows of x [R, d] whose logits are held at a time."""
    rows = max(1, _LOGITS_A_PIECE // len(weight))
    if weight.is_cuda:
        rows = max(128, 4 * rows // 128 * 128)  # products' tiles are whole
    return [slice(start, start + rows) for start in range(0, len(x), rows)]


def _log_sums(products: Tensor, targets: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """The targets' soft-capped logits, and log Σ exp of each row's."""
    if products.dtype == torch.float32 and has_kernels(products.device):
        from xlstm7b.model.triton import head

        return head.log_sums(products, targets, cap)
    logits = soft_cap(products, cap)
    return logits.gather(1, targets[:, None]).squeeze(1), logits.logsumexp(1)


def _slopes(
    products: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    cap: float,
    dtype: torch.dtype,
) -> Tensor:
    """d log p / d logits = onehot − softmax, then through the soft-cap: 1 − tanh²."""
    if products.dtype == torch.float32 and has_kernels(products.device):
        from xlstm7b.model.triton import head

        return head.slopes(products, targets, log_sums, grad, cap, dtype)
    logits = soft_cap(products, cap)
    slope = -torch.exp(logits - log_sums[:, None])
    slope.scatter_add_(1, targets[:, None], torch.ones_like(slope[:, :1]))
    slope *= (1 - (logits / cap).square_()) * grad[:, None]
    return slope.to(dtype)
