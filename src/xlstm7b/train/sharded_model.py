"""The model of a recipe, laid out over the processes: tensor parallel, sharded, replicated.

Everything distributed is PyTorch's: one device mesh of three axes, `parallelize_module` splits the
blocks by heads, FSDP2 (`fully_shard`) shards all parameters. Parameters keep their names; they
become DTensors. One process does without FSDP2 (`one_device.py`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from xlstm7b.checkpoint import Checkpoint, open_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_dtype
from xlstm7b.model import XLSTM
from xlstm7b.model.init import drawn_parameters
from xlstm7b.model.initial_state import InitialState, add_initial_state
from xlstm7b.model.lora import add_lora, base_name, draw_lora, lora_layers
from xlstm7b.quantize.gpu import prepare
from xlstm7b.quantize.weight import QuantizedWeight
from xlstm7b.registry import STANDARD
from xlstm7b.train.one_device import as_dtensors, compute_blocks_in, compute_in
from xlstm7b.train.recipe import LARGE, Layout, Recipe

REPLICATE, SHARD, TENSOR = "dp_replicate", "dp_shard", "tp"
_GRAPHS = 1024  # of compiled blocks, for all shapes of a run
UNIT_PARAMETERS = 30_000_000  # of blocks that are gathered together
# Fields in which the model of `init_from` may differ: the recipe chooses the special tokens, and
# the first value of a bias is not needed if it is learned. The factors count if a width differs.
_FREE = {f"{kind}_token_id" for kind in ("bos", "eos", "pad")}
_FREE |= {"force_bos_token_insert", "igate_bias_init_range"}
_FACTORS = {"qk_dim_factor", "v_dim_factor", "ffn_proj_factor"}
_FACTORS |= {"mlstm_round_up_to_multiple_of", "ffn_round_up_to_multiple_of"}


def build_model(
    recipe: Recipe, layout: Layout, device: torch.device, *, init_from: str = ""
) -> XLSTM:
    """The sharded model with float32 weights: drawn, or read from the checkpoint `init_from`.

    With `[lora]` or `[state_tuning]` the weights of `init_from` are frozen, in the computation's
    dtype or quantised; only what is trained is float32. On one kind of device every layout starts
    from the same numbers.
    """
    quantized: Collection[str] = ()
    weights: Iterator[tuple[str, Tensor | QuantizedWeight]]
    if not recipe.is_frozen:
        weights = iter(first_weights(recipe, init_from, device))
    else:
        base = open_base(recipe, init_from)
        quantized, weights = base.schemes, base.weights()
    auto = "bfloat16" if device.type == "cuda" else "float32"
    dtype = to_dtype(auto if recipe.run.precision == "auto" else recipe.run.precision)
    # 1. The model without memory; the recipe says whether blocks recompute and are compiled.
    with torch.device("meta"):
        model = XLSTM(recipe.model)
        model.replace_quantized(quantized)
        if recipe.lora is not None:
            add_lora(model, **asdict(recipe.lora))
        if recipe.state_tuning is not None:
            add_initial_state(model, _initial_state(recipe))
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    blocks: Any = model.backbone.blocks
    mode = recipe.run.activation_checkpointing

    def prepare_forward(block: Any, during: Callable[[Any], Any] = lambda method: method) -> None:
        if not recipe.run.compile or device.type != "cuda":
            # `during` inside: what is computed again must see the parameters too.
            block.forward = during(block.forward)
            checkpoint_activations(block, mode)
            return
        checkpoint_activations(block, mode)
        # The forward method, not the block: FSDP's hooks and `during` stay outside the graph.
        block.forward = during(compiled(block.forward))

    is_alone = layout.world == 1
    is_large = sum(one.numel() for one in model.parameters() if one.requires_grad) > LARGE
    computes_blocks = is_alone and (is_large or mode != "none")
    if not computes_blocks:
        for block in blocks:
            prepare_forward(block)
    # 2. The layout.
    mesh = build_mesh(layout, device.type)
    if not is_alone:
        parallelize(model, mesh, dtype, keep_gathered=_keeps_gathered(recipe, layout))
    # 3. Memory and values. Each process fills its own part of every parameter.
    model.to_empty(device=device)
    if is_alone:
        as_dtensors(model, mesh[SHARD])
        if computes_blocks:
            compute_blocks_in(model, dtype, prepare_forward)
        else:
            compute_in(model, dtype)
    parameters = {base_name(name): parameter for name, parameter in model.named_parameters()}
    if recipe.lora is not None:
        weights = chain(weights, _drawn_adapter(model, recipe.run.seed, device))
    if recipe.state_tuning is not None:
        weights = chain(weights, _drawn_state(recipe, device))
    with torch.no_grad():
        for name, whole in weights:
            if isinstance(whole, QuantizedWeight):
                layer: Any = model.get_submodule(name.removesuffix(".weight"))
                whole = whole.to(device)
                whole = prepare(whole) if whole.is_cuda else whole
                getattr(layer, "base_layer", layer).weight = whole
            else:
                _fill(parameters.pop(name), whole)
    assert not parameters, "every parameter has a first value"
    return model


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward method, with a graph of its own for each shape of a batch.

    All blocks share these graphs. By default, PyTorch refuses a ninth: ramps, last batches and
    validation may well have more shapes than that.
    """
    from torch._dynamo import config  # takes a second to import

    config.recompile_limit = config.accumulated_recompile_limit = max(
        _GRAPHS, config.recompile_limit, config.accumulated_recompile_limit
    )
    return torch.compile(forward, fullgraph=True, dynamic=False)


def _keeps_gathered(recipe: Recipe, layout: Layout) -> bool:
    """True if gathered weights are kept between forward and backward pass.

    They are freed where this saves memory: if they are sharded, or if activations are recomputed.
    """
    return layout.dp_shard == 1 and recipe.run.activation_checkpointing == "none"


def _drawn_adapter(model: XLSTM, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The first values of A and B, one layer at a time."""
    torch.manual_seed(seed)
    for path, layer in lora_layers(model):
        A, B = (torch.empty(part.shape, device=device) for part in (layer.lora_A, layer.lora_B))
        draw_lora(A, B)
        yield f"{path}.lora_A", A
        yield f"{path}.lora_B", B


def _initial_state(recipe: Recipe) -> InitialState:
    tuning = recipe.state_tuning
    assert tuning is not None
    return InitialState(recipe.model, tuning.layers or None, rank=tuning.rank)


def _drawn_state(recipe: Recipe, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The first values of the initial state."""
    torch.manual_seed(recipe.run.seed)
    with device:
        initial = _initial_state(recipe)
    for name, parameter in initial.named_parameters():
        yield f"backbone.initial_state.{name}", parameter


@torch.no_grad()
def fill_initial_state(model: XLSTM, values: Mapping[str, Tensor]) -> None:
    """Gives the initial state other values."""
    initial: Any = model.backbone.initial_state
    for name, parameter in initial.named_parameters():
        _fill(parameter, values[name])


def first_weights(
    recipe: Recipe, init_from: str, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors, one by one: a process never holds the whole model."""
    return open_base(recipe, init_from).tensors() if init_from else _drawn_weights(recipe, device)


def open_base(recipe: Recipe, init_from: str) -> Checkpoint:
    """The weights that a run starts from. A `ValueError` if the recipe cannot train them."""
    opened = open_checkpoint(init_from)
    if opened.schemes and not recipe.is_frozen:
        raise ValueError(
            f"the weights in {init_from} are quantised, and cannot be trained: start from the "
            "float weights, or from those that `xlstm7b convert` makes of these, or train an "
            "adapter with [lora] or a state with [state_tuning]"
        )
    check_same_model(init_from, opened.config, recipe.model)
    return opened


def check_same_model(source: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    """Raises a `ValueError` that names every field that differs and changes the model."""
    free = _FREE if theirs.parameter_shapes() != ours.parameter_shapes() else _FREE | _FACTORS
    if (ours.input_gate or ours.gate) != STANDARD["gate"]:
        free = free - {"igate_bias_init_range"}
    differing = [
        f"has {name} {getattr(theirs, name)!r}, the recipe {getattr(ours, name)!r}"
        for name in vars(ours)
        if name not in free and getattr(theirs, name) != getattr(ours, name)
    ]
    if differing:
        raise ValueError(f"the model in {source} {'; it '.join(differing)}: change [model]")


def _drawn_weights(recipe: Recipe, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    with torch.device("meta"):
        model = XLSTM(recipe.model)
    torch.manual_seed(recipe.run.seed)
    yield from drawn_parameters(model, device)


def _fill(parameter: Tensor, whole: Tensor) -> None:
    """Copies this process's part. No communication: every process has the whole tensor."""
    if not isinstance(parameter, DTensor):  # frozen, and not sharded
        parameter.copy_(whole)
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    own = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    parameter.to_local().copy_(whole[own])


# Activation checkpointing


def checkpoint_activations(block: nn.Module, mode: str) -> None:
    """Makes the backward pass compute a block again, so that fewer activations are kept.

    "block" keeps only the block's input, "products" the outputs of matrix products, "selective"
    those and the cell's. It wraps the block's forward method, not the block, so parameters keep
    their names.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode in ("selective", "products"):
        policy = partial(_policy, keep_cell=mode == "selective")
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    block.forward = partial(checkpoint, block.forward, **options)


def _policy(
    context: Any, operator: Any, *arguments: Any, keep_cell: bool, **options: Any
) -> CheckpointPolicy:
    aten = torch.ops.aten
    products = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    is_kept = "dequantized_product" in str(operator)
    is_kept |= keep_cell and "mlstm_chunkwise" in str(operator)
    if operator in products:
        x, weight = arguments[-2:]
        # The product with B of LoRA is cheap, and as large as the layer's own.
        is_kept = 4 * x.shape[-1] > weight.shape[-1]
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


# Data parallel


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Tensor parallelism communicates most, so it is the last axis: processes of one host."""
    return init_device_mesh(
        device_type,
        (layout.dp_replicate, layout.dp_shard, layout.tp),
        mesh_dim_names=(REPLICATE, SHARD, TENSOR),
    )


def parallelize(
    model: XLSTM,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    keep_gathered: bool = False,
    unit_parameters: int = UNIT_PARAMETERS,
) -> None:
    """Lays the model out over the mesh, in place; the meta device works too.

    Trained parameters stay float32; computation is in `compute_dtype` and gradients are reduced in
    float32. Frozen ones have `compute_dtype`. They are sharded if there are several shards; else
    they are used as they are, without a copy.
    With tensor parallelism each half of a block takes one all-reduce. `keep_gathered` keeps the
    gathered weights of the forward pass for the backward pass.
    """
    blocks: Any = model.backbone.blocks
    # Norms are no obstacle: those of the residual stream are not split, that of the heads is.
    others = model.config.other_classes().keys() - {"norm", "head_norm"}
    if mesh[TENSOR].size() > 1 and others:
        raise ValueError(
            "tensor parallelism can split the released model's layers only: set parallel.tp = 1"
        )
    if mesh[TENSOR].size() > 1:
        for block in blocks:
            parallelize_module(block, mesh[TENSOR], _tensor_parallel_plan())
    has_replicas = mesh[REPLICATE].size() > 1
    options: dict[str, Any] = {
        "mesh": mesh[REPLICATE, SHARD] if has_replicas else mesh[SHARD],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # the weights of the loss stay float32
        ),
        "reshard_after_forward": not keep_gathered,
    }
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    if frozen and mesh[SHARD].size() == 1:
        options["ignored_params"] = frozen
    for unit in _units(blocks, unit_parameters):
        fully_shard(unit, **options)
    if model.backbone.initial_state is not None:
        # A state stays float32: it is saved and used as it is.
        wide = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(model.backbone.initial_state, **{**options, "mp_policy": wide})
    fully_shard(model, **options)
    for method in ("loss", "token_logprobs"):
        register_fsdp_forward_method(model, method)


def expect_backward(model: XLSTM, recipe: Recipe, layout: Layout, *, is_last: bool) -> None:
    """To be called before each micro-batch; `is_last` says whether it is a step's last one.

    Replicas add up their gradients with the last one. Until then, weights that stay gathered during
    a micro-batch stay so for the next one too.
    """
    if layout.dp_replicate > 1:
        sharded: Any = model  # FSDP has added methods
        sharded.set_requires_all_reduce(is_last)
        if _keeps_gathered(recipe, layout):
            sharded.set_reshard_after_backward(is_last)


def _units(blocks: Iterable[nn.Module], least: int) -> list[list[nn.Module]]:
    """Consecutive blocks that are gathered together: a small block is not worth a collective."""
    units: list[list[nn.Module]] = []
    size = least
    for block in blocks:
        if size >= least:
            units.append([])
            size = 0
        units[-1].append(block)
        size += sum(parameter.numel() for parameter in block.parameters())
    return units


def reshard(model: XLSTM) -> None:
    """Frees gathered weights. A backward pass does that too; a forward pass alone may keep them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Tensor parallel


def _tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """Splits the heads: projections to them by columns, projections from them by rows.

    The input of a layer becomes a DTensor once, so that the gradients of all projections that read
    it are added before they are reduced.
    """
    columns = [f"mlstm_layer.{name}" for name in ("q", "k", "v")]
    columns += [f"mlstm_layer.{name}_preact" for name in ("ogate", "igate", "fgate")]
    columns += ["ffn.proj_up_gate", "ffn.proj_up"]
    return {
        "mlstm_layer": PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
        ),
        "ffn": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        ),
        **{name: ColwiseParallel() for name in columns},
        "mlstm_layer.multihead_norm": _SplitWeight(),
        "mlstm_layer.out_proj": RowwiseParallel(),
        "ffn.proj_down": RowwiseParallel(),
    }


# The gates use an operator of our own: the placements of its outputs and inputs that are possible.
Placements = list[tuple[list[Placement], list[Placement]]]


@register_sharding(torch.ops.xlstm7b.linear_float32.default)  # type: ignore[untyped-decorator]
def _shard_linear(x: Tensor, weight: Tensor) -> Placements:
    columns = Shard(x.ndim - 1)
    return [([columns], [Replicate(), Shard(0)]), ([Replicate()], [Replicate(), Replicate()])]


@register_sharding(torch.ops.xlstm7b.linear_float32_backward.default)  # type: ignore[untyped-decorator]
def _shard_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> Placements:
    columns, whole = Shard(grad.ndim - 1), Replicate()
    return [
        ([Partial(), Shard(0)], [columns, whole, Shard(0)]),
        ([whole, whole], [whole, whole, whole]),
    ]


class _SplitWeight(ParallelStyle):
    """For a module that returns its only parameter: each process gets its part of axis 0."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole: Any = module.weight
        weight = distribute_tensor(whole.data, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))
        module.register_forward_hook(_to_local)
        return module


def _to_local(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.to_local() if isinstance(output, DTensor) else output
