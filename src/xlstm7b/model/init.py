"""First weights. Each module sets its own parameters: `reset_parameters()`, called at construction.

The constructors run in the order of `named_parameters()`. So a model that is built on a device and
one that is filled module by module have the same weights after the same seed.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def small_std(width: int) -> float:
    """The standard deviation of matrices that read a vector of this width: √(2/(5d))."""
    return math.sqrt(2 / (5 * width))


def residual_std(width: int, num_blocks: int) -> float:
    """The standard deviation of matrices that write to the residual stream: 2/(NB·√d)."""
    return 2 / (num_blocks * math.sqrt(width))


@torch.no_grad()
def normal_(weight: Tensor, std: float) -> None:
    """N(0, std). A std of 0 sets zeros and draws no random numbers."""
    if std and not weight.is_meta:  # on meta it would do nothing, slowly
        weight.normal_(std=std)
    else:
        weight.zero_()


def reset_parameters(model: nn.Module) -> None:
    """Sets every parameter of the model to a new first value, from PyTorch's global RNG."""
    for name, module in _owners(model):
        module.reset_parameters()
        _check_written(name, module)


def drawn_parameters(model: nn.Module, device: torch.device) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and first values of a model on the meta device, which stays there.

    Only one module's parameters are in memory at a time.
    """
    for name, module in _owners(model):
        module.to_empty(device=device, recurse=False)
        module.reset_parameters()
        _check_written(name, module)
        for own, parameter in module.named_parameters(recurse=False):
            yield f"{name}.{own}".removeprefix("."), parameter
        module.to_empty(device="meta", recurse=False)


def check_initialised(model: nn.Module) -> None:
    """Raises `TypeError` if some module leaves one of its own parameters uninitialised.

    Such a parameter holds whatever was in memory.
    """
    for name, module in _owners(model):
        _check_written(name, module)


def check_no_buffers(model: nn.Module) -> None:
    """Raises `TypeError` for a buffer: nothing sets its values, and checkpoints have none.

    Training and loading build a model without memory and fill in its parameters only.
    """
    for name, _ in model.named_buffers():
        raise TypeError(
            f"{name} is a buffer, which is not saved or loaded: make it a parameter, "
            f"or compute it in forward"
        )


def _owners(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that have parameters of their own, in the order of `named_parameters()`."""
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield name, module


def _check_written(name: str, module: nn.Module) -> None:
    for own, parameter in module.named_parameters(recurse=False):
        # Every operation in place counts the version up. Inference tensors have no version.
        written = parameter.is_inference() or parameter._version > 0
        if not (written and hasattr(module, "reset_parameters")):
            kind = type(module).__name__
            raise TypeError(
                f"{name}.{own} is not initialised: give {kind} a method reset_parameters() that "
                f"sets {own!r} in place, and call it at the end of its constructor".lstrip(".")
            )
