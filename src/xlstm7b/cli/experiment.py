"""`xlstm7b experiment NAME`: a figure or table of the paper, from its training runs."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from xlstm7b.cli.options import option
from xlstm7b.cli.train import Device, progress, to_training_device
from xlstm7b.report import counted, table


def experiment(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of an experiment (--list shows them) or a .toml file.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        option(
            "Folder for the runs, results.json and the figure. If it holds this experiment, "
            "it is continued.",
            default="experiments/ and the experiment's name",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        option(
            "Folder with the prepared folders train and valid. For an experiment that makes "
            "its own data: text files for it.",
            default=False,
        ),
    ] = None,
    runs: Annotated[
        str | None,
        option(
            "Runs to train, with commas between them. The earlier runs that they continue are "
            "trained too.",
            default="all",
        ),
    ] = None,
    figures: Annotated[
        str | None,
        option(
            "Figures to measure, with commas between them. For the experiment speed only.",
            default="all",
        ),
    ] = None,
    steps: Annotated[
        int | None, option("Steps of each run.", default="as the experiment says")
    ] = None,
    settings: Annotated[
        list[str] | None,
        option("Change a setting of the recipe in all runs, as a.b=c. Repeatable.", "--set"),
    ] = None,
    reuse: Annotated[
        list[Path] | None,
        option(
            "Folder of another experiment. Its finished runs with the same recipe and data "
            "are taken over instead of trained again. Repeatable."
        ),
    ] = None,
    smoke: Annotated[
        bool,
        option("Try it: tiny models and a few steps on a CPU, on bytes of Python code.", "--smoke"),
    ] = False,
    device: Device = None,
    listed: Annotated[
        bool,
        option("List the experiments, or the runs of the one that is named, and exit.", "--list"),
    ] = False,
) -> None:
    """Train the runs of an experiment, write results.json and draw the figure.

    The same command continues an experiment that was stopped. When all runs have a result, it only
    draws the figure again.
    """
    from xlstm7b.experiment import experiment_names, load_experiment
    from xlstm7b.train.recipe import is_path

    if name == "speed":
        if data or steps or settings or reuse:
            raise ValueError("speed trains nothing: leave out --data, --steps, --set and --reuse")
        _speed(output or Path("experiments/speed"), runs, figures, smoke, device, listed)
        return
    if figures is not None:
        raise ValueError("--figures is for the experiment speed: choose runs with --runs")
    known = [*experiment_names(), "speed"]
    if name is not None and name not in known and not is_path(name):
        raise ValueError(
            f"unknown experiment {name!r}; choose from {', '.join(known)}, or give the path of a "
            ".toml file"
        )
    if listed:
        print(_list_runs(name) if name else _list_experiments())
        return
    if name is None:
        raise ValueError(f"name an experiment: {', '.join(known)}, or the path of a .toml file")
    chosen = load_experiment(name)
    names = chosen.chosen(runs)
    target = output or Path("experiments") / chosen.name
    changes = [*([] if steps is None else [f"run.steps={steps}"]), *(settings or [])]
    where = to_training_device(device, prefers_cpu=smoke)
    from xlstm7b.experiment.results import accuracy_table, results_table
    from xlstm7b.experiment.runs import run_experiment

    draws = _can_draw()

    def draw_figures(records: dict[str, Any]) -> None:
        if draws:
            from xlstm7b.experiment.figures import draw

            paths = (target / f"{chosen.name}.{ending}" for ending in ("png", "svg"))
            draw(chosen, records, *paths)

    found = run_experiment(
        chosen,
        target,
        runs=names,
        data=data,
        settings=changes,
        reuse=reuse or (),
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
        drawn = f" and {target / chosen.name}.png and .svg" if draws else ""
        print(f"wrote {target / 'results.json'}{drawn}")
        for status in ("diverged", "failed"):
            if ended := [run for run, record in found.items() if record["status"] == status]:
                print(f"{len(ended)} of {counted(len(found), 'run')} {status}: {', '.join(ended)}")
    if any(run not in found for run in names):
        print(f"{target}: not finished; the same command continues")
    if any(record["status"] == "failed" for record in found.values()):
        raise typer.Exit(1)  # not for a run that diverged: that is its result


def _speed(
    target: Path,
    runs: str | None,
    figures: str | None,
    smoke: bool,
    device: str | None,
    listed: bool,
) -> None:
    """Measures models instead of training them. Those in --runs are measured again."""
    from xlstm7b.bench import speed
    from xlstm7b.bench.plans import Speed

    if listed:
        print(f"{speed.TITLE}\n\n{table(['run', 'label'], list(speed.RUNS.items()))}")
        return
    names, parts = speed.chosen(runs, smoke), speed.chosen_figures(figures)
    where = to_training_device(device, prefers_cpu=smoke)
    if where == "cuda" or smoke:
        plan, again = Speed.of(device=where), runs is not None
        found = speed.run_speed(target, names, plan, figures=parts, again=again)
    elif runs is None and (target / speed.NAME).is_file():
        found = speed.read_records(target)["runs"]
        print("there is no GPU here: results are only drawn", file=sys.stderr)
    else:
        raise ValueError("speed measures 7B models on a GPU; on a CPU, try it with --smoke")
    rows = [
        (name, record["status"], len(record["figures"]), record.get("reason"))
        for name, record in found.items()
    ]
    print(f"\n{table(['run', 'status', 'figures', 'reason'], rows)}")
    drawn = []
    if _can_draw():
        from xlstm7b.bench.speed_figures import draw

        drawn = draw(found, target)
    print(f"{target / speed.NAME}" + "".join(f", {name}.png and .svg" for name in drawn))


def _can_draw() -> bool:
    """True if figures can be drawn. If not, says so on stderr."""
    if find_spec("matplotlib") is None:
        print("no figure is drawn, because matplotlib is not installed", file=sys.stderr)
        return False
    return True


def _list_experiments() -> str:
    from xlstm7b.experiment import experiment_names, load_experiment

    titles = {name: load_experiment(name).title for name in experiment_names()}
    titles["speed"] = "Speed beside Llama, Mamba and the authors' xLSTM"
    return "\n".join(f"{name:20}{title}" for name, title in titles.items())


def _list_runs(name: str) -> str:
    from xlstm7b.experiment import load_experiment

    chosen = load_experiment(name)
    rows = [(run, given.label, " ".join(given.set)) for run, given in chosen.runs.items()]
    common = f"all runs: recipe {chosen.recipe}, {' '.join(chosen.set)}".rstrip(", ")
    runs = table(["run", "label", "settings"], rows)
    return f"{chosen.title}\n{chosen.paper}\n{common}\n\n{runs}"
