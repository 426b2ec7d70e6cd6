"""Bodies: their sampling fields are those of SamplingParams, and mistakes make few errors."""

from dataclasses import fields

import pytest
from pydantic import ValidationError

from xlstm7b.generate.params import SamplingParams
from xlstm7b.serve.protocol import ChatBody, CompletionBody, Limits, SamplingBody

# Fields of SamplingParams that have another name in OpenAI's API, or depend on the route.
RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "eos_token_id": "ignore_eos",
    "logprobs": None,
}
USER = [{"role": "user", "content": "a"}]


def test_sampling_fields_have_the_names_of_sampling_params_and_no_defaults_or_bounds() -> None:
    for param in fields(SamplingParams):
        name = RENAMED.get(param.name, param.name)
        for body in (CompletionBody, ChatBody):
            if name is None:
                assert body.model_fields[param.name].default is None
            else:
                field = body.model_fields[name]
                assert field.default is None
                assert field.metadata == []


@pytest.mark.parametrize("body", [CompletionBody(), ChatBody(messages=USER)])
def test_an_empty_body_has_the_defaults_of_sampling_params(body: SamplingBody) -> None:
    want = SamplingParams(max_new_tokens=body.default_max_tokens(Limits()))
    assert body.to_sampling_params(Limits()) == want


def test_a_chat_without_max_tokens_ends_at_the_end_of_text_or_at_the_limit() -> None:
    def most(limits: Limits, **given: object) -> int:
        return ChatBody(messages=USER, **given).to_sampling_params(limits).max_new_tokens

    assert most(Limits()) == 1 << 16
    assert most(Limits(new_tokens=5000)) == 5000
    # With log-probabilities, as many tokens as a request may have of them.
    assert most(Limits(logprobs=1 << 20), logprobs=True, top_logprobs=20) == (1 << 20) // 21
    assert most(Limits(logprobs=1000), logprobs=True, n=5) == 200
    assert CompletionBody().to_sampling_params(Limits()).max_new_tokens == 16


def test_minus_one_is_as_if_the_field_were_absent() -> None:
    for body in (CompletionBody, ChatBody):
        given = {} if body is CompletionBody else {"messages": USER}
        plain = body(**given).to_sampling_params(Limits())
        for name in ("max_tokens", "max_completion_tokens", "top_k"):
            assert body(**given, **{name: -1}).to_sampling_params(Limits()) == plain


def test_every_sampling_field_reaches_sampling_params() -> None:
    given = {
        "seed": -1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
        "logit_bias": {"7": -1.5},
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": "x",
    }
    body = CompletionBody(**given, logprobs=4)
    params = body.to_sampling_params(Limits(), stop_strings=("y",), eos_token_id=(5,))
    assert params == SamplingParams(
        seed=2**64 - 1,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=-0.5,
        logit_bias={7: -1.5},
        max_new_tokens=9,
        min_new_tokens=2,
        stop_strings=("x", "y"),
        eos_token_id=(5,),
        logprobs=4,
    )
    chat = ChatBody(messages=USER, **given, logprobs=True, ignore_eos=True)
    params = chat.to_sampling_params(Limits(), eos_token_id=(5,))
    assert (params.logprobs, params.eos_token_id) == (0, ())


@pytest.mark.parametrize(
    "body",
    [
        {f"x{n}": n for n in range(5000)},
        {"messages": [{f"x{n}": n for n in range(5000)}]},
        {"messages": [{"role": "x"}] * 5000},
        {"logit_bias": {str(n): "x" for n in range(5000)}},
        {"metadata": {str(n): n for n in range(5000)}},
        {"stop": [1] * 5000},
    ],
)
def test_many_mistakes_make_few_errors(body: dict) -> None:
    """One error for each of 250,000 mistakes would block the server for 6 s."""
    with pytest.raises(ValidationError) as raised:
        ChatBody.model_validate({"messages": [{"role": "user"}], **body})
    assert raised.value.error_count() <= 20
