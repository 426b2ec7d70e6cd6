"""First weights: each module sets its own, and the same seed gives the same weights as ever."""

from dataclasses import replace

import pytest
import torch
from models import SMALL
from torch import Tensor, nn

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM, layers
from xlstm7b.model.init import drawn_parameters, reset_parameters
from xlstm7b.registry import register


def fingerprint(parameters) -> float:
    """A sum that other names, values or another order would change, but not the last bits.

    Kinds of CPUs draw normal numbers with other last bits.
    """
    total = 0.0
    for name, tensor in parameters:
        flat = tensor.detach().double().flatten()
        waves = torch.arange(len(flat)).double().cos()
        total += float(flat @ waves) * (1 + sum(name.encode()) % 97)
    return total


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (SMALL, -2608.406),
        (ModelConfig(96, 3, 4, vocab_size=50, igate_bias_init_range=-3.0), 296.512),
    ],
)
def test_a_seed_gives_the_weights_of_version_0_1(config, want):
    torch.manual_seed(7)
    model = XLSTM(config)
    assert fingerprint(model.named_parameters()) == pytest.approx(want, abs=1e-2)
    other = XLSTM(config)
    torch.manual_seed(7)
    reset_parameters(other)
    with torch.device("meta"):
        empty = XLSTM(config)
    torch.manual_seed(7)
    drawn = dict(drawn_parameters(empty, torch.device("cpu")))
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter)
        assert torch.equal(drawn.pop(name), parameter)
    assert not drawn
    assert all(parameter.is_meta for parameter in empty.parameters())


@pytest.fixture
def _garbage():
    """New memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_garbage")
@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.MLSTMBlock(64, 2),
        lambda: layers.MLSTMLayer(64, 2),
        lambda: layers.SwiGLU(8, 16, 2),
        lambda: layers.RMSNorm(8, 1e-6),
        lambda: layers.NormWeight(8, 1e-6),
        lambda: layers.Embedding(5, 8),
        lambda: layers.Linear(8, 4, std=0.1),
        lambda: layers.Float32Linear(8, 4, std=0.1),
        lambda: layers.GateLinear(8, 4, biases=(3.0, 6.0)),
    ],
)
def test_a_module_alone_is_initialised(make):
    assert torch.empty(1).isnan()
    module = make()
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_a_block_alone_can_be_trained():
    block = layers.MLSTMBlock(64, 2)
    x = torch.randn(2, 9, SMALL.embedding_dim)
    y, _ = block(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in block.parameters())


@register("norm", "with_bias")
class WithBias(layers.RMSNorm):
    """A changed norm whose author forgot to initialise the new parameter."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class WithScale(layers.SwiGLU):
    """A changed feed-forward with a parameter, but without reset_parameters()."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("norm", "ffn", "name"),
    [("with_bias", layers.SwiGLU, "norm_mlstm.bias"), ("rms_norm", WithScale, "ffn.scale")],
)
def test_a_parameter_without_a_rule_is_an_error(monkeypatch, device, norm, ffn, name):
    monkeypatch.setattr(layers, "SwiGLU", ffn)
    message = rf"blocks.0.{name} is not initialised: give With\w+ a method"
    with torch.device(device), pytest.raises(TypeError, match=message):
        XLSTM(replace(SMALL, norm=norm))


def test_a_rule_that_only_the_constructor_knows_is_an_error():
    """The trainer builds on the meta device and calls reset_parameters() later."""

    @register("norm", "shifted")
    class Shifted(WithBias):
        def __init__(self, width: int, eps: float) -> None:
            super().__init__(width, eps)
            nn.init.zeros_(self.bias)

    with torch.device("meta"):
        model = XLSTM(replace(SMALL, norm="shifted"))
    with pytest.raises(TypeError, match=r"norm_mlstm\.bias is not initialised"):
        list(drawn_parameters(model, torch.device("cpu")))


def test_a_model_can_be_built_in_inference_mode():
    with torch.inference_mode():
        assert XLSTM(SMALL).lm_head.weight.isfinite().all()
