"""Mixed precision on one device: float32 weights, a copy of them in the computation's dtype.

It does what FSDP2 does in one process, with the same numbers bit for bit, at a fraction of the
host's time. Small models train as fast as the host can launch kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from xlstm7b.model import XLSTM


def as_dtensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes the trained parameters DTensors with one shard, as FSDP2 has them in one process."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                whole = DTensor.from_local(parameter.data, mesh, [Shard(0)], run_check=False)
                module.register_parameter(name, nn.Parameter(whole))


def compute_in(model: XLSTM, dtype: torch.dtype) -> None:
    """Makes the model compute in `dtype`, with gradients added up in the parameters' dtype.

    The methods `forward`, `loss` and `token_logprobs` put copies of the trained parameters in the
    place of these, and take them out before they return. So blocks may not be computed again in the
    backward pass. Between calls the model has its own parameters. An initial state is used as it
    is.
    """
    copies = _Copies(model, dtype)
    for method in ("forward", "loss", "token_logprobs"):
        setattr(model, method, copies.during(getattr(model, method)))


class _Copies:
    """The trained parameters of a model, where they are in it, and the dtypes of their copies."""

    def __init__(self, model: XLSTM, dtype: torch.dtype) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        self._parameters: list[Any] = []
        self._dtypes: list[torch.dtype] = []
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._places.append((module._parameters, name))
                    self._parameters.append(parameter)
                    is_state = path.startswith("backbone.initial_state")
                    self._dtypes.append(parameter.dtype if is_state else dtype)
        # Autograd calls the backward pass of a function if an input requires a gradient.
        self._input = torch.empty(0, device=self._parameters[0].device, requires_grad=True)

    def during(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            with self._in_place():
                return method(*arguments, **options)

        return call

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        copies: tuple[Tensor, ...] = _Copy.apply(self._input, self)  # type: ignore[no-untyped-call]
        self._put(copies)
        try:
            yield
        finally:
            self._put(self._parameters)

    def _put(self, tensors: Any) -> None:
        for (parameters, name), tensor in zip(self._places, tensors, strict=True):
            parameters[name] = tensor

    def make(self) -> tuple[Tensor, ...]:
        """Copies of the parameters; a parameter that has the right dtype shares its memory."""
        wide = [parameter._local_tensor for parameter in self._parameters]
        copies = [
            x.detach() if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
            for x, dtype in zip(wide, self._dtypes, strict=True)
        ]
        cast = [(copy, x) for copy, x in zip(copies, wide, strict=True) if copy.dtype != x.dtype]
        if cast:
            torch._foreach_copy_([copy for copy, _ in cast], [x for _, x in cast])
        return tuple(copies)

    def add_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Adds the gradients of the copies to those of the parameters."""
        found = [
            (parameter, gradient, torch.empty_like(parameter._local_tensor))
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
            if gradient is not None
        ]
        if not found:
            return
        parameters, narrow, wide = zip(*found, strict=True)
        torch._foreach_copy_(wide, narrow)
        sums, summands = [], []
        for parameter, gradient in zip(parameters, wide, strict=True):
            if parameter.grad is None:
                # `from_local` would take the host ten times as long.
                parameter.grad = DTensor(gradient, parameter._spec, requires_grad=False)
            else:
                sums.append(parameter.grad._local_tensor)
                summands.append(gradient)
        if sums:
            torch._foreach_add_(sums, summands)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unused: Tensor, copies: _Copies) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.copies = copies
        return copies.make()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.copies.add_gradients(gradients)
        return None, None
