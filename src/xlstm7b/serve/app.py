"""The FastAPI application: routes, middleware and error responses."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from xlstm7b import __version__
from xlstm7b.chat_format import PlainFormat
from xlstm7b.serve.body_errors import invalid_body
from xlstm7b.serve.handlers import Service, router
from xlstm7b.serve.middleware import ApiKeys, Gate, RequestLog, refuse
from xlstm7b.serve.page_routes import MARKDOWN_PATH, MarkdownProcess, page_files
from xlstm7b.serve.page_routes import router as page_router
from xlstm7b.serve.protocol import ApiError, ErrorAnswer
from xlstm7b.serve.responses import StoredResponses
from xlstm7b.serve.responses import router as responses_router
from xlstm7b.serve.state_routes import max_upload_bytes
from xlstm7b.serve.state_routes import router as state_router

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def create_app(
    service: Service,
    *,
    keys: ApiKeys,
    cors: Sequence[str] = (),
    muted: Collection[str] = (),
    is_local: bool = False,
) -> FastAPI:
    """The application.

    muted: paths whose requests have no log line, unless they are refused.
    is_local: the server listens on a loopback address.
    """
    markdown = MarkdownProcess()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        markdown.close()

    app = FastAPI(
        title="xlstm7b",
        version=__version__,
        docs_url=None,  # these pages would load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
    )
    # The last one added is the first one that a request meets.
    app.add_middleware(
        Gate,
        service.limits,
        keys,
        state_bytes=None if service.states is None else max_upload_bytes(service),
        local_only=is_local and not keys,
    )
    # The page asks for Markdown several times a second.
    routes = list[Route]()
    muted = {MARKDOWN_PATH, *muted}
    app.add_middleware(RequestLog, metrics=service.metrics, routes=routes, muted=muted)
    if cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"]
        )
    _add_error_handlers(app)
    app.state.service = service
    app.state.responses = StoredResponses(service.limits.stored_bytes)
    app.state.markdown = markdown
    routers = (router, responses_router, page_router, state_router)
    for part in routers:
        app.include_router(part)
    _add_status_routes(app, service)
    app.routes.extend(page_files())
    found = [route for part in (*routers, app) for route in part.routes]
    routes += [route for route in found if isinstance(route, Route)]
    return app


def _add_status_routes(app: FastAPI, service: Service) -> None:
    models = {
        model.id: {
            "id": model.id,
            "object": "model",
            "created": service.created,
            "owned_by": "xlstm7b",
            "max_model_len": service.limits.prompt_tokens,
            "state_bytes": service.state_bytes,
            "has_chat_template": not isinstance(model.chat_format, PlainFormat),
            "saves_states": service.states is not None,
        }
        for model in service.models
    }

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The model that is served, and after it the model with each adapter."""
        return {"object": "list", "data": [*models.values()]}

    @app.get("/v1/models/{name:path}")
    async def find_model(name: str) -> dict[str, Any]:
        """The model, by its name."""
        return models[service.find_model(name).id]

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """The version of the server."""
        return {"version": __version__}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """The tokenizer and the chat template."""
        config = service.config
        return {
            "tokenizer_class": type(service.tokenizer).__name__,
            "vocab_size": service.tokenizer.vocab_size,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "chat_template": service.chat_format.source,
        }

    @app.post("/v1/embeddings", response_model=None)
    async def embed() -> Response:
        """Not served: this model writes text."""
        raise ApiError(404, "this server has no embeddings: its model only writes text")

    @app.head("/health", response_model=None, include_in_schema=False)
    @app.get("/health", response_model=None)
    async def health() -> Response:
        """200 if requests are accepted and answered."""
        if service.engine.failure is not None:
            status = "failed"
        elif service.draining.is_set():
            status = "draining"
        else:
            status = "ok" if service.engine.healthy else "starting"
        return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(http: Request, error: ApiError) -> Response:
        return refuse(http.scope, error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(http: Request, error: RequestValidationError) -> Response:
        return refuse(http.scope, invalid_body(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def on_http_exception(http: Request, error: HTTPException) -> Response:
        def takes(method: str) -> bool:
            scope = {**http.scope, "method": method}
            return any(route.matches(scope)[0] == Match.FULL for route in app.routes)

        headers = dict(error.headers or {})
        if isinstance(error.__cause__, ApiError):  # of `BodyRoute`
            return refuse(http.scope, error.__cause__)
        match error:
            case HTTPException(__cause__=ValueError() | RecursionError() as cause):
                message = f"the body is not JSON: {cause}"
            case HTTPException(status_code=404):
                message = f"there is nothing at {http.url.path[:80]}"
            case HTTPException(status_code=405):
                # Starlette names only the methods of the first route with this path.
                headers["Allow"] = allowed = ", ".join(filter(takes, _METHODS))
                message = f"{http.url.path[:80]} takes {allowed}, not {http.method[:20]}"
            case _:
                message = str(error.detail)
        api_error = ApiError(error.status_code, message)
        api_error.headers.update(headers)
        return refuse(http.scope, api_error)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(http: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # only the log shows it: the client has disconnected
