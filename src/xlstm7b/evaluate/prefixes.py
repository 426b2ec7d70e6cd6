"""What contexts share, as a tree: each shared beginning is to be read once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]

# A shared piece read by itself costs the model a pass, and what follows it goes in smaller batches.
# So it has to be this long, and to save this many tokens; else each context reads it again.
SHORTEST_SHARED = 32
LEAST_SAVED = 512


class Node(NamedTuple):
    """Contexts first … last − 1 of the tree's order, which agree in their first `end` tokens.

    The first of them may end there; a leaf is one context, and all of it.
    """

    first: int
    last: int
    end: int

    @property
    def is_leaf(self) -> bool:
        return self.last - self.first == 1


class PrefixTree:
    """A path-compressed tree over token sequences, kept as nothing but their sorted order.

    `asked[i]` are the places of contexts[i] among those given: equal ones are one.
    """

    def __init__(self, contexts: Sequence[Sequence[int]]) -> None:
        # Big-endian bytes compare as their numbers do, and fast.
        places: dict[bytes, list[int]] = {}
        for place, context in enumerate(contexts):
            places.setdefault(np.array(context, dtype=">u4").tobytes(), []).append(place)
        ordered = sorted(places.items())
        self.contexts: list[Ids] = [np.frombuffer(key, dtype=">u4") for key, _ in ordered]
        self.asked = [asked for _, asked in ordered]

    @property
    def root(self) -> Node:
        return Node(0, len(self.contexts), 0)

    def ends_at(self, node: Node) -> bool:
        """Whether the node's first context is all read at its end."""
        return node.first < node.last and len(self.contexts[node.first]) == node.end

    def tokens(self, node: Node, start: int) -> list[int]:
        """The tokens on the way to a node, less the first `start`."""
        ids: list[int] = self.contexts[node.first][start : node.end].tolist()
        return ids

    def children(self, node: Node) -> list[Node]:
        """Leaves, and nodes that are worth reading: they share enough more than this one does."""
        return list(self._split(node.first + self.ends_at(node), node.last, node.end, node.end))

    def leaves(self, node: Node) -> list[Node]:
        """Every context below a node, as a child of it."""
        first = node.first + self.ends_at(node)
        return [Node(n, n + 1, len(self.contexts[n])) for n in range(first, node.last)]

    def _split(self, first: int, last: int, read: int, at: int) -> Iterator[Node]:
        """Parts by token `at` of a range that agrees up to there, below a node of `read` tokens."""
        while first < last:
            end = first + 1
            while end < last and self.contexts[end][at] == self.contexts[first][at]:
                end += 1
            common = _common(self.contexts[first], self.contexts[end - 1])
            shared, others = common - read, end - first - 1
            if not others or (shared >= SHORTEST_SHARED and shared * others >= LEAST_SAVED):
                yield Node(first, end, common)
            else:
                if len(self.contexts[first]) == common:
                    yield Node(first, first + 1, common)
                    first += 1
                yield from self._split(first, end, read, common)
            first = end


def _common(a: Ids, b: Ids) -> int:
    """How many tokens two sequences share from the beginning."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
