"""`python -m xlstm7b.bench.evaluation`: what evaluating costs, with random weights.

Two parts. `grouping`: questions with four answers after the same five shots, scored with what they
share read once and with every request read whole. `prompts`: prompts from 4096 to 131072 tokens
read by `Generator`, and a few tokens generated, as RULER does: peak memory and time per token.
"""

import random
import time
from dataclasses import asdict, dataclass
from statistics import median

from xlstm7b.bench.generation_ours import model_asked_for, model_options, prompts, release
from xlstm7b.evaluate.results import write_json
from xlstm7b.evaluate.scoring import Continuation, Scorer
from xlstm7b.generate.generator import Generator
from xlstm7b.generate.requests import Request
from xlstm7b.generate.sampling import SamplingSettings
from xlstm7b.generate.texts import peak_memory
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

_SHOTS, _SHOT_TOKENS = 5, 120
_QUESTION_TOKENS, _OPTIONS, _OPTION_TOKENS = 90, 4, (1, 12)
_GENERATED = 4
_REPEATS = 3


@dataclass(frozen=True)
class Grouping:
    grouped: bool
    rows: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Prompts:
    length: int
    seconds: float  # until the first token
    microseconds_per_token: float
    peak_memory: int


def questions(vocab_size: int, count: int) -> list[Continuation]:
    """Random ids in the shape of a five-shot task with four answers."""
    draw = random.Random(0)

    def drawn(length: int) -> list[int]:
        return [draw.randrange(2, vocab_size) for _ in range(length)]

    shots = drawn(_SHOTS * _SHOT_TOKENS)
    requests = []
    for _ in range(count):
        context = shots + drawn(draw.randrange(_QUESTION_TOKENS // 2, 2 * _QUESTION_TOKENS))
        options = [drawn(draw.randint(*_OPTION_TOKENS)) for _ in range(_OPTIONS)]
        requests += [Continuation(context, option) for option in options]
    return requests


def measure_grouping(
    model: XLSTM, requests: list[Continuation], rows: int | None
) -> tuple[list[Grouping], float, float]:
    """Both ways; how much a log-probability differs between them, and by rounding alone.

    The latter is at most so much between two sizes of batches without grouping.
    """
    lines, scores = [], []
    for grouped in (True, False):
        Scorer(model, batch_size=rows, grouping=grouped).score(requests)  # compiles
        scorer = Scorer(model, batch_size=rows, grouping=grouped)
        began = time.perf_counter()
        scores.append(scorer.score(requests))  # its results are on the host: nothing is under way
        elapsed = time.perf_counter() - began
        lines.append(Grouping(grouped, scorer.batch_size, scorer.tokens_processed, elapsed))
        release(scorer.device.type)
    one_by_one = scores[-1]
    fewer = max(1, scorer.batch_size // 3)
    scores.append(Scorer(model, batch_size=fewer, grouping=False).score(requests))
    grouped_off, rounding = (
        max(abs(a.logprob - b.logprob) for a, b in zip(one_by_one, other, strict=True))
        for other in (scores[0], scores[-1])
    )
    return lines, grouped_off, rounding


def measure_prompts(model: XLSTM, lengths: list[int], rows: int) -> list[Prompts]:
    """Each length by itself: its memory is what was in use at most while it ran.

    A length counts id 0, which stands before all prompts.
    """
    generator = Generator(model, ByteTokenizer(), batch_size=rows)
    settings = SamplingSettings(max_new_tokens=_GENERATED, temperature=0, eos_token_id=())
    device = generator.model.device

    def asked(length: int) -> list[Request]:
        drawn = prompts(model.config.vocab_size, rows, length - 1)
        return [Request(ids, settings) for ids in drawn]

    generator.run(asked(min(lengths)))  # what is set up once takes memory
    lines = []
    for length in lengths:
        release(device.type)
        requests, times = asked(length), []
        for _ in range(1 + _REPEATS):  # the first compiles, and captures
            completions = generator.run(requests)
            speed = completions[0].prompt_tokens_per_second
            times.append(completions[0].prompt_tokens / speed)
        elapsed = median(times[1:])
        per_token = elapsed / (rows * completions[0].prompt_tokens) * 1e6
        lines.append(Prompts(length, elapsed, per_token, peak_memory(device)))
    return lines


def main() -> None:
    parser = model_options(__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=100, help="of four answers each")
    parser.add_argument("--batch-size", type=int, help="rows of the first part; by free memory")
    parser.add_argument("--lengths", default="4096,8192,16384,32768,65536,131072")
    parser.add_argument("--rows", type=int, default=1, help="prompts at once in the second part")
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    model, about = model_asked_for(given)

    requests = questions(model.config.vocab_size, given.questions)
    groupings, difference, rounding = measure_grouping(model, requests, given.batch_size)
    print(f"\n{_SHOTS} shots, {given.questions} questions, {len(requests)} requests")
    for line in groupings:
        name = "grouped" if line.grouped else "one by one"
        print(f"{name:12}{line.tokens:>12,} tokens{line.seconds:>10.2f} s{line.rows:>6} rows")
    one, other = groupings
    fewer, faster = other.tokens / one.tokens, other.seconds / one.seconds
    print(f"{fewer:.1f} times fewer tokens, {faster:.1f} times faster")
    print(f"log-probabilities differ by {difference:.3g} at most", end=", ")
    print(f"and by {rounding:.3g} between batches of other sizes", flush=True)

    print(f"\n{given.rows} prompts at once, {_GENERATED} tokens generated")
    print(f"{'prompt':>8}{'to first token':>18}{'µs a token':>14}{'peak memory':>16}")
    measured = measure_prompts(model, lengths, given.rows)
    for result in measured:
        first, per_token = f"{result.seconds * 1e3:.1f} ms", f"{result.microseconds_per_token:.3f}"
        memory = f"{result.peak_memory / 1e9:.3f} GB"
        print(f"{result.length:>8}{first:>18}{per_token:>14}{memory:>16}")
    each = [result.microseconds_per_token for result in measured]
    peaks = [result.peak_memory for result in measured]
    spread, growth = (100 * (max(values) / min(values) - 1) for values in (each, peaks))
    print(f"time per token varies by {spread:.1f}%, memory by {growth:.2f}%")
    if given.json is not None:
        results = {
            "machine": about,
            "settings": {k: str(v) for k, v in vars(given).items() if k != "json"},
            "grouping": [asdict(line) for line in groupings],
            "largest_difference": difference,
            "largest_difference_by_rounding": rounding,
            "prompts": [asdict(result) for result in measured],
        }
        write_json(given.json, results)


if __name__ == "__main__":
    main()
