"""Structured output: a grammar decides, after each token, which tokens may come next.

llguidance compiles a JSON schema, a regex, a list of choices or a Lark grammar, and computes for
each output a mask with one bit for each token. The engine calls `next_masks` while the device
computes the logits that the masks are for.
"""

import copy
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.tokenizer import Tokenizer

_PLACE_SECONDS = 10.0  # to wait until a grammar may be compiled
_SECONDS = 10.0  # to wait for a grammar to be compiled
# So that many hostile grammars leave some cores alone, and one client's leave a place for others.
_PLACES, _CLIENT_PLACES = 4, 3
# CPU time that compiling may take. Large schemas take 40 ms. Memory grows with the time, by up to
# 300 MB per second, and so does the time of each mask: (a{400}){400} takes 0.4 s, then 0.1 s for
# every token.
_CPU_SECONDS = 0.2
# llguidance recurses along chains of rules. With the usual 8 MB, a chain of 4000 ends the process.
_STACK_BYTES = 256 << 20
_MAX_LEXER_STATES = 50_000  # of up to 2 kB each; all outputs with a grammar share them
# Between two tokens of JSON. Small models would spend their tokens on more of it.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]"

_Words = NDArray[np.int32]
_Result = TypeVar("_Result")


class StructuredOutputError(ValueError):
    """A grammar that cannot be compiled or followed."""


class GrammarsBusyError(Exception):
    """No place to compile a grammar became free in time. Try again later."""


_client: ContextVar[str | None] = ContextVar("client", default=None)


@contextmanager
def compiling_for(client: str) -> Iterator[None]:
    """Grammars that this thread compiles are this client's, who cannot take all places."""
    token = _client.set(client)
    try:
        yield
    finally:
        _client.reset(token)


class Vocabulary:
    """The tokens of a model, for llguidance. Special tokens and unused ids are not text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        import llguidance

        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        # The attributes that llguidance reads.
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self.special_token_ids: list[int] = []
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.wrapped = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=vocab_size, eos_token=eos_token_id
        )
        has_text = [token for token, text in enumerate(self.tokens) if text]
        self.has_text = self.words(has_text)

    def __call__(self, text: bytes) -> list[int]:
        """Encodes text, for llguidance."""
        return self._tokenizer.encode(text.decode(), continues=True)

    def words(self, tokens: Sequence[int]) -> _Words:
        """A mask of these tokens: one bit for each token of the vocabulary."""
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        bits[[*tokens]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


class Grammar:
    """A compiled grammar. Outputs follow copies of its `start`, which share one lexer."""

    def __init__(
        self, vocabulary: Vocabulary, form: str, value: Any, start: Any, cpu_seconds: float
    ) -> None:
        self.vocabulary, self.form, self.value, self.start = vocabulary, form, value, start
        self.cpu_seconds = cpu_seconds  # to compile it; its memory grows with that
        self.is_full = False  # True after the lexer had too many states


def compile_grammar(
    structured_outputs: Mapping[str, Any], config: ModelConfig, tokenizer: Any
) -> Grammar:
    """The grammar for `SamplingParams.structured_outputs`, or a `StructuredOutputError`.

    `tokenizer` is a `Tokenizer`. It takes milliseconds, in a thread of its own. The last 16
    grammars are kept. While other threads compile as many grammars as may be compiled at a time,
    this waits, and raises a `GrammarsBusyError` in the end.
    """
    ((form, value),) = structured_outputs.items()
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise StructuredOutputError(
            "structured_outputs needs llguidance: pip install 'xlstm7b[serve]'"
        ) from error
    vocabulary = _vocabulary(tokenizer, config.vocab_size, config.eos_token_id)
    grammar = _compiled(vocabulary, form, value)
    if grammar.is_full:
        _compiled.cache_clear()
        grammar = _compiled(vocabulary, form, value)
    return grammar


class Matcher:
    """Follows one output and knows which tokens may come next."""

    def __init__(self, grammar: Grammar, eos_token_ids: Sequence[int]) -> None:
        self.grammar, self.state = grammar, grammar.start.deep_copy()
        self._tokens: list[int] = []
        self._has_restarted = False
        self._ends = grammar.vocabulary.words(eos_token_ids)
        self._text = grammar.vocabulary.has_text & ~self._ends
        self._is_finished = False
        self.error: StructuredOutputError | None = None  # set by `next_masks`

    def copy(self) -> "Matcher":
        made = copy.copy(self)
        made.state, made._tokens = self.state.deep_copy(), [*self._tokens]
        return made

    def advance(self, token: int) -> None:
        """Reads a token of the output. `StructuredOutputError` if the grammar does not allow it."""
        is_read = self.state.consume_token(token)
        if not is_read and not (self.restart() and self.state.consume_token(token)):
            raise self._failure()
        self._tokens.append(token)

    def restart(self) -> bool:
        """If the grammar's lexer is full: reads the output so far with a new one, for it alone.

        Many outputs together can fill a lexer. An output that fills one alone is too complex:
        False, as for any other error and for none.
        """
        is_full = self.state.is_error() and self.state.get_error().startswith("lexer error")
        if not is_full or self._has_restarted:
            return False
        self._has_restarted = self.grammar.is_full = True
        given = self.grammar
        try:
            self.grammar = _compile_in_thread(
                given.vocabulary, given.form, given.value, takes_place=False
            )
        except StructuredOutputError:  # this time it took too long
            return False
        self.state = self.grammar.start.deep_copy()
        return all(self.state.consume_token(token) for token in self._tokens)

    @property
    def is_complete(self) -> bool:
        """True if the output matches the grammar, and no token but the end of text may follow."""
        return self._is_finished or (self.state.is_stopped() and self.state.is_accepting())

    def finish_mask(self, mask: _Words) -> None:
        """Changes llguidance's mask: special tokens are banned, except for ends of text.

        Those are allowed exactly where the output may end.
        """
        if self.state.is_error():
            self.error = self._failure()
            return
        mask &= self._text
        if self.state.is_accepting():
            self._is_finished = not mask.any()
            mask |= self._ends
        elif not mask.any():
            self.error = self._failure()

    def _failure(self) -> StructuredOutputError:
        problem = _first_line(self.state.get_error()) or "no token can follow"
        return StructuredOutputError(
            f"structured_outputs.{self.grammar.form} cannot be followed any further: {problem}"
        )


def next_masks(matchers: Sequence[Matcher], *, pinned: bool = False) -> Tensor:
    """Which tokens may come next in each output: a bit for each token, [N, words] as int32.

    Several threads compute them, and none holds Python's lock. Sets `error` of matchers for which
    there is no next token.
    """
    words = len(matchers[0].grammar.vocabulary.has_text)
    masks = torch.empty((len(matchers), words), dtype=torch.int32, pin_memory=pinned)
    jobs = [(matcher.state, row) for row, matcher in enumerate(matchers)]
    _executor().unsafe_compute_mask_ptr(jobs, masks.data_ptr(), 4 * words, len(matchers))
    for matcher, mask in zip(matchers, masks.numpy(), strict=True):
        if matcher.restart():
            again = [(matcher.state, 0)]
            _executor().unsafe_compute_mask_ptr(again, mask.ctypes.data, 4 * words, 1)
        matcher.finish_mask(mask)
    return masks


def draft_masks(matcher: Matcher, draft: Sequence[int], *, pinned: bool = False) -> Tensor:
    """The masks after 1, 2, … tokens of a draft, [N, words], as far as an output may go on.

    So the first N tokens of the draft can be verified. The matcher stays as it is.
    """
    after: list[Matcher] = []
    for token in draft:
        follower = (after[-1] if after else matcher).copy()
        try:
            follower.advance(token)
        except StructuredOutputError:
            break
        if follower.is_complete:
            break
        after.append(follower)
    if not after:
        return torch.empty((0, len(matcher.grammar.vocabulary.has_text)), dtype=torch.int32)
    masks = next_masks(after, pinned=pinned)
    ended = (n for n, each in enumerate(after) if each.error is not None or each.is_complete)
    return masks[: next(ended, len(after))]


@cache
def _executor() -> Any:
    import llguidance

    return llguidance.LLExecutor()


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, vocab_size: int, eos_token_id: int) -> Vocabulary:
    return Vocabulary(tokenizer, vocab_size, eos_token_id)


def _compile_in_thread(
    vocabulary: Vocabulary, form: str, value: Any, *, takes_place: bool = True
) -> Grammar:
    """The engine's thread, which must not wait for others, takes no place."""
    place = _Place(_client.get()) if takes_place else None
    try:
        return _in_thread(partial(_compile, vocabulary, form, value), place)
    except TimeoutError as error:
        raise _too_complex(form) from error


_compiled = lru_cache(maxsize=16)(_compile_in_thread)


def _compile(vocabulary: Vocabulary, form: str, value: Any) -> Grammar:
    import llguidance

    started, matcher = time.thread_time(), llguidance.LLMatcher
    try:
        match form:
            case "json":
                own = json.loads(value).get("x-guidance")  # llguidance's options in a schema
                is_set = isinstance(own, dict) and any(name.startswith("white") for name in own)
                options: Any = None if is_set else {"whitespace_pattern": WHITE_SPACE}
                grammar = matcher.grammar_from_json_schema(value, defaults=options)
            case "regex":
                grammar = matcher.grammar_from_regex(value)
            case "choice":
                # One terminal: as alternatives of a rule, at most 2000 could be followed.
                words = " | ".join(map(json.dumps, value))
                grammar = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {words}")
            case _:
                grammar = matcher.grammar_from_lark(value)
    except ValueError as error:
        raise StructuredOutputError(f"structured_outputs.{form} is not valid: {error}") from error
    limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    start = matcher(vocabulary.wrapped, grammar, log_level=0, limits=limits)
    if not start.is_error():
        start.compute_bitmask()  # the slowest: later masks use what it computes
        if start.get_error().startswith("NoExtension"):
            raise StructuredOutputError(f"structured_outputs.{form} matches no text at all")
    if start.is_error():
        raise StructuredOutputError(_explain(form, start.get_error()))
    cpu_seconds = time.thread_time() - started
    if cpu_seconds > _CPU_SECONDS:
        raise _too_complex(form)
    return Grammar(vocabulary, form, value, start, cpu_seconds)


def _too_complex(form: str) -> StructuredOutputError:
    return StructuredOutputError(
        f"structured_outputs.{form} is too complex: it takes too long to compile"
    )


def _explain(form: str, problem: str) -> str:
    """An error of llguidance in words."""
    name = f"structured_outputs.{form}"
    if found := re.match(r"Unimplemented keys: \[(.*)\]", problem):
        return f"{name} has keywords that are not supported: {found[1][:200]}"
    if found := re.match("Unsatisfiable schema: (.*)", problem):
        return f"{name} matches no JSON at all: {found[1][:200]}"
    if re.search("fuel|too (many|large|big|deep)|Unable to determine", problem):
        return f"{name} is too complex: {_first_line(problem)}"
    if found := re.search("^error: (.*)", problem, re.MULTILINE):  # after a drawing of the place
        return f"{name} has an invalid regex: {found[1][:200]}"
    return f"{name} is not valid: {_first_line(problem)}"


def _first_line(problem: str) -> str:
    return problem.partition("\n")[0][:200]


class _Place:
    """One of `_PLACES` in which a grammar is compiled. `GrammarsBusyError` if none becomes free.

    It is free again when the grammar is compiled, or nobody waits for it any more. A compilation
    cannot be stopped, so it counts as its client's until it ends.
    """

    _changed = threading.Condition()
    _taken, _of_client = 0, Counter[str | None]()

    def __init__(self, client: str | None) -> None:
        self._client, self._is_taken = client, True
        with self._changed:
            if not self._changed.wait_for(self._is_free, _PLACE_SECONDS):
                raise GrammarsBusyError(
                    "too many other grammars are being compiled: try again later"
                )
            _Place._taken += 1
            self._of_client[client] += 1

    def _is_free(self) -> bool:
        is_over = self._client is not None and self._of_client[self._client] >= _CLIENT_PLACES
        return self._taken < _PLACES and not is_over

    def leave(self, *, has_ended: bool) -> None:
        """Frees the place, unless it is free already. `has_ended`: the compilation too."""
        with self._changed:
            _Place._taken -= self._is_taken
            self._is_taken = False
            if has_ended:
                self._of_client[self._client] -= 1
                if not self._of_client[self._client]:
                    del self._of_client[self._client]
            self._changed.notify_all()


_starting = threading.Lock()


def _in_thread(work: Callable[[], _Result], place: _Place | None) -> _Result:
    """The result of `work` in a thread with a large stack. `TimeoutError` if it takes too long."""
    future = Future[_Result]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            if place is not None:
                place.leave(has_ended=True)

    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        except BaseException:
            if place is not None:
                place.leave(has_ended=True)
            raise
        finally:
            threading.stack_size(before)
    try:
        return future.result(_SECONDS)
    except TimeoutError:
        if place is not None:
            place.leave(has_ended=False)
        raise
