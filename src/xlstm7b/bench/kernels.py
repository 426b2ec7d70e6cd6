"""`python -m xlstm7b.bench.kernels`: the cell's kernels on this GPU, checked, then timed.

A constant number of tokens is read as many short or few long sequences, forward and forward +
backward, in bf16; then single steps over rotating states in a CUDA graph. Beside each time stand
FLOP/s, bytes/s and the share of the floor: what no chunkwise kernel on this chip can be faster than
(`accounting.cell_floor`, over the measured peaks of the chip). `--peers` runs other libraries that
can be imported, each in a process of its own. Needs torch and Triton alone.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from xlstm7b.accounting import cell_floor, state_bytes
from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState, mlstm_sequence, mlstm_step
from xlstm7b.mlstm.chunkwise import chunkwise_sequence
from xlstm7b.mlstm.triton.launch import plan

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
BATCHES = (1, 8, 64)
STATES_IN_TURN = 32  # more than the second-level cache holds, as in a model of 32 blocks
PEERS = ("mlstm_kernels", "fla", "sdpa")


@dataclass(frozen=True)
class Peaks:
    """What the chip was measured to do: a bf16 product, and a copy, read plus written."""

    flops: float
    bytes_per_second: float


@dataclass(frozen=True)
class Result:
    """One timing."""

    name: str  # ours, or the peer's
    work: str  # forward, forward + backward, step
    size: str
    batch: int
    length: int
    milliseconds: float | None  # None: it failed, and `error` says how
    tflops: float | None = None
    gigabytes_per_second: float | None = None
    percent_of_floor: float | None = None
    error: str | None = None


def inputs(batch: int, length: int, config: ModelConfig) -> list[Tensor]:
    """bf16 q, k, v and float32 gates, as a trained model has them."""
    shape = batch, length, config.num_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    q, k, v = (
        normal(*shape, d).bfloat16().requires_grad_()
        for d in (config.d_qk, config.d_qk, config.d_hv)
    )
    return [q, k, v, (normal(*shape) - 6).requires_grad_(), (normal(*shape) + 4).requires_grad_()]


def check(config: ModelConfig) -> dict[str, float]:
    """Relative errors of h and of each gradient against float64, on fresh random inputs."""
    parts = inputs(1, 1000, config)
    weight = torch.randn_like(parts[2])

    def run(form: Callable[..., tuple[Tensor, MLSTMState]], dtype: torch.dtype) -> list[Tensor]:
        leaves = [
            p.detach().to(torch.promote_types(p.dtype, dtype)).requires_grad_() for p in parts
        ]
        batch, _, heads, d_qk = leaves[0].shape
        state = MLSTMState.zeros(
            batch, heads, d_qk, leaves[2].shape[-1], dtype=leaves[3].dtype, device=leaves[0].device
        )
        h, _ = form(*leaves, state=state)
        return [h.detach(), *torch.autograd.grad((h * weight).sum(), leaves)]

    got, want = run(mlstm_sequence, torch.bfloat16), run(chunkwise_sequence, torch.float64)
    names = ("h", "dq", "dk", "dv", "di", "df")
    return {
        name: float((a.double() - b).norm() / b.norm())
        for name, a, b in zip(names, got, want, strict=True)
    }


def sequence_calls(batch: int, length: int, config: ModelConfig) -> dict[str, Callable[[], object]]:
    """Forward as inference runs it, and forward + backward as training does."""
    parts = inputs(batch, length, config)
    dh = torch.randn_like(parts[2])

    def forward() -> object:
        with torch.no_grad():
            return mlstm_sequence(*parts)

    def both() -> object:
        h, _ = mlstm_sequence(*parts)
        return torch.autograd.grad(h, parts, dh)

    return {"forward": forward, "forward + backward": both}


def median_milliseconds(call: Callable[[], object]) -> float:
    time: float = triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median")
    return time


def time_sequences(size: str, tokens: int, lengths: list[int], peaks: Peaks) -> Iterator[Result]:
    config = ModelConfig.named(size)
    heads, d_qk, d_hv = config.num_heads, config.d_qk, config.d_hv
    for length in lengths:
        batch = tokens // length
        chunk = plan(d_qk, d_hv, torch.bfloat16).chunk
        floors = cell_floor(tokens, chunk, heads, d_qk, d_hv, causal=0.5)
        for work, call in sequence_calls(batch, length, config).items():
            directions = ("forward",) if work == "forward" else ("forward", "backward")
            flops = sum(floors[direction]["flops"] for direction in directions)
            moved = sum(floors[direction]["bytes"] for direction in directions)
            time = median_milliseconds(call)
            floor = sum(
                max(floors[d]["flops"] / peaks.flops, floors[d]["bytes"] / peaks.bytes_per_second)
                for d in directions
            )
            yield Result(
                "ours", work, size, batch, length, time, flops / time / 1e9, moved / time / 1e6,
                100e3 * floor / time,
            )  # fmt: skip


def step_milliseconds(step: Callable[[int], object]) -> float:
    """One step's time in a graph of `STATES_IN_TURN`, each on a state of its own."""
    for index in range(STATES_IN_TURN):
        step(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(STATES_IN_TURN):
            step(index)
    return median_milliseconds(graph.replay) / STATES_IN_TURN


def our_step(batch: int, config: ModelConfig) -> Callable[[int], object]:
    """A step with headwise norm and output gate on one of the float32 states, in place."""
    heads, d_qk, d_hv = config.num_heads, config.d_qk, config.d_hv
    device = torch.device("cuda")
    q, k, v, i, f = (part.detach()[:, 0] for part in inputs(batch, 1, config))
    gate = torch.randn_like(v)
    weight = torch.ones(heads * d_hv, device=device, dtype=torch.bfloat16)
    states = [
        MLSTMState.zeros(batch, heads, d_qk, d_hv, device=device) for _ in range(STATES_IN_TURN)
    ]
    return lambda index: mlstm_step(
        q, k, v, i, f, states[index], gate=gate, norm_weight=weight, inplace=True
    )


def time_steps(size: str, batches: list[int], peaks: Peaks) -> Iterator[Result]:
    config = ModelConfig.named(size)
    for batch in batches:
        time = step_milliseconds(our_step(batch, config))
        moved = 2 * batch * state_bytes(config)["total"] / config.num_blocks
        floor = moved / peaks.bytes_per_second
        yield Result(
            "ours", "step", size, batch, 1, time, None, moved / time / 1e6, 100e3 * floor / time
        )


def time_peer(peer: str, result: Result) -> Result:
    """The same work in another library, in a process that may crash."""
    arguments = [result.work, result.size, str(result.batch), str(result.length)]
    done = subprocess.run(
        [sys.executable, "-m", "xlstm7b.bench.kernel_peers", peer, *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    try:
        time, error = float(done.stdout.split()[-1]), None
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        time, error = None, lines[-1][:200]
    return Result(peer, result.work, result.size, result.batch, result.length, time, error=error)


def line(result: Result) -> str:
    shape = f"{result.batch} × {result.length}"
    head = f"{result.size:6}{result.work:20}{shape:>12}  {result.name:14}"
    if result.milliseconds is None:
        return f"{head} failed: {result.error}"
    cells = [f"{result.milliseconds:9.4f} ms"]
    if result.tflops is not None:
        cells.append(f"{result.tflops:7.0f} TFLOP/s")
    if result.gigabytes_per_second is not None:
        cells.append(f"{result.gigabytes_per_second:7.0f} GB/s")
    if result.percent_of_floor is not None:
        cells.append(f"{result.percent_of_floor:5.0f}% of the floor's speed")
    return head + "".join(cells)


def machine() -> dict[str, str]:
    return {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def plot(results: list[Result], path: Path) -> None:
    """Milliseconds over sequence length, one line a library and kind of work."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        if result.work != "step" and result.milliseconds is not None:
            label = f"{result.name}, {result.work}, {result.size}"
            lines.setdefault(label, []).append((result.length, result.milliseconds))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    lengths = sorted({length for points in lines.values() for length, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set(xlabel="sequence length", ylabel="milliseconds", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def run(
    sizes: list[str], tokens: int, lengths: list[int], batches: list[int], peaks: Peaks,
    peers: list[str],
) -> list[Result]:  # fmt: skip
    """Checks, then times and prints every line as it is known."""
    if not torch.cuda.is_available():
        raise ValueError("the kernels are timed on a CUDA GPU, and there is none here")
    for length in lengths:
        if not 1 <= length <= tokens or tokens % length:
            raise ValueError(f"sequences of {length} do not divide {tokens} tokens")
    results: list[Result] = []
    print(", ".join(machine().values()))
    for size in sizes:
        errors = check(ModelConfig.named(size))
        print(f"{size:6}relative errors:", *(f"{name} {e:.1e}" for name, e in errors.items()))
        if not max(errors.values()) < 2e-2:
            raise ValueError(f"the kernels are wrong here: {errors}")
        timings = [time_sequences(size, tokens, lengths, peaks), time_steps(size, batches, peaks)]
        for result in (result for timing in timings for result in timing):
            for each in [result, *(time_peer(peer, result) for peer in peers)]:
                print(line(each), flush=True)
                results.append(each)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["7b", "1.4b", "160m"])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES), help="of steps")
    parser.add_argument("--peak-tflops", type=float, default=768, help="bf16 (an H200's)")
    parser.add_argument("--peak-tbs", type=float, default=4.2, help="copy, TB/s (an H200's)")
    parser.add_argument("--peers", nargs="*", default=[], choices=PEERS, help="libraries to time")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--plot", type=Path, help="draw them there, as PNG")
    arguments = parser.parse_args()
    peaks = Peaks(arguments.peak_tflops * 1e12, arguments.peak_tbs * 1e12)
    try:
        results = run(
            arguments.sizes, arguments.tokens, arguments.lengths, arguments.batches, peaks,
            arguments.peers,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    write(results, arguments.json, arguments.plot)


def write(results: list[Result], json_path: Path | None, plot_path: Path | None) -> None:
    """The results as JSON with the machine they are from, and as a plot."""
    if json_path:
        document: dict[str, Any] = {**machine(), "results": [asdict(r) for r in results]}
        json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plot_path:
        plot(results, plot_path)


if __name__ == "__main__":
    main()
