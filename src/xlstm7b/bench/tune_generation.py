"""`python -m xlstm7b.bench.tune_generation`: launch parameters of the products with few rows.

Each product of the 7B runs as a chain of launches in a CUDA graph, over more weights than the cache
holds. Candidates are compiled in processes of their own, compared with PyTorch, timed if they are
right, and printed beside the stock product and the time that reading the weights takes. The fastest
go, by hand, into `generate/triton/row.py` and `rows.py`.
"""

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate.triton.row import RowTile, multiply_row
from xlstm7b.generate.triton.rows import RowsTile, multiply_rows

_BYTES_IN_TURN = 1 << 29  # ten times an H200's second-level cache
_TOLERANCE = 1e-2


class Work(NamedTuple):
    """One product: weights [rows, columns], and what rides along."""

    name: str
    rows: int
    columns: int
    swiglu: bool = False
    norm: bool = False
    residual: bool = False

    def weights(self) -> int:
        return self.rows * self.columns


def products(config: ModelConfig) -> list[Work]:
    d, up = config.embedding_dim, config.ffn_dim
    return [
        Work("q, k, v, gate", 2 * (config.qk_dim + config.v_dim), d, norm=True),
        Work("out", d, config.v_dim, residual=True),
        Work("up", 2 * up, d, swiglu=True, norm=True),
        Work("down", d, up, residual=True),
        Work("head", config.vocab_size, d, norm=True),
    ]


def candidates(batch: int) -> Iterator[RowsTile | RowTile]:
    """All that are worth compiling: 16 to 64 elements of the weights a thread at a time."""
    if batch == 1:
        for rows, columns, warps, programs in product(
            (1, 2, 4, 8), (1024, 2048, 4096), (4, 8, 16), (1, 2, 3, 4, 6, 8)
        ):
            threads = 32 * warps
            if 16 <= rows * columns / threads <= 64 and 256 <= threads * programs <= 1024:
                yield RowTile(rows, columns, warps, programs)
        return
    blocks = product((16, 32), (128, 256), (1, 2, 4)) if batch <= 16 else product(
        (64, 128), (64, 128), (4, 8)
    )  # fmt: skip
    for (rows, columns, warps), stages in product(blocks, (3, 4, 5)):
        if rows * max(batch, 16) >= 16 * 16 * warps:
            yield RowsTile(rows, columns, warps, stages)


@cache
def _tensors(work: Work, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(batch, work.columns, device="cuda").bfloat16()
    W = torch.randn(work.rows, work.columns, device="cuda").bfloat16() / work.columns**0.5
    return x, W, torch.rand(work.columns, device="cuda").bfloat16()


def launch(work: Work, x: Tensor, W: Tensor, norm: Tensor, tile: RowsTile | RowTile) -> Tensor:
    out = work.rows // 2 if work.swiglu else work.rows
    residual = x.new_zeros(len(x), out) if work.residual else None
    return _launch_into(work, x, W, norm, residual, tile)


def _launch_into(
    work: Work,
    x: Tensor,
    W: Tensor,
    norm: Tensor,
    residual: Tensor | None,
    tile: RowsTile | RowTile,
) -> Tensor:
    if isinstance(tile, RowTile):
        return multiply_row(
            x, W, norm=norm if work.norm else None, eps=1e-6, swiglu=work.swiglu,
            residual=residual, tile=tile,
        )[0]  # fmt: skip
    return multiply_rows(x, W, swiglu=work.swiglu, residual=residual, tile=tile)[0]


def stock(work: Work, x: Tensor, W: Tensor, norm: Tensor) -> Tensor:
    if work.norm and len(x) == 1:
        x = F.rms_norm(x, x.shape[-1:], norm, 1e-6)
    y = F.linear(x, W)
    if work.swiglu:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y


def error(job: tuple[Work, int, RowsTile | RowTile]) -> float:
    """Relative error in a worker; the compiled binary is left in Triton's cache. ∞: it fails."""
    work, batch, tile = job
    try:
        x, W, norm = _tensors(work, batch)
        want = stock(work, x.float(), W.float(), norm.float())
        return float((launch(work, x, W, norm, tile).float() - want).norm() / want.norm())
    except Exception:  # too much shared memory, or the compiler gives up: no candidate
        return float("inf")


def microseconds(call: Callable[[Tensor], object], work: Work) -> float:
    """One product in a chain, the median of graph replays."""
    copies = max(8, _BYTES_IN_TURN // (2 * work.weights()))
    chain = [torch.randn(work.rows, work.columns, device="cuda").bfloat16() for _ in range(copies)]
    call(chain[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for W in chain:
            call(W)
    time: float = triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median")
    return 1000 * time / copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="7b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--terabytes-per-second", type=float, default=4.27)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--show", type=int, default=3, help="how many of the fastest to print")
    arguments = parser.parse_args()
    works = products(ModelConfig.named(arguments.size))
    for batch in arguments.batches:
        jobs = [(work, batch, tile) for work in works for tile in candidates(batch)]
        with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
            errors = pool.map(error, jobs, chunksize=4)
        right = [job for job, wrong in zip(jobs, errors, strict=True) if wrong < _TOLERANCE]
        print(f"batch {batch}: {len(right)} of {len(jobs)} candidates are right", flush=True)
        for work in works:
            x, _, norm = _tensors(work, batch)
            residual = None
            if work.residual:
                residual = torch.zeros(batch, work.rows, device="cuda", dtype=x.dtype)
            floor = 2e-6 * work.weights() / arguments.terabytes_per_second
            plain = microseconds(lambda W: F.linear(x, W), work)  # noqa: B023
            timed = sorted(
                (microseconds(partial(_chained, work, x, norm, residual, tile), work), tile)
                for of, _, tile in right
                if of is work
            )
            print(f"  {work.name}: floor {floor:.1f} µs, F.linear {plain:.1f} µs", flush=True)
            for time, tile in timed[: arguments.show]:
                print(f"    {time:7.1f} µs  {tile}", flush=True)


def _chained(
    work: Work,
    x: Tensor,
    norm: Tensor,
    residual: Tensor | None,
    tile: RowsTile | RowTile,
    W: Tensor,
) -> Tensor:
    return _launch_into(work, x, W, norm, residual, tile)


if __name__ == "__main__":
    main()
