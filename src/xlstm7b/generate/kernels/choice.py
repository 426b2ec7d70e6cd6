"""Which form of each operation a device uses: `gpu.py`, `plain.py`, or some of both."""

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from xlstm7b.generate.kernels import plain
from xlstm7b.kernel_verdicts import is_wrong
from xlstm7b.mlstm import has_kernels

# Operations by the family of their kernels.
_USES = {
    "sequences": ("scatter_states",),  # its kernel copies only states as the kernels leave them
    "steps": ("step_cell",),
    "replay": ("replay_cell", "ordered", "advance"),
    "passes": ("pass_cell", "advance_pass"),
    "slots": ("gather_states", "scatter_states"),
    # The last three also launch such kernels, for many rows.
    "pointwise": (
        *("embed", "embed_live", "keep_logits", "pass_tokens", "rms_norm", "silu_and_multiply"),
        *("head_norm", "project", "swiglu", "head"),
    ),
}
_PRODUCTS = ("project", "add_product", "swiglu", "multiply", "head")
_SCHEMES = ("int8", "fp8", "int4")


@cache
def operations_for(device: torch.device) -> Any:
    """The operations of generation: kernels on a GPU, but none that `doctor` found to be wrong."""
    if device.type != "cuda" or not has_kernels(device):
        return plain
    from xlstm7b.generate.kernels import gpu

    wrong = {family for family in (*_USES, "products", *_SCHEMES) if is_wrong(family, device)}
    return without(gpu, wrong)


def without(kernels: Any, wrong: set[str]) -> Any:
    """The operations of `gpu.py`, with those of `plain.py` in place of wrong families."""
    if not wrong:
        return kernels
    chosen = {name: getattr(kernels, name) for name in kernels.__all__}
    for name in _PRODUCTS:
        chosen[name] = _by_weight(chosen[name], getattr(plain, name), wrong)
    if "fp8" in wrong:  # nothing is rounded for a product in fp8
        for name in ("swiglu", "head_norm"):
            chosen[name] = _without_reader(chosen[name])
    for family in wrong & _USES.keys():
        chosen |= {name: getattr(plain, name) for name in _USES[family]}
    return SimpleNamespace(**chosen)


def _by_weight(kernel: Callable[..., Any], ordinary: Any, wrong: set[str]) -> Callable[..., Any]:
    """A product by the kernel, or in plain PyTorch for weights whose family is wrong."""
    at = [*signature(kernel).parameters].index("W")

    @wraps(kernel)
    def multiply(*given: Any) -> Any:
        W = given[at]
        family = "products" if isinstance(W, Tensor) else W.scheme.name
        return (ordinary if family in wrong else kernel)(*given)

    return multiply


def _without_reader(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation without its last argument, the matrix that reads the result next."""
    count = len(signature(operation).parameters) - 1

    @wraps(operation)
    def call(*given: Any) -> Any:
        return operation(*given[:count])

    return call
