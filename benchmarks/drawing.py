"""Draws the pictures that pictures.py defines.

A picture has a light and a dark version, at most five lines, and no legend: the name of a line
stands at its end. Ours is bold and in colour. A dotted line is a limit. The title is the point,
and one line below has the conditions.
"""

import hashlib
import inspect
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOST_LINES = 5
DPI = 140
COLOURS = 48  # of a PNG's palette
THEMES = {
    "light": {"back": "#ffffff", "text": "#1f2328", "grey": "#6e7781", "grid": "#e4e8ec"},
    "dark": {"back": "#0d1117", "text": "#e6edf3", "grey": "#9198a1", "grid": "#262c36"},
}
OUR_COLOUR = {"light": "#c2410c", "dark": "#ff8f4a"}
PEER_COLOURS = {  # of the first, second, … line that is not ours
    "light": ["#2f6db3", "#4d5560", "#7d5ba6", "#3f8f6b"],
    "dark": ["#6cabf2", "#b6bec9", "#b89be0", "#6cc79c"],
}
HASH = "xlstm7b-source"  # the field of a PNG that has the hash of the data and of this file


@dataclass(frozen=True)
class Line:
    """Points of one system. `ours` is bold; `limit` is dotted, in the colour of the line before."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    ours: bool = False
    limit: bool = False


@dataclass(frozen=True)
class Picture:
    """What a picture shows. `alt` describes it to those who cannot see it."""

    title: str
    conditions: str
    alt: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    x_is_tokens: bool = False  # a logarithmic axis with ticks such as 16K
    y_is_log: bool = False
    y_from_zero: bool = True

    def __post_init__(self) -> None:
        drawn = sum(not line.limit for line in self.lines)
        if drawn > MOST_LINES:
            raise ValueError(f"the picture {self.title!r} has {drawn} lines, over {MOST_LINES}")

    def source(self) -> str:
        """A hash of the data and of the code that draws it. Equal pictures have equal ones."""
        code = inspect.getsource(sys.modules[__name__])
        return hashlib.sha256(f"{json.dumps(asdict(self))}{code}".encode()).hexdigest()[:16]


def draw(picture: Picture, path: Path, theme: str) -> None:
    """Draws one version of a picture. The same picture has the same bytes, but for matplotlib's."""
    import matplotlib as mpl
    from PIL import Image, PngImagePlugin

    from xlstm7b.files import write_aside

    mpl.use("Agg")
    from matplotlib import pyplot

    colours = THEMES[theme]
    figure, axes = pyplot.subplots(figsize=(7.6, 4.0), facecolor=colours["back"])
    try:
        figure.subplots_adjust(left=0.065, right=0.99, top=0.8, bottom=0.2)
        _draw_axes(axes, picture, colours)
        _draw_lines(axes, picture, theme)
        for text, height, size, weight, colour in (
            (picture.title, 0.945, 13, "bold", "text"),
            (picture.y_title, 0.865, 9.5, "normal", "grey"),
            (picture.conditions, 0.03, 8.5, "normal", "grey"),
        ):
            drawn_text = figure.text(
                0.012, height, text, size=size, weight=weight, color=colours[colour]
            )
            if drawn_text.get_window_extent().x1 > figure.bbox.width:
                raise ValueError(f"the text is wider than the picture: {text!r}")
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=DPI, facecolor=colours["back"])
    finally:
        pyplot.close(figure)
    about = PngImagePlugin.PngInfo()
    about.add_text(HASH, picture.source())
    with Image.open(drawn) as image, write_aside(path) as aside:
        few = image.convert("RGB").quantize(COLOURS)
        few.save(aside, format="png", optimize=True, pnginfo=about)


def drawn_source(path: Path) -> str | None:
    """The hash that `draw` stored in a PNG. None if there is no such file."""
    from PIL import Image

    if not path.is_file():
        return None
    with Image.open(path) as image:
        stored = image.info.get(HASH)
    return stored if isinstance(stored, str) else None


def _draw_axes(axes: Any, picture: Picture, colours: dict[str, str]) -> None:
    from matplotlib import ticker

    axes.set_facecolor(colours["back"])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(colours["grey"])
    axes.tick_params(colors=colours["grey"], length=0, labelsize=9)
    axes.grid(axis="y", color=colours["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(picture.x_title, color=colours["grey"], size=9.5)
    if picture.y_is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.yaxis.set_major_formatter(lambda value, _: _short_number(value))
    if picture.x_is_tokens:
        _token_ticks(axes, sorted({int(x) for line in picture.lines for x in line.x}))


def _token_ticks(axes: Any, counts: Sequence[int]) -> None:
    """A base-2 logarithmic x axis with a tick at each count, such as 512, 4K, 1M."""
    smallest = min(filter(None, counts), default=1)
    axes.set_xscale("symlog", base=2, linthresh=smallest)  # symlog can show a count of 0
    axes.set_xticks(counts, [_short_count(count) for count in counts])
    axes.minorticks_off()


def _short_count(count: int) -> str:
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


def _short_number(value: float) -> str:
    return f"{value / 1000:g}K" if value >= 10_000 else f"{value:g}"


def _draw_lines(axes: Any, picture: Picture, theme: str) -> None:
    peers = iter(PEER_COLOURS[theme])
    colour, colours = "", []
    for line in picture.lines:
        if not line.limit:
            colour = OUR_COLOUR[theme] if line.ours else next(peers)
        colours.append(colour)
        style = {"linestyle": ":" if line.limit else "-", "linewidth": 3.2 if line.ours else 1.6}
        above = {"zorder": 3 if line.ours else 2, "solid_capstyle": "round"}
        axes.plot(line.x, line.y, color=colour, **style, **above)
    lowest, _ = axes.get_ylim()  # this also scales the axes, which the labels' places need
    if picture.y_from_zero and not picture.y_is_log:
        axes.set_ylim(bottom=min(0, lowest))
    labels = []
    for end in {line.x[-1] for line in picture.lines}:
        here = [n for n, line in enumerate(picture.lines) if line.x[-1] == end]
        places = [axes.transData.transform((end, picture.lines[n].y[-1]))[1] for n in here]
        point = axes.figure.dpi / 72
        for n, place, moved in zip(here, places, apart(places, gap=12.5 * point), strict=True):
            line = picture.lines[n]
            labels.append(
                axes.annotate(
                    line.label,
                    (end, line.y[-1]),
                    xytext=(7, (moved - place) / point),
                    textcoords="offset points",
                    va="center",
                    color=colours[n],
                    size=9.5,
                    weight="bold" if line.ours else "normal",
                    bbox={"facecolor": THEMES[theme]["back"], "edgecolor": "none", "pad": 1},
                )
            )
    width = axes.figure.bbox.width
    for _ in range(2):  # the axes end where the longest label fits beside them
        right = max(label.get_window_extent().x1 for label in labels)
        axes.figure.subplots_adjust(right=axes.figure.subplotpars.right + 0.99 - right / width)


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights of labels, moved as little as possible until neighbours are a gap apart."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    groups: list[list[float]] = []  # mean of the lowest label's best height, number of labels
    for place, index in enumerate(order):
        groups.append([heights[index] - place * gap, 1])
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            mean, count = groups.pop()
            before, number = groups[-1]
            groups[-1] = [(before * number + mean * count) / (number + count), number + count]
    moved = [mean for mean, count in groups for _ in range(int(count))]
    found = [0.0] * len(heights)
    for place, index in enumerate(order):
        found[index] = moved[place] + place * gap
    return found
