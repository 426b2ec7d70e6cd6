"""LoRA runs in several processes, and the frozen weights of a model."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from train_runs import losses

from xlstm7b.model import XLSTM
from xlstm7b.train.processes import process_group
from xlstm7b.train.recipe import Parallel, Recipe
from xlstm7b.train.trainer import Trainer


def base_weights(model: XLSTM) -> list[Tensor]:
    """Copies of all numbers that are not trained, the quantised ones included."""
    frozen = [p.detach() for p in model.parameters() if not p.requires_grad]
    for layer in model.quantized_layers():
        frozen += [layer.weight.data, layer.weight.scale]
    return [(p.full_tensor() if isinstance(p, DTensor) else p).clone() for p in frozen]


def lora_equals_one_process(rank: int, chosen: Recipe, folder: Path) -> None:
    """The losses of two processes are those of the run in `folder/one`."""
    with process_group("cpu"):
        for name, parallel in (
            ("shard", Parallel(dp_shard=2)),
            ("replicate", Parallel(dp_shard=1, dp_replicate=2)),
        ):
            trainer = Trainer(replace(chosen, parallel=parallel), folder / name, "cpu")
            frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
            assert all(isinstance(p, DTensor) == (name == "shard") for p in frozen)
            while trainer.step < chosen.run.steps:
                update = trainer.update()
                want = losses(folder / "one")[trainer.step - 1]
                assert abs(update.loss - want) < 1e-4, (name, trainer.step, update.loss, want)
            trainer.loader.close()
            dist.barrier()
