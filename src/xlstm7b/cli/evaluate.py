"""`xlstm7b eval …`: tasks of the LM Evaluation Harness, perplexity, RULER; results compared."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlstm7b.cli import options, ruler
from xlstm7b.cli.loading import OpenedModel, open_model
from xlstm7b.cli.options import count_progress, listed, to_target

if TYPE_CHECKING:
    from xlstm7b.evaluate.results import Line, Measured


class _RunsTasks(typer.core.TyperGroup):
    """`eval FOLDER --tasks …` is `eval run FOLDER --tasks …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(cls=_RunsTasks, help="Measure how good a model is.", no_args_is_help=True)
app.command()(ruler.ruler)
app.command()(ruler.ruler_plot)

_BatchSize = Annotated[
    str, typer.Option(help="Texts at once; auto: by free memory.", rich_help_panel="Model")
]
_Output = Annotated[Path | None, typer.Option(help="Results as JSON, in the harness's layout.")]


@app.command()
def run(
    model: options.Model,
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks and groups of the harness, by commas, and leaderboard-v1, leaderboard-v2."
        ),
    ] = "",
    tasks_dir: Annotated[Path | None, typer.Option(help="A folder of more tasks, as YAML.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many of each task.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question.", show_default="the task's")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put questions as the model's chats go.")
    ] = False,
    output: _Output = None,
    batch_size: _BatchSize = "auto",
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
) -> None:
    """Run tasks of the LM Evaluation Harness; `run` itself may be left out.

    xlstm7b eval --tasks leaderboard-v2 NX-AI/xLSTM-7b --output results.json
    """
    rows = _rows(batch_size)
    for name, value, least in (("limit", limit, 1), ("num-fewshot", num_fewshot, 0)):
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, not {value}")
    target = None if output is None else to_target(output)
    names = listed(tasks)
    if not names and tasks_dir is None:
        raise ValueError("no task is given: --tasks NAME,… or --tasks-dir FOLDER")
    opened = _opened(model, tokenizer, dtype, device)
    from xlstm7b.tokenizer import load_chat_template

    if apply_chat_template and load_chat_template(opened.folder) is None:
        raise ValueError(f"{opened.folder} holds no chat template to apply")
    from xlstm7b.evaluate.harness import XLSTM7B, load_tasks, run_tasks
    from xlstm7b.evaluate.results import described, write_json

    loaded = load_tasks(names, tasks_dir, num_fewshot)
    lm = XLSTM7B(
        str(opened.folder),
        tokenizer=None if tokenizer is None else str(tokenizer),
        dtype=dtype,
        device=opened.device,
        batch_size="auto" if rows is None else rows,
    )
    results = run_tasks(lm, loaded, limit=limit, apply_chat_template=apply_chat_template)
    from lm_eval.utils import make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if target is not None:  # last: should it fail, the table is there
        write_json(target, described(results, opened.folder))


@app.command()
def ppl(
    model: options.Model,
    texts: Annotated[
        list[Path], typer.Argument(help=".txt, .jsonl (also .gz, .zst), .parquet, or folders.")
    ],
    column: Annotated[str, typer.Option(help="The text's name in .jsonl and .parquet.")] = "text",
    output: _Output = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the loss over the position, as PNG.")
    ] = None,
    batch_size: _BatchSize = "auto",
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
) -> None:
    """Perplexity of any text, and by position: does the model use its context?

    Every document is read whole, on a state that goes from piece to piece.
    """
    rows = _rows(batch_size)
    target = None if output is None else to_target(output)
    picture = None if plot is None else to_target(plot)
    if picture is not None:
        import matplotlib  # noqa: F401 (missed now rather than after all the work)
    from xlstm7b.data.sources import Columns, check_source, find_sources
    from xlstm7b.evaluate import perplexity

    for source in find_sources(texts):
        check_source(source, Columns(text=column))
    if not any(perplexity.read_documents(texts, column)):
        raise ValueError("there is no text to measure")
    opened = _opened(model, tokenizer, dtype, device)
    from xlstm7b.evaluate.results import described, write_json
    from xlstm7b.evaluate.scoring import Scorer
    from xlstm7b.model import XLSTM

    loaded = XLSTM.from_pretrained(opened.folder, dtype=opened.dtype, device=opened.device)
    with count_progress("reading", None, shown=True) as progress:
        measured = perplexity.perplexity(
            Scorer(loaded, batch_size=rows),
            opened.tokenizer,
            perplexity.read_documents(texts, column),
            progress,
        )
    print(f"{measured.documents:,} documents, {measured.tokens:,} tokens, {measured.bytes:,} bytes")
    print(f"loss {measured.loss:.4f} nats a token, perplexity {measured.perplexity:.3f}, "
          f"{measured.bits_per_byte:.4f} bits a byte")  # fmt: skip
    print_columns(
        [
            ("tokens from", "to", "how many", "loss", "perplexity"),
            *(
                (
                    f"{b.first:,}",
                    f"{b.last:,}",
                    f"{b.tokens:,}",
                    f"{b.loss:.4f}",
                    f"{b.perplexity:.3f}",
                )
                for b in measured.buckets
            ),
        ],
        left=0,
    )
    if target is not None:  # last: should it fail, the table is there
        name = ", ".join(path.resolve().name for path in texts)
        write_json(target, described(measured.results(name), opened.folder))
    if picture is not None:
        perplexity.plot(measured, picture, opened.folder.resolve().name)


@app.command()
def compare(
    files: Annotated[list[Path], typer.Argument(help="Results files, two or more.")],
) -> None:
    """Print results side by side: task × metric, standard errors, differences to the first file."""
    from xlstm7b.evaluate.results import compare as compared

    if len(files) < 2:
        raise ValueError("there is nothing to compare: give two or more results files")
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    heading = ["task", "metric", names[0]]
    for name in names[1:]:
        heading += [name, "difference"]
    print_columns([heading, *(_cells(line) for line in compared(files))], left=2)


def _cells(line: "Line") -> list[str]:
    cells = [line.task, line.metric, _shown(line.values[0])]
    for value, difference in zip(line.values[1:], line.differences, strict=True):
        cells += [_shown(value), "–" if difference is None else f"{difference:+.4f}"]
    return cells


def _shown(measured: "Measured | None") -> str:
    if measured is None:
        return "–"
    spread = "" if measured.error is None else f" ± {measured.error:.4f}"
    return f"{measured.value:.4f}{spread}"


def print_columns(rows: "list[Any]", left: int) -> None:
    """Rows of texts as columns, the first `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _rows(batch_size: str) -> int | None:
    if batch_size == "auto":
        return None
    if not batch_size.isdecimal() or int(batch_size) < 1:
        raise ValueError(f"--batch-size must be auto or at least 1, not {batch_size}")
    return int(batch_size)


def _opened(
    model: str, tokenizer: Path | None, dtype: str | None, device: str | None
) -> OpenedModel:
    return open_model(model, tokenizer=tokenizer, dtype=dtype, device=device, state_dtype="float32")
