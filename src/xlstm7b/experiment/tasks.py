"""Tasks that an experiment file names: data that is made, and a measurement of a trained model.

A task is a module with three functions:

    check_settings(data, evaluate)
        Raises a `ValueError` if a setting is wrong or the two tables do not fit together. A table
        that the file does not have, or that is of another task, is None.
    write_task(folder, settings)
        Writes prepared folders LENGTH/train and LENGTH/valid into `folder`, for the context lengths
        in its settings. A run reads those of its own context length.
    evaluate(model, settings) -> dict
        Measures an `XLSTM` with float32 weights on the device of the run. The figure "accuracy"
        needs {SERIES: {LENGTH: {"accuracy": …}}}, with "low" and "high" if there is an interval,
        and "chance" if the accuracy of guessing is known.

`settings` is the table `[data]` or `[evaluate]` of the file, without `task`.
"""

from importlib import import_module
from typing import Any

TASKS = {"recall": "xlstm7b.evaluate.recall"}  # name in the file: module


def check_tasks(
    data: tuple[str, dict[str, Any]] | None, evaluate: tuple[str, dict[str, Any]] | None
) -> None:
    """Checks the settings of both tables. Each is the name of its task, and its settings."""
    for name in TASKS:
        own = [table[1] if table and table[0] == name else None for table in (data, evaluate)]
        if own != [None, None]:
            find_task(name).check_settings(*own)


def find_task(name: str) -> Any:
    """The module of this task."""
    return import_module(TASKS[name])
