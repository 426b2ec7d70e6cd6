"""What this CPU's operators for quantised weights round."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from xlstm7b.model import XLSTM
from xlstm7b.model.layers import QuantizedLinear
from xlstm7b.quantize import cpu


@contextmanager
def rounded_inputs(model: XLSTM) -> Iterator[None]:
    """The model's int4 layers round their inputs as this CPU's operator does: on ARM to int8."""
    layers = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    hooks = [
        layer.register_forward_pre_hook(_round_to_int8)
        for layer in layers
        if layer.weight.scheme.name == "int4" and cpu.has_arm_int4()
    ]
    yield
    for hook in hooks:
        hook.remove()


def _round_to_int8(_: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Each row with a scale of its own, which maps its least and its largest value to 255 steps."""
    (x,) = inputs
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / 255).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / step).round() * step
