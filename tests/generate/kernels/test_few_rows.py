"""Products of up to 64 rows, with everything that is computed on the way."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import DTYPES, LARGEST, OPTIONS, assert_close, multiply_both

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import few_rows


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("batch", "k", "n", "tile"),
    [(5, 37, 22, (16, 16)), (17, 100, 34, (32, 64)), (64, 48, 2, (16, 64))],
)
def test_few_rows(batch, k, n, tile, option, dtype):
    tile = replace(
        few_rows.tile_for(batch, n, dtype, option == "swiglu"), rows=tile[0], columns=tile[1]
    )
    product = multiply_both(few_rows.multiply_rows, batch, k, n, option, dtype, tile=tile)
    assert_close(*product, LARGEST[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [2, 16, 17, 64])
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
def test_products_at_the_sizes_of_real_models(batch, k, n, option, dtype):
    assert_close(*multiply_both(few_rows.multiply_rows, batch, k, n, option, dtype), LARGEST[dtype])
