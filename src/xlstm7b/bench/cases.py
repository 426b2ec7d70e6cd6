"""Runs a benchmark: prints its results as they are measured, then saves and draws them.

`xlstm7b bench SUBJECT` runs the module `bench/SUBJECT.py`. Its `PARTS` are the tables. Its
`results(plan)` returns an iterator over the rows (`Result`): each has a case, its figures and the
limit of the hardware, or the reason why the case failed. Its options are a class in `plans.py`.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from xlstm7b.bench.plans import BENCHMARKS, Plan
from xlstm7b.files import write_json
from xlstm7b.report import check_figure, check_results_file, figure, machine, token_ticks


@dataclass(frozen=True)
class Result:
    """One row of a table: a case with its figures, or with the error that ended it."""

    part: str
    name: str = "ours"  # or the name of a peer: another library that does the same work
    work: str = ""
    size: str = ""  # of the model
    batch: int = 0
    length: int = 0  # tokens of each sequence, or tokens read before decoding
    seconds: float | None = None
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    memory: int | None = None  # peak, in bytes
    limit: float | None = None  # of the hardware: tokens per second, else seconds or bytes
    percent_of_limit: float | None = None
    ratio: float | None = None  # of a peer: its time over our time for the same case
    figures: dict[str, Any] = field(default_factory=dict)  # that only one benchmark has
    error: str | None = None

    def get(self, key: str) -> Any:
        """A field or one of `figures`, None if it was not measured."""
        return self.figures.get(key, getattr(self, key, None))

    @property
    def label(self) -> str:
        return ", ".join(part for part in (self.name, self.size, self.work) if part)

    @property
    def case(self) -> tuple[str, str, int, int]:
        """Equal for results that can be compared with each other."""
        return self.part, self.size, self.batch, self.length

    def to_dict(self) -> dict[str, Any]:
        """A flat dictionary for JSON, without the figures that were not measured."""
        values = asdict(self)
        values |= values.pop("figures")
        return {key: value for key, value in values.items() if value not in (None, "")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = {each.name for each in fields(cls)}
        own = {key: value for key, value in values.items() if key in known}
        return cls(**own, figures={k: v for k, v in values.items() if k not in known})


class Column(NamedTuple):
    """How one field of a result, or one of its `figures`, is shown."""

    title: str
    key: str
    scale: float = 1
    digits: int = 0

    def cell(self, result: Result) -> str:
        value = result.get(self.key)
        return "" if value is None else f"{value * self.scale:,.{self.digits}f}"


COLUMNS = {
    column.title: column
    for column in (
        Column("batch", "batch"),
        Column("tokens", "length"),
        Column("s", "seconds", digits=2),
        Column("ms", "seconds", 1e3, 2),
        Column("µs", "seconds", 1e6, 2),
        Column("tok/s", "tokens_per_second", digits=1),
        Column("TFLOP/s", "flops_per_second", 1e-12),
        Column("GB/s", "bytes_per_second", 1e-9),
        Column("GB", "memory", 1e-9, 2),
        Column("limit", "limit", digits=1),
        Column("limit, ms", "limit", 1e3, 2),
        Column("limit, µs", "limit", 1e6, 2),
        Column("limit, GB", "limit", 1e-9, 2),
        Column("% of limit", "percent_of_limit", digits=1),
        Column("± %", "spread", 1e2, 1),
        Column("speed of ours, ×", "ratio", digits=2),
    )
}


class Part:
    """One table. A column is a title in `COLUMNS`, or this part's own.

    `plot` names two of the columns: the second is drawn over the first.
    """

    def __init__(
        self,
        title: str,
        columns: Iterable[str | Column],
        *,
        plot: tuple[str, ...] = (),
        log_y: bool = False,
    ) -> None:
        self.title, self.log_y = title, log_y
        self.columns = [COLUMNS[each] if isinstance(each, str) else each for each in columns]
        titles = [column.title for column in self.columns]
        self.plot = [self.columns[titles.index(each)] for each in plot]


_LABEL, _COLUMN = 40, 9  # widths: rows are printed before the longest cell is known


def run(
    plan: Plan, *, json: Path | None = None, plot: Path | None = None, command: str = ""
) -> list[Result]:
    """Runs the plan's benchmark, and writes its files. `command` is recorded in the JSON file.

    If it is interrupted, the results so far are saved.
    """
    plan.check()
    for path in (json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder")
    if json is not None:
        check_results_file(json)
    if plot is not None:
        check_figure(plot)
    subject = next(name for name, kind in BENCHMARKS.items() if kind is type(plan))
    module: Any = import_module(f"xlstm7b.bench.{subject}")
    if plan.runs_on == "cuda" and not torch.cuda.is_available():
        instead = "; measure the CPU with --device cpu" if hasattr(plan, "device") else ""
        raise ValueError(f"there is no CUDA GPU here{instead}")
    results, about = module.results(plan), machine(plan.runs_on)
    print(", ".join(about.values()), flush=True)
    done: list[Result] = []
    try:
        _print(module.PARTS, results, done)
    finally:
        if json is not None and done:
            rows = [result.to_dict() for result in done]
            content = {"command": command, "plan": plan.to_dict(), "results": rows}
            write_json(json, about | content)
    if plot is not None:
        getattr(module, "draw", draw)(module.PARTS, done, plot)
    return done


def _print(parts: Mapping[str, Part], results: Iterable[Result], done: list[Result]) -> None:
    """Prints a heading before each part and a line for each result. Appends to `done`."""
    began, current = time.monotonic(), ""
    for result in results:
        done.append(_with_ratio(result, done))  # before printing, which may fail: a closed pipe
        if result.part != current and result.part in parts:
            current = result.part
            print(f"\n{heading(parts[current])}  [{time.monotonic() - began:.0f} s]")
        print(line(done[-1], parts.get(result.part)), flush=True)


def _with_ratio(result: Result, done: Sequence[Result]) -> Result:
    """Adds the ratio of a peer's time to ours: of the same case and work, else of the same case."""
    if result.name == "ours" or result.seconds is None:
        return result
    ours = [each for each in done if each.name == "ours" and each.case == result.case]
    ours = [each for each in ours if each.get("new") == result.get("new")]
    ours.sort(key=lambda each: each.work != result.work)
    if not ours or not ours[0].seconds:
        return result
    return replace(result, ratio=result.seconds / ours[0].seconds)


def heading(part: Part) -> str:
    titles = "".join(f"  {column.title:>{_width(column)}}" for column in part.columns)
    return f"{part.title}\n{'':{_LABEL}}{titles}"


def line(result: Result, part: Part | None) -> str:
    """A row: its figures, or its case and why it failed."""
    columns = part.columns if part else []
    if result.error is not None:
        columns = [column for column in columns if column.key in ("batch", "length")]
    cells = "".join(f"  {column.cell(result):>{_width(column)}}" for column in columns)
    failed = "" if result.error is None else f"  failed: {result.error}"
    return f"{result.label:{_LABEL}}{cells}{failed}".rstrip()


def _width(column: Column) -> int:
    return max(_COLUMN, len(column.title))


def draw(parts: Mapping[str, Part], results: Sequence[Result], path: Path) -> None:
    """A panel for each part with a `plot`: a line for each kind of work, and the limit."""
    measured = {result.part for result in results if result.error is None}
    panels = [(name, part) for name, part in parts.items() if part.plot and name in measured]
    with figure(path, columns=max(1, len(panels))) as axes:
        for axis, (name, part) in zip(getattr(axes, "flat", [axes]), panels, strict=False):
            x, y = part.plot
            lines: dict[str, list[tuple[int, float]]] = {}
            for result in results:
                at, value = result.get(x.key), result.get(y.key)
                if result.part == name and at is not None and value is not None:
                    lines.setdefault(result.label, []).append((at, value * y.scale))
                    if result.limit is not None and not part.log_y:
                        lines.setdefault("limit", []).append((at, result.limit * y.scale))
            for label, points in lines.items():
                style = {"ls": "--", "color": "gray"} if label == "limit" else {"marker": "o"}
                axis.plot(*zip(*sorted(points), strict=True), label=label, **style)
            token_ticks(axis, [at for points in lines.values() for at, _ in points])
            axis.set(title=part.title, xlabel=x.title, ylabel=y.title)
            if part.log_y:
                axis.set_yscale("log")
            else:
                axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
            axis.legend(fontsize="small")
