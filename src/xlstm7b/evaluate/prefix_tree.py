"""Prefix tree over token sequences. It finds the prefixes that are worth reading only once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Reading a shared prefix separately costs one more forward pass, and leaves smaller batches for
# the rest. So a prefix must be this long and save this many tokens in all. Otherwise each sequence
# reads it again.
MIN_SHARED_TOKENS = 32
MIN_SAVED_TOKENS = 512

_Tokens = NDArray[np.uint32]


class Node(NamedTuple):
    """Sequences first … last − 1 of the sorted order. They share their first `end` tokens.

    The first of them may end there. A leaf is one whole sequence.
    """

    first: int
    last: int
    end: int

    @property
    def is_leaf(self) -> bool:
        return self.last - self.first == 1


class PrefixTree:
    """Path-compressed tree, stored as the sorted list of distinct sequences.

    `indices[i]` lists where sequences[i] occurs in the input: equal sequences are stored once.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        indices: dict[bytes, list[int]] = {}
        for index, tokens in enumerate(sequences):
            # Big-endian bytes sort like the numbers, and sorting bytes is fast.
            indices.setdefault(np.array(tokens, dtype=">u4").tobytes(), []).append(index)
        ordered = sorted(indices.items())
        self.sequences: list[_Tokens] = [np.frombuffer(key, dtype=">u4") for key, _ in ordered]
        self.indices = [found for _, found in ordered]

    @property
    def root(self) -> Node:
        return Node(0, len(self.sequences), 0)

    def ends_at(self, node: Node) -> bool:
        """True if the node's first sequence ends at the node."""
        return node.first < node.last and len(self.sequences[node.first]) == node.end

    def tokens(self, node: Node, start: int) -> list[int]:
        """The node's tokens from position `start` on."""
        tokens: list[int] = self.sequences[node.first][start : node.end].tolist()
        return tokens

    def children(self, node: Node) -> list[Node]:
        """Leaves, and inner nodes whose additional shared tokens are worth a pass of their own."""
        return list(self._split(node.first + self.ends_at(node), node.last, node.end, node.end))

    def leaves(self, node: Node) -> list[Node]:
        """Every sequence below a node, as a direct child: no further sharing."""
        first = node.first + self.ends_at(node)
        return [Node(n, n + 1, len(self.sequences[n])) for n in range(first, node.last)]

    def _split(self, first: int, last: int, read: int, position: int) -> Iterator[Node]:
        """Children of a node of `read` tokens among sequences that agree up to `position`."""
        while first < last:
            token, end = self.sequences[first][position], first + 1
            while end < last and self.sequences[end][position] == token:
                end += 1
            # Sorted order: what the first and the last share, all between them share too.
            common = _common_length(self.sequences[first], self.sequences[end - 1])
            shared, others = common - read, end - first - 1
            saves = shared >= MIN_SHARED_TOKENS and shared * others >= MIN_SAVED_TOKENS
            if not others or saves:
                yield Node(first, end, common)
            else:
                if len(self.sequences[first]) == common:
                    yield Node(first, first + 1, common)
                    first += 1
                yield from self._split(first, end, read, common)
            first = end


def _common_length(a: _Tokens, b: _Tokens) -> int:
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
