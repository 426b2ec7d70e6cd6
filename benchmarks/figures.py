"""The figures of docs/results: how tables and pictures pick them, and how they are written.

Every line of docs/results/SUBJECT.jsonl is one figure or one curve, as `bench/results.py` writes
it. A table is rows of cells. A cell knows the figures it shows, so `Table.markdown` can refuse to
put figures of different calls side by side, and can name the machine and the commands below.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xlstm7b.bench.results import (
    LOWER_IS_BETTER,
    MOST_POINTS,
    OURS,
    percent_of_limit,
    read_rows,
    shown_number,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
MOST_LINES = 4000  # in all files of results

Row = Mapping[str, Any]


# Picking


def read_figures(folder: Path = RESULTS) -> list[Row]:
    """All lines of all files. `ValueError` if they are too many, or a curve has too many points."""
    rows: list[Row] = [row for file in sorted(folder.glob("*.jsonl")) for row in read_rows(file)]
    if len(rows) > MOST_LINES:
        raise ValueError(f"{folder} has {len(rows)} lines, more than {MOST_LINES}")
    for row in rows:
        if len(row.get("x", ())) > MOST_POINTS:
            points = len(row["x"])
            raise ValueError(f"{_named(row)} is a curve of {points} points, over {MOST_POINTS}")
    return rows


def pick(rows: Iterable[Row], subject: str, what: str, system: str = OURS, **shape: Any) -> Row:
    """The newest figure of this subject, name and system, whose shape has these values.

    A value of None means that the shape does not have it. The shape may have other values too, if
    all such figures have the same ones. `ValueError` if there is no figure, if several different
    ones fit, or if the newest is a failure.
    """
    newest = _newest(rows, subject, what, system, shape)
    if not newest:
        raise ValueError(f"not measured: {_case(subject, what, system, shape)}")
    if len(newest) > 1:
        several = "; ".join(_joined(row["shape"]) for row in newest[:4])
        raise ValueError(f"{_case(subject, what, system, shape)} fits several: {several}")
    if "error" in newest[0]:
        raise ValueError(f"{_named(newest[0])} failed: {newest[0]['error']}")
    return newest[0]


def fastest(rows: Iterable[Row], subject: str, what: str, system: str = OURS, **shape: Any) -> Row:
    """As `pick`, but of several figures that fit, the highest of the newest call."""
    newest = [row for row in _newest(rows, subject, what, system, shape) if "error" not in row]
    if not newest:
        raise ValueError(f"not measured: {_case(subject, what, system, shape)}")
    call = max(reversed(newest), key=lambda row: str(row["date"]))["call"]
    return max((row for row in newest if row["call"] == call), key=lambda row: float(row["value"]))


def series(
    rows: Iterable[Row], x: str, subject: str, what: str, system: str = OURS, **shape: Any
) -> list[Row]:
    """The newest figures for each value of `x` in the shape, sorted by it. Failures are left out.

    All of them must be of one call. `ValueError` if there are none, or if they differ in more.
    """
    newest = _newest(rows, subject, what, system, shape)
    newest = [row for row in newest if x in row["shape"] and "error" not in row]
    if not newest:
        raise ValueError(f"not measured: {_case(subject, what, system, shape)}")
    check_one_call(newest)
    values = sorted(row["shape"][x] for row in newest)
    for some, other in itertools.pairwise(values):
        if some == other:
            raise ValueError(
                f"{_case(subject, what, system, shape)} has several figures for {x} {some}"
            )
    return sorted(newest, key=lambda row: float(row["shape"][x]))


def check_one_call(rows: Iterable[Row]) -> None:
    """`ValueError` if figures that are compared were measured in different calls."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["call"], row)
    if len(first) > 1:
        (one, a), (other, b), *_ = first.items()
        raise ValueError(
            f"figures of different calls are compared: {_named(a)} is of {one}, {_named(b)} of "
            f"{other}. Measure both in one call"
        )


def _newest(
    rows: Iterable[Row], subject: str, what: str, system: str, shape: Mapping[str, Any]
) -> list[Row]:
    """The newest line for each full shape. Of one day, the last line is the newest."""
    found: dict[str, Row] = {}
    for row in rows:
        if (row["subject"], row["what"], row["system"]) != (subject, what, system):
            continue
        if any(row["shape"].get(key) != value for key, value in shape.items()):
            continue
        key = json.dumps(row["shape"], sort_keys=True)
        if key not in found or found[key]["date"] <= row["date"]:
            found.pop(key, None)  # the order is that of the lines that count
            found[key] = row
    return list(found.values())


def _named(row: Row) -> str:
    return _case(row["subject"], row["what"], row["system"], row["shape"])


def _case(subject: str, what: str, system: str, shape: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, (f"{subject}: {what} of {system}", _joined(shape))))


def _joined(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


# Cells


class Cell(NamedTuple):
    """A text and the figures it shows."""

    text: str
    figures: tuple[Row, ...] = ()


def value(row: Row) -> Cell:
    """The value with its unit: 281 tok/s, 15.1K tok/s, 13.5 ms, 14.1 GB."""
    return Cell(quantity(row["value"], row["unit"]), (row,))


def number(row: Row) -> Cell:
    """The value alone, for a column whose title has the unit."""
    return Cell(shown(row["value"]), (row,))


def limit(row: Row) -> Cell:
    """The best value that the hardware allows."""
    if row.get("limit") is None:
        raise ValueError(f"{_named(row)} has no limit")
    return Cell(shown(row["limit"]), (row,))


def percent(row: Row) -> Cell:
    """How near the value is to its limit."""
    limit(row)
    return Cell(f"{percent_of_limit(row):.0f}%", (row,))


def ratio(ours: Row, peer: Row) -> Cell:
    """How many times as good ours is: faster, or smaller."""
    if ours["unit"] != peer["unit"]:
        raise ValueError(f"{_named(ours)} is in {ours['unit']}, {_named(peer)} in {peer['unit']}")
    times = ours["value"] / peer["value"]
    if ours["unit"] in LOWER_IS_BETTER:
        times = 1 / times
    return Cell(f"{shown(times)} ×", (ours, peer))


def listed(rows: Sequence[Row], show: Callable[[Row], Cell] = value) -> Cell:
    """Several figures of one unit: 281 / 280 / 278 tok/s."""
    if len({row["unit"] for row in rows}) > 1:
        raise ValueError(f"{_named(rows[0])} is listed with a figure of another unit")
    *others, last = rows
    texts = [shown(row["value"]) if show is value else show(row).text for row in others]
    return Cell(" / ".join([*texts, show(last).text]), tuple(rows))


def joined(separator: str, *cells: Cell | str) -> Cell:
    """Several cells in one."""
    parts = [Cell(cell) if isinstance(cell, str) else cell for cell in cells]
    text = separator.join(part.text for part in parts)
    return Cell(text, tuple(figure for part in parts for figure in part.figures))


def quantity(amount: float, unit: str) -> str:
    """A number with its unit. Seconds below one are written in ms or µs."""
    if unit == "s" and 0 < abs(amount) < 1:
        amount, unit = (1e3 * amount, "ms") if abs(amount) >= 1e-3 else (1e6 * amount, "µs")
    return f"{shown(amount)}{unit}" if unit == "%" else f"{shown(amount)} {unit}"


def shown(amount: float) -> str:
    """Three significant digits, from 10,000 on in thousands: 3.54, 28.3, 9,657, 15.1K, 1.20M."""
    for size, letter in ((1e6, "M"), (1e3, "K")):
        if abs(amount) >= max(size, 1e4):
            return f"{shown_number(amount / size)}{letter}"
    return shown_number(amount)


# Tables


@dataclass(frozen=True)
class Table:
    """The header and the rows of a table. Text cells have no figures, such as the paper's values.

    The figures of a row must be of one call. With `one_call`, those of the whole table must: then
    rows are compared with each other. Without `has_sources`, the page itself says where and how
    they were measured.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    one_call: bool = False
    has_sources: bool = True

    def markdown(self) -> str:
        """The table, and a line with the machine, the date, the versions and the commands."""
        rows = [[Cell(c) if isinstance(c, str) else c for c in row] for row in self.rows]
        for row in rows:
            if len(row) != len(self.header):
                raise ValueError(f"the row {row[0].text!r} has {len(row)} cells")
            check_one_call(figure for cell in row for figure in cell.figures)
        figures = [figure for row in rows for cell in row for figure in cell.figures]
        if self.one_call:
            check_one_call(figures)
        lines = [list(self.header), ["---"] * len(self.header)]
        lines += [[cell.text for cell in row] for row in rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return (
            f"{table}\n\n<sub>{sources(figures)}</sub>" if figures and self.has_sources else table
        )


def sources(figures: Iterable[Row]) -> str:
    """Where and when figures were measured, with which versions, by which programs."""
    figures = list(figures)
    machines = dict.fromkeys(figure["machine"] for figure in figures)
    dates = sorted({figure["date"] for figure in figures})
    packages = dict.fromkeys(
        f"{name} {version}" for figure in figures for name, version in figure["versions"].items()
    )
    commands = dict.fromkeys(_program(figure["command"]) for figure in figures)
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    about = ", ".join([*machines, when, *packages])
    return f"{about}: {', '.join(f'`{command}`' for command in commands)}"


def _program(command: str) -> str:
    """A command without its options, which the figures' file has."""
    words = command.split(" ")
    return " ".join(words[: 3 if words[0] == "xlstm7b" else 2])
