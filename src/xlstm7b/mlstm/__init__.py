"""The mLSTM cell: one operator, computed in one of several forms that give the same numbers.

    recurrent.py  MLSTMState, and the equations token by token: the reference for the tests
    parallel.py   all pairs of positions at once: a second reference
    chunkwise.py  chunk by chunk in plain PyTorch: runs on any device
    replay.py     single steps from an older state and the tokens since (replay decoding)
    triton/       the chunkwise form and the single step as GPU kernels
    autocast.py   the cell stays in float32 under torch.autocast

`backend="auto"` uses the Triton kernels on a GPU if they support the input, else plain PyTorch. It
also uses plain PyTorch where `xlstm7b doctor` found that the kernels give wrong numbers.
"""

import os
from collections.abc import Iterable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.gpus import has_kernels
from xlstm7b.kernel_verdicts import is_wrong
from xlstm7b.mlstm.autocast import without_autocast
from xlstm7b.mlstm.chunkwise import chunkwise_sequence
from xlstm7b.mlstm.parallel import parallel_sequence
from xlstm7b.mlstm.recurrent import MLSTMState, recurrent_sequence, recurrent_step

__all__ = [
    "KERNEL_CHUNK_SIZE",
    "MLSTMState",
    "has_kernels",
    "headwise_norm",
    "mlstm_sequence",
    "mlstm_step",
]

KERNEL_CHUNK_SIZE = 256  # tokens between two states that the Triton kernels keep in memory

# Tests set it: Triton's interpreter then runs the kernels on the CPU.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
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
    """Runs the cell over whole sequences. Returns h, of v's shape and dtype, and the last state.

    q, k [B, T, NH, d_qk], v [B, T, NH, d_hv]. i, f [B, T, NH] are the gates' pre-activations after
    the soft-cap, in float32 or float64. A padded position has i = −∞ and f = +∞; it leaves the
    state unchanged. f = −∞ forgets all that came before; i must be finite there. `resets` [B, T] is
    True at the first token of each document. Gradients of h, C·exp(m) and n·exp(m) are exact for
    every input and for the state.
    """
    batch, length, heads, d_qk = _check_inputs(q, k, v, i, f)
    if length < 1:
        raise ValueError("a sequence needs at least one token")
    if resets is not None:
        _check_shape("resets", resets, (batch, length))
        if resets.dtype != torch.bool:
            raise ValueError(f"resets must be bool, not {resets.dtype}")
    if state is None:
        state = MLSTMState.zeros(batch, heads, d_qk, v.shape[-1], dtype=i.dtype, device=i.device)
    else:
        _check_state(state, q, v)
    reason = _why_not_triton(q, k, v, i, f)
    form = _pick(backend, _prefers_kernels("sequences", q), reason, "chunkwise", _SEQUENCE_FORMS)
    if form == "triton":
        from xlstm7b.mlstm.triton.sequence import triton_sequence

        return triton_sequence(q, k, v, i, f, state=state, resets=resets, eps=eps)
    with without_autocast(q.device):
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
    slots: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MLSTMState]:
    """One token: q, k [B, NH, d_qk], v [B, NH, d_hv], i, f [B, NH]. Returns h, like v, and state.

    With `norm_weight` [NH · d_hv], h is normalised per head; with `gate` (like v) it is multiplied
    by σ(gate). With `inplace`, the tensors of `state` are overwritten and returned; C may then be
    bfloat16, n and m not, because the decay would be lost (see `MLSTMState`). With `slots` [B] too,
    row r of the batch has the row slots[r] of a larger state; no slot may occur twice. The Triton
    kernel has no backward pass: if an input requires a gradient, PyTorch is used.
    """
    _check_inputs(q, k, v, i, f)
    if slots is None:
        _check_state(state, q, v)
    else:
        if not inplace:
            raise ValueError("slots can only be given with inplace=True")
        _check_shape("slots", slots, (len(q),))
        _check_state(state, q, v, len(state.C))
    for name, part in (("n", state.n), ("m", state.m)):
        if inplace and part.dtype.itemsize < 4:
            raise ValueError(
                f"with inplace=True, the state's {name} must be float32, not {part.dtype}"
            )
    if gate is not None:
        _check_shape("gate", gate, v.shape)
    if norm_weight is not None:
        _check_shape("norm_weight", norm_weight, (v.shape[1] * v.shape[2],))
    reason = _why_not_triton(q, k, v, i, f)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, i, f, *state)):
        reason = "the kernel for a single step has no backward pass"
    form = _pick(backend, _prefers_kernels("steps", q), reason, "recurrent", ("recurrent",))
    if form == "triton":
        from xlstm7b.mlstm.triton.step import triton_step

        return triton_step(q, k, v, i, f, state, gate, norm_weight, norm_eps, eps, inplace, slots)
    with without_autocast(q.device):
        rows = state
        if slots is not None:
            rows = MLSTMState(*(part.index_select(0, slots) for part in state))
        h, new = recurrent_step(q, k, v, i, f, rows, eps=eps, inplace=inplace)
        if slots is not None:
            for part, new_part in zip(state, new, strict=True):
                part.index_copy_(0, slots.long(), new_part)
            new = state
    if norm_weight is not None:
        h = headwise_norm(h, norm_weight, norm_eps)
    if gate is not None:
        h = h * torch.sigmoid(gate)
    return h, new


def headwise_norm(h: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm without bias over each head: h [..., NH, d_hv], weight [NH · d_hv].

    The statistics (mean and biased variance) are in float32. The result is cast to h's dtype and
    then multiplied by the weight.
    """
    wide = h if h.dtype.itemsize >= 4 else h.float()
    return F.layer_norm(wide, h.shape[-1:], eps=eps).to(h.dtype) * weight.view(h.shape[-2:])


def _prefers_kernels(family: str, q: Tensor) -> bool:
    """Whether `backend="auto"` uses Triton, if that supports the input: on a GPU."""
    return q.device.type != "cpu" and not is_wrong(family, q.device)


def _pick(
    backend: str,
    prefers_kernels: bool,
    why_not_triton: str | None,
    default: str,
    forms: Iterable[str],
) -> str:
    """The form that `backend` asks for."""
    if backend == "auto":
        return "triton" if prefers_kernels and why_not_triton is None else default
    if backend == "triton" and why_not_triton:
        raise ValueError(f'backend="triton" cannot be used: {why_not_triton}')
    if backend not in (*forms, "triton"):
        known = ", ".join(("auto", *forms))
        raise ValueError(f"backend must be {known} or triton, not {backend!r}")
    return backend


def _why_not_triton(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> str | None:
    """Why the Triton kernels do not support this input. None if they do."""
    if not (has_kernels(q.device) or _INTERPRETED):
        return f"it needs Triton and a GPU that it supports, and the tensors are on {q.device}"
    if not q.dtype == k.dtype == v.dtype != torch.float64 or i.dtype != f.dtype:
        return f"q, k, v must have one dtype up to float32, not {q.dtype}, {k.dtype}, {v.dtype}"
    if i.dtype != torch.float32:
        return f"the gates must be float32, not {i.dtype}"
    if not (16 <= q.shape[-1] <= 1024 and 16 <= v.shape[-1] <= 1024):
        return f"heads must have 16 to 1024 elements, not {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[0] * q.shape[-2] > 65535:
        return f"batch × heads must be at most 65535, not {q.shape[0] * q.shape[-2]}"
    return None


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> torch.Size:
    rows = q.shape[:-1]
    _check_shape("k", k, q.shape)
    _check_shape("v", v, (*rows, v.shape[-1]))
    for name, gate in (("i", i), ("f", f)):
        _check_shape(name, gate, rows)
        if gate.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} must be float32, not {gate.dtype}")
    return q.shape


def _check_state(state: MLSTMState, q: Tensor, v: Tensor, rows: int | None = None) -> None:
    """A wrong shape would otherwise broadcast, or a kernel would write outside the state.

    The state has as many rows as q, or this many.
    """
    batch = q.shape[0] if rows is None else rows
    heads, d_qk, d_hv = q.shape[-2], q.shape[-1], v.shape[-1]
    _check_shape("the state's C", state.C, (batch, heads, d_qk, d_hv))
    _check_shape("the state's n", state.n, (batch, heads, d_qk))
    _check_shape("the state's m", state.m, (batch, heads))


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, not {list(x.shape)}")
