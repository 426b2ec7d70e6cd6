"""AdamW over XLSTM's parameters, and the gradient's true global norm on any layout."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from xlstm7b.train.recipe import Optimizer

_FUSED_ON = {"cuda", "cpu", "mps", "xpu"}


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to every matrix, the gates' and the head's too.

    Not to the embedding, norms and biases (paper, appendix B; so in the authors' code).
    """
    return parameter.dim() >= 2 and "embeddings" not in name.split(".")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for AdamW: what decays, and what does not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[is_decayed(name, parameter)].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW, fused where the device can. Its averages are float32 because the parameters are."""
    parameters = list(model.parameters())
    assert all(p.dtype == torch.float32 for p in parameters), "AdamW wants float32 master weights"
    return torch.optim.AdamW(
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
    """The 2-norm of all gradients as one vector: a plain float32 number, the same on every rank.

    Plain tensors count as replicated; shards of DTensors are summed over the mesh dimensions that
    hold them, any meshes and placements together. `torch.nn.utils.get_total_norm` (torch ≥ 2.6)
    takes one mesh at a time. A NaN or infinity anywhere makes the norm one too.
    """
    alike: dict[Any, list[Tensor]] = {}  # what is summed over the same processes goes together
    for gradient in _gradients(parameters):
        key = None
        if isinstance(gradient, DTensor):
            gradient = _whole_values(gradient)
            split = [dim for dim, p in enumerate(gradient.placements) if not p.is_replicate()]
            key = (gradient.device_mesh, *split)
            gradient = gradient.to_local()
        alike.setdefault(key, []).append(gradient)
    squares = []
    for key, tensors in alike.items():
        norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
        square = torch.stack(norms).square().sum()
        if key is not None:
            mesh, *split = key
            for dim in split:
                dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


@torch.no_grad()
def clipped_step(
    optimizer: torch.optim.Optimizer, max_norm: float, norm: Tensor, is_bad: Tensor
) -> None:
    """An update with gradients times min(1, max_norm / norm); where `is_bad` is true, none at all.

    AdamW's fused kernel does both, by the attributes that PyTorch's gradient scaler gives it: no
    pass over the gradients of its own, and the host waits for nothing.
    """
    scaled: Any = optimizer
    scaled.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    scaled.found_inf = is_bad.float()
    optimizer.step()


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _whole_values(gradient: DTensor) -> DTensor:
    """Without partial sums, whose norms would say nothing of the sum's."""
    if not any(p.is_partial() for p in gradient.placements):
        return gradient
    placements = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=placements)
