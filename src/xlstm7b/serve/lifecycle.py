"""A server's life: a socket, then requests, then a signal, and what was begun is ended."""

import asyncio
import ipaddress
import os
import socket
import threading
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from xlstm7b.serve.logs import LOGGER
from xlstm7b.serve.work import Service

_LAST_WORDS = 5  # seconds in which what is left in sockets is sent
PATIENCE = 60.0  # seconds, for a request's line and headers, and for a reader that takes nothing
_KEEP_ALIVE = 75  # seconds between requests: longer than most clients and proxies keep connections


def bind(host: str, port: int) -> socket.socket:
    """The socket, not yet listening: a port that is taken is found before the weights are read."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, or asyncio leaves Nagle's algorithm on: answers would lag by 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ValueError(f"{host}:{port} cannot be served at: {error}") from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


class _Connection(H11Protocol):
    """One that ends when the client does nothing: uvicorn itself would wait for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look(self, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self, last_expected_after: object, last_unsent: int) -> None:
        """Looks after it now and then, knowing what it was like the last time."""
        unsent = self.transport.get_write_buffer_size()
        expected_after = self.cycle if self.conn.their_state is h11.IDLE else self
        if unsent and unsent == last_unsent:
            self.transport.abort()
        elif expected_after is last_expected_after is not self:
            self.timeout_keep_alive_handler()  # a request's head has not come since
        self._timer = self.loop.call_later(PATIENCE, self._look, expected_after, unsent)


def server_config(app: FastAPI, last_words: int = _LAST_WORDS) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=last_words,
    )


class _Server(uvicorn.Server):
    """The first signal lets the engine finish, and only then ends the server.

    Until then it answers, so that new requests are told why they are refused, and whoever watches
    /health sees it. A second signal ends the process at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining.is_set():
            os._exit(128 + sig)
        self._service.draining.set()
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        LOGGER.info("draining: new requests are refused, what runs is finished")
        ended = self._service.engine.drain(self._drain_seconds)
        LOGGER.info("drained" if ended else "the time is up: what still runs is given up")
        self.should_exit = True


def serve(app: FastAPI, service: Service, bound: socket.socket, drain_seconds: float) -> None:
    """Answers until a signal; returns when all is ended."""
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    LOGGER.info(f"serving {service.name} at http://{shown}:{port}")
    service.engine.start()
    try:
        _Server(server_config(app), service, drain_seconds).run(sockets=[bound])
    finally:
        service.engine.stop()
