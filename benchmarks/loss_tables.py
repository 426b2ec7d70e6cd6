"""The tables of losses: the paper's ablations, recall, and what quantisation costs."""

from collections.abc import Callable, Mapping
from functools import partial

from figures import Cell, Row, Table, number, pick, value

Rows = list[Row]


def stability(name: str, labels: Mapping[str, tuple[str, str]], rows: Rows) -> Table:
    """Loss and gradient norm of each variant. `labels` are the names to show, and the paper's."""
    lines: list[list[Cell | str]] = []
    for variant, (label, paper) in labels.items():
        of = partial(pick, rows, "ablations", experiment=name, variant=variant)
        highest, high = of("highest gradient norm"), of("steps with a gradient norm over 2")
        lines.append([label, paper, _loss(of("validation loss")), number(highest), number(high)])
    header = ("", "the paper", "loss", "highest gradient norm", "steps with a norm over 2")
    return Table(header, lines, one_call=True, has_sources=False)


def schedule(rows: Rows) -> Table:
    """The validation loss after each schedule."""
    lines: list[list[Cell | str]] = []
    for kind in ("exponential", "cosine"):
        of = partial(pick, rows, "ablations", "validation loss", experiment="schedule")
        with_cooldown, without = of(variant=f"{kind}-cooldown"), of(variant=kind)
        lines.append([f"{kind} decay", _loss(with_cooldown), _loss(without)])
    return Table(("", "with cool-down", "without"), lines, one_call=True, has_sources=False)


def previous_vs_new(rows: Rows) -> Table:
    """Loss with the block of the first xLSTM paper and of xLSTM 7B's."""
    of = partial(pick, rows, "ablations", "validation loss", experiment="previous-vs-new")
    lines: list[list[Cell | str]] = [
        [f"{size[:-1]}M", _loss(of(variant=f"{size}-previous")), _loss(of(variant=size))]
        for size in ("160m", "400m")
    ]
    return Table(("loss", "previous block", "new block"), lines, one_call=True, has_sources=False)


def head_dimension(rows: Rows) -> Table:
    """What the number of heads costs. Sizes and FLOPs are computed, and equal to the paper's."""
    sizes = {
        4: ("512, 1024", "268.4 MB", "7.6e10"),
        8: ("256, 512", "134.2 MB", "4.1e10"),
        16: ("128, 256", "67.1 MB", "2.4e10"),
        32: ("64, 128", "33.6 MB", "1.5e10"),
    }
    of = partial(pick, rows, "ablations", "step time", experiment="head-dimension")
    lines: list[list[Cell | str]] = [
        [f"{heads}{' (released)' * (heads == 8)}", *computed, value(of(variant=f"heads-{heads}"))]
        for heads, computed in sizes.items()
    ]
    header = ("heads", "d_qk, d_hv", "state C", "cell FLOPs, forward", "step time")
    return Table(header, lines, one_call=True, has_sources=False)


def recall(name: str, labels: Mapping[str, str], rows: Rows) -> Table:
    """The share of 64 pairs that each variant recalls, by the length of the sequence."""
    lengths = (2048, 8192, 16384)
    lines: list[list[Cell | str]] = []
    for variant, label in labels.items():
        curve = pick(rows, "recall", "recall 64", experiment=name, variant=variant)
        at = dict(zip(curve["x"], curve["y"], strict=True))
        lines.append([label, *(Cell(f"{at[length]:.2f}", (curve,)) for length in lengths)])
    return Table(
        ("", *(f"{length:,} tokens" for length in lengths)), lines, one_call=True, has_sources=False
    )


def quality(rows: Rows) -> Table:
    """What quantised weights and bfloat16 states cost: the loss of held-out books."""
    of = partial(pick, rows, "quality", "loss")
    lines: list[list[Cell | str]] = []
    for weights in ("bfloat16", "fp8", "int8", "int4"):
        lines.append([weights])
        for model in ("books-160m", "books-400m"):
            for states in ("float32", "bfloat16"):
                row = of(model=model, weights=weights, states=states)
                lines[-1].append(Cell(f"{row['value']:.4f}", (row,)))
    header = ("weights", "160M", "160M, bf16 states", "400M", "400M, bf16 states")
    return Table(header, lines, one_call=True)


def readme_quality(rows: Rows) -> Table:
    """The loss of held-out books, and by how much smaller weights and states raise it."""
    cases = {
        "bf16 states": ("bfloat16", "bfloat16"),
        "fp8": ("fp8", "float32"),
        "int8": ("int8", "float32"),
        "int4": ("int4", "float32"),
    }
    lines: list[list[Cell | str]] = []
    for size in ("160m", "400m"):
        of = partial(pick, rows, "quality", "loss", model=f"books-{size}")
        first = of(weights="bfloat16", states="float32")
        lines.append([f"{size[:-1]}M", Cell(f"{first['value']:.4f}", (first,))])
        for weights, states in cases.values():
            row = of(weights=weights, states=states)
            lines[-1].append(Cell(f"{row['value'] - first['value']:+.4f}", (row, first)))
    lines.append(["7B", *["not measured"] * (1 + len(cases))])
    return Table(("", "loss, bf16", *cases), lines)


def _loss(row: Row) -> Cell:
    return Cell(f"{row['value']:.3f}", (row,))


LOSS_TABLES: dict[str, Callable[[Rows], Table]] = {
    "paper-previous-vs-new": previous_vs_new,
    "paper-head-dimension": head_dimension,
    "paper-pre-norm": partial(
        stability,
        "pre-norm",
        {"rms-norm": ("RMSNorm (released)", "stable"), "layer-norm": ("LayerNorm", "less stable")},
    ),
    "paper-head-norm": partial(
        stability,
        "head-norm",
        {"layer-norm": ("LayerNorm (released)", ""), "rms-norm": ("RMSNorm", "")},
    ),
    "paper-soft-cap": partial(
        stability,
        "soft-cap",
        {
            "both": ("gates and logits (released)", "stable"),
            "logits-only": ("logits only", ""),
            "gates-only": ("gates only", ""),
            "neither": ("neither", "less stable"),
        },
    ),
    "paper-input-gate-bias": partial(
        stability,
        "input-gate-bias",
        {
            "bias-10": ("−10 (released)", "smallest norms"),
            "bias-5": ("−5", ""),
            "bias-2": ("−2", ""),
            "bias-0": ("0", "spikes of the norm"),
        },
    ),
    "paper-fixed-input-gate": partial(
        stability,
        "fixed-input-gate",
        {
            "learnable": ("learned, from −10 (released)", ""),
            "fixed-0": ("fixed at 0", ""),
            "fixed-10": ("fixed at −10", ""),
        },
    ),
    "paper-schedule": schedule,
    "quality": quality,
    "readme-quality": readme_quality,
    "paper-recall-heads": partial(
        recall,
        "recall-heads",
        {f"heads-{n}": f"{n} heads{' (released)' * (n == 8)}" for n in (4, 8, 16, 32)},
    ),
    "paper-recall-gate": partial(
        recall,
        "recall-gate",
        {
            "learnable": "learned, from −10 (released)",
            "fixed-0": "fixed at 0",
            "fixed-10": "fixed at −10",
        },
    ),
    "paper-recall-bias": partial(
        recall,
        "recall-bias",
        {f"bias-{n}": f"{-n or 0}".replace("-", "−") for n in (10, 5, 2, 0)},
    ),
}
