"""Time and memory of evaluating a model with random weights.

Two parts. `grouping`: questions with four answers after the same five examples, scored once with
shared prefixes read once, and once with every request read whole. `prompts`: prompts of several
lengths until the first token, as in RULER. Memory and time per token should stay the same.
"""

import random
import time
from statistics import median
from typing import Annotated

import torch
import typer

from options import numbers
from processes import Call, Json
from xlstm7b.bench.measure import GREEDY, make_generator, random_model, random_prompts, release
from xlstm7b.bench.results import Results
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, Device, option
from xlstm7b.devices import to_device, to_dtype
from xlstm7b.evaluate.scoring import Continuation, Score, Scorer
from xlstm7b.generate.engine import peak_memory
from xlstm7b.model import XLSTM

_EXAMPLES, _EXAMPLE_TOKENS = 5, 120
_QUESTION_TOKENS, _OPTIONS, _OPTION_TOKENS = 90, 4, (1, 12)
_GENERATED, _REPEATS = 4, 3

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def evaluation(
    questions: Annotated[int, option("Questions with four answers each.")] = 100,
    batch_size: Annotated[
        int | None, option("Rows in a batch of questions.", default="as many as memory allows")
    ] = None,
    lengths: Annotated[
        str, option("Tokens of the prompts.")
    ] = "4096,8192,16384,32768,65536,131072",
    size: Annotated[str, option("Size of the model.")] = "7b",
    dtype: Annotated[str, option("Dtype of the weights: float32 or bfloat16.")] = "bfloat16",
    device: Device = None,
    json: Json = None,
    call: Call = None,
) -> None:
    """Time evaluation with random weights: shared prefixes, and prompts of many lengths."""
    on = str(to_device(device))
    to_dtype(dtype, ("float32", "bfloat16"))
    prompts = numbers("lengths", lengths)
    if questions < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError("--questions and --batch-size must be at least 1")
    results = Results("evaluation", on, file=json, call=call)
    model = random_model(size, dtype=dtype, device=on)
    shape: dict[str, int | str] = {"model": size, "weights": dtype}
    measure_grouping(results, shape | {"questions": questions}, model, questions, batch_size, on)
    measure_prompts(results, shape, model, prompts, on)


def random_questions(vocab_size: int, count: int) -> list[Continuation]:
    """Random token ids in the shape of a five-shot task with four answers."""
    draw = random.Random(0)

    def drawn(length: int) -> list[int]:
        return [draw.randrange(2, vocab_size) for _ in range(length)]

    examples = drawn(_EXAMPLES * _EXAMPLE_TOKENS)
    requests = []
    for _ in range(count):
        context = examples + drawn(draw.randrange(_QUESTION_TOKENS // 2, 2 * _QUESTION_TOKENS))
        options = [drawn(draw.randint(*_OPTION_TOKENS)) for _ in range(_OPTIONS)]
        requests += [Continuation(context, option) for option in options]
    return requests


def measure_grouping(
    results: Results,
    shape: dict[str, int | str],
    model: XLSTM,
    questions: int,
    batch_size: int | None,
    device: str,
) -> None:
    """Time with and without grouping, and the largest difference of a log-probability.

    For comparison: the difference that rounding makes between two batch sizes without grouping.
    """
    if results.has("difference by batch size", shape):
        return
    requests = random_questions(model.config.vocab_size, questions)

    def scored(prefixes: str) -> tuple[list[Score], int]:
        grouping = prefixes == "read once"
        Scorer(model, batch_size=batch_size, grouping=grouping).score(requests)  # compiles kernels
        scorer = Scorer(model, batch_size=batch_size, grouping=grouping)
        began = time.perf_counter()
        scores = scorer.score(requests)
        seconds = time.perf_counter() - began
        release(device)
        case = shape | {"prefixes": prefixes, "batch": scorer.batch_size}
        results.add("tokens read", case, scorer.tokens_processed, "tokens")
        results.add("scoring", case, seconds, "s")
        return scores, scorer.batch_size

    def difference(some: list[Score], others: list[Score]) -> float:
        return max(abs(a.logprob - b.logprob) for a, b in zip(some, others, strict=True))

    grouped, _ = scored("read once")
    single, rows = scored("read each time")
    rounded = Scorer(model, batch_size=max(1, rows // 3), grouping=False).score(requests)
    release(device)
    for what, scores in (("grouping", grouped), ("batch size", rounded)):
        results.add(f"difference by {what}", shape, difference(scores, single), "nats")


def measure_prompts(
    results: Results, shape: dict[str, int | str], model: XLSTM, lengths: list[int], device: str
) -> None:
    """Generates from prompts of each length. The memory is the peak of that length alone."""
    generator = make_generator(model)

    def generate(length: int) -> float:
        prompts = random_prompts(model.config.vocab_size, 1, length)
        completion = generator.generate(prompts, max_new_tokens=_GENERATED, **GREEDY)[0]
        return completion.prompt_tokens / completion.prompt_tokens_per_second

    generate(min(lengths))  # allocates what is allocated only once
    for length in lengths:
        case = shape | {"prompt": length}
        if results.has("peak memory", case):
            continue
        release(device)
        times = [generate(length) for _ in range(1 + _REPEATS)]  # the first one compiles kernels
        results.add("first token", case, median(times[1:]), "s")
        results.add("peak memory", case, 1e-9 * peak_memory(torch.device(device)), "GB")


if __name__ == "__main__":
    main(app)
