"""Our model's parts of `bench/generation.py`, and what its peers share with them."""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from xlstm7b import accounting
from xlstm7b.bench.generation_results import Plan, Result, machine
from xlstm7b.bench.peer import seconds
from xlstm7b.config import ModelConfig
from xlstm7b.generate.decoder import Decoder
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.sampling import SamplingSettings
from xlstm7b.generate.texts import peak_memory
from xlstm7b.model import XLSTM
from xlstm7b.model.init import init_parameters

START_TOKENS = 16  # that every row reads before it decodes
MOST_STEPS = 100  # in one timing
GREEDY = SamplingSettings(max_new_tokens=1 << 40, temperature=0)  # nothing ends
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.95)

Module = TypeVar("Module", bound=torch.nn.Module)


def made(make: Callable[[], Module], plan: Plan) -> Module:
    """A module made where it runs, in the plan's dtype, with the same random weights every time."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(plan.torch_dtype)
    try:
        with torch.device(plan.device):
            return make().eval()
    finally:
        torch.set_default_dtype(before)


def random_model(config: ModelConfig, dtype: torch.dtype, device: str) -> XLSTM:
    """Of random weights, the same every time, and with gates that look at their input."""
    torch.manual_seed(0)
    model = XLSTM.empty(config, dtype=dtype, device=device)
    init_parameters(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_preact.weight"):
                parameter.normal_(std=0.02)
    return model


def model_options(description: str) -> argparse.ArgumentParser:
    """The options of a command that measures a random model, to which it adds its own."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", default="7b" if on_gpu else "tiny", help="a named size")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", help="cuda or cpu")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--json", type=Path, help="write the results there")
    return parser


def model_asked_for(given: argparse.Namespace) -> tuple[XLSTM, dict[str, str]]:
    """The random model that these options name, and where it is; both are printed."""
    about = machine(given.device)
    print(", ".join(about.values()))
    print(f"{given.size}, {given.dtype}, random weights", flush=True)
    config = ModelConfig.named(given.size)
    return random_model(config, getattr(torch, given.dtype), given.device), about


def our_model(plan: Plan) -> FusedModel:
    try:
        return FusedModel(random_model(plan.config, plan.torch_dtype, plan.device))
    except torch.OutOfMemoryError as error:
        raise ValueError(f"a {plan.size} in {plan.dtype} does not fit into this GPU") from error


def our_decoder(model: FusedModel, plan: Plan, batch: int = 1) -> Decoder:
    return Decoder(model, batch, state_dtype=getattr(torch, plan.state_dtype))


def prompts(vocab_size: int, batch: int, length: int) -> list[list[int]]:
    """Random ids, the same ones every time."""
    draw = torch.Generator().manual_seed(length)
    ids: list[list[int]] = torch.randint(vocab_size, (batch, length), generator=draw).tolist()
    return ids


def seconds_per_step(run: Callable[[int], object], plan: Plan) -> float:
    """The median over timings of many steps at once; `run(n)` makes n."""
    run(2)  # compiles, captures
    device = plan.torch_device
    once = seconds(lambda: run(4), 1, device) / 4
    steps = max(4, min(MOST_STEPS, round(plan.seconds / once)))
    return seconds(lambda: run(steps), 3, device) / steps


def decoding_seconds(
    decoder: Decoder, plan: Plan, length: int, settings: SamplingSettings = GREEDY
) -> float:
    """Of one step of all rows, behind `length` tokens."""
    decoder.start(None)
    if length:
        decoder.prefill(prompts(plan.config.vocab_size, decoder.batch, length))
    for row in range(decoder.batch):
        decoder.sampler.set_row(row, settings, seed=row)
    decoder.sample()

    def run(steps: int) -> None:
        for _ in range(steps):
            decoder.decode_one()

    return seconds_per_step(run, plan)


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def attempt(
    blank: Result, measure: Callable[[Result], Result], *failures: type[Exception]
) -> Result:
    """What is measured, or the blank result with the reason in one line why it could not be."""
    try:
        return measure(blank)
    except torch.OutOfMemoryError:
        return replace(blank, error="out of memory")
    except failures as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return replace(blank, error=reason[:200])


# The parts


def memory(model: FusedModel, plan: Plan) -> Iterator[Result]:
    """Each from a decoder of its own: what its graphs need while they run counts, too."""
    device, sizes = plan.torch_device, plan.itemsizes
    weights = accounting.weight_bytes(plan.config, sizes["weight_itemsize"])
    state = accounting.state_bytes(plan.config, sizes["state_itemsize"])["total"]

    def result(work: str, length: int, limit: int) -> Result:
        peak = peak_memory(device)
        percent = 100 * limit / peak
        return Result(
            "memory", "ours", work, 1, length, memory=peak, limit=limit, percent_of_limit=percent
        )

    release(plan.device)
    yield result("loaded", 0, weights)
    lengths = [length for length in plan.contexts if length] or [START_TOKENS]
    for length in lengths:
        release(plan.device)
        decoder = our_decoder(model, plan)
        decoder.prefill(prompts(plan.config.vocab_size, 1, length))
        decoder.logits[0, 0].item()  # waits: a graph must not go while it runs
        del decoder
        yield result("prompt read", length, weights + state)
    release(plan.device)
    decoder = our_decoder(model, plan)
    decoder.prefill(prompts(plan.config.vocab_size, 1, lengths[0]))
    decoder.sampler.set_row(0, GREEDY, seed=0)
    decoder.sample()
    for _ in range(plan.generated):
        decoder.decode_one()
    decoder.sampler.tokens.tolist()
    yield result(f"{plan.generated} tokens generated", lengths[0], weights + state)


def decode(model: FusedModel, plan: Plan) -> Iterator[Result]:
    works = [(batch, "greedy", GREEDY) for batch in plan.batches]
    works.insert(1, (1, "temperature 0.8, top_p 0.95", SAMPLED))

    def measure(settings: SamplingSettings, blank: Result) -> Result:
        decoder = our_decoder(model, plan, blank.batch)
        return blank.stepped(plan, decoding_seconds(decoder, plan, blank.length, settings))

    for batch, work, settings in works:
        blank = Result("decode", "ours", work, batch, START_TOKENS)
        yield attempt(blank, partial(measure, settings))
        release(plan.device)


def context(model: FusedModel, plan: Plan) -> Iterator[Result]:
    decoder = our_decoder(model, plan)
    shortest = None
    for length in plan.contexts:
        step = decoding_seconds(decoder, plan, length)
        shortest = shortest or step
        result = Result("context", "ours", "greedy", 1, length).stepped(plan, step)
        yield replace(result, ratio=shortest / step)


def first(model: FusedModel, plan: Plan) -> Iterator[Result]:
    decoder = our_decoder(model, plan)

    def times(prompt: list[list[int]]) -> tuple[float, float]:
        decoder.start(None)
        if plan.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        decoder.prefill(prompt)
        decoder.sampler.set_row(0, GREEDY, seed=0)
        decoder.sample()
        decoder.sampler.tokens.tolist()
        one = time.perf_counter() - began
        for _ in range(plan.first - 1):
            decoder.decode_one()
        decoder.sampler.tokens.tolist()
        return one, time.perf_counter() - began

    for length in plan.prompts:
        prompt = prompts(plan.config.vocab_size, 1, length)
        one, many = map(median, zip(*[times(prompt) for _ in range(4)][1:], strict=True))
        blank = Result("first", "ours", "1 token", 1, length)
        yield blank.read(plan, one)
        yield replace(blank, work=f"{plan.first} tokens").read(plan, many, decoded=plan.first - 1)


def prefill(model: FusedModel, plan: Plan) -> Iterator[Result]:
    def measure(blank: Result) -> Result:
        decoder = our_decoder(model, plan, blank.batch)
        prompt = prompts(plan.config.vocab_size, blank.batch, blank.length)

        def read() -> None:
            decoder.start(None)
            decoder.prefill(prompt)

        return blank.read(plan, seconds(read, 2, plan.torch_device))

    for length in plan.lengths:
        blank = Result("prefill", "ours", "", plan.tokens // length, length)
        yield attempt(blank, measure)
        release(plan.device)


def start(plan: Plan) -> Result:
    """Files that were read lately come from the system's memory, and kernels may be compiled."""
    began = time.perf_counter()
    assert plan.folder is not None
    model = XLSTM.from_pretrained(plan.folder, dtype=plan.torch_dtype, device=plan.device)
    decoder = our_decoder(FusedModel(model), plan)
    decoder.prefill([[model.config.bos_token_id]])
    decoder.sampler.set_row(0, GREEDY, seed=0)
    decoder.sample()
    decoder.sampler.tokens.tolist()
    return Result("start", "ours", "", 1, 1, seconds=time.perf_counter() - began)


def our_results(plan: Plan) -> Iterator[Result]:
    parts = {
        "memory": memory, "decode": decode, "context": context, "first": first, "prefill": prefill,
    }  # fmt: skip
    if plan.folder is not None:
        yield start(plan)
        release(plan.device)
    model = our_model(plan) if plan.parts else None
    for part, measure in parts.items():
        if model is not None and part in plan.parts:
            yield from measure(model, plan)
            release(plan.device)
