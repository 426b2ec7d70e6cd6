"""Results files in the harness's JSON layout, with their origin; and a table that compares them."""

import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from xlstm7b import __version__
from xlstm7b.accounting import parameter_counts
from xlstm7b.checkpoint import read_config
from xlstm7b.report import counted, table

MISSING = "–"  # in tables
_PACKAGES = ("torch", "triton", "tokenizers", "lm_eval", "datasets", "transformers")
_BLOCKS, _BLOCK_BYTES = 64, 4096
_MAX_SHOWN = 3  # differences between two files
_CONFIG = ("limit", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_RULER = ("tokenizer", "seed", "samples", "haystack", "sentences", "squad", "hotpotqa", "tasks")
_BY_TASK = {"n-shot": "few-shot examples", "versions": "version"}


def run_info(model: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """The origin of results: the model's fingerprint, package versions, the command line.

    Goes into a results file under "xlstm7b". `settings` must be equal for results to be comparable,
    besides those that the harness stores itself.
    """
    versions = {"python": platform.python_version(), "xlstm7b": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    about = {"model": model, "versions": versions, "command": command}
    return about | ({"settings": settings} if settings else {})


def fingerprint(folder: Path) -> dict[str, Any]:
    """A model's folder, number of parameters, and a hash that differs between models.

    The hash is of the config and, of each weights file, its size and 64 blocks of 4 KiB. The first
    block is the header. Training changes all the others, so the rest need not be read.
    """
    config = read_config(folder)
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode())
    for path in sorted(folder.glob("model*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return {
        "folder": str(folder),
        "fingerprint": digest.hexdigest(),
        "parameters": parameter_counts(config)["total"],
    }


class Metric(NamedTuple):
    value: float
    stderr: float | None

    def __str__(self) -> str:
        return f"{self.value:.4f}" + ("" if self.stderr is None else f" ± {self.stderr:.4f}")


def read_file(path: Path) -> dict[str, Any]:
    """The content of a results file."""
    if not path.is_file():
        raise ValueError(f"there is no results file {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise ValueError(f'{path} is not a results file: it has no "results"')
    return content


def read_metrics(path: Path) -> dict[tuple[str, str], Metric]:
    """The metrics of a results file, by (task, metric)."""
    found = {}
    for task, metrics in read_file(path)["results"].items():
        if not isinstance(metrics, dict):
            raise ValueError(f"{path} is not a results file: {task!r} has no metrics")
        for key, value in metrics.items():
            name, _, kind = key.partition(",")
            if not kind or name.endswith("_stderr") or not _is_number(value):
                continue
            stderr = metrics.get(f"{name}_stderr,{kind}")
            metric = name if kind == "none" else key
            found[task, metric] = Metric(value, stderr if _is_number(stderr) else None)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def comparison_table(paths: Sequence[Path]) -> str:
    """The files' metrics side by side, then which files are not comparable with the first, and why.

    Files are named by their path if their names are equal.
    """
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    header = ["task", "metric", names[0]]
    for name in names[1:]:
        header += [name, "difference"]
    files = [read_metrics(path) for path in paths]
    rows = []
    for key in dict.fromkeys(key for file in files for key in file):
        first, *others = [file.get(key) for file in files]
        row = [*key, str(first or MISSING)]
        for other in others:
            row += [str(other or MISSING)]
            row += [f"{other.value - first.value:+.4f}" if other and first else MISSING]
        rows.append(row)
    if not rows:
        raise ValueError("none of these files contains a metric")
    lines = [table(header, rows)]
    for path, name in zip(paths[1:], names[1:], strict=True):
        if found := _differences(read_file(paths[0]), read_file(path)):
            lines.append(f"{names[0]} and {name} are not comparable: {'; '.join(found)}")
    return "\n".join(lines)


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The settings that must be equal and are not, each with both values.

    A setting that one of the files does not have is not compared.
    """
    one, other = _settings(first), _settings(second)
    differing = [name for name in one if name in other and one[name] != other[name]]
    if "limit" in differing:  # it explains the numbers of questions
        differing = [name for name in differing if not name.startswith("questions of ")]
    found = [f"{name} {_shown(one[name])} and {_shown(other[name])}" for name in differing]
    more = len(found) - _MAX_SHOWN
    return [*found[:_MAX_SHOWN], counted(more, "more difference")] if more > 0 else found


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """How the results of a file were measured: by this package, or by lm_eval itself."""

    def part(*names: str) -> Mapping[str, Any]:
        found: Any = content
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    found: dict[str, Any] = {}
    if "text_sha256" in part("perplexity"):
        found["text"] = part("perplexity")["text_sha256"]
    if "lengths" in content:
        found |= {name: content[name] for name in _RULER if name in content}
    if "chat_template_sha" in content:
        found["chat_template"] = content["chat_template_sha"]
    found |= part("xlstm7b", "settings")
    found |= {name: part("config")[name] for name in _CONFIG if name in part("config")}
    found = {name.replace("_", " "): value for name, value in found.items()}
    for key, name in _BY_TASK.items():
        found |= {f"{name} of {task}": value for task, value in part(key).items()}
    for task, count in part("n-samples").items():
        found[f"questions of {task}"] = count.get("effective") if isinstance(count, dict) else None
    return found


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 else text  # of a sha256, the start is enough
