"""Saved states: a conversation's memory as a file, found by an id that the server gave it."""

import json
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from xlstm7b.config import ModelConfig
from xlstm7b.files import opened_safetensors
from xlstm7b.generate.states import TextState
from xlstm7b.serve.limits import ApiError
from xlstm7b.serve.logs import LOGGER

MOST_HELD = 16  # requests that have a saved state in memory, at once: each is 134 MB with 7B
_ID = re.compile(r"state-[0-9a-f]{24}")  # all that an id can be: no path is made of anything else


class Saved(NamedTuple):
    """What is known of a saved state without reading it."""

    id: str
    created: int
    tokens: int
    bytes: int

    @property
    def content(self) -> dict[str, str | int]:
        return {"object": "state", **self._asdict()}


class StateStore:
    """The saved states of one model in one folder, of so many bytes in all."""

    def __init__(self, folder: Path, config: ModelConfig, most_bytes: int) -> None:
        self._folder, self._config, self._most_bytes = folder, config, most_bytes
        self._saving = threading.Lock()
        self._held = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """For as long as a request may have a state in memory that is no slot's."""
        if self._held >= MOST_HELD:
            message = f"{MOST_HELD} requests with saved states are under way, the most at once"
            raise ApiError(429, message, retry_after=1)
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def check_room(self, nbytes: int) -> None:
        """Raises an `ApiError` if no state of that size could be saved now."""
        used = sum(saved.bytes for saved in self.list())
        if used + nbytes > self._most_bytes:
            raise ApiError(409, "there is no room for another saved state: delete one first")

    def save(self, state: TextState, overread: str = "") -> Saved:
        """`overread` is what the state has read past the end of an answer."""
        state_id = f"state-{secrets.token_hex(12)}"
        with self._saving:
            self.check_room(state.nbytes)
            try:
                state.save(self._path(state_id), note=overread)
            except OSError as error:
                LOGGER.exception("a state cannot be saved")
                raise ApiError(507, "the state could not be saved: see the server's log") from error
        return self.find(state_id)

    def find(self, state_id: str) -> Saved:
        path = self._path(state_id)
        try:
            status = path.stat()
            with opened_safetensors(path) as file:
                (tokens,) = json.loads((file.metadata() or {})["tokens_seen"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unknown(state_id) from error
        return Saved(state_id, int(status.st_mtime), tokens, status.st_size)

    def list(self) -> list[Saved]:
        """All that can be gone on from, the newest first."""
        found = []
        for path in self._folder.glob("state-*.safetensors"):
            try:
                found.append(self.find(path.stem))
            except ApiError:  # deleted meanwhile, or never ours
                continue
        return sorted(found, key=lambda saved: -saved.created)

    def load(self, state_id: str) -> tuple[TextState, str]:
        """The state, on the CPU, and what it has read past the end of an answer."""
        path = self._path(state_id)
        self.find(state_id)
        try:
            state = TextState.load(path, self._config, device="cpu")
            with opened_safetensors(path) as file:
                return state, file.metadata().get("note", "")
        except (OSError, ValueError) as error:  # these name paths, which are nobody's business
            raise ApiError(409, f"the state {state_id} is damaged or of another model") from error

    def delete(self, state_id: str) -> None:
        try:
            self._path(state_id).unlink()
        except FileNotFoundError as error:
            raise _unknown(state_id) from error

    def _path(self, state_id: str) -> Path:
        if _ID.fullmatch(state_id) is None:
            raise _unknown(state_id)
        return self._folder / f"{state_id}.safetensors"


def _unknown(state_id: str) -> ApiError:
    return ApiError(404, f"there is no saved state {state_id[:80]!r}", code="state_not_found")
