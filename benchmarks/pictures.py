"""The pictures of the pages: which figures they show. drawing.py draws them, render.py writes them.

A function here takes all figures and returns a picture. What it picks must exist, and what it
compares must be of one call.
"""

from collections.abc import Callable, Sequence

from drawing import Line, Picture
from figures import Row, check_one_call, pick, series
from xlstm7b.bench.results import OURS


def speed_context(rows: list[Row]) -> Picture:
    """Tokens per second of one sequence over the tokens before it."""

    def of(system: str) -> list[Row]:
        states = {"states": "float32"} if system == OURS else {}
        return series(
            rows, "context", "speed", "decode", system, batch=1, weights="bfloat16", **states
        )

    ours, llama, limit = of(OURS), of("Llama 3.1 8B"), of("limit of Llama 3.1 8B")
    others = {name: of(name) for name in ("Falcon-Mamba 7B", "xlstm", "transformers")}
    check_one_call([*ours, *llama, *limit, *(row for each in others.values() for row in each)])
    labels = {"xlstm": "xLSTM 7B, authors' package", "transformers": "xLSTM 7B, transformers"}
    longest, machine = llama[-1]["shape"]["context"], ours[0]["machine"]
    return Picture(
        title="Decode speed does not fall with context",
        conditions=f"One sequence, bfloat16 weights, {machine}. Dotted: the time to read Llama's "
        "weights and KV cache, also in bfloat16.",
        alt=f"Tokens per second over the context: xLSTM 7B stays at {ours[-1]['value']:.0f}, "
        f"Llama 3.1 8B falls from {llama[0]['value']:.0f} to {llama[-1]['value']:.0f} after "
        f"{longest:,} tokens",
        x_title="tokens before",
        y_title="tokens per second",
        x_is_tokens=True,
        lines=[
            _line("xLSTM 7B, this package", "context", ours, ours=True),
            _line("Llama 3.1 8B", "context", llama),
            _line("limit of Llama 3.1 8B", "context", limit, limit=True),
            *(_line(labels.get(name, name), "context", each) for name, each in others.items()),
        ],
    )


def books_loss(rows: list[Row]) -> Picture:
    """The training of the 160M on books."""
    training, held_out = (pick(rows, "books", what) for what in ("loss", "held-out loss"))
    last = held_out["y"][-1]
    return Picture(
        title="A 160M learns 156 books in four minutes",
        conditions=f"Four epochs of 14.7M tokens, {training['machine']}.",
        alt=f"Training and held-out loss over 900 steps; the held-out loss ends at {last:.2f}",
        x_title="step",
        y_title="loss, nats per token",
        y_from_zero=False,
        lines=[
            Line("training", training["x"], training["y"], ours=True),
            Line("held out", held_out["x"], held_out["y"]),
        ],
    )


PICTURES: dict[str, Callable[[list[Row]], Picture]] = {
    "speed-context": speed_context,
    "books-loss": books_loss,
}


def _line(label: str, x: str, rows: Sequence[Row], **named: bool) -> Line:
    return Line(label, [row["shape"][x] for row in rows], [row["value"] for row in rows], **named)
