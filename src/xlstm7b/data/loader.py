"""Batches for one data-parallel rank, read ahead in a background thread."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.data import Packing
from xlstm7b.data.mixture import Mixture
from xlstm7b.data.pack import PackedDataset, Sample
from xlstm7b.data.shards import ShardFolder
from xlstm7b.report import counted

# The names of packings in states saved by earlier versions.
_OLD_PACKINGS = {"stream": "windows", "best_fit": "best-fit"}


class Batch(NamedTuple):
    """Samples as rows [B, T]; see `pack.Sample`."""

    tokens: Tensor  # int64
    targets: Tensor  # int64
    resets: Tensor  # bool
    mask: Tensor  # bool


class Loader:
    """Endless batches. Sample s of a run is the same for any batch size and number of ranks.

    A global batch is the next `global_batch` samples. Each rank gets an equal share, rank 0 the
    first rows. The only thing that changes over time is the number of samples consumed; the state
    is that number and everything that determines the order. Runs that follow each other with the
    same seed have different `stage`s, and so read the documents in other orders. `model` gives the
    first token and the padding, and must fit the data; by default they are those of bytes.
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
        packing: Packing = "windows",
        model: ModelConfig | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        if not sources:
            raise ValueError("the loader needs at least one source")
        if prefetch < 0:
            raise ValueError(f"prefetch must be at least 0 batches, not {prefetch}")
        check_tokenizers({name: folder for name, (folder, _) in sources.items()}, model)
        for name, (folder, _) in sources.items():
            if folder.tokens < context_length:
                raise ValueError(
                    f"source {name!r} holds {counted(folder.tokens, 'token')}, less than one "
                    f"context of {context_length:,}: shorten the context or add data"
                )
        self._mixture = Mixture({name: weight for name, (_, weight) in sources.items()})
        self._datasets = [
            PackedDataset(
                folder,
                context_length=context_length,
                seed=source_seed(seed, stage, name),
                packing=packing,
                **_tokens_of(model),
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
        self.samples = 0  # consumed so far, over all ranks
        self.set_global_batch(global_batch)

    def set_global_batch(self, global_batch: int) -> None:
        """Changes the batch size. The next batch starts after the last one returned."""
        self._rows = _rows_per_rank(global_batch, self._rank, self._world_size)
        self._cancel_prefetch()
        self.global_batch = global_batch  # rows of a batch, over all ranks

    def state_dict(self) -> dict[str, int | str]:
        """The samples consumed, and everything that determines their order. Equal on all ranks."""
        return {"samples": self.samples, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the samples of a state, with any number of ranks and any batch size."""
        packing = state.get("packing")
        state = {**state, "packing": _OLD_PACKINGS.get(packing or "", packing)}
        for name, here in self._order.items():
            if state.get(name) != here:
                raise ValueError(
                    f"the saved run read its data with {name} {state.get(name)}, this one with "
                    f"{here}: it would repeat some samples and skip others; choose another --run"
                )
        self._cancel_prefetch()
        self.samples = state["samples"]

    def first_sample(self) -> Batch:
        """The run's first sample, as a batch of one row: the same on every rank, at any time."""
        return self._pool.submit(self._read, 0, 1).result()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        while len(self._ahead) <= self._prefetch:
            start = self.samples + len(self._ahead) * self.global_batch
            first = start + self._rank * self._rows
            self._ahead.append(self._pool.submit(self._read, first, self._rows))
        batch = self._ahead[0].result()  # removed below, so that an interrupt here loses nothing
        self._ahead.popleft()
        self.samples += self.global_batch
        return batch

    def close(self) -> None:
        """Stops the background thread."""
        self._cancel_prefetch()
        self._pool.shutdown()

    def _read(self, first: int, rows: int) -> Batch:
        sources, indices = self._mixture.locate(np.arange(first, first + rows))
        batch = Sample.empty(rows, self._context_length)
        for row, (source, index) in enumerate(zip(sources.tolist(), indices.tolist(), strict=True)):
            self._datasets[source].fill(index, Sample(*(part[row] for part in batch)))
        return _as_tensors(batch, self._pin_memory)

    def _cancel_prefetch(self) -> None:
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
    packing: Packing = "windows",
    model: ModelConfig | None = None,
    most: int | None = None,
) -> Iterator[Batch]:
    """Every token of a folder, or of its first `most` windows, as a target once, in order.

    Ranks share the rows as in `Loader`, and all get the same number of batches: after the end of
    the data, the mask is 0.
    """
    rows = _rows_per_rank(batch, rank, world_size)
    check_tokenizers({str(folder.path): folder}, model)
    dataset = PackedDataset(
        folder, context_length=context_length, seed=None, packing=packing, **_tokens_of(model)
    )
    # Other windows than "windows" end with the epoch.
    tokens = folder.tokens if packing == "windows" else dataset.windows * context_length
    windows = dataset.windows if most is None else min(dataset.windows, most)
    tokens = min(tokens, windows * context_length)
    return (
        _read_in_order(dataset, range(first, first + rows), tokens)
        for first in range(rank * rows, -(-windows // batch) * batch, batch)
    )


def _read_in_order(dataset: PackedDataset, windows: Sequence[int], tokens: int) -> Batch:
    """Windows of the first epoch, with mask 0 after its end."""
    length = dataset.context_length
    batch = Sample.empty(len(windows), length)
    for row, window in enumerate(windows):
        left = tokens - window * length
        if left > 0:
            dataset.fill(window, Sample(*(part[row] for part in batch)))
            batch.mask[row, left:] = False
        else:
            batch.tokens[row] = batch.targets[row] = dataset.padding_token
    return _as_tensors(batch, pin_memory=False)


def _as_tensors(batch: Sample, pin_memory: bool) -> Batch:
    parts = (torch.from_numpy(part) for part in batch)
    return Batch(*(part.pin_memory() if pin_memory else part for part in parts))


def _rows_per_rank(global_batch: int, rank: int, world_size: int) -> int:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be between 0 and {world_size - 1}, not {rank}")
    if global_batch < 1 or global_batch % world_size:
        raise ValueError(
            f"a global batch of {global_batch} cannot be divided among {world_size} data-parallel "
            "ranks: it must be a multiple of their number"
        )
    return global_batch // world_size


def source_seed(seed: int, stage: int, name: str) -> int:
    """The seed of one source. It depends on the source's name, not on the other sources."""
    words = f"{seed} {stage} {name}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest())


def _tokens_of(model: ModelConfig | None) -> dict[str, Any]:
    """The tokens that packing adds, as arguments of `PackedDataset`."""
    if model is None:
        return {}
    first = model.bos_token_id if model.force_bos_token_insert else None
    return {"first_token": first, "padding_token": model.pad_token_id}


def check_tokenizers(folders: Mapping[str, ShardFolder], model: ModelConfig | None) -> None:
    """Raises a `ValueError` unless all folders have one tokenizer that fits the model."""
    first_name, first = next(iter(folders.items()))
    for name, folder in folders.items():
        if folder.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise ValueError(
                f"sources {first_name!r} and {name!r} were prepared with different tokenizers "
                f"({first.tokenizer_fingerprint} and {folder.tokenizer_fingerprint})"
            )
        if model is None:
            continue
        if folder.vocab_size is None:
            raise ValueError(
                f"the tokenizer of source {name!r} is unknown: adopt its folder with "
                "`xlstm7b prepare --adopt`"
            )
        if folder.vocab_size > model.vocab_size:
            raise ValueError(
                f"source {name!r} has a vocabulary of {folder.vocab_size:,} tokens, but the model "
                f"has {model.vocab_size:,}"
            )
        eos, bos = folder.eos_token_id, folder.bos_token_id
        if model.eos_token_id != eos:
            raise ValueError(
                f"the documents of source {name!r} end with id {eos}, but model.eos_token_id is "
                f"{model.eos_token_id}: set it to {eos}"
            )
        if model.force_bos_token_insert and model.bos_token_id not in (bos, eos):
            wanted = "force_bos_token_insert to false" if bos is None else f"bos_token_id to {bos}"
            raise ValueError(
                f"the first token of source {name!r} is {bos}, but model.bos_token_id is "
                f"{model.bos_token_id}: set model.{wanted}"
            )
