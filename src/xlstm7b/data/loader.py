"""Batches for one data-parallel rank, from packed sources, read ahead in the background."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypedDict

import numpy as np
import torch
from torch import Tensor

from xlstm7b.data.mixture import Mixture
from xlstm7b.data.pack import PackedStream, Packing, Sample
from xlstm7b.data.shards import ShardFolder


class Batch(TypedDict):
    """Windows of T positions as rows: tokens and targets are int64, resets and mask bool."""

    tokens: Tensor
    targets: Tensor
    resets: Tensor
    mask: Tensor


class Loader:
    """Endless batches: sample s of a run is the same whatever the batch size and the ranks.

    A global batch is the next `global_batch` samples, of which each rank gets as many, rank 0 the
    first. All that changes is the number of samples consumed, so that is what is saved, with all
    that their order follows from. Runs that follow each other with the same seed differ in their
    `stage`, and so read the same documents in orders of their own.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[ShardFolder, float]],
        *,
        context_length: int,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        stage: int = 0,
        packing: Packing = "stream",
        vocab_size: int | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        if not sources:
            raise ValueError("there are no sources to load from")
        if prefetch < 0:
            raise ValueError(f"{prefetch} batches cannot be read ahead: 0 or more")
        check_tokenizers({name: folder for name, (folder, _) in sources.items()}, vocab_size)
        for name, (folder, _) in sources.items():
            if folder.tokens < context_length:
                raise ValueError(
                    f"source {name!r} holds {folder.tokens:,} tokens, which do not fill one "
                    f"context of {context_length:,}: shorten the context or add data"
                )
        self._mixture = Mixture({name: weight for name, (_, weight) in sources.items()})
        self._streams = [
            PackedStream(
                folder,
                context_length=context_length,
                seed=_source_seed(seed, stage, name),
                packing=packing,
            )
            for name, (folder, _) in sources.items()
        ]
        self._context_length = context_length
        self._order = {
            "seed": seed,
            "stage": stage,
            "context_length": context_length,
            "packing": packing,
            "sources": "; ".join(
                f"{name} {self._mixture.shares[name]} of {folder.tokens} tokens"
                for name, (folder, _) in sources.items()
            ),
        }
        self._rank, self._world_size = rank, world_size
        self._prefetch, self._pin_memory = prefetch, pin_memory
        self._pool = ThreadPoolExecutor(1, "loader")
        self._ahead: deque[Future[Batch]] = deque()
        self._samples = 0
        self.set_global_batch(global_batch)

    @property
    def samples(self) -> int:
        """Samples that all ranks together were given so far."""
        return self._samples

    @property
    def global_batch(self) -> int:
        """Rows of a batch over all ranks."""
        return self._global_batch

    def set_global_batch(self, global_batch: int) -> None:
        """The batch size from here on; the next batch goes on behind the last one given."""
        self._rows = _rows_of_a_rank(global_batch, self._rank, self._world_size)
        self._forget_ahead()
        self._global_batch = global_batch

    def state_dict(self) -> dict[str, int | str]:
        """Where the run is, and what its order follows from: the same for every rank."""
        return {"samples": self._samples, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the state was taken, with any number of ranks and any batch size."""
        for name, mine in self._order.items():
            if state.get(name) != mine:
                raise ValueError(
                    f"the saved run read its data with {name} {state.get(name)}, this one with "
                    f"{mine}: it would repeat some of it and leave out some"
                )
        self._forget_ahead()
        self._samples = state["samples"]

    def first_window(self) -> Batch:
        """The run's first sample, whatever was read since: the same text for every rank."""
        return self._pool.submit(self._read, 0, 1).result()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        while len(self._ahead) <= self._prefetch:
            start = self._samples + len(self._ahead) * self._global_batch
            first = start + self._rank * self._rows
            self._ahead.append(self._pool.submit(self._read, first, self._rows))
        batch = self._ahead[0].result()  # not taken yet, should this be interrupted
        self._ahead.popleft()
        self._samples += self._global_batch
        return batch

    def close(self) -> None:
        """Stops reading ahead."""
        self._forget_ahead()
        self._pool.shutdown()

    def _read(self, first: int, rows: int) -> Batch:
        sources, indices = self._mixture.locate(np.arange(first, first + rows))
        batch = Sample.padding(rows, self._context_length)
        for row, (source, index) in enumerate(zip(sources.tolist(), indices.tolist(), strict=True)):
            self._streams[source].fill(index, Sample(*(part[row] for part in batch)))
        return _as_tensors(batch, self._pin_memory)

    def _forget_ahead(self) -> None:
        for batch in self._ahead:
            batch.cancel()
        self._ahead.clear()


def validation_batches(
    folder: ShardFolder,
    context_length: int,
    batch: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    vocab_size: int | None = None,
) -> Iterator[Batch]:
    """Every token of a folder as a target once, in the order on disk.

    Rows are shared among ranks as in `Loader`, and every rank gets as many batches: where the data
    ends inside the last one, the rest has mask 0.
    """
    rows = _rows_of_a_rank(batch, rank, world_size)
    check_tokenizers({str(folder.path): folder}, vocab_size)
    stream = PackedStream(folder, context_length=context_length, seed=None)
    windows = -(-folder.tokens // context_length)
    return (
        _in_order(stream, range(first, first + rows), folder.tokens)
        for first in range(rank * rows, -(-windows // batch) * batch, batch)
    )


def _in_order(stream: PackedStream, windows: Sequence[int], tokens: int) -> Batch:
    """Windows of the first epoch; what lies behind it does not count."""
    length = stream.context_length
    batch = Sample.padding(len(windows), length)
    for row, window in enumerate(windows):
        left = tokens - window * length
        if left > 0:
            stream.fill(window, Sample(*(part[row] for part in batch)))
            batch.mask[row, left:] = False
    return _as_tensors(batch, pin_memory=False)


def _as_tensors(batch: Sample, pin_memory: bool) -> Batch:
    parts = (torch.from_numpy(part) for part in batch)
    tokens, targets, resets, mask = (part.pin_memory() if pin_memory else part for part in parts)
    return Batch(tokens=tokens, targets=targets, resets=resets, mask=mask)


def _rows_of_a_rank(global_batch: int, rank: int, world_size: int) -> int:
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} among {world_size}: they count from 0")
    if global_batch < 1 or global_batch % world_size:
        raise ValueError(
            f"a global batch of {global_batch} cannot be shared among {world_size} data-parallel "
            "ranks: it must be a multiple of them"
        )
    return global_batch // world_size


def _source_seed(seed: int, stage: int, name: str) -> int:
    """By name: sources of the same size get orders of their own, whichever others there are."""
    words = f"{seed} {stage} {name}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest())


def check_tokenizers(folders: Mapping[str, ShardFolder], vocab_size: int | None) -> None:
    """Raises a `ValueError` where folders are not of one tokenizer, or not of the model's size."""
    first_name, first = next(iter(folders.items()))
    for name, folder in folders.items():
        if folder.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise ValueError(
                f"sources {first_name!r} and {name!r} were prepared with different tokenizers "
                f"({first.tokenizer_fingerprint} and {folder.tokenizer_fingerprint})"
            )
        if vocab_size is None:
            continue
        if folder.vocab_size is None:
            raise ValueError(
                f"source {name!r} does not say what tokenizer prepared it: adopt its folder first"
            )
        if folder.vocab_size > vocab_size:
            raise ValueError(
                f"source {name!r} has a vocabulary of {folder.vocab_size:,} tokens, the model "
                f"one of {vocab_size:,}"
            )
