"""`xlstm7b doctor`: whether this machine is fit, as a report for people and as JSON for issues.

It compiles the kernels that a 7B uses, compares each path of the package with float64
(`bench/checks.py`), measures memory and matrix products, and says what a 7B can reach with them.
After a run on a GPU, the families of kernels that are wrong there are stored
(`kernel_verdicts.py`), so that the package no longer uses them.
"""

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from xlstm7b import kernel_verdicts
from xlstm7b.accounting import parameter_counts, training_flops
from xlstm7b.bench.checks import Check, Outcome, Place, cpu_checks, gpu_checks, run_check
from xlstm7b.bench.generation import Limits
from xlstm7b.bench.measure import free_memory, measure, random_model, reason, release
from xlstm7b.bench.results import machine_name, shown_number
from xlstm7b.compiling import compile_ahead
from xlstm7b.config import ModelConfig
from xlstm7b.devices import as_current
from xlstm7b.files import write_json
from xlstm7b.generate import SamplingParams
from xlstm7b.generate.fused import FusedModel, Slots
from xlstm7b.generate.replay import INTERVAL, Rings
from xlstm7b.generate.sampler import Needs, Sampler
from xlstm7b.kernel_verdicts import FAMILIES, installed_version
from xlstm7b.mlstm import has_kernels
from xlstm7b.mlstm.replay import Pass
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.report import counted, shown_bytes

SECONDS = 75.0  # checks that would start later are left out
_COMPILING_SECONDS = 40.0  # kernels that would be compiled later are compiled when they are used
_LEAST_GPU_MEMORY = 3_000_000_000  # bytes
_CONTEXT = 8192  # tokens of a sequence in training
_EXTRAS = {
    "train": "the tracker TensorBoard, and pictures of loss curves",
    "wandb": "the tracker Weights & Biases",
    "mlflow": "the tracker MLflow",
    "serve": "`xlstm7b serve`, and outputs that follow a JSON schema or a grammar",
    "eval": "`xlstm7b eval`: the tasks of the LM Evaluation Harness",
    "bench": "`xlstm7b compare`, and the pictures of benchmarks",
    "data": "data in Parquet, Arrow and Zstandard for `xlstm7b prepare`",
    "ray": "batches of prompts on Ray",
}

Say = Callable[[str], None]


def examine(device: torch.device, say: Say = print, *, seconds: float = SECONDS) -> dict[str, Any]:
    """The report. Each part of it is also said, as text, when it is known.

    `report["ok"]` is false if a path gave wrong numbers.
    """
    began = monotonic()
    if device.type == "cuda" and (free := free_memory(device)) < _LEAST_GPU_MEMORY:
        raise ValueError(
            f"only {shown_bytes(free)} are free on {device}, and doctor needs "
            f"{shown_bytes(_LEAST_GPU_MEMORY)}: end what uses this GPU, or choose another --device"
        )
    report: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    with as_current(device), kernel_verdicts.ignored():
        report["versions"] = versions(device)
        report["machine"] = machine(device)
        report["extras"] = extras()
        _say_machine(report, say)
        report["speeds"] = speeds = measure_speeds(device)
        _say_speeds(speeds, say)
        uses_kernels = device.type == "cuda" and has_kernels(device)
        if uses_kernels:
            about = kernel_verdicts.conditions(device)
            report["compiled"] = _compile(device, say)
        elif device.type == "cuda":
            say("the kernels cannot run here: plain PyTorch is used, which is much slower")
        checks = gpu_checks() if device.type == "cuda" else cpu_checks()
        report["estimates"] = estimates(device, speeds)
        outcomes = _run(checks, device, speeds, began + seconds, say)
    report["checks"] = [_as_json(outcome) for outcome in outcomes]
    report["left_out"] = len(checks) - len(outcomes)
    wrong = sorted({outcome.family for outcome in outcomes if outcome.problem})
    report["wrong"], report["ok"] = wrong, not wrong
    _say_estimates(report["estimates"], say)
    if uses_kernels:
        path = store_verdict(about, wrong)
        say(f"stored for this GPU, driver and versions: {path}")
    report["seconds"] = round(monotonic() - began, 1)
    _say_end(report, say)
    return report


def store_verdict(about: dict[str, str], wrong: Sequence[str]) -> Path:
    """Writes which families of kernels are wrong under these conditions. Returns the file."""
    path = kernel_verdicts.verdict_file(about)
    path.parent.mkdir(parents=True, exist_ok=True)
    families = [family for family in wrong if family in FAMILIES]
    write_json(path, {"conditions": about, "wrong": families})
    kernel_verdicts.wrong_families.cache_clear()
    return path


# The machine


def versions(device: torch.device) -> dict[str, str]:
    """Empty texts are left out: what is not installed."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or ""}
    for package in ("xlstm7b", "torch", "triton", "transformers"):
        found[package] = installed_version(package)
    if device.type == "cuda":
        found["driver"] = kernel_verdicts.driver_version()
    return {name: text for name, text in found.items() if text}


def machine(device: torch.device) -> dict[str, Any]:
    """The device, and memory and disk in bytes."""
    found: dict[str, Any] = {
        "device": machine_name(str(device)),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory": free_memory("cpu"),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        free, total = torch.cuda.mem_get_info(device)
        found |= {"compute_capability": f"{major}.{minor}"}
        found |= {"gpu_memory": free, "gpu_memory_total": total}
    from huggingface_hub.constants import HF_HUB_CACHE

    found["disk"], found["disk_of_hub_cache"] = _free_disk(Path()), _free_disk(Path(HF_HUB_CACHE))
    return found


def _free_disk(folder: Path) -> int:
    """Free bytes where the folder is or would be."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def extras() -> dict[str, dict[str, Any]]:
    """For each extra of the package: which of its packages are missing, and what it adds."""
    try:
        wanted = requires("xlstm7b") or []
    except PackageNotFoundError:  # used without being installed
        wanted = []
    found: dict[str, dict[str, Any]] = {}
    for requirement in wanted:
        match = re.match(r"([\w.-]+).*extra == [\"'](\w+)[\"']", requirement)
        if match and match[2] in _EXTRAS:
            extra = found.setdefault(match[2], {"missing": [], "adds": _EXTRAS[match[2]]})
            if not installed_version(match[1]):
                extra["missing"].append(match[1])
    return found


# Speeds


def measure_speeds(device: torch.device) -> dict[str, float]:
    """Bytes per second that a copy reads and writes; FLOP/s of large products, by dtype."""
    on_gpu = device.type == "cuda"
    time = partial(measure, device=device, repeats=5)
    if on_gpu and find_spec("triton") is not None:
        time = partial(measure, device=device, gpu_milliseconds=100)
    size = min(1 << 30, free_memory(device) // 8) if on_gpu else 128 << 20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"copy": 2 * size / time(partial(target.copy_, source))}
    width = 8192 if on_gpu else 1024
    square = torch.randn(width, width, device=device)
    flops = 2 * width**3
    if on_gpu:
        narrow = square.bfloat16()
        found["bfloat16"] = flops / time(lambda: narrow @ narrow)
        if torch.cuda.get_device_capability(device) >= (8, 9):
            rounded, one = narrow.to(torch.float8_e4m3fn), torch.ones((), device=device)
            product = partial(torch._scaled_mm, rounded, rounded.mT, scale_a=one, scale_b=one)
            found["fp8"] = flops / time(partial(product, out_dtype=torch.bfloat16))
    else:
        found["float32"] = flops / time(lambda: square @ square)
    release(device)
    return found


def _peaks(speeds: dict[str, float]) -> tuple[float, float]:
    return speeds.get("bfloat16") or speeds["float32"], speeds["copy"]


# Kernels


def _compile(device: torch.device, say: Say) -> dict[str, float | str | None]:
    """Compiles the kernels of the checks, and those that a 7B uses."""
    began, failures = monotonic(), list[str]()
    say("compiling kernels, once …")
    # A thread per core, as most of the work is not Python's.
    threads = os.cpu_count() or 1
    count = compile_ahead(_work(device, failures), threads=threads, seconds=_COMPILING_SECONDS)
    took = round(monotonic() - began, 1)
    release(device)
    say(f"compiled {counted(count, 'kernel')} in {took:.0f} s")
    if failures:
        say(f"{len(failures)} calls failed meanwhile, the first with {failures[0]}")
    return {"kernels": count, "seconds": took, "failure": failures[0] if failures else None}


def _work(device: torch.device, failures: list[str]) -> Iterator[Callable[[], object]]:
    """Calls that launch the kernels. Their errors are noted: nothing that they compute is right."""

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as failure:
            failures.append(reason(failure))

    place = _place(device)
    try:
        for call in used_by(replace(ModelConfig.named("7b"), num_blocks=1), device):
            yield partial(attempt, call)
    except (ValueError, torch.OutOfMemoryError) as failure:  # even one block does not fit
        failures.append(reason(failure))
    for check in gpu_checks():
        if check.family != "model":  # it compares, and so it would fail
            yield partial(attempt, partial(_got, check, place))


def _place(device: torch.device) -> Place:
    """With the kernels themselves: what the package chooses may follow an earlier verdict."""
    if device.type != "cuda" or not has_kernels(device):
        return Place(device)
    from xlstm7b.generate.kernels import gpu

    return Place(device, "triton", gpu)


def _got(check: Check, place: Place) -> None:
    check.make(place).got()


def used_by(config: ModelConfig, device: torch.device) -> Iterator[Callable[[], object]]:
    """Calls that launch the kernels with which such a model generates, serves and trains."""
    for scheme in (None, "int8", "fp8", "int4"):
        whole = random_model("7b", config=config, device=str(device), quantize=scheme)
        model = _Unchecked(whole)
        for rows in (1, 2, 16) if scheme is None else (1, 4, 16):
            yield partial(_decode, model, rows)
        for rows, length in ((1, 64), (1, 2048), (4, 256)):
            yield partial(_read, model, rows, length)
        if scheme is None:
            yield partial(_train, whole)
        del whole, model
        release(device)
    yield partial(_sample, device, config.vocab_size)


class _Unchecked(FusedModel):
    """Before kernels are launched, they compute nothing that could be compared."""

    def _compare_logits(self, model: XLSTM) -> None:
        pass


@torch.inference_mode()
def _decode(model: FusedModel, rows: int) -> None:
    """Single tokens in each way, and a pass over drafts."""
    state = ModelState.zeros(model.config, rows, device=model.device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=model.device)
    out = torch.zeros(rows, model.config.vocab_size, device=model.device)
    model.step(tokens, state, out=out)
    for size in (INTERVAL, 48):
        rings = Rings.zeros(model.config, rows, dtype=model.dtype, device=model.device, size=size)
        for way in ("replay", "fold", "write"):
            model.step(tokens, state, rings=rings, way=way, out=out)
    drafts = torch.zeros(rows, 3, dtype=torch.int64, device=model.device)
    read, lengths = model.operations.pass_tokens(tokens, drafts)
    one = Pass(rings.folded, state.tokens_seen, lengths, rings.interval)
    logits = model.read_drafts(read, state, one, rings)
    model.operations.keep_logits(logits, lengths, out, torch.empty_like(logits))
    model.advance(one, lengths)


@torch.inference_mode()
def _read(model: FusedModel, rows: int, length: int) -> None:
    """Prompts of slots."""
    device = model.device
    state = ModelState.zeros(model.config, rows + 1, device=device)
    tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
    lengths = torch.full((rows,), length, device=device)
    order = torch.arange(rows, device=device)
    model.logits(model.read(tokens, state, lengths, Slots(order, order)))


def _sample(device: torch.device, vocab_size: int) -> None:
    for rows in (1, 2, 16):
        sampler = Sampler(rows, vocab_size, device)
        for row in range(rows):
            sampler.set_row(row, SamplingParams(temperature=1.0, top_p=0.9), seed=row)
        logits = torch.zeros(rows, vocab_size, device=device)
        for needs in (Needs(), Needs(sampling=True), Needs(sampling=True, filters=True)):
            sampler(logits, needs)


def _train(model: XLSTM) -> None:
    tokens = torch.zeros(1, 513, dtype=torch.int64, device=model.lm_head.weight.device)
    weights = torch.ones(1, 512, device=tokens.device)
    model.loss(tokens[:, :-1], tokens[:, 1:], weights).backward()


# Checks


def _run(
    checks: Sequence[Check],
    device: torch.device,
    speeds: dict[str, float],
    until: float,
    say: Say,
) -> list[Outcome]:
    outcomes = []
    place, peaks = _place(device), _peaks(speeds)
    for check in checks:
        if monotonic() > until:
            break
        try:
            outcome = run_check(check, place, peaks)
        except torch.OutOfMemoryError:
            say(f"left out   {check.family:10} {check.name}: out of memory")
            continue
        outcomes.append(outcome)
        say(_line(outcome))
        if outcome.problem and not _still_works(device):
            say("after this error the GPU computes nothing more in this process")
            break
        release(device)
    if len(outcomes) < len(checks):
        say(f"{counted(len(checks) - len(outcomes), 'check')} left out, as time or memory is short")
    return outcomes


def _still_works(device: torch.device) -> bool:
    """False after a kernel has read or written where it may not: all later calls fail then."""
    try:
        torch.ones(1, device=device).item()
    except Exception:
        return False
    return True


def _line(outcome: Outcome) -> str:
    status = "WRONG" if outcome.problem else "ok"
    parts = [f"{status:5}  {outcome.family:10} {outcome.name:58}"]
    if outcome.errors:
        parts.append(f"error {outcome.error:.1e} of {outcome.tolerance:.0e}")
    if outcome.seconds is not None:
        parts.append(f"{1e6 * outcome.seconds:>9,.0f} µs")
    if outcome.share_of_limit is not None:
        parts.append(f"{outcome.share_of_limit:4.0%} of the limit")
    if outcome.problem:
        parts.append(outcome.problem)
    return "  ".join(parts)


def _as_json(outcome: Outcome) -> dict[str, Any]:
    """The errors of a path that computed infinity or NaN are null: JSON has neither."""
    error = outcome.error
    return {
        "family": outcome.family,
        "name": outcome.name,
        "ok": outcome.problem is None,
        "error": error if error < float("inf") and outcome.errors else None,
        "tolerance": outcome.tolerance,
        "seconds": outcome.seconds,
        "share_of_limit": outcome.share_of_limit,
        "problem": outcome.problem,
    }


# What a 7B would do here


@dataclass(frozen=True)
class _Use:
    name: str
    needs: int  # bytes
    tokens_per_second: float


def estimates(device: torch.device, speeds: dict[str, float]) -> list[dict[str, Any]]:
    """For each use of a 7B: the bytes that it needs, whether it fits, and the most tokens/s.

    A speed is that of hardware that only moves the bytes or computes the FLOPs, at the measured
    speeds. What is reached is less.
    """
    config, peaks = ModelConfig.named("7b"), _peaks(speeds)
    memory = free_memory(device)
    limits = partial(Limits, config, peaks, device=device.type)
    uses = [
        _Use(f"decode, {scheme or 'bfloat16'} weights", limit.memory(), limit.decode())
        for scheme in (None, "int8", "int4")
        for limit in [limits(quantize=scheme)]
    ]
    # Weights, gradients and AdamW's two averages in float32.
    whole = 16 * parameter_counts(config)["total"]
    speed = peaks[0] * _CONTEXT / training_flops(config, _CONTEXT)
    uses.append(_Use("training of all weights", whole, speed))
    return [
        {
            "use": use.name,
            "fits": use.needs < memory,
            "bytes": use.needs,
            "free_bytes": memory,
            "tokens_per_second_at_most": use.tokens_per_second if use.needs < memory else None,
        }
        for use in uses
    ]


# The report as text


def _say_machine(report: dict[str, Any], say: Say) -> None:
    found = report["machine"]
    say(", ".join(f"{name} {text}" for name, text in report["versions"].items()))
    gpu = ""
    if "compute_capability" in found:
        free, total = (shown_bytes(found[name]) for name in ("gpu_memory", "gpu_memory_total"))
        gpu = f", compute capability {found['compute_capability']}, {free} of {total} free"
    say(f"{found['device']}{gpu}")
    say(
        f"{found['system']}, {counted(found['cores'] or 1, 'core')}, "
        f"free: memory {shown_bytes(found['memory'])}, disk {shown_bytes(found['disk'])}, "
        f"disk of the hub's cache {shown_bytes(found['disk_of_hub_cache'])}"
    )
    for name, extra in report["extras"].items():
        if missing := extra["missing"]:
            say(f"not installed: xlstm7b[{name}] ({', '.join(missing)}). It adds {extra['adds']}")
    say("")


def _say_speeds(speeds: dict[str, float], say: Say) -> None:
    copy, *products = speeds.items()
    say(f"copies: {shown_number(1e-9 * copy[1])} GB/s read and written")
    for name, flops in products:
        say(f"products in {name}: {shown_number(1e-12 * flops)} TFLOP/s")
    say("")


def _say_estimates(found: list[dict[str, Any]], say: Say) -> None:
    say("\nEstimates for the 7B here, from bytes and FLOPs: the most that the hardware allows")
    for use in found:
        needed, free = shown_bytes(use["bytes"]), shown_bytes(use["free_bytes"])
        if use["fits"]:
            speed = shown_number(use["tokens_per_second_at_most"])
            say(f"{use['use']:28} at most {speed:>8} tok/s, {needed}")
        else:
            say(f"{use['use']:28} does not fit: it needs {needed}, and {free} are free")


def _say_end(report: dict[str, Any], say: Say) -> None:
    took = f"{len(report['checks'])} checks, {report['seconds']:.0f} s"
    if report["ok"]:
        say(f"ok: {took}")
    else:
        wrong = ", ".join(FAMILIES.get(family, family) for family in report["wrong"])
        say(
            f"WRONG: {wrong} ({took}). Please report it, with the output of xlstm7b doctor --json -"
        )
