"""How texts of many lengths go through a model together, with little padding."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def in_batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def pieces(lengths: Sequence[int], tokens: int) -> Iterator[tuple[int, int, list[int]]]:
    """Cuts rows, the longest first, into pieces of so many tokens in all.

    Each is how many rows still have some, where they are, and how much of each is taken.
    """
    start = 0
    while lengths and start < lengths[0]:
        count = sum(length > start for length in lengths)
        size = min(max(1, tokens // count), lengths[0] - start)
        yield count, start, [min(size, length - start) for length in lengths[:count]]
        start += size


def pack(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Places of what has a length, laid out over rows that end close together, longest first."""
    packed: list[list[int]] = [[] for _ in range(rows)]
    filled = [0] * rows
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if lengths[place]:
            shortest = filled.index(min(filled))
            packed[shortest].append(place)
            filled[shortest] += lengths[place]
    order = sorted((row for row in range(rows) if packed[row]), key=lambda row: -filled[row])
    return [packed[row] for row in order]
