"""Generation's Triton kernels against float64: in Triton's interpreter, on a GPU in full.

The oracle is `plain.py` on the same rounded inputs, so that the errors are the kernels' own.
"""

import copy
import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from measure import error
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, SamplingSettings, plain
from xlstm7b.generate.decoder import Decoder
from xlstm7b.generate.fused import FusedModel
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.tokenizer import ByteTokenizer

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.triton import operations, pointwise, row, rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter computes bfloat16 wrongly: that is for GPUs.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
LARGEST = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS, CAP, WIDE = 1e-6, 15.0, torch.float32
gpu = pytest.mark.gpu


@pytest.fixture
def _poison(monkeypatch):
    """New memory is full of NaN: what a kernel leaves out shows."""
    empty = torch.empty

    def poisoned(*shape, **options):
        new = empty(*shape, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch, "empty", poisoned)


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random numbers with NaN behind them: who reads too far shows."""
    numbers = torch.randn(shape, device=DEVICE) * scale
    return F.pad(numbers.flatten(), (0, 256), value=torch.nan).to(dtype)[:-256].view(shape)


def weights(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return draw(n, k, dtype=dtype, scale=2 * k**-0.5)


def assert_close(got: Tensor, want: Tensor, largest: float) -> None:
    """Row by row; infinities are where they should be."""
    assert got.shape == want.shape
    got, infinite = got.double(), want.isinf()
    assert torch.equal(got[infinite], want[infinite])
    got, want = got.masked_fill(infinite, 0), want.masked_fill(infinite, 0)
    sizes = want.norm(dim=-1)
    assert ((got - want).norm(dim=-1) <= largest * (sizes + sizes.mean())).all()


OPTIONS = ["product", "norm", "gates", "not live", "swiglu", "residual", "cap"]


def multiplied(multiply, batch: int, k: int, n: int, option: str, dtype, **tile):
    """A kernel's product under one option, and float64's."""
    x, W = draw(batch, k, dtype=dtype), weights(n, k, dtype)
    wide = x.double()
    if option == "swiglu":
        gate, up = (wide @ W.double().mT).chunk(2, -1)
        return multiply(x, W, swiglu=True, **tile)[0], F.silu(gate) * up
    want = wide @ W.double().mT
    if option == "norm":
        norm = 1 + draw(k, dtype=dtype, scale=0.3)
        want = plain.rms_norm(wide, norm.double(), EPS) @ W.double().mT
        return multiply(x, W, norm=norm, eps=EPS, **tile)[0], want
    if option == "residual":
        residual = draw(batch, n, dtype=dtype)
        want += residual.double()
        multiply(x, W, residual=residual, **tile)
        return residual, want
    if option == "cap":
        return multiply(x, W, cap=2.0, out_dtype=WIDE, **tile)[0], 2 * torch.tanh(want / 2)
    if option == "product":
        return multiply(x, W, **tile)[0], want
    W_gates, bias = weights(6, k, dtype), draw(6, dtype=dtype, scale=3)
    live = torch.arange(batch, device=DEVICE) % 3 >= 2 * (option == "not live")
    got, gates = multiply(x, W, gates=(W_gates, bias), live=live, cap=CAP, **tile)
    assert gates.dtype == torch.float32
    want_gates = CAP * torch.tanh((wide @ W_gates.double().mT + bias.double()) / CAP)
    want_gates[~live, :3], want_gates[~live, 3:] = -torch.inf, torch.inf
    # Accumulated and left in float32, whatever the dtype; tensor cores cut off digits as they sum.
    assert_close(gates, want_gates, 1e-5 + 1e-8 * k)
    return got, want


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("k", "n", "tile"), [(32, 16, (4, 32, 1)), (37, 14, (4, 16, 1)), (100, 30, (8, 32, 2))]
)
def test_one_row(k, n, tile, option, dtype):
    own = row.tile_for(n, k, option == "swiglu")
    tile = replace(own, **dict(zip(("rows", "columns", "programs"), tile, strict=True)))
    product = multiplied(row.multiply_row, 1, k, n, option, dtype, tile=tile)
    assert_close(*product, LARGEST[dtype])


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "norm"])
@pytest.mark.parametrize(
    ("batch", "k", "n", "tile"),
    [(5, 37, 22, (16, 16)), (17, 100, 34, (32, 64)), (64, 48, 2, (16, 64))],
)
def test_few_rows(batch, k, n, tile, option, dtype):
    tile = replace(rows.tile_for(batch, n), rows=tile[0], columns=tile[1])
    product = multiplied(rows.multiply_rows, batch, k, n, option, dtype, tile=tile)
    assert_close(*product, LARGEST[dtype])


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * torch.cuda.is_available())
@pytest.mark.parametrize("batch", [1, 2, 17, 65] + [16, 64, 3000] * torch.cuda.is_available())
def test_operations_are_those_of_plain(batch, dtype):
    """Whichever way a number of rows takes, with the tiles it has there."""
    d, up, largest = 48, 72, 2 * LARGEST[dtype]  # RMSNorm rounds what it hands on
    x, norm = draw(batch, d, dtype=dtype), 1 + draw(d, dtype=dtype, scale=0.3)
    wide, wide_norm = x.double(), norm.double()
    projection = weights(3 * d, d, dtype), weights(4, d, dtype), draw(4, dtype=dtype)
    for live in (None, torch.arange(batch, device=DEVICE) % 4 != 1):
        got = operations.project(x, norm, EPS, *projection, CAP, live)
        wide_projection = [part.double() for part in projection]
        want = plain.project(wide, wide_norm, EPS, *wide_projection, CAP, live)
        assert [part.dtype for part in got] == [dtype, torch.float32]
        for part, want_part in zip(got, want, strict=True):
            assert_close(part, want_part, largest)
    matrices = {"swiglu": weights(2 * up, d, dtype), "head": weights(50, d, dtype)}
    for (name, W), cap in zip(matrices.items(), ([], [5.0]), strict=True):
        got = getattr(operations, name)(x, norm, EPS, W, *cap)
        want = getattr(plain, name)(wide, wide_norm, EPS, W.double(), *cap)
        assert_close(got, want, largest)
    y, W = draw(batch, up, dtype=dtype), weights(d, up, dtype)
    operations.add_product(x, y, W)
    plain.add_product(wide, y.double(), W.double())
    assert_close(x, wide, largest)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 17, 80])
def test_norms_of_strided_rows(width, dtype):
    heads, count = 3, 5
    wide = draw(count, 4 * heads * width, dtype=dtype)
    x, weight = wide[:, : heads * width], draw(heads * width, dtype=dtype)
    got = pointwise.rms_norm(x, weight, EPS)
    assert_close(got, plain.rms_norm(x.double(), weight.double(), EPS), LARGEST[dtype])
    h = draw(count, heads, width, dtype=dtype, scale=0.1) + 3  # the mean is what is taken away
    gate = wide[:, heads * width : 2 * heads * width]
    got = pointwise.head_norm(h, weight, EPS, gate)
    want = plain.head_norm(h.double(), weight.double(), EPS, gate.double())
    assert_close(got, want, 10 * LARGEST[torch.float32] + LARGEST[dtype])


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 7), (5, 683), (2, 2048)])
def test_swiglu(count, width, dtype):
    x = draw(count, 2 * width, dtype=dtype, scale=4)
    gate, up = x.double().chunk(2, -1)
    assert_close(pointwise.swiglu(x), F.silu(gate) * up, LARGEST[dtype])


def test_soft_cap_keeps_its_digits():
    """Tiny inputs come out as they are, huge ones as the cap; between, element by element."""
    sizes = torch.logspace(-30, 30, 1201, dtype=torch.float64)
    sizes = torch.cat([sizes, torch.linspace(0.5, 1, 300), torch.linspace(0, 90, 300)]).float()
    gates = torch.stack([sizes, -sizes], dim=-1).to(DEVICE)
    want = CAP * torch.tanh(gates.double() / CAP)
    pointwise.cap_gates(gates, torch.zeros(2, device=DEVICE), CAP, None)
    off = (gates.double() - want).abs() / want.abs().clamp(min=1e-300)
    assert float(off.max()) < 1e-5
    assert gates.abs().max() == CAP


def test_gates_of_rows_that_are_not_live():
    products, bias = draw(700, 6, dtype=torch.float32), draw(6, dtype=torch.float16)
    want = CAP * torch.tanh((products.double() + bias.double()) / CAP)
    live = torch.arange(700, device=DEVICE) % 7 < 4
    pointwise.cap_gates(products, bias, CAP, live)
    assert error(products[live], want[live]) < 2e-6
    assert (products[~live, :3] == -torch.inf).all()
    assert (products[~live, 3:] == torch.inf).all()


@gpu
@pytest.mark.parametrize("batch", [1, 2, 16, 17, 64])
@pytest.mark.parametrize(
    ("k", "n", "option"),
    [(4096, 12288, "gates"), (4096, 21888, "swiglu"), (10944, 4096, "residual"),
     (4096, 4096, "residual"), (2560, 50304, "cap"), (768, 2304, "not live")],
)  # fmt: skip
def test_the_sizes_of_real_models(batch, k, n, option):
    multiply = row.multiply_row if batch == 1 else rows.multiply_rows
    assert_close(*multiplied(multiply, batch, k, n, option, torch.bfloat16), 1e-2)


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
    on_gpu = copy.deepcopy(model).to("cuda", torch.bfloat16)
    FusedModel(on_gpu)  # from here on its weights stay where they are
    return model, on_gpu


def assert_same_state(got: ModelState, want: ModelState) -> None:
    assert got.tokens_seen.tolist() == want.tokens_seen.tolist()
    for block, want_block in zip(got.blocks, want.blocks, strict=True):
        for part, want_part in zip(block, want_block, strict=True):
            assert error(part.cpu(), want_part.cpu()) < 3e-2


def started(fused: FusedModel, batch: int, temperature: float) -> Decoder:
    """Row r has read 39 − r tokens."""
    decoder = Decoder(fused, batch)
    decoder.prefill([[*range(1, 40 - row)] for row in range(batch)])
    settings = SamplingSettings(temperature=temperature, max_new_tokens=1000)
    for index in range(batch):
        decoder.sampler.set_row(index, settings, seed=index)
    decoder.sample()
    return decoder


@gpu
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_graphs_decode_what_eager_calls_do(models, batch, temperature):
    fused = FusedModel(models[1])
    graphs, eager = (started(fused, batch, temperature) for _ in range(2))
    for _ in range(20):
        assert torch.equal(graphs.logits, eager.logits)
        assert torch.equal(graphs.sampler.tokens, eager.sampler.tokens)
        graphs.decode_one()
        eager._decode(eager.sampler.needs)
    assert graphs.state.tokens_seen.tolist() == [59 - row for row in range(batch)]
    assert all(map(torch.equal, graphs.state._tensors(), eager.state._tensors()))


@gpu
@torch.inference_mode()
def test_prefill_through_padded_graphs(models):
    """In one decoder, so that graphs and the memory they share are used again."""
    decoder = Decoder(FusedModel(models[1]), 1)
    for length in (1, 63, 64, 65, 700, 4096, 5000, 64, 700):
        prompt = torch.randint(0, 320, (1, length))
        decoder.start(None)
        decoder.prefill(prompt.tolist())
        want, state = models[0](prompt, logits="last")
        assert error(decoder.logits.cpu(), want) < 3e-2, length
        assert_same_state(decoder.state, state)


@gpu
def test_ragged_prompts_alone_and_in_a_batch(models):
    """The state is that of the text, to the rounding of bfloat16, whatever lies beside it."""
    generator = Generator(models[1], ByteTokenizer())
    prompts = [torch.randint(2, 258, (length,)).tolist() for length in (5, 900, 64, 1, 300, 2000)]
    together = generator.read(prompts)
    for index, prompt in enumerate(prompts):
        alone, beside = generator.read([prompt]), together.select([index])
        assert error(beside.logits, alone.logits) < 3e-2
        assert_same_state(beside.memory, alone.memory)


@gpu
@pytest.mark.parametrize("batch", [1, 5])
def test_decoding_takes_no_memory(models, batch):
    gc.collect()
    decoder, in_use = started(FusedModel(models[1]), batch, 1.0), []
    for steps in (3, 200):
        for _ in range(steps):
            decoder.decode_one()
        torch.cuda.synchronize()
        in_use.append(torch.cuda.memory_allocated())
    assert in_use[0] == in_use[1]
    assert decoder.state.tokens_seen.tolist() == [39 - row + 203 for row in range(batch)]
