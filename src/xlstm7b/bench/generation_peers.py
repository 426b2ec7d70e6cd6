"""`python -m xlstm7b.bench.generation_peers PEER PLAN`: another library at the same work.

Run by `bench/generation.py` in a process of its own; prints results as JSON. All at batch 1 but for
prefill, with random weights of the plan's size:

- `transformers`: its xLSTM as it is called, with the kernels of `xlstm` if that is installed.
- `xlstm`: the authors' package, with fused weights and the kernels of `mlstm_kernels`: as it is
  called, as a CUDA graph, and compiled in a CUDA graph. It has the logits of every token of a
  prompt, and so has `transformers`.
- `llama2`, `llama3`: the shape of Llama-2-7B and Llama-3.1-8B in `transformers` if the size is 7b,
  else a Llama of the size's width and depth with all, or a quarter as many, heads for keys. They
  decode from a static cache just large enough, compiled in a CUDA graph, or what of that works. The
  cache is filled with random numbers, not from a text: the time is the same.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from xlstm7b.bench.generation_ours import (
    MOST_STEPS,
    START_TOKENS,
    attempt,
    made,
    prompts,
    release,
    seconds_per_step,
)
from xlstm7b.bench.generation_results import Plan, Result
from xlstm7b.bench.peer import seconds

# Chosen by time: products of one row are worth it. Graphs are captured here, not by the compiler.
COMPILE = "max-autotune-no-cudagraphs"
TRITON = {
    "chunkwise_kernel": "chunkwise--triton_limit_chunk",
    "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton",
}
NATIVE = {
    "chunkwise_kernel": "chunkwise--native_autograd",
    "sequence_kernel": "native_sequence__native",
    "step_kernel": "native",
}


def tokens(plan: Plan, batch: int, length: int, vocab_size: int) -> Tensor:
    return torch.tensor(prompts(vocab_size, batch, length), device=plan.device)


def reading_results(
    blank: Result, read: Callable[[Tensor], Tensor], plan: Plan, *, vocab_size: int, limited: bool
) -> Iterator[Result]:
    """Time to the first token, and prefill; `read` gives logits [B, T or 1, V] of whole prompts."""

    def measure(blank: Result) -> Result:
        prompt = tokens(plan, blank.batch, blank.length, vocab_size)

        def call() -> list[int]:
            picked: list[int] = read(prompt)[:, -1].argmax(-1).tolist()
            return picked

        return blank.read(plan, seconds(call, 2, plan.torch_device), limited=limited)

    if "first" in plan.parts:
        for length in plan.prompts:
            work = f"1 token, {blank.work}"
            yield attempt(
                replace(blank, part="first", work=work, length=length), measure, Exception
            )
    if "prefill" in plan.parts:
        for length in plan.lengths:
            shape = replace(blank, part="prefill", batch=plan.tokens // length, length=length)
            yield attempt(shape, measure, Exception)
            release(plan.device)


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph, after it has run on a stream of its own, as capture wants it."""
    step()  # compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_: object = step) -> None:  # the graph reads and writes what the step holds
        graph.replay()

    return replay


def repeated(step: Callable[[], None]) -> Callable[[int], None]:
    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    return run


def stepping(call: Callable[[Tensor], Tensor], plan: Plan) -> Callable[[], None]:
    """Greedy decoding at batch 1 by a call from a token [1, 1] to logits [1, 1, V]."""
    token = torch.zeros(1, 1, dtype=torch.long, device=plan.device)

    def step() -> None:
        token.copy_(call(token)[:, -1:].argmax(-1))

    return step


def transformers_results(plan: Plan) -> Iterator[Result]:
    transformers: Any = import_module("transformers")
    has_kernels = plan.device == "cuda" and transformers.utils.is_xlstm_available()
    kernels = TRITON if has_kernels else NATIVE
    shape = {**plan.config.to_dict(plan.dtype), **kernels, "autocast_kernel_dtype": plan.dtype}
    config = transformers.xLSTMConfig(**shape)
    model = made(lambda: transformers.xLSTMForCausalLM(config), plan)
    work = "Triton kernels" if has_kernels else "native kernels"
    blank = Result("decode", "transformers", work, 1, START_TOKENS)
    vocab_size = plan.config.vocab_size

    def measure(blank: Result) -> Result:
        cache = model(tokens(plan, 1, blank.length, vocab_size), use_cache=True).cache_params

        def call(token: Tensor) -> Tensor:
            logits: Tensor = model(token, cache_params=cache, use_cache=True).logits
            return logits

        return blank.stepped(plan, seconds_per_step(repeated(stepping(call, plan)), plan))

    if "decode" in plan.parts:
        yield attempt(blank, measure, Exception)
    yield from reading_results(
        blank,
        lambda prompt: model(prompt, use_cache=True).logits,
        plan,
        vocab_size=vocab_size,
        limited=True,
    )


def xlstm_results(plan: Plan) -> Iterator[Result]:
    theirs: Any = import_module("xlstm.xlstm_large.model")
    ours = plan.config
    config = theirs.xLSTMLargeConfig(
        embedding_dim=ours.embedding_dim,
        num_heads=ours.num_heads,
        num_blocks=ours.num_blocks,
        vocab_size=ours.vocab_size,
        ffn_proj_factor=ours.ffn_proj_factor,
        weight_mode="fused",
        mode="inference",
        return_last_states=True,
        autocast_kernel_dtype=plan.dtype,
        inference_state_dtype=plan.state_dtype,
        **(TRITON if plan.device == "cuda" else NATIVE),
    )
    model = made(lambda: theirs.xLSTMLarge(config), plan)
    blank = Result("decode", "xlstm", "eager", 1, START_TOKENS)

    def measure(forward: Any, graph: bool, blank: Result) -> Result:
        _, state = model(tokens(plan, 1, blank.length, ours.vocab_size))
        step = stepping(lambda token: forward(token, state)[0], plan)  # updates the state in place
        step = graphed(step) if graph else step
        return blank.stepped(plan, seconds_per_step(repeated(step), plan))

    if "decode" in plan.parts:
        yield attempt(blank, partial(measure, model, False), Exception)
        if plan.device == "cuda":
            work = replace(blank, work="CUDA graph")
            yield attempt(work, partial(measure, model, True), Exception)
    yield from reading_results(
        blank, lambda prompt: model(prompt)[0], plan, vocab_size=ours.vocab_size, limited=True
    )
    if "decode" in plan.parts and plan.device == "cuda":  # last: it takes the longest
        compiled = torch.compile(model, mode=COMPILE, dynamic=False)
        work = replace(blank, work="compiled, CUDA graph")
        yield attempt(work, partial(measure, compiled, True), Exception)


def llama_shape(peer: str, plan: Plan) -> dict[str, int]:
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


def llama_results(peer: str, plan: Plan) -> Iterator[Result]:
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(**llama_shape(peer, plan), max_position_embeddings=1 << 18)
    model = made(lambda: transformers.LlamaForCausalLM(config), plan)

    def measure(compiled: bool, graph: bool, blank: Result) -> Result:
        torch.compiler.reset()  # else the second length would be compiled for any length
        release(plan.device)
        cache = transformers.StaticCache(config, max_cache_len=blank.length + MOST_STEPS + 28)
        heads, width = config.num_key_value_heads, config.head_dim
        cache.early_initialization(1, heads, width, plan.torch_dtype, plan.torch_device)
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        forward = torch.compile(model, mode=COMPILE, dynamic=False) if compiled else model

        def rewind() -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(blank.length)

        rewind()
        step = stepping(lambda token: forward(token, past_key_values=cache).logits, plan)
        step = graphed(step) if graph else step

        def run(steps: int) -> None:
            rewind()
            repeated(step)(steps)

        return blank.stepped(plan, seconds_per_step(run, plan), limited=False)

    ways = {"compiled, CUDA graph": (True, True), "CUDA graph": (False, True)}
    ways = {**(ways if plan.device == "cuda" else {}), "eager": (False, False)}
    shortest = None
    for length in plan.contexts if "context" in plan.parts else ():
        for work, way in [*ways.items()]:
            blank = Result("context", peer, work, 1, length)
            result = attempt(blank, partial(measure, *way), Exception)
            if result.seconds is not None:
                shortest = shortest or result.seconds
                yield replace(result, ratio=shortest / result.seconds)
                break
            del ways[work]  # what fails here would fail behind longer texts, and slowly
            yield result
    torch.compiler.reset()
    release(plan.device)
    yield from reading_results(
        Result("first", peer, "eager", 1, 1),
        lambda prompt: model(prompt, use_cache=True, logits_to_keep=1).logits,
        plan,
        vocab_size=config.vocab_size,
        limited=False,
    )


def results(peer: str, plan: Plan) -> Iterator[Result]:
    if peer in ("llama2", "llama3"):
        return llama_results(peer, plan)
    return {"transformers": transformers_results, "xlstm": xlstm_results}[peer](plan)


def main() -> None:
    peer, plan = sys.argv[1], Plan.from_dict(json.loads(sys.argv[2]))
    with torch.no_grad():
        for result in results(peer, plan):
            print("result " + json.dumps(asdict(result)), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
