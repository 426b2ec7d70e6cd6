"""Text from a model: prefill, decode, sampling, states, search."""

from xlstm7b.generate.generator import Generator, Piece
from xlstm7b.generate.requests import Prompt, Request
from xlstm7b.generate.sampling import SamplingSettings
from xlstm7b.generate.search import (
    Node,
    Tree,
    Vote,
    beam_search,
    best_of_n,
    self_consistency,
    tree_search,
)
from xlstm7b.generate.states import TextState
from xlstm7b.generate.texts import Completion

__all__ = [
    "Completion",
    "Generator",
    "Node",
    "Piece",
    "Prompt",
    "Request",
    "SamplingSettings",
    "TextState",
    "Tree",
    "Vote",
    "beam_search",
    "best_of_n",
    "self_consistency",
    "tree_search",
]
