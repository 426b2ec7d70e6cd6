"""`xlstm7b bench generation`: how fast a model generates, and how much memory that takes.

Everything is measured through `Generator`, as users call it, sampling included. Parts: peak memory;
decoding at several batch sizes, and after contexts of several lengths; the time from a prompt to
its first tokens; prefill of a constant number of tokens as many short or few long prompts; with a
folder, the time from saved weights to the first token. Every figure is shown with its limit.

Peers run in processes of their own, at batch 1 except for prefill, with random weights:

- `transformers`: its xLSTM, with the kernels of `xlstm` if that is installed.
- `xlstm`: the authors' package with fused weights and the kernels of `mlstm_kernels`: eager, in a
  CUDA graph, and compiled in a CUDA graph. Like `transformers`, it computes the logits of every
  token of a prompt.
- `llama2`, `llama3`: Llama-2-7B and Llama-3.1-8B in `transformers` if the size is 7b, else a Llama
  of the size's width and depth. They decode from a static cache that is just large enough,
  compiled in a CUDA graph if that works. The cache holds random numbers: the time is the same.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xlstm7b import accounting
from xlstm7b.bench.cases import Column, Part, Result
from xlstm7b.bench.measure import (
    GREEDY,
    SAMPLED,
    attempt,
    capture,
    find_peaks,
    make_generator,
    measure,
    measure_decoding,
    measure_steps,
    random_model,
    random_module,
    random_prompts,
    release,
)
from xlstm7b.bench.peers import TRITON_KERNELS, in_process, load_transformers, load_xlstm
from xlstm7b.bench.plans import Generation
from xlstm7b.devices import to_dtype
from xlstm7b.generate.engine import peak_memory
from xlstm7b.model import XLSTM

START_TOKENS = 16  # length of the prompt before decoding is timed

_DECODE = ("batch", "tokens", "ms", "tok/s", "GB/s", "limit", "% of limit", "speed of ours, ×")
_SAME = Column("of shortest, ×", "of_shortest", digits=3)  # speed, over that after the shortest
_FIRST = ("batch", "tokens", "ms", "limit, ms", "% of limit", "speed of ours, ×")
PARTS = {
    "start": Part("from a saved folder to the first token", ("batch", "tokens", "ms")),
    "memory": Part(
        "peak memory; the limit is the weights and the state",
        ("batch", "tokens", "GB", "limit, GB", "% of limit"),
        plot=("tokens", "GB"),
    ),
    "decode": Part("decoding, one token per sequence", _DECODE, plot=("batch", "tok/s")),
    "context": Part("decoding after a context", (*_DECODE, _SAME), plot=("tokens", "tok/s")),
    "first": Part("from a prompt to its first tokens", _FIRST, plot=("tokens", "ms"), log_y=True),
    "prefill": Part("reading prompts", [each for each in _DECODE if each != "GB/s"]),
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


def with_limit(case: Result, plan: Generation, seconds: float, *, decoded: int = 0) -> Result:
    """The case with its time and limit: one decoding step, or a prefill and `decoded` tokens more.

    A Llama has no limit.
    """
    is_step = case.part in ("decode", "context")
    tokens = case.batch if is_step else case.batch * case.length
    counts_time = case.part == "first"  # else the speed counts
    result = replace(case, seconds=seconds)
    if not counts_time:
        result = replace(result, tokens_per_second=tokens / seconds)
    if case.name.startswith("llama"):
        return result
    assert plan.peak_tflops is not None
    assert plan.peak_tbs is not None
    config, peaks = plan.config, (1e12 * plan.peak_tflops, 1e12 * plan.peak_tbs)
    sizes = _itemsizes(plan)
    step = accounting.least_decode_seconds(config, *peaks, case.batch, **sizes)
    if is_step:
        least = step
        moved = accounting.decode_bytes(config, case.batch, **sizes)
        result = replace(result, bytes_per_second=moved / seconds)
    else:
        least = accounting.least_prefill_seconds(config, *peaks, case.length, case.batch, **sizes)
        least += decoded * step
    limit = least if counts_time else tokens / least
    return replace(result, limit=limit, percent_of_limit=100 * least / seconds)


def _itemsizes(plan: Generation) -> dict[str, int]:
    """Bytes of one weight and of one number of the state, as `accounting` takes them."""
    names = {"weight_itemsize": plan.dtype, "state_itemsize": plan.state_dtype}
    return {key: to_dtype(name).itemsize for key, name in names.items()}


# Ours


def _our_results(plan: Generation) -> Iterator[Result]:
    if plan.folder is not None:
        yield _start(plan, plan.folder)
        release(plan.device)
    if not plan.parts:
        return
    model = random_model(plan)
    # Memory comes first: on a CPU the peak is that of the whole process.
    measured = {
        "memory": _memory,
        "decode": _decode,
        "context": _context,
        "first": _first,
        "prefill": _prefill,
    }
    for part, results in measured.items():
        if part in plan.parts:
            yield from results(model, plan)
            release(plan.device)


def _start(plan: Generation, folder: str) -> Result:
    """From loading a folder to the first token. Files and compiled kernels may be cached."""
    began = time.perf_counter()
    model = XLSTM.from_pretrained(folder, dtype=to_dtype(plan.dtype), device=plan.device)
    prompts = [[model.config.bos_token_id]]
    make_generator(model, plan).generate(prompts, max_new_tokens=1, **GREEDY)
    return Result("start", batch=1, length=1, seconds=time.perf_counter() - began)


def _memory(model: XLSTM, plan: Generation) -> Iterator[Result]:
    """Each case in a generator of its own, so that what its CUDA graphs hold counts too."""
    sizes, vocab_size = _itemsizes(plan), plan.config.vocab_size
    weights = accounting.weight_bytes(plan.config, sizes["weight_itemsize"])
    state = accounting.state_bytes(plan.config, sizes["state_itemsize"])["total"]

    def result(work: str, length: int, limit: int) -> Result:
        peak = peak_memory(torch.device(plan.device))
        percent = 100 * limit / peak
        case = Result("memory", work=work, batch=1, length=length)
        return replace(case, memory=peak, limit=limit, percent_of_limit=percent)

    # The first generator stacks the model's weights, which takes more memory for a moment.
    make_generator(model, plan).read(random_prompts(vocab_size, 1, START_TOKENS))
    release(plan.device)
    yield result("loaded", 0, weights)
    lengths = [length for length in plan.contexts if length] or [START_TOKENS]
    for length in lengths:
        release(plan.device)
        make_generator(model, plan).read(random_prompts(vocab_size, 1, length))
        yield result("prompt read", length, weights + state)
    release(plan.device)
    prompts = random_prompts(vocab_size, 1, lengths[0])
    make_generator(model, plan).generate(prompts, max_new_tokens=plan.generated, **GREEDY)
    yield result(f"{plan.generated} tokens generated", lengths[0], weights + state)


def _decode(model: XLSTM, plan: Generation) -> Iterator[Result]:
    works = [(batch, "greedy", GREEDY) for batch in plan.batches]
    works.insert(1, (1, "temperature 0.8, top_p 0.95", SAMPLED))

    def timed(sampling: dict[str, Any], case: Result) -> Result:
        prompts = random_prompts(plan.config.vocab_size, case.batch, case.length)
        generator = make_generator(model, plan, case.batch)
        step = measure_decoding(generator, prompts, seconds=plan.seconds, **sampling)
        return with_limit(case, plan, step)

    for batch, work, sampling in works:
        case = Result("decode", work=work, batch=batch, length=START_TOKENS)
        yield attempt(case, partial(timed, sampling), ValueError)  # `ValueError`: too many slots
        release(plan.device)


def _context(model: XLSTM, plan: Generation) -> Iterator[Result]:
    generator, shortest = make_generator(model, plan), None
    for length in plan.contexts:
        # A context of 0 still has the first token, which every prompt starts with.
        state = generator.read(random_prompts(plan.config.vocab_size, 1, max(1, length)))
        step = measure_decoding(generator, None, state=state, seconds=plan.seconds, **GREEDY)
        shortest = shortest or step
        figures = {"of_shortest": shortest / step}
        case = Result("context", work="greedy", batch=1, length=length, figures=figures)
        yield with_limit(case, plan, step)


def _first(model: XLSTM, plan: Generation) -> Iterator[Result]:
    generator = make_generator(model, plan)
    for length in plan.prompts:
        prompts = random_prompts(plan.config.vocab_size, 1, length)
        for tokens in (1, plan.first):
            generate = partial(generator.generate, prompts, max_new_tokens=tokens, **GREEDY)
            seconds = measure(generate, plan.device)
            work = "1 token" if tokens == 1 else f"{tokens} tokens"
            case = Result("first", work=work, batch=1, length=length)
            yield with_limit(case, plan, seconds, decoded=tokens - 1)


def _prefill(model: XLSTM, plan: Generation) -> Iterator[Result]:
    def timed(case: Result) -> Result:
        generator = make_generator(model, plan, case.batch)
        prompts = random_prompts(plan.config.vocab_size, case.batch, case.length)
        return with_limit(case, plan, measure(lambda: generator.read(prompts), plan.device))

    for length in plan.lengths:
        case = Result("prefill", batch=plan.tokens // length, length=length)
        yield attempt(case, timed, ValueError)
        release(plan.device)


# Peers

_Logits = Callable[[Tensor], Tensor]  # of token ids [B, T], at every position or at the last one


class PeerModel(NamedTuple):
    """A model of another library."""

    work: str  # describes a plain call of the model
    vocab_size: int
    forward: Any
    read: _Logits
    # Takes `forward`, perhaps compiled, and a context length. Returns the logits after one more
    # token, and a function that goes back to that length.
    decoder: Callable[[Any, int], tuple[_Logits, Callable[[], None]]]


@torch.no_grad()
def run_peer(peer: str, options: dict[str, Any]) -> Iterator[Result]:
    """All results of a peer. Runs in a process of its own. `options` are those of the plan."""
    plan = Generation.of(**options)
    makers = {"transformers": _transformers, "xlstm": _xlstm}
    is_xlstm = peer in makers
    model = makers[peer](plan) if is_xlstm else _llama(peer, plan)
    if is_xlstm and "decode" in plan.parts:
        case = Result("decode", peer, model.work, batch=1, length=START_TOKENS)
        yield _time_decoding(case, plan, model)
        if peer == "xlstm" and plan.device == "cuda":
            yield _time_decoding(replace(case, work="CUDA graph"), plan, model)
    elif not is_xlstm and "context" in plan.parts:
        yield from _time_contexts(peer, plan, model)
    torch.compiler.reset()
    release(plan.device)
    case = Result("first", peer, f"1 token, {model.work}", batch=1)
    lengths = plan.prompts if "first" in plan.parts else ()
    cases = [replace(case, length=length) for length in lengths]
    case = Result("prefill", peer, model.work)
    lengths = plan.lengths if "prefill" in plan.parts else ()
    cases += [replace(case, batch=plan.tokens // length, length=length) for length in lengths]
    for case in cases:
        yield attempt(case, partial(_time_reading, plan, model), Exception)
        release(plan.device)
    if peer == "xlstm" and plan.device == "cuda" and "decode" in plan.parts:
        case = Result("decode", peer, "compiled, CUDA graph", batch=1, length=START_TOKENS)
        yield _time_decoding(case, plan, model)  # last: it takes the longest


def _time_contexts(peer: str, plan: Generation, model: PeerModel) -> Iterator[Result]:
    """After each context in the fastest way that works."""
    ways = ["eager"] if plan.device == "cpu" else ["compiled, CUDA graph", "CUDA graph", "eager"]
    shortest = None
    for length in plan.contexts:
        for way in [*ways]:
            result = _time_decoding(Result("context", peer, way, "", 1, length), plan, model)
            if result.seconds is not None:
                shortest = shortest or result.seconds
                yield replace(result, figures={"of_shortest": shortest / result.seconds})
                break
            ways.remove(way)  # longer contexts would fail too, and take long
            yield result


def _time_reading(plan: Generation, model: PeerModel, case: Result) -> Result:
    prompts = _tokens(plan, case.batch, case.length, model.vocab_size)
    read = partial(model.read, prompts)
    seconds = measure(lambda: read()[:, -1].argmax(-1).tolist(), plan.device, repeats=2)
    return with_limit(case, plan, seconds)


def _time_decoding(case: Result, plan: Generation, model: PeerModel) -> Result:
    """A greedy step at batch 1. The case's work says whether it is compiled, and in a graph."""

    def timed(case: Result) -> Result:
        torch.compiler.reset()  # else the second length would be compiled for any length
        release(plan.device)
        forward = model.forward
        if "compiled" in case.work:
            # Chosen by measurement: this mode helps products of one row.
            mode = "max-autotune-no-cudagraphs"
            forward = torch.compile(forward, mode=mode, dynamic=False)
        logits, rewind = model.decoder(forward, case.length)
        token = torch.zeros(1, 1, dtype=torch.long, device=plan.device)

        def step() -> None:
            token.copy_(logits(token)[:, -1:].argmax(-1))

        rewind()
        repeated = capture(step) if "CUDA graph" in case.work else step

        def steps(count: int) -> None:
            rewind()
            for _ in range(count):
                repeated()

        return with_limit(case, plan, measure_steps(steps, plan.device, seconds=plan.seconds))

    return attempt(case, timed, Exception)


def _tokens(plan: Generation, batch: int, length: int, vocab_size: int) -> Tensor:
    return torch.tensor(random_prompts(vocab_size, batch, length), device=plan.device)


def _transformers(plan: Generation) -> PeerModel:
    transformers: Any = import_module("transformers")
    has_kernels = plan.device == "cuda" and transformers.utils.is_xlstm_available()
    options = (TRITON_KERNELS if has_kernels else {}) | {"autocast_kernel_dtype": plan.dtype}
    dtype, vocab_size = to_dtype(plan.dtype), plan.config.vocab_size
    model: Any = load_transformers(plan.config, dtype, plan.device, options=options)

    def decoder(forward: Any, length: int) -> tuple[_Logits, Callable[[], None]]:
        state = model(_tokens(plan, 1, length, vocab_size), use_cache=True).cache_params
        return lambda t: forward(t, cache_params=state, use_cache=True).logits, lambda: None

    work = "Triton kernels" if has_kernels else "native kernels"
    return PeerModel(work, vocab_size, model, lambda t: model(t, use_cache=True).logits, decoder)


def _xlstm(plan: Generation) -> PeerModel:
    model: Any = load_xlstm(
        plan.config,
        to_dtype(plan.dtype),
        plan.device,
        weight_mode="fused",
        mode="inference",
        autocast_kernel_dtype=plan.dtype,
        inference_state_dtype=plan.state_dtype,
    )
    vocab_size = plan.config.vocab_size

    def decoder(forward: Any, length: int) -> tuple[_Logits, Callable[[], None]]:
        _, state = model(_tokens(plan, 1, length, vocab_size))
        return lambda t: forward(t, state)[0], lambda: None  # it updates the state in place

    return PeerModel("eager", vocab_size, model, lambda t: model(t)[0], decoder)


def _llama(peer: str, plan: Generation) -> PeerModel:
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(**llama_shape(peer, plan), max_position_embeddings=1 << 18)
    dtype, device = to_dtype(plan.dtype), torch.device(plan.device)
    model: Any = random_module(lambda: transformers.LlamaForCausalLM(config), dtype, plan.device)

    def decoder(forward: Any, length: int) -> tuple[_Logits, Callable[[], None]]:
        cache = transformers.StaticCache(config, max_cache_len=length + 128)
        heads, width = config.num_key_value_heads, config.head_dim
        cache.early_initialization(1, heads, width, dtype, device)
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()

        def rewind() -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(length)

        return lambda t: forward(t, past_key_values=cache).logits, rewind

    def read(tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens, use_cache=True, logits_to_keep=1).logits
        return logits

    return PeerModel("eager", config.vocab_size, model, read, decoder)


def llama_shape(peer: str, plan: Generation) -> dict[str, int]:
    if plan.size.lower() == "7b":
        llama2 = {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32}
        llama3 = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
        sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
        return {**sizes, **(llama2 if peer == "llama2" else llama3)}
    heads = plan.config.embedding_dim // 64
    return {
        "hidden_size": plan.config.embedding_dim,
        "num_hidden_layers": plan.config.num_blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if peer == "llama2" else heads // 4,
        "intermediate_size": plan.config.ffn_dim,
        "vocab_size": plan.config.vocab_size,
    }
