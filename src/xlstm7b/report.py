"""Text tables and figures of results, and files of results."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as text. The first column is left-aligned, the others right-aligned. None: empty."""
    cells = [list(header), *([("" if x is None else str(x)) for x in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        aligned = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 token", "2,000 tokens"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shown_bytes(count: float) -> str:
    """A number of bytes with its unit: "31.2 kB", "134.6 MB", "2,000.0 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return counted(int(count), "byte")


def check_matplotlib() -> None:
    """Raises a `ValueError` if figures cannot be drawn. Call it before a long measurement."""
    if find_spec("matplotlib") is None:
        raise ValueError("drawing a figure needs matplotlib: pip install 'xlstm7b[train]'")


def check_figure(path: Path) -> None:
    """Raises a `ValueError` if no figure can be drawn to this file, as `check_matplotlib` does.

    A figure replaces an older figure, but no other file.
    """
    check_matplotlib()
    if path.suffix.lower() not in ("", ".png", ".pdf", ".svg"):
        raise ValueError(f"cannot draw {path}: a figure is a .png, .pdf or .svg file")
    if path.is_file() and path.stat().st_size:  # `mktemp` makes an empty file
        with path.open("rb") as file:
            if not file.read(5).startswith((b"\x89PNG", b"%PDF", b"<?xml", b"<svg")):
                raise ValueError(f"{path} exists and is no figure: choose another file")


def check_results_file(path: Path) -> None:
    """Raises a `ValueError` if the file exists and holds no results: only those are replaced."""
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or "results" not in content:
        raise ValueError(f"{path} exists and holds no results: choose another file")


@contextmanager
def figure(*paths: Path, columns: int = 1) -> Iterator[Any]:
    """Yields the axes of a new figure (an array if there are several), then saves it to `paths`.

    A file's suffix chooses the format: png, pdf or svg. Without a suffix it is PNG.
    """
    for path in paths:
        check_figure(path)
    import matplotlib as mpl

    # Not above: commands import this module for --help.
    from xlstm7b.files import naming, write_aside

    mpl.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, columns, figsize=(6 * columns, 4), layout="constrained")
    try:
        yield axes
        for path in paths:
            with write_aside(path) as aside, naming(path):
                drawn.savefig(aside, dpi=150, format=path.suffix[1:] or "png")
            drawn.set_layout_engine("none")  # the next file has the same layout
    finally:
        pyplot.close(drawn)


def token_ticks(axis: Any, counts: Sequence[int]) -> None:
    """A base-2 logarithmic x axis with a tick at each count, such as 512, 4K or 32K."""
    ticks = sorted(set(counts))
    smallest = min((count for count in ticks if count), default=1)
    axis.set_xscale("symlog", base=2, linthresh=smallest)  # symlog can show a count of 0
    labels = [f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n) for n in ticks]
    axis.set_xticks(ticks, labels)
    axis.minorticks_off()
