"""GPTQ: codes that keep a layer's outputs, not its weights, close to the original.

For inputs X the error of a row is (w − ŵ) H (w − ŵ)ᵀ with the Hessian H = XᵀX. Columns are rounded
one after the other. The error of each is made up for by the columns that are still floats: they get
the values that minimise the error of the row, given the codes so far (Frantar et al., 2023,
arXiv:2210.17323).
"""

import torch
from torch import Tensor

from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.weight import codes, nearest_scale, round_codes

_COLUMNS = 128  # that are rounded before the others are updated by one matrix product
_DAMPING = 0.01  # of the mean of H's diagonal, added to it


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    act_order: bool = False,
    damping: float = _DAMPING,
) -> tuple[Tensor, Tensor]:
    """Codes [N, K], as floats, and scales of a float32 matrix [N, K] for a Hessian [K, K].

    With `act_order` the columns with the largest inputs are rounded first. A scale is chosen before
    any column of its group is rounded, so the order needs no place in the file. No row is worse
    than by rounding to nearest: where it would be, it is rounded to nearest.
    """
    diagonal = hessian.diagonal()
    scale = nearest_scale(weight, scheme, importance=diagonal)
    order = torch.arange(len(hessian), device=weight.device)
    if act_order:
        order = diagonal.argsort(descending=True, stable=True)
    factor = _inverse_factor(hessian[order][:, order], damping)
    column_scale = scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)[:, order]
    left = weight[:, order]
    rounded = torch.empty_like(left)
    for start in range(0, left.shape[1], _COLUMNS):
        part = slice(start, min(start + _COLUMNS, left.shape[1]))
        errors = torch.empty_like(left[:, part])
        for column in range(part.start, part.stop):
            w, s = left[:, column], column_scale[:, column]
            rounded[:, column] = round_codes(w / s, scheme)
            error = (w - rounded[:, column] * s) / factor[column, column]
            left[:, column : part.stop] -= torch.outer(error, factor[column, column : part.stop])
            errors[:, column - start] = error
        left[:, part.stop :] -= errors @ factor[part, part.stop :]
    result = torch.empty_like(rounded)
    result[:, order] = rounded
    # Rows are independent of each other. Take the better of the two solutions for each.
    nearest = nearest_scale(weight, scheme)
    plain = codes(weight, nearest, scheme)
    worse = row_errors(weight, result, scale, hessian) > row_errors(weight, plain, nearest, hessian)
    return torch.where(worse[:, None], plain, result), torch.where(worse[:, None], nearest, scale)


def row_errors(weight: Tensor, values: Tensor, scale: Tensor, hessian: Tensor | None) -> Tensor:
    """(w − ŵ) H (w − ŵ)ᵀ of each row; without a Hessian, its squared error."""
    groups = values.unflatten(1, (scale.shape[1], -1)) * scale[..., None]
    difference = weight - groups.flatten(1)
    errors: Tensor = (difference if hessian is None else difference @ hessian) * difference
    return errors.sum(1)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of H⁻¹. More damping if H is too close to singular."""
    if not hessian.isfinite().all():  # a Cholesky decomposition of NaN succeeds on some CPUs
        raise ValueError("the model's activations on the calibration text are not finite")
    mean = float(hessian.diagonal().mean()) or 1.0
    while True:
        damped = hessian.double()  # always a copy: H is float32
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                factor: Tensor = upper.to(hessian.dtype)
                return factor
        damping *= 10
