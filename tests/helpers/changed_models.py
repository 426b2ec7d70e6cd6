"""Models that are not quite `XLSTM(config)`: adapters, hooks, changed layers, subclasses."""

from collections.abc import Callable

import torch
from models import spread_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from xlstm7b.model import XLSTM
from xlstm7b.model.layers import Linear, RMSNorm


class LoraLinear(nn.Module):
    """W x + B A x, as PEFT has it: B is 0 at first, so that a fresh adapter changes nothing."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.dropout = nn.Dropout(0.5)  # off in generation, whatever mode the model is in

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.dropout(x) @ self.a.mT @ self.b.mT


class HalvedNorm(RMSNorm):
    """A norm with other mathematics and the same parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class PositiveLinear(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


class Shifted(XLSTM):
    """A subclass whose `forward` adds something to the logits."""

    def forward(self, *arguments: object, **options: object) -> tuple[Tensor, object]:
        logits, state = super().forward(*arguments, **options)
        return logits.roll(1, -1), state


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def fresh_lora(model: XLSTM) -> None:
    for block in model.backbone.blocks:
        for name in ("q", "k", "v"):
            setattr(block.mlstm_layer, name, LoraLinear(getattr(block.mlstm_layer, name)))


def trained_lora(model: XLSTM) -> None:
    fresh_lora(model)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            nn.init.normal_(module.b, std=0.5)


def other_norm(model: XLSTM) -> None:
    layer = HalvedNorm(model.config.embedding_dim, model.config.norm_eps)
    layer.weight = model.backbone.blocks[1].norm_ffn.weight
    model.backbone.blocks[1].norm_ffn = layer


def other_linear(model: XLSTM) -> None:
    ffn = model.backbone.blocks[0].ffn
    layer = PositiveLinear(ffn.proj_up.in_features, ffn.proj_up.out_features, std=0.1)
    layer.weight = ffn.proj_up.weight
    ffn.proj_up = layer


def forward_hook(model: XLSTM) -> None:
    def double(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return 2 * output

    model.backbone.blocks[1].mlstm_layer.k.register_forward_hook(double)


def hook_before(model: XLSTM) -> None:
    model.backbone.out_norm.register_forward_pre_hook(lambda module, inputs: (inputs[0].cos(),))


def parametrised(model: XLSTM) -> None:
    parametrize.register_parametrization(
        model.backbone.blocks[0].ffn.proj_down, "weight", Doubled()
    )


def own_forward(model: XLSTM) -> None:
    layer = model.backbone.blocks[0].mlstm_layer.out_proj
    layer.forward = lambda x: -Linear.forward(layer, x)


def lower_soft_cap(model: XLSTM) -> None:
    model.backbone.blocks[1].mlstm_layer.gate_soft_cap = 1.0


def head_with_bias(model: XLSTM) -> None:
    model.lm_head.bias = nn.Parameter(30 * torch.randn(model.config.vocab_size))


def subclass(model: XLSTM) -> None:
    model.__class__ = Shifted


# Each change with what the refusal says of it. The first one changes no logit.
CHANGES: dict[Callable[[XLSTM], None], str] = {
    fresh_lora: "backbone.blocks.0.mlstm_layer.q is a LoraLinear, not a Linear",
    trained_lora: "backbone.blocks.0.mlstm_layer.q is a LoraLinear, not a Linear",
    other_norm: "backbone.blocks.1.norm_ffn is a HalvedNorm, not a RMSNorm",
    other_linear: "backbone.blocks.0.ffn.proj_up is a PositiveLinear, not a Linear",
    forward_hook: "backbone.blocks.1.mlstm_layer.k has hooks",
    hook_before: "backbone.out_norm has hooks",
    parametrised: "backbone.blocks.0.ffn.proj_down is a ParametrizedLinear, not a Linear",
    own_forward: "backbone.blocks.0.mlstm_layer.out_proj has a forward of its own",
    lower_soft_cap: "backbone.blocks.1.mlstm_layer has gate_soft_cap = 1.0 instead of 15.0",
    head_with_bias: "lm_head has a bias",
    subclass: "the model is a Shifted, not a XLSTM",
}


def changed_model(change: Callable[[XLSTM], None]) -> XLSTM:
    model = spread_model()
    change(model)
    return model
