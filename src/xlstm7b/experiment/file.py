"""Experiment files: the runs, the data and the figure of one experiment, read from TOML.

    experiment = load_experiment("input-gate-bias")
    recipe = experiment.recipe_of("bias-0", data=Path("data/books"), output=Path("results"))

A name is that of a file in `xlstm7b/experiments/`; anything with a `/` or ending in `.toml` is a
path. docs/experiments.md describes the format. As in a recipe, nothing is ignored: an unknown
setting or a wrong type is a `ValueError` of one sentence.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from xlstm7b.train.recipe import (
    Recipe,
    Source,
    is_path,
    load_recipe,
    packaged_names,
    read_toml,
    section,
)

Kind = Literal["loss", "schedule", "speed", "loss-and-speed", "accuracy"]
TRAIN, VALID = "train", "valid"  # the prepared folders in the folder of the data

# With --smoke these settings of the recipe "quickstart" replace `recipe` and `set`.
_SMOKE = (
    "model.embedding_dim=64",
    "model.num_blocks=1",
    "data.context_length=32",
    "data.validation_sequences=4",
    "batch.sequences=4",
    "batch.micro_batch=4",
    "schedule.warmup=2",
    "schedule.cooldown=0",
    "run.steps=6",
    "run.save_every=0",
    "run.validate_every=3",
    "run.log_every=6",
    "run.keep_best=false",
)


@section
class ExperimentRun:
    """`[runs.NAME]`: one training run."""

    label: str
    """Name of the run in the figure."""
    set: tuple[str, ...] = ()
    """Settings of the recipe that this run changes, as `train --set` takes them."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**64)] = 0
    """Seed of the first weights and of the order of the data."""
    group: str = ""
    """Speeds are compared with the first run of the same group."""
    speed_only: StrictBool = False
    """Only measure the speed: no checkpoint, no held-out loss, not in the curves."""
    after: str = ""
    """Earlier run to continue, optimizer included, for as many more steps as the recipe has."""


@section
class Figure:
    """`[figure]`: what is drawn."""

    kind: Kind
    """loss: loss and gradient norm. schedule: learning rate and perplexity. speed: tokens per
    second. loss-and-speed: all three. accuracy: the accuracies of `[evaluate]` by length."""
    window: Annotated[int, Field(strict=True, ge=1)] = 50
    """Steps over which loss (mean) and gradient norm (max) are taken, up to the step drawn."""


@section
class Smoke:
    """`[smoke]`: what `--smoke` changes, after the settings of the runs."""

    set: tuple[str, ...] = ()
    """Settings of the recipe."""
    data: dict[str, Any] | None = None
    """Settings of `[data]`."""
    evaluate: dict[str, Any] | None = None
    """Settings of `[evaluate]`."""


@section
class Experiment:
    """A whole experiment file."""

    name: str
    title: str
    paper: str
    """The figure or table of the paper, and what it shows."""
    recipe: str
    """Recipe of all runs: a name, or a path that starts at this file's folder."""
    runs: dict[str, ExperimentRun]
    figure: Figure
    set: tuple[str, ...] = ()
    """Settings of the recipe that all runs change."""
    data: dict[str, Any] | None = None
    """`task` makes the data of all runs; the other values are its settings. Without it, the data is
    given with `--data`."""
    evaluate: dict[str, Any] | None = None
    """`task` measures each trained model; the other values are its settings."""
    smoke: Smoke = Smoke()

    def __post_init__(self) -> None:
        from xlstm7b.experiment.tasks import TASKS

        if not self.runs:
            raise ValueError("there is no run; give at least one [runs.NAME]")
        for name in self.runs:
            if name == "data" or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
                raise ValueError(
                    f"{name!r} cannot be the name of a run, which is also that of its folder: use "
                    'letters, digits, "-", "." and "_", and not data'
                )
        names = list(self.runs)
        labels = [run.label for run in self.runs.values()]
        for name, run in self.runs.items():
            if labels.count(run.label) > 1:
                raise ValueError(
                    f"several runs have the label {run.label!r}, which the figure shows"
                )
            if run.after and run.after not in names[: names.index(name)]:
                raise ValueError(f"runs.{name}.after must be an earlier run, not {run.after!r}")
            if run.after and self.runs[run.after].speed_only:
                raise ValueError(f"runs.{name}.after is {run.after}, which saves no checkpoint")
        for table, values in (("data", self.data), ("evaluate", self.evaluate)):
            if values is not None and values.get("task") not in TASKS:
                raise ValueError(
                    f"{table}.task must be one of {', '.join(TASKS)}, not {values.get('task')!r}"
                )
        if self.figure.kind == "accuracy" and self.evaluate is None:
            raise ValueError('figure.kind "accuracy" needs [evaluate] with a task')

    def chosen(self, names: str | None) -> list[str]:
        """The runs of a list with commas, in the order of the file. None: all of them."""
        if names is None:
            return list(self.runs)
        given = [name.strip() for name in names.split(",")]
        for name in given:
            if name not in self.runs:
                known = ", ".join(self.runs)
                raise ValueError(f"{self.name} has no run {name!r}; choose from {known}")
        return [name for name in self.runs if name in given]

    def with_earlier(self, names: Iterable[str]) -> list[str]:
        """These runs and the earlier runs that they continue, in the order of the file."""
        found = set(names)
        for name in reversed(self.runs):  # a run comes after the one that it continues
            if name in found and self.runs[name].after:
                found.add(self.runs[name].after)
        return [name for name in self.runs if name in found]

    def recipe_of(
        self,
        name: str,
        *,
        data: Path,
        output: Path,
        smoke: bool = False,
        settings: Sequence[str] = (),
    ) -> Recipe:
        """The recipe of a run of this experiment in the folder `output`. `settings` come last.

        `data` holds the prepared folders `train` and `valid`, or the data that a task has written.
        The held-out loss is always measured at the last step.
        """
        run = self.runs[name]
        base, common = ("quickstart", _SMOKE) if smoke else (self.recipe, self.set)
        given = [*common, *run.set, f"run.seed={run.seed}", *(self.smoke.set if smoke else ())]
        try:
            recipe = load_recipe(base, [*given, *settings])
            folder = data / str(recipe.data.context_length) if self.data else data
            text = replace(
                recipe.data,
                sources={"data": Source(str(folder / TRAIN))},
                validation="" if run.speed_only else str(folder / VALID),
            )
            start, steps, every = 0, recipe.run.steps, recipe.run.validate_every
            if run.after:
                earlier = self.recipe_of(
                    run.after, data=data, output=output, smoke=smoke, settings=settings
                )
                start = earlier.run.steps
                steps += start
            if run.speed_only:
                every = 0
            elif not every or steps % every:
                every = steps
            return replace(
                recipe,
                name=f"{self.name}-{name}",
                data=text,
                run=replace(recipe.run, steps=steps, validate_every=every),
                init_from=str(output / run.after) if run.after else recipe.init_from,
                start_step=start or recipe.start_step,
            )
        except ValueError as error:
            raise ValueError(f"{self.name}, run {name}: {error}") from error

    def task(
        self, table: Literal["data", "evaluate"], *, smoke: bool = False, texts: Path | None = None
    ) -> tuple[str, dict[str, Any]] | None:
        """The task of `[data]` or `[evaluate]` and its settings. None if the file has none."""
        values: dict[str, Any] | None = getattr(self, table)
        if values is None:
            return None
        changes = getattr(self.smoke, table) if smoke else None
        settings = {**values, **(changes or {}), **({"texts": [str(texts)]} if texts else {})}
        return settings.pop("task"), settings


def load_experiment(name_or_path: str) -> Experiment:
    """Reads an experiment of the package, by name, or a TOML file."""
    label, folder, tables = read_toml("experiment", name_or_path)
    recipe = tables.get("recipe")
    if folder and isinstance(recipe, str) and is_path(recipe):
        tables["recipe"] = str(folder / recipe)
    try:
        return Experiment(**{"name": Path(label).name.removesuffix(".toml"), **tables})
    except ValueError as error:
        raise ValueError(f"experiment {name_or_path}: {error}") from error


def experiment_names() -> list[str]:
    """The experiments that come with the package."""
    return packaged_names("experiment")
