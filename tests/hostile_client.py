"""What a hostile client does to the streams of an ordinary one: gaps, errors, the server's memory.

    python tests/hostile_client.py                                 # a small model on this machine
    python tests/hostile_client.py MODEL --start "--slots 64"      # options of `xlstm7b serve`
    python tests/hostile_client.py --url http://127.0.0.1:8000 --key A --hostile-key B

The ordinary client streams answers, alone and then beside each behaviour, in turns, several times.
A gap is the time between two chunks of a stream. The hostile client is a process of its own, with
the lowest priority, because a real one has a machine of its own. `load` is no attack: as many
ordinary streams as the hostile client has, which shows what a larger batch costs. Only servers of
this machine are attacked.
"""

import argparse
import http.client
import ipaddress
import itertools
import json
import os
import random
import shlex
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PATH = "/v1/completions"
STREAM = {"prompt": "The sea", "stream": True, "ignore_eos": True}
KEYS = "ordinary", "hostile"
MEMORY = "process_resident_memory_bytes "


class Client:
    """Requests to the server with one key."""

    def __init__(self, url: str, key: str) -> None:
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self.headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=30)

    def send(self, path: str, body: Any = None) -> tuple[http.client.HTTPConnection, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, content, self.headers)
        return connection, connection.getresponse()

    def ask(self, path: str, body: Any = None) -> tuple[int, bytes]:
        connection, answer = self.send(path, body)
        with connection_closed(connection):
            return answer.status, answer.read()

    def stream(self, **options: Any) -> Iterator[bytes]:
        """The chunks of a stream; an `OSError` if it is refused or breaks off."""
        connection, answer = self.send(PATH, {**STREAM, **options})
        with connection_closed(connection):
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {answer.read(200)!r}")
            while (line := answer.readline()) != b"data: [DONE]\n":
                if not line:
                    raise OSError("the stream broke off")
                if line.startswith(b'data: {"error"'):
                    raise OSError(line[:200].decode())
                if line.startswith(b"data: "):
                    yield line

    def head(self, path: str = PATH) -> bytes:
        lines = [f"POST {path} HTTP/1.1", f"host: {self.host}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, ""]).encode()


@contextmanager
def connection_closed(connection: http.client.HTTPConnection) -> Iterator[None]:
    try:
        yield
    finally:
        connection.close()


# The hostile client. Each function is called again and again in several threads.


def drip(client: Client) -> None:
    """Bodies that come one byte a second, 16 in each thread."""
    connections = [client.connect() for _ in range(16)]
    for connection in connections:
        connection.sendall(client.head() + b"content-length: 1000\r\n\r\n")
    with suppress(OSError):
        while True:
            for connection in connections:
                connection.sendall(b" ")
            time.sleep(1)
    for connection in connections:
        connection.close()


def flood(client: Client) -> None:
    """Connections that send nothing, 100 in each thread, opened and closed without a pause."""
    connections = [client.connect() for _ in range(100)]
    for connection in connections:
        connection.close()


def disconnect(client: Client) -> None:
    """Streams that are left after their first chunk."""
    next(client.stream(max_tokens=10_000))


def trailers(client: Client) -> None:
    """Trailers and extensions of chunks without end."""
    for begin in (b"\r\n0\r\n", b"\r\n1;"):
        with client.connect() as connection:
            connection.sendall(client.head() + b"transfer-encoding: chunked\r\n" + begin)
            with suppress(OSError):
                for _ in range(300):
                    connection.sendall(b"a: " + b"b" * 100_000 + b"\r\n")


def bodies(client: Client) -> None:
    """Bodies of 4 MiB: ids, texts, messages."""
    size = (4 << 20) - 1000
    ids, text = [99] * (size // 4 - 100), "".join(random.choices(string.ascii_letters, k=size))
    for path, body in (
        ("/detokenize", {"tokens": ids}),
        ("/tokenize", {"prompt": text}),
        (PATH, {"prompt": ids, "max_tokens": 1, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 400}] * 4000}),
    ):
        client.ask(path, json.dumps(body, separators=(",", ":")).encode())


def stops(client: Client) -> None:
    """Streams with 16 stop strings of 256 characters."""
    strings = ["".join(random.choices("abc", k=256)) for _ in range(16)]
    for _ in client.stream(stop=strings, max_tokens=1000):
        pass


def logprobs(client: Client) -> None:
    """Streams with the log-probabilities of each token."""
    for _ in client.stream(logprobs=5, max_tokens=1000):
        pass


def grammars(client: Client) -> None:
    """Streams with a new grammar each."""
    names = ["".join(random.choices(string.ascii_lowercase, k=12)) for _ in range(60)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "array", "items": {"type": "number"}} for name in names},
        "required": names,
    }
    for _ in client.stream(structured_outputs={"json": schema}, ignore_eos=False, max_tokens=300):
        pass


def load(client: Client) -> None:
    """Ordinary streams: no attack."""
    for _ in client.stream(max_tokens=1000):
        pass


BEHAVIOURS: dict[str, Callable[[Client], None]] = {
    one.__name__: one
    for one in (load, drip, flood, disconnect, trailers, bodies, stops, logprobs, grammars)
}


def attack(name: str, client: Client, threads: int) -> None:
    """Behaves like this until the process is ended.

    With the lowest priority: a real one would not take its time from the server's cores.
    """
    os.nice(19)

    def repeat() -> None:
        while True:
            try:
                BEHAVIOURS[name](client)
            except OSError:  # refused: that is what a server should do
                time.sleep(0.02)
            except http.client.HTTPException:
                time.sleep(0.02)

    for _ in range(threads):
        threading.Thread(target=repeat, daemon=True).start()
    signal.pause()


# The ordinary client


def measure(client: Client, streams: int, seconds: float) -> tuple[list[float], list[str]]:
    """The gaps of all streams in this time, and the errors."""
    gaps, errors, end = list[float](), list[str](), time.monotonic() + seconds

    def run() -> None:
        while time.monotonic() < end:
            last = None
            try:
                for _ in client.stream(max_tokens=500):
                    now = time.monotonic()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
                    if now > end:
                        break
            except (OSError, http.client.HTTPException) as error:
                errors.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)

    threads = [threading.Thread(target=run) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return gaps, errors


def p99(gaps: list[float]) -> float:
    """In milliseconds."""
    return 1000 * sorted(gaps)[int(0.99 * len(gaps))] if gaps else float("inf")


def memory_mb(client: Client) -> float:
    _, content = client.ask("/metrics")
    found = [line for line in content.decode().splitlines() if line.startswith(MEMORY)]
    return float(found[0].removeprefix(MEMORY)) / 1e6 if found else float("nan")


def measure_behaviour(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One repetition: alone, then beside."""
    client = Client(options.url, options.key)
    alone, errors = measure(client, options.clients, options.seconds)
    command = [sys.executable, str(Path(__file__).resolve()), "--be", name]
    command += ["--url", options.url, "--hostile-key", options.hostile_key]
    hostile = subprocess.Popen([*command, "--hostile", str(options.hostile)])
    try:
        time.sleep(0.5)
        beside, more_errors = measure(client, options.clients, options.seconds)
        memory = memory_mb(client)
    finally:
        hostile.kill()
        hostile.wait()
    time.sleep(0.3)  # until the server has dropped its requests
    return {
        "behaviour": name,
        "alone": p99(alone),
        "beside": p99(beside),
        "gaps": [len(alone), len(beside)],
        "errors": errors + more_errors,
        "memory": memory,
    }


def summary(name: str, taken: list[dict[str, Any]]) -> dict[str, Any]:
    alone = [one["alone"] for one in taken if one["behaviour"] == name]
    beside = [one["beside"] for one in taken if one["behaviour"] == name]
    return {
        "behaviour": name,
        "alone": alone,
        "beside": beside,
        "ratio": statistics.median(beside) / statistics.median(alone),
        "errors": [error for one in taken if one["behaviour"] == name for error in one["errors"]],
        "memory": max(one["memory"] for one in taken if one["behaviour"] == name),
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(
        "behaviour  | gap p99 alone, ms      | gap p99 beside, ms     | ratio | errors | memory, MB"
    )

    def spread(values: list[float]) -> str:
        shown = f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
        return f"{shown:19}"

    for row in rows:
        errors = f"{len(row['errors']):6}"
        numbers = f"{row['ratio']:5.2f} | {errors} | {row['memory']:.0f}"
        print(
            f"{row['behaviour']:10} | {spread(row['alone'])} | {spread(row['beside'])} | {numbers}"
        )
    for row in rows:
        for error in sorted({*row["errors"]})[:3]:
            print(f"{row['behaviour']}: {error}")


# The server


@contextmanager
def started(model: str | None, options: str) -> Iterator[str]:
    """A server with two keys. Without a model, one with a small model that writes letters."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            sys.path.insert(0, str(Path(__file__).parent / "helpers"))
            from models import spelling_model

            model = f"{folder}/small"
            spelling_model("abcdefghijklmnopqrstuvwxyz").save_pretrained(model)
        keys = Path(folder, "keys")
        keys.write_text("\n".join(KEYS))
        command = [sys.executable, "-m", "xlstm7b", "serve", model, "--port", "0"]
        command += ["--api-key-file", str(keys), *shlex.split(options)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        log = Path(folder, "log")
        with log.open("w") as file:
            server = subprocess.Popen(command, stderr=file, env=environment)
        try:
            yield _address(server, log)
        finally:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """The server's address, when it is ready."""
    while server.poll() is None:
        time.sleep(0.1)
        for line in log.read_text().splitlines():
            url = line.partition(" at http://")[2].partition('"')[0]
            with suppress(OSError):
                if url and Client(f"http://{url}", KEYS[0]).ask("/health")[0] == 200:
                    return f"http://{url}"
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", help="folder or hub id of the model to serve (default: a small one)")
    add("--start", default="--slots 32", help="options of `xlstm7b serve` (default: --slots 32)")
    add("--url", help="a server that runs already on this machine, instead of starting one")
    add("--key", default=KEYS[0], help="API key of the ordinary client, with --url")
    add("--hostile-key", default=KEYS[1], help="API key of the hostile client, with --url")
    add("--clients", type=int, default=4, help="streams of the ordinary client (default: 4)")
    add("--hostile", type=int, default=4, help="threads of the hostile client (default: 4)")
    add("--seconds", type=float, default=3.0, help="seconds of each measurement (default: 3)")
    add("--repetitions", type=int, default=3, help="of each pair of measurements (default: 3)")
    add("--behaviours", help=f"some of {','.join(BEHAVIOURS)} (default: all)")
    add("--max-ratio", type=float, help="exit with 1 if a ratio is above it, or there are errors")
    add("--json", type=Path, help="file to which the results are written")
    add("--be", choices=BEHAVIOURS, help=argparse.SUPPRESS)  # the process of the hostile client
    options = parser.parse_args()
    names = options.behaviours.split(",") if options.behaviours else [*BEHAVIOURS]
    if wrong := {*names} - {*BEHAVIOURS}:
        parser.error(f"there is no behaviour {wrong.pop()!r}")
    options.behaviours = names
    if min(options.clients, options.hostile, options.repetitions) < 1 or options.seconds <= 0:
        parser.error("--clients, --hostile, --repetitions and --seconds must be positive")
    if options.url is not None:
        host = urlsplit(options.url).hostname or ""
        with suppress(ValueError):
            if host == "localhost" or ipaddress.ip_address(host).is_loopback:
                return options
        parser.error("--url must be a server of this machine: localhost or 127.0.0.1")
    return options


def run(options: argparse.Namespace) -> int:
    kind = f"{options.clients} ordinary streams, {options.hostile} hostile threads"
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, 2 clients with a key each,")
    print(f"{kind}, {options.repetitions} repetitions of {options.seconds:g} s, in turns")
    measure(Client(options.url, options.key), options.clients, min(1.0, options.seconds))
    taken = []
    for _, name in itertools.product(range(options.repetitions), options.behaviours):
        taken.append(measure_behaviour(options, name))
    rows = [summary(name, taken) for name in options.behaviours]
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    too_slow = options.max_ratio is not None and any(
        row["ratio"] > options.max_ratio or row["errors"] for row in rows
    )
    return int(too_slow)


def main() -> int:
    options = parse()
    if options.be is not None:
        attack(options.be, Client(options.url, options.hostile_key), options.hostile)
    if options.url is not None:
        return run(options)
    options.key, options.hostile_key = KEYS
    with started(options.model, options.start) as options.url:
        return run(options)


if __name__ == "__main__":
    sys.exit(main())
