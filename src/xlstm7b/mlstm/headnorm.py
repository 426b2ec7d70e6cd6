"""The headwise norm that follows the cell: LayerNorm over each head on its own, without bias."""

import torch.nn.functional as F
from torch import Tensor


def headwise_norm(h: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalises h [..., NH, d_hv] over its last axis; weight is [NH · d_hv].

    The mean is subtracted and the variance is the biased one. Statistics are taken in float32,
    the result is cast back to h's dtype, then scaled.
    """
    wide = h if h.dtype.itemsize >= 4 else h.float()
    return F.layer_norm(wide, h.shape[-1:], eps=eps).to(h.dtype) * weight.view(h.shape[-2:])
