"""The paper's speed figures: xLSTM 7B here, in other packages, and beside other models.

All weights are random, and nothing is downloaded. The figures:

    context    tokens per second of one sequence, after contexts of several lengths; peak memory
    first      seconds from a prompt to its first token, and to its first 100
    generated  seconds and peak memory of generating many tokens without a prompt
    prefill    tokens per second of reading 65,536 tokens, as many short or few long prompts
    full       tokens per second of a full GPU: the largest batch that fits beside its cache

Each system is measured in a process of its own. The decoding of other models is checked before it
is timed (`peers.py`).
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from statistics import median
from typing import Annotated, Any, Protocol, TypeAlias

import torch
import typer

from options import chosen, numbers
from peers import CHECKED, COMPILED, EAGER, GRAPH, MOST_STEPS, PEERS, Decoder, Llama3, check
from processes import (
    Call,
    Case,
    Here,
    Json,
    Timeout,
    exit_if_failed,
    measure_alone,
    measure_here,
    repeated,
    results_file,
)
from xlstm7b import accounting
from xlstm7b.bench.generation import Limits
from xlstm7b.bench.measure import (
    GREEDY,
    Timing,
    find_peaks,
    free_memory,
    make_generator,
    measure,
    measure_decoding,
    random_model,
    random_prompts,
    release,
    reset_peak,
)
from xlstm7b.bench.results import OURS, Results
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, listed, option
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_device, to_dtype
from xlstm7b.generate.engine import peak_memory
from xlstm7b.generate.replay import INTERVAL

LIMITS = "limits"
SYSTEMS = (OURS, *PEERS, LIMITS)
FIGURES = {  # the names in the results
    "context": ("decode", "peak memory"),
    "first": ("first token", "{} tokens"),
    "generated": ("generation time", "peak memory"),
    "prefill": ("prefill",),
    "full": ("full GPU",),
}
QUANTIZED = ("fp8", "int8", "int4")
_START = 16  # tokens of a prompt, if its length does not matter
MOST = 4096  # sequences of a full GPU
_ENOUGH = 1.0  # seconds: a prompt that takes as long is timed once

Numbers: TypeAlias = tuple[int, ...]
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Plan:
    """What is measured, and with which sizes."""

    size: str
    device: str
    weights: str
    states: str
    figures: tuple[str, ...]
    contexts: Numbers
    prompts: Numbers
    first: int
    generated: Numbers
    tokens: int
    lengths: Numbers
    full_contexts: Numbers
    batches: Numbers
    seconds: float

    def __post_init__(self) -> None:
        """`ValueError` for what cannot be measured."""
        ModelConfig.named(self.size)
        chosen("figure", self.figures, FIGURES)
        chosen("dtype of weights", [self.weights], ("bfloat16", "float32", *QUANTIZED))
        chosen("dtype of states", [self.states], ("float32", "bfloat16"))
        if self.first < 1:
            raise ValueError(f"--first must be at least 1, not {self.first}")
        if not self.seconds > 0:
            raise ValueError(f"--seconds must be above 0, not {self.seconds:g}")
        for length in self.lengths:
            if self.tokens % length or self.tokens < 1:
                raise ValueError(f"prompts of {length} do not divide {self.tokens} tokens")

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.named(self.size)

    @property
    def dtype(self) -> str:
        """Of weights that are not quantised, such as those of other packages."""
        return "float32" if self.weights == "float32" else "bfloat16"

    def cases(self, name: str) -> list[Case]:
        """All that is measured of a system, in order."""
        return [
            Case(tuple(what.format(self.first) for what in FIGURES[figure]), shape, system)
            for figure in FIGURES
            if figure in self.figures
            for system, precision in self._kinds(name, figure)
            for shape in self._shapes(figure, {"model": self.size, **precision})
        ]

    def _kinds(self, name: str, figure: str) -> list[tuple[str, dict[str, str]]]:
        """The names and precisions of a system."""
        if name == OURS:
            return [(OURS, {"weights": self.weights, "states": self.states})]
        if name == LIMITS:
            kinds = [{"weights": kind, "cache": kind} for kind in _CACHE_KINDS]
            system = f"limit of {Llama3.system}"
            return [(system, kind) for kind in kinds] if figure in ("context", "full") else []
        return [(PEERS[name].system, PEERS[name].precision(self.dtype, self.states))]

    def _shapes(self, figure: str, of: Mapping[str, int | str]) -> Iterator[dict[str, int | str]]:
        match figure:
            case "context":
                yield from ({**of, "batch": 1, "context": length} for length in self.contexts)
            case "first":
                yield from ({**of, "prompt": length} for length in self.prompts)
            case "generated":
                yield from ({**of, "tokens": count} for count in self.generated)
            case "prefill":
                pairs = ((self.tokens // length, length) for length in self.lengths)
                yield from ({**of, "batch": batch, "length": length} for batch, length in pairs)
            case "full":  # the result has the batch too
                yield from ({**of, "context": length} for length in self.full_contexts)


# The command


@app.command(cls=Command)
def speed(
    context: typer.Context,
    systems: Annotated[
        list[str] | None,
        typer.Argument(help=f"What to measure: {', '.join(SYSTEMS)}. By default all of them."),
    ] = None,
    figures: Annotated[str, option("Figures to measure.")] = ",".join(FIGURES),
    size: Annotated[str, option("Size of the models: 7b, or a small one for a trial.")] = "7b",
    device: Annotated[str | None, option("cuda or cpu.", default="a GPU if there is one")] = None,
    weights: Annotated[
        str,
        option(
            f"Weights of {OURS}: bfloat16, float32, {', '.join(QUANTIZED)}. The others have "
            "float32 if it says so, else bfloat16."
        ),
    ] = "bfloat16",
    states: Annotated[str, option(f"States of {OURS} and xlstm: float32 or bfloat16.")] = "float32",
    contexts: Annotated[
        str, option("context: tokens before those that are timed.")
    ] = "0,2048,4096,8192,16384,32768,65536,131072",
    prompts: Annotated[
        str, option("first: lengths of the prompts, in tokens.")
    ] = "128,512,2048,8192,16384,65536",
    first: Annotated[int, option("first: tokens that are generated after a prompt.")] = 100,
    generated: Annotated[str, option("generated: numbers of tokens.")] = "1024,4096",
    tokens: Annotated[int, option("prefill: tokens of all prompts.")] = 65536,
    lengths: Annotated[
        str, option("prefill: lengths of the prompts, in tokens.")
    ] = "2048,8192,16384,65536",
    full_contexts: Annotated[
        str, option("full: tokens before those that are timed.")
    ] = "2048,16384,65536,131072",
    batches: Annotated[
        str, option("full: numbers of sequences.", default="the largest that fits")
    ] = "",
    seconds: Annotated[float, option("Length of one timing of decoding, in seconds.")] = 0.3,
    timeout: Timeout = 480.0,
    json: Json = None,
    call: Call = None,
    here: Here = False,
) -> None:
    """Measures the paper's speed figures: this package, other packages and other models.

    All have random weights. Nothing is downloaded.
    """
    names = chosen("system", systems, SYSTEMS)
    params = context.params | {"device": to_device(device).type, "figures": tuple(listed(figures))}
    for each in fields(Plan):
        if each.type == Numbers:
            name, text = each.name.replace("_", "-"), params[each.name]
            least = 0 if name == "contexts" else 1
            params[each.name] = tuple(numbers(name, text, least)) if text else ()
    plan = Plan(**{each.name: params[each.name] for each in fields(Plan)})
    with results_file(json) as file:
        packages = [each for name in names if name in PEERS for each in PEERS[name].packages]
        results = Results("speed", plan.device, file=file, call=call, packages=packages)
        for name in names:
            cases = plan.cases(name)
            if here:
                measure_here(cases, partial(_start, name, plan, results), results)
                continue
            print(f"\n== {name}", flush=True)
            command = repeated(
                __file__, context, systems=[name], json=file, call=results.call, here=True
            )
            measure_alone(cases, command, timeout, results)
        exit_if_failed(results)


class System(Protocol):
    """A method for each figure."""

    def context(self, case: Case) -> None: ...
    def first(self, case: Case) -> None: ...
    def generated(self, case: Case) -> None: ...
    def prefill(self, case: Case) -> None: ...
    def full(self, case: Case) -> None: ...


def _start(name: str, plan: Plan, results: Results) -> Callable[[Case], None]:
    """Builds a system. Returns what measures one case of it."""
    torch.set_grad_enabled(False)
    system: Any = {OURS: Ours, LIMITS: LlamaLimits}.get(name, Other)
    built: System = system(name, plan, results)
    figure_of = {names[0]: figure for figure, names in FIGURES.items()}

    def run(case: Case) -> None:
        release(plan.device)
        getattr(built, figure_of[case.whats[0]])(case)

    return run


class _Measured:
    """Adds the results of one system."""

    def __init__(self, name: str, plan: Plan, results: Results) -> None:
        self.name, self.plan, self.results = name, plan, results
        self.device = plan.device
        self.peaks = find_peaks(plan.device, to_dtype(plan.dtype))

    def add(self, case: Case, *values: float, note: str = "", **named: Any) -> None:
        """One value for each figure of the case. `named` belongs to the first figure."""
        for what, value in zip(case.whats, values, strict=True):
            unit = _UNITS.get(what, "s")
            self.results.add(
                what, case.shape, value, unit, system=case.system, note=note or None, **named
            )
            named = {}

    def add_full(self, case: Case, step: Timing, batch: int, limit: float, note: str) -> None:
        """Tokens per second of a full GPU, which is known to hold this batch."""
        of_batch = case._replace(shape={**case.shape, "batch": batch})
        self.add(of_batch, batch / step.seconds, limit=limit, spread=step.spread, note=note)

    def peak_gb(self) -> float:
        return peak_memory(torch.device(self.device)) / 1e9


_UNITS = {
    **dict.fromkeys(("decode", "prefill", "full GPU"), "tok/s"),
    "peak memory": "GB",
}


# This package


class Ours(_Measured):
    """This package through `Generator`, as users call it."""

    def __init__(self, name: str, plan: Plan, results: Results) -> None:
        super().__init__(name, plan, results)
        quantize = plan.weights if plan.weights in QUANTIZED else None
        self.model = random_model(
            plan.size, dtype=plan.dtype, device=plan.device, quantize=quantize
        )
        self.limits = Limits(
            plan.config, self.peaks, plan.dtype, plan.states, quantize, plan.device
        )
        self._latest: Any = None
        self._full: tuple[int, Timing] | None = None

    def _generator(self, batch: int = 1) -> Any:
        """One at a time, for its memory."""
        if self._latest is None or self._latest.batch_size != batch:
            self._latest = None
            release(self.device)
            self._latest = make_generator(
                self.model, state_dtype=self.plan.states, batch_size=batch
            )
        return self._latest

    def _prompts(self, length: int, batch: int = 1) -> list[list[int]]:
        return random_prompts(self.plan.config.vocab_size, batch, length)

    def context(self, case: Case) -> None:
        # A context of 0 still has the first token, which every prompt starts with.
        generator = self._generator()
        state = generator.read(self._prompts(max(1, int(case.shape["context"]))))
        reset_peak(self.device)
        step = measure_decoding(generator, None, state=state, seconds=self.plan.seconds, **GREEDY)
        limit, memory = self.limits.decode(), self.peak_gb()
        self.add(case, 1 / step.seconds, memory, limit=limit, spread=step.spread, note="Generator")

    def first(self, case: Case) -> None:
        length, last = int(case.shape["prompt"]), self.plan.first
        times = [self._seconds(length, count) for count in (1, last)]
        self.add(case, *times, limit=self.limits.first(length), note="Generator")

    def generated(self, case: Case) -> None:
        self._generator()
        reset_peak(self.device)
        seconds = self._seconds(1, int(case.shape["tokens"]))
        self.add(case, seconds, self.peak_gb(), note="Generator")

    def _seconds(self, length: int, tokens: int) -> float:
        """From a prompt to this many tokens."""
        generate = partial(
            self._generator().generate, self._prompts(length), max_new_tokens=tokens, **GREEDY
        )
        return measure(generate, self.device, enough=_ENOUGH)

    def prefill(self, case: Case) -> None:
        batch, length = int(case.shape["batch"]), int(case.shape["length"])
        generator, prompts = self._generator(batch), self._prompts(length, batch)
        seconds = measure(lambda: generator.read(prompts), self.device, enough=_ENOUGH)
        limit = self.limits.prefill(length, batch)
        self.add(case, batch * length / seconds, limit=limit, note="Generator")

    def full(self, case: Case) -> None:
        """A step takes the same time after any context, so it is timed once."""
        if self._full is None:
            self._full = fastest_batch(self._bytes_of_row(), self._step, self.plan)
        batch, step = self._full
        self.add_full(case, step, batch, self.limits.decode(batch), "Generator")

    def _step(self, batch: int) -> Timing:
        generator, prompts = self._generator(batch), self._prompts(_START, batch)
        return measure_decoding(generator, prompts, seconds=self.plan.seconds, **GREEDY)

    def _bytes_of_row(self) -> int:
        config = self.plan.config
        states = accounting.state_bytes(config, to_dtype(self.plan.states).itemsize)["total"]
        rings = accounting.ring_bytes(config, INTERVAL, to_dtype(self.plan.dtype).itemsize)
        return states + rings + _LOGIT_BYTES * config.vocab_size


def fastest_batch(row: int, step: Callable[[int], Timing], plan: Plan) -> tuple[int, Timing]:
    """The number of sequences with the most tokens per second, and the time of its step.

    Of those in the plan, else the largest: as many as fit into free memory, where a sequence needs
    about `row` bytes. Out of memory, a smaller batch is tried.
    """
    release(plan.device)
    largest = min(MOST, int(_FREE_SHARE * free_memory(plan.device) // row))
    measured = []
    for wanted in plan.batches or [largest]:
        batch = wanted
        while batch:
            try:
                measured.append((batch, step(batch)))
                break
            except Exception as error:  # kernels and engines have errors of their own for this
                if not re.search("memory|not fit", str(error)):
                    raise
            release(plan.device)
            batch = batch * 7 // 8
    if not measured:
        raise torch.OutOfMemoryError
    return max(measured, key=lambda each: each[0] / each[1].seconds)


_FREE_SHARE = 0.9  # the rest is for what a step computes
_LOGIT_BYTES = 16  # of each id in a row: its logit in float32, and what is computed from it


# Other packages and models


class Other(_Measured):
    """A model of another package. Its decoding is checked first."""

    def __init__(self, name: str, plan: Plan, results: Results) -> None:
        super().__init__(name, plan, results)
        self.peer = PEERS[name](plan.size, plan.device, plan.dtype, plan.states)
        longest = max(CHECKED, *plan.contexts, plan.first + max(plan.prompts), *plan.generated)
        self._room = longest + 2 * MOST_STEPS
        self._decoder: Decoder | None = None
        self._full: tuple[int, Timing] | None = None
        if {"context", "first", "generated"} & set(plan.figures):
            check(self.decoder)
        else:  # without compiling for one sequence
            check(Decoder(self.peer, self.peer.new_cache(1, CHECKED), way=GRAPH))

    @property
    def decoder(self) -> Decoder:
        """Of one sequence. All lengths share its cache: its step is compiled for one length."""
        while self._decoder is None:
            try:
                self._decoder = Decoder(self.peer, self.peer.new_cache(1, self._room))
            except torch.OutOfMemoryError:
                self._room //= 2  # longer contexts are then out of memory
        return self._decoder

    def _drop_decoder(self) -> None:
        """Frees its cache."""
        self._decoder = None
        release(self.device)

    def _fits(self, length: int) -> Decoder:
        decoder = self.decoder
        if length + 2 * MOST_STEPS > self._room:
            raise torch.OutOfMemoryError
        return decoder

    def _gb_of(self, length: int) -> float:
        """The peak of memory, without what a text of this length does not use of a cache."""
        if not self.peer.grows:
            return self.peak_gb()
        unused = self.peer.cache_bytes(self._room) - self.peer.cache_bytes(length)
        return self.peak_gb() - unused / 1e9

    def context(self, case: Case) -> None:
        length = int(case.shape["context"])
        decoder = self._fits(length)
        decoder.prepare(length + MOST_STEPS, length + MOST_STEPS)
        if not self.peer.grows and length:
            decoder.read(self.peer.tokens(1, length))
        release(self.device)  # the models of the check too: Python has not freed them yet
        step = decoder.step_time(length, seconds=self.plan.seconds)
        limit, memory = self._limit(1, length), self._gb_of(length + 1)
        self.add(case, 1 / step.seconds, memory, limit=limit, spread=step.spread, note=decoder.note)

    def _limit(self, batch: int, context: int) -> float:
        return batch * self.peaks[1] / self.peer.step_bytes(batch, context)

    def first(self, case: Case) -> None:
        self.peer.compile_prompts()
        times = self._seconds(int(case.shape["prompt"]), self.plan.first)
        self.add(case, *times, note=f"{self._reading()}, steps {self.decoder.way}")

    def generated(self, case: Case) -> None:
        count = int(case.shape["tokens"])
        release(self.device)
        _, seconds = self._seconds(1, count)
        self.add(case, seconds, self._gb_of(count), note=self.decoder.note)

    def _seconds(self, length: int, tokens: int) -> tuple[float, float]:
        """From a prompt to the first token, and to this many tokens."""
        decoder = self._fits(length + tokens)
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

        seconds = measure(generate, self.device, repeats=2, enough=_ENOUGH)
        return median(first[1:]), seconds

    def prefill(self, case: Case) -> None:
        self._drop_decoder()
        self.peer.compile_prompts()
        batch, length = int(case.shape["batch"]), int(case.shape["length"])
        prompts = self.peer.tokens(batch, length)
        cache = self.peer.new_cache(batch, length) if self.peer.grows else None

        def read() -> object:
            self.peer.set_length(cache, 0)
            return self.peer.reader(prompts, cache)[0][:, -1].argmax(-1).tolist()

        seconds = measure(read, self.device, repeats=2, enough=_ENOUGH)
        self.add(case, batch * length / seconds, note=self._reading())

    def _reading(self) -> str:
        is_eager = self.peer.reader == self.peer.prompt_logits
        return f"{self.peer.engine}, prompts {'eager' if is_eager else 'compiled'}"

    def full(self, case: Case) -> None:
        self._drop_decoder()
        length = int(case.shape["context"])
        if self.peer.grows:
            batch, step = self._timed_batch(length)
        else:  # a step takes the same time after any context
            self._full = self._full or self._timed_batch(0)
            batch, step = self._full
        way = COMPILED if self.peer.compiles_batches else GRAPH
        note = f"{self.peer.engine}, {EAGER if self.device == 'cpu' else way}"
        self.add_full(case, step, batch, self._limit(batch, length), note)

    def _timed_batch(self, length: int) -> tuple[int, Timing]:
        """A batch, and the time of its step."""
        room = length + 2 * MOST_STEPS
        row = self.peer.cache_bytes(room) + _LOGIT_BYTES * self.peer.vocab_size

        def timed(batch: int, way: str | None = None) -> Timing:
            decoder = Decoder(self.peer, self.peer.new_cache(batch, room), batch=batch, way=way)
            return decoder.step_time(length, seconds=self.plan.seconds)

        if self.peer.grows or not self.peer.compiles_batches:
            return fastest_batch(row, timed, self.plan)
        # Such a step is compiled for one batch, which is found without compiling.
        batch, _ = fastest_batch(row, partial(timed, way=GRAPH), self.plan)
        release(self.device)
        return batch, timed(batch)


# The limit of a Transformer's memory traffic

_CACHE_KINDS = {"bfloat16": 2, "8 bits": 1}  # bytes of a weight, and of a number in the cache
_USABLE = 0.95  # of a GPU's memory, for weights and cache


@dataclass(frozen=True)
class TransformerLimit:
    """The best that memory allows Llama 3.1 8B, in any engine without speculation.

    A step reads all weights but the embedding, and the KV cache, at `bandwidth` bytes/s.
    """

    bandwidth: float
    itemsize: int = 2

    def decode(self, context: int, batch: int = 1) -> float:
        """Tokens per second."""
        moved = self._numbers["read"] + batch * context * self._numbers["token"]
        return batch * self.bandwidth / (self.itemsize * moved)

    def memory(self, context: int, batch: int = 1) -> int:
        """Bytes of all weights and of the cache."""
        numbers = self._numbers
        cache = batch * context * numbers["token"]
        return self.itemsize * (numbers["embedding"] + numbers["read"] + cache)

    def largest_batch(self, context: int, memory: float) -> int:
        rest = _USABLE * memory - self.memory(0)
        return int(rest // (self.itemsize * context * self._numbers["token"]))

    @property
    def _numbers(self) -> dict[str, int]:
        """Of the embedding, in the other weights, and of one token in the cache."""
        shape = Llama3.shape()
        width, ffn, vocab = (shape[f"{of}_size"] for of in ("hidden", "intermediate", "vocab"))
        keys = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
        # q and o, k and v, the SwiGLU, two norms; after all layers a norm and the head.
        layer = 2 * width * width + 2 * width * keys + 3 * width * ffn + 2 * width
        layers = shape["num_hidden_layers"]
        read = layers * layer + width + vocab * width
        return {"embedding": vocab * width, "read": read, "token": 2 * layers * keys}


class LlamaLimits(_Measured):
    """The limits of Llama 3.1 8B on this GPU. Nothing is run."""

    def context(self, case: Case) -> None:
        limit, length = self._limit(case), int(case.shape["context"])
        self.add(case, limit.decode(length), limit.memory(length) / 1e9, note=_TRAFFIC)

    def full(self, case: Case) -> None:
        limit, length = self._limit(case), int(case.shape["context"])
        is_gpu = self.device == "cuda"
        memory = torch.cuda.mem_get_info()[1] if is_gpu else free_memory(self.device)
        batch = limit.largest_batch(length, memory)
        case = case._replace(shape={**case.shape, "batch": batch})
        self.add(case, limit.decode(length, batch), note=_TRAFFIC)

    def _limit(self, case: Case) -> TransformerLimit:
        return TransformerLimit(self.peaks[1], _CACHE_KINDS[str(case.shape["cache"])])


_TRAFFIC = "computed from memory traffic"

if __name__ == "__main__":
    main(app)
