"""Logs as lines of JSON on stderr, one a request, each with its id; faults end here."""

import json
import logging
import re
import secrets
import time
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xlstm7b.serve.limits import ApiError
from xlstm7b.serve.metrics import Metrics

LOGGER = logging.getLogger("xlstm7b.serve")
_GIVEN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class JsonLines(logging.Formatter):
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


def log_to_stderr() -> None:
    """All that this process logs: ours, the engine's, uvicorn's, Python's warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    logging.getLogger("xlstm7b").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it asks for its own level


def request_id(http: HTTPConnection) -> str:
    return str(http.scope["xlstm7b.log"]["request_id"])


def noted(http: HTTPConnection, **fields: Any) -> None:
    """What the request's line will say besides."""
    http.scope["xlstm7b.log"].update(fields)


class RequestLog:
    """Gives every request an id, and writes a line when it is over. An exception is a 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        own = given if _GIVEN_ID.fullmatch(given) else secrets.token_hex(12)
        log = scope["xlstm7b.log"] = {
            "request_id": own,
            "method": scope["method"],
            "path": scope["path"][:200],
        }
        status, began = 0, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = own
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            LOGGER.exception("a request failed", extra={"fields": {"request_id": own}})
            if not status:
                await ApiError(500, "the server failed").send(send_with_id)
        finally:
            self._metrics.answered(status)
            fields = {**log, "status": status, "seconds": round(time.monotonic() - began, 4)}
            LOGGER.info("answered", extra={"fields": fields})
