"""`python -m xlstm7b.bench.training`: how fast, and in how much memory, a model trains.

A case is SIZE:BATCHxLENGTH, SIZE:BATCHxLENGTHxN for N such micro-batches a step, and with :block or
:selective behind it activations are computed again. Each runs in a process of its own through the
trainer as users get it: loader, forward, backward, clipping, AdamW over float32 masters, computed
in bfloat16 on a GPU. The text is random numbers. `--peers xlstm` trains the authors' model beside
it: compiled whole, with PyTorch's cross-entropy over all logits, nothing computed again. MFU counts
`accounting.training_flops`, of which recomputation is no part, against the GPU's peak.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import torch

from xlstm7b.accounting import training_flops
from xlstm7b.bench.generation_results import machine
from xlstm7b.config import ModelConfig
from xlstm7b.data.writing import ShardWriter, write_manifest
from xlstm7b.train.plan import H100_FLOPS
from xlstm7b.train.processes import process_group
from xlstm7b.train.recipe import Batch, Data, Recipe, Run, Schedule, Source
from xlstm7b.train.trainer import Trainer

ON_GPU = "160m:16x4096,400m:16x4096,1.4b:4x8192,7b:4x8192x2:block,7b:1x8192x8:selective"
ON_CPU = "tiny:4x512"
ACTIVATIONS = ("none", "block", "selective")
PEERS = ("xlstm",)


@dataclass(frozen=True)
class Case:
    """A model and the batch of one step."""

    size: str
    batch: int
    length: int
    micro_batches: int = 1
    activations: str = field(default="none", kw_only=True)

    @classmethod
    def parse(cls, text: str) -> Self:
        size, shape, activations = (*text.split(":"), "none")[:3] if ":" in text else ("", "", "")
        try:
            batch, length, *micro_batches = (int(part) for part in shape.split("x"))
        except ValueError:
            batch, length, micro_batches = 0, 0, []
        is_whole = len(micro_batches) < 2 and min(batch, length, *micro_batches) > 0
        if not is_whole or activations not in ACTIVATIONS or text.count(":") > 2:
            raise ValueError(
                f"a case is SIZE:BATCHxLENGTH, with xN and :block or :selective behind it if you "
                f"like, not {text!r}"
            )
        ModelConfig.named(size)
        return cls(size, batch, length, *micro_batches, activations=activations)

    @property
    def tokens(self) -> int:
        return self.batch * self.length * self.micro_batches

    def __str__(self) -> str:
        times = f" × {self.micro_batches}" if self.micro_batches > 1 else ""
        kept = "" if self.activations == "none" else f", {self.activations}"
        return f"{self.size} {self.batch} × {self.length}{times}{kept}"


@dataclass(frozen=True)
class Result:
    """What one library did with a case."""

    case: Case
    name: str
    seconds: float | None = None  # of a step, the median
    first: float | None = None  # seconds of the first step, compilation included
    memory: int | None = None  # bytes at the peak, as PyTorch's allocator counts them
    losses: tuple[float, ...] = ()
    error: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.seconds is None else self.case.tokens / self.seconds

    def mfu(self, peak: float) -> float | None:
        if self.tokens_per_second is None:
            return None
        length = self.case.length
        flops = training_flops(ModelConfig.named(self.case.size), length) / length
        return flops * self.tokens_per_second / peak


def timed(case: Case, name: str, step: Callable[[], float], steps: int, device: str) -> Result:
    """`step` trains on one batch and returns its loss, having waited for the device."""
    times, losses = [], []
    for _ in range(steps + 2):  # of which two are not counted: they compile
        began = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - began)
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return Result(case, name, median(times[2:]), times[0], memory, tuple(losses))


def ours(case: Case, steps: int, device: str) -> Result:
    """The trainer on a folder of random documents."""
    with tempfile.TemporaryDirectory() as folder, process_group(device):
        trainer = Trainer(_recipe(case, steps, Path(folder) / "data"), Path(folder), device)
        try:
            return timed(case, "ours", lambda: trainer.update().loss, steps, device)
        finally:
            trainer.loader.close()


def _recipe(case: Case, steps: int, data: Path) -> Recipe:
    model = ModelConfig.named(case.size)
    draw = np.random.default_rng(0)
    data.mkdir()
    with ShardWriter(data / "00000.ds", vocab_size=model.vocab_size) as writer:
        left = (steps + 4) * case.tokens
        while left > 0:
            length = min(int(draw.integers(100, 4000)), left)
            writer.add(draw.integers(2, model.vocab_size, length))
            left -= length + 1
    write_manifest(
        data, [writer.entry], vocab_size=model.vocab_size, tokenizer_fingerprint="random"
    )
    sequences = case.batch * case.micro_batches
    return Recipe(
        name="bench",
        model=model,
        data=Data(case.length, {"random": Source(str(data))}),
        batch=Batch(sequences, micro_batch=case.batch),
        schedule=Schedule(warmup=0),
        run=Run(steps + 2, activation_checkpointing=case.activations),  # type: ignore[arg-type]
    )


def theirs(case: Case, steps: int, device: str) -> Result:
    """The authors' model, compiled with its loss; float32 weights under bfloat16 autocast."""
    from importlib import import_module

    import torch.nn.functional as F

    package: Any = import_module("xlstm.xlstm_large.model")
    config = ModelConfig.named(case.size)
    shape = {
        name: getattr(config, name)
        for name in ("embedding_dim", "num_heads", "num_blocks", "vocab_size", "ffn_proj_factor")
    }
    kernel = "triton_limit_chunk" if device == "cuda" else "native_autograd"
    model = package.xLSTMLarge(
        package.xLSTMLargeConfig(
            **shape, chunkwise_kernel=f"chunkwise--{kernel}", mode="train", return_last_states=True
        )
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits, _ = model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    compiled = torch.compile(loss_of) if device == "cuda" else loss_of

    def step() -> float:
        total = 0.0
        for _ in range(case.micro_batches):
            text = torch.randint(config.vocab_size, (case.batch, case.length + 1), device=device)
            loss = compiled(text[:, :-1], text[:, 1:]) / case.micro_batches
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        return total

    return timed(case, "xlstm, compiled", step, steps, device)


def in_process(case: Case, name: str, steps: int, device: str, timeout: float) -> Result:
    """A case on its own: memory starts from nothing, and a peer may crash or take too long."""
    module = "xlstm7b.bench.training"
    work = json.dumps({"case": asdict(case), "steps": steps, "device": device})
    command = [sys.executable, "-m", module, "--work", name, work]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Result(case, name, error=f"stopped after {timeout:.0f} s")
    for line in done.stdout.splitlines():
        if line.startswith("result "):
            values = json.loads(line.removeprefix("result "))
            return Result(**values | {"case": case, "losses": tuple(values["losses"])})
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    errors = [line for line in said if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return Result(case, name, error=(errors or said)[-1][:300])


def run(
    cases: Sequence[Case], peers: Sequence[str], *, steps: int, device: str, timeout: float = 300
) -> list[Result]:
    """Measures and prints every line as it is known."""
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"there is no peer {peer!r}; there is: {', '.join(PEERS)}")
    print(", ".join(machine(device).values()))
    print(f"MFU of {H100_FLOPS / 1e12:.0f} TFLOP/s (an H100's or H200's in bf16), first: 1 step")
    print(f"{'':40}{'tok/s':>10}{'ms':>10}{'MFU':>8}{'GB':>8}{'first, s':>10}{'speed, ×':>10}")
    results: list[Result] = []
    for case in cases:
        beside = [in_process(case, "ours", steps, device, timeout)]
        for peer in peers:
            plain = replace(case, activations="none")  # it has no other
            beside.append(in_process(plain, peer, steps, device, timeout))
        results += beside
        for result in beside:
            print(_line(result, beside[0], device), flush=True)
    return results


def _line(result: Result, ours: Result, device: str) -> str:
    head = f"{result.case}, {result.name}"
    if result.seconds is None or result.first is None:
        return f"{head:40} {result.error}"
    mfu = f"{result.mfu(H100_FLOPS) or 0:.1%}" if device == "cuda" else ""
    memory = f"{result.memory / 1e9:.1f}" if result.memory else ""
    ratio = f"{result.seconds / ours.seconds:.2f}" if ours.seconds and result is not ours else ""
    return (
        f"{head:40}{result.tokens_per_second:10,.0f}{1e3 * result.seconds:10,.1f}{mfu:>8}"
        f"{memory:>8}{result.first:10.1f}{ratio:>10}"
    )


def write(results: Sequence[Result], device: str, path: Path | None) -> None:
    """The results as JSON, with the machine they are from."""
    if path is None:
        return
    rows = [
        asdict(result)
        | {"tokens_per_second": result.tokens_per_second, "mfu": result.mfu(H100_FLOPS)}
        for result in results
    ]
    document = machine(device) | {"peak_flops": H100_FLOPS, "results": rows}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def parse_cases(text: str | None, device: str) -> list[Case]:
    """Those of a list with commas, or the device's own."""
    if device not in ("cuda", "cpu"):
        raise ValueError(f"the device must be cuda or cpu, not {device!r}")
    chosen = text or (ON_GPU if device == "cuda" else ON_CPU)
    return [Case.parse(part.strip()) for part in chosen.split(",") if part.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help=f"as {ON_GPU}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10, help="to take the median of")
    parser.add_argument("--peers", default="", help="xlstm")
    parser.add_argument("--timeout", type=float, default=300, help="of a case, seconds")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        name, work = given.work[0], json.loads(given.work[1])
        measure = partial(ours if name == "ours" else theirs, Case(**work.pop("case")))
        print("result " + json.dumps(asdict(measure(**work))))
        return
    try:
        cases = parse_cases(given.cases, given.device)
        peers = [peer for peer in given.peers.split(",") if peer]
        results = run(cases, peers, steps=given.steps, device=given.device, timeout=given.timeout)
    except ValueError as error:
        parser.error(str(error))
    write(results, given.device, given.json)


if __name__ == "__main__":
    main()
