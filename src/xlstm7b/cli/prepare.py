"""`xlstm7b prepare`: text → token shards; their check, and the adoption of what datatrove wrote."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlstm7b.cli.options import byte_progress

if TYPE_CHECKING:
    from xlstm7b.data.shards import ShardFolder


def _column(explained: str) -> Any:
    return typer.Option(help=explained, rich_help_panel="Columns")


def prepare(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Files (.txt, .jsonl, also .gz or .zst, .parquet) or folders of them; with "
            "--verify or --adopt, folders of shards.",
            metavar="INPUT",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write the shards to.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="A tokenizer.json, a folder that has one, or bytes.")
    ] = "bytes",
    form: Annotated[
        str,
        typer.Option(
            "--format", help="text, chat or qa: of the last two, only answers count in the loss."
        ),
    ] = "text",
    text_column: Annotated[str, _column("Of --format text.")] = "text",
    messages_column: Annotated[str, _column("Of --format chat: role and content each.")] = (
        "messages"
    ),
    question_column: Annotated[str, _column("Of --format qa.")] = "question",
    answer_column: Annotated[str, _column("Of --format qa.")] = "answer",
    as_text: Annotated[
        list[str] | None,
        typer.Option(help="Another ending, such as .py, of files that are texts; repeatable."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="How many turn text to tokens.", show_default="all cores")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Most tokens in a shard.")] = 100_000_000,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check shards against their checksums instead.")
    ] = False,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", help="Give shards that datatrove wrote a manifest instead."),
    ] = False,
) -> None:
    """Turn text into token shards, to train on.

    The same command again goes on where it was interrupted; half a folder cannot be trained on.
    """
    if verify and adopt:
        raise ValueError("--verify and --adopt are two things: give one of them")
    if verify or adopt:
        if output is not None:
            raise ValueError("--verify and --adopt write no --output")
        for folder in inputs:
            _say(folder, "is as it was written" if verify else "is adopted",
                 _verified(folder) if verify else _adopted(folder, tokenizer))  # fmt: skip
        return
    if output is None:
        raise ValueError("--output is missing: the folder to write the shards to")
    from xlstm7b.data.prepare import prepare as run
    from xlstm7b.data.sources import find_sources

    endings = tuple(as_text or ())
    total = sum(file.stat().st_size for file in find_sources(inputs, endings))
    start = time.perf_counter()
    with byte_progress("preparing", total) as report:
        written = run(
            inputs,
            output,
            tokenizer,
            format=form,
            text_column=text_column,
            messages_column=messages_column,
            question_column=question_column,
            answer_column=answer_column,
            text_endings=endings,
            processes=_cores() if processes is None else processes,
            shard_tokens=shard_tokens,
            progress=report,
        )
    _say(output, f"is ready, after {time.perf_counter() - start:.1f} s", written)


def _cores() -> int:
    """Those that this process may use, where the system can tell."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _verified(path: Path) -> "ShardFolder":
    from xlstm7b.data.shards import open_folder

    total = sum(file.stat().st_size for file in path.glob("*.ds*"))
    with byte_progress("verifying", total) as report:
        return open_folder(path, verify=True, progress=report)


def _adopted(path: Path, tokenizer: str) -> "ShardFolder":
    from xlstm7b.data.prepare import adopt

    return adopt(path, tokenizer)


def _say(path: Path, what: str, folder: "ShardFolder") -> None:
    print(
        f"{path} {what}: {folder.tokens:,} tokens, {folder.documents:,} documents, "
        f"shards: {len(folder.shards)}{', loss masks' if folder.has_mask else ''}"
    )
