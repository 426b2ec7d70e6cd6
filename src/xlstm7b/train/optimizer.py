"""AdamW for the parameters of an XLSTM, and the global gradient norm on any layout."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from xlstm7b.train.recipe import Optimizer

_FUSED_ON = {"cuda", "cpu", "mps", "xpu"}


def is_decayed(name: str, parameter: Tensor) -> bool:
    """True if weight decay applies: to every matrix, those of the gates and the head included.

    Not to the embedding, norms and biases, as in the authors' training code, nor to a state.
    """
    return parameter.dim() >= 2 and not {"embeddings", "initial_state"} & {*name.split(".")}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for AdamW: with and without weight decay."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[is_decayed(name, parameter)].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


class LocalAdamW(torch.optim.AdamW):
    """AdamW that computes with each process's own part of the DTensors.

    The numbers are those of `torch.optim.AdamW`, and so is the state, which holds DTensors. But the
    host needs several times as long for an operator over DTensors.
    """

    def step(self, closure: Any = None) -> Any:
        assert closure is None
        groups = self.param_groups
        trained = [[p for p in group["params"] if p.grad is not None] for group in groups]
        found: list[list[Any]] = [[self.state.get(p) for p in group] for group in trained]
        if any(None in states for states in found):
            return super().step()  # it makes the state
        with torch.no_grad():
            for group, parameters, states in zip(groups, trained, found, strict=True):
                adamw(
                    [_local(p) for p in parameters],
                    [_local(p.grad) for p in parameters],
                    [_local(state["exp_avg"]) for state in states],
                    [_local(state["exp_avg_sq"]) for state in states],
                    [],
                    [state["step"] for state in states],
                    fused=group["fused"],
                    grad_scale=getattr(self, "grad_scale", None),
                    found_inf=getattr(self, "found_inf", None),
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
        return None


def _local(tensor: Tensor) -> Tensor:
    """This process's part. It shares memory with the tensor, and has no gradient."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def build_optimizer(model: nn.Module, settings: Optimizer) -> LocalAdamW:
    """AdamW for the parameters that are not frozen, fused where the device can.

    Its averages are float32 because the parameters are.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in parameters), "AdamW needs float32 weights"
    return LocalAdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused={p.device.type for p in parameters} <= _FUSED_ON,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients as one vector: a plain float32 tensor, equal on every rank.

    Plain tensors count as replicated. Shards of DTensors are summed over the mesh dimensions that
    hold them; meshes and placements may differ between parameters, while
    `torch.nn.utils.get_total_norm` takes one mesh. A NaN or infinity anywhere shows in the norm.
    """
    groups: dict[Any, list[Tensor]] = {}  # by the processes that the squares are summed over
    keys: dict[Any, Any] = {}  # of groups, by mesh and placements
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        key = None
        if isinstance(gradient, DTensor):
            key = keys.get((gradient.device_mesh, gradient.placements))
            if key is None:
                gradient = _without_partial_sums(gradient)
                split = [dim for dim, p in enumerate(gradient.placements) if not p.is_replicate()]
                key = gradient.device_mesh, *split
                keys[gradient.device_mesh, gradient.placements] = key
        groups.setdefault(key, []).append(_local(gradient))
    squares = []
    for key, tensors in groups.items():
        norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
        square = torch.stack(norms).square().sum()
        if key is not None:
            mesh, *split = key
            for dim in split:
                if mesh.size(dim) > 1:
                    dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _without_partial_sums(gradient: DTensor) -> DTensor:
    """Adds partial sums up: their norms do not give the norm of the sum."""
    if not any(p.is_partial() for p in gradient.placements):
        return gradient
    placements = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=placements)


@torch.no_grad()
def clipped_step(
    optimizer: torch.optim.Optimizer, max_norm: float, norm: Tensor, is_bad: Tensor
) -> None:
    """An update with gradients scaled by min(1, max_norm / norm); no update where `is_bad` is true.

    AdamW's fused kernel does both through the attributes of PyTorch's gradient scaler. So there is
    no extra pass over the gradients, and the host does not wait for the device.
    """
    scaled: Any = optimizer
    scaled.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    scaled.found_inf = is_bad.float()
    optimizer.step()
