"""The routes that use the model: completions, chats and tokens.

A completion takes three steps. 1. The body becomes engine requests, within all limits. 2. They are
submitted to the engine thread. 3. Their outputs become the response, whole or as a stream.
"""

import asyncio
import hmac
import json
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xlstm7b.chat_format import ANSWER, ChatFormat, answer_ends, without_prefix
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Completion, Request, RequestOutput, SamplingParams, SavedState
from xlstm7b.generate.request import end_ids
from xlstm7b.generate.state import state_bytes
from xlstm7b.generate.structured import (
    Grammar,
    GrammarsBusyError,
    StructuredOutputError,
    compile_grammar,
    compiling_for,
)
from xlstm7b.model.adapter import Adapter
from xlstm7b.serve import protocol
from xlstm7b.serve.engine_thread import EngineThread
from xlstm7b.serve.middleware import add_to_log, request_id
from xlstm7b.serve.off_loop import SHORT, BodyRoute, json_response, off_loop
from xlstm7b.serve.prometheus import Metrics
from xlstm7b.serve.protocol import ApiError, ChatBody, CompletionBody, Json, SamplingBody, TextBody
from xlstm7b.serve.saved_states import SavedStates, save_in_thread
from xlstm7b.serve.streaming import EventStream, OutputQueue, cancel_on_disconnect
from xlstm7b.serve.tools import (
    AnswerReader,
    ToolFormat,
    check_messages,
    check_tools,
    schemas_of,
)
from xlstm7b.tokenizer import CachingEncoder, Tokenizer, check_tokens, with_first_token

router = APIRouter(route_class=BodyRoute)
# Grammars that take long to compile do not hold up other work in threads. Only a few are compiled
# at a time (`structured.py`); the other threads wait, one for each request.
_GRAMMARS = ThreadPoolExecutor(512, thread_name_prefix="prepare")
_Result = TypeVar("_Result")


class ServedModel(NamedTuple):
    """What a client's `model` stands for."""

    id: str
    chat_format: ChatFormat
    tool_format: ToolFormat
    adapter: Adapter | None = None

    @property
    def fingerprint(self) -> str:
        """Of the adapter; empty without one."""
        return "" if self.adapter is None else self.adapter.fingerprint


class GrammarsInUse:
    """Limits the memory of the grammars of all requests that wait or run.

    It grows with the CPU time that compiled them, by up to 300 MB per second. Grammars that took at
    most 10 ms, as usual ones do, are never refused.
    """

    def __init__(self, cpu_seconds: float = 4.0) -> None:
        self._limit, self._uses = cpu_seconds, Counter[Grammar]()

    @contextmanager
    def count(self, requests: Sequence[Request]) -> Iterator[None]:
        """Held while the requests wait or run. Requests with the same grammar share it."""
        used = {one.matcher.grammar for one in requests if one.matcher is not None}
        large = [one for one in used if one.cpu_seconds > 0.01 and one not in self._uses]
        if large and sum(one.cpu_seconds for one in {*self._uses, *used}) > self._limit:
            message = (
                "the grammars of running requests take up too much memory for another large one: "
                "try again later, or send a simpler schema, regex or grammar"
            )
            raise ApiError(429, message, retry_after=1)
        self._uses.update(used)
        try:
            yield
        finally:
            self._uses.subtract(used)
            self._uses = +self._uses  # without those that no request uses


@dataclass(frozen=True)
class Service:
    """Everything that the handlers share: `http.app.state.service`."""

    engine: EngineThread
    chat_format: ChatFormat
    name: str  # of the model, for clients
    limits: protocol.Limits
    metrics: Metrics
    states: SavedStates | None = None
    adapters: Mapping[str, tuple[Adapter, ChatFormat]] = field(default_factory=dict)  # by name
    created: int = field(default_factory=lambda: int(time.time()))
    draining: threading.Event = field(default_factory=threading.Event)
    grammars: GrammarsInUse = field(default_factory=GrammarsInUse)

    @property
    def config(self) -> ModelConfig:
        return self.engine.engine.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.engine.tokenizer

    @cached_property
    def encoder(self) -> CachingEncoder:
        return CachingEncoder(self.tokenizer)

    @cached_property
    def choices(self) -> protocol.Limiter:
        """Limits the outputs that one client generates. The queue limits those of all."""
        return protocol.Limiter(math.inf, "choices", per_client=self.limits.client_requests)

    @cached_property
    def _states_in_memory(self) -> protocol.Limiter:
        most, alone = self.limits.states_bytes, self.limits.client_requests is None
        part = None if alone else most * 3 / 4
        return protocol.Limiter(most, "GB of saved states", per_client=part, unit=10**9)

    def hold_states(self, count: int, http: HttpRequest) -> AbstractContextManager[None]:
        """Memory for states besides those in slots: loaded ones, and those that will be saved."""
        if count:
            self.saved_states()
        client = http.scope["xlstm7b.client"]
        return self._states_in_memory.count(count * self.state_bytes, client)

    @property
    def state_bytes(self) -> int:
        """Size of one saved state."""
        return state_bytes(self.config, self.engine.engine.state_dtype)

    @cached_property
    def models(self) -> list[ServedModel]:
        """The model without an adapter, then with each of them."""
        made = [ServedModel(self.name, self.chat_format, self._tool_format(self.chat_format))]
        for name, (adapter, chat_format) in self.adapters.items():
            tool_format = self._tool_format(chat_format)
            made.append(ServedModel(f"{self.name}:{name}", chat_format, tool_format, adapter))
        return made

    def _tool_format(self, chat_format: ChatFormat) -> ToolFormat:
        return ToolFormat(chat_format, self.tokenizer)

    def find_model(self, name: str | None) -> ServedModel:
        """By its id, or by the adapter's name alone. None is the model without an adapter."""
        for model in self.models:
            if name in (None, model.id, model.id.removeprefix(f"{self.name}:")):
                return model
        known = ", ".join(repr(model.id) for model in self.models)
        message = f"there is no model {str(name)[:80]!r}; this server has {known}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def saved_states(self) -> SavedStates:
        if self.states is None:
            message = "this server does not save states: it was started without --states-folder"
            raise ApiError(404, message)
        return self.states


@router.post("/v1/completions", response_model=None)
async def complete(body: CompletionBody, http: HttpRequest) -> Response:
    """Continue a prompt."""
    return await generate(http.app.state.service, body, http)


@router.post("/v1/chat/completions", response_model=None)
async def chat(body: ChatBody, http: HttpRequest) -> Response:
    """Answer a conversation."""
    return await generate(http.app.state.service, body, http)


class Converter(Protocol):
    """Writes the response in another form than that of the body's own route."""

    def whole(self, content: Json) -> Json:
        """The whole response."""

    def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Json]:
        """The events of a stream, each with a "type", which is its name."""


async def generate(
    service: Service,
    body: CompletionBody | ChatBody,
    http: HttpRequest,
    converter: Converter | None = None,
) -> Response:
    """Generates the response. If the client disconnects, its requests are aborted."""
    with ExitStack() as cleanup:
        states = (body.state is not None) + bool(body.save_state)
        cleanup.enter_context(service.hold_states(states, http))
        # 1. The body becomes engine requests.
        if isinstance(body, ChatBody):
            prompts, params, state = await _read_chat(service, body)
        else:
            prompts, params, state = await _read_completion(service, body)
        _check_limits(service, body, prompts, params)
        model = service.find_model(body.model)
        salt: bytes = http.scope["xlstm7b.cache_salt"]
        if body.cache_salt is not None:
            salt = hmac.digest(salt, body.cache_salt.encode(), "sha256")
        built = _build_requests(body, prompts, params, state, model.adapter, salt)
        cleanup.enter_context(service.choices.count(len(built), http.scope["xlstm7b.client"]))
        requests = await _prepare(service, built, body, http.scope["xlstm7b.client"])
        cleanup.enter_context(service.grammars.count(requests))
        # 2. They are submitted.
        answer = _Answer(service, body, http, prompts, requests)
        queue = OutputQueue(service.engine, service.metrics)
        queue.submit(requests)
        cleanup.callback(queue.abort)
        cleanup.callback(lambda: add_to_log(http, **answer.usage()))
        # 3. Their outputs become the response.
        if body.stream:
            options = body.stream_options or protocol.StreamOptions()
            events = _chunks(answer, queue, options)
            if converter is not None:
                events = converter.events(events)
            stream = EventStream(events, are_named=converter is not None)
            cleanup.callback(lambda: add_to_log(http, **stream.outcome))
            stream.cleanup = cleanup.pop_all()  # the stream outlives this function
            return stream
        content = await cancel_on_disconnect(http.receive, _whole(answer, queue))
        if converter is not None:
            content = converter.whole(content)
    size = answer.usage()["total_tokens"] * (1 + (body.answer_logprobs or 0))
    return await json_response(content, size)


async def count_prompt_tokens(service: Service, body: ChatBody) -> int:
    """The prompt tokens that the usage of an answer would name."""
    (ids,), _, _ = await _read_chat(service, body)
    (request,) = await _prepare(service, [Request(ids)], body)
    return len(request.prompt_token_ids)


# 1. From a body to engine requests

_Input = tuple[list[list[int]], SamplingParams, SavedState | None]


async def _read_completion(service: Service, body: CompletionBody) -> _Input:
    n, best_of = body.choices, body.candidates
    if best_of < n:
        raise ApiError(400, f"best_of ({best_of}) must not be less than n ({n})", param="best_of")
    if body.stream and best_of > n:
        raise ApiError(400, "with stream, best_of must equal n", param="best_of")
    if body.scores_prompt and body.state is not None:
        raise ApiError(400, "echo with logprobs does not work with a saved state", param="echo")
    state, _ = await _load_state(service, body)
    needs_no_prompt = state is not None and body.prompt is None
    prompts = [[]] if needs_no_prompt else await _encode(service, body, body.prompt, state)
    adapter = service.find_model(body.model).adapter
    ends = end_ids(service.config.eos_token_id, adapter=adapter)
    return prompts, body.to_sampling_params(service.limits, eos_token_id=ends), state


async def _read_chat(service: Service, body: ChatBody) -> _Input:
    state, text_after_answer = await _load_state(service, body)
    size = _chat_size(body.messages, body.tools)
    write = partial(_write_chat, service, body, state, text_after_answer)
    text, params = await off_loop(write, size)
    return await _encode(service, body, text, state), params, state


def _chat_size(messages: Sequence[protocol.Message], tools: Sequence[protocol.Tool] | None) -> int:
    """About the characters of a conversation. Functions take much work for few characters."""
    texts = (len(message.to_template()["content"]) for message in messages)
    return sum(texts) + 64 * len(messages) + (SHORT + 1 if tools else 0)


def _write_chat(
    service: Service, body: ChatBody, state: SavedState | None, text_after_answer: str
) -> tuple[str, SamplingParams]:
    """The text of the conversation, and the parameters of its answer."""
    model = service.find_model(body.model)
    chat_format = model.chat_format
    _check_messages(service, body.messages)
    if body.tools or body.tool_choice:
        check_tools(body.tools or (), body.tool_choice)
    continues_last = _continues_last(body)
    if state is None or not state.has_text:
        tools = [] if body.tool_choice == "none" else body.tools or []
        text = _render(
            model,
            body.messages,
            tools,
            continues_last=continues_last,
            variables=body.chat_template_kwargs,
        )
    else:
        ends = (body.messages[0].role, body.messages[-1].role)
        if ends != ("user", "assistant" if continues_last else "user"):
            error = (
                "with a state, messages must be one user message, or several that start and end "
                "with one: they follow what the state has read"
            )
            raise ApiError(400, error, param="messages")
        if body.tools:
            error = "tools cannot be combined with a state that has read text"
            raise ApiError(400, error, param="tools")
        later = _render_later(
            model,
            body.messages,
            continues_last=continues_last,
            variables=body.chat_template_kwargs,
        )
        text = without_prefix(later, text_after_answer)
    stop_strings, eos_token_id = answer_ends(
        chat_format, service.tokenizer, service.config.eos_token_id
    )
    grammar = model.tool_format.grammar(body) if body.offered_tools else None
    if body.form() is not None or body.must_call:
        stop_strings = ()  # the grammar ends the answer
    params = body.to_sampling_params(
        service.limits,
        stop_strings=stop_strings,
        eos_token_id=end_ids(
            *(eos_token_id or (service.config.eos_token_id,)), adapter=model.adapter
        ),
        grammar=grammar,
    )
    return text, params


def _continues_last(body: ChatBody) -> bool:
    """True if the answer goes on with the last message."""
    if not body.continue_final_message:
        if body.add_generation_prompt is False:
            message = "add_generation_prompt: false needs continue_final_message: true"
            raise ApiError(400, message, param="add_generation_prompt")
        return False
    if body.add_generation_prompt:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise ApiError(400, message, param="add_generation_prompt")
    last = body.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        message = "continue_final_message needs a last message of the assistant, without tool_calls"
        raise ApiError(400, message, param="continue_final_message")
    return True


async def _load_state(service: Service, body: SamplingBody) -> tuple[SavedState | None, str]:
    """The saved state to continue from, and the text that it has read after its answer."""
    model = service.find_model(body.model)
    if body.save_state:
        await asyncio.to_thread(service.saved_states().check_room, service.state_bytes)
    if body.state is None:
        return None, ""
    return await asyncio.to_thread(service.saved_states().load, body.state, model.fingerprint)


async def _encode(
    service: Service,
    body: SamplingBody | TextBody,
    prompt: protocol.Prompt | None,
    state: SavedState | None = None,
) -> list[list[int]]:
    """The token ids of the body's prompts, which are read after a state."""
    if prompt is None or prompt == []:
        raise ApiError(400, "there is no prompt", param="prompt")
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts = cast("list[str | list[int]]", [prompt] if is_one else prompt)
    encode = partial(service.encoder.encode, continues=state is not None and state.has_text)
    token_ids = await off_loop(
        lambda: [encode(one) if isinstance(one, str) else one for one in prompts],
        size=sum(map(len, prompts)),
    )
    _check_prompt_tokens(service, body, token_ids)
    return token_ids


def _render(
    model: ServedModel,
    messages: Sequence[protocol.Message],
    tools: Sequence[protocol.Tool] = (),
    *,
    add_generation_prompt: bool = True,
    continues_last: bool = False,
    variables: Json | None = None,
) -> str:
    written: list[Json]
    if tools or any(message.uses_tools for message in messages):
        written, described = model.tool_format.write(messages, tools)
    else:
        written, described = [{**message.to_template()} for message in messages], None
    try:
        if continues_last:
            return model.chat_format.render_open(written, tools=described, variables=variables)
        return model.chat_format.render(
            written,
            add_generation_prompt=add_generation_prompt,
            tools=described,
            variables=variables,
        )
    except ValueError as error:  # the chat template refuses them
        raise ApiError(400, str(error), param="messages") from error


def _render_later(model: ServedModel, messages: Sequence[protocol.Message], **options: Any) -> str:
    """The text of messages that follow an answer, from the end of its turn on."""
    talk = [
        protocol.Message(role="user", content="Hello"),
        protocol.Message(role="assistant", content=ANSWER),
        *messages,
    ]
    return _render(model, talk, (), **options).partition(ANSWER)[2]


def _check_messages(service: Service, messages: Sequence[protocol.Message]) -> None:
    count, allowed = len(messages), service.limits.messages
    if count > allowed:
        message = f"messages must have at most {allowed} entries, not {count}"
        raise ApiError(400, message, param="messages")
    if any(message.uses_tools for message in messages):
        check_messages(messages)
    for number, one in enumerate(messages):
        if one.content is None and one.role != "assistant":
            name = f"messages.{number}.content"
            raise ApiError(400, f"{name} is missing: only an assistant may have none", param=name)


def _check_limits(
    service: Service, body: SamplingBody, prompts: Sequence[list[int]], params: SamplingParams
) -> None:
    generations, limits = len(prompts) * body.candidates, service.limits
    if generations > limits.choices:
        message = f"a request may have at most {limits.choices} choices in all, not {generations}"
        raise ApiError(400, message, param="n")
    if body.save_state and generations != 1:
        raise ApiError(400, "save_state needs one prompt, and n and best_of of 1", param="n")
    _check_prompt_tokens(service, body, prompts, body.candidates)
    if body.answer_logprobs is not None:
        tokens = 0 if body.only_echoes else params.max_new_tokens * generations
        tokens += sum(map(len, prompts)) * body.choices if body.echoes else 0
        count = tokens * (1 + body.answer_logprobs)
        if count > limits.logprobs:
            message = f"a request may have at most {limits.logprobs} logprobs in all, not {count}"
            raise ApiError(400, message, param="logprobs")


def _check_prompt_tokens(
    service: Service,
    body: SamplingBody | TextBody,
    prompts: Sequence[list[int]],
    choices: int = 1,
) -> None:
    """Prompt tokens count once for each choice."""
    total, allowed = sum(map(len, prompts)) * choices, service.limits.prompt_tokens
    if total > allowed:
        # OpenAI's words, by which clients find out that they must shorten the text.
        param = protocol.prompt_field(body)
        each = ", counted once for each choice" if choices > 1 else ""
        message = (
            f"This model's maximum context length is {allowed} tokens. However, your {param} "
            f"resulted in {total} tokens{each}. Please reduce the length of the {param}."
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")


def _build_requests(
    body: SamplingBody,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    state: SavedState | None,
    adapter: Adapter | None,
    cache_salt: bytes,
) -> list[Request]:
    """The requests of the first prompt, then those of the second, …"""
    return [
        Request(
            prompt,
            params,
            state=state,
            keep_state=bool(body.save_state),
            # One request of each prompt scores it.
            prompt_logprobs=body.answer_logprobs if body.echoes and number == 0 else None,
            prefill_only=body.only_echoes,
            adapter=adapter,
            speculate=body.speculate is not False,
            cache_salt=cache_salt,
        ).with_seed_offset(number)
        for prompt in prompts
        for number in range(body.candidates)
    ]


async def _prepare(
    service: Service, requests: list[Request], body: SamplingBody | TextBody, client: str = ""
) -> list[Request]:
    """Checks requests, hashes their prompts and compiles their grammars."""

    def prepare() -> list[Request]:
        return [request.prepare(service.config, service.tokenizer) for request in requests]

    try:
        if any(one.params.structured_outputs is not None for one in requests):
            return await _with_grammars(prepare, client)
        sizes = (len(one.prompt) + sum(map(len, one.params.stop_strings)) for one in requests)
        return await off_loop(prepare, size=sum(sizes))
    except ValueError as error:
        is_grammar = str(error).startswith("structured_outputs.grammar ")
        if is_grammar and isinstance(body, ChatBody) and body.offered_tools:
            await _check_schemas(service, body, client)
        raise protocol.request_error(error, body) from error


async def _check_schemas(service: Service, body: ChatBody, client: str) -> None:
    """Raises an `ApiError` that names the first function whose schema alone is refused."""

    def check() -> None:
        for name, schema in schemas_of(body):
            try:
                compile_grammar({"json": json.dumps(schema)}, service.config, service.tokenizer)
            except StructuredOutputError as error:
                message = str(error).replace("structured_outputs.json", name)
                raise ApiError(400, message, param=name) from error

    await _with_grammars(check, client)


async def _with_grammars(work: Callable[[], _Result], client: str) -> _Result:
    """The result of `work`, which compiles grammars of this client."""

    def run() -> _Result:
        with compiling_for(client):
            return work()

    try:
        return await asyncio.get_running_loop().run_in_executor(_GRAMMARS, run)
    except GrammarsBusyError as error:
        raise ApiError(503, str(error), param="structured_outputs", retry_after=5) from error


# 3. From outputs to the response


class _Answer:
    """The outputs so far, and how they are written.

    Requests of one prompt follow each other: prompt p has requests p·c … p·c + c − 1, where c is
    `body.candidates`.
    """

    def __init__(
        self,
        service: Service,
        body: SamplingBody,
        http: HttpRequest,
        prompts: list[list[int]],  # as the client sent them, without the model's first token
        requests: list[Request],
    ) -> None:
        self.body, self.prompts, self.requests = body, prompts, requests
        self._is_chat = isinstance(body, ChatBody)
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._model = service.find_model(body.model)
        self._head = {
            "id": f"{prefix}-{request_id(http)}",
            "created": int(time.time()),
            "model": self._model.id,
        }
        self.completions: dict[int, Completion] = {}  # by request
        self._service, self._tokenizer = service, service.tokenizer
        self._output_tokens = 0
        self._scores: list[list[RequestOutput]] = [[] for _ in prompts]
        # Prompt tokens without a score yet. The first one never has a score: nothing precedes it.
        scored = requests[:: body.candidates] if body.scores_prompt else []
        self.unscored = sum(len(request.prompt_token_ids) - 1 for request in scored)

    def add(self, index: int, output: RequestOutput) -> None:
        if output.prompt_logprobs:
            self._scores[index // self.body.candidates].append(output)
            self.unscored -= len(output.prompt_logprobs)
        if output.completion is not None:
            self.completions[index] = output.completion
        self._output_tokens += len(output.token_ids)

    def choice(self, index: int) -> protocol.ChoiceFormat:
        body, strips, reader = self.body, False, None
        if isinstance(body, ChatBody):
            # The space after "Assistant:" belongs to the chat format, but not where a grammar wrote
            # it, or in the middle of an answer.
            strips = body.form() is None and not body.continue_final_message
            if body.offered_tools:
                reader = AnswerReader(self._model.tool_format.calls)
        return protocol.ChoiceFormat(
            index,
            self._tokenizer,
            is_chat=self._is_chat,
            logprobs=body.answer_logprobs,
            strips=strips,
            reader=reader,
        )

    def to_json(self, choices: list[Json], usage: Json | None = None) -> Json:
        """A whole response or a chunk."""
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk" if self.body.stream else "chat.completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def echo(self, choice: protocol.ChoiceFormat, prompt: int) -> tuple[str, Json | None]:
        """The prompt's text and log-probabilities, for a response that repeats them."""
        if not self.body.echoes:
            return "", None
        ids = self.prompts[prompt]
        logprobs = [value for output in self._scores[prompt] for value in output.prompt_logprobs]
        tops = [top for output in self._scores[prompt] for top in output.prompt_top_logprobs]
        # The prompt's first token has a score only if the model's own first token precedes it.
        missing = len(ids) - len(logprobs)
        scores = [*[None] * missing, *logprobs], [*[{}] * missing, *tops]
        return self._tokenizer.decode(ids), choice.logprobs(ids, *scores)

    def usage(self) -> Json:
        first = self.requests[:: self.body.candidates]  # the others find the prompt in the cache
        prompt_tokens = sum(len(request.prompt_token_ids) for request in first)
        cached_tokens = sum(request.cached_tokens for request in first)
        usage: Json = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._output_tokens,
            "total_tokens": prompt_tokens + self._output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        # The engine's thread may count more meanwhile, so the smaller number is read first.
        accepted = sum(request.accepted_tokens for request in self.requests)
        if drafted := sum(request.drafted_tokens for request in self.requests):
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return usage

    def stop_string(self, completion: Completion) -> str:
        """The body's stop string that ended the text, if the client wants it there."""
        if not self.body.include_stop_str_in_output:
            return ""
        after = self._text_after(completion)
        return next((stop for stop in sorted(self.body.stops) if after.startswith(stop)), "")

    def _text_after(self, completion: Completion) -> str:
        """What was generated after the completion's text: a stop string, and what a token adds."""
        written = self._tokenizer.decode(completion.token_ids, continues=True)
        return written.removeprefix(completion.text)

    async def save_state(self, completion: Completion) -> Json:
        """Saves the final state, if requested. The response is sent even if that fails."""
        if not self.body.save_state:
            return {}
        assert completion.state is not None
        text_after_answer = self._text_after(completion)
        save = self._service.saved_states().save
        try:
            adapter = self._model.fingerprint
            saved = await save_in_thread(save, completion.state, text_after_answer, adapter)
        except ApiError as error:
            return {"state_id": None, "state_error": error.message}
        return {"state_id": saved.name}


async def _whole(answer: _Answer, queue: OutputQueue) -> Json:
    async for index, output in queue.outputs():
        answer.add(index, output)
    choices = await asyncio.to_thread(_choices, answer)
    saved = await answer.save_state(answer.completions[0])
    return answer.to_json(choices, answer.usage()) | saved


def _choices(answer: _Answer) -> list[Json]:
    body, choices = answer.body, list[Json]()
    for prompt in range(len(answer.prompts)):
        first = prompt * body.candidates
        completions = [answer.completions[first + number] for number in range(body.candidates)]
        if body.candidates > body.choices:
            completions.sort(key=_mean_logprob, reverse=True)
        for completion in completions[: body.choices]:
            choice = answer.choice(len(choices))
            text, prompt_logprobs = answer.echo(choice, prompt)
            own_logprobs = choice.logprobs(
                completion.token_ids, completion.logprobs or (), completion.top_logprobs or ()
            )
            logprobs = protocol.join_logprobs(prompt_logprobs, own_logprobs)
            text += completion.text + answer.stop_string(completion)
            choices.append(choice.whole(text, logprobs, completion.finish_reason))
    return choices


def _mean_logprob(completion: Completion) -> float:
    logprobs = completion.logprobs or [0.0]
    return sum(logprobs) / len(logprobs)


async def _chunks(
    answer: _Answer, queue: OutputQueue, options: protocol.StreamOptions
) -> AsyncIterator[Json]:
    """The response as a stream. Here every request is one choice."""
    body, is_echoed = answer.body, not answer.body.echoes
    in_every_chunk = options.include_usage and options.continuous_usage_stats

    def to_json(choice: Json) -> Json:
        return answer.to_json([choice], answer.usage() if in_every_chunk else None)

    choices = [answer.choice(index) for index in range(len(answer.requests))]
    pending = list[tuple[int, RequestOutput]]()
    async for arrived in queue.outputs():
        answer.add(*arrived)
        pending.append(arrived)
        if answer.unscored:
            continue  # echoed prompts come first, when all of them are scored
        if not is_echoed:
            for index, choice in enumerate(choices):
                echo = partial(answer.echo, choice, index // body.candidates)
                text, logprobs = await asyncio.to_thread(echo)
                for chunk in choice.chunks(text, logprobs, None):
                    yield to_json(chunk)
            is_echoed = True
        for index, output in pending:
            choice, done = choices[index], output.completion
            if not (output.text or done or output.logprobs):
                continue
            logprobs = choice.logprobs(output.token_ids, output.logprobs, output.top_logprobs)
            if done is None:
                for chunk in choice.chunks(output.text, logprobs, None):
                    yield to_json(chunk)
                continue
            text = output.text + answer.stop_string(done)
            *chunks, last = choice.chunks(text, logprobs, done.finish_reason)
            for chunk in chunks:
                yield to_json(chunk)
            yield to_json(last) | await answer.save_state(done)
        pending.clear()
    if options.include_usage:
        yield answer.to_json([], answer.usage())


# Tokens


@router.post("/tokenize", response_model=None)
async def tokenize(body: protocol.TokenizeBody, http: HttpRequest) -> Response:
    """Token ids of a text, or of a conversation up to its next answer."""
    service: Service = http.app.state.service
    model = service.find_model(body.model)
    _check_one_text(body)
    prompt = body.prompt
    if body.messages is not None:
        size = _chat_size(body.messages, body.tools)
        prompt = await off_loop(partial(_write_messages, service, model, body), size)
    else:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(body, name):
                raise ApiError(400, f"{name} needs messages, not a prompt", param=name)
    ids = [] if prompt == [] else (await _encode(service, body, prompt))[0]
    if body.add_special_tokens and service.config.force_bos_token_insert:
        ids = with_first_token(service.config, ids)
    return await json_response({"tokens": ids, "count": len(ids)}, len(ids))


def _write_messages(service: Service, model: ServedModel, body: protocol.TokenizeBody) -> str:
    messages, tools = body.messages or [], body.tools or []
    _check_messages(service, messages)
    check_tools(tools)
    return _render(
        model,
        messages,
        tools,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )


@router.post("/detokenize", response_model=None)
async def detokenize(body: protocol.TokensBody, http: HttpRequest) -> Response:
    """The text of token ids."""
    service: Service = http.app.state.service
    service.find_model(body.model)

    def decode() -> str:
        check_tokens(service.config, body.tokens)
        return service.tokenizer.decode(body.tokens)

    try:
        text = await off_loop(decode, len(body.tokens))
    except ValueError as error:
        raise ApiError(400, str(error), param="tokens") from error
    return await json_response({"prompt": text}, len(text))


def _check_one_text(body: TextBody) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "exactly one of prompt and messages is needed", param="prompt")


async def reading_request(
    service: Service,
    body: protocol.StateBody,
    state: SavedState | None,
    text_after_answer: str,
    cache_salt: bytes,
) -> tuple[Request, str]:
    """A request that reads a text after a state, without generating.

    `text_after_answer` is what the state has read after an answer. The second result is that of the
    state after this text.
    """
    model = service.find_model(body.model)
    _check_one_text(body)
    prompt, after = body.prompt, ""
    messages = body.messages

    def write() -> str:
        assert messages is not None
        _check_messages(service, messages)
        if state is not None and state.has_text:
            later = _render_later(model, messages, add_generation_prompt=False)
            return without_prefix(later, text_after_answer)
        return _render(model, messages, add_generation_prompt=False)

    if messages is not None:
        prompt = await off_loop(write, _chat_size(messages, None))
        after = _start_of_next_turn(model.chat_format, prompt)
    ids = [] if prompt == [] else (await _encode(service, body, prompt, state))[0]
    if not ids and state is None:
        param = protocol.prompt_field(body)
        raise ApiError(400, f"{param} is empty: there is no text to save a state of", param=param)
    request = Request(
        ids,
        state=state,
        keep_state=True,
        prefill_only=True,
        adapter=model.adapter,
        cache_salt=cache_salt,
    )
    await _prepare(service, [request], body)
    return request, after


def _start_of_next_turn(chat_format: ChatFormat, text: str) -> str:
    """The end of a conversation's text, where it equals the start of the next turn."""
    turn = chat_format.next_prompt("")
    lengths = range(min(len(text), len(turn)), 0, -1)
    return turn[: next((n for n in lengths if text.endswith(turn[:n])), 0)]
