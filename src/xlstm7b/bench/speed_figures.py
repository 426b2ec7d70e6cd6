"""The figures of `xlstm7b experiment speed`, from its records."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from xlstm7b.bench.speed import KERNELS, OURS, RUNS, Record
from xlstm7b.report import figure, token_ticks

Points = list[tuple[int, float]]
_CELLS = {
    "ours": "mLSTM, this package",
    "mlstm_kernels": "mLSTM, mlstm_kernels",
    "sdpa": "FlashAttention (SDPA)",
    "fla": "simple GLA, FLA",
    "gated_deltanet": "gated delta rule, FLA",
}
_CELL_PACKAGES = "torch", "xlstm7b", "mlstm_kernels", "fla-core"


def draw(runs: Mapping[str, Record], folder: Path) -> list[str]:
    """Draws every figure that has rows, as PNG and SVG. Returns their names."""
    drawn = []
    for name, panels in _FIGURES.items():
        if any(_rows(record, name) for record in runs.values()):
            paths = [folder / f"speed-{name}.{ending}" for ending in ("png", "svg")]
            with figure(*paths, columns=len(panels)) as axes:
                all_axes = [axes] if len(panels) == 1 else list(axes)
                for axis, panel in zip(all_axes, panels, strict=True):
                    panel(axis, runs)
                _add_legend_and_caption(all_axes, _caption(runs, name))
            drawn.append(f"speed-{name}")
    return drawn


def _add_legend_and_caption(axes: Sequence[Any], caption: str) -> None:
    """Beside and below the panels, which keep their size."""
    drawn, width = axes[0].figure, 6 * len(axes) + 2.2
    text = textwrap.fill(caption, int(16 * width))
    drawn.set_size_inches(width, 3.6 + 0.12 * (text.count("\n") + 2))
    drawn.supxlabel(text, fontsize=7)
    lines: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        lines |= zip(labels, handles, strict=True)
    drawn.legend(lines.values(), lines.keys(), loc="outside right center", fontsize="small")


def _rows(record: Record, part: str) -> list[Record]:
    """The rows of a figure that could be measured."""
    return [row for row in record["figures"].get(part, []) if "error" not in row]


def _caption(runs: Mapping[str, Record], part: str) -> str:
    """Where and when a figure was measured, what ran each model, and what failed."""
    shown = {name: record for name, record in runs.items() if record["figures"].get(part)}
    facts = [record.get("machine", {}) for record in shown.values()]
    where = sorted({each["gpu"] for each in facts if "gpu" in each})
    if dates := sorted({each["date"] for each in facts if "date" in each}):
        where.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
    notes = _cell_notes(shown[KERNELS]) if part == "cell" else _model_notes(shown, part)
    return " ".join([*([f"{', '.join(where)}."] if where else []), *notes])


def _model_notes(shown: Mapping[str, Record], part: str) -> list[str]:
    models: dict[str, list[str]] = {}
    for name, record in shown.items():
        rows = record["figures"][part]
        engine = _alternatives([row["engine"] for row in rows if "engine" in row])
        failed: dict[str, int] = {}  # the shortest length with this error; 0 if a process crashed
        for row in rows:
            if "error" in row:
                shortest = failed.get(row["error"], row["length"])
                failed[row["error"]] = min(shortest, row["length"])
        errors = "".join(
            f"; from {length:,} tokens on: {error}" if length else f"; {error}"
            for error, length in failed.items()
        )
        models.setdefault(f"{engine}{errors}", []).append(RUNS[name])
    notes = [f"{'; '.join(labels)}: {note}." for note, labels in models.items()]
    if any(name.startswith("llama") for name in shown):
        notes.append("The Llamas run under transformers, not vLLM.")
    return ["Random weights.", *notes]


def _cell_notes(record: Record) -> list[str]:
    rows = record["figures"]["cell"]
    failed: dict[str, list[str]] = {}
    for row in rows:
        if "error" in row:
            labels = failed.setdefault(f"{row.get('work', 'all')}: {row['error']}", [])
            label = _CELLS.get(row["name"], RUNS[KERNELS])
            labels += [] if label in labels else [label]
    tokens = max(row["batch"] * row["length"] for row in rows)
    versions = {**record.get("machine", {}), **record.get("packages", {})}
    engines = [f"{name} {versions[name]}" for name in _CELL_PACKAGES if name in versions]
    return [
        f"{tokens:,} random tokens of the 7B's width, bf16.",
        *([", ".join(engines) + "."] if engines else []),
        *(f"{'; '.join(labels)}, {error}." for error, labels in failed.items()),
    ]


def _alternatives(engines: Sequence[str]) -> str:
    """What the engines have in common, then their differences: "a, b" and "a, c": "a, b or c"."""
    parts = [each.split(", ") for each in dict.fromkeys(engines)]
    same = takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))
    shared = [each[0] for each in same]
    rests = [", ".join(each[len(shared) :]) for each in parts]
    return ", ".join(filter(None, [*shared, " or ".join(filter(None, rests))]))


def _lines(
    axis: Any,
    runs: Mapping[str, Record],
    part: str,
    key: str,
    notes: Mapping[str, str] | None = None,
    **wanted: Any,
) -> None:
    """A line for each model that has such rows. What is summed is dashed.

    `notes` are added to the names of models in the legend.
    """
    lengths: set[int] = set()
    for name, record in _models(runs):
        rows = [
            row
            for row in _rows(record, part)
            if key in row and all(row.get(field) == value for field, value in wanted.items())
        ]
        points = sorted((row["length"], row[key]) for row in rows)
        summed = {row["length"] for row in rows if row.get("summed") and key == "seconds"}
        measured = [point for point in points if point[0] not in summed]
        style = _style(name)
        if measured:
            marks = {"marker": _MARKERS[name], "markersize": 4}
            label = RUNS[name] + (notes or {}).get(name, "")
            axis.plot(*zip(*measured, strict=True), "-", label=label, **marks, **style)
        if summed:
            axis.plot(*zip(*points[len(measured) - 1 :], strict=True), "--", **style)
        lengths.update(length for length, _ in points)
    if lengths:
        token_ticks(axis, sorted(lengths))
        axis.tick_params(axis="x", labelsize="small")


_PEERS = [name for name in RUNS if name not in (*OURS, KERNELS)]
_MARKERS = dict(zip((*OURS, *_PEERS), "oxs^dvP<>h*X", strict=True))  # lines may coincide


def _style(name: str) -> dict[str, Any]:
    """The colour of a model: ours is the same in all precisions.

    The line of `ours` is the first, and so wide that it is seen beside one that is drawn over it.
    """
    colour = 1 + _PEERS.index(name) if name in _PEERS else 0
    return {"color": f"C{colour}", "linewidth": 3 if name == "ours" else 1.2}


def _log_scale(axis: Any) -> None:
    """With plain numbers at 1, 2 and 5 times a power of ten."""
    from matplotlib import ticker

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def _models(runs: Mapping[str, Record]) -> Iterator[tuple[str, Record]]:
    return ((name, runs.get(name, {"figures": {}})) for name in RUNS if name != KERNELS)


def _context(axis: Any, runs: Mapping[str, Record]) -> None:
    _lines(axis, runs, "context", "tokens_per_second")
    axis.set(xlabel="tokens before", ylabel="tokens per second", title="generation, batch 1")
    axis.set_ylim(bottom=0)


def _first(index: int, axis: Any, runs: Mapping[str, Record]) -> None:
    counts = {row["new"] for _, record in _models(runs) for row in _rows(record, "first")}
    count = sorted(counts)[min(index, len(counts) - 1)]
    _lines(axis, runs, "first", "seconds", new=count)
    title = "time to the first token" if count == 1 else f"time to {count} tokens"
    axis.set(xlabel="tokens of the prompt", ylabel="seconds", title=title)
    _log_scale(axis)


def _generated_time(axis: Any, runs: Mapping[str, Record]) -> None:
    _lines(axis, runs, "generated", "seconds")
    title = "time of a text without a prompt (dashed: summed)"
    axis.set(xlabel="tokens generated", ylabel="seconds", title=title)
    _log_scale(axis)


def _generated_memory(axis: Any, runs: Mapping[str, Record]) -> None:
    _lines(axis, runs, "generated", "memory")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value / 1e9:.0f}")
    axis.set(xlabel="tokens generated", ylabel="GB", title="peak memory")
    axis.set_ylim(bottom=0)


def _prefill(axis: Any, runs: Mapping[str, Record]) -> None:
    _lines(axis, runs, "prefill", "tokens_per_second")
    axis.set(xlabel="tokens of each prompt", ylabel="tokens per second", title="reading prompts")
    axis.set_ylim(bottom=0)


def _full(axis: Any, runs: Mapping[str, Record]) -> None:
    notes = {}
    for name, record in _models(runs):
        rows = _rows(record, "full")
        batches = {row["batch"] for row in rows}
        if len(batches) == 1:
            notes[name] = f" ({batches.pop()})"
            continue
        for row in rows:
            at = row["length"], row["tokens_per_second"]
            beside = {"xytext": (4, 2), "textcoords": "offset points"}  # lines fall to the right
            axis.annotate(row["batch"], at, fontsize=7, **beside)
    _lines(axis, runs, "full", "tokens_per_second", notes)
    title = "a full GPU (numbers: sequences at once)"
    axis.set(xlabel="tokens before", ylabel="tokens per second", title=title)
    _log_scale(axis)


def _cell(work: str, axis: Any, runs: Mapping[str, Record]) -> None:
    rows = [row for row in _rows(runs[KERNELS], "cell") if row["work"] == work]
    for position, (name, label) in enumerate(_CELLS.items()):
        points = sorted(
            (row["length"], 1e3 * row["seconds"]) for row in rows if row["name"] == name
        )
        if points:
            style = {"color": f"C{position}", "linewidth": 2.2 if name == "ours" else 1.2}
            axis.plot(*zip(*points, strict=True), "o-", markersize=3, label=label, **style)
    if rows:
        token_ticks(axis, [row["length"] for row in rows])
    axis.set(xlabel="tokens of each sequence", ylabel="ms", title=work)
    _log_scale(axis)


def _panel(function: Any, value: Any) -> Any:
    return lambda axis, runs: function(value, axis, runs)


_FIGURES: dict[str, list[Any]] = {
    "context": [_context],
    "generated": [_generated_time, _generated_memory],
    "first": [_panel(_first, 0), _panel(_first, 1)],
    "prefill": [_prefill],
    "full": [_full],
    "cell": [_panel(_cell, "forward"), _panel(_cell, "forward + backward")],
}
