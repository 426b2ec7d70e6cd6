"""/v1/states: read texts into states, and list, label, download, upload and delete them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from xlstm7b.generate import Completion, Request
from xlstm7b.generate.state import StateLabel, StoredState, state_bytes
from xlstm7b.serve import protocol
from xlstm7b.serve.handlers import ServedModel, Service, reading_request
from xlstm7b.serve.middleware import add_to_log
from xlstm7b.serve.off_loop import BodyRoute
from xlstm7b.serve.protocol import ApiError, Json, StateBody, UploadQuery
from xlstm7b.serve.saved_states import save_in_thread
from xlstm7b.serve.streaming import EventStream, OutputQueue, cancel_on_disconnect

router = APIRouter(route_class=BodyRoute)
_MAX_STATE_HEADER = 1 << 20  # bytes of a state file besides its numbers
_PROGRESS_SECONDS = 0.25  # between two events
_PIECE = 1 << 20  # bytes of a download


def max_upload_bytes(service: Service) -> int:
    """The most bytes that a state file may have."""
    return state_bytes(service.config) + _MAX_STATE_HEADER


@router.post("/v1/states", response_model=None)
async def save_state(body: StateBody, http: HttpRequest) -> Response:
    """Read a text or a conversation, perhaps after another state, and save the state after it."""
    return await _read_and_save(http.app.state.service, body, http)


@router.put(protocol.UPLOAD_PATH, response_model=None)
async def upload_file(query: Annotated[UploadQuery, Query()], http: HttpRequest) -> Response:
    """Save a state file, or read a text file (content-type text/plain) and save its state."""
    service: Service = http.app.state.service
    states, content = service.saved_states(), http.scope["xlstm7b.upload"]
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == "text/plain":
        try:
            prompt = await asyncio.to_thread(content.decode, "utf-8-sig")
        except UnicodeDecodeError as error:
            wrong = f"byte 0x{content[error.start]:02x} at position {error.start}"
            raise ApiError(400, f"the file is not UTF-8 text: {wrong}") from error
        return await _read_and_save(service, StateBody(prompt=prompt, **query.given()), http)
    for name in query.given().keys() & {"model", "state", "stream"}:
        raise ApiError(400, f"{name} is for text files: send content-type text/plain", param=name)
    with service.hold_states(2, http):  # the file and its state
        adapters = [model.fingerprint for model in service.models]
        stored = await save_in_thread(states.upload, content, _label(query), adapters)
        return JSONResponse(_describe(service, stored))


@router.get("/v1/states")
async def list_states(
    query: Annotated[protocol.ListQuery, Query()], http: HttpRequest
) -> dict[str, Any]:
    """Saved states, newest first."""
    service: Service = http.app.state.service
    page = partial(service.saved_states().list, query.limit, query.after, query.tag)
    found, has_more = await asyncio.to_thread(page)
    return {
        "object": "list",
        "data": [_describe(service, stored) for stored in found],
        "first_id": found[0].name if found else None,
        "last_id": found[-1].name if found else None,
        "has_more": has_more,
    }


@router.get("/v1/states/{state_id}")
async def find_state(state_id: str, http: HttpRequest) -> dict[str, Any]:
    """One saved state."""
    service: Service = http.app.state.service
    return _describe(service, await asyncio.to_thread(service.saved_states().find, state_id))


@router.get("/v1/states/{state_id}/content", response_model=None)
async def download_state(state_id: str, http: HttpRequest) -> Response:
    """The file of a saved state."""
    service: Service = http.app.state.service
    file = await asyncio.to_thread(service.saved_states().open, state_id)
    size = os.fstat(file.fileno()).st_size
    headers = {
        "content-length": str(size),
        "content-disposition": f'attachment; filename="{state_id}.safetensors"',
    }
    pieces = _pieces(file, size)
    return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")


@router.patch("/v1/states/{state_id}")
async def label_state(state_id: str, body: protocol.LabelBody, http: HttpRequest) -> dict[str, Any]:
    """Change the name, the tags or the expiry of a saved state."""
    service: Service = http.app.state.service
    change = partial(service.saved_states().change_label, state_id, partial(_label, body))
    return _describe(service, await save_in_thread(change))


@router.delete("/v1/states/{state_id}")
async def delete_state(state_id: str, http: HttpRequest) -> dict[str, Any]:
    """Delete a saved state."""
    await asyncio.to_thread(http.app.state.service.saved_states().delete, state_id)
    return {"id": state_id, "object": "state", "deleted": True}


async def _read_and_save(service: Service, body: StateBody, http: HttpRequest) -> Response:
    """Reads the body's text. If the client disconnects first, nothing is saved."""
    states, model = service.saved_states(), service.find_model(body.model)
    with ExitStack() as cleanup:
        cleanup.enter_context(service.hold_states(1 + (body.state is not None), http))
        await asyncio.to_thread(states.check_room, service.state_bytes)
        state, already_read = None, ""
        if body.state is not None:
            load = partial(states.load, body.state, model.fingerprint)
            state, already_read = await asyncio.to_thread(load)
        salt: bytes = http.scope["xlstm7b.cache_salt"]
        request, after = await reading_request(service, body, state, already_read, salt)
        reading = _Reading(service, request, after, model, body)
        cleanup.callback(reading.abort)
        cleanup.callback(lambda: add_to_log(http, **reading.usage()))
        if body.stream:
            stream = EventStream(reading.events())
            cleanup.callback(lambda: add_to_log(http, **stream.outcome))
            stream.cleanup = cleanup.pop_all()  # the stream outlives this function
            return stream
        return JSONResponse(await cancel_on_disconnect(http.receive, reading.saved()))


class _Reading:
    """A request that reads a text, until its state is saved."""

    def __init__(
        self,
        service: Service,
        request: Request,
        text_after_answer: str,
        model: ServedModel,
        label: protocol.LabelBody,
    ) -> None:
        self._service, self._request, self._label = service, request, label
        self._notes = text_after_answer, model.fingerprint
        self._queue = OutputQueue(service.engine, service.metrics)
        self._queue.submit([request])
        self._completing = asyncio.ensure_future(self._completion())

    def abort(self) -> None:
        self._queue.abort()
        self._completing.cancel()

    async def saved(self) -> Json:
        """The saved state, when all is read."""
        completion = await self._completing
        assert completion.state is not None
        label = _label(self._label)  # only now: `expires_in` counts from here
        save = partial(self._service.saved_states().save, completion.state, *self._notes, label)
        stored = await save_in_thread(save)
        return {**_describe(self._service, stored), "usage": self.usage()}

    async def events(self) -> AsyncIterator[Json]:
        """How much is read, as it grows, then the saved state."""
        total, read, shown = len(self._request.prompt_token_ids), 0, -1
        while read > shown or not self._completing.done():
            if read > shown:
                yield {"object": "state.progress", "tokens_read": read, "tokens_total": total}
                shown = read
            await asyncio.wait([self._completing], timeout=_PROGRESS_SECONDS)
            read = min(self._tokens_read(), total)
        yield await self.saved()

    def usage(self) -> Json:
        tokens, cached = len(self._request.prompt_token_ids), self._request.cached_tokens
        return {
            "prompt_tokens": tokens,
            "completion_tokens": 0,
            "total_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _tokens_read(self) -> int:
        # The engine thread sets the position: a whole number, which may be a moment old.
        position = self._request.position
        return position + self._request.starts_after_bos if position > 0 else 0

    async def _completion(self) -> Completion:
        outputs = [output async for _, output in self._queue.outputs()]
        assert outputs[-1].completion is not None
        return outputs[-1].completion


def _describe(service: Service, stored: StoredState) -> Json:
    models = {model.fingerprint: model.id for model in service.models}
    return service.saved_states().describe(stored, models)


def _label(given: protocol.LabelBody, before: StateLabel | None = None) -> StateLabel:
    """The label of a new state, or a label with the fields that are given replaced."""
    label = before or StateLabel()
    if given.name is not None:
        label = label._replace(name=given.name)
    if given.tags is not None:
        label = label._replace(tags=tuple(dict.fromkeys(given.tags)))
    if given.expires_in is not None:
        expires = int(time.time()) + given.expires_in if given.expires_in else None
        label = label._replace(expires=expires)
    return label


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, even if it grows meanwhile."""
    with file:
        while piece := file.read(min(_PIECE, size)):
            size -= len(piece)
            yield piece
