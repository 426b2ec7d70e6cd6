"""/v1/completions, /v1/chat/completions and /tokenize against the library's own results."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import GREEDY, LiveServer, error_of, serving

from xlstm7b.generate import Generator
from xlstm7b.model import XLSTM
from xlstm7b.serve.protocol import Limits
from xlstm7b.tokenizer import ByteTokenizer

PATH = "/v1/completions"
PROMPT = "The sea was"


def texts(answer: dict) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_texts_token_ids_and_lists_of_them_are_prompts(
    live: LiveServer, generator: Generator
) -> None:
    want = [done.text for done in generator.generate([PROMPT, "b"], max_new_tokens=9, **GREEDY)]
    ids = ByteTokenizer().encode(PROMPT)
    options = {"max_tokens": 9, **GREEDY}
    assert texts(live.post(PATH, prompt=PROMPT, **options)) == want[:1]
    assert texts(live.post(PATH, prompt=ids, **options)) == want[:1]
    assert texts(live.post(PATH, prompt=[0, *ids], **options)) == want[:1]
    both = live.post(PATH, prompt=[PROMPT, "b"], **options)
    assert texts(both) == want
    assert both["usage"]["prompt_tokens"] == 2 + len(PROMPT) + 1
    assert both["usage"]["completion_tokens"] == 18
    assert texts(live.post(PATH, prompt=[ids, ByteTokenizer().encode("b")], **options)) == want
    assert len(texts(live.post(PATH, prompt="", **options))[0]) <= 9
    assert len(live.post(PATH, prompt="a")["choices"][0]["text"]) <= 16  # OpenAI's default


def test_n_choices_have_the_seeds_from_seed_on(live: LiveServer, generator: Generator) -> None:
    settings = {"temperature": 2.0, "seed": 5, "top_k": 20}
    want = generator.generate(PROMPT, max_new_tokens=12, num_return_sequences=3, **settings)
    got = live.post(PATH, prompt=PROMPT, n=3, max_tokens=12, **settings)
    assert texts(got) == [done.text for done in want]
    assert len(set(texts(got))) == 3
    assert got["usage"]["prompt_tokens"] == 1 + len(PROMPT)
    assert got["usage"]["completion_tokens"] == 36
    streamed = live.stream(PATH, prompt=PROMPT, n=3, max_tokens=12, **settings)
    streamed_texts = {0: "", 1: "", 2: ""}
    for event in streamed:
        (choice,) = event["choices"]
        streamed_texts[choice["index"]] += choice["text"]
    assert [*streamed_texts.values()] == texts(got)


def test_best_of_returns_the_most_likely(live: LiveServer, generator: Generator) -> None:
    settings = {"temperature": 3.0, "seed": 1}
    drawn = generator.generate(
        PROMPT, max_new_tokens=5, num_return_sequences=6, logprobs=0, **settings
    )
    ranked = sorted(drawn, key=lambda done: -sum(done.logprobs) / len(done.logprobs))
    got = live.post(PATH, prompt=PROMPT, n=2, best_of=6, max_tokens=5, **settings)
    assert texts(got) == [done.text for done in ranked[:2]]
    assert got["choices"][0]["logprobs"] is None
    assert got["usage"]["completion_tokens"] == 30
    assert "best_of (1) must not be less than n (2)" in live.refused(
        PATH, 400, prompt="a", n=2, best_of=1
    )
    assert "best_of must equal n" in live.refused(PATH, 400, prompt="a", best_of=2, stream=True)


def test_sampling_fields_reach_the_sampler(live: LiveServer) -> None:
    (e,) = ByteTokenizer().encode("e")
    biased = live.post(PATH, prompt=PROMPT, max_tokens=4, logit_bias={str(e): 100}, **GREEDY)
    assert texts(biased) == ["eeee"]
    stopped = live.post(
        PATH, prompt=PROMPT, max_tokens=9, logit_bias={str(e): 100}, stop=["x", "ee"], **GREEDY
    )
    assert texts(stopped) == [""]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 2
    ended = {"prompt": PROMPT, "max_tokens": 3, "logit_bias": {"0": 100}, **GREEDY}
    assert texts(live.post(PATH, **ended)) == [""]
    assert live.post(PATH, **ended)["usage"]["completion_tokens"] == 0
    assert live.post(PATH, min_tokens=2, **ended)["usage"]["completion_tokens"] == 2
    assert live.post(PATH, ignore_eos=True, **ended)["usage"]["completion_tokens"] == 3
    negative = {"prompt": PROMPT, "max_tokens": 8, "seed": -1, "temperature": 2}
    assert texts(live.post(PATH, **negative)) == texts(live.post(PATH, **negative))


def test_echo_with_logprobs_scores_the_prompt(live: LiveServer, folder: Path) -> None:
    prompt = "abc äö"
    ids = ByteTokenizer().encode(prompt)
    with torch.no_grad():
        logits, _ = XLSTM.from_pretrained(folder)(torch.tensor([[0, *ids]]))
    table = logits[0].log_softmax(-1)
    got = live.post(PATH, prompt=ids, echo=True, logprobs=2, max_tokens=1, **GREEDY)
    choice = got["choices"][0]
    scores = choice["logprobs"]
    best = int(table[-1].argmax())
    assert choice["text"] == prompt + ByteTokenizer().decode([best])
    want = [float(table[position, token]) for position, token in enumerate([*ids, best])]
    assert scores["token_logprobs"] == pytest.approx(want, abs=1e-4)
    assert scores["tokens"][:4] == ["a", "b", "c", " "]
    assert scores["tokens"][4:6] == ["bytes:\\xc3", "bytes:\\xa4"]
    assert scores["text_offset"][:8] == [0, 1, 2, 3, 4, 4, 5, 5]
    for position, top in enumerate(scores["top_logprobs"]):
        most_likely = table[position].topk(2)
        assert sorted(top.values())[-2:] == pytest.approx(
            sorted(most_likely.values.tolist()), abs=1e-4
        )
        assert len(top) in (2, 3)  # the token itself, too
    alone = live.post(PATH, prompt=ids, echo=True, logprobs=2, max_tokens=0)
    assert alone["choices"][0]["text"] == prompt
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == scores["token_logprobs"][:-1]
    assert alone["usage"]["completion_tokens"] == 0
    first = live.post(PATH, prompt=[0, *ids], echo=True, logprobs=0, max_tokens=0)
    first_logprobs = first["choices"][0]["logprobs"]["token_logprobs"]
    assert first_logprobs[:2] == [None, scores["token_logprobs"][0]]
    plain = live.post(PATH, prompt=[prompt, "b"], echo=True, max_tokens=2, n=2, **GREEDY)
    assert [text[: len(prompt)] for text in texts(plain)[:2]] == [prompt] * 2
    assert [text[0] for text in texts(plain)[2:]] == ["b"] * 2
    streamed = live.stream(PATH, prompt=ids, echo=True, logprobs=2, max_tokens=1, **GREEDY)
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]
    streamed_logprobs = [
        value for event in streamed for value in event["choices"][0]["logprobs"]["token_logprobs"]
    ]
    assert streamed_logprobs == pytest.approx(scores["token_logprobs"])


@pytest.mark.parametrize("n", [1, 2])
def test_a_scored_prompt_is_read_once(live: LiveServer, n: int) -> None:
    counted = (
        "computed_prompt_tokens_total",
        "time_to_first_token_seconds_count",
        'request_success_total{finished_reason="length"}',
    )
    before = [live.metric(name) for name in counted]
    prompts = ["never seen before", "nor this"]
    options = {"echo": True, "logprobs": 1, "max_tokens": 3, "ignore_eos": True, "n": n}
    got = live.post(PATH, prompt=prompts, seed=1, **options)
    if n == 1:
        read = sum(len(prompt) + 1 for prompt in prompts)
        after = [live.metric(name) for name in counted]
        assert [b - a for a, b in zip(before, after, strict=True)] == [read, 2, 2]
    assert got["usage"]["completion_tokens"] == 6 * n
    for index, choice in enumerate(got["choices"]):
        prompt = prompts[index // n]
        assert choice["text"].startswith(prompt)
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 3
    events = live.stream(PATH, prompt=prompts, seed=1, **options)
    for index, choice in enumerate(got["choices"]):
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        scores = [score for part in parts for score in part["logprobs"]["token_logprobs"]]
        assert scores == pytest.approx(choice["logprobs"]["token_logprobs"])
        assert [part["finish_reason"] for part in parts][-2:] == [None, "length"]


def test_the_chunks_of_a_stream_add_up_to_the_whole_answer(live: LiveServer) -> None:
    options = {"prompt": PROMPT, "max_tokens": 60, "temperature": 1.0, "seed": 11, "logprobs": 1}
    whole = live.post(PATH, **options)["choices"][0]
    parts = [event["choices"][0] for event in live.stream(PATH, **options)]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in whole["logprobs"]:
        joined = [value for part in parts for value in part["logprobs"][name]]
        assert joined == whole["logprobs"][name], name


def test_tokenize_and_detokenize(live: LiveServer) -> None:
    ids = ByteTokenizer().encode("Grüße")
    first = live.service.config.bos_token_id
    assert live.post("/tokenize", prompt="Grüße") == {"tokens": [first, *ids], "count": 8}
    without = live.post("/tokenize", prompt="Grüße", add_special_tokens=False)
    assert without == {"tokens": ids, "count": 7}
    for tokens in (ids, [first, *ids]):
        assert live.post("/detokenize", tokens=tokens) == {"prompt": "Grüße"}
    talk = [{"role": "user", "content": "Hi"}]
    written = ByteTokenizer().encode("User: Hi\nAssistant:")
    assert live.post("/tokenize", messages=talk)["tokens"] == [first, *written]
    assert "outside the vocabulary of 320" in live.refused("/detokenize", 400, tokens=[320])
    assert "exactly one of prompt and messages" in live.refused("/tokenize", 400)


PROMPTS = st.text(max_size=20) | st.lists(st.integers(0, 319), min_size=1, max_size=20)
ROLES = st.sampled_from(["system", "user", "assistant"])
TALKS = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=9)}), min_size=1)


@settings(max_examples=12)
@given(prompt=PROMPTS, talk=TALKS)
def test_tokenize_counts_as_usage_does(live: LiveServer, prompt: Any, talk: Any) -> None:
    count = live.post("/tokenize", prompt=prompt)["count"]
    answer = live.post("/v1/completions", prompt=prompt, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == count
    if prompt:  # an empty one is not saved
        assert live.post("/v1/states", prompt=prompt)["usage"]["prompt_tokens"] == count
    tokens = live.post("/tokenize", messages=talk)["tokens"]
    answer = live.post("/v1/chat/completions", messages=talk, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    # The tokens can be sent as they are.
    answer = live.post("/v1/completions", prompt=tokens, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "there is no prompt"),
        ({"prompt": []}, "there is no prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": "a", "max_token": 1}, "max_token is not a field that this server knows"),
        ({"prompt": "a", "temperature": "1"}, 'temperature must be a number, not "1"'),
        ({"prompt": "a", "temperature": -1}, "temperature must be 0 or a positive number"),
        ({"prompt": "a", "n": [1]}, "n must be a whole number, not a list of 1 item"),
        ({"prompt": "a", "n": {"a": 1, "b": 2}}, "a whole number, not an object of 2 fields"),
        ({"prompt": "a", "n": True}, "n must be a whole number, not true"),
        ({"prompt": "a", "n": 129}, "n must be at most 128, not 129"),
        ({"prompt": ["a"] * 65, "n": 1}, "a request may have at most 64 choices in all, not 65"),
        ({"prompt": ["a"] * 129}, "prompt must have at most 128 entries, not 129"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop must have at most 16 entries, not 17"),
        ({"prompt": "a", "stop": ["a" * 257]}, "stop"),
        ({"prompt": "a", "stop": ""}, "a stop string must not be empty"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be between 1 and 65536, not 0"),
        ({"prompt": "a", "max_tokens": 10**30}, "max_tokens must be between 1 and 65536"),
        ({"prompt": [320]}, "token 320 is outside the vocabulary of 320"),
        ({"prompt": "a", "logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias.a: the keys must be token ids"),
        ({"prompt": "a", "logit_bias": {"400": 1}}, "token 400 of logit_bias is outside"),
        ({"prompt": "a", "suffix": "b"}, 'suffix must be "", not "b"'),
        ({"prompt": [1.5]}, "prompt.0 must be a whole number"),
        (
            {"prompt": "a", "stop": ["a", "b" * 257]},
            "stop.1 must be a string of at most 256 characters",
        ),
        (
            {"prompt": "a" * 9, "n": 64, "echo": True, "logprobs": 20, "max_tokens": 1600},
            "a request may have at most 1048576 logprobs in all",
        ),
    ],
)
def test_mistakes_are_400(live: LiveServer, body: dict, message: str) -> None:
    assert message in live.refused(PATH, 400, **body)


def test_mistakes_name_the_field_of_the_api(live: LiveServer, generator: Generator) -> None:
    chat, talk = "/v1/chat/completions", [{"role": "user", "content": "a"}]
    for path, body, message, param in (
        (PATH, {"prompt": "a", "temperature": -1}, "temperature must be 0 or", "temperature"),
        (PATH, {"prompt": "a", "logprobs": 99}, "logprobs must be between", "logprobs"),
        (PATH, {"prompt": "a", "stop": ""}, "a stop string must not be empty", "stop"),
        (PATH, {"prompt": "a", "logit_bias": {"320": 1}}, "token 320 of logit_bias", "logit_bias"),
        (PATH, {"prompt": [320]}, "token 320 is outside the vocabulary", "prompt"),
        (PATH, {"prompt": "a", "top_k": -2}, "top_k must be 0 (all tokens) or", "top_k"),
        (
            chat,
            {"messages": talk, "logprobs": True, "top_logprobs": 21},
            "top_logprobs must be between 0 and 20, not 21",
            "top_logprobs",
        ),
        ("/tokenize", {}, "exactly one of prompt and messages is needed", "prompt"),
        (
            PATH,
            {"prompt": "a", "min_tokens": 30, "max_tokens": 3},
            "min_tokens (30) must not exceed max_tokens (3)",
            "min_tokens",
        ),
        (
            chat,
            {"messages": talk, "max_completion_tokens": 0},
            "max_completion_tokens must be between 1 and 65536",
            "max_completion_tokens",
        ),
    ):
        error = error_of(live.client.post(path, json=body))
        assert message in error["message"]
        assert error["param"] == param
    limits = Limits(prompt_tokens=20)
    with serving(generator, limits=limits) as small:
        for path, body, param in (
            (PATH, {"prompt": "a" * 21}, "prompt"),
            (chat, {"messages": [{"role": "user", "content": "a" * 21}]}, "messages"),
            ("/tokenize", {"messages": [{"role": "user", "content": "a" * 21}]}, "messages"),
        ):
            error = error_of(small.client.post(path, json=body))
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            # The words by which litellm, langchain and agents know what to do.
            words = "This model's maximum context length is 20 tokens. However, your "
            assert error["message"].startswith(words + f"{param} resulted in ")
        many = small.refused(PATH, 400, prompt="a" * 19, n=2)
        assert "resulted in 38 tokens, counted once for each choice." in many


def test_a_chat_without_max_tokens_has_the_limit_of_the_server(generator: Generator) -> None:
    talk = [{"role": "user", "content": "a"}]
    with serving(generator, limits=Limits(new_tokens=1030)) as live:
        usage = live.post("/v1/chat/completions", messages=talk, ignore_eos=True)["usage"]
        assert usage["completion_tokens"] == 1030


def test_the_default_max_tokens_is_within_the_limit(generator: Generator) -> None:
    with serving(generator, limits=Limits(new_tokens=8)) as live:
        for path, body in (
            (PATH, {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            assert live.post(path, **body, ignore_eos=True)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages is missing"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing: only an assistant"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": None}]},
            "messages.1.content is missing: only an assistant",
        ),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            'messages.0.role must be "system", "developer", "user", "assistant" or "tool"',
        ),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, "needs logprobs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]},
            'messages.0.content.0.type must be "text", not "image_url"',
        ),
        (
            {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
            "tools.0.type is missing",
        ),
    ],
)
def test_chat_mistakes(live: LiveServer, body: dict, message: str) -> None:
    assert message in live.refused("/v1/chat/completions", 400, **body)


def test_max_tokens_0_with_echo_generates_nothing(live: LiveServer) -> None:
    body = {"prompt": [PROMPT, "b"], "echo": True, "max_tokens": 0}
    for logprobs in (None, 1):
        whole = live.post(PATH, **body, logprobs=logprobs)
        assert texts(whole) == [PROMPT, "b"]
        assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "length"]
        assert whole["usage"]["completion_tokens"] == 0
        events = live.stream(PATH, **body, logprobs=logprobs)
        for index, choice in enumerate(whole["choices"]):
            parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [part["finish_reason"] for part in parts] == [None, "length"]
