"""`xlstm7b bench serve URL`: a running server under load, as its clients see it.

Requests are sent at random times (Poisson), whether or not earlier ones are answered. Times count
from when a request was due, so waiting to connect counts too. With `--clients`, a
fixed number of clients each wait for their answer and then send the next request. Prompts are
random token ids of mixed lengths, all different, after a common prefix. Answers are streamed and
have their full length.
"""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

from xlstm7b.bench.measure import percentile
from xlstm7b.bench.results import Results, Shape
from xlstm7b.report import counted

_IDS = range(2, 256)  # valid in every vocabulary; none ends the output


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests to send. Without clients they are sent at `rate`, in requests per second."""

    url: str
    rate: float = 4.0
    clients: int = 0
    seconds: float = 30.0
    prompt_tokens: tuple[int, ...] = (32, 128, 512)
    new_tokens: tuple[int, ...] = (16, 64, 128)
    shared_tokens: int = 0
    seed: int = 0
    timeout: float = 120.0
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise ValueError(f"{self.url!r} is not a server address such as http://127.0.0.1:8000")
        if self.shared_tokens + min(self.prompt_tokens) < 1:
            raise ValueError("every prompt must have at least one token")

    @property
    def path(self) -> str:
        """The path of the URL, without /v1, in which the base URLs of OpenAI clients end."""
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1")

    @property
    def shape(self) -> Shape:
        shape: dict[str, int | float | str] = {"clients": self.clients}
        if not self.clients:
            shape = {"requests/s": self.rate}
        shape["prompt"] = " or ".join(map(str, self.prompt_tokens))
        shape["output"] = " or ".join(map(str, self.new_tokens))
        return shape | ({"shared": self.shared_tokens} if self.shared_tokens else {})


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        return False


@dataclass
class Answer:
    """How one request was answered. Times are in seconds since the request was due."""

    chunks: list[float] = field(default_factory=list)  # when each one arrived
    prompt_tokens: int = 0
    new_tokens: int = 0
    ended: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Measured:
    """All answers to a load."""

    seconds: float
    answers: list[Answer]
    interrupted: bool = False

    @property
    def errors(self) -> dict[str, int]:
        return dict(Counter(answer.error for answer in self.answers if answer.error))

    def add_to(self, results: Results, shape: Shape) -> None:
        """Adds what was measured of the answered requests, and a failure for each kind of error."""
        good = [answer for answer in self.answers if answer.error is None]
        if good:
            for what, count, unit in (
                ("requests", len(good), "req/s"),
                ("prompts", sum(answer.prompt_tokens for answer in good), "tok/s"),
                ("output", sum(answer.new_tokens for answer in good), "tok/s"),
            ):
                results.add(what, shape, count / self.seconds, unit)
        else:
            results.fail("output", shape, "no request was answered")
        gaps = [late - early for answer in good for early, late in pairwise(answer.chunks)]
        for what, times in (
            ("first token", [answer.chunks[0] for answer in good if answer.chunks]),
            ("between chunks", gaps),
            ("whole answer", [answer.ended for answer in good]),
        ):
            for percent in (50, 90, 99) if times else ():
                results.add(f"{what}, p{percent}", shape, 1e3 * percentile(times, percent), "ms")
        for error, count in self.errors.items():
            results.fail(error, shape, counted(count, "request"))


def measure_server(results: Results, load: Load) -> None:
    """Sends the load. After Ctrl-C it adds the results so far and raises it again."""
    if results.has("output", load.shape):
        return
    measured = send(load)
    measured.add_to(results, load.shape)
    if measured.interrupted:
        raise KeyboardInterrupt


def check_server(load: Load) -> None:
    """Raises an `OSError` if nothing answers at the address, a `ValueError` if it is not ready."""
    connection = _connect(load)
    try:
        connection.request("GET", f"{load.path}/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f"{load.url} does not answer: {error}") from error
    finally:
        connection.close()
    if status >= 500:
        raise ValueError(f"{load.url} is not ready: its /health returns {status}")


def send(load: Load) -> Measured:
    """Sends the load. Returns when everything is answered, or at Ctrl-C with the answers so far."""
    draw = random.Random(load.seed)
    answers: list[Answer] = []
    threads: list[threading.Thread] = []
    began, interrupted = time.perf_counter(), False

    def ask(body: bytes, due: float) -> None:
        answers.append(_ask(load, body, due))

    def be_a_client(bodies: Iterator[bytes]) -> None:
        while time.perf_counter() - began < load.seconds:
            ask(next(bodies), time.perf_counter())

    def start(work: Callable[..., None], *arguments: object) -> None:
        # A daemon: after Ctrl-C the process must not wait for answers that take minutes.
        threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        threads[-1].start()

    try:
        for _ in range(load.clients):
            start(be_a_client, _bodies(load, random.Random(draw.random())))
        if not load.clients:
            bodies, due = _bodies(load, draw), began
            while (due := due + draw.expovariate(load.rate)) - began < load.seconds:
                body = next(bodies)
                time.sleep(max(0.0, due - time.perf_counter()))
                start(ask, body, due)
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        interrupted = True
    return Measured(time.perf_counter() - began, [*answers], interrupted)


def _bodies(load: Load, draw: random.Random) -> Iterator[bytes]:
    shared = random.Random(load.seed).choices(_IDS, k=load.shared_tokens)
    while True:
        body = {
            "prompt": shared + draw.choices(_IDS, k=draw.choice(load.prompt_tokens)),
            "max_tokens": draw.choice(load.new_tokens),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield json.dumps(body).encode()


def _connect(load: Load) -> http.client.HTTPConnection:
    address = urlsplit(load.url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    return kind(address.hostname or "", address.port, timeout=load.timeout)


def _ask(load: Load, body: bytes, due: float) -> Answer:
    answer, deadline = Answer(), time.perf_counter() + load.timeout
    headers = {"content-type": "application/json"}
    if load.api_key:
        headers["authorization"] = f"Bearer {load.api_key}"
    connection = _connect(load)
    try:
        connection.request("POST", f"{load.path}/v1/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"status {response.status}"
        else:
            _read_stream(response, answer, due, deadline)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        answer.error = type(error).__name__
    finally:
        connection.close()
    answer.ended = time.perf_counter() - due
    return answer


def _read_stream(
    response: http.client.HTTPResponse, answer: Answer, due: float, deadline: float
) -> None:
    answer.error = "the stream ended early"
    for line in response:
        if time.perf_counter() > deadline:
            raise TimeoutError
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            answer.error = None
            return
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            answer.error = "an error in the stream"
            return
        if event["choices"]:
            answer.chunks.append(time.perf_counter() - due)
        if event["usage"]:
            answer.prompt_tokens = event["usage"]["prompt_tokens"]
            answer.new_tokens = event["usage"]["completion_tokens"]
