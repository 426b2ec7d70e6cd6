"""From the engine's thread to clients: pieces of texts as they come, events as they are written.

The engine never waits for a reader. One that falls far behind loses its stream; of one that stops
reading, the connection is closed (`lifecycle.py`).
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xlstm7b.generate.engine import EngineStopped, Job, Piece, QueueFull
from xlstm7b.serve.limits import ApiError
from xlstm7b.serve.metrics import Metrics

FAR_BEHIND = 4096  # pieces that wait for their reader, besides what the sockets hold

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_News = Piece | Exception
_Result = TypeVar("_Result")


@dataclass
class _Timing:
    submitted: float
    last_token: float | None = None


class Outbox:
    """What the engine's thread has to say to the event loop, which is woken once for all of it."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def put(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Has something called in the loop; in the order in which it was put."""
        self._calls.append(call)
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop has ended, and all requests with it
                loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._is_woken = False  # first: what is put from now on wakes the loop again
        while self._calls:
            self._calls.popleft()()


class Texts:
    """The texts that one request waits for: jobs of the engine, and what it says of them."""

    def __init__(self, metrics: Metrics, outbox: Outbox) -> None:
        self._loop, self._outbox = asyncio.get_running_loop(), outbox
        self._waiting: list[tuple[int, _News]] = []
        self._arrived = asyncio.Event()
        self._metrics = metrics
        self._jobs: list[Job] = []
        self._timings: list[_Timing] = []
        self._unfinished = 0
        self._fell_behind = False

    def submit(self, submit: Callable[[Callable[[_News], None]], Job]) -> None:
        """Gives the engine one more text; an `ApiError` takes back all of them."""
        index = len(self._jobs)

        def receive(news: _News) -> None:  # called in the engine's thread
            self._outbox.put(self._loop, partial(self._put, index, news))

        self._timings.append(_Timing(time.monotonic()))
        try:
            self._jobs.append(submit(receive))
        except (ValueError, QueueFull, EngineStopped) as error:
            self.cancel()
            raise to_api_error(error) from error
        self._unfinished += 1

    def cancel(self) -> None:
        """Frees what the unfinished texts hold."""
        for job in self._jobs:
            job.cancel()
        if self._unfinished:
            self._metrics.aborted(self._unfinished)
            self._unfinished = 0

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(which text, what it grew by) until all have ended; an `ApiError` if one cannot.

        What has come since it was last asked for is one piece of each text: under load clients get
        fewer chunks of more tokens, and the server has less to do.
        """
        while self._unfinished or self._waiting:
            await self._arrived.wait()
            self._arrived.clear()
            waiting, self._waiting = self._waiting, []
            grown: dict[int, list[Piece]] = {}
            failure: Exception | None = None
            for index, news in waiting:
                if isinstance(news, Piece):
                    grown.setdefault(index, []).append(news)
                else:
                    failure = failure or news
            for index, pieces in grown.items():
                yield index, Piece.joined(pieces)
            if failure is not None:
                self.cancel()
                raise to_api_error(failure)
        if self._fell_behind:
            raise ApiError(408, "the stream ended because its reader fell too far behind")

    def _put(self, index: int, news: _News) -> None:
        if not self._unfinished:  # cancelled while this was on its way
            return
        if isinstance(news, Piece):
            self._measure(self._timings[index], news)
        if len(self._waiting) < FAR_BEHIND:
            self._waiting.append((index, news))
            self._arrived.set()
        else:
            self._fell_behind = True
            self.cancel()

    def _measure(self, timing: _Timing, piece: Piece) -> None:
        now = time.monotonic()
        if len(piece.token_ids) > piece.scored_tokens:
            if timing.last_token is None:
                self._metrics.first_token(now - timing.submitted)
            else:
                self._metrics.next_token(now - timing.last_token)
            timing.last_token = now
        if piece.completion is not None:
            self._unfinished -= 1
            self._metrics.finished(piece.completion.finish_reason, now - timing.submitted)


def to_api_error(error: Exception) -> ApiError:
    """What a client is told; never a path or a trace."""
    match error:
        case ApiError():
            return error
        case ValueError():  # of a request that was checked before it was taken
            return ApiError(400, str(error))
        case QueueFull():
            return ApiError(429, "the server's queue is full", retry_after=error.retry_after)
        case EngineStopped():
            return ApiError(503, f"the server is not available: {error.reason}", retry_after=5)
        case _:
            return ApiError(500, "the model failed while this request was in flight")


async def or_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """What the work gives. If the client leaves first, the work ends: `ClientDisconnect`."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_leaving(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. However it ends, `at_the_end` is closed, and `ended` says how."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self.at_the_end = events, ExitStack()
        self.ended: Literal["whole", "error", "abort"] = "abort"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.at_the_end, suppress(ClientDisconnect):
            await or_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )

        async def tell(data: str) -> None:
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        failure: Exception | None = None
        try:
            async for event in self._events:
                await tell(_to_json(event))
            await tell("[DONE]")
            self.ended = "whole"
        except Exception as error:
            failure, self.ended = error, "error"
            known = error if isinstance(error, ApiError) else ApiError(500, "the server failed")
            await tell(_to_json(known.content))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if failure is not None and not isinstance(failure, ApiError):
            raise failure  # to the log
