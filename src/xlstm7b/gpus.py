"""Which devices run the Triton kernels, and how much shared memory they have."""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
_HAS_TRITON = find_spec("triton") is not None
_OLDEST = (8, 0)  # compute capability: Ampere, the first with instructions for bfloat16
_HOPPER_SHARED_MEMORY = 227 * 1024


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernels(device: torch.device) -> bool:
    """True if Triton is installed and this device can run its kernels. Logs once why a GPU cannot.

    Where it is false, everything is computed in plain PyTorch.
    """
    return _HAS_TRITON and (
        device.type == "xpu" or (device.type == "cuda" and _runs_kernels(device))
    )


@cache
def _runs_kernels(device: torch.device) -> bool:
    reason = _why_not(device)
    if reason is not None:
        _LOG.warning("%s: plain PyTorch is used, which is slower", reason)
    return reason is None


def _why_not(device: torch.device) -> str | None:
    """Why a CUDA device cannot run the kernels, or None."""
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return f"the kernels are for NVIDIA GPUs, not for {name}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _OLDEST:
        return f"the kernels need compute capability 8.0, and {name} has {major}.{minor}"
    return None


@cache
def shared_memory(device: torch.device) -> int:
    """The most bytes of shared memory that a program of a kernel can have on this device."""
    if device.type != "cuda":
        return _HOPPER_SHARED_MEMORY  # Triton's interpreter takes any tile
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
