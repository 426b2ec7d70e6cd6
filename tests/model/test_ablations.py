"""The paper's ablations as config fields, against the model's equations in plain float64."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines import Driver, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import assert_states_match, random_model, random_tokens, spread_model
from torch import Tensor
from train_processes import CONFIG, in_processes, layouts_agree, run
from train_runs import losses, recipe

from xlstm7b import XLSTM, Engine, ModelConfig, accounting
from xlstm7b.checkpoint import transformers_limits
from xlstm7b.data.shards import ShardWriter, write_manifest
from xlstm7b.generate.fused import FusedModel
from xlstm7b.model.contract import check_model
from xlstm7b.model.layers import RMSNorm
from xlstm7b.registry import register
from xlstm7b.tokenizer import ByteTokenizer
from xlstm7b.train import make_plan
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.recipe import Layout
from xlstm7b.train.run_checkpoints import export_run
from xlstm7b.train.sharded_model import check_same_model, parallelize

# Each makes another model than the released one.
VARIANTS = [
    {"norm": "layer_norm"},
    {"head_norm": "rms_norm"},
    {"gate_soft_cap": None},
    {"output_logit_soft_cap": None},
    {"input_gate": "fixed"},
    {"input_gate": "fixed", "igate_bias_init_range": 0.0},
]
ALL = {name: value for variant in VARIANTS for name, value in variant.items()}


# The equations


def reference(p: dict[str, Tensor], config: ModelConfig, tokens: Tensor) -> Tensor:
    """Logits [B, T, V] from parameters by name: the paper's recurrence, token by token."""
    x = p["backbone.embeddings.weight"][tokens]
    for number in range(config.num_blocks):
        start = f"backbone.blocks.{number}."
        own = {name.removeprefix(start): w for name, w in p.items() if name.startswith(start)}
        z = x + mlstm(own, config, norm(config.norm, x, config.norm_eps) * own["norm_mlstm.weight"])
        y = norm(config.norm, z, config.norm_eps) * own["norm_ffn.weight"]
        up = F.silu(y @ own["ffn.proj_up_gate.weight"].T) * (y @ own["ffn.proj_up.weight"].T)
        x = z + up @ own["ffn.proj_down.weight"].T
    x = norm(config.norm, x, config.norm_eps) * p["backbone.out_norm.weight"]
    return capped(x @ p["lm_head.weight"].T, config.output_logit_soft_cap)


def mlstm(p: dict[str, Tensor], config: ModelConfig, x: Tensor) -> Tensor:
    def heads(name: str) -> Tensor:
        return (x @ p[f"mlstm_layer.{name}.weight"].T).unflatten(-1, (config.num_heads, -1))

    def gate(name: str) -> Tensor:
        if f"mlstm_layer.{name}.bias" not in p:
            assert (name, config.input_gate) == ("igate_preact", "fixed")
            value = torch.tensor(config.igate_bias_init_range, dtype=x.dtype)
            return capped(value, config.gate_soft_cap).expand(*x.shape[:2], config.num_heads)
        product = heads(name).squeeze(-1) + p[f"mlstm_layer.{name}.bias"]
        return capped(product, config.gate_soft_cap)

    q, k, v, o = (heads(name) for name in ("q", "k", "v", "ogate_preact"))
    i, log_f = gate("igate_preact"), F.logsigmoid(gate("fgate_preact"))
    C = x.new_zeros(len(x), config.num_heads, config.d_qk, config.d_hv)
    n, m = C[..., 0], C[..., 0, 0]
    rows = []
    for t in range(x.shape[1]):
        m_old, m = m, torch.maximum(log_f[:, t] + m, i[:, t]).detach()
        f_t, i_t = torch.exp(log_f[:, t] + m_old - m), torch.exp(i[:, t] - m)
        C = f_t[..., None, None] * C
        C = C + i_t[..., None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        n = f_t[..., None] * n + i_t[..., None] * k[:, t]
        scaled = q[:, t] / config.d_qk**0.5
        below = torch.maximum((n * scaled).sum(-1).abs(), torch.exp(-m)) + config.eps
        rows.append((C * scaled[..., None]).sum(-2) / below[..., None])
    h = norm(config.head_norm, torch.stack(rows, 1), config.cell_norm_eps).flatten(-2)
    h = h * p["mlstm_layer.multihead_norm.weight"] * torch.sigmoid(o.flatten(-2))
    return h @ p["mlstm_layer.out_proj.weight"].T


def norm(kind: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if kind == "layer_norm" else x
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)


def capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


@st.composite
def configs(draw) -> ModelConfig:
    """Any combination of the fields, with heads of odd sizes."""
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    return ModelConfig(
        2 * heads * draw(st.sampled_from([3, 5, 8])),
        draw(st.integers(1, 2)),
        heads,
        vocab_size=11,
        ffn_proj_factor=1.3,
        ffn_round_up_to_multiple_of=draw(st.sampled_from([1, 8])),
        norm=draw(st.sampled_from(["rms_norm", "layer_norm"])),
        head_norm=draw(st.sampled_from(["layer_norm", "rms_norm"])),
        gate_soft_cap=draw(st.sampled_from([None, 15.0, 2.0])),
        output_logit_soft_cap=draw(st.sampled_from([None, 30.0, 1.0])),
        input_gate=draw(st.sampled_from(["", "linear", "fixed"])),
        igate_bias_init_range=draw(st.sampled_from([0, -2, -5, -10])),
    )


@settings(max_examples=30)
@given(config=configs(), batch=st.integers(1, 2), length=st.sampled_from([1, 5, 9]))
def test_logits_gradients_and_single_tokens_follow_the_equations(config, batch, length):
    torch.manual_seed(0)
    model = random_model(config, gate_std=1.0)
    with torch.no_grad():
        model.lm_head.weight *= 5  # into the soft-cap
    tokens = random_tokens(batch, length + 1, config)
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    weights = torch.rand(batch, length, dtype=torch.float64)
    exact = {name: w.detach().clone().requires_grad_() for name, w in model.named_parameters()}
    want = reference(exact, config, tokens)
    logprobs = want.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    (-logprobs * weights).sum().backward()
    got, state = model(tokens)
    assert error(got, want) < 1e-11
    assert error(model.token_logprobs(tokens, targets)[0], logprobs) < 1e-11
    model.loss(tokens, targets, weights).backward()
    for name, parameter in model.named_parameters():
        wanted = exact[name].grad
        assert (parameter.grad - wanted).norm() <= 1e-9 * wanted.norm() + 1e-12, name
    with torch.no_grad():
        logits, after = model(tokens[:, :1])
        for t in range(1, length):
            logits, after = model(tokens[:, t : t + 1], after)
            assert error(logits, want[:, t : t + 1]) < 1e-11
    assert_states_match(after, state, 1e-11)
    assert config.parameter_shapes() == {name: w.shape for name, w in exact.items()}
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_fixed_gate_is_the_gate_that_a_model_starts_with():
    """At first a learned gate does not depend on the input: the same logits, fewer parameters."""
    config = ModelConfig(32, 2, 2, vocab_size=40, igate_bias_init_range=-2.0)
    torch.manual_seed(0)
    learned = XLSTM(config)
    fixed = XLSTM(replace(config, input_gate="fixed"))
    left_out = fixed.load_state_dict(learned.state_dict(), strict=False)
    assert not left_out.missing_keys
    assert all("igate_preact" in name for name in left_out.unexpected_keys)
    tokens = random_tokens(2, 7, config)
    assert torch.equal(learned(tokens)[0], fixed(tokens)[0])
    counts, others = (accounting.parameter_counts(model.config) for model in (learned, fixed))
    assert counts["gates"] == 2 * others["gates"] == 2 * 2 * 2 * 33
    flops, others = (accounting.step_flops(model.config) for model in (learned, fixed))
    assert flops["gates"] == 2 * others["gates"]
    assert fixed.bfloat16()(tokens)[0].dtype == torch.float32


# Files, generation, training


@pytest.mark.parametrize("variant", [*VARIANTS, ALL], ids=str)
class TestEveryVariant:
    def test_keeps_the_rules(self, variant):
        check_model(ModelConfig(32, 2, 2, vocab_size=40, **variant))

    def test_is_saved_loaded_and_generates(self, variant, tmp_path, caplog):
        model = spread_model(**variant)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        model.save_pretrained(tmp_path)
        values = json.loads((tmp_path / "config.json").read_text())
        assert values["model_type"] == "xlstm7b"
        assert {name: values[name] for name in variant} == variant
        loaded = XLSTM.from_pretrained(tmp_path)
        assert loaded.config == model.config
        for one, two in zip(model.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(one, two)
        # Without a soft-cap the fused path computes the model. Of other classes it knows nothing.
        is_fused = not {"norm", "head_norm", "input_gate"} & variant.keys()
        with caplog.at_level(logging.WARNING, logger="xlstm7b"):
            driver = Driver(Engine(loaded, ByteTokenizer(), slots=2))
        assert any("fused path does not know" in line for line in caplog.messages) != is_fused
        requests = driver.add_all([greedy("So much de", 8), greedy("So", 8)])
        driver.finish()
        for request in requests:
            ids = [0, *ByteTokenizer().encode(request.prompt)]
            for _ in range(8):
                with torch.no_grad():
                    ids.append(int(model(torch.tensor([ids]), logits="last")[0].argmax()))
            assert driver.completion(request).token_ids == ids[-8:]

    def test_is_fused_only_if_the_fused_path_computes_it(self, variant):
        model = spread_model(**variant)
        for parameter in model.parameters():
            parameter.data.mul_(1e-3)  # the logits would not show a difference
        if {"norm", "head_norm", "input_gate"} & variant.keys():
            with pytest.raises(ValueError, match=r" is a .*, not a .*fused=False"):
                FusedModel(model)
        else:
            FusedModel(model)


def test_transformers_refuses_every_variant(tmp_path):
    transformers = pytest.importorskip("transformers")
    for number, variant in enumerate(VARIANTS):
        config = ModelConfig(64, 1, 1, vocab_size=40, **variant)
        XLSTM(config).save_pretrained(tmp_path / str(number))
        with pytest.raises(ValueError, match="xlstm7b"):
            transformers.AutoConfig.from_pretrained(tmp_path / str(number))
        (sentence,) = transformers_limits(config)
        assert sentence.startswith("transformers cannot load this model: it has ")


def test_files_of_the_released_model_and_older_ones():
    config = ModelConfig(64, 1, 1, vocab_size=40, input_gate="linear")
    assert config == ModelConfig(64, 1, 1, vocab_size=40)
    assert config.is_standard
    values = config.to_dict()
    assert values["model_type"] == "xlstm"
    assert not {"norm", "head_norm", "gate", "input_gate"} & values.keys()
    # Before these fields there were folders with the names of other classes.
    before = {**values, "model_type": "xlstm7b", "block": "mlstm", "gate": "linear"}
    assert ModelConfig.from_dict({**before, "norm": "layer_norm"}) == replace(
        config, norm="layer_norm"
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"gate_soft_cap": "no"},
            r'gate_soft_cap must be of type float or null \("none" in TOML\)',
        ),
        ({"output_logit_soft_cap": 0.0}, "output_logit_soft_cap must be a positive number, not 0"),
        ({"norm_eps": None}, "norm_eps must be of type float, not None"),
        ({"input_gate": "none"}, "there is no gate 'none', only .*fixed, linear"),
        ({"head_norm": "none"}, "there is no head_norm 'none', only .*layer_norm, .*rms_norm"),
    ],
)
def test_wrong_values_are_named(fields, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        ModelConfig(64, 1, 1, **fields)


def test_a_class_of_the_package_cannot_be_replaced():
    """Not even by one of its own name from a notebook, which has no file."""
    again = type("LayerNorm", (RMSNorm,), {"__module__": "a_notebook", "__qualname__": "LayerNorm"})
    with pytest.raises(
        ValueError, match=r"^norm 'layer_norm' is xlstm7b\.model\.layers\.LayerNorm"
    ):
        register("norm", "layer_norm")(again)


def test_a_recipe_trains_and_exports_them_all(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    with ShardWriter(data / "00000.ds", vocab_size=320) as writer:
        for _ in range(40):
            writer.add(np.arange(100) % 7 + 100)
    write_manifest(data, [writer.entry], vocab_size=320, tokenizer_fingerprint="bytes")
    chosen = recipe(
        data,
        "model.norm=layer_norm",
        "model.head_norm=rms_norm",
        "model.gate_soft_cap=none",
        "model.output_logit_soft_cap=none",
        "model.input_gate=fixed",
        "model.igate_bias_init_range=-2",
        "run.activation_checkpointing=selective",
    )
    assert chosen.model == ModelConfig(
        64, 2, 2, vocab_size=320, **{**ALL, "igate_bias_init_range": -2}
    )
    assert type(chosen).from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen
    assert make_plan(chosen).parameters == accounting.parameter_counts(chosen.model)["total"]
    run(0, chosen, tmp_path / "run")
    seen = losses(tmp_path / "run")
    assert seen[-1] < seen[0]
    gates = [
        line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "input_gate_max" in line
    ]
    assert all(line["input_gate_max"] == line["input_gate_mean"] == [-2.0, -2.0] for line in gates)
    export_run(tmp_path / "run", tmp_path / "model")
    assert XLSTM.from_pretrained(tmp_path / "model").config == chosen.model


def test_a_fixed_gate_must_be_the_one_of_the_weights():
    config = ModelConfig(64, 1, 1, vocab_size=40)
    check_same_model("here", config, replace(config, igate_bias_init_range=0))
    fixed = replace(config, input_gate="fixed")
    with pytest.raises(ValueError, match=r"^the model in here has igate_bias_init_range -10\.0"):
        check_same_model("here", fixed, replace(fixed, igate_bias_init_range=0))
    with pytest.raises(ValueError, match=r"^the model in here has input_gate '', the recipe 'fix"):
        check_same_model("here", config, fixed)


@pytest.mark.parametrize(
    ("fields", "layouts"),
    [
        (
            {name: value for name, value in ALL.items() if name != "input_gate"},
            [Layout(1, 2, 1), Layout(1, 1, 2)],
        ),
        (ALL, [Layout(1, 2, 1), Layout(2, 1, 1)]),
    ],
    ids=["norms and soft-caps", "all"],
)
def test_layouts_have_the_one_process_gradients(fields, layouts):
    # In float64: the gradient of a gate's bias is a small difference of large numbers here.
    in_processes(2, layouts_agree, layouts, replace(CONFIG, **fields), torch.float64)


def test_tensor_parallelism_cannot_split_a_fixed_gate():
    class Mesh(dict):
        size = staticmethod(lambda: 2)

    with torch.device("meta"):
        model = XLSTM(replace(CONFIG, input_gate="fixed"))
    with pytest.raises(ValueError, match=r"set parallel\.tp = 1$"):
        parallelize(model, {"tp": Mesh()}, torch.float32)


def gradient_error(model, exact):
    """The largest relative error of a module's gradient.

    A gate's bias counts with its weight: alone, its gradient is a small difference of large
    numbers.
    """
    return max(
        error(*(torch.cat([p.grad.flatten().cpu() for p in each]) for each in pair))
        for one, other in zip(model.modules(), exact.modules(), strict=True)
        if all(pair := [list(each.parameters(recurse=False)) for each in (one, other)])
    )


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [*VARIANTS, ALL], ids=str)
def test_a_gpu_computes_what_the_cpu_computes(variant):
    """Training with compiled blocks, and generation by the engine, both in float32.

    The gradients are compared with float64. A learned input gate has the bias -10 of a new model:
    the cell's denominator is then far from zero, and float32 on a CPU is off by 5e-6 at most. With
    a gate near 0, |n q| can be close to zero, and the error is up to 100 times larger.
    """
    model = spread_model(embedding_dim=128, **variant)
    for name, parameter in model.named_parameters():
        if name.endswith("igate_preact.bias"):
            torch.nn.init.constant_(parameter, -10.0)
    gate_at_zero = "igate_bias_init_range" in variant
    exact = XLSTM(model.config).double()
    on_gpu = XLSTM(model.config).cuda()
    for each in (exact, on_gpu):
        each.load_state_dict(model.state_dict())
    for block in on_gpu.backbone.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    tokens, targets = random_tokens(4, 300, model.config).chunk(2)
    weights = torch.full(tokens.shape, 1 / tokens.numel())
    want = exact.loss(tokens, targets, weights.double())
    want.backward()
    got = on_gpu.loss(tokens.cuda(), targets.cuda(), weights.cuda())
    got.backward()
    assert error(got.cpu(), want) < 1e-5
    assert gradient_error(on_gpu, exact) < (1e-3 if gate_at_zero else 1e-4)
    answers = []
    for device in ("cpu", "cuda"):
        generator = XLSTM(model.config).to(device)
        generator.load_state_dict(model.state_dict())
        driver = Driver(Engine(generator, ByteTokenizer(), slots=2))
        requests = driver.add_all([greedy("So much depends", 8), greedy("upon", 8)])
        driver.finish()
        answers.append([driver.completion(request).token_ids for request in requests])
    assert answers[0] == answers[1]
