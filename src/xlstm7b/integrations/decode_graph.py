"""DecodeGraph: one decoding step of an xLSTM of `transformers` on a GPU, as one CUDA graph.

Launching a 7B's kernels one by one from Python takes several times longer than the GPU needs. The
graph runs `FusedModel`, the step that `Generator` runs, over the parameters of the other library's
model: parameters that multiply the same vector become views of one tensor, as there.

The graph reads the parameters in place, so training may change them between two steps. It is
dropped when a parameter got other memory, or when a layer was replaced or got a hook.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from xlstm7b.config import ModelConfig
from xlstm7b.devices import as_current
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.runner import stream_for
from xlstm7b.model import XLSTM, ModelState

_MOST_STACKED = 4  # parameters that `FusedModel` makes views of one tensor

# The last graph of each model. It is not an attribute of the model, which may be copied.
_graphs: "weakref.WeakKeyDictionary[nn.Module, DecodeGraph]" = weakref.WeakKeyDictionary()


def find_graph(model: Any, cache: Any, tokens: Tensor | None) -> "DecodeGraph | None":
    """The graph for this call; None if it must go through the model's modules."""
    if (
        torch.compiler.is_compiling()
        or tokens is None
        or tokens.shape[1] != 1
        or not tokens.is_cuda
        or cache.states is None
        or cache.is_recording
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cuda")
    ):
        return None
    return graph_for(model, cache, len(tokens))


def graph_for(model: Any, cache: Any, batch: int) -> "DecodeGraph | None":
    """The graph for a model and a batch size. None if the model is not a plain xLSTM.

    The cache remembers such a model in `not_plain`, so that it is checked only once.
    """
    graph = _graphs.get(model)
    if graph is not None and graph.batch == batch and graph.is_current():
        return graph
    if cache.not_plain is not None and cache.not_plain() is model:
        return None
    _graphs.pop(model, None)  # frees its memory
    view = as_xlstm(model)
    if view is None:
        cache.not_plain = weakref.ref(model)
        return None
    graph = _graphs[model] = DecodeGraph(model, view, batch)
    return graph


def as_xlstm(model: Any) -> XLSTM | None:
    """An `XLSTM` that shares the parameters of an xLSTM of `transformers`.

    None if the model has adapters, hooks, quantised or sharded weights: what it computes then does
    not follow from its parameters alone.
    """
    theirs = model.config
    parameters = dict(model.named_parameters())
    first = next(iter(parameters.values()))
    config = ModelConfig(
        embedding_dim=theirs.hidden_size,
        num_blocks=theirs.num_hidden_layers,
        num_heads=theirs.num_heads,
        vocab_size=theirs.vocab_size,
        qk_dim_factor=theirs.qk_dim_factor,
        v_dim_factor=theirs.v_dim_factor,
        ffn_proj_factor=theirs.ffn_proj_factor,
        ffn_round_up_to_multiple_of=theirs.ffn_round_up_to_multiple_of,
        norm_eps=theirs.norm_eps,
        cell_norm_eps=theirs.norm_eps,
        eps=theirs.eps,
        gate_soft_cap=theirs.gate_soft_cap,
        output_logit_soft_cap=theirs.output_logit_soft_cap,
    )
    if {name: tuple(p.shape) for name, p in parameters.items()} != config.parameter_shapes():
        return None
    kind = first.dtype, first.device
    if any(type(p) is not nn.Parameter or (p.dtype, p.device) != kind for p in parameters.values()):
        return None
    if any(_is_changed(module) for module in model.modules() if module is not model):
        return None  # the model itself may be wrapped: that wrapper has been called already
    if not _have_own_memory(parameters.values()):
        return None
    with torch.device("meta"):
        view = XLSTM(config)
    for name, parameter in parameters.items():
        path, _, own = name.rpartition(".")
        setattr(view.get_submodule(path), own, parameter)
    return view


def _is_changed(module: nn.Module) -> bool:
    """True if a call of the module does more than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _have_own_memory(parameters: Any) -> bool:
    """False if parameters are views of one large buffer, as DeepSpeed's: they must stay there."""
    sharing: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        sharing.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
    return all(len(group) <= _MOST_STACKED for group in sharing.values())


class DecodeGraph:
    """One token for each row of a batch. The states of one cache at a time are in its memory."""

    def __init__(self, model: nn.Module, view: XLSTM, batch: int) -> None:
        self.batch = batch
        # Not under inference mode: what is made there cannot be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._fused = FusedModel(view)
            device = self._fused.device
            self._state = ModelState.zeros(view.config, batch, device=device)
            self._tokens = torch.full((batch,), -1, device=device)  # −1: the row keeps its state
            self._replay = self._capture()
        self.states = list(self._state.blocks)
        self._owner: Callable[[], Any] = lambda: None  # the cache whose states are here
        modules = list(model.modules())
        self._parameters = [
            (module._parameters, name, parameter.data_ptr())
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        # Every layer: where it is, and what a call of it may run besides its class's `forward`.
        self._layers = [
            (
                module._modules,
                name,
                layer,
                vars(layer),
                layer._forward_hooks,
                layer._forward_pre_hooks,
            )
            for module in modules
            for name, layer in module._modules.items()
            if layer is not None
        ]

    def is_current(self) -> bool:
        """True if the model still is the one that the graph was made from, values aside.

        It runs before every step, over hundreds of layers, so it is written for speed.
        """
        for parameters, name, address in self._parameters:
            parameter = parameters.get(name)
            if parameter is None or parameter.data_ptr() != address:
                return False
        for layers, name, layer, attributes, hooks, pre_hooks in self._layers:
            if layers.get(name) is not layer or hooks or pre_hooks or "forward" in attributes:
                return False
        return True

    @torch.no_grad()
    def step(self, cache: Any, tokens: Tensor, live: Tensor | None) -> Tensor:
        """Reads one token [B] per row into the cache; float32 logits [B, V].

        A row that is not `live` keeps its state.
        """
        if cache.states is not self.states:
            before = self._owner()
            if before is not None and before.states is self.states:
                before.states = list(self._state.clone().blocks)
            self._state.copy_(ModelState(tuple(cache.states), self._state.tokens_seen))
            self._owner = weakref.ref(cache)
        if live is not None:
            tokens = torch.where(live.to(tokens.device), tokens, -1)
        self._tokens.copy_(tokens)
        with as_current(self._fused.device):
            logits = self._replay()
        cache.update(self.states, 1, None)
        return logits.clone()

    def _capture(self) -> Callable[[], Tensor]:
        """A function that does the step and returns its logits. On a CPU it is the step itself."""

        @torch.inference_mode()
        def work() -> Tensor:
            return self._fused.step(self._tokens, self._state)

        if self._fused.device.type != "cuda":
            return work
        with as_current(self._fused.device):
            work()  # compiles the kernels; no row has a token, so that no state changes
            graph = torch.cuda.CUDAGraph()
            stream = stream_for(self, self._fused.device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                logits = work()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
