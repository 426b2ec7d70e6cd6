"""`xlstm7b bench engine`: continuous batching without HTTP, `Engine.step()` in this thread.

Three parts. `streams`: a constant number of concurrent requests, where a new one is added when one
finishes. The limit is the speed of the same requests as whole batches through `Generator`.
`grammar`: the same requests with a JSON schema. The limit is their speed without, in the same call.
`prefix`: the time to the first token of requests that share a long prefix, one after another.
"""

import math
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from xlstm7b.accounting import adapted_shapes
from xlstm7b.bench import plans
from xlstm7b.bench.cases import Column, Part, Result
from xlstm7b.bench.measure import GREEDY, percentile, plan_model, random_prompts, release
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_dtype
from xlstm7b.generate import Engine, Generator, Request, SamplingParams
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import Adapter, LowRank
from xlstm7b.report import counted
from xlstm7b.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from xlstm7b.train.recipe import Lora

_QUESTION_TOKENS, _QUESTIONS = 40, 12  # of the prefix part

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

_STREAMS = (
    Column("streams", "batch"),
    Column("prompt", "length"),
    "tok/s",
    "limit",
    "% of limit",
    Column("first, ms", "first_token_seconds", 1e3, 1),
    Column("gap p50, ms", "gap_p50", 1e3, 2),
    Column("gap p99, ms", "gap_p99", 1e3, 2),
    Column("outside model, %", "outside_model", 100, 1),
)
PARTS = {
    "streams": Part(
        "concurrent requests; the limit is the speed of whole batches",
        _STREAMS,
        plot=("streams", "tok/s"),
    ),
    "grammar": Part(
        "the same requests with a JSON schema; the limit is their speed without", _STREAMS
    ),
    "prefix": Part("first token after a shared prefix", ("tokens", "ms"), plot=("tokens", "ms")),
}


def results(plan: plans.Engine) -> Iterator[Result]:
    tokenizer: Tokenizer = ByteTokenizer()
    if plan.tokenizer is not None:
        tokenizer = load_tokenizer(Path(plan.tokenizer), plan.config.vocab_size)
    model = plan_model(plan)
    if "streams" in plan.parts:
        limit = _whole_batches(model, tokenizer, plan)
        release(plan.device)
        for prefill_tokens in plan.prefill_tokens:
            yield _streams(model, tokenizer, plan, prefill_tokens, limit)
            release(plan.device)
    if "grammar" in plan.parts:
        for prefill_tokens in plan.prefill_tokens:
            without = _streams(model, tokenizer, plan, prefill_tokens, math.inf)
            assert without.tokens_per_second is not None
            release(plan.device)
            limit = without.tokens_per_second
            yield _streams(model, tokenizer, plan, prefill_tokens, limit, schema=_SCHEMA)
            release(plan.device)
    if "prefix" in plan.parts:
        yield from _prefix(model, tokenizer, plan)


def make_requests(
    plan: plans.Engine,
    adapters: Sequence[Adapter] = (),
    schema: Mapping[str, Any] | None = None,
) -> list[Request]:
    """New requests. Every call returns the same prompts and lengths."""
    prompts = random_prompts(plan.config.vocab_size, plan.requests, plan.prompt_tokens)
    draw, form = random.Random(0), {"json": schema} if schema else None
    requests = [_greedy(ids, draw.randint(*plan.new_tokens_range()), form) for ids in prompts]
    for number, request in enumerate(requests if adapters else ()):
        request.adapter = adapters[number % len(adapters)]
    return requests


def _greedy(
    token_ids: list[int], new_tokens: int, form: Mapping[str, Any] | None = None
) -> Request:
    params = SamplingParams(max_new_tokens=new_tokens, structured_outputs=form, **GREEDY)
    return Request(token_ids, params)


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


def _whole_batches(model: XLSTM, tokenizer: Tokenizer, plan: plans.Engine) -> float:
    """Tokens per second if the requests run in groups of `streams`, one group after another."""
    state_dtype = to_dtype(plan.state_dtype)
    generator = Generator(model, tokenizer, state_dtype=state_dtype, batch_size=plan.streams)
    generator.run(make_requests(plan)[: plan.streams])  # compiles kernels, captures graphs
    requests, tokens, began = make_requests(plan), 0, time.perf_counter()
    for start in range(0, len(requests), plan.streams):
        completions = generator.run(requests[start : start + plan.streams])
        tokens += sum(len(completion.token_ids) for completion in completions)
    return tokens / (time.perf_counter() - began)


def _streams(
    model: XLSTM,
    tokenizer: Tokenizer,
    plan: plans.Engine,
    prefill_tokens: int,
    limit: float,
    schema: Mapping[str, Any] | None = None,
) -> Result:
    adapters = random_adapters(plan.config, plan.adapters)
    engine = Engine(
        model,
        tokenizer,
        slots=plan.streams,
        state_dtype=to_dtype(plan.state_dtype),
        prefill_tokens=prefill_tokens,
        adapters=adapters,
    )
    engine.warm_up()
    requests = make_requests(plan, adapters, schema)
    drive(engine, requests[: plan.streams], plan.streams)  # not counted
    requests = make_requests(plan, adapters, schema)
    before, began = engine.stats(), time.perf_counter()
    times = drive(engine, requests, plan.streams)
    seconds, after = time.perf_counter() - began, engine.stats()
    engine.close()
    gaps = [late - early for each in times for early, late in pairwise(each[1:])] or [0.0]
    model_seconds = after.model_seconds - before.model_seconds
    speed = (after.generated_tokens - before.generated_tokens) / seconds
    figures = {
        "requests": plan.requests,
        "new_tokens": plan.new_tokens,
        "prefill_tokens": prefill_tokens,
        "first_token_seconds": median(each[1] - each[0] for each in times),
        "gap_p50": percentile(gaps, 50),
        "gap_p99": percentile(gaps, 99),
        "outside_model": 1 - model_seconds / (after.seconds - before.seconds),
    }
    return Result(
        "grammar" if schema else "streams",
        work=f"prefill of {prefill_tokens}"
        + (f", {counted(len(adapters), 'adapter')}" if adapters else ""),
        batch=plan.streams,
        length=plan.prompt_tokens,
        seconds=seconds,
        tokens_per_second=speed,
        limit=limit,
        percent_of_limit=100 * speed / limit,
        figures=figures,
    )


def _prefix(model: XLSTM, tokenizer: Tokenizer, plan: plans.Engine) -> Iterator[Result]:
    """The prefix is cached from the second request on, which shows where requests differ."""
    state_dtype, cache_bytes = to_dtype(plan.state_dtype), int(plan.cache_gb * 1e9)
    engine = Engine(model, tokenizer, slots=8, state_dtype=state_dtype, cache_bytes=cache_bytes)
    prefix, other = random_prompts(plan.config.vocab_size, 2, plan.prefix_tokens)
    engine.warm_up()
    drive(engine, [_greedy(other, 8)], 1)  # not counted
    firsts = []
    for question in random_prompts(plan.config.vocab_size, _QUESTIONS, _QUESTION_TOKENS):
        ((added, first, *_),) = drive(engine, [_greedy(prefix + question, 8)], 1)
        firsts.append(first - added)
    engine.close()
    nothing_cached, second, *later = firsts
    rows = {
        "nothing cached": nothing_cached,
        "second request": second,
        "later requests, median": median(later),
        "later requests, slowest": max(later),
    }
    for work, seconds in rows.items():
        yield Result("prefix", work=work, length=plan.prefix_tokens, seconds=seconds)
