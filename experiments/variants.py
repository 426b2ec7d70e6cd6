"""Training of an experiment's variants, and the record, table and figure of their results.

ablations.py and recall.py share it. The output folder has a folder for each training run, and
`results.jsonl`. The same command continues: a variant with results is skipped, and a run that was
stopped goes on from its last checkpoint.
"""

import gc
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch
import typer

from xlstm7b.accounting import parameter_counts
from xlstm7b.bench.results import Results, read_rows, shown_number
from xlstm7b.cli.options import listed, option
from xlstm7b.cli.train import progress
from xlstm7b.data.prepare import prepare
from xlstm7b.files import replacing
from xlstm7b.report import figure, table, token_ticks
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.processes import first_line, process_group
from xlstm7b.train.recipe import Recipe, Source, load_recipe
from xlstm7b.train.run_checkpoints import saved_steps
from xlstm7b.train.run_settings import changed_settings, may_differ
from xlstm7b.train.trainer import Trainer

Settings = Mapping[str, Any]  # of a recipe, by name: {"model.num_heads": 8}
Shape = Mapping[str, int | str]  # what the results of a variant are recorded under
Line = dict[str, Any]  # of a run's metrics

# With --smoke these settings of the recipe "quickstart" replace those of the experiment.
SMOKE: Settings = {
    "model.embedding_dim": 64,
    "model.num_blocks": 1,
    "data.context_length": 32,
    "data.validation_sequences": 4,
    "batch.sequences": 4,
    "batch.micro_batch": 4,
    "schedule.warmup": 2,
    "schedule.cooldown": 0,
    "run.steps": 6,
    "run.save_every": 0,
    "run.validate_every": 3,
    "run.log_every": 6,
    "run.keep_best": False,
}
WINDOW = 50  # steps of a mean or a maximum
HIGH_NORM = 2  # steps with a gradient norm above it are counted
_SLOW_STEPS = 2  # the first steps compile: they do not count in the speed
_SMOKE_FILES = 12  # of Python's own sources, as the text of --smoke

Name = Annotated[
    str | None, typer.Argument(help="Name of an experiment; --list shows them.", show_default=False)
]
Output = Annotated[
    Path | None,
    option(
        "Folder for the runs, results.jsonl and the figure. If it holds this experiment, it is "
        "continued.",
        default="runs/ and the experiment's name",
    ),
]
Variants = Annotated[
    str | None, option("Variants to train, with commas between them.", default="all")
]
Steps = Annotated[
    int | None, option("Steps of each training run.", default="as the experiment says")
]
Changes = Annotated[
    list[str] | None,
    option("Change a setting of the recipe in all variants, as a.b=c. Repeatable.", "--set"),
]
Smoke = Annotated[
    bool, option("Try it: tiny models and a few steps on a CPU, on Python's sources.", "--smoke")
]
Listed = Annotated[
    bool, option("List the experiments, or the variants of the one named, and exit.", "--list")
]


# Before training


def known(name: str | None, experiments: Mapping[str, Any]) -> str:
    if name is None or name not in experiments:
        wrong = "name an experiment" if name is None else f"unknown experiment {name!r}"
        raise ValueError(f"{wrong}; choose from {', '.join(experiments)}")
    return name


def print_list(
    name: str | None, titles: Mapping[str, str], variants: Mapping[str, Mapping[str, Settings]]
) -> None:
    """The titles of all experiments, or the variants of one with their settings."""
    if name is None:
        print(table(["experiment", "title"], [*titles.items()]))
        return
    shown = {
        each: " ".join(f"{a}={b}" for a, b in settings.items())
        for each, settings in variants[known(name, variants)].items()
    }
    print(f"{titles[name]}\n\n" + table(["variant", "settings"], [*shown.items()]))


def choose(wanted: str | None, variants: Mapping[str, Any]) -> list[str]:
    """The variants in a list with commas, in their own order. None: all of them."""
    given = [*variants] if wanted is None else listed(wanted)
    for name in given:
        if name not in variants:
            raise ValueError(f"there is no variant {name!r}; choose from {', '.join(variants)}")
    return [name for name in variants if name in given]


def changes_of(changes: Sequence[str] | None, steps: int | None) -> list[str]:
    """The settings of the options --set and --steps."""
    return [*(changes or []), *([] if steps is None else [f"run.steps={steps}"])]


def recipe_of(
    base: str,
    *settings: Settings,
    name: str,
    data: Path,
    changes: Sequence[str],
    timed: bool = False,
) -> Recipe:
    """A recipe with these settings, of which the last count, and with the folders of `data`.

    The validation loss is always measured at the last step, unless steps are only timed.
    """
    given = {key: value for each in settings for key, value in each.items()}
    recipe = load_recipe(base, [*(f"{k}={json.dumps(v)}" for k, v in given.items()), *changes])
    steps, every = recipe.run.steps, recipe.run.validate_every
    if not every or steps % every:
        every = steps
    folders = {"data": Source(str(data / "train"))}
    validation = "" if timed else str(data / "valid")
    return replace(
        recipe,
        name=name,
        data=replace(recipe.data, sources=folders, validation=validation),
        run=replace(recipe.run, validate_every=0 if timed else every),
    )


def check_same(folder: Path, recipe: Recipe) -> None:
    """Raises a `ValueError` if this folder holds a run with other settings."""
    if not (folder / "recipe.json").is_file():
        return
    before = Recipe.from_dict(json.loads((folder / "recipe.json").read_text(encoding="utf-8")))
    for name, (old, new) in changed_settings(before, recipe).items():
        if name in ("run.steps", "run.seed") or not (may_differ(name) or name == "init_from"):
            raise ValueError(
                f"the run in {folder} has {name} {old!r}, not {new!r}: choose another --output"
            )


def open_results(subject: str, experiment: str, output: Path, device: str) -> Results:
    """The results in an output folder, which must be of this experiment."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("an experiment trains in one process: start it without torchrun")
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file, not a folder: choose another --output")
    rows = read_rows(output / "results.jsonl")
    if others := {row["shape"].get("experiment") for row in rows} - {experiment}:
        raise ValueError(f"{output} holds the experiment {others.pop()}: choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    call = rows[-1]["call"] if rows else None
    return Results(subject, device, file=output / "results.jsonl", call=call)


def write_smoke_text(folder: Path) -> None:
    """Prepared folders `train` and `valid` of a few of Python's own sources, as bytes."""
    if folder.exists():
        return
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_SMOKE_FILES]
    with replacing(folder, lambda name: True) as aside:
        for name, part in (("train", sources[1:]), ("valid", sources[:1])):
            prepare(part, aside / name, "bytes", text_endings=[".py"])


# Training


@contextmanager
def failures_recorded(results: Results, what: str, shape: Shape, folder: Path) -> Iterator[None]:
    """Records a model that diverges or does not fit. Removes the checkpoints below `folder`.

    If training is stopped, by Ctrl-C, SIGTERM or a time limit, they stay.
    """
    print(f"\nvariant {shape['variant']}", file=sys.stderr)
    try:
        yield
    except FloatingPointError as error:
        results.fail(what, shape, f"diverged: {error}")
    except torch.OutOfMemoryError as error:
        results.fail(what, shape, f"out of memory: {first_line(error)}")
    for checkpoints in [*folder.rglob("checkpoints")]:
        shutil.rmtree(checkpoints)


def train(recipe: Recipe, folder: Path, device: str) -> list[Line]:
    """Trains a run or continues it, and returns its metrics. Ends the program if it is stopped."""
    _free()
    found = saved_steps(folder / "checkpoints")
    trainer = Trainer(recipe, folder, device)
    with progress(recipe, found[-1] if found else recipe.start_step) as report:
        trainer.train(report)
    if trainer.step < recipe.run.steps:
        print(f"{folder}: stopped at step {trainer.step}; the same command continues")
        raise typer.Exit
    lines = read_metrics(folder / "metrics.jsonl")
    # The trainer skips a few steps that are not finite. Such losses are None.
    if None in (lines[-1]["loss"], lines[-1].get("validation_loss", 0.0)):
        raise FloatingPointError("the loss of the last step is not finite")
    return lines


def time_steps(recipe: Recipe, folder: Path, device: str) -> list[Line]:
    """Makes the steps of a run without validation and checkpoints: the model may be too large."""
    _free()
    lines: list[Line] = []
    with process_group(device), progress(recipe, 0) as report:
        trainer = Trainer(recipe, folder, device)
        try:
            while trainer.step < recipe.run.steps:
                lines.append(trainer.measured_update()[1])
                report(lines[-1])
        finally:
            trainer.loader.close()
    return lines


def _free() -> None:
    """Frees what is left of the model before, also if it failed."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.compiler.reset()  # compiled graphs accumulate, and their number is limited
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# Results


def shape_of(experiment: str, variant: str, recipe: Recipe) -> Shape:
    count = parameter_counts(recipe.model)["total"]
    return {
        "experiment": experiment,
        "variant": variant,
        "parameters": f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.3g}M",
        "steps": recipe.run.steps,
        "batch": f"{recipe.batch.sequences} × {recipe.data.context_length}",
    }


# Name of a curve: field of the metrics, its summary over the last 50 steps, unit, note.
_CURVES: dict[str, tuple[str, Callable[[list[float]], float] | None, str, str | None]] = {
    "training loss": ("loss", fmean, "nats", f"mean of {WINDOW} steps"),
    "gradient norm": ("gradient_norm", max, "", f"maximum of {WINDOW} steps"),
    "learning rate": ("learning_rate", None, "", None),
    "validation curve": ("validation_loss", None, "nats", None),
}


def record_curves(
    results: Results, shape: Shape, lines: Sequence[Line], chosen: Sequence[str]
) -> None:
    """Records those of the curves of a run that are chosen."""
    for what in [name for name in _CURVES if name in chosen]:
        field, summary, unit, note = _CURVES[what]
        found = [line for line in lines if field in line]
        values = [line[field] for line in found]
        if summary is not None:
            values = over_previous(values, summary)
        points = [(line["step"], y) for line, y in zip(found, values, strict=True) if y is not None]
        if points:
            x, y = zip(*points, strict=True)
            results.add_curve(what, shape, x, y, unit, x_unit="step", note=note)


def over_previous(
    values: Sequence[float | None], summary: Callable[[list[float]], float]
) -> list[float | None]:
    """`summary` of each value and those before it, 50 at most. None if all of them are None."""
    windows = (values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1))
    recent = ([value for value in window if value is not None] for window in windows)
    return [summary(window) if window else None for window in recent]


def record_norms(results: Results, shape: Shape, lines: Sequence[Line], warmup: int) -> None:
    """Records what the gradient norm did after the warm-up, before clipping."""
    norms = [line["gradient_norm"] for line in lines[warmup:]]
    finite = [norm for norm in norms if norm is not None]
    results.add("highest gradient norm", shape, max(finite, default=0.0), "")
    high = len(norms) - sum(norm <= HIGH_NORM for norm in finite)
    results.add(f"steps with a gradient norm over {HIGH_NORM}", shape, high, "steps")


def record_speed(results: Results, shape: Shape, lines: Sequence[Line]) -> None:
    """Records medians over all steps but the first two. Does nothing on a CPU.

    There a step's time depends on whatever else the machine does. The time of a step is measured,
    not computed from tokens per second, which leave padding out.
    """
    timed = [line for line in lines if line["applied"]][_SLOW_STEPS:]
    if not timed or "peak_memory_gb" not in timed[0]:
        return
    memory = max(line["peak_memory_gb"] for line in lines)
    results.add("peak memory", shape, memory, "GB")
    seconds = median(line["seconds"] for line in timed)
    results.add("step time", shape, 1000 * seconds, "ms")
    speed = median(line["tokens_per_second"] for line in timed)
    results.add("training speed", shape, speed, "tok/s")


def show(results: Results, panels: Sequence[str], path: Path) -> None:
    """Prints a table of all variants, and draws their results in `panels`."""
    rows = results.rows
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        line = found.setdefault(row["shape"]["variant"], {})
        if "error" in row:
            line["failed"] = row["error"]
        elif "value" in row:
            is_loss = row["unit"] == "nats"
            line[row["what"]] = f"{row['value']:.4f}" if is_loss else shown_number(row["value"])
        elif row["x_unit"] == "tokens":  # a few values
            at = " / ".join(f"{x:,}" for x in row["x"])
            line[f"{row['what']} at {at}"] = " / ".join(f"{y:.2f}" for y in row["y"])
    columns = dict.fromkeys(name for line in found.values() for name in line)
    lines = [[name, *map(line.get, columns)] for name, line in found.items()]
    print("\n" + table(["variant", *columns], lines))
    drawn = [name for name in panels if any(_is_drawn(row, name) for row in rows)]
    if find_spec("matplotlib") is None:
        print("no figure is drawn, because matplotlib is not installed", file=sys.stderr)
    elif drawn:
        with figure(path, columns=len(drawn)) as axes:
            for one, name in zip([axes] if len(drawn) == 1 else axes, drawn, strict=True):
                _draw(one, [row for row in rows if _is_drawn(row, name)])
        print(f"wrote {path}")


def _is_drawn(row: Mapping[str, Any], panel: str) -> bool:
    return row["what"] == panel and "error" not in row


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each curve, or a bar for each figure."""
    first, names = rows[0], [row["shape"]["variant"] for row in rows]
    what = f"{first['what']}, {first['unit']}".removesuffix(", ")
    if "value" in first:
        bars = axes.barh(names, [row["value"] for row in rows])
        axes.bar_label(bars, [f" {shown_number(row['value'])}" for row in rows])
        axes.invert_yaxis()  # the first variant at the top
        axes.margins(x=0.2)  # for the labels
        axes.set(xlabel=what)
        return
    for name, row in zip(names, rows, strict=True):
        axes.plot(row["x"], row["y"], "o-" if len(row["x"]) < 20 else "-", label=name)
    if first["x_unit"] == "tokens":
        token_ticks(axes, [x for row in rows for x in row["x"]])
    if first["what"] == "gradient norm":
        axes.set_yscale("log")
    axes.set(xlabel=first["x_unit"], ylabel=what, title=first.get("note"))
    axes.legend()
