"""The trained initial state: its gradient against float64, and what it equals."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SMALL, random_model, random_tokens
from torch import Tensor

from xlstm7b.accounting import state_tuning_parameters
from xlstm7b.generate import Engine, Generator
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.model.initial_state import InitialState, add_initial_state, values_of
from xlstm7b.tokenizer import ByteTokenizer

# The norm of each head's output cancels most of what n does, unless its ε is large.
CONFIG = replace(SMALL, cell_norm_eps=0.1)


def tuned(
    layers: list[int] | None, rank: int, dtype: torch.dtype, m: float = 0.0
) -> tuple[XLSTM, InitialState]:
    """A frozen model that starts from random numbers."""
    torch.manual_seed(0)
    model = random_model(CONFIG).to(dtype)
    initial = InitialState(CONFIG, layers, rank=rank).to(dtype)
    initial.m = [[m] * SMALL.num_heads for _ in initial.layers]
    with torch.no_grad():
        for parameter in initial.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    add_initial_state(model, initial)
    return model, initial


def loss(model: XLSTM, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    tokens, targets = random_tokens(3, 70), random_tokens(3, 70)
    weights = torch.rand(3, 70, dtype=torch.float64).to(model.lm_head.weight.dtype)
    return model.loss(tokens, targets, weights)


@settings(max_examples=10, deadline=None)
@given(
    layers=st.sampled_from([None, [0], [1]]),
    rank=st.integers(0, 3),
    m=st.sampled_from([0.0, 2.5, -1.0]),
)
def test_gradients_against_float64(layers, rank, m):
    exact, wide = tuned(layers, rank, torch.float64, m)
    loss(exact).backward()
    # 1. Autograd in float64 against the difference of two losses, in a random direction.
    directions = [torch.randn_like(parameter) for parameter in wide.parameters()]
    want = sum((p.grad * d).sum() for p, d in zip(wide.parameters(), directions, strict=True))
    moved = []
    for step in (1e-5, -1e-5):
        other = copy.deepcopy(exact)
        with torch.no_grad():
            own = other.backbone.initial_state.parameters()
            for parameter, direction in zip(own, directions, strict=True):
                parameter += step * direction
        moved.append(loss(other).item())
    slope = (moved[0] - moved[1]) / 2e-5
    assert slope == pytest.approx(want.item(), rel=1e-5, abs=1e-6)
    # 2. float32 against float64.
    model, initial = tuned(layers, rank, torch.float32, m)
    loss(model).backward()
    for narrow, right in zip(initial.parameters(), wide.parameters(), strict=True):
        assert (narrow.grad - right.grad).norm() <= 2e-4 * right.grad.norm()
    assert all(p.grad is None for name, p in model.named_parameters() if "initial" not in name)
    count = sum(parameter.numel() for parameter in initial.parameters())
    assert count == state_tuning_parameters(SMALL, layers, rank)


def test_a_new_one_changes_nothing():
    model, tokens = random_model(), random_tokens(2, 30)
    before = model(tokens)[0]
    for rank in (0, 2):
        add_initial_state(model, InitialState(SMALL, rank=rank).double())
        assert torch.equal(model(tokens)[0], before)


def test_it_starts_from_the_state_after_a_text():
    model, text, tokens = random_model(), random_tokens(1, 30), random_tokens(3, 20)
    _, state = model(text)
    want, _ = model(tokens, state.fork(3))
    initial = InitialState(SMALL)
    initial.m = [[-3.0, 0.5], [1.0, -8.0]]
    initial.load_state_dict(values_of(state, initial.m))
    add_initial_state(model, initial.double())
    got, after = model(tokens)
    assert (got - want).abs().max() < 1e-4  # the values are float32
    assert after.tokens_seen.tolist() == [20, 20, 20]
    # A state that is given comes first.
    from_zeros, _ = model(tokens, ModelState.zeros(SMALL, 3))
    model.backbone.initial_state = None
    assert torch.equal(from_zeros, model(tokens)[0])


def test_the_low_rank_start_is_the_best_approximation():
    _, state = random_model()(random_tokens(1, 40))
    exact = torch.stack([block.C[0] for block in state.blocks])
    errors = []
    for rank in (1, 4, SMALL.d_qk):
        initial = InitialState(SMALL, rank=rank)
        m = torch.stack([block.m[0] for block in state.blocks]).tolist()
        initial.load_state_dict(values_of(state, m, rank))
        error = (initial.A @ initial.B - exact).norm() / exact.norm()
        errors.append(error.item())
        tail = torch.linalg.svdvals(exact)[..., rank:].norm() / exact.norm()
        assert errors[-1] == pytest.approx(tail.item(), abs=1e-5)
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("fused", [False, True])
def test_generation_refuses_a_model_that_starts_from_a_state_of_its_own(fused):
    """It would start from zeros. The state is given to `generate` instead."""
    model, _ = tuned(None, 0, torch.float32)
    with pytest.raises(ValueError, match="has an initial_state, which generation would ignore"):
        Generator(model, ByteTokenizer(), fused=fused)
    with pytest.raises(ValueError, match="has an initial_state, which generation would ignore"):
        Engine(model, ByteTokenizer(), fused=fused)
