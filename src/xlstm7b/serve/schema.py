"""What requests may hold. Names and meanings are OpenAI's; what it lacks has our generator's names.

Types are strict, numbers finite and lists bounded, so that no later code meets a surprise. A field
that is not here is refused: a setting that is dropped in silence gives wrong results.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_CHOICES = 128  # texts of one request

# A long list of the wrong type fails at its first item; it would make an error of each.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True, max_length=MOST_CHOICES)]
ManyIds = Annotated[list[Ids], Field(fail_fast=True, max_length=MOST_CHOICES)]
Prompt = str | Ids | Texts | ManyIds
Stop = Annotated[str, Field(max_length=256)]  # each is looked for at every token
StateId = Annotated[str, Field(description="The id of a saved state to go on from")]


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Asked):
    include_usage: bool = False


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
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    user: str | None = None
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
    text: str


class Message(Asked):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    name: str | None = None
    refusal: None = None

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


class TextBody(Asked):
    """POST /tokenize, and POST /v1/states: a text or a conversation."""

    model: str | None = None
    prompt: str | Ids | None = None
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
