"""Products of one row, with everything that is computed on the way."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import DTYPES, LARGEST, OPTIONS, assert_close, multiply_both

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import one_row


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("k", "n", "tile"), [(32, 16, (4, 32, 1)), (37, 14, (4, 16, 1)), (100, 30, (8, 32, 2))]
)
def test_one_row(k, n, tile, option, dtype):
    default = one_row.tile_for(n, k, option == "swiglu")
    tile = replace(default, **dict(zip(("rows", "columns", "programs"), tile, strict=True)))
    product = multiply_both(one_row.multiply_row, 1, k, n, option, dtype, tile=tile)
    assert_close(*product, LARGEST[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("k", "n", "option"),
    [
        (4096, 12288, "gates"),
        (4096, 21888, "swiglu"),
        (10944, 4096, "residual"),
        (4096, 4096, "residual"),
        (2560, 50304, "cap"),
        (768, 2304, "not live"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_at_the_sizes_of_real_models(k, n, option, dtype):
    assert_close(*multiply_both(one_row.multiply_row, 1, k, n, option, dtype), LARGEST[dtype])
