"""`xlstm7b bench generation`: how fast a model generates, and how much memory that takes.

Everything is measured through `Generator`, as users call it, sampling included. Each part is a
function here. Every figure stands beside its limit (`Limits`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from xlstm7b import accounting
from xlstm7b.bench.measure import (
    GREEDY,
    H200,
    SAMPLED,
    RandomModel,
    Timing,
    attempt,
    make_generator,
    measure,
    measure_decoding,
    random_prompts,
)
from xlstm7b.bench.results import Results, Shape
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_dtype
from xlstm7b.generate import Generator, SavedState
from xlstm7b.generate.engine import peak_memory
from xlstm7b.generate.replay import INTERVAL, default_interval
from xlstm7b.model import XLSTM
from xlstm7b.model.lm import schemes_of

START_TOKENS = 16  # length of the prompts before a batch is decoded
ENOUGH = 1.0  # seconds: a prompt that takes as long is timed once


@dataclass(frozen=True)
class Limits:
    """The best that a processor with these peaks (FLOP/s, bytes/s) allows.

    Work takes at least the time to move all its bytes or to compute all its FLOPs, whichever is
    longer. `bench generation` and the scripts of benchmarks/ show speeds beside it.
    """

    config: ModelConfig
    peaks: tuple[float, float] = H200
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    quantize: str | None = None  # int8, fp8 or int4
    device: str = "cuda"
    replay: bool | None = None  # moves fewer bytes in decoding; by default as `Generator` does it

    def decode(self, batch: int = 1) -> float:
        """Tokens per second of decoding."""
        return batch / self._step_seconds(batch)

    def prefill(self, length: int, batch: int = 1) -> float:
        """Prompt tokens per second of reading prompts of this length."""
        return batch * length / self._prefill_seconds(length, batch)

    def first(self, length: int, tokens: int = 1) -> float:
        """Seconds from a prompt of this length to its first tokens."""
        return self._prefill_seconds(length, 1) + (tokens - 1) * self._step_seconds(1)

    def memory(self, batch: int = 1) -> int:
        """Bytes of the weights and of the states of a batch."""
        counts = accounting.parameter_counts(self.config)
        weights = (counts["total"] - counts["embedding"]) * self._weight_itemsize
        weights += counts["embedding"] * to_dtype(self.dtype).itemsize  # it is never quantised
        states = accounting.state_bytes(self.config, to_dtype(self.state_dtype).itemsize)["total"]
        return round(weights) + batch * states

    def _step_seconds(self, batch: int) -> float:
        interval = INTERVAL if self.replay else None
        if self.replay is None:
            interval = default_interval(self.config, batch, torch.device(self.device).type)
        return accounting.least_decode_seconds(
            self.config,
            *self.peaks,
            batch,
            **self._itemsizes,
            replay_interval=interval,
            ring_itemsize=to_dtype(self.dtype).itemsize,
        )

    def _prefill_seconds(self, length: int, batch: int) -> float:
        return accounting.least_prefill_seconds(
            self.config, *self.peaks, length, batch, **self._itemsizes
        )

    @property
    def _itemsizes(self) -> dict[str, Any]:
        itemsize = to_dtype(self.state_dtype).itemsize
        return {"weight_itemsize": self._weight_itemsize, "state_itemsize": itemsize}

    @cached_property
    def _weight_itemsize(self) -> float:
        """Bytes of a weight; if they are quantised, the mean over all, the embedding aside."""
        itemsize = to_dtype(self.dtype).itemsize
        if not self.quantize:
            return itemsize
        schemes = schemes_of(self.config, self.quantize)
        counts = {name: prod(shape) for name, shape in self.config.parameter_shapes().items()}
        del counts["backbone.embeddings.weight"]
        sizes = (
            count * (schemes[name].bytes_per_weight if name in schemes else itemsize)
            for name, count in counts.items()
        )
        return sum(sizes) / sum(counts.values())


@dataclass(frozen=True)
class Benchmark:
    """Measures one model. `seconds` is about the length of one timing of decoding."""

    results: Results
    random: RandomModel
    model: XLSTM
    limits: Limits
    seconds: float = 0.3

    def contexts(self, lengths: Sequence[int]) -> None:
        """After a context of each length: the time to read it, speed of decoding, peak memory."""
        for length in lengths:
            shape = self._shape(batch=1, context=length)
            attempt(self.results, "decode", shape, partial(self._context, length, shape))

    def _context(self, length: int, shape: Shape) -> None:
        # A context of 0 still has the first token, which every prompt starts with.
        prompts = self._prompts(1, max(1, length))
        generator, states = self._generator(1), list[SavedState]()

        def read() -> None:
            states[:] = [generator.read(prompts)]

        seconds = measure(read, self.random.device, enough=ENOUGH)
        step = measure_decoding(generator, None, state=states[0], seconds=self.seconds, **GREEDY)
        if length:
            self.results.add("read", shape, seconds, "s", limit=self.limits.first(length))
        self._add_decode(shape, 1, step)

    def decode(self, batches: Sequence[int]) -> None:
        """Speed and peak memory of batches after short prompts. Batch 1 is also sampled."""
        cases: list[tuple[int, dict[str, str], dict[str, Any]]] = []
        for batch in batches:
            cases.append((batch, {}, GREEDY))
            if batch == 1:
                cases.append((1, {"sampling": "temperature 0.8, top_p 0.95"}, SAMPLED))
        for batch, how, sampling in cases:
            shape = self._shape(batch=batch, context=START_TOKENS, **how)
            work = partial(self._decode, batch, sampling, shape)
            attempt(self.results, "decode", shape, work, ValueError)  # `ValueError`: too many slots

    def _decode(self, batch: int, sampling: dict[str, Any], shape: Shape) -> None:
        prompts = self._prompts(batch, START_TOKENS)
        step = measure_decoding(self._generator(batch), prompts, seconds=self.seconds, **sampling)
        self._add_decode(shape, batch, step)

    def _add_decode(self, shape: Shape, batch: int, step: Timing) -> None:
        peak = 1e-9 * peak_memory(torch.device(self.random.device))
        least = 1e-9 * self.limits.memory(batch)
        self.results.add("peak memory", shape, peak, "GB", limit=least)
        speed, limit = batch / step.seconds, self.limits.decode(batch)
        self.results.add("decode", shape, speed, "tok/s", limit=limit, spread=step.spread)

    def first(self, lengths: Sequence[int], tokens: int) -> None:
        """Time from a prompt to its first token, and to the first `tokens`."""
        generator = self._generator(1)
        for length in lengths:
            for count in dict.fromkeys((1, tokens)):
                what = "first token" if count == 1 else f"first {count} tokens"
                work = partial(self._first, generator, length, count, what)
                attempt(self.results, what, self._shape(prompt=length), work)

    def _first(self, generator: Generator, length: int, tokens: int, what: str) -> None:
        generate = partial(generator.generate, self._prompts(1, length), max_new_tokens=tokens)
        seconds = measure(partial(generate, **GREEDY), self.random.device, enough=ENOUGH)
        limit = 1e3 * self.limits.first(length, tokens)
        self.results.add(what, self._shape(prompt=length), 1e3 * seconds, "ms", limit=limit)

    def prefill(self, lengths: Sequence[int], tokens: int) -> None:
        """Speed of reading `tokens` in all, as prompts of each length."""
        for length in lengths:
            shape = self._shape(batch=tokens // length, prompt=length)
            work = partial(self._prefill, tokens // length, length, shape)
            attempt(self.results, "prefill", shape, work, ValueError)

    def _prefill(self, batch: int, length: int, shape: Shape) -> None:
        generator, prompts = self._generator(batch), self._prompts(batch, length)
        seconds = measure(lambda: generator.read(prompts), self.random.device, enough=ENOUGH)
        speed, limit = batch * length / seconds, self.limits.prefill(length, batch)
        self.results.add("prefill", shape, speed, "tok/s", limit=limit)

    def _shape(self, **more: int | str) -> Shape:
        replay = {None: {}, True: {"replay": "on"}, False: {"replay": "off"}}[self.limits.replay]
        return self.random.shape(**more, **replay)

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        return random_prompts(self.random.config.vocab_size, batch, length)

    def _generator(self, batch: int) -> Generator:
        """A new one for each figure of memory: what its CUDA graphs hold counts too."""
        return make_generator(
            self.model,
            state_dtype=self.random.state_dtype,
            batch_size=batch,
            replay=self.limits.replay,
        )


def measure_start(results: Results, folder: Path, random: RandomModel) -> None:
    """From loading a folder to the first token. Files and compiled kernels may be cached."""

    def start() -> None:
        began = time.perf_counter()
        dtype = to_dtype(random.dtype)
        model = XLSTM.from_pretrained(folder, dtype=dtype, device=random.device)
        prompts = [[model.config.bos_token_id]]
        make_generator(model).generate(prompts, max_new_tokens=1, **GREEDY)
        results.add("start", shape, time.perf_counter() - began, "s")

    shape = {"folder": folder.name, "weights": random.dtype}
    attempt(results, "start", shape, start)
