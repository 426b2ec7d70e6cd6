"""GPTQ against solutions by brute force, and never worse than rounding to nearest."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.gptq import gptq, row_errors
from xlstm7b.quantize.weight import codes, nearest_scale, round_codes

SCHEMES = [Scheme("int8"), Scheme("fp8"), Scheme("int4", 32), Scheme("int4", 64)]


def case(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """A matrix, and the Hessian of correlated inputs."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=random)
    x = torch.randn(2 * columns, columns, generator=random) @ mixing
    return torch.randn(rows, columns, generator=random), x.mT @ x


@given(st.sampled_from(SCHEMES), st.integers(1, 9), st.integers(0, 99), st.booleans())
@settings(deadline=None, max_examples=40)
def test_no_row_is_worse_than_rounding_to_nearest(
    scheme: Scheme, rows: int, seed: int, act_order: bool
) -> None:
    weight, hessian = case(rows, 128 if scheme.group_size else 75, seed)
    values, scale = gptq(weight, hessian, scheme, act_order=act_order)
    assert torch.equal(values, round_codes(values, scheme))
    nearest = nearest_scale(weight, scheme)
    plain = row_errors(weight, codes(weight, nearest, scheme), nearest, hessian)
    assert (row_errors(weight, values, scale, hessian) <= plain * 1.0001).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_errors_of_correlated_inputs_shrink(scheme: Scheme) -> None:
    weight, hessian = case(32, 192, 0)
    values, scale = gptq(weight, hessian, scheme)
    nearest = nearest_scale(weight, scheme)
    plain = row_errors(weight, codes(weight, nearest, scheme), nearest, hessian).sum()
    assert row_errors(weight, values, scale, hessian).sum() < 0.6 * plain


def least_squares_rounding(
    weight: Tensor, hessian: Tensor, scale: Tensor, order: list[int]
) -> Tensor:
    """What GPTQ computes, by definition: after each column, solves for all that are left."""
    scheme, left = Scheme("int8"), weight.double().clone()
    done: list[int] = []
    values = torch.zeros_like(left)
    for column in order:
        values[:, column] = round_codes(left[:, column] / scale[:, 0], scheme)
        done.append(column)
        free = [other for other in order if other not in done]
        if free:
            error = weight[:, done].double() - values[:, done] * scale
            shift = torch.linalg.solve(hessian[free][:, free], hessian[free][:, done] @ error.mT)
            left[:, free] = weight[:, free].double() + shift.mT
    return values


@given(st.integers(2, 9), st.integers(0, 99), st.booleans())
@settings(deadline=None, max_examples=30)
def test_each_column_is_the_best_after_those_before_it(
    columns: int, seed: int, act_order: bool
) -> None:
    weight, hessian = case(4, columns, seed)
    hessian += hessian.diagonal().mean() * torch.eye(columns)
    weight *= 1e-2  # int8 with one scale: rounding matters where the scale is large
    weight[:, 0] = 1.0
    got, scale = gptq(weight, hessian, Scheme("int8"), act_order=act_order, damping=1e-9)
    order = [*range(columns)]
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    want = least_squares_rounding(weight, hessian.double(), scale.double(), order)
    nearest = codes(weight, scale, Scheme("int8")).double()
    for row in range(4):
        same = torch.equal(got[row].double(), want[row])
        assert same or torch.equal(got[row].double(), nearest[row])
        if not same:  # rounding to nearest was better, or as good
            pair = torch.stack([nearest[row], want[row]])
            errors = row_errors(
                weight[[row, row]].double(), pair, scale.double()[[row, row]], hessian.double()
            )
            assert errors[0] <= errors[1] * (1 + 1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_close_to_the_best_of_all_codes(seed: int) -> None:
    """Three columns, all codes around the weights: at most half of the gap to nearest is left."""
    weight, hessian = case(1, 3, seed)
    weight, scheme = weight * 0.03, Scheme("int8")
    weight[0, 0] = 1.0
    values, scale = gptq(weight, hessian, scheme)
    around = [
        [float(torch.floor(w / scale[0, 0])) + step for step in range(-3, 5)] for w in weight[0]
    ]
    every = torch.tensor([*itertools.product(*around)])
    errors = row_errors(weight.expand(len(every), 3), every, scale.expand(len(every), 1), hessian)
    best = float(errors.min())
    nearest = float(row_errors(weight, codes(weight, scale, scheme), scale, hessian))
    found = float(row_errors(weight, values, scale, hessian))
    assert best * 0.999 <= found <= nearest * 1.001


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    weight, _ = case(8, 64, 0)
    hessian = torch.diag(torch.rand(64) + 0.5)
    values, scale = gptq(weight, hessian, Scheme("int8"))
    assert torch.equal(values, codes(weight, scale, Scheme("int8")))


def test_inputs_that_are_always_zero() -> None:
    weight, hessian = case(8, 64, 0)
    hessian[5], hessian[:, 5] = 0, 0
    for matrix in (hessian, torch.zeros(64, 64)):
        values, scale = gptq(weight, matrix, Scheme("int4", 32))
        assert values.isfinite().all()
        assert scale.isfinite().all()


def test_inputs_that_are_not_finite() -> None:
    weight, hessian = case(8, 64, 0)
    hessian[0, 0] = torch.nan
    with pytest.raises(ValueError, match="are not finite"):
        gptq(weight, hessian, Scheme("int8"))
