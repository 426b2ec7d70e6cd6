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


def in_reverse_order(form: Form) -> Form:
    """The same function with every head's elements reversed: only the rounding differs."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *, state: MLSTMState, **options: Any
    ) -> tuple[Tensor, MLSTMState]:
        C, n, m = state
        turned = MLSTMState(C.flip(-1, -2), n.flip(-1), m)
        h, new = form(q.flip(-1), k.flip(-1), v.flip(-1), i, f, state=turned, **options)
        return h.flip(-1), MLSTMState(new.C.flip(-1, -2), new.n.flip(-1), new.m)

    return run


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
    draw = torch.Generator().manual_seed(0)
    loss = sum(
        (x * torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x)).sum()
        / (1 + x.detach().norm())
        for x in outputs
    )
    return [*outputs, new.m, *torch.autograd.grad(loss, leaves)]
