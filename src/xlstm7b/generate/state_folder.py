"""States in a folder, each a file named by what was read: they outlive the process."""

import hashlib
import json
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from xlstm7b.files import opened_safetensors
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.prefix_store import PrefixStore, Stored, TokenChain
from xlstm7b.generate.states import TextState

_LOG = logging.getLogger(__name__)
_MOST_UNWRITTEN = 2  # states on their way to the disk; more are let go
_SAMPLES = 64  # of each weight


def fingerprint(model: FusedModel, state_dtype: torch.dtype) -> bytes:
    """Tells models apart whose states must not be mixed up, by a sample of all weights."""
    weights = [*(part for block in model.blocks for part in block), model.embedding, model.head]
    samples = [
        weight.flatten()[:: max(1, weight.numel() // _SAMPLES)][:_SAMPLES].double()
        for weight in weights
    ]
    described = json.dumps([model.config.to_dict(), str(model.dtype), str(state_dtype)])
    return hashlib.sha256(described.encode() + torch.cat(samples).cpu().numpy().tobytes()).digest()


class StateFolder:
    """States of one model in at most so many bytes of files. Only one thread may call it."""

    def __init__(
        self, folder: Path, model: FusedModel, state_dtype: torch.dtype, most_bytes: int
    ) -> None:
        self._folder, self._model = folder, model
        self._fingerprint = fingerprint(model, state_dtype)
        self._store = PrefixStore(most_bytes)
        self._writer = ThreadPoolExecutor(1, "state-writer")
        self._unwritten: list[Stored] = []
        self._written: deque[tuple[Stored, bool]] = deque()
        folder.mkdir(parents=True, exist_ok=True)
        files = [(path.stat().st_mtime, path) for path in folder.glob("*.safetensors")]
        for _, path in sorted(files):
            self._adopt(path)

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def longest(self, chain: TokenChain, longer_than: int) -> Stored | None:
        """The longest beginning of a text of which there is a file."""
        self._take_written()
        return self._store.longest(chain, longer_than)

    def load(self, stored: Stored) -> TextState | None:
        """The state, if its file is whole; else the file is deleted."""
        try:
            state = TextState.load(
                self._path(stored.start), self._model.config, device=self._model.device
            )
        except (OSError, ValueError) as error:
            _LOG.warning("a stored state cannot be used: %s", error)
            state = None
        if state is None or state.tokens_seen != [len(stored)]:
            self._store.remove(stored.key)
            self._path(stored.start).unlink(missing_ok=True)
            return None
        self._store.touch(stored.key)
        return state

    def save(self, stored: Stored) -> None:
        """Writes a state in the background; it is found once it is there."""
        self._take_written()
        if stored.key in self._store:
            self._store.touch(stored.key)
        elif len(self._unwritten) < _MOST_UNWRITTEN:
            self._unwritten.append(stored)
            arrived = None
            if self._model.device.type == "cuda":  # it may be on its way to the host
                arrived = torch.cuda.Event()
                arrived.record()
            self._writer.submit(self._write, stored, arrived)

    def close(self) -> None:
        """Waits for what is being written."""
        self._writer.shutdown()
        self._take_written()

    def _write(self, stored: Stored, arrived: torch.cuda.Event | None) -> None:
        """In the writer's thread."""
        assert stored.state is not None
        try:
            if arrived is not None:
                arrived.synchronize()
            stored.state.save(self._path(stored.start), note=stored.start.hex())
            self._written.append((stored, True))
        except Exception:
            _LOG.exception("a state cannot be stored in %s", self._folder)
            self._written.append((stored, False))

    def _take_written(self) -> None:
        while self._written:
            stored, is_there = self._written.popleft()
            self._unwritten.remove(stored)
            if is_there:
                self._add(replace(stored, state=None))

    def _add(self, stored: Stored) -> None:
        for gone in self._store.add(stored):
            self._path(gone.start).unlink(missing_ok=True)

    def _adopt(self, path: Path) -> None:
        """Takes a file over that an earlier process left; others' files are left alone."""
        try:
            with opened_safetensors(path) as file:
                start = bytes.fromhex((file.metadata() or {}).get("note", ""))
                chain = TokenChain.from_bytes(start)
        except (OSError, ValueError):
            return
        if path == self._path(start):
            self._add(Stored(chain.key(len(chain)), start, None, path.stat().st_size))

    def _path(self, start: bytes) -> Path:
        name = hashlib.sha256(self._fingerprint + start).hexdigest()
        return self._folder / f"{name}.safetensors"
