"""Tasks that an experiment file names: data that is made, and a measurement of a trained model.

A task is a module with two functions:

    write_task(folder, settings)
        Writes prepared folders LENGTH/train and LENGTH/valid into `folder`, for the context lengths
        in its settings. A run reads those of its own context length.
    evaluate(model, settings) -> dict
        Measures an `XLSTM` with float32 weights on the device of the run. The figure "accuracy"
        needs {SERIES: {LENGTH: {"accuracy": …}}}, with "low" and "high" if there is an interval,
        and "chance" if the accuracy of guessing is known.

`settings` is the table `[data]` or `[evaluate]` of the file, without `task`. A wrong setting is a
`ValueError`.
"""

from importlib import import_module
from typing import Any

TASKS = {"recall": "xlstm7b.evaluate.recall"}  # name in the file: module


def find_task(name: str) -> Any:
    """The module of this task."""
    return import_module(TASKS[name])
