"""Random adapters."""

from collections.abc import Sequence
from pathlib import Path

import torch

from xlstm7b.checkpoint import open_checkpoint
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import LowRank, save_adapter
from xlstm7b.model.lora import add_lora, lora_layers

TARGETS = ["q", "k", "v", "ogate_preact", "out_proj", "proj_up", "proj_up_gate", "proj_down"]


def adapted_model(
    base: Path,
    targets: Sequence[str] = TARGETS,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    std: float = 0.05,
    dtype: torch.dtype = torch.float32,
) -> XLSTM:
    """A model with an adapter that changes it."""
    torch.manual_seed(seed)
    model = XLSTM.from_pretrained(base, dtype=dtype)
    add_lora(model, targets, rank=rank, alpha=alpha)
    with torch.no_grad():
        for _, layer in lora_layers(model):
            layer.lora_B.normal_(std=std)
    return model


def write_adapter(model: XLSTM, folder: Path, base: Path) -> Path:
    """The adapter of such a model as a folder."""
    layers = {
        path: LowRank(layer.lora_A.detach(), layer.lora_B.detach(), layer.scale)
        for path, layer in lora_layers(model)
    }
    first = next(iter(layers.values()))
    save_adapter(
        folder,
        layers,
        rank=len(first.A),
        alpha=first.scale * len(first.A),
        dropout=0.0,
        targets=sorted({path.rpartition(".")[2] for path in layers}),
        base=open_checkpoint(base).fingerprint(),
        base_name=str(base),
    )
    return folder


def random_adapter(folder: Path, base: Path, **options) -> Path:
    """The folder of an adapter; the options are those of `adapted_model`."""
    return write_adapter(adapted_model(base, **options), folder, base)
