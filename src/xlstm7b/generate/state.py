"""StateStore: saved states as files in one folder."""

import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from xlstm7b import accounting
from xlstm7b.config import ModelConfig
from xlstm7b.files import opened_safetensors
from xlstm7b.model.saved_state import (
    OWN_NOTES,
    SavedState,
    read_metadata,
    read_tokens_seen,
    to_device,
)

__all__ = ["SavedState", "StateStore", "StoreFull", "StoredState", "state_bytes", "to_device"]

_NAME = re.compile(r"[\w-]{1,200}", re.ASCII)  # of a stored state: never a path


def state_bytes(config: ModelConfig, state_dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the `SavedState` of one row, with C in `state_dtype`."""
    cells = accounting.state_bytes(config, state_dtype.itemsize)["total"]
    return cells + 4 * config.vocab_size + 8


class StoreFull(RuntimeError):  # noqa: N818 (a condition of the store, not a fault)
    """A state does not fit into the store, and the store does not evict."""


class StoredState(NamedTuple):
    """The properties of a stored state that are known without loading it."""

    name: str
    created: float  # seconds since 1970
    tokens_seen: list[int]
    nbytes: int
    notes: dict[str, str]


class StateStore:
    """Saved states as files in one folder, at most `max_bytes` in all. Thread-safe.

    With `evict` the least recently used files make room for new ones (the prefix cache). Without,
    a full store raises `StoreFull`, and only `delete` deletes files (/v1/states). Only
    files whose names start with `prefix` are counted or touched.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        max_bytes: int,
        *,
        evict: bool,
        prefix: str = "state-",
    ) -> None:
        self.folder, self.config, self.max_bytes = Path(folder), config, max_bytes
        self._evict, self._prefix = evict, prefix
        self._writing = threading.Lock()
        if evict:
            self._delete_oldest(self.nbytes - max_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def check_room(self, nbytes: int) -> None:
        """Raises `StoreFull` if a state of this size could not be saved now."""
        available = self.max_bytes if self._evict else self.max_bytes - self.nbytes
        if nbytes > available:
            raise StoreFull(
                f"a state of {nbytes / 1e6:,.1f} MB does not fit: the store holds "
                f"{self.nbytes / 1e9:,.2f} of at most {self.max_bytes / 1e9:,.2f} GB"
            )

    def save(self, name: str, state: SavedState, **notes: str) -> StoredState:
        """Writes a state. `StoreFull` if there is no room, `OSError` if the disk fails."""
        path = self._path(name)
        size = state.nbytes + sum(map(len, notes.values()))
        with self._writing:
            self.check_room(size)
            if self._evict:
                self._delete_oldest(self.nbytes + size - self.max_bytes)
            state.save(path, **notes)
            return self.find(name)

    def find(self, name: str) -> StoredState:
        """`KeyError` if there is no such state."""
        path = self._path(name)
        try:
            status = path.stat()
            with opened_safetensors(path) as file:
                metadata = read_metadata(path, file)
            seen = read_tokens_seen(path, metadata)
        except (OSError, ValueError) as error:
            raise KeyError(name) from error
        notes = {key: note for key, note in metadata.items() if key not in OWN_NOTES}
        return StoredState(name, status.st_mtime, seen, status.st_size, notes)

    def list(self) -> list[StoredState]:
        """All states that can be loaded, newest first."""
        found = []
        for _, _, path in sorted(self._files(), reverse=True):
            try:
                found.append(self.find(path.stem))
            except KeyError:  # deleted meanwhile, or not a saved state
                continue
        return found

    def load(self, name: str, *, device: torch.device | str | None = None) -> SavedState:
        """`KeyError` if there is no such state; `ValueError` if damaged or another model's."""
        path = self._path(name)
        try:
            state = SavedState.load(path, self.config, device=device)
        except (OSError, ValueError):
            if not path.is_file():  # or deleted meanwhile
                raise KeyError(name) from None
            raise
        if self._evict:
            with suppress(OSError):  # evicted meanwhile
                os.utime(path)  # used now: the last to be evicted
        return state

    def delete(self, name: str) -> None:
        """`KeyError` if there is no such state."""
        try:
            self._path(name).unlink()
        except FileNotFoundError as error:
            raise KeyError(name) from error

    def _delete_oldest(self, nbytes: int) -> None:
        """Deletes the least recently used files until at least this many bytes are free."""
        for _, size, path in sorted(self._files()):
            if nbytes <= 0:
                break
            path.unlink(missing_ok=True)
            nbytes -= size

    def _files(self) -> Sequence[tuple[float, int, Path]]:
        """Time of last use, size and path of each file."""
        found = []
        for path in self.folder.glob(f"{self._prefix}*.safetensors"):
            try:
                status = path.stat()
            except OSError:  # deleted meanwhile
                continue
            found.append((status.st_mtime, status.st_size, path))
        return found

    def _path(self, name: str) -> Path:
        if not name.startswith(self._prefix) or not _NAME.fullmatch(name):
            raise KeyError(name)
        return self.folder / f"{name}.safetensors"
