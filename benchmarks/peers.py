"""Models of other libraries with random weights, behind one interface: read a prompt, then decode.

`PEERS` names them. Each runs in the fastest way that we found on an H200: which kernels, which
attention, what is compiled. Shapes are the published ones for the size 7b, else small ones of the
same kind. A `Decoder` decodes greedily from one cache; on a GPU its step is a CUDA graph. `check`
compares a peer's decoding with its own pass over the whole text.
"""

import copy
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xlstm7b.bench.measure import (
    Timing,
    capture,
    measure_steps,
    random_module,
    random_prompts,
    release,
)
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_dtype

# Ways to decode. A GPU's graph holds one step.
COMPILED, GRAPH, EAGER = "compiled, CUDA graph", "CUDA graph", "eager"
MOST_STEPS = 100  # in one timing, see `measure_steps`
_PIECE = 256  # tokens: the steps in such a piece of a cache that grows share one CUDA graph

# The interface


class Peer(ABC):
    """A model with random weights."""

    system: ClassVar[str]  # its name in results
    packages: ClassVar[tuple[str, ...]]
    cache_name: ClassVar[str] = "cache_params"  # in transformers
    grows: ClassVar[bool] = False  # whether the cache grows with the context
    compiles_prompts: ClassVar[bool] = False
    compiles_batches: ClassVar[bool] = True  # decoding of one sequence is always compiled

    def __init__(
        self, size: str, device: str, dtype: str = "bfloat16", state_dtype: str = "float32"
    ) -> None:
        """`state_dtype` is for those that let one choose it."""
        self.config = ModelConfig.named(size)
        self.is_7b = size.lower() == "7b"
        self.device, self.dtype, self.dtype_name = device, to_dtype(dtype), dtype
        self.state_dtype = state_dtype
        self.reader: Any = self.prompt_logits
        self._compiled: dict[bool, Any] = {}
        self.model: Any = self.build()

    @property
    def engine(self) -> str:
        """What runs it, such as kernels of another package."""
        return self.packages[0]

    @classmethod
    def precision(cls, dtype: str, state_dtype: str) -> dict[str, str]:
        """Its dtypes, as results name them."""
        return {"weights": dtype}

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @abstractmethod
    def build(self) -> nn.Module: ...

    def logits(self, tokens: Tensor) -> Tensor:
        """Of every position, without a cache."""
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits

    def prompt_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Reads prompts [B, T]. Returns the last position's logits [B, 1, V] and the cache.

        A cache that grows is given, and filled; others are made.
        """
        given = {} if cache is None else {self.cache_name: cache}
        out = self.model(tokens, use_cache=True, logits_to_keep=1, **given)
        return out.logits, getattr(out, self.cache_name) if cache is None else cache

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        """Logits [B, 1, V] after one more token [B, 1]. Updates the cache in place."""
        logits: Tensor = self.model(tokens, use_cache=True, **{self.cache_name: cache}).logits
        return logits

    def tensors(self, cache: Any) -> list[Tensor]:
        """All tensors of the cache, in an order that depends on the model only."""
        return list(_tensors(cache))

    def new_cache(self, batch: int, room: int) -> Any:
        """A cache for texts of `room` tokens."""
        first = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        return self.prompt_logits(first, None)[1]

    def set_length(self, cache: Any, length: int) -> None:  # noqa: B027
        """Makes the cache one of `length` tokens, whatever they are, if it grows."""

    def attend_to(self, keys: int) -> None:  # noqa: B027
        """The next steps attend to the first `keys` places of a cache that grows."""

    def cache_bytes(self, room: int) -> int:
        """Bytes of the cache of one sequence of `room` tokens."""
        return sum(each.nbytes for each in self.tensors(self.new_cache(1, room)))

    def step_bytes(self, batch: int, context: int) -> int:
        """The least that a step moves: all weights but the embedding, each state in and out."""
        return self.read_weight_bytes() + batch * 2 * self.cache_bytes(context)

    def read_weight_bytes(self) -> int:
        parts = (each for each in self.model.modules() if not isinstance(each, nn.Embedding))
        return sum(own.nbytes for part in parts for own in part.parameters(recurse=False))

    def tokens(self, batch: int, length: int) -> Tensor:
        return torch.tensor(random_prompts(self.vocab_size, batch, length), device=self.device)

    def compiled_step(self, is_batch: bool) -> Any:
        """`step`, compiled for one sequence or for a batch: of any size, if the cache grows."""
        if is_batch not in self._compiled:
            # This mode is faster for products of one row, and not for those of a batch.
            mode = None if is_batch else "max-autotune-no-cudagraphs"
            dynamic = is_batch and self.grows
            self._compiled[is_batch] = torch.compile(self.step, mode=mode, dynamic=dynamic)
        return self._compiled[is_batch]

    def compile_prompts(self) -> None:
        """Compiles the reading of prompts of any length, if that makes it faster."""
        if self.compiles_prompts and self.device == "cuda" and self.reader == self.prompt_logits:
            self.reader = torch.compile(self.prompt_logits, dynamic=True)
            # A first cache that is as long as the prompts would be compiled for that case only.
            self.reader(self.tokens(1, 2048), self.new_cache(1, 2049))

    def in_float32(self) -> "Peer":
        """A copy with the same weights."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).float()
        other.dtype, other.reader, other._compiled = torch.float32, other.prompt_logits, {}
        return other


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


class Decoder:
    """Greedy decoding of `batch` texts from one cache. `way` is `COMPILED`, `GRAPH` or `EAGER`.

    By default it is the fastest way.
    """

    def __init__(self, peer: Peer, cache: Any, *, batch: int = 1, way: str | None = None) -> None:
        best = COMPILED if batch == 1 or peer.compiles_batches else GRAPH
        self.peer, self.cache = peer, cache
        self.way = EAGER if peer.device == "cpu" else way or best
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=peer.device)
        self._step: Any = peer.compiled_step(batch > 1) if self.way == COMPILED else peer.step
        self._steps: dict[int, Callable[[], Tensor]] = {}

    @property
    def note(self) -> str:
        return f"{self.peer.engine}, {self.way}"

    def read(self, tokens: Tensor) -> None:
        """Reads prompts [B, T] into the cache; the most likely next token becomes `token`."""
        self.peer.set_length(self.cache, 0)
        if self.peer.grows and tokens.shape[1] == 1:
            self.token.copy_(tokens)
            self.step(0)
            return
        logits, read = self.peer.reader(tokens, self.cache if self.peer.grows else None)
        if read is not self.cache:  # steps use this cache's memory
            pairs = zip(self.peer.tensors(self.cache), self.peer.tensors(read), strict=True)
            for ours, theirs in pairs:
                ours.copy_(theirs)
        self.token.copy_(logits[:, -1:].argmax(-1))

    def prepare(self, first: int, last: int) -> None:
        """Compiles and captures the steps after `first` to `last` tokens.

        What the cache holds is lost.
        """
        for length in (*range(first, last, _PIECE), last):
            self._prepared(length)

    def step(self, length: int) -> Tensor:
        """One more token after `length` tokens. Returns its logits [B, 1, V]; `token` is next."""
        return self._prepared(length)()

    def step_time(self, length: int, *, seconds: float) -> Timing:
        """The time of one step after `length` tokens, which are random in a cache that grows."""
        step = self._prepared(length + MOST_STEPS)

        def run(count: int) -> None:
            self.peer.set_length(self.cache, length)
            for _ in range(count):
                step()

        return measure_steps(run, self.peer.device, seconds=seconds, most=MOST_STEPS)

    def _prepared(self, length: int) -> Callable[[], Tensor]:
        """The step after `length` tokens. All lengths that end in the same piece share one step."""
        keys = rounded_up(length + 1) if self.peer.grows else 0
        if keys not in self._steps:
            self._steps[keys] = self._make(keys)
        return self._steps[keys]

    def _make(self, keys: int) -> Callable[[], Tensor]:
        latest: list[Tensor] = []

        def once() -> None:
            self.peer.attend_to(keys)
            logits = self._step(self.token, self.cache)
            self.token.copy_(logits[:, -1:].argmax(-1))
            latest[:] = [logits]

        run = once
        if self.way != EAGER:
            self.peer.set_length(self.cache, max(0, keys - 8))  # room for the steps before capture
            run = capture(once)

        def step() -> Tensor:
            run()
            return latest[0]

        return step


def rounded_up(length: int) -> int:
    return -(-length // _PIECE) * _PIECE


# The check


def check(decoder: Decoder) -> None:
    """Raises a `ValueError` if cached decoding differs from a pass over the whole text.

    Logits of 16 forced tokens may differ from those of the same model in float32 at most three
    times as much as the logits of a pass over the whole text do.
    """
    peer = decoder.peer
    text = peer.tokens(1, _PROMPT + _STEPS)
    want, whole = (each.logits(text)[:, _PROMPT:].double() for each in (peer.in_float32(), peer))
    release(peer.device)
    cached = torch.cat([*_forced(decoder, text)], 1).double()
    whole_error, error = (float((got - want).norm() / want.norm()) for got in (whole, cached))
    if not whole_error <= _UNSTABLE:
        raise ValueError(
            f"the random model is too unstable to check: a pass over the text in {peer.dtype} "
            f"differs from float32 by {whole_error:.2g} (relative)"
        )
    if not error <= _WORSE * whole_error + _ROUNDING:
        raise ValueError(
            f"cached decoding is wrong: its logits differ from those of float32 by {error:.2g}, "
            f"those of a pass over the whole text by {whole_error:.2g} (relative)"
        )


_PROMPT, _STEPS = 248, 16  # tokens: the steps cross the border between two pieces
CHECKED = _PROMPT + _STEPS + 1  # room that the check needs
_WORSE, _ROUNDING, _UNSTABLE = 3.0, 1e-4, 0.25


def _forced(decoder: Decoder, text: Tensor) -> Iterator[Tensor]:
    """Logits at the positions after `_PROMPT`, from steps with the text's own tokens."""
    decoder.prepare(_PROMPT, text.shape[1])
    decoder.read(text[:, :_PROMPT])
    for length in range(_PROMPT, text.shape[1]):
        decoder.token.copy_(text[:, length : length + 1])
        yield decoder.step(length).clone()


# xLSTM

TRITON_KERNELS = {
    "chunkwise_kernel": "chunkwise--triton_limit_chunk",
    "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton",
}


def transformers_xlstm(config: ModelConfig, dtype: str, device: str, **options: Any) -> nn.Module:
    """The xLSTM of transformers; `options` are fields of its config."""
    transformers: Any = import_module("transformers")
    theirs = transformers.xLSTMConfig(**config.to_dict(dtype) | options)
    make = partial(transformers.xLSTMForCausalLM, theirs)
    model: nn.Module = random_module(make, to_dtype(dtype), device)
    return model


def authors_xlstm(config: ModelConfig, dtype: str, device: str, **options: Any) -> nn.Module:
    """The model of the authors' package; `options` are fields of its config."""
    package: Any = import_module("xlstm.xlstm_large.model")
    names = ("embedding_dim", "num_heads", "num_blocks", "vocab_size", "ffn_proj_factor")
    named = config.to_dict()  # with the native kernels
    fields = {name: named[name] for name in (*names, *TRITON_KERNELS)}
    if device == "cuda":
        fields |= TRITON_KERNELS
    theirs = package.xLSTMLargeConfig(**fields, return_last_states=True, **options)
    make: Callable[[], nn.Module] = partial(package.xLSTMLarge, theirs)
    return random_module(make, to_dtype(dtype), device)


class TransformersXLSTM(Peer):
    """The xLSTM of transformers, with the kernels of `mlstm_kernels` if it is installed."""

    system, packages = "transformers", ("transformers", "mlstm_kernels")

    @classmethod
    def precision(cls, dtype: str, state_dtype: str) -> dict[str, str]:
        return {"weights": dtype, "states": dtype}  # it has no other choice

    @property
    def has_kernels(self) -> bool:
        transformers: Any = import_module("transformers")
        return self.device == "cuda" and bool(transformers.utils.is_xlstm_available())

    @property
    def engine(self) -> str:
        return "mlstm_kernels" if self.has_kernels else "native kernels"

    def build(self) -> nn.Module:
        kernels = TRITON_KERNELS if self.has_kernels else {}
        options = {**kernels, "autocast_kernel_dtype": self.dtype_name}
        return transformers_xlstm(self.config, self.dtype_name, self.device, **options)

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=True).logits
        return logits

    def prompt_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self.model(tokens, use_cache=True)
        return out.logits[:, -1:], out.cache_params

    def tensors(self, cache: Any) -> list[Tensor]:
        return list(_tensors(cache.rnn_state))


class AuthorsXLSTM(Peer):
    """The authors' package, with fused weights and the kernels of `mlstm_kernels`."""

    system, packages = "xlstm", ("xlstm", "mlstm_kernels")

    @classmethod
    def precision(cls, dtype: str, state_dtype: str) -> dict[str, str]:
        return {"weights": dtype, "states": state_dtype}

    @property
    def engine(self) -> str:
        return "native kernels" if self.device == "cpu" else "mlstm_kernels"

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def build(self) -> nn.Module:
        return authors_xlstm(
            self.config,
            self.dtype_name,
            self.device,
            weight_mode="fused",
            mode="inference",
            autocast_kernel_dtype=self.dtype_name,
            inference_state_dtype=self.state_dtype,
        )

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)[0]
        return logits

    def prompt_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        logits, state = self.model(tokens)
        return logits[:, -1:], state

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        logits: Tensor = self.model(tokens, cache)[0]
        return logits


# Mamba


class Mamba(Peer):
    """A Mamba in transformers. On a GPU it needs `mamba_ssm`: without, it runs a slow path."""

    packages = ("transformers", "mamba_ssm", "causal_conv1d")
    compiles_batches = False  # for 2,048 sequences that takes minutes
    kind: ClassVar[str]  # the name of its classes
    module: ClassVar[str]
    scans: ClassVar[tuple[str, ...]]

    @property
    def engine(self) -> str:
        if not self._is_fast(*self.scans):
            return "slow path"
        is_fast = self._is_fast("causal_conv1d_fn", "causal_conv1d_update")
        return "mamba_ssm, " + ("causal_conv1d" if is_fast else "convolution of PyTorch")

    def _is_fast(self, *functions: str) -> bool:
        """Whether transformers found another package's kernels for all of these functions."""
        module = import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        return all(_is_replaced(getattr(module, name)) for name in functions)

    def build(self) -> nn.Module:
        if self.device == "cuda" and not self._is_fast(*self.scans):
            import_module("mamba_ssm")  # says what is missing, if that is why
            raise ValueError("transformers does not use the kernels of mamba_ssm")
        transformers: Any = import_module("transformers")
        # Their default range, 0.1, makes a random model so unstable that bfloat16 says nothing
        # about float32.
        common = {"tie_word_embeddings": False, "initializer_range": 0.02}
        config = getattr(transformers, f"{self.kind}Config")(**self.shape(), **common)
        make = partial(getattr(transformers, f"{self.kind}ForCausalLM"), config)
        model: nn.Module = random_module(make, self.dtype, self.device)
        return model

    def shape(self) -> dict[str, int]:
        """Its published shape, or a small one of the same kind."""
        if self.is_7b:
            return {"hidden_size": 4096, "num_hidden_layers": 64}
        config = self.config
        sizes = {"hidden_size": config.embedding_dim, "num_hidden_layers": config.num_blocks}
        return sizes | {"vocab_size": config.vocab_size, "state_size": 16}

    def tensors(self, cache: Any) -> list[Tensor]:
        return list(_tensors([(each.conv_states, each.recurrent_states) for each in cache.layers]))


class FalconMamba(Mamba):
    system, kind, module = "Falcon-Mamba 7B", "FalconMamba", "falcon_mamba"
    scans = ("mamba_selective_scan", "mamba_selective_state_update")

    def shape(self) -> dict[str, int]:
        return {"vocab_size": 65024, "state_size": 16} | super().shape()


class CodestralMamba(Mamba):
    system, kind, module = "Codestral-Mamba 7B", "Mamba2", "mamba2"
    scans = ("mamba2_chunk_scan", "mamba2_selective_state_update")

    def shape(self) -> dict[str, int]:
        if self.is_7b:
            own = {"vocab_size": 32768, "state_size": 128, "num_heads": 128, "n_groups": 8}
        else:
            own = {"num_heads": self.config.embedding_dim // 32, "n_groups": 2, "chunk_size": 16}
        return {**own, "head_dim": 64, **super().shape()}


def _is_replaced(function: Any) -> bool:
    """Whether a function of transformers calls another package's instead of its own code."""
    if isinstance(function, nn.Module):  # the package `kernels` wraps it in a module
        function = inspect.getclosurevars(function.forward).nonlocals["func"]
    return bool(inspect.getclosurevars(function).nonlocals["is_new_implementation"])


# Llama


class Llama(Peer):
    """A Llama in transformers, decoding from a static cache.

    A step attends to whole pieces of 256 tokens, in which later positions are hidden: to one piece
    by products of matrices, to more by PyTorch's attention with a mask.
    """

    packages, cache_name = ("transformers",), "past_key_values"
    grows = compiles_prompts = True

    @property
    def engine(self) -> str:
        return "static cache"

    @classmethod
    def precision(cls, dtype: str, state_dtype: str) -> dict[str, str]:
        return {"weights": dtype, "cache": dtype}

    @classmethod
    @abstractmethod
    def shape(cls, config: ModelConfig | None = None) -> dict[str, int]:
        """Its published shape, or a small one of the same kind."""

    def build(self) -> nn.Module:
        transformers: Any = import_module("transformers")
        transformers.AttentionInterface.register(_ATTENTION, _attention)
        config = transformers.LlamaConfig(
            **self.shape(None if self.is_7b else self.config),
            max_position_embeddings=1 << 18,
            attn_implementation=_ATTENTION,
        )
        make = partial(transformers.LlamaForCausalLM, config)
        model: nn.Module = random_module(make, self.dtype, self.device)
        return model

    def new_cache(self, batch: int, room: int) -> Any:
        transformers: Any = import_module("transformers")
        config = self.model.config
        cache = transformers.StaticCache(config, max_cache_len=rounded_up(room))
        heads, width = config.num_key_value_heads, config.head_dim
        cache.early_initialization(batch, heads, width, self.dtype, torch.device(self.device))
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        return cache

    def tensors(self, cache: Any) -> list[Tensor]:
        return [each for layer in cache.layers for each in (layer.keys, layer.values)]

    def token_bytes(self) -> int:
        """Bytes of one token in the cache."""
        config = self.model.config
        numbers: int = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return numbers * self.dtype.itemsize

    def cache_bytes(self, room: int) -> int:
        return self.token_bytes() * rounded_up(room)

    def step_bytes(self, batch: int, context: int) -> int:
        return self.read_weight_bytes() + batch * context * self.token_bytes()

    def set_length(self, cache: Any, length: int) -> None:
        lengths = [layer.cumulative_length for layer in cache.layers]
        torch._foreach_zero_(lengths)
        if length:
            torch._foreach_add_(lengths, length)

    def attend_to(self, keys: int) -> None:
        global _keys
        _keys = keys


class Llama2(Llama):
    system = "Llama 2 7B"

    @classmethod
    def shape(cls, config: ModelConfig | None = None) -> dict[str, int]:
        return _llama_shape(32000, 11008, 32, config)


class Llama3(Llama):
    system = "Llama 3.1 8B"

    @classmethod
    def shape(cls, config: ModelConfig | None = None) -> dict[str, int]:
        return _llama_shape(128256, 14336, 8, config)


def _llama_shape(
    vocab_size: int, ffn: int, key_heads: int, of: ModelConfig | None
) -> dict[str, int]:
    heads = 32 if of is None else of.embedding_dim // 64
    return {
        "vocab_size": vocab_size if of is None else of.vocab_size,
        "hidden_size": 4096 if of is None else of.embedding_dim,
        "intermediate_size": ffn if of is None else of.ffn_dim,
        "num_hidden_layers": 32 if of is None else of.num_blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": heads * key_heads // 32,
    }


_ATTENTION = "xlstm7b_benchmarks"
_keys = 0  # places of the cache that a step attends to


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls instead of its own attention."""
    assert position_ids is not None
    return _attend(query, key, value, position_ids[0, -1], scaling), None


@torch.library.custom_op("xlstm7b_benchmarks::attend", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
    """Prompts [B, H, T, D] from the first position on, or one token at `position`: [B, T, H, D].

    A compiler does not look inside, so the number of keys may change without compiling again.
    """
    length = q.shape[2]
    if length > 1:
        k, v = k[:, :, :length], v[:, :, :length]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    keys = _keys
    k, v = k[:, :, :keys], v[:, :, :keys]
    if keys <= _PIECE:
        attend = _attend_to_piece if q.device.type == "cpu" else _compiled_attend_to_piece()
        piece: Tensor = attend(q, k, v, position, scale)
        return piece
    seen = (torch.arange(keys, device=q.device) <= position).expand(q.shape[0], 1, 1, keys)
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
    batch, heads, length, width = q.shape
    return q.new_empty(batch, length, heads, width)


def _attend_to_piece(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
    hidden = torch.arange(k.shape[2], device=q.device) > position
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    scores = (grouped @ k.transpose(2, 3)).float() * scale
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype)
    return (weights @ v).reshape(q.shape).transpose(1, 2).contiguous()


_compiled: list[Any] = []


def _compiled_attend_to_piece() -> Any:
    if not _compiled:
        _compiled.append(torch.compile(_attend_to_piece, dynamic=True))
    return _compiled[0]


# Flash linear attention


class Rwkv7(Peer):
    """RWKV-7 in FLA, with the shape of its 7.2B."""

    system, packages = "RWKV-7 7.2B", ("fla-core", "transformers")
    cache_name = "past_key_values"
    compiles_batches = False  # it would run out of memory

    @property
    def engine(self) -> str:
        return "FLA"

    def build(self) -> nn.Module:
        fla: Any = import_module("fla.models.rwkv7")
        layer: Any = import_module("fla.layers.rwkv7").RWKV7Attention
        _tune_less("fla.")
        if self.is_7b:
            fields = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 65536}
            ranks = {"decay": 128, "gate": 480, "a": 128, "v": 96}
            fields |= {f"{name}_low_rank_dim": rank for name, rank in ranks.items()}
        else:
            config = self.config
            fields = {"hidden_size": config.embedding_dim, "vocab_size": config.vocab_size}
            fields |= {"num_hidden_layers": config.num_blocks}
        make = partial(fla.RWKV7ForCausalLM, fla.RWKV7Config(**fields))
        # Its own initialisation takes minutes.
        usual, layer._initialize_weights = layer._initialize_weights, lambda *_: None
        try:
            model: nn.Module = random_module(make, self.dtype, self.device)
        finally:
            layer._initialize_weights = usual
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.02)
            # Its kernels are tuned once, whatever the length: so a long prompt comes first.
            model(torch.zeros(1, 4096, dtype=torch.long, device=self.device), logits_to_keep=1)
        return model

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        """It replaces its states; they are copied back, so that a graph finds them."""
        before = [dict(layer.state) for layer in cache.layers]
        logits: Tensor = self.model(tokens, past_key_values=cache, use_cache=True).logits
        for layer, states in zip(cache.layers, before, strict=True):
            for ours, theirs in zip(_tensors(states), _tensors(layer.state), strict=True):
                ours.copy_(theirs)
            layer.state = states
        return logits

    def tensors(self, cache: Any) -> list[Tensor]:
        return list(_tensors([layer.state for layer in cache.layers]))


def _tune_less(prefix: str) -> None:
    """Kernels of these modules are tuned over configurations with 4 or 8 warps, 2 or 3 stages.

    Triton compiles one after another. All configurations of RWKV-7's kernels, up to 135 for one of
    them, would take minutes.
    """
    autotuner: Any = import_module("triton.runtime.autotuner")
    for name, module in [*sys.modules.items()]:
        for kernel in vars(module).values() if name.startswith(prefix) else ():
            while isinstance(kernel, (autotuner.Autotuner, autotuner.Heuristics)):
                if isinstance(kernel, autotuner.Autotuner):
                    kept = [each for each in kernel.configs if _is_usual(each)]
                    kernel.configs = kept or kernel.configs
                kernel = kernel.fn


def _is_usual(config: Any) -> bool:
    return config.num_warps in (4, 8) and config.num_stages in (2, 3)


PEERS: dict[str, type[Peer]] = {
    "llama3": Llama3,
    "xlstm": AuthorsXLSTM,
    "transformers": TransformersXLSTM,
    "falcon-mamba": FalconMamba,
    "llama2": Llama2,
    "codestral-mamba": CodestralMamba,
    "rwkv7": Rwkv7,
}
