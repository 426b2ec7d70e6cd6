"""The routes of the chat page: its files, and Markdown as HTML."""

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from xlstm7b.serve.protocol import ApiError, Body, Json, Limiter, Text

MARKDOWN_PATH = "/markdown"
MAX_MARKDOWN = 1 << 18  # characters of a request
MARKDOWN_SECONDS = 5.0  # of CPU time
_MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from other sites, and HTML only where the page's own policy "markdown" makes it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types markdown"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # the files of two versions do not fit together
}
router = APIRouter()


def page_files() -> list[Route]:
    """A route for each file. StaticFiles at "/" would hide the 405 responses of other routes."""
    routes = []
    for file in (files("xlstm7b.serve") / "page").iterdir():
        path = "/" if file.name == "index.html" else f"/{file.name}"
        media_type = _MEDIA_TYPES[Path(file.name).suffix]
        response = Response(file.read_bytes(), media_type=media_type, headers=_HEADERS)
        routes.append(Route(path, response, methods=["GET"]))  # a response is an ASGI app
    return routes


class MarkdownBody(Body):
    """POST /markdown"""

    texts: Annotated[list[Text], Field(fail_fast=True, max_length=1024)]


@router.post(MARKDOWN_PATH)
async def render_markdown(body: MarkdownBody, http: HttpRequest) -> Json:
    """Markdown texts as HTML, for the chat page: for each text its blocks and their first lines."""
    length = sum(map(len, body.texts))
    if length > MAX_MARKDOWN:
        message = f"the texts have {length} characters together; at most {MAX_MARKDOWN} are allowed"
        raise ApiError(400, message, param="texts")
    return {"texts": await http.app.state.markdown.render(body.texts)}


class MarkdownProcess:
    """The process that renders Markdown. It starts with the first text."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="markdown")
        self._waiting = Limiter(64, "texts to render")

    async def render(self, texts: list[str]) -> list[list[Json]]:
        """The blocks of each text, as `markdown.to_blocks` makes them."""
        with self._waiting.count():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._render, texts)

    def close(self) -> None:
        self._thread.shutdown()
        self._end()

    def _render(self, texts: list[str]) -> list[list[Json]]:
        if self._process is None:
            script = str(Path(__file__).with_name("markdown.py"))
            # -P: a module in the current folder must not take the place of one of Python's.
            command = [sys.executable, "-P", script]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([MARKDOWN_SECONDS, texts]).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self._end()
            raise ApiError(400, "the texts cannot be rendered: they take too long", param="texts")
        return list(json.loads(line))

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # closes its pipes
            self._process = None
