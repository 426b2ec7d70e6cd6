"""The server process: its socket, its logs, slow connections, signals and shutdown."""

import asyncio
import errno
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import FrameType
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from xlstm7b import __version__
from xlstm7b.generate.engine import peak_memory
from xlstm7b.serve.handlers import Service
from xlstm7b.serve.middleware import ApiKeys

CLIENT_TIMEOUT = 60.0  # seconds, for request headers to arrive and for a client to read something
_KEEP_ALIVE = 75  # seconds between requests: longer than most clients and proxies keep connections
_MAX_EXTRA_BYTES = 1 << 16  # of a request besides its body: headers, trailers, framing of chunks
_EXTRA_SHARE = 1 / 8  # how much more may come for each byte of the body
_REFUSED_SECONDS = 1.0  # that a connection with more of it waits until it is closed
_MAX_PIPELINED = 16  # requests of a connection that wait for the answer to an earlier one
_BACKLOG = 2048  # connections that wait to be accepted
_MAX_CONNECTIONS = 8192  # fewer if the limit of open files is lower
_OTHER_FILES = 128  # that the process may have open besides connections
_ACCEPTED_AT_ONCE = 16  # then the event loop does other work
_SHUTDOWN_TIMEOUT = 5  # seconds to send what is still in the sockets
_LOG = logging.getLogger("xlstm7b.serve")


def bind(host: str, port: int) -> socket.socket:
    """Binds the port without listening, so that a port in use is reported before weights load."""
    if not host:  # for the operating system that means all addresses
        raise ValueError("--host must not be empty; 0.0.0.0 means all addresses of this machine")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol asyncio sets TCP_NODELAY; without it, responses would lag by 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            message = f"port {port} is already in use; choose another with --port"
        else:
            message = f"cannot listen on {host}, port {port}: {error}"
        raise ValueError(message) from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


LogLevel = Literal["debug", "info", "warning", "error"]


def log_to_stderr(level: LogLevel = "info") -> None:
    """Writes all logs of this process as JSON lines: ours, uvicorn's and Python's warnings.

    At level info, libraries write warnings and errors only.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter())
    libraries = "WARNING" if level == "info" else level.upper()
    logging.basicConfig(handlers=[handler], level=libraries, force=True)
    logging.captureWarnings(True)
    logging.getLogger("xlstm7b").setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(libraries)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def reload_on_hangup(keys: ApiKeys, read: Callable[[], Mapping[str, str]]) -> None:
    """Reads the keys again on SIGHUP. If that fails, the log says why and the old keys stay."""

    def reload() -> None:
        try:
            keys.replace(read())
            _LOG.info(f"reloaded the API keys: there are {len(keys)} now")
        except ValueError as error:
            _LOG.error(f"the API keys were not reloaded: {error}")

    # In a thread: a signal can interrupt a log line, which must not be written into.
    signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=reload, daemon=True).start())


def serve(
    app: FastAPI,
    service: Service,
    bound: socket.socket,
    drain_seconds: float,
    summary: Mapping[str, Any],
) -> None:
    """Serves until a signal. Returns when all requests and threads have ended.

    `summary`: settings for the first line of the log.
    """
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    line = f"serving {service.name} at http://{shown}:{port}"
    _LOG.info(line, extra={"fields": {**_describe(service), **summary}})
    service.engine.start()
    try:
        _Server(server_config(app), service, drain_seconds).run(sockets=[bound])
    finally:
        service.engine.stop()


def _describe(service: Service) -> dict[str, Any]:
    engine = service.engine.engine
    return {
        "version": __version__,
        "models": [model.id for model in service.models],
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "state_dtype": str(engine.state_dtype).removeprefix("torch."),
        "slots": engine.slots,
        "slots_gb": _in_gb(engine.slots * engine.slot_bytes),
        "memory_gb": _in_gb(peak_memory(engine.device)),  # of the GPU, or of this process
    }


def _in_gb(count: int) -> float:
    return float(f"{count / 1e9:.3g}")


def server_config(app: FastAPI, shutdown_timeout: int = _SHUTDOWN_TIMEOUT) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_ACCEPTED_AT_ONCE,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=shutdown_timeout,
    )


class _Server(uvicorn.Server):
    """Drains the engine on the first signal, then exits. A second signal ends the process at once.

    While draining it still answers: new requests get a 503, and /health says "draining".
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(_BACKLOG)  # asyncio has one number for this and for `_ACCEPTED_AT_ONCE`

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining.is_set():
            os._exit(128 + sig)
        self._service.draining.set()
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        _LOG.info("draining: new requests are refused, running ones are finished")
        if self._service.engine.drain(self._drain_seconds):
            _LOG.info("drained")
        else:
            _LOG.info(f"not drained after {self._drain_seconds:g} s: running requests are aborted")
        self.should_exit = True


class _Connection(HttpToolsProtocol):
    """A connection that is closed when its client sends too much besides bodies, or reads nothing.

    uvicorn itself would wait forever. Every CLIENT_TIMEOUT seconds the connection is checked for
    progress since the last check. For each chunk of a stream httptools takes 5 µs less than h11,
    uvicorn's other parser. Unlike h11, it does not limit the size of headers: this class does. It
    counts everything that is not body: trailers and the framing of chunks, too.
    """

    _is_in_headers = False
    _extra_bytes = 0.0  # received since the last message ended, less what its body allows
    _requests = 0  # whose headers have arrived

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made = self.loop.time()
        self._check_progress(0, None)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MAX_CONNECTIONS
        if files != resource.RLIM_INFINITY:
            most = min(most, max(files - _OTHER_FILES, files // 2))
        if len(self.connections) > most:
            self._close_others()

    def _close_others(self) -> None:
        """Closes connections without a request of the address that has most of them.

        The oldest sixteenth, because all connections have to be looked at.
        """
        every = [one for one in self.connections if isinstance(one, _Connection)]
        idle = [one for one in every if one._is_idle() and not one.transport.is_closing()]
        for address, count in Counter(one._address() for one in idle).most_common(1):
            own = sorted(
                (one for one in idle if one._address() == address), key=attrgetter("_made")
            )
            for one in own[: -(-count // 16)]:
                one.transport.abort()

    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _is_idle(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._extra_bytes += len(data)
        super().data_received(data)
        if self._extra_bytes > _MAX_EXTRA_BYTES and not self.transport.is_closing():
            if self._is_in_headers:
                self.send_400_response("The headers are too long.")
            else:  # it is closed later, because a new one would take more of the server's time
                self.transport.pause_reading()
                self.loop.call_later(_REFUSED_SECONDS, self.transport.abort)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # else it is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._requests += 1
        if len(self.pipeline) == _MAX_PIPELINED:
            raise RuntimeError("too many requests before the first one is answered")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        share = 0 if self.cycle.response_complete else _EXTRA_SHARE
        self._extra_bytes -= (1 + share) * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._extra_bytes = 0
        super().on_message_complete()

    def _check_progress(self, last_unsent: int, last_answered: int | None) -> None:
        unsent = self.transport.get_write_buffer_size()
        answered = self._requests if self._is_idle() else None  # None: a request is being answered
        if unsent and unsent == last_unsent:
            self.transport.abort()
        elif answered is not None and answered == last_answered:
            self.timeout_keep_alive_handler()  # no headers since the last check
        self._timer = self.loop.call_later(CLIENT_TIMEOUT, self._check_progress, unsent, answered)
