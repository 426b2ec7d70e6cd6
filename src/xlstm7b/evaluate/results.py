"""Results files: the harness's layout, with what they were measured on and by; and compared."""

import hashlib
import json
import math
import platform
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from xlstm7b.weights import read_config, resolve

_PACKAGES = ("xlstm7b", "torch", "triton", "tokenizers", "lm_eval", "datasets", "transformers")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint(folder_or_hub_id: str | Path) -> dict[str, Any]:
    """What tells a model from another without reading all of it.

    The hash covers the config, and of each file of weights its size and 64 places of 4 KiB, the
    first of which is its header's: training changes every one of them.
    """
    folder = resolve(folder_or_hub_id)
    config = read_config(folder)
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode())
    for path in sorted(folder.glob("model*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    parameters = sum(math.prod(shape) for shape in config.parameter_shapes().values())
    return {"folder": str(folder), "fingerprint": digest.hexdigest(), "parameters": parameters}


def described(results: dict[str, Any], model: str | Path) -> dict[str, Any]:
    """Results with the model's fingerprint, the packages' versions and the command."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    about = {"model": fingerprint(model), "versions": versions, "command": command}
    return {**results, "xlstm7b": about}


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Writes aside, then renames: a file that was there stays whole till then."""
    text = json.dumps(results, indent=2, default=_plain, ensure_ascii=False) + "\n"
    replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Has a file written under another name, then puts it in its place."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """What JSON has no word for: NumPy's numbers, and functions in tasks' configs."""
    return value.item() if hasattr(value, "item") else str(value)


class Measured(NamedTuple):
    """One metric of one task; the standard error where there is one."""

    value: float
    error: float | None


class Line(NamedTuple):
    """A task's metric in every file; None where a file lacks it. Differences are to the first."""

    task: str
    metric: str
    values: list[Measured | None]
    differences: list[float | None]


def read_results(path: Path) -> dict[tuple[str, str], Measured]:
    """Every task's metrics of a results file, by (task, metric)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error
    results = content.get("results") if isinstance(content, dict) else None
    if not isinstance(results, dict):
        raise ValueError(f'{path} is not a results file: it has no "results"')
    found = {}
    for task, metrics in results.items():
        if not isinstance(metrics, dict):
            raise ValueError(f"{path} is not a results file: {task!r} has no metrics")
        for key, value in metrics.items():
            name, _, kind = key.partition(",")
            if not kind or name.endswith("_stderr") or not _is_number(value):
                continue
            spread = metrics.get(f"{name}_stderr,{kind}")
            metric = name if kind == "none" else key
            found[task, metric] = Measured(value, spread if _is_number(spread) else None)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compare(paths: Sequence[Path]) -> list[Line]:
    """Task × metric over several files, in the order in which they first appear."""
    files = [read_results(path) for path in paths]
    keys = dict.fromkeys(key for file in files for key in file)
    lines = []
    for task, metric in keys:
        values = [file.get((task, metric)) for file in files]
        first = values[0]
        differences = [
            None if first is None or other is None else other.value - first.value
            for other in values[1:]
        ]
        lines.append(Line(task, metric, values, differences))
    if not lines:
        raise ValueError("there is no metric in any of these files")
    return lines
