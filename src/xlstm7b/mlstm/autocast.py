"""`torch.autocast`: the dtype that it asks for, and float32 arithmetic inside of it.

Under autocast the model computes what the trainer's mixed precision computes: from parameters and
vectors in autocast's dtype, with gates, cell, norms' statistics and logits in float32.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Asked once: torch.compile cannot trace the question in PyTorch 2.11.
_KINDS = frozenset(
    kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)
)


def to_autocast(x: Tensor) -> Tensor:
    """x in the dtype of autocast if that is on, else x. float64 stays, as in PyTorch's products."""
    if not _is_on(x.device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which products of float32 tensors stay float32."""
    return torch.autocast(device.type, enabled=False) if _is_on(device) else nullcontext()


def _is_on(device: torch.device) -> bool:
    kind = device.type
    return kind in _KINDS and torch.is_autocast_enabled(kind)
