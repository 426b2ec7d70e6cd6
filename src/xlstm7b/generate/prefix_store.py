"""Things kept under the beginnings of texts, found again by the longest that a text begins with."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xlstm7b.generate.states import TextState

_BLOCK = 64  # tokens
_ID_BYTES = 4

Key = tuple[bytes, bytes]


def _digest(before: bytes, block: bytes) -> bytes:
    return hashlib.blake2b(before + block, digest_size=16).digest()


class TokenChain:
    """A text's ids, with a hash at the end of every block that covers all before it.

    So the key of any beginning of the text costs nothing.
    """

    def __init__(self, ids: Sequence[int], before: "TokenChain | None" = None) -> None:
        self._bytes: bytes = (before._bytes if before else b"") + array("i", ids).tobytes()
        self._digests: list[bytes] = [*before._digests] if before else [b""]
        size = _BLOCK * _ID_BYTES
        for start in range(size * (len(self._digests) - 1), len(self._bytes) - size + 1, size):
            self._digests.append(_digest(self._digests[-1], self._bytes[start : start + size]))

    @classmethod
    def from_bytes(cls, start: bytes) -> "TokenChain":
        """The chain whose whole `start` this is."""
        ids = array("i")
        ids.frombytes(start)
        return cls(ids)

    def __len__(self) -> int:
        return len(self._bytes) // _ID_BYTES

    def start(self, length: int) -> bytes:
        """The first ids, as bytes."""
        return self._bytes[: length * _ID_BYTES]

    def key(self, length: int) -> Key:
        """What the first ids are stored under: their blocks' hash, and the ids after these."""
        blocks = length // _BLOCK
        return self._digests[blocks], self._bytes[blocks * _BLOCK * _ID_BYTES : length * _ID_BYTES]

    def blocks(self, longer_than: int) -> Iterator[tuple[bytes, range]]:
        """Lengths of beginnings, the longest first, in groups that share their blocks' hash."""
        for blocks in range(len(self._digests) - 1, longer_than // _BLOCK - 1, -1):
            last = min(len(self), (blocks + 1) * _BLOCK - 1)
            yield self._digests[blocks], range(last, max(longer_than, blocks * _BLOCK - 1), -1)


class Beginnings:
    """The texts of late, to tell where a text parts from them: others may part there again."""

    def __init__(self, most_digests: int = 1 << 16) -> None:
        self._most_digests = most_digests
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def meet(self, chain: TokenChain) -> int:
        """How much of a text, in whole blocks, a different one began with before."""
        blocks = [digest for digest, _ in chain.blocks(_BLOCK)]
        whole = _digest(*chain.key(len(chain)))
        known = 0
        if whole not in self._digests:
            met = (place for place, digest in enumerate(blocks) if digest in self._digests)
            known = _BLOCK * (len(blocks) - next(met, len(blocks)))
        for digest in (whole, *blocks):
            self._digests[digest] = None
            self._digests.move_to_end(digest)  # a text's first blocks last: they go last, too
        while len(self._digests) > self._most_digests:
            self._digests.popitem(last=False)
        return known


@dataclass(frozen=True, eq=False)
class Stored:
    """The state at the end of a text's beginning, or in a file where it is None."""

    key: Key
    start: bytes  # all the ids: a hash alone is not trusted
    state: TextState | None
    nbytes: int

    def __len__(self) -> int:
        return len(self.start) // _ID_BYTES


class PrefixStore:
    """At most so many bytes of states; what was not used for longest goes first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self.nbytes = most_bytes, 0
        self._all: OrderedDict[Key, Stored] = OrderedDict()
        self._digests: dict[bytes, int] = {}  # how many are stored under each

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, key: Key) -> bool:
        return key in self._all

    def fits(self, stored: Stored) -> bool:
        """Whether there is room for it, if for nothing else."""
        return stored.nbytes <= self._most_bytes

    def add(self, stored: Stored) -> list[Stored]:
        """Takes one in; returns those that had to go for it, which may be itself."""
        self.remove(stored.key)
        if not self.fits(stored):
            return [stored]
        self._all[stored.key] = stored
        self._digests[stored.key[0]] = self._digests.get(stored.key[0], 0) + 1
        self.nbytes += stored.nbytes
        gone = []
        while self.nbytes > self._most_bytes:
            gone.append(next(iter(self._all.values())))
            self.remove(gone[-1].key)
        return gone

    def remove(self, key: Key) -> None:
        stored = self._all.pop(key, None)
        if stored is not None:
            self.nbytes -= stored.nbytes
            self._digests[key[0]] -= 1
            if not self._digests[key[0]]:
                del self._digests[key[0]]

    def touch(self, key: Key) -> None:
        """Counts one as used."""
        self._all.move_to_end(key)

    def longest(self, chain: TokenChain, longer_than: int) -> Stored | None:
        """What is stored under the longest beginning of a text."""
        for digest, lengths in chain.blocks(longer_than):
            if digest in self._digests:
                for length in lengths:
                    stored = self._all.get(chain.key(length))
                    if stored is not None and stored.start == chain.start(length):
                        return stored
        return None
