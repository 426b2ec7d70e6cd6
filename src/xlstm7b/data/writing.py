"""Writing token shards: aside, hashed on the way, renamed; the manifest last."""

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from xlstm7b.data.shards import (
    FORMAT,
    MANIFEST,
    ShardFolder,
    file_names,
    open_folder,
    sha256,
    token_size,
)

Ids = Sequence[int] | npt.NDArray[Any]


class ShardWriter:
    """Writes one shard, `path` being its NAME.ds: there is all of it afterwards, or nothing.

    A last small file, NAME.ds.json, says that it is whole and what it holds: `entry`.
    """

    def __init__(self, path: Path, *, vocab_size: int, has_mask: bool = False) -> None:
        self.path, self.entry = path, dict[str, Any]()
        self.documents = self.tokens = 0
        self._vocab_size, self._has_mask = vocab_size, has_mask
        self._dtype = np.dtype(f"<u{token_size(vocab_size)}")
        self._ends = array("Q")
        self._files = {
            name: _HashedFile(path.parent / name) for name in file_names(path.name, has_mask)
        }

    def add(self, tokens: Ids, mask: Ids | None = None) -> None:
        """Appends a document, and the 0 that ends it, which always counts in the loss."""
        ids = np.zeros(len(tokens) + 1, dtype=np.int64)
        ids[:-1] = tokens
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ValueError(
                f"{self.path}: a document's ids are {ids.min()} to {ids.max()}, "
                f"but the vocabulary ends at {self._vocab_size - 1}"
            )
        assert (mask is not None) == self._has_mask
        self._files[self.path.name].write(ids.astype(self._dtype).tobytes())
        if mask is not None:
            assert len(mask) == len(tokens)
            counted = np.ones(len(ids), dtype=np.uint8)
            counted[:-1] = mask
            self._files[f"{self.path.name}.loss"].write(counted.tobytes())
        self.documents += 1
        self.tokens += len(ids)
        self._ends.append(self.tokens)

    def close(self, **noted: Any) -> None:
        """Puts the shard in place, with what else is to be noted in its NAME.ds.json."""
        index = np.array(self._ends, dtype="<u8").tobytes()
        self._files[f"{self.path.name}.index"].write(index)
        self.entry = {
            "name": self.path.name,
            "documents": self.documents,
            "tokens": self.tokens,
            "has_mask": self._has_mask,
            "sha256": {name: file.close() for name, file in self._files.items()},
        }
        write_json(self.path.with_name(f"{self.path.name}.json"), {**self.entry, **noted})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self.entry:
                self.close()
        finally:
            for file in self._files.values():
                file.abandon()


class _HashedFile:
    """A file that is written aside, hashed on the way, and in place when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path, self._aside = path, path.with_name(f"{path.name}.part")
        self._file = self._aside.open("wb")
        self._sum = hashlib.sha256()

    def write(self, piece: bytes) -> None:
        self._sum.update(piece)
        self._file.write(piece)

    def close(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._aside.replace(self._path)
        return self._sum.hexdigest()

    def abandon(self) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a whole file or none."""
    file = _HashedFile(path)
    try:
        file.write(f"{json.dumps(value, indent=1, ensure_ascii=False)}\n".encode())
        file.close()
    finally:
        file.abandon()


@contextmanager
def alone_in(folder: Path, doing: str) -> Iterator[None]:
    """No other process may come into the folder while this one is in it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is {doing} {folder} right now") from error
        except OSError:
            pass  # some network file systems cannot lock
        yield
    finally:
        os.close(lock)


def write_manifest(
    folder: Path,
    entries: Sequence[dict[str, Any]],
    *,
    vocab_size: int,
    tokenizer_fingerprint: str,
    **noted: Any,
) -> None:
    """Writes what makes a folder of shards complete, from the `entry` of each."""
    manifest = {
        "format": FORMAT,
        "tokenizer": tokenizer_fingerprint,
        "vocab_size": vocab_size,
        "documents": sum(entry["documents"] for entry in entries),
        "tokens": sum(entry["tokens"] for entry in entries),
        **noted,
        "shards": list(entries),
    }
    write_json(folder / MANIFEST, manifest)


def adopt_folder(path: str | Path, *, vocab_size: int, tokenizer_fingerprint: str) -> ShardFolder:
    """Gives a folder that datatrove wrote the manifest it lacks, after a look at every token."""
    path, entries = Path(path), []
    if (path / MANIFEST).exists():
        return open_folder(path, tokenizer_fingerprint=tokenizer_fingerprint)
    for shard in open_folder(path, token_bytes=token_size(vocab_size)).shards:
        if (largest := int(shard.tokens.max())) >= vocab_size:
            raise ValueError(f"{shard.path} holds id {largest}, but ids end at {vocab_size - 1}")
        name, has_mask = shard.path.name, shard.mask is not None
        entry = {"name": name, "documents": len(shard.ends), "tokens": len(shard.tokens)}
        sums = {file: sha256(path / file) for file in file_names(name, has_mask)}
        entries.append({**entry, "has_mask": has_mask, "sha256": sums})
    write_manifest(
        path, entries, vocab_size=vocab_size, tokenizer_fingerprint=tokenizer_fingerprint
    )
    return open_folder(path)
