"""State tuning runs in several processes."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from train_runs import losses

from xlstm7b.train.processes import process_group
from xlstm7b.train.recipe import Parallel, Recipe
from xlstm7b.train.trainer import Trainer


def state_tuning_equals_one_process(rank: int, chosen: Recipe, folder: Path) -> None:
    """The losses of two processes are those of the run in `folder/one`."""
    with process_group("cpu"):
        for name, parallel in (
            ("shard", Parallel(dp_shard=2)),
            ("replicate", Parallel(dp_shard=1, dp_replicate=2)),
        ):
            trainer = Trainer(replace(chosen, parallel=parallel), folder / name, "cpu")
            while trainer.step < chosen.run.steps:
                update = trainer.update()
                want = losses(folder / "one")[trainer.step - 1]
                assert abs(update.loss - want) < 1e-4, (name, trainer.step, update.loss, want)
            trainer.loader.close()
            dist.barrier()
