"""The block (post up-projection): z = x + mLSTM(RMSNorm(x)); y = z + SwiGLU(RMSNorm(z))."""

import torch
from torch import Tensor, nn

from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState, headwise_norm, mlstm_sequence, mlstm_step
from xlstm7b.model.layers import Float32Linear, Linear, NormWeight, RMSNorm, SwiGLU, soft_cap


class MLSTMLayer(nn.Module):
    """Projections and gates around the cell: h = σ(õ) ⊙ Norm(h̃), then the output projection.

    The number of heads is read off the gates' pre-activations, so that a layer that holds some of
    the heads (tensor parallelism) is the same code.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.embedding_dim
        self.q = Linear(width, config.qk_dim)
        self.k = Linear(width, config.qk_dim)
        self.v = Linear(width, config.v_dim)
        self.ogate_preact = Linear(width, config.v_dim)
        self.igate_preact = Float32Linear(width, config.num_heads)
        self.fgate_preact = Float32Linear(width, config.num_heads)
        self.multihead_norm = NormWeight(config.v_dim, config.cell_norm_eps)
        self.out_proj = Linear(config.v_dim, width)
        self.gate_soft_cap = config.gate_soft_cap
        self.eps = config.eps

    def forward(
        self, x: Tensor, state: MLSTMState | None, resets: Tensor | None, padded: Tensor | None
    ) -> tuple[Tensor, MLSTMState]:
        i = soft_cap(self.igate_preact(x), self.gate_soft_cap)
        f = soft_cap(self.fgate_preact(x), self.gate_soft_cap)
        if padded is not None:
            i = i.masked_fill(padded[..., None], -torch.inf)
            f = f.masked_fill(padded[..., None], torch.inf)
        heads = (i.shape[-1], -1)
        q, k, v = (layer(x).unflatten(-1, heads) for layer in (self.q, self.k, self.v))
        gate = self.ogate_preact(x).unflatten(-1, heads)
        norm_weight, norm_eps = self.multihead_norm(), self.multihead_norm.eps
        if x.shape[1] == 1 and resets is None and state is not None:
            h, state = mlstm_step(
                q.squeeze(1),
                k.squeeze(1),
                v.squeeze(1),
                i.squeeze(1),
                f.squeeze(1),
                state,
                gate=gate.squeeze(1),
                norm_weight=norm_weight,
                norm_eps=norm_eps,
                eps=self.eps,
            )
            h = h.unsqueeze(1)
        else:
            h, state = mlstm_sequence(q, k, v, i, f, state=state, resets=resets, eps=self.eps)
            h = headwise_norm(h, norm_weight, norm_eps) * torch.sigmoid(gate)
        return self.out_proj(h.flatten(-2)), state


class Block(nn.Module):
    """One residual block: the mLSTM layer, then the feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_mlstm = RMSNorm(config.embedding_dim, config.norm_eps)
        self.mlstm_layer = MLSTMLayer(config)
        self.norm_ffn = RMSNorm(config.embedding_dim, config.norm_eps)
        self.ffn = SwiGLU(config.embedding_dim, config.ffn_dim)

    def forward(
        self, x: Tensor, state: MLSTMState | None, resets: Tensor | None, padded: Tensor | None
    ) -> tuple[Tensor, MLSTMState]:
        y, state = self.mlstm_layer(self.norm_mlstm(x), state, resets, padded)
        z = x + y
        return z + self.ffn(self.norm_ffn(z)), state
