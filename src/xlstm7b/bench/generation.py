"""`xlstm7b bench generation`: how fast a model generates, and how much memory that takes.

Everything is measured through `Generator`, as users call it, sampling included. Parts: peak memory;
decoding at several batch sizes, and after contexts of several lengths; the time from a prompt to
its first tokens; prefill of a constant number of tokens as many short or few long prompts; with a
folder, the time from saved weights to the first token; if asked for, decoding with and without
replay, the drift of bfloat16 states (`drift.py`), and speculation: with a folder on texts
(`texts.py`), without one with drafts of a given accuracy (`speculation.py`). Every speed but that
of speculation is shown with its limit.

Peers run in processes of their own, with random weights, in the fastest way that works: compiled
in a CUDA graph, in a CUDA graph, or eager (`peer_models.py`). Before a peer is timed, its cached
decoding is checked against its own pass over the whole text. `xlstm7b experiment speed` measures
the same, and more, and keeps the results of one model while another is measured.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from statistics import median
from typing import Any

import torch

from xlstm7b import accounting
from xlstm7b.bench import drift, speculation, texts
from xlstm7b.bench.cases import Column, Part, Result
from xlstm7b.bench.measure import (
    GREEDY,
    H200,
    SAMPLED,
    Timing,
    attempt,
    failed,
    find_peaks,
    measure,
    measure_decoding,
    plan_generator,
    plan_model,
    random_prompts,
    release,
    time_limit,
)
from xlstm7b.bench.peer_models import (
    COMPILED,
    EAGER,
    GRAPH,
    MOST_STEPS,
    PEERS,
    Decoder,
    check,
)
from xlstm7b.bench.peers import in_process
from xlstm7b.bench.plans import Generation
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_dtype
from xlstm7b.generate.engine import peak_memory
from xlstm7b.generate.replay import INTERVAL, default_interval
from xlstm7b.model import XLSTM
from xlstm7b.model.lm import schemes_of
from xlstm7b.report import counted

START_TOKENS = 16  # length of the prompt before decoding is timed
ENOUGH = 1.0  # seconds: a prompt that takes as long is timed once
_LONG, _MUCH_SLOWER = 2048, 1.2  # tokens of a context; times

_DECODE = (
    "batch",
    "tokens",
    "ms",
    "± %",
    "tok/s",
    "GB/s",
    "limit",
    "% of limit",
    "speed of ours, ×",
)
_SAME = Column("of shortest, ×", "of_shortest", digits=3)  # speed, over that after the shortest
_NEW = Column("new tokens", "new")
_FIRST = ("batch", "tokens", _NEW, "ms", "limit, ms", "% of limit", "speed of ours, ×")
PARTS = {
    "ways": Part("ways to decode one token", ("batch", "tokens", "ms", "± %")),
    "check": Part("cached decoding agrees with the whole pass", ("batch", "tokens")),
    "start": Part("from a saved folder to the first token", ("batch", "tokens", "ms")),
    "memory": Part(
        "peak memory; the limit is the weights and the state",
        ("batch", "tokens", "GB", "limit, GB", "% of limit"),
        plot=("tokens", "GB"),
    ),
    "decode": Part("decoding, one token per sequence", _DECODE, plot=("batch", "tok/s")),
    "replay": Part("decoding with and without replay", _DECODE, plot=("batch", "tok/s")),
    "drift": Part(
        "loss of a text that is decoded token by token",
        ("batch", "tokens", Column("loss", "loss", digits=5), Column("change, %", "change", 1, 4)),
    ),
    "speculation": Part(
        "generation with drafts; ms are those of a token",
        (
            "batch",
            "tokens",
            "ms",
            "± %",
            "tok/s",
            Column("accepted, %", "accepted", digits=1),
            Column("of plain, ×", "of_plain", digits=3),
            Column("same outputs, %", "same"),
        ),
    ),
    "context": Part("decoding after a context", (*_DECODE, _SAME), plot=("tokens", "tok/s")),
    "first": Part("from a prompt to its first tokens", _FIRST, plot=("tokens", "ms"), log_y=True),
    "prefill": Part("reading prompts", [each for each in _DECODE if each not in ("± %", "GB/s")]),
}


def results(plan: Generation) -> Iterator[Result]:
    flops, bandwidth = find_peaks(
        plan.device, to_dtype(plan.dtype), plan.peak_tflops, plan.peak_tbs
    )
    plan = replace(plan, peak_tflops=flops / 1e12, peak_tbs=bandwidth / 1e12)
    print(
        "The limit is the time to move all bytes or to compute all FLOPs, whichever is longer, at "
        f"{plan.peak_tbs:.4g} TB/s and {plan.peak_tflops:.4g} TFLOP/s.",
        flush=True,
    )
    if not plan.only_peers:
        yield from _our_results(plan)
    for peer in plan.peers:
        release(plan.device)
        job = {"peer": peer, "options": plan.to_dict()}
        yield from in_process(Result("peer", peer), run_peer, plan.timeout, **job)


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
    device: str = "cuda"  # a GPU decodes many states by replay, which moves fewer bytes

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
        return accounting.least_decode_seconds(
            self.config,
            *self.peaks,
            batch,
            **self._itemsizes,
            replay_interval=default_interval(self.config, batch, self.device),
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


def with_limit(
    case: Result,
    plan: Generation,
    time: Timing | float,
    *,
    decoded: int = 0,
    replay_interval: int | None = None,
) -> Result:
    """The case with its time and limit: one decoding step, or a prefill and `decoded` tokens more.

    Only an xLSTM has a limit. `replay_interval` is that of a step by replay.
    """
    if isinstance(time, Timing):
        case, seconds = with_spread(case, time), time.seconds
    else:
        seconds = time
    is_step = case.part in ("decode", "replay", "context", "full", "ways")
    tokens = case.batch if is_step else case.batch * case.length
    counts_time = case.part == "first"  # else the speed counts
    result = replace(case, seconds=seconds)
    if not counts_time:
        result = replace(result, tokens_per_second=tokens / seconds)
    if case.name not in ("ours", "transformers", "xlstm"):
        return result
    assert plan.peak_tflops is not None
    assert plan.peak_tbs is not None
    config, peaks = plan.config, (1e12 * plan.peak_tflops, 1e12 * plan.peak_tbs)
    sizes = itemsizes(plan if case.name == "ours" else replace(plan, quantize="no"))
    if case.name == "transformers":  # its state has the dtype of its weights
        sizes["state_itemsize"] = to_dtype(plan.dtype).itemsize
    rings = {"replay_interval": replay_interval, "ring_itemsize": to_dtype(plan.dtype).itemsize}
    step_sizes = sizes | rings
    step = accounting.least_decode_seconds(config, *peaks, case.batch, **step_sizes)
    if is_step:
        least = step
        moved = accounting.decode_bytes(config, case.batch, **step_sizes)
        result = replace(result, bytes_per_second=moved / seconds)
    else:
        least = accounting.least_prefill_seconds(config, *peaks, case.length, case.batch, **sizes)
        least += decoded * step
    limit = least if counts_time else tokens / least
    return replace(result, limit=limit, percent_of_limit=100 * least / seconds)


def with_spread(case: Result, timing: Timing) -> Result:
    """The case with the spread of its timing. `Result.seconds` is not set."""
    return replace(case, figures=case.figures | {"spread": timing.spread})


def replay_interval(plan: Generation, batch: int) -> int | None:
    """That of a decoding step of an engine with this many slots, as `with_limit` takes it."""
    return default_interval(plan.config, batch, plan.device)


def itemsizes(plan: Generation) -> dict[str, Any]:
    """Bytes of one weight and of one number of the state, as `accounting` takes them."""
    weight: float = to_dtype(plan.dtype).itemsize
    if plan.quantize != "no":  # the mean over all weights, the embedding aside
        schemes = schemes_of(plan.config, plan.quantize)
        counts = {name: prod(shape) for name, shape in plan.config.parameter_shapes().items()}
        del counts["backbone.embeddings.weight"]
        sizes = (
            count * (schemes[name].bytes_per_weight if name in schemes else weight)
            for name, count in counts.items()
        )
        weight = sum(sizes) / sum(counts.values())
    return {"weight_itemsize": weight, "state_itemsize": to_dtype(plan.state_dtype).itemsize}


# Ours


def _our_results(plan: Generation) -> Iterator[Result]:
    if plan.folder is not None:
        yield _start(plan, plan.folder)
        release(plan.device)
    if "drift" in plan.parts:
        yield from drift.results(plan)
        release(plan.device)
    parts = [part for part in _OURS if part in plan.parts]
    if "speculation" in parts and plan.folder is not None:
        parts.remove("speculation")
        yield from texts.results(plan)
        release(plan.device)
    if not parts:
        return
    model = plan_model(plan)
    for part in parts:
        yield from our_part(part, model, plan)


def our_part(part: str, model: XLSTM, plan: Generation) -> Iterator[Result]:
    """The results of one part of this package."""
    yield from _OURS[part](model, plan)
    release(plan.device)


def _start(plan: Generation, folder: str) -> Result:
    """From loading a folder to the first token. Files and compiled kernels may be cached."""
    began = time.perf_counter()
    model = XLSTM.from_pretrained(folder, dtype=to_dtype(plan.dtype), device=plan.device)
    prompts = [[model.config.bos_token_id]]
    plan_generator(model, plan).generate(prompts, max_new_tokens=1, **GREEDY)
    return Result("start", batch=1, length=1, seconds=time.perf_counter() - began)


def _memory(model: XLSTM, plan: Generation) -> Iterator[Result]:
    """Each case in a generator of its own, so that what its CUDA graphs hold counts too."""
    sizes, vocab_size = itemsizes(plan), plan.config.vocab_size
    weights = accounting.weight_bytes(plan.config, sizes["weight_itemsize"])
    state = accounting.state_bytes(plan.config, sizes["state_itemsize"])["total"]

    def result(work: str, length: int, limit: int) -> Result:
        peak = peak_memory(torch.device(plan.device))
        percent = 100 * limit / peak
        case = Result("memory", work=work, batch=1, length=length)
        return replace(case, memory=peak, limit=limit, percent_of_limit=percent)

    # The first generator stacks the model's weights, which takes more memory for a moment.
    plan_generator(model, plan).read(random_prompts(vocab_size, 1, START_TOKENS))
    release(plan.device)
    yield result("loaded", 0, weights)
    lengths = [length for length in plan.contexts if length] or [START_TOKENS]
    for length in lengths:
        release(plan.device)
        plan_generator(model, plan).read(random_prompts(vocab_size, 1, length))
        yield result("prompt read", length, weights + state)
    release(plan.device)
    prompts = random_prompts(vocab_size, 1, lengths[0])
    plan_generator(model, plan).generate(prompts, max_new_tokens=plan.generated, **GREEDY)
    yield result(f"{counted(plan.generated, 'token')} generated", lengths[0], weights + state)


def _decode(model: XLSTM, plan: Generation) -> Iterator[Result]:
    works = [(batch, "greedy", GREEDY) for batch in plan.batches]
    works.insert(1, (1, "temperature 0.8, top_p 0.95", SAMPLED))

    def timed(sampling: dict[str, Any], case: Result) -> Result:
        prompts = random_prompts(plan.config.vocab_size, case.batch, case.length)
        generator = plan_generator(model, plan, case.batch)
        step = measure_decoding(generator, prompts, seconds=plan.seconds, **sampling)
        interval = replay_interval(plan, case.batch)
        return with_limit(case, plan, step, replay_interval=interval)

    for batch, work, sampling in works:
        case = Result("decode", work=work, batch=batch, length=START_TOKENS)
        yield attempt(case, partial(timed, sampling), ValueError)  # `ValueError`: too many slots
        release(plan.device)


def _replay(model: XLSTM, plan: Generation) -> Iterator[Result]:
    def timed(replay: bool, case: Result) -> Result:
        prompts = random_prompts(plan.config.vocab_size, case.batch, case.length)
        generator = plan_generator(model, plan, case.batch, replay=replay)
        step = measure_decoding(generator, prompts, seconds=plan.seconds, **GREEDY)
        return with_limit(case, plan, step, replay_interval=INTERVAL if replay else None)

    for batch in plan.batches:
        for replay in (False, True):
            work = f"replay {'on' if replay else 'off'}"
            case = Result("replay", work=work, batch=batch, length=START_TOKENS)
            yield attempt(case, partial(timed, replay), ValueError)  # `ValueError`: too many slots
            release(plan.device)


def _context(model: XLSTM, plan: Generation) -> Iterator[Result]:
    generator, shortest = plan_generator(model, plan), None

    def timed(case: Result) -> Result:
        # A context of 0 still has the first token, which every prompt starts with.
        state = generator.read(random_prompts(plan.config.vocab_size, 1, max(1, case.length)))
        step = measure_decoding(generator, None, state=state, seconds=plan.seconds, **GREEDY)
        return with_limit(case, plan, step, replay_interval=replay_interval(plan, 1))

    for length in plan.contexts:
        result = attempt(Result("context", work="greedy", batch=1, length=length), timed)
        if result.seconds is not None:
            shortest = shortest or result.seconds
            figures = result.figures | {"of_shortest": shortest / result.seconds}
            result = replace(result, figures=figures)
        yield result


def _first(model: XLSTM, plan: Generation) -> Iterator[Result]:
    generator = plan_generator(model, plan)
    for length in plan.prompts:
        prompts = random_prompts(plan.config.vocab_size, 1, length)
        for tokens in (1, plan.first):
            generate = partial(generator.generate, prompts, max_new_tokens=tokens, **GREEDY)
            seconds = measure(generate, plan.device, enough=ENOUGH)
            work = counted(tokens, "token")
            case = Result("first", work=work, batch=1, length=length, figures={"new": tokens})
            interval = replay_interval(plan, 1)
            yield with_limit(case, plan, seconds, decoded=tokens - 1, replay_interval=interval)


def _prefill(model: XLSTM, plan: Generation) -> Iterator[Result]:
    def timed(case: Result) -> Result:
        generator = plan_generator(model, plan, case.batch)
        prompts = random_prompts(plan.config.vocab_size, case.batch, case.length)
        seconds = measure(lambda: generator.read(prompts), plan.device, enough=ENOUGH)
        return with_limit(case, plan, seconds)

    for length in plan.lengths:
        case = Result("prefill", batch=plan.tokens // length, length=length)
        yield attempt(case, timed, ValueError)
        release(plan.device)


_OURS: dict[str, Callable[[XLSTM, Generation], Iterator[Result]]] = {
    "memory": _memory,  # first: on a CPU the peak is that of the whole process
    "decode": _decode,
    "replay": _replay,
    "context": _context,
    "first": _first,
    "prefill": _prefill,
    "speculation": speculation.results,  # last: it changes the embedding and the head
}


# Peers


@torch.no_grad()
def run_peer(peer: str, options: dict[str, Any]) -> Iterator[Result]:
    """All results of a peer. Runs in a process of its own. `options` are those of the plan."""
    plan = Generation.of(**options)
    timer = PeerTimer(peer, plan)
    yield from timer.start()
    for part in ("decode", "context", "first", "prefill"):
        if part in plan.parts:
            yield from timer.results(part)


class PeerTimer:
    """Times one peer. `start` comes first: it chooses the fastest way, and checks it."""

    def __init__(self, name: str, plan: Generation) -> None:
        self.name, self.plan = name, plan
        self.peer = PEERS[name](plan)
        self.attentions = self.peer.attentions  # those that passed the check, the fastest first
        self.ways: tuple[str, ...] = ()  # those that can decode, the fastest first
        self.decoder: Decoder | None = None
        self._cache: Any = None
        self._room = max(START_TOKENS, *plan.contexts, *plan.prompts) + 2 * MOST_STEPS

    def start(self) -> Iterator[Result]:
        """The time of each way to decode, then the check. Raises a `ValueError` if it fails."""
        decoders: dict[str, tuple[float, Decoder]] = {}
        for way in decoding_ways(self.plan.device):
            if way == EAGER and decoders:
                continue
            case = Result("ways", self.name, f"{self.peer.engine}, {way}", "", 1, START_TOKENS)
            result = attempt(case, partial(self._try, way), Exception)
            yield result
            if result.seconds is None:
                torch.compiler.reset()
            else:
                assert self.decoder is not None
                decoders[way] = result.seconds, self.decoder
            self.decoder = None
        if not decoders:
            raise ValueError(f"{self.name} cannot decode in any way; see the rows above")
        self.ways = tuple(sorted(decoders, key=lambda way: decoders[way][0]))
        self.decoder = decoders[self.ways[0]][1]
        decoders.clear()  # what the slower one holds is freed
        fastest_attention, self.attentions = self.decoder.attention, ()
        for attention in self.peer.attentions:
            self.decoder.attention = attention
            case = Result("check", self.name, self.decoding(), batch=1)
            result = attempt(case, self._check, Exception)
            yield result
            if result.error is None:
                self.attentions += (attention,)
        if not self.attentions:
            raise ValueError(f"{self.name} is not timed: {result.error}")
        self.attentions = tuple(sorted(self.attentions, key=lambda each: each != fastest_attention))
        self.decoder.attention = self.attentions[0]
        if self.peer.compiles_prompts and self.plan.device == "cuda":
            yield attempt(Result("ways", self.name), self._try_compiled_prompts, Exception)

    def choices(self) -> dict[str, Any]:
        """What `start` chose, for `resume`. It changes with the contexts that are timed."""
        return {
            "ways": self.ways,
            "attentions": self.attentions,
            "compiled_prompts": self.peer.reader != self.peer.prompt_logits,
        }

    def resume(self, choices: dict[str, Any]) -> None:
        """Instead of `start`: what another process chose and checked on the same machine."""
        self.ways, self.attentions = tuple(choices["ways"]), tuple(choices["attentions"])
        if choices["compiled_prompts"]:
            self.peer.compile_prompts()
        self._make_decoder(self.ways[0]).attention = self.attentions[0]

    def _check(self, case: Result) -> Result:
        assert self.decoder is not None
        figures: dict[str, Any] = check(PEERS[self.name], self.peer, self.decoder)
        return replace(case, figures=figures)

    def _make_decoder(self, way: str) -> Decoder:
        while self._cache is None:
            try:
                self._cache = self.peer.new_cache(1, self._room)
            except torch.OutOfMemoryError:
                self._room //= 2  # longer contexts are then out of memory
        self.decoder = Decoder(self.peer, way, self._cache)
        return self.decoder

    def _try(self, way: str, case: Result) -> Result:
        self._make_decoder(way)
        with time_limit(self.plan.compile_seconds):
            return self._timed(case)

    def _timed(self, case: Result) -> Result:
        """The case with the time of a step, by the faster way to attend to the cache."""
        decoder = self.decoder
        assert decoder is not None
        if case.length + 2 * MOST_STEPS > self._room:
            raise torch.OutOfMemoryError
        if not self.peer.grows and case.length:
            decoder.read(self.peer.tokens(1, case.length))
        results = []
        for attention in self.attentions:
            decoder.attention = attention
            results.append(attempt(case, self._step, Exception))
            if (results[-1].error or "").startswith("TimeoutError"):
                break  # the time limit is for all of them
        measured = [each for each in results if each.seconds is not None]
        if not measured:
            return results[0]
        best = min(measured, key=lambda each: each.seconds or 0)
        times = {
            attention: math.inf if each.seconds is None else each.seconds
            for attention, each in zip(self.attentions, results, strict=False)
        }
        self.attentions = tuple(sorted(self.attentions, key=lambda each: times.get(each, math.inf)))
        decoder.attention = fastest = self.attentions[0]
        if case.length >= _LONG:  # what is much slower now is more so after longer contexts
            slowest = _MUCH_SLOWER * times[fastest]
            self.attentions = tuple(
                each for each in self.attentions if times.get(each, math.inf) <= slowest
            )
        return replace(best, work=self.decoding())

    def _step(self, case: Result) -> Result:
        assert self.decoder is not None
        step = self.decoder.step_time(case.length, seconds=self.plan.seconds)
        return with_limit(case, self.plan, step)

    def decoding(self) -> str:
        """The engine, and how it decodes."""
        assert self.decoder is not None
        return joined(self.peer.engine, self.decoder.way, self.decoder.attention)

    def _try_compiled_prompts(self, case: Result) -> Result:
        """Compiles the reading of prompts, if that is faster."""
        prompts = self.peer.tokens(1, min(2048, self._room))
        # A cache as long as the prompts would be compiled for that case only.
        cache = self.peer.new_cache(1, prompts.shape[1] + 1)
        eager = self.peer.reader

        def seconds() -> float:
            def read() -> None:
                self.peer.set_length(cache, 0)
                self.peer.reader(prompts, cache)

            return measure(read, self.plan.device, repeats=2)

        before = seconds()
        self.peer.compile_prompts()
        try:
            with time_limit(self.plan.compile_seconds):
                after = seconds()
        except BaseException:
            self.peer.reader = eager
            raise
        if after > before:
            self.peer.reader = eager
        work = f"{self._reading()} (eager {1e3 * before:.1f} ms, compiled {1e3 * after:.1f} ms)"
        return replace(
            case, work=work, batch=1, length=prompts.shape[1], seconds=min(before, after)
        )

    def _reading(self) -> str:
        is_eager = self.peer.reader == self.peer.prompt_logits
        return f"{self.peer.engine}, prompts {'eager' if is_eager else 'compiled'}"

    def results(self, part: str) -> Iterator[Result]:
        """Of one part. `prefill` comes last: it needs the cache's memory."""
        measured = {
            "decode": self._decode,
            "context": self._context,
            "first": self._first,
            "prefill": self._prefill,
        }
        yield from measured[part]()

    def drop_decoder(self) -> None:
        self.decoder = self._cache = None
        release(self.plan.device)

    def _decode(self) -> Iterator[Result]:
        case = Result("decode", self.name, self.decoding(), "", 1, START_TOKENS)
        yield attempt(case, self._timed, Exception)

    def _context(self) -> Iterator[Result]:
        shortest = None
        for length in self.plan.contexts:
            case = Result("context", self.name, self.decoding(), "", 1, length)
            result = attempt(case, self._timed, Exception)
            if result.seconds is not None:
                shortest = shortest or result.seconds
                figures = result.figures | {"of_shortest": shortest / result.seconds}
                result = replace(result, figures=figures)
            yield result

    def _first(self) -> Iterator[Result]:
        for length in self.plan.prompts:
            assert self.decoder is not None
            steps = joined(self.decoder.way, self.decoder.attention)
            case = Result("first", self.name, f"{self._reading()}, steps {steps}", "", 1, length)
            rows = [replace(case, figures={"new": tokens}) for tokens in (1, self.plan.first)]
            try:
                times = self._first_seconds(length, self.plan.first)
            except Exception as error:
                yield from (failed(row, error) for row in rows)
                continue
            for row, seconds in zip(rows, times, strict=True):
                yield with_limit(row, self.plan, seconds, decoded=row.figures["new"] - 1)

    def _first_seconds(self, length: int, tokens: int) -> tuple[float, float]:
        """Until the first token of an output, and until all its tokens."""
        decoder = self.decoder
        assert decoder is not None
        if length + tokens > self._room:
            raise torch.OutOfMemoryError
        decoder.prepare(length, length + tokens)
        prompts, first = self.peer.tokens(1, length), []

        def generate() -> None:
            began = time.perf_counter()
            decoder.read(prompts)
            decoder.token.tolist()
            first.append(time.perf_counter() - began)
            for more in range(tokens - 1):
                decoder.step(length + more)
            decoder.token.tolist()

        seconds = measure(generate, self.plan.device, repeats=2, enough=ENOUGH)
        return median(first[1:]), seconds

    def _prefill(self) -> Iterator[Result]:
        self.drop_decoder()
        for length in self.plan.lengths:
            batch = self.plan.tokens // length
            case = Result("prefill", self.name, self._reading(), "", batch, length)
            yield attempt(case, self._time_reading, Exception)
            release(self.plan.device)

    def _time_reading(self, case: Result) -> Result:
        prompts = self.peer.tokens(case.batch, case.length)
        cache = self.peer.new_cache(case.batch, case.length) if self.peer.grows else None

        def read() -> object:
            if cache is not None:
                self.peer.set_length(cache, 0)
            return self.peer.reader(prompts, cache)[0][:, -1].argmax(-1).tolist()

        seconds = measure(read, self.plan.device, repeats=2, enough=ENOUGH)
        return with_limit(case, self.plan, seconds)


def joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def decoding_ways(device: str) -> tuple[str, ...]:
    return (EAGER,) if device == "cpu" else (COMPILED, GRAPH, EAGER)
