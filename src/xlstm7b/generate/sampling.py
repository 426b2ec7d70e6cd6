"""How a text is sampled: its settings, and what work they ask for."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import NamedTuple

MOST_LOGPROBS = 20
NO_TOKEN = -2  # what a row gets whose logits are not numbers
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
REALS = ("temperature", "top_p", "min_p", *_PENALTIES)
_WHOLE = ("max_new_tokens", "min_new_tokens", "top_k", "seed", "logprobs")


class Needs(NamedTuple):
    """Which work a batch asks for. Rows that don't need some work are the same with it done."""

    sampling: bool = False  # a temperature above 0
    filters: bool = False  # top_k, top_p or min_p
    penalties: bool = False
    bias: bool = False
    minimum: bool = False  # min_new_tokens
    logprobs: int | None = None  # the most that any row wants

    @classmethod
    def union(cls, rows: Iterable["Needs"]) -> "Needs":
        """What all rows need together."""
        *flags, counts = zip(*rows, strict=True)
        return cls._make([*map(any, flags), max({*counts} - {None}, default=None)])


@dataclass(frozen=True)
class SamplingSettings:
    """One row's settings, under Hugging Face's names where it has them.

    A value of another type than its setting's is a `ValueError` at once.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0  # no end of text before
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # the k likeliest tokens, among equals those of lower id; 0: all
    top_p: float = 1.0  # the fewest likeliest tokens whose probabilities reach p
    min_p: float = 0.0  # tokens at least this many times as likely as the likeliest
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # −inf bans a token
    seed: int | None = None
    eos_token_id: int | Sequence[int] | None = None  # None: only max_new_tokens ends the text
    logprobs: int | None = None  # 0: of the token alone; n: and of the n likeliest

    def __post_init__(self) -> None:
        for name in (*_WHOLE, *REALS):
            value, kind = getattr(self, name), Real if name in REALS else Integral
            if not _is(kind, value) and (value is not None or name not in ("seed", "logprobs")):
                wanted = "a number" if kind is Real else "a whole number"
                raise ValueError(f"{name} must be {wanted}, not {value!r}")
        bias, ends = self.logit_bias, self.eos_token_id
        if not (isinstance(bias, Mapping) and _are(Integral, bias) and _are(Real, bias.values())):
            raise ValueError(f"logit_bias must be numbers by token id, not {bias!r}")
        if ends is not None and not _is(Integral, ends) and not _are(Integral, ends):
            raise ValueError(f"eos_token_id must be an id or a list of ids, not {ends!r}")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the text, however many there are."""
        if self.eos_token_id is None:
            return ()
        ends = self.eos_token_id
        return (*ends,) if isinstance(ends, Collection) else (ends,)

    @property
    def needs(self) -> Needs:
        """The work that this row asks for."""
        sampling = self.temperature > 0
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return Needs(
            sampling=sampling,
            filters=sampling and (self.top_k, self.top_p, self.min_p) != (0, 1, 0),
            penalties=penalties != (1, 0, 0),
            bias=bool(self.logit_bias),
            minimum=self.min_new_tokens > 0,
            logprobs=self.logprobs,
        )

    def check(self, vocab_size: int) -> None:
        """Raises a `ValueError` that names the first setting outside its range."""
        for holds, sentence in self._rules(vocab_size):
            if not holds:
                raise ValueError(sentence)

    def _rules(self, vocab_size: int) -> Iterator[tuple[bool, str]]:
        # All in a form that NaN fails. The bounds of penalties and biases lie far beyond any use:
        # they only keep scores from infinity.
        most, least = self.max_new_tokens, self.min_new_tokens
        yield most >= 1, f"max_new_tokens must be at least 1, not {most}"
        yield most < 1 << 63, f"max_new_tokens must be below 2^63, not {most}"
        yield least >= 0, f"min_new_tokens must be at least 0, not {least}"
        yield least <= most, f"min_new_tokens ({least}) must not exceed max_new_tokens ({most})"
        t, k = self.temperature, self.top_k
        yield 0 <= t < math.inf, f"temperature must be 0 or a positive number, not {t}"
        yield k >= 0, f"top_k must be 0 (all tokens) or a positive number, not {k}"
        yield 0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}"
        yield 0 <= self.min_p <= 1, f"min_p must be between 0 and 1, not {self.min_p}"
        for name, low in zip(_PENALTIES, (0.01, -100, -100), strict=True):
            penalty = getattr(self, name)
            yield low <= penalty <= 100, f"{name} must be between {low} and 100, not {penalty}"
        outside = f"is outside the vocabulary of {vocab_size}"
        for token, bias in self.logit_bias.items():
            yield 0 <= token < vocab_size, f"token {token} of logit_bias {outside}"
            yield bias <= 100, f"logit_bias of token {token} must be at most 100, not {bias}"
        seed = self.seed or 0
        yield 0 <= seed < 1 << 64, f"seed must be between 0 and 2^64 - 1, not {seed}"
        for token in self.eos_token_ids:
            yield 0 <= token < vocab_size, f"eos_token_id {token} {outside}"
        n, columns = self.logprobs or 0, min(MOST_LOGPROBS, vocab_size)
        yield 0 <= n <= columns, f"logprobs must be between 0 and {columns}, not {n}"


def _is(kind: type, value: object) -> bool:
    """Whether it is such a number; Python counts bools among them."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _are(kind: type, values: object) -> bool:
    return isinstance(values, Collection) and all(_is(kind, value) for value in values)
