"""The block of the first xLSTM paper: convolution, block-diagonal projections, states, training."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import assert_states_match, random_model, random_tokens
from torch import Tensor

from xlstm7b import MLSTMStack, accounting
from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.model.contract import check_model
from xlstm7b.model.previous import BlockDiagonal, CausalConvolution, PreviousBlock, PreviousState
from xlstm7b.train.recipe import load_recipe
from xlstm7b.train.sharded_model import checkpoint_activations

FACTORS = {"block": "previous", "qk_dim_factor": 2.0, "v_dim_factor": 2.0}
SMALL = ModelConfig(12, 2, 4, vocab_size=97, **FACTORS)


def random_block(config: ModelConfig = SMALL, dtype: torch.dtype = torch.float64) -> PreviousBlock:
    """A block in which every parameter matters: gates, norms, skip and bias are random too."""
    block = PreviousBlock.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return block


# The parts


@given(length=st.integers(1, 9), split=st.integers(0, 9), seed=st.integers(0, 999))
def test_the_convolution_is_causal_depthwise_and_continues_from_its_state(length, split, seed):
    torch.manual_seed(seed)
    conv = CausalConvolution(6).double()
    torch.nn.init.normal_(conv.bias)
    inputs = torch.randn(2, 3 + length, 6, dtype=torch.float64)
    want = F.conv1d(inputs.mT, conv.weight[:, None], conv.bias, groups=6).mT
    got = conv(inputs)
    assert error(got, F.silu(want)) < 1e-14
    split = min(split, length)
    parts = [conv(inputs[:, : 3 + split]), conv(inputs[:, split:])]
    assert error(torch.cat(parts, 1), got) < 1e-14  # SiLU rounds by position in a CPU vector


def test_the_convolution_sees_no_other_document():
    conv = CausalConvolution(6).double()
    inputs, documents = torch.randn(1, 13, 6).double(), torch.tensor([[0, 0, 0, 0, 0, 1, 2, 2, 2]])
    documents = torch.cat([documents, documents[:, -1:].expand(1, 4)], 1)
    got = conv(inputs, documents)
    alone = F.pad(inputs[:, 6:], (0, 0, 3, 0))
    assert error(got[:, 3:], conv(alone)) < 1e-14
    assert error(got[:, :2], conv(inputs[:, :5])) < 1e-14
    spoiled = inputs.clone()
    spoiled[:, :6] = torch.nan
    assert torch.equal(conv(spoiled, documents)[:, 3:], got[:, 3:])


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_padding_may_hold_anything(garbage):
    """The same outputs, states and gradients, to the last bit, as with zeros for padding."""
    block, x, lengths = random_block(), torch.randn(3, 9, 12).double(), torch.tensor([9, 4, 0])
    inside, found = torch.arange(9) < lengths[:, None], []
    for value in (0.0, garbage):
        padded = x.masked_fill(~inside[..., None], value).requires_grad_()
        y, state = block(padded, lengths=lengths)
        loss = y[inside].square().sum() + sum(part.square().sum() for part in state)
        gradients = torch.autograd.grad(loss, [padded, *block.parameters()])
        found.append([y[inside], *state, *gradients])
    assert all(map(torch.equal, *found))


@given(blocks=st.integers(1, 5), seed=st.integers(0, 999))
def test_a_block_diagonal_projection_is_a_dense_one_with_zeros(blocks, seed):
    torch.manual_seed(seed)
    layer = BlockDiagonal(4 * blocks).double()
    x = torch.randn(2, 3, 4 * blocks, dtype=torch.float64, requires_grad=True)
    dense = torch.block_diag(*layer.weight)
    assert (dense == 0).sum() == (4 * blocks) ** 2 - 16 * blocks
    got, want = layer(x), F.linear(x, dense)
    assert error(got, want) < 1e-14
    seeds = torch.randn_like(want)
    ours = torch.autograd.grad((got * seeds).sum(), (x, layer.weight))
    theirs = torch.autograd.grad((want * seeds).sum(), (x, layer.weight))
    assert all(error(one, two) < 1e-14 for one, two in zip(ours, theirs, strict=True))


# The block against its equations, token by token


def by_the_equations(block: PreviousBlock, y: Tensor, starts: list[int]) -> Tensor:
    """One row [T, d] of documents that start at `starts`, with plain loops and dense matrices."""
    w = {name.removeprefix("mlstm_layer."): p for name, p in block.named_parameters()}
    dense = {name: torch.block_diag(*w[f"{name}.weight"]) for name in "qkv"}
    heads, width = len(w["igate_preact.bias"]), len(w["skip.weight"])
    d = width // heads
    outputs = []
    for t in range(len(y)):
        if t in starts:
            C, n, m = y.new_zeros(heads, d, d), y.new_zeros(heads, d), y.new_zeros(heads)
            past = [y.new_zeros(width)] * 3
        normed = y[t] / (y[t].square().mean() + 1e-6).sqrt() * w["norm_mlstm.weight"]
        x, z = w["proj_up.weight"] @ normed, w["proj_up_gate.weight"] @ normed
        past = [*past[-3:], x]
        c = F.silu(sum(w["conv.weight"][:, j] * past[j] for j in range(4)) + w["conv.bias"])
        q, k, v = dense["q"] @ c, dense["k"] @ c, dense["v"] @ x
        qkv = torch.cat([q, k, v])
        i, f = (
            15 * torch.tanh((w[f"{g}gate_preact.weight"] @ qkv + w[f"{g}gate_preact.bias"]) / 15)
            for g in "if"
        )
        q, k, v = (part.view(heads, d) for part in (q, k, v))
        m_new = torch.maximum(F.logsigmoid(f) + m, i).detach()
        kept, added = torch.exp(F.logsigmoid(f) + m - m_new), torch.exp(i - m_new)
        C = kept[:, None, None] * C + added[:, None, None] * k[:, :, None] * v[:, None, :]
        n, m = kept[:, None] * n + added[:, None] * k, m_new
        q = q / d**0.5
        below = torch.maximum((n * q).sum(-1).abs(), torch.exp(-m)) + 1e-6
        h = torch.einsum("hkv,hk->hv", C, q) / below[:, None]
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        h = h.flatten() * w["multihead_norm.weight"] + w["skip.weight"] * c
        outputs.append(y[t] + w["out_proj.weight"] @ (h * F.silu(z)))
    return torch.stack(outputs)


@pytest.mark.parametrize("heads", [1, 4])
def test_outputs_and_gradients_are_those_of_the_equations(heads):
    block = random_block(replace(SMALL, num_heads=heads))
    length, starts = 70, [0, 5, 6, 66]
    x = torch.randn(1, length, 12, dtype=torch.float64, requires_grad=True)
    resets = torch.zeros(1, length, dtype=torch.bool)
    resets[:, starts] = True
    got, _ = block(x, resets=resets)
    want = by_the_equations(block, x[0], starts)[None]
    assert error(got, want) < 1e-12
    seeds = torch.randn_like(got)
    leaves = [x, *block.parameters()]
    ours = torch.autograd.grad((got * seeds).sum(), leaves)
    theirs = torch.autograd.grad((want * seeds).sum(), leaves)
    names = ["x", *(name for name, _ in block.named_parameters())]
    for name, one, two in zip(names, ours, theirs, strict=True):
        assert error(one, two) < 1e-10, name


def test_gradients_flow_through_the_state():
    block = random_block()
    x = torch.randn(2, 8, 12, dtype=torch.float64, requires_grad=True)
    whole = torch.autograd.grad(block(x)[0][:, 5:].sum(), x)[0]
    _, state = block(x[:, :5])
    parts = torch.autograd.grad(block(x[:, 5:], state)[0].sum(), x)[0]
    assert error(parts, whole) < 1e-12


# The model: states, documents, padding


@settings(max_examples=20)
@given(
    width=st.integers(1, 4),
    heads=st.sampled_from([1, 2, 3]),
    blocks=st.integers(1, 2),
    gate=st.sampled_from([-10.0, 0.0]),
)
def test_models_of_all_sizes_keep_the_rules(width, heads, blocks, gate):
    check_model(
        ModelConfig(
            2 * heads * width,
            blocks,
            heads,
            vocab_size=31,
            igate_bias_init_range=gate,
            **FACTORS,
        )
    )


@pytest.mark.parametrize(
    "variant",
    [
        {"head_norm": "rms_norm", "igate_bias_init_range": 0.0},
        {"input_gate": "fixed", "norm": "layer_norm"},
        {"gate_soft_cap": None, "output_logit_soft_cap": None, "gate": "fixed"},
    ],
    ids=str,
)
def test_variants_of_the_paper_keep_the_rules(variant):
    check_model(replace(SMALL, **variant))


def test_single_tokens_give_the_logits_and_states_of_a_sequence():
    model, tokens = random_model(SMALL), random_tokens(2, 70, SMALL)
    with torch.no_grad():
        want, last = model(tokens)
        state, got = ModelState.zeros(SMALL, 2, dtype=torch.float64), []
        for t in range(70):
            logits, state = model(tokens[:, t : t + 1], state)
            got.append(logits)
    assert error(torch.cat(got, 1), want) < 1e-12
    assert_states_match(state, last, 1e-12)


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 999))
def test_packed_documents_are_read_as_if_alone_and_padding_changes_nothing(data, seed):
    torch.manual_seed(seed)
    model = random_model(SMALL)
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    padding = data.draw(st.integers(0, 4))
    documents = [random_tokens(1, length, SMALL) for length in lengths]
    row = torch.cat([*documents, random_tokens(1, padding, SMALL)], 1)
    resets = torch.zeros_like(row, dtype=torch.bool)
    resets[0, [sum(lengths[:at]) for at in range(len(lengths))]] = True
    resets[0, sum(lengths) :] = data.draw(st.booleans())
    before = ModelState.zeros(SMALL, 1, dtype=torch.float64)
    with torch.no_grad():
        if data.draw(st.booleans()):
            _, before = model(random_tokens(1, 4, SMALL))  # of another document
        got, state = model(row, before, resets=resets, lengths=torch.tensor([sum(lengths)]))
        end = 0
        for tokens in documents:
            want, after = model(tokens)
            start, end = end, end + tokens.shape[1]
            assert error(got[:, start:end], want) < 1e-12
        assert_states_match(state._replace(tokens_seen=after.tokens_seen), after, 1e-12)
        # The next token, too, sees nothing of the documents before.
        token = random_tokens(1, 1, SMALL)
        assert error(model(token, state)[0], model(token, after)[0]) < 1e-12


def test_a_state_is_exact_for_every_dtype():
    """bfloat16 vectors are kept as they are, so parts of a text give the convolution the same."""
    block = random_block(dtype=torch.bfloat16)
    x = torch.randn(2, 7, 12).bfloat16()
    with torch.no_grad():
        _, whole = block(x)
        _, first = block(x[:, :2])
        _, second = block(x[:, 2:], first)
    assert isinstance(second, PreviousState)
    assert whole.conv.dtype == torch.float32
    assert torch.equal(second.conv, whole.conv)
    for dtype in (torch.bfloat16, torch.float64):
        zeros = PreviousBlock.zero_state(SMALL, 3, dtype=dtype)
        assert zeros.C.dtype == dtype
        assert zeros.conv.dtype == zeros.n.dtype == torch.promote_types(dtype, torch.float32)
    assert SMALL.state_parts()["conv"] == ((3, 24), False)


# Sizes


@pytest.mark.parametrize(
    ("size", "shape", "parameters", "published", "state_bytes"),
    [
        ("160m", (24, 4, 384), 163_806_144, "163.8M", 57_213_312),
        ("400m", (48, 4, 512), 409_290_112, "409.3M", 202_900_224),
        ("1.4b", (48, 4, 1024), 1_422_559_616, "1.423B", 808_452_864),
        ("7b", (64, 8, 1024), 6_889_935_872, "6.890B", 2_155_874_304),
    ],
)
def test_the_papers_sizes(size, shape, parameters, published, state_bytes):
    config = ModelConfig.named(f"{size}-previous")
    assert (config.num_blocks, config.num_heads, config.d_qk) == shape
    assert config.d_hv == config.d_qk
    assert config.embedding_dim == ModelConfig.named(size).embedding_dim
    with torch.device("meta"):
        model = XLSTM(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    counts = accounting.parameter_counts(config)
    assert counts["total"] == parameters
    unit, digits = (1e9, 3) if published[-1] == "B" else (1e6, 1)
    assert f"{parameters / unit:.{digits}f}{published[-1]}" == published
    assert counts["ffn"] == 0
    assert accounting.state_bytes(config)["total"] == state_bytes
    # The recipe is that of the size; the largest models compute their states again.
    recipe = load_recipe(f"{size}-previous")
    assert recipe.model == config
    assert recipe.optimizer == load_recipe(size).optimizer
    assert (recipe.run.activation_checkpointing == "block") == (size in ("1.4b", "7b"))


def test_flops_are_two_per_weight_and_token_and_what_is_elementwise():
    config, length = ModelConfig.named("160m-previous"), 100
    forward = accounting.forward_flops(config, length)
    weights = sum(
        torch.Size(shape).numel()
        for name, shape in config.parameter_shapes().items()
        if len(shape) >= 2 and "embeddings" not in name
    )
    parts = ("mlstm_projections", "convolution", "gates", "head")
    elementwise = config.num_blocks * (4 * config.v_dim + 2 * config.num_heads)
    assert sum(forward[part] for part in parts) == length * (2 * weights + elementwise)
    cell = accounting.cell_flops(length, 64, 4, 384, 384)["total"]
    assert forward["cell"] == config.num_blocks * cell
    assert accounting.summary(config)["shape"]["block"] == "previous"
    assert accounting.summary(config)["shape"]["ffn_dim"] == 0


def test_first_weights():
    block = PreviousBlock.from_config(ModelConfig(512, 24, 4, **FACTORS))
    layer = block.mlstm_layer
    std = {"proj_up": 0.4 / 512, "proj_up_gate": 0.4 / 512, "q": 0.1, "k": 0.1, "v": 0.1}
    std |= {"conv": 0.1, "out_proj": 4 / (24**2 * 512)}
    for name, variance in std.items():
        drawn = layer.get_submodule(name).weight.var().item()
        assert drawn == pytest.approx(variance, rel=0.1), name
    assert layer.igate_preact.weight.shape == (4, 6 * 512)
    assert not layer.igate_preact.weight.any()
    assert not layer.conv.bias.any()
    assert layer.igate_preact.bias.tolist() == [-10] * 4
    assert layer.fgate_preact.bias.tolist() == [3, 4, 5, 6]
    assert layer.skip.weight.tolist() == [1] * 1024


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, r"needs qk_dim_factor = v_dim_factor = 2, not 0\.5 and 1\.0; .*160m-previous"),
        ({"qk_dim_factor": 2.0}, r"factor = 2, not 2\.0 and 1\.0"),
        ({"embedding_dim": 15, "num_heads": 1, **FACTORS}, "needs an even embedding_dim, not 15"),
        (
            {"mlstm_round_up_to_multiple_of": 64, **FACTORS},
            "of = 1, not 64, which makes the width 64 instead of 32$",
        ),
    ],
)
def test_configs_that_the_block_refuses(fields, words):
    config = ModelConfig(**{"embedding_dim": 16, "num_blocks": 2, "num_heads": 2} | fields)
    with pytest.raises(ValueError, match=words):
        accounting.parameter_counts(replace(config, block="previous"))


def test_wrong_resets_are_refused():
    with pytest.raises(ValueError, match=r"^resets must have the shape \[2, 5\], not \[2, 4\]$"):
        random_block()(torch.randn(2, 5, 12).double(), resets=torch.ones(2, 4).bool())


def test_states_of_other_models_are_refused():
    x, wider = torch.randn(2, 5, 12).double(), replace(SMALL, embedding_dim=24)
    with pytest.raises(TypeError, match=r"^the state must be a PreviousState, not a MLS"):
        random_block()(x, MLSTMState.zeros(2, 4, 6, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^the state's conv must have the shape \[2, 3, 24\]"):
        random_block()(x, PreviousBlock.zero_state(wider, 2, dtype=torch.float64))


# Files, torch.compile and autocast


def test_a_folder_is_loaded_as_it_was_saved_and_has_its_own_type(tmp_path):
    model, tokens = random_model(SMALL, torch.float32), random_tokens(2, 9, SMALL)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["block"], config["head_dim"]) == ("xlstm7b", "previous", 6)
    loaded = XLSTM.from_pretrained(tmp_path)
    assert loaded.config == SMALL
    with torch.no_grad():
        assert torch.equal(loaded(tokens)[0], model(tokens)[0])


def test_a_compiled_block_gives_the_same():
    torch.compiler.reset()
    block = random_block(dtype=torch.float32)
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
    x, resets = torch.randn(2, 70, 12, requires_grad=True), torch.rand(2, 70) < 0.1

    def run(call):
        y, state = call(x, resets=resets)
        gradients = torch.autograd.grad(y.square().sum(), [x, *block.parameters()])
        return [y, *state, *gradients]

    for got, want in zip(run(compiled), run(block), strict=True):
        assert error(got, want) < 1e-5


@pytest.mark.parametrize("mode", ["selective", "block"])
def test_a_block_that_is_computed_again_has_the_same_gradients(mode):
    block, x = random_block(), torch.randn(2, 9, 12, dtype=torch.float64)
    resets = torch.rand(2, 9) < 0.2
    gradients = []
    for _ in range(2):
        block.zero_grad()
        block(x, resets=resets)[0].square().sum().backward()
        gradients.append([p.grad.clone() for p in block.parameters()])
        checkpoint_activations(block, mode)
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_autocast_computes_what_a_bfloat16_block_computes():
    block = random_block(dtype=torch.float32)
    x, resets = torch.randn(2, 9, 12), torch.rand(2, 9) < 0.2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, state = block(x, resets=resets)
    with torch.no_grad():
        want, want_state = block.bfloat16()(x.bfloat16(), resets=resets)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    assert all(torch.equal(one, two) for one, two in zip(state, want_state, strict=True))


def test_a_stack_of_vectors_takes_it_too():
    stack = MLSTMStack(16, 2, 2, **FACTORS)
    y, state = stack(torch.randn(2, 5, 16))
    assert y.shape == (2, 5, 16)
    assert isinstance(state.blocks[1], PreviousState)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "heads"), [(768, 4), (512, 1)], ids=["384-wide", "1024-wide"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_bfloat16_layer_on_a_gpu_is_near_float64(dim, heads, compiled):
    """The layer without its residual connection, which would hide what it adds."""
    torch.compiler.reset()
    exact = PreviousBlock.from_config(ModelConfig(dim, 24, heads, **FACTORS)).mlstm_layer
    with torch.no_grad():
        exact.igate_preact.weight.normal_(std=0.02)
        exact.fgate_preact.weight.normal_(std=0.02)
        exact.igate_preact.bias.zero_()
    layer = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(layer.state_dict())  # the same rounded weights
    x = torch.randn(2, 600, dim).bfloat16()
    resets, seeds = torch.rand(2, 600) < 0.01, torch.randn(2, 600, dim)

    def run(layer, x, call):
        x = x.requires_grad_()
        y, state = call(x, None, resets=resets.to(x.device), lengths=None)
        (y.double() * seeds.to(x.device, torch.float64)).sum().backward()
        found = {name: p.grad for name, p in layer.named_parameters()}
        return {"y": y, "x": x.grad, "C": state.C, "conv": state.conv, **found}

    want = run(exact.double(), x.double(), exact)
    layer = layer.cuda()
    call = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    got = run(layer, x.cuda(), call)
    for name, reference in want.items():
        if not name.endswith("preact.bias"):  # a sum over all tokens, in which most cancels
            assert error(got[name].cpu(), reference) < 3e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ["none", "block", "selective"])
def test_a_training_step_with_compiled_blocks(activations):
    """Loss and gradients of compiled, recomputed blocks are those of the plain model."""
    torch.compiler.reset()
    config = ModelConfig(128, 2, 2, vocab_size=320, **FACTORS)
    tokens, targets = torch.randint(0, 320, (2, 4, 300), device="cuda")
    weights, resets = torch.ones(4, 300, device="cuda"), torch.rand(4, 300, device="cuda") < 0.01
    plain = random_model(config, torch.float32).cuda()
    changed = XLSTM(config).cuda()
    changed.load_state_dict(plain.state_dict())
    for block in changed.backbone.blocks:
        checkpoint_activations(block, activations)
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    losses = [model.loss(tokens, targets, weights, resets=resets) for model in (changed, plain)]
    for loss in losses:
        loss.backward()
    assert error(*losses) < 1e-5
    for (name, got), want in zip(changed.named_parameters(), plain.parameters(), strict=True):
        assert error(got.grad, want.grad) < 1e-3, name
