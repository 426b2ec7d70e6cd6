"""Who may ask, and how much: keys, bodies and requests at once, before anything is parsed."""

import asyncio
import base64
import binascii
import hmac
import ipaddress
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OPEN = "/health"  # the one route without a key: whoever restarts a server has none


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    requests: int = 512  # at once, in whatever stage
    prompt_tokens: int = 1 << 20
    new_tokens: int = 1 << 16
    choices: int = 128
    logprobs: int = 1 << 20  # numbers, of all texts and their echoes


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    @property
    def content(self) -> dict[str, dict[str, str | None]]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        # Half of a surrogate pair in a field's name is text in JSON, and none in UTF-8.
        message = self.message.encode(errors="replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    async def send(self, send: Send) -> None:
        """The whole answer, where there is no application around."""
        body = json.dumps(self.content).encode()
        headers = {
            **self.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


def check_key(key: str, place: str) -> str:
    """An API key that a header can hold, or a `ValueError` that names where it is from."""
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise ValueError(
            f"{place}: an API key must be printable ASCII without spaces, and not empty"
        )
    return key


def check_origins(origins: Sequence[str]) -> Sequence[str]:
    """Origins as browsers send them, or `*`; else a `ValueError`: others would never match."""
    for origin in origins:
        if origin != "*" and re.fullmatch(r"https?://[^/?#@\s]+", origin) is None:
            raise ValueError(f"{origin!r} is not an origin, as https://their.site or *")
    return origins


class KeyCheck:
    """Lets those in who name a key, as a bearer's token or as HTTP Basic's password.

    It stands before all routes: one added tomorrow is behind it. Browsers ask for the password by
    themselves, so that the page gets through; who came with a token is asked for a token.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._keys or self._may_enter(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            error = ApiError(401, "this server needs an API key", code="invalid_api_key")
            scheme = "Bearer" if _authorization(scope).lower().startswith(b"bearer ") else "Basic"
            error.headers["www-authenticate"] = f'{scheme} realm="xlstm7b"'
            await error.send(send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may_enter(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] == _OPEN:
            return True
        given = _given_key(_authorization(scope))
        # All are compared, each in constant time: how long it takes tells nothing.
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0


def _authorization(scope: Scope) -> bytes:
    header: bytes = dict(scope["headers"]).get(b"authorization", b"")
    return header


def _given_key(header: bytes) -> bytes:
    scheme, _, rest = header.partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


class LocalNames:
    """Lets no page in whose own name was made to lead to this machine (DNS rebinding).

    Its browser would take the server for the page's own. Where there are keys, it has none to send.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"host", b"localhost").decode("latin-1")
            if not _is_local_name(given):
                message = "without an API key, this server goes by localhost or its address alone"
                await ApiError(403, message).send(send)
                return
        await self._app(scope, receive, send)


def _is_local_name(host: str) -> bool:
    """Whether it is localhost or an address, with or without a port."""
    name = re.sub(r":\d*$", "", host)
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return name.lower() == "localhost"
    return True


class Admission:
    """Reads bodies within their limits, and keeps the number of requests within theirs."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits, self._inside = app, limits, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == _OPEN:
            await self._app(scope, receive, send)
            return
        if self._inside >= self._limits.requests:
            error = ApiError(429, "the server has too many requests at once", retry_after=1)
            await error.send(send)
            return
        self._inside += 1
        try:
            await self._enter(scope, receive, send)
        finally:
            self._inside -= 1

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            await ApiError(408, "the request's body did not come in time").send(send)
            return
        except ApiError as error:
            await error.send(send)
            return
        if body is None:  # the client has gone
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        most = self._limits.body_bytes
        too_long = ApiError(413, f"the request's body is longer than {most} bytes")
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        if not announced.isdigit() or len(announced) > 18 or int(announced) > most:
            raise too_long
        if scope["method"] == "POST" and _media_type(headers) != b"application/json":
            # What a foreign page can send without the browser asking first is refused.
            raise ApiError(415, "the request's content-type must be application/json")
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > most:
                raise too_long
            if not message.get("more_body", False):
                return bytes(body)


def _media_type(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
