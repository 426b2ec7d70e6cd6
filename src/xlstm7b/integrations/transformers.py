"""`optimize(model)`: the xLSTM of `transformers` with this package's cell, masks and cache.

    from xlstm7b.integrations.transformers import optimize

    model = optimize(AutoModelForCausalLM.from_pretrained("NX-AI/xLSTM-7b"))

The model keeps its parameters and their names. Its modules get subclasses with the same names that
only replace `forward`, so saving, loading, PEFT, TRL and sharding work as before.

The import alone lets `transformers` load folders with int4 weights.
"""

import inspect
import warnings
import weakref
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers.models.xlstm import modeling_xlstm
from transformers.utils.generic import ModelOutput, can_return_tuple

from xlstm7b.accounting import LORA_TARGETS
from xlstm7b.integrations.decode_graph import find_graph
from xlstm7b.mlstm import MLSTMState, headwise_norm, mlstm_sequence, mlstm_step
from xlstm7b.mlstm.autocast import to_autocast
from xlstm7b.model import layers
from xlstm7b.model.layers import soft_cap
from xlstm7b.report import counted

_theirs: Any = modeling_xlstm
# With the authors' package installed, transformers uses its layers. They have the same names.
_is_external = getattr(_theirs, "external_xlstm", False)
_NAMES = ["xLSTMBlock", "xLSTMConfig", "xLSTMForCausalLM", "xLSTMModel", "xLSTMPreTrainedModel"]
_NAMES += ["xLSTMCache", "xLSTMRMSNorm", *([] if _is_external else ["xLSTMMultiHeadLayerNorm"])]
if _missing := [name for name in _NAMES if not hasattr(_theirs, name)]:
    raise ImportError(
        f"the xLSTM of transformers {transformers.__version__} has no {' and no '.join(_missing)}, "
        "which xlstm7b needs: install another version of transformers"
    )
_head_norm: Any = (
    import_module("xlstm.xlstm_large.model").MultiHeadLayerNorm
    if _is_external
    else _theirs.xLSTMMultiHeadLayerNorm
)

__all__ = ["LORA_TARGETS", "TESTED_VERSIONS", "XLSTMCache", "optimize"]

TESTED_VERSIONS = (5, 17), (5, 23)  # the first and the last that the tests ran with


def optimize(model: Any) -> Any:
    """Gives an `xLSTMForCausalLM` this package's forward pass, in place, and returns it.

    A PEFT model around one is accepted too. `ValueError` for models that this package does not
    compute, and if a small model has other numbers afterwards with the installed `transformers`. A
    version outside `TESTED_VERSIONS` is a warning.
    """
    found = [each for each in model.modules() if isinstance(each, _theirs.xLSTMForCausalLM)]
    if not found:
        raise ValueError(f"optimize takes an xLSTMForCausalLM, not a {type(model).__name__}")
    for each in found:
        _check_config(each.config)
    _check_library()
    _complete_config_class(_theirs.xLSTMConfig)
    _replace_modules(model)
    _register_lora_targets()
    return model


def _replace_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module) in _SUBCLASSES:
            module.__class__ = _SUBCLASSES[type(module)]
        elif type(module) is nn.Linear:
            # PEFT's wrapper has the layer's name; the layer itself is its `base_layer`.
            layer = name.removesuffix(".base_layer").rpartition(".")[2]
            module.__class__ = _LINEARS.get(layer, nn.Linear)


@cache  # once in a process
def _check_library() -> None:
    """Checks the installed `transformers`: what this module replaces is not its public API."""
    version, (first, last) = transformers.__version__, TESTED_VERSIONS
    try:
        _check_signatures()
        _compare_small_model()
    except Exception as error:  # a name is missing, or means something else
        raise ValueError(
            f"optimize does not work with transformers {version}: {error}; the tests ran with "
            f"transformers {first[0]}.{first[1]} to {last[0]}.{last[1]}"
        ) from error
    if not first <= Version(version).release[:2] <= last:
        warnings.warn(
            f"no test of xlstm7b ran with transformers {version}, only with {first[0]}.{first[1]} "
            f"to {last[0]}.{last[1]}; a small model has the same numbers with and without optimize",
            stacklevel=3,
        )


def _check_signatures() -> None:
    """The methods that `transformers` calls by position."""
    for method, names in (
        (_theirs.xLSTMForCausalLM._prepare_cache_for_generation, "generation_config model_kwargs"),
        (_init_weights, "module"),
    ):
        wanted = ["self", *names.split()]
        found = [*inspect.signature(method).parameters][: len(wanted)]
        if found != wanted:
            raise TypeError(f"its {method.__qualname__} takes {found}, not {wanted}")


@torch.no_grad()
def _compare_small_model() -> None:
    """Loss, logits and `generate` of a small random model, as it is and after `optimize`."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 64}
    random = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.random.fork_rng([]):
        model = _theirs.xLSTMForCausalLM(_theirs.xLSTMConfig(**sizes)).eval().double()
        for parameter in model.parameters():
            spread = 1.5 * parameter.shape[-1] ** -0.5
            parameter.normal_(float(parameter.dim() == 1), spread, generator=random)
        ours = deepcopy(model)
        _replace_modules(ours)
        ids = torch.randint(64, (2, 20), generator=random)
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        options |= {"pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
        written = ours.generate(ids, attention_mask=torch.ones_like(ids), **options)
        got = ours(written.sequences, labels=written.sequences)
        want = model(written.sequences, labels=written.sequences)
    steps = torch.stack(written.logits, dim=1)
    for what, mine, other in (
        ("loss", got.loss, want.loss),
        ("logits", got.logits, want.logits),
        ("generate", steps, want.logits[:, 19:-1]),
    ):
        error = float((mine.double() - other.double()).norm() / other.norm())
        if not error < 1e-3:
            raise ValueError(
                f"a small model has other numbers ({what}, relative error {error:.1g})"
            )


def _check_config(config: Any) -> None:
    for name, supported in (("weight_mode", "single"), ("use_bias", False), ("add_out_norm", True)):
        if getattr(config, name) != supported:
            raise ValueError(
                f"optimize supports {name} = {supported!r}, and this model has "
                f"{getattr(config, name)!r}"
            )


def _complete_config_class(config: Any) -> None:
    """What trainers look up in a config. On the class, because attributes of a config are saved."""
    # Trainer's evaluation gathers all other outputs, as tensors.
    config.keys_to_ignore_at_inference = ["past_key_values", "cache_params"]
    # TRL computes the loss from `lm_head.weight` itself, with the soft-cap under this name.
    config.final_logit_softcapping = property(lambda self: self.output_logit_soft_cap)


def _register_lora_targets() -> None:
    """PEFT's LoRA then needs no `target_modules` for xLSTM."""
    try:
        from peft.utils import constants
    except ImportError:
        return
    targets = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets.setdefault("xlstm", [*LORA_TARGETS])


class XLSTMCache(_theirs.xLSTMCache):  # for `isinstance`; `transformers` reads what follows
    """The states of all layers after the tokens read so far, for `past_key_values`.

    C, n and m of each layer are float32, whatever the dtype of the model. With
    `activate_past_recording`, what the states are updated with is kept, so that `crop` can take
    tokens back: assisted generation needs it.
    """

    # Read by `generate`. With True, it would compile the model and crop without a recording.
    is_compileable = is_croppable = False
    dtype = torch.float32

    def __init__(self) -> None:
        self.states: list[MLSTMState] | None = None  # None before the first token
        self.not_plain: weakref.ref[Any] | None = None  # of `graph_for`
        self._tokens = 0
        # k, v, i, f and resets of each call and layer.
        self._recording: list[list[tuple[Tensor, ...]]] | None = None
        self._recorded_from: list[MLSTMState] | None = None

    @property
    def rnn_state(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """C, n and m of each layer, shaped as in the cache of `transformers`."""
        return {
            layer: (state.C, state.n, state.m[..., None])
            for layer, state in enumerate(self.states or [])
        }

    @property
    def seqlen_offset(self) -> Tensor:
        return torch.tensor([self._tokens])

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, padding included."""
        return self._tokens

    def update(
        self, states: list[MLSTMState], tokens: int, inputs: list[tuple[Tensor, ...]] | None
    ) -> None:
        """Sets the states after `tokens` more tokens. `inputs` is what a recording keeps."""
        self.states = states
        self._tokens += tokens
        if self._recording is not None and inputs is not None:
            self._recording.append(inputs)

    def activate_past_recording(self) -> None:
        """From now on `crop` can take tokens back."""
        # Copies: the states may be those of a graph, which another cache may use next.
        self._recording = []
        self._map(Tensor.clone)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last tokens, given as a negative number; 0 forgets the recording.

        A positive number is the number of tokens that are kept.
        """
        kept = tokens_to_remove if tokens_to_remove > 0 else self._tokens + tokens_to_remove
        removed = self._tokens - kept
        if removed > 0:
            recorded = sum(call[0][0].shape[1] for call in self._recording or [])
            if removed > recorded:
                raise ValueError(
                    f"the last {counted(removed, 'token')} cannot be taken back: {recorded} are "
                    "recorded; call activate_past_recording() before they are read"
                )
            assert self._recording is not None
            self.states = self._replayed(recorded - removed)
            self._tokens = kept
        self._restart_recording()

    def _replayed(self, tokens: int) -> list[MLSTMState] | None:
        """The states after the first recorded tokens."""
        assert self._recording is not None
        before = self._recorded_from
        if not tokens:
            return before
        states = []
        for layer, calls in enumerate(zip(*self._recording, strict=True)):
            parts = zip(*calls, strict=True)
            k, v, i, f, resets = (torch.cat(part, dim=1)[:, :tokens] for part in parts)
            state = None if before is None else before[layer]
            # The outputs are not used, so k stands in for q.
            states.append(mlstm_sequence(k, k, v, i, f, state=state, resets=resets)[1])
        return states

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row r becomes a copy of row beam_idx[r]."""
        self._map(lambda part: part.index_select(0, beam_idx.to(part.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Row r becomes the rows r · repeats … r · repeats + repeats − 1."""
        self._map(lambda part: part.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        """Back to before the first token."""
        self.__init__()  # type: ignore[misc]

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.states is not None:
            self.states = [MLSTMState(*map(change, state)) for state in self.states]
        self._restart_recording()

    def _restart_recording(self) -> None:
        if self._recording is not None:
            self._recording, self._recorded_from = [], self.states


# The fields are those of `transformers`; `past_key_values` is the usual name of a cache.


@dataclass
class XLSTMOutput(ModelOutput):
    """`last_hidden_state` of the model without its head."""

    last_hidden_state: Tensor | None = None
    cache_params: XLSTMCache | None = None
    hidden_states: tuple[Tensor | None, ...] | None = None

    @property
    def past_key_values(self) -> XLSTMCache | None:
        return self.cache_params


@dataclass
class XLSTMCausalLMOutput(ModelOutput):
    """float32 `logits`, and the `loss` if labels were given."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache_params: XLSTMCache | None = None
    hidden_states: tuple[Tensor | None, ...] | None = None

    @property
    def past_key_values(self) -> XLSTMCache | None:
        return self.cache_params


# The modules. Each is the class of the same name with this package's `forward`.


class xLSTMForCausalLM(_theirs.xLSTMForCausalLM):  # noqa: N801
    _is_stateful = False  # a cache can be cropped

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_params: XLSTMCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: XLSTMCache | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | int | Collection[int] | None = None,
        **kwargs: Any,
    ) -> XLSTMCausalLMOutput:
        """As every causal language model of `transformers`.

        Args:
            attention_mask: [B, T], or longer and ending with these T tokens. Tokens with 0 do not
                change the state, wherever they are.
            position_ids: [B, T] or [1, T]. A 0 after the first column starts a new document.
            past_key_values: The cache, which is updated. `cache_params` is the same.
            logits_to_keep: Number of last positions, or indices, to compute logits for; 0: all.
            output_hidden_states: True: the embedding and every layer's output. Numbers: only these,
                None for the others; the embedding is 0 (before `transformers` 5.23, layer 0 is).
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        cache = _checked_cache(past_key_values if past_key_values is not None else cache_params)
        if cache is not None and labels is None and not output_hidden_states:
            graph = find_graph(self, cache, input_ids)
            if graph is not None:
                assert input_ids is not None
                padded = _padded(attention_mask, len(input_ids), 1)
                live = None if padded is None else ~padded[:, 0]
                logits = graph.step(cache, input_ids[:, 0], live)
                return XLSTMCausalLMOutput(logits=logits[:, None], cache_params=cache)
        output = self.backbone(
            input_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        products = self.lm_head(output.last_hidden_state[:, kept])
        logits = soft_cap(_wide(products), self.config.output_logit_soft_cap)
        loss = None
        if labels is not None:
            size = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=size, **kwargs)
        return XLSTMCausalLMOutput(loss, logits, output.cache_params, output.hidden_states)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        given = model_kwargs.pop("cache_params", None)
        if given is not None:
            model_kwargs["past_key_values"] = given
        cache: Any = _checked_cache(model_kwargs.get("past_key_values"))
        if cache is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = cache = XLSTMCache()
            if generation_config.is_assistant:
                cache.activate_past_recording()


class xLSTMModel(_theirs.xLSTMModel):  # noqa: N801
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_params: XLSTMCache | None = None,
        use_cache: bool | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: XLSTMCache | None = None,
        output_hidden_states: bool | int | Collection[int] | None = None,
        **kwargs: Any,
    ) -> XLSTMOutput:
        """The arguments are those of `xLSTMForCausalLM.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        cache = _checked_cache(past_key_values if past_key_values is not None else cache_params)
        if use_cache is None:  # training does not need it, and would hold the states' memory
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = XLSTMCache()
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        batch, length = x.shape[:2]
        if not length:
            raise ValueError(
                "there are no tokens to read; generate with a cache takes the whole text, or the "
                "new tokens and an attention_mask for the whole text"
            )
        padded = _padded(attention_mask, batch, length)
        resets = _resets(position_ids, padded, batch, length)
        if padded is not None:
            x = layers.without_padding(x, padded)
        states: list[MLSTMState | None] = [None] * len(self.blocks)
        if cache is not None and cache.states is not None:
            if len(cache.states) != len(states):
                raise ValueError(
                    f"the cache holds the states of {counted(len(cache.states), 'layer')}, and "
                    f"this model has {len(states)}: it was filled by another model"
                )
            states[:] = cache.states
        records = cache is not None and cache.is_recording
        # A long prompt is read in parts, to save memory.
        part_length = length
        if not (torch.is_grad_enabled() or output_hidden_states or records):
            part_length = min(length, self.config.max_inference_chunksize)
        first, chosen = _chosen_states(output_hidden_states, len(states))
        outputs, inputs, seen = [], [], [x if 0 in chosen else None]
        for start in range(0, length, part_length):
            part = slice(start, start + part_length)
            y = x[:, part]
            for index, block in enumerate(self.blocks):
                y, states[index], recorded = block(
                    y,
                    states[index],
                    padded=None if padded is None else padded[:, part],
                    resets=None if resets is None else resets[:, part],
                    records=records,
                )
                inputs.append(recorded)
                if output_hidden_states:
                    seen.append(y if index + 1 in chosen else None)
            outputs.append(y)
        y = self.out_norm(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1))
        if cache is not None:
            cache.update(states, length, inputs if records else None)  # type: ignore[arg-type]
        hidden = None
        if output_hidden_states:
            hidden = (*seen[first:-1], None if seen[-1] is None else y)
        return XLSTMOutput(y, cache if use_cache else None, hidden)


def _chosen_states(
    wanted: bool | int | Collection[int] | None, layers: int
) -> tuple[int, Collection[int]]:
    """The first hidden state to return, and those that are kept: 0 is the embedding."""
    every = range(layers + 1)
    if not wanted or wanted is True:
        return 0, every if wanted else ()
    if Version(transformers.__version__).release < (5, 23):
        if isinstance(wanted, int):
            return 0, every
        return 1, {layer + 1 for layer in wanted}
    numbers = [wanted] if isinstance(wanted, int) else wanted
    return 0, {n % len(every) for n in numbers if -len(every) <= n <= layers}


def _checked_cache(cache: object) -> XLSTMCache | None:
    if cache is not None and not isinstance(cache, XLSTMCache):
        raise ValueError(
            "the cache of an optimized model is xlstm7b.integrations.transformers.XLSTMCache, "
            f"not {type(cache).__name__}"
        )
    return cache


def _padded(attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """bool [B, T], True where the mask is 0; None without a mask."""
    if attention_mask is None:
        return None
    shape = attention_mask.shape
    if len(shape) != 2 or shape[0] not in (1, batch) or shape[1] < length:
        raise ValueError(f"attention_mask must be [{batch}, {length}] or longer, not {list(shape)}")
    return (attention_mask[:, -length:] == 0).expand(batch, length)


def _resets(
    position_ids: Tensor | None, padded: Tensor | None, batch: int, length: int
) -> Tensor | None:
    """bool [B, T], True where a new document starts; None if there is none.

    The first column is never one: it continues the cache, or there is nothing to forget.
    """
    if position_ids is None or length == 1:
        return None
    shape = position_ids.shape
    is_wrong = len(shape) not in (1, 2) or shape[-1] < length
    if is_wrong or (len(shape) == 2 and shape[0] not in (1, batch)):
        raise ValueError(f"position_ids must be [{batch}, {length}], not {list(shape)}")
    resets = (position_ids[..., -length:] == 0).expand(batch, length)
    resets = resets & (torch.arange(length, device=resets.device) > 0)
    return resets if padded is None else resets & ~padded


class xLSTMBlock(_theirs.xLSTMBlock):  # noqa: N801
    def forward(
        self,
        x: Tensor,
        state: MLSTMState | None = None,
        *,
        padded: Tensor | None = None,
        resets: Tensor | None = None,
        records: bool = False,
    ) -> tuple[Tensor, MLSTMState, tuple[Tensor, ...] | None]:
        """The block over vectors [B, T, d]: its output, the new state and what a recording keeps.

        Every layer with weights is called, so that adapters, offloading and sharding can wrap it.
        """
        config, layer = self.config, self.mlstm_layer
        x = to_autocast(x)
        y = self.norm_mlstm(x)
        heads = (config.num_heads, -1)
        q, k, v = (part(y).unflatten(-1, heads) for part in (layer.q, layer.k, layer.v))
        # In float32 also if a quantised layer stands in for a `GateLinear`.
        i = soft_cap(_wide(layer.igate_preact(y)), config.gate_soft_cap)
        f = soft_cap(_wide(layer.fgate_preact(y)), config.gate_soft_cap)
        if padded is not None:
            i = i.masked_fill(padded[..., None], -torch.inf)
            f = f.masked_fill(padded[..., None], torch.inf)
        recorded = None
        if records:
            none = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
            recorded = k, v, i, f, none if resets is None else resets
        if x.shape[1] == 1 and resets is None and state is not None:
            q, k, v, i, f = (part.squeeze(1) for part in (q, k, v, i, f))
            h, state = mlstm_step(q, k, v, i, f, state, eps=config.eps)
            h = h.unsqueeze(1)
        else:
            h, state = mlstm_sequence(q, k, v, i, f, state=state, resets=resets, eps=config.eps)
        h = layer.multihead_norm(h) * torch.sigmoid(layer.ogate_preact(y))
        x = x + layer.out_proj(h)
        return x + self.ffn(self.norm_ffn(x)), state, recorded


def _wide(x: Tensor) -> Tensor:
    """x in float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class xLSTMRMSNorm(_theirs.xLSTMRMSNorm):  # noqa: N801
    forward = layers.RMSNorm.forward


class xLSTMMultiHeadLayerNorm(_head_norm):  # noqa: N801
    def forward(self, h: Tensor) -> Tensor:
        """h [B, T, NH, d_hv], normalised and flattened to [B, T, NH · d_hv]."""
        return headwise_norm(h, to_autocast(self.weight), self.eps).flatten(-2)


class GateLinear(nn.Linear):
    """Returns float32: the cell's gates are never rounded to bfloat16."""

    forward = layers.GateLinear.forward  # type: ignore[assignment]


class HeadLinear(nn.Linear):
    """Returns float32 logits."""

    forward = layers.Float32Linear.forward  # type: ignore[assignment]


_SUBCLASSES: dict[type, type] = {
    each.__bases__[0]: each
    for each in (xLSTMForCausalLM, xLSTMModel, xLSTMBlock, xLSTMRMSNorm, xLSTMMultiHeadLayerNorm)
}
_LINEARS = {"igate_preact": GateLinear, "fgate_preact": GateLinear, "lm_head": HeadLinear}


# Loading int4 weights. `_init_weights` of transformers reads the `weight` of every linear layer. A
# layer with packed weights has none before its first forward pass, so loading fails. Such layers
# are left out: the checkpoint fills them.

_base = _theirs.xLSTMPreTrainedModel
_init_weights = _base._init_weights


def _init_loaded_weights(self: Any, module: nn.Module) -> None:
    if not isinstance(module, nn.Linear) or hasattr(module, "weight"):
        _init_weights(self, module)


_base._init_weights = _init_loaded_weights
