"""The settings of a run: its default folder, and what may change when the run is continued."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xlstm7b.train.recipe import Recipe, parse_overrides

_LONGEST_NAME = 100  # of the settings in a folder's name
# Settings, or tables of them, that may differ each time that a run is continued.
_MAY_DIFFER = re.compile(
    r"(run|parallel|data\.(validation|validation_sequences|verify)|batch\.micro_batch|init_from"
    r"|data\.sources\..+\.path)(\..*)?"
)
# Settings that may not change at all. The loader checks those that decide the order of the data.
_FIXED = re.compile(
    r"(model|lora)\..*|state_tuning\.(layers|rank)|data\.(context_length|packing)"
    r"|batch\.(sequences|ramp)"
)


def default_folder(name: str, overrides: Sequence[str]) -> Path:
    """`runs/NAME`, or `runs/NAME-optimizer.lr=0.001` with overrides: a folder for each of a sweep.

    Settings of `run`, the layout and paths are left out, so that a run can be continued with others
    in the same folder. Long names become a hash.
    """
    given: dict[str, Any] = {}
    for keys, value in parse_overrides(overrides):
        given |= flatten(value, ".".join(keys))
    words = ",".join(
        f"{setting}={given[setting]}"
        for setting in sorted(given)
        if not _MAY_DIFFER.fullmatch(setting)
    )
    if len(words) > _LONGEST_NAME:
        words = hashlib.sha256(words.encode()).hexdigest()[:12]
    words = re.sub(r"[^\w.,=+-]", "", words)
    return Path("runs") / (f"{name}-{words}" if words else name)


def may_differ(setting: str) -> bool:
    """True for settings that a run may change without a remark: `run`, layout, paths of data."""
    return setting != "init_from" and _MAY_DIFFER.fullmatch(setting) is not None


def changed_settings(before: Recipe, now: Recipe) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, sorted by name, with both values."""
    found = differences(before.to_dict(), now.to_dict())
    return {name: found[name] for name in sorted(found) if name != "name"}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values that differ between two nested tables, by name. None stands for a missing one."""
    old, new = flatten(before), flatten(now)
    both = {name: (old.get(name), new.get(name)) for name in old | new}
    return {name: (one, other) for name, (one, other) in both.items() if one != other}


def check_continues(folder: Path, before: Recipe, now: Recipe) -> None:
    """Raises a `ValueError` if the run in a folder cannot be continued with another recipe."""
    for table in ("lora", "state_tuning"):
        had, has = getattr(before, table) is not None, getattr(now, table) is not None
        if had != has:
            words = f"[{table}], and this recipe has none" if had else f"no [{table}]"
            raise ValueError(f"the run in {folder} was started with {words}: choose another --run")
    for name, (old, new) in changed_settings(before, now).items():
        if _FIXED.fullmatch(name):
            raise ValueError(
                f"the run in {folder} was started with {name} {old!r}, not {new!r}: choose another "
                "--run"
            )


def raised_rate(before: Recipe, now: Recipe, step: int) -> tuple[float, float] | None:
    """The learning rates of the last step and the next, if a change raises it after the warm-up."""
    last, planned = before.learning_rate(step - 1), before.learning_rate(step)
    following = now.learning_rate(step)
    is_raised = step > now.schedule.warmup and following > max(last, planned)
    return (last, following) if is_raised else None


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """A table of tables as one: {"optimizer.lr": 0.001}."""
    if not isinstance(value, Mapping):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{name}.{key}" if name else str(key))
    return flat
