"""log p(target) from hidden vectors, the head in pieces: no [tokens × vocabulary] tensor, ever."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xlstm7b.model.layers import linear_float32, soft_cap

_LOGITS_A_PIECE = 1 << 26  # 256 MiB of float32 logits at a time


def head_logprobs(x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    """float32 log-probabilities of `targets` [...] under the soft-capped head; x is [..., d]."""
    apply: Callable[..., Tensor] = _HeadLogprobs.apply
    return apply(x, weight, targets, cap)


class _HeadLogprobs(torch.autograd.Function):
    """Keeps one number a token for the backward, which computes each piece's logits again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
        shape, x, targets = targets.shape, x.flatten(0, -2), targets.flatten()
        chosen, log_sums = [], []
        rows = _rows_a_piece(weight)
        for x_piece, target in zip(x.split(rows), targets.split(rows), strict=True):
            logits = soft_cap(linear_float32(x_piece, weight), cap)
            chosen.append(logits.gather(1, target[:, None]).squeeze(1))
            log_sums.append(logits.logsumexp(1))
        log_sum = torch.cat(log_sums)
        ctx.save_for_backward(x, weight, targets, log_sum)
        ctx.cap = cap
        return torch.cat(chosen).view(shape) - log_sum.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, targets, log_sum = ctx.saved_tensors
        shape, grad = (*grad.shape, x.shape[-1]), grad.flatten()
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype)
        rows = _rows_a_piece(weight)
        for start in range(0, len(x), rows):
            piece = slice(start, start + rows)
            logits = soft_cap(linear_float32(x[piece], weight), ctx.cap)
            # d log p / d logits = onehot − softmax, then through the soft-cap: 1 − tanh².
            slope = -torch.exp(logits - log_sum[piece, None])
            slope.scatter_add_(1, targets[piece, None], torch.ones_like(slope[:, :1]))
            slope *= (1 - (logits / ctx.cap).square_()) * grad[piece, None]
            slope = slope.to(x.dtype)
            grad_x[piece] = slope @ weight
            grad_weight += slope.mT @ x[piece]
        return grad_x.view(shape), grad_weight.to(weight.dtype), None, None


def _rows_a_piece(weight: Tensor) -> int:
    return max(1, _LOGITS_A_PIECE // len(weight))
