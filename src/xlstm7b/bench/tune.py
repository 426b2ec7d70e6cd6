"""`python -m xlstm7b.bench.tune`: measures launch parameters of the Triton kernels on this GPU.

Every kernel of the chunkwise form runs alone under each candidate of `candidates()`, is compared
with float32, and timed if it is right; compilation is spread over processes, timing is not. The
fastest go, by hand, into `mlstm/triton/launch.py`.
"""

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from xlstm7b.bench.kernels import STATES_IN_TURN, step_milliseconds
from xlstm7b.mlstm import MLSTMState
from xlstm7b.mlstm.triton import sequence
from xlstm7b.mlstm.triton.launch import Tile, padded
from xlstm7b.mlstm.triton.step import launch_step

_PLAIN = Tile(32, 32, 64, 4, 2)
_TOLERANCE = 5e-3
KERNELS = ("states", "state_gradients", "h", "dv", "dq", "dk")


class Shape(NamedTuple):
    """What is measured: bf16 inputs at the gates of a trained model."""

    batch: int
    length: int
    heads: int
    d_qk: int
    d_hv: int


class Task(NamedTuple):
    """One kernel under one set of parameters."""

    kernel: str
    chunk: int
    tile: Tile


def candidates(shape: Shape, chunks: list[int], kernels: list[str]) -> Iterator[Task]:
    """All that are worth compiling; those that don't fit the chip fail and are left out."""
    for chunk, kernel in product(chunks, kernels):
        if kernel.startswith("state"):
            blocks = product((32, 64, 128), (64, 128), (64, 128, 256))
        else:
            blocks = product((64, 128), (32, 64), (128, 256))
        for (t, d_in, d_out), warps, stages in product(blocks, (4, 8), (2, 3, 4)):
            inner, outer = shape.d_qk, shape.d_hv
            if kernel in ("dq", "dk"):
                inner, outer = outer, inner
            kept = (d_in if kernel.startswith("state") else t) * d_out
            too_small = kept < 64 * 64 * (warps // 4)
            too_large = kept > 64 * 256 * (warps // 4)
            fits = t <= chunk and d_in <= padded(inner) and d_out <= padded(outer)
            if fits and not (too_small or too_large):
                yield Task(kernel, chunk, Tile(t, d_in, d_out, warps, stages))


@cache
def _launches(
    shape: Shape, chunk: int, dtype: torch.dtype
) -> dict[str, Callable[[Tile], list[Tensor]]]:
    """Each kernel on the same inputs, as a function of its tile."""
    batch, length, heads, d_qk, d_hv = shape
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    q, k = (normal(batch, length, heads, d_qk).bfloat16().to(dtype) for _ in range(2))
    v, dh = (normal(batch, length, heads, d_hv).bfloat16().to(dtype) for _ in range(2))
    i, f = normal(batch, length, heads) - 3, normal(batch, length, heads) + 4
    first = normal(batch, heads, d_qk, d_hv), normal(batch, heads, d_qk)
    weights, _ = sequence._weights(i, f, torch.zeros_like(first[1][..., 0]), None, chunk)
    weight = weights.to_state
    states, _ = sequence._scan(k, v, weight, weight, weights.decay, first, _PLAIN, chunk)
    inverse, slope = torch.rand_like(weights.b), normal(*weights.b.shape)

    def scan(x: Tensor, y: Tensor, tile: Tile, *, reverse: bool) -> list[Tensor]:
        borders, last = sequence._scan(
            x, y, weight, weights.from_state, weights.decay, first, tile, chunk, reverse=reverse
        )
        return [*borders, *last]

    def tiles(x: Tensor, other: Tensor, z: Tensor, own: Tensor, tile: Tile, **kind: bool) -> Any:
        out, results = sequence._tiles(
            x, other, z, states, weights, i, tile, chunk, d_qk**-0.5, 1e-6,
            row_weight=weights.from_state, vector_weight=weights.from_state,
            inverse=inverse, slope=slope, own=own, **kind,
        )  # fmt: skip
        return [out] if kind == {"query_rows": False, "of_scores": False} else [out, results.sum(0)]

    return {
        "states": lambda tile: scan(k, v, tile, reverse=False),
        "state_gradients": lambda tile: scan(q, dh, tile, reverse=True),
        "h": lambda tile: tiles(q, k, v, q, tile, query_rows=True, of_scores=False),
        "dv": lambda tile: tiles(k, q, dh, v, tile, query_rows=False, of_scores=False),
        "dq": lambda tile: tiles(dh, v, k, q, tile, query_rows=True, of_scores=True),
        "dk": lambda tile: tiles(v, dh, q, k, tile, query_rows=False, of_scores=True),
    }


@cache
def _exact(shape: Shape, chunk: int, kernel: str) -> list[Tensor]:
    return _launches(shape, chunk, torch.float32)[kernel](_PLAIN)


def largest_error(job: tuple[Shape, Task]) -> float:
    """A task's worst relative error against float32, in a worker; 1 if two runs differ, ∞ if none.

    The compiled binary is left in Triton's cache. Not every candidate that compiles is right.
    """
    shape, task = job
    try:
        launch = _launches(shape, task.chunk, torch.bfloat16)[task.kernel]
        got = launch(task.tile)
        if not all(map(torch.equal, got, launch(task.tile))):  # a race
            return 1.0
        pairs = zip(got, _exact(shape, task.chunk, task.kernel), strict=True)
        return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
    except Exception:  # too much shared memory, or the compiler gives up: no candidate
        return float("inf")


def milliseconds(shape: Shape, task: Task) -> float:
    launch = _launches(shape, task.chunk, torch.bfloat16)[task.kernel]
    time: float = triton.testing.do_bench(
        lambda: launch(task.tile), warmup=5, rep=20, return_mode="median"
    )
    return time


def tune_step(shape: Shape, show: int) -> None:
    """The single step with norm and gate, over rotating states in a CUDA graph."""
    heads, d_qk, d_hv = shape.heads, shape.d_qk, shape.d_hv
    for batch in (1, 8, 64):
        q, k, v, gate = (
            torch.randn(batch, heads, d, device="cuda").bfloat16() for d in (d_qk, d_qk, d_hv, d_hv)
        )
        i, f = torch.randn(2, batch, heads, device="cuda")
        weight = torch.ones(heads * d_hv, device="cuda").bfloat16()
        states = [
            MLSTMState.zeros(batch, heads, d_qk, d_hv, device=torch.device("cuda"))
            for _ in range(STATES_IN_TURN)
        ]
        timed = []
        for d_in, d_out, warps in product((32, 64, 128, 256), (16, 32, 64, 128), (2, 4, 8)):
            tile = Tile(1, d_in, d_out, warps, 1)
            if d_in <= padded(d_qk) and 8 <= d_in * d_out / (32 * warps) <= 64:
                launch = partial(_step, q, k, v, i, f, gate, weight, states, tile)
                timed.append((1000 * step_milliseconds(launch), tile))
        for time, tile in sorted(timed)[:show]:
            print(f"step, batch {batch:3} {time:8.2f} µs  {tile}", flush=True)


def _step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, gate: Tensor, weight: Tensor,
    states: list[MLSTMState], tile: Tile, index: int,
) -> Tensor:  # fmt: skip
    return launch_step(q, k, v, i, f, *states[index], gate, weight, 1e-6, 1e-6, tile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("batch", 8),
        ("length", 8192),
        ("heads", 8),
        ("d-qk", 256),
        ("d-hv", 512),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--step", action="store_true", help="measure the single step as well")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--show", type=int, default=4, help="how many of the fastest to print")
    arguments = parser.parse_args()
    shape = Shape(*(getattr(arguments, name) for name in Shape._fields))
    if arguments.step:
        tune_step(shape, arguments.show)
    tasks = list(candidates(shape, arguments.chunks, arguments.kernels))
    # Small enough for every worker, and alike in what Triton specialises on.
    small = shape._replace(batch=2, length=4096)
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        errors = pool.map(largest_error, [(small, task) for task in tasks], chunksize=4)
    right = {task for task, error in zip(tasks, errors, strict=True) if error < _TOLERANCE}
    wrong = [
        (error, task) for task, error in zip(tasks, errors, strict=True) if error >= _TOLERANCE
    ]
    print(f"{shape}: {len(right)} of {len(tasks)} candidates run and are right", flush=True)
    for error, task in wrong:
        if error < float("inf"):
            print(f"wrong by {error:.1e}: {task}", flush=True)
    for chunk, kernel in product(arguments.chunks, arguments.kernels):
        usable = [task for task in right if (task.chunk, task.kernel) == (chunk, kernel)]
        timed = sorted((milliseconds(shape, task), task) for task in usable)
        for time, task in timed[: arguments.show]:
            t = task.tile
            print(
                f"{kernel:16} chunk {chunk:4}  {time:7.3f} ms  "
                f"Tile({t.t}, {t.d_in}, {t.d_out}, {t.warps}, {t.stages})",
                flush=True,
            )


if __name__ == "__main__":
    main()
