"""XLSTM: parts of sequences, ragged batches, documents, log-probabilities, compilation."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import SMALL, assert_states_match, random_model, random_tokens

from xlstm7b.config import SIZES, ModelConfig
from xlstm7b.model import XLSTM, ModelState, head


@pytest.mark.parametrize("size", SIZES)
def test_parameters_have_the_names_of_the_checkpoint(size):
    with torch.device("meta"):
        model = XLSTM(ModelConfig.named(size))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == model.config.parameter_shapes()
    assert all(p.is_meta for p in model.parameters())


def test_initialisation():
    config = ModelConfig(512, 4, 4, vocab_size=1000)
    model = XLSTM(config)
    small, residual = math.sqrt(2 / (5 * 512)), 2 / (4 * math.sqrt(512))
    deviations = {
        "embeddings": small,
        "lm_head": small,
        "q": small,
        "k": small,
        "v": small,
        "proj_up_gate": small,
        "proj_up": small,
        "out_proj": residual,
        "proj_down": residual,
    }
    for name, parameter in model.named_parameters():
        *_, part, kind = name.split(".")
        if kind == "bias":
            want = torch.linspace(3, 6, 4) if part == "fgate_preact" else torch.full((4,), -10.0)
            assert torch.equal(parameter, want)
        elif "norm" in part:
            assert (parameter == 1).all()
        elif "gate_preact" in part:
            assert (parameter == 0).all()
        else:
            assert parameter.std().item() == pytest.approx(deviations[part], rel=0.02)
            assert abs(parameter.mean().item()) < 0.02 * deviations[part]


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, 149), max_size=5, unique=True))
@torch.no_grad()
def test_a_sequence_can_be_read_in_parts(cuts):
    model, tokens = random_model(), random_tokens(2, 150)
    want, want_state = model(tokens)
    state, edges = None, [0, *sorted(cuts), 150]
    for start, end in pairwise(edges):
        got, state = model(tokens[:, start:end], state)
        assert error(got, want[:, start:end]) < 1e-11
    assert_states_match(state, want_state, 1e-11)


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(0, 80), min_size=1, max_size=5), with_state=st.booleans())
@torch.no_grad()
def test_a_ragged_batch_equals_each_row_alone(lengths, with_state):
    model, tokens = random_model(), random_tokens(len(lengths), 80)
    resets = torch.rand(tokens.shape) < 0.05
    before = model(random_tokens(len(lengths), 9))[1] if with_state else None
    logits, state = model(tokens, before, resets=resets, lengths=torch.tensor(lengths))
    last, last_state = model(
        tokens, before, resets=resets, lengths=torch.tensor(lengths), logits="last"
    )
    assert_states_match(last_state, state, 0)
    fresh = before or ModelState.zeros(SMALL, len(lengths), dtype=torch.float64)
    for row, length in enumerate(lengths):
        alone = fresh.select([row])
        got_state = state.select([row])
        if length == 0:
            assert_states_match(got_state, alone, 0)
            continue
        want, want_state = model(
            tokens[row : row + 1, :length], alone, resets=resets[row : row + 1, :length]
        )
        assert error(logits[row, :length], want[0]) < 1e-11
        assert error(last[row], want[0, -1]) < 1e-11
        assert_states_match(got_state, want_state, 1e-11)


@torch.no_grad()
def test_a_single_token_may_be_padding():
    model, tokens = random_model(), random_tokens(2, 1)
    before = model(random_tokens(2, 9))[1]
    logits, state = model(tokens, before, lengths=torch.tensor([0, 1]), logits="last")
    want, want_state = model(tokens[1:], before.select([1]), logits="last")
    assert_states_match(state.select([0]), before.select([0]), 0)
    assert_states_match(state.select([1]), want_state, 1e-12)
    assert error(logits[1], want[0]) < 1e-12


@torch.no_grad()
def test_packed_documents_equal_the_documents_alone():
    model, tokens = random_model(), random_tokens(1, 120)
    boundaries = [0, 1, 40, 103]
    resets = torch.zeros(1, 120, dtype=torch.bool)
    resets[0, boundaries] = True
    got, _ = model(tokens, model(random_tokens(1, 5))[1], resets=resets)
    for start, end in zip(boundaries, [*boundaries[1:], 120], strict=True):
        assert error(got[:, start:end], model(tokens[:, start:end])[0]) < 1e-11


@pytest.mark.parametrize("rows_at_once", [1, 7, 10_000])
def test_token_logprobs_and_their_gradients(rows_at_once, monkeypatch):
    monkeypatch.setattr(head, "MAX_LOGITS", rows_at_once * SMALL.vocab_size)
    model, tokens, targets = random_model(), random_tokens(3, 20), random_tokens(3, 20)
    with torch.no_grad():
        model.lm_head.weight *= 20  # far into the soft-cap
    lengths, weights = torch.tensor([20, 0, 13]), torch.randn(3, 20, dtype=torch.float64)
    inside = torch.arange(20) < lengths[:, None]

    logits, want_state = model(tokens, lengths=lengths)
    want = logits.log_softmax(-1).gather(2, targets[..., None]).squeeze(2).where(inside, 0)
    want_grads = torch.autograd.grad((want * weights).sum(), [*model.parameters()])
    got, state = model.token_logprobs(tokens, targets, lengths=lengths)
    grads = torch.autograd.grad((got * weights).sum(), [*model.parameters()])

    assert error(got, want) < 1e-12
    assert_states_match(state, want_state, 0)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        assert error(grad, want_grad) < 1e-11


@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
def test_the_loss_equals_that_of_token_logprobs(rows_at_once, monkeypatch):
    monkeypatch.setattr(head, "MAX_LOGITS", rows_at_once * SMALL.vocab_size)
    model, tokens, targets = random_model(), random_tokens(3, 20), random_tokens(3, 20)
    weights, resets = torch.randn(3, 20, dtype=torch.float64), torch.rand(3, 20) < 0.2
    want = -3 * (model.token_logprobs(tokens, targets, resets=resets)[0] * weights).sum()
    got = 3 * model.loss(tokens, targets, weights, resets=resets)
    assert error(got, want) < 1e-12
    parameters = [*model.parameters()]
    for ours, exact in zip(
        torch.autograd.grad(got, parameters), torch.autograd.grad(want, parameters), strict=True
    ):
        assert error(ours, exact) < 1e-11


@pytest.mark.parametrize("weighted", [False, True])
def test_targets_of_minus_100_do_not_count_as_in_pytorch(weighted):
    model, tokens = random_model(), random_tokens(2, 9)
    targets = random_tokens(2, 9)
    targets[0, 3:] = targets[1, 0] = -100
    logits, _ = model(tokens)
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum" if weighted else "mean"
    )
    weights = (torch.full((2, 9), 1.0, dtype=torch.float64),) if weighted else ()
    got = model.loss(tokens, targets, *weights)
    grads = [torch.autograd.grad(loss, model.parameters()) for loss in (got, want)]
    assert error(got, want) < 1e-6
    for grad, want_grad in zip(*grads, strict=True):
        assert error(grad, want_grad) < 1e-6
    assert model.loss(tokens, torch.full((2, 9), -100)) == 0


def test_token_logprobs_in_bfloat16_are_float32():
    model = random_model(dtype=torch.bfloat16)
    tokens, targets = random_tokens(2, 30), random_tokens(2, 30)
    got, state = model.token_logprobs(tokens, targets)
    logits, _ = model(tokens)
    assert got.dtype == logits.dtype == state.blocks[0].C.dtype == torch.float32
    want = logits.log_softmax(-1).gather(2, targets[..., None]).squeeze(2)
    assert error(got, want) < 1e-6


def test_head_gradients_in_bfloat16():
    """The logits' gradient is rounded once, to bfloat16, before the two products."""
    x, weight = torch.randn(300, 64).bfloat16(), torch.randn(97, 64).bfloat16()
    targets, weights = torch.randint(0, 97, (300,)), torch.randn(300)

    def gradients(dtype):
        leaves = [part.to(dtype).requires_grad_() for part in (x, weight)]
        loss = (head.head_logprobs(*leaves, targets, 30.0) * weights).sum()
        return torch.autograd.grad(loss, leaves)

    for got, want in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert got.dtype == torch.bfloat16
        assert error(got, want) < 4e-3


@torch.no_grad()
def test_logits_are_capped_and_the_state_given_is_not_changed():
    model, tokens = random_model(), random_tokens(2, 10)
    model.lm_head.weight *= 1000
    _, state = model(tokens)
    copy = state.clone()
    for length in (1, 10):
        logits, _ = model(tokens[:, :length], state)
        assert 29 < float(logits.abs().max()) <= 30
        assert_states_match(state, copy, 0)


@pytest.mark.parametrize("length", [1, 70])
def test_compiles_as_one_graph(length):
    torch.compiler.reset()
    model = random_model(replace(SMALL, num_blocks=1))
    tokens, resets = random_tokens(2, length), torch.rand(2, length) < 0.1
    with torch.no_grad():
        _, state = model(random_tokens(2, 3))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    for options in ({}, {"resets": resets, "lengths": torch.tensor([length, 0])}):
        want, want_state = model(tokens, state, **options)
        got, got_state = compiled(tokens, state, **options)
        assert error(got, want) < 1e-12
        assert_states_match(got_state, want_state, 1e-12)
        want_grads = torch.autograd.grad(want.sum(), [*model.parameters()], allow_unused=True)
        grads = torch.autograd.grad(got.sum(), [*model.parameters()], allow_unused=True)
        for grad, want_grad in zip(grads, want_grads, strict=True):
            assert (grad is None) == (want_grad is None)
            assert grad is None or error(grad, want_grad) < 1e-11


@torch.no_grad()
def test_compiles_as_one_graph_in_bfloat16():
    torch.compiler.reset()
    model, tokens = random_model(replace(SMALL, num_blocks=1), torch.bfloat16), random_tokens(2, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    for part in (tokens, tokens[:1, :1]):
        assert torch.equal(compiled(part)[0], model(part)[0])


def test_token_logprobs_compiles_as_one_graph():
    torch.compiler.reset()
    model = random_model(replace(SMALL, num_blocks=1))
    tokens, targets = random_tokens(2, 70), random_tokens(2, 70)
    compiled = torch.compile(model.token_logprobs, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(model.token_logprobs(tokens, targets)[0].sum(), model.parameters())
    got = torch.autograd.grad(compiled(tokens, targets)[0].sum(), model.parameters())
    for grad, want_grad in zip(got, want, strict=True):
        assert error(grad, want_grad) < 1e-11


def test_bad_input_is_a_value_error_that_names_it():
    model, tokens = random_model(), random_tokens(2, 5)
    _, state = model(random_tokens(3, 2))
    for call, message in [
        (lambda: model(tokens.float()), r"tokens must be integers \[B, T\]"),
        (lambda: model(tokens[0]), r"tokens must be integers \[B, T\]"),
        (lambda: model(tokens[:, :0]), r"tokens must be integers \[B, T\]"),
        (lambda: model(tokens[:0]), r"tokens must be integers \[B, T\] with B and T of at least 1"),
        (
            lambda: model(tokens, state),
            "the state has 2 blocks and 3 rows, the model 2 blocks and the input 2 rows",
        ),
        (lambda: model(tokens, lengths=torch.tensor([5])), "lengths must have shape"),
        (lambda: model(tokens, lengths=torch.tensor([1, -2])), r"between 0 and 5, not \[1, -2\]"),
        (lambda: model(tokens, lengths=torch.tensor([99, 1])), r"between 0 and 5, not \[99, 1\]"),
        (
            lambda: model(tokens, resets=torch.zeros(2, 4) > 0),
            r"resets must have the shape \[2, 5\]",
        ),
        (lambda: model(tokens, logits="first"), 'logits must be "all" or "last"'),
        (lambda: model.token_logprobs(tokens, tokens[:, 1:]), "differ in shape"),
        (lambda: model(tokens + SMALL.vocab_size), "tokens must be ids from 0 to"),
        (lambda: model(tokens - 300), "tokens must be ids from 0 to"),
        (lambda: model.token_logprobs(tokens, tokens + 10**6), "targets must be ids from 0 to"),
        (lambda: model.loss(tokens, tokens + 10**6), "targets must be ids from 0 to"),
        (
            lambda: model.loss(tokens, tokens.mT, torch.ones(2, 5)),
            r"targets \[5, 2\] and tokens \[2, 5\] differ in shape",
        ),
        (
            lambda: model.loss(tokens, tokens, torch.tensor(1.0)),
            r"weights \[\] and tokens \[2, 5\] differ in shape",
        ),
        (
            lambda: model.loss(tokens, tokens, torch.ones(2, 5) > 0),
            r"weights must be floating-point numbers, not torch\.bool",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_what_everyone_looks_for(tmp_path):
    model, tokens = random_model(dtype=torch.float32), random_tokens(1, 4)
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path / "model")
    assert ModelConfig.from_pretrained(tmp_path / "model") == model.config
    (tmp_path / "model" / "model.safetensors").unlink()
    assert ModelConfig.from_pretrained(tmp_path / "model") == model.config
    _, state = model(tokens)
    block = state.blocks[0].detach()
    assert type(block) is type(state.blocks[0])
    assert state.blocks[0].C.requires_grad
    assert not any(part.requires_grad for part in block)
