"""A request's texts on their way to the client: whole, or as a stream of chunks."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from xlstm7b.generate.engine import Piece
from xlstm7b.generate.texts import Completion
from xlstm7b.serve.answers import Form, Json, Telling, joined, usage
from xlstm7b.serve.limits import ApiError
from xlstm7b.serve.logs import noted
from xlstm7b.serve.schema import Sampling, TextBody
from xlstm7b.serve.states import Saved
from xlstm7b.serve.streaming import EventStream, Texts, or_gone
from xlstm7b.serve.work import Service, Work, overread_of, text_ids


class _Answer:
    """An answer in the making."""

    def __init__(self, service: Service, work: Work, form: Form) -> None:
        self.service, self.work, self.form = service, work, form
        self.completions: dict[int, Completion] = {}
        self._cached: dict[int, int] = {}
        self._new_tokens = 0
        self._scored: list[list[Piece]] = [[] for _ in work.requests]
        # A first token that follows nothing has no probability.
        scored = work.requests if work.scores_prompts else ()
        self.unscored = sum(len(request.ids) - 1 for request in scored)

    def telling(self, index: int) -> Telling:
        return Telling(self.form, index, self.service.generator.tokenizer, self.work.logprobs)

    def keep(self, index: int, piece: Piece) -> Piece:
        """Notes what one text grew by; returns it without the prompt's own tokens."""
        own, piece = piece.parts()
        if own is not None:
            self._scored[index // self.work.texts_each].append(own)
            self.unscored -= len(own.token_ids)
        if piece.completion is not None:
            self.completions[index] = piece.completion
        self._cached[index] = piece.cached_tokens
        self._new_tokens += len(piece.token_ids)
        return piece

    def usage(self) -> Json:
        requests, texts_each = self.work.requests, self.work.texts_each
        tokens = sum(len(request.ids) for request in requests)
        # Of several texts of one prompt, the first one's: the others find what it has read.
        cached = sum(self._cached.get(place * texts_each, 0) for place in range(len(requests)))
        return usage(tokens, self._new_tokens, cached)

    def echo(self, telling: Telling, prompt: int) -> tuple[str, Json | None]:
        """The prompt as part of the answer."""
        if not self.work.echo:
            return "", None
        ids = self.work.prompts[prompt]
        text = self.service.generator.tokenizer.decode(ids)
        if not self.work.scores_prompts:
            return text, None
        own = self._scored[prompt]
        logprobs = [value for piece in own for value in piece.logprobs]
        tops = [top for piece in own for top in piece.top_logprobs]
        unknown = len(ids) - len(logprobs)
        return text, telling.scores(ids, [*[None] * unknown, *logprobs], [*[{}] * unknown, *tops])

    async def saved(self, completion: Completion) -> Json:
        """Saves the state behind the text: what the answer, which is not lost, says of it."""
        assert completion.state is not None
        written = self.service.generator.tokenizer.decode(completion.token_ids)
        overread = written.removeprefix(completion.text)
        store = self.service.saved()
        try:
            saved = await asyncio.to_thread(store.save, completion.state, overread)
        except ApiError as error:
            return {"state_id": None, "state_error": error.message}
        return {"state_id": saved.id}


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
        made = _Answer(service, work, form)
        texts = work.submit(service)
        at_the_end.callback(texts.cancel)
        at_the_end.callback(lambda: noted(http, **made.usage()))
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            stream = EventStream(_events(made, texts, with_usage))
            at_the_end.callback(lambda: noted(http, ended=stream.ended))
            stream.at_the_end = at_the_end.pop_all()
            return stream
        content = await or_gone(http.receive, _whole(made, texts))
    return await asyncio.to_thread(JSONResponse, content)  # long ones take a while


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
    saved = await made.saved(made.completions[0]) if made.work.keep_state else {}
    return made.form.whole(choices, made.usage()) | saved


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
    coming, held = texts.pieces(), list[tuple[int, Piece]]()
    while made.unscored:  # an echo comes before what follows it
        index, piece = await anext(coming)
        held.append((index, made.keep(index, piece)))
    if work.echo:
        for index, telling in enumerate(tellings):
            echo = partial(made.echo, telling, index // max(1, work.n))
            text, scores = await asyncio.to_thread(echo)
            yield form.chunk([telling.chunk(text, scores, None if work.n else "length")])

    async def to_chunk(index: int, piece: Piece) -> Json | None:
        telling, done = tellings[index], piece.completion
        scores = telling.scores(piece.token_ids, piece.logprobs, piece.top_logprobs)
        if not (work.n and (piece.text or done or piece.logprobs)):
            return None
        if done is None:
            return form.chunk([telling.chunk(piece.text, scores, None)])
        last = form.chunk([telling.chunk(piece.text, scores, done.finish_reason)])
        return last | await made.saved(done) if work.keep_state else last

    for index, piece in held:
        if (chunk := await to_chunk(index, piece)) is not None:
            yield chunk
    async for index, piece in coming:
        if (chunk := await to_chunk(index, made.keep(index, piece))) is not None:
            yield chunk
    if with_usage:
        yield form.chunk([], made.usage())
