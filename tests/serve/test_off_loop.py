"""Long work runs beside the event loop, and saving does not hold up other work."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import LiveServer, wait_for

from xlstm7b.serve import handlers, off_loop, responses
from xlstm7b.serve.saved_states import SavedStates
from xlstm7b.tokenizer import ByteTokenizer

LONG = "ab " * 4000
JSON = {"content-type": "application/json"}
TOOL = {"type": "function", "function": {"name": "f", "description": "a" * 100_000}}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def test_long_work_is_not_done_in_the_event_loop(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, set[bool]] = {}

    def watch(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            found.setdefault(name, set()).add(in_event_loop())
            return work(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (ByteTokenizer, "decode"),
        (ByteTokenizer, "encode"),
        (handlers, "check_tools"),
        (handlers, "check_tokens"),
        (handlers, "_check_messages"),
        (handlers, "_render"),
        (responses, "_to_chat"),
    ):
        watch(owner, name)
    live.post("/detokenize", tokens=[99] * 100_000)
    live.post("/tokenize", prompt=LONG)
    live.post("/tokenize", messages=user("a"), tools=[TOOL])
    live.post("/v1/completions", prompt=LONG, echo=True, max_tokens=1)
    live.post("/v1/chat/completions", messages=user(LONG), max_tokens=1)
    live.post("/v1/chat/completions", messages=user("a"), tools=[TOOL], max_tokens=1)
    live.post("/v1/states", messages=user(LONG))
    live.post("/v1/responses", input=LONG, max_output_tokens=1, store=False)
    names = ("decode", "encode", "check_tools", "check_tokens", "_check_messages", "_render")
    assert found == {name: {False} for name in (*names, "_to_chat")}


def test_a_large_body_is_refused_as_a_small_one_is(live: LiveServer) -> None:
    for path, body, name in (
        ("/v1/completions", {"prompt": "a", "top_p": "b"}, "top_p"),
        ("/v1/completions", {"prompt": "a", "unknown": 1}, "unknown"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt.1"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": "a"}]}, "messages.0.role"),
    ):
        small = live.client.post(path, json=body)
        large = live.client.post(path, content=json.dumps(body) + " " * 100_000, headers=JSON)
        assert (large.status_code, large.json()) == (small.status_code, small.json())
        assert small.json()["error"]["param"] == name
    for content in (" " * 100_000, "[" * 100_000, '{"prompt": "' + "a" * 100_000):
        answer = live.client.post("/tokenize", content=content, headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("the body is not JSON")


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | _TEXTS
_VALUES = st.recursive(_SCALARS, lambda one: st.lists(one) | st.dictionaries(_TEXTS, one))


@given(content=_VALUES, length=st.sampled_from([0, 1, 256, 257, 1000]))
def test_json_in_slices_is_the_same(content: Any, length: int) -> None:
    content = {"a": [content] * length, "b": content}
    assert json.loads("".join(off_loop._slices(content))) == content


def test_saving_does_not_hold_up_other_answers(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves wait for each other. Here the first one takes until all other work is done."""
    others_are_done, save, saving = threading.Event(), SavedStates.save, list[int]()

    def slow_save(*arguments: Any) -> Any:
        saving.append(1)
        assert others_are_done.wait(60)
        return save(*arguments)

    monkeypatch.setattr(SavedStates, "save", slow_save)
    body = {"prompt": "a", "max_tokens": 1}
    with ThreadPoolExecutor(40) as pool:
        answers = [
            pool.submit(live.post, "/v1/completions", **body, save_state=True) for _ in range(40)
        ]
        wait_for(lambda: bool(saving) and live.is_idle())
        try:
            for _ in range(3):
                assert live.post("/v1/completions", **body, echo=True)["choices"]
                assert live.post("/tokenize", prompt=LONG)["count"] > len(LONG)
        finally:
            others_are_done.set()
        assert all(answer.result()["state_id"] for answer in answers)


def test_long_work_rests_in_between() -> None:
    long_work, times = off_loop._LongWork(), []

    def work() -> None:
        times.append(time.monotonic())
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        times.append(time.monotonic())

    async def three() -> None:
        await asyncio.gather(*(long_work.run(work) for _ in range(3)))

    began = time.monotonic()
    asyncio.run(three())
    assert times[0] - began < 0.1  # the first one does not wait
    for end, start in ((times[1], times[2]), (times[3], times[4])):
        assert start - end > 0.17
