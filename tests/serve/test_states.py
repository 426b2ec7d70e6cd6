"""/v1/states: states are saved, listed, continued from and deleted."""

import json
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from commands import CHATML
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import GREEDY, LiveServer, serving, wait_for

from xlstm7b.chat_format import ChatTemplate, TemplateFormat
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, SavedState, StateStore
from xlstm7b.model import XLSTM
from xlstm7b.serve.protocol import ApiError, Limiter
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


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_chat_continues_from_a_saved_state(
    generator: Generator, tmp_path: Path, template: str | None
) -> None:
    """Turn by turn from states, the answers are those from the whole conversation."""
    chat_format = None if template is None else TemplateFormat(ChatTemplate(template, {}))
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


def test_few_requests_may_hold_saved_states_in_memory(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.service.states, "in_memory", Limiter(1, "requests with saved states"))
    saved = live.post(STATES, prompt="a")["id"]
    endless = {"state": saved, "max_tokens": 60000, "ignore_eos": True, "stream": True}
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
        path.write_bytes(whole[: len(whole) // 2])
        assert "there is no saved state" in live.refused(COMPLETIONS, 404, state=saved)
        other = Generator(XLSTM(ModelConfig(64, 1, 2, vocab_size=320)), ByteTokenizer())
        other.read("a").save(path)
        message = live.refused(COMPLETIONS, 409, state=saved)
        assert message == f"the state {saved} is damaged or was saved by another model"


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


def test_other_files_are_not_uploaded(live: LiveServer, tmp_path: Path) -> None:
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
    assert "at most" in refused(bytes(1 << 24), 413)
    assert len(live.client.get(STATES).json()["data"]) == before


def test_a_trained_state_needs_the_weights_it_was_trained_for(
    generator: Generator, tmp_path: Path
) -> None:
    ours = {"quantization": "", "matrices": "a", "others": "b"}
    store = StateStore(tmp_path, generator.config, 1 << 30, evict=False)
    states = SavedStates(store, lambda: ours)
    file = tmp_path / "tuned.safetensors"
    generator.read("a").save(file, weights=json.dumps(ours))
    saved = states.upload(file.read_bytes())["id"]
    assert states.load(saved)[0].tokens_seen == [2]
    after_a_restart = SavedStates(store, lambda: {**ours, "matrices": "c"})
    with pytest.raises(ApiError, match="trained for other weights") as raised:
        after_a_restart.load(saved)
    assert raised.value.status == 409
    for note in (json.dumps({**ours, "others": "c"}), "[]", "{"):
        generator.read("a").save(file, weights=note)
        with pytest.raises(ApiError, match="trained for other weights"):
            states.upload(file.read_bytes())
