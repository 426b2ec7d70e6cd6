"""Prefixes that are worth reading only once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlstm7b.evaluate import prefix_tree
from xlstm7b.evaluate.prefix_tree import Node, PrefixTree

# Few different words: contexts share prefixes, are prefixes of one another, and occur twice.
WORDS = st.sampled_from([[5], [5, 6], [7] * 9, [8, 9, 10, 11] * 4])
CONTEXTS = st.lists(WORDS, max_size=5).map(
    lambda words: [token for word in words for token in word]
)


@given(st.lists(CONTEXTS, min_size=1, max_size=20), st.integers(1, 12), st.integers(1, 30))
def test_a_tree_contains_every_sequence_once(
    contexts: list[list[int]], shortest: int, saved: int
) -> None:
    sequences = [[0, *context] for context in contexts]
    tree = PrefixTree(sequences)
    found: dict[int, list[int]] = {}

    def visit(node: Node, path: list[int]) -> None:
        if node.end and tree.ends_at(node):
            found.update(dict.fromkeys(tree.indices[node.first], path))
        for child in tree.children(node):
            segment = tree.tokens(child, node.end)
            saves = len(segment) * (child.last - child.first - 1)
            assert child.is_leaf or (len(segment) >= shortest and saves >= saved)
            visit(child, path + segment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "MIN_SHARED_TOKENS", shortest)
        patch.setattr(prefix_tree, "MIN_SAVED_TOKENS", saved)
        visit(tree.root, [])
    assert [found[index] for index in range(len(sequences))] == sequences


@pytest.mark.parametrize(
    ("shared", "count", "is_shared"),
    [(32, 17, True), (32, 16, False), (31, 40, False), (512, 2, True), (511, 2, False)],
)
def test_a_prefix_must_be_long_and_save_enough(shared: int, count: int, is_shared: bool) -> None:
    """At least 32 tokens, and 512 in all, less those that are read."""
    tree = PrefixTree([[*range(300, 300 + shared), n] for n in range(count)])
    children = tree.children(tree.root)
    leaves = [Node(n, n + 1, shared + 1) for n in range(count)]
    assert children == ([Node(0, count, shared)] if is_shared else leaves)
    assert tree.leaves(tree.root) == leaves
    if is_shared:
        assert not children[0].is_leaf
        assert tree.children(children[0]) == leaves


def test_prefixes_are_shared_within_prefixes() -> None:
    """40 questions of two tasks, after the same examples. Some are asked twice, one is empty."""
    examples, questions = [7] * 64, [[task] * 50 + [n + 300] for task in (1, 2) for n in range(20)]
    sequences = [[*examples, *question] for question in questions] + [examples, examples]
    tree = PrefixTree([*sequences, sequences[3]])
    (node,) = tree.children(tree.root)
    assert node == Node(0, 41, 64)
    assert tree.ends_at(node)
    assert tree.indices[node.first] == [40, 41]
    assert not tree.ends_at(tree.root)
    one, two = tree.children(node)
    assert (one, two) == (Node(1, 21, 114), Node(21, 41, 114))
    assert tree.tokens(one, node.end) == [1] * 50
    assert len(tree.children(two)) == 20
    assert tree.leaves(node)[0] == Node(1, 2, 115)
    assert tree.indices[4] == [3, 42]


def test_nothing_to_read() -> None:
    tree = PrefixTree([])
    assert tree.children(tree.root) == []
    assert not tree.ends_at(tree.root)
