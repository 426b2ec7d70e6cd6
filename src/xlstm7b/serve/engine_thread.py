"""The thread that runs the engine for the server.

`Engine` is not thread-safe, so only this thread calls it. Other threads leave new requests and
aborts in an inbox, which is emptied before every step.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from xlstm7b.generate import Engine, EngineStats, Request, RequestOutput, RequestStatus

_LOG = logging.getLogger(__name__)
_MAX_RETRY_AFTER = 60.0  # seconds

Receive = Callable[[RequestOutput], None]
_Loop = asyncio.AbstractEventLoop


class QueueFull(RuntimeError):  # noqa: N818
    """Too many requests wait for a slot. Try again after `retry_after` seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the queue is full; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class EngineStopped(RuntimeError):  # noqa: N818
    """The engine accepts no requests, or stopped before this one was finished."""


class EngineFailed(RuntimeError):  # noqa: N818
    """A step raised an exception, which ended all requests."""


class EngineThread:
    """Runs an `Engine` in one thread. Every method may be called from any thread.

    At most `max_waiting` requests may wait for a slot.
    """

    def __init__(self, engine: Engine, max_waiting: int = 256) -> None:
        self.engine, self._max_waiting = engine, max_waiting
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_warm = False
        self.failure: str | None = None  # the exception that ended the engine
        # The condition guards all fields below, and is notified when one of them changes.
        self._changed = threading.Condition()
        self._receivers: dict[Request, tuple[Receive, _Loop | None]] = {}  # unfinished requests
        self._new: list[Request] = []  # not yet added to the engine
        self._aborted: list[Request] = []  # not yet aborted in the engine
        self._refusal: str | None = None  # why new requests are refused
        self._is_stopping = False

    def start(self) -> None:
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """True if the engine is warmed up and running."""
        return self._thread.is_alive() and self._is_warm and self.failure is None

    def stats(self) -> EngineStats:
        with self._changed:
            return replace(self.engine.stats(), waiting=self._count_waiting())

    def submit(self, request: Request, receive: Receive, *, loop: _Loop | None = None) -> Request:
        """Queues a request. Raises `QueueFull` or `EngineStopped`.

        `receive` is called with every output of the request, and must not block. The last output
        has a completion or an error. With `loop`, it is called in that event loop, which is woken
        once per step for the outputs of all requests; without, in the engine thread.
        """
        self.submit_all({request: receive}, loop=loop)
        return request

    def submit_all(
        self, receivers: Mapping[Request, Receive], *, loop: _Loop | None = None
    ) -> None:
        """Queues all requests as `submit` does, or none of them if there is no room for all."""
        with self._changed:
            if self._refusal is not None:
                raise EngineStopped(self._refusal)
            waiting = self._count_waiting()
            if waiting + len(receivers) > self._max_waiting:
                rounds = 1 + waiting / self.engine.slots
                seconds = rounds * self.engine.stats().request_seconds
                raise QueueFull(min(_MAX_RETRY_AFTER, max(1.0, seconds)))
            for request, receive in receivers.items():
                self._receivers[request] = receive, loop
                self._new.append(request)
            self._changed.notify_all()

    def abort(self, request: Request) -> None:
        """Ends a request without a last output. Its slot is free before the next step.

        An output that is being handed over may still arrive.
        """
        with self._changed:
            if self._receivers.pop(request, None) is None:
                return
            if request in self._new:
                self._new.remove(request)
                request.status = RequestStatus.ABORTED
            else:
                self._aborted.append(request)
            self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Refuses new requests, waits for the unfinished ones, then stops.

        Returns True if all of them finished in time.
        """
        with self._changed:
            self._refusal = self._refusal or "the server is shutting down"
            self._changed.wait_for(lambda: self._is_stopping or not self._receivers, seconds)
            finished = not (self._is_stopping or self._receivers)
        self.stop()
        return finished

    def stop(self) -> None:
        """Stops at once. Every unfinished request ends with `EngineStopped`."""
        with self._changed:
            self._refusal = self._refusal or "the server was stopped"
            self._is_stopping = True
            self._changed.notify_all()
        if not self._thread.is_alive():
            self._end_all(EngineStopped("the server was stopped"))
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        error: Exception = EngineStopped("the server was stopped")
        try:
            began = time.monotonic()
            self.engine.warm_up()
            _LOG.info("engine warmed up in %.1f s", time.monotonic() - began)
            self._is_warm = True
            while self._wait_for_work():
                outputs = self._empty_inbox()
                if self.engine.has_requests:
                    outputs += self.engine.step()
                self._deliver(outputs)
        except Exception as failure:
            _LOG.exception("the engine failed")
            self.failure = f"{type(failure).__name__}: {failure}"
            error = EngineFailed(f"a step of the engine failed: {self.failure}")
        with self._changed:
            self._refusal = self._refusal or "the engine failed"
            self._is_stopping = True
        self._end_all(error)
        self.engine.close()

    def _wait_for_work(self) -> bool:
        """Blocks while there is nothing to do. Returns False when the thread should end."""

        def has_work() -> bool:
            inbox = self._new or self._aborted
            return bool(self._is_stopping or inbox or self.engine.has_requests)

        with self._changed:
            self._changed.wait_for(has_work)
            return not self._is_stopping

    def _empty_inbox(self) -> list[RequestOutput]:
        """Applies aborts and adds new requests. Returns an output for each refused request."""
        with self._changed:
            new, self._new = self._new, []
            aborted, self._aborted = self._aborted, []
        for request in aborted:
            self.engine.abort(request)
        refused = []
        for request in new:
            try:
                self.engine.add_request(request)
            except ValueError as error:
                request.status = RequestStatus.FAILED
                refused.append(RequestOutput(request, error=error))
        return refused

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hands over all outputs of a step, with one call per event loop."""
        by_loop: dict[_Loop | None, list[tuple[Receive, RequestOutput]]] = {}
        with self._changed:
            for output in outputs:
                if output.request in self._receivers:  # else it was aborted meanwhile
                    receive, loop = self._receivers[output.request]
                    by_loop.setdefault(loop, []).append((receive, output))
                    if output.finished:
                        del self._receivers[output.request]
        for loop, calls in by_loop.items():
            if loop is None:
                self._call_receivers(calls)
            else:
                with suppress(RuntimeError):  # the loop is closed: nobody waits for outputs
                    loop.call_soon_threadsafe(self._call_receivers, calls)
        with self._changed:
            if not self._receivers:
                self._changed.notify_all()  # `drain` may wait for this

    def _call_receivers(self, calls: Sequence[tuple[Receive, RequestOutput]]) -> None:
        for receive, output in calls:
            try:
                receive(output)
            except Exception:
                _LOG.exception("a request is aborted: its receiver failed")
                self.abort(output.request)

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            unfinished = [*self._receivers]
            self._new.clear()
            self._aborted.clear()
        for request in unfinished:
            request.status = RequestStatus.FAILED
        self._deliver([RequestOutput(request, error=error) for request in unfinished])

    def _count_waiting(self) -> int:
        return sum(request.status is RequestStatus.WAITING for request in self._receivers)
