"""torch.autocast around the model computes what a bfloat16 copy of the model computes.

That is also what the trainer's mixed precision computes: FSDP casts the float32 parameters to
bfloat16 before each use and the gradients back to float32.
"""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import SMALL, assert_states_match, random_model, random_tokens
from train_processes import autocast_equals_the_trainer, in_processes

from xlstm7b.mlstm import mlstm_sequence
from xlstm7b.model import XLSTM, layers
from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.weight import QuantizedWeight

WIDE = torch.float32


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def losses(model, tokens, targets):
    """The three ways to a loss, of one shape each."""
    logits, _ = model(tokens)
    assert logits.dtype == WIDE
    logprobs = logits.log_softmax(-1).gather(2, targets[..., None]).squeeze(2)
    return {
        "forward": -logprobs.sum(),
        "token_logprobs": -model.token_logprobs(tokens, targets)[0].sum(),
        "loss": model.loss(tokens, targets, torch.ones(tokens.shape)),
    }


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
def test_losses_and_gradients(inside):
    model = XLSTM(SMALL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_preact.weight"):
                parameter.normal_(std=0.1)
    narrow = copy.deepcopy(model).bfloat16()
    tokens, targets = random_tokens(3, 70), random_tokens(3, 70)
    exact, rounded = losses(model, tokens, targets), losses(narrow, tokens, targets)
    with autocast():
        got = losses(model, tokens, targets)
    for name, loss in got.items():
        assert loss.dtype == WIDE
        assert torch.equal(loss, rounded[name]), name
        assert error(loss, exact[name]) < 1e-3, name
        want = torch.autograd.grad(exact[name], [*model.parameters()])
        same = torch.autograd.grad(rounded[name], [*narrow.parameters()])
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            grads = torch.autograd.grad(loss, [*model.parameters()])
        assert error(flat(grads), flat(want)) < 5e-2, name
        assert all(grad.dtype == WIDE for grad in grads)
        if not inside:
            assert torch.equal(flat(grads), flat(same).float()), name


def flat(gradients):
    """One vector. A single gradient may be a difference of large numbers, all rounding."""
    return torch.cat([gradient.flatten() for gradient in gradients])


@settings(max_examples=15)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 70),
    with_state=st.booleans(),
    with_resets=st.booleans(),
    with_lengths=st.booleans(),
)
@torch.no_grad()
def test_every_input_gives_the_numbers_of_a_bfloat16_model(
    batch, length, with_state, with_resets, with_lengths
):
    model = random_model(dtype=WIDE)
    narrow = copy.deepcopy(model).bfloat16()
    tokens, options = random_tokens(batch, length), {}
    if with_resets:
        options["resets"] = torch.rand(tokens.shape) < 0.1
    if with_lengths:
        options["lengths"] = torch.randint(0, length + 1, (batch,))
    state = model(random_tokens(batch, 5))[1] if with_state else None
    want, want_state = narrow(tokens, state, **options)
    with autocast():
        got, got_state = model(tokens, state, **options)
    assert torch.equal(got, want)
    assert_states_match(got_state, want_state, 0)
    assert all(part.dtype == WIDE for block in got_state.blocks for part in block)


def test_autocast_equals_the_trainers_mixed_precision():
    in_processes(1, autocast_equals_the_trainer)


def test_the_residual_stream_is_bfloat16_and_the_rest_float32():
    model, seen = random_model(dtype=WIDE), {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, x, y, name=name: seen.update({name: y[0] if type(y) is tuple else y})
        )
    with autocast():
        model(random_tokens(2, 9))
    for name, y in seen.items():
        wide = name in ("", "lm_head") or name.endswith(("igate_preact", "fgate_preact"))
        assert y.dtype == (WIDE if wide else torch.bfloat16), name


def test_layers_alone_take_float32_vectors():
    x = torch.randn(2, 9, SMALL.embedding_dim)
    for module in (layers.MLSTMBlock(64, 2), layers.MLSTMLayer(64, 2)):
        with autocast():
            y, state = module(x)
        assert y.dtype == torch.bfloat16
        assert {part.dtype for part in state} == {WIDE}


@pytest.mark.parametrize("backend", ["recurrent", "parallel", "chunkwise"])
def test_the_cell_stays_in_float32(backend):
    q, k, v = torch.randn(3, 2, 40, 2, 8).bfloat16()
    i, f = torch.randn(2, 2, 40, 2)
    want, want_state = mlstm_sequence(q, k, v, i, f, backend=backend)
    with autocast():
        got, state = mlstm_sequence(q, k, v, i, f, backend=backend)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(state, want_state, strict=True))


def test_float64_is_left_alone():
    model, tokens = random_model(), random_tokens(2, 9)
    want, _ = model(tokens)
    with autocast():
        assert torch.equal(model(tokens)[0], want)


def test_compiles_as_one_graph():
    torch.compiler.reset()
    model = random_model(replace(SMALL, num_blocks=1), WIDE)
    tokens, targets = random_tokens(2, 20), random_tokens(2, 20)
    compiled = torch.compile(model.token_logprobs, fullgraph=True, backend="aot_eager")
    with autocast():
        want, got = (run(tokens, targets)[0] for run in (model.token_logprobs, compiled))
    assert torch.equal(got, want)
    wanted = torch.autograd.grad(want.sum(), [*model.parameters()])
    for grad, want_grad in zip(
        torch.autograd.grad(got.sum(), [*model.parameters()]), wanted, strict=True
    ):
        assert error(grad, want_grad) < 5e-2  # the terms are added in another order


@pytest.mark.parametrize("scheme", [Scheme("int8", 0), Scheme("int4", 32)])
def test_products_with_quantised_weights_do_not_change(scheme):
    weight = QuantizedWeight.quantize(torch.randn(320, 64), scheme)
    x = torch.randn(2, 30, 64).bfloat16()
    want = layers.linear_float32(x, weight)
    with autocast():
        got = layers.linear_float32(x, weight)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
