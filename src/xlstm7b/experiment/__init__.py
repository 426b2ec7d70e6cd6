"""Experiments: sets of training runs that reproduce a figure or table of the paper.

Reading an experiment file loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xlstm7b.experiment.file import Experiment, experiment_names, load_experiment

if TYPE_CHECKING:
    from xlstm7b.experiment.figures import draw
    from xlstm7b.experiment.runs import run_experiment

__all__ = ["Experiment", "draw", "experiment_names", "load_experiment", "run_experiment"]

_HOMES = {"draw": "figures", "run_experiment": "runs"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'xlstm7b.experiment' has no attribute {name!r}")
    return getattr(import_module(f"xlstm7b.experiment.{_HOMES[name]}"), name)
