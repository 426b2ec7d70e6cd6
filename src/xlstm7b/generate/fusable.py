"""Whether a model can generate, and is the one that `FusedModel` computes, layer by layer."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.model.layers import Linear, MLSTMBlock, QuantizedLinear
from xlstm7b.model.lora import LoraLinear
from xlstm7b.registry import STANDARD
from xlstm7b.report import counted

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# Attributes that generation does not depend on. The config is what the model is compared with.
_UNUSED = ("training", "dropout", "config")


def check_language_model(model: object) -> None:
    """A `TypeError` for other modules. A wrapper that has the config of its model is accepted.

    A model in state tuning is a `ValueError`.
    """
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise TypeError(
            f"the model must be an XLSTM, which has an embedding and a head, not "
            f"{type(model).__name__}"
        )
    if getattr(getattr(model, "backbone", None), "initial_state", None) is not None:
        raise ValueError(
            "the model has an initial_state, which generation would ignore: save it as a "
            "SavedState, as `xlstm7b export` does, and give that as the state of a model without "
            "it"
        )


def difference(model: XLSTM) -> str | None:
    """Names the first layer that is not as the released model has it. None if all layers are.

    It looks at the types of modules and parameters, at hooks, at attributes such as `eps`, and at
    methods that were replaced. Values of weights make no difference.
    """
    classes: dict[str, Any] = {**STANDARD, "input_gate": ""}
    config = replace(model.config, **classes)
    with torch.device("meta"):
        standard = XLSTM(replace(config, num_blocks=1))
        # A block's attributes depend on the number of blocks.
        standard.backbone.blocks[0] = MLSTMBlock.from_config(config)
    if type(model) is XLSTM and len(model.backbone.blocks) != model.config.num_blocks:
        return (
            f"backbone.blocks holds {counted(len(model.backbone.blocks), 'block')}, "
            f"and the config says {model.config.num_blocks}"
        )
    return _difference("", model, standard)


def _difference(name: str, module: nn.Module, standard: nn.Module) -> str | None:
    called = name or "the model"
    if type(module) is QuantizedLinear and isinstance(standard, Linear):
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"{called} has hooks"
        return f"{called} has a forward of its own" if "forward" in vars(module) else None
    if type(module) is LoraLinear and type(standard) is Linear:
        if any(getattr(module, hooks) for hooks in _HOOKS) or "forward" in vars(module):
            return f"{called} has hooks or a forward of its own"
        return _difference(f"{name}.base_layer", module.base_layer, standard)
    if type(module) is not type(standard):
        return f"{called} is a {_names(type(module), type(standard))}"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return f"{called} has hooks"
    ours = {key: value for key, value in vars(standard).items() if key[0] != "_"}
    for key, value in vars(module).items():
        if key in ours and key not in _UNUSED and value != ours[key]:
            return f"{called} has {key} = {value!r} instead of {ours[key]!r}"
        if key not in ours and key[0] != "_" and hasattr(type(module), key):
            return f"{called} has a {key} of its own"
    for kind in ("_parameters", "_buffers", "_modules"):
        own, expected = getattr(module, kind), getattr(standard, kind)
        if kind == "_modules" and isinstance(module, nn.ModuleList):
            expected = dict.fromkeys(own, expected["0"])  # all blocks are alike
        for key in sorted(own.keys() ^ expected.keys()):
            return f"{called} has {'a' if key in own else 'no'} {key}"
        for key, value in own.items():
            path = f"{name}.{key}".lstrip(".")
            if (value is None) != (expected[key] is None):
                return f"{called} has {'no' if value is None else 'a'} {key}"
            if isinstance(value, nn.Module):
                found = _difference(path, value, expected[key])
                if found is not None:
                    return found
            elif value is not None and (
                type(value) is not nn.Parameter or type(value.data) is not torch.Tensor
            ):
                return f"{path} is a {_names(type(value.data), torch.Tensor)}"
    return None


def _names(found: type, expected: type) -> str:
    """The names of two types; with their modules if the names are the same."""
    names = [kind.__qualname__ for kind in (found, expected)]
    if names[0] == names[1]:
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in (found, expected)]
    return f"{names[0]}, not a {names[1]}"
