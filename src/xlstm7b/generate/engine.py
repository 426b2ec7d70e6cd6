"""Many texts at once, each as if it were alone: continuous batching over a fixed pool of states.

A thread of its own goes round: texts that wait take free rows, a piece of some prompt is read, all
running texts get a token (`scheduler.py`). Here are the queue in front of it, and its life.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from xlstm7b.generate.generator import Generator
from xlstm7b.generate.jobs import EngineFailed, EngineStopped, Job, Piece, QueueFull, Receive
from xlstm7b.generate.prefix_cache import PrefixCache
from xlstm7b.generate.requests import Prompt, Request
from xlstm7b.generate.sampling import SamplingSettings
from xlstm7b.generate.scheduler import Scheduler
from xlstm7b.generate.slots import Slots, fitting_slots, state_bytes
from xlstm7b.generate.state_folder import StateFolder
from xlstm7b.generate.states import TextState
from xlstm7b.generate.texts import GrowingText

__all__ = ["Engine", "EngineFailed", "EngineStats", "EngineStopped", "Job", "Piece", "QueueFull"]

_LOG = logging.getLogger(__name__)
_SHARED = 4  # states kept, even with no cache, for prompts that several waiting texts share
_LONGEST_RETRY = 60.0


@dataclass(frozen=True)
class EngineStats:
    """What the engine did so far, and has at hand."""

    slots: int
    running: int  # texts that have a slot
    waiting: int
    prompt_tokens: int  # read
    generated_tokens: int
    cached_tokens: int  # of prompts, that stored states spared
    cache_hits: dict[str, int]  # by level: device, host, disk
    cache_bytes: dict[str, int]
    steps: int
    seconds: float  # of all steps
    model_seconds: float  # of these, in the model and sampling or waiting for them


class Engine:
    """Continues texts that any thread submits, and tells of them as they grow.

    A text's answer does not depend on what else is going on. `slots` texts run at a time, by
    default as many as the memory holds; `most_waiting` may wait. A long prompt is read
    `piece_tokens` at a time between the others' tokens. States of prompts are stored, every
    `cache_interval` tokens and at their ends, in so many bytes on the device, then on the host,
    then in a folder's files.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        slots: int | None = None,
        most_waiting: int = 256,
        piece_tokens: int = 512,
        cache_bytes: int = 0,
        host_cache_bytes: int = 0,
        cache_folder: Path | None = None,
        cache_folder_bytes: int = 1 << 34,
        cache_interval: int = 2048,
    ) -> None:
        sizes = {"piece_tokens": piece_tokens, "cache_interval": cache_interval}
        for name, size in {**sizes, "slots": 1 if slots is None else slots}.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        self._generator, self._most_waiting = generator, most_waiting
        device_bytes = max(cache_bytes, _SHARED * state_bytes(generator))
        self._slots = Slots(generator, fitting_slots(generator, slots, device_bytes))
        folder = None
        if cache_folder is not None:
            folder = StateFolder(
                cache_folder, generator.model, generator.state_dtype, cache_folder_bytes
            )
        self._scheduler = Scheduler(
            generator,
            self._slots,
            PrefixCache(generator.model.device, device_bytes, host_cache_bytes, folder),
            piece_tokens=piece_tokens,
            cache_interval=cache_interval,
            keeps_all=bool(cache_bytes or host_cache_bytes or cache_folder),
        )
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._refusal: str | None = None  # why no text is taken
        self._stopping = self._warm = False
        self._failure: str | None = None

    def start(self) -> None:
        """Starts the thread, which alone touches the model."""
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether texts that are submitted go on at once: it is warm, and nothing failed."""
        return self._thread.is_alive() and self._warm and self._failure is None

    @property
    def failure(self) -> str | None:
        """What failed, if something did."""
        return self._failure

    def submit(
        self,
        request: Request,
        receive: Receive,
        *,
        state: TextState | None = None,
        keep_state: bool = False,
        score_prompt: bool = False,
    ) -> Job:
        """Hands in a text to continue, on top of a state if there is one.

        With `score_prompt` the pieces begin with the prompt's own tokens as of `submit_logprobs`,
        and as many likeliest as the settings' `logprobs` say.

        Raises a `ValueError` for a request that cannot be, `QueueFull` or `EngineStopped`.
        `receive` is called in the engine's thread and must not block: with pieces, of which the
        last has the completion, or at last with an exception.
        """
        (checked,) = self._generator.check([request], state)
        text = GrowingText(self._generator.tokenizer, checked.settings, checked.stop_strings)
        top = checked.settings.logprobs or 0 if score_prompt else None
        return self._submit(
            checked, receive, state=state, keep_state=keep_state, text=text, top=top
        )

    def submit_logprobs(self, ids: Sequence[int], top: int, receive: Receive) -> Job:
        """Hands in a text whose own tokens are scored: all but its first, which follows nothing.

        Where the model has a first token of its own and the text lacks it, that is all of `ids`.
        The pieces have the tokens, their log-probabilities and those of the `top` likeliest.
        """
        settings = SamplingSettings(logprobs=top)
        (checked,) = self._generator.check([Request(list(ids), settings)], None)
        return self._submit(checked, receive, top=top)

    def read(self, prompt: Prompt, receive: Receive, *, state: TextState | None = None) -> Job:
        """Hands in a text that is only read: its one piece's completion has the state."""
        (checked,) = self._generator.check([Request(prompt)], state)
        return self._submit(checked, receive, state=state, keep_state=True)

    def drain(self, seconds: float) -> bool:
        """Takes no more texts and waits for those that are here; True if all ended. Then stops."""
        end = time.monotonic() + seconds
        with self._changed:
            self._refusal = self._refusal or "it is shutting down"
            ended = self._changed.wait_for(
                lambda: self._stopping or not (self._waiting or self._scheduler.active),
                timeout=max(0.0, end - time.monotonic()),
            )
            ended = ended and not self._stopping
        self.stop()
        return ended

    def stop(self) -> None:
        """Stops at once: every text that is still here ends with `EngineStopped`."""
        with self._changed:
            self._refusal = self._refusal or "it was stopped"
            self._stopping = True
            self._changed.notify_all()
        if not self._thread.is_alive():
            self._end_all(EngineStopped(self._refusal))
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            slots=self._slots.count,
            running=len(scheduler.active),
            waiting=len(self._waiting),
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            cached_tokens=scheduler.cached_tokens,
            cache_hits=dict(scheduler.cache.hits),
            cache_bytes=scheduler.cache.nbytes,
            steps=scheduler.steps,
            seconds=scheduler.seconds,
            model_seconds=scheduler.model_seconds,
        )

    def _submit(
        self,
        request: Request,
        receive: Receive,
        *,
        state: TextState | None = None,
        keep_state: bool = False,
        text: GrowingText | None = None,
        top: int | None = None,
    ) -> Job:
        with self._changed:
            self._check_open()
        job = Job(
            request, receive, self._forget, state=state, keep_state=keep_state, text=text, top=top
        )
        with self._changed:
            self._check_open()  # again: others came, while its hashes were made
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise EngineStopped(self._refusal)
        if len(self._waiting) >= self._most_waiting:
            rounds = 1 + len(self._waiting) / self._slots.count
            raise QueueFull(min(_LONGEST_RETRY, max(1.0, rounds * self._scheduler.job_seconds)))

    def _forget(self, job: Job) -> None:
        """A text was cancelled: it waits no more, or the next step finds it."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self._changed.notify_all()

    def _run(self) -> None:
        error: Exception = EngineStopped("it was stopped")
        try:
            with torch.inference_mode():
                began = time.monotonic()
                self._slots.warm_up(self._scheduler.longest_piece)
                _LOG.info("warm after %.1f s", time.monotonic() - began)
                self._warm = True
                while (waiting := self._admit()) is not None:
                    self._scheduler.step(waiting)
        except Exception as failure:
            _LOG.exception("the engine failed")
            self._failure = f"{type(failure).__name__}: {failure}"
            error = EngineFailed(f"a step of the model failed: {self._failure}")
        with self._changed:
            self._refusal = self._refusal or "it failed"
            self._stopping = True
        self._end_all(error)
        self._scheduler.cache.close()

    def _admit(self) -> tuple[Job, ...] | None:
        """Gives free rows to those who came first; who waits on, or None to stop.

        While nobody is here, it waits.
        """
        active, free = self._scheduler.active, self._slots.free
        with self._changed:
            if not active:
                self._changed.notify_all()  # drain may wait for that
            while not (self._stopping or self._waiting or active):
                self._changed.wait()
            while self._waiting and free and not self._stopping:
                self._scheduler.admit(self._waiting.popleft())
            return None if self._stopping else tuple(self._waiting)

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            left = [*self._scheduler.active, *self._waiting]
            self._waiting.clear()
            self._scheduler.active.clear()
            self._changed.notify_all()
        for job in left:
            job.deliver(error)
