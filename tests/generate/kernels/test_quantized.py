"""Products with quantised weights that are decoded on the way, and decoding alone."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    DEVICE,
    DTYPES,
    INT4,
    LARGEST,
    OPTIONS,
    SCHEMES,
    assert_close,
    draw,
    multiply_both,
    weights,
)

from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.gpu import prepare
from xlstm7b.quantize.weight import QuantizedWeight

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import integers, quantized
from xlstm7b.generate.kernels.integers import IntegersTile, multiply_integers
from xlstm7b.quantize import kernels


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("option", OPTIONS)
@settings(max_examples=6)
@given(
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 64),
    groups=st.integers(1, 20),
    rest=st.integers(0, 15),
    half=st.integers(1, 40),
    rows=st.sampled_from([16, 32]),
    split=st.sampled_from([1, 2, 4, 8]),
    programs=st.integers(1, 3),
)
# Widths that fill no block, and more; fewer blocks than parts, and more.
@example(
    scheme=Scheme("int8"), dtype=DTYPES[0], batch=1, groups=18, rest=12,
    half=17, rows=16, split=2, programs=1,
)  # fmt: skip
@example(
    scheme=Scheme("fp8"), dtype=DTYPES[1], batch=5, groups=2, rest=5,
    half=17, rows=16, split=4, programs=1,
)  # fmt: skip
@example(
    scheme=Scheme("int4", 32), dtype=DTYPES[1], batch=17, groups=9, rest=0,
    half=17, rows=32, split=1, programs=2,
)  # fmt: skip
@example(
    scheme=Scheme("int4", 128), dtype=DTYPES[1], batch=64, groups=9, rest=0,
    half=17, rows=32, split=1, programs=2,
)  # fmt: skip
def test_quantised_rows_of_any_size_and_split(
    option, scheme, dtype, batch, groups, rest, half, rows, split, programs
):
    """A product's width is a number of groups, or any where the scheme has none."""
    k = groups * scheme.group_size if scheme.group_size else 16 * groups + rest
    tile = quantized.CodesTile(rows, split, 3, split=split, programs=programs)
    product = multiply_both(
        quantized.multiply_codes, batch, k, 2 * half, option, dtype, scheme, tile=tile
    )
    assert_close(*product, LARGEST[dtype])


@pytest.mark.usefixtures("_poison")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the compiler asks for which GPU it compiles")
@pytest.mark.parametrize("option", ["norm", "gates"])
@pytest.mark.parametrize(
    ("scheme", "batch"), [*((scheme, 5) for scheme in SCHEMES[:3]), (INT4[0], 1)], ids=str
)
def test_products_as_on_blackwell(scheme, batch, option, monkeypatch):
    asked = []
    for module in (quantized, integers):
        monkeypatch.setattr(module, "sums_apart", lambda: not asked.append(1))
    k = 9 * (scheme.group_size or 31)
    call, tile = quantized.multiply_codes, quantized.CodesTile(16, 4, 3, split=4)
    if batch == 1:
        call, tile = multiply_integers, IntegersTile(16, 2, 2)
    product = multiply_both(call, batch, k, 34, option, DTYPES[1], scheme, tile=tile)
    assert_close(*product, LARGEST[DTYPES[1]])
    assert asked


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("option", OPTIONS)
def test_rows_that_do_not_fit_the_shared_memory_at_once(option, monkeypatch):
    """As on GPUs with 99 KB. In float32 they are the operands of two launches."""
    launches, take_counters = [], quantized.take_counters
    monkeypatch.setattr(quantized, "shared_memory", lambda device: 99 * 1024)
    monkeypatch.setattr(
        quantized, "take_counters", lambda *args: launches.append(1) or take_counters(*args)
    )
    product = multiply_both(
        quantized.multiply_codes, 37, 512, 34, option, torch.float32, Scheme("int4", 128)
    )
    assert_close(*product, LARGEST[torch.float32])
    assert len(launches) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 16, 17, 64])
def test_quantised_rows_in_float32(batch):
    """The largest groups: the default tiles fit the shared memory."""
    product = multiply_both(
        quantized.multiply_codes, batch, 1024, 512, "norm", torch.float32, Scheme("int4", 128)
    )
    assert_close(*product, LARGEST[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 33])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantised_rows_are_the_same_in_every_run(scheme, batch):
    x = draw(batch, 4096, dtype=torch.bfloat16)
    W = prepare(QuantizedWeight.quantize(weights(4096, 4096, torch.bfloat16), scheme))
    first = quantized.multiply_codes(x, W)[0]
    for _ in range(20):
        assert torch.equal(quantized.multiply_codes(x, W)[0], first)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 9, 17, 33])
@pytest.mark.parametrize(
    ("k", "n", "option"),
    [
        (4096, 12288, "gates"),
        (4096, 21888, "swiglu"),
        (10944, 4096, "residual"),
        (256, 50304, "cap"),
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantised_products_at_the_sizes_of_real_models(scheme, k, n, option, batch):
    if k % 128 and scheme.group_size == 128:
        pytest.skip("10,944 is no multiple of 128")
    product = multiply_both(quantized.multiply_codes, batch, k, n, option, torch.bfloat16, scheme)
    assert_close(*product, 1e-2)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_quantised_matrix_is_dequantised(scheme, dtype):
    weight = QuantizedWeight.quantize(weights(37, 640, dtype), scheme)
    want = weight.dequantize(torch.float64).to(dtype)
    assert torch.equal(kernels.dequantize(prepare(weight), dtype), want)
