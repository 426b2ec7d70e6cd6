"""Two compiler errors of Triton that the kernels avoid. Prints whether small kernels show them.

    python tests/triton_faults.py

Needs a Hopper GPU. docs/kernels.md says what the kernels do about them.
"""

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64 * 1024


@triton.jit
def register_use_kernel(
    x, w, vector, y, z, out, sums,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """out = x·w + Σ_tiles (x·yᵀ / 100)·z and, in registers, sums = x·vector, for 64 rows."""
    t, d, c = tl.program_id(0) * 64 + tl.arange(0, 64), tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    acc, total = tl.zeros([64, COLUMNS], tl.float32), tl.zeros([64], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        x_t = tl.load(x + t[:, None] * WIDTH + start + d[None, :])
        acc = tl.dot(x_t, tl.load(w + (start + d)[:, None] * COLUMNS + c[None, :]), acc)
        if IN_REGISTERS:
            total += tl.sum(x_t.to(tl.float32) * tl.load(vector + start + d)[None, :], 1)
    for tile in range(TILES):
        r = tile * 64 + tl.arange(0, 64)
        scores = tl.zeros([64, 64], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            x_t = tl.load(x + t[:, None] * WIDTH + start + d[None, :])
            y_r = tl.load(y + r[None, :] * WIDTH + (start + d)[:, None])
            scores = tl.dot(x_t, y_r, scores)
        z_r = tl.load(z + r[:, None] * COLUMNS + c[None, :])
        acc = tl.dot((0.01 * scores).to(tl.bfloat16), z_r, acc)
    tl.store(out + t[:, None] * COLUMNS + c[None, :], acc)
    tl.store(sums + t, total)


@triton.jit
def narrow_tile_kernel(
    x, w, y, z, out, T, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr
):
    """out = x·wᵀ + tril(x·yᵀ / 100)·z for 64 rows. w is [COLUMNS, WIDTH], so it is transposed."""
    t, d, c = tl.program_id(0) * 64 + tl.arange(0, 64), tl.arange(0, 64), tl.arange(0, PADDED)
    in_t, in_d, in_c = t < T, d < WIDTH, c < COLUMNS
    x_t = tl.load(x + t[:, None] * WIDTH + d[None, :], in_t[:, None] & in_d[None, :], 0.0)
    w_c = tl.load(w + d[:, None] + c[None, :] * WIDTH, in_d[:, None] & in_c[None, :], 0.0)
    acc = tl.dot(x_t, w_c)
    for tile in range(0, tl.program_id(0) + 1):
        r = tile * 64 + tl.arange(0, 64)
        y_r = tl.load(y + r[None, :] * WIDTH + d[:, None], in_d[:, None] & (r < T)[None, :], 0.0)
        scores = tl.where(r[None, :] <= t[:, None], tl.dot(x_t, y_r), 0.0)
        z_r = tl.load(z + r[:, None] * COLUMNS + c[None, :], (r < T)[:, None] & in_c[None, :], 0.0)
        acc = tl.dot((0.01 * scores).to(tl.bfloat16), z_r, acc)
    tl.store(out + t[:, None] * COLUMNS + c[None, :], acc, in_t[:, None] & in_c[None, :])


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def wrong_rows(got: Tensor, want: Tensor) -> int:
    return int(((got - want).norm(dim=1) > 0.05 * want.norm(dim=1)).sum())


def register_use(stages: int, in_registers: bool, block: int, warps: int) -> int:
    width, columns, tiles = 256, 256, 4
    x, w, y, z = draw(ROWS, width), draw(width, columns), draw(256, width), draw(256, columns)
    vector = torch.randn(width, device="cuda")
    want = x.float() @ w.float() + (0.01 * x.float() @ y.float().T).bfloat16().float() @ z.float()
    out, sums = torch.empty(ROWS, columns, device="cuda"), torch.empty(ROWS, device="cuda")
    register_use_kernel[(ROWS // 64,)](
        x, w, vector, y, z, out, sums, WIDTH=width, COLUMNS=columns, TILES=tiles, BLOCK=block,
        IN_REGISTERS=in_registers, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return wrong_rows(out, want)


def narrow_tile(width: int, columns: int, padded: int, stages: int) -> int:
    T = 515
    x, w, y, z = draw(T, width), draw(columns, width), draw(T, width), draw(T, columns)
    scores = (0.01 * (x.float() @ y.float().T).tril()).bfloat16().float()
    want = x.float() @ w.float().T + scores @ z.float()
    out = torch.empty(T, columns, device="cuda")
    narrow_tile_kernel[(triton.cdiv(T, 64),)](
        x, w, y, z, out, T, WIDTH=width, COLUMNS=columns, PADDED=padded, num_warps=4,
        num_stages=stages,
    )  # fmt: skip
    return wrong_rows(out, want)


def main() -> None:
    print(f"Triton {triton.__version__}, {torch.cuda.get_device_name()}")
    torch.manual_seed(0)
    print(f"\na tile in a pipelined product and in registers: wrong rows of {ROWS}, three runs")
    for in_registers, block, warps in itertools.product((False, True), (32, 64), (4, 8)):
        for stages in (2, 3, 4):
            counts = [register_use(stages, in_registers, block, warps) for _ in range(3)]
            about = f"in registers too: {in_registers}, tiles of {block}, {warps} warps"
            print(f"  {about}, {stages} stages: {counts}")
    print("\na transposed operand that is narrower than 64 columns: wrong rows of 515")
    for width, columns, padded in ((33, 17, 32), (40, 24, 32), (40, 32, 32), (40, 24, 64)):
        counts = [narrow_tile(width, columns, padded, stages) for stages in (1, 4)]
        print(f"  {width} to {columns} in a tile of {padded}: {counts} with 1 and 4 stages")


if __name__ == "__main__":
    main()
