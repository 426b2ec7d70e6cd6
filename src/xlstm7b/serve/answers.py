"""Answers in OpenAI's JSON: whole or in chunks, of completions or of chats."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from xlstm7b.tokenizer import StreamDecoder, Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """What all parts of one answer have in common."""

    id: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[Json], usage: Json) -> Json:
        kind = "chat.completion" if self.chat else "text_completion"
        return self._part(kind, choices, usage)

    def chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._part(kind, choices, usage)

    def _part(self, kind: str, choices: list[Json], usage: Json | None) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }


class Telling:
    """One text of an answer, as it is told: in chunks, or all at once."""

    def __init__(self, form: Form, index: int, tokenizer: Tokenizer, logprobs: int | None) -> None:
        self._chat, self._index = form.chat, index
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._decoder, self._offset = StreamDecoder(tokenizer), 0
        self._role: Json = {"role": "assistant"}
        self._begun = False

    def whole(self, text: str, scores: Json | None, reason: str) -> Json:
        if self._chat:
            message = {"role": "assistant", "content": text.lstrip(), "refusal": None}
            return self._choice({"message": message}, scores, reason)
        return self._choice({"text": text}, scores, reason)

    def chunk(self, text: str, scores: Json | None, reason: str | None) -> Json:
        if not self._chat:
            return self._choice({"text": text}, scores, reason)
        shown = text if self._begun else text.lstrip()  # an answer's first space is the format's
        self._begun = self._begun or shown != ""
        delta, self._role = {**self._role, "content": shown}, {}
        return self._choice({"delta": delta}, scores, reason)

    def scores(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        likeliest: Sequence[dict[int, float]],
    ) -> Json | None:
        """Log-probabilities of the text's next tokens, if they are wanted."""
        if self._logprobs is None:
            return None
        tops = likeliest or [{}] * len(tokens)
        scored = list(zip(tokens, logprobs, tops, strict=True))
        if self._chat:
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
            offsets.append(self._offset)
            self._offset += len(self._decoder.push(token))
        return {
            "tokens": [token_name(self._tokenizer, token) for token in tokens],
            "token_logprobs": list(logprobs),
            "top_logprobs": [
                None if logprob is None else self._by_name({**top, token: logprob})
                for token, logprob, top in scored
            ],
            "text_offset": offsets,
        }

    def _choice(self, told: Json, scores: Json | None, reason: str | None) -> Json:
        return {"index": self._index, **told, "logprobs": scores, "finish_reason": reason}

    def _by_name(self, logprobs: dict[int, float]) -> dict[str, float]:
        return {token_name(self._tokenizer, token): value for token, value in logprobs.items()}

    def _named(self, token: int, logprob: float | None) -> Json:
        content = self._tokenizer.token_bytes(token)
        name = token_name(self._tokenizer, token)
        return {"token": name, "logprob": logprob, "bytes": list(content)}


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text that no other token has: log-probabilities are found by it."""
    content = tokenizer.token_bytes(token)
    if not content:
        return f"token_id:{token}"
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def joined(first: Json | None, second: Json | None) -> Json | None:
    """The log-probabilities of a prompt and of what follows it."""
    if first is None or second is None:
        return first or second
    return {name: [*first[name], *second[name]] for name in first}


def usage(prompt: int, completion: int, cached: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
