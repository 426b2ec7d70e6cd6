"""The JSON of requests and responses: bodies, choices, usage and errors, as OpenAI defines them.

Bodies are checked strictly. An unknown field is refused, because ignoring a setting would silently
give wrong results. Fields that clients often send and that change nothing are accepted, with the
values that change nothing. Numbers must be finite and lists have a maximum length.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

from xlstm7b.generate.params import SamplingParams
from xlstm7b.tokenizer import StreamDecoder, Tokenizer

if TYPE_CHECKING:
    from xlstm7b.serve.tools import AnswerReader

Json = dict[str, Any]

# 1. Errors


class ApiError(Exception):
    """An error response with an HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    @property
    def content(self) -> Json:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        # JSON can hold half of a surrogate pair in a field's name; UTF-8 cannot.
        message = self.message.encode(errors="replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class ErrorAnswer(BaseModel):
    """The body of every response with status 400 and above: message, type, param and code."""

    error: dict[str, str | None]


# 2. Bodies

MAX_CHOICES = 128
MAX_MESSAGES = 1 << 16  # the most that `Limits.messages` may be
UPLOAD_PATH = "/v1/states"  # with PUT, for a state file or a text file
_MAX_ENTRIES = 1024  # of a JSON object
_SCHEMA_FIELDS = {"name", "schema", "description", "strict"}  # of response_format.json_schema


@dataclass(frozen=True)
class Limits:
    """Limits of one request, and of requests at the same time."""

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    messages: int = 4096
    upload_seconds: float = 300.0  # for a state file or a text file
    slow_seconds: float = 5.0  # after them, a body must have come at `slow_bytes` per second
    slow_bytes: int = 4096
    bodies_bytes: int = 512 << 20  # of all bodies that are being received; half for each client
    requests: int = 512  # HTTP requests at the same time
    client_requests: int | None = None  # those of one client, and the choices in them
    states_bytes: int = 8 << 30  # memory of saved states that requests have loaded or will save
    prompt_tokens: int = 1 << 20  # of all choices together
    new_tokens: int = 1 << 16  # of each choice
    choices: int = MAX_CHOICES
    logprobs: int = 1 << 20  # numbers, over all choices and echoed prompts
    stored_bytes: int = 64 << 20  # of the conversations of /v1/responses


class Limiter:
    """Limits what all requests hold at the same time, of a kind such as "requests".

    per_client: the limit of one client. Without it, one client may hold all.
    """

    def __init__(
        self, limit: float, kind: str, *, per_client: float | None = None, unit: int = 1
    ) -> None:
        """unit: messages name the limits in this unit, such as 1 << 20 for bytes in MiB."""
        self._limit = limit
        self._per_client = math.inf if per_client is None else per_client
        self._kind, self._unit = kind, unit
        self._held, self._of_client = 0, Counter[str]()

    @contextmanager
    def count(self, amount: int = 1, client: str = "") -> Iterator[None]:
        """Held by a request. Beyond a limit it is refused with a 429."""
        limit, whose = self._limit, ""
        if self._of_client[client] + amount > self._per_client:
            limit, whose = self._per_client, " of this client"
        if whose or self._held + amount > self._limit:
            shown = f"{limit / self._unit:.6g} {self._kind}{whose}"
            message = f"the server handles at most {shown} at the same time: try again later"
            raise ApiError(429, message, retry_after=1)
        self._held += amount
        self._of_client[client] += amount
        try:
            yield
        finally:
            self._held -= amount
            self._of_client[client] -= amount
            if not self._of_client[client]:
                del self._of_client[client]


def _check_entries(value: Any) -> Any:
    """Limits the number of entries before validation, which would list every wrong entry."""
    if isinstance(value, dict) and len(value) > _MAX_ENTRIES:
        raise PydanticKnownError(
            "too_long",
            {"field_type": "Object", "max_length": _MAX_ENTRIES, "actual_length": len(value)},
        )
    return value


def is_json(value: Any) -> bool:
    """False for what Python reads and other programs do not: NaN, halves of surrogate pairs."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


# Set by the server for every chat template, or options of transformers that replace it.
_TEMPLATE_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)


def _check_template_variables(variables: Json) -> Json:
    for name in variables:
        if name in _TEMPLATE_FIELDS:
            raise ValueError(f"{name!r} is set by the server")
    if not is_json(variables):
        raise ValueError("it is not JSON")
    return variables


_Bounded = BeforeValidator(_check_entries)
JsonObject = Annotated[Json, _Bounded]
TemplateVariables = Annotated[JsonObject, AfterValidator(_check_template_variables)]

# A string with a maximum length is also checked for halves of surrogate pairs.
Text = Annotated[str, Field(max_length=1 << 30)]
CacheSalt = Annotated[Text, Field(min_length=1)]
Metadata = Annotated[dict[Text, Text], _Bounded]
# Without fail_fast, a long list of wrong items would produce one error per item.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
_Texts = Annotated[list[Text], Field(fail_fast=True, max_length=MAX_CHOICES)]
_TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_CHOICES)]
Prompt = Text | TokenIds | _Texts | _TokenIdLists
_Stop = Annotated[str, Field(max_length=256)]  # the engine searches for each after every token
_TokenKey = Annotated[int, Field(strict=False)]  # keys of a JSON object are strings
EmptyList = Annotated[list[Any], Field(max_length=0)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        """Treats null as absent. Keeps only the first unknown field: one error is enough."""
        if not isinstance(body, dict):
            return body
        given = {name: value for name, value in body.items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in given if name not in known]
        for name in unknown[1:]:
            del given[name]
        return given


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # with include_usage: the usage so far in every chunk
    include_obfuscation: bool = False


class TextPart(Body):
    type: Literal["text"]
    text: Text


_Content = Text | Annotated[list[TextPart], Field(max_length=1024)]


class Prediction(Body):
    """A text that the answer will resemble."""

    type: Literal["content"]
    content: _Content


class ResponseFormat(Body):
    """The form of the output. `json_schema` has `name`, `schema`, `description` and `strict`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonObject | None = None


class SamplingBody(Body):
    """The fields that /v1/completions and /v1/chat/completions share.

    Defaults and bounds of sampling fields are those of `SamplingParams`: here they are all None.
    """

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Sampling fields of OpenAI's API. -1 for max_tokens is as if it were absent, for top_k it is 0.
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[_TokenKey, float], _Bounded] | None = None
    # Sampling fields that are not in OpenAI's API:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    # The form of the output: OpenAI's field, vLLM's field, and vLLM's older fields:
    response_format: ResponseFormat | None = None
    structured_outputs: JsonObject | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    # Saved states, which are not in OpenAI's API:
    state: Annotated[str | None, Field(description="id of the saved state to continue from")] = None
    save_state: bool | None = None
    # Whether tokens are drafted for this request, if the server speculates; not in OpenAI's API:
    speculate: bool | None = None
    # Only requests with the same one share cached prefixes; vLLM's field:
    cache_salt: CacheSalt | None = None
    # Accepted, without effect:
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_prompt: bool | None = None
    # Accepted only with the values that change nothing:
    skip_special_tokens: Literal[True] | None = None
    use_beam_search: Literal[False] | None = None

    def to_sampling_params(
        self,
        limits: Limits,
        *,
        stop_strings: tuple[str, ...] = (),
        eos_token_id: tuple[int, ...] | None = None,
        grammar: str | None = None,
    ) -> SamplingParams:
        """The body as sampling parameters. `stop_strings` are added to the body's own.

        With `stop_token_ids` in the body, `eos_token_id` is needed. A `grammar` replaces the body's
        form of the output.
        """
        name, max_tokens = self._max_tokens()
        if max_tokens is None:
            max_tokens = min(self.default_max_tokens(limits), limits.new_tokens)
        if not 1 <= max_tokens <= limits.new_tokens:
            message = f"{name} must be between 1 and {limits.new_tokens}, not {max_tokens}"
            raise ApiError(400, message, param=name)
        logprobs = self.answer_logprobs
        if logprobs is None and self.candidates > self.choices:
            logprobs = 0  # candidates are ranked by them
        # 1. Fields with the same name and meaning.
        names = [one.name for one in fields(SamplingParams)]
        options: Json = {name: getattr(self, name, None) for name in names}
        form = self.form()
        # 2. Fields with another name or form.
        ends = () if self._ignores_eos() else eos_token_id
        if self.stop_token_ids:
            ends = (*(ends or ()), *self.stop_token_ids)
        structured = None if form is None else form[1]
        options |= {
            "max_new_tokens": max_tokens,
            "min_new_tokens": self.min_tokens,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "stop_strings": (*self.stops, *stop_strings),
            "eos_token_id": ends,
            "logprobs": logprobs,
            "seed": None if self.seed is None else self.seed % (1 << 64),  # OpenAI's are signed
            "structured_outputs": structured if grammar is None else {"grammar": grammar},
        }
        # 3. The rest has the defaults of SamplingParams.
        try:
            return SamplingParams(**{key: one for key, one in options.items() if one is not None})
        except ValueError as error:
            raise request_error(error, self) from error

    def form(self) -> tuple[str, Json] | None:
        """The field that describes the form of the output, and it as `structured_outputs`."""
        given = list[tuple[str, Json]]()
        if self.structured_outputs is not None:
            given.append(("structured_outputs", self.structured_outputs))
        for name in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{name}")
            if value is not None:
                given.append((f"guided_{name}", {name: value}))
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            given.append(("response_format", {"json_object": True}))
        elif wanted is not None and wanted.type == "json_schema":
            described = wanted.json_schema or {}
            path, unknown = "response_format.json_schema", [*described.keys() - _SCHEMA_FIELDS]
            if unknown:
                raise ApiError(400, f"{path} has an unknown field {unknown[0][:80]!r}", param=path)
            if not isinstance(described.get("schema"), dict):
                message = f"{path}.schema must be a JSON schema: an object"
                raise ApiError(400, message, param=f"{path}.schema")
            given.append((f"{path}.schema", {"json": described["schema"]}))
        if len(given) > 1:
            message = f"{given[0][0]} and {given[1][0]} cannot be combined"
            raise ApiError(400, message, param=given[1][0])
        return given[0] if given else None

    def form_field(self) -> str | None:
        """The field that error messages about the form of the output name."""
        form = self.form()
        return None if form is None else form[0]

    def default_max_tokens(self, limits: Limits) -> int:
        """The most tokens of a choice if the body does not say it."""
        raise NotImplementedError

    @property
    def stops(self) -> list[str]:
        """The strings that end the output."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def choices(self) -> int:
        """Choices per prompt in the response."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Outputs generated per prompt. If more than `choices`, the best ones are returned."""
        return self.choices

    @property
    def echoes(self) -> bool:
        """True if the response repeats the prompt."""
        return False

    @property
    def only_echoes(self) -> bool:
        """True if nothing is generated: the response is the prompt, perhaps with its logprobs."""
        return False

    @property
    def answer_logprobs(self) -> int | None:
        """How many most likely tokens have logprobs in the response, next to the sampled token."""
        raise NotImplementedError

    @property
    def scores_prompt(self) -> bool:
        return self.echoes and self.answer_logprobs is not None

    def _max_tokens(self) -> tuple[str, int | None]:
        """The field that limits the output, for error messages, and its value."""
        name = "max_tokens" if self.max_completion_tokens in (None, -1) else "max_completion_tokens"
        value = getattr(self, name)
        return name, None if value == -1 else value

    def _ignores_eos(self) -> bool:
        return bool(self.ignore_eos)


def request_error(error: ValueError, body: "SamplingBody | TextBody") -> ApiError:
    """A mistake in a prompt or in sampling parameters, with the names of the body's fields."""
    message = str(error).replace("_new_tokens", "_tokens")
    message = message.replace("eos_token_id", "stop_token_ids")
    name = message.partition(" ")[0]
    field = body.form_field() if isinstance(body, SamplingBody) else None
    if field is not None and name.startswith("structured_outputs"):
        if field != "structured_outputs":
            message, name = message.replace(name, field, 1), field
        return ApiError(400, message, param=name)
    if isinstance(body, ChatBody):
        message = message.replace("logprobs must", "top_logprobs must")
    # What names no field is about the prompt.
    named = [word for word in re.findall(r"\w+", message) if word in type(body).model_fields]
    return ApiError(400, message, param=named[0] if named else prompt_field(body))


def prompt_field(body: "SamplingBody | TextBody") -> str:
    """The field that the prompt comes from."""
    return "prompt" if getattr(body, "messages", None) is None else "messages"


class CompletionBody(SamplingBody):
    """POST /v1/completions"""

    prompt: Prompt | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Literal[""] | None = None

    def default_max_tokens(self, limits: Limits) -> int:
        return 16

    @property
    def candidates(self) -> int:
        return self.best_of or self.choices

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def only_echoes(self) -> bool:
        return self.echoes and super()._max_tokens()[1] == 0

    @property
    def answer_logprobs(self) -> int | None:
        return self.logprobs

    def _max_tokens(self) -> tuple[str, int | None]:
        name, max_tokens = super()._max_tokens()
        return name, 1 if self.only_echoes else max_tokens

    def _ignores_eos(self) -> bool:
        # Clients that score prompts request one token and drop the last score (lm_eval does). So
        # one token must be returned, even if it is the end of text.
        one_token = super()._max_tokens()[1] == 1
        return bool(self.ignore_eos) or (self.scores_prompt and one_token)


def is_name(text: str) -> bool:
    """True for what may be a part of a function's name."""
    return re.fullmatch(r"[\w.:/-]*", text, re.ASCII) is not None


def _check_name(name: str) -> str:
    if not 1 <= len(name) <= 128 or not is_name(name):
        raise ValueError("must be 1 to 128 letters, digits and characters of _ . : / -")
    return name


# Names stand in prompts and grammars.
FunctionName = Annotated[str, AfterValidator(_check_name)]


class Function(Body):
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None  # without effect: arguments always match the schema


class Tool(Body):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=128)]


class _ChosenFunction(Body):
    name: str


class ChosenTool(Body):
    """The function that the model must call."""

    type: Literal["function"]
    function: _ChosenFunction


def _or_empty_object(arguments: str) -> str:
    """Some clients write no text for a call without arguments."""
    return arguments or "{}"


class _CalledFunction(Body):
    name: FunctionName
    arguments: Annotated[Text, AfterValidator(_or_empty_object)]
    parsed_arguments: Any = None  # added by OpenAI's client: without effect


class ToolCall(Body):
    """A call in a past message. `arguments` is JSON: an object."""

    id: Text
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None  # of a call that was streamed: without effect


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: Text | None = None  # of the call whose result a message with role "tool" is
    reasoning_content: Text | None = None  # of past turns: without effect
    parsed: Any = None  # added by OpenAI's client: without effect
    provider_specific_fields: Any = None  # added by litellm: without effect
    refusal: None = None
    annotations: EmptyList | None = None

    @property
    def uses_tools(self) -> bool:
        """True for a message with calls, or with a result."""
        return bool(self.tool_calls) or self.role == "tool" or self.tool_call_id is not None

    def to_template(self) -> dict[str, str]:
        """Role and content in the form that chat templates take. `tools.py` adds calls."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(SamplingBody):
    """POST /v1/chat/completions"""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    # Accepted, without effect:
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Prediction | None = None
    # Accepted only with the values that change nothing:
    modalities: list[Literal["text"]] | None = None
    functions: EmptyList | None = None
    function_call: Literal["none", "auto"] | None = None

    def default_max_tokens(self, limits: Limits) -> int:
        if self.answer_logprobs is None:
            return limits.new_tokens
        scores = self.choices * (1 + max(0, self.answer_logprobs))  # of a token of each choice
        return max(1, limits.logprobs // scores)

    @property
    def answer_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[Function]:
        """The functions that the model may call in this answer."""
        offered = [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, ChosenTool):
            return [one for one in offered if one.name == self.tool_choice.function.name]
        return offered

    @property
    def must_call(self) -> bool:
        """True if the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool)

    def form_field(self) -> str | None:
        return "tools" if self.offered_tools else super().form_field()


class TextBody(Body):
    """A text or a conversation"""

    model: str | None = None
    prompt: Text | TokenIds | None = None
    messages: Messages | None = None


class TokenizeBody(TextBody):
    """POST /tokenize"""

    add_special_tokens: bool = True  # the model's first token
    # For messages, as in a chat:
    tools: Tools | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables | None = None


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must not have line breaks or other characters that are not printable")
    return text


_Printable = AfterValidator(_check_printable)
_StateName = Annotated[str, Field(max_length=200), _Printable]
_Tag = Annotated[str, Field(min_length=1, max_length=64), _Printable]


class LabelBody(Body):
    """PATCH /v1/states/ID. A field that is absent is not changed; "", [] and 0 clear it."""

    name: _StateName | None = None
    tags: Annotated[list[_Tag], Field(fail_fast=True, max_length=16)] | None = None
    expires_in: Annotated[int, Field(ge=0, le=10 * 365 * 24 * 3600)] | None = None  # seconds


class StateBody(TextBody, LabelBody):
    """POST /v1/states"""

    state: str | None = None  # id of the saved state to continue from
    stream: bool | None = None  # events that say how much is read


class UploadQuery(LabelBody):
    """PUT /v1/states. The last three fields are for text files."""

    model_config = ConfigDict(extra="forbid", strict=False)

    model: str | None = None
    state: str | None = None
    stream: bool | None = None

    def given(self) -> Json:
        return self.model_dump(exclude_none=True)


class ListQuery(Body):
    """GET /v1/states"""

    model_config = ConfigDict(extra="forbid", strict=False)

    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    after: str | None = None  # the last id of the page before
    tag: str | None = None


class TokensBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: TokenIds


# 3. Answers


class ChoiceFormat:
    """The JSON of one choice, whole or chunk by chunk."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        is_chat: bool,
        logprobs: int | None,
        strips: bool = False,
        reader: "AnswerReader | None" = None,
    ) -> None:
        """strips: white space before a text is left out.
        reader: finds calls of tools in an answer.
        """
        self._index, self._is_chat, self._strips = index, is_chat, strips
        self._reader = reader
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._decoder, self._text_offset = StreamDecoder(tokenizer), 0
        self._is_first, self._has_text = True, False

    def whole(self, text: str, logprobs: Json | None, finish_reason: str) -> Json:
        if not self._is_chat:
            return self._choice("text", text, logprobs, finish_reason)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._reader is not None:
            text, calls = self._reader.read(text)
            if calls:
                message = {"role": "assistant", "content": None, "refusal": None}
                message["tool_calls"] = calls
            finish_reason = self._reader.finish_reason(finish_reason)
        text = text.lstrip() if self._strips else text
        if text or "tool_calls" not in message:
            message["content"] = text
        return self._choice("message", message, logprobs, finish_reason)

    def chunks(self, text: str, logprobs: Json | None, finish_reason: str | None) -> list[Json]:
        """The chunks of a piece of text: one, or with tools one for each part of a call.

        With tools there is none while the reader holds back all of the text.
        """
        if not self._is_chat:
            return [self._choice("text", text, logprobs, finish_reason)]
        calls = list[Json]()
        if self._reader is not None:
            text, calls = self._reader.push(text, is_last=finish_reason is not None)
            if finish_reason is not None:
                finish_reason = self._reader.finish_reason(finish_reason)
            elif not (text or calls or logprobs):
                return []
        if self._strips and not self._has_text:
            text = text.lstrip()
            self._has_text = text != ""
        deltas: list[Json] = [{"content": text}] if text else []
        deltas += [{"tool_calls": [call]} for call in calls]
        if finish_reason == "tool_calls":
            deltas.append({})
        elif not deltas:
            deltas.append({"content": ""})
        if self._is_first:
            deltas[0] = {"role": "assistant", "content": None, **deltas[0]}
            self._is_first = False
        last = len(deltas) - 1
        return [
            self._choice(
                "delta",
                delta,
                logprobs if number == 0 else None,
                finish_reason if number == last else None,
            )
            for number, delta in enumerate(deltas)
        ]

    def logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        top_logprobs: Sequence[dict[int, float]],
    ) -> Json | None:
        """Log-probabilities of the next tokens of this choice, if the client wants them."""
        if self._logprobs is None:
            return None
        tops = top_logprobs or [{}] * len(tokens)
        scored = list(zip(tokens, logprobs, tops, strict=True))
        if self._is_chat:
            content = [
                {
                    **self._named(token, logprob),
                    "top_logprobs": [*map(self._named, top, top.values())],
                }
                for token, logprob, top in scored
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self._text_offset)
            self._text_offset += len(self._decoder.push(token))
        return {
            "tokens": [token_name(self._tokenizer, token) for token in tokens],
            "token_logprobs": list(logprobs),
            "top_logprobs": [
                None if logprob is None else self._by_name({**top, token: logprob})
                for token, logprob, top in scored
            ],
            "text_offset": offsets,
        }

    def _choice(self, name: str, value: Any, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": self._index, name: value, "logprobs": logprobs, "finish_reason": reason}

    def _by_name(self, logprobs: dict[int, float]) -> dict[str, float]:
        return {token_name(self._tokenizer, token): value for token, value in logprobs.items()}

    def _named(self, token: int, logprob: float | None) -> Json:
        content = self._tokenizer.token_bytes(token)
        name = token_name(self._tokenizer, token)
        return {"token": name, "logprob": logprob, "bytes": list(content)}


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A name for each token that no other token has: log-probabilities are keyed by it."""
    content = tokenizer.token_bytes(token)
    if not content:
        return f"token_id:{token}"
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def join_logprobs(first: Json | None, second: Json | None) -> Json | None:
    """The log-probabilities of an echoed prompt, followed by those of the output."""
    if first is None or second is None:
        return first or second
    return {name: [*first[name], *second[name]] for name in first}
