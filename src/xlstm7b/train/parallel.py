"""One model over many processes: tensor parallel by heads, sharded and replicated data parallel.

All of it is PyTorch's own: one device mesh of three axes, `parallelize_module` for the blocks'
heads, FSDP2 (`fully_shard`) for everything. Parameters keep their names; they become DTensors.
"""

from collections.abc import Iterable
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
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from xlstm7b.model import XLSTM
from xlstm7b.train.recipe import Layout

REPLICATE, SHARD, TENSOR = "dp_replicate", "dp_shard", "tp"
_UNIT_PARAMETERS = 30_000_000


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Processes of one host are neighbours on the last axis, which talks most."""
    return init_device_mesh(
        device_type,
        (layout.dp_replicate, layout.dp_shard, layout.tp),
        mesh_dim_names=(REPLICATE, SHARD, TENSOR),
    )


def parallelize(
    model: XLSTM, mesh: DeviceMesh, compute_dtype: torch.dtype, *, keep_gathered: bool = False
) -> None:
    """Lays the model out over the mesh, in place: on the meta device too, before it has memory.

    Parameters stay in their own dtype (float32 masters) and are computed with in `compute_dtype`;
    gradients are reduced in float32. `token_logprobs` then works as before; with tensor parallelism
    each of a block's two halves takes one all-reduce. With `keep_gathered` what the forward pass
    computes with is kept for the backward pass, not made again.
    """
    blocks: Any = model.backbone.blocks
    if mesh[TENSOR].size() > 1:
        for block in blocks:
            parallelize_module(block, mesh[TENSOR], _tensor_plan())
    copies = mesh[REPLICATE].size() > 1
    options: dict[str, Any] = {
        "mesh": mesh[REPLICATE, SHARD] if copies else mesh[SHARD],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # the loss's weights stay float32
        ),
        "reshard_after_forward": not keep_gathered,
    }
    for unit in _units(blocks):
        fully_shard(unit, **options)
    fully_shard(model, **options)
    for method in ("loss", "token_logprobs"):
        register_fsdp_forward_method(model, method)


def _units(blocks: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Blocks in a row that are gathered as one: small ones are not worth a collective each."""
    units: list[list[nn.Module]] = []
    size = _UNIT_PARAMETERS
    for block in blocks:
        if size >= _UNIT_PARAMETERS:
            units.append([])
            size = 0
        units[-1].append(block)
        size += sum(parameter.numel() for parameter in block.parameters())
    return units


def reshard(model: XLSTM) -> None:
    """Drops gathered weights, as a backward pass does; after a forward pass alone, where kept."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _tensor_plan() -> dict[str, ParallelStyle]:
    """Heads are split: what makes them by columns, what reads them by rows (paper, "gates").

    The layers' input becomes a DTensor once, so that the gradients of all that read it are summed
    before they are reduced.
    """
    columns = [f"mlstm_layer.{name}" for name in ("q", "k", "v")]
    columns += [f"mlstm_layer.{name}_preact" for name in ("ogate", "igate", "fgate")]
    columns += ["ffn.proj_up_gate", "ffn.proj_up"]
    return {
        "mlstm_layer": PrepareModuleInput(
            input_layouts=(Replicate(), None, None, None),
            desired_input_layouts=(Replicate(), None, None, None),
        ),
        "ffn": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        ),
        **{name: ColwiseParallel() for name in columns},
        "mlstm_layer.multihead_norm": _OwnPart(),
        "mlstm_layer.out_proj": RowwiseParallel(),
        "ffn.proj_down": RowwiseParallel(),
    }


# The gates' product is an operator of our own: outputs and inputs, as they may be laid out.
Layouts = list[tuple[list[Placement], list[Placement]]]


@register_sharding(torch.ops.xlstm7b.linear_float32.default)  # type: ignore[untyped-decorator]
def _split_columns(x: Tensor, weight: Tensor) -> Layouts:
    columns = Shard(x.ndim - 1)
    return [([columns], [Replicate(), Shard(0)]), ([Replicate()], [Replicate(), Replicate()])]


@register_sharding(torch.ops.xlstm7b.linear_float32_backward.default)  # type: ignore[untyped-decorator]
def _split_columns_backward(grad: Tensor, x: Tensor, weight: Tensor) -> Layouts:
    columns, whole = Shard(grad.ndim - 1), Replicate()
    return [
        ([Partial(), Shard(0)], [columns, whole, Shard(0)]),
        ([whole, whole], [whole, whole, whole]),
    ]


class _OwnPart(ParallelStyle):
    """A module that returns its one parameter: split along its first axis, each gets its own."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole: Any = module.weight
        weight = distribute_tensor(whole.data, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))
        module.register_forward_hook(_to_local)
        return module


def _to_local(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.to_local() if isinstance(output, DTensor) else output
