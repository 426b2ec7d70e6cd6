"""SamplingParams: how the tokens of one request are chosen.

A field's default, bounds and help text are written here and nowhere else. The command line, the
JSONL reader, the HTTP body and the evaluation harness take them from here.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Self

MAX_LOGPROBS = 20
MAX_GRAMMAR = 1 << 16  # characters of a schema, a regex, a grammar, or all choices together

_Rule = tuple[Callable[[Any], bool], str]
"""A check, and the words for the values it allows. NaN fails every check."""


def _param(default: Any, help_text: str, kind: type | None, *rules: _Rule) -> Any:
    metadata = {"help": help_text, "kind": kind, "rules": rules}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def _between(low: float, high: float) -> _Rule:
    return lambda value: low <= value <= high, f"between {low} and {high}"


# Bounds of penalties and biases are far beyond any use. They only keep scores finite.
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, with Hugging Face's names where it has them.

    A value of the wrong type raises a `ValueError` at construction, one out of bounds in `check`.
    """

    max_new_tokens: int = _param(
        256,
        "Maximum number of tokens to generate.",
        Integral,
        (lambda n: n >= 1, "at least 1"),
        (lambda n: n < 1 << 63, "below 2^63"),
    )
    min_new_tokens: int = _param(
        0,
        "Minimum number of tokens before the output may end.",
        Integral,
        (lambda n: n >= 0, "at least 0"),
    )
    temperature: float = _param(
        1.0,
        "Sampling temperature. 0 always takes the most likely token.",
        Real,
        (lambda t: 0 <= t < math.inf, "0 or a positive number"),
    )
    top_k: int = _param(
        0,
        "Sample from the k most likely tokens. 0 means all.",
        Integral,
        (lambda k: k >= 0, "0 (all tokens) or a positive number"),
    )
    top_p: float = _param(
        1.0,
        "Sample from the fewest most likely tokens whose probabilities sum to at least p.",
        Real,
        (lambda p: 0 < p <= 1, "above 0 and at most 1"),
    )
    min_p: float = _param(
        0.0,
        "Sample only tokens at least this many times as likely as the most likely one.",
        Real,
        _between(0, 1),
    )
    repetition_penalty: float = _param(
        1.0,
        "Above 1, tokens of the prompt and of the output become less likely.",
        Real,
        _between(0.01, 100),
    )
    presence_penalty: float = _param(
        0.0,
        "Subtracted once from the score of each token that is already in the output.",
        Real,
        _between(-100, 100),
    )
    frequency_penalty: float = _param(
        0.0,
        "Subtracted from a token's score for each time that it is already in the output.",
        Real,
        _between(-100, 100),
    )
    logit_bias: Mapping[int, float] = _param(
        {}, "Numbers added to the logits of token ids. -inf bans a token.", None
    )
    seed: int | None = _param(
        None,
        "Seed of the random draws. The same seed gives the same output.",
        Integral,
        (lambda n: 0 <= n < 1 << 64, "between 0 and 2^64 - 1"),
    )
    stop_strings: tuple[str, ...] = _param(
        (), "Strings that end the output. They are not part of its text.", None
    )
    eos_token_id: int | Sequence[int] | None = _param(
        None,
        "Token ids that end the output. By default the model's own; an empty list means none.",
        None,
    )
    logprobs: int | None = _param(
        None,
        "Return log-probabilities: of each output token, and of this many most likely tokens.",
        Integral,
    )
    structured_outputs: Mapping[str, Any] | None = _param(
        None,
        "Form of the output: one of json (a schema), json_object, regex, choice and grammar.",
        None,
    )

    def __post_init__(self) -> None:
        for param in fields(self):
            value, kind = getattr(self, param.name), param.metadata["kind"]
            if kind is None or (value is None and param.default is None):
                continue
            if not _is(kind, value):
                wanted = "a number" if kind is Real else "a whole number"
                raise ValueError(f"{param.name} must be {wanted}, not {value!r}")
            if kind is Real:
                _check_float(param.name, value)
        bias, ends, stops = self.logit_bias, self.eos_token_id, self.stop_strings
        if not (isinstance(bias, Mapping) and _are(Integral, bias) and _are(Real, bias.values())):
            raise ValueError(f"logit_bias must be numbers by token id, not {bias!r}")
        for value in bias.values():
            _check_float("logit_bias", value)
        object.__setattr__(self, "logit_bias", dict(bias))  # a copy: the caller may change its dict
        if ends is not None and not _is(Integral, ends) and not _are(Integral, ends):
            raise ValueError(f"eos_token_id must be an id or a list of ids, not {ends!r}")
        if isinstance(stops, str):
            object.__setattr__(self, "stop_strings", (stops,))
        elif isinstance(stops, Sequence) and all(isinstance(stop, str) for stop in stops):
            object.__setattr__(self, "stop_strings", tuple(stops))
        else:
            raise ValueError(f"stop_strings must be a string or a list of strings, not {stops!r}")
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", _one_form(self.structured_outputs))

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """From keyword arguments, as users give them.

        Also `do_sample`, as in transformers, and `json_schema` for `structured_outputs`.
        """
        schema = options.pop("json_schema", None)
        if schema is not None:
            if options.get("structured_outputs") is not None:
                raise ValueError("json_schema and structured_outputs cannot be combined")
            options["structured_outputs"] = {"json": schema}
        do_sample = options.pop("do_sample", None)
        if do_sample is not None:
            if not isinstance(do_sample, bool):
                raise ValueError(f"do_sample must be true or false, not {do_sample!r}")
            options.setdefault("temperature", 1.0 if do_sample else 0.0)
        for name in options:
            if name not in HELP:
                raise ValueError(
                    f"there is no sampling parameter {name!r}; there are: {', '.join(HELP)}"
                )
        params = cls(**options)
        if do_sample is not None and do_sample != (params.temperature > 0):
            raise ValueError(f"do_sample={do_sample} contradicts temperature {params.temperature}")
        return params

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """`eos_token_id` as a tuple."""
        ends = self.eos_token_id
        if ends is None:
            return ()
        return (*ends,) if isinstance(ends, Collection) else (ends,)

    def check(self, vocab_size: int | None = None) -> None:
        """Raises a `ValueError` that names the first field out of bounds.

        Without `vocab_size`, ids are only checked to be at least 0: for use before a model is open.
        """
        for param in fields(self):
            value = getattr(self, param.name)
            for holds, allowed in param.metadata["rules"]:
                if value is not None and not holds(value):
                    raise ValueError(f"{param.name} must be {allowed}, not {value}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens "
                f"({self.max_new_tokens})"
            )
        if not all(self.stop_strings):
            raise ValueError("a stop string must not be empty")
        for token, bias in self.logit_bias.items():
            _check_token(f"token {token} of logit_bias", token, vocab_size)
            if not bias <= 100:
                raise ValueError(f"logit_bias of token {token} must be at most 100, not {bias}")
        for token in self.eos_token_ids:
            _check_token(f"eos_token_id {token}", token, vocab_size)
        if self.logprobs is not None:
            check_logprobs("logprobs", self.logprobs, vocab_size)
        for form, value in (self.structured_outputs or {}).items():
            length = len(value) if isinstance(value, str) else sum(map(len, value))
            if length > MAX_GRAMMAR:
                raise ValueError(
                    f"structured_outputs.{form} must have at most {MAX_GRAMMAR} characters, "
                    f"not {length}"
                )


HELP: dict[str, str] = {param.name: param.metadata["help"] for param in fields(SamplingParams)}
"""Help text by field name."""


def check_logprobs(name: str, count: object, vocab_size: int | None = None) -> None:
    """Raises a `ValueError` unless `count` is a possible number of most likely tokens."""
    most = MAX_LOGPROBS if vocab_size is None else min(MAX_LOGPROBS, vocab_size)
    if not _is(Integral, count) or not 0 <= count <= most:  # type: ignore[operator]
        raise ValueError(f"{name} must be between 0 and {most}, not {count}")


def _one_form(given: object) -> dict[str, Any]:
    """The one form in `structured_outputs`, as a copy. A schema becomes its JSON text."""
    forms = given if isinstance(given, Mapping) else {}
    forms = {
        name: value for name, value in forms.items() if value is not None and value is not False
    }
    match forms:
        case {"json": schema, **others} if not others:
            try:
                text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
                is_object = isinstance(json.loads(text), dict)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"structured_outputs.json is not JSON: {error}") from error
            if not is_object:
                raise ValueError("structured_outputs.json must be a JSON schema: an object")
            return {"json": text}
        case {"json_object": True, **others} if not others:
            return {"json": '{"type": "object"}'}
        case {"regex": str(), **others} | {"grammar": str(), **others} if not others:
            return forms
        case {"choice": [*choices], **others} if not others:
            if choices and all(isinstance(choice, str) and choice for choice in choices):
                return {"choice": tuple(choices)}
            raise ValueError("structured_outputs.choice must be a list of strings, none empty")
    named = f"has {', '.join(map(str, forms))}" if forms else f"is {given!r}"
    raise ValueError(
        "structured_outputs must have exactly one of json (a schema), json_object (true), regex "
        f"(a string), choice (a list of strings) and grammar (a string); it {named[:200]}"
    )


def _check_token(name: str, token: int, vocab_size: int | None) -> None:
    if vocab_size is None and token < 0:
        raise ValueError(f"{name} must be at least 0")
    if vocab_size is not None and not 0 <= token < vocab_size:
        raise ValueError(f"{name} is outside the vocabulary of {vocab_size}")


def _check_float(name: str, value: Any) -> None:
    try:
        float(value)
    except OverflowError as error:
        raise ValueError(f"{name} must be within the range of a float, not {value}") from error


def _is(kind: type, value: object) -> bool:
    """isinstance, except that a bool is not a number."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _are(kind: type, values: object) -> bool:
    return isinstance(values, Collection) and all(_is(kind, value) for value in values)
