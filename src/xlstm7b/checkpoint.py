"""Reads and writes checkpoints: Hugging Face folders, hub ids, and the authors' own format.

Reading checks every name, shape and dtype in the files' headers before it reads a tensor. Writing
goes to a temporary folder with a sha256 manifest, which then replaces the target: a killed process
leaves the old checkpoint unchanged. Every error in a file is a `ValueError` that names the file.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import yaml

from xlstm7b import files, hub
from xlstm7b.config import ModelConfig, warn_of_unknown
from xlstm7b.files import Progress, Stored
from xlstm7b.quantize.config import GROUP_SIZES, Quantization, Scheme, schemes_in
from xlstm7b.quantize.weight import QuantizedWeight, unpack_int8
from xlstm7b.registry import PluginError
from xlstm7b.tokenizer import read_object

# Layers that some files hold as one matrix, with their rows in this order.
_FUSED = {
    "qkv_opreact": ("q", "k", "v", "ogate_preact"),
    "ifgate_preact": ("igate_preact", "fgate_preact"),
    "proj_up_gate_z": ("proj_up_gate", "proj_up"),
}
_BESIDE = (".weight_scale", ".weight_shape")  # tensors beside a quantised weight
# Matrices of a model that `xlstm7b quantize` may quantise: all but those of the gates.
_QUANTIZABLE = re.compile(r"lm_head\.weight|backbone\.blocks\.(?!.*([if]gate|norm)).*\.weight")
# The files that `save_checkpoint` writes and replaces. The manifest must list all of them.
_OWN_FILE = re.compile(
    rf"model([-_].*)?\.safetensors(\.index\.json)?|config\.json|{files.MANIFEST}", re.DOTALL
)


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. Its headers match its config; no tensor has been read."""

    folder: Path
    config: ModelConfig
    dtype: torch.dtype  # the narrowest that holds every stored tensor that is not quantised
    nbytes: int  # bytes of the stored tensors
    schemes: Mapping[str, Scheme]  # of the parameters that are quantised
    _stored: tuple[Stored, ...]  # without the scales and shapes of quantised parameters
    _scales: Mapping[str, Stored]  # by the names of the parameters

    def tensors(
        self, prefix: str = "", dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and memory-mapped tensors, one file after the other.

        Quantised ones are floats of `dtype`, by default of that of the others. Only those whose
        names start with `prefix`.
        """
        for name, tensor in self.weights(prefix):
            if isinstance(tensor, QuantizedWeight):
                tensor = tensor.dequantize(dtype or self.dtype)
            yield name, tensor

    def weights(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """As `tensors`, but quantised parameters as they are stored, copied to memory."""
        shapes = self.config.parameter_shapes()
        chosen = (part for part in self._stored if _our_names(part.key)[0].startswith(prefix))
        # What has been read of a mapped file counts as memory of the process. A quantised folder is
        # loaded where memory is short, so its file is mapped again for each tensor.
        by_mapping = groupby(chosen, lambda part: (part.file, part.key if self.schemes else None))
        for (file, _), parts in by_mapping:
            with files.opened_safetensors(file) as handle:
                for part in parts:
                    names = _our_names(part.key)
                    scheme = self.schemes.get(names[0])
                    if scheme is not None:
                        rows, columns = shapes[names[0]]
                        data = _copied(part)
                        if part.key != names[0] and scheme.name == "int8":
                            data = unpack_int8(data, columns)
                        scale = self.scale(names[0])
                        yield names[0], QuantizedWeight(scheme, (rows, columns), data, scale)
                        continue
                    sizes = [shapes[name][0] for name in names]
                    yield from zip(names, handle.get_tensor(part.key).split(sizes), strict=True)

    def scale(self, name: str) -> torch.Tensor:
        """The scales of a quantised parameter."""
        part = self._scales[name]
        scale = _copied(part)
        if not scale.isfinite().all():
            raise ValueError(f"{part.file}: {part.key} holds a scale that is not finite")
        return scale

    def fingerprint(self) -> dict[str, str]:
        """Digests of some rows of every parameter, by which an adapter recognises its base.

        `matrices` are those that may be quantised, `others` all other parameters: a quantised
        folder has the same `others` as its source. Floats are compared as bfloat16, so that
        float32 and bfloat16 make no difference. A float16 copy does: it is rounded twice.
        """
        shapes = self.config.parameter_shapes()
        digests = {"matrices": hashlib.sha256(), "others": hashlib.sha256()}
        samples: dict[str, bytes] = {}
        for file, parts in groupby(self._stored, key=lambda part: part.file):
            with files.opened_safetensors(file) as handle:
                for part in parts:
                    stored, start = handle.get_slice(part.key), 0
                    for name in _our_names(part.key):
                        count = shapes[name][0]
                        rows = [start + row for row in sorted({0, count // 2, count - 1})]
                        chosen = torch.cat([stored[row : row + 1] for row in rows])
                        kept = chosen if name in self.schemes else chosen.bfloat16()
                        samples[name] = kept.flatten().view(torch.uint8).numpy().tobytes()
                        start += count
        for name in sorted(samples):
            kind = "matrices" if _QUANTIZABLE.fullmatch(name) else "others"
            digests[kind].update(name.encode() + samples[name])
        kinds = ", ".join(sorted(map(str, set(self.schemes.values()))))
        found = {kind: digest.hexdigest() for kind, digest in digests.items()}
        return {"quantization": kinds, **found}

    def companions(self) -> list[Path]:
        """The tokenizer, licence and similar files in the folder."""
        return companions(self.folder)

    def copy_into(
        self, parameters: Mapping[str, torch.Tensor], progress: Progress | None = None
    ) -> None:
        """Copies every tensor into the parameter of that name, with its dtype and device."""
        stored = self.config.parameter_shapes().items()
        given = {name: tuple(tensor.shape) for name, tensor in parameters.items()}.items()
        for name, _ in sorted(stored ^ given):
            raise ValueError(
                f"{self.folder}: {name} has the shape {dict(stored).get(name)} in the checkpoint, "
                f"but {dict(given).get(name)} in the model"
            )
        assert not any(p.is_meta for p in parameters.values()), "the model is on the meta device"
        with torch.no_grad():
            for name, tensor in self.tensors():
                parameters[name].copy_(tensor)
                if progress:
                    progress(name, tensor.nbytes)


def _copied(part: Stored) -> torch.Tensor:
    """A copy of a stored tensor.

    The file is mapped for this tensor alone: what has been read of a mapped file counts as memory
    of the process, and all tensors of a file would count twice.
    """
    with files.opened_safetensors(part.file) as handle:
        tensor: torch.Tensor = handle.get_tensor(part.key).clone()
    return tensor


def same_weights(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Compares two fingerprints.

    The matrices count if both or none are quantised in the same way: what was trained on quantised
    weights may be used on the floats that they were made of, and the other way round.
    """
    compared = ["others"]
    if ours["quantization"] == theirs.get("quantization"):
        compared.append("matrices")
    return all(ours[kind] == theirs.get(kind) for kind in compared)


def companions(folder: Path) -> list[Path]:
    """The tokenizer, licence and similar files in a folder."""
    found = (path for pattern in hub.COMPANION_FILES for path in folder.glob(pattern))
    return sorted(path for path in found if path.is_file())


def resolve(
    folder_or_hub_id: str | Path,
    patterns: Sequence[str] = hub.MODEL_FILES,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
) -> Path:
    """The folder itself, or the local copy of a hub folder, whose names `hub.parse` reads.

    Files of the hub folder that match `patterns` are downloaded if needed.
    """
    if not str(folder_or_hub_id):  # else it would be the current folder
        raise ValueError("a folder or hub id is needed, and the one given is empty")
    folder = hub.locate(folder_or_hub_id, patterns, revision=revision, subfolder=subfolder)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}")
    return folder


def open_checkpoint(
    folder_or_hub_id: str | Path, *, revision: str | None = None, subfolder: str | None = None
) -> Checkpoint:
    """Reads the config and the headers of the weights, and checks that they match."""
    folder = resolve(folder_or_hub_id, revision=revision, subfolder=subfolder)
    config = read_config(folder)
    quantization = read_quantization(folder)
    dtypes = files.float_dtypes() | (files.quantized_dtypes() if quantization else {})
    everything = _read_headers(folder, dtypes)
    nbytes = sum(torch.Size(part.shape).numel() * part.dtype.itemsize for part in everything)
    stored = [part for part in everything if not part.key.endswith(_BESIDE)]
    beside = {part.key: part for part in everything if part.key.endswith(_BESIDE)}
    if config.num_blocks > len(stored):  # a damaged config: its parameters could be billions
        raise ValueError(
            f"{folder}: the config says num_blocks = {config.num_blocks}, "
            f"but the number of tensors in the weights is {len(stored)}"
        )
    shapes = config.parameter_shapes()
    seen: dict[str, Stored] = {}
    schemes: dict[str, Scheme] = {}
    scales: dict[str, Stored] = {}
    for part in stored:
        names = _our_names(part.key)
        for name in names:
            if name not in shapes:
                raise ValueError(f"{part.file}: {part.key!r} is not in a model of this config")
            if name in seen:
                raise ValueError(
                    f"{part.file}: {part.key} holds {name}, "
                    f"and so does {seen[name].key} in {seen[name].file.name}"
                )
            seen[name] = part
        if part.dtype not in files.float_dtypes().values():
            schemes[names[0]] = _check_quantized(part, names[0], shapes[names[0]], beside)
            scales[names[0]] = beside.pop(f"{names[0]}_scale")
            beside.pop(f"{names[0]}_shape", None)
            continue
        _, *width = shapes[names[0]]
        expected = (sum(shapes[name][0] for name in names), *width)
        if part.shape != expected:
            raise ValueError(
                f"{part.file}: {part.key} has the shape {part.shape}, the config says {expected}"
            )
    for part in beside.values():
        raise ValueError(f"{part.file}: {part.key!r} belongs to no quantised weight")
    named = schemes_in(quantization)
    for name, scheme in schemes.items():
        if scheme not in named:
            raise ValueError(
                f"{seen[name].file}: {seen[name].key} is {scheme}, but config.json says "
                f"{' and '.join(sorted(map(str, named)))}: one of the two files is of another model"
            )
    several = stored[0].file != stored[-1].file
    _refuse_missing(shapes.keys() - seen.keys(), folder if several else stored[0].file)
    floats = [part.dtype for part in stored if part.dtype in files.float_dtypes().values()]
    dtype = reduce(torch.promote_types, floats)
    return Checkpoint(folder, config, dtype, nbytes, schemes, tuple(stored), scales)


def _check_quantized(
    part: Stored, name: str, shape: tuple[int, ...], beside: Mapping[str, Stored]
) -> Scheme:
    """The scheme of a quantised weight. `ValueError` unless its codes and scales fit together."""
    scale = beside.get(f"{name}_scale")
    if len(shape) != 2:
        raise ValueError(f"{part.file}: {part.key} is quantised, but {name} is not a matrix")
    if scale is None:
        raise ValueError(f"{part.file}: {part.key} is quantised, but {name}_scale is missing")
    rows, columns = shape
    packed_int8 = (rows, -(-columns // 4))  # the library packs 8-bit codes too
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = shape, (rows, 1)
    if part.key == name and part.dtype in (torch.int8, torch.float8_e4m3fn):
        scheme = Scheme("int8" if part.dtype == torch.int8 else "fp8")
    elif part.key != name and part.dtype == torch.int32 and part.shape == packed_int8:
        scheme, shapes = Scheme("int8"), (packed_int8, (rows, 1))
    elif part.key != name and part.dtype == torch.int32:
        groups = scale.shape[1] if len(scale.shape) == 2 else 0
        if not groups or columns % groups or columns // groups not in GROUP_SIZES:
            raise ValueError(
                f"{scale.file}: {scale.key} has the shape {scale.shape}, which are no groups of "
                f"{', '.join(map(str, GROUP_SIZES))} in {columns} columns"
            )
        scheme, shapes = Scheme("int4", columns // groups), ((rows, columns // 8), (rows, groups))
    else:
        raise ValueError(f"{part.file}: {part.key} is stored as {part.dtype}, which is no scheme")
    for found, expected in zip((part, scale), shapes, strict=True):
        if found.shape != expected:
            raise ValueError(
                f"{found.file}: {found.key} has the shape {found.shape}, not {expected} as a "
                f"matrix {shape} in {scheme}"
            )
    if scale.dtype not in files.float_dtypes().values():
        raise ValueError(f"{scale.file}: {scale.key} is stored as {scale.dtype}, not as floats")
    return scheme


def save_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor | QuantizedWeight]],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    companions: Iterable[Path] = (),
    progress: Progress | None = None,
    quantization: Quantization | None = None,
    overwrite: bool = True,
) -> None:
    """Writes a Hugging Face folder with a sha256 manifest. Replaces a checkpoint that is there.

    `dtype` casts the tensors; by default each keeps its own. `companions` are files to copy into
    the folder, such as a tokenizer or a licence. Other files in the folder are kept. With
    `quantization`, some of the tensors are `QuantizedWeight`s. Without `overwrite`, a folder that
    holds something, or that another process is writing, is a `FileExistsError`.
    """
    target = check_target(folder)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    companions = list(companions)
    for path in companions:
        if is_own_file(path.name) or not path.name.isprintable():
            raise ValueError(
                f"{path} cannot be copied: its name is that of a checkpoint file or not printable"
            )

    with files.replacing(target, is_own_file, overwrite=overwrite) as aside:
        sums: dict[str, str] = {}

        def write(name: str, pieces: Iterable[bytes | memoryview]) -> None:
            sums[name] = files.write_hashed(aside / name, pieces)

        # 1. Other files, such as the tokenizer.
        for path in companions:
            write(path.name, [path.read_bytes()])
        # 2. The weights, under temporary names: the final names contain the number of shards.
        shards: list[list[str]] = []
        dtypes: set[torch.dtype] = set()
        nbytes = 0
        for shard in files.shards(_checked(tensors, config, dtype), max_shard_bytes):
            shards.append(list(shard))
            dtypes |= {tensor.dtype for key, tensor in shard.items() if not key.endswith(_BESIDE)}
            nbytes += sum(tensor.nbytes for tensor in shard.values())
            write(f"{len(shards)}.part", files.safetensors_pieces(shard, progress))
        file_of: dict[str, str] = {}
        for number, keys in enumerate(shards, 1):
            several = f"model-{number:05}-of-{len(shards):05}.safetensors"
            name = several if len(shards) > 1 else "model.safetensors"
            (aside / f"{number}.part").rename(aside / name)
            sums[name] = sums.pop(f"{number}.part")
            file_of |= dict.fromkeys(keys, name)
        # 3. The index, the config and the manifest.
        if len(shards) > 1:
            index = {"metadata": {"total_size": nbytes}, "weight_map": file_of}
            write(hub.WEIGHTS_INDEX, [files.json_bytes(index)])
        dtypes &= set(files.float_dtypes().values())
        stored = str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")
        described = config.to_dict(stored)
        if quantization is not None:
            described["quantization_config"] = quantization.to_dict()
        write("config.json", [files.json_bytes(described)])
        files.write_manifest(aside, sums)


def is_own_file(name: str) -> bool:
    """True for the names of the files that `save_checkpoint` writes: weights, config, manifest."""
    return _OWN_FILE.fullmatch(name) is not None


def check_target(folder: str | Path) -> Path:
    """The folder to save to, with links resolved. `ValueError` if it holds something else."""
    target = files.real_path(folder)  # keeps a symbolic link and replaces the folder it points to
    files.check_writable(target)
    taken = target.exists()
    if taken and not target.is_dir():
        raise ValueError(f"{target} is a file; a checkpoint is a folder")
    if taken and not (target / "config.json").exists() and any(target.iterdir()):
        raise ValueError(
            f"{target} holds other files and no config.json: save to a new or an empty folder"
        )
    return target


def transformers_limits(config: ModelConfig) -> list[str]:
    """Why `transformers` cannot run a model of this config, one sentence each; empty if it can."""
    others = ", ".join(f"{name} = {value!r}" for name, value in config.differences().items())
    if others:
        return [f"transformers cannot load this model: it has {others}"]
    found = []
    for field, what, width in (
        ("qk_dim_factor", "queries and keys", config.qk_dim),
        ("v_dim_factor", "values", config.v_dim),
    ):
        # Its layers have the exact width, its states the width rounded up to a multiple of 64.
        exact = int(config.embedding_dim * getattr(config, field))
        if exact != width or width % 64:
            found.append(
                f"transformers cannot run this model: {field} gives its {what} a width of {exact}, "
                f"which is not {'a multiple of 64' if exact == width else f'the {width} used here'}"
            )
    if config.cell_norm_eps != config.norm_eps:
        found.append(
            f"transformers computes other logits: it uses norm_eps ({config.norm_eps}) where this "
            f"model has cell_norm_eps ({config.cell_norm_eps})"
        )
    return found


def verify(folder: str | Path, progress: Progress | None = None) -> int:
    """Checks every file against the folder's manifest. Returns the number of files."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    own = {path.name for path in folder.iterdir() if is_own_file(path.name)}
    sums = files.read_manifest(folder, own - {files.MANIFEST})
    for name, digest in sums.items():
        files.check_sha256(folder / name, digest)
        if progress:
            progress(name, (folder / name).stat().st_size)
    return len(sums)


def read_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder, from config.json or config.yaml."""
    path = folder / "config.json"
    if path.is_file():
        return ModelConfig.from_file(path)
    path = folder / "config.yaml"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise ValueError(
                f"{folder} is an adapter, not a model: give the model that it adapts (generate, "
                "chat, eval and serve take the adapter with --adapter), or make one model of both "
                "with `xlstm7b merge MODEL ADAPTER TARGET`"
            )
        if (folder / "checkpoints").is_dir():
            raise ValueError(f"{folder} is the folder of a {run_advice(folder)}")
        raise ValueError(f"{folder} holds neither config.json nor config.yaml: not a checkpoint")
    with path.open("rb") as file:
        try:
            values = yaml.safe_load(file)
            nested = (dict, list, set)
            if not isinstance(values, dict) or any(isinstance(v, nested) for v in values.values()):
                raise ValueError("it must be a flat list of fields")
            # The default of the authors' code.
            config = ModelConfig.from_dict({"ffn_proj_factor": 2.6667, **values})
        except PluginError:
            raise
        except Exception as error:  # PyYAML can raise any type on damaged files
            raise ValueError(f"{path}: {error}") from error
    warn_of_unknown(values, path)
    return config


def run_advice(folder: Path) -> str:
    """What kind of run a folder holds, and how to get the weights after it."""
    recipe = read_object(folder / "recipe.json")
    if recipe.get("lora"):
        return (
            "LoRA run: make an adapter of it with `xlstm7b export`, then give the folder that "
            "`xlstm7b merge MODEL ADAPTER TARGET` makes of the model and the adapter"
        )
    if recipe.get("state_tuning"):
        return (
            "state-tuning run, which changes no weights: give the model that it started from, "
            f"{recipe.get('init_from')}"
        )
    return "run: give the folder that `xlstm7b export` makes of it"


def read_quantization(folder: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a folder whose config has been read; None without one."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found: dict[str, Any] | None = values.get("quantization_config")
    return found


def _read_headers(folder: Path, dtypes: Mapping[str, torch.dtype]) -> list[Stored]:
    """The tensors of a single file, of the shards in an index, or of numbered shards."""
    single, index = folder / "model.safetensors", folder / hub.WEIGHTS_INDEX
    if single.exists():
        return files.read_headers([single], dtypes)
    if not index.exists():
        count = len(list(folder.glob("model_*.safetensors")))
        if not count:
            raise ValueError(f"{folder} holds neither {single.name} nor {hub.WEIGHTS_INDEX}")
        return files.read_headers([folder / f"model_{n}.safetensors" for n in range(count)], dtypes)
    file_of = _read_index(index)
    stored = files.read_headers([folder / name for name in sorted(set(file_of.values()))], dtypes)
    found = {(part.key, part.file.name) for part in stored}
    for key, name in sorted(found ^ file_of.items()):
        if (key, name) in found:
            raise ValueError(
                f"{folder / name} holds {key!r}, but {hub.WEIGHTS_INDEX} does not list it there"
            )
        raise ValueError(
            f"{folder / name} does not hold {key!r}, but {hub.WEIGHTS_INDEX} lists it there"
        )
    return stored


def _read_index(index: Path) -> dict[str, str]:
    """The index's map from keys to file names. The files exist in the folder of the index."""
    try:
        stored = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is not JSON: {error}") from error
    file_of = stored.get("weight_map") if isinstance(stored, dict) else None
    if not isinstance(file_of, dict) or not file_of:
        raise ValueError(f"{index}: weight_map is not a map from keys to files")
    for key, name in file_of.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise ValueError(f"{index}: {key!r} is in {name!r}, which is not a file of this folder")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent} has no file {name!r}, which should hold {key!r}")
    return file_of


def _our_names(key: str) -> tuple[str, ...]:
    """The parameters that a key in a file stands for, in the order of its rows."""
    if key == "embedding.weight":  # in the authors' format
        return ("backbone.embeddings.weight",)
    if key.endswith(".weight_packed"):  # of a quantised weight
        return (key.removesuffix("_packed"),)
    path, _, kind = key.rpartition(".")
    block, _, layer = path.rpartition(".")
    if layer not in _FUSED:
        return (key,)
    return tuple(f"{block}.{part}.{kind}" for part in _FUSED[layer])


def _checked(
    tensors: Iterable[tuple[str, torch.Tensor | QuantizedWeight]],
    config: ModelConfig,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as they will be stored. `ValueError` unless they are exactly the config's."""
    shapes = config.parameter_shapes()
    missing = set(shapes)
    for name, tensor in tensors:
        if name not in missing:
            reason = "was given twice" if name in shapes else "is not a parameter of this config"
            raise ValueError(f"{name} {reason}")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}, the config says {shapes[name]}"
            )
        if isinstance(tensor, QuantizedWeight):
            missing.remove(name)
            yield from tensor.stored(name).items()
            continue
        if (dtype or tensor.dtype) not in files.float_dtypes().values():
            raise ValueError(f"{name} cannot be stored as {dtype or tensor.dtype}")
        missing.remove(name)
        stored = tensor.detach().to("cpu", dtype)
        if stored.dtype != tensor.dtype and stored.isinf().sum() > tensor.isinf().sum():
            raise ValueError(f"{name} has values that are too large for {dtype}")
        yield name, stored
    _refuse_missing(missing, "the tensors to save")


def _refuse_missing(names: Collection[str], where: str | Path) -> None:
    if names:
        others = f", and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(f"{where}: {min(names)} is missing{others}")
