"""Launches that overlap: programmatic dependent launch, and weights asked for ahead of time.

Between one product with the weights and the next a GPU runs dry: the last programs finish, the next
launch starts, its first loads are under way. With programmatic dependent launch (Hopper and later)
a kernel's programs start in the free places, ask for their first weights, and only then wait for
what the kernel before them writes. Every kernel here lets its successor start once its own wait is
over, so whatever was written two launches ago can be read before the wait.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Options that let a launch overlap with the one before it, where the GPU can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@triton.jit
def prefetch_rows(W, row, wanted, BYTES: tl.constexpr):
    """Asks for the first BYTES of rows of W, ahead of loads, if `wanted`: one row a thread.

    They come as far as the second-level cache and occupy no register. BYTES is a multiple of 16.
    """
    size = tl.full(row.shape, BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred wanted; setp.ne.s32 wanted, $3, 0; "
        "@wanted cp.async.bulk.prefetch.L2.global [$1], $2; mov.s32 $0, 0; }",
        "=r,l,r,r", [(W + row).to(tl.int64), size, wanted.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
