"""Small runs, and what they left in their folders."""

from pathlib import Path

import torch

from xlstm7b.train.checkpoint import read_model, steps
from xlstm7b.train.metrics import read_metrics
from xlstm7b.train.recipe import Recipe, load_recipe


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
            # By default AdamW makes steps of the rounding in a rare token's tiny gradient.
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
    last = steps(folder / "checkpoints")[-1]
    return read_model(folder / f"checkpoints/step-{last:08}", chosen.model).state_dict()
