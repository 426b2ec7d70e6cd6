"""Text files to token shards: `prepare`, and `adopt` for shards that datatrove wrote.

Several processes tokenize batches of documents; one process writes the shards in input order. So
the files do not depend on the number of processes. A killed run continues after its last complete
shard.
"""

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xlstm7b.data.input_files import (
    Columns,
    RecordBatch,
    check_input_file,
    find_input_files,
    read_batches,
)
from xlstm7b.data.shards import (
    MANIFEST,
    UNFINISHED,
    ShardEntry,
    ShardFolder,
    ShardWriter,
    adopt_folder,
    open_folder,
    token_size,
    write_manifest,
)
from xlstm7b.tokenizer import AnyTokenizer, copy_tokenizer, open_tokenizer, tokenizer_file

if TYPE_CHECKING:
    from xlstm7b.files import Progress

# The temporary names of `files.write_aside`, which a killed run leaves.
_HALF_WRITTEN = re.compile(r"\.(unfinished|manifest|\d{5}\.ds).*\.[0-9a-f]{8}")


def prepare(
    inputs: Iterable[str | Path],
    output: str | Path,
    tokenizer: str | Path = "bytes",
    columns: Columns = Columns(),  # noqa: B008 (frozen)
    *,
    text_endings: Sequence[str] = (),
    processes: int = 1,
    shard_tokens: int = 100_000_000,
    progress: "Progress | None" = None,
) -> ShardFolder:
    """Tokenizes the documents of files and folders into the folder `output`.

    `tokenizer` is a tokenizer.json, its folder, a hub id, or "bytes". A copy of the file is kept
    with the shards, for `export`. A shard holds at most `shard_tokens`
    tokens, or a single longer document. Documents without tokens are left out. The same call
    continues a killed run, and returns at once if nothing is left to do.
    """
    for name, value in (("processes", processes), ("shard_tokens", shard_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    output, sources = Path(output), find_input_files(inputs, text_endings)
    tokenizer = tokenizer_file(tokenizer) or "bytes"  # a download comes once, not in each process
    ids = _tokenizer_ids(tokenizer)
    plan = _digest([ids, vars(columns), shard_tokens, *map(_identity, sources)])
    if _is_done(output, plan):
        return open_folder(output)
    for source in sources:
        check_input_file(source, columns, text_endings)
    with _begin(output, plan):
        if not (output / MANIFEST).exists():
            done = _finished_shards(output)
            start = done[-1][1] if done else [0, 0]
            batches = _read(sources, columns, text_endings, start, progress)
            tokenized = tokenize(batches, tokenizer, columns, processes)
            _write(output, tokenized, sources, done, ids, columns.has_mask, shard_tokens)
            if not done:
                (output / UNFINISHED).unlink()
                output.rmdir()
                raise ValueError("the input holds no text")
            copy_tokenizer(tokenizer, output)
            write_manifest(
                output,
                [entry for entry, _ in done],
                **ids,
                documents_as=columns.format,
                plan=plan,
            )
        for file in output.iterdir():
            if file.name.endswith(".ds.json") or _HALF_WRITTEN.fullmatch(file.name):
                file.unlink()
        (output / UNFINISHED).unlink(missing_ok=True)  # from here on the folder can be opened
    return open_folder(output)


def adopt(folder: str | Path, tokenizer: str | Path) -> ShardFolder:
    """Adds the manifest to a folder that datatrove wrote with this tokenizer."""
    adopted = adopt_folder(folder, **_tokenizer_ids(tokenizer))
    copy_tokenizer(tokenizer, adopted.path)
    return adopted


def _tokenizer_ids(tokenizer: str | Path) -> dict[str, Any]:
    """What the manifest says of a tokenizer. `ValueError` if it has no end of text."""
    loaded = open_tokenizer(tokenizer)
    bos, eos, _ = loaded.special
    if eos is None:
        raise ValueError(
            f"{tokenizer} names no end of text, which separates documents: put a "
            'tokenizer_config.json with "eos_token" beside it'
        )
    return {
        "vocab_size": loaded.vocab_size,
        "tokenizer_fingerprint": loaded.fingerprint,
        "eos_token_id": eos,
        "bos_token_id": bos,
    }


# The output folder


def _digest(plan: Any) -> str:
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()


def _identity(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _is_done(output: Path, plan: str) -> bool:
    """True if nothing is left to do. `ValueError` if `output` holds anything else."""
    if not output.exists():
        return False
    if not output.is_dir():
        raise ValueError(f"{output} exists already and is not a folder")
    found = {file.name for file in output.iterdir() if not _HALF_WRITTEN.fullmatch(file.name)}
    for name in (UNFINISHED, MANIFEST):
        if name in found:
            try:
                is_same = json.loads((output / name).read_bytes())["plan"] == plan
            except (ValueError, LookupError, TypeError):
                is_same = False
            if not is_same and (name == MANIFEST or found != {UNFINISHED}):
                raise ValueError(
                    f"{output} was prepared from other input, with another tokenizer or with other "
                    "settings: remove it, or choose another folder"
                )
            return name == MANIFEST
    if found:
        raise ValueError(f"{output} holds other files: remove it, or choose another folder")
    return False


@contextmanager
def _begin(output: Path, plan: str) -> Iterator[None]:
    """Creates the folder, locks it and marks it as unfinished."""
    from xlstm7b.files import lock_folder, write_json  # not at the top: it loads torch

    output.mkdir(parents=True, exist_ok=True)
    with lock_folder(output, "preparing"):
        if not _is_done(output, plan):
            write_json(output / UNFINISHED, {"plan": plan})
        yield


Finished = list[tuple[ShardEntry, Sequence[int]]]
"""Complete shards, each with where in the input the next one starts."""


def _finished_shards(output: Path) -> Finished:
    """The shards that earlier runs completed, in order. Removes everything else they wrote."""
    done: Finished = []
    while (note := output / f"{len(done):05d}.ds.json").exists():
        noted = json.loads(note.read_bytes())
        done.append((ShardEntry.model_validate(noted), noted["next"]))
    kept = {name for entry, _ in done for name in (*entry.sha256, f"{entry.name}.json")}
    for file in output.iterdir():
        if file.name not in kept | {UNFINISHED}:
            file.unlink()
    return done


# Reading, tokenizing, writing


class Tokenized(NamedTuple):
    """The documents of one batch, concatenated."""

    path: Path
    positions: list[int]  # of each document's record in its file
    lengths: list[int]
    tokens: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8] | None


def _read(
    sources: Sequence[Path],
    columns: Columns,
    text_endings: Sequence[str],
    start: Sequence[int],
    progress: "Progress | None",
) -> Iterator[RecordBatch]:
    """All batches from `start`: the number of a file, and of a record in it."""
    for number, source in enumerate(sources):
        if number < start[0]:
            if progress:
                progress(source.name, source.stat().st_size)
            continue
        first = start[1] if number == start[0] else 0
        for batch in read_batches(source, columns, first, text_endings):
            yield batch
            if progress:
                progress(source.name, batch.bytes_read)


def tokenize(
    batches: Iterator[RecordBatch], tokenizer: str | Path, columns: Columns, processes: int
) -> Iterator[Tokenized]:
    """Tokenizes batches in order, in this process or in several others."""
    if processes == 1:
        here = open_tokenizer(tokenizer)
        yield from (_tokenize(batch, here, columns) for batch in batches)
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _start_worker, (tokenizer, columns)
    )
    waiting: deque[Future[Tokenized]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise OSError("a worker process died, perhaps because memory ran out") from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: Any = None  # in a worker process: its tokenizer and columns


def _start_worker(tokenizer: str | Path, columns: Columns) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)  # a killed parent cannot stop us

    threading.Thread(target=exit_with_parent, daemon=True).start()
    _worker = open_tokenizer(tokenizer), columns


def _work(batch: RecordBatch) -> Tokenized:
    return _tokenize(batch, *_worker)


def _tokenize(batch: RecordBatch, tokenizer: AnyTokenizer, columns: Columns) -> Tokenized:
    documents = list(batch.documents(columns))
    texts = [text for _, doc in documents for text, _ in doc]
    continues = [number > 0 for _, doc in documents for number in range(len(doc))]
    encoded = iter(tokenizer.encode_batch(texts, continues))
    dtype = f"<u{token_size(tokenizer.vocab_size)}"
    positions, lengths, tokens, mask = [], [], [np.empty(0, dtype)], [np.empty(0, np.uint8)]
    for position, segments in documents:
        parts = [(next(encoded), in_loss) for _, in_loss in segments]
        positions.append(position)
        lengths.append(sum(len(ids) for ids, _ in parts))
        tokens += [np.array(ids, dtype) for ids, _ in parts]
        mask += [np.full(len(ids), in_loss, np.uint8) for ids, in_loss in parts]
    whole = np.concatenate(mask) if columns.has_mask else None
    return Tokenized(batch.path, positions, lengths, np.concatenate(tokens), whole)


def _write(
    output: Path,
    batches: Iterable[Tokenized],
    sources: Sequence[Path],
    done: Finished,
    ids: dict[str, Any],
    has_mask: bool,
    shard_tokens: int,
) -> None:
    """Writes shards, and appends each one to `done`."""
    documents = _documents(batches, sources)
    upcoming = next(documents, None)
    while upcoming is not None:
        path = output / f"{len(done):05d}.ds"
        sizes = {name: ids[name] for name in ("vocab_size", "eos_token_id")}
        with ShardWriter(path, **sizes, has_mask=has_mask) as writer:
            while upcoming is not None:
                _, tokens, mask = upcoming
                if writer.tokens and writer.tokens + len(tokens) + 1 > shard_tokens:
                    break
                writer.add(tokens, mask)
                upcoming = next(documents, None)
            start = [len(sources), 0] if upcoming is None else upcoming[0]
            writer.close(next=start)
        done.append((writer.entry, start))


def _documents(
    batches: Iterable[Tokenized], sources: Sequence[Path]
) -> Iterator[tuple[list[int], npt.NDArray[Any], npt.NDArray[np.uint8] | None]]:
    """Non-empty documents: the number of the file and of the record, tokens, loss mask."""
    numbers = {source: number for number, source in enumerate(sources)}
    for batch in batches:
        start = 0
        for position, length in zip(batch.positions, batch.lengths, strict=True):
            piece = slice(start, start := start + length)
            if length:
                mask = None if batch.mask is None else batch.mask[piece]
                yield [numbers[batch.path], position], batch.tokens[piece], mask
