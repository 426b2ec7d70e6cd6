"""What a run writes down: a JSONL line a step, and mean and max over intervals."""

import json
import math
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any


class Metrics:
    """`metrics.jsonl` of a run; after a resume, lines of steps that are done again are dropped.

    With `tensorboard` the numbers go to a folder of that name beside it, too.
    """

    def __init__(self, path: Path, *, start: int, interval: int, tensorboard: bool) -> None:
        kept = [line for line in read_metrics(path) if line["step"] < start]
        aside = path.with_name(f".{path.name}")
        aside.write_text("".join(map(_as_line, kept)), encoding="utf-8")
        aside.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._recent: deque[dict[str, float]] = deque(maxlen=interval)
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(path.with_name("tensorboard")), purge_step=start)

    def write(self, **line: Any) -> None:
        try:
            self._file.write(_as_line(line))
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # closing tries to write once more
                self._file.close()
            raise OSError(f"{self._file.name} could not be written ({error})") from error
        if self._board is not None:
            for name, value in line.items():
                if isinstance(value, list):
                    for index, part in enumerate(value):
                        self._board.add_scalar(f"{name}/{index}", part, line["step"])
                elif name != "step":
                    self._board.add_scalar(name, value, line["step"])
        if "loss" in line:
            self._recent.append({"loss": line["loss"], "gradient_norm": line["gradient_norm"]})

    def over_interval(self) -> dict[str, float]:
        """Mean and max of loss and gradient norm over the last steps (paper, figure 2)."""
        result = {}
        for name in ("loss", "gradient_norm"):
            values = [line[name] for line in self._recent]
            result[f"{name}_mean"] = sum(values) / len(values)
            result[f"{name}_max"] = max(values)
        return result

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics: the last may have been cut off."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        if line:
            try:
                found.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path} is garbled in line {number}: {error}") from error
    return found


def _as_line(values: dict[str, Any]) -> str:
    """JSON has no NaN and no infinity: null."""

    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: finite(value) for name, value in values.items()}) + "\n"
