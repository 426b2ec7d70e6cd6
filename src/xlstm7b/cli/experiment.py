"""`xlstm7b experiment NAME`: a figure or table of the paper, from its training runs."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from xlstm7b.cli.train import progress
from xlstm7b.report import table


def experiment(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of an experiment (--list shows them) or a .toml file.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the runs, results.json and the figure. If it holds this experiment, "
            "it is continued.",
            show_default="experiments/ and the experiment's name",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the prepared folders train and valid. For an experiment that makes "
            "its own data: text files for it.",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[
        str | None,
        typer.Option(
            help="Runs to train, with commas between them. The earlier runs that they continue are "
            "trained too.",
            show_default="all",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each run.", show_default="as the experiment says"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a setting of the recipe in all runs, as a.b=c. Repeatable."
        ),
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="Try it: tiny models and a few steps on a CPU, on bytes of Python code."
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Device: cuda or cpu.", show_default="a GPU if there is one")
    ] = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--list", help="List the experiments, or the runs of the one that is named, and exit."
        ),
    ] = False,
) -> None:
    """Train the runs of an experiment, write results.json and draw the figure.

    The same command continues an experiment that was stopped. When all runs have a result, it only
    draws the figure again.
    """
    from xlstm7b.experiment import experiment_names, load_experiment

    if listed:
        print(_list_runs(name) if name else _list_experiments())
        return
    if name is None:
        raise ValueError(
            f"name an experiment: {', '.join(experiment_names())}, or the path of a .toml file"
        )
    chosen = load_experiment(name)
    names = chosen.chosen(runs)
    target = output or Path("experiments") / chosen.name
    changes = [*([] if steps is None else [f"run.steps={steps}"]), *(settings or [])]
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"the device must be cuda or cpu, not {device!r}")
    import torch

    where = device or ("cuda" if torch.cuda.is_available() and not smoke else "cpu")
    if where == "cuda" and not torch.cuda.is_available():
        raise ValueError("the device cuda cannot be used here: PyTorch finds no GPU")
    from xlstm7b.experiment.results import accuracy_table, results_table
    from xlstm7b.experiment.runs import run_experiment

    draws = find_spec("matplotlib") is not None

    def draw_figures(records: dict[str, Any]) -> None:
        if draws:
            from xlstm7b.experiment.figures import draw

            for ending in ("png", "svg"):
                draw(chosen, records, target / f"{chosen.name}.{ending}")

    if not draws:
        print("no figure is drawn, because matplotlib is not installed", file=sys.stderr)
    found = run_experiment(
        chosen,
        target,
        runs=names,
        data=data,
        settings=changes,
        smoke=smoke,
        device=where,
        progress=progress,
        recorded=draw_figures,
        say=lambda line: print(line, file=sys.stderr),
    )
    if found:
        draw_figures(found)
        print(results_table(chosen, found))
        if chosen.figure.kind == "accuracy":
            print(f"\n{accuracy_table(chosen, found)}")
        figures = f" and {target / chosen.name}.png and .svg" if draws else ""
        print(f"wrote {target / 'results.json'}{figures}")
    if any(run not in found for run in names):
        print(f"{target}: not finished; the same command continues")


def _list_experiments() -> str:
    from xlstm7b.experiment import experiment_names, load_experiment

    loaded = {name: load_experiment(name) for name in experiment_names()}
    return "\n".join(f"{name:20}{file.title}" for name, file in loaded.items())


def _list_runs(name: str) -> str:
    from xlstm7b.experiment import load_experiment

    chosen = load_experiment(name)
    rows = [(run, given.label, " ".join(given.set)) for run, given in chosen.runs.items()]
    common = f"all runs: recipe {chosen.recipe}, {' '.join(chosen.set)}".rstrip(", ")
    runs = table(["run", "label", "settings"], rows)
    return f"{chosen.title}\n{chosen.paper}\n{common}\n\n{runs}"
