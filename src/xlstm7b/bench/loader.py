"""`xlstm7b bench loader FOLDER…`: how fast training's batches come from prepared shards."""

import time
from collections.abc import Sequence
from pathlib import Path

from xlstm7b.data.loader import Loader
from xlstm7b.data.pack import Packing
from xlstm7b.data.shards import ShardFolder, open_folder

PACKINGS: tuple[Packing, ...] = ("stream", "best_fit")


def tokens_per_second(
    folders: Sequence[ShardFolder],
    context_length: int,
    batch: int,
    packing: Packing,
    seconds: float,
) -> float:
    """Over so long a time, the first batch not counted; the folders are mixed evenly."""
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


def run(
    folders: Sequence[Path], lengths: Sequence[int], batches: Sequence[int], seconds: float
) -> None:
    """Prints a line for each packing, context length and batch size."""
    opened = [open_folder(folder) for folder in folders]
    print(f"{'packing':12}{'context':>10}{'batch':>8}{'tok/s':>14}")
    for packing in PACKINGS:
        for length in lengths:
            for batch in batches:
                speed = tokens_per_second(opened, length, batch, packing, seconds)
                print(f"{packing:12}{length:10}{batch:8}{speed:14,.0f}", flush=True)
