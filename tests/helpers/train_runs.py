"""Small training runs, and what is in their folders."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.recipe import Recipe, load_recipe
from xlstm7b.train.run_checkpoints import read_model, saved_steps
from xlstm7b.train.trainer import Trainer


def recipe(data: Path, *settings: str) -> Recipe:
    return load_recipe(
        "quickstart",
        [
            f'data.sources={{noise={{path="{data}"}}}}',
            f"data.validation={data}",
            "data.validation_sequences=8",
            "data.context_length=32",
            "model={embedding_dim=64,num_blocks=2,num_heads=2,vocab_size=320}",
            "batch.sequences=8",
            "batch.micro_batch=4",
            # With the default, AdamW would turn the rounding of tiny gradients into whole steps.
            "optimizer.eps=1e-6",
            "schedule.warmup=2",
            "schedule.cooldown=2",
            "run.steps=8",
            "run.save_every=3",
            "run.validate_every=4",
            "run.log_every=4",
            *settings,
        ],
    )


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


def weights(folder: Path, chosen: Recipe) -> dict[str, torch.Tensor]:
    last = saved_steps(folder / "checkpoints")[-1]
    return read_model(folder / f"checkpoints/step-{last:08}", chosen.model).state_dict()


def spoil_loss(trainer: Trainer, factor: float, steps: Sequence[int]) -> None:
    """Multiplies the loss of these steps by a factor that is not finite."""
    loss = trainer.model.loss

    def spoiled(*arguments: Tensor, **options: Tensor) -> Tensor:
        return loss(*arguments, **options) * (factor if trainer.step in steps else 1)

    trainer.model.loss = spoiled
