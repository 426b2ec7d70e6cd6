"""Scores as a table of tasks and lengths, and as a plot over length."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xlstm7b.evaluate.results import read_results, replace_file
from xlstm7b.evaluate.ruler.runner import AVERAGE, to_metric
from xlstm7b.evaluate.ruler.tasks import TASKS

_ABSENT = "–"


def to_table(document: dict[str, Any]) -> str:
    """A row for each task and one for the average; what is left out of that is named below."""
    lengths = document["lengths"]
    lines = [f"{'':16}" + "".join(f"{length:>9}" for length in lengths)]
    for name, row in document["results"].items():
        values = [row.get(to_metric(length)) for length in lengths]
        cells = [_ABSENT if value is None else f"{value:.1f}" for value in values]
        lines.append(f"{name:16}" + "".join(f"{cell:>9}" for cell in cells))
    for name, reason in document["left_out"].items():
        lines.append(f"{_ABSENT} {name} is not in the average: {reason}")
    return "\n".join(lines)


def model_names(paths: Sequence[Path]) -> list[str]:
    """What each scores.json is of; with its folder's name where that would not tell two apart."""
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    names = [Path(str(content.get("model"))).name for content in contents]
    return [
        name if names.count(name) == 1 else f"{name}, {path.absolute().parent.name}"
        for name, path in zip(names, paths, strict=True)
    ]


def plot_scores(paths: Sequence[Path], output: Path) -> None:
    """The average over length, a line for each scores.json: the paper's figure of RULER."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    places: set[int] = set()
    read = [read_results(path) for path in paths]
    for path, results, name in zip(paths, read, model_names(paths), strict=True):
        points = sorted((int(n), r.value) for (task, n), r in results.items() if task == AVERAGE)
        if not points:
            raise ValueError(f"{path} holds no average to draw")
        tasks = len({task for task, _ in results} - {AVERAGE})
        label = name if tasks == len(TASKS) else f"{name} ({tasks} of {len(TASKS)} tasks)"
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
        places |= {length for length, _ in points}
    axes.set_xscale("log", base=2)
    ticks = sorted(places)
    axes.set_xticks(ticks, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in ticks])
    axes.minorticks_off()
    axes.set(title="RULER", xlabel="length in tokens", ylabel="average score, %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend()
    replace_file(output, lambda aside: figure.savefig(aside, dpi=150, format="png"))
    pyplot.close(figure)
