"""`xlstm7b bench engine`: continuous batching without HTTP, `Engine.step()` in this thread.

A constant number of requests runs at a time: a new one is added when one finishes. The limit is the
speed of the same requests as whole batches through `Generator`; with a JSON schema, it is their
speed without. The first token after a shared prefix is that of requests one after another.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from xlstm7b.accounting import adapted_shapes
from xlstm7b.bench.measure import GREEDY, RandomModel, attempt, percentile, random_prompts, release
from xlstm7b.bench.results import Results, Shape
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_dtype
from xlstm7b.generate import Engine, Generator, Request, SamplingParams
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import Adapter, LowRank
from xlstm7b.tokenizer import Tokenizer
from xlstm7b.train.recipe import Lora

_QUESTION_TOKENS, _QUESTIONS = 40, 12  # after a shared prefix

# A list of records. No output ends before it has 1000 of them, so all have their full length.
_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}[.](com|org)$"},
            "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": ["name", "age", "email", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Load:
    """The requests of one measurement."""

    streams: int  # requests that run at a time
    requests: int
    prompt_tokens: int
    new_tokens: tuple[int, int]  # the shortest and the longest output
    prefill_tokens: int = 512  # of prompts in one engine step
    adapters: int = 0

    @property
    def shape(self) -> Shape:
        low, high = self.new_tokens
        return {
            "streams": self.streams,
            "requests": self.requests,
            "prompt": self.prompt_tokens,
            "output": low if low == high else f"{low}-{high}",
            "prefill tokens": self.prefill_tokens,
            **({"adapters": self.adapters} if self.adapters else {}),
        }

    def make(
        self,
        vocab_size: int,
        adapters: Sequence[Adapter] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> list[Request]:
        """New requests. Every call returns the same prompts and lengths."""
        prompts = random_prompts(vocab_size, self.requests, self.prompt_tokens)
        draw, form = random.Random(0), {"json": schema} if schema else None
        requests = [_greedy(ids, draw.randint(*self.new_tokens), form) for ids in prompts]
        for number, request in enumerate(requests if adapters else ()):
            request.adapter = adapters[number % len(adapters)]
        return requests


def _greedy(
    token_ids: list[int], new_tokens: int, form: Mapping[str, Any] | None = None
) -> Request:
    params = SamplingParams(max_new_tokens=new_tokens, structured_outputs=form, **GREEDY)
    return Request(token_ids, params)


@dataclass(frozen=True)
class Benchmark:
    """Measures one model."""

    results: Results
    random: RandomModel
    model: XLSTM
    tokenizer: Tokenizer

    def streams(self, load: Load) -> None:
        """The limit is the speed of whole batches, without adapters."""
        shape = self.random.shape(**load.shape)
        limit = partial(self._whole_batches, load)
        attempt(self.results, "output", shape, partial(self._streams, load, shape, limit))

    def grammar(self, load: Load) -> None:
        """Every output follows a JSON schema. The limit is the speed without."""
        shape = self.random.shape(**load.shape, format="JSON schema")
        limit = partial(self._speed, load)
        attempt(self.results, "output", shape, partial(self._streams, load, shape, limit, _SCHEMA))

    def _whole_batches(self, load: Load) -> float:
        """Tokens per second if the requests run in groups of `streams`, one group after another."""
        generator = Generator(
            self.model,
            self.tokenizer,
            state_dtype=to_dtype(self.random.state_dtype),
            batch_size=load.streams,
        )
        vocab_size = self.random.config.vocab_size
        generator.run(load.make(vocab_size)[: load.streams])  # compiles kernels, captures graphs
        requests, tokens, began = load.make(vocab_size), 0, time.perf_counter()
        for start in range(0, len(requests), load.streams):
            completions = generator.run(requests[start : start + load.streams])
            tokens += sum(len(completion.token_ids) for completion in completions)
        return tokens / (time.perf_counter() - began)

    def _speed(self, load: Load) -> float:
        return self._drive(load)[0]

    def _streams(
        self,
        load: Load,
        shape: Shape,
        limit: Callable[[], float],
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        best = limit()
        release(self.random.device)
        speed, outside, times = self._drive(load, schema)
        gaps = [late - early for each in times for early, late in pairwise(each[1:])] or [0.0]
        add, first = self.results.add, median(each[1] - each[0] for each in times)
        add("first token", shape, 1e3 * first, "ms")
        for percent in (50, 99):
            add(f"between tokens, p{percent}", shape, 1e3 * percentile(gaps, percent), "ms")
        add("outside the model", shape, 100 * outside, "%")
        add("output", shape, speed, "tok/s", limit=best)

    def _drive(
        self, load: Load, schema: Mapping[str, Any] | None = None
    ) -> tuple[float, float, list[list[float]]]:
        """Tokens per second, the share of time outside the model, and the times of `drive`."""
        adapters = random_adapters(self.random.config, load.adapters)
        engine = Engine(
            self.model,
            self.tokenizer,
            slots=load.streams,
            state_dtype=to_dtype(self.random.state_dtype),
            prefill_tokens=load.prefill_tokens,
            adapters=adapters,
        )
        engine.warm_up()
        make = partial(load.make, self.random.config.vocab_size, adapters, schema)
        drive(engine, make()[: load.streams], load.streams)  # not counted
        requests = make()
        before, began = engine.stats(), time.perf_counter()
        times = drive(engine, requests, load.streams)
        seconds, after = time.perf_counter() - began, engine.stats()
        engine.close()
        model_seconds = after.model_seconds - before.model_seconds
        speed = (after.generated_tokens - before.generated_tokens) / seconds
        return speed, 1 - model_seconds / (after.seconds - before.seconds), times

    def prefix(self, tokens: int, cache_bytes: int) -> None:
        """The prefix is cached from the second request on, which shows where requests differ."""
        shape = self.random.shape(prefix=tokens)
        last = {**shape, "request": "later, slowest"}
        attempt(self.results, "first token", last, lambda: self._prefix(tokens, cache_bytes, shape))

    def _prefix(self, tokens: int, cache_bytes: int, shape: Shape) -> None:
        state_dtype = to_dtype(self.random.state_dtype)
        engine = Engine(
            self.model, self.tokenizer, slots=8, state_dtype=state_dtype, cache_bytes=cache_bytes
        )
        vocab_size = self.random.config.vocab_size
        prefix, other = random_prompts(vocab_size, 2, tokens)
        engine.warm_up()
        drive(engine, [_greedy(other, 8)], 1)  # not counted
        firsts = []
        for question in random_prompts(vocab_size, _QUESTIONS, _QUESTION_TOKENS):
            ((added, first, *_),) = drive(engine, [_greedy(prefix + question, 8)], 1)
            firsts.append(first - added)
        engine.close()
        nothing_cached, second, *later = firsts
        for request, seconds in (
            ("first", nothing_cached),
            ("second", second),
            ("later, median", median(later)),
            ("later, slowest", max(later)),
        ):
            self.results.add("first token", {**shape, "request": request}, 1e3 * seconds, "ms")


def random_adapters(config: ModelConfig, count: int) -> list[Adapter]:
    """Adapters of the recipes' default rank and layers."""
    lora, draw = Lora(), torch.Generator().manual_seed(0)
    return [
        Adapter(
            Path(f"adapter-{number}"),
            {
                path: LowRank(
                    torch.randn(lora.rank, columns, generator=draw) / columns**0.5,
                    torch.randn(rows, lora.rank, generator=draw) / 100,
                    lora.alpha / lora.rank,
                )
                for path, (rows, columns) in adapted_shapes(config, lora.targets).items()
            },
            {},
            "",
            f"{number:064x}",
        )
        for number in range(count)
    ]


def drive(engine: Engine, requests: Sequence[Request], streams: int) -> list[list[float]]:
    """Runs all requests, at most `streams` at a time: one more is added when one finishes.

    Returns for each request the time when it was added, then the times of its outputs with tokens.
    """
    waiting, running = deque(requests), 0
    times: dict[Request, list[float]] = {}
    while waiting or engine.has_requests:
        while waiting and running < streams:
            times[engine.add_request(waiting.popleft())] = [time.perf_counter()]
            running += 1
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise output.error
            if output.token_ids:
                times[output.request].append(now)
            running -= output.finished
    return list(times.values())
