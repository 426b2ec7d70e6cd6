"""The mLSTM cell: one operator in several forms of the same mathematics.

recurrent.py  one step at a time: the oracle
parallel.py   all pairs of positions: the second oracle
chunkwise.py  chunks: what runs by default
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlstm7b.mlstm.chunkwise import chunkwise_sequence
from xlstm7b.mlstm.headnorm import headwise_norm
from xlstm7b.mlstm.parallel import parallel_sequence
from xlstm7b.mlstm.recurrent import recurrent_sequence, recurrent_step
from xlstm7b.mlstm.state import MLSTMState

__all__ = ["MLSTMState", "headwise_norm", "mlstm_sequence", "mlstm_step"]

_SEQUENCE_FORMS = {
    "recurrent": recurrent_sequence,
    "parallel": parallel_sequence,
    "chunkwise": chunkwise_sequence,
}
_STEP_FORMS = {"recurrent": recurrent_step}


def mlstm_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    state: MLSTMState | None = None,
    resets: Tensor | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[Tensor, MLSTMState]:
    """Runs the cell over whole sequences; returns h, like v, and the state behind the last token.

    q, k [B, T, NH, d_qk], v [B, T, NH, d_hv]; i, f [B, T, NH] are the gates' pre-activations,
    already capped, in float32 (or float64). A padded position has i = −∞ and f = +∞: it leaves the
    state as it is. `resets` [B, T] is True on a document's first token. Gradients are exact for h,
    C·exp(m) and n·exp(m), with respect to every input and the state.
    """
    batch, length, heads, d_qk = _check_inputs(q, k, v, i, f)
    if length < 1:
        raise ValueError("a sequence needs at least one token")
    if resets is not None and (resets.shape != (batch, length) or resets.dtype != torch.bool):
        raise ValueError(f"resets must be bool of shape {(batch, length)}, not {_describe(resets)}")
    if state is None:
        state = MLSTMState.zeros(batch, heads, d_qk, v.shape[-1], dtype=i.dtype, device=i.device)
    form = _SEQUENCE_FORMS[_pick(backend, "chunkwise", _SEQUENCE_FORMS)]
    return form(q, k, v, i, f, state=state, resets=resets, eps=eps)


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState,
    *,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    eps: float = 1e-6,
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, MLSTMState]:
    """One token: q, k [B, NH, d_qk], v [B, NH, d_hv], i, f [B, NH]; h like v.

    With `norm_weight` [NH · d_hv] h leaves headwise-normalised, with `gate` (like v) times σ(gate).
    With `inplace` the given state's tensors are overwritten and returned.
    """
    _check_inputs(q, k, v, i, f)
    form = _STEP_FORMS[_pick(backend, "recurrent", _STEP_FORMS)]
    h, new = form(q, k, v, i, f, state, eps=eps)
    if norm_weight is not None:
        h = headwise_norm(h, norm_weight, norm_eps)
    if gate is not None:
        h = h * torch.sigmoid(gate)
    if inplace:
        for old_part, new_part in zip(state, new, strict=True):
            old_part.copy_(new_part)
        new = state
    return h, new


def _pick(backend: str, default: str, forms: Mapping[str, object]) -> str:
    name = default if backend == "auto" else backend
    if name not in forms:
        raise ValueError(
            f"there is no backend {backend!r} here; there are: auto, {', '.join(forms)}"
        )
    return name


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> torch.Size:
    if k.shape != q.shape:
        raise ValueError(f"q and k differ: {_describe(q)} and {_describe(k)}")
    if v.shape[:-1] != q.shape[:-1]:
        raise ValueError(f"v must be {list(q.shape[:-1])} + [d_hv] like q, not {_describe(v)}")
    for name, gate in (("i", i), ("f", f)):
        if gate.shape != q.shape[:-1] or gate.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} must be float32 of shape {list(q.shape[:-1])}, not {_describe(gate)}"
            )
    return q.shape


def _describe(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
