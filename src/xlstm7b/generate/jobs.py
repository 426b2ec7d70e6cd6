"""One text in the engine's hands: who waits for it, how far it is, what they are told."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xlstm7b.generate.prefix_store import TokenChain
from xlstm7b.generate.requests import Request
from xlstm7b.generate.states import TextState
from xlstm7b.generate.texts import Completion, GrowingText

_LOG = logging.getLogger(__name__)


class QueueFull(RuntimeError):  # noqa: N818 (said as it is)
    """As many texts wait as may; the next may be welcome in `retry_after` seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the queue is full; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class EngineStopped(RuntimeError):  # noqa: N818 (said as it is)
    """The engine takes no more texts, or has let this one go."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine takes no texts: {reason}")
        self.reason = reason


class EngineFailed(RuntimeError):  # noqa: N818 (said as it is)
    """A step of the model failed, and every text with it."""


class Piece(NamedTuple):
    """What was added to one text. The last piece of a text has its completion.

    Where the prompt is scored, its own tokens come first.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # one a token, if asked for
    top_logprobs: tuple[dict[int, float], ...]  # likewise
    completion: Completion | None
    cached_tokens: int  # of the prompt, that a stored state spared
    scored_tokens: int = 0  # of `token_ids`, the prompt's own

    def parts(self) -> "tuple[Piece | None, Piece]":
        """The prompt's own tokens, if it has any, and what was generated."""
        own = self.scored_tokens
        if not own:
            return None, self
        first, rest = (
            (self.token_ids[part], self.logprobs[part], self.top_logprobs[part])
            for part in (slice(own), slice(own, None))
        )
        return (
            Piece("", *first, None, self.cached_tokens, own),
            Piece(self.text, *rest, self.completion, self.cached_tokens),
        )

    @classmethod
    def joined(cls, pieces: "Sequence[Piece]") -> "Piece":
        """Pieces of the same text, in their order, as one."""
        if len(pieces) == 1:
            return pieces[0]
        return cls(
            "".join(piece.text for piece in pieces),
            tuple(token for piece in pieces for token in piece.token_ids),
            tuple(value for piece in pieces for value in piece.logprobs),
            tuple(top for piece in pieces for top in piece.top_logprobs),
            pieces[-1].completion,
            pieces[-1].cached_tokens,
            sum(piece.scored_tokens for piece in pieces),
        )


Receive = Callable[[Piece | Exception], None]


class Job:
    """A text that was handed in. `top` is set where its prompt's tokens are to be scored.

    `text` is None where nothing is to be generated.
    """

    def __init__(
        self,
        request: Request,
        receive: Receive,
        wake: Callable[["Job"], None],
        *,
        state: TextState | None = None,
        keep_state: bool = False,
        text: GrowingText | None = None,
        top: int | None = None,
    ) -> None:
        self.request, self.state, self.keep_state = request, state, keep_state
        self.text, self.top = text, top
        self.created = time.monotonic()
        self.admitted = self.first_token = 0.0  # likewise; 0 until then
        self.finished = False
        # A prompt's last token predicts nothing that is scored.
        only_scored = top is not None and text is None
        self.ids: Sequence[int] = request.ids[:-1] if only_scored else request.ids
        # What no stored state could spare, or help others with, has no chain.
        self.chain = TokenChain(self.ids) if state is None and top is None else None
        self.number = 0  # in the order of admission
        self.position = 0  # how much of `ids` was read
        self.parting = 0  # how much of it an earlier text began with
        self.follows: tuple[Job, int] | None = None  # who reads this text's beginning, up to where
        self.cached_tokens = 0
        self.row = -1
        self._receive, self._wake = receive, wake
        self._lock = threading.RLock()  # it may be cancelled while it is told something

    @property
    def waiting(self) -> bool:
        return not self.admitted and not self.finished

    @property
    def running(self) -> bool:
        return bool(self.admitted) and not self.finished

    def cancel(self) -> None:
        """Nothing is delivered from now on; what the text holds is free within a step."""
        with self._lock:
            self.finished = True
        self._wake(self)

    def deliver(self, news: Piece | Exception) -> None:
        """Tells whoever waits, unless they were told all. One who cannot be told is given up."""
        with self._lock:
            if self.finished:
                return
            self.finished = not isinstance(news, Piece) or news.completion is not None
            try:
                self._receive(news)
            except Exception:
                self.finished = True
                _LOG.exception("a text is dropped: its receiver failed")
