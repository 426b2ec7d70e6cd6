"""Work that would hold up the event loop: large bodies and answers, and what is done with them.

A thread alone is not enough. A call into C such as `json.loads` keeps Python's lock to its end, and
with it the event loop and the engine wait. So large answers are encoded in slices, and work on
large bodies rests in between: however many are sent, most tokens of other streams are on time.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pydantic_core
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from xlstm7b.serve.body_errors import invalid_body

SHORT = 4096  # tokens or characters
_LONG = 1 << 16
_REST = 9.0  # times as long as the work before, so that long work takes a tenth of the time
_MOST_REST = 0.5  # seconds
_SLICE = 256  # entries of a list that are encoded at once
_Result = TypeVar("_Result")

_dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class _LongWork:
    """One thread for long work. After each piece it rests, then begins the next."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long")
        self._rests_until = 0.0

    async def run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def _run(self, work: Callable[[], _Result]) -> _Result:
        time.sleep(max(0.0, self._rests_until - time.monotonic()))
        began = time.thread_time()
        try:
            return work()
        finally:
            rest = min(_MOST_REST, _REST * (time.thread_time() - began))
            self._rests_until = time.monotonic() + rest


_LONG_WORK = _LongWork()


async def off_loop(work: Callable[[], _Result], size: int) -> _Result:
    """The result of `work` on `size` tokens or characters, in another thread if they are many.

    For a few of them, the change of threads takes longer than the work.
    """
    if size <= SHORT:
        return work()
    if size > _LONG:  # short work does not wait for it
        return await _LONG_WORK.run(work)
    return await asyncio.to_thread(work)


async def json_response(content: Any, size: int) -> Response:
    """The response with this content, of about `size` tokens or characters."""
    return await off_loop(partial(_SlicedResponse, content), size)


class _SlicedResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        return "".join(_slices(content)).encode()


def _slices(content: Any) -> Iterator[str]:
    """The JSON of objects and lists in pieces, so that other threads can run in between."""
    if isinstance(content, dict):
        start = "{"
        for name, value in content.items():
            yield f"{start}{_dumps(name)}:"
            yield from _slices(value)
            start = ","
        yield "}" if content else "{}"
    elif isinstance(content, list) and len(content) > _SLICE:
        for first in range(0, len(content), _SLICE):
            yield "," if first else "["
            yield _dumps(content[first : first + _SLICE])[1:-1]
        yield "]"
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield "," if number else "["
            yield from _slices(value)
        yield "]" if content else "[]"
    else:
        yield _dumps(content)


class BodyRoute(APIRoute):
    """A route whose large bodies are parsed and checked in another thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        body = self.body_field
        if body is None or body.field_info.annotation is None:
            return handle
        adapter = TypeAdapter[Any](body.field_info.annotation)

        async def handle_in_thread(http: Request) -> Response:
            return await handle(_BodyRequest(http.scope, http.receive, adapter))

        return handle_in_thread


class _BodyRequest(Request):
    def __init__(self, scope: Any, receive: Any, adapter: TypeAdapter[Any]) -> None:
        super().__init__(scope, receive)
        self._adapter = adapter

    async def json(self) -> Any:
        """The JSON of the body; of a large one the checked body, which FastAPI takes as it is."""
        body = await self.body()
        if len(body) <= _LONG:
            return await super().json()
        return await off_loop(partial(self._parse, body), len(body))

    def _parse(self, body: bytes) -> Any:
        try:
            content = pydantic_core.from_json(body)  # takes half as long as `json`, and less memory
        except ValueError:
            content = json.loads(body)  # for its messages, and for halves of surrogate pairs
        try:
            return self._adapter.validate_python(content)
        except ValidationError as error:
            # As FastAPI names the place of an error in the body.
            errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise invalid_body(errors, content) from error
