"""Packing: documents on disk to windows of the context length, computed by index alone.

The model reads a document as [first token, tokens…] and, after its last token, predicts the end of
text. On disk the end of text comes after each document, so the tokens on disk are exactly the
targets: targets are slices of the shards, and inputs are the targets shifted right by one, with the
first token at the start of every document. So with both ways of packing each token on disk is a
target exactly once per epoch, and its loss mask is the byte stored with it. (The mask of an end of
text belongs to the document that it ends.)

A model without a first token reads a document as [tokens…]. The position before them, where the
first token would be, stays: its input is an end of text, its target does not count in the loss, and
the state is reset after it. So a document's first token is never a target, as in generation, where
it is always given.
"""

from bisect import bisect_left, insort
from typing import NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from xlstm7b.data import Packing
from xlstm7b.data.shards import ShardFolder

_PAGE_WINDOWS = 8192  # of 8192 two-byte tokens each: random reads within 134 MB
Numbers = NDArray[np.uint32 | np.int64]
Lengths = NDArray[np.int64]
Pieces = tuple[Numbers, Lengths, Lengths]  # documents; first and end token of each piece


class Sample(NamedTuple):
    """One window of T positions, or a batch of them."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    resets: NDArray[np.bool_]  # True where the state is reset before this token
    mask: NDArray[np.bool_]  # True where the target counts in the loss

    @classmethod
    def empty(cls, *shape: int) -> "Sample":
        """Windows to be filled. Their tokens and targets are arbitrary."""
        return cls(
            np.empty(shape, np.int64),
            np.empty(shape, np.int64),
            np.zeros(shape, np.bool_),
            np.zeros(shape, np.bool_),
        )


class PackedDataset:
    """Endless samples from a folder. `sample(index)` depends on nothing but the arguments.

    "windows": an epoch is all documents in an order drawn from (seed, epoch), concatenated; epochs
    are concatenated too. Window w predicts tokens w·T … w·T + T − 1 of that. Windows are also
    shuffled within pages of 8192 windows (or an epoch, if shorter), so that one long document does
    not fill a batch. A window that begins inside a document has no reset at its first position: its
    state is zero anyway.

    "best-fit": few documents are cut. Documents longer than T are split every T tokens; then all
    pieces are placed into windows of T by best-fit decreasing. The rest of a window is padding
    (mask 0, a reset where it begins). Every epoch has the same windows in another order. A
    piece sees nothing that is before it in its window, not even the start of its own document.

    "documents": each document has a window of its own, and the rest of the window is padding.
    Documents longer than T are split every T tokens, and each piece is read as a document: it
    begins with the first token (without one, with an end of text). No state is reset before the
    padding, so that a window may start from any state.

    `first_token` is the model's, None if it has none. `seed=None` keeps the order on disk. Tokens
    are copied once, from the memory maps into samples.
    The order of an epoch takes 12 bytes per document (two epochs are kept where they meet);
    "best-fit" takes 24 bytes per piece.
    """

    def __init__(
        self,
        folder: ShardFolder,
        *,
        context_length: int,
        seed: int | None,
        packing: Packing = "windows",
        first_token: int | None = 0,
        padding_token: int = 1,
    ) -> None:
        if context_length < 1:
            raise ValueError(f"the context length must be at least 1, not {context_length}")
        if seed is not None and not 0 <= seed < 2**64:
            raise ValueError(f"the seed must be from 0 to 2**64 - 1, not {seed}")
        if packing not in get_args(Packing):
            raise ValueError(
                f'packing must be "windows", "best-fit" or "documents", not {packing!r}'
            )
        counts = [len(shard.ends) for shard in folder.shards]
        self._firsts = np.cumsum([0, *counts[:-1]])  # each shard's first document
        self._shards, self._folder = folder.shards, folder.path
        self._vocab_size = folder.vocab_size or 1 << 32
        self.context_length, self.padding_token = context_length, padding_token
        self._has_first = first_token is not None
        self._first_input = folder.eos_token_id if first_token is None else first_token
        self._is_alone = packing == "documents"
        self._layout: _Layout
        if packing == "windows":
            self._layout = _Windows(folder, context_length, seed)
        else:
            self._layout = _Pieces(folder, context_length, seed, join=not self._is_alone)

    @property
    def windows(self) -> int:
        """The windows of an epoch. The last one may reach into the next, with "windows"."""
        return self._layout.windows

    def sample(self, index: int) -> Sample:
        """Sample `index` ≥ 0."""
        sample = Sample.empty(self.context_length)
        self.fill(index, sample)
        return sample

    def fill(self, index: int, into: Sample) -> None:
        """Writes sample `index`. An id above the vocabulary is a `ValueError`.

        Nothing but `resets` and `mask`, which are False, needs to be in `into`.
        """
        documents, starts, stops = self._layout.pieces(index)
        shards, offsets = self._locate(documents, starts)
        # First position and end of each piece in the window.
        lengths = stops - starts
        ends = np.cumsum(lengths)
        firsts = ends - lengths
        filled = int(ends[-1])
        into.mask[:filled] = True
        opened = self._shards
        for number, offset, first, end in zip(
            shards.tolist(), offsets.tolist(), firsts.tolist(), ends.tolist(), strict=True
        ):
            shard, span = opened[number], slice(offset, offset + end - first)
            into.targets[first:end] = shard.tokens[span]
            if shard.mask is not None:
                into.mask[first:end] = shard.mask[span]
        if into.targets[into.targets[:filled].argmax()] >= self._vocab_size:  # max takes longer
            raise self._damaged(index)
        into.tokens[1:filled] = into.targets[: filled - 1]
        into.tokens[filled:] = into.targets[filled:] = self.padding_token
        into.tokens[firsts] = self._first_input
        into.resets[filled : filled + 1] = True
        if not self._has_first:
            into.mask[firsts[starts == 0]] = False
        if self._is_alone:
            return
        for cut in np.flatnonzero(starts):
            before = self._shards[int(shards[cut])].tokens[offsets[cut] - 1]
            if before >= self._vocab_size:
                raise self._damaged(index)
            into.tokens[firsts[cut]] = before
        into.resets[firsts] = (starts == 0) | (firsts > 0)
        if not self._has_first:
            outside = firsts[starts == 0]  # the positions before documents
            into.resets[outside[outside + 1 < self.context_length] + 1] = True

    def _damaged(self, index: int) -> ValueError:
        """The error for sample `index`, which holds an id above the vocabulary."""
        documents, starts, stops = self._layout.pieces(index)
        shards, offsets = self._locate(documents, starts)
        for number, offset, start, stop in zip(shards, offsets, starts, stops, strict=True):
            first = offset - (start > 0)  # the token before a piece is read too
            shard = self._shards[int(number)]
            piece = shard.tokens[first : offset + stop - start]
            if (largest := piece.max()) >= self._vocab_size:
                break
        return ValueError(
            f"{shard.path} is damaged: token {first + piece.argmax()} is the id {largest}, but the "
            f"ids of {self._folder} end at {self._vocab_size - 1}; "
            f"check it with `xlstm7b prepare --verify {self._folder}`"
        )

    def _locate(self, documents: Numbers, starts: Lengths) -> tuple[NDArray[np.int64], Lengths]:
        """The shard of each piece, and its offset there."""
        shards = np.searchsorted(self._firsts, documents, side="right") - 1
        opened = self._shards
        offsets = starts + [
            opened[shard].ends.item(document - 1) if document else 0
            for shard, document in zip(
                shards.tolist(), (documents - self._firsts[shards]).tolist(), strict=True
            )
        ]
        return shards, offsets


class _Layout(Protocol):
    windows: int  # in an epoch

    def pieces(self, index: int) -> Pieces:
        """The pieces of documents in window `index`, in order."""


class _Epoch(NamedTuple):
    documents: Numbers
    ends: NDArray[np.int64]


class _Windows:
    """Documents concatenated in each epoch's order."""

    def __init__(self, folder: ShardFolder, context_length: int, seed: int | None) -> None:
        self._folder, self._context_length, self._seed = folder, context_length, seed
        self._epoch_length = folder.tokens
        self.windows = -(-self._epoch_length // context_length)
        self._epochs: dict[int, _Epoch] = {}
        self._page_size = max(1, min(_PAGE_WINDOWS, self._epoch_length // context_length))
        self._page, self._order = -1, permutation(0, None, 0)

    def pieces(self, index: int) -> Pieces:
        page, slot = divmod(index, self._page_size)
        if page != self._page:
            # Numbers from 2^63 on, which no epoch has.
            self._order = permutation(self._page_size, self._seed, 2**63 + page)
            self._page = page
        window = page * self._page_size + int(self._order[slot])
        number, offset = divmod(window * self._context_length, self._epoch_length)
        missing = self._context_length
        parts = []
        while missing:
            documents, ends = self._epoch(number)
            stop = min(offset + missing, self._epoch_length)
            first = np.searchsorted(ends, offset, side="right")
            last = np.searchsorted(ends, stop) + 1
            begins = np.concatenate(
                [ends[first - 1 : first] if first else [0], ends[first : last - 1]]
            )
            starts = np.maximum(offset - begins, 0)
            stops = np.minimum(ends[first:last], stop) - begins
            parts.append((documents[first:last], starts, stops))
            missing -= stop - offset
            number, offset = number + 1, 0
        if len(parts) == 1:
            return parts[0]
        documents, starts, stops = map(np.concatenate, zip(*parts, strict=True))
        return documents, starts, stops

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            # A window may reach into the next epoch, and shuffled windows go back and forth there.
            self._epochs = {n: epoch for n, epoch in self._epochs.items() if abs(n - number) == 1}
            lengths = _lengths(self._folder)
            documents = permutation(len(lengths), self._seed, number)
            self._epochs[number] = _Epoch(documents, np.cumsum(lengths[documents]))
        return self._epochs[number]


class _Pieces:
    """Whole documents, where they fit. With `join`, several in one window."""

    def __init__(
        self, folder: ShardFolder, context_length: int, seed: int | None, *, join: bool
    ) -> None:
        self._seed = seed
        lengths = _lengths(folder)
        counts = -(-lengths // context_length)
        documents = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = number * context_length
        stops = np.minimum(starts + context_length, lengths[documents])
        windows = np.arange(len(documents))
        if join:
            windows = best_fit_decreasing(stops - starts, context_length)
        order = np.argsort(windows, kind="stable")
        self._pieces = documents[order], starts[order], stops[order]
        self.windows = int(windows.max()) + 1
        self._edges = np.searchsorted(windows[order], np.arange(self.windows + 1))
        self._epoch, self._order = -1, permutation(0, None, 0)

    def pieces(self, index: int) -> Pieces:
        epoch, slot = divmod(index, self.windows)
        if epoch != self._epoch:
            self._order = permutation(self.windows, self._seed, epoch)
            self._epoch = epoch
        window = int(self._order[slot])
        documents, starts, stops = self._pieces
        inside = slice(self._edges[window], self._edges[window + 1])
        return documents[inside], starts[inside], stops[inside]


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The window of each piece: longest first, each into the fullest window that has room.

    Pieces of equal length keep their order. A piece costs a search among at most `capacity` rooms.
    """
    windows = np.empty(len(lengths), np.int64)
    opened = 0
    rooms: list[int] = []  # sorted: the rooms that open windows have
    open_windows: dict[int, list[int]] = {}  # by room
    order = np.argsort(-lengths, kind="stable")
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            window, room = opened, capacity
            opened += 1
        else:
            room = rooms[at]
            window = open_windows[room].pop()
            if not open_windows[room]:
                del rooms[at], open_windows[room]
        windows[piece] = window
        room -= length
        if room in open_windows:
            open_windows[room].append(window)
        elif room:
            open_windows[room] = [window]
            insort(rooms, room)
    return windows


def permutation(count: int, seed: int | None, epoch: int) -> Numbers:
    """0 … count − 1 in an order drawn from (seed, epoch); without a seed, in order.

    It sorts random words that have the number in their low bits. NumPy guarantees the words of
    Philox for all versions and machines, but not the result of its own `permutation`.
    """
    numbers = np.arange(count, dtype=np.uint64)
    if seed is not None:
        low = np.uint64((1 << count.bit_length()) - 1)
        words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
        words &= ~low
        numbers |= words
        numbers.sort()
        numbers &= low
    return numbers.astype(np.uint32 if count < 2**32 else np.int64)


def _lengths(folder: ShardFolder) -> Lengths:
    return np.concatenate([np.diff(shard.ends, prepend=0) for shard in folder.shards])
