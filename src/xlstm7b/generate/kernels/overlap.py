"""Programmatic dependent launch: a kernel starts before the previous one has ended.

Between two products the GPU's memory is idle for a moment: the last programs of one launch finish,
the next launch starts, and its first loads take time. On Hopper and later GPUs the next launch's
programs can start as soon as there is room, load their first weights, and only then wait for the
results of the previous launch.

What a kernel may read before it waits: every kernel that starts early allows the next launch to
start only after its own wait. So when a kernel starts, everything but the previous launch has
ended. It may read what was written two or more launches ago, and weights. It must wait before it
reads what the previous launch writes, and before it writes anything.

The one exception is `integers.digits_kernel`. It allows the next launch to start at once, which
only reads weights before it waits, and allows its own next launch to start after that.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xlstm7b.mlstm.triton.launch_params import overlap_launch


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the previous launch has ended: on Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel with OVERLAP, which is False where the GPU cannot do that."""
    return overlap_launch(can_overlap(device))


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Waits until the previous launch has ended. From then on the next one may start.

    Without OVERLAP it does nothing: the previous launch has ended when this one starts.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_rows(W, offset, mask, BYTES: tl.constexpr):
    """Loads BYTES from W + offset into the L2 cache where `mask` is true: one row per thread.

    No register is used, unlike with a load. BYTES must be a multiple of 16.
    """
    size = tl.full(offset.shape, BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred wanted; setp.ne.s32 wanted, $3, 0; "
        "@wanted cp.async.bulk.prefetch.L2.global [$1], $2; mov.s32 $0, 0; }",
        "=r,l,r,r", [(W + offset).to(tl.int64), size, mask.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
