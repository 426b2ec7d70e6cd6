"""Generation: the engine, sampling, saved states, chat and search.

Names are imported when used: `xlstm7b.generate.params` alone loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlstm7b.generate.engine import Engine, EngineStats
    from xlstm7b.generate.generator import Generator
    from xlstm7b.generate.params import SamplingParams
    from xlstm7b.generate.request import Completion, Prompt, Request, RequestOutput, RequestStatus
    from xlstm7b.generate.search import (
        Node,
        Tree,
        Vote,
        beam_search,
        best_of_n,
        self_consistency,
        tree_search,
    )
    from xlstm7b.generate.state import SavedState, StateStore

_MODULES = {
    "engine": ("Engine", "EngineStats"),
    "generator": ("Generator",),
    "params": ("SamplingParams",),
    "request": ("Completion", "Prompt", "Request", "RequestOutput", "RequestStatus"),
    "search": (
        "Node",
        "Tree",
        "Vote",
        "beam_search",
        "best_of_n",
        "self_consistency",
        "tree_search",
    ),
    "state": ("SavedState", "StateStore"),
}
__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "Generator",
    "Node",
    "Prompt",
    "Request",
    "RequestOutput",
    "RequestStatus",
    "SamplingParams",
    "SavedState",
    "StateStore",
    "Tree",
    "Vote",
    "beam_search",
    "best_of_n",
    "self_consistency",
    "tree_search",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"xlstm7b.generate.{module}"), name)
    raise AttributeError(f"module 'xlstm7b.generate' has no attribute {name!r}")
