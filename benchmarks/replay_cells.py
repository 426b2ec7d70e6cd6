"""Steps and passes by replay over random tokens, for tune.py."""

import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate.drafts import MAX_DRAFT
from xlstm7b.generate.kernels.gpu import ordered
from xlstm7b.generate.replay import ring_sizes
from xlstm7b.mlstm import MLSTMState, headwise_norm
from xlstm7b.mlstm.replay import Cursor, Pass, Ring, replay_pass, replay_step
from xlstm7b.mlstm.triton.launch_params import Tile
from xlstm7b.mlstm.triton.replay import launch_replay
from xlstm7b.mlstm.triton.replay_pass import launch_pass

_EPS = 1e-6


class ReplayCell:
    """The cell of several layers, each with its own state and ring.

    `positions` is the number of tokens of a pass; 0 is a step. Rows are at different places of
    their rings. One in 16 is folded in a step; in a pass, some of them.
    """

    def __init__(
        self,
        batch: int,
        config: ModelConfig,
        *,
        positions: int = 0,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        device: str = "cuda",
    ) -> None:
        heads, d_qk, d_hv = config.num_heads, config.d_qk, config.d_hv
        sizes = ring_sizes(MAX_DRAFT if positions else 0)
        interval, size = sizes["interval"], sizes["size"]

        shape = (batch, positions, heads) if positions else (batch, heads)

        def normal(*width: int) -> Tensor:
            return torch.randn(*shape, *width, device=device)

        q, k, v, self.gate = (normal(width).to(dtype) for width in (d_qk, d_qk, d_hv, d_hv))
        self.tokens = q, k, v, normal() - 6, normal() + 4  # gates like those of a trained model
        self.norm = torch.ones(heads * d_hv, dtype=dtype, device=device)
        self.states, self.rings = [], []
        for _ in range(layers):
            state = MLSTMState.zeros(batch, heads, d_qk, d_hv, dtype=state_dtype, device=device)
            self.states.append(MLSTMState(*(part.normal_() for part in state)))
            ring = Ring.zeros(batch, heads, size, d_qk, d_hv, dtype=dtype, device=device)
            for part, center in zip(ring, (0, 0, -6, 4), strict=True):
                part.normal_().add_(center)
            self.rings.append(ring)
        seen, row = torch.full((batch,), size, device=device), torch.arange(batch, device=device)
        self.cursor: Cursor | Pass
        if positions:
            lengths = torch.full_like(seen, positions)
            self.cursor = Pass(seen - positions * (1 + row % 2) + 1, seen, lengths, interval)
        else:
            live = torch.ones_like(seen, dtype=torch.bool)
            self.cursor = ordered(Cursor(seen - row % interval, seen, live, interval))

    def run(self, layer: int, tile: Tile) -> Tensor:
        """h of all tokens. Updates the layer's ring, and the states of rows that are due."""
        state, ring, rows = self.states[layer], self.rings[layer], self.cursor
        gate, norm = self.gate, self.norm
        if isinstance(rows, Pass):
            return launch_pass(*self.tokens, state, ring, rows, gate, norm, _EPS, _EPS, tile)
        return launch_replay(*self.tokens, state, ring, rows, gate, norm, _EPS, _EPS, tile)

    def error(self, tile: Tile) -> float:
        """The largest relative error of h and of the new state of layer 0, against float64."""
        state = MLSTMState(*(part.double() for part in self.states[0]))
        ring = Ring(*(part.double() for part in self.rings[0]))
        q, k, v, i, f = (x.double() for x in self.tokens)
        got = self.run(0, tile)
        if isinstance(self.cursor, Pass):
            want = replay_pass(q, k, v, i, f, state, ring, self.cursor, eps=_EPS)
        else:
            want = replay_step(q, k, v, i, f, state, ring, self.cursor, eps=_EPS)
        want = headwise_norm(want, self.norm.double(), _EPS) * torch.sigmoid(self.gate.double())
        pairs = [(got, want), *zip(self.states[0], state, strict=True)]
        return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
