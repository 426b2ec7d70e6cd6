"""Devices and dtypes by name, and the default dtype for loading a model."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")


def to_device(name: "str | torch.device | None") -> "torch.device":
    """The device with this name; None is a GPU if there is one. `ValueError` if it is unusable."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        usable = not torch.empty(0, device=device).is_meta
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the device {str(name)!r} cannot be used here: {reason}") from error
    if not usable:
        raise ValueError(f"the device {str(name)!r} cannot be used here: it has no memory")
    return device


def to_dtype(name: str, allowed: tuple[str, ...] = DTYPES) -> "torch.dtype":
    """The dtype with this name. `ValueError` if it is not one of `allowed`."""
    import torch

    if name not in allowed:
        raise ValueError(f"unknown dtype {name!r}; choose from {', '.join(allowed)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def float_dtype(dtype: "torch.dtype | str", *, name: str = "dtype") -> "torch.dtype":
    """A dtype of floating-point numbers, given as such or by its name. `name` is the argument's."""
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f'{name} must be a dtype for weights, as "bfloat16", not {dtype!r}')
    return found


def as_current(device: "torch.device") -> AbstractContextManager[object]:
    """Makes a GPU the current one: Triton and CUDA events use that. Does nothing for a CPU."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def default_dtype(device: "torch.device") -> "torch.dtype | None":
    """The dtype to load weights in: bfloat16 on a GPU; None, the stored one, on a CPU."""
    import torch

    return torch.bfloat16 if device.type == "cuda" else None
