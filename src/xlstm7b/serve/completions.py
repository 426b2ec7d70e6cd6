"""A request's texts on their way to the client: whole, or as a stream of chunks."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Self

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from xlstm7b.generate.engine import Piece
from xlstm7b.generate.texts import Completion
from xlstm7b.serve.answers import Form, Json, Telling, joined, usage
from xlstm7b.serve.logs import noted
from xlstm7b.serve.schema import Sampling, TextBody
from xlstm7b.serve.states import Saved
from xlstm7b.serve.streaming import EventStream, Texts, or_gone
from xlstm7b.serve.work import Service, Work, overread_of, text_ids


class _Scored(NamedTuple):
    """A prompt's tokens and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float | None]
    top_logprobs: list[dict[int, float]]

    @classmethod
    def of(cls, prompt: list[int], pieces: Sequence[Piece]) -> Self:
        logprobs: list[float | None] = [value for piece in pieces for value in piece.logprobs]
        tops = [top for piece in pieces for top in piece.top_logprobs]
        # A first token that follows nothing has no probability.
        unknown = len(prompt) - len(logprobs)
        return cls(prompt, [*[None] * unknown, *logprobs], [*[{}] * unknown, *tops])


@dataclass
class _Answer:
    """An answer in the making."""

    service: Service
    work: Work
    form: Form
    echoes: list[_Scored | None]  # the prompts' own log-probabilities, where they are wanted
    completions: dict[int, Completion] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    def telling(self, index: int) -> Telling:
        return Telling(self.form, index, self.service.generator.tokenizer, self.work.logprobs)

    def keep(self, index: int, piece: Piece) -> None:
        if piece.completion is not None:
            self.completions[index] = piece.completion
        self.cached[index] = piece.cached_tokens

    def usage(self) -> Json:
        requests, best_of = self.work.requests, self.work.best_of
        tokens = sum(len(request.ids) for request in requests)
        # Of several texts of one prompt, the first one's: the others find what it has read.
        cached = sum(self.cached.get(place * best_of, 0) for place in range(len(requests)))
        made = sum(len(completion.token_ids) for completion in self.completions.values())
        return usage(tokens, made, cached)

    def echo(self, telling: Telling, prompt: int) -> tuple[str, Json | None]:
        """The prompt as part of the answer."""
        if not self.work.echo:
            return "", None
        text = self.service.generator.tokenizer.decode(self.work.prompts[prompt])
        scored = self.echoes[prompt]
        return text, None if scored is None else telling.scores(*scored)

    async def save(self, completion: Completion) -> str:
        """Saves the state behind the text; its id, for the answer."""
        assert completion.state is not None
        written = self.service.generator.tokenizer.decode(completion.token_ids)
        overread = written.removeprefix(completion.text)
        store = self.service.saved()
        return (await asyncio.to_thread(store.save, completion.state, overread)).id


async def answer(
    service: Service,
    to_work: Callable[[], Awaitable[Work]],
    form: Form,
    http: HttpRequest,
    body: Sampling,
) -> Response:
    """Generates, and answers. A client that leaves takes its texts with it."""
    with ExitStack() as at_the_end:
        if body.state is not None or body.save_state:
            at_the_end.enter_context(service.saved().held())
        work = await to_work()
        echoes = await or_gone(http.receive, _score_prompts(service, work))
        made = _Answer(service, work, form, echoes)
        texts = work.submit(service)
        at_the_end.callback(texts.cancel)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            at_the_end.callback(lambda: noted(http, **made.usage()))
            return EventStream(_events(made, texts, with_usage), at_the_end.pop_all().close)
        content = await or_gone(http.receive, _whole(made, texts))
    noted(http, **content["usage"])
    return await asyncio.to_thread(JSONResponse, content)  # long ones take a while


async def _score_prompts(service: Service, work: Work) -> list[_Scored | None]:
    """The tokens of every prompt with their log-probabilities, if its echo is to have them."""
    if not work.echo or work.logprobs is None:
        return [None] * len(work.prompts)
    texts = service.texts()
    for prompt in work.prompts:
        texts.submit(partial(service.engine.submit_logprobs, prompt, work.logprobs))
    scored: list[list[Piece]] = [[] for _ in work.prompts]
    try:
        async for index, piece in texts.pieces():
            scored[index].append(piece)
    finally:
        texts.cancel()
    return [_Scored.of(*pair) for pair in zip(work.prompts, scored, strict=True)]


async def read_to_state(service: Service, body: TextBody, http: HttpRequest) -> Saved:
    """Reads a text, or a conversation as far as it has come, and saves where that leads."""
    store = service.saved()
    with store.held():
        await asyncio.to_thread(store.check_room, service.state_bytes)
        ids = await text_ids(service, body, to_answer=False)
        texts = service.texts()
        texts.submit(partial(service.engine.read, ids))
        try:
            piece = await or_gone(http.receive, _last_piece(texts))
        finally:
            texts.cancel()
        assert piece.completion is not None
        assert piece.completion.state is not None
        overread = "" if body.messages is None else overread_of(service, body.messages)
        return await asyncio.to_thread(store.save, piece.completion.state, overread)


async def _last_piece(texts: Texts) -> Piece:
    pieces = [piece async for _, piece in texts.pieces()]
    return pieces[-1]


async def _whole(made: _Answer, texts: Texts) -> Json:
    async for index, piece in texts.pieces():
        made.keep(index, piece)
    choices = await asyncio.to_thread(_choices, made)
    saved = await made.save(made.completions[0]) if made.work.keep_state else None
    return made.form.whole(choices, made.usage(), saved)


def _choices(made: _Answer) -> list[Json]:
    work, choices = made.work, list[Json]()
    for prompt in range(len(work.prompts)):
        own = [made.completions[prompt * work.best_of + place] for place in range(work.best_of)]
        if work.best_of > work.n:
            own.sort(key=_mean_logprob, reverse=True)
        for completion in own[: work.n]:
            telling = made.telling(len(choices))
            text, scores = made.echo(telling, prompt)
            scores = joined(
                scores,
                telling.scores(
                    completion.token_ids, completion.logprobs or (), completion.top_logprobs or ()
                ),
            )
            told = telling.whole(text + completion.text, scores, completion.finish_reason)
            choices.append(told)
        if not work.n:
            telling = made.telling(prompt)
            choices.append(telling.whole(*made.echo(telling, prompt), "length"))
    return choices


def _mean_logprob(completion: Completion) -> float:
    logprobs = completion.logprobs or [0.0]
    return sum(logprobs) / len(logprobs)


async def _events(made: _Answer, texts: Texts, with_usage: bool) -> AsyncIterator[Json]:
    work, form = made.work, made.form
    tellings = [made.telling(index) for index in range(len(work.prompts) * max(1, work.n))]
    if work.echo:
        for index, telling in enumerate(tellings):
            echo = partial(made.echo, telling, index // max(1, work.n))
            text, scores = await asyncio.to_thread(echo)
            yield form.chunk([telling.chunk(text, scores, None if work.n else "length")])
    async for index, piece in texts.pieces():
        made.keep(index, piece)
        telling, done = tellings[index], piece.completion
        scores = telling.scores(piece.token_ids, piece.logprobs, piece.top_logprobs)
        saved = await made.save(done) if done is not None and work.keep_state else None
        if piece.text or done or scores:
            reason = None if done is None else done.finish_reason
            yield form.chunk([telling.chunk(piece.text, scores, reason)], state_id=saved)
    if with_usage:
        yield form.chunk([], made.usage())
