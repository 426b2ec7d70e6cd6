"""One round of the engine: a piece of prompt, a token for every running text, and telling of it.

A step's results are looked at when the next is under way, so that a GPU never waits for the host.
By the time that a text is seen to be over, its last token has been read.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from xlstm7b.generate.decoder import Results
from xlstm7b.generate.generator import Generator
from xlstm7b.generate.jobs import Job, Piece
from xlstm7b.generate.prefix_cache import PrefixCache
from xlstm7b.generate.prefix_store import Beginnings, TokenChain
from xlstm7b.generate.slots import Slots
from xlstm7b.generate.states import TextState
from xlstm7b.generate.texts import GrowingText, Speeds, peak_memory

_Result = TypeVar("_Result")


class Scheduler:
    """The texts that have a row each. Only the engine's thread may call it.

    Prompts are cut at multiples of `piece_tokens` from the text's start, unless the rest is short,
    and of `cache_interval`. With `keeps_all` states are stored at the latter, where a prompt parts
    from an earlier one, and at the ends of prompts and texts; without, only what several texts
    that are here share.
    """

    def __init__(
        self,
        generator: Generator,
        slots: Slots,
        cache: PrefixCache,
        *,
        piece_tokens: int,
        cache_interval: int,
        keeps_all: bool,
    ) -> None:
        self._device, self._tokenizer = generator.model.device, generator.tokenizer
        self._slots, self.cache = slots, cache
        self._piece, self._interval, self._keeps_all = piece_tokens, cache_interval, keeps_all
        self._beginnings = Beginnings()
        self.active: dict[Job, None] = {}
        self._reading: deque[Job] = deque()  # in the order of their turns
        self._running: list[Job] = []
        self._under_way: deque[Callable[[], None]] = deque()  # results, and who is to be told
        self._admitted = 0
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = self.steps = 0
        self.seconds = self.model_seconds = 0.0  # of steps that are over
        self._model_seconds = 0.0  # of this one
        self.job_seconds = 1.0  # how long a text has its row, of late

    @property
    def longest_piece(self) -> int:
        """A piece with a rest that is too short for a turn of its own."""
        return self._piece + self._piece // 2

    def admit(self, job: Job) -> None:
        """Gives a text a free row, in which its prompt waits between pieces."""
        job.row = max(self._slots.free)  # those in front are for running texts
        self._slots.free.remove(job.row)
        self._admitted += 1
        job.number, job.admitted = self._admitted, time.monotonic()
        if self._keeps_all and job.chain is not None:
            job.parting = self._beginnings.meet(job.chain)
        self.active[job] = None
        self._reading.append(job)

    def step(self, waiting: Sequence[Job]) -> None:
        """One round; `waiting` are the texts that have no row yet."""
        started, self._model_seconds = time.perf_counter(), 0.0
        for job in [job for job in self.active if job.finished]:
            self._leave(job)
        self._read(waiting)
        later = self._decode()
        while len(self._under_way) > later:
            self._under_way.popleft()()
        if not self.active:
            self._under_way.clear()
        self.steps += 1
        self.seconds += time.perf_counter() - started
        self.model_seconds += self._model_seconds

    def _read(self, waiting: Sequence[Job]) -> None:
        """Reads on in prompts, in turn: one piece, and what more fits into a piece's tokens.

        Where states are stored on the way the model stops, but the turn goes on.
        """
        left = self._piece
        for _ in range(len(self._reading)):
            job = self._reading[0]
            if self._is_read_by_another(job):
                self._reading.rotate(-1)
                continue
            self._slots.load(self._place(job))
            end = self._turn_end(job)
            if end - job.position > left and left < self._piece:
                self._slots.park(job.row)
                return
            left -= end - job.position
            self._reading.popleft()
            while job.position < end:
                self._read_piece(job, min(end, self._next_stored(job)))
                self._store_prompt(job, waiting)
            if job.position < len(job.ids):
                self._slots.park(job.row)
                self._reading.append(job)
            else:
                self._begin(job)

    def _is_read_by_another(self, job: Job) -> bool:
        """Whether a text that came earlier is about to store a longer beginning of this one."""
        if job.chain is None:
            return False
        if job.follows is not None:
            other, end = job.follows
            if not other.finished and other.position < end:
                return True
        job.follows = None
        for other in self._reading:
            if other.number < job.number and other.chain is not None:
                end = min(self._next_stored(other), len(other.ids))
                same = end <= len(job.ids) and other.chain.key(end) == job.chain.key(end)
                if job.position < end and same:
                    job.follows = other, end
                    return True
        return False

    def _next_stored(self, job: Job) -> int:
        if not self._keeps_all:
            return len(job.ids)
        due = (job.position // self._interval + 1) * self._interval
        return min(due, job.parting) if job.parting > job.position else due

    def _place(self, job: Job) -> TextState | int | None:
        """Where the text goes on: from a stored state if one spares reading, else from its own."""
        found = None if job.chain is None else self.cache.longest(job.chain, job.position)
        if found is None:
            return job.row if job.position else job.state
        length, state = found
        job.cached_tokens += length - job.position
        self.cached_tokens += length - job.position
        job.position = length
        return state

    def _turn_end(self, job: Job) -> int:
        if len(job.ids) <= job.position + self.longest_piece:
            return len(job.ids)  # by itself the rest would cost a turn and a pass over the weights
        return (job.position // self._piece + 1) * self._piece

    def _read_piece(self, job: Job, end: int) -> None:
        start, job.position = job.position, end
        piece = job.ids[start:end]
        self.prompt_tokens += len(piece)
        if job.top is None:
            self._in_model(partial(self._slots.read, piece))
            return
        targets = job.request.ids[start + 1 : end + 1]
        read = partial(self._slots.read_scored, piece, targets, job.top)
        self._under_way.append(partial(self._tell_scores, job, targets, self._in_model(read), end))

    def _store_prompt(self, job: Job, waiting: Sequence[Job]) -> None:
        if job.chain is None:
            return
        end, is_whole = job.position, job.position == len(job.ids)
        if self._keeps_all:
            due = is_whole or end % self._interval == 0 or end == job.parting
        else:
            others = (other.chain for other in (*self._reading, *waiting))
            key = job.chain.key(end)
            due = is_whole and any(c and len(c) >= end and c.key(end) == key for c in others)
        if due:
            self.cache.add(job.chain, end, self._slots.read_state())

    def _begin(self, job: Job) -> None:
        """The prompt was read: what is next?"""
        if job.text is None:
            if job.top is None:
                self._finish(job, _nothing(job), self._slots.read_state())
            elif not job.ids:
                self._finish(job, _nothing(job))
            return
        self._slots.release(job.row)
        job.row = min(self._slots.free)
        self._slots.free.remove(job.row)
        request = job.request
        settings, prompt = request.settings, [*request.already_read, *job.ids]
        seed = secrets.randbits(64) if settings.seed is None else settings.seed
        results = self._slots.begin(job.row, settings, seed, prompt, request.already_generated)
        self._running.append(job)
        self._under_way.append(partial(self._tell_tokens, results, [(0, job)]))

    def _decode(self) -> int:
        """Starts a token of every running text; returns how many results are to be waited for."""
        if not self._running:
            return 0
        moved = self._slots.lower_row([job.row for job in self._running])
        for job in self._running:
            if moved is not None and job.row == moved[0]:
                job.row = moved[1]
        results = self._in_model(partial(self._slots.decode, [job.row for job in self._running]))
        rows = [(job.row, job) for job in self._running]
        self._under_way.append(partial(self._tell_tokens, results, rows))
        return 1

    def _tell_tokens(self, results: Results, rows: Sequence[tuple[int, Job]]) -> None:
        tokens, *logprobs = self._in_model(results.lists)
        now = time.monotonic()
        for row, job in rows:
            if job.finished:
                continue
            text = job.text
            assert text is not None
            job.first_token = job.first_token or now
            before = len(text.token_ids)
            try:
                given = text.push(tokens[row], *(part[row] for part in logprobs))
            except FloatingPointError as error:
                job.deliver(error)  # the next step frees its row
                continue
            self.generated_tokens += len(text.token_ids) - before
            wanted = job.request.settings.logprobs
            piece = Piece(
                given,
                (*text.token_ids[before:],),
                () if wanted is None else (*text.logprobs[before:],),
                (*text.top_logprobs[before:],) if wanted else (),
                None,
                job.cached_tokens,
            )
            if text.finish_reason is None:
                job.deliver(piece)
            else:
                self._finish(job, piece, self._end_state(job, text))

    def _tell_scores(self, job: Job, targets: Sequence[int], results: Results, end: int) -> None:
        logprobs, top_logprobs, top_tokens = self._in_model(results.lists)
        top = (dict(zip(*pair, strict=True)) for pair in zip(top_tokens, top_logprobs, strict=True))
        piece = Piece("", (*targets,), (*logprobs,), (*top,), None, 0, len(targets))
        if job.finished:
            return
        if end == len(job.ids) and job.text is None:
            self._finish(job, piece)
        else:
            job.deliver(piece)

    def _end_state(self, job: Job, text: GrowingText) -> TextState | None:
        """The state at the end of a text, if anyone wants it."""
        stored = self._keeps_all and job.chain is not None
        if not stored and not job.keep_state:
            return None
        state = self._slots.view(job.row).clone()
        if stored and text.token_ids:
            chain = TokenChain(text.token_ids, before=job.chain)
            self.cache.add(chain, len(chain), state)
        return state if job.keep_state else None

    def _finish(self, job: Job, piece: Piece, state: TextState | None = None) -> None:
        now = time.monotonic()
        first = job.first_token or now
        prompt_tokens = len(job.request.ids)
        memory = peak_memory(self._device)
        speeds = Speeds(prompt_tokens, first - job.admitted, now - first, memory)
        self.job_seconds += (now - job.admitted - self.job_seconds) / 16
        text = job.text
        if text is None:
            text = GrowingText(self._tokenizer, job.request.settings)
            text.finish("length")
        self._leave(job)
        job.deliver(piece._replace(completion=text.completion(speeds, state)))

    def _leave(self, job: Job) -> None:
        """Frees a text's row, and all else that it holds."""
        self._slots.release(job.row)
        job.state = job.follows = None
        del self.active[job]
        if job in self._running:
            self._running.remove(job)
        elif job in self._reading:
            self._reading.remove(job)

    def _in_model(self, work: Callable[[], _Result]) -> _Result:
        """Does what is the model's work, or waits for it, and takes the time."""
        started = time.perf_counter()
        result = work()
        self._model_seconds += time.perf_counter() - started
        return result


def _nothing(job: Job) -> Piece:
    return Piece("", (), (), (), None, job.cached_tokens)
