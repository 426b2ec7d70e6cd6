"""The loss on held-out text."""

from typing import Any

import torch
import torch.distributed as dist

from xlstm7b.data.loader import validation_batches
from xlstm7b.data.shards import ShardFolder
from xlstm7b.model import XLSTM
from xlstm7b.train.recipe import Layout, Recipe


@torch.no_grad()
def held_out_loss(
    model: XLSTM, folder: ShardFolder, recipe: Recipe, layout: Layout, device: torch.device
) -> dict[str, Any]:
    """Mean loss over held-out text, in all and by eighths of the context."""
    length, most = recipe.data.context_length, recipe.data.validation_sequences
    rows = recipe.batch.micro_batch * layout.data_parallel
    batches = validation_batches(
        folder, length, rows, rank=dist.get_rank() // layout.tp,
        world_size=layout.data_parallel, vocab_size=recipe.model.vocab_size,
    )  # fmt: skip
    sums = torch.zeros(2, length, dtype=torch.float64, device=device)
    for index, batch in enumerate(batches):
        if most and index * rows >= most:
            break
        tokens, targets, resets, mask = (
            batch[name].to(device) for name in ("tokens", "targets", "resets", "mask")
        )
        logprobs, _ = model.token_logprobs(tokens, targets, resets=resets)
        sums[0] -= (logprobs.double() * mask).sum(0)
        sums[1] += mask.sum(0)
    dist.all_reduce(sums)
    losses, counts = sums.cpu()
    eighths = [
        (loss.sum() / count.sum().clamp(min=1)).item()
        for loss, count in zip(losses.chunk(8), counts.chunk(8), strict=True)
    ]
    whole = (losses.sum() / counts.sum().clamp(min=1)).item()
    return {"validation_loss": whole, "validation_loss_by_position": eighths}
