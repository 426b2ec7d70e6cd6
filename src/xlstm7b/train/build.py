"""A recipe's model, laid out over the processes and filled with its first weights."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from xlstm7b.data.tokenising import tokenizer_fingerprint
from xlstm7b.model import XLSTM
from xlstm7b.model.init import init_parameter
from xlstm7b.train.activations import checkpoint_activations
from xlstm7b.train.parallel import build_mesh, parallelize
from xlstm7b.train.recipe import Layout, Recipe
from xlstm7b.weights import open_checkpoint, resolve

_CONSTANTS = ("norm_eps", "cell_norm_eps", "eps", "gate_soft_cap", "output_logit_soft_cap")


def build_model(
    recipe: Recipe, layout: Layout, device: torch.device, *, init_from: str = ""
) -> XLSTM:
    """Float32 masters, sharded; every layout on one kind of device starts from the same numbers.

    They are drawn, or those of the checkpoint `init_from`.
    """
    auto = "bfloat16" if device.type == "cuda" else "float32"
    precision = auto if recipe.run.precision == "auto" else recipe.run.precision
    with torch.device("meta"):
        model = XLSTM(recipe.model)
    blocks: Any = model.backbone.blocks
    for block in blocks:
        checkpoint_activations(block, recipe.run.activation_checkpointing)
        if recipe.run.compile and device.type == "cuda":
            # Its forward, not the block: what FSDP does before and after stays outside the graph.
            # A run has few shapes: each is compiled for itself.
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    # Gathered weights are dropped in between where that is worth memory: where they are shards, or
    # where activations are dropped, too.
    spare = layout.dp_shard == 1 and recipe.run.activation_checkpointing == "none"
    mesh = build_mesh(layout, device.type)
    parallelize(model, mesh, getattr(torch, precision), keep_gathered=spare)
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, whole in _first_weights(recipe, init_from, device):
            _fill(parameters.pop(name), whole)
    assert not parameters, "every parameter has a first value"
    return model


def check_tokenizer(init_from: str, fingerprint: str | None) -> None:
    """Raises a `ValueError` for text in other ids than the weights know, if they say which."""
    folder = resolve(init_from)
    if (folder / "tokenizer.json").is_file() and tokenizer_fingerprint(folder) != fingerprint:
        raise ValueError(
            f"the data was prepared with another tokenizer than that of {init_from}: prepare it "
            f"with --tokenizer {folder}"
        )


def _first_weights(
    recipe: Recipe, init_from: str, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """One by one: a process never holds the whole model."""
    if init_from:
        checkpoint = open_checkpoint(init_from)
        theirs, ours = checkpoint.config, recipe.model
        if theirs.parameter_shapes() != ours.parameter_shapes():
            raise ValueError(f"the model in {init_from} is not of the recipe's shape")
        for name in _CONSTANTS:  # and not its special tokens, which are the recipe's to choose
            if getattr(theirs, name) != getattr(ours, name):
                raise ValueError(
                    f"the model in {init_from} has {name} {getattr(theirs, name)}, "
                    f"the recipe {getattr(ours, name)}"
                )
        yield from checkpoint.tensors()
        return
    torch.manual_seed(recipe.run.seed)
    for name, shape in recipe.model.parameter_shapes().items():
        drawn = torch.empty(shape, device=device)
        init_parameter(name, drawn, recipe.model)
        yield name, drawn


def _fill(parameter: Tensor, whole: Tensor) -> None:
    """Each process takes its own part of what all of them have: nothing is sent."""
    assert isinstance(parameter, DTensor)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    own = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    parameter.to_local().copy_(whole[own])
