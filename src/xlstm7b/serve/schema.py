"""What requests may hold. Names and meanings are OpenAI's; what it lacks has our generator's names.

Types are strict, numbers finite and lists bounded, so that no later code meets a surprise. A field
that is not here is refused: a setting that is dropped in silence gives wrong results. What clients
send by habit and what changes no answer is taken, in those values alone.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MOST_CHOICES = 128  # texts of one request
_MOST_ENTRIES = 1024  # of a dictionary


def _few(entries: Any) -> Any:
    """Counted first, since each wrong entry would make an error of its own."""
    if isinstance(entries, dict) and len(entries) > _MOST_ENTRIES:
        raise PydanticCustomError("too_long", f"there may be at most {_MOST_ENTRIES} entries")
    return entries


Few = BeforeValidator(_few)

# A limit, however high, also sees to it that half of a surrogate pair is refused.
Text = Annotated[str, Field(max_length=1 << 24)]
# A long list of the wrong type fails at its first item; it would make an error of each.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[Text], Field(fail_fast=True, max_length=MOST_CHOICES)]
ManyIds = Annotated[list[Ids], Field(fail_fast=True, max_length=MOST_CHOICES)]
Prompt = Text | Ids | Texts | ManyIds
Stop = Annotated[str, Field(max_length=256)]  # each is looked for at every token
StateId = Annotated[str, Field(description="The id of a saved state to go on from")]
Nothing = Annotated[list[Any], Field(max_length=0)]


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """What is null is not there; of many unknown fields one is enough for an error."""
        if not isinstance(body, dict):
            return body
        given = {name: value for name, value in body.items() if value is not None}
        unknown = [name for name in given if name not in cls.model_fields]
        for name in unknown[1:]:
            del given[name]
        return given


class StreamOptions(Asked):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(Asked):
    """What both kinds of completion share. None is the default, as in OpenAI's."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Few] | None = None
    # They change no answer:
    user: str | None = None
    metadata: Annotated[dict[str, str], Few] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Not OpenAI's:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    state: StateId | None = None
    save_state: bool | None = None


class CompletionBody(Sampling):
    """POST /v1/completions"""

    prompt: Prompt | None = None
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)
    echo: bool | None = None
    logprobs: int | None = None
    suffix: None = None


class TextPart(Asked):
    type: Literal["text"]
    text: Text


class TextFormat(Asked):
    type: Literal["text"]


class Message(Asked):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: Nothing | None = None
    annotations: Nothing | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]


class ChatBody(Sampling):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # There are no tools, and all is text: only what says no more than that.
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None


class TextBody(Asked):
    """POST /tokenize, and POST /v1/states: a text or a conversation."""

    model: str | None = None
    prompt: Text | Ids | None = None
    messages: Messages | None = None


class IdsBody(Asked):
    """POST /detokenize"""

    model: str | None = None
    tokens: Ids


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """What every answer of 400 and above holds, as OpenAI's."""

    error: ErrorDetails
