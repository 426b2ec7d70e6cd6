"""Request: a prompt with its parameters and progress. RequestOutput, Completion: its results."""

import copy
import hashlib
import hmac
import math
from array import array
from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Literal, Self

from xlstm7b.generate.params import SamplingParams, check_logprobs
from xlstm7b.tokenizer import StreamDecoder, Tokenizer, check_tokens, with_first_token

if TYPE_CHECKING:
    from xlstm7b.config import ModelConfig
    from xlstm7b.generate.state import SavedState
    from xlstm7b.generate.structured import Matcher
    from xlstm7b.model.adapter import Adapter

Prompt = str | Sequence[int]
FinishReason = Literal["stop", "length"]
BAD_LOGITS = -2  # the sampler's token for a row whose logits are NaN or infinite
LOGITS_ARE_BAD = (
    "the model's logits are not numbers: its weights are damaged, or overflow in this dtype"
)


class RequestStatus(Enum):
    WAITING = auto()  # in the queue, or not yet added
    PREFILL = auto()  # has a slot; its prompt is being read
    RUNNING = auto()  # generates
    FINISHED = auto()
    ABORTED = auto()
    FAILED = auto()


class Request:
    """A prompt to continue. Build it, then give it to `Engine.add_request` or `Generator.run`.

    state: a saved state of one row; the prompt is read on top of it.
    keep_state: the completion carries the state after the last output token.
    prompt_logprobs: also return log-probabilities of the prompt's tokens, and of this number of
        most likely tokens at each position.
    prefill_only: read the prompt and generate nothing. The completion carries the state; with
        `prompt_logprobs` only if `keep_state` is set.
    previous_prompt, previous_output: tokens that `state` has read already. Penalties count them,
        and `structured_outputs` describes `previous_output` and the new output together.
    adapter: one of the engine's adapters. Default: the model without any.
    speculate: whether an engine that speculates drafts tokens for this request.
    history: tokens that `state` has read already, in which drafts may be found. They change no
        output.
    cache_salt: the prefix cache shares states only between requests with the same one. It is stored
        as a hash.
    """

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        state: "SavedState | None" = None,
        keep_state: bool = False,
        prompt_logprobs: int | None = None,
        prefill_only: bool = False,
        previous_prompt: Sequence[int] = (),
        previous_output: Sequence[int] = (),
        adapter: "Adapter | None" = None,
        speculate: bool = True,
        history: Sequence[int] = (),
        cache_salt: bytes = b"",
    ) -> None:
        self.cache_salt = cache_salt
        self.adapter, self.speculate, self.history = adapter, speculate, history
        self.prompt, self.params = prompt, params or SamplingParams()
        self.state, self.keep_state = state, keep_state
        self.prompt_logprobs, self.prefill_only = prompt_logprobs, prefill_only
        self.previous_prompt, self.previous_output = tuple(previous_prompt), tuple(previous_output)
        self.status = RequestStatus.WAITING
        # Set by `prepare`.
        self._config: ModelConfig | None = None
        self.prompt_token_ids: list[int] = []
        self.read_token_ids: Sequence[int] = []  # the prompt tokens that the engine reads
        self.starts_after_bos = False  # reading starts from the state after the first token
        self.hashed: HashedTokens | None = None  # None: the prefix cache cannot serve it
        self.output: OutputText | None = None
        self.matcher: Matcher | None = None  # None: without `structured_outputs`
        # Set by the scheduler and the engine.
        self.slot = -1
        self.order = 0  # number in the order of admission
        self.position = -1  # how many of `read_token_ids` were read; -1: the slot has no state yet
        self.shared_prefix_len = 0  # tokens shared with an earlier prompt
        self.waits_for: tuple[Request, int] | None = None  # the request that will cache a prefix
        self.cached_tokens = 0  # prompt tokens that came from the prefix cache
        self.reads = 0  # output tokens that were read, or will be by steps that were launched
        self.drafted_tokens = self.accepted_tokens = 0
        self.added = self.admitted = self.first_token = 0.0  # times; 0 until then

    @property
    def finished(self) -> bool:
        """True if no more output follows."""
        return self.status in (RequestStatus.FINISHED, RequestStatus.ABORTED, RequestStatus.FAILED)

    @property
    def prepared(self) -> bool:
        return self.output is not None

    def prepare(
        self, config: "ModelConfig", tokenizer: Tokenizer, *, shareable: bool = True
    ) -> Self:
        """Encodes the prompt, adds the first token and the model's end of text, checks everything.

        Mistakes raise a `ValueError`. Touches no model, so any thread may call it. A prompt that is
        not `shareable` is not hashed, and does not use the prefix cache.
        """
        if self.prepared:
            if self._config != config:
                raise ValueError("this request was prepared for another model; build a new one")
            return self
        self._config = config
        if self.state is not None:
            self.state.check_model(config)
            if len(self.state) != 1:
                raise ValueError(f"a request continues one state, not {len(self.state)}")
        if self.params.eos_token_id is None:
            ends = end_ids(config.eos_token_id, adapter=self.adapter)
            self.params = replace(self.params, eos_token_id=ends)
        self.params.check(config.vocab_size)
        if self.prompt_logprobs is not None:
            check_logprobs("prompt_logprobs", self.prompt_logprobs, config.vocab_size)
        prompt = self.prompt
        if not is_prompt(prompt):
            raise ValueError("a prompt must be a string or a list of ids")
        if isinstance(prompt, str):
            continues = self.state is not None and self.state.has_text
            ids = _encode(tokenizer, prompt, continues)
        else:
            ids = list(prompt)
        if not is_prompt([*self.previous_prompt, *self.previous_output]):
            raise ValueError("previous_prompt and previous_output must be lists of ids")
        if not isinstance(self.speculate, bool):
            raise ValueError(f"speculate must be true or false, not {self.speculate!r}")
        if isinstance(self.history, str) or not is_prompt(self.history):
            raise ValueError("history must be a list of ids")
        if not isinstance(self.cache_salt, bytes):
            raise ValueError(f"cache_salt must be bytes, not {type(self.cache_salt).__name__}")
        for tokens in (ids, self.previous_prompt, self.previous_output, self.history):
            check_tokens(config, tokens)
        self.prompt_token_ids = with_first_token(config, ids) if self.state is None else ids
        self.read_token_ids = self.prompt_token_ids
        if self.prompt_logprobs is not None:
            if self.prefill_only and not self.keep_state:  # nothing needs the last token
                self.read_token_ids = self.prompt_token_ids[:-1]
        elif self.state is None:
            if config.force_bos_token_insert:
                # All prompts start with the same token. The engine keeps the state after it.
                self.read_token_ids, self.starts_after_bos = self.prompt_token_ids[1:], True
            if shareable:
                salt = b"" if self.adapter is None else bytes.fromhex(self.adapter.fingerprint)
                if self.cache_salt:
                    salt = hmac.digest(self.cache_salt, salt, "sha256")
                self.hashed = HashedTokens(self.read_token_ids, salt=salt)
        if self.params.structured_outputs is not None:
            from xlstm7b.generate.structured import Matcher, compile_grammar

            grammar = compile_grammar(self.params.structured_outputs, config, tokenizer)
            self.matcher = Matcher(grammar, self.params.eos_token_ids)
            for token in self.previous_output:
                self.matcher.advance(token)
        self.output = OutputText(tokenizer, self.params)
        return self

    def with_seed_offset(self, n: int) -> "Request":
        """A new request like this one, with seed + n. For several samples of one prompt."""
        assert self.status is RequestStatus.WAITING
        made = copy.copy(self)
        if self.params.seed is not None:
            made.params = replace(self.params, seed=(self.params.seed + n) % (1 << 64))
        if self.output is not None:
            made.output = OutputText(self.output.tokenizer, made.params)
        if self.matcher is not None:
            made.matcher = self.matcher.copy()
        return made


def end_ids(*ids: int, adapter: "Adapter | None") -> tuple[int, ...]:
    """End-of-text ids, and that of the adapter if it has one of its own."""
    return ids if adapter is None or adapter.end is None else (*ids, adapter.end)


def _encode(tokenizer: Tokenizer, text: str, continues: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, or bytes that are not UTF-8
        wrong = text[error.start]
        raise ValueError(
            f"the prompt is not valid Unicode: {wrong!r} at character {error.start}"
        ) from error
    return tokenizer.encode(text, continues=continues)


def is_prompt(value: object) -> bool:
    """True for a string, and for a sequence of whole numbers."""
    if isinstance(value, str):
        return True
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        return False
    # By the set of types: a prompt may have millions of ids.
    return all(issubclass(kind, Integral) for kind in {*map(type, value)})


@dataclass(frozen=True)
class Completion:
    """A finished request. Neither end of text nor a stop string is part of the text."""

    text: str
    token_ids: list[int]  # without the end of text, but with a stop string's tokens
    finish_reason: FinishReason  # "stop": end of text, a stop string, or the caller's should_stop
    prompt_tokens: int
    prompt_tokens_per_second: float
    tokens_per_second: float  # from the first output token to the last; 0 if there is only one
    peak_memory: int  # bytes: on the GPU, or of the process
    logprobs: list[float] | None = None  # one per output token
    top_logprobs: list[dict[int, float]] | None = None  # the most likely tokens at each position
    state: "SavedState | None" = field(default=None, repr=False)  # has read all of token_ids
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of the drafted ones, those that became output


@dataclass(frozen=True)
class RequestOutput:
    """What one engine step added to a request. The last one has a completion or an error."""

    request: Request
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # one per token, if requested
    top_logprobs: tuple[dict[int, float], ...] = ()  # one per token, if requested
    prompt_logprobs: tuple[float, ...] = ()  # of prompt tokens; the first token has none
    prompt_top_logprobs: tuple[dict[int, float], ...] = ()
    completion: Completion | None = None
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.completion is not None or self.error is not None

    @classmethod
    def merge(cls, outputs: "Sequence[RequestOutput]") -> "RequestOutput":
        """Consecutive outputs of one request as one."""
        if len(outputs) == 1:
            return outputs[0]
        return cls(
            outputs[0].request,
            "".join(output.text for output in outputs),
            tuple(token for output in outputs for token in output.token_ids),
            tuple(value for output in outputs for value in output.logprobs),
            tuple(top for output in outputs for top in output.top_logprobs),
            tuple(value for output in outputs for value in output.prompt_logprobs),
            tuple(top for output in outputs for top in output.prompt_top_logprobs),
            outputs[-1].completion,
            outputs[-1].error,
        )


class OutputText:
    """Turns output tokens into text and finds the end.

    It holds back text that may still change: half a character, or the start of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.tokenizer, self._params = tokenizer, params
        self._decoder = StreamDecoder(tokenizer)
        self._stops, self._ends = _StopStrings.of(params.stop_strings), {*params.eos_token_ids}
        self._node = 0  # of `_stops`, after the text
        self.text, self._returned = "", 0
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.finish_reason: FinishReason | None = None

    def push(
        self,
        token: int,
        logprob: float = 0.0,
        top_logprobs: Sequence[float] = (),
        top_tokens: Sequence[int] = (),
    ) -> str:
        """Adds a token; returns new text that cannot change. Sets `finish_reason` at the end.

        Raises a `FloatingPointError` if the model's logits were not finite.
        """
        if token == BAD_LOGITS or math.isnan(logprob):
            raise FloatingPointError(LOGITS_ARE_BAD)
        if token in self._ends:
            return self.finish("stop")
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        count = self._params.logprobs or 0  # another row of the batch may have more
        tops = dict(zip(top_tokens[:count], top_logprobs[:count], strict=True)) if count else {}
        self.top_logprobs.append(tops)
        if self._add(self._decoder.push(token)):
            self._decoder.flush()
            return self.finish("stop")
        if len(self.token_ids) >= self._params.max_new_tokens:
            return self.finish("length")
        return self._new_text(len(self.text) - self._stops.depths[self._node])

    def finish(self, reason: FinishReason) -> str:
        """Ends the text; returns what was held back, unless a stop string ends there."""
        is_stop = self._add(self._decoder.flush())
        self.finish_reason = "stop" if is_stop else reason
        return self._new_text(len(self.text))

    def _add(self, new: str) -> bool:
        """Adds text. If a stop string ends in it, the text is cut before the first: True."""
        start, self.text = len(self.text), self.text + new
        if not self._params.stop_strings:
            return False
        self._node, cut = self._stops.find(self._node, new)
        if cut is not None:
            self.text = self.text[: start + cut]
        return cut is not None

    def _new_text(self, end: int) -> str:
        start, self._returned = self._returned, max(self._returned, end)
        return self.text[start : self._returned]


class _StopStrings:
    """Finds stop strings in a text that grows, in constant time per character (Aho–Corasick).

    A node stands for the longest end of the text that is the start of a stop string; node 0 for
    none. `depths` are the lengths of these ends.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: dict[int, int] = {}  # by node and character
        self.depths, self._shorter, self._found = [0], [0], [0]
        # Node by node in order of depth: each is the next character of some stop strings.
        nodes = dict.fromkeys(stops, 0)
        for depth in range(1, max(map(len, stops), default=0) + 1):
            nodes = {stop: node for stop, node in nodes.items() if len(stop) >= depth}
            for stop, node in nodes.items():
                character = ord(stop[depth - 1])
                key = node << 21 | character
                following = self._next.get(key)
                if following is None:
                    following = self._next[key] = len(self.depths)
                    self.depths.append(depth)
                    # The node of the next shorter end.
                    shorter = self._after(self._shorter[node], character) if node else 0
                    self._shorter.append(shorter)
                    # The longest stop string at the end.
                    self._found.append(self._found[shorter])
                nodes[stop] = following
                if len(stop) == depth:
                    self._found[following] = depth

    @classmethod
    @lru_cache(maxsize=64)  # one request may be copied many times
    def of(cls, stops: tuple[str, ...]) -> Self:
        return cls(stops)

    def find(self, node: int, text: str) -> tuple[int, int | None]:
        """The node after more text, and where the first stop string that ends in it starts.

        It may start before the text: below 0.
        """
        cut = None
        for end, character in enumerate(map(ord, text), 1):
            node = self._after(node, character)
            if self._found[node]:
                start = end - self._found[node]
                cut = start if cut is None else min(cut, start)
        return node, cut

    def _after(self, node: int, character: int) -> int:
        while (following := self._next.get(node << 21 | character)) is None and node:
            node = self._shorter[node]
        return following or 0


PrefixKey = tuple[bytes, bytes]
BLOCK = 64  # tokens per hash
_ID_BYTES = 4


class HashedTokens:
    """Token ids with a hash after every block of 64, which covers all tokens before it.

    So the key of any prefix is found without reading all its tokens. Tokens with another `salt`,
    such as that of an adapter, have other keys.
    """

    def __init__(
        self, ids: Sequence[int], after: "HashedTokens | None" = None, *, salt: bytes = b""
    ) -> None:
        """`ids`, or `after` continued by `ids`."""
        if after is None:  # `after` may be empty, which counts as false
            self.salt, before, self._digests = salt, b"", [salt]
        else:
            self.salt, before, self._digests = after.salt, after._bytes, [*after._digests]
        self._bytes: bytes = before + array("i", ids).tobytes()
        size = BLOCK * _ID_BYTES
        for start in range(size * (len(self._digests) - 1), len(self._bytes) - size + 1, size):
            self._digests.append(digest(self._digests[-1], self._bytes[start : start + size]))
        self._blocks = {block_hash: blocks for blocks, block_hash in enumerate(self._digests)}

    @classmethod
    def from_bytes(cls, content: bytes, salt: bytes = b"") -> "HashedTokens":
        """The inverse of `prefix_bytes(len(self))`."""
        ids = array("i")
        ids.frombytes(content)
        return cls(ids, salt=salt)

    def __len__(self) -> int:
        return len(self._bytes) // _ID_BYTES

    def prefix_bytes(self, length: int) -> bytes:
        """The first `length` ids as bytes."""
        return self._bytes[: length * _ID_BYTES]

    def key(self, length: int) -> PrefixKey:
        """Key of the first `length` ids: the hash of the whole blocks, and the ids after them."""
        blocks = length // BLOCK
        return self._digests[blocks], self._bytes[blocks * BLOCK * _ID_BYTES : length * _ID_BYTES]

    def block_hashes(self) -> list[bytes]:
        """The hash after each whole block."""
        return self._digests[1:]

    def has_prefix(self, other: "HashedTokens", length: int) -> bool:
        """True if both start with the same `length` ids."""
        return min(len(self), len(other)) >= length and self.key(length) == other.key(length)

    def lengths(self, longer_than: int, known: KeysView[bytes]) -> Iterator[int]:
        """Lengths above `longer_than` of prefixes whose key has a known hash, longest first.

        The cost is that of the smaller of the two sets of hashes: it is paid for every chunk of a
        prompt, which may have a million tokens.
        """
        numbers = [self._blocks[block_hash] for block_hash in self._blocks.keys() & known]
        for blocks in sorted((n for n in numbers if n >= longer_than // BLOCK), reverse=True):
            last = min(len(self), (blocks + 1) * BLOCK - 1)
            yield from range(last, max(longer_than, blocks * BLOCK - 1), -1)


def digest(before: bytes, block: bytes) -> bytes:
    """The hash of a block and of everything before it."""
    return hashlib.blake2b(before + block, digest_size=16).digest()
