"""Saved states for /v1/states: files of a `StateStore`, found by an id that the server chose."""

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, TypeVar

import torch

from xlstm7b.generate.request import LOGITS_ARE_BAD
from xlstm7b.generate.state import (
    NO_LABEL,
    SavedState,
    StateLabel,
    StateStore,
    StoredState,
    StoreFull,
)
from xlstm7b.model.saved_state import ADAPTER_NOTE, WEIGHTS_NOTE, fits_weights
from xlstm7b.serve.protocol import ApiError, Json

_LOG = logging.getLogger("xlstm7b.serve")
_Result = TypeVar("_Result")
_ID = re.compile(r"state-[0-9a-f]{24}")  # files have no other names
# Saves wait for each other. In the common pool they would hold up other requests' work.
_SAVES = ThreadPoolExecutor(1, thread_name_prefix="save")
_NOTE = "note"  # in the file; `xlstm7b chat` uses the same name
_KEPT = (_NOTE, "exchanges", ADAPTER_NOTE, WEIGHTS_NOTE)  # notes of an uploaded file


async def save_in_thread(save: Callable[..., _Result], *arguments: Any) -> _Result:
    """The result of a method that writes a state."""
    return await asyncio.get_running_loop().run_in_executor(_SAVES, save, *arguments)


class SavedStates:
    """A store of states whose errors are HTTP errors, which never name a path."""

    def __init__(self, store: StateStore, weights: Mapping[str, str] | None = None) -> None:
        """`weights` is the fingerprint of the server's weights. New states are saved with it."""
        self._store, self._weights = store, weights

    def check_room(self, nbytes: int) -> None:
        with _http_errors():
            self._store.check_room(nbytes)

    def save(
        self,
        state: SavedState,
        text_after_answer: str = "",
        adapter: str = "",
        label: StateLabel = NO_LABEL,
    ) -> StoredState:
        """Saves a state. `adapter` is that which has read the text.

        `text_after_answer`: what the state has read after the end of the answer, such as a stop
        string. The next prompt must not repeat it.
        """
        if not _has_finite_logits(state):
            _LOG.error("a state was not saved: %s", LOGITS_ARE_BAD)
            raise ApiError(500, "the state was not saved: the model's logits are not numbers")
        notes = {_NOTE: text_after_answer, ADAPTER_NOTE: adapter}
        if self._weights is not None:
            notes[WEIGHTS_NOTE] = json.dumps(self._weights)
        with _http_errors():
            return self._store.save(_new_id(), state, label, **notes)

    def upload(
        self, content: bytes, label: StateLabel = NO_LABEL, adapters: Collection[str] = ("",)
    ) -> StoredState:
        """Saves a state file: of state tuning, of `xlstm7b generate` or of a conversation.

        `adapters` are the fingerprints of those that are served. A state of another is a 400.
        """
        with _http_errors():
            self._store.check_room(len(content))
            # In the store's folder: it has room, and what a killed server leaves there is removed.
            with NamedTemporaryFile(dir=self._store.folder, prefix=".state-") as aside:
                path = Path(aside.name)
                path.write_bytes(content)
                state, notes = self._read_upload(path)
        self._check_weights(notes, 400)
        if notes.get(ADAPTER_NOTE, "") not in adapters:
            raise ApiError(400, "the state belongs to an adapter that this server does not have")
        kept = {name: note for name, note in notes.items() if name in _KEPT}
        with _http_errors():
            return self._store.save(_new_id(), state, label, **kept)

    def _read_upload(self, path: Path) -> tuple[SavedState, dict[str, str]]:
        """The state and the notes of a file. One that holds something else is a 400."""
        try:
            state = SavedState.load(path, self._store.config, device="cpu")
            if len(state) != 1:
                raise ValueError(f"it holds the states of {len(state)} texts")
            if not _has_finite_logits(state):
                raise ValueError("its logits are not numbers")
            return state, SavedState.read_notes(path)
        except ValueError as error:
            reason = str(error).replace(str(path), "the file")  # never name a path
            message = (
                f"this is no state of this server's model: {reason}. For a text file, send "
                "content-type text/plain"
            )
            raise ApiError(400, message) from error

    def list(
        self, limit: int, after: str | None = None, tag: str | None = None
    ) -> tuple[Sequence[StoredState], bool]:
        """A page of states, newest first, and whether more follow. `after`: the last one before."""
        with _http_errors():
            names = [name for name in self._store.names(tag) if _ID.fullmatch(name)]
            first = 0
            if after is not None:
                if after not in names:
                    message = f"after: there is no saved state {after[:80]!r} in this list"
                    raise ApiError(404, message, param="after", code="state_not_found")
                first = names.index(after) + 1
            found = []
            for name in names[first : first + limit]:
                try:
                    found.append(self._store.find(name))
                except KeyError:  # deleted meanwhile
                    continue
        return found, len(names) > first + limit

    def find(self, state_id: str, param: str | None = None) -> StoredState:
        """The properties of a state. A damaged one is a 409. `param`: the field with the id."""
        with _http_errors(state_id, param):
            stored = self._store.find(state_id)
            if stored.status == "damaged":
                raise ValueError("the file is damaged")
            return stored

    def load(self, state_id: str, adapter: str = "") -> tuple[SavedState, str]:
        """The state, on the CPU, and the text that it has read after the end of the answer."""
        notes = self.find(state_id, "state").notes
        if notes.get(ADAPTER_NOTE, "") != adapter:
            raise ApiError(
                409,
                f"the state {state_id} was saved with another adapter, or without one: name "
                "the model that saved it",
                param="model",
            )
        self._check_weights(notes, 409, "state")
        with _http_errors(state_id, "state"):
            return self._store.load(state_id, device="cpu"), notes.get(_NOTE, "")

    def open(self, state_id: str) -> BinaryIO:
        """The file of a state. It can be read to its end even if it is deleted meanwhile."""
        self.find(state_id)
        with _http_errors(state_id):
            try:
                return self._store.path(state_id).open("rb")
            except FileNotFoundError as error:
                raise KeyError(state_id) from error

    def change_label(
        self, state_id: str, change: Callable[[StateLabel], StateLabel]
    ) -> StoredState:
        self.find(state_id)
        with _http_errors(state_id):
            return self._store.change_label(state_id, change)

    def delete(self, state_id: str) -> None:
        with _http_errors(state_id):
            self._store.delete(state_id)

    def describe(self, stored: StoredState, models: Mapping[str, str]) -> Json:
        """A state for clients. `models` are the ids of the served models by adapter."""
        status, model = stored.status, models.get(stored.notes.get(ADAPTER_NOTE, ""))
        if status == "ok" and (model is None or not self._fits_weights(stored.notes)):
            status = "other_model"
        return {
            "object": "state",
            "id": stored.name,
            "created": int(stored.created),
            "tokens": sum(stored.tokens_seen),
            "bytes": stored.nbytes,
            "name": stored.label.name,
            "tags": [*stored.label.tags],
            "expires": stored.label.expires,
            "model": model if status == "ok" else None,
            "status": status,
        }

    def _fits_weights(self, notes: Mapping[str, str]) -> bool:
        note = notes.get(WEIGHTS_NOTE)
        return note is None or self._weights is None or fits_weights(note, self._weights)

    def _check_weights(
        self, notes: Mapping[str, str], status: int, param: str | None = None
    ) -> None:
        if not self._fits_weights(notes):
            message = "the state belongs to other weights than those of this server"
            raise ApiError(status, message, param=param)


def _has_finite_logits(state: SavedState) -> bool:
    """False for NaN and +inf, which damaged weights give. A token may have a logit of -inf."""
    return bool(state.logits.amax() < torch.inf)  # NaN, if there is one


def _new_id() -> str:
    return f"state-{secrets.token_hex(12)}"


@contextmanager
def _http_errors(state_id: str | None = None, param: str | None = None) -> Iterator[None]:
    """Checks the id, if there is one, and turns the store's errors into HTTP errors."""
    try:
        if state_id is not None and _ID.fullmatch(state_id) is None:
            raise KeyError(state_id)
        yield
    except KeyError as error:
        message = f"there is no saved state {str(state_id)[:80]!r}"
        raise ApiError(404, message, param=param, code="state_not_found") from error
    except StoreFull as error:
        message = "there is no room for another saved state: delete one first"
        raise ApiError(409, message, code="states_full") from error
    except (ValueError, OSError) as error:
        what = "the state could not be saved"
        if state_id is not None:
            if isinstance(error, ValueError):
                message = f"the state {state_id} is damaged or was saved by another model"
                raise ApiError(409, message, param=param) from error
            what = f"the state {state_id} could not be read or changed"
        _LOG.exception(what)
        raise ApiError(507, f"{what}: see the server's log", param=param) from error
