"""`xlstm7b train RECIPE`, `export RUN FOLDER` and `plot RUN…`."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlstm7b.accounting import PAPER_MFU
from xlstm7b.cli.options import option, to_target
from xlstm7b.cli.sections import print_sections
from xlstm7b.devices import to_dtype

if TYPE_CHECKING:
    from xlstm7b.train import Recipe
    from xlstm7b.train.trainer import Trainer

Device = Annotated[str | None, option("Device: cuda or cpu.", default="a GPU if there is one")]


def _print_reference(chosen: bool) -> None:
    if chosen:
        from xlstm7b.train.reference import recipe_reference

        print(recipe_reference(), end="")
        raise typer.Exit


def train(
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe (quickstart, 160m, …, 7b) or a .toml file.")
    ],
    run: Annotated[
        Path | None,
        option(
            "Folder of the run. If it holds a run, that run is continued.",
            default="runs/, the recipe's name and most settings given with --set",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, option("Change a setting of the recipe, as a.b=c. Repeatable.", "--set")
    ] = None,
    dry_run: Annotated[bool, option("Print the plan and do not train.", "--dry-run")] = False,
    gpus: Annotated[
        int | None,
        option(
            "Number of GPUs to plan for, with --dry-run.",
            default="the fewest that the recipe allows",
        ),
    ] = None,
    mfu: Annotated[
        float | None,
        option(
            "Share of the GPUs' peak FLOP/s to plan with, with --dry-run.",
            default=f"{PAPER_MFU}, the paper's",
        ),
    ] = None,
    device: Device = None,
    profile: Annotated[
        bool,
        option(
            "Write a trace of three steps after warm-up, and on a GPU a memory snapshot, into the "
            "run's folder.",
            "--profile",
        ),
    ] = False,
    profile_steps: Annotated[
        str | None,
        option(
            "Steps to profile, as FIRST-LAST, numbered as in metrics.jsonl.",
            default="three steps after the first three of this start, with --profile",
        ),
    ] = None,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference",
            help="Print all settings of a recipe, with defaults and meanings, and exit.",
            callback=_print_reference,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Train a model. The same command continues a run that was stopped.

    One process: xlstm7b train 160m. Eight: torchrun --nproc-per-node 8 -m -- xlstm7b train 160m.
    """
    from xlstm7b.train import describe, load_recipe, make_plan
    from xlstm7b.train.orphans import end_with_torchrun
    from xlstm7b.train.run_settings import default_folder

    end_with_torchrun()  # now, since to import torch takes seconds
    _check_device_name(device)
    if not dry_run and (gpus is not None or mfu is not None):
        raise ValueError(
            "--gpus and --mfu are for --dry-run. To train on several GPUs, start one process for "
            "each: torchrun --nproc-per-node 8 -m -- xlstm7b train …"
        )
    steps = profile if profile_steps is None else _parse_steps(profile_steps)
    chosen = load_recipe(recipe, settings or [])
    folder = run or default_folder(chosen.name, settings or [])
    if dry_run:
        if chosen.init_from:
            from xlstm7b.train.trainer import check_init_from

            check_init_from(chosen, folder)
        plan = make_plan(chosen, gpus=gpus, mfu=PAPER_MFU if mfu is None else mfu)
        print_sections(f"recipe {chosen.name}", describe(plan))
        _warn_of_memory(plan.memory["total"])
        return
    _check_same_run(folder, chosen)
    where = to_training_device(device)
    from xlstm7b.train.processes import process_group, run_folder
    from xlstm7b.train.trainer import Trainer

    is_first = int(os.environ.get("RANK", "0")) == 0
    with process_group(where), run_folder(folder):
        trainer = Trainer(chosen, folder, where)
        trainer.resume()
        is_finished = trainer.step == chosen.run.steps
        trainer.print_remarks()
        if not is_finished:
            with progress(chosen, trainer.step) as report, _explain_hook_errors():
                trainer.train(report, profile=steps)
    if is_first:
        done = f"step {trainer.step} of {chosen.run.steps}"
        if is_finished:
            print(f"{folder}: already finished, nothing trained ({done})")
        else:
            print(f"{folder}: trained to {done}{_remarks(trainer)}")


def _parse_steps(text: str) -> range:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ValueError(f"--profile-steps must be FIRST-LAST, such as 100-102, not {text!r}")
    return range(int(first), int(last) + 1)


def _warn_of_memory(planned: int) -> None:
    """Says on stderr if this machine's GPU has hardly more memory than the plan needs, or less."""
    import torch

    if torch.cuda.is_available():
        there = torch.cuda.get_device_properties(0).total_memory
        if planned > 0.95 * there:
            print(
                f"warning: the plan needs {planned / 1e9:.1f} GB of the {there / 1e9:.1f} GB of "
                "this machine's GPU, and may not fit: lower batch.micro_batch, or recompute more "
                "with run.activation_checkpointing",
                file=sys.stderr,
            )


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    folder: Annotated[
        Path,
        typer.Argument(help="Folder to write, in Hugging Face layout. For a state, the file."),
    ],
    step: Annotated[
        str | None,
        option(
            "Step of the checkpoint, or best: the lowest validation loss.", default="the last one"
        ),
    ] = None,
    dtype: Annotated[
        str, option("Dtype of the weights: float32, bfloat16 or float16.")
    ] = "float32",
    tokenizer: Annotated[
        str | None,
        option(
            "A tokenizer.json, its folder, a hub id, or bytes, to write next to the weights.",
            default="that of the data",
        ),
    ] = None,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder, for generate and transformers.

    A LoRA run becomes an adapter in PEFT's format, for --adapter, merge and PEFT. A state tuning
    run becomes a state file, for --load-state, /load in a chat and /v1/states of a server.
    """
    from xlstm7b.checkpoint import read_config, transformers_limits
    from xlstm7b.train.run_checkpoints import export_run

    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists already: choose another folder")
    chosen: Any = step
    if step not in (None, "best"):
        if not str(step).isdecimal():
            raise ValueError(f"--step must be a number or best, not {step!r}")
        chosen = int(str(step))
    done = export_run(
        run, folder, step=chosen, dtype=to_dtype(dtype), tokenizer=tokenizer, overwrite=False
    )
    if folder.is_file():
        print(f"wrote the state of step {done} of {run} to {folder}")
        return
    is_adapter = (folder / "adapter_config.json").is_file()
    warnings = [] if is_adapter else transformers_limits(read_config(folder))
    if not (folder / "tokenizer.json").exists():
        warnings.append("the run's tokenizer was not found: give it with --tokenizer")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"wrote step {done} of {run} to {folder}")


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    output: Annotated[Path, option("File to write: .png, .pdf or .svg.")] = Path("curves.png"),
) -> None:
    """Plot loss and gradient norm of one or more runs."""
    from xlstm7b.train.metrics_log import plot_runs

    plot_runs(runs, to_target(output))
    print(f"wrote {output}")


def to_training_device(device: str | None, *, prefers_cpu: bool = False) -> str:
    """cuda or cpu; None is a GPU if there is one, unless `prefers_cpu`."""
    _check_device_name(device)
    import torch

    where = device or ("cuda" if torch.cuda.is_available() and not prefers_cpu else "cpu")
    if where == "cuda" and not torch.cuda.is_available():
        raise ValueError("the device cuda cannot be used here: PyTorch finds no GPU")
    return where


def _check_device_name(device: str | None) -> None:
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"the device must be cuda or cpu, not {device!r}")


def _check_same_run(folder: Path, recipe: "Recipe") -> None:
    """Raises a `ValueError` if the folder holds another run or other files."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not the folder of a run: choose another --run")
    path = folder / "recipe.json"
    if not path.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds files that are not of a run: choose another --run")
        return
    from xlstm7b.train.recipe import Recipe
    from xlstm7b.train.run_checkpoints import saved_steps
    from xlstm7b.train.run_settings import check_continues

    if not saved_steps(folder / "checkpoints"):
        return  # the run starts again from step 0
    try:
        before = Recipe.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    check_continues(folder, before, recipe)


def _remarks(trainer: "Trainer") -> str:
    remarks = ""
    if trainer.skipped:
        remarks += f"; steps skipped because a number was not finite: {trainer.skipped}"
    if trainer.step < trainer.recipe.run.steps:
        remarks += "; the same command continues"
    return remarks


@contextmanager
def _explain_hook_errors() -> Iterator[None]:
    """Prints where a hook failed, for its author, and then the sentence that names it."""
    from xlstm7b.train import HookError

    try:
        yield
    except HookError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"xlstm7b: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


@contextmanager
def progress(recipe: "Recipe", step: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A progress bar on stderr; in a log file, one line per interval."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    is_live = console.is_terminal
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not is_live) as bar:
        task = bar.add_task("starting", total=recipe.run.steps, completed=step)

        def report(line: dict[str, Any]) -> None:
            shown = f"loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tok/s"
            shown += f"  MFU {100 * line['mfu']:.1f}%" if "mfu" in line else ""
            shown += f"  {line['peak_memory_gb']:.1f} GB" if "peak_memory_gb" in line else ""
            if "validation_loss" in line:
                names = [name for name in recipe.data.validation_sets() if name]
                losses = [f"{name} {line[f'validation_loss/{name}']:.4f}" for name in names]
                found = ", ".join(losses) or f"{line['validation_loss']:.4f}"
                text = f"step {line['step'] + 1}: validation loss {found}"
                bar.print(text, markup=False, soft_wrap=True)
            bar.update(task, completed=line["step"] + 1, description=shown)
            if not is_live and "loss_mean" in line:
                mean, norm = line["loss_mean"], line["gradient_norm_mean"]
                console.print(f"step {line['step'] + 1}: {shown}, mean {mean:.4f}, norm {norm:.3g}")

        yield report
