"""A conversation: each message is read on top of the state, so nothing is read twice."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from xlstm7b.chat_format import ChatFormat, PlainFormat, answer_ends, without_prefix
from xlstm7b.generate.drafts import WINDOW
from xlstm7b.generate.generator import Generator
from xlstm7b.generate.params import SamplingParams
from xlstm7b.generate.request import Completion, RequestOutput
from xlstm7b.generate.state import SavedState

MAX_UNDO = 8  # each exchange that can be undone keeps a state: 0.14 GB for the 7B


class ChatStats(NamedTuple):
    """Length of a conversation, and its last answer."""

    exchanges: int
    tokens_read: int
    state_bytes: int
    last: Completion | None


@dataclass(frozen=True)
class _Snapshot:
    """The conversation after an exchange."""

    state: SavedState | None = None
    started: bool = False  # False: the state has read no message, but perhaps another text
    overread: str = ""  # text that the state has read after the answer, such as a stop string
    exchanges: int = 0
    last: Completion | None = None
    message: str | None = None  # that `last` answers
    attempt: int = 0  # how often the answer was generated again
    history: tuple[int, ...] = ()  # the latest tokens that the state has read, for drafts


class Chat:
    """A conversation with a model. `sampling` are fields of `SamplingParams` for every answer.

    With a seed the whole conversation is reproducible: answer n is sampled with seed + n − 1. Each
    `retry` of it adds 2^32 more.
    """

    def __init__(
        self,
        generator: Generator,
        chat_format: ChatFormat | None = None,
        *,
        system: str | None = None,
        **sampling: Any,
    ) -> None:
        self._generator, self._system = generator, system
        self._format = chat_format or PlainFormat()
        params = SamplingParams.from_options(**sampling)
        stop_strings, eos_token_ids = answer_ends(
            self._format, generator.tokenizer, generator.config.eos_token_id
        )
        if params.eos_token_id is None:
            params = replace(params, eos_token_id=eos_token_ids)
        if params.structured_outputs is None:  # else the grammar ends an answer
            params = replace(params, stop_strings=(*params.stop_strings, *stop_strings))
        self._params = params
        self._params.check(generator.config.vocab_size)
        self._now, self._past = _Snapshot(), deque[_Snapshot](maxlen=MAX_UNDO)

    def say(
        self, text: str, should_stop: Callable[[], bool] | None = None
    ) -> Iterator[RequestOutput]:
        """Streams the answer. The message and the answer count once the last output was returned.

        Before that, `save`, `stats` and the next `say` see the conversation as it was.
        """
        return self._answer(self._now, text, 0, should_stop)

    def retry(self, should_stop: Callable[[], bool] | None = None) -> Iterator[RequestOutput]:
        """Streams another answer to the last message. It replaces the answer once it is whole."""
        if self._now.message is None or not self._past:
            raise ValueError("there is no answer to generate again")
        return self._answer(self._past[-1], self._now.message, self._now.attempt + 1, should_stop)

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the next answer."""
        return self._params

    def set_sampling(self, **changes: Any) -> None:
        """Changes sampling parameters from the next answer on. A wrong one changes nothing."""
        params = replace(self._params, **changes)
        params.check(self._generator.config.vocab_size)
        self._params = params

    def start(self, system: str | None) -> None:
        """Starts a new conversation with this system message."""
        self._format.first_prompt(system, "")  # a template can refuse it
        self._system = system
        self.clear()

    def _answer(
        self, base: _Snapshot, text: str, attempt: int, should_stop: Callable[[], bool] | None
    ) -> Iterator[RequestOutput]:
        params = self._params
        if base.started:
            prompt = without_prefix(self._format.next_prompt(text), base.overread)
        else:
            # After a text that was read before.
            separator = "\n" if base.state is not None and base.state.has_text else ""
            prompt = separator + self._format.first_prompt(self._system, text)
        if params.seed is not None:
            seed = params.seed + base.exchanges + (attempt << 32)
            params = replace(params, seed=seed % (1 << 64))
        outputs = self._generator.stream(
            prompt,
            state=base.state,
            keep_state=True,
            should_stop=should_stop,
            history=base.history,
            **vars(params),
        )
        return self._follow(outputs, base, text, attempt)

    def _follow(
        self, outputs: Iterator[RequestOutput], base: _Snapshot, text: str, attempt: int
    ) -> Iterator[RequestOutput]:
        for output in outputs:
            answer = output.completion
            if answer is not None:
                # The ids hold a stop string that ended the answer, the text does not.
                overread = self._generator.tokenizer.decode(answer.token_ids, continues=True)
                overread = overread.removeprefix(answer.text)
                read = *base.history, *output.request.prompt_token_ids, *answer.token_ids
                if base is self._now:  # else the last answer is replaced
                    self._past.append(base)
                self._now = _Snapshot(
                    answer.state,
                    True,
                    overread,
                    base.exchanges + 1,
                    answer,
                    text,
                    attempt,
                    read[-WINDOW:],
                )
            yield output

    def undo(self) -> None:
        """Undoes the last exchange."""
        if not self._past:
            raise ValueError(f"there is nothing to undo (at most {MAX_UNDO} exchanges are kept)")
        self._now = self._past.pop()

    def clear(self) -> None:
        """Starts a new conversation."""
        self._now = _Snapshot()
        self._past.clear()

    def save(self, path: str | Path, **notes: str) -> None:
        """Saves the state of the conversation, which is all that `load` needs.

        Notes are the caller's own, as those of `SavedState.save`.
        """
        now = self._now
        if now.state is None:
            raise ValueError("there is nothing to save: the conversation is empty")
        own = {"note": now.overread, "exchanges": str(now.exchanges)} if now.started else {}
        now.state.save(path, **notes, **own)

    def load(self, path: str | Path) -> None:
        """Continues from a saved state: of a conversation, or of any text that comes before it.

        The state of a conversation has a note in its file; one saved by the server has it too.
        """
        state = SavedState.load(path, self._generator.config, device=self._generator.device)
        if len(state) != 1:
            raise ValueError(f"{path} holds the states of {len(state)} texts; one is needed")
        notes = SavedState.read_notes(path)
        exchanges = int(notes.get("exchanges", 0))
        self.clear()
        self._now = _Snapshot(state, "note" in notes, notes.get("note", ""), exchanges)

    def stats(self) -> ChatStats:
        now = self._now
        if now.state is None:
            return ChatStats(0, 0, 0, None)
        return ChatStats(now.exchanges, now.state.tokens_seen[0], now.state.nbytes, now.last)
