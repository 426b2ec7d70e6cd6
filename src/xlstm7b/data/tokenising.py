"""Batches of documents into tokens, by several processes, in the batches' order."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xlstm7b.data.shards import token_size
from xlstm7b.data.sources import Batch, Columns
from xlstm7b.tokenizer import ByteTokenizer, FileTokenizer


def tokenizer_fingerprint(tokenizer: str | Path) -> str:
    """What tells tokenizers apart: "bytes", or that of a tokenizer.json, or of a folder's."""
    file = tokenizer_file(tokenizer)
    return "bytes" if file is None else FileTokenizer(file).fingerprint


def tokenizer_file(tokenizer: str | Path) -> Path | None:
    """The tokenizer.json itself, or a folder's; none for "bytes"."""
    if str(tokenizer) == "bytes":
        return None
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no tokenizer at {file}")
    return file


def load(tokenizer: str | Path) -> ByteTokenizer | FileTokenizer:
    file = tokenizer_file(tokenizer)
    if file is None:
        return ByteTokenizer()
    loaded = FileTokenizer(file)
    if text := loaded.token_bytes(0):
        raise ValueError(
            f"id 0 of {file} is {text.decode(errors='replace')!r}, "
            "but has to be the end of text, with which documents are parted"
        )
    return loaded


class Tokenised(NamedTuple):
    """A batch's documents, one behind the other."""

    path: Path
    places: list[int]
    lengths: list[int]
    tokens: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8] | None


def _tokens_of(
    batch: Batch, tokenizer: ByteTokenizer | FileTokenizer, columns: Columns
) -> Tokenised:
    documents = list(batch.documents(columns))
    encoded = iter(tokenizer.encode_batch([text for _, doc in documents for text, _ in doc]))
    dtype = f"<u{token_size(tokenizer.vocab_size)}"
    places, lengths, tokens, mask = [], [], [np.empty(0, dtype)], [np.empty(0, np.uint8)]
    for place, segments in documents:
        parts = [(next(encoded), counts) for _, counts in segments]
        places.append(place)
        lengths.append(sum(len(ids) for ids, _ in parts))
        tokens += [np.array(ids, dtype) for ids, _ in parts]
        mask += [np.full(len(ids), counts, np.uint8) for ids, counts in parts]
    whole = np.concatenate(mask) if columns.has_mask else None
    return Tokenised(batch.path, places, lengths, np.concatenate(tokens), whole)


_ours: Any = None  # a worker's tokenizer and columns


def _start_worker(tokenizer: str | Path, columns: Columns) -> None:
    global _ours
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)  # nobody else would tell us if the parent was killed

    threading.Thread(target=follow, daemon=True).start()
    _ours = load(tokenizer), columns


def _work(batch: Batch) -> Tokenised:
    return _tokens_of(batch, *_ours)


def tokenise(
    batches: Iterator[Batch], tokenizer: str | Path, columns: Columns, processes: int
) -> Iterator[Tokenised]:
    if processes == 1:
        here = load(tokenizer)
        yield from (_tokens_of(batch, here, columns) for batch in batches)
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _start_worker, (tokenizer, columns)
    )
    waiting: deque[Future[Tokenised]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise OSError("a worker process died, perhaps for want of memory") from error
    finally:
        pool.shutdown(cancel_futures=True)
