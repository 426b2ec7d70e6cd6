"""Keys on every route, and limits that are held before anything is done."""

import base64
import json
import re
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from serve.live import Live, error_of, serving, wait_for

from xlstm7b.generate import Generator
from xlstm7b.serve import lifecycle
from xlstm7b.serve.limits import Limits, check_key, check_origins
from xlstm7b.serve.schema import ChatBody

KEYS = ("first-key", "second+key/=")
SLOW = {"prompt": "a", "max_tokens": 60000, "ignore_eos": True, "temperature": 0}


def routes(live: Live) -> list[tuple[str, str]]:
    """Every method and path that the application answers."""
    found = [
        (method, re.sub(r"{.*?}", "x", route.path))
        for route in live.app.routes
        for method in route.methods
    ]
    assert {"/", "/health", "/metrics", "/openapi.json", "/v1/completions"} <= {p for _, p in found}
    return found


def basic(user: str, password: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_every_route_needs_a_key(generator: Generator) -> None:
    with serving(generator, keys=KEYS) as live, httpx.Client(base_url=live.url) as stranger:
        wrong = [
            {},
            {"authorization": "Bearer"},
            {"authorization": "Bearer first-ke"},
            {"authorization": "Bearer first-key2"},
            {"authorization": "first-key"},
            {"authorization": "Basic first-key"},
            basic("first-key", ""),
            basic("", "first"),
        ]
        for method, path in [*routes(live), ("GET", "/nowhere"), ("POST", "/health/")]:
            for headers in wrong:
                answer = stranger.request(method, path, headers=headers)
                if path == "/health":
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401, (method, path)
                token = headers.get("authorization", "").startswith("Bearer ")
                scheme = "Bearer" if token else "Basic"  # for the latter a browser asks
                assert answer.headers["www-authenticate"] == f'{scheme} realm="xlstm7b"'
                if method != "HEAD":
                    assert error_of(answer)["code"] == "invalid_api_key"
        for right in (
            *({"authorization": f"Bearer {key}"} for key in KEYS),
            {"authorization": "bearer first-key"},
            basic("", "first-key"),
            basic("anybody", "second+key/="),
        ):
            assert stranger.get("/v1/models", headers=right).status_code == 200


@given(key=st.text(max_size=8))
def test_what_can_be_a_key(key: str) -> None:
    if re.fullmatch(r"[!-~]+", key):
        assert check_key(key, "keys.txt:3") == key
    else:
        with pytest.raises(ValueError, match=r"^keys\.txt:3: an API key must be"):
            check_key(key, "keys.txt:3")


def test_what_can_be_an_origin() -> None:
    right = ["https://their.site", "http://localhost:3000", "http://[::1]:80", "*"]
    assert check_origins(right) == right
    for wrong in ("https://their.site/", "their.site", "", "https://", "ftp://a", "https://a/b"):
        with pytest.raises(ValueError, match="is not an origin"):
            check_origins([wrong])


def test_bodies(generator: Generator) -> None:
    limits = Limits(body_bytes=1000, body_seconds=1.0, prompt_tokens=20, new_tokens=50)
    with serving(generator, limits=limits) as live:
        said = live.refused("/v1/completions", 413, prompt="a" * 1000)
        assert said == "the request's body is longer than 1000 bytes"

        def in_pieces():
            yield from [b" " * 300] * 4

        kind = {"content-type": "application/json"}
        assert live.client.post("/tokenize", content=in_pieces(), headers=kind).status_code == 413
        plain = live.client.post("/tokenize", content=b'{"prompt": "a"}')
        assert plain.status_code == 415  # a foreign page could send this unasked
        for content in (b"", b"{", b"\xff", b"[]", b"1e999", b'"a"', b"[" * 900, b"9" * 900):
            answer = live.client.post("/tokenize", content=content, headers=kind)
            assert answer.status_code == 400, content
            error_of(answer)
        said = live.refused("/v1/completions", 400, prompt="a" * 21)
        assert said == "the prompts of all texts are longer than 20 tokens"
        live.refused("/v1/completions", 400, prompt="a" * 7, n=3)
        assert live.post("/v1/completions", prompt="a" * 7, n=2)["choices"]
        assert "between 1 and 50" in live.refused("/v1/completions", 400, prompt="a", max_tokens=51)
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(
                b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: 9\r\n\r\n{"
            )
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "body",
    [
        {f"x{n}": n for n in range(5000)},
        {"messages": [{f"x{n}": n for n in range(5000)}]},
        {"messages": [{"role": "x"}] * 5000},
        {"logit_bias": {str(n): "x" for n in range(5000)}},
        {"metadata": {str(n): n for n in range(5000)}},
        {"stop": [1] * 5000},
    ],
)
def test_many_mistakes_make_few_errors(body: dict) -> None:
    """An error of each of 250,000 mistakes kept the server from all else for 6 s."""
    with pytest.raises(ValidationError) as raised:
        ChatBody.model_validate({"messages": [{"role": "user"}], **body})
    assert raised.value.error_count() <= 20


def test_names_of_this_machine(generator: Generator) -> None:
    """A page elsewhere may make its own name lead here: its browser sends that name."""
    with serving(generator) as live:
        for host in (
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1:8000",
            "[::1]:8000",
            "[::1]",
            "10.0.0.1",
        ):
            assert live.client.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in (
            "a.example",
            "a.example:8000",
            "localhost.a.example",
            "127.0.0.1.a.example",
            "",
        ):
            answer = live.client.get("/v1/models", headers={"host": host})
            assert answer.status_code == 403, host
            assert error_of(answer)["message"].startswith("without an API key, this server goes by")
    with serving(generator, keys=KEYS) as live:
        assert live.client.get("/v1/models", headers={"host": "a.example"}).status_code == 200


def test_heads_that_do_not_come(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "PATIENCE", 0.3)
    whole = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(generator) as live:
        host, port = live.url.removeprefix("http://").split(":")
        for sent in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost:", whole + b"GET /hea"):
            with socket.create_connection((host, int(port)), timeout=20) as slow:
                slow.sendall(sent)
                answer = b"".join(iter(lambda s=slow: s.recv(4096), b""))  # until it is closed
                assert answer.count(b"HTTP/1.1 200 OK") == sent.count(b"\r\n\r\n")
        with live.client.stream("POST", "/v1/completions", json={**SLOW, "stream": True}) as answer:
            began, lines = time.monotonic(), answer.iter_lines()
            while time.monotonic() < began + 1:  # an answer may take as long as it likes
                assert next(lines) is not None


def test_answers_that_nobody_reads(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a whole answer is not kept for ever, either."""
    monkeypatch.setattr(lifecycle, "PATIENCE", 0.3)
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


def test_a_full_queue_and_its_recovery(generator: Generator) -> None:
    with serving(generator, slots=2, most_waiting=3) as live:
        stats = live.service.engine.stats
        with httpx.Client(base_url=live.url, timeout=30) as client:
            streams = [client.stream("POST", "/v1/completions", json={**SLOW, "stream": True})
                       for _ in range(5)]  # fmt: skip
            for stream in streams[:2]:
                stream.__enter__()
            wait_for(lambda: stats().running == 2)
            for stream in streams[2:]:
                stream.__enter__()
            wait_for(lambda: stats().waiting == 3)
            for path, body in (
                ("/v1/completions", SLOW),
                ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ):
                answer = client.post(path, json=body)
                assert answer.status_code == 429
                assert 1 <= int(answer.headers["retry-after"]) <= 600
                assert error_of(answer)["type"] == "rate_limit_error"
            assert (stats().running, stats().waiting) == (2, 3)
            streams[0].__exit__(None, None, None)
            wait_for(lambda: stats().waiting == 2)
            # Three more do not fit, though the first of them does: none stays.
            assert client.post("/v1/completions", json={**SLOW, "n": 3}).status_code == 429
            assert stats().waiting == 2
            for stream in streams[1:]:
                stream.__exit__(None, None, None)
        wait_for(lambda: stats().running == stats().waiting == 0)
        assert live.post("/v1/completions", prompt="a", max_tokens=3)["choices"]


def test_requests_at_once(generator: Generator) -> None:
    with serving(generator, limits=Limits(requests=2)) as live:
        streams = [live.client.stream("POST", "/v1/completions", json={**SLOW, "stream": True})
                   for _ in range(2)]  # fmt: skip
        for stream in streams:
            stream.__enter__()
        answer = live.client.get("/v1/models")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert live.client.get("/health").status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)
        wait_for(lambda: live.client.get("/v1/models").status_code == 200)


def test_other_origins(generator: Generator) -> None:
    preflight = {"origin": "http://b.example", "access-control-request-method": "POST"}
    with serving(generator) as live:
        answer = live.client.options("/v1/completions", headers=preflight)
        assert answer.status_code == 405
        assert "access-control-allow-origin" not in answer.headers
    with serving(generator, cors=("http://b.example",), keys=KEYS) as live:
        answer = httpx.options(f"{live.url}/v1/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "http://b.example"
        refused = httpx.get(f"{live.url}/v1/models", headers={"origin": "http://b.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://b.example"
        stranger = {**preflight, "origin": "http://c.example"}
        answer = httpx.options(f"{live.url}/v1/completions", headers=stranger)
        assert "access-control-allow-origin" not in answer.headers


def test_ids_of_requests(live: Live) -> None:
    answer = live.client.post("/tokenize", json={"prompt": "a"}, headers={"x-request-id": "a.b-1"})
    assert answer.headers["x-request-id"] == "a.b-1"
    odd = live.client.get("/health", headers={"x-request-id": "a b"})
    assert re.fullmatch("[0-9a-f]{24}", odd.headers["x-request-id"])
    done = live.client.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine"}
    )
    assert json.loads(done.text)["id"] == "cmpl-mine"


def test_clients_side_by_side(live: Live, generator: Generator) -> None:
    """Greedy texts are those of each alone, whoever else is there."""
    prompts = [f"{n} " * (n + 1) for n in range(12)]
    want = [generator.generate(p, max_new_tokens=20, temperature=0)[0].text for p in prompts]
    got: dict[int, str] = {}

    def ask(index: int) -> None:
        body = {"prompt": prompts[index], "max_tokens": 20, "temperature": 0}
        answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=30)
        got[index] = answer.json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[index] for index in range(len(prompts))] == want
