"""`xlstm7b bench serve URL`: a running server under load, as its clients see it.

Requests are sent at random times (Poisson), whether or not earlier ones are answered. Times count
from when a request was due, so waiting to connect counts too. With `--clients`, a
fixed number of clients each wait for their answer and then send the next request. Prompts are
random token ids of mixed lengths, all different, after a common prefix of `--shared-tokens`.
Answers are streamed and have their full length.
"""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from xlstm7b.bench.cases import Column, Part, Result
from xlstm7b.bench.measure import percentile
from xlstm7b.bench.plans import Serve
from xlstm7b.report import counted, figure

_IDS = range(2, 256)  # valid in every vocabulary; none ends the output

_LOAD = (
    Column("requests", "requests"),
    Column("s", "seconds", digits=1),
    Column("requests/s", "requests_per_second", digits=2),
    Column("prompt tok/s", "prompt_tokens_per_second", digits=1),
    Column("new tok/s", "tokens_per_second", digits=1),
)
PARTS = {
    "load": Part("answered requests", _LOAD),
    "times": Part("their times, ms", [Column(f"p{n}", f"p{n}", 1e3, 1) for n in (50, 90, 99)]),
}


def results(plan: Serve) -> Iterator[Result]:
    """Checks the server; then, when iterated, sends the requests and yields what was measured."""
    check_server(plan)
    return _results(plan)


def _results(plan: Serve) -> Iterator[Result]:
    measured = send(plan)
    yield from measured.results()
    if measured.interrupted:
        raise KeyboardInterrupt


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
    def answered(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def errors(self) -> dict[str, int]:
        return dict(Counter(answer.error for answer in self.answers if answer.error))

    def times(self) -> dict[str, list[float]]:
        good = self.answered
        gaps = [late - early for answer in good for early, late in pairwise(answer.chunks)]
        return {
            "first token": [answer.chunks[0] for answer in good if answer.chunks],
            "between chunks": gaps,
            "whole answer": [answer.ended for answer in good],
        }

    def results(self) -> Iterator[Result]:
        good = self.answered
        figures = {
            "requests": len(good),
            "requests_per_second": len(good) / self.seconds,
            "prompt_tokens_per_second": sum(a.prompt_tokens for a in good) / self.seconds,
            "answers": [asdict(answer) for answer in self.answers],
        }
        speed = sum(answer.new_tokens for answer in good) / self.seconds
        error = None if good else "no request was answered"
        yield Result(
            "load", "server", "", "", 0, 0, self.seconds, speed, figures=figures, error=error
        )
        for reason, count in self.errors.items():
            yield Result("load", "server", counted(count, "request"), error=reason)
        for name, values in self.times().items():
            if values:
                figures = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
                yield Result("times", name, figures=figures)


def check_server(load: Serve) -> None:
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


def send(load: Serve) -> Measured:
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
        if load.rate is not None:
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


def _bodies(load: Serve, draw: random.Random) -> Iterator[bytes]:
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


def _connect(load: Serve) -> http.client.HTTPConnection:
    address = urlsplit(load.url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    return kind(address.hostname or "", address.port, timeout=load.timeout)


def _ask(load: Serve, body: bytes, due: float) -> Answer:
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


def draw(_: Mapping[str, Part], rows: Sequence[Result], path: Path) -> None:
    """The distribution of the times to the first token and between chunks."""
    load = rows[0]
    answers = [Answer(**answer) for answer in load.figures["answers"]]
    times = Measured(load.seconds or 0.0, answers).times()
    with figure(path, columns=2) as axes:
        for axis, name in zip(axes, ("first token", "between chunks"), strict=True):
            shares = [(index + 1) / len(times[name]) for index in range(len(times[name]))]
            axis.plot([1e3 * value for value in sorted(times[name])], shares)
            axis.set(title=name, xlabel="milliseconds", xscale="log", ylabel="share of all")
            axis.grid(alpha=0.3)
