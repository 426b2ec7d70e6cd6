"""SavedState: a model state and the logits after it, in memory and as a file."""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

import numpy as np
import torch
from torch import Tensor

from xlstm7b import devices, hub
from xlstm7b.checkpoint import Checkpoint, resolve, same_weights
from xlstm7b.config import ModelConfig
from xlstm7b.files import check_format, opened_safetensors, write_safetensors
from xlstm7b.model.model_state import ModelState

if TYPE_CHECKING:
    from xlstm7b.model.publish import Options

_NAME, _NEWEST = "xlstm7b-state-", 2
_FORMAT, _WITHOUT_CHECKSUM = f"{_NAME}{_NEWEST}", f"{_NAME}1"
_CHECKSUM = "checksum"
_OWN_NOTES = ("format", "config", "tokens_seen", _CHECKSUM)
_BLOCK = 1 << 20  # bytes that are read and checked at a time: a CPU's cache holds them
_ROW = 512  # numbers of 64 bits in each row of a block
_NO_CONFIG = (KeyError, ValueError, TypeError, AttributeError, RecursionError)
WEIGHTS_NOTE = "weights"  # fingerprint of the weights that a state belongs to, as JSON
ADAPTER_NOTE = "adapter"  # fingerprint of the adapter that has read the text; empty without one


@dataclass(frozen=True)
class SavedState:
    """Everything needed to continue some token sequences, one per row, without reading them again.

    The size does not depend on how many tokens were read. `logits` [B, V] follow the last token.
    """

    config: ModelConfig
    model_state: ModelState
    logits: Tensor

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def tokens_seen(self) -> list[int]:
        """How many tokens each row has read."""
        seen: list[int] = self.model_state.tokens_seen.tolist()
        return seen

    @property
    def has_text(self) -> bool:
        """False if all rows have read at most the model's first token, as a trained state has."""
        return max(self.tokens_seen, default=0) > self.config.force_bos_token_insert

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.model_state.nbytes + self.logits.nbytes

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The state on another device. With `non_blocking`, synchronize before a CPU uses it."""
        logits = to_device(self.logits, device)
        return self._with(self.model_state.to(device, non_blocking=non_blocking), logits)

    def clone(self) -> Self:
        """A copy that shares no memory with this one."""
        return self._with(self.model_state.clone(), self.logits.clone())

    def fork(self, n: int) -> Self:
        """n copies of each row, next to each other: row r becomes rows r·n … r·n + n − 1."""
        return self._with(self.model_state.fork(n), self.logits.repeat_interleave(n, dim=0))

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The given rows, in the given order; a row may appear several times."""
        model_state = self.model_state.select(rows)
        index = torch.as_tensor(rows, dtype=torch.long, device=self.logits.device)
        return self._with(model_state, self.logits.index_select(0, index))

    @classmethod
    def cat(cls, states: Sequence[Self]) -> Self:
        """The rows of several states of one model, in order."""
        if not states:
            raise ValueError("there are no states to join")
        first = states[0]
        if len(states) == 1:
            return first
        for state in states[1:]:
            state.check_model(first.config)
        model_state = ModelState.cat([state.model_state for state in states])
        return first._with(model_state, torch.cat([state.logits for state in states]))

    def check_model(self, config: ModelConfig) -> None:
        """Raises a `ValueError` that names what differs if this is another model's state."""
        if self.config != config:
            raise ValueError(f"this state was saved by another model: {_differences(self, config)}")

    def save(self, path: str | Path, mode: int = 0o666, /, **notes: str) -> None:
        """Writes one safetensors file; an existing file is replaced only when it is complete.

        `mode` is that of the file, less the process's umask. Notes are strings for the caller's own
        use; `read_notes` returns them.
        """
        for name, note in notes.items():
            if name in _OWN_NOTES:
                raise ValueError(f"the file has its own {name!r}: give the note another name")
            if not isinstance(note, str):
                raise ValueError(f"the note {name!r} must be a string, not {note!r}")
            note.encode()  # half a surrogate pair could not be read back
        blocks = self.model_state.blocks
        tensors = {
            name: torch.stack(parts, dim=1).cpu()
            for name, parts in zip(blocks[0]._fields, zip(*blocks, strict=True), strict=True)
        }
        tensors["logits"] = self.logits.cpu()
        metadata = {
            **notes,
            "format": _FORMAT,
            "config": config_text(self.config),
            "tokens_seen": json.dumps(self.tokens_seen),
        }
        metadata[_CHECKSUM] = _checksum(
            metadata,
            {
                name: (str(tensor.dtype), [*tensor.shape], _sum(tensor))
                for name, tensor in tensors.items()
            },
        )
        write_safetensors(Path(path), tensors, metadata, mode=mode)

    @classmethod
    def load(
        cls, path: str | Path, config: ModelConfig, *, device: torch.device | str | None = None
    ) -> Self:
        """Reads what `save` wrote, to a device; None is PyTorch's default.

        `ValueError` for another model's state, another file, or a device that cannot be used.
        """
        path = Path(path)
        where = torch.get_default_device() if device is None else devices.to_device(device)
        with opened_safetensors(path) as file:
            metadata = _read_metadata(path, file)
            saved = cls(_config(path, metadata), ModelState((), torch.empty(0)), torch.empty(0))
            spelled = ModelConfig.from_dict(config.to_dict())  # as `save` does it
            if saved.config != spelled:
                raise ValueError(
                    f"{path} was saved from another model: {_differences(saved, spelled)}"
                )
            seen = _read_tokens_seen(path, metadata)
            own = config.state_parts()
            shapes = {name: (config.num_blocks, *part.shape) for name, part in own.items()}
            shapes["logits"] = (config.vocab_size,)
            dtypes = {}
            for name, shape in shapes.items():
                if name not in file.keys():  # noqa: SIM118 (the handle is no dict)
                    raise ValueError(f"{path} is damaged: it has no {name!r}")
                tensor = file.get_tensor(name)  # in the mapped file: nothing is read yet
                if tensor.shape != (len(seen), *shape) or not tensor.is_floating_point():
                    kind = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
                    raise ValueError(f"{path} is damaged: its {name!r} is {kind}")
                dtypes[name] = tensor.dtype
        parts = _read_tensors(path, metadata, shapes, dtypes, len(seen))
        for name, tensor in parts.items():
            if tensor.numel() and tensor.amax().isnan():
                raise ValueError(f"{path} is damaged: some numbers of its {name!r} are NaN")
            if name in own and not own[name].narrow:  # older versions kept n and m narrow
                tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            parts[name] = tensor.to(where)
        logits = parts.pop("logits")
        blocks = zip(*(part.unbind(1) for part in parts.values()), strict=True)
        block_state = type(ModelState.zeros(config, 1, device="meta").blocks[0])
        model_state = ModelState(
            tuple(block_state(*block) for block in blocks), torch.tensor(seen, device=logits.device)
        )
        return cls(config, model_state, logits)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        config: ModelConfig,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """`load` for the file of a folder or hub id that `push_to_hub` has written."""
        folder = resolve(folder_or_hub_id, [hub.STATE_FILE], revision=revision, subfolder=subfolder)
        return cls.load(folder / hub.STATE_FILE, config, device=device)

    def push_to_hub(self, repo: str, **options: "Unpack[Options]") -> str:
        """Uploads what `save` writes; `options` are those of `publish.Options`."""
        from xlstm7b.model.publish import push_saved

        return push_saved(self.save, hub.STATE_FILE, repo, **options)

    @staticmethod
    def read_notes(path: str | Path) -> dict[str, str]:
        """The notes that `save` was given."""
        return describe_file(Path(path)).notes

    def _with(self, model_state: ModelState, logits: Tensor) -> Self:
        return type(self)(self.config, model_state, logits)


def check_state_weights(path: str | Path, base: Checkpoint, adapter: str = "") -> None:
    """`ValueError` if a state file belongs to other weights or to another adapter than these.

    `adapter` is the fingerprint of the adapter; empty: none. A file knows its weights if state
    tuning, a command or a server wrote it. What Python code saved may not; `SavedState.load`
    compares the configs of all.
    """
    notes = SavedState.read_notes(path)
    if WEIGHTS_NOTE not in notes:
        return
    if not fits_weights(notes[WEIGHTS_NOTE], base.fingerprint()):
        raise ValueError(
            f"{path} belongs to other weights than those in {base.folder}: give the model that it "
            "was saved with"
        )
    theirs = notes.get(ADAPTER_NOTE, "")
    if theirs and theirs != adapter:
        which = "another adapter" if adapter else "an adapter"
        raise ValueError(f"{path} was saved with {which}: continue it with that adapter")
    if adapter and not theirs:
        raise ValueError(f"{path} was saved without an adapter: continue it without one")


def fits_weights(note: str, fingerprint: Mapping[str, str]) -> bool:
    """True if the `WEIGHTS_NOTE` of a state has the fingerprint of these weights."""
    try:
        theirs = json.loads(note)
    except (ValueError, RecursionError):
        theirs = None
    return isinstance(theirs, dict) and same_weights(fingerprint, theirs)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device, without waiting. From a GPU it goes to pinned host memory."""
    if tensor.is_cuda and torch.device(device).type == "cpu":
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)


class Description(NamedTuple):
    """What a state file says of itself."""

    config: str  # as `config_text` writes it
    tokens_seen: list[int]
    notes: dict[str, str]


def describe_file(path: Path) -> Description:
    """Reads the header of a state file, but no tensor. `ValueError` if it is damaged."""
    with opened_safetensors(path) as file:
        metadata = _read_metadata(path, file)
    notes = {name: note for name, note in metadata.items() if name not in _OWN_NOTES}
    return Description(metadata.get("config", ""), _read_tokens_seen(path, metadata), notes)


def config_text(config: ModelConfig) -> str:
    """A config as state files hold it."""
    return json.dumps(config.to_dict())


def is_same_config(text: str, other: str) -> bool:
    """True if two texts of `config_text` stand for the same config. `other` must be valid."""
    if text == other:  # fast: a store compares thousands
        return True
    try:  # other versions may spell it differently
        return ModelConfig.from_dict(json.loads(text)) == ModelConfig.from_dict(json.loads(other))
    except _NO_CONFIG:
        return False


def _read_tensors(
    path: Path,
    metadata: dict[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    rows: int,
) -> dict[str, Tensor]:
    """The tensors of a file whose header was checked. Compares the checksum."""
    tensors, described = {}, {}
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        if header["__metadata__"] != metadata:
            raise OSError(f"{path} was replaced while it was read")
        for name, shape in shapes.items():
            size = rows * math.prod(shape) * dtypes[name].itemsize
            # NumPy asks for huge pages, which are faster to get than those of `torch.empty`.
            tensor = torch.from_numpy(np.empty(size, np.uint8)).view(dtypes[name])
            file.seek(start + header[name]["data_offsets"][0])
            tensors[name] = tensor.view(rows, *shape)
            described[name] = (str(tensor.dtype), [rows, *shape], _sum(tensor, file))
    if metadata["format"] != _WITHOUT_CHECKSUM:
        notes = {name: note for name, note in metadata.items() if name != _CHECKSUM}
        if metadata.get(_CHECKSUM) != _checksum(notes, described):
            raise ValueError(f"{path} is damaged: its checksum is wrong")
    return tensors


def _checksum(
    metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, list[int], int]]
) -> str:
    """The CRC-32 of a file's metadata and of the dtypes, shapes and sums of its tensors."""
    text = json.dumps([sorted(metadata.items()), sorted(tensors.items())])
    return f"{zlib.crc32(text.encode()):08x}"


def _sum(tensor: Tensor, file: BufferedReader | None = None) -> int:
    """A checksum of the bytes of a tensor. With a file, they are read from it first.

    A CRC-32 of 134 MB takes half as long as loading them. So whole blocks are added up, by rows and
    by columns: up to three changed numbers always change a sum. The CRC-32 is that of the sums.
    """
    content, found = tensor.contiguous().view(-1).view(torch.uint8).numpy(), 0
    for start in range(0, len(content), _BLOCK):
        block = content[start : start + _BLOCK]
        if file is not None and file.readinto(block.data) < len(block):
            raise ValueError(f"{file.name} is damaged: it ends early")
        if len(block) == _BLOCK:
            numbers = block.view(np.int64).reshape(-1, _ROW)
            sums = numbers.sum(0).tobytes() + numbers.sum(1).tobytes()
            found = zlib.crc32(sums, found)
        else:
            found = zlib.crc32(block.data, found)
    return found


def _read_metadata(path: Path, file: Any) -> dict[str, str]:
    metadata: dict[str, str] = file.metadata() or {}
    found = metadata.get("format", "")
    if found not in (_FORMAT, _WITHOUT_CHECKSUM):
        check_format(path, found.removeprefix(_NAME), _NEWEST)
        raise ValueError(f"{path} holds no saved state")
    return metadata


def _config(path: Path, metadata: dict[str, str]) -> ModelConfig:
    try:
        return ModelConfig.from_dict(json.loads(metadata["config"]))
    except _NO_CONFIG as error:
        raise ValueError(f"{path} is damaged: it does not say which model it is of") from error


def _differences(state: SavedState, config: ModelConfig) -> str:
    parts = []
    for field in fields(config):
        theirs, ours = getattr(state.config, field.name), getattr(config, field.name)
        if theirs != ours:
            parts.append(f"it has {field.name} {theirs!r}, the loaded model {ours!r}")
    return "; ".join(parts)


def _read_tokens_seen(path: Path, metadata: dict[str, str]) -> list[int]:
    try:
        seen = json.loads(metadata["tokens_seen"])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it does not say how much it has read") from error
    if not isinstance(seen, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in seen):
        raise ValueError(f"{path} is damaged: it has read {seen} tokens")
    return seen
