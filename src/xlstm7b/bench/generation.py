"""`python -m xlstm7b.bench.generation`: how fast, and in how much memory, a model generates.

A named size with random weights: nothing is downloaded. Parts: peak memory over tokens read and
generated; decoding over batch sizes, and at batch 1 behind ever longer texts; the time from a
prompt to its first tokens; prefill of a constant number of tokens as many short or few long
prompts; with `--folder`, the time from a saved model to its first token. Sampling is included, as
users get it, and every figure has its limit beside it. `--peers` runs other libraries at the same
work, each in a process of its own. On a CPU the defaults are smaller.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import torch

from xlstm7b.bench.generation_ours import our_results, release
from xlstm7b.bench.generation_results import (
    DTYPES,
    LIMIT,
    PARTS,
    PEERS,
    Plan,
    Report,
    Result,
    check_names,
    heading,
    line,
    machine,
    write,
)
from xlstm7b.bench.peer import seconds

__all__ = ["Plan", "Report", "Result", "check_outputs", "run", "write"]

H200 = 768e12, 4.27e12  # measured: FLOP/s of a bf16 product, bytes/s of a product with a vector


def peer_results(peer: str, plan: Plan, timeout: float) -> Iterator[Result]:
    """A peer's results as it prints them, from a process that may crash or take too long."""
    release(plan.device)
    module = "xlstm7b.bench.generation_peers"
    command = [sys.executable, "-m", module, peer, json.dumps(asdict(plan))]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        assert process.stdout is not None
        done, began = False, time.monotonic()
        # With all of its group: a compiler's workers would keep the pipe open.
        timer = threading.Timer(timeout, _end, [process])
        timer.start()
        try:
            for text in process.stdout:
                if text.startswith("result "):
                    yield Result(**json.loads(text.removeprefix("result ")))
                done = text == "done\n"
                if done:
                    break
        finally:
            timer.cancel()
            _end(process)
            process.wait()
            process.stdout.close()
        if not done:
            errors.seek(0)
            reason = (errors.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            if time.monotonic() - began >= timeout:
                reason = f"stopped after {timeout:.0f} s"
            yield Result("peer", peer, "", 0, 0, error=reason[:200])


def _end(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def with_peaks(plan: Plan) -> Plan:
    """The plan with the machine's peaks where it has none: an H200's, or what is measured now."""
    if plan.peak_flops is not None and plan.peak_bytes is not None:
        return plan
    flops, moved = H200
    if plan.device == "cpu" or "H200" not in torch.cuda.get_device_name():
        wide, device = 8192 if plan.device == "cuda" else 1024, plan.torch_device
        table = torch.randn(32 * wide, 1024, device=device)  # larger than a cache
        moved = table.nbytes / seconds(lambda: table @ table[0], 3, device)
        dtypes = {torch.float32, plan.torch_dtype}  # the faster: not every CPU has bf16 products
        squares = [torch.randn(wide, wide, device=device).to(dtype) for dtype in dtypes]
        flops = 2 * wide**3 / min(seconds(partial(torch.mm, a, a), 3, device) for a in squares)
    return replace(plan, peak_flops=plan.peak_flops or flops, peak_bytes=plan.peak_bytes or moved)


def run(
    plan: Plan, peers: Sequence[str] = (), *, ours: bool = True, timeout: float = 300
) -> Report:
    """Measures and prints every line as it is known; `timeout` is a peer's, in seconds."""
    plan.check()
    check_names("peer", peers, PEERS)
    began = time.monotonic()
    print(", ".join(machine(plan.device).values()))
    plan = with_peaks(plan)
    print(f"{plan.size}, {plan.dtype}, state {plan.state_dtype}, random weights", flush=True)
    print(LIMIT)
    print(f"{(plan.peak_flops or 0) / 1e12:.4g} TFLOP/s, {(plan.peak_bytes or 0) / 1e12:.4g} TB/s")
    sources = [our_results(plan)] if ours else []
    sources += [peer_results(peer, plan, timeout) for peer in peers]
    report, part = Report(plan, []), ""
    for result in chain.from_iterable(sources):
        if result.part not in (part, "peer"):
            part = result.part
            print(f"\n[{time.monotonic() - began:.0f} s] {heading(part)}", flush=True)
        print(line(result), flush=True)
        report.results.append(result)
    print(f"\n[{time.monotonic() - began:.0f} s] done", flush=True)
    return report


def check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Raises a `ValueError` if the results could not be written, before they are measured."""
    for path in (json_path, plot_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {path.absolute().parent} to write into")
    if plot_path is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'xlstm7b[bench]'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", help="7b on a GPU, 160m on a CPU")
    parser.add_argument("--device", help="cuda or cpu; cuda if there is a GPU")
    parser.add_argument("--dtype", help=" or ".join(DTYPES))
    parser.add_argument("--state-dtype", help="float32, or bfloat16")
    parser.add_argument("--parts", type=_listed, help=f"of {','.join(PARTS)}")
    parser.add_argument("--batches", type=_numbers, help="to decode, as 1,8,64")
    parser.add_argument("--contexts", type=_numbers, help="tokens before decoding, and of memory")
    parser.add_argument("--prompts", type=_numbers, help="lengths, to the first tokens")
    parser.add_argument("--tokens", type=int, help="of a prefill in all")
    parser.add_argument("--lengths", type=_numbers, help="of its prompts")
    parser.add_argument("--folder", help="a saved model to start from, beside the random one")
    parser.add_argument("--peak-tflops", type=float, help="an H200's on one, else measured")
    parser.add_argument("--peak-tbs", type=float, help="TB/s read: likewise")
    parser.add_argument("--peers", type=_listed, default=[], help=f"of {','.join(PEERS)}")
    parser.add_argument("--only-peers", action="store_true", help="leave out ours")
    parser.add_argument("--timeout", type=float, default=300, help="of a peer, seconds")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--plot", type=Path, help="draw them there, as PNG")
    given = vars(parser.parse_args())
    peaks = {"peak_flops": given.pop("peak_tflops"), "peak_bytes": given.pop("peak_tbs")}
    peers, only, timeout, json_path, plot_path = (
        given.pop(name) for name in ("peers", "only_peers", "timeout", "json", "plot")
    )
    try:
        check_outputs(json_path, plot_path)
        plan = Plan.of(**given, **{name: peak and peak * 1e12 for name, peak in peaks.items()})
        report = run(plan, peers, ours=not only, timeout=timeout)
    except ValueError as error:
        parser.error(str(error))
    write(report, json_path, plot_path)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in _listed(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, as 1,8,64") from None


if __name__ == "__main__":
    main()
