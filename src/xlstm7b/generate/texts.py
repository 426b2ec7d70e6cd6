"""One text as it grows: tokens into characters, where it ends, and what is known of it then."""

import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from xlstm7b.generate.sampling import NO_TOKEN, SamplingSettings
from xlstm7b.generate.states import TextState
from xlstm7b.tokenizer import StreamDecoder, Tokenizer

FinishReason = Literal["stop", "length"]


class Speeds(NamedTuple):
    """What it took: seconds until the first token, and from there to the last."""

    prompt_tokens: int
    prompt_seconds: float
    seconds: float
    peak_memory: int


@dataclass(frozen=True)
class Completion:
    """A finished text. Neither end of text nor a stop string is part of it."""

    text: str
    token_ids: list[int]  # less the end of text, but with a stop string's
    finish_reason: FinishReason  # "stop": end of text, a stop string, or asked to
    prompt_tokens: int
    prompt_tokens_per_second: float
    tokens_per_second: float  # after the first, which counts as the prompt's; 0 if there is one
    peak_memory: int  # bytes, of the process or on the GPU
    logprobs: list[float] | None = None  # one a token
    top_logprobs: list[dict[int, float]] | None = None  # the likeliest tokens at each
    state: TextState | None = field(default=None, repr=False)  # has read all of token_ids


class GrowingText:
    """Takes tokens one by one; gives text that is certain, and holds back what may yet change.

    That is half a character, or the beginning of a stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, settings: SamplingSettings, stop_strings: Sequence[str] = ()
    ) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._settings, self._stops = settings, stop_strings
        self._text, self._given = "", 0
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []  # one a token, as are these
        self.top_logprobs: list[dict[int, float]] = []
        self.finish_reason: FinishReason | None = None

    def push(
        self,
        token: int,
        logprob: float = 0.0,
        top_logprobs: Sequence[float] = (),
        top_tokens: Sequence[int] = (),
    ) -> str:
        """The text that this token makes certain; `finish_reason` says whether it is the last.

        A `FloatingPointError` if the model's logits were not numbers.
        """
        if token == NO_TOKEN or math.isnan(logprob):
            raise FloatingPointError(
                "the model's logits are not numbers: its weights are damaged, or overflow in "
                "this dtype"
            )
        if token in self._settings.eos_token_ids:
            return self.finish("stop")
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        own = slice(self._settings.logprobs or 0)  # of as many as the batch's greediest row wants
        self.top_logprobs.append(dict(zip(top_tokens[own], top_logprobs[own], strict=True)))
        searched = max(0, len(self._text) - max(map(len, self._stops), default=0) + 1)
        self._text += self._decoder.push(token)
        found = [at for stop in self._stops if (at := self._text.find(stop, searched)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self._decoder.flush()
            return self.finish("stop")
        if len(self.token_ids) >= self._settings.max_new_tokens:
            return self.finish("length")
        return self._give(len(self._text) - self._held_back())

    def finish(self, reason: FinishReason) -> str:
        """Ends the text, and gives what was held back."""
        self.finish_reason = reason
        self._text += self._decoder.flush()
        return self._give(len(self._text))

    def completion(self, speeds: Speeds, state: TextState | None) -> Completion:
        assert self.finish_reason is not None
        wanted = self._settings.logprobs
        return Completion(
            text=self._text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            prompt_tokens=speeds.prompt_tokens,
            prompt_tokens_per_second=speeds.prompt_tokens / max(speeds.prompt_seconds, 1e-9),
            tokens_per_second=max(0, len(self.token_ids) - 1) / max(speeds.seconds, 1e-9),
            peak_memory=speeds.peak_memory,
            logprobs=None if wanted is None else self.logprobs,
            top_logprobs=self.top_logprobs if wanted else None,
            state=state,
        )

    def _give(self, end: int) -> str:
        given, self._given = self._given, max(self._given, end)
        return self._text[given : self._given]

    def _held_back(self) -> int:
        """How long the longest end of the text is that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def peak_memory(device: torch.device) -> int:
    """The most bytes in use so far: on the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
