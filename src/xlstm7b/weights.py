"""Checkpoints in and out: Hugging Face folders, hub ids, and the authors' standalone folders.

Reading maps one safetensors file at a time and checks every name, shape and type on the headers
before any tensor is touched. Writing streams into a folder beside the target, with a sha256
manifest, and swaps the two: a killed save leaves the old checkpoint as it was.
Every problem with a file's content is a `ValueError` that names the file.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from pathlib import Path

import torch
import yaml

from xlstm7b import files
from xlstm7b.config import ModelConfig
from xlstm7b.files import Progress, Stored

# Layers that a file may hold stacked by rows, in this order.
_FUSED = {
    "qkv_opreact": ("q", "k", "v", "ogate_preact"),
    "ifgate_preact": ("igate_preact", "fgate_preact"),
    "proj_up_gate_z": ("proj_up_gate", "proj_up"),
}
_INDEX = "model.safetensors.index.json"
# The files that a save writes: it replaces them all, and the manifest has to list them.
_OWN_FILE = re.compile(
    rf"model([-_].*)?\.safetensors(\.index\.json)?|config\.json|{files.MANIFEST}", re.DOTALL
)
# What belongs beside the weights and says nothing of them.
_COMPANIONS = ["tokenizer*", "special_tokens_map.json", "chat_template*", "LICENSE*"]
_HUB_FILES = ["config.json", "config.yaml", "model*.safetensors", _INDEX, *_COMPANIONS]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint whose headers fit its config; no tensor has been read."""

    folder: Path
    config: ModelConfig
    dtype: torch.dtype  # the narrowest that holds every stored tensor
    nbytes: int  # of the tensors, as stored
    _stored: tuple[Stored, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and memory-mapped tensors, file by file."""
        shapes = self.config.parameter_shapes()
        for file, parts in groupby(self._stored, key=lambda part: part.file):
            with files.opened_safetensors(file) as handle:
                for part in parts:
                    names = _our_names(part.key)
                    rows = [shapes[name][0] for name in names]
                    yield from zip(names, handle.get_tensor(part.key).split(rows), strict=True)

    def companions(self) -> list[Path]:
        """The tokenizer, licence and the like that lie beside the weights."""
        found = (path for pattern in _COMPANIONS for path in self.folder.glob(pattern))
        return sorted(path for path in found if path.is_file())

    def copy_into(
        self, parameters: Mapping[str, torch.Tensor], progress: Progress | None = None
    ) -> None:
        """Copies every tensor into its place, in the dtype and on the device it finds there."""
        stored = self.config.parameter_shapes().items()
        given = {name: tuple(tensor.shape) for name, tensor in parameters.items()}.items()
        for name, _ in sorted(stored ^ given):
            raise ValueError(
                f"{self.folder}: {name} has the shape {dict(stored).get(name)} in the checkpoint, "
                f"but {dict(given).get(name)} in the model"
            )
        assert not any(tensor.is_meta for tensor in parameters.values()), "no memory to load into"
        with torch.no_grad():
            for name, tensor in self.tensors():
                parameters[name].copy_(tensor)
                if progress:
                    progress(name, tensor.nbytes)


def resolve(folder_or_hub_id: str | Path) -> Path:
    """The folder itself, or the local copy of a hub repository, downloaded if need be."""
    name, folder = str(folder_or_hub_id), Path(folder_or_hub_id)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{name} is a file; a checkpoint is a folder")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name, re.ASCII):
        raise ValueError(f"there is no folder {name!r}, nor is that the name of a hub repository")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's HTTP library, and so its errors, changes by version
        reason = " ".join(str(error).split())
        raise OSError(
            f"there is no folder {name!r}, and the Hugging Face hub does not give it: {reason}"
        ) from error


def open_checkpoint(folder_or_hub_id: str | Path) -> Checkpoint:
    """Reads the config and the weights' headers, and checks the ones against the other."""
    folder = resolve(folder_or_hub_id)
    config = read_config(folder)
    stored = _read_headers(folder)
    if config.num_blocks > len(stored):  # a damaged config: do not even list its parameters
        raise ValueError(
            f"{folder}: the config says num_blocks = {config.num_blocks}, "
            f"but the weights hold only {len(stored)} tensors"
        )
    shapes = config.parameter_shapes()
    seen: dict[str, Stored] = {}
    for part in stored:
        names = _our_names(part.key)
        for name in names:
            if name not in shapes:
                raise ValueError(f"{part.file}: the config has no place for {part.key!r}")
            if name in seen:
                raise ValueError(
                    f"{part.file}: {part.key} holds {name}, "
                    f"and so does {seen[name].key} in {seen[name].file.name}"
                )
            seen[name] = part
        _, *width = shapes[names[0]]
        expected = (sum(shapes[name][0] for name in names), *width)
        if part.shape != expected:
            raise ValueError(
                f"{part.file}: {part.key} has the shape {part.shape}, the config says {expected}"
            )
    several = stored[0].file != stored[-1].file
    _refuse_missing(shapes.keys() - seen.keys(), folder if several else stored[0].file)
    dtype = reduce(torch.promote_types, (part.dtype for part in stored))
    nbytes = sum(torch.Size(part.shape).numel() * part.dtype.itemsize for part in stored)
    return Checkpoint(folder, config, dtype, nbytes, tuple(stored))


def save_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    companions: Iterable[Path] = (),
    progress: Progress | None = None,
) -> None:
    """Writes a Hugging Face folder with a sha256 manifest, in place of any that stands there.

    `dtype` casts on the way; without it every tensor keeps its own. `companions` are files to
    copy in, a tokenizer or a licence. Other files that already lie in the folder stay.
    """
    target = Path(folder).resolve()  # through a link, so that the link itself stays
    taken = target.exists()
    if taken and not target.is_dir():
        raise ValueError(f"{target} is a file; a checkpoint is a folder")
    if taken and not (target / "config.json").exists() and any(target.iterdir()):
        raise ValueError(
            f"{target} holds other files and no config.json: save to a new or an empty folder"
        )
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    companions = list(companions)
    for path in companions:
        if _OWN_FILE.fullmatch(path.name) or not path.name.isprintable():
            raise ValueError(f"{path} cannot go along: its name is taken or cannot be listed")

    with files.replacing(target, lambda name: _OWN_FILE.fullmatch(name) is not None) as aside:
        sums: dict[str, str] = {}

        def write(name: str, pieces: Iterable[bytes | memoryview]) -> None:
            sums[name] = files.write_hashed(aside / name, pieces)

        for path in companions:
            write(path.name, [path.read_bytes()])
        shards: list[list[str]] = []
        dtypes: set[torch.dtype] = set()
        nbytes = 0
        for shard in files.shards(_checked(tensors, config, dtype), max_shard_bytes):
            shards.append(list(shard))
            dtypes |= {tensor.dtype for tensor in shard.values()}
            nbytes += sum(tensor.nbytes for tensor in shard.values())
            write(f"{len(shards)}.part", files.safetensors_pieces(shard, progress))
        placed: dict[str, str] = {}
        for number, keys in enumerate(shards, 1):  # only now is their number known
            several = f"model-{number:05}-of-{len(shards):05}.safetensors"
            name = several if len(shards) > 1 else "model.safetensors"
            (aside / f"{number}.part").rename(aside / name)
            sums[name] = sums.pop(f"{number}.part")
            placed |= dict.fromkeys(keys, name)
        if len(shards) > 1:
            write(_INDEX, _json({"metadata": {"total_size": nbytes}, "weight_map": placed}))
        stored = str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")
        write("config.json", _json(config.to_dict(stored)))
        files.write_manifest(aside, sums)


def _json(value: object) -> list[bytes]:
    return [json.dumps(value, indent=2).encode(), b"\n"]


def verify(folder: str | Path, progress: Progress | None = None) -> int:
    """Hashes every file that the folder's manifest lists; returns their number."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    own = {path.name for path in folder.iterdir() if _OWN_FILE.fullmatch(path.name)}
    return files.check_manifest(folder, own - {files.MANIFEST}, progress)


def read_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder of either format."""
    path = folder / "config.json"
    if path.is_file():
        return ModelConfig.from_file(path)
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{folder} holds neither config.json nor config.yaml: not a checkpoint")
    with path.open("rb") as file:
        try:
            values = yaml.safe_load(file)
            nested = (dict, list, set)
            if not isinstance(values, dict) or any(isinstance(v, nested) for v in values.values()):
                raise ValueError("not a flat list of fields")
            # The standalone code has another default here.
            return ModelConfig.from_dict({"ffn_proj_factor": 2.6667, **values})
        except Exception as error:  # PyYAML lets any of them out when a scalar is damaged
            raise ValueError(f"{path}: {error}") from error


def _read_headers(folder: Path) -> list[Stored]:
    """Every stored tensor, of a single file, of an index's shards or of numbered shards."""
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.exists():
        return files.read_headers([single])
    if not index.exists():
        count = len(list(folder.glob("model_*.safetensors")))
        if not count:
            raise ValueError(f"{folder} holds neither {single.name} nor {_INDEX}")
        return files.read_headers([folder / f"model_{n}.safetensors" for n in range(count)])
    placed = _read_index(index)
    stored = files.read_headers([folder / name for name in sorted(set(placed.values()))])
    found = {(part.key, part.file.name) for part in stored}
    for key, name in sorted(found ^ placed.items()):
        verbs = ("holds", "does not") if (key, name) in found else ("lacks", "does")
        raise ValueError(f"{folder / name} {verbs[0]} {key!r}, but {_INDEX} {verbs[1]} list it so")
    return stored


def _read_index(index: Path) -> dict[str, str]:
    """The index's map from keys to files, each of which is a file in the index's folder."""
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise ValueError(f"{index} is not an index of shards: {error!r}") from error
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index}: weight_map is not a map from keys to files")
    for key, name in placed.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise ValueError(f"{index}: {key!r} is placed in {name!r}, not a file of this folder")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent} lacks {name!r}, which should hold {key!r}")
    return placed


def _our_names(key: str) -> tuple[str, ...]:
    """The parameters that a file's key stands for, in the order of its rows."""
    if key == "embedding.weight":  # in standalone folders
        return ("backbone.embeddings.weight",)
    path, _, kind = key.rpartition(".")
    block, _, layer = path.rpartition(".")
    if layer not in _FUSED:
        return (key,)
    return tuple(f"{block}.{part}.{kind}" for part in _FUSED[layer])


def _checked(
    tensors: Iterable[tuple[str, torch.Tensor]], config: ModelConfig, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as they will be stored; raises unless they are the config's, each once."""
    shapes = config.parameter_shapes()
    missing = set(shapes)
    for name, tensor in tensors:
        if name not in missing:
            raise ValueError(f"{name} was given twice" if name in shapes else
                             f"{name} is not a parameter of this config")  # fmt: skip
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}, the config says {shapes[name]}"
            )
        if (dtype or tensor.dtype) not in files.DTYPES.values():
            raise ValueError(f"{name} cannot be stored as {dtype or tensor.dtype}")
        missing.remove(name)
        stored = tensor.detach().to("cpu", dtype)
        if stored.dtype != tensor.dtype and stored.isinf().sum() > tensor.isinf().sum():
            raise ValueError(f"{name} holds numbers too large for {dtype}")
        yield name, stored
    _refuse_missing(missing, "the tensors to save")


def _refuse_missing(names: Collection[str], where: str | Path) -> None:
    if names:
        others = f", and {len(names) - 1} others" if len(names) > 1 else ""
        raise ValueError(f"{where}: {min(names)} is missing{others}")
