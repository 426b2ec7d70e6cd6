"""Mixed precision on one device: float32 weights, computation in another dtype.

It does what FSDP2 does in one process, and takes less time. Small models train as fast as the host
can launch kernels, and FSDP2 takes more of the host's time. With large ones, FSDP2 copies each
weight several times in every micro-batch. The numbers are the same, bit for bit, unless blocks
are compiled, or the loss calls the model several times: FSDP2 adds the gradients of these calls in
the computation's dtype.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from xlstm7b.model import XLSTM

_METHODS = "forward", "loss", "token_logprobs"
_CAST_AT_ONCE = 1 << 26  # elements of gradients


def as_dtensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes the trained parameters DTensors with one shard, as FSDP2 has them in one process."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                whole = DTensor.from_local(parameter.data, mesh, [Shard(0)], run_check=False)
                module.register_parameter(name, nn.Parameter(whole))


def compute_in(model: XLSTM, dtype: torch.dtype) -> None:
    """Makes the model compute in `dtype`, with gradients added up in the parameters' dtype.

    While `forward`, `loss` or `token_logprobs` runs, copies stand in for the trained parameters.
    That takes the least of the host's time. But the copies and their gradients take memory, and
    blocks may not be computed again in the backward pass. An initial state is used as it is.
    """
    stand_ins = _StandIns(model.named_modules(), dtype)
    for method in _METHODS:
        setattr(model, method, stand_ins.during(getattr(model, method)))


def compute_blocks_in(
    model: XLSTM, dtype: torch.dtype, prepare: Callable[[Any, Callable[[Any], Any]], None]
) -> None:
    """As `compute_in`, for large models and for blocks that are computed again.

    Each product casts its weight, under autocast, also when it is computed again. Classes of one's
    own may not know autocast: then weights are copied block by block. The gradients of a block are
    added up when its backward pass ends, so there is never a second set of them. `prepare` gets
    each block, and a decorator for the method that uses the block's parameters.
    """
    blocks: Any = model.backbone.blocks
    in_blocks = {module for block in blocks for module in block.modules()}
    by_autocast = dtype != torch.float32 and not model.config.other_classes()
    copied = None if by_autocast else dtype
    for block in blocks:
        prepare(block, _StandIns(block.named_modules(), copied).during)
    others = [(path, module) for path, module in model.named_modules() if module not in in_blocks]
    during = _StandIns(others, copied).during
    for name in _METHODS:
        method = during(getattr(model, name))
        if by_autocast:
            # Nothing is cached: what a block casts is freed when it ends.
            kind = next(model.parameters()).device.type
            method = torch.autocast(kind, dtype, cache_enabled=False)(method)
        setattr(model, name, method)


class _StandIns:
    """Tensors that stand in for the trained parameters of some modules: copies in a dtype.

    Without a dtype they share the parameters' memory, and autocast casts them.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], dtype: torch.dtype | None) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        self._parameters: list[Any] = []
        self._dtypes: list[torch.dtype] = []
        self._by_autocast = dtype is None
        for path, module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._places.append((module._parameters, name))
                    self._parameters.append(parameter)
                    is_state = path.startswith("backbone.initial_state")
                    self._dtypes.append(dtype if dtype and not is_state else parameter.dtype)
        # Autograd calls the backward pass of a function if an input requires a gradient.
        device = self._parameters[0].device if self._parameters else None
        self._input = torch.empty(0, device=device, requires_grad=True)

    def during(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with the stand-ins in the modules while it runs."""
        if not self._parameters:
            return method

        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            with self._in_place():
                return method(*arguments, **options)

        return call

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._put(_StandIn.apply(self._input, self))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._put(self._parameters)

    def _put(self, tensors: Any) -> None:
        for (parameters, name), tensor in zip(self._places, tensors, strict=True):
            parameters[name] = tensor

    def make(self) -> tuple[Tensor, ...]:
        """The stand-ins. That of a parameter that has the right dtype shares its memory."""
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
        """Adds the gradients of the stand-ins to those of the parameters."""
        some, size = [], 0
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                some.append((parameter, gradient))
                size += gradient.numel()
            if size >= _CAST_AT_ONCE:  # what is cast takes memory
                self._add(some)
                some, size = [], 0
        self._add(some)

    def _add(self, found: list[tuple[Any, Tensor]]) -> None:
        wide = [g if g.dtype == p.dtype else torch.empty_like(p._local_tensor) for p, g in found]
        cast = [(w, g) for w, (_, g) in zip(wide, found, strict=True) if w is not g]
        if cast:
            torch._foreach_copy_([w for w, _ in cast], [g for _, g in cast])
        sums, summands = [], []
        for (parameter, gradient), own in zip(found, wide, strict=True):
            if parameter.grad is None:
                # What autograd gives may be the gradient of something else too, or a view. What
                # autocast has cast is neither.
                is_new = own is not gradient or (self._by_autocast and own.is_contiguous())
                if not is_new:
                    own = gradient.clone(memory_format=torch.contiguous_format)
                # `from_local` would take the host ten times as long.
                parameter.grad = DTensor(own, parameter._spec, requires_grad=False)
            else:
                sums.append(parameter.grad._local_tensor)
                summands.append(own)
        if sums:
            torch._foreach_add_(sums, summands)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unused: Tensor, stand_ins: _StandIns) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.stand_ins = stand_ins
        return stand_ins.make()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.stand_ins.add_gradients(gradients)
        return None, None
