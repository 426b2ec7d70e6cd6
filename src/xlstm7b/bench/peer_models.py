"""Models of other libraries with random weights, behind one interface: read a prompt, then decode.

`PEERS` names them. Shapes are the published ones for the size 7b, else small ones of the same kind.
A `Decoder` holds one cache and decodes from it greedily: eager, in a CUDA graph, or compiled in a
CUDA graph. `check` compares a peer's cached decoding with its own pass over the whole text.
"""

import copy
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module, metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.bench.measure import (
    Timing,
    capture,
    measure_steps,
    random_module,
    random_prompts,
    release,
)
from xlstm7b.bench.peers import TRITON_KERNELS, load_transformers, load_xlstm
from xlstm7b.bench.plans import ModelPlan
from xlstm7b.devices import to_dtype

COMPILED, GRAPH, EAGER = "compiled, CUDA graph", "CUDA graph", "eager"
MOST_STEPS = 100  # in one timing, see `measure_steps`
_KEYS = 256  # tokens of a piece: a step attends to whole pieces of a cache that grows

# The interface


class Peer(ABC):
    """A model with random weights. `layers` replaces the number of layers of its shape."""

    attentions: tuple[str, ...] = ("",)  # ways to attend to a cache while decoding
    grows = False  # whether the cache grows with the context
    compiles_prompts = False

    def __init__(self, plan: ModelPlan, layers: int | None = None) -> None:
        self.plan, self.layers = plan, layers
        self.dtype, self.device = to_dtype(plan.dtype), torch.device(plan.device)
        self.reader: Any = self.prompt_logits
        self._compiled: dict[bool, Any] = {}
        self.model: Any = self.build()

    @property
    @abstractmethod
    def engine(self) -> str:
        """The library and its version, and the kernels that run."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def build(self) -> torch.nn.Module: ...

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """Of every position, without a cache."""

    @abstractmethod
    def prompt_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Reads prompts [B, T]. Returns the last position's logits [B, 1, V] and the cache.

        A cache that grows is given, and filled; others are made.
        """

    @abstractmethod
    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        """Logits [B, 1, V] after one more token [B, 1]. Updates the cache in place."""

    def new_cache(self, batch: int, room: int) -> Any:
        """A cache for texts of `room` tokens."""
        first = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        return self.prompt_logits(first, None)[1]

    def tensors(self, cache: Any) -> list[Tensor]:
        """All tensors of the cache, in an order that depends on the model only."""
        return list(_tensors(cache))

    def set_length(self, cache: Any, length: int) -> None:
        """Makes the cache one of `length` tokens, whatever they are, if it grows."""
        assert not self.grows

    @contextmanager
    def attending(self, attention: str, length: int) -> Iterator[None]:
        """Steps inside attend to at most `length` tokens, in this way."""
        yield

    def tokens(self, batch: int, length: int) -> Tensor:
        return torch.tensor(random_prompts(self.vocab_size, batch, length), device=self.device)

    def cache_bytes(self, room: int) -> int:
        """Bytes of the cache of one sequence of `room` tokens."""
        return sum(each.nbytes for each in self.tensors(self.new_cache(1, room)))

    def compiled_step(self, is_batch: bool) -> Any:
        """`step`, compiled for one sequence or for a batch: of any size, if the cache grows."""
        if is_batch not in self._compiled:
            # The mode was chosen by measurement: it helps products of one row.
            mode = None if is_batch else "max-autotune-no-cudagraphs"
            dynamic = is_batch and self.grows
            self._compiled[is_batch] = torch.compile(self.step, mode=mode, dynamic=dynamic)
        return self._compiled[is_batch]

    def compile_prompts(self) -> None:
        self.reader = torch.compile(self.prompt_logits, dynamic=True)

    def in_float32(self) -> "Peer":
        """A copy with the same weights."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).float()
        other.dtype = torch.float32
        other.reader, other._compiled = other.prompt_logits, {}
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
    """Greedy decoding of `batch` texts from one cache. `way` is `COMPILED`, `GRAPH` or `EAGER`."""

    def __init__(
        self, peer: Peer, way: str, cache: Any, *, batch: int = 1, attention: str = ""
    ) -> None:
        self.peer, self.way, self.cache = peer, way, cache
        self.attention = attention or peer.attentions[0]
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=peer.device)
        self._step: Any = peer.compiled_step(batch > 1) if way == COMPILED else peer.step
        self._steps: dict[tuple[str, int], Callable[[], Tensor]] = {}

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
        for length in (*range(first, last, _KEYS), last):
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
        keys = _rounded(length + 1) if self.peer.grows else 0
        case = self.attention, keys
        if case not in self._steps:
            self._steps[case] = self._make(keys)
        return self._steps[case]

    def _make(self, keys: int) -> Callable[[], Tensor]:
        latest: list[Tensor] = []
        attention = self.attention

        def once() -> None:
            with self.peer.attending(attention, keys):
                logits = self._step(self.token, self.cache)
            self.token.copy_(logits[:, -1:].argmax(-1))
            latest[:] = [logits]

        if self.way == EAGER:
            run: Callable[[], None] = once
        else:
            self.peer.set_length(self.cache, max(0, keys - 8))  # room for the steps before capture
            run = capture(once)

        def step() -> Tensor:
            run()
            return latest[0]

        return step


def _rounded(length: int) -> int:
    return -(-length // _KEYS) * _KEYS


# The sanity check


def check(
    make: Callable[[ModelPlan, int | None], Peer], peer: Peer, decoder: Decoder
) -> dict[str, float]:
    """Raises a `ValueError` if cached decoding differs from a pass over the whole text.

    1. The model that is timed: logits of 16 forced tokens may differ from those of float32 by at
       most three times as much as the logits of the whole pass do.
    2. Four layers in float32: 16 greedy tokens are equal.
    """
    found = {}
    text = peer.tokens(1, _PROMPT + _CHECKED)
    want, whole = (each.logits(text)[:, _PROMPT:].double() for each in (peer.in_float32(), peer))
    cached = torch.cat([*_forced(decoder, text)], 1).double()
    for name, got in {"whole": whole, "cached": cached}.items():
        found[f"{name}_error"] = float((got - want).norm() / want.norm())
    release(peer.plan.device)
    if not found["whole_error"] <= _UNSTABLE:
        raise ValueError(
            "the random model is too unstable to check: logits of a pass over the whole text "
            f"differ from those of float32 by {found['whole_error']:.2g} (relative)"
        )
    if not found["cached_error"] <= _WORSE * found["whole_error"] + _ROUNDING:
        raise ValueError(
            "cached decoding is wrong: its logits differ from those of float32 by "
            f"{found['cached_error']:.2g}, those of a pass over the whole text by "
            f"{found['whole_error']:.2g} (relative)"
        )
    small = make(replace(peer.plan, dtype="float32"), 4)
    prompt = small.tokens(1, _PROMPT)
    cache = small.new_cache(1, _PROMPT + _CHECKED + 1)
    way = GRAPH if decoder.way == COMPILED else decoder.way  # compiling again takes too long
    cached_decoder = Decoder(small, way, cache, attention=decoder.attention)
    cached_decoder.prepare(_PROMPT, _PROMPT + _CHECKED)
    cached_decoder.read(prompt)
    cached_tokens, tokens = [int(cached_decoder.token)], []
    for length in range(_PROMPT, _PROMPT + _CHECKED - 1):
        cached_decoder.step(length)
        cached_tokens.append(int(cached_decoder.token))
    for _ in range(_CHECKED):
        tokens.append(int(small.logits(prompt)[:, -1].argmax(-1)))
        prompt = torch.cat([prompt, prompt.new_tensor([tokens[-1:]])], 1)
    if cached_tokens != tokens:
        raise ValueError(f"cached decoding is wrong: greedy tokens {cached_tokens}, not {tokens}")
    release(peer.plan.device)
    return found | {"equal_tokens": _CHECKED}


_PROMPT, _CHECKED = 248, 16  # tokens: steps cross the border between two pieces
_WORSE, _ROUNDING, _UNSTABLE = 3.0, 1e-4, 0.25


def _forced(decoder: Decoder, text: Tensor) -> Iterator[Tensor]:
    """Logits at the positions after `_PROMPT`, from steps with the text's own tokens."""
    decoder.prepare(_PROMPT, text.shape[1])
    decoder.read(text[:, :_PROMPT])
    for length in range(_PROMPT, text.shape[1]):
        decoder.token.copy_(text[:, length : length + 1])
        yield decoder.step(length).clone()


# xLSTM


class TransformersXLSTM(Peer):
    """The xLSTM of transformers, with the kernels of `mlstm_kernels` if it is installed."""

    @cached_property
    def has_kernels(self) -> bool:
        transformers: Any = import_module("transformers")
        return self.device.type == "cuda" and bool(transformers.utils.is_xlstm_available())

    @property
    def engine(self) -> str:
        kernels = _named("mlstm_kernels") if self.has_kernels else "native kernels"
        return f"{_named('transformers')}, {kernels}"

    @property
    def vocab_size(self) -> int:
        return self.plan.config.vocab_size

    def build(self) -> torch.nn.Module:
        config = self.plan.config
        if self.layers is not None:
            config = replace(config, num_blocks=self.layers)
        options = TRITON_KERNELS if self.has_kernels else {}
        options = options | {"autocast_kernel_dtype": self.plan.dtype}
        return load_transformers(config, self.dtype, self.plan.device, options=options)

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=True).logits
        return logits

    def prompt_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self.model(tokens, use_cache=True)
        return out.logits[:, -1:], out.cache_params

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        logits: Tensor = self.model(tokens, cache_params=cache, use_cache=True).logits
        return logits

    def tensors(self, cache: Any) -> list[Tensor]:
        return list(_tensors(cache.rnn_state))


class AuthorsXLSTM(Peer):
    """The authors' package, with fused weights and the kernels of `mlstm_kernels`."""

    @property
    def engine(self) -> str:
        kernels = "native kernels" if self.device.type == "cpu" else _named("mlstm_kernels")
        return f"{_named('xlstm')}, {kernels}"

    @property
    def vocab_size(self) -> int:
        return self.plan.config.vocab_size

    def build(self) -> torch.nn.Module:
        config = self.plan.config
        if self.layers is not None:
            config = replace(config, num_blocks=self.layers)
        return load_xlstm(
            config,
            self.dtype,
            self.plan.device,
            weight_mode="fused",
            mode="inference",
            autocast_kernel_dtype=self.plan.dtype,
            inference_state_dtype=self.plan.state_dtype,
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
    """Falcon-Mamba-7B (Mamba 1) or Codestral-Mamba-7B (Mamba 2) in transformers.

    On a GPU it needs `mamba_ssm`, without which transformers runs a slow path.
    """

    def __init__(self, kind: str, plan: ModelPlan, layers: int | None = None) -> None:
        self.kind = kind
        super().__init__(plan, layers)

    @property
    def engine(self) -> str:
        if not self._is_fast(*self._scans):
            return f"{_named('transformers')}, slow path"
        is_fast = self._is_fast("causal_conv1d_fn", "causal_conv1d_update")
        convolution = _named("causal_conv1d") if is_fast else "convolution of PyTorch"
        return f"{_named('transformers')}, {_named('mamba_ssm')}, {convolution}"

    @property
    def _scans(self) -> tuple[str, str]:
        if self.kind == "falcon-mamba":
            return "mamba_selective_scan", "mamba_selective_state_update"
        return "mamba2_chunk_scan", "mamba2_selective_state_update"

    def _is_fast(self, *functions: str) -> bool:
        """Whether transformers found another package's kernels for all of these functions."""
        kind = "falcon_mamba" if self.kind == "falcon-mamba" else "mamba2"
        module = import_module(f"transformers.models.{kind}.modeling_{kind}")
        return all(_is_replaced(getattr(module, name)) for name in functions)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def build(self) -> torch.nn.Module:
        if self.device.type == "cuda" and not self._is_fast(*self._scans):
            import_module("mamba_ssm")  # says what is missing, if that is why
            raise ValueError(f"{_named('transformers')} does not use the kernels of mamba_ssm")
        transformers: Any = import_module("transformers")
        fields = mamba_shape(self.kind, self.plan)
        if self.layers is not None:
            fields["num_hidden_layers"] = self.layers
        if self.kind == "falcon-mamba":
            config = transformers.FalconMambaConfig(**fields)
            make = partial(transformers.FalconMambaForCausalLM, config)
        else:
            config = transformers.Mamba2Config(**fields)
            make = partial(transformers.Mamba2ForCausalLM, config)
        model: torch.nn.Module = random_module(make, self.dtype, self.plan.device)
        return model

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits

    def prompt_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self.model(tokens, use_cache=True, logits_to_keep=1)
        return out.logits, out.cache_params

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        logits: Tensor = self.model(tokens, cache_params=cache, use_cache=True).logits
        return logits

    def tensors(self, cache: Any) -> list[Tensor]:
        return list(_tensors([(each.conv_states, each.recurrent_states) for each in cache.layers]))


def _is_replaced(function: Any) -> bool:
    """Whether a function of transformers calls another package's instead of its own code."""
    if isinstance(function, torch.nn.Module):  # the package `kernels` wraps it in a module
        function = inspect.getclosurevars(function.forward).nonlocals["func"]
    return bool(inspect.getclosurevars(function).nonlocals["is_new_implementation"])


def mamba_shape(kind: str, plan: ModelPlan) -> dict[str, Any]:
    is_falcon, config = kind == "falcon-mamba", plan.config
    if plan.size.lower() == "7b":
        sizes = {"hidden_size": 4096, "num_hidden_layers": 64}
        sizes["vocab_size"] = 65024 if is_falcon else 32768
        sizes["state_size"] = 16 if is_falcon else 128
        heads = {"num_heads": 128, "head_dim": 64, "n_groups": 8}
    else:
        sizes = {"hidden_size": config.embedding_dim, "num_hidden_layers": config.num_blocks}
        sizes |= {"vocab_size": config.vocab_size, "state_size": 16}
        heads = {"num_heads": config.embedding_dim // 32, "head_dim": 64, "n_groups": 2}
        heads["chunk_size"] = 16
    # Their default, 0.1, makes a random model so unstable that bfloat16 says nothing about float32.
    fields: dict[str, Any] = {**sizes, "tie_word_embeddings": False, "initializer_range": 0.02}
    return fields if is_falcon else fields | heads


# Llama


class Llama(Peer):
    """Llama-2-7B or Llama-3.1-8B in transformers, decoding from a static cache.

    A step attends in one of two ways. Both give the same result, at any position:

    - "flash": FlashAttention over all whole pieces of 256 tokens, and products over the last piece,
      in which later positions are hidden. The two are merged by their log-sums.
    - "sdpa": PyTorch's attention with a mask, over the same tokens.
    """

    attentions = ("flash", "sdpa")
    grows = True
    compiles_prompts = True

    def __init__(self, kind: str, plan: ModelPlan, layers: int | None = None) -> None:
        self.kind = kind
        super().__init__(plan, layers)

    @property
    def engine(self) -> str:
        return f"{_named('transformers')}, static cache"

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def build(self) -> torch.nn.Module:
        transformers: Any = import_module("transformers")
        transformers.AttentionInterface.register(_ATTENTION, _attention)
        fields = llama_shape(self.kind, self.plan)
        if self.layers is not None:
            fields["num_hidden_layers"] = self.layers
        config = transformers.LlamaConfig(
            **fields, max_position_embeddings=1 << 18, attn_implementation=_ATTENTION
        )
        make = partial(transformers.LlamaForCausalLM, config)
        model: torch.nn.Module = random_module(make, self.dtype, self.plan.device)
        return model

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits

    def prompt_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self.model(tokens, past_key_values=cache, logits_to_keep=1)
        return out.logits, cache

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        logits: Tensor = self.model(tokens, past_key_values=cache).logits
        return logits

    def new_cache(self, batch: int, room: int) -> Any:
        transformers: Any = import_module("transformers")
        config = self.model.config
        cache = transformers.StaticCache(config, max_cache_len=_rounded(room))
        heads, width = config.num_key_value_heads, config.head_dim
        cache.early_initialization(batch, heads, width, self.dtype, self.device)
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        return cache

    def tensors(self, cache: Any) -> list[Tensor]:
        return [each for layer in cache.layers for each in (layer.keys, layer.values)]

    def cache_bytes(self, room: int) -> int:
        config = self.model.config
        per_token: int = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return per_token * _rounded(room) * self.dtype.itemsize

    def set_length(self, cache: Any, length: int) -> None:
        lengths = [layer.cumulative_length for layer in cache.layers]
        torch._foreach_zero_(lengths)
        if length:
            torch._foreach_add_(lengths, length)

    @contextmanager
    def attending(self, attention: str, length: int) -> Iterator[None]:
        before = dict(_ATTENDED)
        _ATTENDED.update(way=attention, keys=length)
        try:
            yield
        finally:
            _ATTENDED.update(before)


def llama_shape(kind: str, plan: ModelPlan) -> dict[str, int]:
    if plan.size.lower() == "7b":
        llama2 = {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32}
        llama3 = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
        sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
        return {**sizes, **(llama2 if kind == "llama2" else llama3)}
    heads = plan.config.embedding_dim // 64
    return {
        "hidden_size": plan.config.embedding_dim,
        "num_hidden_layers": plan.config.num_blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kind == "llama2" else heads // 4,
        "intermediate_size": plan.config.ffn_dim,
        "vocab_size": plan.config.vocab_size,
    }


_ATTENTION = "xlstm7b_bench"
_ATTENDED: dict[str, Any] = {"way": "flash", "keys": 0}  # 0: all that the cache has room for


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


@torch.library.custom_op("xlstm7b_bench::attend", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
    """Prompts [B, H, T, D] from the first position on, or one token at `position`: [B, T, H, D].

    A compiler does not look inside, so the number of keys may change without compiling again.
    """
    length = q.shape[2]
    if length > 1:
        k, v = k[:, :, :length], v[:, :, :length]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    keys = _ATTENDED["keys"] or k.shape[2]
    k, v = k[:, :, :keys], v[:, :, :keys]
    if _ATTENDED["way"] == "sdpa":
        seen = (torch.arange(keys, device=q.device) <= position).expand(q.shape[0], 1, 1, keys)
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    start = max(0, keys - _KEYS)
    last = _last_piece if q.device.type == "cpu" else _compiled_last_piece()
    if not start:
        return last(q, k, v, position, scale, None, None)
    out, log_sum = _flash(q, k[:, :, :start], v[:, :, :start], scale)
    k, v = k[:, :, start:], v[:, :, start:]
    return last(q, k, v, position - start, scale, out, log_sum)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
    batch, heads, length, width = q.shape
    return q.new_empty(batch, length, heads, width)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to all of the keys, and the log-sum of its weights [B, H, 1]."""
    if q.device.type == "cuda" and q.dtype != torch.float32:
        result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return result[0], result[1]
    scores = _scores(q, k, scale)
    out = scores.softmax(-1).to(v.dtype) @ v
    return out.reshape(q.shape), scores.logsumexp(-1).reshape(q.shape[:3])


def _last_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    scale: float,
    out: Tensor | None,
    log_sum: Tensor | None,
) -> Tensor:
    """Attention to a piece up to `position`, merged with that to the pieces before it."""
    hidden = torch.arange(k.shape[2], device=q.device) > position
    scores = _scores(q, k, scale).masked_fill(hidden, -torch.inf)
    piece = (scores.softmax(-1).to(v.dtype) @ v).reshape(q.shape)
    if out is not None and log_sum is not None:
        share = torch.sigmoid(scores.logsumexp(-1).reshape(q.shape[:3]) - log_sum)[..., None]
        piece = torch.lerp(out.float(), piece.float(), share).to(q.dtype)
    return piece.transpose(1, 2).contiguous()


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """float32 [B, key heads, queries of each, keys]."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    return (grouped @ k.transpose(2, 3)).float() * scale


_COMPILED: list[Any] = []


def _compiled_last_piece() -> Any:
    if not _COMPILED:
        _COMPILED.append(torch.compile(_last_piece, dynamic=True))
    return _COMPILED[0]


# Flash linear attention


class Rwkv7(Peer):
    """RWKV-7 in FLA, with the shape of its 7.2B."""

    @property
    def engine(self) -> str:
        return f"FLA {metadata.version('fla-core')}, {_named('transformers')}"

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def build(self) -> torch.nn.Module:
        fla: Any = import_module("fla.models.rwkv7")
        layer: Any = import_module("fla.layers.rwkv7").RWKV7Attention
        _tune_less("fla.")
        plan = self.plan
        if plan.size.lower() == "7b":
            fields = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 65536}
            ranks = {"decay": 128, "gate": 480, "a": 128, "v": 96}
            fields |= {f"{name}_low_rank_dim": rank for name, rank in ranks.items()}
        else:
            fields = {
                "hidden_size": plan.config.embedding_dim,
                "num_hidden_layers": plan.config.num_blocks,
                "vocab_size": plan.config.vocab_size,
            }
        if self.layers is not None:
            fields["num_hidden_layers"] = self.layers
        make = partial(fla.RWKV7ForCausalLM, fla.RWKV7Config(**fields))
        # Its own initialisation takes minutes.
        usual, layer._initialize_weights = layer._initialize_weights, lambda *_: None
        try:
            model: torch.nn.Module = random_module(make, self.dtype, plan.device)
        finally:
            layer._initialize_weights = usual
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.02)
            # Its kernels are tuned once, whatever the length: so a long prompt comes first.
            model(torch.zeros(1, 4096, dtype=torch.long, device=plan.device), logits_to_keep=1)
        return model

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits

    def prompt_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self.model(tokens, use_cache=True, logits_to_keep=1)
        return out.logits, out.past_key_values

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
    them, took most of the time limit of a model.
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


def _named(package: str) -> str:
    """The package with its version, if it is installed as a distribution."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        module: Any = import_module(package)
        return f"{package} {getattr(module, '__version__', '')}".rstrip()


PEERS: dict[str, Callable[..., Peer]] = {
    "xlstm": AuthorsXLSTM,
    "transformers": TransformersXLSTM,
    "llama2": partial(Llama, "llama2"),
    "llama3": partial(Llama, "llama3"),
    "falcon-mamba": partial(Mamba, "falcon-mamba"),
    "codestral-mamba": partial(Mamba, "codestral-mamba"),
    "rwkv7": Rwkv7,
}
