"""Results files in the harness's JSON layout, with their origin; and tables that compare them."""

import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from xlstm7b.accounting import parameter_counts
from xlstm7b.checkpoint import read_config, resolve
from xlstm7b.report import counted, table

MISSING = "–"  # in tables
_PACKAGES = ("xlstm7b", "torch", "triton", "tokenizers", "lm_eval", "datasets", "transformers")
_BLOCKS, _BLOCK_BYTES = 64, 4096


def run_info(model: str | Path | Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """The origin of results: the model's fingerprint, package versions, the command line.

    Goes into a results file under "xlstm7b". `model` is a folder, a hub id or a fingerprint.
    `settings` are those that `compare` compares, besides what the harness stores itself.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    described = model if isinstance(model, Mapping) else fingerprint(model)
    about = {"model": described, "versions": versions, "command": command}
    return about | ({"settings": settings} if settings else {})


def fingerprint(folder_or_hub_id: str | Path) -> dict[str, Any]:
    """A model's folder, number of parameters, and a hash that differs between models."""
    folder = resolve(folder_or_hub_id)
    config = read_config(folder)
    return {
        "folder": str(folder),
        "fingerprint": hash_model(folder, config.to_dict()),
        "parameters": parameter_counts(config)["total"],
    }


def hash_model(folder: Path, config: Mapping[str, Any]) -> str:
    """A hash of the config and, of each weights file, its size and 64 blocks of 4 KiB.

    The first block is the header. Training changes all the others, so the rest need not be read.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in sorted(folder.glob("model*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


class Metric(NamedTuple):
    value: float
    stderr: float | None

    def __str__(self) -> str:
        return f"{self.value:.4f}" + ("" if self.stderr is None else f" ± {self.stderr:.4f}")


class Comparison(NamedTuple):
    """One metric of one task: its value in each file, and the differences to the first file."""

    task: str
    metric: str
    values: list[Metric | None]  # None: not in the file
    differences: list[float | None]


def read_results(path: Path) -> dict[tuple[str, str], Metric]:
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compare(paths: Sequence[Path]) -> list[Comparison]:
    """Every metric of several results files, in order of first appearance."""
    files = [read_results(path) for path in paths]
    comparisons = []
    for task, metric in dict.fromkeys(key for file in files for key in file):
        first, *others = values = [file.get((task, metric)) for file in files]
        differences = [x.value - first.value if x and first else None for x in others]
        comparisons.append(Comparison(task, metric, values, differences))
    if not comparisons:
        raise ValueError("none of these files contains a metric")
    return comparisons


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
    rows = []
    for task, metric, values, differences in compare(paths):
        row = [task, metric, str(values[0] or MISSING)]
        for value, difference in zip(values[1:], differences, strict=True):
            row += [str(value or MISSING), MISSING if difference is None else f"{difference:+.4f}"]
        rows.append(row)
    lines = [table(header, rows)]
    for path, name in zip(paths[1:], names[1:], strict=True):
        if found := setting_differences(paths[0], path):
            lines.append(f"{names[0]} and {name} are not comparable: {'; '.join(found)}")
    return "\n".join(lines)


def setting_differences(first: Path, second: Path) -> list[str]:
    """The settings that must be equal and are not, each with both values.

    A setting that one of the files does not have is not compared.
    """
    one, other = _settings(read_file(first)), _settings(read_file(second))
    found = []
    for name, value in one.items():
        if name not in other or other[name] == value:
            continue
        if not isinstance(value, dict) or not isinstance(other[name], dict):
            found.append(f"{name} {_shown(value)} and {_shown(other[name])}")
            continue
        tasks = [task for task in value if task in other[name] and value[task] != other[name][task]]
        if tasks and not (name == "number of questions" and one.get("limit") != other.get("limit")):
            both = f"{_shown(value[tasks[0]])} and {_shown(other[name][tasks[0]])}"
            more = f", and of {counted(len(tasks) - 1, 'more task')}" if len(tasks) > 1 else ""
            found.append(f"{name} of {tasks[0]} {both}{more}")
    averaged, others = _averaged(first), _averaged(second)
    for length in averaged.keys() & others.keys():
        if only := sorted(averaged[length] ^ others[length]):
            found.append(f"average over other tasks: only one of the files has {', '.join(only)}")
            break
    return found


def _averaged(path: Path) -> dict[str, set[str]]:
    """The tasks in RULER's average at each length."""
    tasks: dict[str, set[str]] = {}
    for task, length in read_results(path):
        tasks.setdefault(length, set()).add(task)
    return {length: names for length, names in tasks.items() if "average" in names}


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """How the results of a file were measured. A dict has a value for each task."""

    def part(*names: str) -> Mapping[str, Any]:
        found: Any = content
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    ours, config = part("xlstm7b", "settings"), part("config")
    ruler = content if "lengths" in content else {}
    questions = {
        task: count.get("effective")
        for task, count in part("n-samples").items()
        if isinstance(count, dict)
    }
    places: dict[str, tuple[Mapping[str, Any], str]] = {
        "text": (part("perplexity"), "text_sha256"),
        "tokenizer": (ruler or ours, "tokenizer"),
        "limit": (config, "limit"),
        "chat template": (ours, "chat_template")
        if "chat_template" in ours
        else (content, "chat_template_sha"),
        **{name.replace("_", " "): (ruler, name) for name in _RULER},
        **{name.replace("_", " "): (config, name) for name in _SEEDS},
        "few-shot examples": (content, "n-shot"),
        "version": (content, "versions"),
        "number of questions": ({"n": questions}, "n"),
    }
    return {name: where[key] for name, (where, key) in places.items() if key in where}


_RULER = ("seed", "samples", "haystack", "sentences", "squad", "hotpotqa", "english_words")
_SEEDS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 else text  # of a sha256, the start is enough
