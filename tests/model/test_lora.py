"""LoRA layers: gradients against float64, on float and on quantised weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import SMALL, random_model, random_tokens

from xlstm7b.accounting import adapted_shapes, lora_parameters
from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.model.lm import schemes_of
from xlstm7b.model.lora import LoraLinear, add_lora, base_name, lora_layers
from xlstm7b.quantize.gpu import prepare
from xlstm7b.quantize.weight import QuantizedWeight

NAMES = ["q", "k", "v", "ogate_preact", "out_proj", "proj_up", "proj_up_gate", "proj_down"]
GATES = ["igate_preact", "fgate_preact"]


def adapted(
    scheme: str | None, targets: list[str], rank: int, dtype: torch.dtype = torch.float64
) -> tuple[XLSTM, XLSTM]:
    """A model with an adapter, and a float64 model with the same weights, merged."""
    torch.manual_seed(0)
    exact = random_model()
    model = XLSTM(SMALL).to(dtype)
    parameters = {name: p.detach().clone() for name, p in exact.named_parameters()}
    schemes = {} if scheme is None else schemes_of(SMALL, scheme)
    model.replace_quantized(schemes)
    for name in schemes:
        weight = QuantizedWeight.quantize(parameters[name], schemes[name])
        model.get_submodule(name.removesuffix(".weight")).weight = weight
        parameters[name] = weight.dequantize(torch.float64)
    floats = dict(model.named_parameters())
    add_lora(model, targets, rank=rank, alpha=5.0)
    model.to(dtype)
    with torch.no_grad():
        for name, parameter in floats.items():
            parameter.copy_(parameters[name])
        for path, layer in lora_layers(model):
            layer.lora_B.normal_(std=0.1)
            added = layer.scale * layer.lora_B.double() @ layer.lora_A.double()
            parameters[f"{path}.weight"] = parameters[f"{path}.weight"] + added
        for name, parameter in exact.named_parameters():
            parameter.copy_(parameters[name])
    return model, exact


@settings(max_examples=12, deadline=None)
@given(
    scheme=st.sampled_from([None, "int8", "int4", "fp8"]),
    targets=st.lists(st.sampled_from(NAMES + GATES), min_size=1, unique=True),
    rank=st.integers(1, 9),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_gradients_are_those_of_the_merged_float64_model(scheme, targets, rank, dtype):
    model, exact = adapted(scheme, targets, rank, dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-3
    tokens, wanted = random_tokens(2, 20), random_tokens(2, 20)
    resets, weights = torch.rand(2, 20) < 0.1, torch.rand(2, 20, dtype=dtype)
    want = exact.loss(tokens, wanted, weights.double(), resets=resets)
    want.backward()
    loss = model.loss(tokens, wanted, weights, resets=resets)
    loss.backward()
    assert abs(loss.item() - want.item()) < tolerance * want.item()
    trained = 0
    for path, layer in lora_layers(model):
        merged = exact.get_parameter(f"{path}.weight").grad * layer.scale
        for got, right in (
            (layer.lora_A.grad, layer.lora_B.double().mT @ merged),
            (layer.lora_B.grad, merged @ layer.lora_A.double().mT),
        ):
            assert (got - right).norm() <= tolerance * right.norm(), path
            trained += got.numel()
    assert trained == lora_parameters(SMALL, targets, rank)
    frozen = [p for name, p in model.named_parameters() if ".lora_" not in name]
    assert all(p.grad is None and not p.requires_grad for p in frozen)
    # Log-probabilities of the same tokens, by the other form of the head.
    model.zero_grad()
    (-model.token_logprobs(tokens, wanted, resets=resets)[0] * weights).sum().backward()
    first = next(lora_layers(model))[1]
    merged = exact.get_parameter(f"{next(lora_layers(model))[0]}.weight").grad * first.scale
    right = first.lora_B.double().mT @ merged
    assert (first.lora_A.grad - right).norm() <= tolerance * right.norm()


def test_a_new_adapter_changes_nothing_and_keeps_the_names():
    model = random_model(dtype=torch.float32)
    names, tokens = [name for name, _ in model.named_parameters()], random_tokens(2, 9)
    before = model(tokens)[0]
    add_lora(model, NAMES, rank=4, alpha=8.0, dropout=0.5)
    assert torch.equal(model(tokens)[0], before)
    base = [name for name, _ in model.named_parameters() if ".lora_" not in name]
    assert [base_name(name) for name in base] == names
    with torch.no_grad():
        for _, layer in lora_layers(model):
            layer.lora_B.fill_(0.1)
    assert not torch.equal(model(tokens)[0], model(tokens)[0])  # dropout
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


@pytest.mark.parametrize("layout", ["stored", "gpu"])
def test_the_gradient_of_a_dequantised_product(layout):
    torch.manual_seed(0)
    product = torch.ops.xlstm7b.dequantized_product
    for scheme, columns in (("int8", 40), ("int4", 64), ("fp8", 40)):
        config = ModelConfig(64, 1, 2, vocab_size=97)
        kind = next(iter(schemes_of(config, scheme).values()))
        weight = QuantizedWeight.quantize(torch.randn(24, columns), kind)
        matrix = weight.dequantize(torch.float64)
        weight = prepare(weight) if layout == "gpu" else weight
        x = torch.randn(2, 3, columns, dtype=torch.float64, requires_grad=True)
        rest = (weight.data, weight.scale, kind.name, kind.group_size, columns, layout)
        assert error(product(x, *rest), x @ matrix.mT) < 1e-12
        assert torch.autograd.gradcheck(lambda x, rest=rest: product(x, *rest), (x,))
        if scheme == "int4":
            checks = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(product, (x, *rest), test_utils=checks)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_validation_computes_what_training_does(scheme):
    model, _ = adapted(scheme, NAMES, 4, torch.float32)
    tokens = random_tokens(2, 20)
    with torch.no_grad():
        got = model(tokens)[0]
    assert torch.equal(got, model(tokens)[0])


def test_a_block_with_an_adapter_compiles_as_one_graph():
    model, _ = adapted("int4", NAMES, 4, torch.float32)
    x, block = torch.randn(2, 20, 64, requires_grad=True), model.backbone.blocks[0]
    compiled = torch.compile(block.forward, fullgraph=True, dynamic=False, backend="eager")
    results = [forward(x)[0] for forward in (compiled, block)]
    torch.testing.assert_close(*results)
    trained = [x, block.mlstm_layer.q.lora_A, block.ffn.proj_down.lora_B]
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), trained) for y in results))


def test_targets_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match=r"called 'qq'; choose from fgate_preact, .*, v$"):
        adapted_shapes(SMALL, ["q", "qq"])
    with pytest.raises(ValueError, match="not supported for a Embedding"):
        LoraLinear(random_model().backbone.embeddings, 2, scale=1.0)


def test_a_quantised_model_that_is_not_frozen_still_scores(tmp_path):
    """Its weights may be laid out for this CPU, where there is no gradient."""
    random_model(dtype=torch.float32).save_pretrained(tmp_path)
    tokens = random_tokens(1, 9)
    for scheme in ("int8", "int4", "fp8"):
        model = XLSTM.from_pretrained(tmp_path, quantize=scheme)
        logprobs, _ = model.token_logprobs(tokens, tokens)
        assert logprobs.isfinite().all()
