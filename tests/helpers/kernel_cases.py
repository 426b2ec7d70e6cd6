"""Inputs of kernels, what their products must be, and how far they may be off.

Without a GPU the kernels run in Triton's interpreter. The oracle (`generate/kernels/plain.py`) gets
the same rounded inputs, so the measured errors are the kernels' own.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.generate.kernels import plain
from xlstm7b.model.layers import soft_cap
from xlstm7b.quantize.config import GROUP_SIZES, Scheme
from xlstm7b.quantize.gpu import prepare
from xlstm7b.quantize.weight import QuantizedWeight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter computes bfloat16 wrongly: it is tested on GPUs only.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
LARGEST = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS, CAP = 1e-6, 15.0
GUARD = 256  # NaNs after the last element of a tensor from `draw`
SCHEMES = [Scheme("int8"), Scheme("fp8"), *(Scheme("int4", size) for size in GROUP_SIZES)]
INT4 = [Scheme("int4", size) for size in GROUP_SIZES]
OPTIONS = ["product", "norm", "gates", "uncapped", "not live", "swiglu", "residual", "cap"]


def fill_new_memory_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that a kernel does not write are then NaN in its result."""
    empty = torch.empty

    def poisoned(*shape, **options):
        new = empty(*shape, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch, "empty", poisoned)


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random numbers followed by NaNs in memory: a kernel that reads too far returns NaN."""
    numbers = torch.randn(shape, device=DEVICE) * scale
    return F.pad(numbers.flatten(), (0, GUARD), value=torch.nan).to(dtype)[:-GUARD].view(shape)


def weights(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return draw(n, k, dtype=dtype, scale=2 * k**-0.5)


def assert_close(got: Tensor, want: Tensor, largest: float) -> None:
    """Relative error row by row; infinities are in the same positions."""
    assert got.shape == want.shape
    got, infinite = got.double(), want.isinf()
    assert torch.equal(got[infinite], want[infinite])
    got, want = got.masked_fill(infinite, 0), want.masked_fill(infinite, 0)
    sizes = want.norm(dim=-1)
    assert ((got - want).norm(dim=-1) <= largest * (sizes + sizes.mean())).all()


def multiply_both(
    multiply, batch: int, k: int, n: int, option: str, dtype, scheme: Scheme | None = None, **tile
):
    """A kernel's product with one option, and the same in float64."""
    x, W = draw(batch, k, dtype=dtype), weights(n, k, dtype)
    wide, wide_W = x.double(), W.double()
    if scheme is not None:
        weight = QuantizedWeight.quantize(W, scheme)
        W, wide_W = prepare(weight), weight.dequantize(torch.float64)
    if option == "swiglu":
        gate, up = (wide @ wide_W.mT).chunk(2, -1)
        return multiply(x, W, swiglu=True, **tile)[0], F.silu(gate) * up
    want = wide @ wide_W.mT
    if option == "norm":
        norm = 1 + draw(k, dtype=dtype, scale=0.3)
        want = plain.rms_norm(wide, norm.double(), EPS) @ wide_W.mT
        return multiply(x, W, norm=norm, eps=EPS, **tile)[0], want
    if option == "residual":
        residual = draw(batch, n, dtype=dtype)
        want += residual.double()
        multiply(x, W, residual=residual, **tile)
        return residual, want
    if option == "cap":
        got = multiply(x, W, cap=2.0, out_dtype=torch.float32, **tile)[0]
        return got, 2 * torch.tanh(want / 2)
    if option == "product":
        return multiply(x, W, **tile)[0], want
    W_gates, bias = weights(6, k, dtype), draw(6, dtype=dtype, scale=3)
    live = torch.arange(batch, device=DEVICE) % 3 >= 2 * (option == "not live")
    cap = None if option == "uncapped" else CAP
    got, gates = multiply(x, W, gates=(W_gates, bias), live=live, cap=cap, **tile)
    assert gates.dtype == torch.float32
    want_gates = soft_cap(wide @ W_gates.double().mT + bias.double(), cap)
    want_gates[~live, :3], want_gates[~live, 3:] = -torch.inf, torch.inf
    # Gates are summed and returned in float32 for every dtype. Tensor cores drop a few digits.
    assert_close(gates, want_gates, 1e-5 + 1e-8 * k)
    return got, want
