"""Rows rounded to fp8, and their products with fp8 weights."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import CAP, DEVICE, DTYPES, EPS, LARGEST, assert_close, draw, weights
from torch import Tensor

from xlstm7b.generate.kernels import plain
from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.gpu import Fp8Rows, dequantize, prepare
from xlstm7b.quantize.weight import QuantizedWeight

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import fp8, gpu


def in_floats(rows: Fp8Rows, weight: QuantizedWeight) -> Tensor:
    """Rows in fp8 as float64, in the usual order of columns."""
    assert rows.codes.float().isfinite().all()  # also in the columns that fill up the last block
    shape = len(rows.codes), weight.shape[1]
    matrix = replace(weight, shape=shape, data=rows.codes.view(torch.int16), scale=rows.scale.mT)
    return dequantize(matrix, torch.float64)


def fp8_weight(n: int, k: int, dtype: torch.dtype) -> QuantizedWeight:
    return prepare(QuantizedWeight.quantize(weights(n, k, dtype), Scheme("fp8")))


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [37, 128, 300])
def test_rows_of_fp8_numbers_stay_as_they_are(k, dtype):
    """In the order of the weights. Triton's interpreter does not round to the nearest fp8."""
    x = draw(5, k, dtype=dtype, scale=50).to(torch.float8_e4m3fn).to(dtype)
    x[:, 7] = 448 * torch.tensor([1, -1, 2, 0.5, 4], device=DEVICE)
    weight = fp8_weight(16, k, dtype)
    assert torch.equal(in_floats(fp8.round_rows(x, weight), weight), x.double())


def assert_rounded(rows: Fp8Rows, weight: QuantizedWeight, want: Tensor) -> None:
    """To the nearest fp8 number: 3 bits after the first, and subnormal numbers in steps of 2⁻⁹.

    Triton's interpreter makes 64 of 127, where 128 is the nearest: it drops the carry. And it makes
    subnormal numbers 0. 1% is for the arithmetic before.
    """
    floats = in_floats(rows, weight)
    error, smallest = (floats - want).abs(), 2**-10
    if not torch.cuda.is_available():
        error, smallest = error.minimum((2 * floats - want).abs()), 2**-6
    assert (error <= (1 / 16 + 0.01) * want.abs() + smallest * rows.scale).all()
    largest = want.abs().amax(1, keepdim=True)
    assert ((448 * rows.scale - largest).abs() <= 0.01 * largest).all()


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [37, 128, 300] + [4096, 10944] * torch.cuda.is_available())
def test_norms_and_swiglu_that_round_to_fp8(k, dtype):
    x, norm, weight = draw(5, k, dtype=dtype), draw(k, dtype=dtype), fp8_weight(16, k, dtype)
    assert_rounded(fp8.round_rows(x, weight), weight, x.double())
    want = plain.rms_norm(x.double(), norm.double(), EPS)
    normed = torch.empty_like(x)
    for rows in (
        fp8.rms_norm_fp8(x, norm, EPS, weight),
        fp8.rms_norm_fp8(x, norm, EPS, weight, normed),
    ):
        assert_rounded(rows, weight, want)
    assert_close(normed, want, LARGEST[dtype])
    y = draw(5, 2 * k, dtype=dtype, scale=3)
    want = plain.silu_and_multiply(y.double())
    assert_rounded(fp8.silu_and_multiply_fp8(y, weight), weight, want)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "width"), [(3, 16), (3, 128), (2, 33)] + [(8, 512)] * torch.cuda.is_available()
)
def test_headwise_norm_that_rounds_to_fp8(heads, width, dtype):
    h = draw(5, heads, width, dtype=dtype) + 3
    weight, norm = fp8_weight(16, heads * width, dtype), draw(heads * width, dtype=dtype)
    gate = draw(5, 2 * heads * width, dtype=dtype)[:, : heads * width]
    want = plain.head_norm(h.double(), norm.double(), EPS, gate.double())
    assert_rounded(fp8.head_norm_fp8(h, norm, EPS, gate, weight), weight, want)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "n"), [(4096, 12288), (10944, 4096), (300, 48)])
def test_products_in_fp8(k, n):
    weight = fp8_weight(n, k, torch.bfloat16)
    x = draw(130, k, dtype=torch.bfloat16)
    assert fp8.has_fp8_product(weight, x)
    rows = fp8.round_rows(x, weight)
    want = in_floats(rows, weight) @ dequantize(weight, torch.float64).mT
    assert_close(fp8.multiply_fp8(rows, weight), want, 1e-2)


@pytest.mark.gpu
def test_operations_of_a_prompt_in_fp8():
    """The rows are rounded: 2.7% of a vector, and their products by as much."""
    d, up, heads, dtype = 512, 704, 4, torch.bfloat16
    x, norm = draw(130, d, dtype=dtype), 1 + draw(d, dtype=dtype, scale=0.3)
    shapes = {"qkv": (3 * d, d), "out": (d, d), "up": (2 * up, d), "down": (d, up)}
    matrices = {name: fp8_weight(*shape, dtype) for name, shape in shapes.items()}
    floats = {name: dequantize(W, torch.float64) for name, W in matrices.items()}
    gates = weights(4, d, dtype), draw(4, dtype=dtype)
    wide, wide_norm, wide_gates = x.double(), norm.double(), [part.double() for part in gates]
    got = gpu.project(x, norm, EPS, matrices["qkv"], *gates, CAP, None)
    want = plain.project(wide, wide_norm, EPS, floats["qkv"], *wide_gates, CAP, None)
    assert_close(got[0], want[0], 0.03)
    assert_close(got[1], want[1], 2e-2)  # the gates are not rounded to fp8
    h, gate = draw(130, heads, d // heads, dtype=dtype), draw(130, d, dtype=dtype)
    y = gpu.head_norm(h, norm, EPS, gate, matrices["out"])
    assert isinstance(y, Fp8Rows)
    gpu.add_product(x, y, matrices["out"])
    wide_y = plain.head_norm(h.double(), wide_norm, EPS, gate.double())
    plain.add_product(wide, wide_y, floats["out"])
    assert_close(x, wide, 0.03)
    wide = x.double()
    y = gpu.swiglu(x, norm, EPS, matrices["up"], matrices["down"])
    assert isinstance(y, Fp8Rows)
    gpu.add_product(x, y, matrices["down"])
    wide_y = plain.swiglu(wide, wide_norm, EPS, floats["up"])
    plain.add_product(wide, wide_y, floats["down"])
    assert_close(x, wide, 0.05)
