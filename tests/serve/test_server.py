"""The server process: connections that stall, logs, signals."""

import json
import logging
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from commands import environment
from live_server import LiveServer, error_of, events, serving, wait_for

import xlstm7b
from xlstm7b.generate import Generator
from xlstm7b.serve import server
from xlstm7b.serve.server import LogLevel, log_to_stderr

PATH = "/v1/completions"
ENDLESS = {"prompt": "a", "max_tokens": 60000, "ignore_eos": True, "stream": True}


def test_a_connection_without_headers_is_closed(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CLIENT_TIMEOUT", 0.3)
    whole = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(generator) as live:
        wait_for(lambda: live.service.engine.healthy)
        for sent in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost:", whole + b"GET /hea"):
            with live.connect() as slow:
                slow.sendall(sent)
                answer = b"".join(iter(lambda s=slow: s.recv(4096), b""))  # until it is closed
                assert answer.count(b"HTTP/1.1 200 OK") == sent.count(b"\r\n\r\n")
        with live.client.stream("POST", PATH, json=ENDLESS) as answer:
            began, lines = time.monotonic(), answer.iter_lines()
            while time.monotonic() < began + 1:  # an answer may take any time
                assert next(lines) is not None


def test_headers_that_do_not_end_are_refused(live: LiveServer) -> None:
    """Memory is not filled with them. A body may come with the headers in one packet."""
    for line in (b"a: " + b"b" * 1000 + b"\r\n", b"b" * 1000):
        with live.connect() as endless:
            endless.sendall(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n")
            sent = 0
            with suppress(ConnectionError):
                while sent < 50_000_000:
                    endless.sendall(line * 100)
                    sent += 100 * len(line)
            assert sent < 10_000_000  # what fits into the buffers of both sockets
    assert live.client.post("/tokenize", json={"prompt": "a" * 200_000}).json()["count"] > 100_000


def test_an_answer_that_is_not_read_is_dropped(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CLIENT_TIMEOUT", 0.3)
    body = json.dumps({"tokens": [99] * 1_000_000}).encode()
    head = (
        "POST /detokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with serving(generator, send_buffer=4096) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.socket() as sleeper:
            sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sleeper.settimeout(20)
            sleeper.connect((host, int(port)))
            sleeper.sendall(head.encode() + body)
            assert sleeper.recv(15) == b"HTTP/1.1 200 OK"
            time.sleep(2)
            read = 0
            with suppress(ConnectionResetError):
                while got := sleeper.recv(1 << 16):
                    read += len(got)
            assert read < 1_000_000
        assert live.post("/detokenize", tokens=[99]) == {"prompt": "a"}


def test_logs_are_json_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also an exception with its traceback, and a library's warning."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    log_to_stderr()
    try:
        raise RuntimeError("/a/secret/path")
    except RuntimeError:
        logging.getLogger("xlstm7b.serve.engine_thread").exception("the engine failed")
    warnings.warn("of a\nlibrary", stacklevel=1)
    logging.captureWarnings(False)
    failure, warning = map(json.loads, capsys.readouterr().err.splitlines())
    assert (failure["level"], failure["message"]) == ("error", "the engine failed")
    assert failure["exception"].endswith("RuntimeError: /a/secret/path")
    assert warning["level"] == "warning"
    assert "of a\nlibrary" in warning["message"]


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", ["ours debug", "ours info", "theirs debug", "theirs warning", "theirs error"]),
        ("info", ["ours info", "theirs warning", "theirs error"]),
        ("warning", ["theirs warning", "theirs error"]),
        ("error", ["theirs error"]),
    ],
)
def test_log_levels(
    level: LogLevel,
    written: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    ours, theirs = logging.getLogger("xlstm7b.serve"), logging.getLogger("a.library")
    for logger in (logging.root, logging.getLogger("xlstm7b"), logging.getLogger("uvicorn.error")):
        monkeypatch.setattr(logger, "level", logger.level)
    log_to_stderr(level)
    logging.captureWarnings(False)
    for logger in (ours, theirs):  # they remember which levels are enabled
        monkeypatch.setattr(logger, "_cache", {})
    ours.debug("ours debug")
    ours.info("ours info")
    theirs.debug("theirs debug")
    theirs.warning("theirs warning")
    theirs.error("theirs error")
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["message"] for line in lines] == written


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts `xlstm7b serve`; returns the process and the address from its log."""
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
        first = json.loads(process.stderr.readline())
        message, process.summary = first["message"], first
        assert message.startswith("serving tiny at http://127.0.0.1:")
        url = message.split()[-1]
        wait_for(lambda: _is_healthy(url))
        return process, url

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


HEAD = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\n"
JSON, CHUNKED = "content-type: application/json\r\n", "transfer-encoding: chunked\r\n"
KEY = "authorization: Bearer a-key\r\n"
WHOLE = '10\r\n{"prompt":"abc"}\r\n'
FLOODS = {  # what is sent once, and what is then repeated
    "headers": ("", "a: " + "b" * 1000 + "\r\n"),
    "one header": ("a: ", "b" * 1000),
    "trailers": (f"{CHUNKED}\r\n{WHOLE}0\r\n", "a: " + "b" * 1000 + "\r\n"),
    "short trailers": (f"{CHUNKED}\r\n{WHOLE}0\r\n", "a:\r\n"),
    "one trailer": (f"{CHUNKED}\r\n{WHOLE}0\r\na: ", "b" * 1000),
    "extensions": (f"{CHUNKED}\r\n", "1;" + "a" * 1000 + "\r\n \r\n"),
    "one extension": (f"{CHUNKED}\r\n1;", "a" * 1000),
    "short chunks": (f"{CHUNKED}\r\n", "1\r\n \r\n"),
    "after a request": (f"{CHUNKED}\r\n{WHOLE}0\r\n\r\n", "\r\n"),
    "requests in one packet": ("\r\n", HEAD + "\r\n"),
}


def test_what_is_not_a_body_is_limited(start: Callable[..., Any]) -> None:
    """Headers, trailers and framing take no memory, whether an answer is waited for or finished."""
    process, url = start("--api-key", "a-key")
    host, port = url.removeprefix("http://").split(":")

    def peak_mb() -> float:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def flood(head: str, begin: str, repeated: str) -> int:
        """The bytes that could be sent before the server closed the connection."""
        sent, block = 0, repeated.encode() * (200_000 // len(repeated))
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall((head + begin).encode())
            with suppress(ConnectionError):
                if "content-type" not in head + begin:
                    assert client.recv(1 << 16).startswith(b"HTTP/1.1 4")  # it is answered
                while sent < 30_000_000:
                    client.sendall(block)
                    sent += len(block)
        return sent

    heads = {"waiting": HEAD + KEY + JSON, "answered": HEAD + KEY, "no key": HEAD}
    httpx.post(f"{url}/tokenize", json={"prompt": "abc"})
    before, taken = peak_mb(), {}
    for kind, (begin, repeated) in FLOODS.items():
        for name, head in heads.items():
            if name != "waiting" and "\r\n\r\n" not in head + begin:
                continue  # nothing is answered before the headers end
            sent = flood(head, begin, repeated)
            assert sent < 10_000_000, (kind, name)  # what fits into the buffers of both sockets
            taken[kind, name] = peak_mb() - before
    assert max(taken.values()) < 20, taken
    ok = {"authorization": "Bearer a-key"}
    assert httpx.post(f"{url}/tokenize", json={"prompt": "a"}, headers=ok).status_code == 200


def test_idle_connections_of_one_address_do_not_keep_others_out(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_CONNECTIONS", 20)
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(generator) as live, ExitStack() as stack:
        host, port = live.url.removeprefix("http://").split(":")
        ordinary = stack.enter_context(live.connect())
        ordinary.sendall(request)
        assert ordinary.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        idle = [
            stack.enter_context(
                socket.create_connection((host, int(port)), 20, source_address=("127.0.0.2", 0))
            )
            for _ in range(60)
        ]
        with suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""  # closed: it is the oldest one of its address
        ordinary.sendall(request)
        assert ordinary.recv(1 << 16)
        assert live.client.get("/health").status_code == 200


def test_trailers_are_not_headers(live: LiveServer) -> None:
    """Neither of their own request nor of the next one on the connection."""
    for trailers in ("content-type: application/json\r\n", "x: y\r\nx-request-id: mine\r\n"):
        with live.connect() as client:
            request = HEAD + CHUNKED + f"\r\n{WHOLE}0\r\n{trailers}\r\n"
            client.sendall((request + "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").encode())
            answers = b""
            while b'{"status":"ok"}' not in answers:
                answers += client.recv(1 << 16)
            assert answers.startswith(b"HTTP/1.1 415 ")
            assert b"x-request-id: mine" not in answers


def log_lines(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    assert process.stderr is not None
    return [json.loads(line) for line in process.stderr]


def test_a_signal_lets_running_requests_finish(start: Callable[..., Any]) -> None:
    process, url = start("--api-key", "a-key")
    headers = {"authorization": "Bearer a-key"}
    body = {**ENDLESS, "max_tokens": 400, "stream_options": {"include_usage": True}}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        with client.stream("POST", PATH, json=body) as answer:
            received = events(answer.iter_lines())
            next(received)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/health").json() == {"status": "draining"})
            refused = httpx.post(f"{url}{PATH}", json={"prompt": "a"}, headers=headers)
            assert refused.status_code == 503
            assert "the server is shutting down" in error_of(refused)["message"]
            *_, last = received
        assert last["usage"]["completion_tokens"] == 400
    assert process.wait(60) == 0
    lines = log_lines(process)
    warm, *others = [line["message"] for line in lines if line["message"] != "answered"]
    assert warm.startswith("engine warmed up in ")
    assert others == [
        "draining: new requests are refused, running ones are finished",
        "drained",
    ]
    (streamed,) = [line for line in lines if line.get("completion_tokens") == 400]
    assert (streamed["path"], streamed["status"], streamed["method"]) == (PATH, 200, "POST")
    assert "a-key" not in json.dumps(lines)


def test_the_first_line_sums_up_the_server(start: Callable[..., Any], tmp_path: Path) -> None:
    states, cache = tmp_path / "new" / "states", tmp_path / "cache"
    folders = ("--states-folder", states, "--cache-folder", cache)
    process, _ = start("--slots", 3, "--cache-gb", 0.5, "--api-key", "a-key", *folders)
    assert states.is_dir()
    assert cache.is_dir()
    want = {
        "level": "info",
        "version": xlstm7b.__version__,
        "models": ["tiny"],
        "device": "cpu",
        "dtype": "float32",
        "state_dtype": "float32",
        "slots": 3,
        "speculate": "off",
        "cache_gb": 0.5,
        "host_cache_gb": 0,
        "cache_folder": str(cache),
        "states_folder": str(states),
        "api_keys": 1,
        "chat_template": False,
    }
    summary = process.summary
    assert {name: summary[name] for name in want} == want
    assert 0 < summary["slots_gb"] < summary["memory_gb"]
    assert "a-key" not in json.dumps(summary)


def test_a_hangup_reloads_the_keys(start: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    process, url = start("--api-key-file", file, "--mute-paths", "/health,/metrics")

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{url}/v1/models", headers=headers).status_code

    assert (status("old"), status("new")) == (200, 401)
    file.write_text("new\nother\n")
    process.send_signal(signal.SIGHUP)
    wait_for(lambda: status("new") == 200)
    assert status("old") == 401
    file.write_text("")  # a mistake: the keys stay
    process.send_signal(signal.SIGHUP)
    httpx.get(f"{url}/metrics", headers={"authorization": "Bearer new"})
    time.sleep(0.3)
    assert (status("new"), status("x")) == (200, 401)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    lines = log_lines(process)
    messages = [line["message"] for line in lines]
    assert "reloaded the API keys: there are 2 now" in messages
    assert f"the API keys were not reloaded: {file} contains no API key" in messages
    assert {line["path"] for line in lines if "path" in line} == {"/v1/models"}


def test_draining_has_a_time_limit(start: Callable[..., Any]) -> None:
    process, url = start("--drain-seconds", 0.3)
    with httpx.stream("POST", f"{url}{PATH}", json=ENDLESS) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        *_, last = (line for line in lines if line)
    message = json.loads(last.removeprefix("data: "))["error"]["message"]
    assert message == "the server is not available: the server was stopped"
    assert process.wait(60) == 0
    messages = [line["message"] for line in log_lines(process)]
    assert "not drained after 0.3 s: running requests are aborted" in messages


def test_a_second_signal_ends_the_process_at_once(start: Callable[..., Any]) -> None:
    process, url = start("--drain-seconds", 60)
    with httpx.stream("POST", f"{url}{PATH}", json=ENDLESS) as answer:
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
