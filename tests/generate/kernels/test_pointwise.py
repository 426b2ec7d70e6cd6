"""Norms, gates, embeddings and what else surrounds the products."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import CAP, DEVICE, DTYPES, EPS, LARGEST, assert_close, draw
from measure import error

from xlstm7b.generate.kernels import plain

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import gpu, pointwise


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
