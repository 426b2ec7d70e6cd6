"""A server with several adapters: a request names one of them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from adapters import random_adapter
from commands import CHATML
from live_server import GREEDY, LiveServer, serving

from xlstm7b.chat_format import ChatFormat, ChatTemplate, PlainFormat
from xlstm7b.generate import Generator
from xlstm7b.model.adapter import load_adapter

COMPLETIONS, CHAT, STATES = "/v1/completions", "/v1/chat/completions", "/v1/states"


@pytest.fixture(scope="module")
def folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {
        name: random_adapter(place / name, folder, seed=seed, std=0.5)
        for seed, name in enumerate(("red", "blue"))
    }


@pytest.fixture(scope="module")
def adapted(
    generator: Generator, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    formats = {"red": PlainFormat(), "blue": ChatFormat(ChatTemplate(CHATML, {}), None)}
    adapters = {
        name: (load_adapter(path, generator.config), formats[name])
        for name, path in folders.items()
    }
    states = tmp_path_factory.mktemp("states")
    with serving(generator, states=states, adapters=adapters) as server:
        yield server


@pytest.fixture(scope="module")
def texts(folder: Path, folders: dict[str, Path]) -> dict[str, str]:
    """What each model writes after the same prompt."""
    found = {}
    for name, path in {"tiny": None, **folders}.items():
        alone = Generator.from_pretrained(folder, adapter=path, device="cpu")
        (done,) = alone.generate("The sea was", max_new_tokens=20, **GREEDY)
        found[name] = done.text
    assert len(set(found.values())) == 3
    return found


def test_models_are_listed_and_found(adapted: LiveServer) -> None:
    listed = adapted.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "tiny:red", "tiny:blue"]
    for name in ("tiny", "tiny:red", "tiny:blue"):
        assert adapted.client.get(f"/v1/models/{name}").json()["id"] == name
    assert adapted.client.get("/v1/models/green").status_code == 404
    message = adapted.refused(COMPLETIONS, 404, prompt="x", model="tiny:green")
    assert message == (
        "there is no model 'tiny:green'; this server has 'tiny', 'tiny:red', 'tiny:blue'"
    )


def test_requests_with_different_adapters_at_once(
    adapted: LiveServer, texts: dict[str, str]
) -> None:
    names = ["tiny", "tiny:red", "blue", "tiny:blue", "red", "tiny"] * 2

    def ask(name: str) -> dict:
        options = {"prompt": "The sea was", "max_tokens": 20, **GREEDY}
        return adapted.post(COMPLETIONS, model=name, **options)

    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(ask, names))
    for name, answer in zip(names, answers, strict=True):
        short = name.removeprefix("tiny:")
        assert answer["choices"][0]["text"] == texts[short]
        assert answer["model"] == (short if short == "tiny" else f"tiny:{short}")


def test_the_end_of_text_of_an_adapter(
    generator: Generator, folder: Path, folders: dict[str, Path]
) -> None:
    """It ends the outputs of that adapter only."""
    alone = Generator.from_pretrained(folder, adapter=folders["red"], device="cpu")
    (whole,) = alone.generate("The sea was", max_new_tokens=20, **GREEDY)
    end = whole.token_ids[5]
    before = whole.token_ids[: whole.token_ids.index(end)]
    red, blue = (load_adapter(folders[name], generator.config) for name in ("red", "blue"))
    adapters = {"red": (replace(red, end=end), PlainFormat()), "blue": (blue, PlainFormat())}
    body = {"prompt": "The sea was", "max_tokens": 20, **GREEDY}
    with serving(generator, adapters=adapters) as server:
        (choice,) = server.post(COMPLETIONS, model="red", **body)["choices"]
        assert choice["text"] == generator.tokenizer.decode(before)
        assert choice["finish_reason"] == "stop"
        (choice,) = server.post(COMPLETIONS, model="blue", **body)["choices"]
        assert choice["finish_reason"] == "length"


def test_a_state_belongs_to_its_adapter(adapted: LiveServer, texts: dict[str, str]) -> None:
    options = {"max_tokens": 20, **GREEDY}
    saved = adapted.post(STATES, prompt="The sea was", model="red")["id"]
    answer = adapted.post(COMPLETIONS, state=saved, model="red", **options)
    assert answer["choices"][0]["text"] == texts["red"]
    for other in ("blue", "tiny", None):
        body = {"state": saved, "model": other, **options}
        assert "saved with another adapter" in adapted.refused(COMPLETIONS, 409, **body)
    first = adapted.post(
        COMPLETIONS, prompt="The sea was", model="blue", max_tokens=8, save_state=True, **GREEDY
    )
    second = adapted.post(COMPLETIONS, state=first["state_id"], model="blue", **options)
    whole = first["choices"][0]["text"] + second["choices"][0]["text"]
    assert whole.startswith(texts["blue"])


def test_an_uploaded_state_belongs_to_an_adapter_of_the_server(
    adapted: LiveServer, generator: Generator, tmp_path: Path
) -> None:
    saved = adapted.post(STATES, prompt="a", model="red")["id"]
    content = adapted.client.get(f"{STATES}/{saved}/content").content
    assert adapted.client.put(STATES, content=content).json()["model"] == "tiny:red"
    generator.read("a").save(tmp_path / "green", adapter="of another server")
    answer = adapted.client.put(STATES, content=(tmp_path / "green").read_bytes())
    assert answer.status_code == 400
    assert "an adapter that this server does not have" in answer.text


def test_an_adapter_has_its_own_chat_template(adapted: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    counts = {
        name: adapted.post("/tokenize", messages=messages, model=name)["count"]
        for name in ("tiny", "red", "blue")
    }
    assert counts["tiny"] == counts["red"] != counts["blue"]
    for name in counts:
        adapted.post(CHAT, messages=messages, model=name, max_tokens=4, **GREEDY)
