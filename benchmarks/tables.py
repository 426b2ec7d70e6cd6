"""The tables of the pages: which figures they show. render.py writes them.

A function here takes all figures and returns a table. What it picks must exist and must be of one
call in each row: else rendering fails and says what is missing. So a table has no row for what was
not measured. The paper's values are text: they are the authors' published ones, on one H100.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from figures import (
    Cell,
    Row,
    Table,
    fastest,
    joined,
    limit,
    listed,
    number,
    percent,
    pick,
    ratio,
    shown,
    value,
)
from loss_tables import LOSS_TABLES
from xlstm7b.bench.results import OURS

LLAMA, FALCON = "Llama 3.1 8B", "Falcon-Mamba 7B"
AUTHORS, TRANSFORMERS, LLAMA_LIMIT = "xlstm", "transformers", f"limit of {LLAMA}"
BF16 = {"weights": "bfloat16", "states": "float32"}  # how ours runs, if nothing else is said
BF16_STATES = {"weights": "bfloat16", "states": "bfloat16"}

Rows = list[Row]
Pick = Callable[..., Row]
Columns = Mapping[str, Callable[[int], Cell | str]]


def table_over(
    title: str, values: Sequence[int], columns: Columns, *, one_call: bool = False
) -> Table:
    """A table with a row for each value, such as each context length."""
    header = [title, *columns]
    lines = [[f"{each:,}", *(show(each) for show in columns.values())] for each in values]
    return Table(header, lines, one_call)


def _speed(rows: Rows, what: str, system: str = OURS, **shape: Any) -> Row:
    """A figure that benchmarks/speed.py measured. Of a full GPU it is that of the best batch."""
    if system == OURS:
        shape = {"model": "7b"} | BF16 | shape
    return (fastest if what == "full GPU" else pick)(rows, "speed", what, system, **shape)


# README.md


def readme(rows: Rows) -> Table:
    """A row for each quantity, a column for each system. "–" was not measured."""
    short, long, million = 0, 131072, 1048576
    bf16: dict[str, Any] = {"weights": "bfloat16"}
    in_8_bits: dict[str, Any] = {"weights": "8 bits"}
    small = {"weights": "fp8", "states": "bfloat16"}

    def line(
        title: str,
        ours: Cell,
        limit: Cell | str = "–",
        llama: Cell | str = "–",
        llama_limit: Cell | str = "–",
        falcon: Cell | str = "–",
        authors: Cell | str = "–",
        transformers: Cell | str = "–",
    ) -> list[Cell | str]:
        return [title, ours, limit, llama, llama_limit, falcon, authors, transformers]

    def alone(what: str, system: str, *contexts: int, **shape: Any) -> Cell:
        """One sequence after these contexts."""
        found = [_speed(rows, what, system, batch=1, context=c, **shape) for c in contexts]
        return listed(found, number)

    def alone_in_all(title: str, what: str, limit: Cell | str = "–") -> list[Cell | str]:
        return line(
            title,
            alone(what, OURS, short, long, million),
            limit,
            joined(" / ", alone(what, LLAMA, short, long), "–"),
            alone(what, LLAMA_LIMIT, short, long, million, **bf16),
            joined(" / ", alone(what, FALCON, short, long), "–"),
            joined(" / ", alone(what, AUTHORS, short, long), "–"),
            joined(" / ", alone(what, TRANSFORMERS, short), "–", "–"),
        )

    def full(system: str, **shape: Any) -> Cell:
        """A full GPU after two contexts."""
        found = [_speed(rows, "full GPU", system, context=c, **shape) for c in (2048, long)]
        return listed(found, number)

    def trained(system: str) -> Cell:
        sizes = "160m", "400m", "1.4b"
        return listed([pick(rows, "training", "training", system, model=s) for s in sizes], number)

    decode = _speed(rows, "decode", batch=1, context=short)
    small_decode, small_memory = (
        _speed(rows, what, batch=1, context=short, **small) for what in ("decode", "peak memory")
    )
    full_limits = [
        limit(_speed(rows, "full GPU", context=2048, **shape)) for shape in (BF16, small)
    ]
    return Table(
        ("", OURS, "limit", LLAMA, "its limit", FALCON, f"`{AUTHORS}`", f"`{TRANSFORMERS}`"),
        [
            alone_in_all(
                "decode after 0 / 131,072 / 1,048,576 tokens, tok/s", "decode", limit(decode)
            ),
            alone_in_all("peak memory after the same, GB", "peak memory"),
            line(
                "full GPU after 2,048 / 131,072 tokens, tok/s",
                full(OURS),
                full_limits[0],
                full(LLAMA),
                full(LLAMA_LIMIT, **bf16),
                full(FALCON),
                full(AUTHORS),
            ),
            line(
                "the same in 8 bits, tok/s",
                full(OURS, **small),
                full_limits[1],
                llama_limit=full(LLAMA_LIMIT, **in_8_bits),
            ),
            line(
                "decode in 8 bits, tok/s (memory)",
                joined("", number(small_decode), " (", value(small_memory), ")"),
                limit(small_decode),
                llama_limit=alone("decode", LLAMA_LIMIT, short, **in_8_bits),
            ),
            line("training 160M / 400M / 1.4B, tok/s", trained(OURS), authors=trained(AUTHORS)),
        ],
    )


# docs/benchmarks.md


def decode_batches(rows: Rows) -> Table:
    """Decoding at several batch sizes, beside the time to read weights and states."""
    ours: Pick = partial(
        pick,
        rows,
        "generation",
        "decode",
        model="7b",
        sampling=None,
        replay=None,
        context=16,
        **BF16,
    )
    return table_over(
        "batch",
        (1, 8, 64, 256),
        {
            "tok/s": lambda batch: number(ours(batch=batch)),
            "limit": lambda batch: limit(ours(batch=batch)),
            "of the limit": lambda batch: percent(ours(batch=batch)),
        },
    )


def first_token(rows: Rows) -> Table:
    """From a prompt to its first token and to 100 tokens."""
    of: Pick = partial(pick, rows, "generation", model="7b", **BF16)
    return table_over(
        "prompt, tokens",
        (128, 512, 2048, 16384),
        {
            "first token": lambda prompt: value(of("first token", prompt=prompt)),
            "of the limit": lambda prompt: percent(of("first token", prompt=prompt)),
            "100 tokens": lambda prompt: value(of("first 100 tokens", prompt=prompt)),
        },
    )


def prefill(rows: Rows) -> Table:
    """Reading 65,536 tokens as prompts of several lengths."""
    of: Pick = partial(pick, rows, "generation", "prefill", model="7b", **BF16)
    return table_over(
        "tokens of each prompt",
        (2048, 8192, 16384, 65536),
        {
            "tok/s": lambda prompt: number(of(prompt=prompt)),
            "of the limit": lambda prompt: percent(of(prompt=prompt)),
        },
        one_call=True,
    )


def cell_steps(rows: Rows) -> Table:
    """One step of the cell, beside the authors' kernel."""
    of: Pick = partial(pick, rows, "kernels", "step", model="7b")
    return table_over(
        "batch",
        (1, 8, 64),
        {
            "ours": lambda batch: value(of(batch=batch)),
            "of the limit": lambda batch: percent(of(batch=batch)),
            "`mlstm_kernels`": lambda batch: value(of("mlstm_kernels", batch=batch)),
            "our speedup": lambda batch: ratio(of(batch=batch), of("mlstm_kernels", batch=batch)),
        },
    )


def cell_sizes(rows: Rows) -> Table:
    """The cell of smaller models, 8 sequences of 8,192 tokens."""
    of: Pick = partial(pick, rows, "kernels", batch=8, length=8192)
    kinds = "forward", "forward + backward"
    lines: list[list[Cell | str]] = []
    for what in kinds:
        for model in ("1.4b", "160m"):
            row = of(what, model=model)
            lines.append([f"{model}, {what}", value(row), percent(row)])
    return Table(("model", "time", "of the limit"), lines)


def engine(rows: Rows) -> Table:
    """Continuous batching of 64 requests, beside the same requests in whole batches."""
    lines: list[list[Cell | str]] = []
    outputs: dict[str, int | str] = {"256 tokens": 256, "128 to 384 tokens": "128-384"}
    for title, output in outputs.items():
        of: Pick = partial(pick, rows, "engine", streams=64, format=None, output=output)
        speed, first = of("output"), of("first token")
        gaps = [of(f"between tokens, p{percent}") for percent in (50, 99)]
        lines.append([title, number(speed), percent(speed), listed(gaps), value(first)])
    header = ("outputs", "new tok/s", "of whole batches", "gap p50 / p99", "first token")
    return Table(header, lines)


def server(rows: Rows) -> Table:
    """A server under load."""
    row = pick(rows, "serve", "output", clients=64)
    return Table(("load", "new tok/s"), [["64 clients, 512 tokens in, 256 out", number(row)]])


def training(rows: Rows) -> Table:
    """Training beside the authors' package, which is compiled too."""
    lines: list[list[Cell | str]] = []
    for model, batch, length in (
        ("160m", 16, 4096),
        ("400m", 16, 4096),
        ("1.4b", 4, 8192),
        ("7b", 1, 2048),
    ):
        shape: dict[str, Any] = {"model": model, "batch": batch, "length": length}
        of: Pick = partial(pick, rows, "training", recomputed=None, **shape)
        ours, peer = (of("training", system) for system in (OURS, AUTHORS))
        memory = [of("peak memory", system) for system in (OURS, AUTHORS)]
        case = f"{model}, {batch} × {length:,}"
        speeds = number(ours), value(of("MFU")), number(peer), ratio(ours, peer)
        lines.append([case, *speeds, listed(memory)])
    return Table(("", "tok/s", "MFU", "`xlstm`", "our speedup", "memory, ours / `xlstm`"), lines)


def training_7b(rows: Rows) -> Table:
    """The 7B on one GPU, by what is recomputed."""
    lines: list[list[Cell | str]] = []
    for length, recomputed in (
        (8192, "selective"),
        (8192, "block"),
        (2048, "selective"),
        (2048, "block"),
    ):
        of: Pick = partial(pick, rows, "training", model="7b", length=length)
        figures = [of(what, recomputed=recomputed) for what in ("training", "MFU", "peak memory")]
        case = f"{length:,} tokens, {recomputed}"
        lines.append([case, number(figures[0]), *map(value, figures[1:])])
    return Table(("context, recomputed", "tok/s", "MFU", "peak memory"), lines, one_call=True)


def speculation_drafts(rows: Rows) -> Table:
    """Decoding with drafts that are right as often as given."""
    lines: list[list[Cell | str]] = []
    for title, shape in (
        ("none", {"drafts": "none"}),
        ("never right, lengths adapt", {"drafts": "adaptive", "right": 0}),
        ("never right", {"drafts": "up to 15", "right": 0}),
        ("half are right", {"drafts": "up to 15", "right": 0.5}),
        ("four of five are right", {"drafts": "up to 15", "right": 0.8}),
        ("all are right", {"drafts": "up to 15", "right": 1}),
    ):
        of: Pick = partial(pick, rows, "speculation", "decode", model="7b", **shape)
        lines.append([title, number(of(batch=1)), number(of(batch=8))])
    return Table(("drafts", "batch 1, tok/s", "batch 8, tok/s"), lines, one_call=True)


def speculation_texts(rows: Rows) -> Table:
    """Decoding of real texts with and without lookup in the text."""
    lines: list[list[Cell | str]] = []
    for text in ("copy", "code", "question", "prose"):
        of: Pick = partial(pick, rows, "speculation", batch=1, text=text)
        plain, fast = (of("decode", drafts=drafts) for drafts in ("none", "lookup"))
        lines.append(
            [
                text,
                number(plain),
                number(fast),
                ratio(fast, plain),
                number(of("accepted drafts", drafts="lookup")),
            ]
        )
    header = ("text", "tok/s", "with lookup", "speedup", "drafts accepted, %")
    return Table(header, lines)


def drift(rows: Rows) -> Table:
    """The loss of a text that is decoded token by token, by the dtype of the states."""
    lines: list[list[Cell | str]] = []
    for states in ("float32", "bfloat16"):
        of: Pick = partial(pick, rows, "drift", "loss", states=states, weights="bfloat16")
        lines.append([states, *(exact(of(replay=replay)) for replay in ("off", "on"))])
    return Table(("states", "loss", "loss with replay"), lines, one_call=True)


def paper_training(rows: Rows) -> Table:
    """The speed of training a 7B, for each GPU."""
    of: Pick = partial(pick, rows, "training", model="7b", length=8192, recomputed="selective")
    header = ("", "tok/s of one GPU", "MFU")
    lines: list[list[Cell | str]] = [["the paper, 128 H100s", "9.15K", "37.4%"]]
    return Table(header, [*lines, ["ours, one GPU", number(of("training")), value(of("MFU"))]])


def grouped_scoring(rows: Rows) -> Table:
    """100 questions with four answers each, after the same five examples."""
    lines: list[list[Cell | str]] = []
    for prefixes in ("read once", "read each time"):
        of: Pick = partial(pick, rows, "evaluation", model="7b", prefixes=prefixes)
        lines.append([prefixes, number(of("tokens read")), value(of("scoring"))])
    return Table(("shared prefixes", "tokens read", "time"), lines, one_call=True)


# docs/paper.md


def paper_decode(rows: Rows) -> Table:
    """The paper's figure of generation speed at batch size 1."""
    of: Pick = partial(_speed, rows, "decode", batch=1)
    paper = {0: "157", 16384: "157"}
    return table_over(
        "tokens before",
        (0, 2048, 16384, 65536, 131072),
        {
            "the paper, xLSTM 7B": lambda context: paper.get(context, ""),
            "ours": lambda context: number(of(context=context)),
            "limit": lambda context: limit(of(context=context)),
            "`xlstm`": lambda context: number(of(AUTHORS, context=context)),
            LLAMA: lambda context: number(of(LLAMA, context=context)),
            "its limit": lambda context: number(
                of(LLAMA_LIMIT, weights="bfloat16", context=context)
            ),
            FALCON: lambda context: number(of(FALCON, context=context)),
        },
        one_call=True,
    )


def paper_generation(rows: Rows) -> Table:
    """The paper's figure of time and memory over the generated tokens."""
    seconds: Pick = partial(_speed, rows, "generation time")
    memory: Pick = partial(_speed, rows, "peak memory")

    def cell(system: str, tokens: int) -> Cell:
        figures = seconds(system, tokens=tokens), memory(system, tokens=tokens)
        return joined(", ", *map(value, figures))

    systems = {"ours": OURS, "`xlstm`": AUTHORS, LLAMA: LLAMA, FALCON: FALCON}
    columns = {title: partial(cell, system) for title, system in systems.items()}
    return table_over("tokens generated", (256, 1024, 4096), columns, one_call=True)


def paper_first_token(rows: Rows) -> Table:
    """The paper's figure of the time to the first token."""
    of: Pick = partial(_speed, rows, "first token")
    paper = {16384: "349 ms"}
    return table_over(
        "prompt, tokens",
        (128, 512, 2048, 8192, 16384, 65536),
        {
            "the paper, xLSTM 7B": lambda prompt: paper.get(prompt, ""),
            "ours": lambda prompt: value(of(prompt=prompt)),
            "`xlstm`": lambda prompt: value(of(AUTHORS, prompt=prompt)),
            LLAMA: lambda prompt: value(of(LLAMA, prompt=prompt)),
            FALCON: lambda prompt: value(of(FALCON, prompt=prompt)),
        },
        one_call=True,
    )


def paper_prefill(rows: Rows) -> Table:
    """The paper's figure of reading 65,536 tokens in prompts of several lengths."""
    of: Pick = partial(_speed, rows, "prefill")
    return table_over(
        "tokens of each prompt",
        (2048, 8192, 16384, 65536),
        {
            "the paper, xLSTM 7B": lambda length: "47.6K",
            "ours": lambda length: number(of(length=length)),
            "limit": lambda length: limit(of(length=length)),
            "`xlstm`": lambda length: number(of(AUTHORS, length=length)),
            LLAMA: lambda length: number(of(LLAMA, length=length)),
            FALCON: lambda length: number(of(FALCON, length=length)),
        },
        one_call=True,
    )


def paper_full_gpu(rows: Rows) -> Table:
    """Not in the paper: each model at its largest batch, and ours at its fastest setting too."""

    def cell(context: int, system: str, **shape: Any) -> Cell:
        row = _speed(rows, "full GPU", system, context=context, **shape)
        batch = Cell(f" ({shown(row['shape']['batch'])})")
        return joined("", number(row), batch)

    small = {"weights": "fp8", "states": "bfloat16"}
    in_8_bits: dict[str, Any] = {"weights": "8 bits"}
    return table_over(
        "tokens before",
        (2048, 16384, 65536, 131072),
        {
            "ours": lambda context: cell(context, OURS),
            "ours, fp8, bf16 states": lambda context: cell(context, OURS, **small),
            "`xlstm`": lambda context: cell(context, AUTHORS),
            FALCON: lambda context: cell(context, FALCON),
            LLAMA: lambda context: cell(context, LLAMA),
            "its limit": lambda context: cell(context, LLAMA_LIMIT, weights="bfloat16"),
            "in 8 bits": lambda context: cell(context, LLAMA_LIMIT, **in_8_bits),
        },
        one_call=True,
    )


def paper_cell(rows: Rows) -> Table:
    """The cell beside FlashAttention: 65,536 tokens of the 7B's width, with the backward pass."""
    forward: Pick = partial(pick, rows, "kernels", "forward", model="7b")
    both: Pick = partial(pick, rows, "kernels", "forward + backward", model="7b")

    def cell(length: int, system: str = OURS) -> Cell:
        figures = [forward(system, length=length), both(system, length=length)]
        return listed(figures)

    return table_over(
        "tokens of each sequence",
        (2048, 4096, 8192, 16384, 32768, 65536),
        {
            "ours": cell,
            "`mlstm_kernels`": lambda length: cell(length, "mlstm_kernels"),
            "FlashAttention": lambda length: cell(length, "FlashAttention (SDPA)"),
        },
        one_call=True,
    )


def exact(row: Row) -> Cell:
    """The value with four decimals, where differences are small."""
    return Cell(f"{row['value']:.4f}", (row,))


TABLES: dict[str, Callable[[Rows], Table]] = {
    "readme": readme,
    "decode-batches": decode_batches,
    "first-token": first_token,
    "prefill": prefill,
    "cell-steps": cell_steps,
    "cell-sizes": cell_sizes,
    "engine": engine,
    "server": server,
    "training": training,
    "training-7b": training_7b,
    "speculation-drafts": speculation_drafts,
    "speculation-texts": speculation_texts,
    "drift": drift,
    "grouped-scoring": grouped_scoring,
    "paper-decode": paper_decode,
    "paper-generation": paper_generation,
    "paper-first-token": paper_first_token,
    "paper-prefill": paper_prefill,
    "paper-full-gpu": paper_full_gpu,
    "paper-cell": paper_cell,
    "paper-training": paper_training,
    **LOSS_TABLES,
}
