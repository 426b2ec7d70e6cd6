"""The official OpenAI client against the server."""

import math

import openai
import pytest
from live_server import LiveServer

from xlstm7b.generate import Generator

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "xlstm7b"
    with pytest.raises(
        openai.NotFoundError, match="there is no model 'gpt'; this server has 'tiny'"
    ):
        client.models.retrieve("gpt")


def test_a_completion_through_the_client(client: openai.OpenAI, generator: Generator) -> None:
    (want,) = generator.generate(PROMPT, max_new_tokens=24, temperature=0)
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert done.choices[0].text == want.text
    assert done.choices[0].finish_reason == "length"
    assert done.usage.prompt_tokens == 1 + len(PROMPT)  # with the model's first token
    assert done.usage.completion_tokens == 24
    assert done.usage.total_tokens == 1 + len(PROMPT) + 24
    assert done.id.startswith("cmpl-")


def test_a_streamed_completion(client: openai.OpenAI, generator: Generator) -> None:
    settings = {"temperature": 1.5, "seed": 3, "top_p": 0.9}
    (want,) = generator.generate(PROMPT, max_new_tokens=40, **settings)
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
            **settings,
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == want.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 40
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_through_the_client(client: openai.OpenAI, generator: Generator) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": [{"type": "text", "text": "And you?"}]},
    ]
    written = "Be brief.\n\nUser: Hello\nAssistant: Hi!\nUser: And you?\nAssistant:"
    (want,) = generator.generate(
        written, max_new_tokens=12, temperature=0, logprobs=2, stop_strings="\nUser:"
    )
    options = {"model": "tiny", "messages": conversation, "temperature": 0}
    done = client.chat.completions.create(
        max_completion_tokens=12, logprobs=True, top_logprobs=2, **options
    )
    choice = done.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == want.text.lstrip()
    assert done.usage.prompt_tokens == 1 + len(written)
    got = [token.logprob for token in choice.logprobs.content]
    assert got == pytest.approx(want.logprobs, abs=1e-4)
    text = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert text.decode(errors="replace") == want.text
    for token in choice.logprobs.content:
        assert token.top_logprobs[0].logprob == token.logprob  # greedy
        assert (
            math.exp(token.top_logprobs[0].logprob) + math.exp(token.top_logprobs[1].logprob)
            <= 1 + 1e-6
        )

    chunks = list(client.chat.completions.create(max_tokens=12, stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == want.text.lstrip()
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_growing_chat_is_found_in_the_prefix_cache(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "A long story, please. " * 20}]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    first = client.chat.completions.create(messages=messages, **options)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Go on."},
    ]
    second = client.chat.completions.create(messages=messages, **options)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens <= cached < second.usage.prompt_tokens


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "temperature": 0, "max_tokens": 5}
    messages = [{"role": "user", "content": "Hello"}]
    plain = client.chat.completions.create(messages=messages, **options).choices[0].message
    extra = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "user": "me",
        "store": False,
        "metadata": {"run": "1"},
        "service_tier": "auto",
        "stop": [],
        "n": 1,
        "reasoning_effort": "low",
        "verbosity": "low",
        "prediction": {"type": "content", "content": [{"type": "text", "text": "abc"}]},
        "logit_bias": {},
        "extra_body": {
            "functions": [],
            "function_call": "none",
            "audio": None,
            "top_k": -1,
            "cache_prompt": True,
            "skip_special_tokens": True,
            "stop_token_ids": [],
            "use_beam_search": False,
            "add_generation_prompt": True,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    }
    again = client.chat.completions.create(messages=messages, **options, **extra)
    assert again.choices[0].message.content == plain.content
    # Clients send an answer back as it came, or with all fields that they know.
    known = {"tool_calls": [], "annotations": [], "reasoning_content": "Let me think."}
    for answer in (plain, {**plain.model_dump(), **known}):
        talk = [*messages, answer, *messages]
        assert client.chat.completions.create(messages=talk, **options).usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "structural_tag"}),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("top_k", -2),
        ("max_tokens", -2),
        ("skip_special_tokens", False),
        ("stop_token_ids", [320]),
        ("use_beam_search", True),
        ("add_generation_prompt", False),
        ("web_search_options", {}),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(
    client: openai.OpenAI, field: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], extra_body={field: value}
        )
    assert raised.value.param is not None
    assert raised.value.param.partition(".")[0] == field
    assert field in raised.value.message


def test_errors_are_exceptions_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p must be above 0") as raised:
        client.completions.create(model="tiny", prompt="a", top_p=0)
    assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="a")
    assert unknown.value.code == "model_not_found"


def test_max_tokens_of_minus_one_is_the_default(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
    for most in (openai.omit, -1, 16):
        done = client.completions.create(prompt="a", max_tokens=most, suffix="", **options)
        assert done.usage.completion_tokens == 16
    for both in ((7, 7), (9, 7), (7, -1)):
        options["extra_body"]["max_completion_tokens"] = both[1]  # some clients send both
        done = client.completions.create(prompt="a", max_tokens=both[0], **options)
        assert done.usage.completion_tokens == 7


def test_continuous_usage(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": "abc", "max_tokens": 30, "stream": True}
    options |= {"extra_body": {"ignore_eos": True}}
    both = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.completions.create(**options, stream_options=both)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], chunks[0].usage.prompt_tokens) == (30, 4)
    assert counts[0] < 30
    assert (last.choices, last.usage) == ([], chunks[-1].usage)
    for more in ({"include_usage": True}, {"continuous_usage_stats": True}):
        streamed = [*client.completions.create(**options, stream_options=more)]
        with_usage = [chunk for chunk in streamed if chunk.usage is not None]
        assert len(with_usage) == ("include_usage" in more)
