"""The mLSTM cell: one operator in several forms of the same mathematics.

    recurrent.py  one step at a time: the oracle
    parallel.py   all pairs of positions: the second oracle
    chunkwise.py  chunks, in plain PyTorch: any device
    triton/       chunks and the single step in Triton: GPUs

With `backend="auto"` a GPU runs the Triton forms where they apply and PyTorch's run elsewhere.
"""

import importlib.util
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from xlstm7b.mlstm.chunkwise import chunkwise_sequence
from xlstm7b.mlstm.headnorm import headwise_norm
from xlstm7b.mlstm.parallel import parallel_sequence
from xlstm7b.mlstm.recurrent import recurrent_sequence, recurrent_step
from xlstm7b.mlstm.state import MLSTMState

__all__ = ["MLSTMState", "has_kernels", "headwise_norm", "mlstm_sequence", "mlstm_step"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None
# On a CPU Triton's kernels run in its interpreter alone, which tests switch on.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_SEQUENCE_FORMS = {
    "recurrent": recurrent_sequence,
    "parallel": parallel_sequence,
    "chunkwise": chunkwise_sequence,
}


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
    else:
        _check_state(state, q, v)
    reason = _why_not_triton(q, k, v, i, f)
    form = _pick(backend, q.device.type != "cpu", reason, "chunkwise", _SEQUENCE_FORMS)
    if form == "triton":
        from xlstm7b.mlstm.triton.sequence import triton_sequence

        return triton_sequence(q, k, v, i, f, state=state, resets=resets, eps=eps)
    return _SEQUENCE_FORMS[form](q, k, v, i, f, state=state, resets=resets, eps=eps)


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
    With `inplace` the given state's tensors are overwritten and returned. The Triton form has no
    gradient: where one is wanted, PyTorch's form runs.
    """
    _check_inputs(q, k, v, i, f)
    _check_state(state, q, v)
    if gate is not None:
        _check_shape("gate", gate, v.shape)
    if norm_weight is not None:
        _check_shape("norm_weight", norm_weight, (v.shape[1] * v.shape[2],))
    reason = _why_not_triton(q, k, v, i, f)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, i, f, *state)):
        reason = "its single step has no gradient"
    if _pick(backend, q.device.type != "cpu", reason, "recurrent", ("recurrent",)) == "triton":
        from xlstm7b.mlstm.triton.step import triton_step

        return triton_step(
            q, k, v, i, f, state, gate=gate, norm_weight=norm_weight, norm_eps=norm_eps, eps=eps,
            inplace=inplace,
        )  # fmt: skip
    h, new = recurrent_step(q, k, v, i, f, state, eps=eps)
    if norm_weight is not None:
        h = headwise_norm(h, norm_weight, norm_eps)
    if gate is not None:
        h = h * torch.sigmoid(gate)
    if inplace:
        for old_part, new_part in zip(state, new, strict=True):
            old_part.copy_(new_part)
        new = state
    return h, new


def _pick(
    backend: str, on_gpu: bool, why_not_triton: str | None, default: str, forms: Iterable[str]
) -> str:
    if backend == "auto":
        return "triton" if on_gpu and why_not_triton is None else default
    if backend == "triton" and why_not_triton:
        raise ValueError(f"the Triton form cannot run here: {why_not_triton}")
    if backend not in (*forms, "triton"):
        known = ", ".join(("auto", *forms, "triton"))
        raise ValueError(f"there is no backend {backend!r} here; there are: {known}")
    return backend


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels are the way to compute there."""
    return _HAS_TRITON and device.type in ("cuda", "xpu")


def _why_not_triton(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> str | None:
    """None where the Triton forms apply."""
    if not (has_kernels(q.device) or (_HAS_TRITON and _INTERPRETED)):
        return f"it needs a GPU and Triton, and the tensors are on {q.device.type}"
    if not q.dtype == k.dtype == v.dtype != torch.float64 or i.dtype != f.dtype:
        return f"q, k, v must have one dtype up to float32, not {q.dtype}, {k.dtype}, {v.dtype}"
    if i.dtype != torch.float32:
        return f"it needs gates in float32, not {i.dtype}"
    if not (16 <= q.shape[-1] <= 1024 and 16 <= v.shape[-1] <= 1024):
        return f"heads must have 16 to 1024 elements, not {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[0] * q.shape[-2] > 65535:
        return f"batch × heads must be at most 65535, not {q.shape[0] * q.shape[-2]}"
    return None


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


def _check_state(state: MLSTMState, q: Tensor, v: Tensor) -> None:
    """A state of other shapes would broadcast, or have a kernel write beside it."""
    batch, heads, d_qk, d_hv = q.shape[0], q.shape[-2], q.shape[-1], v.shape[-1]
    _check_shape("the state's C", state.C, (batch, heads, d_qk, d_hv))
    _check_shape("the state's n", state.n, (batch, heads, d_qk))
    _check_shape("the state's m", state.m, (batch, heads))


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, not {list(x.shape)}")


def _describe(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
