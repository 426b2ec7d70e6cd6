"""LoRA: frozen layers with a trained low-rank addition, y = W x + s · B A x (arXiv 2106.09685).

`add_lora` puts a `LoraLinear` around each chosen layer. Its base keeps the weights, as floats or
quantised (QLoRA, arXiv 2305.14314). Everything but A and B is frozen.
"""

import math
from collections.abc import Collection, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xlstm7b.accounting import adapted_shapes
from xlstm7b.mlstm.autocast import to_autocast
from xlstm7b.model.layers import GateLinear, Linear, QuantizedLinear, linear
from xlstm7b.model.lm import XLSTM

_BASE = "base_layer"


class LoraLinear(nn.Module):
    """base(x) + scale · B A x. B is 0 at first, so that a new layer changes nothing.

    Dropout applies to the input of A, while training.
    """

    def __init__(self, base: nn.Module, rank: int, *, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        if not isinstance(base, Linear | GateLinear | QuantizedLinear):
            raise ValueError(f"LoRA is not supported for a {type(base).__name__}")
        self.base_layer = base
        self.scale, self.dropout = scale, dropout
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_lora(self.lora_A, self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return add_low_rank(y, x, self.lora_A, self.lora_B, self.scale)


@torch.no_grad()
def draw_lora(A: Tensor, B: Tensor) -> None:
    """Sets first values: A uniform random numbers of at most 1/√K, as in PEFT, and B zeros."""
    limit = 1 / math.sqrt(A.shape[1])
    A.uniform_(-limit, limit)
    B.zero_()


def add_low_rank(y: Tensor, x: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """y + scale · x Aᵀ Bᵀ, in y's dtype. The products are computed in x's."""
    x = to_autocast(x)
    A, B = A.to(x.dtype), B.to(x.dtype)
    z = scale * linear(x, A)
    if y.dtype != x.dtype or (x.device.type == "cpu" and x.dtype.itemsize == 2):
        return y + linear(z, B).to(y.dtype)
    # One operator, which does not write the product to memory before it is added.
    return torch.addmm(y.flatten(0, -2), z.flatten(0, -2), B.mT).view_as(y)


def freeze(model: XLSTM) -> None:
    """Freezes all parameters. Gradients then flow through quantised layers to their inputs."""
    model.requires_grad_(False)
    for layer in model.quantized_layers():
        layer.has_gradient = True


def add_lora(
    model: XLSTM, targets: Collection[str], *, rank: int, alpha: float, dropout: float = 0.0
) -> None:
    """Freezes the model, and adds A and B to the layers with these names, in every block."""
    freeze(model)
    for path in adapted_shapes(model.config, targets):
        layer = LoraLinear(model.get_submodule(path), rank, scale=alpha / rank, dropout=dropout)
        model.set_submodule(path, layer)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The paths of the adapted layers, and the layers."""
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield path, module


def base_name(name: str) -> str:
    """The name that a parameter of an adapted model has in the base's checkpoint."""
    return name.replace(f".{_BASE}.", ".")
