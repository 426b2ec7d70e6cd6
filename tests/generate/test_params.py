"""SamplingParams: fields, defaults, bounds and mistakes."""

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from errors import refused

from xlstm7b.generate.params import HELP, MAX_LOGPROBS, SamplingParams, check_logprobs

HUGE = 10**400
# The first field is the one at fault: the error names it and its value.
WRONG_TYPES = [
    {"max_new_tokens": 5.5},
    {"max_new_tokens": "5"},
    {"max_new_tokens": None},
    {"min_new_tokens": 1.0},
    {"top_k": True},
    {"top_k": None},
    {"seed": 1.0},
    {"logprobs": False},
    {"temperature": None},
    {"temperature": "hot"},
    {"temperature": True},
    {"temperature": 1 + 0j},
    {"min_p": "0"},
    {"top_p": [1]},
    {"presence_penalty": HUGE},
    {"logit_bias": {"65": 1}},
    {"logit_bias": {65: "1"}},
    {"logit_bias": [65]},
    {"logit_bias": None},
    {"eos_token_id": "0"},
    {"eos_token_id": 0.0},
    {"eos_token_id": [0, None]},
    {"stop_strings": 5},
    {"stop_strings": None},
    {"stop_strings": [5]},
    {"stop_strings": b"a"},
]
OUT_OF_BOUNDS = [
    {"max_new_tokens": 0},
    {"max_new_tokens": 2**63},
    {"min_new_tokens": -1},
    {"temperature": -1},
    {"temperature": math.inf},
    {"temperature": math.nan},
    {"top_k": -1},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_p": math.nan},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"min_p": math.nan},
    {"repetition_penalty": 0},
    {"repetition_penalty": 0.009},
    {"repetition_penalty": 100.5},
    {"repetition_penalty": math.nan},
    {"presence_penalty": -100.5},
    {"presence_penalty": 100.5},
    {"presence_penalty": math.inf},
    {"frequency_penalty": -100.5},
    {"frequency_penalty": 100.5},
    {"frequency_penalty": math.nan},
    {"seed": -1},
    {"seed": 2**64},
    {"logprobs": -1},
    {"logprobs": 21},
    {"top_k": -3, "top_p": 2, "seed": -1},  # the first of several, in the order of the fields
]
# Errors that name something else.
OTHERS = [
    ({"min_new_tokens": 9, "max_new_tokens": 8}, ["min_new_tokens (9)", "max_new_tokens (8)"]),
    ({"logit_bias": {3: 100.5}}, ["logit_bias", "token 3", "100.5"]),
    ({"logit_bias": {3: math.inf}}, ["logit_bias", "token 3", "inf"]),
    ({"logit_bias": {3: math.nan}}, ["logit_bias", "token 3", "nan"]),
    ({"logit_bias": {-1: 1.0}}, ["logit_bias", "token -1"]),
    ({"eos_token_id": [0, -1]}, ["eos_token_id -1"]),
    ({"stop_strings": ""}, ["stop string", "empty"]),
    ({"stop_strings": ["a", ""]}, ["stop string", "empty"]),
]
BEYOND_40 = [
    ({"logit_bias": {3: 1.0, 40: 1.0}}, ["logit_bias", "token 40", "vocabulary of 40"]),
    ({"eos_token_id": 40}, ["eos_token_id 40", "vocabulary of 40"]),
]


@pytest.mark.parametrize("changes", WRONG_TYPES, ids=str)
def test_values_of_another_type(changes):
    ((field, value),) = changes.items()
    with refused(field, f"not {value!r}"):
        SamplingParams(**changes)


def test_a_bias_beyond_the_range_of_a_float():
    with refused("logit_bias", HUGE):
        SamplingParams(logit_bias={65: HUGE})


@pytest.mark.parametrize("vocab_size", [40, None])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *((one, [next(iter(one)), f"not {next(iter(one.values()))!r}"]) for one in OUT_OF_BOUNDS),
        *OTHERS,
    ],
    ids=str,
)
def test_values_out_of_bounds(changes, named, vocab_size):
    params = SamplingParams(**changes)
    with refused(*named):
        params.check(vocab_size)


@pytest.mark.parametrize(("changes", "named"), BEYOND_40, ids=str)
def test_tokens_outside_the_vocabulary(changes, named):
    params = SamplingParams(**changes)
    params.check()
    params.check(41)
    with refused(*named):
        params.check(40)


def test_a_small_vocabulary_has_few_most_likely_tokens():
    SamplingParams(logprobs=7).check(7)
    with refused("logprobs", 8):
        SamplingParams(logprobs=8).check(7)
    for count in (0, MAX_LOGPROBS):
        check_logprobs("prompt_logprobs", count, 40)
    for count in (-1, 21, 2.0, True, None, "3"):
        with refused("prompt_logprobs", f"not {count}"):
            check_logprobs("prompt_logprobs", count, 40)


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
    ("options", "named"),
    [
        ({"max_tokens": 5}, ["max_tokens", *HELP]),
        ({"do_sample": False, "temperature": 0.7}, ["do_sample=False", "temperature 0.7"]),
        ({"do_sample": True, "temperature": 0}, ["do_sample=True", "temperature 0"]),
        ({"do_sample": 1}, ["do_sample", "not 1"]),
        ({"do_sample": True, "temperature": "hot"}, ["temperature", "not 'hot'"]),
        ({"seed": "x"}, ["seed", "not 'x'"]),
    ],
)
def test_mistakes_in_options(options, named):
    with refused(*named):
        SamplingParams.from_options(**options)


def test_params_need_no_torch():
    """The command line reads them for its help texts."""
    script = "import sys, xlstm7b.generate.params; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
