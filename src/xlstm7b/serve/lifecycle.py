"""A server's life: a socket, then requests, then a signal, and what was begun is ended."""

import ipaddress
import os
import socket
import threading
from types import FrameType

import uvicorn
from fastapi import FastAPI

from xlstm7b.serve.logs import LOGGER, log_to_stderr
from xlstm7b.serve.work import Service

_LAST_WORDS = 5  # seconds in which what is left in sockets is sent


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
    log_to_stderr()
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_WORDS,
    )
    service.engine.start()
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    LOGGER.info(f"serving {service.name} at http://{shown}:{port}")
    try:
        _Server(config, service, drain_seconds).run(sockets=[bound])
    finally:
        service.engine.stop()
