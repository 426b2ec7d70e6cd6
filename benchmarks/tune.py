"""Searches for the fastest launch parameters of the Triton kernels on this GPU.

Each kernel runs with every candidate tile. Candidates are compiled and checked in parallel
processes; those with correct results are timed one after another. The fastest are printed. Enter
them by hand in `mlstm/triton/launch_params.py` (the cell) or `generate/kernels/` (the products).

Kernels: those of the chunkwise cell, timed as part of the whole cell (states and h forward, the
others forward + backward); `step`, the single step; `replay`, the same by replay decoding; `pass`,
a pass that verifies drafts; `products`, the matrix products of decoding.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, product, starmap
from typing import Annotated, Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from options import chosen, numbers
from processes import Call, Json
from replay_cells import ReplayCell
from xlstm7b.bench.kernels import (
    STATES_IN_TURN,
    check_kernels,
    our_step,
    time_sequence,
    time_steps,
)
from xlstm7b.bench.measure import capture, find_peaks, measure
from xlstm7b.bench.results import Results, Shape
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, listed, option
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_dtype
from xlstm7b.generate.drafts import MAX_DRAFT
from xlstm7b.generate.kernels import MAX_ROWS
from xlstm7b.generate.kernels.few_rows import RowsTile, multiply_rows
from xlstm7b.generate.kernels.integers import (
    MAX_BATCH,
    IntegersTile,
    integers_kernel,
    multiply_integers,
)
from xlstm7b.generate.kernels.one_row import RowTile, multiply_row
from xlstm7b.generate.kernels.quantized import CodesTile, codes_kernel, multiply_codes
from xlstm7b.mlstm.triton import launch_params, sequence, step
from xlstm7b.quantize.config import Quantization, Scheme
from xlstm7b.quantize.gpu import codes_in_word, prepare, words_in_block
from xlstm7b.quantize.weight import QuantizedWeight

CELL_KERNELS = ("states", "state_gradients", "h", "dv", "dq", "dk")
KERNELS = (*CELL_KERNELS, "step", "replay", "pass", "products")
_CELL_TOLERANCE, _PRODUCT_TOLERANCE = 5e-3, 1e-2
_BYTES_IN_TURN = 1 << 29  # ten times the L2 cache of an H200
_Job = TypeVar("_Job")

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def tune(
    kernels: Annotated[str, option("Kernels to tune.")] = ",".join(KERNELS),
    size: Annotated[str, option("Model size whose shapes are measured.")] = "7b",
    batch: Annotated[int, option("Sequences in a batch, for the chunkwise cell.")] = 8,
    length: Annotated[int, option("Tokens of each sequence, for the chunkwise cell.")] = 8192,
    chunks: Annotated[str, option("Chunk sizes of the chunkwise cell.")] = "64,128,256",
    batches: Annotated[str, option("Batch sizes of steps, passes and products.")] = "1,8,64",
    state_dtype: Annotated[
        str, option("Dtype of the states in replay and pass: float32 or bfloat16.")
    ] = "float32",
    quantize: Annotated[
        str | None, option("Quantise the weights of the products: int8, fp8 or int4.", default="no")
    ] = None,
    processes: Annotated[int, option("Processes that compile kernels.")] = 14,
    show: Annotated[int, option("Number of fastest candidates to print.")] = 4,
    json: Json = None,
    call: Call = None,
) -> None:
    """Search for the fastest launch parameters of the Triton kernels on this GPU."""
    wanted = chosen("kernel", listed(kernels), KERNELS)
    ModelConfig.named(size)
    to_dtype(state_dtype, ("float32", "bfloat16"))
    rows, chunk_sizes = numbers("batches", batches), numbers("chunks", chunks)
    if min(batch, length, processes, show) < 1:
        raise ValueError("--batch, --length, --processes and --show must be at least 1")
    if not torch.cuda.is_available():
        raise ValueError("tuning needs a CUDA GPU")
    tuner = Tuner(Results("tune", "cuda", file=json, call=call), size, processes, show)
    for chunk, kernel in product(chunk_sizes, CELL_KERNELS):
        if kernel in wanted:
            tuner.cell(kernel, chunk, batch, length)
    for count in rows:
        if "step" in wanted:
            tuner.step(count)
        if "replay" in wanted:
            tuner.replay(ReplayJob(size, state_dtype, count))
        if "pass" in wanted and pass_positions(count) > 1:
            tuner.replay(ReplayJob(size, state_dtype, count, pass_positions(count)))
    if "products" in wanted:
        for count in rows:
            tuner.products(count, quantize)


@dataclass(frozen=True)
class Tuner:
    """Checks and times the candidates of each kernel, and adds the fastest to the results."""

    results: Results
    size: str
    processes: int
    show: int

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.named(self.size)

    def cell(self, kernel: str, chunk: int, batch: int, length: int) -> None:
        tiles = cell_tiles(self.config, kernel, chunk)
        jobs = [CellJob(self.size, kernel, chunk, tile) for tile in tiles]
        work = "forward" if kernel in ("states", "h") else "forward + backward"
        times = {}
        for job in self._right(jobs, cell_error, _CELL_TOLERANCE):
            with job.applied():
                times[job.tile] = time_sequence(batch, length, work, self.config)
        shape: Shape = {"kernel": kernel, "chunk": chunk, "batch": batch, "length": length}
        self._add_fastest(work, shape, times)

    def step(self, batch: int) -> None:
        times = {}
        for tile in step_tiles(self.config):
            with patch.object(step, "step_tile", lambda *_, tile=tile: tile):
                times[tile] = time_steps(our_step(batch, self.config))
        self._add_fastest("step", {"batch": batch}, times)

    def replay(self, case: "ReplayJob") -> None:
        # A pass with three stages would meet the first compiler error of docs/kernels.md.
        tiles = replay_tiles(self.config, (1, 2) if case.positions else (1, 2, 3))
        jobs = [case._replace(tile=tile) for tile in tiles]
        right = self._right(jobs, replay_error, _CELL_TOLERANCE)
        cell, times = case.cell(case.batch, STATES_IN_TURN), {}
        for job in right:
            assert job.tile is not None
            times[job.tile] = time_steps(partial(cell.run, tile=job.tile))
        shape: dict[str, int | str] = {"batch": case.batch, "states": case.state_dtype}
        if case.positions:
            shape["tokens"] = case.positions
        self._add_fastest("pass" if case.positions else "replay", shape, times)

    def products(self, batch: int, quantize: str | None) -> None:
        bandwidth = find_peaks("cuda", torch.bfloat16)[1]
        all_products = products(self.config)
        schemes: dict[Product, Scheme | None] = dict.fromkeys(all_products)
        if quantize:
            quantization = Quantization.named(quantize)
            schemes = dict.fromkeys(all_products, quantization.blocks)
            schemes[all_products[-1]] = quantization.head
        jobs = [
            ProductJob(each, batch, tile, scheme)
            for each, scheme in schemes.items()
            for tile in tiles_of(each, batch, scheme)
        ]
        right = self._right(jobs, product_error, _PRODUCT_TOLERANCE)
        for each, scheme in schemes.items():
            x, W, norm = _product_inputs(each, batch)
            residual = x.new_zeros(batch, each.rows) if each.residual else None
            itemsize = scheme.bytes_per_weight if scheme else 2
            limit = itemsize * each.rows * each.columns / bandwidth
            shape: Shape = {"product": each.name, "batch": batch, "weights": quantize or "bfloat16"}
            self._add_fastest("product", shape, {"F.linear": _time_chain(partial(F.linear, x), W)})
            weight = _weight(W, scheme)
            times = {
                job.tile: _time_chain(partial(_multiply, job, x, norm, residual), weight)
                for job in right
                if job.product == each
            }
            self._add_fastest("product", shape, times, limit)

    def _right(
        self, jobs: Sequence[_Job], error: Callable[[_Job], float], tolerance: float
    ) -> list[_Job]:
        """The jobs that run and whose error is within the tolerance, checked in other processes.

        Compiled kernels stay in Triton's cache. A kernel that compiles may give wrong results.
        """
        with multiprocessing.get_context("spawn").Pool(self.processes) as pool:
            errors = pool.map(error, jobs, chunksize=4)
        right = [job for job, wrong in zip(jobs, errors, strict=True) if wrong < tolerance]
        failed = errors.count(float("inf"))
        print(f"candidates: {len(jobs)}, correct: {len(right)}, do not run: {failed}", flush=True)
        return right

    def _add_fastest(
        self,
        what: str,
        shape: Shape,
        times: Mapping[Any, float],
        limit: float | None = None,
    ) -> None:
        for tile in sorted(times, key=times.__getitem__)[: self.show]:
            case = {"model": self.size, **shape, "tile": str(tile)}
            microseconds = None if limit is None else 1e6 * limit
            self.results.add(what, case, 1e6 * times[tile], "µs", limit=microseconds)


# The cell


class CellJob(NamedTuple):
    size: str
    kernel: str
    chunk: int
    tile: launch_params.Tile

    def applied(self) -> AbstractContextManager[Any]:
        """The cell's launch parameters, with this tile and chunk."""
        config = ModelConfig.named(self.size)
        usual = launch_params.plan(config.d_qk, config.d_hv, torch.bfloat16)
        changed = replace(usual, chunk=self.chunk, **{self.kernel: self.tile})
        return patch.object(sequence, "plan", lambda *_: changed)


def cell_tiles(config: ModelConfig, kernel: str, chunk: int) -> Iterator[launch_params.Tile]:
    """All tiles that are worth compiling. Some do not fit the GPU: they fail and are left out."""
    of_states = kernel.startswith("state")
    blocks = product((64, 128), (32, 64), (128, 256))
    if of_states:
        blocks = product((32, 64, 128), (64, 128), (64, 128, 256))
    inner, outer = launch_params.padded(config.d_qk), launch_params.padded(config.d_hv)
    if kernel in ("dq", "dk"):
        inner, outer = outer, inner
    for (t, d_in, d_out), warps, stages in product(blocks, (4, 8), (2, 3, 4)):
        kept = (d_in if of_states else t) * d_out
        is_sensible = 64 * 64 * (warps // 4) <= kept <= 64 * 256 * (warps // 4)
        if is_sensible and t <= chunk and d_in <= inner and d_out <= outer:
            yield launch_params.Tile(t, d_in, d_out, warps, stages)


def cell_error(job: CellJob) -> float:
    """The largest relative error of the whole cell against float64, ∞ if it does not run."""
    try:
        with job.applied():
            # Twice, to find races. Triton uses the same kernels for these and larger lengths.
            errors = [check_kernels(ModelConfig.named(job.size), 2, 2048) for _ in range(2)]
        return max(max(error.values()) for error in errors)
    except Exception:  # too much shared memory, or the compiler gives up
        return float("inf")


class ReplayJob(NamedTuple):
    size: str
    state_dtype: str
    batch: int
    positions: int = 0  # tokens of a pass; 0: a step
    tile: launch_params.Tile | None = None

    def cell(self, batch: int, layers: int) -> ReplayCell:
        return ReplayCell(
            batch,
            ModelConfig.named(self.size),
            positions=self.positions,
            layers=layers,
            state_dtype=to_dtype(self.state_dtype),
        )


def pass_positions(batch: int) -> int:
    """Tokens of a row in the largest pass of this batch."""
    return min(MAX_DRAFT + 1, MAX_ROWS // batch)


def replay_error(job: ReplayJob) -> float:
    """The largest relative error of h and the state against float64, ∞ if it does not run."""
    assert job.tile is not None
    try:
        return job.cell(16, 1).error(job.tile)  # enough rows that some are folded
    except Exception:  # too much shared memory, or the compiler gives up
        return float("inf")


def replay_tiles(config: ModelConfig, stages: Sequence[int]) -> Iterator[launch_params.Tile]:
    """Tiles of a step or pass by replay, each with several limits of its registers.

    With fewer registers, more programs fit on a multiprocessor; with too few, they are spilled.
    """
    limits = {2: (None, 168, 224), 4: (None, 128, 168), 8: (None, 96, 128)}
    for tile in step_tiles(config):
        if tile.d_out >= 32:
            for registers, count in product(limits[tile.warps], stages):
                yield replace(tile, registers=registers, stages=count)


def step_tiles(config: ModelConfig) -> Iterator[launch_params.Tile]:
    for d_in, d_out, warps in product((32, 64, 128, 256), (16, 32, 64, 128), (2, 4, 8)):
        if d_in <= launch_params.padded(config.d_qk) and 8 <= d_in * d_out / (32 * warps) <= 64:
            yield launch_params.Tile(1, d_in, d_out, warps, 1)


# Products of few rows


class Product(NamedTuple):
    """A matrix product: weights [rows, columns], and the operations fused with it."""

    name: str
    rows: int
    columns: int
    swiglu: bool = False
    norm: bool = False
    residual: bool = False


class ProductJob(NamedTuple):
    product: Product
    batch: int
    tile: RowTile | RowsTile | CodesTile | IntegersTile
    scheme: Scheme | None = None  # of the weights


def products(config: ModelConfig) -> list[Product]:
    d, up = config.embedding_dim, config.ffn_dim
    return [
        Product("q, k, v, gate", 2 * (config.qk_dim + config.v_dim), d, norm=True),
        Product("out", d, config.v_dim, residual=True),
        Product("up", 2 * up, d, swiglu=True, norm=True),
        Product("down", d, up, residual=True),
        Product("head", config.vocab_size, d, norm=True),
    ]


def tiles_of(
    each: Product, batch: int, scheme: Scheme | None
) -> Iterator[RowTile | RowsTile | CodesTile | IntegersTile]:
    """All tiles that are worth compiling."""
    if scheme is None:
        return product_tiles(batch)
    if scheme.name == "int4" and batch == 1:
        return int4_tiles(each.columns, scheme)
    if scheme.name == "int8" and batch == 1:
        return starmap(IntegersTile, _INT8)
    if scheme.name == "int4" and batch <= MAX_BATCH:
        return chain(int4_rows_tiles(), codes_tiles(batch))
    return codes_tiles(batch)


def product_tiles(batch: int) -> Iterator[RowTile | RowsTile]:
    """Tiles for weights in bfloat16: 16 to 64 weights for each thread at a time."""
    if batch == 1:
        for rows, columns, warps, programs in product(
            (1, 2, 4, 8), (1024, 2048, 4096), (4, 8, 16), (1, 2, 3, 4, 6, 8)
        ):
            threads = 32 * warps
            if 16 <= rows * columns / threads <= 64 and 256 <= threads * programs <= 1024:
                yield RowTile(rows, columns, warps, programs)
        return
    blocks: Iterable[tuple[int, int, int]] = product((64, 128), (64, 128), (4, 8))
    if batch <= 16:
        blocks = product((16, 32), (128, 256), (1, 2, 4))
    for (rows, columns, warps), stages in product(blocks, (3, 4, 5)):
        if rows * max(batch, 16) >= 16 * 16 * warps:
            yield RowsTile(rows, columns, warps, stages)


# What the kernels below are tuned over: tile by tile what was fast on an H200, and its neighbours.
# fmt: off
_CODES = (  # rows, split and registers. Fewer registers let more programs run; too few are spilled
    (16, 4, None), (16, 8, None), (16, 16, None),
    (32, 4, None), (32, 4, 168), (32, 8, None), (32, 8, 128),
)
_INT4 = (  # rows, split, ahead, registers
    (16, 4, 1, 80), (16, 4, 2, 80), (16, 4, 4, 128), (16, 8, 1, 64), (16, 8, 2, 80),
    (16, 8, 2, 128), (16, 8, 3, 128), (16, 16, 1, 64), (32, 4, 1, 128), (32, 8, 1, 128),
    (32, 8, 2, 128),
)
_INT4_ROWS = (  # rows, split, registers
    (16, 4, 80), (16, 4, 96), (16, 4, 128), (16, 8, 80), (16, 8, 128), (32, 4, 128), (32, 4, 168),
    (32, 8, 128),
)
_INT8 = (  # rows, split, ahead, registers, prefetch
    (16, 4, 1, 80, 0), (16, 4, 1, 96, 0), (16, 4, 2, 128, 0), (16, 4, 2, 128, 4096),
    (16, 4, 4, 128, 0), (16, 8, 1, 80, 0), (16, 8, 2, 80, 0), (16, 8, 2, 80, 4096),
    (16, 8, 2, 128, 0), (16, 8, 4, 128, 0), (16, 16, 1, 80, 0), (16, 16, 2, 80, 0),
    (32, 4, 1, 96, 0), (32, 4, 2, 128, 0), (32, 8, 1, 128, 0),
)
# fmt: on


def codes_tiles(batch: int) -> Iterator[CodesTile]:
    """Tiles for quantised weights."""
    if batch > 16:
        for (rows, warps), programs in product(((64, 4), (128, 8)), (1, 2, 4, 8)):
            yield CodesTile(rows, warps, 3, programs=programs)
        return
    for rows, split, registers in _CODES:
        yield CodesTile(rows, split, 3, 512, split, registers)


def int4_tiles(columns: int, scheme: Scheme) -> Iterator[IntegersTile]:
    """Tiles for one row and int4 weights."""
    blocks = -(-columns // (codes_in_word(scheme) * words_in_block(scheme)))
    tiles = starmap(IntegersTile, _INT4)
    return (tile for tile in tiles if tile.split * (tile.ahead - 1) < blocks)


def int4_rows_tiles() -> Iterator[IntegersTile]:
    """Tiles for 2 to 8 rows and int4 weights: with and without loading codes into L2 first."""
    for (rows, split, registers), prefetch in product(_INT4_ROWS, (0, 2048)):
        yield IntegersTile(rows, split, 1, registers, prefetch)


def product_error(job: ProductJob) -> float:
    """The relative error against PyTorch in float32, ∞ if it does not run or spills registers."""
    each = job.product
    try:
        x, W, norm = _product_inputs(each, job.batch)
        read = F.rms_norm(x, x.shape[-1:], norm, 1e-6) if each.norm else x
        weight = _weight(W, job.scheme)
        if isinstance(weight, QuantizedWeight):
            W = weight.dequantize(torch.float32)
        want = read.float() @ W.float().mT
        if each.swiglu:
            gate, up = want.chunk(2, -1)
            want = F.silu(gate) * up
        residual = torch.zeros_like(want, dtype=x.dtype) if each.residual else None
        kernels = codes_kernel, integers_kernel
        for kernel in kernels:
            kernel.device_caches.clear()
        got = _multiply(job, x, norm, residual, weight)
        if any(form.n_spills for kernel in kernels for form in _compiled(kernel)):
            return float("inf")
        return float((got.float() - want).norm() / want.norm())
    except Exception:  # too much shared memory, or the compiler gives up
        return float("inf")


def _compiled(kernel: Any) -> list[Any]:
    """What Triton has compiled of a kernel, for all devices."""
    return [each for caches in kernel.device_caches.values() for each in caches[0].values()]


@cache
def _product_inputs(each: Product, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(batch, each.columns, device="cuda").bfloat16()
    W = torch.randn(each.rows, each.columns, device="cuda").bfloat16() / each.columns**0.5
    return x, W, torch.rand(each.columns, device="cuda").bfloat16()


def _weight(W: Tensor, scheme: Scheme | None) -> Tensor | QuantizedWeight:
    return W if scheme is None else prepare(QuantizedWeight.quantize(W, scheme))


def _multiply(job: ProductJob, x: Tensor, norm: Tensor, residual: Tensor | None, W: Any) -> Tensor:
    multiply: Any = multiply_rows
    if isinstance(job.tile, IntegersTile):
        multiply = multiply_integers
    elif isinstance(job.tile, CodesTile):
        multiply = multiply_codes
    elif isinstance(job.tile, RowTile):
        multiply = multiply_row
    y: Tensor = multiply(
        x,
        W,
        norm=norm if job.product.norm else None,
        eps=1e-6,
        swiglu=job.product.swiglu,
        residual=residual,
        tile=job.tile,
    )[0]
    return y


def _time_chain(multiply: Callable[[Any], object], W: Tensor | QuantizedWeight) -> float:
    """One product in a CUDA graph that goes over more weights than the L2 cache holds."""
    copies = max(8, _BYTES_IN_TURN // W.nbytes)
    chain = [
        replace(W, data=W.data.clone()) if isinstance(W, QuantizedWeight) else W.clone()
        for _ in range(copies)
    ]
    replay = capture(lambda: [multiply(each) for each in chain])
    return measure(replay, "cuda", gpu_milliseconds=20) / copies


if __name__ == "__main__":
    main(app)
