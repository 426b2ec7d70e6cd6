"""States of texts that were read, for texts that begin alike: on the device, the host, a disk."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from xlstm7b.generate.decoder import to_host
from xlstm7b.generate.prefix_store import PrefixStore, Stored, TokenChain
from xlstm7b.generate.state_folder import StateFolder
from xlstm7b.generate.states import TextState
from xlstm7b.mlstm import MLSTMState
from xlstm7b.model import ModelState


class PrefixCache:
    """Levels of so many bytes each. What is used comes up to the device; what is not sinks."""

    def __init__(
        self,
        device: torch.device,
        device_bytes: int,
        host_bytes: int = 0,
        folder: StateFolder | None = None,
    ) -> None:
        self._device, self._folder = device, folder
        self._on_device, self._on_host = PrefixStore(device_bytes), PrefixStore(host_bytes)
        self.hits = {"device": 0, "host": 0, "disk": 0}

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes in use, by level."""
        on_disk = 0 if self._folder is None else self._folder.nbytes
        return {"device": self._on_device.nbytes, "host": self._on_host.nbytes, "disk": on_disk}

    def add(self, chain: TokenChain, length: int, state: TextState) -> None:
        """Keeps the state at this place of a text. Nobody may write to it from now on."""
        start = chain.start(length)
        self._on_host.remove(chain.key(length))
        self._put(Stored(chain.key(length), start, state, state.nbytes + len(start)))

    def longest(self, chain: TokenChain, longer_than: int) -> tuple[int, TextState] | None:
        """The state at the longest beginning of a text that is stored, if one is longer."""
        while True:
            level, best = "", None
            for name, found in self._found(chain, longer_than):
                if best is None or len(found) > len(best):
                    level, best = name, found
            if best is None:
                return None
            state = best.state
            if state is None:
                assert self._folder is not None
                state = self._folder.load(best)
            if state is not None:
                break  # else the file was damaged: what is shorter may do
        self.hits[level] += 1
        if level == "device":
            self._on_device.touch(best.key)
        else:
            state = _moved(state, self._device)
            self._on_host.remove(best.key)
            self._put(replace(best, state=state))
        return len(best), state

    def close(self) -> None:
        """Waits for what is on its way to the disk."""
        if self._folder is not None:
            self._folder.close()

    def _found(self, chain: TokenChain, longer_than: int) -> Iterator[tuple[str, Stored]]:
        levels = {"device": self._on_device, "host": self._on_host, "disk": self._folder}
        for name, level in levels.items():
            found = None if level is None else level.longest(chain, longer_than)
            if found is not None:
                yield name, found

    def _put(self, stored: Stored) -> None:
        for sinks in self._on_device.add(stored):
            if self._folder is None and not self._on_host.fits(sinks):
                continue
            assert sinks.state is not None
            on_host = replace(sinks, state=_moved(sinks.state, torch.device("cpu")))
            for gone in self._on_host.add(on_host):
                if self._folder is not None:
                    self._folder.save(gone)


def _moved(state: TextState, device: torch.device) -> TextState:
    """The state elsewhere, without waiting for it; what is there already is not copied."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.is_cuda and device.type == "cpu":
            return to_host(tensor)
        return tensor.to(device, non_blocking=True)

    memory = ModelState(
        tuple(MLSTMState(*map(move, block)) for block in state.memory.blocks),
        move(state.memory.tokens_seen),
    )
    return TextState(state.config, memory, move(state.logits))
