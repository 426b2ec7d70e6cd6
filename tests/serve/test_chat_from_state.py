"""A chat goes on from a saved state with several messages, as from the whole conversation."""

from pathlib import Path

import pytest
from commands import CHATML
from live_server import GREEDY, serving

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
