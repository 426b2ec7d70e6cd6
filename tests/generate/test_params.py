"""SamplingParams: fields, defaults, bounds and the sentences about mistakes."""

import math
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest

from xlstm7b.generate.params import HELP, MAX_LOGPROBS, SamplingParams, check_logprobs

OUTSIDE = r"is outside the vocabulary of 40"
OUT_OF_BOUNDS = [
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
    ({"max_new_tokens": 2**63}, f"max_new_tokens must be below 2^63, not {2**63}"),
    ({"min_new_tokens": -1}, "min_new_tokens must be at least 0, not -1"),
    (
        {"min_new_tokens": 9, "max_new_tokens": 8},
        "min_new_tokens (9) must not exceed max_new_tokens (8)",
    ),
    ({"temperature": -1}, "temperature must be 0 or a positive number, not -1"),
    ({"temperature": math.inf}, "temperature must be 0 or a positive number, not inf"),
    ({"temperature": math.nan}, "temperature must be 0 or a positive number, not nan"),
    ({"top_k": -1}, "top_k must be 0 (all tokens) or a positive number, not -1"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
    ({"top_p": 1.1}, "top_p must be above 0 and at most 1, not 1.1"),
    ({"top_p": math.nan}, "top_p must be above 0 and at most 1, not nan"),
    ({"min_p": -0.1}, "min_p must be between 0 and 1, not -0.1"),
    ({"min_p": math.nan}, "min_p must be between 0 and 1, not nan"),
    ({"repetition_penalty": 0}, "repetition_penalty must be between 0.01 and 100, not 0"),
    ({"repetition_penalty": math.nan}, "repetition_penalty must be between 0.01 and 100, not nan"),
    ({"presence_penalty": math.inf}, "presence_penalty must be between -100 and 100, not inf"),
    ({"frequency_penalty": math.nan}, "frequency_penalty must be between -100 and 100, not nan"),
    ({"logit_bias": {3: math.inf}}, "logit_bias of token 3 must be at most 100, not inf"),
    ({"logit_bias": {3: math.nan}}, "logit_bias of token 3 must be at most 100, not nan"),
    ({"seed": -1}, "seed must be between 0 and 2^64 - 1, not -1"),
    ({"seed": 2**64}, f"seed must be between 0 and 2^64 - 1, not {2**64}"),
    ({"stop_strings": ""}, "a stop string must not be empty"),
    ({"stop_strings": ["a", ""]}, "a stop string must not be empty"),
    ({"logprobs": -1}, "logprobs must be between 0 and 20, not -1"),
    ({"logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
    (
        {"top_p": 2, "seed": -1, "top_k": -3},
        "top_k must be 0 (all tokens) or a positive number, not -3",
    ),
]


@pytest.mark.parametrize("vocab_size", [40, None])
@pytest.mark.parametrize(("changes", "message"), OUT_OF_BOUNDS)
def test_values_out_of_bounds(changes, message, vocab_size):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(**changes).check(vocab_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {3: 1.0, 40: 1.0}}, f"token 40 of logit_bias {OUTSIDE}"),
        ({"logit_bias": {-1: 1.0}}, f"token -1 of logit_bias {OUTSIDE}"),
        ({"eos_token_id": 40}, f"eos_token_id 40 {OUTSIDE}"),
        ({"eos_token_id": [0, -1]}, f"eos_token_id -1 {OUTSIDE}"),
    ],
)
def test_tokens_outside_the_vocabulary(changes, message):
    params = SamplingParams(**changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        params.check(40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {-1: 1.0}}, "token -1 of logit_bias must be at least 0"),
        ({"eos_token_id": [0, -1]}, "eos_token_id -1 must be at least 0"),
    ],
)
def test_negative_tokens_before_the_vocabulary_is_known(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(**changes).check()
    SamplingParams(logit_bias={10**9: 1.0}, eos_token_id=[10**9]).check()


def test_a_small_vocabulary_has_few_most_likely_tokens():
    SamplingParams(logprobs=7).check(7)
    with pytest.raises(ValueError, match=r"^logprobs must be between 0 and 7, not 8$"):
        SamplingParams(logprobs=8).check(7)
    for count in (0, MAX_LOGPROBS):
        check_logprobs("prompt_logprobs", count, 40)
    for count in (-1, 21, 2.0, True, None, "3"):
        with pytest.raises(
            ValueError, match=f"^prompt_logprobs must be between 0 and 20, not {count}$"
        ):
            check_logprobs("prompt_logprobs", count, 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 5.5}, "max_new_tokens must be a whole number, not 5.5"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be a whole number, not '5'"),
        ({"max_new_tokens": None}, "max_new_tokens must be a whole number, not None"),
        ({"min_new_tokens": 1.0}, "min_new_tokens must be a whole number, not 1.0"),
        ({"top_k": True}, "top_k must be a whole number, not True"),
        ({"top_k": None}, "top_k must be a whole number, not None"),
        ({"seed": 1.0}, "seed must be a whole number, not 1.0"),
        ({"logprobs": False}, "logprobs must be a whole number, not False"),
        ({"temperature": None}, "temperature must be a number, not None"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"temperature": 1 + 0j}, "temperature must be a number, not (1+0j)"),
        ({"min_p": "0"}, "min_p must be a number, not '0'"),
        ({"top_p": [1]}, "top_p must be a number, not [1]"),
        (
            {"presence_penalty": 10**400},
            f"presence_penalty must be within the range of a float, not {10**400}",
        ),
        (
            {"logit_bias": {65: 10**400}},
            f"logit_bias must be within the range of a float, not {10**400}",
        ),
        ({"logit_bias": {"65": 1}}, "logit_bias must be numbers by token id, not {'65': 1}"),
        ({"logit_bias": {65: "1"}}, "logit_bias must be numbers by token id, not {65: '1'}"),
        ({"logit_bias": [65]}, "logit_bias must be numbers by token id, not [65]"),
        ({"logit_bias": None}, "logit_bias must be numbers by token id, not None"),
        ({"eos_token_id": "0"}, "eos_token_id must be an id or a list of ids, not '0'"),
        ({"eos_token_id": 0.0}, "eos_token_id must be an id or a list of ids, not 0.0"),
        ({"eos_token_id": [0, None]}, "eos_token_id must be an id or a list of ids, not [0, None]"),
        ({"stop_strings": 5}, "stop_strings must be a string or a list of strings, not 5"),
        ({"stop_strings": None}, "stop_strings must be a string or a list of strings, not None"),
        ({"stop_strings": [5]}, "stop_strings must be a string or a list of strings, not [5]"),
        ({"stop_strings": b"a"}, "stop_strings must be a string or a list of strings, not b'a'"),
    ],
)
def test_values_of_another_type(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(**changes)


def test_defaults_are_valid_and_change_nothing():
    params = SamplingParams()
    params.check()
    params.check(7)
    assert {field.name: getattr(params, field.name) for field in fields(params)} == {
        "max_new_tokens": 256,
        "min_new_tokens": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "seed": None,
        "stop_strings": (),
        "eos_token_id": None,
        "logprobs": None,
        "structured_outputs": None,
    }


def test_values_at_the_bounds():
    SamplingParams(
        max_new_tokens=2**63 - 1,
        min_new_tokens=2**63 - 1,
        temperature=5e-324,
        top_k=2**70,
        top_p=5e-324,
        min_p=1,
        repetition_penalty=0.01,
        presence_penalty=-100,
        frequency_penalty=100,
        logit_bias={0: -math.inf, 39: 100},
        seed=2**64 - 1,
        eos_token_id=[0, 39],
        logprobs=20,
    ).check(40)


def test_every_field_has_a_help_text():
    assert [*HELP] == [field.name for field in fields(SamplingParams)]
    for text in HELP.values():
        assert text[0].isupper()
        assert text.endswith(".")
        assert len(text) <= 100


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), seed=np.int64(3), eos_token_id=np.int64(2), top_k=np.int32(4)
    )
    params.check(40)
    assert params.eos_token_ids == (2,)
    assert params == SamplingParams(temperature=0.5, seed=3, eos_token_id=2, top_k=4)


@pytest.mark.parametrize(
    ("given", "tokens"), [(None, ()), (5, (5,)), ([], ()), ((5, 6), (5, 6)), ([7], (7,))]
)
def test_eos_token_ids(given, tokens):
    assert SamplingParams(eos_token_id=given).eos_token_ids == tokens


def test_stop_strings_are_a_tuple():
    assert SamplingParams(stop_strings="ab").stop_strings == ("ab",)
    assert SamplingParams(stop_strings=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop_strings=()).stop_strings == ()


def test_params_do_not_change():
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(FrozenInstanceError):
        params.seed = 3
    assert replace(params, seed=3) == SamplingParams(logit_bias={3: 1.0}, seed=3)
    assert SamplingParams().logit_bias is not SamplingParams().logit_bias


# Keyword arguments


def test_from_options():
    assert SamplingParams.from_options() == SamplingParams()
    assert SamplingParams.from_options(seed=3, top_k=4) == SamplingParams(seed=3, top_k=4)
    assert SamplingParams.from_options(do_sample=None) == SamplingParams()
    assert SamplingParams.from_options(do_sample=False) == SamplingParams(temperature=0)
    assert SamplingParams.from_options(do_sample=True) == SamplingParams(temperature=1)
    assert SamplingParams.from_options(do_sample=True, temperature=0.3).temperature == 0.3
    assert SamplingParams.from_options(do_sample=False, temperature=0).temperature == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_tokens": 5},
            "there is no sampling parameter 'max_tokens'; there are: " + ", ".join(HELP),
        ),
        ({"do_sample": False, "temperature": 0.7}, "do_sample=False contradicts temperature 0.7"),
        ({"do_sample": True, "temperature": 0}, "do_sample=True contradicts temperature 0"),
        ({"do_sample": 1}, "do_sample must be true or false, not 1"),
        ({"do_sample": True, "temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"seed": "x"}, "seed must be a whole number, not 'x'"),
    ],
)
def test_mistakes_in_options(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams.from_options(**options)


def test_params_need_no_torch():
    """The command line reads them for its help texts."""
    script = "import sys, xlstm7b.generate.params; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
