"""MLSTMLayer, MLSTMBlock and MLSTMStack as a library: modules over vectors [B, T, dim]."""

import io
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import SMALL, assert_states_match, open_gates, random_model, random_tokens
from torch import nn

import xlstm7b
from xlstm7b import XLSTM, MLSTMBlock, MLSTMLayer, MLSTMStack, ModelState
from xlstm7b.mlstm import MLSTMState

DIM, HEADS = 64, 2
KINDS = {
    "layer": lambda: MLSTMLayer(DIM, HEADS),
    "block": lambda: MLSTMBlock(DIM, HEADS),
    "stack": lambda: MLSTMStack(DIM, HEADS, 2),
}


def make(kind):
    return open_gates(KINDS[kind]().double())


def vectors(batch, length):
    return torch.randn(batch, length, DIM, dtype=torch.float64)


def cells(state):
    """The cell states of a layer, a block or a stack."""
    return [state] if isinstance(state, MLSTMState) else list(state.blocks)


def rows(state, row):
    if isinstance(state, ModelState):
        return state.select([row])
    return MLSTMState(*(part[row : row + 1] for part in state))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(cuts=st.lists(st.integers(1, 89), max_size=4, unique=True))
@torch.no_grad()
def test_a_sequence_can_be_read_in_parts(kind, cuts):
    module, x = make(kind), vectors(2, 90)
    want, want_state = module(x)
    state, edges = None, [0, *sorted(cuts), 90]
    for start, end in pairwise(edges):
        got, state = module(x[:, start:end], state)
        assert error(got, want[:, start:end]) < 1e-11
    assert_states_match(state, want_state, 1e-11)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_position_at_a_time(kind):
    module, x = make(kind), vectors(2, 20)
    want, want_state = module(x)
    _, state = module(x[:, :1])
    for t in range(1, 20):
        got, state = module(x[:, t : t + 1], state)
        assert error(got, want[:, t : t + 1]) < 1e-11
    assert_states_match(state, want_state, 1e-11)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4), with_state=st.booleans())
@torch.no_grad()
def test_lengths_and_resets(kind, lengths, with_state):
    """Each padded row with several sequences equals the row alone, without padding."""
    module, x = make(kind), vectors(len(lengths), 40)
    resets = torch.rand(len(lengths), 40) < 0.1
    before = module(vectors(len(lengths), 5))[1] if with_state else None
    y, state = module(x, before, resets=resets, lengths=torch.tensor(lengths))
    for row, length in enumerate(lengths):
        if length:
            want, want_state = module(
                x[row : row + 1, :length],
                None if before is None else rows(before, row),
                resets=resets[row : row + 1, :length],
            )
            assert error(y[row, :length], want[0]) < 1e-11
            assert_states_match(rows(state, row), want_state, 1e-11)
        elif before is not None:
            assert_states_match(rows(state, row), rows(before, row), 0)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    garbage=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    with_state=st.booleans(),
    size=st.sampled_from([1, 20]),
)
def test_padding_may_hold_anything(kind, lengths, garbage, with_state, size):
    """The same outputs, states and gradients, to the last bit, as with zeros for padding."""
    module, x = make(kind), vectors(len(lengths), size)
    lengths = torch.tensor(lengths).clamp(max=size)
    with torch.no_grad():
        before = module(vectors(len(x), 5))[1] if with_state else None
    inside = torch.arange(size) < lengths[:, None]
    found = []
    for value in (0.0, garbage):
        padded = x.masked_fill(~inside[..., None], value).requires_grad_()
        y, state = module(padded, before, lengths=lengths)
        loss = y[inside].square().sum() + sum(cell.C.square().sum() for cell in cells(state))
        inputs = [padded, *module.parameters()]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        with torch.no_grad():
            _, alone = module(padded, before, lengths=lengths)
        parts = [part for each in (state, alone) for cell in cells(each) for part in cell]
        found.append([y[inside], *parts, *gradients])
    for want, got in zip(*found, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


def test_the_language_model_is_made_of_these_classes():
    model = XLSTM(SMALL)
    assert isinstance(model.backbone, MLSTMStack)
    assert {type(block) for block in model.backbone.blocks} == {MLSTMBlock}
    assert {type(block.mlstm_layer) for block in model.backbone.blocks} == {MLSTMLayer}
    assert list(dict(model.named_parameters())) == list(SMALL.parameter_shapes())


def test_a_stack_with_the_weights_of_a_model_computes_its_hidden_vectors():
    model = random_model()
    stack = MLSTMStack(DIM, HEADS, 2).double()
    weights = {
        name.removeprefix("backbone."): tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(("backbone.blocks", "backbone.out_norm"))
    }
    stack.load_state_dict(weights)
    tokens = random_tokens(2, 30)
    want, want_state = model.backbone(tokens)
    got, state = stack(model.backbone.embeddings(tokens))
    assert torch.equal(got, want)
    assert_states_match(state, want_state, 0)


def test_the_same_seed_gives_the_same_weights_alone_and_in_the_model():
    torch.manual_seed(3)
    xlstm7b.model.layers.Embedding(SMALL.vocab_size, DIM)  # drawn first in the model
    stack = MLSTMStack(DIM, HEADS, 2)
    torch.manual_seed(3)
    model = XLSTM(SMALL)
    for name, parameter in stack.named_parameters():
        assert torch.equal(parameter, model.backbone.get_parameter(name)), name


def test_options_are_fields_of_the_config():
    layer = MLSTMLayer(
        32, 2, num_blocks=8, qk_dim_factor=1.0, igate_bias_init_range=-2.0, gate_soft_cap=7.0
    )
    assert layer.q.weight.shape == (32, 32)
    assert (layer.igate_preact.bias == -2).all()
    assert layer.gate_soft_cap == 7.0
    assert layer.out_proj.weight.std().item() == pytest.approx(2 / (8 * 32**0.5), rel=0.1)
    assert MLSTMBlock(32, 2, ffn_proj_factor=1.0).ffn.proj_up.weight.shape == (64, 32)


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    plain = MLSTMStack(DIM, HEADS, 2)
    torch.manual_seed(0)
    stack = MLSTMStack(DIM, HEADS, 2, dropout=0.5)
    x = torch.randn(2, 9, DIM)
    want, _ = plain(x)
    assert error(stack(x)[0], want) > 0.01
    assert torch.equal(stack.eval()(x)[0], want)


def test_gradients_are_those_of_the_whole_until_the_state_is_detached():
    """Truncated backpropagation: `loss` takes and returns a state."""
    model, tokens, targets = random_model(), random_tokens(2, 40), random_tokens(2, 40)
    weights, parameters = torch.rand(2, 40, dtype=torch.float64), [*model.parameters()]
    whole = model.loss(tokens, targets, weights)
    want = torch.autograd.grad(whole, parameters)

    def parts(detach):
        state, losses = ModelState.zeros(model.config, 2, dtype=torch.float64), []
        for part in (slice(0, 25), slice(25, 40)):
            loss, state = model.loss(
                tokens[:, part], targets[:, part], weights[:, part], state=state
            )
            state = state.detach() if detach else state
            losses.append(loss)
        assert state.tokens_seen.tolist() == [40, 40]
        return losses

    joined = sum(parts(detach=False))
    assert error(joined, whole) < 1e-12
    for grad, want_grad in zip(torch.autograd.grad(joined, parameters), want, strict=True):
        assert error(grad, want_grad) < 1e-10
    first, second = parts(detach=True)
    assert error(first + second, whole) < 1e-12
    truncated = torch.autograd.grad(first + second, parameters)
    assert max(map(error, truncated, want)) > 1e-3


def test_a_detached_state_has_no_history():
    _, state = MLSTMStack(DIM, HEADS, 1)(torch.randn(1, 4, DIM))
    assert state.blocks[0].C.requires_grad
    detached = state.detach()
    assert not any(part.requires_grad for part in detached.blocks[0])
    assert_states_match(detached, state, 0)


@pytest.mark.parametrize(
    "options", [{}, {"block": "previous", "qk_dim_factor": 2.0, "v_dim_factor": 2.0}]
)
@torch.no_grad()
def test_a_step_can_be_exported_saved_and_loaded(options):
    stack, x = MLSTMStack(DIM, HEADS, 1, **options).eval(), torch.randn(3, 5, DIM)
    _, state = stack(x)
    step = torch.export.export(stack, (x[:, :1],), {"state": state})
    file = io.BytesIO()
    torch.export.save(step, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    want, want_state = stack(x[:, 1:2], state)
    got, got_state = loaded(x[:, 1:2], state=state)
    assert error(got, want) < 1e-6
    assert isinstance(got_state, ModelState)
    assert_states_match(got_state, want_state, 1e-6)


def test_embeddings_come_first():
    stack = MLSTMStack(DIM, HEADS, 1, embeddings=nn.Linear(3, DIM))
    assert next(iter(dict(stack.named_parameters()))) == "embeddings.weight"
    y, _ = stack(torch.randn(2, 5, 3))
    assert y.shape == (2, 5, DIM)


def test_bad_input_is_an_error_that_names_it():
    x = torch.randn(2, 5, DIM)
    for kind in KINDS:
        module = KINDS[kind]()
        for bad, shape in ((x[0], r"\[5, 64\]"), (x[:, :0], r"\[2, 0, 64\]"), (x[..., :8], "8")):
            if kind == "block":
                continue  # its norm comes before the check
            with pytest.raises(ValueError, match=rf"x must be vectors \[B, T, 64\] .*{shape}"):
                module(bad)
        with pytest.raises(ValueError, match=r"lengths must have shape \[2\]"):
            module(x, lengths=torch.tensor([5]))
        with pytest.raises(ValueError, match=r"between 0 and 5, not \[6, 1\]"):
            module(x, lengths=torch.tensor([6, 1]))
        with pytest.raises(ValueError, match=r"lengths must be integers, not torch\.float32"):
            module(x, lengths=torch.tensor([2.5, 1]))
        with pytest.raises(ValueError, match=r"resets must have the shape \[2, 5\], not \[2, 1\]"):
            module(x, resets=torch.ones(2, 1) > 0, lengths=torch.tensor([2, 1]))
    _, state = MLSTMStack(DIM, HEADS, 1)(x)
    with pytest.raises(ValueError, match="the state has 1 block and 2 rows, the model 2 blocks"):
        MLSTMStack(DIM, HEADS, 2)(x, state)
    with pytest.raises(ValueError, match="dropout must be at least 0 and less than 1"):
        MLSTMBlock(DIM, HEADS, dropout=1.0)
    with pytest.raises(ValueError, match="num_heads"):
        MLSTMLayer(DIM, 3)
    with pytest.raises(TypeError, match="qk_dims"):
        MLSTMLayer(DIM, HEADS, qk_dims=3)
