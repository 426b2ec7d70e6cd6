"""`python -m xlstm7b.bench.engine`: what continuous batching costs, with random weights, no HTTP.

Two parts. `streams`: so many texts at once through the engine, each handed in when another ends,
against the same texts in whole batches through `Generator`. `prefix`: questions after a long
beginning that all of them share: how soon their first token comes.
"""

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from xlstm7b.bench.generation_ours import model_asked_for, model_options, prompts, release
from xlstm7b.evaluate.results import write_json
from xlstm7b.generate.engine import Engine, Piece
from xlstm7b.generate.generator import Generator
from xlstm7b.generate.requests import Request
from xlstm7b.generate.sampling import SamplingSettings
from xlstm7b.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

_QUESTION_TOKENS, _QUESTIONS = 40, 12


@dataclass(frozen=True)
class Streams:
    """The same texts by the engine and in whole batches, in seconds."""

    streams: int
    texts: int
    prompt_tokens: int
    new_tokens: int
    piece_tokens: int
    engine_seconds: float
    batch_seconds: float
    outside_model: float  # the share of the engine's time that is not the model's
    first_token_seconds: float  # median
    between_tokens_seconds: float  # median
    slowest_between: float  # 99 of 100 are no slower

    @property
    def share(self) -> float:
        """Of the speed that whole batches have."""
        return self.batch_seconds / self.engine_seconds


@dataclass(frozen=True)
class Prefix:
    """Milliseconds to the first token after a beginning that is shared."""

    tokens: int
    nothing_stored: float
    second: float  # which shows where texts part: it reads from the last interval on
    later: float  # median
    slowest: float


class _Told:
    """One text's pieces, with the time of each."""

    def __init__(self, at_end: threading.Semaphore) -> None:
        self.submitted = time.perf_counter()
        self.times: list[float] = []
        self.error: Exception | None = None
        self._at_end = at_end

    def __call__(self, news: Piece | Exception) -> None:
        self.times.append(time.perf_counter())
        if isinstance(news, Exception):
            self.error = news
        if isinstance(news, Exception) or news.completion is not None:
            self._at_end.release()

    @property
    def first(self) -> float:
        if self.error is not None:
            raise self.error
        return self.times[0] - self.submitted


def through_engine(engine: Engine, requests: Sequence[Request], streams: int) -> list[_Told]:
    """Hands in so many at once, and one more whenever one ends."""
    free, told = threading.Semaphore(streams), []
    for request in requests:
        free.acquire()
        told.append(_Told(free))
        engine.submit(request, told[-1])
    for _ in range(streams):
        free.acquire()
    return told


def measure_streams(
    generator: Generator, texts: int, lengths: tuple[int, int], piece_tokens: int
) -> Streams:
    streams = generator.batch_size
    settings = SamplingSettings(max_new_tokens=lengths[1], temperature=0, eos_token_id=())
    drawn = prompts(generator.config.vocab_size, texts, lengths[0])
    requests = [Request(ids, settings) for ids in drawn]
    generator.run(requests[:streams])  # compiles, captures
    began = time.perf_counter()
    for start in range(0, texts, streams):
        generator.run(requests[start : start + streams])
    batch_seconds = time.perf_counter() - began

    engine = Engine(generator, slots=streams, piece_tokens=piece_tokens)
    engine.start()
    through_engine(engine, requests[:streams], streams)
    before, began = engine.stats(), time.perf_counter()
    told = through_engine(engine, requests, streams)
    engine_seconds = time.perf_counter() - began
    after = engine.stats()
    engine.stop()
    model_seconds = after.model_seconds - before.model_seconds
    between = sorted(
        later - earlier
        for one in told
        for earlier, later in zip(one.times, one.times[1:], strict=False)
    )
    return Streams(
        streams, texts, *lengths, piece_tokens, engine_seconds, batch_seconds,
        1 - model_seconds / (after.seconds - before.seconds),
        median(one.first for one in told), median(between), between[int(0.99 * len(between))],
    )  # fmt: skip


def measure_prefix(generator: Generator, tokens: int, cache_bytes: int) -> Prefix:
    engine = Engine(generator, slots=8, cache_bytes=cache_bytes)
    engine.start()
    settings = SamplingSettings(max_new_tokens=8, temperature=0, eos_token_id=())
    beginning, other = prompts(generator.config.vocab_size, 2, tokens)
    through_engine(engine, [Request(other, settings)], 1)  # compiles, captures
    times = []
    for question in prompts(generator.config.vocab_size, _QUESTIONS, _QUESTION_TOKENS):
        (told,) = through_engine(engine, [Request(beginning + question, settings)], 1)
        times.append(1e3 * told.first)
    engine.stop()
    nothing_stored, second, *later = times
    return Prefix(tokens, nothing_stored, second, median(later), max(later))


def _results(
    generator: Generator, given: argparse.Namespace
) -> Iterator[tuple[str, Streams | Prefix]]:
    lengths = (given.prompt_tokens, given.new_tokens)
    for piece in map(int, given.piece_tokens.split(",")):
        measured = measure_streams(generator, given.texts, lengths, piece)
        print(f"streams: {100 * measured.share:.1f}% of the speed of whole batches")
        yield "streams", measured
        release(given.device)
    yield "prefix", measure_prefix(generator, given.prefix_tokens, int(given.cache_gb * 1e9))


def main() -> None:
    parser = model_options(__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", help="a tokenizer.json; else token ids stand for bytes")
    parser.add_argument("--streams", type=int, default=64, help="texts at once")
    parser.add_argument("--texts", type=int, default=192, help="texts in all")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--piece-tokens", default="512", help="of prompts, a step; several: 512,…")
    parser.add_argument("--prefix-tokens", type=int, default=30_000)
    parser.add_argument("--cache-gb", type=float, default=4.0)
    given = parser.parse_args()
    model, about = model_asked_for(given)
    tokenizer: Tokenizer = ByteTokenizer()
    if given.tokenizer:
        tokenizer = load_tokenizer(given.tokenizer, model.config.vocab_size)
    generator = Generator(model, tokenizer, batch_size=given.streams)
    results = []
    for part, measured in _results(generator, given):
        for field in fields(measured):
            print(f"  {field.name:26}{getattr(measured, field.name):,.6g}", flush=True)
        results.append({"part": part, **asdict(measured)})
    if given.json is not None:
        write_json(given.json, {"machine": about, "results": results})


if __name__ == "__main__":
    main()
