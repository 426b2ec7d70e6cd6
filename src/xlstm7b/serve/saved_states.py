"""Saved states for /v1/states: files of a `StateStore`, found by an id that the server chose."""

import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from xlstm7b.generate.state import SavedState, StateStore, StoredState, StoreFull
from xlstm7b.model.saved_state import WEIGHTS_NOTE, fits_weights
from xlstm7b.serve.protocol import ApiError, Json, Limiter

MAX_IN_MEMORY = 16  # requests with a saved state at the same time: each holds 134 MB for the 7B
_LOG = logging.getLogger("xlstm7b.serve")
_ID = re.compile(r"state-[0-9a-f]{24}")  # files have no other names
_ADAPTER = "adapter"  # the fingerprint of the adapter that has read the text; empty without one
_NOTE = "note"  # in the file; `xlstm7b chat` uses the same name
_KEPT = (_NOTE, "exchanges", _ADAPTER, WEIGHTS_NOTE)  # notes of an uploaded file


class SavedStates:
    """A store of states whose errors are HTTP errors, which never name a path."""

    def __init__(
        self, store: StateStore, weights: Callable[[], Mapping[str, str]] | None = None
    ) -> None:
        """`weights` returns the fingerprint of the server's weights, for states trained for it."""
        self._store, self._weights = store, weights
        # Requests that may hold a state in addition to the engine's slots.
        self.in_memory = Limiter(MAX_IN_MEMORY, "requests with saved states")

    def check_room(self, nbytes: int) -> None:
        with _http_errors():
            self._store.check_room(nbytes)

    def save(self, state: SavedState, text_after_answer: str = "", adapter: str = "") -> Json:
        """Saves a state and returns its description. `adapter` is that which has read the text.

        `text_after_answer`: what the state has read after the end of the answer, such as a stop
        string. The next prompt must not repeat it.
        """
        state_id = f"state-{secrets.token_hex(12)}"
        notes = {_NOTE: text_after_answer, _ADAPTER: adapter}
        with _http_errors():
            return _describe(self._store.save(state_id, state, **notes))

    def upload(self, content: bytes) -> Json:
        """Saves a state file: of state tuning, of `xlstm7b generate` or of a conversation."""
        with _http_errors():
            self._store.check_room(len(content))
        with TemporaryDirectory() as aside:
            path = Path(aside) / "upload.safetensors"
            path.write_bytes(content)
            try:
                state = SavedState.load(path, self._store.config, device="cpu")
                if len(state) != 1:
                    raise ValueError(f"it holds the states of {len(state)} texts")
                notes = SavedState.read_notes(path)
            except ValueError as error:
                reason = str(error).replace(str(path), "the file")  # never name a path
                message = f"this is no state of this server's model: {reason}"
                raise ApiError(400, message) from error
        self._check_weights(notes, 400)
        kept = {name: note for name, note in notes.items() if name in _KEPT}
        with _http_errors():
            return _describe(self._store.save(f"state-{secrets.token_hex(12)}", state, **kept))

    def _check_weights(self, notes: Mapping[str, str], status: int) -> None:
        note = notes.get(WEIGHTS_NOTE)
        if note is None or self._weights is None or fits_weights(note, self._weights()):
            return
        message = "the state was trained for other weights than those of this server"
        raise ApiError(status, message)

    def list(self) -> list[Json]:
        """Descriptions of all saved states, newest first."""
        return [_describe(stored) for stored in self._store.list() if _ID.fullmatch(stored.name)]

    def find(self, state_id: str) -> Json:
        with _http_errors(state_id):
            return _describe(self._store.find(state_id))

    def load(self, state_id: str, adapter: str = "") -> tuple[SavedState, str]:
        """The state, on the CPU, and the text that it has read after the end of the answer."""
        with _http_errors(state_id):
            notes = self._store.find(state_id).notes
            if notes.get(_ADAPTER, "") != adapter:
                raise ApiError(
                    409,
                    f"the state {state_id} was saved with another adapter, or without one: name "
                    "the model that saved it",
                    param="model",
                )
            self._check_weights(notes, 409)
            return self._store.load(state_id, device="cpu"), notes.get(_NOTE, "")

    def delete(self, state_id: str) -> None:
        with _http_errors(state_id):
            self._store.delete(state_id)


def _describe(stored: StoredState) -> Json:
    return {
        "object": "state",
        "id": stored.name,
        "created": int(stored.created),
        "tokens": sum(stored.tokens_seen),
        "bytes": stored.nbytes,
    }


@contextmanager
def _http_errors(state_id: str | None = None) -> Iterator[None]:
    """Checks the id, if there is one, and turns the store's errors into HTTP errors."""
    try:
        if state_id is not None and _ID.fullmatch(state_id) is None:
            raise KeyError(state_id)
        yield
    except KeyError as error:
        message = f"there is no saved state {str(state_id)[:80]!r}"
        raise ApiError(404, message, code="state_not_found") from error
    except StoreFull as error:
        message = "there is no room for another saved state: delete one first"
        raise ApiError(409, message) from error
    except (ValueError, OSError) as error:
        if state_id is None:
            _LOG.exception("a state could not be saved")
            message = "the state could not be saved: see the server's log"
            raise ApiError(507, message) from error
        message = f"the state {state_id} is damaged or was saved by another model"
        raise ApiError(409, message) from error
