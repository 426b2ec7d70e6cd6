"""Training. Reading and planning a recipe load no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xlstm7b.train.plan import Plan, describe, make_plan
from xlstm7b.train.recipe import Layout, Recipe, load_recipe, recipe_names

if TYPE_CHECKING:
    from xlstm7b.train.hooks import Hook, HookError, LossBatch
    from xlstm7b.train.run_checkpoints import export_run
    from xlstm7b.train.trackers import TrackedRun, Tracker
    from xlstm7b.train.trainer import Trainer

__all__ = [
    "Hook",
    "HookError",
    "Layout",
    "LossBatch",
    "Plan",
    "Recipe",
    "TrackedRun",
    "Tracker",
    "Trainer",
    "describe",
    "export_run",
    "load_recipe",
    "make_plan",
    "recipe_names",
]

_HOMES = {
    "Hook": "hooks",
    "HookError": "hooks",
    "LossBatch": "hooks",
    "TrackedRun": "trackers",
    "Tracker": "trackers",
    "Trainer": "trainer",
    "export_run": "run_checkpoints",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'xlstm7b.train' has no attribute {name!r}")
    return getattr(import_module(f"xlstm7b.train.{_HOMES[name]}"), name)
