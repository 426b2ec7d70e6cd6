"""MLSTMState: the cell's whole memory, of a size that never depends on the text's length."""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class MLSTMState(NamedTuple):
    """Memory of one layer: what remains of a text after any number of tokens.

    `C` and `n` are stored relative to the stabiliser `m`: the memory itself is `C·exp(m)`,
    `n·exp(m)`. `m` is a gauge and carries no gradient.
    """

    C: Tensor  # [B, NH, d_qk, d_hv]
    n: Tensor  # [B, NH, d_qk]
    m: Tensor  # [B, NH]

    @classmethod
    def zeros(
        cls,
        batch: int,
        heads: int,
        d_qk: int,
        d_hv: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Self:
        """The memory before any text: C_0 = n_0 = m_0 = 0."""
        return cls(
            torch.zeros(batch, heads, d_qk, d_hv, dtype=dtype, device=device),
            torch.zeros(batch, heads, d_qk, dtype=dtype, device=device),
            torch.zeros(batch, heads, dtype=dtype, device=device),
        )
