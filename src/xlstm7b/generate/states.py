"""A place in a text, as a thing: keep it, fork it, save it, go on from it tomorrow."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.files import opened_safetensors, write_safetensors
from xlstm7b.mlstm import MLSTMState
from xlstm7b.model import ModelState

_FORMAT = "xlstm7b-state-1"


@dataclass(frozen=True)
class TextState:
    """All that a model knows of some texts, one a row: what it remembers, and what may come next.

    `memory` is of one size for any length of text. `logits` [B, V] follow the last token read.
    """

    config: ModelConfig
    memory: ModelState
    logits: Tensor

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def tokens_seen(self) -> list[int]:
        """How many tokens each row has read."""
        seen: list[int] = self.memory.tokens_seen.tolist()
        return seen

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.memory.nbytes + self.logits.nbytes

    def clone(self) -> Self:
        """A copy that shares no memory with this one."""
        return self._replace(self.memory.clone(), self.logits.clone())

    def fork(self, n: int) -> Self:
        """n copies of each row, side by side: row r becomes rows r·n … r·n + n − 1."""
        return self._replace(self.memory.fork(n), self.logits.repeat_interleave(n, dim=0))

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The given rows, in the given order; a row may be taken several times."""
        memory = self.memory.select(rows)
        index = torch.as_tensor(rows, dtype=torch.long, device=self.logits.device)
        return self._replace(memory, self.logits.index_select(0, index))

    @classmethod
    def join(cls, states: Sequence[Self]) -> Self:
        """The rows of several states of one model, in order."""
        if len(states) == 1:
            return states[0]
        if any(state.config != states[0].config for state in states):
            raise ValueError("states of different models cannot be joined")
        blocks = zip(*(state.memory.blocks for state in states), strict=True)
        return cls(
            states[0].config,
            ModelState(
                tuple(
                    MLSTMState(*(torch.cat(parts) for parts in zip(*block, strict=True)))
                    for block in blocks
                ),
                torch.cat([state.memory.tokens_seen for state in states]),
            ),
            torch.cat([state.logits for state in states]),
        )

    def save(self, path: str | Path, **notes: str) -> None:
        """Writes one safetensors file, aside first: a file that was there stays whole till then.

        Notes go into the file's metadata, for whoever wrote it.
        """
        C, n, m = (torch.stack(parts, dim=1) for parts in zip(*self.memory.blocks, strict=True))
        tensors = {"C": C.cpu(), "n": n.cpu(), "m": m.cpu(), "logits": self.logits.cpu()}
        description = {
            **notes,
            "format": _FORMAT,
            "config": json.dumps(self.config.to_dict()),
            "tokens_seen": json.dumps(self.tokens_seen),
        }
        write_safetensors(Path(path), tensors, description)

    @classmethod
    def load(
        cls, path: str | Path, config: ModelConfig, *, device: torch.device | str | None = None
    ) -> Self:
        """Reads what `save` wrote; a state of another model is refused, and so is another file."""
        path = Path(path)
        with opened_safetensors(path) as file:
            described: dict[str, str] = file.metadata() or {}
            if described.get("format") != _FORMAT:
                raise ValueError(f"{path} holds no saved state")
            _check_same_model(path, described, config)
            shapes = {
                "C": (config.num_blocks, config.num_heads, config.d_qk, config.d_hv),
                "n": (config.num_blocks, config.num_heads, config.d_qk),
                "m": (config.num_blocks, config.num_heads),
                "logits": (config.vocab_size,),
            }
            seen = _tokens_seen(path, described)
            parts = {}
            for name, shape in shapes.items():
                if name not in file.keys():  # noqa: SIM118 (the handle is no dict)
                    raise ValueError(f"{path} is damaged: it has no {name!r}")
                tensor = file.get_tensor(name)
                if tensor.shape != (len(seen), *shape) or not tensor.is_floating_point():
                    kind = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
                    raise ValueError(f"{path} is damaged: its {name!r} is {kind}")
                # A clone: the file is mapped, and may be replaced while the state is in use.
                parts[name] = tensor.clone().to(device or torch.get_default_device())
        logits = parts.pop("logits")
        blocks = zip(*(part.unbind(1) for part in parts.values()), strict=True)
        memory = ModelState(
            tuple(MLSTMState(*block) for block in blocks), torch.tensor(seen, device=logits.device)
        )
        return cls(config, memory, logits)

    def _replace(self, memory: ModelState, logits: Tensor) -> Self:
        return type(self)(self.config, memory, logits)


def _check_same_model(path: Path, described: dict[str, str], config: ModelConfig) -> None:
    try:
        saved = ModelConfig.from_dict(json.loads(described["config"]))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it does not say which model it is of") from error
    config = ModelConfig.from_dict(config.to_dict())  # in the spelling that is saved
    pairs = [(x.name, getattr(saved, x.name), getattr(config, x.name)) for x in fields(config)]
    differing = [f"{name} {theirs}, not {ours}" for name, theirs, ours in pairs if theirs != ours]
    if differing:
        raise ValueError(f"{path} was saved from another model: it has {'; '.join(differing)}")


def _tokens_seen(path: Path, described: dict[str, str]) -> list[int]:
    try:
        seen = json.loads(described["tokens_seen"])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it does not say how much it has read") from error
    if not isinstance(seen, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in seen):
        raise ValueError(f"{path} is damaged: it has read {seen} tokens")
    return seen
