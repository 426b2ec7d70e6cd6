"""Launch parameters of the cell's kernels: block sizes, warps, pipeline stages and dtypes.

`_FAST` and the tiles of the single step were measured with `benchmarks/tune.py` on an
H200 (Triton 3.6) for heads of 256/512 and 65,536 tokens; other head sizes use the same. `_WIDE`
and `CARRY` were not tuned.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import current_target

from xlstm7b.gpus import shared_memory
from xlstm7b.mlstm import KERNEL_CHUNK_SIZE


@dataclass(frozen=True)
class Tile:
    """Block sizes of one launch, with its warps, pipeline stages and registers."""

    t: int  # positions
    d_in: int  # the dimension that is summed over; for states, d_qk
    d_out: int  # the dimension that is kept; for states, d_hv
    warps: int
    stages: int
    registers: int | None = None  # of a thread, at most; None: the compiler decides

    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}

    def within(self, d_in: int, d_out: int) -> "Tile":
        """The same tile with no block larger than the padded head."""
        return replace(
            self, d_in=min(self.d_in, padded(d_in)), d_out=min(self.d_out, padded(d_out))
        )


@dataclass(frozen=True)
class Plan:
    """How the work is divided. `chunk` is the number of tokens between two stored states."""

    chunk: int
    states: Tile
    state_gradients: Tile
    h: Tile
    dv: Tile
    dq: Tile
    dk: Tile


_FAST = Plan(
    chunk=KERNEL_CHUNK_SIZE,
    states=Tile(64, 64, 256, 4, 2),
    state_gradients=Tile(64, 64, 256, 4, 2),
    h=Tile(64, 32, 256, 4, 4),
    dv=Tile(64, 32, 256, 4, 4),
    dq=Tile(64, 64, 128, 4, 4),
    dk=Tile(64, 64, 128, 4, 4),
)
# float32 operands need smaller tiles.
_WIDE = Plan(KERNEL_CHUNK_SIZE, *[Tile(32, 32, 32, 4, 2)] * 2, *[Tile(32, 32, 64, 4, 2)] * 4)
CARRY = Tile(1, 1, 1024, 4, 1)
_BESIDE_STAGES = 8192  # bytes of shared memory for sums and conversions, more than any kernel takes
# From this batch × heads on, one pass over the chunks is enough work for an H200.
ROWS_TO_FILL = 32


def plan(d_qk: int, d_hv: int, dtype: torch.dtype) -> Plan:
    """The parameters for one head size."""
    chosen = _FAST if _is_fast(dtype, d_qk, d_hv) else _WIDE
    sums_over_k = (chosen.states, chosen.state_gradients, chosen.h, chosen.dv)
    return Plan(
        chosen.chunk,
        *(tile.within(d_qk, d_hv) for tile in sums_over_k),
        *(tile.within(d_hv, d_qk) for tile in (chosen.dq, chosen.dk)),
    )


def step_tile(rows: int, d_qk: int, d_hv: int) -> Tile:
    """The tile of a single step. A few rows use small tiles, so that every SM has work."""
    tile = Tile(1, 256, 16, 2, 1) if rows <= 16 else Tile(1, 64, 64, 4, 1)
    return (tile if rows <= 128 else Tile(1, 128, 64, 4, 1)).within(d_qk, d_hv)


def replay_tile(rows: int, tokens: int, d_qk: int, d_hv: int, state_dtype: torch.dtype) -> Tile:
    """The tile of a step by replay, with up to this many tokens since the checkpoint.

    With many rows and 16 tokens, the tiles are the fastest of those tried on an H200: float32 with
    64 and 256 rows of a 7B, bfloat16 with 256. More tokens take more registers.
    """
    if rows <= 16:
        tile = Tile(1, 256, 32, 8, 1, 128)
    elif tokens > 16:
        tile = Tile(1, 64, 64, 4, 1, 128)
    elif state_dtype == torch.bfloat16:
        tile = Tile(1, 16, 128, 2, 4, 128)
    else:
        tile = Tile(1, 64, 64, 2, 1, 168)
    return tile.within(d_qk, d_hv)


def pass_tile(rows: int, d_qk: int, d_hv: int) -> Tile:
    """The tile of a pass by replay: of ten, the fastest or near it on an H200."""
    if rows <= 8:
        tile = Tile(1, 256, 32, 8, 1)
    elif rows <= 16:
        tile = Tile(1, 64, 32, 4, 1)
    else:
        tile = Tile(1, 64, 64, 4, 1, 128)
    return tile.within(d_qk, d_hv)


def fitting_stages(stages: int, stage_bytes: int, device: torch.device) -> int:
    """`stages`, or as many pipeline stages as fit the shared memory of the device, at least one.

    A loop of n stages has the tiles of n − 1 iterations in shared memory. On Hopper it may have
    those of n; all tiles that were chosen for it fit.
    """
    memory = shared_memory(device) - _BESIDE_STAGES
    return max(1, min(stages, 1 + memory // stage_bytes))


def overlap_launch(overlap: bool) -> dict[str, bool]:
    """Launch options by whether a kernel may start before the previous launch has ended."""
    return {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}


@triton.constexpr_function
def sums_apart():
    """Whether two `tl.dot` of an iteration must not add to the same sum, one after the other.

    Compiled for Blackwell (sm_100, sm_103), sums that start from 0 would be wrong from tiles of 64
    rows on: Triton 3.6 to 3.8 lose what the first of them has added (triton-lang/triton#10821,
    mended in 3.9). Other GPUs keep one sum, which takes fewer registers.
    """
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch >= 100


def padded(d: int) -> int:
    """The power of two that a head is padded to, at least 16: the least that `tl.dot` takes."""
    return max(16, int(triton.next_power_of_2(d)))


def arithmetic(dtype: torch.dtype, d_qk: int, d_hv: int) -> dict[str, Any]:
    """The dtype and precision of the matrix products' inputs. Sums are always float32.

    float16 has the digits of TF32 but not its range: 1/denominator and C can overflow it. So
    float16 is widened to float32 and multiplied as TF32. float32 inputs are multiplied exactly.
    """
    if _is_fast(dtype, d_qk, d_hv):
        return {"OPERAND": tl.bfloat16, "PRECISION": "tf32"}
    return {"OPERAND": tl.float32, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}


def state_dtype(dtype: torch.dtype, d_qk: int, d_hv: int) -> torch.dtype:
    """The dtype of the states stored between chunks: the one that the products take."""
    return torch.bfloat16 if _is_fast(dtype, d_qk, d_hv) else torch.float32


def _is_fast(dtype: torch.dtype, d_qk: int, d_hv: int) -> bool:
    """True if the products take bfloat16 tiles as they are in memory.

    With Triton 3.6 on Hopper, dq and dk are wrong that way if their tiles have fewer than 64
    columns, a compiler error (docs/kernels.md). With operands widened to float32 they are right.
    Tested: heads of at least 64 whose size is a multiple of 32.
    """
    return dtype == torch.bfloat16 and all(d >= 64 and d % 32 == 0 for d in (d_qk, d_hv))
