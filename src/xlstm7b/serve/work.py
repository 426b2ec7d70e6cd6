"""From a request's body to texts for the engine: prompts as ids, settings checked, limits held."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import cast

from xlstm7b.generate.chat import Turns, ends_of_answers, less_start
from xlstm7b.generate.engine import Engine
from xlstm7b.generate.generator import Generator
from xlstm7b.generate.requests import Request
from xlstm7b.generate.sampling import SamplingSettings
from xlstm7b.generate.slots import state_bytes
from xlstm7b.generate.states import TextState
from xlstm7b.serve.limits import ApiError, Limits
from xlstm7b.serve.metrics import Metrics
from xlstm7b.serve.schema import ChatBody, CompletionBody, Message, Prompt, Sampling, TextBody
from xlstm7b.serve.states import StateStore
from xlstm7b.serve.streaming import Outbox, Texts
from xlstm7b.tokenizer import CachingEncoder

_COMPLETION_TOKENS, _CHAT_TOKENS = 16, 1024  # where the request does not say
_SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True)
class Service:
    """What the routes need."""

    engine: Engine
    generator: Generator
    turns: Turns
    name: str  # the model's, for clients
    created: int
    limits: Limits
    metrics: Metrics
    states: StateStore | None
    draining: threading.Event = field(default_factory=threading.Event)  # on its way out
    outbox: Outbox = field(default_factory=Outbox)

    @cached_property
    def encoder(self) -> CachingEncoder:
        return CachingEncoder(self.generator.tokenizer)

    def texts(self) -> Texts:
        """None yet, of a request that is about to ask for some."""
        return Texts(self.metrics, self.outbox)

    @property
    def state_bytes(self) -> int:
        """Of one text's memory, however long it is."""
        return state_bytes(self.generator)

    def check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"there is no model {name[:80]!r} here, only {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def saved(self) -> StateStore:
        if self.states is None:
            raise ApiError(404, "this server saves no states: it was started without a folder")
        return self.states


@dataclass(frozen=True)
class Work:
    """What a request amounts to: of every prompt `best_of` texts, of which `n` are told."""

    prompts: list[list[int]]  # as given
    requests: list[Request]  # one a prompt, checked: with the first id that the model may want
    n: int = 1
    best_of: int = 1
    echo: bool = False
    logprobs: int | None = None  # of how many likeliest tokens, besides the one chosen
    start: TextState | None = None
    keep_state: bool = False

    @property
    def texts_each(self) -> int:
        """Texts of a prompt, of which the first may score it: one, too, where it does only that."""
        return max(1, self.best_of) if self.scores_prompts else self.best_of

    @property
    def scores_prompts(self) -> bool:
        return self.echo and self.logprobs is not None

    def submit(self, service: Service) -> Texts:
        """All its texts as jobs: text t is the prompt t // texts_each's."""
        texts, engine = service.texts(), service.engine
        for request in self.requests:
            if self.scores_prompts and not self.best_of:
                texts.submit(partial(engine.submit_logprobs, request.ids, self.logprobs or 0))
            for place in range(self.best_of):
                submit = partial(
                    engine.submit,
                    request.nth(place),
                    state=self.start,
                    keep_state=self.keep_state,
                    score_prompt=self.scores_prompts and place == 0,
                )
                texts.submit(submit)
        return texts


async def completion_work(service: Service, body: CompletionBody) -> Work:
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n:
        raise ApiError(400, f"best_of ({best_of}) must not be less than n ({n})", param="best_of")
    if body.stream and best_of > n:
        raise ApiError(400, "a stream cannot tell the best of several texts", param="best_of")
    start, _ = await _start(service, body)
    prompts = [[]] if body.prompt is None and start else await to_ids(service, body.prompt)
    default = min(_COMPLETION_TOKENS, service.limits.new_tokens)
    max_tokens = default if body.max_tokens is None else body.max_tokens
    scored = max_tokens == 0 and bool(body.echo)  # nothing is generated, only the prompt scored
    if body.logprobs is not None and body.echo and start is not None:
        raise ApiError(400, "the prompt after a saved state has no logprobs", param="echo")
    logprobs = 0 if body.logprobs is None and best_of > n else body.logprobs
    # Who scores prompts asks for one token and leaves the last score out (lm_eval does): there must
    # be one, even if it is an end of text.
    counted = body.echo and body.logprobs is not None and max_tokens == 1
    eos = () if counted else None
    settings = _settings(service, body, max_tokens or int(scored), logprobs, eos)
    work = Work(
        prompts,
        _requests(service, prompts, settings, _stops(body), start),
        0 if scored else n,
        0 if scored else best_of,
        bool(body.echo),
        body.logprobs,
        start,
        bool(body.save_state),
    )
    _check_choices(service, work)
    return work


async def chat_work(service: Service, body: ChatBody) -> Work:
    start, overread = await _start(service, body)
    if start is None:
        text = _written(service, body.messages)
    else:
        (message, *others) = body.messages
        if others or message.role != "user":
            what = "with a state there must be one message, the user's: the state knows the others"
            raise ApiError(400, what, param="messages")
        text = less_start(service.turns.later(message.plain()["content"]), overread)
    prompts = await to_ids(service, text)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked = (body.max_completion_tokens, body.max_tokens)
    default = min(_CHAT_TOKENS, service.limits.new_tokens)
    max_tokens = next((most for most in asked if most is not None), default)
    if body.max_completion_tokens is not None:
        _check_max_tokens(service, max_tokens, "max_completion_tokens")
    endings, special = ends_of_answers(service.turns, service.generator)
    settings = _settings(service, body, max_tokens, logprobs, special)
    stops = (*_stops(body), *endings)
    n = body.n or 1
    work = Work(
        prompts,
        _requests(service, prompts, settings, stops, start),
        n,
        n,
        logprobs=logprobs,
        start=start,
        keep_state=bool(body.save_state),
    )
    _check_choices(service, work)
    return work


async def to_ids(service: Service, prompt: Prompt | None) -> list[list[int]]:
    """The ids of one prompt or of many, tokenized in another thread: a long text takes a while."""
    if prompt is None or prompt == []:
        raise ApiError(400, "there is no prompt", param="prompt")
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts = cast("list[str | list[int]]", [prompt] if one else prompt)
    encode = service.encoder.encode
    ids = await asyncio.to_thread(
        lambda: [encode(part) if isinstance(part, str) else part for part in prompts]
    )
    _check_length(service, ids)
    return ids


def _check_length(service: Service, prompts: Sequence[list[int]], texts_each: int = 1) -> None:
    """Each text holds its prompt: n of them count n times."""
    most = service.limits.prompt_tokens
    if sum(map(len, prompts)) * texts_each > most:
        message = f"the prompts of all texts are longer than {most} tokens"
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")


async def text_ids(service: Service, body: TextBody, *, to_answer: bool = True) -> list[int]:
    """The ids of a text, or of a conversation; `to_answer`: and of the start of an answer."""
    service.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "there must be either a prompt or messages")
    prompt = body.prompt
    if body.messages is not None:
        prompt = _written(service, body.messages, to_answer=to_answer)
    return [] if prompt == [] else (await to_ids(service, prompt))[0]


def overread_of(service: Service, messages: Sequence[Message]) -> str:
    """How a conversation ends, as far as a later turn begins like that."""
    text, later = _written(service, messages, to_answer=False), service.turns.later("")
    ends = (end for end in range(min(len(text), len(later)), 0, -1) if text.endswith(later[:end]))
    return later[: next(ends, 0)]


def _written(service: Service, messages: Sequence[Message], *, to_answer: bool = True) -> str:
    try:
        return service.turns.whole([one.plain() for one in messages], to_answer=to_answer)
    except ValueError as error:  # the template will not have them
        raise ApiError(400, str(error), param="messages") from error


async def _start(service: Service, body: Sampling) -> tuple[TextState | None, str]:
    """The state to go on from, and what it has read too much."""
    service.check_name(body.model)
    if body.save_state:
        await asyncio.to_thread(service.saved().check_room, service.state_bytes)
    if body.state is None:
        return None, ""
    return await asyncio.to_thread(service.saved().load, body.state)


def _settings(
    service: Service,
    body: Sampling,
    max_tokens: int,
    logprobs: int | None,
    eos: tuple[int, ...] | None = None,
) -> SamplingSettings:
    _check_max_tokens(service, max_tokens, "max_tokens")
    given = {name: getattr(body, name) for name in _SAME_NAMES}
    try:
        biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise ApiError(400, "logit_bias is by token ids", param="logit_bias") from error
    return SamplingSettings(
        max_new_tokens=max_tokens,
        min_new_tokens=body.min_tokens or 0,
        logit_bias=biases,
        seed=None if body.seed is None else body.seed % (1 << 64),
        eos_token_id=() if body.ignore_eos else eos,
        logprobs=logprobs,
        **{name: value for name, value in given.items() if value is not None},
    )


def _check_max_tokens(service: Service, max_tokens: int, name: str) -> None:
    most = service.limits.new_tokens
    if not 1 <= max_tokens <= most:
        raise ApiError(400, f"{name} must be between 1 and {most}", param=name)


def _stops(body: Sampling) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _requests(
    service: Service,
    prompts: Sequence[list[int]],
    settings: SamplingSettings,
    stops: tuple[str, ...],
    start: TextState | None,
) -> list[Request]:
    try:
        return [
            service.generator.check([Request(prompt, settings, stops)], start)[0]
            for prompt in prompts
        ]
    except ValueError as error:
        message = str(error).replace("_new_tokens", "_tokens")  # as clients call them
        name = message.partition(" ")[0]
        param = name if name in Sampling.model_fields or name == "logprobs" else None
        raise ApiError(400, message, param=param) from error


def _check_choices(service: Service, work: Work) -> None:
    most = service.limits.choices
    if len(work.prompts) * max(1, work.best_of) > most:
        raise ApiError(400, f"a request may ask for at most {most} texts in all", param="n")
    _check_length(service, work.prompts, max(1, work.best_of))
    if work.logprobs is not None:
        tokens = sum(request.settings.max_new_tokens for request in work.requests) * work.best_of
        tokens += sum(map(len, work.prompts)) * max(1, work.n) if work.echo else 0
        if tokens * (1 + work.logprobs) > service.limits.logprobs:
            message = f"a request may ask for at most {service.limits.logprobs} logprobs in all"
            raise ApiError(400, message, param="logprobs")
    if work.keep_state and len(work.prompts) * work.best_of != 1:
        raise ApiError(400, "save_state saves one text: n and best_of must be 1", param="n")
