"""What the gates do while a model learns."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xlstm7b.data.loader import Batch
from xlstm7b.model import XLSTM
from xlstm7b.model.layers import soft_cap


@torch.no_grad()
def gate_statistics(model: XLSTM, text: Batch, device: torch.device) -> dict[str, list[float]]:
    """A number for every block, over all heads and positions of a text; all processes read it.

    Of the input gate's pre-activation ĩ the mean and max, of the forget gate's f̃ the mean and min,
    soft-capped (paper, "Gate Soft-Capping"): an input gate that no longer stays low, or a forget
    gate that closes, shows here.
    """
    blocks: Any = model.backbone.blocks
    layers = [block.mlstm_layer for block in blocks]
    gates = [gate for layer in layers for gate in (layer.igate_preact, layer.fgate_preact)]
    found = torch.full((3, len(gates)), torch.nan, device=device)

    def look(index: int, module: Any, inputs: Any, preactivations: Tensor) -> None:
        capped = soft_cap(preactivations, model.config.gate_soft_cap)
        found[:, index] = torch.stack([capped.amin(), capped.mean(), capped.amax()])

    hooks = [gate.register_forward_hook(partial(look, at)) for at, gate in enumerate(gates)]
    tokens, targets, resets = (text[name].to(device) for name in ("tokens", "targets", "resets"))
    try:
        # A compiled block would not call the hooks.
        with torch.compiler.set_stance("force_eager"):
            model.token_logprobs(tokens, targets, resets=resets)
    finally:
        for hook in hooks:
            hook.remove()
    least, mean, most = found
    # Tensor parallelism shares out the heads evenly; other processes have found the same.
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {
        "input_gate_mean": mean[0::2].tolist(),
        "input_gate_max": most[0::2].tolist(),
        "forget_gate_mean": mean[1::2].tolist(),
        "forget_gate_min": least[1::2].tolist(),
    }
