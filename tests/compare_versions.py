"""The speeds of two versions of the package, in turns: decoding, reading prompts, serving.

    git worktree add /tmp/before v1.0
    python tests/compare_versions.py /tmp/before/src src 7b            # random weights
    python tests/compare_versions.py /tmp/before/src src FOLDER --rounds 5

Each version has processes of its own, which are ready before anything is timed. A ratio is that of
the medians, second version over first. The spread is half the range of a version's rounds.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

GREEDY: dict[str, Any] = {"temperature": 0.0, "eos_token_id": ()}
STEPS = 64  # of decoding that are timed, after the first ones

# One version. It reads requests in JSON and writes one number for each.


def work(model: str, device: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the package prints
    import torch

    from xlstm7b import XLSTM, Generator
    from xlstm7b.tokenizer import ByteTokenizer

    loaded = XLSTM.from_pretrained(model, device=device)
    vocab_size = loaded.config.vocab_size

    def prompts(count: int, length: int) -> list[list[int]]:
        draw = random.Random(0)
        return [[draw.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]

    def decode(batch: int) -> float:
        """Tokens per second of a batch, after all of its sequences have started."""
        generator = Generator(loaded, ByteTokenizer(), batch_size=batch)
        generator.generate(prompts(batch, 16), max_new_tokens=4, **GREEDY)
        times, skipped = list[float](), 8 + batch // 16

        def should_stop() -> bool:
            times.append(time.perf_counter())
            return len(times) > skipped + 3 * STEPS

        generator.generate(
            prompts(batch, 16), max_new_tokens=1 << 20, should_stop=should_stop, **GREEDY
        )
        pieces = [times[skipped + n * STEPS : skipped + (n + 1) * STEPS + 1] for n in range(3)]
        return batch * STEPS / median(piece[-1] - piece[0] for piece in pieces)

    def read(tokens: int) -> float:
        """Prompt tokens per second, in 8 prompts."""
        generator, times = Generator(loaded, ByteTokenizer(), batch_size=8), list[float]()
        for _ in range(4):
            start = time.perf_counter()
            generator.read(prompts(8, tokens // 8))
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return tokens / median(times[1:])

    answers.write("ready\n")
    for line in sys.stdin:
        name, number = json.loads(line)
        answers.write(f"{decode(number) if name == 'decode' else read(number)}\n")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()  # for the other version


# The comparison


def ask(worker: "subprocess.Popen[str]", *request: Any) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    if not (answer := worker.stdout.readline()):
        raise SystemExit(f"a worker ended during {request}; its message is above")
    return float(answer)


def wait_for(server: "subprocess.Popen[bytes]", url: str) -> None:
    while True:
        with suppress(OSError), urlopen(f"{url}/health", timeout=2):
            return
        if server.poll() is not None:
            raise SystemExit("a server ended; its message is above")
        time.sleep(0.5)


def load(url: str, clients: int, seconds: float, environment: dict[str, str]) -> float:
    """Tokens per second of all clients of a server, by the command of one version for both."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "xlstm7b", "bench", "serve", url, "--clients", clients]
        command += ["--seconds", seconds, "--prompt-tokens", 512, "--new-tokens", 256]
        command += ["--json", f"{folder}/results.jsonl"]
        subprocess.run(
            [str(part) for part in command], env=environment, check=True, stdout=subprocess.DEVNULL
        )
        lines = Path(folder, "results.jsonl").read_text().splitlines()
    return next(row["value"] for row in map(json.loads, lines) if row["what"] == "output")


def compare(name: str, rounds: int, versions: list[Callable[[], float]]) -> None:
    speeds: list[list[float]] = [[], []]
    for turn in range(rounds):
        for version in (0, 1) if turn % 2 == 0 else (1, 0):
            speeds[version].append(versions[version]())
    shown = ""
    for found in speeds:
        spread = 50 * (max(found) - min(found)) / median(found)
        shown += f" | {median(found):10,.0f} ± {spread:3.1f}%"
    print(f"{name:20}{shown} | {median(speeds[1]) / median(speeds[0]):.3f}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("before", type=Path, help="folder `src` of the first version")
    add("after", type=Path, help="folder `src` of the second version")
    add("model", help="folder, or a size such as 7b for random weights")
    add("--device", default="cuda", help="cuda or cpu (default: cuda)")
    add("--rounds", type=int, default=3, help="of each pair of timings (default: 3)")
    add("--batches", default="1,8,64,256", help="batches to decode (default: 1,8,64,256)")
    add("--tokens", type=int, default=32768, help="of the prompts that are read (default: 32768)")
    add("--clients", type=int, default=64, help="of a server; 0: no server (default: 64)")
    add("--seconds", type=float, default=10.0, help="of each load of a server (default: 10)")
    options = parser.parse_args()
    for folder in (options.before, options.after):
        if not (folder / "xlstm7b").is_dir():
            parser.error(f"{folder} holds no package xlstm7b")
    return options


def run(options: argparse.Namespace, model: str) -> None:
    folders = [options.before.resolve(), options.after.resolve()]
    path = os.environ.get("PYTHONPATH", "")
    environments = [os.environ | {"PYTHONPATH": f"{each}{os.pathsep}{path}"} for each in folders]
    print(f"{'tokens per second':20} | {'before':17} | {'after':17} | after / before")
    with ExitStack() as stack:
        command = [sys.executable, str(Path(__file__).resolve()), "--work", model, options.device]
        workers = [
            subprocess.Popen(
                command, env=each, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for each in environments
        ]
        for worker in workers:
            stack.callback(worker.kill)
            assert worker.stdout is not None
            worker.stdout.readline()
        requests: list[tuple[str, int]] = [
            ("decode", int(batch)) for batch in options.batches.split(",")
        ]
        for name, number in [*requests, ("read", options.tokens)]:
            versions = [lambda one=one: ask(one, name, number) for one in workers]  # noqa: B023
            compare(f"{name} {number}", options.rounds, versions)
    if not options.clients:
        return
    with ExitStack() as stack:
        urls = []
        for number, each in enumerate(environments):
            url = f"http://127.0.0.1:{8301 + number}"
            command = [sys.executable, "-m", "xlstm7b", "serve", model, "--tokenizer", "bytes"]
            command += ["--slots", str(options.clients), "--port", url[-4:]]
            command += ["--device", options.device]
            server = subprocess.Popen(command, env=each, stderr=subprocess.DEVNULL)
            stack.callback(server.kill)
            wait_for(server, url)
            urls.append(url)
        versions = [
            lambda url=url: load(url, options.clients, options.seconds, environments[1])
            for url in urls
        ]
        compare(f"{options.clients} clients", options.rounds, versions)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
        return
    options = parse()
    if Path(options.model).is_dir():
        run(options, options.model)
        return
    from xlstm7b.bench.measure import random_model, release

    with tempfile.TemporaryDirectory() as folder:
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        model = random_model(options.model, dtype=dtype, device=options.device)
        model.save_pretrained(folder)
        del model
        release(options.device)
        run(options, folder)


if __name__ == "__main__":
    main()
