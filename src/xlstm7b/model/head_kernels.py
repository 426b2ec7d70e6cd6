"""Triton kernels for the head: log Σ exp of the logits, and their gradient, in one pass each."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def soft_cap(y, cap):
    """cap · tanh(y / cap), with tanh(z) = 1 − 2 / (exp(2 z) + 1).

    Near 0 that difference loses digits, so the series of tanh is used there.
    """
    z = y / cap
    square = z * z
    series = z * (1.0 - square * (1.0 / 3 - square * (2.0 / 15)))
    return cap * tl.where(tl.abs(z) < 0.05, series, 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))


@triton.jit
def log_sums_kernel(
    products, targets, chosen, log_sums, cap, V,
    HAS_CAP: tl.constexpr, IS_SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one row of x Wᵀ: the target's soft-capped logit, and log Σ exp of all logits.

    No logit exceeds the cap. With a small cap exp cannot overflow, so no maximum is subtracted.
    """
    row = tl.program_id(0).to(tl.int64)
    products += row * V
    v = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    if not HAS_CAP:
        largest -= 3e38  # not ∞: after the last logit, −∞ − (−∞) would be NaN
    elif not IS_SMALL:
        largest -= cap
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        y = tl.load(products + start + v, mask=start + v < V, other=0.0)
        if HAS_CAP:
            y = soft_cap(y, cap)
        y = tl.where(start + v < V, y, float("-inf"))
        if not IS_SMALL:
            before = largest
            largest = tl.maximum(largest, y)
            total *= tl.exp(before - largest)
        total += tl.exp(y - largest)
    top = tl.max(largest, 0)
    tl.store(log_sums + row, top + tl.log(tl.sum(total * tl.exp(largest - top), 0)))
    y_target = tl.load(products + tl.load(targets + row))
    if HAS_CAP:
        y_target = soft_cap(y_target, cap)
    tl.store(chosen + row, y_target)


@triton.jit
def gradients_kernel(
    products, targets, log_sums, grad, gradients, cap, V,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d log p(target) / d(x Wᵀ) · grad = (onehot − softmax) · (1 − tanh²) · grad.

    Without a cap there is no factor (1 − tanh²).
    """
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(products + row * V + v, mask=v < V, other=0.0)
    if HAS_CAP:
        y = soft_cap(y, cap)
    slope = tl.where(v == tl.load(targets + row), 1.0, 0.0) - tl.exp(y - tl.load(log_sums + row))
    if HAS_CAP:
        slope *= (1.0 - (y / cap) * (y / cap)) * tl.load(grad + row)
    else:
        slope *= tl.load(grad + row)
    tl.store(gradients + row * V + v, slope.to(gradients.dtype.element_ty), mask=v < V)


def log_sums(products: Tensor, targets: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """From float32 x Wᵀ [R, V]: the targets' logits and log Σ exp of each row, both [R]."""
    rows, V = products.shape
    chosen, sums = products.new_empty(2, rows).unbind()
    block = min(2048, triton.next_power_of_2(V))
    log_sums_kernel[(rows,)](
        products, targets.contiguous(), chosen, sums, cap or 1.0, V,
        HAS_CAP=cap is not None, IS_SMALL=cap is not None and cap <= 60, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return chosen, sums


def gradients(
    products: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    cap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of x Wᵀ [R, V], in `dtype`. `grad` [R] is that of the log-probabilities."""
    rows, V = products.shape
    out = torch.empty_like(products, dtype=dtype)
    block = min(4096, triton.next_power_of_2(V))
    gradients_kernel[(rows, triton.cdiv(V, block))](
        products, targets.contiguous(), log_sums, grad.contiguous(), out, cap or 1.0, V,
        HAS_CAP=cap is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return out
