"""Scheme and Quantization: how weights are quantised, and the `quantization_config` that says so.

The format is that of the compressed-tensors library. This file reads and writes it without the
library, and without torch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from xlstm7b.patterns import first_matches

GROUP_SIZES = (32, 64, 128)
SCHEMES = ("int8", "fp8", "int4")

_GATES = "re:.*[if]gate_preact$"  # stay in 16 or 32 bits
_HEAD = "lm_head"
_FORMATS = {"int8": "int-quantized", "fp8": "float-quantized", "int4": "pack-quantized"}


@dataclass(frozen=True)
class Scheme:
    """How one matrix [N, K] is quantised.

    int8 and fp8 (e4m3) have one scale for each row. int4 has one for each group of `group_size`
    values along K. All are symmetric: a weight is its code times its scale.
    """

    name: str
    group_size: int = 0  # of int4

    def __post_init__(self) -> None:
        if self.name not in SCHEMES:
            raise ValueError(f"unknown scheme {self.name!r}; choose from {', '.join(SCHEMES)}")
        if self.name == "int4" and self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(f"the group size must be one of {sizes}, not {self.group_size}")

    def __str__(self) -> str:
        return f"int4 in groups of {self.group_size}" if self.group_size else self.name

    @property
    def bytes_per_weight(self) -> float:
        """With the share of a group's bfloat16 scale. Scales of whole rows are not counted."""
        return 0.5 + 2 / self.group_size if self.group_size else 1.0

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """`ValueError` if a matrix of this shape cannot be quantised in this scheme."""
        if self.group_size and shape[1] % self.group_size:
            fitting = [str(size) for size in GROUP_SIZES if shape[1] % size == 0]
            advice = f"use a group size of {' or '.join(fitting)}" if fitting else "use int8"
            raise ValueError(
                f"{name} has {shape[1]} columns, not a multiple of the group size "
                f"{self.group_size}: {advice}"
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_bits": 4 if self.name == "int4" else 8,
            "type": "float" if self.name == "fp8" else "int",
            "symmetric": True,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size or None,
            "dynamic": False,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads the `weights` of a group of a `quantization_config`."""
        kind, bits = values.get("type", "int"), values.get("num_bits", 8)
        strategy, size = values.get("strategy"), values.get("group_size")
        names: dict[Any, str] = {("int", 8, "channel"): "int8", ("float", 8, "channel"): "fp8"}
        if strategy == "group" and size in GROUP_SIZES:
            names["int", 4, "group"] = "int4"
        name = names.get((kind, bits, strategy))
        if name and values.get("symmetric", True) and values.get("actorder") != "group":
            return cls(name, (size or 0) if name == "int4" else 0)
        told = {key: value for key, value in values.items() if key in _TOLD and value is not None}
        found = ", ".join(f"{key} {value}" for key, value in told.items())
        raise ValueError(f"weights with {found} are not supported{_SUPPORTED}")


_TOLD = ("num_bits", "type", "symmetric", "strategy", "group_size", "actorder")
_SUPPORTED = ", only symmetric int8 and fp8 per channel, and int4 in groups of " + ", ".join(
    map(str, GROUP_SIZES)
)


@dataclass(frozen=True)
class Quantization:
    """The schemes of a model: of the matrices in its blocks, and of its head (None: floats)."""

    blocks: Scheme
    head: Scheme | None

    @classmethod
    def named(cls, bits: str, *, group_size: int = 64, head: str | None = None) -> Self:
        """`bits` is "int8", "int4" or "fp8", `head` "16", "8" or "4"; 8 by default."""
        blocks = Scheme(bits, group_size if bits == "int4" else 0)
        heads = {
            "4": Scheme("int4", group_size) if head == "4" else None,
            "8": Scheme("fp8" if bits == "fp8" else "int8"),
            "16": None,
        }
        if (head or "8") not in heads:
            raise ValueError(f"the head has 4, 8 or 16 bits, not {head!r}")
        return cls(blocks, heads[head or "8"])

    def scheme_of(self, name: str) -> Scheme | None:
        """The scheme of the linear layer with this name, which is not a gate."""
        return self.head if name.removesuffix(".weight") == _HEAD else self.blocks

    def to_dict(self) -> dict[str, Any]:
        """The `quantization_config`."""
        groups = {"group_0": self._group(self.blocks, "re:.*blocks.*")}
        if self.head == self.blocks:
            groups["group_0"]["targets"].append(f"re:.*{_HEAD}$")
        elif self.head is not None:
            groups["group_1"] = self._group(self.head, f"re:.*{_HEAD}$")
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [_GATES] if self.head is not None else [_GATES, _HEAD],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    @staticmethod
    def _group(scheme: Scheme, target: str) -> dict[str, Any]:
        return {
            "targets": [target],
            "weights": scheme.to_dict(),
            "input_activations": None,
            "output_activations": None,
            "format": _FORMATS[scheme.name],
        }


def described(values: Mapping[str, Any] | None) -> dict[str, str]:
    """The schemes in a supported `quantization_config`, by the layers that have them."""
    groups = {} if values is None else values["config_groups"]
    return {
        ", ".join(map(str, group.get("targets", ()))): str(Scheme.from_dict(group["weights"]))
        for group in groups.values()
    }


def schemes_in(values: Mapping[str, Any] | None) -> set[Scheme]:
    """All schemes in a supported `quantization_config`; none without one."""
    groups = {} if values is None else values["config_groups"]
    return {Scheme.from_dict(group["weights"]) for group in groups.values()}


def named_schemes(values: Mapping[str, Any], layers: Sequence[str]) -> list[Scheme | None]:
    """The schemes of layers by a supported `quantization_config`; None if one stays in floats."""
    schemes: list[Scheme | None] = [None]
    targets = [(target, 0) for target in values.get("ignore") or ()]
    for number, group in enumerate(values["config_groups"].values(), 1):
        schemes.append(Scheme.from_dict(group["weights"]))
        targets += [(target, number) for target in group.get("targets") or ()]
    try:
        matches = first_matches([_pattern(target) for target, _ in targets], layers)
    except ValueError as error:
        raise ValueError(f"quantization_config: {error}") from error
    return [None if match is None else schemes[targets[match][1]] for match in matches]


def _pattern(target: str) -> str:
    """The regular expression of a target: `re:` and one, "Linear" for all, or a layer's name."""
    if target.startswith("re:"):
        return target.removeprefix("re:")
    return "" if target == "Linear" else rf"{re.escape(target)}\Z"


def check_supported(values: Any) -> None:
    """`ValueError` that names the first thing in a `quantization_config` that is not supported.

    Which matrix has which scheme is read from the files' headers, which cannot disagree with the
    weights; `open_checkpoint` compares them with the schemes here. Activations are never rounded
    here, so dynamic schemes for them are ignored.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"quantization_config is {values!r}, not an object")
    method = values.get("quant_method")
    if method != "compressed-tensors":
        raise ValueError(
            f"quantization_config is not supported with the quant_method {method!r}, "
            "only with 'compressed-tensors'"
        )
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("quantization_config has no config_groups")
    if values.get("quantization_status", "compressed") != "compressed":
        raise ValueError(
            f"quantization_config: the status {values['quantization_status']!r} is not supported, "
            "only 'compressed'"
        )
    known = {*_FORMATS.values(), "naive-quantized", "mixed-precision"}
    for name, group in [("", values), *groups.items()]:
        if not isinstance(group, Mapping):
            raise ValueError(f"quantization_config: {name} is {group!r}, not an object")
        if group.get("format") not in (None, *known):
            raise ValueError(
                f"quantization_config: the format {group['format']!r} is not supported, "
                f"only {', '.join(sorted(known))}"
            )
    _check_names("quantization_config: ignore", values.get("ignore"))
    for extra in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if values.get(extra):
            raise ValueError(f"quantization_config: {extra} is not supported")
    for name, group in groups.items():
        try:
            _check_names("targets", group.get("targets"))
            if not isinstance(group.get("weights"), Mapping):
                raise ValueError("no scheme for the weights")
            Scheme.from_dict(group["weights"])
            for side in ("input_activations", "output_activations"):
                scheme = group.get(side)
                if scheme is not None and not (
                    isinstance(scheme, Mapping) and scheme.get("dynamic")
                ):
                    raise ValueError(f"{side} that are not dynamic are not supported")
        except (ValueError, TypeError) as error:
            raise ValueError(f"quantization_config, {name}: {error}") from error


def _check_names(field: str, names: Any) -> None:
    if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return
    raise ValueError(f"{field} is {names!r}, not a list of names")
