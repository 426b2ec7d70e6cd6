"""The operations of generation on a GPU against the plain ones in float64."""

import inspect

import pytest
import torch
from kernel_cases import CAP, DEVICE, DTYPES, EPS, LARGEST, SCHEMES, assert_close, draw, weights
from measure import error
from torch import Tensor

from xlstm7b.generate.kernels import plain
from xlstm7b.mlstm import MLSTMState
from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.gpu import prepare
from xlstm7b.quantize.weight import QuantizedWeight

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import gpu


@pytest.mark.parametrize("name", gpu.__all__)
def test_both_forms_have_one_signature_and_description(name):
    ours, theirs = getattr(gpu, name), getattr(plain, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert inspect.getdoc(ours).splitlines()[0] == inspect.getdoc(theirs).splitlines()[0]


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * torch.cuda.is_available())
@pytest.mark.parametrize("batch", [1, 2, 17, 65] + [16, 64, 3000] * torch.cuda.is_available())
@pytest.mark.parametrize("scheme", [None, Scheme("int8"), Scheme("int4", 32)], ids=str)
def test_operations_equal_the_plain_ones(scheme, batch, dtype):
    """With the kernel and the tile that each number of rows uses."""
    d, up, largest = 64, 96, 2 * LARGEST[dtype]  # RMSNorm rounds its result

    def both(n: int, k: int) -> tuple[Tensor | QuantizedWeight, Tensor]:
        """A matrix, quantised or not, and the same in float64."""
        W = weights(n, k, dtype)
        if scheme is None:
            return W, W.double()
        weight = QuantizedWeight.quantize(W, scheme)
        return prepare(weight), weight.dequantize(torch.float64)

    x, norm = draw(batch, d, dtype=dtype), 1 + draw(d, dtype=dtype, scale=0.3)
    wide, wide_norm = x.double(), norm.double()
    W, wide_W = both(3 * d, d)
    gates = weights(4, d, dtype), draw(4, dtype=dtype)
    wide_gates = [part.double() for part in gates]
    some = torch.arange(batch, device=DEVICE) % 4 != 1
    for live, cap in ((None, CAP), (some, CAP), (some, None)):
        got = gpu.project(x, norm, EPS, W, *gates, cap, live)
        want = plain.project(wide, wide_norm, EPS, wide_W, *wide_gates, cap, live)
        assert [part.dtype for part in got] == [dtype, torch.float32]
        for part, want_part in zip(got, want, strict=True):
            assert_close(part, want_part, largest)
    matrices = {"swiglu": both(2 * up, d), "head": both(50, d)}
    for name, *cap in (("swiglu",), ("head", 5.0), ("head", None)):
        W, wide_W = matrices[name]
        got = getattr(gpu, name)(x, norm, EPS, W, *cap)
        want = getattr(plain, name)(wide, wide_norm, EPS, wide_W, *cap)
        assert got.dtype == (torch.float32 if name == "head" else dtype)
        assert_close(got, want, largest)
    y, (W, wide_W) = draw(batch, up, dtype=dtype), both(d, up)
    gpu.add_product(x, y, W)
    plain.add_product(wide, y.double(), wide_W)
    assert_close(x, wide, largest)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("scheme", [None, Scheme("int8")], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 17, 67])
def test_logits_of_live_rows(rows, scheme, cap, dtype):
    """Written in place; those of other rows stay as they were."""
    x, norm = draw(rows, 96, dtype=dtype), 1 + draw(96, dtype=dtype, scale=0.3)
    W = weights(51, 96, dtype)
    wide_W = W.double()
    if scheme is not None:
        weight = QuantizedWeight.quantize(W, scheme)
        W, wide_W = prepare(weight), weight.dequantize(torch.float64)
    for remainder in range(2):  # one row is live, then it is not
        live = torch.arange(rows, device=DEVICE) % 2 == remainder
        before = draw(rows + 1, 51, dtype=torch.float32)
        space = before.clone()
        got = gpu.head(x, norm, EPS, W, cap, space[:rows], live)
        assert got.data_ptr() == space.data_ptr()
        assert torch.equal(space[:rows][~live], before[:rows][~live])
        assert torch.equal(space[rows:], before[rows:])
        want = plain.head(x.double(), norm.double(), EPS, wide_W, cap, before[:rows].double(), live)
        assert_close(got, want, max(LARGEST[dtype], LARGEST[torch.float32]))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 8, 9, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_are_multiplied_for_few_rows(monkeypatch, dtype, batch, scheme):
    called = []
    for name in ("multiply_integers", "multiply_codes"):
        monkeypatch.setattr(gpu, name, lambda *_, name=name: (called.append(name), None))
    W = prepare(QuantizedWeight.quantize(weights(32, 256, dtype), scheme))
    gpu.multiply(draw(batch, 256, dtype=dtype), W)
    integers = dtype != torch.float32 and batch <= {"int4": 8, "int8": 1, "fp8": 0}[scheme.name]
    assert called == ["multiply_integers" if integers else "multiply_codes"]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 16, 33])
def test_quantised_operations_at_the_sizes_of_the_7b(batch):
    """With RMSNorm of vectors that are far from normalised, and the head, the largest matrix."""
    d, dtype = 4096, torch.bfloat16
    sizes = 10 ** torch.linspace(-2, 3, batch, device=DEVICE)[:, None]
    x, norm = draw(batch, d, dtype=dtype) * sizes.to(dtype), 1 + draw(d, dtype=dtype, scale=0.3)
    wide = x.double(), norm.double(), EPS
    W = QuantizedWeight.quantize(weights(50304, d, dtype), Scheme("int8"))
    want = plain.head(*wide, W.dequantize(torch.float64), 30.0)
    assert_close(gpu.head(x, norm, EPS, prepare(W), 30.0), want, 1e-2)
    W = QuantizedWeight.quantize(weights(12288, d, dtype), Scheme("int4", 64))
    gates = weights(16, d, dtype), draw(16, dtype=dtype)
    got = gpu.project(x, norm, EPS, prepare(W), *gates, CAP, None)
    wide_gates = [part.double() for part in gates]
    want = plain.project(*wide, W.dequantize(torch.float64), *wide_gates, CAP, None)
    for part, want_part in zip(got, want, strict=True):
        assert_close(part, want_part, 1e-2)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 5])
def test_step_cell_equals_the_plain_one(batch, dtype):
    """On a strided state, with q, k, v and gate as views of one projection; twice in a row."""
    heads, d_qk, d_hv = 3, 16, 33
    widths = [heads * d for d in (d_qk, d_qk, d_hv, d_hv)]
    sizes = heads, d_qk, d_hv
    buffers = [draw(batch, 2, *sizes[:dims], dtype=torch.float32) for dims in (3, 2, 1)]
    state = MLSTMState(*(buffer[:, 1] for buffer in buffers))
    want_state = MLSTMState(*(part.double() for part in state))
    other_block = [buffer[:, 0].clone() for buffer in buffers]
    norm = 1 + draw(heads * d_hv, dtype=dtype, scale=0.3)
    for _ in range(2):
        parts = draw(batch, sum(widths), dtype=dtype).split(widths, dim=-1)
        q, k, v, gate = (part.unflatten(-1, (heads, -1)) for part in parts)
        i, f = draw(batch, 2, heads, dtype=torch.float32, scale=3).unbind(1)
        arguments = q, k, v, i, f
        got = gpu.step_cell(*arguments, state, gate, norm, EPS, EPS)
        wide = [part.double() for part in arguments]
        want = plain.step_cell(*wide, want_state, gate.double(), norm.double(), EPS, EPS)
        assert got.dtype == dtype
        assert_close(got, want, 10 * LARGEST[torch.float32] + LARGEST[dtype])
        for part, want_part in zip(state, want_state, strict=True):
            assert error(part, want_part) < 1e-5
    assert all(map(torch.equal, (buffer[:, 0] for buffer in buffers), other_block))
