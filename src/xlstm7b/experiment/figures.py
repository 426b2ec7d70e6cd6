"""The figure of an experiment, drawn from its results as the paper draws its own."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from xlstm7b.experiment.file import Experiment
from xlstm7b.experiment.results import Record, perplexity, ratios
from xlstm7b.report import counted, figure, token_ticks

Panel = Callable[[Any, Experiment, Mapping[str, Record]], None]


def draw(experiment: Experiment, runs: Mapping[str, Record], *outputs: Path) -> None:
    """Draws all runs that have a record. A file's suffix chooses the format: png, pdf or svg."""
    kind = experiment.figure.kind
    panels = _accuracy_panels(runs) if kind == "accuracy" else _PANELS[kind]
    with figure(*outputs, columns=len(panels)) as drawn:
        all_axes = [drawn] if len(panels) == 1 else drawn
        for axes, panel in zip(all_axes, panels, strict=True):
            panel(axes, experiment, runs)
        all_axes[0].figure.suptitle(experiment.title)


def over_previous(
    values: Sequence[float | None], window: int, summary: Callable[[list[float]], float]
) -> list[float]:
    """`summary` of each step and the steps before it, at most `window` in all.

    Steps that were skipped have no value and do not count; NaN if there is none in the window.
    """
    found = []
    for end in range(1, len(values) + 1):
        recent = [x for x in values[max(0, end - window) : end] if x is not None]
        found.append(summary(recent) if recent else math.nan)
    return found


def _curves(
    axes: Any,
    experiment: Experiment,
    runs: Mapping[str, Record],
    smoothed: Callable[[Mapping[str, Any]], list[float]],
) -> dict[str, Any]:
    """One line for each run that has a curve, with a cross where it diverged. Returns colours."""
    colours = {}
    for name, run in experiment.runs.items():
        if name not in runs or run.speed_only or not runs[name]["curve"]["step"]:
            continue
        steps, values = runs[name]["curve"]["step"], smoothed(runs[name]["curve"])
        is_diverged = runs[name]["status"] == "diverged"
        label = f"{run.label} (diverged)" if is_diverged else run.label
        (line,) = axes.plot(steps, values, label=label, linewidth=1.2)
        colours[name] = line.get_color()
        if is_diverged:
            axes.plot(steps[-1:], values[-1:], "x", color=colours[name])
    axes.set_xlabel("step")
    return colours


def _loss(axes: Any, experiment: Experiment, runs: Mapping[str, Record]) -> None:
    window = experiment.figure.window
    _curves(axes, experiment, runs, lambda curve: over_previous(curve["loss"], window, fmean))
    axes.set(ylabel="loss", title=f"loss, mean of the previous {counted(window, 'step')}")
    axes.legend()


def _gradient_norm(axes: Any, experiment: Experiment, runs: Mapping[str, Record]) -> None:
    window = experiment.figure.window
    norms = _curves(
        axes, experiment, runs, lambda curve: over_previous(curve["gradient_norm"], window, max)
    )
    title = f"gradient norm, max of the previous {counted(window, 'step')}"
    axes.set(ylabel="norm", title=title, yscale="log" if norms else "linear")


def _learning_rate(axes: Any, experiment: Experiment, runs: Mapping[str, Record]) -> None:
    _curves(axes, experiment, runs, lambda curve: curve["learning_rate"])
    axes.set(ylabel="learning rate", title="learning rate")
    axes.legend()


def _perplexity(axes: Any, experiment: Experiment, runs: Mapping[str, Record]) -> None:
    window = experiment.figure.window

    def smoothed(curve: Mapping[str, Any]) -> list[float]:
        return [perplexity(loss) for loss in over_previous(curve["loss"], window, fmean)]

    for name, colour in _curves(axes, experiment, runs, smoothed).items():
        held_out = runs[name]["held_out"]
        axes.plot(held_out["step"], list(map(perplexity, held_out["loss"])), "o--", color=colour)
    title = f"perplexity of the previous {counted(window, 'step')} (dots: held-out text)"
    axes.set(ylabel="perplexity", title=title, yscale="log")


def _speed(axes: Any, experiment: Experiment, runs: Mapping[str, Record]) -> None:
    speedups = ratios(experiment, runs)
    names = [name for name in experiment.runs if runs.get(name, {}).get("tokens_per_second")]
    speeds = [runs[name]["tokens_per_second"] for name in names]
    bars = axes.barh([experiment.runs[name].label for name in names], speeds)
    labels = [
        f" {speed:,.0f} tok/s, {1000 * runs[name]['seconds_per_step']:,.0f} ms"
        + (f", {speedups[name]:.2f}×" if name in speedups else "")
        for name, speed in zip(names, speeds, strict=True)
    ]
    axes.bar_label(bars, labels, fontsize="small")
    axes.invert_yaxis()  # the first run at the top
    axes.margins(x=0.9)  # for the labels
    if speeds and (ratio := max(speeds) / min(speeds)) > 10:
        axes.set(xscale="log", xlim=(min(speeds) / 3, ratio * max(speeds)))
    else:
        axes.ticklabel_format(axis="x", style="sci", scilimits=(3, 3))
    axes.set(xlabel="tokens per second", title="speed, and × the first of its group")


def _accuracy_panels(runs: Mapping[str, Record]) -> list[Panel]:
    """One panel for each series of the evaluations."""
    names = {series: None for run in runs.values() for series in run.get("evaluation", {})}
    return [partial(_accuracy, series) for series in names] or [partial(_accuracy, "accuracy")]


def _accuracy(series: str, axes: Any, experiment: Experiment, runs: Mapping[str, Record]) -> None:
    lengths: set[int] = set()
    chances: set[float] = set()
    for name, run in experiment.runs.items():
        found = runs.get(name, {}).get("evaluation", {}).get(series, {})
        if not found:
            continue
        points = sorted((int(length), point) for length, point in found.items())
        at, values = [length for length, _ in points], [point["accuracy"] for _, point in points]
        (line,) = axes.plot(at, values, "o-", label=run.label)
        if all("low" in point for _, point in points):
            low, high = ([point[end] for _, point in points] for end in ("low", "high"))
            axes.fill_between(at, low, high, color=line.get_color(), alpha=0.15)
        lengths.update(at)
        chances.update(point["chance"] for _, point in points if "chance" in point)
    if lengths:
        token_ticks(axes, sorted(lengths))
        for chance in sorted(chances):  # after the ticks: a line fixes the limits of the x axis
            axes.axhline(chance, color="grey", linestyle=":", label=f"guessing: {chance:.3g}")
        axes.legend()
    axes.set(xlabel="tokens", ylabel="accuracy", title=series, ylim=(-0.03, 1.03))


_PANELS: dict[str, list[Panel]] = {
    "loss": [_loss, _gradient_norm],
    "schedule": [_learning_rate, _perplexity],
    "speed": [_speed],
    "loss-and-speed": [_loss, _gradient_norm, _speed],
}
