"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

    adapter = load_adapter("my-adapter", model.config)
    merge_adapter(model, adapter)

An adapter that this package wrote also holds a fingerprint of its base, in the metadata of the
safetensors file, which PEFT ignores. Weights of an adapter are never unpickled.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

import torch
from torch import Tensor, nn

from xlstm7b import files, hub
from xlstm7b.checkpoint import (
    Checkpoint,
    check_target,
    companions,
    open_checkpoint,
    resolve,
    same_weights,
    save_checkpoint,
)
from xlstm7b.config import ModelConfig
from xlstm7b.model.layers import QuantizedLinear
from xlstm7b.model.lm import XLSTM
from xlstm7b.model.lora import LoraLinear
from xlstm7b.patterns import first_matches
from xlstm7b.tokenizer import check_trained, load_tokenizer, other_end, read_object

if TYPE_CHECKING:
    from xlstm7b.model.publish import Options

CONFIG, WEIGHTS = hub.ADAPTER_CONFIG, hub.ADAPTER_WEIGHTS
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
# Fields of the config that may have any value: they do not change what an adapter computes.
_INITIAL = {"eva_config", "loftq_config"}
# Of what this package adds to PEFT's format, in the metadata of the weights.
_FORMAT, _NEWEST = "xlstm7b_format", 1
# Ways to start an adapter that change the base's weights too.
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LowRank(NamedTuple):
    """The addition to one matrix [N, K]: scale · B A, with A [rank, K] and B [N, rank]."""

    A: Tensor
    B: Tensor
    scale: float

    def to(self, dtype: torch.dtype | None) -> Self:
        return self._replace(A=self.A.to(dtype), B=self.B.to(dtype))

    def product(self, dtype: torch.dtype) -> Tensor:
        """The addition as a matrix, in float32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        return self.scale * (self.B.to(wide) @ self.A.to(wide))


@dataclass(frozen=True)
class Adapter:
    """Additions to matrices of a model, by the paths of their layers."""

    folder: Path
    layers: Mapping[str, LowRank]
    base: Mapping[str, str]  # fingerprint of the weights that it was trained on; {}: not known
    base_name: str  # where they were
    fingerprint: str  # of A and B
    end: int | None = None  # an end-of-text id besides the model's own, see `other_end`

    def push_to_hub(self, repo: str, **options: "Unpack[Options]") -> str:
        """Uploads the adapter's folder; `options` are those of `publish.Options`."""
        from xlstm7b.model.publish import push_to_hub

        return push_to_hub(self.folder, repo, **options)

    def template_folder(self, base: Path) -> Path:
        """Where the chat template is: the adapter's folder if it has one, else the base's."""
        described = read_object(self.folder / "tokenizer_config.json")
        has_own = "chat_template" in described or (self.folder / "chat_template.jinja").is_file()
        return self.folder if has_own else base


def load_adapter(
    folder_or_hub_id: str | Path,
    config: ModelConfig,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
) -> Adapter:
    """Reads an adapter for a model of this config. Anything that does not fit is a `ValueError`."""
    try:
        folder = resolve(
            folder_or_hub_id, hub.ADAPTER_FILES, revision=revision, subfolder=subfolder
        )
    except ValueError as error:
        raise ValueError(f"there is no adapter: {error}") from error
    settings = read_settings(folder)
    path, shapes = folder / WEIGHTS, config.parameter_shapes()
    if not path.is_file() and (folder / "adapter_model.bin").exists():
        raise ValueError(f"{folder} holds a pickle, adapter_model.bin: save it as {WEIGHTS}")
    parts: dict[str, dict[str, Tensor]] = {}
    digest = hashlib.sha256()
    with files.opened_safetensors(path) as file:
        metadata = file.metadata() or {}
        files.check_format(path, metadata.get(_FORMAT), _NEWEST)
        for key in sorted(file.keys()):
            match = _KEY.fullmatch(key)
            if key.endswith(".base_layer.weight"):
                continue  # PEFT saves the head of the base too, if it is adapted
            if match is None:
                raise ValueError(
                    f"{path}: {key!r} is not supported, only lora_A and lora_B: "
                    f"{_merge_advice(folder)}"
                )
            layer, side = match[1], match[2]
            shape = shapes.get(f"{layer}.weight", ())
            if len(shape) != 2 or layer == "backbone.embeddings":
                raise ValueError(f"{path}: {key!r} is for no matrix of this model")
            tensor = file.get_tensor(key).clone()
            if not tensor.is_floating_point():
                kind = str(tensor.dtype).removeprefix("torch.")
                raise ValueError(f"{path}: {key!r} is of type {kind}, not of a floating-point type")
            if not tensor.float().isfinite().all():
                raise ValueError(f"{path}: {key!r} holds values that are not finite numbers")
            if side in parts.setdefault(layer, {}):
                raise ValueError(f"{path} holds lora_{side} of {layer} twice")
            parts[layer][side] = tensor
            digest.update(key.encode() + tensor.float().flatten().view(torch.uint8).numpy().data)
    layers = {}
    ranks = _by_layer(folder / CONFIG, settings, "r", "rank_pattern", parts)
    alphas = _by_layer(folder / CONFIG, settings, "lora_alpha", "alpha_pattern", parts)
    for layer, sides in parts.items():
        rows, columns = shapes[f"{layer}.weight"]
        given = {side: tuple(tensor.shape) for side, tensor in sides.items()}
        rank = next(iter(given.get("A", ())), 0)
        if given != {"A": (rank, columns), "B": (rows, rank)} or not rank:
            raise ValueError(
                f"{path}: A and B of {layer} have the shapes {given}, "
                f"for a matrix of {rows} × {columns}: give the model that was adapted"
            )
        if ranks[layer] != rank:
            raise ValueError(
                f"{folder / CONFIG}: the rank of {layer} is {ranks[layer]!r}, "
                f"but A and B have {rank}"
            )
        scale = _scale(folder / CONFIG, settings, alphas[layer], rank)
        layers[layer] = LowRank(sides["A"], sides["B"], scale)
        digest.update(repr(scale).encode())
    if not layers:
        raise ValueError(f"{path} holds no adapter")
    try:
        base = json.loads(metadata.get("base", "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its metadata are no JSON") from error
    if not isinstance(base, dict):
        raise ValueError(f"{path} is damaged: the fingerprint of its base is {base!r}")
    name = str(settings.get("base_model_name_or_path") or "")
    return Adapter(folder, layers, base, name, digest.hexdigest())


def read_settings(folder: Path) -> dict[str, Any]:
    """The config of an adapter that this package can use; for any other a `ValueError`."""
    path = folder / CONFIG
    if not path.is_file():
        hint = "not an adapter"
        if (folder / "checkpoints").is_dir():
            hint = "give the folder that `xlstm7b export` makes of this run"
        elif inside := sorted(found.parent for found in folder.glob(f"*/{CONFIG}")):
            # PEFT's adapters with names, and the checkpoints of Trainer.
            hint = f"not an adapter; give {', or '.join(map(str, inside[:3]))}"
        raise ValueError(f"{folder} holds no {CONFIG}: {hint}")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a JSON {type(settings).__name__}, not an object")
    if (kind := settings.get("peft_type")) != "LORA":
        raise ValueError(f"{path}: the peft_type {kind!r} is not supported, only 'LORA'")
    others = (
        *(key for key in settings if key.startswith("use_") and key != "use_rslora"),
        *(key for key in settings if key.endswith("_config") and key not in _INITIAL),
        *("lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication"),
        *("trainable_token_indices", "target_parameters", "alora_invocation_tokens"),
    )
    refused = [f"{key} = {settings[key]!r}" for key in others if settings.get(key)]
    if settings.get("bias", "none") != "none":
        refused.append(f"bias = {settings['bias']!r}")
    if refused:
        raise ValueError(f"{path}: {refused[0]} is not supported: {_merge_advice(folder)}")
    if str(settings.get("init_lora_weights")).startswith(_CHANGE_BASE):
        raise ValueError(
            f"{path}: init_lora_weights = {settings['init_lora_weights']!r} changes the base's "
            "weights: convert it to an ordinary adapter with PEFT first"
        )
    return settings


def _merge_advice(folder: Path) -> str:
    return (
        f"merge the adapter with PEFT first, by PeftModel.from_pretrained(base, {str(folder)!r})"
        ".merge_and_unload().save_pretrained(TARGET), and use TARGET as the model, without the "
        "adapter"
    )


def _scale(path: Path, settings: Mapping[str, Any], alpha: Any, rank: int) -> float:
    """alpha / rank, or alpha / √rank with `use_rslora`."""
    try:
        scale = float(alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank)
    except (TypeError, OverflowError):
        scale = math.nan
    if not math.isfinite(scale):
        raise ValueError(f"{path}: lora_alpha is {alpha!r}, not a finite number")
    return scale


def _by_layer(
    path: Path, settings: Mapping[str, Any], name: str, patterns: str, layers: Iterable[str]
) -> dict[str, Any]:
    """A setting of each layer: that of the first pattern that matches it, else that of `name`.

    As in PEFT, a pattern matches the end of the layer's path.
    """
    given = settings.get(patterns) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{path}: {patterns} is {given!r}, not an object of patterns and numbers")
    found = dict.fromkeys(layers, settings.get(name, 8))  # PEFT's default of both
    try:
        matches = first_matches([*given], [*found], form=r"(.*\.)?({})$")
    except ValueError as error:
        raise ValueError(f"{path}: {patterns}: {error}") from error
    values = [*given.values()]
    for layer, number in zip(found, matches, strict=True):
        if number is not None:
            found[layer] = values[number]
    return found


def save_adapter(
    folder: str | Path,
    layers: Mapping[str, LowRank],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: Iterable[str],
    base: Mapping[str, str],
    base_name: str,
    companion_files: Iterable[Path] = (),
    overwrite: bool = True,
) -> None:
    """Writes a folder that PEFT loads. It appears when it is complete.

    `overwrite` is that of `save_checkpoint`.
    """
    target = files.real_path(folder)
    files.check_writable(target)
    if target.is_file():
        raise ValueError(f"{target} is a file; an adapter is a folder")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors = {
        f"base_model.model.{path}.lora_{side}.weight": tensor.contiguous()
        for path, layer in layers.items()
        for side, tensor in (("A", layer.A), ("B", layer.B))
    }
    metadata = {"format": "pt", _FORMAT: str(_NEWEST), "base": json.dumps(dict(base))}
    own = (CONFIG, WEIGHTS)
    with files.replacing(target, lambda name: name in own, overwrite=overwrite) as aside:
        for path in companion_files:
            files.write_hashed(aside / path.name, [path.read_bytes()])
        files.write_json(aside / CONFIG, settings)
        files.write_hashed(aside / WEIGHTS, files.safetensors_pieces(tensors, metadata=metadata))


def check_base(adapter: Adapter, base: Checkpoint) -> None:
    """`ValueError` if the adapter was trained on other weights (see `same_weights`)."""
    if not adapter.base:
        return
    if not same_weights(base.fingerprint(), adapter.base):
        where = f", {adapter.base_name}" if adapter.base_name else ""
        raise ValueError(
            f"{adapter.folder} was trained on other weights than those in {base.folder}: give the "
            f"base that it was trained on{where}"
        )


@torch.no_grad()
def merge_adapter(model: XLSTM, adapter: Adapter) -> None:
    """Adds the adapter to the weights, which must be floats."""
    for path, layer in adapter.layers.items():
        module: Any = model.get_submodule(path)
        if isinstance(module, QuantizedLinear):
            raise ValueError(f"{path} is quantised: an adapter cannot be merged into it")
        weight = module.weight
        weight.copy_(weight + layer.product(weight.dtype).to(weight.device))


@torch.no_grad()
def apply_adapter(model: XLSTM, adapter: Adapter) -> None:
    """Makes a model compute with the adapter: merged into floats, added to quantised layers."""
    quantized: dict[str, LowRank] = {}
    floats = dict(adapter.layers)
    for path in adapter.layers:
        if isinstance(model.get_submodule(path), QuantizedLinear):
            quantized[path] = floats.pop(path)
    if "lm_head" in quantized:
        raise ValueError(
            f"{adapter.folder} changes lm_head, which is quantised here: use float weights"
        )
    merge_adapter(model, replace(adapter, layers=floats))
    like = model.backbone.embeddings.weight
    for path, (A, B, scale) in quantized.items():
        layer = LoraLinear(model.get_submodule(path), len(A), scale=scale)
        layer.lora_A = nn.Parameter(A.to(like), requires_grad=False)
        layer.lora_B = nn.Parameter(B.to(like), requires_grad=False)
        model.set_submodule(path, layer)


def load_adapted(
    folder_or_hub_id: str | Path,
    adapter: str | Path | None,
    **options: Any,
) -> XLSTM:
    """`XLSTM.from_pretrained` with these options, and an adapter for these weights."""
    base = open_checkpoint(folder_or_hub_id)
    loaded = None
    if adapter is not None:
        loaded = load_adapter(adapter, base.config)
        check_base(loaded, base)
    model = XLSTM.from_pretrained(base.folder, **options)
    if loaded is not None:
        apply_adapter(model, loaded)
    return model


def merge_checkpoint(
    base: str | Path, adapter: str | Path, target: str | Path, *, overwrite: bool = True
) -> None:
    """Writes the base with the adapter added, in the base's dtype: an ordinary checkpoint.

    Tokenizer, chat template and end-of-text token are those of the adapter's folder, where it has
    them. `overwrite` is that of `save_checkpoint`.
    """
    opened = open_checkpoint(base)
    if opened.schemes:
        raise ValueError(
            f"the weights in {opened.folder} are quantised, and an adapter cannot be merged into "
            "them: merge it into the float weights and quantise the result, or give the adapter "
            "to generate, chat, eval or serve with --adapter"
        )
    added = load_adapter(adapter, opened.config)
    check_base(added, opened)
    folder = check_target(target)
    for source in (opened.folder, added.folder):
        if folder == source.resolve():
            raise ValueError(f"{folder} is also read; choose another folder for the merged weights")
    beside = {path.name: path for path in [*opened.companions(), *companions(added.folder)]}
    config = opened.config
    if "tokenizer.json" in beside:
        tokenizer = load_tokenizer(beside["tokenizer.json"], config.vocab_size)
        end = other_end(added.folder, tokenizer, config)
        config = config if end is None else replace(config, eos_token_id=end)
        if "tokenizer_config.json" in beside:  # other commands would refuse the merged folder
            described = beside["tokenizer_config.json"].parent
            check_trained(described, tokenizer, config, beside["tokenizer.json"].parent)
    save_checkpoint(
        folder,
        config,
        _merged(opened, added),
        companions=beside.values(),
        overwrite=overwrite,
    )


def _merged(base: Checkpoint, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in base.tensors():
        layer = adapter.layers.get(name.removesuffix(".weight"))
        if layer is not None:
            tensor = (tensor + layer.product(tensor.dtype)).to(tensor.dtype)
        yield name, tensor
