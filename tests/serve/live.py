"""A server on loopback in this process, and requests to it."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from fastapi import FastAPI

from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator
from xlstm7b.generate.chat import PlainTurns, Turns
from xlstm7b.generate.engine import Engine
from xlstm7b.model import XLSTM
from xlstm7b.serve.app import create_app
from xlstm7b.serve.lifecycle import bind, server_config
from xlstm7b.serve.limits import Limits
from xlstm7b.serve.metrics import Metrics
from xlstm7b.serve.states import StateStore
from xlstm7b.serve.work import Service
from xlstm7b.tokenizer import ByteTokenizer

GREEDY = {"temperature": 0}


@torch.no_grad()
def speller(letters: str) -> XLSTM:
    """A byte-level model that writes these bytes: all other tokens have logit 0."""
    torch.manual_seed(0)
    model = XLSTM(ModelConfig(128, 2, 2, vocab_size=320))
    for name, parameter in model.named_parameters():
        if "gate_preact" in name:
            parameter.normal_(std=0.5)
    ids = torch.tensor(ByteTokenizer().encode(letters))
    rows = 20 * model.lm_head.weight[ids]
    model.lm_head.weight.zero_()
    model.lm_head.weight[ids] = rows
    return model


@dataclass
class Live:
    url: str
    app: FastAPI
    service: Service
    client: httpx.Client

    def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, status: int, /, **body: Any) -> str:
        """The sentence of an error, which has OpenAI's form."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return error_of(answer)["message"]

    def stream(self, path: str, /, **body: Any) -> list[dict[str, Any]]:
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            return list(events(answer.iter_lines()))

    def figure(self, name: str) -> float:
        """One number of /metrics, with its labels."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.rpartition(" ")[0] == f"xlstm7b:{name}":
                return float(line.rpartition(" ")[2])
        return 0.0


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """What a stream tells, which must end as it should."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has no end")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    content = answer.json()
    assert content.keys() == {"error"}
    assert content["error"].keys() == {"message", "type", "param", "code"}
    return content["error"]


def wait_for(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


@contextmanager
def serving(
    generator: Generator,
    *,
    turns: Turns | None = None,
    keys: tuple[str, ...] = (),
    cors: tuple[str, ...] = (),
    limits: Limits | None = None,
    states: Path | None = None,
    states_bytes: int = 1 << 30,
    slots: int = 4,
    most_waiting: int = 64,
    cache_bytes: int = 1 << 24,
    send_buffer: int | None = None,
) -> Iterator[Live]:
    engine = Engine(generator, slots=slots, most_waiting=most_waiting, cache_bytes=cache_bytes)
    store = None if states is None else StateStore(states, generator.config, states_bytes)
    service = Service(
        engine,
        generator,
        turns or PlainTurns(),
        "tiny",
        1,
        limits or Limits(choices=min(128, most_waiting)),
        Metrics(engine),
        store,
    )
    app = create_app(service, keys=keys, cors=cors, is_local=True)
    bound = bind("127.0.0.1", 0)
    if send_buffer is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    server = uvicorn.Server(server_config(app, last_words=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    engine.start()
    thread.start()
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        wait_for(lambda: server.started)
        with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
            yield Live(url, app, service, client)
    finally:
        server.should_exit = True
        thread.join(20)
        engine.stop()
        bound.close()
    assert not thread.is_alive()
