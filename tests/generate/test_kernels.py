"""The operations of generation on a GPU against the plain ones in float64.

Without a GPU the kernels run in Triton's interpreter. The oracle (`plain.py`) gets the same rounded
inputs, so the measured errors are the kernels' own.
"""

import copy
import gc
import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, SamplingParams, SavedState
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.kernels import plain
from xlstm7b.generate.runner import ModelRunner, PrefillRow, Results
from xlstm7b.generate.sampler import Sampler
from xlstm7b.mlstm import MLSTMState
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.model.layers import soft_cap
from xlstm7b.quantize.config import GROUP_SIZES, Scheme
from xlstm7b.quantize.gpu import Fp8Rows, dequantize, prepare
from xlstm7b.quantize.weight import QuantizedWeight
from xlstm7b.tokenizer import ByteTokenizer

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import few_rows, fp8, gpu, integers, one_row, pointwise, quantized
from xlstm7b.generate.kernels.integers import IntegersTile, multiply_integers
from xlstm7b.quantize import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter computes bfloat16 wrongly: it is tested on GPUs only.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
LARGEST = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS, CAP = 1e-6, 15.0
GUARD = 256  # NaNs after the last element of a tensor from `draw`
on_gpu = pytest.mark.gpu


def fill_new_memory_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that a kernel does not write are then NaN in its result."""
    empty = torch.empty

    def poisoned(*shape, **options):
        new = empty(*shape, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def _poison(monkeypatch):
    fill_new_memory_with_nan(monkeypatch)


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


@pytest.mark.parametrize("name", gpu.__all__)
def test_both_forms_have_one_signature_and_description(name):
    ours, theirs = getattr(gpu, name), getattr(plain, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert inspect.getdoc(ours).splitlines()[0] == inspect.getdoc(theirs).splitlines()[0]


# Products

OPTIONS = ["product", "norm", "gates", "uncapped", "not live", "swiglu", "residual", "cap"]


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


@on_gpu
@pytest.mark.parametrize("batch", [1, 2, 16, 17, 64])
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
    multiply = one_row.multiply_row if batch == 1 else few_rows.multiply_rows
    assert_close(*multiply_both(multiply, batch, k, n, option, dtype), LARGEST[dtype])


SCHEMES = [Scheme("int8"), Scheme("fp8"), *(Scheme("int4", size) for size in GROUP_SIZES)]


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "split", "option"),
    [
        *((*case, option) for case in [(1, 2), (5, 4), (17, 1)] for option in OPTIONS),
        *((64, 1, option) for option in ("not live", "swiglu")),
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantised_rows(scheme, batch, split, option, dtype):
    """Widths that fill no block, and more; fewer blocks than parts, and more."""
    k = {"int8": 300, "fp8": 37}.get(scheme.name, 9 * (scheme.group_size or 0))
    rows, programs = (16, 1) if batch < 17 else (32, 2)
    tile = quantized.CodesTile(rows, split, 3, split=split, programs=programs)
    product = multiply_both(
        quantized.multiply_codes, batch, k, 34, option, dtype, scheme, tile=tile
    )
    assert_close(*product, LARGEST[dtype])


@pytest.mark.usefixtures("_poison")
@settings(max_examples=40)
@given(st.data())
def test_quantised_rows_of_any_size_and_split(data):
    def pick(*choices):
        return data.draw(st.sampled_from(choices))

    scheme, option, split = pick(*SCHEMES), pick(*OPTIONS), pick(1, 2, 4, 8)
    batch, rows = data.draw(st.integers(1, 64)), pick(16, 32)
    n, groups = 2 * data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))
    k = (
        groups * scheme.group_size
        if scheme.group_size
        else 16 * groups + data.draw(st.integers(0, 15))
    )
    tile = quantized.CodesTile(rows, split, 3, split=split, programs=pick(1, 2, 3))
    product = multiply_both(
        quantized.multiply_codes, batch, k, n, option, torch.float32, scheme, tile=tile
    )
    assert_close(*product, LARGEST[torch.float32])


@on_gpu
@pytest.mark.parametrize("batch", [1, 16, 17, 64])
def test_quantised_rows_in_float32(batch):
    """The largest groups: the default tiles fit the shared memory."""
    product = multiply_both(
        quantized.multiply_codes, batch, 1024, 512, "norm", torch.float32, Scheme("int4", 128)
    )
    assert_close(*product, LARGEST[torch.float32])


@on_gpu
@pytest.mark.parametrize("batch", [1, 8, 33])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantised_rows_are_the_same_in_every_run(scheme, batch):
    x = draw(batch, 4096, dtype=torch.bfloat16)
    W = prepare(QuantizedWeight.quantize(weights(4096, 4096, torch.bfloat16), scheme))
    first = quantized.multiply_codes(x, W)[0]
    for _ in range(20):
        assert torch.equal(quantized.multiply_codes(x, W)[0], first)


INT4 = [Scheme("int4", size) for size in GROUP_SIZES]
INTEGERS = [*((scheme, batch) for scheme in INT4 for batch in (1, 3, 8)), (Scheme("int8"), 1)]


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("scheme", "batch"), INTEGERS, ids=str)
def test_integers(scheme, batch, option):
    """A width that does not fill its last block; fewer blocks than parts of a program."""
    k, tile = 9 * (scheme.group_size or 31), IntegersTile(16, 2, 2, prefetch=64)
    product = multiply_both(multiply_integers, batch, k, 34, option, DTYPES[1], scheme, tile=tile)
    assert_close(*product, LARGEST[DTYPES[1]])


@pytest.mark.usefixtures("_poison")
@settings(max_examples=40)
@given(st.data())
def test_integers_of_any_size_and_tile(data):
    scheme = data.draw(st.sampled_from([*INT4, Scheme("int8")]))
    option = data.draw(st.sampled_from(OPTIONS))
    batch = data.draw(st.integers(1, 8)) if scheme.group_size else 1
    widths = st.integers(1, 2000)
    if scheme.group_size:
        widths = st.integers(1, 20).map(lambda groups: groups * scheme.group_size)
    k = data.draw(widths)
    n = 2 * data.draw(st.integers(1, 40))
    choices = (16, 32), (2, 4, 8), (1, 2, 3), (None,), (0, 512)
    tile = IntegersTile(*(data.draw(st.sampled_from(each)) for each in choices))
    product = multiply_both(multiply_integers, batch, k, n, option, DTYPES[1], scheme, tile=tile)
    assert_close(*product, LARGEST[DTYPES[1]])


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


@on_gpu
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


@on_gpu
@pytest.mark.parametrize(
    ("scheme", "batch"), [(INT4[1], 1), (INT4[1], 8), (Scheme("int8"), 1)], ids=str
)
def test_integers_are_the_same_in_every_run(scheme, batch):
    x = draw(batch, 4096, dtype=torch.bfloat16)
    W = prepare(QuantizedWeight.quantize(weights(4096, 4096, torch.bfloat16), scheme))
    first = multiply_integers(x, W)[0]
    for _ in range(20):
        assert torch.equal(multiply_integers(x, W)[0], first)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_quantised_matrix_is_dequantised(scheme, dtype):
    weight = QuantizedWeight.quantize(weights(37, 640, dtype), scheme)
    want = weight.dequantize(torch.float64).to(dtype)
    assert torch.equal(kernels.dequantize(prepare(weight), dtype), want)


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


@on_gpu
@pytest.mark.parametrize(("k", "n"), [(4096, 12288), (10944, 4096), (300, 48)])
def test_products_in_fp8(k, n):
    weight = fp8_weight(n, k, torch.bfloat16)
    x = draw(130, k, dtype=torch.bfloat16)
    assert fp8.has_fp8_product(weight, x)
    rows = fp8.round_rows(x, weight)
    want = in_floats(rows, weight) @ dequantize(weight, torch.float64).mT
    assert_close(fp8.multiply_fp8(rows, weight), want, 1e-2)


@on_gpu
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


@on_gpu
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


@on_gpu
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


# The cell


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


# Norms, soft-caps and gates


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 17, 80])
def test_norms_of_strided_rows(width, dtype):
    heads, count = 3, 5
    wide = draw(count, 4 * heads * width, dtype=dtype)
    x, weight = wide[:, : heads * width], draw(heads * width, dtype=dtype)
    got = pointwise.rms_norm(x, weight, EPS)
    assert_close(got, plain.rms_norm(x.double(), weight.double(), EPS), LARGEST[dtype])
    h = draw(count, heads, width, dtype=dtype, scale=0.1) + 3  # the norm must subtract the mean
    gate = wide[:, heads * width : 2 * heads * width]
    got = gpu.head_norm(h, weight, EPS, gate)
    want = plain.head_norm(h.double(), weight.double(), EPS, gate.double())
    assert_close(got, want, 10 * LARGEST[torch.float32] + LARGEST[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (7, 683), (70, 2048)])
def test_embeddings(count, width, dtype):
    table = draw(11, 2 * width, dtype=dtype)[:, :width]
    tokens = (torch.arange(2 * count, device=DEVICE) % 13 - 2)[::2]  # with gaps
    want = plain.embed(tokens, table)
    assert torch.equal(gpu.embed(tokens, table), want)
    for seen in (None, torch.arange(count, device=DEVICE)):
        x, live = gpu.embed_live(tokens, table, seen)
        assert torch.equal(x, want)
        assert live.tolist() == (tokens >= 0).tolist()
    assert seen.tolist() == (torch.arange(count, device=DEVICE) + live).tolist()


@pytest.mark.parametrize(("rows", "length"), [(1, 2), (3, 1), (5, 16), (2, 9)])
def test_tokens_of_a_pass(rows, length):
    numbers = torch.arange(rows * 17, device=DEVICE).view(rows, 17)
    drafts = torch.where(numbers % 5 < 3, numbers, -1)[:, : length - 1]
    pending = torch.arange(rows, device=DEVICE) - 1
    got, want = (path.pass_tokens(pending, drafts) for path in (gpu, plain))
    assert [*map(torch.Tensor.tolist, got)] == [*map(torch.Tensor.tolist, want)]


@pytest.mark.parametrize(("rows", "length", "width"), [(1, 1, 1), (5, 1, 4096), (6, 9, 5001)])
def test_kept_logits(rows, length, width):
    logits = draw(rows, length, width, dtype=torch.float32)
    before = draw(rows, width, dtype=torch.float32)
    room = draw(rows, length + 2, width, dtype=torch.float32)
    kept = torch.arange(rows, device=DEVICE) * 2 % (length + 1)
    for number in (kept, kept > 0) if length == 1 else (kept,):
        last, expected = before.clone(), before.clone()
        gpu.keep_logits(logits, number, last)
        plain.keep_logits(logits, number, expected)
        assert torch.equal(last, expected)
        spaces = room.clone(), room.clone()
        gpu.keep_logits(logits, number, last, spaces[0][:, :length])
        plain.keep_logits(logits, number, expected, spaces[1][:, :length])
        assert torch.equal(last, expected)
        assert torch.equal(*spaces)


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


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 7), (5, 683), (2, 2048)])
def test_silu_and_multiply(count, width, dtype):
    x = draw(count, 2 * width, dtype=dtype, scale=4)
    gate, up = x.double().chunk(2, -1)
    assert_close(pointwise.silu_and_multiply(x), F.silu(gate) * up, LARGEST[dtype])


def test_soft_cap_is_precise_for_small_and_large_inputs():
    """Tiny inputs come out unchanged, huge ones as the cap; in between, element by element."""
    sizes = torch.logspace(-30, 30, 1201, dtype=torch.float64)
    sizes = torch.cat([sizes, torch.linspace(0.5, 1, 300), torch.linspace(0, 90, 300)]).float()
    signs, bias = torch.tensor([[1.0], [-1.0]], device=DEVICE), torch.zeros(2, device=DEVICE)
    gates = pointwise.gate_product(sizes[:, None].to(DEVICE), signs, bias, CAP, None)
    want = CAP * torch.tanh(torch.stack([sizes, -sizes], dim=-1).to(DEVICE).double() / CAP)
    off = (gates.double() - want).abs() / want.abs().clamp(min=1e-300)
    assert float(off.max()) < 1e-5
    assert gates.abs().max() == CAP


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "heads"), [(1, 7, 1), (17, 512, 3), (65, 700, 8), (33, 130, 11), (5, 64, 32)]
)
def test_gates_of_many_rows(rows, width, heads, dtype):
    x, bias = draw(rows, width, dtype=dtype), draw(2 * heads, dtype=dtype)
    W, live = draw(2 * heads, width, dtype=dtype), torch.arange(rows, device=DEVICE) % 7 < 4
    for cap, mask in ((CAP, live), (None, None)):
        want = x.double() @ W.double().mT + bias.double()
        want = want if cap is None else cap * torch.tanh(want / cap)
        got = pointwise.gate_product(x, W, bias, cap, mask)
        kept = live if mask is not None else slice(None)
        assert error(got[kept], want[kept]) < 2e-6
        if mask is not None:
            assert (got[~live, :heads] == -torch.inf).all()
            assert (got[~live, heads:] == torch.inf).all()


# States of slots


def check_slot_states(
    slots: list[int], count: int, blocks: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Gathers from and scatters to these of `count` slots; the last slot is the spare one.

    A buffer [slots, blocks, …] holds all blocks, so the states of one block are a strided view.
    Only the spare slot may be repeated in `slots`.
    """
    buffers = [draw(count, blocks, *sizes[:dims], dtype=dtype) for dims in (3, 2, 1)]
    index, spare = torch.tensor(slots, device=DEVICE), count - 1
    is_spare = index == spare
    for block in range(blocks):
        states = MLSTMState(*(buffer[:, block] for buffer in buffers))
        gathered, want = gpu.gather_states(states, index), plain.gather_states(states, index)
        for part, want_part in zip(gathered, want, strict=True):
            assert part.dtype == dtype
            assert part.is_contiguous()
            assert torch.equal(part, want_part)

        # The cell returns float32, whatever dtype the slots have.
        batch = MLSTMState(*(draw(*part.shape, dtype=torch.float32) for part in gathered))
        want_buffers = [buffer.clone() for buffer in buffers]
        want_states = MLSTMState(*(buffer[:, block] for buffer in want_buffers))
        plain.scatter_states(batch, want_states, index)
        gpu.scatter_states(batch, states, index)
        for buffer, want_buffer, rows in zip(buffers, want_buffers, batch, strict=True):
            if is_spare.sum() > 1:  # each element comes from one of the spare slot's rows
                candidates = rows[is_spare].to(dtype)
                assert (buffer[spare, block] == candidates).any(0).all()
                want_buffer[spare, block] = buffer[spare, block]
            assert torch.equal(buffer, want_buffer)  # other slots and blocks are unchanged
            after = buffer.as_strided((GUARD,), (1,), buffer.numel())
            assert after.isnan().all()


odd = st.integers(0, 20).map(lambda n: 2 * n + 1)


@st.composite
def chosen_slots(draw_from) -> tuple[list[int], int]:
    """Slots in any order, the spare one any number of times; and how many slots there are."""
    count = draw_from(st.integers(2, 7))
    used = draw_from(st.lists(st.integers(0, count - 2), unique=True))
    spares = draw_from(st.integers(0 if used else 1, 3))
    return draw_from(st.permutations([*used, *[count - 1] * spares])), count


@settings(max_examples=40)
@given(chosen_slots(), st.integers(1, 3), st.tuples(odd, odd, odd), st.sampled_from(DTYPES))
def test_states_of_any_slots(chosen, blocks, sizes, dtype):
    with pytest.MonkeyPatch.context() as patch:
        fill_new_memory_with_nan(patch)
        check_slot_states(*chosen, blocks, sizes, dtype)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (2, 32, 64), (3, 37, 37), (5, 821, 1), (4099, 1, 1)],
    ids=["one element", "one whole block", "C over two blocks", "n over two", "m over two"],
)
def test_states_of_slots_at_the_edges_of_blocks(sizes, dtype):
    check_slot_states([4, 0, 4, 2], 5, 2, sizes, dtype)


@on_gpu
@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("blocks", "sizes"), [(3, (8, 256, 512)), (2, (4, 96, 192)), (2, (5, 129, 257))]
)
def test_states_of_slots_on_a_gpu(blocks, sizes, dtype):
    check_slot_states([6, 2, 8, 0, 8, 5, 8], 9, blocks, sizes, dtype)


# A whole model on a GPU, in CUDA graphs


@pytest.fixture(scope="module")
def models() -> tuple[XLSTM, XLSTM]:
    """float32 on the CPU, and the same weights in bfloat16 on the GPU."""
    torch.manual_seed(0)
    model = XLSTM(ModelConfig(256, 2, 4, vocab_size=320))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name:
                parameter += 0.02 * torch.randn_like(parameter)
            parameter.copy_(parameter.bfloat16())
    rounded = copy.deepcopy(model).to("cuda", torch.bfloat16)
    FusedModel(rounded)  # stacks the weights now, so that they do not move later
    return model, rounded


def assert_same_state(got: ModelState, want: ModelState) -> None:
    assert got.tokens_seen.tolist() == want.tokens_seen.tolist()
    for block, want_block in zip(got.blocks, want.blocks, strict=True):
        for part, want_part in zip(block, want_block, strict=True):
            assert error(part.cpu(), want_part.cpu()) < 3e-2


def tensors(state: ModelState) -> list[Tensor]:
    return [*(part for block in state.blocks for part in block), state.tokens_seen]


def saved(runner: ModelRunner) -> SavedState:
    """The states and logits of all slots."""
    return SavedState.cat([runner.saved(slot) for slot in range(runner.slots)])


def started(fused: FusedModel, batch: int, params: SamplingParams) -> tuple[ModelRunner, Results]:
    """A runner whose slot s has read 39 − s tokens, and the first tokens drawn."""
    runner = ModelRunner(fused, batch)
    runner.prefill([PrefillRow(slot, [*range(1, 40 - slot)]) for slot in range(batch)])
    for slot in range(batch):
        runner.start(slot, params, seed=slot)
    return runner, runner.sample(range(batch))


@on_gpu
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_graphs_decode_as_eager_calls_do(models, batch, temperature):
    fused = FusedModel(models[1])
    params = SamplingParams(temperature=temperature, max_new_tokens=1000)
    runner, results = started(fused, batch, params)
    eager = saved(runner).clone()
    state, logits, sampler = eager.model_state, eager.logits, Sampler(batch, 320, fused.device)
    for row in range(batch):
        sampler.set_row(row, params, seed=row)
    sampler(logits, sampler.needs)
    for _ in range(20):
        assert torch.equal(saved(runner).logits, logits)
        assert results.lists() == [sampler.tokens.tolist()]
        results = runner.decode(batch - 1)
        logits = fused.step(sampler.pending, state)
        sampler(logits, sampler.needs)
    after = saved(runner)
    assert after.tokens_seen == [59 - row for row in range(batch)]
    assert all(map(torch.equal, tensors(after.model_state), tensors(state)))


@on_gpu
@torch.inference_mode()
def test_prefill_through_padded_graphs(models):
    """In one runner, so that graphs and the memory they share are used again."""
    runner = ModelRunner(FusedModel(models[1]), 1)
    for length in (1, 63, 64, 65, 700, 4096, 5000, 64, 700):
        prompt = torch.randint(0, 320, (1, length))
        runner.load(0, None)
        runner.prefill([PrefillRow(0, prompt[0].tolist())])
        want, state = models[0](prompt, logits="last")
        after = runner.saved(0)
        assert error(after.logits.cpu(), want) < 3e-2, length
        assert_same_state(after.model_state, state)


@on_gpu
@torch.inference_mode()
def test_prefill_of_several_slots_through_padded_graphs(models):
    """Prompts on top of each other, in slots in any order; the other slots do not change."""
    runner = ModelRunner(FusedModel(models[1]), 7)
    texts: list[list[int]] = [[] for _ in range(7)]
    for lengths in ({3: 70, 0: 5, 5: 64}, {5: 1, 2: 1}, {6: 500, 5: 2}, {2: 900, 3: 1500, 0: 3}):
        before, rows = saved(runner), []
        for slot, length in lengths.items():
            tokens = torch.randint(0, 320, (length,)).tolist()
            rows.append(PrefillRow(slot, tokens))
            texts[slot] = texts[slot] + tokens
        runner.prefill(rows)
        after = saved(runner)
        for slot, text in enumerate(texts):
            if slot not in lengths:
                same = after.select([slot]), before.select([slot])
                assert torch.equal(*(one.logits for one in same))
                assert all(map(torch.equal, *(tensors(one.model_state) for one in same)))
                continue
            want, state = models[0](torch.tensor([text]), logits="last")
            assert error(after.logits[slot].cpu(), want[0]) < 3e-2
            assert_same_state(after.model_state.select([slot]), state)


@on_gpu
def test_ragged_prompts_alone_and_in_a_batch(models):
    """A prompt's state does not depend on the other prompts, up to bfloat16's rounding."""
    generator = Generator(models[1], ByteTokenizer())
    prompts = [torch.randint(2, 258, (length,)).tolist() for length in (5, 900, 64, 1, 300, 2000)]
    together = generator.read(prompts)
    for index, prompt in enumerate(prompts):
        alone, in_batch = generator.read([prompt]), together.select([index])
        assert error(in_batch.logits, alone.logits) < 3e-2
        assert_same_state(in_batch.model_state, alone.model_state)


@on_gpu
@pytest.mark.parametrize("batch", [1, 5])
def test_decoding_takes_no_memory(models, batch):
    gc.collect()
    params = SamplingParams(max_new_tokens=1000)
    (runner, _), in_use = started(FusedModel(models[1]), batch, params), []
    for steps in (3, 200):
        for _ in range(steps):
            runner.decode(batch - 1)
        torch.cuda.synchronize()
        in_use.append(torch.cuda.memory_allocated())
    assert in_use[0] == in_use[1]
    assert saved(runner).tokens_seen == [39 - row + 203 for row in range(batch)]
