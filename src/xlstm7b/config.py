"""ModelConfig: the shape of an xLSTM. Named sizes, and reading and writing `config.json`."""

import functools
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self

from xlstm7b.quantize.config import check_supported
from xlstm7b.registry import STANDARD, PluginError, find

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embedding_dim": 256, "num_blocks": 4, "num_heads": 4, "vocab_size": 320},
    "160m": {"embedding_dim": 768, "num_blocks": 12, "num_heads": 4},
    "400m": {"embedding_dim": 1024, "num_blocks": 24, "num_heads": 4},
    "1.4b": {"embedding_dim": 2048, "num_blocks": 24, "num_heads": 4},
    "2.7b": {"embedding_dim": 2560, "num_blocks": 32, "num_heads": 5},
    "7b": {"embedding_dim": 4096, "num_blocks": 32, "num_heads": 8},
}
# The block of the first xLSTM paper (model/previous.py) at the same widths: twice as many blocks.
SIZES |= {
    f"{size}-previous": SIZES[size]
    | {"num_blocks": 2 * SIZES[size]["num_blocks"], "block": "previous"}
    | {"qk_dim_factor": 2.0, "v_dim_factor": 2.0}
    for size in ("160m", "400m", "1.4b", "7b")
}

# Fields of a published config.json that change the model, with the only value supported here.
_ONLY_SUPPORTED: dict[str, bool] = {
    "use_bias": False,
    "tie_word_embeddings": False,
    "add_out_norm": True,
    "add_post_blocks_norm": True,
    "add_post_norm": False,
    "add_qk_norm": False,
}
# Fields that change nothing that is computed: kernels and how they run, training, and what
# `transformers` writes into every config.json.
_WITHOUT_EFFECT = {
    *("chunkwise_kernel", "sequence_kernel", "step_kernel", "mode", "chunk_size", "weight_mode"),
    *("forward_backend_name", "step_backend_name", "add_forward_backend_padding", "use_cache"),
    *("max_inference_chunksize", "return_last_states", "norm_reduction_force_float32"),
    *("autocast_kernel_dtype", "inference_state_dtype", "torch_dtype", "dtype"),
    *("add_embedding_dropout", "initializer_range", "max_position_embeddings"),
    *("architectures", "model_type", "auto_map", "transformers_version", "tokenizer_class"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
    *("is_encoder_decoder", "id2label", "label2id", "problem_type", "name_or_path"),
}
# Fields that are read, but are none of `ModelConfig`.
_OTHER_NAMES = {"hidden_size", "num_hidden_layers", "head_dim", "quantization_config"}
_OWN_TYPE = "xlstm7b"  # the model_type of models that compute something else
_CLASSES = (*STANDARD, "input_gate")  # the fields that name a class
_SOFT_CAPS = ("gate_soft_cap", "output_logit_soft_cap")
_GPT_NEOX_VOCABULARY = 50304
_LOG = logging.getLogger(__name__)
_LARGEST = 1 << 24  # no model is wider or deeper; a larger number means a damaged file


class StatePart(NamedTuple):
    """A tensor of a block's state: its shape for one row, and whether it may be bfloat16."""

    shape: tuple[int, ...]
    narrow: bool


@dataclass(frozen=True)
class ModelConfig:
    """All numbers that define a model and the shapes of its parameters.

    The fields are named as in the released `config.json`. The constructor checks them: a wrong
    value is a `ValueError` that names the field.
    """

    embedding_dim: int
    num_blocks: int
    num_heads: int
    vocab_size: int = _GPT_NEOX_VOCABULARY
    qk_dim_factor: float = 0.5
    v_dim_factor: float = 1.0
    mlstm_round_up_to_multiple_of: int = 1
    ffn_proj_factor: float = 2.667
    ffn_round_up_to_multiple_of: int = 64
    norm_eps: float = 1e-6
    cell_norm_eps: float = 1e-6
    eps: float = 1e-6
    gate_soft_cap: float | None = 15.0  # None: no soft-cap
    output_logit_soft_cap: float | None = 30.0  # None: no soft-cap
    igate_bias_init_range: float = -10.0
    bos_token_id: int = 0  # the first token of every text; eos_token_id if there is none
    eos_token_id: int = 0
    pad_token_id: int = 1
    force_bos_token_insert: bool = True  # False: texts have no first token
    # Classes, by the names under which they are registered (registry.py).
    block: str = STANDARD["block"]
    layer: str = STANDARD["layer"]
    norm: str = STANDARD["norm"]
    head_norm: str = STANDARD["head_norm"]
    gate: str = STANDARD["gate"]
    input_gate: str = ""  # the class of the input gate, if it is another one than `gate`

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            _check_type(name, field.type, value)
            if field.type is bool or value is None:
                continue
            if name in _CLASSES:
                if value != STANDARD.get(name, ""):
                    find("gate" if name == "input_gate" else name, value)
                continue
            if name.endswith("token_id"):
                rule = f"an id in the vocabulary, 0 to {self.vocab_size - 1}"
                holds = 0 <= value < self.vocab_size
            elif field.type is int:
                rule, holds = f"between 1 and {_LARGEST}", 1 <= value <= _LARGEST
            elif name.endswith("eps"):
                rule, holds = "between 0 and 1", 0 <= value < 1
            elif name == "igate_bias_init_range":
                rule, holds = "finite", math.isfinite(value)
            else:
                rule, holds = "a positive number", 0 < value <= _LARGEST
            if not holds:
                raise ValueError(f"{name} must be {rule}, not {value}")
        for name, width in (("qk", self.qk_dim), ("v", self.v_dim)):
            if width % self.num_heads:
                raise ValueError(
                    f"num_heads ({self.num_heads}) does not divide the {name} width ({width}) "
                    f"of embedding_dim {self.embedding_dim}"
                )
        if not self.force_bos_token_insert:
            # Not used then. It gets one value, so that configs of equal models compare equal.
            object.__setattr__(self, "bos_token_id", self.eos_token_id)
        if self.input_gate == self.gate:
            object.__setattr__(self, "input_gate", "")  # one spelling, for the same reason

    @classmethod
    def named(cls, size: str) -> Self:
        """The config of a size: "tiny", "160m", "400m", "1.4b", "2.7b", "7b", "160m-previous", …"""
        if size.lower() not in SIZES:
            raise ValueError(f"unknown model size {size!r}; choose from {', '.join(SIZES)}")
        return cls(**SIZES[size.lower()])

    # Widths. d_qk and d_hv are those of one head, as in the paper.

    @property
    def qk_dim(self) -> int:
        return _round_up(
            self.embedding_dim * self.qk_dim_factor, self.mlstm_round_up_to_multiple_of
        )

    @property
    def v_dim(self) -> int:
        return _round_up(self.embedding_dim * self.v_dim_factor, self.mlstm_round_up_to_multiple_of)

    @property
    def d_qk(self) -> int:
        return self.qk_dim // self.num_heads

    @property
    def d_hv(self) -> int:
        return self.v_dim // self.num_heads

    @property
    def ffn_dim(self) -> int:
        return _round_up(
            self.embedding_dim * self.ffn_proj_factor, self.ffn_round_up_to_multiple_of
        )

    @property
    def is_standard(self) -> bool:
        """True if the model computes what the released model computes, apart from its sizes."""
        return not self.differences()

    def differences(self) -> dict[str, str | None]:
        """The fields that make another model than the released one: classes, absent soft-caps."""
        absent = [name for name in _SOFT_CAPS if getattr(self, name) is None]
        return {**self.other_classes(), **dict.fromkeys(absent)}

    def other_classes(self) -> dict[str, str]:
        """The fields that name a class other than the released model's, with these names."""
        chosen = {name: str(getattr(self, name)) for name in _CLASSES}
        return {name: cls for name, cls in chosen.items() if cls != STANDARD.get(name, "")}

    def block_parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names after `backbone.blocks.{i}.`, and shapes, of one block's parameters."""
        if self.other_classes():
            return _shapes("block", self.block, self)
        d, heads, up = self.embedding_dim, self.num_heads, self.ffn_dim
        return {
            "norm_mlstm.weight": (d,),
            "mlstm_layer.q.weight": (self.qk_dim, d),
            "mlstm_layer.k.weight": (self.qk_dim, d),
            "mlstm_layer.v.weight": (self.v_dim, d),
            "mlstm_layer.ogate_preact.weight": (self.v_dim, d),
            "mlstm_layer.igate_preact.weight": (heads, d),
            "mlstm_layer.igate_preact.bias": (heads,),
            "mlstm_layer.fgate_preact.weight": (heads, d),
            "mlstm_layer.fgate_preact.bias": (heads,),
            "mlstm_layer.multihead_norm.weight": (self.v_dim,),
            "mlstm_layer.out_proj.weight": (d, self.v_dim),
            "norm_ffn.weight": (d,),
            "ffn.proj_up_gate.weight": (up, d),
            "ffn.proj_up.weight": (up, d),
            "ffn.proj_down.weight": (d, up),
        }

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter. The names are the keys of the released checkpoint."""
        block = self.block_parameter_shapes()
        out_norm: dict[str, tuple[int, ...]] = {"weight": (self.embedding_dim,)}
        if self.other_classes():
            out_norm = _shapes("norm", self.norm, self.embedding_dim, self.norm_eps)
        return {
            "backbone.embeddings.weight": (self.vocab_size, self.embedding_dim),
            **{
                f"backbone.blocks.{i}.{name}": shape
                for i in range(self.num_blocks)
                for name, shape in block.items()
            },
            **{f"backbone.out_norm.{name}": shape for name, shape in out_norm.items()},
            "lm_head.weight": (self.vocab_size, self.embedding_dim),
        }

    def state_parts(self) -> "dict[str, StatePart]":
        """The tensors of one block's state, by name."""
        if self.other_classes():
            import torch

            narrow = torch.bfloat16
            state = find("block", self.block).zero_state(self, 1, dtype=narrow, device="meta")
            return {
                name: StatePart(tuple(part.shape[1:]), part.dtype == narrow)
                for name, part in state._asdict().items()
            }
        shape = self.num_heads, self.d_qk, self.d_hv
        parts = {"C": (shape, True), "n": (shape[:2], False), "m": (shape[:1], False)}
        return {name: StatePart(*part) for name, part in parts.items()}

    # config.json

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads the fields of any published `config.json`. Ignores those that choose kernels."""
        if values.get("model_type", "xlstm") not in ("xlstm", _OWN_TYPE):
            raise ValueError(f"model_type is {values['model_type']!r}, not 'xlstm'")
        for name, supported in _ONLY_SUPPORTED.items():
            if values.get(name, supported) is not supported:
                raise ValueError(
                    f"{name} = {values[name]!r} is not supported, only {name} = {supported!r}"
                )
        if values.get("quantization_config") is not None:
            check_supported(values["quantization_config"])
        read = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        for ours, theirs in (("embedding_dim", "hidden_size"), ("num_blocks", "num_hidden_layers")):
            given = {values[name] for name in (ours, theirs) if values.get(name) is not None}
            if len(given) != 1:
                raise ValueError(
                    f"{ours} and {theirs} disagree: {values[ours]!r} and {values[theirs]!r}"
                    if given
                    else f"neither {ours} nor {theirs} is given"
                )
            read[ours] = given.pop()
        if "num_heads" not in read:
            raise ValueError("num_heads is not given")
        read.setdefault("cell_norm_eps", read.get("norm_eps", cls.norm_eps))
        bias = read.get("igate_bias_init_range")
        if isinstance(bias, list | tuple) and len(set(bias)) == 1:
            read["igate_bias_init_range"] = bias[0]
        eos = read.get("eos_token_id")
        if isinstance(eos, list) and len(eos) == 1:
            read["eos_token_id"] = eos[0]
        if "bos_token_id" in read and read["bos_token_id"] is None:  # as Qwen's
            del read["bos_token_id"]
            if read.setdefault("force_bos_token_insert", False):
                raise ValueError("force_bos_token_insert is true, but bos_token_id is null")
        if "pad_token_id" in read and read["pad_token_id"] is None:  # as GPT-2's and Llama 3's
            read["pad_token_id"] = read.get("eos_token_id", cls.eos_token_id)
        if eos == 2 and read.get("vocab_size", cls.vocab_size) == _GPT_NEOX_VOCABULARY:
            # The released config says 2, but that is the token "!". Documents end with id 0.
            read["eos_token_id"] = 0
        config = cls(**read)
        # Drop a rounding that changes no width, so that configs of equal models compare equal.
        d, factors = config.embedding_dim, (config.qk_dim_factor, config.v_dim_factor)
        if [math.floor(d * factor) for factor in factors] == [config.qk_dim, config.v_dim]:
            config = replace(config, mlstm_round_up_to_multiple_of=1)
        head_dim = values.get("head_dim", config.d_hv)
        if head_dim != config.d_hv:
            raise ValueError(f"head_dim is {head_dim!r}, but the other fields give {config.d_hv}")
        return config

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
    ) -> Self:
        """The config of a checkpoint folder or hub id. No weights are downloaded or read."""
        checkpoint = import_module("xlstm7b.checkpoint")  # it needs this module, and PyTorch
        folder = checkpoint.resolve(
            folder_or_hub_id, ("config.json", "config.yaml"), revision=revision, subfolder=subfolder
        )
        config: Self = checkpoint.read_config(folder)
        return config

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Reads a `config.json`. Every problem of it is a `ValueError` that names the file."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not a JSON file: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds a JSON {type(values).__name__}, not an object")
        try:
            config = cls.from_dict(values)
        except PluginError:
            raise
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error
        warn_of_unknown(values, path)
        return config

    def to_dict(self, dtype: str = "float32") -> dict[str, Any]:
        """A `config.json` that `transformers` loads as `xLSTMConfig` without extra packages.

        A model that computes something else than the released one has another `model_type`:
        `transformers` would ignore the fields that say so, and compute another model.
        """
        values, kind = asdict(self), {"architectures": ["XLSTM"], "model_type": _OWN_TYPE}
        if self.is_standard:
            kind = {"architectures": ["xLSTMForCausalLM"], "model_type": "xlstm"}
            values = {name: value for name, value in values.items() if name not in _CLASSES}
        return {
            **kind,
            **values,
            "bos_token_id": self.bos_token_id if self.force_bos_token_insert else None,
            **_ONLY_SUPPORTED,
            "hidden_size": self.embedding_dim,
            "num_hidden_layers": self.num_blocks,
            "head_dim": self.d_hv,
            "weight_mode": "single",
            "norm_reduction_force_float32": True,
            "chunkwise_kernel": "chunkwise--native_autograd",
            "sequence_kernel": "native_sequence__native",
            "step_kernel": "native",
            "mode": "inference",
            "return_last_states": True,
            "dtype": dtype,
        }


def warn_of_unknown(values: Mapping[str, Any], path: Path) -> None:
    """Logs the fields of a config file that are not known here, once for each file."""
    known = {field.name for field in fields(ModelConfig)}
    known |= {*_ONLY_SUPPORTED, *_WITHOUT_EFFECT, *_OTHER_NAMES}
    unknown = (str(name) for name in values if name not in known)
    # A name with an underscore is of the program that wrote the file.
    if names := sorted(name for name in unknown if not name.startswith("_")):
        _log_unknown(path, ", ".join(names))


@functools.cache
def _log_unknown(path: Path, names: str) -> None:
    _LOG.warning(
        "%s: unknown fields are ignored: %s. If one of them changes what the model computes, its "
        "outputs are wrong here.",
        path,
        names,
    )


def _shapes(kind: str, name: str, *arguments: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a registered class, which is built without memory."""
    import torch

    with torch.device("meta"):
        cls = find(kind, name)
        module = (cls.from_config if kind == "block" else cls)(*arguments)
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def _check_type(name: str, expected: Any, value: object) -> None:
    """A JSON file may hold a string or null where a number belongs."""
    if expected in (float, float | None):
        right = isinstance(value, int | float) and not isinstance(value, bool)
        right |= value is None and expected is not float
    else:
        right = type(value) is expected
    if not right:
        kind = expected.__name__ if isinstance(expected, type) else 'float or null ("none" in TOML)'
        raise ValueError(f"{name} must be of type {kind}, not {value!r}")


def _round_up(value: float, multiple: int) -> int:
    """multiple · ⌊(value + multiple − 1) / multiple⌋, as in the released code.

    For a fractional value it is not a ceiling: 2.667 · 768 = 2048.256 gives 2048.
    """
    return multiple * math.floor((value + multiple - 1) / multiple)
