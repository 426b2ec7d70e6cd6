"""The ablations of the paper at small scale: a set of training runs, their table and figure.

    python experiments/ablations.py --list
    python experiments/ablations.py soft-cap --smoke                 # on a CPU, in seconds
    python experiments/ablations.py soft-cap --data data/books       # on a GPU, in minutes

docs/experiments.md says what they need and how to add one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from variants import (
    SMOKE,
    Changes,
    Listed,
    Name,
    Output,
    Settings,
    Smoke,
    Steps,
    Variants,
    changes_of,
    check_same,
    choose,
    failures_recorded,
    known,
    open_results,
    print_list,
    recipe_of,
    record_curves,
    record_norms,
    record_speed,
    shape_of,
    show,
    time_steps,
    train,
    write_smoke_text,
)
from xlstm7b.bench.results import Results
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, option
from xlstm7b.cli.train import Device, to_training_device
from xlstm7b.train import Recipe
from xlstm7b.train.metrics_log import read_metrics

_BASE = {  # 300 steps of 8 × 4,096 tokens with the 160M
    "optimizer.betas": [0.9, 0.95],
    "batch.sequences": 8,
    "batch.micro_batch": 8,
    "schedule.warmup": 30,
    "schedule.cooldown": 0,
    "run.steps": 300,
    "run.validate_every": 100,
    "run.save_every": 150,
    "run.keep_last": 1,
    "run.keep_best": False,
    "run.log_every": 100,
    "run.seed": 0,
}
_SHORT = _BASE | {"optimizer.lr": 1.5e-3}
# Five times the learning rate of the recipe 160m, so that instability shows in a short run.
_UNSTABLE = _BASE | {"optimizer.lr": 5e-3}
# The 1.4B and the 7B with what fits on one GPU for both kinds of blocks.
_LARGE = {
    "data.context_length": 8192,
    "batch.sequences": 4,
    "batch.micro_batch": 1,
    "schedule.warmup": 2,
    "run.steps": 10,
}
_LARGEST = _LARGE | {"run.steps": 6, "run.activation_checkpointing": "block"}


@dataclass(frozen=True)
class Ablation:
    """Variants of a recipe."""

    title: str
    settings: Settings
    """Settings of all variants."""
    variants: Mapping[str, Settings] = field(default_factory=dict)
    """Settings of each variant."""
    timed: Mapping[str, Settings] = field(default_factory=dict)
    """Variants of which only the steps are timed, with no validation and no checkpoint."""
    panels: tuple[str, ...] = ("training loss", "gradient norm")
    """Results that the figure shows. Curves that are named here are recorded."""
    smoke: Settings = field(default_factory=dict)
    """Settings that --smoke changes last."""


ABLATIONS = {
    # The block of the first xLSTM paper and that of xLSTM 7B, with the same micro-batches.
    "previous-vs-new": Ablation(
        "The block of the first xLSTM paper and that of xLSTM 7B: speed and loss",
        _SHORT,
        {name: {"model.size": name} for name in ("160m-previous", "160m", "400m-previous", "400m")},
        {name: {"model.size": name, **_LARGE} for name in ("1.4b-previous", "1.4b")}
        | {name: {"model.size": name, **_LARGEST} for name in ("7b-previous", "7b")},
        panels=("training loss", "gradient norm", "training speed"),
        smoke={
            "data.context_length": 32,
            "batch.micro_batch": 4,
            "run.activation_checkpointing": "none",
        },
    ),
    # The 7B's widths with 8 of its 32 blocks, which is what fits on one GPU.
    "head-dimension": Ablation(
        "Number of heads: time of a training step",
        {
            "model.size": "7b",
            "model.num_blocks": 8,
            "data.context_length": 8192,
            "batch.sequences": 4,
            "batch.micro_batch": 4,
            "schedule.warmup": 2,
            "schedule.cooldown": 0,
            "run.steps": 12,
            "run.seed": 0,
        },
        timed={f"heads-{count}": {"model.num_heads": count} for count in (4, 8, 16, 32)},
        panels=("step time",),
    ),
    "input-gate-bias": Ablation(
        "First value of the input gate's bias",
        _UNSTABLE,
        {
            f"bias-{-value}": {"model.igate_bias_init_range": float(value)}
            for value in (-10, -5, -2, 0)
        },
    ),
    "fixed-input-gate": Ablation(
        "Learnable and fixed input gate",
        _UNSTABLE,
        {
            "learnable": {"model.igate_bias_init_range": -10.0},
            "fixed-0": {"model.input_gate": "fixed", "model.igate_bias_init_range": 0.0},
            "fixed-10": {"model.input_gate": "fixed", "model.igate_bias_init_range": -10.0},
        },
    ),
    "pre-norm": Ablation(
        "RMSNorm and LayerNorm before each layer",
        _UNSTABLE,
        {"rms-norm": {"model.norm": "rms_norm"}, "layer-norm": {"model.norm": "layer_norm"}},
    ),
    "head-norm": Ablation(
        "LayerNorm and RMSNorm of each head's output",
        _UNSTABLE,
        {
            "layer-norm": {"model.head_norm": "layer_norm"},
            "rms-norm": {"model.head_norm": "rms_norm"},
        },
    ),
    "soft-cap": Ablation(
        "Soft-caps of gates and logits",
        _UNSTABLE,
        {
            "both": {},
            "logits-only": {"model.gate_soft_cap": "none"},
            "gates-only": {"model.output_logit_soft_cap": "none"},
            "neither": {"model.gate_soft_cap": "none", "model.output_logit_soft_cap": "none"},
        },
    ),
    "schedule": Ablation(
        "Learning-rate schedules",
        _SHORT | {"run.validate_every": 50},
        {
            f"{kind}{name}": {"schedule.kind": kind, "schedule.cooldown": cooldown}
            for kind in ("exponential", "cosine")
            for name, cooldown in (("-cooldown", 60), ("", 0))
        },
        panels=("learning rate", "training loss", "validation curve"),
        smoke={"schedule.cooldown": 2},
    ),
}

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]}, pretty_exceptions_enable=False
)


@app.command(cls=Command)
def ablations(
    name: Name = None,
    data: Annotated[
        Path | None,
        option("Folder with the prepared folders train and valid.", default=False),
    ] = None,
    output: Output = None,
    variants: Variants = None,
    steps: Steps = None,
    changes: Changes = None,
    smoke: Smoke = False,
    device: Device = None,
    listed: Listed = False,
) -> None:
    """Train the variants of an ablation, print their results and draw the figure.

    The same command continues what was stopped: variants with results are skipped. The exit code
    is 1 if a variant diverged or did not fit into memory; that is recorded, and not tried again.
    """
    all_variants = {each: {**one.variants, **one.timed} for each, one in ABLATIONS.items()}
    if listed:
        print_list(name, {each: one.title for each, one in ABLATIONS.items()}, all_variants)
        return
    name = known(name, ABLATIONS)
    ablation, target = ABLATIONS[name], output or Path("runs") / name
    chosen = choose(variants, all_variants[name])
    if smoke and data is not None:
        raise ValueError("--smoke makes its own data: leave out --data")
    source = target / "data" if smoke else data
    if source is None:
        raise ValueError("--data is missing: a folder with the prepared folders train and valid")
    if not smoke and not all((source / part).is_dir() for part in ("train", "valid")):
        raise ValueError(f"{source} does not hold the prepared folders train and valid")
    where = to_training_device(device, prefers_cpu=smoke)
    recipes = {
        variant: recipe_of(
            *(("quickstart", SMOKE) if smoke else ("160m", ablation.settings)),
            all_variants[name][variant],
            ablation.smoke if smoke else {},
            name=f"{name}-{variant}",
            data=source,
            changes=changes_of(changes, steps),
            timed=variant in ablation.timed,
        )
        for variant in chosen
    }
    for variant, recipe in recipes.items():
        check_same(target / variant, recipe)
    results = open_results("ablations", name, target, where)
    if smoke:
        write_smoke_text(source)
    try:
        for variant, recipe in recipes.items():
            run_variant(results, name, variant, recipe, target / variant, where)
    finally:
        show(results, ablation.panels, target / f"{name}.png")
    if any("error" in row for row in results.rows):
        raise typer.Exit(1)


def run_variant(
    results: Results, name: str, variant: str, recipe: Recipe, folder: Path, device: str
) -> None:
    """Trains a variant, or times its steps, and records its results, if that is not done yet."""
    ablation, shape = ABLATIONS[name], shape_of(name, variant, recipe)
    timed = variant in ablation.timed
    last = "training speed" if timed else "validation loss"
    if results.has(last, shape):
        return
    with failures_recorded(results, last, shape, folder):
        if timed:
            record_speed(results, shape, time_steps(recipe, folder, device))
            return
        try:
            lines = train(recipe, folder, device)
        except FloatingPointError:  # the curves end where it diverged
            record_curves(results, shape, read_metrics(folder / "metrics.jsonl"), ablation.panels)
            raise
        record_speed(results, shape, lines)
        record_curves(results, shape, lines, ablation.panels)
        record_norms(results, shape, lines, recipe.schedule.warmup)
        results.add("validation loss", shape, lines[-1]["validation_loss"], "nats")


if __name__ == "__main__":
    main(app)
