"""Launch parameters: a table of measured choices, and the arithmetic each dtype is given.

`_FAST` and the step were measured by `python -m xlstm7b.bench.tune` on an H200 (Triton 3.6) at
heads of 256/512, 65,536 tokens; other head sizes use the same. `_WIDE` and `CARRY` were not tuned.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, order=True)
class Tile:
    """Block sizes of a launch, and its warps and pipeline stages."""

    t: int  # positions
    d_in: int  # summed over; for states, d_qk's block
    d_out: int  # kept; for states, d_hv's block
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}

    def within(self, d_in: int, d_out: int) -> "Tile":
        """No block larger than the head, padded to a power of two."""
        return replace(
            self, d_in=min(self.d_in, padded(d_in)), d_out=min(self.d_out, padded(d_out))
        )


@dataclass(frozen=True)
class Plan:
    """How the work is cut up. `chunk` is the distance between states in memory."""

    chunk: int
    states: Tile
    state_gradients: Tile
    h: Tile
    dv: Tile
    dq: Tile
    dk: Tile


_FAST = Plan(
    chunk=256,
    states=Tile(64, 64, 256, 4, 2),
    state_gradients=Tile(64, 64, 256, 4, 2),
    h=Tile(64, 32, 256, 4, 4),
    dv=Tile(64, 32, 256, 4, 4),
    dq=Tile(64, 64, 128, 4, 4),
    dk=Tile(64, 64, 128, 4, 4),
)
# Operands of float32 need smaller tiles.
_WIDE = Plan(256, *[Tile(32, 32, 32, 4, 2)] * 2, *[Tile(32, 32, 64, 4, 2)] * 4)
CARRY = Tile(1, 1, 1024, 4, 1)
ROWS_TO_FILL = 32  # batch × heads from which the recurrence over chunks fills an H200 in one pass


def plan(d_qk: int, d_hv: int, dtype: torch.dtype) -> Plan:
    """The parameters for one head size."""
    chosen = _FAST if _is_fast(dtype, d_qk, d_hv) else _WIDE
    return Plan(
        chosen.chunk,
        chosen.states.within(d_qk, d_hv),
        chosen.state_gradients.within(d_qk, d_hv),
        chosen.h.within(d_qk, d_hv),
        chosen.dv.within(d_qk, d_hv),
        chosen.dq.within(d_hv, d_qk),
        chosen.dk.within(d_hv, d_qk),
    )


def step_tile(rows: int, d_qk: int, d_hv: int) -> Tile:
    """The single step: few heads are cut finely, to occupy every multiprocessor."""
    tile = Tile(1, 256, 16, 2, 1) if rows <= 16 else Tile(1, 64, 64, 4, 1)
    return (tile if rows <= 128 else Tile(1, 128, 64, 4, 1)).within(d_qk, d_hv)


def padded(d: int) -> int:
    """The power of two that a head is padded to; products need at least 16."""
    return max(16, int(triton.next_power_of_2(d)))


def _is_fast(dtype: torch.dtype, d_qk: int, d_hv: int) -> bool:
    """Whether products run on bf16 tiles as they lie in memory.

    Heads of 16, of odd sizes and of 24/40 came out wrong so on Hopper with Triton 3.6, for a cause
    not found; widened operands were right. Heads from 64 in whole 32s are those that were tested.
    """
    return dtype == torch.bfloat16 and all(d >= 64 and d % 32 == 0 for d in (d_qk, d_hv))


def arithmetic(dtype: torch.dtype, d_qk: int, d_hv: int) -> dict[str, Any]:
    """What products are computed in: every one is accumulated in float32.

    float16 has the digits of TF32 but not the range: 1/denominator or C overflow it, so it is
    widened. float32 stays exact.
    """
    if _is_fast(dtype, d_qk, d_hv):
        return {"OPERAND": tl.bfloat16, "PRECISION": "tf32"}
    return {"OPERAND": tl.float32, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}


def state_dtype(dtype: torch.dtype, d_qk: int, d_hv: int) -> torch.dtype:
    """What states between chunks are kept in: the dtype they enter the products in."""
    return torch.bfloat16 if _is_fast(dtype, d_qk, d_hv) else torch.float32
