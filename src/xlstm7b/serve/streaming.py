"""Outputs on their way from the engine thread to a client: queued, merged, sent as events.

The engine never waits for a client. Outputs for a slow client are merged. If more than MAX_QUEUED
wait, the stream ends. If a client reads nothing, its connection is closed (`server.py`).
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from xlstm7b.generate.request import Request, RequestOutput
from xlstm7b.generate.structured import StructuredOutputError
from xlstm7b.serve.engine_thread import EngineStopped, EngineThread, QueueFull
from xlstm7b.serve.prometheus import Metrics
from xlstm7b.serve.protocol import ApiError, Json

MAX_QUEUED = 4096  # outputs that wait for their client, not counting what the sockets hold
QUIET_SECONDS = 10.0  # without an event, until a comment says that the connection lives

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_Result = TypeVar("_Result")


class OutputQueue:
    """The engine requests of one HTTP request, and the outputs that the handler has not read yet.

    It belongs to one event loop.
    """

    def __init__(self, engine: EngineThread, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._loop = asyncio.get_running_loop()
        self._requests: list[Request] = []
        self._submitted = 0.0  # time
        self._last_token: list[float | None] = []  # time of each request's latest token
        self._outputs: list[tuple[int, RequestOutput]] = []
        self._arrived = asyncio.Event()
        self._unfinished = 0
        self._is_too_slow = False

    def submit(self, requests: Sequence[Request]) -> None:
        """Submits all requests, or none of them if there is no room for all: an `ApiError`."""
        self._submitted = time.monotonic()
        self._last_token = [None] * len(requests)
        receivers = {request: partial(self._put, index) for index, request in enumerate(requests)}
        try:
            self._engine.submit_all(receivers, loop=self._loop)
        except (QueueFull, EngineStopped) as error:
            raise to_api_error(error) from error
        self._requests, self._unfinished = [*requests], len(requests)

    def abort(self) -> None:
        """Aborts all unfinished requests."""
        if self._unfinished:
            for request in self._requests:
                self._engine.abort(request)
            self._metrics.aborted.inc(self._unfinished)
            self._unfinished = 0

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yields (index of the request, output) until all are finished; `ApiError` if one fails.

        All outputs that one request had since the last call are merged into one. Under load clients
        get fewer chunks with more tokens, and the server has less to do.
        """
        while self._unfinished or self._outputs:
            await self._arrived.wait()
            self._arrived.clear()
            arrived, self._outputs = self._outputs, []
            by_request: dict[int, list[RequestOutput]] = {}
            failure: Exception | None = None
            for index, output in arrived:
                if output.error is None:
                    by_request.setdefault(index, []).append(output)
                else:
                    failure = failure or output.error
            for index, outputs in by_request.items():
                yield index, RequestOutput.merge(outputs)
            if failure is not None:
                self.abort()
                raise to_api_error(failure)
        if self._is_too_slow:
            raise ApiError(408, "the stream ended because the client read it too slowly")

    def _put(self, index: int, output: RequestOutput) -> None:
        """Called in the event loop, for every output of the engine."""
        if not self._unfinished:  # aborted while this was on its way
            return
        self._measure(index, output)
        if len(self._outputs) < MAX_QUEUED:
            self._outputs.append((index, output))
            self._arrived.set()
        else:
            self._is_too_slow = True
            self.abort()

    def _measure(self, index: int, output: RequestOutput) -> None:
        now, last = time.monotonic(), self._last_token[index]
        if last is None and (output.token_ids or output.completion is not None):
            self._metrics.prompt_tokens.inc(len(output.request.prompt_token_ids))
        if output.token_ids:
            if last is None:
                self._metrics.first_token.observe(now - self._submitted)
            else:
                self._metrics.next_token.observe(now - last)
            self._last_token[index] = now
        if output.completion is not None:
            self._unfinished -= 1
            self._metrics.count_finished(output.completion.finish_reason)
            self._metrics.queue_time.observe(output.request.admitted - self._submitted)
            self._metrics.request.observe(now - self._submitted)


def to_api_error(error: Exception) -> ApiError:
    """The error as the client sees it. It never shows a path or a traceback."""
    match error:
        case QueueFull():
            return ApiError(429, "the queue is full", retry_after=error.retry_after)
        case EngineStopped():
            return ApiError(503, f"the server is not available: {error}", retry_after=5)
        case StructuredOutputError():
            return ApiError(400, str(error), param="structured_outputs")
        case _:
            return ApiError(500, "the model failed while this request was running")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`. If the client disconnects first, cancels it: `ClientDisconnect`."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events, ended by [DONE] or by an error event.

    are_named: each event has a "type", which is its name. Their own last event ends the stream: it
        also reports errors.

    While there is no event, as during a long prompt, comments keep the connection alive: clients
    skip them.

    `cleanup` is closed however the stream ends. `outcome` says how it ended, for the log.
    FastAPI's EventSourceResponse has no error events, more work per event, and cleans up only when
    its generator is garbage collected.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Json], *, are_named: bool = False) -> None:
        super().__init__((), headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._are_named = are_named
        self._events, self.cleanup = events, ExitStack()
        self.outcome = {"ended": "abort"}  # or "whole", or "error" with the reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.cleanup:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        now = asyncio.get_running_loop().time
        latest = now()

        async def send_text(text: str) -> None:
            nonlocal latest
            latest = now()
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        async def keep_alive() -> None:
            while True:
                quiet = now() - latest
                if quiet >= QUIET_SECONDS:
                    await send_text(": keep-alive\n\n")
                else:
                    await asyncio.sleep(QUIET_SECONDS - quiet)

        failure: Exception | None = None
        keeping_alive = asyncio.ensure_future(keep_alive())
        try:
            async for event in self._events:
                name = f"event: {event['type']}\n" if self._are_named else ""
                await send_text(f"{name}data: {_to_json(event)}\n\n")
            if not self._are_named:
                await send_text("data: [DONE]\n\n")
            self.outcome = {"ended": "whole"}
        except Exception as error:
            failure = error
            known = error if isinstance(error, ApiError) else ApiError(500, "internal server error")
            self.outcome = {"ended": "error", "error": known.message}
            if not self._are_named:
                await send_text(f"data: {_to_json(known.content)}\n\n")
        finally:
            keeping_alive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if failure is not None and not isinstance(failure, ApiError):
            raise failure  # for the request log
