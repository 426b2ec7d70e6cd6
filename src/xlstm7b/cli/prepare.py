"""`xlstm7b prepare`: text files to token shards; `--verify` and `--adopt` for existing shards."""

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlstm7b.cli.options import byte_progress, option
from xlstm7b.report import counted

if TYPE_CHECKING:
    from xlstm7b.data.shards import ShardFolder


_column = partial(option, panel="Columns")


def prepare(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Files (.txt, .md, .jsonl, .ndjson, .json, all also .gz or .zst; .parquet) or "
            "folders of them; or one .toml file that lists sources. With --verify or --adopt: "
            "folders of shards.",
            metavar="INPUT",
        ),
    ],
    output: Annotated[
        Path | None, option("Folder to write the shards to.", "--output", "-o")
    ] = None,
    tokenizer: Annotated[
        str,
        option(
            "A tokenizer.json, its folder, a hub id, or bytes. Chats are written with the "
            "chat template of its folder; without one, as User: and Assistant: lines."
        ),
    ] = "bytes",
    form: Annotated[
        str,
        option(
            "How JSON and parquet records are read: text, chat, sharegpt, alpaca, qa or "
            "completion. auto finds the format of each file by its columns. In all but text, only "
            "the answers count in the loss.",
            "--format",
        ),
    ] = "auto",
    text_column: Annotated[str, _column("Column with the text, for --format text.")] = "text",
    messages_column: Annotated[
        str,
        _column("Column with the messages ({role, content} or {from, value}), for --format chat."),
    ] = "messages",
    question_column: Annotated[
        str, _column("Column with the question, for --format qa.")
    ] = "question",
    answer_column: Annotated[str, _column("Column with the answer, for --format qa.")] = "answer",
    as_text: Annotated[
        list[str] | None, option("Read files with this ending, such as .py, as text. Repeatable.")
    ] = None,
    include: Annotated[
        list[str] | None,
        option(
            "Read only files whose name, path or folder matches this pattern, such as "
            "'train*'. Repeatable."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        option("Leave out files and folders whose name or path matches this pattern. Repeatable."),
    ] = None,
    skip_bad: Annotated[int, option("Leave out up to this many records that cannot be read.")] = 0,
    special_tokens: Annotated[
        bool,
        option(
            "Turn special tokens in the text, such as <|endoftext|>, into their ids. "
            "By default they are ordinary text.",
            "--special-tokens",
        ),
    ] = False,
    processes: Annotated[
        int | None, option("Number of processes that tokenize.", default="all cores")
    ] = None,
    shard_tokens: Annotated[int, option("Maximum number of tokens in a shard.")] = 100_000_000,
    verify: Annotated[
        bool, option("Check existing shards against their checksums.", "--verify")
    ] = False,
    adopt: Annotated[
        bool, option("Add the manifest to shards that datatrove wrote.", "--adopt")
    ] = False,
) -> None:
    """Turn text into token shards to train on.

    The same command continues after an interruption, or after a bad record was corrected. Only a
    finished folder can be used.
    """
    if verify and adopt:
        raise ValueError("--verify and --adopt cannot be given together")
    if verify or adopt:
        if output is not None:
            raise ValueError("--verify and --adopt write no --output")
        from xlstm7b.data.prepare import adopt as adopt_folder
        from xlstm7b.data.shards import MANIFEST

        for folder in inputs if adopt else ():
            if (folder / MANIFEST).exists():
                raise ValueError(f"{folder} has a {MANIFEST} already: check it with --verify")
        for folder in inputs:
            if verify:
                _print_summary(folder, "is intact", _verify(folder))
            else:
                _print_summary(folder, "is adopted", adopt_folder(folder, tokenizer))
        return
    if output is None:
        raise ValueError("--output is missing: the folder to write the shards to")
    with _ending_on_signals():
        from xlstm7b.data.input_files import Columns
        from xlstm7b.data.prepare import prepare as run
        from xlstm7b.data.prepare import read_notes
        from xlstm7b.data.sources import find_sources

        columns = Columns(form, text_column, messages_column, question_column, answer_column)
        endings = tuple(as_text or ())
        patterns = {"include": include or (), "exclude": exclude or ()}
        _, found = find_sources(inputs, columns, endings, **patterns, output=output)
        start = time.perf_counter()
        size = sum(file.stat().st_size for file in found.files)
        with byte_progress("preparing", size) as report:
            written = run(
                inputs,
                output,
                tokenizer,
                columns,
                text_endings=endings,
                **patterns,
                skip_bad=skip_bad,
                special_tokens=special_tokens,
                processes=_usable_cores() if processes is None else processes,
                shard_tokens=shard_tokens,
                progress=report,
            )
    print(found)
    notes = read_notes(output)
    _print_formats(notes)
    bad = notes["bad"]
    if bad:
        print(f"bad records left out: {len(bad)}, all listed in {output / 'manifest.json'}")
    for message in bad[:5]:
        print(f"  {message}")
    _print_summary(output, f"is ready, after {time.perf_counter() - start:.1f} s", written)


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the worker processes first, which takes a moment.

    A second SIGTERM kills. A second Ctrl-C in that moment changes nothing.
    """
    ended_at = -math.inf

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal ended_at
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        before[signal.SIGINT] = signal.SIG_IGN  # until Python has ended
        if time.monotonic() > ended_at + 1:
            ended_at = time.monotonic()
            sys.exit(128 + number)  # what a shell reports for a signal

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as a shell starts commands in the background
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_formats(notes: dict[str, Any]) -> None:
    """The formats that were found, if there is more than plain text, and how chats are written."""
    from xlstm7b.chat_format import ChatFormat, ChatTemplate, PlainFormat

    formats = notes["formats"]
    if any(not name.startswith("text ") or group["also"] for name, group in formats.items()):
        for name, group in formats.items():
            more = ", …" if group["count"] > len(group["first"]) else ""
            print(f"format {name}: {group['count']} ({', '.join(group['first'])}{more})")
            if group["also"]:
                print(f"  the records also have {', '.join(group['also'])}: choose with --format")
    template = notes.get("chat_template")
    if template is not None:
        is_plain = template == PlainFormat.template
        source = "as User: and Assistant: lines" if is_plain else "with the tokenizer's template"
        print(f"chats are written {source}")
        try:
            ChatFormat(ChatTemplate(template, {}))
        except ValueError as error:
            print(f"  {error}: `chat` and `serve` will write User: and Assistant: lines instead")
    if notes["last_answer_only"]:
        print(
            f"chats of which only the last answer counts in the loss: "
            f"{notes['last_answer_only']:,} (the chat template writes their earlier turns "
            "differently once a turn follows)"
        )


def _usable_cores() -> int:
    allowed = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _verify(path: Path) -> "ShardFolder":
    from xlstm7b.data.shards import open_folder

    total = sum(file.stat().st_size for file in path.glob("*.ds*"))
    with byte_progress("verifying", total) as report:
        return open_folder(path, verify=True, progress=report)


def _print_summary(path: Path, what: str, folder: "ShardFolder") -> None:
    tokens, documents = counted(folder.tokens, "token"), counted(folder.documents, "document")
    print(
        f"{path} {what}: {tokens}, {documents}, "
        f"shards: {len(folder.shards)}{', loss masks' if folder.has_mask else ''}"
    )
    eos, bos = folder.eos_token_id, folder.bos_token_id
    if (eos, bos) != (0, 0):  # other than a recipe's defaults
        first = "force_bos_token_insert=false" if bos is None else f"bos_token_id={bos}"
        print(f"train on it with --set model.eos_token_id={eos} --set model.{first}")
