"""The operations in plain PyTorch against the definitions of the model's layers."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from measure import error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xlstm7b.config import ModelConfig
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.kernels import plain
from xlstm7b.mlstm import MLSTMState, mlstm_step
from xlstm7b.model import XLSTM, ModelState

WIDE = {torch.float32: 1e-6, torch.float64: 1e-14}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("C_dtype", [None, torch.bfloat16])
def test_step_cell_equals_mlstm_step(batch, dtype, C_dtype):
    """On a strided state, with views of one projection. The last row is not live: it stays."""
    heads, d_qk, d_hv = 3, 8, 11
    buffers = [
        torch.randn(batch, 2, *(heads, d_qk, d_hv)[:dims], dtype=dtype) for dims in (3, 2, 1)
    ]
    if C_dtype is not None:
        buffers[0] = buffers[0].to(C_dtype)
    state = MLSTMState(*(buffer[:, 1] for buffer in buffers))
    want_state = MLSTMState(*(part.clone() for part in state))
    norm = torch.randn(heads * d_hv, dtype=dtype)
    for _ in range(2):
        widths = [heads * d for d in (d_qk, d_qk, d_hv, d_hv)]
        parts = torch.randn(batch, sum(widths), dtype=dtype).split(widths, dim=-1)
        q, k, v, gate = (part.unflatten(-1, (heads, -1)) for part in parts)
        i, f = 3 * torch.randn(2, batch, heads, dtype=dtype)
        i[-1], f[-1] = -torch.inf, torch.inf
        before = [part[-1].clone() for part in state]
        got = plain.step_cell(q, k, v, i, f, state, gate, norm, 1e-5, 1e-6)
        want, want_state = mlstm_step(
            q, k, v, i, f, want_state, gate=gate, norm_weight=norm, norm_eps=1e-5, eps=1e-6,
            inplace=True,
        )  # fmt: skip
        assert error(got, want) < WIDE[dtype]
        for part, want_part in zip(state, want_state, strict=True):
            assert error(part, want_part) < WIDE[dtype]
        assert all(map(torch.equal, before, (part[-1] for part in state)))


@pytest.mark.parametrize("dtype", [*WIDE, torch.bfloat16])
def test_rms_norm(dtype):
    x, weight = torch.randn(5, 33, dtype=dtype), torch.randn(33, dtype=dtype)
    x = x * torch.tensor([0, 1e-3, 1, 30, 1e4], dtype=dtype)[:, None]
    want = F.rms_norm(x.double(), (33,), weight.double(), 1e-6)
    assert error(plain.rms_norm(x, weight, 1e-6), want) < WIDE.get(dtype, 5e-3)
    assert not plain.rms_norm(x[:1], weight, 1e-6).any()


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None) -> Tensor:
        self.calls[str(operator)] += 1
        return operator(*arguments, **(options or {}))


@torch.inference_mode()
def test_few_operators_a_block():
    """Each takes some microseconds, whatever the size of the model."""
    counts = []
    for blocks in (1, 2):
        fused = FusedModel(XLSTM(ModelConfig(32, blocks, 2, vocab_size=16)))
        state = ModelState.zeros(fused.config, 1)
        with _Counting() as counting:
            fused.step(torch.zeros(1, dtype=torch.int64), state)
        counts.append(counting.calls.total())
    assert counts[1] - counts[0] <= 70
