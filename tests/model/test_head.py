"""The head's kernels and `linear_float32` against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error

from xlstm7b.model import head
from xlstm7b.model.layers import linear_float32

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.model import head_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@given(
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([1, 2, 40, 320, 2048, 2049, 5000]),
    cap=st.sampled_from([30.0, 5.0, 200.0, None]),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
)
@settings(max_examples=25)
def test_kernels_match_float64(rows, vocabulary, cap, scale):
    products = scale * torch.randn(rows, vocabulary, device=DEVICE)
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    grad = torch.randn(rows, device=DEVICE)
    exact = products.double().cpu().requires_grad_()
    chosen, sums = head._log_sums(exact, targets.cpu(), cap)
    ((chosen - sums) * grad.cpu()).sum().backward()
    chosen, sums = chosen.detach(), sums.detach()
    got_chosen, got_sums = head_kernels.log_sums(products, targets, cap)
    size = cap or max(1.0, float(products.abs().max()))  # of the logits
    assert float((got_chosen.cpu() - chosen).abs().max()) < 4e-6 * size
    assert float((got_sums.cpu() - sums).abs().max()) < 4e-6 * size
    got = head_kernels.gradients(products, targets, got_sums, grad, cap, torch.float32)
    # A gradient is a difference from 1: its error is absolute.
    largest = 2e-6 * size * float(grad.abs().max())
    assert float((got.cpu() - exact.grad).abs().max()) < largest
    plain = head._gradients(exact.detach(), targets.cpu(), sums, grad.cpu(), cap, exact.dtype)
    assert float((plain - exact.grad).abs().max()) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
def test_the_head_on_a_gpu_matches_float64(monkeypatch, dtype, largest):
    monkeypatch.setattr(head, "GPU_MAX_LOGITS", 50_304 * 256)  # two slices, the last one short
    x = torch.randn(1, 300, 768, device="cuda", dtype=dtype)
    weight = torch.randn(50_304, 768, device="cuda", dtype=dtype) / 20
    targets = torch.randint(50_304, (1, 300), device="cuda")
    grad = torch.randn(1, 300, device="cuda")
    results = []
    for parts in ((x, weight), (x.double(), weight.double())):
        leaves = [part.detach().requires_grad_() for part in parts]
        y = head.head_logprobs(*leaves, targets, 30.0)
        results.append([y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))])
    assert results[0][0].dtype == torch.float32
    assert error(results[0][0], results[1][0]) < 1e-6  # of the same rounded inputs
    for got, want in zip(results[0][1:], results[1][1:], strict=True):
        assert error(got, want) < largest


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_linear_float32_and_its_gradients(device):
    x = torch.randn(2, 37, 96, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 96, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(4, device=device, dtype=torch.bfloat16, requires_grad=True)
    leaves = x, weight, bias
    wide = [part.detach().double().requires_grad_() for part in leaves]
    got, want = linear_float32(*leaves), linear_float32(*wide)
    assert got.dtype == torch.float32
    assert error(got, want) < 1e-6
    grad = torch.randn_like(got)
    for ours, exact in zip(
        torch.autograd.grad(got, leaves, grad),
        torch.autograd.grad(want, wide, grad.double()),
        strict=True,
    ):
        assert error(ours, exact) < 5e-3
    torch.library.opcheck(torch.ops.xlstm7b.linear_float32.default, leaves[:2])
