"""The metrics of a run: one JSON line per step in `metrics.jsonl`, and curves."""

import json
import math
from collections import deque
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

from xlstm7b.files import naming, write_aside
from xlstm7b.report import figure


class MetricsLog:
    """Appends to `metrics.jsonl`. After a resume, lines from step `start` on are dropped."""

    def __init__(self, path: Path, *, start: int, interval: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] < start]
        with write_aside(path) as aside, naming(path):
            aside.write_text("".join(map(_as_line, kept)), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._recent: deque[dict[str, float]] = deque(maxlen=interval)
        for line in kept[-interval:]:
            self._remember(line)

    def write(self, **line: Any) -> None:
        try:
            self._file.write(_as_line(line))
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # closing tries to write again
                self._file.close()
            raise OSError(f"{self._file.name} could not be written ({error})") from error
        self._remember(line)

    def _remember(self, line: dict[str, Any]) -> None:
        if "loss" in line:
            names = "loss", "gradient_norm"  # not finite: null in the file
            self._recent.append(
                {name: math.inf if line[name] is None else line[name] for name in names}
            )

    def over_interval(self) -> dict[str, float]:
        """Mean and max of loss and gradient norm over the last interval (paper, figure 2)."""
        result = {}
        for name in ("loss", "gradient_norm"):
            values = [line[name] for line in self._recent]
            result[f"{name}_mean"] = sum(values) / len(values)
            result[f"{name}_max"] = max(values)
        return result

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of `metrics.jsonl`. The last line may have been cut off by a kill."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        if line:
            try:
                found.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path} is damaged in line {number}: {error}") from error
    return found


def _as_line(values: dict[str, Any]) -> str:
    """JSON has no NaN and no infinity: they become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: finite(value) for name, value in values.items()}) + "\n"


def plot_runs(runs: list[Path], output: Path) -> None:
    """Plots loss and gradient norm by step: mean and max over up to 50 steps (paper, figure 2)."""
    metrics = {run: read_metrics(run / "metrics.jsonl") for run in runs}
    with figure(output, columns=2) as (losses, norms):
        for run, found in metrics.items():
            lines = [line for line in found if line["applied"]]
            if not lines:
                raise ValueError(f"{run} holds no metrics to plot")
            size = max(1, min(50, len(lines) // 20))
            groups = [lines[at : at + size] for at in range(0, len(lines), size)]
            steps = [group[-1]["step"] for group in groups]
            for axes, name in ((losses, "loss"), (norms, "gradient_norm")):
                means = [sum(line[name] for line in group) / len(group) for group in groups]
                (drawn,) = axes.plot(steps, means, label=f"{run.name}, mean of {size}")
                highest = [max(line[name] for line in group) for group in groups]
                axes.plot(steps, highest, color=drawn.get_color(), alpha=0.35, linewidth=0.8)
            validated = [line for line in lines if "validation_loss" in line]
            logged = dict.fromkeys(name for line in validated for name in line)
            # Several sets of held-out text have a loss each, by name.
            names = [name for name in logged if name.startswith("validation_loss/")]
            for name, marker in zip(names or ["validation_loss"], cycle("osv^Dx"), strict=False):
                points = [(line["step"], line[name]) for line in validated if name in line]
                if points:
                    losses.plot(
                        *zip(*points, strict=True),
                        f"{marker}--",
                        color=drawn.get_color(),
                        label=f"{run.name}, validation {name.partition('/')[2]}".rstrip(),
                    )
        losses.set(xlabel="step", ylabel="loss", title="loss (faint: max)")
        norms.set(xlabel="step", ylabel="norm", title="gradient norm (faint: max)", yscale="log")
        losses.legend()
