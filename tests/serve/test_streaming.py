"""Clients that leave or do not read, engines that fail, and what the log says of it."""

import asyncio
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from live_server import GREEDY, LiveServer, error_of, serving, wait_for

from xlstm7b.generate import Engine, Generator, Request, RequestOutput
from xlstm7b.serve import server, streaming
from xlstm7b.serve.protocol import ApiError, ChoiceFormat
from xlstm7b.serve.streaming import OutputQueue

PATH = "/v1/completions"
ENDLESS = {"prompt": "a", "max_tokens": 60000, "ignore_eos": True}


def send_body(connection: socket.socket, **body: Any) -> None:
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)


def test_clients_that_disconnect_leave_nothing_behind(
    live: LiveServer, generator: Generator
) -> None:
    draw, reason = random.Random(0), "request_aborts_total"
    aborted = live.metric(reason)
    for number in range(400):
        with live.connect() as connection:
            choices = draw.choice((1, 1, 3))
            send_body(connection, **ENDLESS, stream=number % 4 > 0, n=choices)
            aborted += choices
            wanted, read = draw.choice((0, 0, 100, 1000, 4000)), 0
            wait_for(lambda: not live.is_idle())
            while number % 4 and read < wanted:
                read += len(connection.recv(4096))
    wait_for(live.is_idle)
    wait_for(lambda: live.metric(reason) == aborted)
    (want,) = generator.generate("Once", max_new_tokens=9, **GREEDY)
    got = live.post(PATH, prompt="Once", max_tokens=9, **GREEDY)
    assert got["choices"][0]["text"] == want.text


@pytest.mark.parametrize(("max_queued", "timeout"), [(64, 60.0), (1 << 20, 0.5)])
def test_streams_to_clients_that_do_not_read_end(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, max_queued: int, timeout: float
) -> None:
    monkeypatch.setattr(streaming, "MAX_QUEUED", max_queued)
    monkeypatch.setattr(server, "CLIENT_TIMEOUT", timeout)
    with serving(generator, send_buffer=4096) as live, live.connect() as sleeper:
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send_body(sleeper, **ENDLESS, stream=True)
        wait_for(lambda: not live.is_idle())
        began = live.service.engine.stats().generated_tokens
        others = live.post(PATH, prompt="b", max_tokens=30, ignore_eos=True)
        assert others["usage"]["completion_tokens"] == 30
        wait_for(live.is_idle)  # long before its end
        assert 30 < live.service.engine.stats().generated_tokens - began < 59000


@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_are_written_outside_the_event_loop(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """100,000 scored tokens would block the event loop for a second."""
    threads = []

    def logprobs(self: ChoiceFormat, tokens: Sequence[int], *others: Any) -> Any:
        if len(tokens) == 2000:
            threads.append(threading.current_thread().name)
        return original(self, tokens, *others)

    original = ChoiceFormat.logprobs
    monkeypatch.setattr(ChoiceFormat, "logprobs", logprobs)
    body = {"prompt": "a" * 2000, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    assert live.client.post(PATH, json=body).status_code == 200
    (thread,) = threads
    assert thread.startswith("asyncio_")  # the pool of asyncio.to_thread


def test_outputs_that_wait_are_merged(live: LiveServer, generator: Generator) -> None:
    """Outputs of two requests, an end and a failure, all before the handler reads any."""
    first, second = Request("a"), Request("b")
    (done,) = generator.generate("a", max_new_tokens=3, **GREEDY)

    receivers: dict[Request, Any] = {}

    class Thread:
        def submit_all(self, given: dict[Request, Any], *, loop: Any) -> None:
            receivers.update(given)

        def abort(self, request: Request) -> None:
            pass

    async def read() -> list[tuple[int, RequestOutput]]:
        queue = OutputQueue(Thread(), live.service.metrics)  # type: ignore[arg-type]
        queue.submit([first, second])
        for output in (
            RequestOutput(first, "ab", (1, 2), (-0.5, -1.0), ({1: -0.5}, {})),
            RequestOutput(second, "", (3,), (-2.0,), ({},)),
            RequestOutput(first, "", (3,), (-2.0,), ({},)),
            RequestOutput(first, "c", completion=done),
            RequestOutput(second, error=RuntimeError("/a/secret/path")),
        ):
            receivers[output.request](output)
        outputs = queue.outputs()
        found = [await anext(outputs), await anext(outputs)]
        with pytest.raises(ApiError, match=r"^the model failed while this request was running$"):
            await anext(outputs)
        return found

    tops = ({1: -0.5}, {}, {})
    whole = RequestOutput(first, "abc", (1, 2, 3), (-0.5, -1.0, -2.0), tops, completion=done)
    rest = RequestOutput(second, "", (3,), (-2.0,), ({},))
    assert asyncio.run(read()) == [(0, whole), (1, rest)]


def test_requests_wait_for_a_cold_engine(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = threading.Event()
    monkeypatch.setattr(Engine, "warm_up", lambda _: warm_up.wait())
    with serving(generator, is_warm=False) as live:
        cold = live.client.get("/health")
        assert (cold.status_code, cold.json()) == (503, {"status": "starting"})
        warm_up.set()
        assert live.post(PATH, prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert live.client.get("/health").json() == {"status": "ok"}


def test_a_failed_engine_is_reported(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(generator) as live:
        with live.client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            monkeypatch.setattr(live.service.engine.engine, "step", fail)
            received = [line for line in lines if line]
        assert json.loads(received[-1].removeprefix("data: ")) == {
            "error": {
                "message": "the model failed while this request was running",
                "type": "server_error",
                "param": None,
                "code": None,
            }
        }
        health = live.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
        later = live.client.post(PATH, json={"prompt": "a"})
        assert later.status_code == 503
        assert error_of(later)["message"] == "the server is not available: the engine failed"
        assert "secret" not in later.text + health.text + "".join(received)
        assert live.client.get("/v1/models").status_code == 200


def fail(*_: object) -> None:
    raise RuntimeError("/a/secret/path")


def test_an_exception_in_a_handler_is_a_500_without_details(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.service.tokenizer, "encode", fail, raising=False)
    answer = live.client.post("/tokenize", json={"prompt": "a"})
    assert answer.status_code == 500
    assert error_of(answer)["message"] == "internal server error"
    assert "x-request-id" in answer.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_comments_keep_a_quiet_stream_alive(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """While a long prompt is read, and between tokens. Proxies close connections without data."""
    body: dict[str, Any] = {"max_tokens": 3, "prompt": "a" * 50, "ignore_eos": True}
    if "chat" in path:
        body = {"max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
    elif "responses" in path:
        body = {"max_output_tokens": 3, "input": "a"}

    def lines() -> list[str]:
        with live.client.stream("POST", path, json={**body, **GREEDY, "stream": True}) as answer:
            return list(answer.iter_lines())

    def events(lines: list[str]) -> list[str]:
        return [line.partition(":")[0] for line in lines if line and not line.startswith(":")]

    plain, step = lines(), Engine.step
    assert not any(line.startswith(":") for line in plain)

    def slow_step(self: Engine) -> Sequence[RequestOutput]:
        time.sleep(0.3)
        return step(self)

    monkeypatch.setattr(Engine, "step", slow_step)
    monkeypatch.setattr(streaming, "QUIET_SECONDS", 0.05)
    got = lines()
    comments = [n for n, line in enumerate(got) if line.startswith(":")]
    assert {got[n] for n in comments} == {": keep-alive"}
    assert all(got[n + 1] == "" for n in comments)
    assert 4 <= len(comments) <= 60
    assert len(events(got)) >= 2
    assert got[-2:] == plain[-2:] or path == "/v1/responses"
    if path == "/v1/completions":
        assert comments[0] == 0  # before the first token
    # Clients skip the comments.
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    if "responses" in path:
        stream = client.responses.create(model="tiny", input="a", max_output_tokens=3, stream=True)
        assert [event.type for event in stream][-1] == "response.incomplete"
    elif "chat" in path:
        options = {"model": "tiny", "max_tokens": 3, "stream": True}
        stream = client.chat.completions.create(messages=body["messages"], **options)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] is not None


def test_the_log_says_how_a_stream_ended(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    monkeypatch.setattr(ChoiceFormat, "chunks", fail)
    with live.client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as answer:
        received = [line for line in answer.iter_lines() if line]
    assert [json.loads(line.removeprefix("data: "))["error"]["message"] for line in received] == [
        "internal server error"
    ]
    wait_for(lambda: len(caplog.records) == 2)
    assert caplog.records[0].message == "a request failed"
    assert (last_line()["ended"], last_line()["error"]) == ("error", "internal server error")
    wait_for(live.is_idle)


def test_concurrent_clients_get_the_same_output_as_alone(
    live: LiveServer, generator: Generator
) -> None:
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
