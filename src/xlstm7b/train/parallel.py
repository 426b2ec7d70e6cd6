"""One model over many processes: tensor parallel by heads, sharded and replicated data parallel.

All of it is PyTorch's own: one device mesh of three axes, `parallelize_module` for the blocks'
heads, FSDP2 (`fully_shard`) for everything. Parameters keep their names; they become DTensors.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
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


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Processes of one host are neighbours on the last axis, which talks most."""
    return init_device_mesh(
        device_type,
        (layout.dp_replicate, layout.dp_shard, layout.tp),
        mesh_dim_names=(REPLICATE, SHARD, TENSOR),
    )


def parallelize(model: XLSTM, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Lays the model out over the mesh, in place: on the meta device too, before it has memory.

    Parameters stay in their own dtype (float32 masters) and are computed with in `compute_dtype`;
    gradients are reduced in float32. `token_logprobs` then works as before; with tensor parallelism
    each of a block's two halves takes one all-reduce.
    """
    blocks: Any = model.backbone.blocks
    if mesh[TENSOR].size() > 1:
        for block in blocks:
            parallelize_module(block, mesh[TENSOR], _tensor_plan())
    copies = mesh[REPLICATE].size() > 1
    options: dict[str, Any] = {
        "mesh": mesh[REPLICATE, SHARD] if copies else mesh[SHARD],
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
    }
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "token_logprobs")


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
