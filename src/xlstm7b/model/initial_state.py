"""State tuning: a trained state that every text starts from, while all weights are frozen.

A model starts a text from C_0 = n_0 = 0. With an `InitialState`, C_0 and n_0 of its blocks are
parameters, the same for all rows of a batch:

    C_1 = f_1 C_0 + i_1 k_1 v_1ᵀ        n_1 = f_1 n_0 + i_1 k_1

m_0, the logarithm of the scale of C_0 and n_0, is a constant: C_0 exp(m_0) is what the equations
without stabiliser would have, so another m_0 is only another unit of C_0 and n_0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState
from xlstm7b.mlstm.autocast import without_autocast
from xlstm7b.model.lm import XLSTM
from xlstm7b.model.lora import freeze
from xlstm7b.model.model_state import ModelState


class InitialState(nn.Module):
    """C_0 and n_0 of some blocks, by default of all. The others start from zeros.

    With a `rank`, C_0 of each head is a product A B of matrices with `rank` columns and rows.
    `initial_state(batch)` is the state for that many rows. All numbers start at 0, except A.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[int] | None = None, *, rank: int = 0
    ) -> None:
        super().__init__()
        self.config, self.rank = config, rank
        self.layers = tuple(range(config.num_blocks) if layers is None else layers)
        heads = len(self.layers), config.num_heads
        if rank:
            self.A = nn.Parameter(torch.empty(*heads, config.d_qk, rank))
            self.B = nn.Parameter(torch.empty(*heads, rank, config.d_hv))
        else:
            self.C = nn.Parameter(torch.empty(*heads, config.d_qk, config.d_hv))
        self.n = nn.Parameter(torch.empty(*heads, config.d_qk))
        # Numbers, not a tensor: the model is built without memory, and has no buffers.
        self.m = [[0.0] * config.num_heads for _ in self.layers]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name == "A":
                parameter.normal_(std=self.rank**-0.5)
            else:
                parameter.zero_()

    def forward(self, batch: int) -> ModelState:
        with without_autocast(self.n.device):  # a state stays float32
            C = self.A @ self.B if self.rank else self.C
        m = torch.tensor(self.m, dtype=self.n.dtype, device=self.n.device)
        zeros = ModelState.zeros(self.config, batch, dtype=self.n.dtype, device=self.n.device)
        blocks = list(zeros.blocks)
        for at, layer in enumerate(self.layers):
            # `repeat` always copies: FSDP may free the gathered parameters after this.
            blocks[layer] = MLSTMState(
                C[at].repeat(batch, 1, 1, 1), self.n[at].repeat(batch, 1, 1), m[at].repeat(batch, 1)
            )
        return zeros._replace(blocks=tuple(blocks))


def add_initial_state(model: XLSTM, initial: InitialState) -> None:
    """Freezes the model, and makes every text start from this state."""
    freeze(model)
    model.backbone.initial_state = initial


def values_of(state: ModelState, m: Sequence[Sequence[float]], rank: int = 0) -> dict[str, Tensor]:
    """The values of an `InitialState` of all blocks, with this m, that equals a state of one row.

    With a rank, A B is the best approximation of C (by singular values).
    """
    C, n, own = (
        torch.cat([part.float() for part in parts]) for parts in zip(*state.blocks, strict=True)
    )
    scale = torch.exp(own - torch.tensor(m))[..., None]
    C, n = scale[..., None] * C, scale * n
    if not rank:
        return {"C": C, "n": n}
    U, S, V = torch.linalg.svd(C, full_matrices=False)
    root = S[..., :rank].sqrt()
    return {
        "A": U[..., :rank] * root[..., None, :],
        "B": root[..., None] * V[..., :rank, :],
        "n": n,
    }
