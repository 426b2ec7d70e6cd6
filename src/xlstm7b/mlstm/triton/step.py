"""`mlstm_step` as one kernel: cell, norm and gate (paper, "Fused Generation Kernels").

Each program has a tile of one head's state, cut along d_hv. n and m may only be overwritten after
every program of the head has read them. So the program that finishes last writes them, and it
normalises the head.
"""

import threading

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xlstm7b.mlstm import MLSTMState
from xlstm7b.mlstm.triton.chunk_gates import log_sigmoid
from xlstm7b.mlstm.triton.launch_params import Tile, overlap_launch, padded, step_tile


@triton.jit
def step_kernel(
    q, k, v, i, f, gate, norm_weight, C, n, m, slots, h, raw, arrived,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h,
    i_stride_b, i_stride_h, f_stride_b, f_stride_h, gate_stride_b, gate_stride_h,
    C_stride_b, n_stride_b, m_stride_b,
    scale, eps, norm_eps, NH, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_GATE: tl.constexpr, HAS_SLOTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one head's C, and the same elements of h.

    One long function, because nearly half of its lines are arguments and pointers.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // NH, row % NH
    d_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = d_v < DV
    slot = batch  # the row of the state
    if HAS_SLOTS:
        slot = tl.load(slots + batch).to(tl.int64)
    C_head = C + slot * C_stride_b + head * DK * DV + d_v[None, :]
    n_head, m_head = n + slot * n_stride_b + head * DK, m + slot * m_stride_b + head
    q_head = q + batch * q_stride_b + head * q_stride_h
    k_head = k + batch * k_stride_b + head * k_stride_h
    # Nearly all bytes are in C, so its first block is loaded before anything else.
    d_k = tl.arange(0, BLOCK_K)
    mask = (d_k < DK)[:, None] & in_v[None, :]
    C_t = tl.load(C_head + d_k[:, None] * DV, mask=mask, other=0.0)
    all_k = tl.arange(0, PADDED_K)
    in_all = all_k < DK
    n_t = tl.load(n_head + all_k, mask=in_all, other=0.0).to(tl.float32)
    m_old = tl.load(m_head).to(tl.float32)
    all_v = tl.arange(0, PADDED_V)
    in_all_v = all_v < DV
    if HAS_NORM:
        norm_v = tl.load(norm_weight + head * DV + all_v, mask=in_all_v, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if HAS_NORM and HAS_GATE:  # early: the last program of a head is on the critical path
        gate_at = gate + batch * gate_stride_b + head * gate_stride_h + all_v
        gate_v = tl.load(gate_at, mask=in_all_v, other=0.0).to(tl.float32)
    k_all = tl.load(k_head + all_k, mask=in_all, other=0.0).to(tl.float32)
    q_all = tl.load(q_head + all_k, mask=in_all, other=0.0).to(tl.float32)
    v_t = tl.load(v + batch * v_stride_b + head * v_stride_h + d_v, mask=in_v, other=0.0)

    i_t = tl.load(i + batch * i_stride_b + head * i_stride_h)
    decayed = log_sigmoid(tl.load(f + batch * f_stride_b + head * f_stride_h)) + m_old
    m_new = tl.maximum(decayed, i_t)
    f_act, i_act = tl.exp(decayed - m_new), tl.exp(i_t - m_new)
    v_t = v_t.to(tl.float32) * i_act
    numerator = tl.zeros([BLOCK_V], tl.float32)
    for start in tl.static_range(0, DK, BLOCK_K):
        d_k = start + tl.arange(0, BLOCK_K)
        mask = (d_k < DK)[:, None] & in_v[None, :]
        at = C_head + d_k[:, None] * DV
        if start > 0:
            C_t = tl.load(at, mask=mask, other=0.0)
        k_t = tl.load(k_head + d_k, mask=d_k < DK, other=0.0).to(tl.float32)
        q_t = tl.load(q_head + d_k, mask=d_k < DK, other=0.0).to(tl.float32)
        C_new = C_t.to(tl.float32) * f_act + k_t[:, None] * v_t[None, :]
        tl.store(at, C_new, mask=mask)
        numerator += tl.sum(q_t[:, None] * C_new, 0)
    n_t = n_t * f_act + i_act * k_all
    n_q = scale * tl.sum(n_t * q_all, 0)
    h_t = scale * numerator / (tl.maximum(tl.abs(n_q), tl.exp(-m_new)) + eps)
    if HAS_NORM:
        tl.store(raw + row * DV + d_v, h_t, mask=in_v)
    else:
        if HAS_GATE:
            gate_at = gate + batch * gate_stride_b + head * gate_stride_h + d_v
            h_t *= tl.sigmoid(tl.load(gate_at, mask=in_v, other=0.0).to(tl.float32))
        tl.store(h + row * DV + d_v, h_t, mask=in_v)

    tl.debug_barrier()  # all threads have read and written their part
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived + row, 0)
        tl.store(n_head + all_k, n_t, mask=in_all)
        tl.store(m_head, m_new)
        if HAS_NORM:
            # .cg skips the L1 cache, which may not have what other programs wrote.
            x = tl.load(raw + row * DV + all_v, mask=in_all_v, other=0.0, cache_modifier=".cg")
            centred = tl.where(in_all_v, x - tl.sum(x, 0) / DV, 0.0)
            x = centred * tl.rsqrt(tl.sum(centred * centred, 0) / DV + norm_eps) * norm_v
            if HAS_GATE:
                x *= tl.sigmoid(gate_v)
            tl.store(h + row * DV + all_v, x, mask=in_all_v)


class _Counters:
    """Counters of finished programs, one for each head. Every launch resets its own to 0.

    The launches of a stream follow each other, so they all use the same ones. Other streams have
    their own, and so has the stream on which a CUDA graph is captured: graphs that are captured on
    different streams may run at the same time. Nothing is freed, because a graph keeps addresses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_stream: dict[int, Tensor] = {}
        self._outgrown: list[Tensor] = []
        self._spare: Tensor | None = None  # for a capture, which cannot allocate
        self._lock = threading.Lock()

    def take(self, rows: int) -> Tensor:
        stream = _current_stream(self._device)
        counters = self._of_stream.get(stream)
        if counters is None or len(counters) < rows or self._spare is None:
            with self._lock:
                counters = self._grow(stream, counters, rows)
        return counters[:rows]

    def _grow(self, stream: int, counters: Tensor | None, rows: int) -> Tensor:
        is_capturing = _is_capturing(self._device)
        if counters is None or len(counters) < rows:
            if counters is not None:
                self._outgrown.append(counters)
            if is_capturing:
                if self._spare is None or len(self._spare) < rows:
                    raise RuntimeError("call mlstm_step once before you capture a CUDA graph")
                counters, self._spare = self._spare, None
            else:
                counters = self._zeros(rows)
            self._of_stream[stream] = counters
        if not is_capturing and (self._spare is None or len(self._spare) < len(counters)):
            self._spare = self._zeros(len(counters))
        return counters

    def _zeros(self, rows: int) -> Tensor:
        size = max(1024, triton.next_power_of_2(rows))
        return torch.zeros(size, dtype=torch.int32, device=self._device)


def _current_stream(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_counters: dict[torch.device, _Counters] = {}


def take_counters(rows: int, device: torch.device) -> Tensor:
    """Counters for the programs of this many heads, all 0. The launch must leave them so."""
    if device not in _counters:
        _counters.setdefault(device, _Counters(device))
    return _counters[device].take(rows)


def launch_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, C: Tensor, n: Tensor, m: Tensor,
    gate: Tensor | None, norm_weight: Tensor | None, norm_eps: float, eps: float, tile: Tile,
    overlap: bool = False, slots: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns h of one token, [B, NH, d_hv]. Updates the state in place.

    With `slots` [B], integers, row r of the batch has the row slots[r] of the state.
    With `overlap` (programmatic dependent launch, Hopper and later) the kernel reads the state
    before the previous kernel has ended, so at least one other kernel must run between the one
    that wrote the state and this one.
    """
    batch, heads, d_k = q.shape
    d_v = v.shape[-1]
    h = torch.empty(batch, heads, d_v, dtype=v.dtype, device=v.device)
    raw = torch.empty(batch, heads, d_v, dtype=torch.float32, device=v.device)
    step_kernel[(triton.cdiv(d_v, tile.d_out), batch * heads)](
        q, k, v, i, f, v if gate is None else gate, v if norm_weight is None else norm_weight,
        C, n, m, q if slots is None else slots, h, raw, take_counters(batch * heads, q.device),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *i.stride(), *f.stride(),
        *(v if gate is None else gate).stride()[:2], C.stride(0), n.stride(0), m.stride(0),
        d_k**-0.5, eps, norm_eps, heads,
        DK=d_k, DV=d_v, BLOCK_K=tile.d_in, BLOCK_V=tile.d_out,
        PADDED_K=padded(d_k), PADDED_V=padded(d_v),
        HAS_NORM=norm_weight is not None, HAS_GATE=gate is not None, HAS_SLOTS=slots is not None,
        **tile.options(), **overlap_launch(overlap),
    )  # fmt: skip
    return h


@torch.library.custom_op("xlstm7b::mlstm_step", mutates_args=("C", "n", "m"))
def mlstm_fused_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, C: Tensor, n: Tensor, m: Tensor,
    gate: Tensor | None, norm_weight: Tensor | None, norm_eps: float, eps: float,
    slots: Tensor | None = None,
) -> Tensor:  # fmt: skip
    tile = step_tile(q.shape[0] * q.shape[1], q.shape[-1], v.shape[-1])
    return launch_step(q, k, v, i, f, C, n, m, gate, norm_weight, norm_eps, eps, tile, slots=slots)


@mlstm_fused_step.register_fake
def _(q, k, v, i, f, C, n, m, gate, norm_weight, norm_eps, eps, slots=None):
    return v.new_empty(v.shape)


def triton_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState,
    gate: Tensor | None, norm_weight: Tensor | None, norm_eps: float, eps: float, inplace: bool,
    slots: Tensor | None = None,
) -> tuple[Tensor, MLSTMState]:  # fmt: skip
    """`mlstm_step` by the fused kernel, on the given state or on a copy of it."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if gate is not None and gate.stride(-1) != 1:
        gate = gate.contiguous()
    if inplace and not all(part[:1].is_contiguous() for part in state):
        raise ValueError("with inplace=True, each row of the state must be contiguous")
    if not inplace:
        state = MLSTMState(*(part.clone(memory_format=torch.contiguous_format) for part in state))
    if slots is not None:
        slots = slots.contiguous()
    h = mlstm_fused_step(q, k, v, i, f, *state, gate, norm_weight, norm_eps, eps, slots)
    return h, state
