"""`xlstm7b doctor`: whether this machine is fit."""

from pathlib import Path
from typing import Annotated

import typer

from xlstm7b.cli.options import option, to_target
from xlstm7b.devices import to_device


def doctor(
    json: Annotated[
        str | None,
        option("Write the report as JSON to this file. - is stdout, without other output."),
    ] = None,
    device: Annotated[
        str | None, option("Device: cpu, cuda, cuda:1, …", default="a GPU if there is one")
    ] = None,
) -> None:
    """Check within 90 s whether this machine computes right numbers, and how fast it is.

    On a GPU, kernels are compiled for later use. Those that are wrong are noted, and no longer
    used. Exit code 1: a path of this device gives wrong numbers.
    """
    if json == "":
        raise ValueError("--json is empty: give a path, or - for stdout")
    target = None if json in (None, "-") else to_target(Path(str(json)))
    where = to_device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"the device must be a CPU or a CUDA GPU, not {device!r}")
    from xlstm7b.doctor import examine
    from xlstm7b.files import json_bytes, write_json

    def say(line: str) -> None:
        if json != "-":
            print(line, flush=True)

    report = examine(where, say)
    if target is not None:
        write_json(target, report)
    elif json == "-":
        print(json_bytes(report).decode(), end="")
    if not report["ok"]:
        raise typer.Exit(1)
