"""The prefix cache: states after prompt prefixes, in device memory, in host memory and on disk."""

import hashlib
import json
import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

import torch

from xlstm7b.generate.request import HashedTokens, PrefixKey
from xlstm7b.generate.state import SavedState, StateStore, StoreFull

_LOG = logging.getLogger(__name__)
_MAX_UNWRITTEN = 2  # states on their way to the disk; more are dropped
_PIECE = 1 << 18  # numbers that a fingerprint multiplies at a time: a CPU's cache holds them

Level = Literal["device", "host", "disk"]
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Entry(Generic[Value]):
    """A stored prefix."""

    key: PrefixKey
    prefix: bytes  # all ids, compared on a match: a hash alone is not trusted
    value: Value
    nbytes: int
    salt: bytes = b""  # of the tokens

    def __len__(self) -> int:
        return len(self.prefix) // 4


class PrefixIndex(Generic[Value]):
    """Entries of at most `max_bytes` in all; the least recently used are evicted first.

    An ordinary LRU cache is not enough: entries have sizes, evicted entries move to another level,
    and a lookup finds the longest stored prefix.
    """

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes, self.nbytes = max_bytes, 0
        self._entries: OrderedDict[PrefixKey, Entry[Value]] = OrderedDict()
        self._digests: dict[bytes, int] = {}  # number of entries with each hash in their key

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry[Value]]:
        return iter([*self._entries.values()])

    def fits(self, entry: Entry[Value]) -> bool:
        """True if the entry alone is not too large."""
        return entry.nbytes <= self._max_bytes

    def add(self, entry: Entry[Value]) -> list[Entry[Value]]:
        """Adds an entry; returns the evicted ones, which may be the entry itself."""
        self.remove(entry.key)
        if not self.fits(entry):
            return [entry]
        self._entries[entry.key] = entry
        self._digests[entry.key[0]] = self._digests.get(entry.key[0], 0) + 1
        self.nbytes += entry.nbytes
        evicted = []
        while self.nbytes > self._max_bytes:
            evicted.append(next(iter(self._entries.values())))
            self.remove(evicted[-1].key)
        return evicted

    def remove(self, key: PrefixKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes
            self._digests[key[0]] -= 1
            if not self._digests[key[0]]:
                del self._digests[key[0]]

    def touch(self, key: PrefixKey) -> None:
        """Marks an entry as used."""
        self._entries.move_to_end(key)

    def longest(self, tokens: HashedTokens, longer_than: int) -> Entry[Value] | None:
        """The entry of the longest stored prefix of `tokens` above this length."""
        for length in tokens.lengths(longer_than, self._digests.keys()):
            entry = self._entries.get(tokens.key(length))
            if entry is None or entry.salt != tokens.salt:
                continue
            if entry.prefix == tokens.prefix_bytes(length):
                return entry
        return None


class PrefixCache:
    """States by prefix in up to three levels of limited size.

    A state that is used moves to the device level. A state that is evicted moves down one level.
    """

    def __init__(
        self,
        device: torch.device,
        device_bytes: int,
        host_bytes: int = 0,
        disk: "DiskLevel | None" = None,
    ) -> None:
        self._device, self._disk = device, disk
        self._on_device = PrefixIndex[SavedState](device_bytes)
        self._on_host = PrefixIndex[SavedState](host_bytes)
        self.hits: dict[Level, int] = {"device": 0, "host": 0, "disk": 0}

    @property
    def nbytes(self) -> dict[Level, int]:
        """Bytes in use, by level."""
        on_disk = 0 if self._disk is None else self._disk.nbytes
        return {"device": self._on_device.nbytes, "host": self._on_host.nbytes, "disk": on_disk}

    def add(self, tokens: HashedTokens, length: int, state: SavedState) -> None:
        """Stores the state after the first `length` tokens. It must not be written to later."""
        prefix = tokens.prefix_bytes(length)
        self._on_host.remove(tokens.key(length))
        nbytes = state.nbytes + len(prefix)
        self._put(Entry(tokens.key(length), prefix, state, nbytes, tokens.salt))

    def longest(self, tokens: HashedTokens, longer_than: int) -> tuple[int, SavedState] | None:
        """Length and state of the longest stored prefix above `longer_than` tokens."""
        on_device = self._on_device.longest(tokens, longer_than)
        on_host = self._on_host.longest(tokens, len(on_device) if on_device else longer_than)
        found = on_host or on_device
        level: Level = "host" if on_host else "device"
        if self._disk is not None:
            loaded = self._disk.longest(tokens, len(found) if found else longer_than)
            if loaded is not None:
                found, level = loaded, "disk"
        if found is None:
            return None
        self.hits[level] += 1
        if level == "device":
            self._on_device.touch(found.key)
            return len(found), found.value
        state = found.value.to(self._device, non_blocking=True)
        self._on_host.remove(found.key)
        self._put(replace(found, value=state))
        return len(found), state

    def close(self) -> None:
        """Waits for states that are being written to disk."""
        if self._disk is not None:
            self._disk.close()

    def _put(self, entry: Entry[SavedState]) -> None:
        for evicted in self._on_device.add(entry):
            if self._disk is None and not self._on_host.fits(evicted):
                continue
            on_host = replace(evicted, value=evicted.value.to("cpu", non_blocking=True))
            for dropped in self._on_host.add(on_host):
                if self._disk is not None:
                    self._disk.save(dropped)


class DiskLevel:
    """The cache's files. Written in the background; they are found again after a restart.

    Not thread-safe: the engine's thread calls it. `fingerprint` identifies the weights, because
    states of other weights must not be used.
    """

    def __init__(self, store: StateStore, fingerprint: bytes, device: torch.device) -> None:
        self._store, self._fingerprint, self._device = store, fingerprint, device
        self._index = PrefixIndex[str](float("inf"))  # the store limits the bytes
        # The first token, which all prompts have, is not part of a prefix.
        self._first_tokens = int(store.config.force_bos_token_insert)
        self._writer = ThreadPoolExecutor(1, "state-writer")
        self._unwritten: set[str] = set()
        self._written: deque[tuple[Entry[SavedState], int]] = deque()
        for stored in reversed(store.list()):
            try:
                prefix = bytes.fromhex(stored.notes.get("prefix", ""))
                salt = bytes.fromhex(stored.notes.get("salt", ""))
                tokens = HashedTokens.from_bytes(prefix, salt)
            except ValueError:
                continue
            if stored.name == self._name(prefix, salt):
                key = tokens.key(len(tokens))
                self._index.add(Entry(key, prefix, stored.name, stored.nbytes, salt))

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def longest(self, tokens: HashedTokens, longer_than: int) -> Entry[SavedState] | None:
        """The longest prefix whose file can be loaded. Files that fail their check are deleted."""
        self._collect()
        unread, found = [], None
        while found is None and (entry := self._index.longest(tokens, longer_than)) is not None:
            state = None
            try:
                state = self._store.load(entry.value, device=self._device)
            except OSError as error:  # such as too many open files: later it may be read
                _LOG.warning("a cached state cannot be read: %s", error)
                self._index.remove(entry.key)
                unread.append(entry)
                continue
            except KeyError:  # evicted, or deleted by another process
                pass
            except ValueError as error:
                _LOG.warning("a cached state cannot be used: %s", error)
            if state is not None and state.tokens_seen == [len(entry) + self._first_tokens]:
                self._index.touch(entry.key)
                nbytes = state.nbytes + len(entry.prefix)
                found = Entry(entry.key, entry.prefix, state, nbytes, entry.salt)
            else:
                self._forget(entry)
        for entry in unread:
            self._index.add(entry)
        return found

    def save(self, entry: Entry[SavedState]) -> None:
        """Writes a state in the background. It is found once the file is complete."""
        self._collect()
        name = self._name(entry.prefix, entry.salt)
        if entry.key in self._index:
            self._index.touch(entry.key)
        elif name not in self._unwritten and len(self._unwritten) < _MAX_UNWRITTEN:
            self._unwritten.add(name)
            copied = None
            if self._device.type == "cuda":  # the copy to the host may still be running
                copied = torch.cuda.Event()
                copied.record()
            self._writer.submit(self._write, name, entry, copied)

    def close(self) -> None:
        """Waits for files that are being written."""
        self._writer.shutdown()
        self._collect()

    def _write(self, name: str, entry: Entry[SavedState], copied: torch.cuda.Event | None) -> None:
        """Runs in the writer's thread."""
        nbytes = 0
        try:
            if copied is not None:
                copied.synchronize()
            notes = {"prefix": entry.prefix.hex(), "salt": entry.salt.hex()}
            nbytes = self._store.save(name, entry.value, **notes).nbytes
        except StoreFull as error:
            _LOG.warning("a cached state is dropped: %s", error)
        except Exception:
            _LOG.exception("a cached state could not be written to %s", self._store.folder)
        self._written.append((entry, nbytes))

    def _collect(self) -> None:
        """Adds files that were written since the last call, and drops evicted ones."""
        while self._written:
            entry, nbytes = self._written.popleft()
            name = self._name(entry.prefix, entry.salt)
            self._unwritten.discard(name)
            if nbytes:
                self._index.add(Entry(entry.key, entry.prefix, name, nbytes, entry.salt))
                for other in self._index:
                    if not (self._store.folder / f"{other.value}.safetensors").exists():
                        self._index.remove(other.key)

    def _forget(self, entry: Entry[str]) -> None:
        self._index.remove(entry.key)
        with suppress(KeyError):
            self._store.delete(entry.value)

    def _name(self, prefix: bytes, salt: bytes) -> str:
        return f"prefix-{hashlib.sha256(self._fingerprint + salt + prefix).hexdigest()}"


def weights_fingerprint(
    description: object, weights: Iterable[torch.Tensor], state_dtype: torch.dtype
) -> bytes:
    """A hash of a config, a dtype and every bit of all weights. It is the same on all devices.

    Each piece of a weight is reduced on its device to Σ kᵢ xᵢ mod 2⁶⁴, with odd numbers kᵢ and its
    bits as integers xᵢ: one pass over memory, and exact in any order of the sum.
    """
    found = hashlib.sha256(json.dumps([description, str(state_dtype)]).encode())
    factors: dict[torch.device, torch.Tensor] = {}
    for weight in weights:
        if weight.device not in factors:
            factors[weight.device] = _factors(weight.device)
        flat = weight.detach().flatten()
        if flat.storage_offset() * flat.itemsize % 4:
            flat = flat.clone()
        numbers = flat.view(torch.uint8 if flat.nbytes % 4 else torch.int32)
        sums = [
            (piece * factors[weight.device][: len(piece)]).sum() for piece in numbers.split(_PIECE)
        ]
        found.update(f"{weight.dtype} {[*weight.shape]}".encode())
        found.update(torch.stack(sums).cpu().numpy().tobytes())
    return found.digest()


def _factors(device: torch.device) -> torch.Tensor:
    """Odd numbers that look random, int64 [_PIECE]. Products wrap around."""
    numbers = torch.arange(1, _PIECE + 1, device=device) * -0x61C8864680B583EB
    numbers = (numbers ^ (numbers >> 31)) * -0x40A7B892E31B1A47
    return (numbers ^ (numbers >> 29)) | 1
