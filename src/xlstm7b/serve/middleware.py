"""What every request passes before FastAPI parses it: the log, then host, API key and limits.

Both are plain ASGI middleware, which also covers unknown paths and routes added later. FastAPI's
own parts do less: HTTPBearer guards single routes and knows no HTTP Basic, TrustedHostMiddleware
cannot allow every IP address, and neither has error responses in OpenAI's form.
"""

import asyncio
import base64
import binascii
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xlstm7b.serve.prometheus import Metrics
from xlstm7b.serve.protocol import UPLOAD_PATH, ApiError, Limiter, Limits

_LOG = logging.getLogger("xlstm7b.serve")
_OPEN_PATH = "/health"  # needs no key and has no limits: supervisors call it
_CLIENT_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class RequestLog:
    """Gives every request an id and writes a log line when it ends. An exception is a 500.

    A response of 400 and above is a warning, with the reason. `muted`: paths without log lines,
    except for such warnings. `routes` are those of the metrics.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, routes: Sequence[Route], muted: Collection[str] = ()
    ) -> None:
        self._app, self._metrics, self._routes, self._muted = app, metrics, routes, muted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own_id = Headers(scope=scope).get("x-request-id", "")
        if not _CLIENT_ID.fullmatch(own_id):
            own_id = secrets.token_hex(12)
        path = scope["path"][:200]
        fields = {"request_id": own_id, "method": scope["method"], "path": path}
        if scope.get("client"):
            fields["client"] = scope["client"][0]
        scope["xlstm7b.log"] = fields
        status, began = 0, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = own_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _LOG.exception("a request failed", extra={"fields": {"request_id": own_id}})
            if not status:
                response = refuse(scope, ApiError(500, "internal server error"))
                await response(scope, receive, send_with_id)
        finally:
            self._metrics.count_response(self._route(scope["path"]), status)
            seconds = round(time.monotonic() - began, 4)
            fields |= {"status": status, "seconds": seconds}
            # A stream can fail after its status was sent. 499: the client has disconnected.
            is_refused = "error" in fields or (status >= 400 and status != 499)
            if is_refused or path not in self._muted:
                level = logging.WARNING if is_refused else logging.INFO
                _LOG.log(level, "answered", extra={"fields": fields})

    def _route(self, path: str) -> str:
        """The path with names in place of ids. Clients cannot make up more of them."""
        found = (route.path for route in self._routes if route.path_regex.match(path))
        return next(found, "none")


def request_id(http: HTTPConnection) -> str:
    return str(http.scope["xlstm7b.log"]["request_id"])


def add_to_log(http: HTTPConnection, **fields: Any) -> None:
    """Adds fields to the log line of this request."""
    http.scope["xlstm7b.log"].update(fields)


def refuse(scope: Scope, error: ApiError) -> JSONResponse:
    """The response for an error. The log line of the request gives the reason and the field."""
    reason = {"error": error.message, "param": error.param}
    given = {name: value for name, value in reason.items() if value is not None}
    scope.get("xlstm7b.log", {}).update(given)
    return JSONResponse(error.content, error.status, error.headers)


class ApiKeys:
    """The keys that clients may send, with their names for the log.

    Without any, everyone who can connect may use the server.
    """

    def __init__(
        self, names: Mapping[str, str] | None = None, *, share_prefix_cache: bool = False
    ) -> None:
        """`names` of the keys, by key."""
        self._share_prefix_cache = share_prefix_cache
        self.replace(names or {})

    def replace(self, names: Mapping[str, str]) -> None:
        """Takes effect with the next request. Requests that run already are not ended."""
        self._keys = [(key.encode(), name) for key, name in names.items()]

    def __len__(self) -> int:
        return len(self._keys)

    def find_name(self, given: bytes) -> str | None:
        """The name of this key; None if there is no such key, "" if there are no keys at all."""
        keys = self._keys
        if not keys:
            return ""
        # Every key is compared, each in constant time, so that timing reveals nothing.
        found = [name for key, name in keys if hmac.compare_digest(given, key)]
        return found[0] if found else None

    def cache_salt(self, key: str) -> bytes:
        """What keeps the cached prefixes of a key from other keys; empty if they are shared.

        It is a hash of the key, because it outlives a request. It is the same after a restart.
        """
        if self._share_prefix_cache or len(self) < 2:
            return b""
        return hmac.digest(key.encode(), b"xlstm7b prefix cache", "sha256")


class Gate:
    """Checks host and API key, reads bodies within limits, then limits requests at the same time.

    A client is an API key, or an address if there are no keys.

    state_bytes: the most that a file for `UPLOAD_PATH` may have; None if none are taken. The file
        is in the scope as "xlstm7b.upload", not copied.
    local_only: refuse a `Host` header that is neither localhost nor an IP address. A web page can
        let its own host name resolve to this machine (DNS rebinding), and its scripts could then
        read our responses; the browser still sends the page's name. With keys this is not needed:
        the page has no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        keys: ApiKeys,
        *,
        state_bytes: int | None,
        local_only: bool,
    ) -> None:
        self._app, self._limits, self._state_bytes = app, limits, state_bytes
        self._keys, self._local_only = keys, local_only
        self._running = Limiter(limits.requests, "requests", per_client=limits.client_requests)
        most = max(limits.bodies_bytes, 2 * limits.body_bytes, 2 * (state_bytes or 0))
        kind = "MiB of incoming request bodies"
        self._bodies = Limiter(most, kind, per_client=most // 2, unit=1 << 20)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            if scope["path"] == _OPEN_PATH:
                await self._app(scope, receive, send)
                return
            key = self._check_key(scope, headers)
            client = scope["xlstm7b.client"] = key or _network(scope)
            scope["xlstm7b.cache_salt"] = self._keys.cache_salt(key)
            # A request counts when its body is there: many slow ones do not keep others out.
            if (scope["method"], scope["path"]) != ("PUT", UPLOAD_PATH):
                body = await self._read_body(scope["method"], headers, receive, client)
                receive = _replay(bytes(body), receive)
                scope["xlstm7b.body_bytes"] = len(body)
            elif self._state_bytes is not None:
                scope["xlstm7b.upload"] = await self._read_upload(headers, receive, client)
            with self._running.count(client=client):
                await self._app(scope, receive, send)
        except ApiError as error:
            await refuse(scope, error)(scope, receive, send)
        except ClientDisconnect:  # before its body was there
            await Response(status_code=499)(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "localhost")
        if self._local_only and not _is_local(host):
            message = (
                f"the Host header is {host[:80]!r}; a server without an API key only accepts "
                "localhost or an IP address there"
            )
            raise ApiError(403, message)

    def _check_key(self, scope: Scope, headers: Headers) -> str:
        """The key of the request; empty if there are no keys. Its name goes to the log.

        A key is a bearer token, or the password of HTTP Basic, for which browsers ask.

        If the client sent a wrong bearer token, the 401 names bearer tokens as the scheme.
        """
        scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() == b"basic":
            given = _basic_password(given)
        elif scheme.lower() != b"bearer":
            given = b""
        name = self._keys.find_name(given.strip())
        if name is None:
            message = "this API key is wrong" if given else "this server needs an API key"
            error = ApiError(401, message, code="invalid_api_key")
            wanted = "Bearer" if scheme.lower() == b"bearer" and given else "Basic"
            error.headers["www-authenticate"] = f'{wanted} realm="xlstm7b"'
            raise error
        if not name:
            return ""
        scope["xlstm7b.log"]["key_name"] = name
        return given.strip().decode("latin-1")

    async def _read_body(
        self, method: str, headers: Headers, receive: Receive, client: str
    ) -> bytearray:
        max_bytes = self._limits.body_bytes
        too_long = ApiError(413, f"the request body is longer than {max_bytes} bytes")
        length = _length(headers, max_bytes, too_long)
        media_type = _media_type(headers)
        if method == "POST" and media_type != "application/json":
            # Browsers let any page send other types to any server without a preflight request.
            raise ApiError(415, "the content-type header must be application/json")
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise ApiError(415, "the request body must not be compressed (content-encoding)")
        with self._bodies.count(length, client):
            seconds = self._limits.body_seconds
            return await self._receive(receive, max_bytes, too_long, seconds, "the request body")

    async def _read_upload(self, headers: Headers, receive: Receive, client: str) -> bytearray:
        max_bytes, kind = self._state_bytes or 0, "a state of this model"
        if _media_type(headers) == "text/plain":
            max_bytes, kind = self._limits.body_bytes, "a text file"
        too_long = ApiError(413, f"{kind} may have at most {max_bytes} bytes")
        with self._bodies.count(_length(headers, max_bytes, too_long), client):
            seconds = self._limits.upload_seconds
            return await self._receive(receive, max_bytes, too_long, seconds, "the file")

    async def _receive(
        self, receive: Receive, max_bytes: int, too_long: ApiError, seconds: float, kind: str
    ) -> bytearray:
        """The whole body. One that comes too slowly, or not in time, is a 408."""
        slow_seconds, slow_bytes = self._limits.slow_seconds, self._limits.slow_bytes
        loop, body, more = asyncio.get_running_loop(), bytearray(), True
        began = loop.time()
        try:
            async with asyncio.timeout(0) as timeout:
                while more:
                    allowed = min(seconds, slow_seconds + len(body) / slow_bytes)
                    timeout.reschedule(began + allowed)
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > max_bytes:
                        raise too_long
        except TimeoutError as error:
            reason = f"did not arrive within {seconds:g} s"
            if allowed < seconds:
                reason = f"arrived more slowly than {slow_bytes} bytes per second"
            raise ApiError(408, f"{kind} {reason}") from error
        return body


def _network(scope: Scope) -> str:
    """The client's address; for IPv6 its network, because a client has all addresses of it."""
    address = (scope.get("client") or ("", 0))[0]
    return ":".join(address.split(":")[:4]) if ":" in address else address


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _length(headers: Headers, max_bytes: int, too_long: ApiError) -> int:
    """The body's length, or the most that it may be if the headers do not say it."""
    length = headers.get("content-length")
    if length is None:
        return max_bytes if "transfer-encoding" in headers else 0
    if not length.isdecimal() or len(length) > 18 or int(length) > max_bytes:
        raise too_long
    return int(length)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _is_local(host: str) -> bool:
    name = re.sub(r":\d*$", "", host)
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return name.lower() == "localhost"
    return True


def _basic_password(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def check_key(key: str, source: str) -> str:
    """Returns the key if a header can hold it. `source` says in the error where it came from."""
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise ValueError(
            f"{source}: an API key must be printable ASCII without spaces, and not empty"
        )
    return key


def check_origins(origins: Sequence[str]) -> Sequence[str]:
    """Returns the origins if each is `*` or as browsers send it. Any other would never match."""
    for origin in origins:
        if origin != "*" and re.fullmatch(r"https?://[^/?#@\s]+", origin) is None:
            raise ValueError(
                f"{origin!r} is not an origin; write it like https://their.site, or * for all"
            )
    return origins
