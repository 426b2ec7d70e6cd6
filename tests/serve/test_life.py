"""Clients that leave or don't read, an engine that fails, signals."""

import asyncio
import json
import logging
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from cli.commands import environment
from serve.live import GREEDY, Live, error_of, events, serving, wait_for

from xlstm7b.generate import Generator
from xlstm7b.generate.engine import Piece
from xlstm7b.generate.slots import Slots
from xlstm7b.serve import lifecycle, streaming
from xlstm7b.serve.answers import Telling
from xlstm7b.serve.limits import ApiError
from xlstm7b.serve.logs import log_to_stderr

PATH = "/v1/completions"
ENDLESS = {"prompt": "a", "max_tokens": 60000, "ignore_eos": True}


def is_idle(live: Live) -> bool:
    stats = live.service.engine.stats()
    return stats.running == stats.waiting == 0


def connect(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def ask(connection: socket.socket, **body: Any) -> None:
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)


def test_clients_that_leave(live: Live, generator: Generator) -> None:
    draw = random.Random(0)
    aborted = live.figure('request_success_total{finished_reason="abort"}')
    for n in range(1000):
        with connect(live) as connection:
            texts = draw.choice((1, 1, 3))
            ask(connection, **ENDLESS, stream=n % 4 > 0, n=texts)
            aborted += texts
            wanted, read = draw.choice((0, 0, 100, 1000, 4000)), 0
            wait_for(lambda: not is_idle(live))
            while n % 4 and read < wanted:
                read += len(connection.recv(4096))
    wait_for(lambda: is_idle(live))
    wait_for(lambda: live.figure('request_success_total{finished_reason="abort"}') == aborted)
    (want,) = generator.generate("Once", max_new_tokens=9, **GREEDY)
    got = live.post(PATH, prompt="Once", max_tokens=9, **GREEDY)
    assert got["choices"][0]["text"] == want.text


@pytest.mark.parametrize(("far_behind", "stalled"), [(64, 60.0), (1 << 20, 0.5)])
def test_readers_that_do_not_read(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, far_behind: int, stalled: float
) -> None:
    monkeypatch.setattr(streaming, "FAR_BEHIND", far_behind)
    monkeypatch.setattr(lifecycle, "PATIENCE", stalled)
    with serving(generator, send_buffer=4096) as live, connect(live) as sleeper:
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ask(sleeper, **ENDLESS, stream=True)
        wait_for(lambda: not is_idle(live))
        began = live.service.engine.stats().generated_tokens
        others = live.post(PATH, prompt="b", max_tokens=30, ignore_eos=True)
        assert others["usage"]["completion_tokens"] == 30
        wait_for(lambda: is_idle(live))  # it is given up, long before its end
        assert 30 < live.service.engine.stats().generated_tokens - began < 59000


@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_keep_nobody_waiting(
    live: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """100,000 scored tokens took a second of the thread that all requests share."""
    threads = []

    def scores(self: Telling, tokens: Sequence[int], *others: Any) -> Any:
        if len(tokens) == 2000:
            threads.append(threading.current_thread().name)
        return told(self, tokens, *others)

    told = Telling.scores
    monkeypatch.setattr(Telling, "scores", scores)
    body = {"prompt": "a" * 2000, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    assert live.client.post(PATH, json=body).status_code == 200
    (thread,) = threads
    assert thread.startswith("asyncio_")  # the loop's pool


def test_what_comes_faster_than_it_is_told_is_told_at_once(live: Live) -> None:
    """Tokens of two texts, an end and a failure, all before anybody looked."""
    (completion,) = live.service.generator.generate("a", max_new_tokens=3, **GREEDY)
    given = [
        Piece("ab", (1, 2), (-0.5, -1.0), ({1: -0.5}, {}), None, 0),
        Piece("", (3,), (-2.0,), ({},), None, 0),
        Piece("c", (), (), (), completion, 7),
    ]

    async def told(*news: tuple[int, Piece | Exception]) -> list[tuple[int, Piece]]:
        texts, receivers = live.service.texts(), []
        for _ in range(2):
            texts.submit(lambda receive: receivers.append(receive) or Mock())
        for index, one in news:
            receivers[index](one)
        pieces = texts.pieces()
        found = [await anext(pieces), await anext(pieces)]
        with pytest.raises(ApiError, match="the model failed"):
            await anext(pieces)
        return found

    whole = Piece("abc", (1, 2, 3), (-0.5, -1.0, -2.0), ({1: -0.5}, {}, {}), completion, 7)
    failure = RuntimeError("/a/secret/path")
    assert asyncio.run(
        told((0, given[0]), (1, given[1]), (0, given[1]), (0, given[2]), (1, failure))
    ) == [(0, whole), (1, given[1])]


def test_an_engine_that_is_not_warm(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Slots, "warm_up", lambda *_: go_on.wait())
    with serving(generator) as live:
        cold = live.client.get("/health")
        assert (cold.status_code, cold.json()) == (503, {"status": "starting"})
        go_on.set()
        assert live.post(PATH, prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert live.client.get("/health").json() == {"status": "ok"}


def test_an_engine_that_fails(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(generator) as live:
        wait_for(lambda: live.client.get("/health").json() == {"status": "ok"})
        with live.client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")

            def fail(*_: object) -> None:
                raise RuntimeError("/a/secret/path")

            monkeypatch.setattr(live.service.engine._slots, "decode", fail)
            told = [line for line in lines if line]
        assert json.loads(told[-1].removeprefix("data: ")) == {
            "error": {
                "message": "the model failed while this request was in flight",
                "type": "server_error",
                "param": None,
                "code": None,
            }
        }
        red = live.client.get("/health")
        assert (red.status_code, red.json()) == (503, {"status": "failed"})
        later = live.client.post(PATH, json={"prompt": "a"})
        assert later.status_code == 503
        assert error_of(later)["message"] == "the server is not available: it failed"
        assert "secret" not in later.text + red.text + "".join(told)
        assert live.client.get("/v1/models").status_code == 200


def test_a_fault_of_ours_tells_nothing(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/a/secret/path")

    monkeypatch.setattr(live.service.generator.tokenizer, "encode", fail, raising=False)
    answer = live.client.post("/tokenize", json={"prompt": "a"})
    assert answer.status_code == 500
    assert error_of(answer)["message"] == "the server failed"
    assert "x-request-id" in answer.headers


def test_logs_tell_how_a_stream_ended(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "xlstm7b.serve")

    def last_line() -> dict[str, Any]:
        wait_for(lambda: bool(caplog.records))
        return caplog.records[-1].fields  # type: ignore[attr-defined]

    live.stream(PATH, prompt="a", max_tokens=3, ignore_eos=True)
    wait_for(lambda: last_line()["path"] == PATH)
    assert (last_line()["ended"], last_line()["completion_tokens"]) == ("whole", 3)
    caplog.clear()
    with live.client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
    wait_for(lambda: bool(caplog.records))
    assert last_line()["ended"] == "abort"
    assert last_line()["completion_tokens"] >= 10
    caplog.clear()

    def fail(*_: object) -> None:
        raise RuntimeError("/a/secret/path")

    monkeypatch.setattr(Telling, "chunk", fail)
    with live.client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as answer:
        told = [line for line in answer.iter_lines() if line]
    assert [json.loads(line.removeprefix("data: "))["error"]["message"] for line in told] == [
        "the server failed"
    ]
    wait_for(lambda: len(caplog.records) == 2)
    assert caplog.records[0].message == "a request failed"
    assert last_line()["ended"] == "error"
    wait_for(lambda: is_idle(live))


def test_logs_are_lines_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever writes them: the engine's fault with its trace, a library's warning."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    log_to_stderr()
    try:
        raise RuntimeError("/a/secret/path")
    except RuntimeError:
        logging.getLogger("xlstm7b.generate.engine").exception("the engine failed")
    warnings.warn("of a\nlibrary", stacklevel=1)
    logging.captureWarnings(False)
    fault, warning = map(json.loads, capsys.readouterr().err.splitlines())
    assert (fault["level"], fault["message"]) == ("error", "the engine failed")
    assert fault["exception"].endswith("RuntimeError: /a/secret/path")
    assert warning["level"] == "warning"
    assert "of a\nlibrary" in warning["message"]


# As a process


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts `xlstm7b serve`; gives the process, and its address as it tells it."""
    processes = []

    def run(*options: object) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "xlstm7b", "serve", folder, "--port", 0, "--device", "cpu"]
        process = subprocess.Popen(
            [*map(str, command), *map(str, options)],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stderr is not None
        told = json.loads(process.stderr.readline())["message"]
        assert told.startswith("serving tiny at http://127.0.0.1:")
        url = told.split()[-1]
        wait_for(lambda: _answers(url))
        return process, url

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def log_lines(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    assert process.stderr is not None
    return [json.loads(line) for line in process.stderr]


def test_a_signal_lets_what_runs_finish(start: Callable[..., Any]) -> None:
    process, url = start("--api-key", "a-key")
    headers = {"authorization": "Bearer a-key"}
    body = {**ENDLESS, "max_tokens": 400, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        with client.stream("POST", PATH, json=body) as answer:
            told = events(answer.iter_lines())
            next(told)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/health").json() == {"status": "draining"})
            refused = httpx.post(f"{url}{PATH}", json={"prompt": "a"}, headers=headers)
            assert refused.status_code == 503
            assert "shutting down" in error_of(refused)["message"]
            *_, last = told
        assert last["usage"]["completion_tokens"] == 400
    assert process.wait(60) == 0
    lines = log_lines(process)
    warm, *others = [line["message"] for line in lines if line["message"] != "answered"]
    assert warm.startswith("warm after ")
    assert others == [
        "draining: new requests are refused, what runs is finished",
        "drained",
    ]
    (streamed,) = [line for line in lines if line.get("completion_tokens") == 400]
    assert (streamed["path"], streamed["status"], streamed["method"]) == (PATH, 200, "POST")
    assert "a-key" not in json.dumps(lines)


def test_a_signals_deadline(start: Callable[..., Any]) -> None:
    process, url = start("--drain-seconds", 0.3)
    with httpx.stream("POST", f"{url}{PATH}", json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        *_, last = (line for line in lines if line)
    told = json.loads(last.removeprefix("data: "))["error"]["message"]
    assert told == "the server is not available: it was stopped"
    assert process.wait(60) == 0


def test_a_second_signal_ends_at_once(start: Callable[..., Any]) -> None:
    process, url = start("--drain-seconds", 60)
    with httpx.stream("POST", f"{url}{PATH}", json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20  # not the minute that draining may take
