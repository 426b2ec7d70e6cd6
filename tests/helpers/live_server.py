"""A server on loopback in this process, and requests to it."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from models import spelling_model

from xlstm7b.chat_format import ChatFormat, PlainFormat
from xlstm7b.generate import Engine, Generator, StateStore
from xlstm7b.generate.draft_model import Speculation
from xlstm7b.model.adapter import Adapter
from xlstm7b.serve.app import create_app
from xlstm7b.serve.engine_thread import EngineThread
from xlstm7b.serve.handlers import Service
from xlstm7b.serve.middleware import ApiKeys
from xlstm7b.serve.prometheus import Metrics
from xlstm7b.serve.protocol import Limits
from xlstm7b.serve.saved_states import SavedStates
from xlstm7b.serve.server import bind, server_config

__all__ = ["GREEDY", "LiveServer", "error_of", "events", "serving", "spelling_model", "wait_for"]

GREEDY = {"temperature": 0}


@dataclass
class LiveServer:
    url: str
    app: FastAPI
    service: Service
    client: httpx.Client

    def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, status: int, /, **body: Any) -> str:
        """The message of an error answer, which must be in OpenAI's form."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return error_of(answer)["message"]

    def stream(self, path: str, /, **body: Any) -> list[dict[str, Any]]:
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            return list(events(answer.iter_lines()))

    def metric(self, name: str) -> float:
        """One number of /metrics, by its name and its labels without the model's name."""
        text = self.client.get("/metrics").text.replace(',model_name="tiny"', "")
        text = text.replace('model_name="tiny",', "")
        for line in text.replace('{model_name="tiny"}', "").splitlines():
            if line.rpartition(" ")[0] == f"xlstm7b:{name}":
                return float(line.rpartition(" ")[2])
        return 0.0

    def is_idle(self) -> bool:
        stats = self.service.engine.stats()
        return stats.running == stats.waiting == 0

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=20)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line and not line.startswith(":"):
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has no end")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    content = answer.json()
    assert content.keys() == {"error"}
    assert content["error"].keys() == {"message", "type", "param", "code"}
    return content["error"]


def wait_for(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Looks often at first: while a test sleeps, an engine computes tokens that no one reads."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not holds():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


@contextmanager
def serving(
    generator: Generator,
    *,
    chat_format: ChatFormat | None = None,
    keys: tuple[str, ...] = (),
    cors: tuple[str, ...] = (),
    muted: tuple[str, ...] = (),
    limits: Limits | None = None,
    states: Path | None = None,
    states_bytes: int = 1 << 30,
    slots: int = 4,
    max_waiting: int = 64,
    cache_bytes: int = 1 << 24,
    send_buffer: int | None = None,
    adapters: Mapping[str, tuple[Adapter, ChatFormat]] | None = None,
    speculate: Speculation = None,
    is_warm: bool = True,
    share_prefix_cache: bool = False,
) -> Iterator[LiveServer]:
    """Serves the generator's model. The generator itself can be used at the same time.

    is_warm: wait until the engine is warmed up. Before that, /health says "starting".
    """
    engine = Engine(
        generator.model,
        generator.tokenizer,
        slots=slots,
        cache_bytes=cache_bytes,
        speculate=speculate,
        adapters=[adapter for adapter, _ in (adapters or {}).values()],
    )
    thread = EngineThread(engine, max_waiting)
    saved = None
    if states is not None:
        saved = SavedStates(StateStore(states, generator.config, states_bytes, evict=False))
    service = Service(
        thread,
        chat_format or PlainFormat(),
        "tiny",
        limits or Limits(choices=min(128, max_waiting)),
        Metrics(thread, "tiny"),
        saved,
        adapters or {},
    )
    names = {key: f"key {number}" for number, key in enumerate(keys, 1)}
    accepted = ApiKeys(names, share_prefix_cache=share_prefix_cache)
    app = create_app(service, keys=accepted, cors=cors, muted=muted, is_local=True)
    bound = bind("127.0.0.1", 0)
    if send_buffer is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    server = uvicorn.Server(server_config(app, shutdown_timeout=1))
    server_thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    server_thread.start()
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        wait_for(lambda: server.started and (thread.healthy or not is_warm))
        with httpx.Client(base_url=url, headers=headers, timeout=30, verify=False) as client:
            yield LiveServer(url, app, service, client)
    finally:
        server.should_exit = True
        server_thread.join(20)
        thread.stop()
        bound.close()
    assert not server_thread.is_alive()
