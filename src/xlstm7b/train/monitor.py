"""Measurements during training: the validation loss, and statistics of the gates."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xlstm7b.data.loader import Batch, validation_batches
from xlstm7b.data.shards import ShardFolder
from xlstm7b.model import XLSTM
from xlstm7b.model.layers import soft_cap
from xlstm7b.train.processes import all_reduce
from xlstm7b.train.recipe import Layout, Recipe


@torch.no_grad()
def validation_loss(
    model: XLSTM, folder: ShardFolder, recipe: Recipe, layout: Layout, device: torch.device
) -> dict[str, Any]:
    """Mean loss on held-out text, in total and for each eighth of the context.

    NaN where no target counts, as after the end of short documents.
    """
    length = recipe.data.context_length
    batches = validation_batches(
        folder,
        length,
        recipe.batch.micro_batch * layout.data_parallel,
        rank=dist.get_rank() // layout.tp,
        world_size=layout.data_parallel,
        packing="documents" if recipe.data.packing == "documents" else "windows",
        model=recipe.model,
        most=recipe.data.validation_sequences or None,
    )
    sums = torch.zeros(2, length, dtype=torch.float64, device=device)
    for batch in batches:
        tokens, targets, resets, mask = (part.to(device) for part in batch)
        logprobs, _ = model.token_logprobs(tokens, targets, resets=resets)
        sums[0] -= (logprobs.double() * mask).sum(0)
        sums[1] += mask.sum(0)
    all_reduce(sums)
    losses, counts = sums.cpu()
    eighths = [
        (loss.sum() / count.sum()).item()
        for loss, count in zip(losses.tensor_split(8), counts.tensor_split(8), strict=True)
    ]
    total = (losses.sum() / counts.sum()).item()
    return {"validation_loss": total, "validation_loss_by_position": eighths}


@torch.no_grad()
def gate_statistics(model: XLSTM, batch: Batch, device: torch.device) -> dict[str, list[float]]:
    """One number per block, over all heads and positions of a batch that all processes read.

    Mean and max of the input gate's pre-activation ĩ, mean and min of the forget gate's f̃, both
    soft-capped (paper, "Gate Soft-Capping"). They show an input gate that no longer stays low and a
    forget gate that closes. NaN for a block of one's own that has no such gate in `mlstm_layer`;
    nothing if no block has one.
    """
    blocks: Any = model.backbone.blocks
    layers = [getattr(block, "mlstm_layer", None) for block in blocks]
    gates: list[Any] = [
        getattr(layer, name, None) for layer in layers for name in ("igate_preact", "fgate_preact")
    ]
    if all(gate is None for gate in gates):
        return {}
    found = torch.full((3, len(gates)), torch.nan, device=device)

    def measure(index: int, module: Any, inputs: Any, preactivations: Tensor) -> None:
        capped = soft_cap(preactivations, model.config.gate_soft_cap)
        found[:, index] = torch.stack([capped.amin(), capped.mean(), capped.amax()])

    hooks = [
        gate.register_forward_hook(partial(measure, at))
        for at, gate in enumerate(gates)
        if gate is not None
    ]
    tokens, targets, resets, _ = (part.to(device) for part in batch)
    try:
        # A compiled block would not call the hooks.
        with torch.compiler.set_stance("force_eager"):
            model.token_logprobs(tokens, targets, resets=resets)
    finally:
        for hook in hooks:
            hook.remove()
    least, mean, most = found
    # Tensor-parallel processes hold equal shares of the heads; all others found the same numbers.
    all_reduce(least, dist.ReduceOp.MIN)
    all_reduce(mean)
    mean /= dist.get_world_size()
    all_reduce(most, dist.ReduceOp.MAX)
    return {
        "input_gate_mean": mean[0::2].tolist(),
        "input_gate_max": most[0::2].tolist(),
        "forget_gate_mean": mean[1::2].tolist(),
        "forget_gate_min": least[1::2].tolist(),
    }
