"""What the prompt of a chat is: after a saved state, and with variables for the template."""

import json
from pathlib import Path

import pytest
from commands import CHATML
from live_server import GREEDY, error_of, serving

from xlstm7b.chat_format import ChatFormat, ChatTemplate
from xlstm7b.generate import Generator

CHAT, STATES = "/v1/chat/completions", "/v1/states"


@pytest.mark.parametrize("template", [None, CHATML])
def test_several_messages_follow_a_state(
    generator: Generator, tmp_path: Path, template: str | None
) -> None:
    chat_format = None if template is None else ChatFormat(ChatTemplate(template, {}))
    roles = ["system", "user", "assistant", "user", "assistant"]
    texts = ["The sea was calm.", "What was it?", "Calm.", "And then?", "A storm"]
    talk = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    options = {"max_tokens": 12, **GREEDY}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False, **options}
    with serving(generator, states=tmp_path, chat_format=chat_format) as live:
        for read in (1, 3):  # the document alone, or the first turn with it
            state = live.post(STATES, messages=talk[:read])["id"]
            want = live.post(CHAT, messages=talk[:4], **options)
            got = live.post(CHAT, messages=talk[read:4], state=state, **options)
            assert got["choices"] == want["choices"]
            want = live.post(CHAT, messages=talk, **goes_on)
            got = live.post(CHAT, messages=talk[read:], state=state, **goes_on)
            assert got["choices"] == want["choices"]
        for messages in (talk[2:4], talk[:4]):  # what the state has read
            message = live.refused(CHAT, 400, messages=messages, state=state)
            assert "must be one user message, or several" in message


def test_variables_reach_the_chat_template(generator: Generator, tmp_path: Path) -> None:
    source = CHATML + (
        "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
        "{{ '<think></think>' }}{% endif %}"
    )
    talk = [{"role": "user", "content": "Hi"}]
    off = {"chat_template_kwargs": {"enable_thinking": False, "unknown": [1, {"a": None}]}}
    chat_format = ChatFormat(ChatTemplate(source, {}))
    with serving(generator, states=tmp_path, chat_format=chat_format) as live:

        def prompt_of(**body: object) -> str:
            ids = live.post("/tokenize", **body, add_special_tokens=False)["tokens"]
            return live.post("/detokenize", tokens=ids)["prompt"]

        text = chat_format.render(talk)
        assert prompt_of(messages=talk) == text
        assert prompt_of(messages=talk, **off) == text + "<think></think>"
        options = {"max_tokens": 12, **GREEDY}
        want = live.post("/v1/completions", prompt=text + "<think></think>", **options)
        got = live.post(CHAT, messages=talk, **off, **options)
        assert got["choices"][0]["message"]["content"] == want["choices"][0]["text"].lstrip()
        assert got["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
        # After a state, too.
        state = live.post(STATES, messages=talk, name="a")["id"]
        plain, with_it = (
            live.post(CHAT, messages=talk, state=state, **more, **options)["usage"]["prompt_tokens"]
            for more in ({}, off)
        )
        assert with_it == plain + len("<think></think>")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("chat_template_kwargs", {"messages": []}, "'messages' is set by the server"),
        ("chat_template_kwargs", {"a": "\ud800"}, "it is not JSON"),
        ("chat_template_kwargs", [], "must be an object"),
        ("verbosity", "short", 'must be "low", "medium" or "high", not "short"'),
        ("prediction", "a", "must be an object"),
        ("prediction", {"type": "content"}, "prediction.content is missing"),
    ],
)
def test_wrong_hints_are_refused(
    generator: Generator, field: str, value: object, message: str
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], field: value})
    with serving(generator) as live:
        answer = live.client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        error = error_of(answer)
        assert message in error["message"]
        assert error["param"].startswith(field)
