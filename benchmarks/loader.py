"""How fast training batches come from prepared shards."""

import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from options import numbers
from processes import Call, Json
from xlstm7b.bench.results import Results
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, option
from xlstm7b.data import Packing
from xlstm7b.data.loader import Loader
from xlstm7b.data.shards import ShardFolder, open_folder

PACKINGS: tuple[Packing, ...] = ("windows", "best-fit")

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def loader(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders that `xlstm7b prepare` wrote, mixed evenly.")
    ],
    lengths: Annotated[str, option("Tokens of a sequence.")] = "2048,8192",
    batches: Annotated[str, option("Sequences in a batch.")] = "8,64",
    seconds: Annotated[float, option("Length of each timing, in seconds.")] = 3.0,
    json: Json = None,
    call: Call = None,
) -> None:
    """Time how fast training batches come from prepared shards."""
    sizes = [*product(numbers("lengths", lengths), numbers("batches", batches))]
    if not seconds > 0:
        raise ValueError(f"--seconds must be above 0, not {seconds:g}")
    opened = [open_folder(folder) for folder in folders]
    results = Results("loader", "none", file=json, call=call)
    for packing, (length, batch) in product(PACKINGS, sizes):
        shape = {"packing": packing, "length": length, "batch": batch}
        if not results.has("batches", shape):
            speed = tokens_per_second(opened, length, batch, packing, seconds)
            results.add("batches", shape, speed, "tok/s")


def tokens_per_second(
    folders: Sequence[ShardFolder],
    context_length: int,
    batch: int,
    packing: Packing,
    seconds: float,
) -> float:
    """The speed over `seconds`, without the first batch. The folders are mixed evenly."""
    batches = Loader(
        {str(folder.path): (folder, 1.0) for folder in folders},
        context_length=context_length,
        global_batch=batch,
        packing=packing,
    )
    next(batches)
    count, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        next(batches)
        count += 1
    batches.close()
    return count * batch * context_length / passed


if __name__ == "__main__":
    main(app)
