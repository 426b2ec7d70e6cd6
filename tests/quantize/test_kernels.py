"""The assembly that takes codes apart, on all words, and as before Hopper. Products: see `gpu`."""

import numpy as np
import ptx
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import integers
from xlstm7b.quantize import kernels

WORDS = np.arange(1 << 16, dtype=np.uint16)
BYTES = WORDS.view(np.uint8).reshape(-1, 2)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    monkeypatch.setattr(kernels.tl, "inline_asm_elementwise", ptx.inline_asm_elementwise)


@pytest.mark.parametrize("on_hopper", [True, False])
def test_int4_codes_in_assembly(on_hopper, monkeypatch):
    monkeypatch.setattr(kernels, "cuda_capability_geq", lambda major, minor: on_hopper)
    for place, decoded in enumerate(kernels.decode_int4.fn(WORDS, None, True)):
        codes = (WORDS >> (4 * place) & 15).astype(np.float32)
        assert (ptx.floats(decoded) == 128 + codes).all()
        numbers = kernels.centre_int4.fn(decoded, True)
        assert (ptx.floats(numbers) == codes - 8).all()
        assert not (numbers == 0x8000).any()  # no zero is negative


def test_int8_codes_in_assembly():
    for place, decoded in enumerate(kernels.decode_bytes.fn(WORDS, "int8", None, True)):
        assert (ptx.floats(decoded) == BYTES[:, place].view(np.int8)).all()


def test_fp8_codes_in_assembly():
    """Every number has its sign, zeros too. Two codes are NaN, which no weight has."""
    for place, decoded in enumerate(kernels.decode_bytes.fn(WORDS, "fp8", None, True)):
        codes = torch.from_numpy(BYTES[:, place].copy()).view(torch.float8_e4m3fn)
        bits = codes.bfloat16().view(torch.int16).numpy().view(np.uint16)
        is_number = (BYTES[:, place] & 127) != 127
        assert (decoded == bits)[is_number].all()


def test_int4_codes_as_integers_in_assembly():
    low, high = integers._decode.fn(BYTES.reshape(-1), True)
    assert (low == (BYTES.reshape(-1) & 15)).all()
    assert (high.view(np.int8) == 16 * ((BYTES.reshape(-1) >> 4).astype(np.int8) - 8)).all()
