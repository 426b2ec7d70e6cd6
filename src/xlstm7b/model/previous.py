"""The block of the first xLSTM paper (arXiv 2405.04517), for comparison: `block = "previous"`.

Pre up-projection: the cell works at twice the width of the residual stream, and there is no
feed-forward layer. With W = 2d, and x, z ∈ R^W:

    x, z = W_x RMSNorm(y), W_z RMSNorm(y)              c = SiLU(conv₄(x))
    q, k, v = Q c, K c, V x                            Q, K, V: block-diagonal, blocks of 4 × 4
    ĩ, f̃ = W_i [q, k, v] + b_i, W_f [q, k, v] + b_f    soft-capped, one of each for every head
    y ← y + W_out ((Norm_head(mLSTM(q, k, v, ĩ, f̃)) + skip ⊙ c) ⊙ SiLU(z))

conv₄ is causal and has one filter of 4 taps, and a bias, for each channel. It needs the last three
x, so they are a part of the state.
"""

from dataclasses import replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xlstm7b import accounting
from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState, mlstm_sequence, mlstm_step
from xlstm7b.mlstm.autocast import to_autocast
from xlstm7b.model.init import normal_, residual_std, small_std
from xlstm7b.model.layers import Linear, make_gates, padding, soft_cap, without_padding
from xlstm7b.model.model_state import register_state
from xlstm7b.registry import STANDARD, find, register

_UP = 2  # the cell's width, relative to that of the residual stream
_TAPS = 4  # of the convolution
_BLOCK = 4  # rows and columns of a block of the block-diagonal projections


class PreviousState(NamedTuple):
    """The state of one block: the cell's, and the last inputs of the convolution.

    `conv` is at least float32, so it holds the inputs without rounding for every dtype of C.
    """

    C: Tensor  # [B, NH, d, d] with d = 2 · embedding_dim / NH
    n: Tensor  # [B, NH, d]
    m: Tensor  # [B, NH]
    conv: Tensor  # [B, 3, 2 · embedding_dim], the newest last; 0 before the start of a document


register_state(PreviousState)


@register("block", "previous")
class PreviousBlock(nn.Module):
    """y = x + mLSTM(Norm(x)). The mLSTM is `PreviousLayer`; other layers are refused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_mlstm = find("norm", config.norm)(config.embedding_dim, config.norm_eps)
        self.mlstm_layer = PreviousLayer(config)

    @classmethod
    def from_config(cls, config: ModelConfig) -> Self:
        return cls(config)

    def forward(
        self,
        x: Tensor,
        state: PreviousState | None = None,
        *,
        resets: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, PreviousState]:
        x = to_autocast(x)
        if lengths is not None:
            x = without_padding(x, padding(lengths, *x.shape[:2]))
        y, state = self.mlstm_layer(self.norm_mlstm(x), state, resets=resets, lengths=lengths)
        return x + y, state

    @staticmethod
    def zero_state(
        config: ModelConfig,
        batch: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> PreviousState:
        """The state before the first token."""
        shape = batch, config.num_heads, config.d_qk, config.d_hv
        cell = MLSTMState.zeros(*shape, dtype=dtype, device=device)
        conv = batch, _TAPS - 1, config.v_dim
        return PreviousState(*cell, torch.zeros(conv, dtype=cell.n.dtype, device=device))

    @staticmethod
    def flops(config: ModelConfig, tokens: int, cell: int) -> dict[str, int]:
        d, width = config.embedding_dim, config.v_dim
        gates = replace(config, embedding_dim=3 * width)  # they read q, k and v
        norms = accounting.norm_flops(config, tokens) + tokens * 3 * width
        return {
            # x, z and out; q, k and v; then SiLU(z) ⊙ h.
            "mlstm_projections": tokens * width * (6 * d + 3 * 2 * _BLOCK + 2),
            "convolution": tokens * width * (2 * _TAPS + 2),  # with bias and SiLU
            "gates": accounting.gate_flops(gates, tokens)
            + accounting.gate_flops(gates, tokens, config.input_gate),
            "cell": cell,
            "norms_and_residuals": norms + tokens * (2 * width + d),  # skip ⊙ c, and both sums
        }

    @staticmethod
    def kept_values(config: ModelConfig) -> tuple[int, int]:
        """Values that the backward pass needs of each token, for the plan of a recipe.

        With all activations: y, its norm, x, z, c, q, k, v, h and the input of W_out. With those of
        products and the cell: y, x, z, h and the output of W_out.
        """
        d, width = config.embedding_dim, config.v_dim
        return 2 * d + 8 * width, 2 * d + 3 * width


class PreviousLayer(nn.Module):
    """All of the block but its first norm and the residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, width = config.embedding_dim, config.v_dim
        if config.layer != STANDARD["layer"]:
            raise ValueError(
                f'block = "previous" has a layer of its own: leave out layer = {config.layer!r}'
            )
        if not config.qk_dim_factor == config.v_dim_factor == _UP:
            raise ValueError(
                f'block = "previous" needs qk_dim_factor = v_dim_factor = {_UP}, not '
                f"{config.qk_dim_factor} and {config.v_dim_factor}; "
                f'sizes such as "160m-previous" have them'
            )
        if width != _UP * dim:
            raise ValueError(
                f'block = "previous" needs mlstm_round_up_to_multiple_of = 1, not '
                f"{config.mlstm_round_up_to_multiple_of}, which makes the width {width} instead of "
                f"{_UP * dim}"
            )
        if width % _BLOCK:
            raise ValueError(f'block = "previous" needs an even embedding_dim, not {dim}')
        std, residual = small_std(dim), residual_std(dim, config.num_blocks)
        self.proj_up = Linear(dim, width, std=std)
        self.proj_up_gate = Linear(dim, width, std=std)
        self.conv = CausalConvolution(width)
        self.q = BlockDiagonal(width)
        self.k = BlockDiagonal(width)
        self.v = BlockDiagonal(width)
        self.igate_preact, self.fgate_preact = make_gates(config, 3 * width)
        self.multihead_norm = find("head_norm", config.head_norm)(width, config.cell_norm_eps)
        self.skip = Skip(width)
        self.out_proj = Linear(width, dim, std=residual)
        self.heads = config.num_heads
        self.gate_soft_cap, self.eps = config.gate_soft_cap, config.eps

    def forward(
        self,
        x: Tensor,
        state: PreviousState | None,
        *,
        resets: Tensor | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, PreviousState]:
        padded = None if lengths is None else padding(lengths, *x.shape[:2])
        if resets is not None and resets.shape != x.shape[:2]:
            raise ValueError(
                f"resets must have the shape {list(x.shape[:2])}, not {list(resets.shape)}"
            )
        if resets is not None and padded is not None:
            resets = resets & ~padded
        # 1. The convolution, from the inputs before x and x itself.
        x, z = self.proj_up(x), self.proj_up_gate(x)
        inputs = _with_last(x, state)
        documents = None if resets is None else F.pad(resets.cumsum(1), (_TAPS - 1, 0))
        convolved = self.conv(inputs, documents)
        # 2. q, k and v side by side: the gates read all three, and no copy of them is made.
        qkv = torch.cat([self.q(convolved), self.k(convolved), self.v(x)], dim=-1)
        i = soft_cap(self.igate_preact(qkv), self.gate_soft_cap)
        f = soft_cap(self.fgate_preact(qkv), self.gate_soft_cap)
        if padded is not None:
            i = i.masked_fill(padded[..., None], -torch.inf)
            f = f.masked_fill(padded[..., None], torch.inf)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in qkv.chunk(3, dim=-1))
        # 3. The cell.
        cell = None if state is None else MLSTMState(state.C, state.n, state.m)
        if x.shape[1] == 1 and resets is None and cell is not None:
            q, k, v, i, f = (part.squeeze(1) for part in (q, k, v, i, f))
            h, cell = mlstm_step(q, k, v, i, f, cell, eps=self.eps)
            h = h.unsqueeze(1)
        else:
            h, cell = mlstm_sequence(q, k, v, i, f, state=cell, resets=resets, eps=self.eps)
        norm = self.multihead_norm
        h = norm.normalise(h, norm(), norm.eps).flatten(-2)
        y = self.out_proj(self.skip(h, convolved) * F.silu(z))
        return y, PreviousState(*cell, _last(inputs, documents, lengths))


def _with_last(x: Tensor, state: PreviousState | None) -> Tensor:
    """x [B, T, W] after the last inputs of the state, or after zeros: [B, T + 3, W]."""
    if state is None:
        return F.pad(x, (0, 0, _TAPS - 1, 0))  # torch.compile reads x itself, and makes no copy
    if not isinstance(state, PreviousState):
        raise TypeError(f"the state must be a PreviousState, not a {type(state).__name__}")
    shape = [len(x), _TAPS - 1, x.shape[2]]
    if list(state.conv.shape) != shape:
        raise ValueError(
            f"the state's conv must have the shape {shape}, not {list(state.conv.shape)}"
        )
    return torch.cat([state.conv.to(x.dtype), x], dim=1)


def _last(inputs: Tensor, documents: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The last inputs [B, 3, W] at each row's length; 0 for those of an earlier document."""
    count = _TAPS - 1
    if lengths is None:
        at = slice(inputs.shape[1] - count, None)
        last, own = inputs[:, at], None if documents is None else documents[:, at]
    else:
        index = lengths[:, None] + torch.arange(count, device=lengths.device)
        rows = torch.arange(len(inputs), device=inputs.device)[:, None]
        last, own = inputs[rows, index], None if documents is None else documents[rows, index]
    last = last.to(_wide(inputs))
    if documents is None or own is None:
        return last
    return last.masked_fill((own != documents[:, -1:])[..., None], 0)


class CausalConvolution(nn.Module):
    """SiLU(Σ_j w_j ⊙ x_{t−3+j} + b): a filter of 4 taps for each channel.

    Sums of shifted inputs, which torch.compile turns into one kernel. Arithmetic is in float32.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, _TAPS))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.weight, small_std(_TAPS))
        normal_(self.bias, 0)

    def forward(self, inputs: Tensor, documents: Tensor | None = None) -> Tensor:
        """inputs [B, 3 + T, W], the first three are those before the sequence. Returns [B, T, W].

        documents [B, 3 + T] are numbers. A token sees only inputs with its own document's number.
        """
        length, wide = inputs.shape[1] - (_TAPS - 1), _wide(inputs)
        weight, total = to_autocast(self.weight).to(wide), to_autocast(self.bias).to(wide)
        for tap in range(_TAPS):
            x = inputs[:, tap : tap + length].to(wide)
            if documents is not None and tap < _TAPS - 1:
                is_other = documents[:, tap : tap + length] != documents[:, _TAPS - 1 :]
                x = x.masked_fill(is_other[..., None], 0)
            total = total + x * weight[:, tap]
        return F.silu(total).to(inputs.dtype)


class BlockDiagonal(nn.Module):
    """A linear layer without bias whose matrix has blocks of 4 × 4 on its diagonal, else zeros.

    The sums of four products are written elementwise: torch.compile makes one kernel of them, which
    reads x and writes y once. A dense matrix would take W / 4 times the arithmetic, and products of
    W / 4 small matrices would leave most of a GPU's matrix units empty. Arithmetic is in float32.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width // _BLOCK, _BLOCK, _BLOCK))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.weight, small_std(_BLOCK))

    def forward(self, x: Tensor) -> Tensor:
        """y_{b,o} = Σ_i w_{b,o,i} x_{b,i} for each block b."""
        blocks: Tensor = x.to(_wide(x)).unflatten(-1, (-1, 1, _BLOCK))
        weight = to_autocast(self.weight).to(blocks.dtype)
        return (blocks * weight).sum(-1).to(x.dtype).flatten(-2)


class Skip(nn.Module):
    """h + weight ⊙ c. The first weight is 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1.0)

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        return h + to_autocast(self.weight) * c


def _wide(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)
