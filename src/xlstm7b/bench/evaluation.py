"""`xlstm7b bench evaluation`: time and memory of evaluating a model.

Two parts. `grouping`: questions with four answers after the same five examples, scored once with
shared prefixes read once, and once with every request read whole. `prompts`: prompts of 4096 to
131,072 tokens, read by `Generator` as in RULER. Memory and time per token should stay the same.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import torch

from xlstm7b.bench.cases import Column, Part, Result
from xlstm7b.bench.measure import GREEDY, plan_generator, plan_model, random_prompts, release
from xlstm7b.bench.plans import Evaluation
from xlstm7b.evaluate.scoring import Continuation, Score, Scorer
from xlstm7b.generate.engine import peak_memory
from xlstm7b.model import XLSTM

_EXAMPLES, _EXAMPLE_TOKENS = 5, 120
_QUESTION_TOKENS, _OPTIONS, _OPTION_TOKENS = 90, 4, (1, 12)
_GENERATED, _REPEATS = 4, 3

_GROUPING = (
    "batch",
    Column("tokens read", "tokens"),
    "s",
    Column("tokens, ×", "tokens_ratio", digits=1),
    Column("time, ×", "time_ratio", digits=1),
    Column("log p differs", "largest_difference", digits=7),
)
_PROMPTS = (
    "batch",
    "tokens",
    "ms",
    Column("µs per token", "seconds_per_token", 1e6, 3),
    Column("of shortest, ×", "of_shortest", digits=3),
    Column("GB", "memory", 1e-9, 3),
)
PARTS = {
    "grouping": Part("questions with four answers after the same five examples", _GROUPING),
    "prompts": Part("from a prompt to its first token", _PROMPTS, plot=("tokens", "GB")),
}


def results(plan: Evaluation) -> Iterator[Result]:
    model = plan_model(plan)
    yield from _grouping(model, plan)
    yield from _prompts(model, plan)


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


def _grouping(model: XLSTM, plan: Evaluation) -> Iterator[Result]:
    """Scores with and without grouping, and the largest difference of a log-probability.

    For comparison: the difference that rounding makes between two batch sizes without grouping.
    """
    requests = random_questions(model.config.vocab_size, plan.questions)

    def scored(rows: int | None, grouping: bool) -> tuple[Result, list[Score]]:
        Scorer(model, batch_size=rows, grouping=grouping).score(requests)  # compiles kernels
        scorer = Scorer(model, batch_size=rows, grouping=grouping)
        began = time.perf_counter()
        scores = scorer.score(requests)
        case = Result("grouping", batch=scorer.batch_size, seconds=time.perf_counter() - began)
        release(plan.device)
        return replace(case, figures={"tokens": scorer.tokens_processed}), scores

    def difference(some: list[Score], others: list[Score]) -> float:
        return max(abs(a.logprob - b.logprob) for a, b in zip(some, others, strict=True))

    grouped, grouped_scores = scored(plan.batch_size, grouping=True)
    single, single_scores = scored(plan.batch_size, grouping=False)
    fewer_rows = max(1, single.batch // 3)
    rounded = Scorer(model, batch_size=fewer_rows, grouping=False).score(requests)
    release(plan.device)
    assert grouped.seconds is not None
    assert single.seconds is not None
    off = {"largest_difference": difference(grouped_scores, single_scores)}
    yield replace(grouped, work="shared prefixes once", figures=grouped.figures | off)
    more = {
        "tokens_ratio": single.figures["tokens"] / grouped.figures["tokens"],
        "time_ratio": single.seconds / grouped.seconds,
        "largest_difference": difference(rounded, single_scores),
    }
    yield replace(single, work="every request whole", figures=single.figures | more)


def _prompts(model: XLSTM, plan: Evaluation) -> Iterator[Result]:
    """Generates from prompts of each length. The memory is the peak of that length alone."""
    generator = plan_generator(model, plan, plan.rows)

    def generate(length: int) -> float:
        prompts = random_prompts(plan.config.vocab_size, plan.rows, length)
        completion = generator.generate(prompts, max_new_tokens=_GENERATED, **GREEDY)[0]
        return completion.prompt_tokens / completion.prompt_tokens_per_second

    generate(min(plan.lengths))  # allocates what is allocated only once
    shortest = None
    for length in plan.lengths:
        release(plan.device)
        times = [generate(length) for _ in range(1 + _REPEATS)]  # the first one compiles kernels
        seconds = median(times[1:])
        per_token = seconds / (plan.rows * length)
        shortest = shortest or per_token
        yield Result(
            "prompts",
            batch=plan.rows,
            length=length,
            seconds=seconds,
            memory=peak_memory(torch.device(plan.device)),
            figures={"seconds_per_token": per_token, "of_shortest": per_token / shortest},
        )
