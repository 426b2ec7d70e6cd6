"""`xlstm7b bench loader FOLDER…`: how fast training batches come from prepared shards."""

import time
from collections.abc import Iterator, Sequence
from itertools import product, starmap

from xlstm7b.bench import plans
from xlstm7b.bench.cases import Part, Result
from xlstm7b.data import Packing
from xlstm7b.data.loader import Loader
from xlstm7b.data.shards import ShardFolder, open_folder

PACKINGS: tuple[Packing, ...] = ("windows", "best-fit")
PARTS = {
    "loader": Part("batches for training", ("tokens", "batch", "tok/s"), plot=("tokens", "tok/s"))
}


def results(plan: plans.Loader) -> Iterator[Result]:
    """One row for each packing, context length and batch size."""
    folders = [open_folder(folder) for folder in plan.folders]

    def row(packing: Packing, length: int, batch: int) -> Result:
        speed = tokens_per_second(folders, length, batch, packing, plan.seconds)
        return Result("loader", packing, batch=batch, length=length, tokens_per_second=speed)

    return starmap(row, product(PACKINGS, plan.lengths, plan.batches))


def tokens_per_second(
    folders: Sequence[ShardFolder],
    context_length: int,
    batch: int,
    packing: Packing,
    seconds: float,
) -> float:
    """The speed over `seconds`, without the first batch. The folders are mixed evenly."""
    loader = Loader(
        {str(folder.path): (folder, 1.0) for folder in folders},
        context_length=context_length,
        global_batch=batch,
        packing=packing,
    )
    next(loader)
    batches, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        next(loader)
        batches += 1
    loader.close()
    return batches * batch * context_length / passed
