"""Activation checkpointing: what is kept for the backward pass, and what is computed again."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def checkpoint_activations(block: nn.Module, mode: str) -> None:
    """`block` keeps a block's input alone; `selective` what matrix products and the cell return.

    The block's own forward is wrapped, not the block: parameters keep their names.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    block.forward = partial(checkpoint, block.forward, **options)


def _policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = operator in _products() or "mlstm_chunkwise" in str(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _products() -> set[Any]:
    aten = torch.ops.aten
    return {aten.mm.default, aten.addmm.default, aten.bmm.default}
