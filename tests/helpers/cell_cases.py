"""Random inputs for the mLSTM cell, and all of its forms by name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from xlstm7b.mlstm import MLSTMState
from xlstm7b.mlstm.chunkwise import chunkwise_sequence
from xlstm7b.mlstm.parallel import parallel_sequence
from xlstm7b.mlstm.recurrent import recurrent_sequence

Form = Callable[..., tuple[Tensor, MLSTMState]]
FORMS: dict[str, Form] = {
    "recurrent": recurrent_sequence,
    "parallel": parallel_sequence,
    "chunkwise": chunkwise_sequence,
    "chunkwise of 5": partial(chunkwise_sequence, chunk_size=5),
}


@dataclass
class Case:
    """Inputs of `mlstm_sequence`."""

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor
    f: Tensor
    state: MLSTMState
    resets: Tensor | None = None

    def run(self, form: Form, **options: Any) -> tuple[Tensor, MLSTMState]:
        return form(
            self.q,
            self.k,
            self.v,
            self.i,
            self.f,
            state=self.state,
            resets=self.resets,
            **options,
        )

    def differentiable(self) -> list[Tensor]:
        """The tensors that get gradients: all but m."""
        return [self.q, self.k, self.v, self.i, self.f, self.state.C, self.state.n]

    def to(self, dtype: torch.dtype) -> "Case":
        gates = torch.promote_types(dtype, torch.float32)
        return replace(
            self,
            q=self.q.to(dtype),
            k=self.k.to(dtype),
            v=self.v.to(dtype),
            i=self.i.to(gates),
            f=self.f.to(gates),
            state=MLSTMState(*(part.to(gates) for part in self.state)),
        )

    def on(self, device: torch.device) -> "Case":
        return replace(
            self,
            **{name: getattr(self, name).to(device) for name in "qkvif"},
            state=MLSTMState(*(part.to(device) for part in self.state)),
            resets=None if self.resets is None else self.resets.to(device),
        )

    def split(self, *cuts: int) -> list[tuple[slice, "Case"]]:
        """The sequence cut at these positions. Every part has the first part's initial state."""
        edges = [0, *cuts, self.q.shape[1]]
        slices = [slice(a, b) for a, b in pairwise(edges) if a < b]
        return [
            (
                s,
                replace(
                    self,
                    **{name: getattr(self, name)[:, s] for name in "qkvif"},
                    resets=None if self.resets is None else self.resets[:, s],
                ),
            )
            for s in slices
        ]


def random_case(
    seed: int,
    batch: int,
    length: int,
    heads: int,
    d_qk: int,
    d_hv: int,
    *,
    dtype: torch.dtype = torch.float64,
    gates: float = 5.0,
    fresh: bool = False,
    resets: float = 0.0,
    padding: float = 0.0,
) -> Case:
    """The gates are normal with standard deviation `gates`, clamped to ±15 as by the soft-cap.

    `resets` and `padding` are fractions of the positions. With `fresh` the first state is 0.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    i, f = ((gates * normal(batch, length, heads)).clamp(-15, 15) for _ in range(2))
    padded = torch.rand(batch, length, generator=draw) < padding
    i = i.masked_fill(padded[..., None], -torch.inf)
    f = f.masked_fill(padded[..., None], torch.inf)
    state = MLSTMState.zeros(batch, heads, d_qk, d_hv, dtype=torch.float64)
    if not fresh:
        state = MLSTMState(
            normal(batch, heads, d_qk, d_hv), normal(batch, heads, d_qk), 3 * normal(batch, heads)
        )
    cuts = torch.rand(batch, length, generator=draw) < resets
    return Case(
        normal(batch, length, heads, d_qk),
        normal(batch, length, heads, d_qk),
        normal(batch, length, heads, d_hv),
        i,
        f,
        state,
        cuts if resets else None,
    ).to(dtype)


def closed_forget_gates(case: Case) -> Case:
    """The case with forget gates of −∞ at some tokens, other ones in each row and head."""
    draw = torch.Generator().manual_seed(0)
    closed = torch.rand(case.f.shape, generator=draw) < 0.05
    closed[0, 0, 0] = closed[0, -1, 0] = True
    if case.resets is not None:
        first = case.resets.nonzero()[0]
        closed[first[0], first[1], 0] = True
    return replace(case, f=case.f.masked_fill(closed, -torch.inf))


def memory(state: MLSTMState) -> tuple[Tensor, Tensor]:
    """C·exp(m) and n·exp(m): what does not depend on the choice of m."""
    scale = torch.exp(state.m)
    return state.C * scale[..., None, None], state.n * scale[..., None]


def results_and_gradients(case: Case, form: Form, eps: float) -> list[Tensor]:
    """h, C·exp(m), n·exp(m), m, and the gradients of a random projection of the first three."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in case.differentiable()]
    q, k, v, i, f, C, n = leaves
    state = MLSTMState(C, n, case.state.m)
    h, new = form(q, k, v, i, f, state=state, resets=case.resets, eps=eps)
    outputs = [h, *memory(new)]
    return [*outputs, new.m, *torch.autograd.grad(_projection(outputs), leaves)]


def results_in_both_orders(case: Case, form: Form, eps: float) -> tuple[list[Tensor], list[Tensor]]:
    """`results_and_gradients`, and the same with every head's elements reversed.

    Only their rounding differs. Both are computed in one pass, as rows of one batch.
    """
    leaves = [leaf.detach().repeat(2, *[1] * (leaf.dim() - 1)) for leaf in case.differentiable()]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    q, k, v, i, f, C, n = leaves
    batch = i.shape[0] // 2
    turned = [_turned(x, 1, batch) for x in (q, k, v, n)]
    state = MLSTMState(_turned(C, 2, batch), turned[3], case.state.m.repeat(2, 1))
    resets = None if case.resets is None else case.resets.repeat(2, 1)
    h, new = form(*turned[:3], i, f, state=state, resets=resets, eps=eps)
    new = MLSTMState(_turned(new.C, 2, batch), _turned(new.n, 1, batch), new.m)
    outputs = [_turned(h, 1, batch), *memory(new)]
    halves = [[x[:batch] for x in outputs], [x[batch:] for x in outputs]]
    loss = _projection(halves[0]) + _projection(halves[1])
    everything = [*outputs, new.m, *torch.autograd.grad(loss, leaves)]
    return [x[:batch] for x in everything], [x[batch:] for x in everything]


def _turned(x: Tensor, dims: int, batch: int) -> Tensor:
    """The second half of the rows has its last dimensions reversed."""
    return torch.cat([x[:batch], x[batch:].flip(*range(-dims, 0))])


def _projection(outputs: list[Tensor]) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return sum(
        (x * torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x)).sum()
        / (1 + x.detach().norm())
        for x in outputs
    )
