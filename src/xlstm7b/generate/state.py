"""StateStore: saved states as files in one folder."""

import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from xlstm7b import accounting
from xlstm7b.config import ModelConfig
from xlstm7b.files import json_bytes, lock, write_aside, write_hashed
from xlstm7b.model.saved_state import (
    SavedState,
    config_text,
    describe_file,
    is_same_config,
    to_device,
)

__all__ = [
    "SavedState",
    "StateLabel",
    "StateStore",
    "StoreFull",
    "StoredState",
    "state_bytes",
    "to_device",
]

_NAME = re.compile(r"[\w-]{1,200}", re.ASCII)  # of a stored state: never a path
_STATE, _LABEL = ".safetensors", ".json"  # endings of the two files of a state
_PRIVATE = 0o600  # a state holds what was read
_REFRESH_SECONDS = 10.0  # other processes may use the folder
_STALE_SECONDS = 3600.0  # no save takes so long


def state_bytes(config: ModelConfig, state_dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the `SavedState` of one row, with C in `state_dtype`."""
    cells = accounting.state_bytes(config, state_dtype.itemsize)["total"]
    return cells + 4 * config.vocab_size + 8


class StoreFull(RuntimeError):  # noqa: N818 (a condition of the store, not a fault)
    """A state does not fit into the store, and the store does not evict."""


class StateLabel(NamedTuple):
    """What can change about a stored state. It is kept in a small file beside the state."""

    name: str = ""
    tags: tuple[str, ...] = ()
    expires: float | None = None  # seconds since 1970; None: never

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires <= time.time()


NO_LABEL = StateLabel()
Status = Literal["ok", "damaged", "other_model"]


class StoredState(NamedTuple):
    """The properties of a stored state that are known without loading it."""

    name: str
    created: float  # seconds since 1970
    tokens_seen: list[int]
    nbytes: int
    notes: dict[str, str]
    label: StateLabel = NO_LABEL
    status: Status = "ok"


@dataclass
class _Entry:
    """A state in the index."""

    changed: int = 0  # time of last use, in nanoseconds
    created: float = 0.0  # the same in seconds
    nbytes: int = 0
    label: StateLabel = NO_LABEL
    label_changed: int = 0  # 0: there is no label, or it was not read yet
    described: StoredState | None = None  # None: its header was not read yet


class StateStore:
    """Saved states as files in one folder, at most `max_bytes` in all. Thread-safe.

    A folder that is missing is created.

    With `evict` the least recently used files make room for new ones (the prefix cache). Without,
    a full store raises `StoreFull`, and only `delete` and the expiry of a label delete files
    (/v1/states). Only files whose names start with `prefix` are counted or touched.

    An index in memory knows the names and sizes of all files, so that saving a state does not list
    the folder. Several processes may share a folder: `list` and a full store look at it again, and
    so does a save when the index is older than 10 seconds.
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
        self._config_text = config_text(config)
        self._writing = threading.Lock()
        self._indexing = threading.RLock()  # guards the fields below
        self._index: dict[str, _Entry] = {}
        self._nbytes, self._refreshed = 0, 0.0
        self.folder.mkdir(parents=True, exist_ok=True)  # there must be something to lock
        self._remove_unfinished()
        self._refresh()
        if evict:
            self._delete_oldest(self._nbytes - max_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        self._refresh()
        return self._nbytes

    def check_room(self, nbytes: int) -> None:
        """Raises `StoreFull` if a state of this size could not be saved now."""
        if time.monotonic() > self._refreshed + _REFRESH_SECONDS or nbytes > self._room():
            self._refresh()
        if nbytes > self._room():
            raise StoreFull(
                f"a state of {nbytes / 1e6:,.1f} MB does not fit: the store holds "
                f"{self._nbytes / 1e9:,.2f} of at most {self.max_bytes / 1e9:,.2f} GB"
            )

    def save(
        self, name: str, state: SavedState, label: StateLabel = NO_LABEL, /, **notes: str
    ) -> StoredState:
        """Writes a state. `StoreFull` if there is no room, `OSError` if the disk fails."""
        path = self._path(name)
        size = state.nbytes + sum(map(len, notes.values()))
        with self._writing:
            self.check_room(size)
            if self._evict and self._nbytes + size > self.max_bytes:
                self._delete_oldest(self.nbytes + size - self.max_bytes)
            self._write_label(name, label)  # first: the state appears with its label
            try:
                state.save(path, _PRIVATE, **notes)
            except BaseException:
                self._write_label(name, NO_LABEL)
                raise
            return self._find(name)  # even if it expires at once

    def find(self, name: str) -> StoredState:
        """`KeyError` if there is no such state."""
        found = self._find(name)
        if found.label.is_expired:
            self.delete(name)
            raise KeyError(name)
        return found

    def names(self, tag: str | None = None) -> list[str]:
        """The names of all states, or of those with a tag, newest first. Opens no state."""
        self._refresh()
        with self._indexing:
            files = sorted(self._index.items(), key=lambda item: (-item[1].changed, item[0]))
        return [name for name, entry in files if tag is None or tag in entry.label.tags]

    def list(self) -> list[StoredState]:
        """All states, newest first, with those that are damaged or of another model."""
        found = []
        for name in self.names():
            with suppress(KeyError):  # deleted meanwhile
                found.append(self.find(name))
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

    def path(self, name: str) -> Path:
        """The file of a state. `KeyError` if there is no such state."""
        self.find(name)
        return self._path(name)

    def change_label(self, name: str, change: Callable[[StateLabel], StateLabel]) -> StoredState:
        """Replaces the label by a changed one. `KeyError` if there is no such state.

        The state's file is locked meanwhile: of two changes at the same time, in any threads or
        processes, the second sees the first.
        """
        try:
            file = self._path(name).open("rb")
        except FileNotFoundError as error:
            raise KeyError(name) from error
        with file:
            with suppress(OSError):  # some network file systems have no locks
                lock(file, wait=True)
            self.find(name)  # it may have expired
            now = _Entry()  # not that of the index: another process may have written since
            self._read_label(name, now)
            self._write_label(name, change(now.label))
            return self.find(name)

    def delete(self, name: str) -> None:
        """`KeyError` if there is no such state."""
        try:
            self._path(name).unlink()
        except FileNotFoundError as error:
            raise KeyError(name) from error
        finally:
            self._forget(name)
        self._path(name, _LABEL).unlink(missing_ok=True)

    def _find(self, name: str) -> StoredState:
        path = self._path(name)
        try:
            entry = self._add(name, path.stat())
        except FileNotFoundError as error:
            self._forget(name)
            raise KeyError(name) from error
        with suppress(OSError):  # it stays as it was read before
            self._read_label(name, entry)
        try:
            described = entry.described or self._describe(name, entry)
        except OSError:  # such as too many open files: the next call reads it again
            return self._damaged(name, entry)
        if not self._evict:  # the notes of the prefix cache are long
            entry.described = described
        return described._replace(label=entry.label)

    def _room(self) -> int:
        return self.max_bytes if self._evict else self.max_bytes - self._nbytes

    def _delete_oldest(self, nbytes: int) -> None:
        """Deletes the least recently used files until at least this many bytes are free."""
        with self._indexing:
            files = sorted(self._index.items(), key=lambda item: item[1].changed)
        for name, entry in files:
            if nbytes <= 0:
                break
            with suppress(KeyError):  # another process deleted it
                self.delete(name)
            nbytes -= entry.nbytes

    def _describe(self, name: str, entry: _Entry) -> StoredState:
        path = self._path(name)
        try:
            config, seen, notes = describe_file(path)
        except (OSError, ValueError) as error:
            if not path.exists():  # deleted meanwhile
                raise KeyError(name) from None
            if isinstance(error, OSError):
                raise
            return self._damaged(name, entry)
        status: Status = "ok" if is_same_config(config, self._config_text) else "other_model"
        return StoredState(name, entry.created, seen, entry.nbytes, notes, status=status)

    def _damaged(self, name: str, entry: _Entry) -> StoredState:
        return StoredState(name, entry.created, [], entry.nbytes, {}, entry.label, "damaged")

    def _path(self, name: str, ending: str = _STATE) -> Path:
        if not name.startswith(self._prefix) or not _NAME.fullmatch(name):
            raise KeyError(name)
        return self.folder / f"{name}{ending}"

    # The index

    def _refresh(self) -> None:
        """Lists the folder. Reads the labels that are new or changed; deletes expired states."""
        with self._indexing:
            states: dict[str, os.stat_result] = {}
            labelled = set()
            with suppress(FileNotFoundError), os.scandir(self.folder) as files:
                for file in files:
                    name, dot, ending = file.name.partition(".")
                    if not name.startswith(self._prefix) or not _NAME.fullmatch(name):
                        continue
                    if dot + ending == _LABEL:
                        labelled.add(name)
                    elif dot + ending == _STATE and file.is_file():
                        with suppress(FileNotFoundError):  # deleted meanwhile
                            states[name] = file.stat()
            for name in self._index.keys() - states.keys():
                self._forget(name)
            expired = []
            for name, status in states.items():
                entry = self._add(name, status)
                if name in labelled or entry.label_changed:
                    with suppress(OSError):  # it stays as it was read before
                        self._read_label(name, entry)
                    if entry.label.is_expired:
                        expired.append(name)
            self._refreshed = time.monotonic()
        for name in expired:
            with suppress(KeyError, OSError):
                self.delete(name)

    def _add(self, name: str, status: os.stat_result) -> _Entry:
        with self._indexing:
            entry = self._index.setdefault(name, _Entry())
            if (entry.changed, entry.nbytes) != (status.st_mtime_ns, status.st_size):
                self._nbytes += status.st_size - entry.nbytes
                entry.changed, entry.created = status.st_mtime_ns, status.st_mtime
                entry.nbytes, entry.described = status.st_size, None
            return entry

    def _forget(self, name: str) -> None:
        with self._indexing:
            entry = self._index.pop(name, None)
            self._nbytes -= 0 if entry is None else entry.nbytes

    # Labels

    def _write_label(self, name: str, label: StateLabel) -> None:
        path = self._path(name, _LABEL)
        if label == NO_LABEL:
            path.unlink(missing_ok=True)
        else:
            with write_aside(path) as aside:
                write_hashed(aside, [json_bytes(label._asdict())], mode=_PRIVATE)
        with self._indexing:
            if name in self._index:  # read it again, even if it was written twice in one tick
                self._index[name].label_changed = 0

    def _read_label(self, name: str, entry: _Entry) -> None:
        """Reads the label again if its file has changed. A damaged one is as if it were absent.

        `OSError` if it cannot be read.
        """
        path = self._path(name, _LABEL)
        try:
            changed = path.stat().st_mtime_ns
            if changed != entry.label_changed:
                entry.label = _to_label(json.loads(path.read_bytes()))
                entry.label_changed = changed
        except (FileNotFoundError, ValueError, RecursionError):
            entry.label, entry.label_changed = NO_LABEL, 0

    # Files of killed processes

    def _remove_unfinished(self) -> None:
        """Removes the temporary files of killed saves.

        Every store holds a shared lock of its folder. If no other process does, all temporary files
        are left over, and all labels without a state. Else those that are an hour old.
        """
        folder = os.open(self.folder, os.O_RDONLY)
        weakref.finalize(self, os.close, folder)
        is_alone = True
        try:
            lock(folder)
        except OSError:  # another process has it, or the file system has no locks
            is_alone = False
        for path in self.folder.glob(f".{self._prefix}*"):
            with suppress(FileNotFoundError):  # it was just renamed
                if is_alone or path.stat().st_mtime < time.time() - _STALE_SECONDS:
                    path.unlink()
        if is_alone:
            for path in self.folder.glob(f"{self._prefix}*{_LABEL}"):
                if not path.with_suffix(_STATE).exists():
                    path.unlink(missing_ok=True)
        with suppress(OSError):
            lock(folder, shared=True, wait=True)


def _to_label(content: object) -> StateLabel:
    match content:
        case {"name": str(name), "tags": [*tags], "expires": None | int() | float() as expires}:
            if all(isinstance(tag, str) for tag in tags):
                return StateLabel(name, (*tags,), expires)
    raise ValueError("this is no label")
