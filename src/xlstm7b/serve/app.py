"""The routes."""

import asyncio
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from xlstm7b import __version__
from xlstm7b.generate.decoder import check_tokens
from xlstm7b.serve.answers import Form
from xlstm7b.serve.completions import answer, read_to_state
from xlstm7b.serve.limits import Admission, ApiError, KeyCheck, LocalNames
from xlstm7b.serve.logs import RequestLog, request_id
from xlstm7b.serve.schema import ChatBody, CompletionBody, ErrorAnswer, IdsBody, TextBody
from xlstm7b.serve.work import Service, chat_work, completion_work, text_ids

_PAGE = {"/": ("index.html", "text/html"), "/app.js": ("app.js", "text/javascript"),
         "/server.js": ("server.js", "text/javascript"),
         "/style.css": ("style.css", "text/css"),
         "/icon.svg": ("icon.svg", "image/svg+xml")}  # fmt: skip
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def create_app(
    service: Service,
    *,
    keys: Sequence[str] = (),
    cors: Sequence[str] = (),
    is_local: bool = False,
) -> FastAPI:
    """The server's application. Without keys, everybody who can connect may ask.

    `is_local`: it listens at a loopback address, for this machine alone.
    """
    app = FastAPI(
        title="xlstm7b",
        version=__version__,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
    )
    # The last one added stands in front of the others.
    app.add_middleware(Admission, limits=service.limits)
    app.add_middleware(KeyCheck, keys=keys)
    if is_local and not keys:
        app.add_middleware(LocalNames)
    app.add_middleware(RequestLog, metrics=service.metrics)
    if cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"]
        )
    _add_error_handlers(app)
    _add_generation(app, service)
    _add_states(app, service)
    _add_watching(app, service)
    _add_page(app)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Continue a text."""
        form = Form(f"cmpl-{request_id(http)}", service.name, chat=False)
        return await answer(service, partial(completion_work, service, body), form, http, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        """Answer in a conversation."""
        form = Form(f"chatcmpl-{request_id(http)}", service.name, chat=True)
        return await answer(service, partial(chat_work, service, body), form, http, body)

    @app.post("/tokenize")
    async def tokenize(body: TextBody) -> dict[str, Any]:
        """The ids of a text, or of a conversation up to its next answer."""
        ids = await text_ids(service, body)
        return {"tokens": ids, "count": len(ids)}

    @app.post("/detokenize")
    async def detokenize(body: IdsBody) -> dict[str, str]:
        """The text of ids."""
        service.check_name(body.model)
        try:
            check_tokens(service.generator.config, body.tokens)
        except ValueError as error:
            raise ApiError(400, str(error), param="tokens") from error
        return {"prompt": service.generator.tokenizer.decode(body.tokens)}


def _add_states(app: FastAPI, service: Service) -> None:
    @app.post("/v1/states")
    async def save_state(body: TextBody, http: Request) -> dict[str, Any]:
        """Read a text or a conversation, and save where that leads."""
        return (await read_to_state(service, body, http)).content

    @app.get("/v1/states")
    async def list_states() -> dict[str, Any]:
        """The saved states, the newest first."""
        saved = await asyncio.to_thread(service.saved().list)
        return {"object": "list", "data": [one.content for one in saved]}

    @app.get("/v1/states/{state_id}")
    async def find_state(state_id: str) -> dict[str, Any]:
        """One saved state."""
        return (await asyncio.to_thread(service.saved().find, state_id)).content

    @app.delete("/v1/states/{state_id}")
    async def delete_state(state_id: str) -> dict[str, Any]:
        """Delete a saved state."""
        await asyncio.to_thread(service.saved().delete, state_id)
        return {"id": state_id, "object": "state", "deleted": True}


def _add_watching(app: FastAPI, service: Service) -> None:
    model = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "xlstm7b",
        "state_bytes": service.state_bytes,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def find_model(name: str) -> dict[str, Any]:
        """The model, by its name."""
        service.check_name(name)
        return model

    @app.head("/health", response_model=None, include_in_schema=False)
    @app.get("/health", response_model=None)
    async def health() -> Response:
        """200 while requests are taken and answered."""
        engine = service.engine
        if engine.failure is not None:
            status = "failed"
        elif service.draining.is_set():
            status = "draining"
        else:
            status = "ok" if engine.healthy else "starting"
        return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    def add(path: str, name: str, kind: str) -> None:
        content = (files("xlstm7b.serve") / "page" / name).read_bytes()

        @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
        async def page() -> Response:
            return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    for path, (name, kind) in _PAGE.items():
        add(path, name, kind)


def _add_error_handlers(app: FastAPI) -> None:
    async def refuse(http: Request, error: ApiError) -> Response:
        return JSONResponse(error.content, status_code=error.status, headers=error.headers)

    async def refuse_body(http: Request, error: RequestValidationError) -> Response:
        # Where several types were tried, the one that came farthest was meant.
        first = max(error.errors(), key=lambda one: len(one["loc"]))
        where = _place(first["loc"][1:], error.body, first["type"] == "missing")[:200]
        where = where.encode(errors="replace").decode()
        message = f"{where}: {first['msg']}" if where else first["msg"]
        return await refuse(http, ApiError(400, message, param=where or None))

    async def refuse_route(http: Request, error: HTTPException) -> Response:
        refusal = ApiError(error.status_code, str(error.detail))
        refusal.headers.update(error.headers or {})
        return await refuse(http, refusal)

    async def leave(http: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # to the log alone

    for kind, handler in (
        (ApiError, refuse),
        (RequestValidationError, refuse_body),
        (HTTPException, refuse_route),
        (ClientDisconnect, leave),
    ):
        app.add_exception_handler(kind, handler)  # type: ignore[arg-type]


def _place(parts: Sequence[str | int], body: Any, is_missing: bool) -> str:
    """Where in the body a mistake is, without the names of types that were tried there."""
    place = []
    for part in parts:
        keys = body if isinstance(body, dict) else range(len(body) if isinstance(body, list) else 0)
        if part in keys:
            body = body[part]
        elif not is_missing:
            continue
        place.append(str(part))
    return ".".join(place)
