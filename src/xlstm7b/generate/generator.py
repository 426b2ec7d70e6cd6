"""`Generator`: prompts in, completions out, with their speeds."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from xlstm7b.generate.batch import Step, continued, read_prompts, taken
from xlstm7b.generate.decoder import Decoder, check_tokens, with_first_token
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.requests import Prompt, Request, common_requests
from xlstm7b.generate.states import TextState
from xlstm7b.generate.texts import Completion
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import Tokenizer, load_tokenizer
from xlstm7b.weights import read_config, resolve


class Piece(NamedTuple):
    """What one token added to a streamed text; the last piece has the whole completion."""

    text: str
    token_id: int
    completion: Completion | None


class Generator:
    """A model and its tokenizer, ready to generate.

    Any `XLSTM` will do; its weights are fused in place. States are kept in `state_dtype`.
    """

    def __init__(
        self,
        model: XLSTM,
        tokenizer: Tokenizer,
        *,
        state_dtype: torch.dtype = torch.float32,
        batch_size: int = 32,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype must be float32 or bfloat16, not {state_dtype}")
        self.config, self.tokenizer = model.config, tokenizer
        self.model = FusedModel(model)
        self.state_dtype, self.batch_size = state_dtype, batch_size
        self._idle: dict[int, Decoder] = {}

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        *,
        tokenizer: str | Path | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        state_dtype: torch.dtype = torch.float32,
        batch_size: int = 32,
    ) -> Self:
        """Loads a checkpoint folder or hub id with the tokenizer that is in it.

        By default on a GPU if there is one, in bfloat16; else on the CPU, in the dtype stored.
        """
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if dtype is None and where.type == "cuda":
            dtype = torch.bfloat16
        folder = resolve(folder_or_hub_id)
        text = load_tokenizer(tokenizer or folder, read_config(folder).vocab_size)
        model = XLSTM.from_pretrained(folder, dtype=dtype, device=where)
        return cls(model, text, state_dtype=state_dtype, batch_size=batch_size)

    def generate(
        self,
        prompts: str | Sequence[Prompt] | None = None,
        *,
        state: TextState | None = None,
        num_return_sequences: int = 1,
        stop_strings: str | Sequence[str] = (),
        keep_state: bool = False,
        done: Callable[[int, Completion], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> list[Completion]:
        """Continues every prompt, `num_return_sequences` times each, in the prompts' order.

        Settings are those of `SamplingSettings`, and `do_sample=False` for temperature 0. With
        `state`, prompt r is read on top of its row r; without prompts its texts go on as they are.
        With `keep_state` each completion carries its state, which has read all of its tokens.
        `done` and `should_stop` are as in `run`.
        """
        requests = self.requests(prompts, state=state, stop_strings=stop_strings, **settings)
        if num_return_sequences < 1:
            raise ValueError(f"num_return_sequences must be at least 1, not {num_return_sequences}")
        if num_return_sequences == 1:
            return self.run(
                requests, state=state, keep_state=keep_state, done=done, should_stop=should_stop
            )
        requests = self.check(requests, state)
        started = time.perf_counter()
        place = self.read([request.prompt for request in requests], state=state)
        speed = sum(len(request.ids) for request in requests) / (time.perf_counter() - started)
        several = [
            request.once_read().nth(n) for request in requests for n in range(num_return_sequences)
        ]
        finished = self._finished(several, place, keep_state, should_stop, num_return_sequences)
        with_prompt = (
            (
                index,
                replace(
                    completion,
                    prompt_tokens=len(several[index].already_read),
                    prompt_tokens_per_second=speed,
                ),
            )
            for index, completion in finished
        )
        return _collected(with_prompt, done)

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        state: TextState | None = None,
        stop_strings: str | Sequence[str] = (),
        keep_state: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] | None = None,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Continues one prompt piece by piece. A mistake raises here, not at the first piece.

        `should_stop` is asked at every token: True ends the text there. `progress` is told how many
        tokens of the prompt were just read.
        """
        prompts = None if prompt is None else [prompt]
        requests = self.requests(prompts, state=state, stop_strings=stop_strings, **settings)
        if len(requests) != 1:
            raise ValueError(f"one text can be streamed, not {len(requests)}")
        checked = self.check(requests, state)
        steps = self._steps(checked, state, keep_state, should_stop, progress)
        return (Piece(*pieces[0][1:]) for pieces in steps)

    def read(
        self,
        prompts: str | Sequence[Prompt],
        *,
        state: TextState | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> TextState:
        """Reads prompts, on top of a state if there is one, and returns where that leads.

        `progress` is told how many tokens were just read.
        """
        requests = self.check(self.requests(prompts, state=state), state)
        parts = []
        for group, start in self._groups(requests, state):
            with self._decoder(len(group)) as decoder:
                order = read_prompts(decoder, group, start, progress)
                back = sorted(range(len(order)), key=order.__getitem__)
                parts.append(taken(decoder, back))
        return TextState.join(parts)

    def run(
        self,
        requests: Sequence[Request],
        *,
        state: TextState | None = None,
        keep_state: bool = False,
        done: Callable[[int, Completion], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Completes requests, each by its own settings, at most `batch_size` of them at a time.

        `done` is told of every completion, with its request's index, as soon as it is there.
        `should_stop` is asked at every token: True ends the texts there, and begins no more.
        """
        checked = self.check(requests, state)
        return _collected(self._finished(checked, state, keep_state, should_stop), done)

    def _finished(
        self,
        requests: Sequence[Request],
        state: TextState | None,
        keep_state: bool,
        should_stop: Callable[[], bool],
        copies: int = 1,
    ) -> Iterator[tuple[int, Completion]]:
        """Completions with their requests' indices, as they come."""
        first = 0
        for group, start in self._groups(requests, state, copies):
            if first and should_stop():
                return
            for pieces in self._steps(group, start, keep_state, should_stop):
                for row, _, _, completion in pieces:
                    if completion is not None:
                        yield first + row, completion
            first += len(group)

    def requests(
        self,
        prompts: str | Sequence[Prompt] | None,
        *,
        state: TextState | None = None,
        stop_strings: str | Sequence[str] = (),
        **settings: Any,
    ) -> list[Request]:
        """Prompts under common settings; with a state and no prompts, its rows as they are."""
        if prompts is None:
            if state is None:
                raise ValueError("there is nothing to continue: give a prompt or a state")
            prompts = [()] * len(state)
        return common_requests(prompts, stop_strings, settings)

    def check(self, requests: Sequence[Request], state: TextState | None) -> list[Request]:
        """The requests with their prompts as ids and all settings filled in, or a `ValueError`."""
        if state is not None and state.config != self.config:
            raise ValueError("the state is of another model")
        if state is not None and len(state) != len(requests):
            raise ValueError(f"prompts: {len(requests)}, but the state's rows: {len(state)}")
        checked = []
        for request in requests:
            settings, prompt = request.settings, request.prompt
            if settings.eos_token_id is None:
                settings = replace(settings, eos_token_id=self.config.eos_token_id)
            settings.check(self.config.vocab_size)
            if isinstance(request.stop_strings, str):
                raise ValueError("a request's stop_strings must be a tuple of strings")
            if not all(request.stop_strings):
                raise ValueError("a stop string must not be empty")
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            check_tokens(self.config, ids)
            if state is None:
                ids = with_first_token(self.config, ids)
            checked.append(replace(request, prompt=ids, settings=settings))
        return checked

    def _groups(
        self, requests: Sequence[Request], state: TextState | None, copies: int = 1
    ) -> Iterator[tuple[Sequence[Request], TextState | None]]:
        """Requests with their places; each row of the state is that of `copies` requests."""
        if 0 < len(requests) <= self.batch_size and copies == 1:
            yield requests, state
            return
        for start in range(0, len(requests), self.batch_size):
            group = requests[start : start + self.batch_size]
            rows = [(start + index) // copies for index in range(len(group))]
            yield group, None if state is None else state.select(rows)

    @contextmanager
    def _decoder(self, batch: int) -> Iterator[Decoder]:
        """A decoder for so many rows, nobody else's for a while: two streams may be read in turn.

        Two are kept for the next time: one row's, and the last one of more.
        """
        decoder = self._idle.pop(batch, None)
        if decoder is None:
            # What is let go makes room for what comes.
            self._idle = {rows: kept for rows, kept in self._idle.items() if rows == 1}
            decoder = Decoder(self.model, batch, state_dtype=self.state_dtype)
        try:
            yield decoder
        finally:
            self._idle[batch] = decoder

    def _steps(
        self,
        requests: Sequence[Request],
        state: TextState | None,
        keep_state: bool,
        should_stop: Callable[[], bool],
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[list[Step]]:
        with self._decoder(len(requests)) as decoder:
            started = time.perf_counter()
            order = read_prompts(decoder, requests, state, progress)
            yield from continued(
                decoder, self.tokenizer, order, requests, keep_state, should_stop, started
            )


def _collected(
    finished: Iterator[tuple[int, Completion]], done: Callable[[int, Completion], None] | None
) -> list[Completion]:
    """Completions in their requests' order, when all have come."""
    completions: dict[int, Completion] = {}
    for index, completion in finished:
        completions[index] = completion
        if done is not None:
            done(index, completion)
    return [completions[index] for index in sorted(completions)]
