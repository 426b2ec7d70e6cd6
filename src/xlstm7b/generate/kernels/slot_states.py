"""Copies the states of one block between chosen slots and a contiguous batch.

One launch copies C, n and m; PyTorch's index_select and index_copy_ would take one launch for each.
Prefill gathers and scatters in every block, and short prompts are bound by launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xlstm7b.mlstm import MLSTMState

_BLOCK = 4096  # elements per program


def gather_states(states: MLSTMState, slots: Tensor) -> MLSTMState:
    """The states of these slots [R], as a new batch.

    Each slot's C, n and m are contiguous; slots may lie anywhere apart.
    """
    batch = MLSTMState(
        *(torch.empty(len(slots), *x.shape[1:], dtype=x.dtype, device=x.device) for x in states)
    )
    _launch(states, batch, slots, gather=True)
    return batch


def scatter_states(batch: MLSTMState, states: MLSTMState, slots: Tensor) -> None:
    """Writes the states of a batch to these slots [R], in the slots' dtype.

    Each row's C, n and m are contiguous. Rows with the same slot overwrite each other in any order.
    """
    _launch(batch, states, slots, gather=False)


def _launch(source: MLSTMState, target: MLSTMState, slots: Tensor, *, gather: bool) -> None:
    for x in (*source, *target):
        assert x[0].is_contiguous()
    sizes = [x[0].numel() for x in source]
    copy_states_kernel[(triton.cdiv(sizes[0], _BLOCK), len(slots))](
        *source, *target, slots, *sizes,
        *(x.stride(0) for x in source), *(x.stride(0) for x in target),
        GATHER=gather, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def copy_states_kernel(
    C, n, m, C_to, n_to, m_to, slots, C_size, n_size, m_size,
    C_stride, n_stride, m_stride, C_to_stride, n_to_stride, m_to_stride,
    GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of one row's C per program; the first program of a row also copies n and m.

    Sizes are elements per row, strides elements between rows. With GATHER row r is copied from
    slots[r] of the source to r of the target, else from r to slots[r].
    """
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    source, target = slot, row
    if not GATHER:
        source, target = row, slot
    first = tl.program_id(0) * BLOCK
    _copy(C + source * C_stride, C_to + target * C_to_stride, C_size, first, BLOCK)
    if first == 0:
        for start in range(0, n_size, BLOCK):
            _copy(n + source * n_stride, n_to + target * n_to_stride, n_size, start, BLOCK)
        for start in range(0, m_size, BLOCK):
            _copy(m + source * m_stride, m_to + target * m_to_stride, m_size, start, BLOCK)


@triton.jit
def _copy(source, target, size, first, BLOCK: tl.constexpr):
    """BLOCK of `size` elements, from number `first`, in the target's dtype."""
    at = first + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < size, other=0.0)
    tl.store(target + at, value.to(target.dtype.element_ty), mask=at < size)
