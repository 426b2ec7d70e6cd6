"""API keys, hosts, origins, limits and request IDs: what is checked before a body is parsed."""

import base64
import gzip
import json
import logging
import re
import select
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import LiveServer, error_of, serving, wait_for
from starlette.routing import Route

from xlstm7b.generate import Generator
from xlstm7b.serve.middleware import ApiKeys, check_key, check_origins
from xlstm7b.serve.protocol import Limits

KEYS = ("first-key", "second+key/=")
ENDLESS = {"prompt": "a", "max_tokens": 60000, "ignore_eos": True, "temperature": 0, "stream": True}


def routes(live: LiveServer) -> list[tuple[str, str]]:
    """Every method and path of the application."""
    found = [
        (method, route.path)
        for route in live.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    ]
    for path, methods in live.app.openapi()["paths"].items():  # of the routers, too
        found += [(method.upper(), re.sub(r"{.*?}", "x", path)) for method in methods]
    expected = {"/", "/health", "/metrics", "/openapi.json", "/v1/completions", "/v1/states/x"}
    expected |= {"/v1/responses", "/v1/responses/x", "/v1/embeddings", "/version"}
    expected |= {"/tokenizer_info", "/markdown", "/app.js", "/v1/states/x/content"}
    assert expected <= {path for _, path in found}
    return found


def basic(user: str, password: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_every_route_but_health_needs_a_key(generator: Generator) -> None:
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
        wait_for(lambda: live.service.engine.healthy)
        for method, path in [*routes(live), ("GET", "/nowhere"), ("POST", "/health/")]:
            for headers in wrong:
                answer = stranger.request(method, path, headers=headers)
                if path == "/health":
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401, (method, path)
                is_bearer = headers.get("authorization", "").startswith("Bearer ")
                scheme = "Bearer" if is_bearer else "Basic"  # browsers ask for a Basic password
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
def test_a_key_is_printable_ascii(key: str) -> None:
    if re.fullmatch(r"[!-~]+", key):
        assert check_key(key, "keys.txt:3") == key
    else:
        with pytest.raises(ValueError, match=r"^keys\.txt:3: an API key must be"):
            check_key(key, "keys.txt:3")


def test_an_origin_is_written_as_browsers_send_it() -> None:
    right = ["https://their.site", "http://localhost:3000", "http://[::1]:80", "*"]
    assert check_origins(right) == right
    for wrong in ("https://their.site/", "their.site", "", "https://", "ftp://a", "https://a/b"):
        with pytest.raises(ValueError, match="is not an origin"):
            check_origins([wrong])


def test_limits_of_bodies(generator: Generator) -> None:
    limits = Limits(body_bytes=1000, body_seconds=1.0, prompt_tokens=20, new_tokens=50)
    with serving(generator, limits=limits) as live:
        message = live.refused("/v1/completions", 413, prompt="a" * 1000)
        assert message == "the request body is longer than 1000 bytes"

        def in_parts():
            yield from [b" " * 300] * 4

        kind = {"content-type": "application/json"}
        assert live.client.post("/tokenize", content=in_parts(), headers=kind).status_code == 413
        plain = live.client.post("/tokenize", content=b'{"prompt": "a"}')
        assert plain.status_code == 415  # any web page could send this without asking
        content = gzip.compress(b'{"prompt": "a"}')
        answer = live.client.post(
            "/tokenize", content=content, headers={**kind, "content-encoding": "gzip"}
        )
        assert answer.status_code == 415
        assert "must not be compressed" in error_of(answer)["message"]
        for content in (b"", b"{", b"\xff", b"[]", b"1e999", b'"a"', b"[" * 900, b"9" * 900):
            answer = live.client.post("/tokenize", content=content, headers=kind)
            assert answer.status_code == 400, content
            error_of(answer)
        message = live.refused("/v1/completions", 400, prompt="a" * 21)
        assert message.startswith("This model's maximum context length is 20 tokens.")
        live.refused("/v1/completions", 400, prompt="a" * 7, n=3)
        assert live.post("/v1/completions", prompt="a" * 7, n=2)["choices"]
        message = live.refused("/v1/completions", 400, prompt="a", max_tokens=51)
        assert message == "max_tokens must be between 1 and 50, not 51"
        with live.connect() as slow:
            slow.sendall(
                b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: 9\r\n\r\n{"
            )
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


def test_messages_are_limited(generator: Generator) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with serving(generator, limits=Limits(messages=2, new_tokens=1)) as live:
        for path in ("/v1/chat/completions", "/tokenize"):
            live.post(path, messages=talk)
            message = live.refused(path, 400, messages=[*talk, *talk])
            assert message == "messages must have at most 2 entries, not 4"


def test_keys_can_be_replaced(generator: Generator) -> None:
    def names() -> list[str | None]:
        return [keys.find_name(key) for key in (b"old", b"kept", b"new", b"")]

    keys = ApiKeys({"old": "A", "kept": "B"})
    assert names() == ["A", "B", None, None]
    keys.replace({"kept": "B", "new": "C"})
    assert names() == [None, "B", "C", None]
    assert ApiKeys().find_name(b"") == ""


def test_the_log_gives_the_reason_and_field_of_refusals(
    generator: Generator, caplog: pytest.LogCaptureFixture
) -> None:
    def last_line() -> tuple[str, dict[str, Any]]:
        def lines() -> list[logging.LogRecord]:
            return [record for record in caplog.records if record.message == "answered"]

        wait_for(lambda: bool(lines()))
        (record,) = lines()
        caplog.clear()
        return record.levelname, record.fields  # type: ignore[attr-defined]

    caplog.set_level(logging.INFO, "xlstm7b.serve")
    muted = ("/health", "/metrics")
    with serving(generator, keys=KEYS, limits=Limits(body_bytes=1000), muted=muted) as live:
        for path, body, status, error, param in (
            ("/v1/completions", {"prompt": 3}, 400, "prompt must be a string", "prompt"),
            ("/v1/completions", {"prompt": "a", "top_p": 2}, 400, "top_p must be", "top_p"),
            ("/v1/completions", {"prompt": "a" * 1000}, 413, "the request body is longer", None),
            ("/v1/completions", {"model": "x"}, 404, "there is no model 'x'", "model"),
            ("/nowhere", {}, 404, "there is nothing at /nowhere", None),
            ("/metrics", {}, 405, "/metrics takes GET, not POST", None),
        ):
            answer = live.client.post(path, json=body, headers={"x-request-id": "mine"})
            level, fields = last_line()
            assert (answer.status_code, fields["status"], fields["request_id"]) == (
                status,
                status,
                "mine",
            )
            assert level == "WARNING"
            assert fields["error"].startswith(error)
            assert fields.get("param") == param
            assert (fields["client"], fields["key_name"]) == ("127.0.0.1", "key 1")
            assert KEYS[0] not in str(fields)
        second = {"authorization": f"Bearer {KEYS[1]}"}
        httpx.get(f"{live.url}/v1/models", headers=second)
        assert last_line()[1]["key_name"] == "key 2"
        httpx.get(f"{live.url}/v1/models", headers={"authorization": "Bearer a-secret"})
        _, fields = last_line()
        assert (fields["status"], fields["error"]) == (401, "this API key is wrong")
        assert "secret" not in str(fields)
        assert "key_name" not in fields
        # A muted path has lines for refused requests only.
        caplog.clear()
        for path in muted:
            assert live.client.get(path).status_code == 200
        assert httpx.get(f"{live.url}/metrics").status_code == 401
        level, fields = last_line()
        assert (level, fields["path"]) == ("WARNING", "/metrics")
        live.client.get("/v1/models")
        level, fields = last_line()
        assert (level, fields["path"]) == ("INFO", "/v1/models")


def test_without_keys_a_host_must_be_local(generator: Generator) -> None:
    """A web page can let its own host name resolve to this machine; browsers send that name."""
    local = ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.0.0.1")
    others = ("a.example", "a.example:8000", "localhost.a.example", "127.0.0.1.a.example", "")
    with serving(generator) as live:
        for host in local:
            assert live.client.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in others:
            answer = live.client.get("/v1/models", headers={"host": host})
            assert answer.status_code == 403, host
            message = error_of(answer)["message"]
            assert message.startswith(f"the Host header is {host!r}; a server without an API key")
    with serving(generator, keys=KEYS) as live:
        assert live.client.get("/v1/models", headers={"host": "a.example"}).status_code == 200


def test_requests_at_the_same_time_are_limited(generator: Generator) -> None:
    with serving(generator, limits=Limits(requests=2)) as live:
        streams = [live.client.stream("POST", "/v1/completions", json=ENDLESS) for _ in range(2)]
        for stream in streams:
            stream.__enter__()
        answer = live.client.get("/v1/models")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert error_of(answer)["message"] == (
            "the server handles at most 2 requests at the same time: try again later"
        )
        assert live.client.get("/health").status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)
        wait_for(lambda: live.client.get("/v1/models").status_code == 200)


HEAD = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
UPLOAD = "PUT /v1/states HTTP/1.1\r\nhost: localhost\r\n"


def begin_body(live: LiveServer, head: str, length: int | None, address: str = "") -> socket.socket:
    """A connection that has sent the headers and one byte of a body. None: its length is open."""
    host, port = live.url.removeprefix("http://").split(":")
    source = (address or host, 0)
    connection = socket.create_connection((host, int(port)), 20, source_address=source)
    framing = f"content-length: {length}\r\n\r\n "
    if length is None:
        framing = "transfer-encoding: chunked\r\n\r\n1\r\n \r\n"
    connection.sendall((head + framing).encode())
    return connection


def received(client: socket.socket) -> str:
    """A refusal with its body."""
    answer = ""
    while "}}" not in answer:
        answer += client.recv(1 << 16).decode()
    return answer


def test_a_request_counts_when_its_body_is_there(generator: Generator, tmp_path: Path) -> None:
    """Clients that send a byte now and then take nobody's place."""
    with serving(generator, limits=Limits(requests=2), states=tmp_path) as live:
        with ExitStack() as slow:
            for head in [HEAD] * 30 + [UPLOAD] * 30:
                slow.enter_context(begin_body(live, head, 100))
            time.sleep(0.1)
            assert live.post("/tokenize", prompt="a")["count"] == 2
            saved = live.post("/v1/states", prompt="a")["id"]
            state = live.client.get(f"/v1/states/{saved}/content")
            assert live.client.put("/v1/states", content=state.content).status_code == 200


def test_a_body_must_not_come_too_slowly(generator: Generator, tmp_path: Path) -> None:
    limits = Limits(slow_seconds=0.3, slow_bytes=1000)
    with serving(generator, limits=limits, states=tmp_path) as live:
        for head, kind in ((HEAD, "the request body"), (UPLOAD, "the file")):
            with begin_body(live, head, 100_000) as client:
                began, sent = time.monotonic(), 0
                while not select.select([client], [], [], 0.02)[0]:
                    client.sendall(b" " * 10)  # 500 bytes per second
                    sent += 10
                answer = received(client)
                assert answer.startswith("HTTP/1.1 408 ")
                assert f"{kind} arrived more slowly than 1000 bytes per second" in answer
                assert time.monotonic() - began < 10
        with begin_body(live, HEAD, 3001) as client:
            for _ in range(30):  # three seconds are allowed
                time.sleep(0.02)
                client.sendall(b" " * 100)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")  # no JSON


def test_bodies_that_are_received_are_limited(generator: Generator) -> None:
    """In bytes, of all clients together and of each."""
    limits = Limits(body_bytes=1000, bodies_bytes=4000)
    with serving(generator, limits=limits) as live, ExitStack() as stack:
        stack.enter_context(begin_body(live, HEAD, 1000, "127.0.0.3"))
        stack.enter_context(begin_body(live, HEAD, 1000, "127.0.0.2"))
        chunked = stack.enter_context(begin_body(live, HEAD, None, "127.0.0.2"))  # as 1000
        time.sleep(0.1)
        with begin_body(live, HEAD, 1000, "127.0.0.2") as client:
            answer = received(client)
        assert answer.startswith("HTTP/1.1 429 ")
        assert "retry-after: 1" in answer
        assert "MiB of incoming request bodies of this client at the same time" in answer
        last = stack.enter_context(begin_body(live, HEAD, 1000, "127.0.0.3"))
        time.sleep(0.1)
        with begin_body(live, HEAD, 1, "127.0.0.4") as client:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
        last.sendall(b" " * 999)
        chunked.sendall(b"0\r\n\r\n")
        for client in (last, chunked):
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")  # no JSON
        with begin_body(live, HEAD, 1, "127.0.0.4") as client:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


def test_requests_and_choices_of_a_client_are_limited(generator: Generator) -> None:
    """A client is a key, or an address if there are no keys."""
    limits = Limits(requests=10, client_requests=2)
    one, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    for keys in (KEYS, ()):
        with serving(generator, limits=limits, keys=keys) as live, ExitStack() as stack:
            local = httpx.HTTPTransport(local_address="127.0.0.2")
            stranger = stack.enter_context(
                httpx.Client(base_url=live.url, headers=other, transport=local, timeout=30)
            )
            stream = live.client.stream("POST", "/v1/completions", json=ENDLESS)
            stack.enter_context(stream)
            for n, wanted in ((1, 200), (2, 429)):  # one choice is generated already
                body = {"prompt": "a", "max_tokens": 1, "n": n}
                answer = live.client.post("/v1/completions", json=body)
                assert answer.status_code == wanted
            message = "the server handles at most 2 choices of this client at the same time"
            assert error_of(answer)["message"].startswith(message)
            stack.enter_context(live.client.stream("POST", "/v1/completions", json=ENDLESS))
            answer = live.client.get("/v1/models", headers=one)
            assert answer.status_code == 429
            assert "2 requests of this client" in error_of(answer)["message"]
            assert stranger.get("/v1/models").status_code == 200
            assert stranger.post("/v1/completions", json=body).status_code == 200


def test_the_queue_is_bounded_and_recovers(generator: Generator) -> None:
    with serving(generator, slots=2, max_waiting=3) as live:
        stats = live.service.engine.stats
        with httpx.Client(base_url=live.url, timeout=30) as client:
            streams = [client.stream("POST", "/v1/completions", json=ENDLESS) for _ in range(5)]
            for stream in streams[:2]:
                stream.__enter__()
            wait_for(lambda: stats().running == 2)
            for stream in streams[2:]:
                stream.__enter__()
            wait_for(lambda: stats().waiting == 3)
            for path, body in (
                ("/v1/completions", ENDLESS),
                ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ):
                answer = client.post(path, json=body)
                assert answer.status_code == 429
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                error = error_of(answer)
                assert (error["type"], error["message"]) == (
                    "rate_limit_error",
                    "the queue is full",
                )
            assert (stats().running, stats().waiting) == (2, 3)
            streams[0].__exit__(None, None, None)
            wait_for(lambda: stats().waiting == 2)
            # Of three more only the first fits: none of them stays.
            assert client.post("/v1/completions", json={**ENDLESS, "n": 3}).status_code == 429
            assert stats().waiting == 2
            for stream in streams[1:]:
                stream.__exit__(None, None, None)
        wait_for(live.is_idle)
        assert live.post("/v1/completions", prompt="a", max_tokens=3)["choices"]


def test_other_origins_may_call_only_if_allowed(generator: Generator) -> None:
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


def test_request_ids(live: LiveServer) -> None:
    answer = live.client.post("/tokenize", json={"prompt": "a"}, headers={"x-request-id": "a.b-1"})
    assert answer.headers["x-request-id"] == "a.b-1"
    odd = live.client.get("/health", headers={"x-request-id": "a b"})
    assert re.fullmatch("[0-9a-f]{24}", odd.headers["x-request-id"])
    done = live.client.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine"}
    )
    assert json.loads(done.text)["id"] == "cmpl-mine"
