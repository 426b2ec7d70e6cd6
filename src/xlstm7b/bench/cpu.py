"""`xlstm7b bench cpu`: this package and `transformers` on the CPU, with random weights.

The generation and training benchmarks with small sizes: a 160m reads a prompt and decodes (ours in
float32 and bfloat16, `transformers` in float32), then a small model is trained.
"""

from collections.abc import Iterator
from dataclasses import replace

from xlstm7b.bench import generation, training
from xlstm7b.bench.cases import Result
from xlstm7b.bench.plans import Cpu, Generation, Training

PARTS = generation.PARTS | training.PARTS


def results(plan: Cpu) -> Iterator[Result]:
    for dtype, peers in (("float32", ("transformers",)), ("bfloat16", ())):
        both = Generation.of(
            device="cpu",
            size=plan.size,
            dtype=dtype,
            parts=("decode", "prefill"),
            batches=(1,),
            tokens=plan.length,
            peers=peers,
            timeout=plan.timeout,
        )
        for result in generation.results(both):
            if result.part in ("ways", "check") and result.error is None:
                continue
            work = ", ".join(filter(None, (result.work, dtype)))
            yield replace(result, size=plan.size, work=work)
    yield from training.results(
        Training(
            device="cpu",
            cases=plan.cases,
            steps=plan.steps,
            peers=("transformers",),
            timeout=plan.timeout,
        )
    )
