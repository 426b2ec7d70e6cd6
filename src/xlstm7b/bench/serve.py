"""`xlstm7b bench serve URL`: how a running server bears load, seen from its clients.

Requests come as they do from many strangers: at random (Poisson), whether or not earlier ones are
answered; times count from when a request was due, so that a server which makes clients wait cannot
hide it. Or, with `--clients`, from so many that each wait for their answer and ask again. Prompts
are random ids of mixed lengths, no two alike, after `--shared-tokens` that all of them begin with;
answers are streamed and go on to their full length.
"""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from urllib.parse import urlsplit

_IDS = range(2, 256)  # in every vocabulary, and no end of text


@dataclass(frozen=True)
class Load:
    """What a server is put under."""

    url: str
    rate: float = 4.0  # requests a second, if there are no clients
    clients: int = 0
    seconds: float = 30.0
    prompt_tokens: tuple[int, ...] = (32, 128, 512)  # each request draws one of these
    new_tokens: tuple[int, ...] = (16, 64, 128)
    shared_tokens: int = 0  # of one beginning of all prompts
    seed: int = 0
    timeout: float = 120.0  # of an answer, from when it was asked for

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise ValueError(f"{self.url!r} is not a server's address, as http://127.0.0.1:8000")
        if not (self.rate > 0 and self.seconds > 0 and self.timeout > 0 and self.clients >= 0):
            raise ValueError("rate, seconds and timeout must be positive, and clients not negative")
        if not self.prompt_tokens or not self.new_tokens:
            raise ValueError("there must be lengths of prompts and of answers")
        if min(self.shared_tokens, *self.prompt_tokens) < 0:
            raise ValueError("lengths must not be negative")
        if self.shared_tokens + min(self.prompt_tokens) < 1 or min(self.new_tokens) < 1:
            raise ValueError("there must be at least one token to read and to generate")

    @property
    def path(self) -> str:
        """Of the server, in front of all routes: clients of OpenAI's have /v1 in its address."""
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of its port
        return False


@dataclass
class Answer:
    """What became of one request; times in seconds since it was due."""

    chunks: list[float] = field(default_factory=list)  # when each came
    prompt_tokens: int = 0
    new_tokens: int = 0
    ended: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Report:
    load: Load
    seconds: float
    answers: list[Answer]
    interrupted: bool = False

    def first(self) -> list[float]:
        return [answer.chunks[0] for answer in self._good() if answer.chunks]

    def between(self) -> list[float]:
        return [
            later - earlier
            for answer in self._good()
            for earlier, later in zip(answer.chunks, answer.chunks[1:], strict=False)
        ]

    @property
    def requests_per_second(self) -> float:
        """Of those that were answered."""
        return len(self._good()) / self.seconds

    def summary(self) -> dict[str, object]:
        good = self._good()
        return {
            "requests": len(self.answers),
            "errors": dict(Counter(answer.error for answer in self.answers if answer.error)),
            "seconds": self.seconds,
            "requests_per_second": self.requests_per_second,
            "prompt_tokens_per_second": sum(a.prompt_tokens for a in good) / self.seconds,
            "new_tokens_per_second": sum(a.new_tokens for a in good) / self.seconds,
            "first_token_seconds": _percentiles(self.first()),
            "between_tokens_seconds": _percentiles(self.between()),
            "whole_seconds": _percentiles([answer.ended for answer in good]),
        }

    def _good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    """The smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return {
        f"p{percent}": ordered[max(0, -(-percent * len(ordered) // 100) - 1)]
        for percent in (50, 90, 99)
        if ordered
    }


def check_server(load: Load) -> None:
    """Raises an `OSError` if nobody answers there, a `ValueError` if they are not ready."""
    connection = _connect(load)
    try:
        connection.request("GET", f"{load.path}/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f"{load.url} does not answer: {error}") from error
    finally:
        connection.close()
    if status >= 500:
        raise ValueError(f"{load.url} is not ready: its /health says {status}")


def run(load: Load, api_key: str | None = None) -> Report:
    """Puts a server under load; returns when all is answered, or with what is at Ctrl-C."""
    draw = random.Random(load.seed)
    answers: list[Answer] = []
    began = time.perf_counter()

    def ask(body: bytes, due: float) -> None:
        answers.append(_ask(load, body, due, api_key))

    def be_a_client(bodies: Iterator[bytes]) -> None:
        while time.perf_counter() - began < load.seconds:
            ask(next(bodies), time.perf_counter())

    threads: list[threading.Thread] = []

    def start(work: Callable[..., None], *arguments: object) -> None:
        # The process need not wait for it: Ctrl-C leaves answers behind that may take minutes.
        threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        threads[-1].start()

    interrupted = False
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
    return Report(load, time.perf_counter() - began, [*answers], interrupted)


def _bodies(load: Load, draw: random.Random) -> Iterator[bytes]:
    shared = random.Random(load.seed).choices(_IDS, k=load.shared_tokens)
    while True:
        asked = {
            "prompt": shared + draw.choices(_IDS, k=draw.choice(load.prompt_tokens)),
            "max_tokens": draw.choice(load.new_tokens),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield json.dumps(asked).encode()


def _connect(load: Load) -> http.client.HTTPConnection:
    where = urlsplit(load.url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    return kind(where.hostname or "", where.port, timeout=load.timeout)


def _ask(load: Load, body: bytes, due: float, api_key: str | None) -> Answer:
    answer, last = Answer(), time.perf_counter() + load.timeout
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    connection = _connect(load)
    try:
        connection.request("POST", f"{load.path}/v1/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"status {response.status}"
        else:
            _follow(response, answer, due, last)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        answer.error = type(error).__name__
    finally:
        connection.close()
    answer.ended = time.perf_counter() - due
    return answer


def _follow(response: http.client.HTTPResponse, answer: Answer, due: float, last: float) -> None:
    answer.error = "cut short"
    for line in response:
        if time.perf_counter() > last:
            raise TimeoutError
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            answer.error = None
            return
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            answer.error = "error in the stream"
            return
        if event["choices"]:
            answer.chunks.append(time.perf_counter() - due)
        if event["usage"]:
            answer.prompt_tokens = event["usage"]["prompt_tokens"]
            answer.new_tokens = event["usage"]["completion_tokens"]


def show(report: Report) -> None:
    """The summary, a line a figure."""
    for name, value in report.summary().items():
        if isinstance(value, dict):
            parts = (f"{key} {_figure(part)}" for key, part in value.items())
            print(f"{name:26}{'  '.join(parts) or 'none'}")
        else:
            print(f"{name:26}{_figure(value)}")


def _figure(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def write(report: Report, json_path: Path | None, plot_path: Path | None) -> None:
    """The load, the summary and every answer as JSON; how times are distributed as a plot."""
    if json_path is not None:
        document = {
            "date": date.today().isoformat(),
            "load": asdict(report.load),
            "summary": report.summary(),
            "answers": [asdict(answer) for answer in report.answers],
        }
        json_path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    if plot_path is not None:
        _plot(report, plot_path)


def _plot(report: Report, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, sides = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for side, title, values in zip(
        sides, ("first token", "between tokens"), (report.first(), report.between()), strict=True
    ):
        shares = [(place + 1) / len(values) for place in range(len(values))]
        side.plot([1e3 * value for value in sorted(values)], shares)
        side.set(title=title, xlabel="milliseconds", xscale="log")
        side.grid(alpha=0.3)
    sides[0].set_ylabel("share of all")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
