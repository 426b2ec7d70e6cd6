"""Products of integers: rows of x in 8 bits and quantised weights."""

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
    assert_close,
    draw,
    multiply_both,
    weights,
)
from measure import error

from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.gpu import prepare
from xlstm7b.quantize.weight import QuantizedWeight

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels.integers import IntegersTile, multiply_integers

EDGE = IntegersTile(16, 2, 2, prefetch=64)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("option", OPTIONS)
@settings(max_examples=6)
@given(
    scheme=st.sampled_from([*INT4, Scheme("int8")]),
    batch=st.integers(1, 8),
    groups=st.integers(1, 20),
    rest=st.integers(0, 99),
    half=st.integers(1, 40),
    tile=st.builds(
        IntegersTile,
        st.sampled_from([16, 32]),
        st.sampled_from([2, 4, 8]),
        st.integers(1, 3),
        prefetch=st.sampled_from([0, 64, 512]),
    ),
)
# A width that does not fill its last block; fewer blocks than parts of a program.
@example(scheme=INT4[0], batch=1, groups=9, rest=0, half=17, tile=EDGE)
@example(scheme=INT4[1], batch=3, groups=9, rest=0, half=17, tile=EDGE)
@example(scheme=INT4[2], batch=8, groups=9, rest=0, half=17, tile=EDGE)
@example(scheme=Scheme("int8"), batch=1, groups=2, rest=79, half=17, tile=EDGE)
def test_integers_of_any_size_and_tile(option, scheme, batch, groups, rest, half, tile):
    """A product's width is a number of groups, or any with int8, which takes one row."""
    k, rows = groups * scheme.group_size, batch
    if not scheme.group_size:
        k, rows = 100 * groups + rest, 1
    product = multiply_both(
        multiply_integers, rows, k, 2 * half, option, DTYPES[1], scheme, tile=tile
    )
    assert_close(*product, LARGEST[DTYPES[1]])


INTEGERS = [*((scheme, batch) for scheme in INT4 for batch in (1, 3, 8)), (Scheme("int8"), 1)]


@pytest.mark.parametrize(("scheme", "batch"), INTEGERS, ids=str)
def test_integers_lose_less_than_rounding_to_bfloat16(scheme, batch):
    """Also where a few columns of x are a hundred times larger than the others."""
    x, W = torch.randn(batch, 1024, device=DEVICE), weights(64, 1024, torch.float32)
    x[:, ::100] *= 100
    weight = QuantizedWeight.quantize(W, scheme)
    wide_W = weight.dequantize(torch.float64)
    x = x.to(DTYPES[1])
    tile = IntegersTile(16, 4)
    got = multiply_integers(x, prepare(weight), out_dtype=torch.float32, tile=tile)[0]
    want = x.double() @ wide_W.mT
    assert error(got, want) < 0.2 * error(want.bfloat16(), want)


@pytest.mark.parametrize(
    ("scheme", "batch"), [(INT4[1], 1), (INT4[1], 3), (Scheme("int8"), 1)], ids=str
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_integers_keep_what_is_not_a_number(bad, scheme, batch):
    """In its own row: the others have nothing of it."""
    W = prepare(QuantizedWeight.quantize(weights(32, 512, DTYPES[1]), scheme))
    x = torch.zeros(batch, 512, dtype=DTYPES[1], device=DEVICE)
    assert not multiply_integers(x, W)[0].any()
    x[0, 300] = bad
    got = multiply_integers(x, W)[0]
    assert not got[0].isfinite().any()
    assert not got[1:].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("k", "n", "option"),
    [
        (4096, 12288, "gates"),
        (4096, 4096, "residual"),
        (4096, 21888, "swiglu"),
        (10944, 4096, "residual"),
        (256, 50304, "cap"),
        (4096, 4090, "norm"),
    ],
)
@pytest.mark.parametrize("scheme", [*INT4, Scheme("int8")], ids=str)
def test_integers_at_the_sizes_of_real_models(scheme, k, n, option):
    if k % 128 and scheme.group_size == 128:
        pytest.skip("10,944 is no multiple of 128")
    # In one process: the same kernel is compiled once.
    for batch in range(1, 9 if scheme.group_size else 2):
        product = multiply_both(multiply_integers, batch, k, n, option, torch.bfloat16, scheme)
        assert_close(*product, 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("scheme", "batch"), [(INT4[1], 1), (INT4[1], 8), (Scheme("int8"), 1)], ids=str
)
def test_integers_are_the_same_in_every_run(scheme, batch):
    x = draw(batch, 4096, dtype=torch.bfloat16)
    W = prepare(QuantizedWeight.quantize(weights(4096, 4096, torch.bfloat16), scheme))
    first = multiply_integers(x, W)[0]
    for _ in range(20):
        assert torch.equal(multiply_integers(x, W)[0], first)
