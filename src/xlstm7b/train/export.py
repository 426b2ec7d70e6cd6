"""From a run's folder to what everyone reads: a Hugging Face folder, and curves as a picture."""

import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from xlstm7b.data.tokenising import load, tokenizer_file, tokenizer_fingerprint
from xlstm7b.train.checkpoint import best_step, read_model, read_run, steps
from xlstm7b.train.metrics import read_metrics
from xlstm7b.train.recipe import Recipe
from xlstm7b.weights import resolve, save_checkpoint


def export_run(
    run: Path,
    target: Path,
    *,
    step: int | Literal["best"] | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | None = None,
) -> int:
    """Writes a checkpoint's weights, the last one's if none is named; returns its step.

    The best one is that with the lowest held-out loss. `tokenizer` is laid beside the weights: a
    tokenizer.json, its folder, or "bytes", which needs none; by default that of `init_from`.
    """
    folder = run / "checkpoints"
    found = steps(folder)
    if not found:
        raise ValueError(f"{run} holds no checkpoint to export")
    if step == "best":
        step = best_step(folder)
        if step is None:
            raise ValueError(f"{run} has no best checkpoint: it kept none by held-out loss")
    step = found[-1] if step is None else step
    if step not in found:
        raise ValueError(f"{run} has no checkpoint of step {step}; there are: {found}")
    checkpoint = folder / f"step-{step:08}"
    noted = read_run(checkpoint)
    recipe = Recipe.from_dict(noted["recipe"])
    # Runs of earlier versions did not note their tokenizer.
    file = _find_tokenizer(recipe, tokenizer, noted.get("tokenizer"))
    parameters = read_model(checkpoint, recipe.model).named_parameters()
    with TemporaryDirectory() as aside:
        companions = []
        if file is not None:  # whatever its own name is
            companions.append(shutil.copyfile(file, Path(aside) / "tokenizer.json"))
        save_checkpoint(target, recipe.model, parameters, dtype=dtype, companions=companions)
    return step


def _find_tokenizer(
    recipe: Recipe, chosen: str | Path | None, fingerprint: str | None
) -> Path | None:
    """The one chosen, if it is the run's; else that of the weights it began with, if they say."""
    if chosen is not None:
        fits = load(chosen).vocab_size <= recipe.model.vocab_size
        if not fits or fingerprint not in (None, tokenizer_fingerprint(chosen)):
            raise ValueError(f"the run was trained on tokens of another tokenizer than {chosen}")
        return tokenizer_file(chosen)
    if recipe.init_from and not recipe.start_step:
        with suppress(ValueError, OSError):  # it may be gone by now
            file = tokenizer_file(resolve(recipe.init_from))
            if file is not None and fingerprint in (None, tokenizer_fingerprint(file)):
                return file
    return None


def plot_runs(runs: list[Path], output: Path) -> None:
    """Loss and gradient norm over the steps, mean and max over 50 (paper, figure 2).

    The file's ending says the format: png, pdf, svg, …
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, norms) = pyplot.subplots(1, 2, figsize=(11, 4))
    for run in runs:
        lines = [line for line in read_metrics(run / "metrics.jsonl") if line["applied"]]
        if not lines:
            raise ValueError(f"{run} holds no metrics to draw")
        size = max(1, min(50, len(lines) // 20))
        for axes, name in ((losses, "loss"), (norms, "gradient_norm")):
            groups = [lines[at : at + size] for at in range(0, len(lines), size)]
            at = [group[-1]["step"] for group in groups]
            means = [sum(line[name] for line in group) / len(group) for group in groups]
            (drawn,) = axes.plot(at, means, label=f"{run.name}, mean of {size}")
            highest = [max(line[name] for line in group) for group in groups]
            axes.plot(at, highest, color=drawn.get_color(), alpha=0.35, linewidth=0.8)
        held_out = [line for line in lines if "validation_loss" in line]
        if held_out:
            at = [line["step"] for line in held_out]
            heights = [line["validation_loss"] for line in held_out]
            losses.plot(at, heights, "o--", color=drawn.get_color(), label=f"{run.name}, held out")
    losses.set(xlabel="step", ylabel="loss", title="loss (faint: max)")
    norms.set(xlabel="step", ylabel="norm", title="gradient norm (faint: max)", yscale="log")
    losses.legend()
    figure.tight_layout()
    aside = output.with_name(f".{output.name}")
    figure.savefig(aside, dpi=120, format=output.suffix[1:] or "png")
    pyplot.close(figure)
    aside.replace(output)
