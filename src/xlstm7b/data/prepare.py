"""Text → token shards: several processes, one order, resumable, whole or not at all."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xlstm7b.data.shards import MANIFEST, UNFINISHED, ShardFolder, open_folder
from xlstm7b.data.sources import (
    Batch,
    Columns,
    check_source,
    find_sources,
    read_batches,
)
from xlstm7b.data.tokenising import Tokenised, load, tokenise, tokenizer_fingerprint
from xlstm7b.data.writing import ShardWriter, adopt_folder, alone_in, write_json, write_manifest

Progress = Callable[[str, int], None]
"""Called with the name of an input file and how many of its bytes were just dealt with."""


def prepare(
    inputs: Iterable[str | Path],
    output: str | Path,
    tokenizer: str | Path = "bytes",
    *,
    format: str = "text",  # noqa: A002 (the option's name)
    text_column: str = "text",
    messages_column: str = "messages",
    question_column: str = "question",
    answer_column: str = "answer",
    text_endings: Sequence[str] = (),
    processes: int = 1,
    shard_tokens: int = 100_000_000,
    progress: Progress | None = None,
) -> ShardFolder:
    """Writes the documents of files and folders as tokens into the folder `output`.

    `tokenizer` is a tokenizer.json, its folder, or "bytes". Shards hold `shard_tokens` at most, or
    one document that is longer. The same call goes on where a killed one was, and returns at once
    when all is done; the files are the same, however many processes there are and deaths they die.
    Documents without any token are left out.
    """
    columns = Columns(format, text_column, messages_column, question_column, answer_column)
    for name, value in (("processes", processes), ("shard_tokens", shard_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    output, sources = Path(output), find_sources(inputs, text_endings)
    vocab_size = load(tokenizer).vocab_size
    fingerprint = tokenizer_fingerprint(tokenizer)
    plan = _digest([fingerprint, vars(columns), shard_tokens, *map(_identity, sources)])
    if _is_done(output, plan):
        return open_folder(output)
    for source in sources:
        check_source(source, columns, text_endings)
    with _begun(output, plan):
        if not (output / MANIFEST).exists():
            done = _finished_shards(output)
            start = done[-1]["next"] if done else [0, 0]
            found = _read(sources, columns, text_endings, start, progress)
            tokenised = tokenise(found, tokenizer, columns, processes)
            _write(output, tokenised, sources, done, vocab_size, columns.has_mask, shard_tokens)
            if not done:
                (output / UNFINISHED).unlink()
                output.rmdir()
                raise ValueError("there is no text in what is to be prepared")
            entries = [{k: v for k, v in entry.items() if k != "next"} for entry in done]
            write_manifest(
                output,
                entries,
                vocab_size=vocab_size,
                tokenizer_fingerprint=fingerprint,
                documents_as=format,
                plan=plan,
            )
        for file in output.glob("*.ds.json"):
            file.unlink()
        _sync(output)
        (output / UNFINISHED).unlink(missing_ok=True)  # only now can it be opened
    return open_folder(output)


def adopt(folder: str | Path, tokenizer: str | Path) -> ShardFolder:
    """Makes a folder that datatrove wrote with this tokenizer one of ours: adds the manifest."""
    return adopt_folder(
        folder,
        vocab_size=load(tokenizer).vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
    )


def _digest(plan: Any) -> str:
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()


def _identity(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _is_done(output: Path, plan: str) -> bool:
    """Whether there is nothing left to do; `ValueError` if `output` is not ours to write."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is there already, and is not a folder")
    unfinished, manifest = output / UNFINISHED, output / MANIFEST
    for file in (unfinished, manifest):
        if file.exists():
            try:
                ours = json.loads(file.read_bytes())["plan"] == plan
            except (ValueError, LookupError, TypeError):
                ours = False
            begun = any(other.suffix != ".part" for other in output.iterdir() if other != file)
            if not ours and (file == manifest or begun):
                raise ValueError(
                    f"{output} holds tokens of other input, or by another tokenizer or other "
                    "settings: remove it, or name another folder"
                )
            return file == manifest
    if output.exists() and {file.name for file in output.iterdir()} - {f"{UNFINISHED}.part"}:
        raise ValueError(f"{output} holds something else: remove it, or name another folder")
    return False


@contextmanager
def _begun(output: Path, plan: str) -> Iterator[None]:
    """The folder, marked as unfinished, and ours alone."""
    output.mkdir(parents=True, exist_ok=True)
    with alone_in(output, "preparing"):
        if not _is_done(output, plan):
            write_json(output / UNFINISHED, {"plan": plan})
        yield


def _sync(folder: Path) -> None:
    """Renames survive a power cut only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finished_shards(output: Path) -> list[dict[str, Any]]:
    """What earlier runs finished, in order; the rest of what they wrote is removed."""
    done: list[dict[str, Any]] = []
    while (note := output / f"{len(done):05d}.ds.json").exists():
        done.append(json.loads(note.read_bytes()))
    kept = {name for entry in done for name in (*entry["sha256"], f"{entry['name']}.json")}
    for file in output.iterdir():
        if file.name not in kept | {UNFINISHED}:
            file.unlink()
    return done


def _read(
    sources: Sequence[Path],
    columns: Columns,
    text_endings: Sequence[str],
    start: Sequence[int],
    progress: Progress | None,
) -> Iterator[Batch]:
    for place, source in enumerate(sources):
        if place < start[0]:
            if progress:
                progress(source.name, source.stat().st_size)
            continue
        first = start[1] if place == start[0] else 0
        for batch in read_batches(source, columns, first, text_endings):
            yield batch
            if progress:
                progress(source.name, batch.read)


def _write(
    output: Path,
    batches: Iterable[Tokenised],
    sources: Sequence[Path],
    done: list[dict[str, Any]],
    vocab_size: int,
    has_mask: bool,
    shard_tokens: int,
) -> None:
    """Writes shards and appends what they hold, and where in the input they end, to `done`."""
    documents = _documents(batches, sources)
    following = next(documents, None)
    while following is not None:
        path = output / f"{len(done):05d}.ds"
        with ShardWriter(path, vocab_size=vocab_size, has_mask=has_mask) as writer:
            while following is not None:
                _, tokens, mask = following
                if writer.tokens and writer.tokens + len(tokens) + 1 > shard_tokens:
                    break
                writer.add(tokens, mask)
                following = next(documents, None)
            after = [len(sources), 0] if following is None else following[0]
            writer.close(next=after)
        done.append({**writer.entry, "next": after})


def _documents(
    batches: Iterable[Tokenised], sources: Sequence[Path]
) -> Iterator[tuple[list[int], npt.NDArray[Any], npt.NDArray[np.uint8] | None]]:
    """Documents that are not empty, each with its place: that of its file, and in its file."""
    number = {source: place for place, source in enumerate(sources)}
    for batch in batches:
        start = 0
        for place, length in zip(batch.places, batch.lengths, strict=True):
            piece = slice(start, start := start + length)
            if length:
                mask = None if batch.mask is None else batch.mask[piece]
                yield [number[batch.path], place], batch.tokens[piece], mask
