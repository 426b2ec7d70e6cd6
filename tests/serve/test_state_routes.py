"""/v1/states: states are saved, listed, continued from and deleted."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from commands import CHATML
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import (
    GREEDY,
    LiveServer,
    error_of,
    events,
    serving,
    spelling_model,
    wait_for,
)

from xlstm7b.chat_format import ChatFormat, ChatTemplate
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, SavedState, StateStore
from xlstm7b.generate.state import state_bytes
from xlstm7b.model import XLSTM
from xlstm7b.serve.protocol import ApiError, Limits
from xlstm7b.serve.saved_states import SavedStates
from xlstm7b.tokenizer import ByteTokenizer

COMPLETIONS, CHAT, STATES = "/v1/completions", "/v1/chat/completions", "/v1/states"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_completion_continues_from_a_saved_state(live: LiveServer, generator: Generator) -> None:
    (want,) = generator.generate("The sea was", max_new_tokens=20, **GREEDY)
    saved = live.post(STATES, prompt="The sea was")
    assert (saved["object"], saved["tokens"]) == ("state", 12)
    options = {"max_tokens": 10, **GREEDY, "save_state": True}
    first = live.post(COMPLETIONS, state=saved["id"], **options)
    second = live.post(COMPLETIONS, state=first["state_id"], **options)
    assert first["choices"][0]["text"] + second["choices"][0]["text"] == want.text
    again = live.post(COMPLETIONS, state=first["state_id"], **options)  # the state is unchanged
    assert again["choices"][0]["text"] == second["choices"][0]["text"]
    forks = live.post(COMPLETIONS, state=saved["id"], max_tokens=10, n=3, **GREEDY)
    assert {choice["text"] for choice in forks["choices"]} == {first["choices"][0]["text"]}
    read = live.client.get(f"{STATES}/{second['state_id']}").json()
    assert read["tokens"] == 12 + 20
    assert read["bytes"] > live.service.state_bytes
    listed = [state["id"] for state in live.client.get(STATES).json()["data"]]
    assert {saved["id"], first["state_id"], second["state_id"], again["state_id"]} <= {*listed}
    gone = live.client.delete(f"{STATES}/{saved['id']}")
    assert gone.json() == {"id": saved["id"], "object": "state", "deleted": True}
    for answer in (
        live.client.delete(f"{STATES}/{saved['id']}"),
        live.client.get(f"{STATES}/{saved['id']}"),
        live.client.post(COMPLETIONS, json={"state": saved["id"]}),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "state_not_found"
    assert answer.json()["error"]["param"] == "state"


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_chat_continues_from_a_saved_state(
    generator: Generator, tmp_path: Path, template: str | None
) -> None:
    """Turn by turn from states, the answers are those from the whole conversation."""
    chat_format = None if template is None else ChatFormat(ChatTemplate(template, {}))
    with serving(generator, states=tmp_path, chat_format=chat_format) as live:
        options = {"max_tokens": 12, **GREEDY, "save_state": True}
        first = live.post(CHAT, messages=user("Hello"), **options)
        answer = first["choices"][0]["message"]
        talk = [*user("Hello"), {"role": answer["role"], "content": answer["content"]}]
        whole = live.post(CHAT, messages=[*talk, *user("Go on.")], max_tokens=12, **GREEDY)
        events = live.stream(CHAT, state=first["state_id"], messages=user("Go on."), **options)
        streamed = "".join(event["choices"][0]["delta"]["content"] for event in events)
        assert whole["choices"][0]["message"]["content"] == streamed
        assert events[-1]["state_id"] != first["state_id"]
        # The conversation without an answer is saved, then continued.
        saved = live.post(STATES, messages=talk)
        later = live.post(CHAT, state=saved["id"], messages=user("Go on."), max_tokens=12, **GREEDY)
        assert later["choices"][0]["message"]["content"] == streamed
        assert "must be one user message" in live.refused(
            CHAT, 400, state=saved["id"], messages=talk
        )


def test_limits_of_saved_states(generator: Generator, tmp_path: Path) -> None:
    with serving(generator) as live:
        assert "does not save states" in live.refused(STATES, 404, prompt="a")
        assert live.client.get(STATES).status_code == 404
        assert "does not save states" in live.refused(COMPLETIONS, 404, prompt="a", save_state=True)
    with serving(generator, states=tmp_path, states_bytes=live.service.state_bytes * 2) as live:
        assert "save_state needs one prompt" in live.refused(
            COMPLETIONS, 400, prompt="a", n=2, save_state=True
        )
        live.post(STATES, prompt="a")
        assert "delete one first" in live.refused(STATES, 409, prompt="a")
        assert len(live.client.get(STATES).json()["data"]) == 1


def test_an_answer_is_sent_even_if_its_state_cannot_be_saved(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/a/secret/path")

    monkeypatch.setattr(SavedState, "save", full)
    options = {"prompt": "The sea", "max_tokens": 5, **GREEDY, "save_state": True}
    why = "the state could not be saved: see the server's log"
    whole = live.post(COMPLETIONS, **options)
    assert whole["choices"][0]["text"]
    assert (whole["state_id"], whole["state_error"]) == (None, why)
    events = live.stream(COMPLETIONS, **options)
    assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]
    assert (events[-1]["state_id"], events[-1]["state_error"]) == (None, why)
    assert live.refused(STATES, 507, prompt="a") == why


def test_a_label_on_a_full_disk(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = live.post(STATES, prompt="a", name="before")
    path = f"{STATES}/{saved['id']}"

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/a/secret/path")

    with monkeypatch.context() as patch:
        patch.setattr("xlstm7b.generate.state.write_hashed", full)
        answer = live.client.patch(path, json={"name": "after"})
        assert (answer.status_code, error_of(answer)["message"]) == (
            507,
            f"the state {saved['id']} could not be read or changed: see the server's log",
        )
        assert "No space left on device" in caplog.text
        patch.setattr("xlstm7b.generate.state.Path.unlink", full)
        assert live.client.delete(path).status_code == 507
    assert live.client.get(path).json()["name"] == "before"


@torch.no_grad()
def test_a_state_of_damaged_weights_is_not_saved(tmp_path: Path) -> None:
    model = spelling_model("abc")
    model.backbone.embeddings.weight[ByteTokenizer().encode("~")[-1]] = torch.nan
    with serving(Generator(model, ByteTokenizer()), states=tmp_path) as live:
        why = "the state was not saved: the model's logits are not numbers"
        assert live.refused(STATES, 500, prompt="a~b") == why
        streamed = live.client.post(STATES, json={"prompt": "a~b", "stream": True})
        assert json.loads(streamed.text.split("data: ")[-1])["error"]["message"] == why
        assert live.client.get(STATES).json()["data"] == []
        saved = live.post(STATES, prompt="ab")
        assert live.refused(STATES, 500, prompt="~", state=saved["id"]) == why
        assert [state["id"] for state in live.client.get(STATES).json()["data"]] == [saved["id"]]


@pytest.mark.parametrize("broken", ["pathlib.Path.write_bytes", "tempfile._mkstemp_inner"])
def test_an_upload_to_a_full_disk(
    live: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    folder = live.service.states._store.folder
    content = live.client.get(f"{STATES}/{live.post(STATES, prompt='a')['id']}/content").content
    before = {*folder.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/a/secret/path")

    monkeypatch.setattr(broken, full)
    answer = live.client.put(STATES, content=content)
    assert answer.status_code == 507
    assert error_of(answer)["message"] == "the state could not be saved: see the server's log"
    assert {*folder.iterdir()} == before


def test_saved_states_in_memory_are_limited_by_their_size(
    generator: Generator, tmp_path: Path
) -> None:
    """Not by the number of requests: many small states may be in use while requests run."""
    size = state_bytes(generator.config)
    many = 40  # more than the 16 requests that were once allowed
    with serving(generator, states=tmp_path, limits=Limits(states_bytes=many * size)) as live:
        saved = live.post(STATES, prompt="a")["id"]
        endless = {"state": saved, "max_tokens": 60000, "ignore_eos": True, "stream": True}
        with ExitStack() as stack:
            streams = [live.client.stream("POST", COMPLETIONS, json=endless) for _ in range(many)]
            answers = [stack.enter_context(stream) for stream in streams]
            assert {answer.status_code for answer in answers} == {200}
            assert "GB of saved states" in live.refused(COMPLETIONS, 429, state=saved)
    limits = Limits(states_bytes=2 * size)
    with serving(generator, states=tmp_path, limits=limits) as live:
        _check_two_states(live, saved)


def _check_two_states(live: LiveServer, saved: str) -> None:
    """At most two states may be in memory: one that is loaded, and one that will be saved."""
    endless = {"max_tokens": 60000, "ignore_eos": True, "stream": True, "save_state": True}
    endless["state"] = saved
    with live.client.stream("POST", COMPLETIONS, json=endless) as answer:
        lines = answer.iter_lines()  # keeps the connection open
        next(lines)
        for path, body in (
            (COMPLETIONS, {"state": saved}),
            (CHAT, {"messages": user("Hello"), "save_state": True}),
            (STATES, {"prompt": "b"}),
        ):
            refused = live.client.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert live.post(COMPLETIONS, prompt="b", max_tokens=1)["choices"]
    can_save = {"prompt": "b", "max_tokens": 1, "save_state": True}
    wait_for(lambda: live.client.post(COMPLETIONS, json=can_save).status_code == 200)
    live.refused(COMPLETIONS, 400, state=saved, top_p=0)  # a refused request holds none
    for stream in (False, True, False):
        body = {"state": saved, "max_tokens": 1, "stream": stream, "save_state": True}
        assert live.client.post(COMPLETIONS, json=body).status_code == 200
        # A client sees the end of a stream a moment before the server frees what it held.
        wait_for(lambda: live.client.post(COMPLETIONS, json=can_save).status_code == 200)
    assert live.post(STATES, prompt="b")["tokens"] == 2


def test_states_that_are_damaged_or_of_another_model(generator: Generator, tmp_path: Path) -> None:
    with serving(generator, states=tmp_path) as live:
        saved = live.post(STATES, prompt="a")["id"]
        path = tmp_path / f"{saved}.safetensors"
        whole = path.read_bytes()
        other = Generator(XLSTM(ModelConfig(64, 1, 2, vocab_size=320)), ByteTokenizer())
        message = f"the state {saved} is damaged or was saved by another model"
        for status, damage in (
            ("damaged", lambda: path.write_bytes(whole[: len(whole) // 2])),
            ("other_model", lambda: other.read("a").save(path)),
        ):
            damage()
            (listed,) = live.client.get(STATES).json()["data"]
            assert (listed["id"], listed["status"], listed["model"]) == (saved, status, None)
            assert live.refused(COMPLETIONS, 409, state=saved) == message
            assert live.refused(STATES, 409, state=saved, prompt="b") == message
            found = live.client.get(f"{STATES}/{saved}")
            assert found.status_code == (409 if status == "damaged" else 200)
            content = live.client.get(f"{STATES}/{saved}/content")
            assert content.status_code == found.status_code
        path.write_bytes(whole)
        assert live.post(COMPLETIONS, state=saved, max_tokens=1)["choices"]
        path.write_bytes(b"")
        assert live.client.delete(f"{STATES}/{saved}").status_code == 200
        assert live.client.get(STATES).json()["data"] == []


def test_a_download_ends_where_its_length_says(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if another program writes a longer file meanwhile. That ended the connection."""
    saved = live.post(STATES, prompt="a")["id"]
    file = live.service.states._store.folder / f"{saved}.safetensors"
    whole, fstat = file.read_bytes(), os.fstat

    def then_grow(descriptor: int) -> os.stat_result:
        size = fstat(descriptor)
        file.write_bytes(whole + b"more")
        return size

    monkeypatch.setattr("xlstm7b.serve.state_routes.os.fstat", then_grow)
    assert live.client.get(f"{STATES}/{saved}/content").content == whole
    monkeypatch.undo()
    live.client.delete(f"{STATES}/{saved}")


IDS = st.one_of(
    st.text(),
    st.sampled_from(
        [
            "..",
            "../secret",
            "%2e%2e",
            "/etc/passwd",
            "state-",
            "state-../../secret",
            "state-" + "0" * 24,
            "state-" + "0" * 23 + "/",
            "state-" + "A" * 24,
        ]
    ),
)


@given(state_id=IDS)
def test_an_id_is_never_a_path(tmp_path_factory: pytest.TempPathFactory, state_id: str) -> None:
    parent = tmp_path_factory.getbasetemp() / "traversal"
    (parent / "states").mkdir(parents=True, exist_ok=True)
    secret = parent / "secret.safetensors"
    config = ModelConfig(64, 1, 2, vocab_size=320)
    if not secret.exists():
        Generator(XLSTM(config), ByteTokenizer()).read("a").save(secret)
    saved = SavedStates(StateStore(parent / "states", config, 1 << 30, evict=False))
    for use in (saved.find, saved.load, saved.delete):
        with pytest.raises(ApiError) as raised:
            use(state_id)
        assert raised.value.status == 404
        assert str(parent) not in raised.value.message
    assert secret.exists()


@settings(max_examples=30)
@given(state_id=IDS.filter(bool))
def test_an_id_in_a_url_is_never_a_path(live: LiveServer, state_id: str) -> None:
    try:
        quoted = quote(state_id, safe="")
    except UnicodeEncodeError:
        return
    assert live.client.get(f"{STATES}/{quoted}").status_code in (200, 404)
    assert live.client.delete(f"{STATES}/{quoted}").status_code in (404, 405)


def test_a_saved_state_is_a_file_of_the_library(generator: Generator, tmp_path: Path) -> None:
    with serving(generator, states=tmp_path) as live:
        saved = live.post(STATES, prompt="The sea")["id"]
    ours = SavedState.load(tmp_path / f"{saved}.safetensors", generator.config)
    assert torch.allclose(ours.logits, generator.read(["The sea"]).logits, atol=1e-4)


def test_a_state_file_is_uploaded(live: LiveServer, generator: Generator, tmp_path: Path) -> None:
    file, text = tmp_path / "state.safetensors", "The sea was"
    generator.read(text).save(file, name="x", state="z", adapter="")
    answer = live.client.put(STATES, content=file.read_bytes())
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens"] == 12
    (want,) = generator.generate(text, max_new_tokens=8, **GREEDY)
    found = live.post(COMPLETIONS, state=answer.json()["id"], max_tokens=8, **GREEDY)
    assert found["choices"][0]["text"] == want.text
    # Different states, one that has read only the first token, share a batch.
    generator.read("").save(file)
    new = live.client.put(STATES, content=file.read_bytes()).json()["id"]
    talk = [*user("Hello"), {"role": "assistant", "content": "Hi"}, *user("Go on.")]
    whole = live.post(CHAT, messages=talk, max_tokens=8, **GREEDY)
    later = live.post(CHAT, messages=talk, state=new, max_tokens=8, **GREEDY)
    assert later["choices"][0]["message"] == whole["choices"][0]["message"]


def test_other_files_are_not_uploaded(
    live: LiveServer, generator: Generator, tmp_path: Path
) -> None:
    def refused(content: bytes, status: int) -> str:
        answer = live.client.put(STATES, content=content)
        assert answer.status_code == status, answer.text
        message: str = answer.json()["error"]["message"]
        assert str(tmp_path) not in message
        return message

    file = tmp_path / "state.safetensors"
    other = Generator(XLSTM(ModelConfig(64, 1, 2, vocab_size=320)), ByteTokenizer())
    before = len(live.client.get(STATES).json()["data"])
    other.read("a").save(file)
    assert "the file was saved from another model" in refused(file.read_bytes(), 400)
    assert "is damaged" in refused(file.read_bytes()[:-1], 400)
    assert "no state of this server's model" in refused(b"", 400)
    assert "For a text file, send content-type text/plain" in refused(b"Call me Ishmael. " * 9, 400)
    assert "at most" in refused(bytes(1 << 24), 413)
    for part in ("logits", "C"):
        state = generator.read("a").clone()  # outside inference mode: it can be changed
        bad = state.logits if part == "logits" else state.model_state.blocks[-1][0]
        bad.view(-1)[-1] = torch.nan
        state.save(file)
        assert f"some numbers of its {part!r} are NaN" in refused(file.read_bytes(), 400)
    state = generator.read("a").clone()  # what is read after it could not be saved
    state.logits[0, 5] = torch.inf
    state.save(file)
    assert "its logits are not numbers" in refused(file.read_bytes(), 400)
    assert len(live.client.get(STATES).json()["data"]) == before


def test_a_state_needs_the_weights_that_it_belongs_to(generator: Generator, tmp_path: Path) -> None:
    ours = {"quantization": "", "matrices": "a", "others": "b"}
    store = StateStore(tmp_path, generator.config, 1 << 30, evict=False)
    states = SavedStates(store, ours)
    file = tmp_path / "tuned.safetensors"
    generator.read("a").save(file, weights=json.dumps(ours))
    saved = states.upload(file.read_bytes()).name
    assert states.load(saved)[0].tokens_seen == [2]
    read = states.save(generator.read("a")).name
    after_a_restart = SavedStates(store, {**ours, "matrices": "c"})
    for state_id in (saved, read):
        assert states.describe(states.find(state_id), {"": "tiny"})["status"] == "ok"
        with pytest.raises(ApiError, match="belongs to other weights") as raised:
            after_a_restart.load(state_id)
        assert raised.value.status == 409
        found = after_a_restart.find(state_id)
        assert after_a_restart.describe(found, {"": "tiny"})["status"] == "other_model"
    for note in (json.dumps({**ours, "others": "c"}), "[]", "{"):
        generator.read("a").save(file, weights=note)
        with pytest.raises(ApiError, match="belongs to other weights"):
            states.upload(file.read_bytes())


# Reading a text into a state


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_a_state_is_extended_without_generating(live: LiveServer, kind: str) -> None:
    def prompt(text: str) -> Any:
        return text if kind == "text" else ByteTokenizer().encode(text, continues=True)

    first = live.post(STATES, prompt=prompt("The sea"))
    second = live.post(STATES, state=first["id"], prompt=prompt(" was"))
    assert (first["tokens"], second["tokens"]) == (8, 12)
    assert second["usage"]["prompt_tokens"] == 4
    want = live.post(COMPLETIONS, prompt="The sea was", max_tokens=8, **GREEDY)
    found = live.post(COMPLETIONS, state=second["id"], max_tokens=8, **GREEDY)
    assert text_of(found) == text_of(want)
    found = live.post(COMPLETIONS, state=first["id"], prompt=" was", max_tokens=8, **GREEDY)
    assert text_of(found) == text_of(want)  # the first state is as it was
    copy = live.post(STATES, state=first["id"], prompt="")
    assert (copy["tokens"], copy["usage"]["prompt_tokens"]) == (8, 0)
    message = live.refused(STATES, 400, state=first["id"])
    assert message == "exactly one of prompt and messages is needed"


def test_an_empty_text_is_not_saved(live: LiveServer) -> None:
    before = live.client.get(STATES).json()["data"]
    for prompt in ("", []):
        for stream in (False, True):
            message = live.refused(STATES, 400, prompt=prompt, stream=stream)
            assert message == "prompt is empty: there is no text to save a state of"
    for content in (b"", "\ufeff".encode()):
        answer = live.client.put(STATES, content=content, headers={"content-type": "text/plain"})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "prompt")
    assert live.client.get(STATES).json()["data"] == before


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_conversation_is_extended_without_generating(
    generator: Generator, tmp_path: Path, template: str | None
) -> None:
    chat_format = None if template is None else ChatFormat(ChatTemplate(template, {}))
    talk = [
        {"role": "system", "content": "A long book."},
        *user("Hello"),
        {"role": "assistant", "content": "Hi"},
        *user("Who?"),
        {"role": "assistant", "content": "Me"},
    ]
    with serving(generator, states=tmp_path, chat_format=chat_format) as live:
        last = {"messages": user("Go on."), "max_tokens": 8, **GREEDY}
        want = live.post(CHAT, **{**last, "messages": [*talk, *user("Go on.")]})
        for cut in (1, 3, 5):
            state = live.post(STATES, messages=talk[:cut])["id"]
            if cut < 5:
                state = live.post(STATES, state=state, messages=talk[cut:])["id"]
            read = live.client.get(f"{STATES}/{state}").json()["tokens"]
            assert read == live.post(STATES, messages=talk)["tokens"]
            assert text_of(live.post(CHAT, state=state, **last)) == text_of(want), cut


def test_a_reading_shows_its_progress(generator: Generator, tmp_path: Path) -> None:
    text = "The sea was calm. " * 600
    with serving(generator, states=tmp_path) as live:
        parts = live.stream(STATES, prompt=text, name="Sea")
        *progress, saved = parts
        assert {part["object"] for part in progress} == {"state.progress"}
        assert {part["tokens_total"] for part in progress} == {len(text) + 1}
        read = [part["tokens_read"] for part in progress]
        assert read == sorted(set(read))
        assert read[0] == 0
        assert read[-1] <= len(text) + 1
        assert (saved["object"], saved["name"], saved["tokens"]) == ("state", "Sea", len(text) + 1)
        assert saved["usage"]["prompt_tokens"] == len(text) + 1
        whole = live.post(STATES, prompt=text)
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == len(text) + 1
        again = live.client.get(f"{STATES}/{saved['id']}").json()
        assert again == {name: value for name, value in saved.items() if name != "usage"}
        # What is refused before reading has a status; what fails later is an event.
        assert live.refused(STATES, 404, prompt="a", state="state-" + "0" * 24, stream=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SavedState, "save", _full)
            with live.client.stream("POST", STATES, json={"prompt": "a", "stream": True}) as answer:
                lines = [line for line in answer.iter_lines() if line]
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert "could not be saved" in error["message"]
        assert len(live.client.get(STATES).json()["data"]) == 2


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_client_that_disconnects_ends_the_reading(
    generator: Generator, tmp_path: Path, stream: bool, method: str
) -> None:
    text = "The sea was calm. " * 40_000  # minutes of reading
    with serving(generator, states=tmp_path) as live, live.connect() as connection:
        if method == "POST":
            content = json.dumps({"prompt": text, "stream": stream}).encode()
            head = f"POST {STATES} HTTP/1.1\r\ncontent-type: application/json"
        else:
            content = text.encode()
            head = f"PUT {STATES}?stream={stream} HTTP/1.1\r\ncontent-type: text/plain"
        head += f"\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        wait_for(lambda: live.service.engine.stats().running == 1)
        connection.close()
        wait_for(live.is_idle)
        assert live.client.get(STATES).json()["data"] == []
        assert live.metric("request_aborts_total") == 1
        assert [*tmp_path.iterdir()] == []


def test_a_text_file_is_read_into_a_state(live: LiveServer) -> None:
    def put(content: bytes, kind: str = "text/plain", **query: Any) -> Any:
        return live.client.put(
            STATES, content=content, params=query, headers={"content-type": kind}
        )

    want = live.post(STATES, prompt="Grüße")
    for content, kind in (
        ("Grüße".encode(), "text/plain"),
        ("Grüße".encode("utf-8-sig"), "Text/Plain; charset=utf-8"),
    ):
        answer = put(content, kind, name="Gruß", tags=["a", "b"], expires_in=60)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["tokens"], found["name"], found["tags"]) == (8, "Gruß", ["a", "b"])
        assert found["expires"] - found["created"] in (59, 60, 61)
        assert found["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    longer = put(b" und", state=found["id"], model="tiny").json()
    assert longer["tokens"] == 12
    streamed = put(b"abc", stream="true")
    *progress, last = events(iter(streamed.text.split("\n\n")))
    assert progress[0] == {"object": "state.progress", "tokens_read": 0, "tokens_total": 4}
    assert last["tokens"] == 4
    refused = put("Grüße".encode("latin-1"))
    assert refused.status_code == 400
    assert error_of(refused)["message"] == "the file is not UTF-8 text: byte 0xfc at position 2"
    # These fields mean nothing for a state file.
    for name, value in {"model": "tiny", "state": found["id"], "stream": "false"}.items():
        refused = put(b"", "application/octet-stream", **{name: value})
        assert (refused.status_code, error_of(refused)["param"]) == (400, name)


def test_limits_of_a_text_file(generator: Generator, tmp_path: Path) -> None:
    limits = Limits(body_bytes=100, prompt_tokens=50, upload_seconds=0.3)
    kind = {"content-type": "text/plain"}
    with serving(generator, states=tmp_path, limits=limits) as live:
        for size, status in ((49, 200), (60, 400), (100, 400), (101, 413)):
            answer = live.client.put(STATES, content=b"a" * size, headers=kind)
            assert answer.status_code == status, answer.text
        assert error_of(answer)["message"] == "a text file may have at most 100 bytes"
        head = f"PUT {STATES} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
        with live.connect() as connection:
            connection.sendall(head.encode())
            assert b" 408 " in connection.recv(1000)


# Labels, pages and files


def test_a_state_has_a_name_tags_and_an_expiry(live: LiveServer) -> None:
    state = live.post(STATES, prompt="a", name="Book", tags=["x", "y", "x"], expires_in=100)
    path = f"{STATES}/{state['id']}"
    assert (state["name"], state["tags"]) == ("Book", ["x", "y"])
    assert 98 <= state["expires"] - state["created"] <= 101
    assert (state["status"], state["model"]) == ("ok", "tiny")

    def patch(**body: Any) -> dict[str, Any]:
        answer = live.client.patch(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json() == live.client.get(path).json()
        return answer.json()

    del state["usage"]
    assert patch(name="Büch 😀") == {**state, "name": "Büch 😀"}
    assert patch() == {**state, "name": "Büch 😀"}
    assert patch(tags=[])["tags"] == []
    assert patch(name="")["name"] == ""
    assert patch(expires_in=0)["expires"] is None
    assert patch(tags=["z"], name=None)["tags"] == ["z"]
    empty = live.client.patch(path, json={"tags": [""]})
    assert error_of(empty)["message"] == 'tags.0 must be a string that is not empty, not ""'
    for body, param in (
        ({"name": "a" * 201}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": 1}, "name"),
        ({"tags": "a"}, "tags"),
        ({"tags": [""]}, "tags.0"),
        ({"tags": ["a" * 65]}, "tags.0"),
        ({"tags": ["a"] * 17}, "tags"),
        ({"expires_in": -1}, "expires_in"),
        ({"expires_in": 1.5}, "expires_in"),
        ({"expires_in": 10**10}, "expires_in"),
        ({"tokens": 1}, "tokens"),
    ):
        for answer in (
            live.client.patch(path, json=body),
            live.client.post(STATES, json={"prompt": "a", **body}),
        ):
            assert answer.status_code == 400, answer.text
            assert error_of(answer)["param"] == param
            assert "Input should" not in answer.text
    assert live.client.patch(f"{STATES}/state-{'0' * 24}", json={}).status_code == 404


def test_changes_at_the_same_time_are_all_kept(live: LiveServer) -> None:
    path = f"{STATES}/{live.post(STATES, prompt='a')['id']}"

    def patch(body: dict[str, Any]) -> None:
        assert live.client.patch(path, json=body).status_code == 200

    with ThreadPoolExecutor(2) as pool:
        for n in range(1, 21):
            list(pool.map(patch, ({"name": str(n)}, {"tags": [str(n)]})))
            found = live.client.get(path).json()
            assert (found["name"], found["tags"]) == (str(n), [str(n)])


def test_an_expired_state_is_gone(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:

    short = live.post(STATES, prompt="a", expires_in=50)
    long = live.post(STATES, prompt="a", expires_in=500)
    now = time.time()
    monkeypatch.setattr("xlstm7b.generate.state.time.time", lambda: now + 100)
    for method, path in (
        ("GET", f"{STATES}/{short['id']}"),
        ("GET", f"{STATES}/{short['id']}/content"),
        ("DELETE", f"{STATES}/{short['id']}"),
    ):
        assert live.client.request(method, path).status_code == 404
    assert live.client.post(COMPLETIONS, json={"state": short["id"]}).status_code == 404
    listed = {state["id"] for state in live.client.get(STATES).json()["data"]}
    assert long["id"] in listed
    assert short["id"] not in listed
    folder = live.service.states._store.folder
    assert [path for path in folder.iterdir() if short["id"] in path.name] == []


def test_pages(generator: Generator, tmp_path: Path) -> None:
    with serving(generator, states=tmp_path) as live:
        ids = [live.post(STATES, prompt="a", tags=["odd"] * (n % 2))["id"] for n in range(7)]
        newest = ids[::-1]

        def page(**query: Any) -> tuple[list[str], bool]:
            answer = live.client.get(STATES, params=query).json()
            found = [state["id"] for state in answer["data"]]
            ends = (found[0], found[-1]) if found else (None, None)
            assert (answer["first_id"], answer["last_id"]) == ends
            return found, answer["has_more"]

        assert page() == (newest, False)
        assert page(limit=7) == (newest, False)
        found, has_more = page(limit=3)
        while has_more:
            more, has_more = page(limit=3, after=found[-1])
            found += more
        assert found == newest
        assert page(tag="odd") == ([ids[5], ids[3], ids[1]], False)
        assert page(tag="odd", limit=1, after=ids[5]) == ([ids[3]], True)
        assert page(tag="other") == ([], False)
        for query, status, message in (
            ({"limit": 0}, 400, 'limit must be at least 1, not "0"'),
            ({"limit": 1001}, 400, 'limit must be at most 1000, not "1001"'),
            ({"limit": "x"}, 400, 'limit must be a whole number, not "x"'),
            ({"limit": "9" * 5000}, 400, "limit must be a whole number"),
            ({"limt": 1}, 400, "limt is not a field that this server knows"),
            ({"after": "state-0"}, 404, "after: there is no saved state 'state-0' in this list"),
            ({"after": ids[0], "tag": "odd"}, 404, "after: there is no saved state"),
        ):
            answer = live.client.get(STATES, params=query)
            assert answer.status_code == status, answer.text
            assert error_of(answer)["message"].startswith(message)
            assert error_of(answer)["param"] == next(iter(query))


def test_a_state_is_downloaded_and_uploaded_again(live: LiveServer, tmp_path: Path) -> None:
    saved = live.post(STATES, messages=user("Hello"))
    answer = live.client.get(f"{STATES}/{saved['id']}/content")
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content) == saved["bytes"]
    assert answer.headers["content-type"] == "application/octet-stream"
    file_name = f'attachment; filename="{saved["id"]}.safetensors"'
    assert answer.headers["content-disposition"] == file_name
    (tmp_path / "state").write_bytes(answer.content)
    assert SavedState.load(tmp_path / "state", live.service.config).tokens_seen == [saved["tokens"]]
    again = live.client.put(STATES, content=answer.content, params={"name": "copy", "tags": "t"})
    assert again.status_code == 200, again.text
    assert (again.json()["name"], again.json()["tags"]) == ("copy", ["t"])
    turn = {"messages": user("Go on."), "max_tokens": 8, **GREEDY}
    answers = [live.post(CHAT, state=one["id"], **turn) for one in (saved, again.json())]
    assert text_of(answers[0]) == text_of(answers[1])


def test_a_state_is_used_by_several_requests_at_once(live: LiveServer) -> None:
    book = live.post(STATES, prompt="The sea was calm. " * 20)["id"]
    want = {
        text: text_of(live.post(COMPLETIONS, state=book, prompt=text, max_tokens=20, **GREEDY))
        for text in "abcdefgh"
    }
    found: dict[str, str] = {}

    def ask(text: str) -> None:
        body = {"state": book, "prompt": text, "max_tokens": 20, **GREEDY}
        found[text] = text_of(live.post(COMPLETIONS, **body))

    threads = [threading.Thread(target=ask, args=(text,)) for text in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == want


def test_files_are_private_and_a_restart_keeps_the_labels(
    generator: Generator, tmp_path: Path
) -> None:
    with serving(generator, states=tmp_path) as live:
        saved = live.post(STATES, prompt="a", name="Book")
        done = live.post(COMPLETIONS, prompt="a", max_tokens=1, save_state=True)["state_id"]
    paths = [*tmp_path.iterdir()]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert len(paths) == 3
    with serving(generator, states=tmp_path) as live:
        listed = {state["id"]: state["name"] for state in live.client.get(STATES).json()["data"]}
        assert listed == {saved["id"]: "Book", done: ""}
