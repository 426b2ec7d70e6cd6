"""The pictures of the pages: which figures they show. drawing.py draws them, render.py writes them.

A function here takes all figures and returns a picture. What it picks must exist, and what it
compares must be of one call.
"""

from collections.abc import Callable, Sequence
from typing import Any

from drawing import Line, Picture
from figures import Row, check_one_call, fastest, pick, series
from xlstm7b.bench.results import OURS

LLAMA, FALCON = "Llama 3.1 8B", "Falcon-Mamba 7B"
LLAMA_LIMIT = f"limit of {LLAMA}"
LABELS = {
    OURS: "xLSTM 7B, this package",
    "xlstm": "xLSTM 7B, authors' package",
    "transformers": "xLSTM 7B, transformers",
    "mlstm_kernels": "mlstm_kernels",
}
SYSTEMS = (OURS, LLAMA, FALCON, "xlstm")  # of most pictures

Rows = list[Row]


def speed_context(rows: Rows) -> Picture:
    """Tokens per second of one sequence over the tokens before it."""
    systems = (OURS, LLAMA, LLAMA_LIMIT, FALCON, "xlstm")
    found = _speeds(rows, "context", "decode", systems, batch=1)
    ours, llama = found[OURS], found[LLAMA]
    return Picture(
        title="Decode speed does not fall with context",
        conditions=f"One sequence, bfloat16 weights, {ours[0]['machine']}. Dotted: the limit "
        "by memory bandwidth, also in bfloat16.",
        alt=f"Tokens per second over the context: xLSTM 7B stays at {ours[-1]['value']:.0f}, "
        f"Llama 3.1 8B falls from {llama[0]['value']:.0f} to {llama[-1]['value']:.0f} after "
        f"{llama[-1]['shape']['context']:,} tokens",
        x_title="tokens before",
        y_title="tokens per second",
        x_is_tokens=True,
        lines=[
            *_lines({OURS: ours}, "context"),
            Line(
                "its limit",
                [row["shape"]["context"] for row in ours],
                [row["limit"] for row in ours],
                limit=True,
            ),
            *_lines({name: each for name, each in found.items() if name != OURS}, "context"),
        ],
    )


def paper_memory(rows: Rows) -> Picture:
    """Peak memory over the tokens generated."""
    found = _speeds(rows, "tokens", "peak memory", SYSTEMS)
    return Picture(
        title="Memory does not grow with the output",
        conditions=f"One sequence, no prompt, bfloat16 weights, {_machine(found)}.",
        alt="Peak memory over the number of generated tokens; only that of Llama 3.1 8B grows",
        x_title="tokens generated",
        y_title="peak memory, GB",
        x_is_tokens=True,
        lines=_lines(found, "tokens"),
    )


def paper_first_token(rows: Rows) -> Picture:
    """Seconds to the first token over the length of the prompt."""
    found = _speeds(rows, "prompt", "first token", SYSTEMS)
    return Picture(
        title="The time to the first token grows with the prompt, not with its square",
        conditions=f"One prompt, bfloat16 weights, {_machine(found)}.",
        alt="Seconds to the first token over the length of the prompt, of four models",
        x_title="tokens of the prompt",
        y_title="seconds to the first token",
        x_is_tokens=True,
        y_is_log=True,
        lines=_lines(found, "prompt"),
    )


def paper_prefill(rows: Rows) -> Picture:
    """Tokens per second of reading prompts over their length."""
    found = _speeds(rows, "length", "prefill", SYSTEMS)
    return Picture(
        title="Long prompts are read as fast as short ones",
        conditions=f"65,536 tokens in prompts of this length, bfloat16 weights, {_machine(found)}.",
        alt="Tokens per second of reading prompts; only that of Llama 3.1 8B falls with the length",
        x_title="tokens of each prompt",
        y_title="tokens per second",
        x_is_tokens=True,
        lines=_lines(found, "length"),
    )


def paper_full_gpu(rows: Rows) -> Picture:
    """Tokens per second of a full GPU over the context."""
    contexts = (2048, 16384, 65536, 131072)
    kinds: dict[str, tuple[str, dict[str, str]]] = {
        "xLSTM 7B, this package": (OURS, {"weights": "fp8", "states": "bfloat16"}),
        LLAMA: (LLAMA, {"weights": "bfloat16"}),
        f"limit of {LLAMA}, 8 bits": (LLAMA_LIMIT, {"weights": "8 bits"}),
        FALCON: (FALCON, {"weights": "bfloat16"}),
    }
    found = {
        label: [
            fastest(rows, "speed", "full GPU", system, context=context, **shape)
            for context in contexts
        ]
        for label, (system, shape) in kinds.items()
    }
    check_one_call(row for each in found.values() for row in each)
    return Picture(
        title="A full GPU decodes as fast after 131,072 tokens as after 2,048",
        conditions=f"Each at its best batch, {_machine(found)}. Ours: fp8 weights, bfloat16 "
        "states. Dotted: the time to read 8 bits.",
        alt="Tokens per second of a full GPU over the context; only that of Llama 3.1 8B falls",
        x_title="tokens before",
        y_title="tokens per second",
        x_is_tokens=True,
        y_is_log=True,
        lines=_lines(found, "context"),
    )


def paper_cell(rows: Rows) -> Picture:
    """The time of the mLSTM cell over the length of the sequences."""
    systems = (OURS, "mlstm_kernels", "FlashAttention (SDPA)")
    what = "forward + backward"
    found = {s: series(rows, "length", "kernels", what, s, model="7b") for s in systems}
    check_one_call(row for each in found.values() for row in each)
    return Picture(
        title="The cell takes the same time at any length",
        conditions=f"65,536 tokens of the 7B's width, forward and backward, {_machine(found)}.",
        alt="Milliseconds over the length of the sequences; only those of attention grow",
        x_title="tokens of each sequence",
        y_title="ms",
        x_is_tokens=True,
        y_is_log=True,
        lines=_lines(found, "length"),
    )


def books_loss(rows: Rows) -> Picture:
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


PICTURES: dict[str, Callable[[Rows], Picture]] = {
    "speed-context": speed_context,
    "paper-memory": paper_memory,
    "paper-first-token": paper_first_token,
    "paper-prefill": paper_prefill,
    "paper-full-gpu": paper_full_gpu,
    "paper-cell": paper_cell,
    "books-loss": books_loss,
}


def _speeds(
    rows: Rows, x: str, what: str, systems: Sequence[str], **shape: Any
) -> dict[str, list[Row]]:
    """Figures of benchmarks/speed.py in bfloat16, ours with float32 states; all of one call."""
    found = {}
    for system in systems:
        states = {"states": "float32"} if system == OURS else {}
        same = {"weights": "bfloat16", **states, **shape}
        found[system] = series(rows, x, "speed", what, system, **same)
    check_one_call(row for each in found.values() for row in each)
    return found


def _lines(found: dict[str, list[Row]], x: str) -> list[Line]:
    """A line for each system. A limit follows the system that it belongs to."""
    return [
        Line(
            LABELS.get(name, name),
            [row["shape"][x] for row in rows],
            [row["value"] for row in rows],
            ours=rows[0]["system"] == OURS,
            limit=rows[0]["system"].startswith("limit of"),
        )
        for name, rows in found.items()
    ]


def _machine(found: dict[str, list[Row]]) -> str:
    return str(next(iter(found.values()))[0]["machine"])
