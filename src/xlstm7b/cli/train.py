"""`xlstm7b train RECIPE`, `export RUN FOLDER`, `plot RUN…`."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlstm7b.cli.options import to_dtype, to_target
from xlstm7b.cli.sections import print_sections

if TYPE_CHECKING:
    from xlstm7b.train import Recipe
    from xlstm7b.train.trainer import Trainer

# What a run keeps from first step to last, beside its model; the loader sees to its sources.
_SAME = {"data": ["context_length", "packing"], "batch": ["sequences", "ramp"]}
_PEAK_FLOPS = {(9, 0): 989e12, (8, 0): 312e12}  # dense bfloat16, by compute capability


def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name (quickstart, 160m, …, 7b) or a .toml file.")
    ],
    run: Annotated[
        Path | None,
        typer.Option(help="The run's folder; one that holds a run is gone on with.",
                     show_default="runs/ and the recipe's name"),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="a.b=c over the recipe's; repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved plan, and train nothing.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(help="That the plan is for.", show_default="the fewest that the recipe takes"),
    ] = None,
    mfu: Annotated[
        float, typer.Option(help="Share of the GPUs' peak that the plan counts on.")
    ] = 0.374,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu.", show_default="a GPU if there is one")
    ] = None,
) -> None:  # fmt: skip
    """Train a model: on this machine, or on many by torchrun. Stopped, it goes on when run again.

    One process: xlstm7b train 160m. Eight: torchrun --nproc-per-node 8 -m -- xlstm7b train 160m.
    """
    from xlstm7b.train import describe, load_recipe, resolved

    chosen = load_recipe(recipe, settings or [])
    if dry_run:
        print_sections(f"recipe {chosen.name}", describe(resolved(chosen, gpus=gpus, mfu=mfu)))
        return
    folder = run or Path("runs") / chosen.name
    _check_same_run(folder, chosen)
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"the device must be cuda or cpu, not {device!r}")
    import torch

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where == "cuda" and not torch.cuda.is_available():
        raise ValueError("the device cuda cannot be used here: PyTorch finds no GPU")
    from xlstm7b.data.writing import write_json
    from xlstm7b.train.processes import in_first_process, process_group, run_folder
    from xlstm7b.train.trainer import Trainer

    is_first = int(os.environ.get("RANK", "0")) == 0
    with process_group(where), run_folder(folder):
        trainer = Trainer(chosen, folder, where)
        trainer.resume()
        # Now that nothing stands against it.
        in_first_process(write_json, folder / "recipe.json", chosen.to_dict())
        if is_first and chosen.data.validation and not chosen.run.validate_every:
            print("data.validation is never read: run.validate_every is 0", file=sys.stderr)
        with _bar(chosen, trainer.step, where) as report:
            trainer.train(report)
    if is_first:
        print(f"{folder}: trained to step {trainer.step} of {chosen.run.steps}{_remarks(trainer)}")


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write, in Hugging Face layout.")],
    step: Annotated[
        str | None,
        typer.Option(
            help="Of the checkpoint; best: of the lowest held-out loss.",
            show_default="the last one's",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="A tokenizer.json, or its folder, to lay beside the weights.",
            show_default="that of init_from, if it has one",
        ),
    ] = None,
) -> None:
    """Write a run's checkpoint as a folder that generate, transformers and everyone reads."""
    from xlstm7b.train.export import export_run

    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists already")
    chosen: Any = step
    if step not in (None, "best"):
        if not str(step).isdecimal():
            raise ValueError(f"--step is a number or best, not {step!r}")
        chosen = int(str(step))
    done = export_run(run, folder, step=chosen, dtype=to_dtype(dtype), tokenizer=tokenizer)
    print(f"wrote step {done} of {run} to {folder}")


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    output: Annotated[Path, typer.Option(help="A .png, .pdf or .svg.")] = Path("curves.png"),
) -> None:
    """Draw loss and gradient norm of one or more runs."""
    from xlstm7b.train.export import plot_runs

    plot_runs(runs, to_target(output))
    print(f"wrote {output}")


def _check_same_run(folder: Path, recipe: "Recipe") -> None:
    """A folder's run is gone on with, not mixed with another."""
    path = folder / "recipe.json"
    if not path.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds something else than a run: choose another --run")
        return
    from xlstm7b.train.checkpoint import steps

    if not steps(folder / "checkpoints"):
        return  # it begins anew
    now = json.loads(json.dumps(recipe.to_dict()))
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        others = [
            f"{section}.{name} {before[section][name]}, not {now[section][name]}"
            for section, names in {"model": now["model"], **_SAME}.items()
            for name in names
            if before[section][name] != now[section][name]
        ]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is garbled: {type(error).__name__}: {error}") from error
    for other in others:
        raise ValueError(f"the run in {folder} was begun with {other}: choose another --run")


def _remarks(trainer: "Trainer") -> str:
    remarks = ""
    if trainer.skipped:
        remarks += f"; skipped for numbers that were not finite: {trainer.skipped} of them"
    if trainer.step < trainer.recipe.run.steps:
        remarks += "; the same command goes on"
    return remarks


@contextmanager
def _bar(recipe: "Recipe", step: int, device: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A live line on stderr; in a log, a line at every interval."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    live = console.is_terminal
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, disable=not live,
    ) as bar:  # fmt: skip
        task = bar.add_task("starting", total=recipe.run.steps, completed=step)

        def report(line: dict[str, Any]) -> None:
            shown = f"loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tok/s"
            shown += _mfu(recipe, line["tokens_per_second"], device)
            if "validation_loss" in line:
                bar.print(f"step {line['step'] + 1}: held-out loss {line['validation_loss']:.4f}")
            bar.update(task, completed=line["step"] + 1, description=shown)
            if not live and "loss_mean" in line:
                mean, norm = line["loss_mean"], line["gradient_norm_mean"]
                console.print(f"step {line['step'] + 1}: {shown}, mean {mean:.4f}, norm {norm:.2f}")

        yield report


def _mfu(recipe: "Recipe", tokens_per_second: float, device: str) -> str:
    if device != "cuda":
        return ""
    import torch

    from xlstm7b.accounting import training_flops

    peak = _PEAK_FLOPS.get(torch.cuda.get_device_capability())
    if peak is None:
        return ""
    length = recipe.data.context_length
    flops = training_flops(recipe.model, length) / length
    world = torch.distributed.get_world_size()
    return f"  MFU {100 * flops * tokens_per_second / (peak * world):.1f}%"
