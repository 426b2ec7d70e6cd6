"""Structured output: what the model writes has the form that was asked for."""

import gc
import json
import math
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
import torch
from engines import Driver, copy_of, gpu_like_engine, is_idle, new_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from models import spelling_model, spread_model
from tokenizer_kinds import gpt2, qwen, sentencepiece, unigram

from xlstm7b.chat_format import PlainFormat
from xlstm7b.generate import Generator, Request, SamplingParams, best_of_n, structured
from xlstm7b.generate.chat import Chat
from xlstm7b.generate.sampler import Needs, Sampler
from xlstm7b.generate.search import Tree
from xlstm7b.generate.structured import (
    GrammarsBusyError,
    Matcher,
    StructuredOutputError,
    compile_grammar,
    compiling_for,
    next_masks,
)
from xlstm7b.tokenizer import ByteTokenizer, FileTokenizer

MODEL = spread_model()
TOKENIZER = ByteTokenizer()
GENERATOR = Generator(MODEL, TOKENIZER)
COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # a random model likes white space
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
    **COMPACT,
}
both_engines = pytest.mark.parametrize(
    "make_engine",
    [new_engine, gpu_like_engine, pytest.param(partial(gpu_like_engine, replay=True), id="replay")],
)


def grammar(form, tokenizer=TOKENIZER, config=MODEL.config):
    params = SamplingParams(structured_outputs=form)
    return compile_grammar(params.structured_outputs, config, tokenizer)


def accepts(form, text, tokenizer=TOKENIZER):
    """True if the whole text, and not only its start, matches."""
    matcher = Matcher(grammar(form, tokenizer), [0])
    try:
        for token in tokenizer.encode(text, continues=True):
            matcher.advance(token)
    except StructuredOutputError:
        return False
    mask = next_masks([matcher]).numpy()[0]
    return matcher.error is None and bool(mask[0] & 1)


# JSON schemas

NAMES = st.text('ab é"\\', min_size=1, max_size=3)
LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-200, 200),
        st.integers(0, 50),
    ),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
    st.lists(st.none() | st.booleans() | st.integers(-9, 9) | NAMES, min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    NAMES.map(lambda name: {"const": name}),
)


@st.composite
def objects(draw, inner):
    properties = draw(st.dictionaries(NAMES, inner, min_size=1, max_size=3))
    required = draw(st.lists(st.sampled_from([*properties]), unique=True))
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        objects(inner)
        | st.builds(
            lambda items, least: {
                "type": "array", "items": items, "minItems": least, "maxItems": 2
            },
            inner,
            st.integers(0, 2),
        )
        | st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some})
    ),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_outputs_parse_and_validate(schemas, seed):
    requests = [
        Request(
            "x",
            SamplingParams(
                max_new_tokens=120, seed=seed, structured_outputs={"json": {**schema, **COMPACT}}
            ),
        )
        for schema in schemas
    ]
    for schema, completion in zip(schemas, GENERATOR.run(requests), strict=True):
        if completion.finish_reason == "stop":
            assert jsonschema_rs.is_valid(schema, json.loads(completion.text))
        else:
            assert len(completion.token_ids) == 120


def test_a_schema_as_a_dict_a_text_and_json_schema():
    want = GENERATOR.generate("x", json_schema=PERSON, seed=1)[0]
    person = json.loads(want.text)
    assert jsonschema_rs.is_valid(PERSON, person)
    assert want.finish_reason == "stop"
    assert want.text == json.dumps(person, separators=(",", ":"), ensure_ascii=False)
    for form in ({"json": PERSON}, {"json": json.dumps(PERSON)}, {"json": PERSON, "regex": None}):
        assert GENERATOR.generate("x", structured_outputs=form, seed=1)[0].text == want.text


def test_json_object():
    params = {"structured_outputs": {"json_object": True}, "max_new_tokens": 200}
    outputs = GENERATOR.generate(["a", "b"] * 4, num_return_sequences=2, seed=0, **params)
    finished = [one for one in outputs if one.finish_reason == "stop"]
    assert finished
    assert all(isinstance(json.loads(one.text), dict) for one in finished)


def test_white_space_ends():
    """A model that prefers white space would write nothing else."""
    bias = {2 + byte: 100.0 for byte in b" \n\t\r"}
    schema = {"type": "array", "items": {"const": 1}, "maxItems": 1}
    output = GENERATOR.generate("x", json_schema=schema, logit_bias=bias, temperature=0)[0]
    assert output.finish_reason == "stop"
    assert json.loads(output.text) in ([], [1])
    assert set(map(len, re.findall(r"\s+", output.text))) == {1}


# Regexes, choices and grammars


@settings(max_examples=20, deadline=None)
@given(
    pattern=st.sampled_from(["[a-c]{2,5}x", r"\d{4}-\d\d", "(yes|no)( maybe)?", "é+[^\\x00-ÿ]"]),
    seed=st.integers(0, 2**32),
)
def test_regexes(pattern, seed):
    form = {"regex": pattern}
    output = GENERATOR.generate("x", structured_outputs=form, max_new_tokens=40, seed=seed)[0]
    if output.finish_reason == "stop":
        assert re.fullmatch(pattern, output.text)


@settings(max_examples=40, deadline=None)
@given(choices=st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=4), data=st.data())
def test_choices(choices, data):
    for choice in choices:
        assert accepts({"choice": choices}, choice)
    other = data.draw(st.text(min_size=1, max_size=4))
    assert accepts({"choice": choices}, other) == (other in choices)


def test_choices_are_written_whole():
    choices = ["yes", "no", "Grüße", 'a "quoted"\nword\\', "no way"]
    outputs = GENERATOR.generate(
        "x", structured_outputs={"choice": choices}, num_return_sequences=20, seed=0, temperature=5
    )
    assert {output.text for output in outputs} <= {*choices}
    assert len({output.text for output in outputs}) > 1
    assert {output.finish_reason for output in outputs} == {"stop"}


def test_a_grammar():
    sums = 'start: term ("+" term)*\nterm: /[1-9]/ | "(" start ")"'
    for output in GENERATOR.generate(
        "x", structured_outputs={"grammar": sums}, num_return_sequences=8, seed=0
    ):
        assert re.fullmatch("[1-9+()]+", output.text)
        if output.finish_reason == "stop":
            assert isinstance(eval(output.text), int)


def test_a_grammar_cannot_name_special_tokens():
    """Id 0 is the end of text, and 258 and above have no text."""
    matcher = Matcher(grammar({"grammar": "start: <[0-319]> <[0-319]>"}), [0])
    allowed = np.unpackbits(next_masks([matcher]).numpy().view(np.uint8), bitorder="little")
    assert [*np.flatnonzero(allowed)] == [*range(2, 258)]


# Tokenizers


@pytest.mark.parametrize("kind", [gpt2, qwen, sentencepiece, unigram])
def test_tokens_of_several_bytes(kind, tmp_path: Path):
    folder = kind(tmp_path / kind.__name__)
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    size = tokenizer.vocab_size + 7  # some ids have no token
    model = spread_model(vocab_size=size, eos_token_id=tokenizer.special.eos)
    form = {"json": {"type": "string", "pattern": "^the (lazy )?dog, [a-zäß]{1,9}$"}}
    generator = Generator(model, tokenizer)
    outputs = generator.generate(
        ["The quick", "Grüße"] * 5, structured_outputs=form, max_new_tokens=40, seed=3
    )
    for output in outputs:
        assert output.finish_reason == "stop"
        assert re.fullmatch("the (lazy )?dog, [a-zäß]{1,9}", json.loads(output.text))
    matcher = Matcher(grammar(form, tokenizer, model.config), [tokenizer.special.eos])
    for token in tokenizer.encode('"the lazy dog, x"', continues=True):
        matcher.advance(token)
    assert matcher.is_complete


# With other parameters


def test_other_parameters():
    want = GENERATOR.generate("x", json_schema=PERSON, seed=1, logprobs=2)[0]
    assert len(want.logprobs) == len(want.token_ids) == len(want.top_logprobs)
    # Log-probabilities are the model's own: what the schema does not allow may be likelier.
    assert any(
        token not in top for token, top in zip(want.token_ids, want.top_logprobs, strict=True)
    )
    for options in (
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"temperature": 0},
        {"top_k": 1},
        {"top_p": 0.1, "min_p": 0.2},
        {"min_new_tokens": 100},  # an output that is complete ends sooner
        {"eos_token_id": []},
        {"logit_bias": dict.fromkeys(range(320), -torch.inf)},  # it has no say
    ):
        output = GENERATOR.generate("x", json_schema=PERSON, seed=1, **options)[0]
        assert output.finish_reason == "stop", options
        assert jsonschema_rs.is_valid(PERSON, json.loads(output.text))


def test_a_bias_chooses_among_allowed_tokens():
    form = {"choice": ["cat", "dog", "cow"]}
    for letter, others in (("d", "c"), ("c", "d")):
        for bias in ({2 + ord(letter): 50.0}, {2 + ord(others): -100.0}):
            output = GENERATOR.generate("x", structured_outputs=form, logit_bias=bias, seed=0)[0]
            assert output.text[0] == letter


def test_stop_strings_and_the_maximum_cut():
    form = {"regex": "(ab)+c"}
    output = GENERATOR.generate("x", structured_outputs=form, stop_strings="ba", seed=0)[0]
    assert (output.text, output.finish_reason) in (("a", "stop"), ("abc", "stop"))
    form = {"regex": "a{20}"}
    output = GENERATOR.generate("x", structured_outputs=form, max_new_tokens=19)[0]
    assert (output.text, output.finish_reason) == ("a" * 19, "length")
    output = GENERATOR.generate("x", structured_outputs=form, max_new_tokens=20)[0]
    assert (output.text, output.finish_reason) == ("a" * 20, "stop")


def test_an_output_may_end_only_where_the_form_is_complete():
    """The end of text is by far the likeliest token, and never banned."""
    bias = {0: 100.0}
    form = {"regex": "a{3,}"}
    output = GENERATOR.generate("x", structured_outputs=form, logit_bias=bias, temperature=0)[0]
    assert (output.text, output.finish_reason) == ("aaa", "stop")
    output = GENERATOR.generate(
        "x", structured_outputs=form, logit_bias=bias, min_new_tokens=5, temperature=0
    )[0]
    assert output.text == "aaaaa"
    # An end of text that is a letter: it is text nowhere.
    output = GENERATOR.generate("x", structured_outputs={"regex": "[ab]{3}"}, eos_token_id=99)[0]
    assert output.text == "bbb"


def test_the_empty_text():
    for ends in (None, []):
        output = GENERATOR.generate("x", structured_outputs={"regex": ""}, eos_token_id=ends)[0]
        assert (output.text, output.token_ids, output.finish_reason) == ("", [], "stop")


def test_streams_and_states():
    outputs = [*GENERATOR.stream("x", json_schema=PERSON, seed=1, keep_state=True)]
    completion = outputs[-1].completion
    assert "".join(output.text for output in outputs) == completion.text
    assert json.loads(completion.text)
    # The state has read the whole output: what follows is what follows the same text.
    again = GENERATOR.read([[*TOKENIZER.encode("x"), *completion.token_ids]])
    torch.testing.assert_close(completion.state.logits, again.logits, atol=1e-3, rtol=1e-3)


def test_a_chat_answer_ends_by_its_form_alone():
    model = spelling_model("abc")
    chat = Chat(
        Generator(model, TOKENIZER), structured_outputs={"choice": ["\n\nUser: a", "\nUser:"]}
    )
    answer = [*chat.say("hello")][-1].completion
    assert answer.text in ("\n\nUser: a", "\nUser:")
    assert PlainFormat().stop_string in "\n\nUser: a"


def test_searches():
    form = {"choice": ["one", "two", "three"]}
    for ends in (None, []):
        ranked = best_of_n(GENERATOR, "x", 5, structured_outputs=form, seed=0, eos_token_id=ends)
        assert all(map(math.isfinite, (score for score, _ in ranked)))
    assert {completion.text for _, completion in ranked} <= {"one", "two", "three"}
    tree = Tree(GENERATOR, "x")
    for _ in range(3):
        tree.expand(tree.leaves[0], 2, structured_outputs={"regex": "abcdef"}, max_new_tokens=2)
    assert tree.best.text == "abcdef"
    tree = Tree(GENERATOR, "x")
    tree.expand(tree.root, 1, structured_outputs={"choice": ["ab"]}, max_new_tokens=1)
    with pytest.raises(StructuredOutputError, match="cannot be followed any further"):
        tree.expand(tree.leaves[0], 1, structured_outputs={"choice": ["ba"]})


# Batches

FORMS = [
    None,
    {"json": PERSON},
    {"regex": "[a-z]{3,9}"},
    {"choice": ["yes", "no"]},
    {"grammar": 'start: "a" start | "b"'},
]


def requests_of(seed):
    return [
        Request(
            "x" * (1 + number % 3),
            SamplingParams(
                max_new_tokens=12 + 5 * (number % 4),
                temperature=number % 3,
                seed=seed + number,
                structured_outputs=FORMS[number % len(FORMS)],
                logprobs=1 if number % 7 == 0 else None,
                top_k=5 if number % 4 == 0 else 0,
            ),
            keep_state=number % 6 == 1,
        )
        for number in range(15)
    ]


@both_engines
def test_a_batch_with_and_without_grammars(make_engine):
    """Every output is the same as alone: grammars, slots and moves do not mix."""
    driver = Driver(make_engine(MODEL, slots=5, prefill_tokens=16, cache_bytes=1 << 22))
    requests = []
    for request in requests_of(7):
        requests.append(driver.add(request))
        driver.step(2)
    driver.finish()
    assert is_idle(driver.engine)
    wants = [GENERATOR.run([copy_of(request)])[0] for request in requests_of(7)]
    assert len({request.params.structured_outputs is None for request in requests}) == 2
    for request, want in zip(requests, wants, strict=True):
        got = driver.completion(request)
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
        if request.keep_state:
            torch.testing.assert_close(got.state.logits, want.state.logits, atol=1e-3, rtol=1e-3)
        assert request.matcher is None  # freed


def test_masks_are_computed_while_the_device_computes(monkeypatch):
    """The forward pass is launched first, and the draw after the masks."""
    driver = Driver(gpu_like_engine(MODEL, slots=2))
    calls = []
    runner = driver.engine._runner

    def call(name, work, *arguments):
        calls.append(name)
        return work(*arguments)

    for name in ("forward", "set_masks", "draw", "decode"):
        monkeypatch.setattr(runner, name, partial(call, name, getattr(runner, name)))
    driver.add(Request("x", SamplingParams(max_new_tokens=3, structured_outputs={"regex": "a+"})))
    driver.finish()
    assert calls[:4] == ["set_masks", "forward", "set_masks", "draw"]
    assert "decode" not in calls
    calls.clear()
    driver.add(Request("x", SamplingParams(max_new_tokens=3)))
    driver.finish()
    assert {*calls} == {"decode"}  # without a grammar everything is as before


@both_engines
def test_many_aborts_leave_memory_flat(make_engine):
    engine = make_engine(MODEL, slots=8, prefill_tokens=16)

    def aborts(rounds):
        for number in range(rounds):
            driver = Driver(engine)
            params = SamplingParams(max_new_tokens=50, structured_outputs=FORMS[1 + number % 4])
            requests = driver.add_all(Request("x", params) for _ in range(10))
            driver.step(number % 5)
            for request in requests:
                engine.abort(request)
                assert request.matcher is None
            assert is_idle(engine)

    tracemalloc.start()
    aborts(8)
    gc.collect()
    before = tracemalloc.take_snapshot()
    aborts(16)
    gc.collect()
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    grown = sum(line.size_diff for line in after.compare_to(before, "filename"))
    assert grown < 100_000
    assert not [one for one in threading.enumerate() if one.name == "grammar"]


# Its automaton has millions of states. An output needs about three for each token.
LARGE = {"regex": "[a-h]*(a[a-h]{30}|b[a-h]{29}c)x"}


@both_engines
def test_a_lexer_that_many_outputs_fill_is_built_again(make_engine, monkeypatch):
    """Outputs of one grammar share its lexer. A full one refused every later output."""
    monkeypatch.setattr(structured, "_MAX_LEXER_STATES", 400)
    structured._compiled.cache_clear()
    driver = Driver(make_engine(MODEL, slots=4))
    params = [SamplingParams(60, seed=seed, structured_outputs=LARGE) for seed in range(12)]
    requests = driver.add_all(Request("x", one) for one in params)
    first = requests[0].matcher.grammar
    driver.finish()
    assert first.is_full  # else this tests nothing
    assert not grammar(LARGE).is_full
    for request in requests:
        assert re.fullmatch("[a-h]+x?", driver.completion(request).text)
    structured._compiled.cache_clear()


@both_engines
def test_an_output_that_fills_a_lexer_alone_fails(make_engine, monkeypatch):
    monkeypatch.setattr(structured, "_MAX_LEXER_STATES", 90)
    structured._compiled.cache_clear()
    driver = Driver(make_engine(MODEL, slots=2))
    bad = driver.add(Request("x", SamplingParams(200, seed=1, structured_outputs=LARGE)))
    good = driver.add(Request("x", SamplingParams(structured_outputs={"choice": ["hello"]})))
    driver.finish()
    assert driver.completion(good).text == "hello"
    assert "cannot be followed any further: lexer error: too many states" in str(driver.error(bad))
    assert is_idle(driver.engine)
    structured._compiled.cache_clear()


@both_engines
def test_a_grammar_that_leads_nowhere_fails_alone(make_engine):
    driver = Driver(make_engine(MODEL, slots=3))
    dead_end = {"grammar": 'start: "ab" rest\nrest: rest "c"'}
    bad = driver.add(Request("x", SamplingParams(structured_outputs=dead_end)))
    good = driver.add(Request("x", SamplingParams(structured_outputs={"choice": ["hello"]})))
    driver.finish()
    assert driver.completion(good).text == "hello"
    assert "structured_outputs.grammar cannot be followed" in str(driver.error(bad))
    assert is_idle(driver.engine)


# The sampler


@given(
    allowed=st.lists(st.booleans(), min_size=70, max_size=70),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_only_tokens_of_the_mask_are_drawn(allowed, temperature, seed):
    sampler = Sampler(3, 70, "cpu")
    params = SamplingParams(temperature=temperature, eos_token_id=())
    form = SamplingParams(
        temperature=temperature, eos_token_id=(), structured_outputs={"regex": "a"}
    )
    for row, given_params in enumerate((form, params, form)):
        sampler.set_row(row, given_params, seed=seed)
    tokens = [token for token, may in enumerate(allowed) if may] or [69]
    bits = np.zeros(96, dtype=np.uint8)
    bits[tokens] = 1
    masks = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))[None]
    sampler.set_masks([2], masks)
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(seed % 2**31))
    plain = Sampler(3, 70, "cpu")
    for row in range(3):
        plain.set_row(row, params, seed=seed)
    sampler(logits, sampler.needs)
    plain(logits, Needs(sampling=True))
    assert sampler.tokens[:2].tolist() == plain.tokens[:2].tolist()
    token = sampler.tokens[2].item()
    assert token in tokens
    if temperature == 0:
        assert token == max(tokens, key=lambda one: logits[2, one])


# Mistakes

ONE_OF = (
    "structured_outputs must have exactly one of json (a schema), json_object (true), regex "
    "(a string), choice (a list of strings) and grammar (a string); it "
)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (5, ONE_OF + "is 5"),
        ({}, ONE_OF + "is {}"),
        ({"regex": "a", "choice": ["a"]}, ONE_OF + "has regex, choice"),
        ({"regexp": "a"}, ONE_OF + "has regexp"),
        ({"regex": 5}, ONE_OF + "has regex"),
        ({"choice": []}, "structured_outputs.choice must be a list of strings, none empty"),
        ({"choice": ["a", ""]}, "structured_outputs.choice must be a list of strings, none empty"),
        ({"json": "{"}, "structured_outputs.json is not JSON: Expecting property name"),
        ({"json": [1]}, "structured_outputs.json must be a JSON schema: an object"),
        ({"json": {"a": float("nan")}}, "structured_outputs.json is not JSON: Out of range"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json is not JSON: Object of type set"),
        (
            {"regex": "a" * 65537},
            "structured_outputs.regex must have at most 65536 characters, not 65537",
        ),
        (
            {"json": {"type": "strin"}},
            "structured_outputs.json is not valid: Invalid type: strin",
        ),
        (
            {"json": {"not": {}}},
            'structured_outputs.json has keywords that are not supported: "not"',
        ),
        (
            {"json": {"type": "integer", "minimum": 5, "maximum": 2}},
            "structured_outputs.json matches no JSON at all: minimum (5) is greater than maximum",
        ),
        ({"json": {"$ref": "#"}}, "structured_outputs.json matches no text at all"),
        (
            {"json": {"$ref": "http://example.com/x"}},
            "structured_outputs.json is not valid: Resource 'http://example.com/x' is not present",
        ),
        (
            {"json": {"type": "string", "pattern": "(?=a)b"}},
            "structured_outputs.json has an invalid regex: look-around",
        ),
        ({"regex": "("}, "structured_outputs.regex has an invalid regex: unclosed group"),
        ({"regex": "\ud800"}, "structured_outputs.regex is not valid: 'utf-8' codec can't encode"),
        (
            {"json": {"type": "integer", "multipleOf": 982451653}},
            "structured_outputs.json is too complex: fuel exhausted",
        ),
        ({"grammar": "start: x"}, "structured_outputs.grammar is not valid: at 1(8): unknown name"),
        ({"grammar": "start: start"}, "structured_outputs.grammar matches no text at all"),
    ],
)  # fmt: skip
def test_mistakes(form, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        GENERATOR.generate("x", structured_outputs=form)


def test_json_schema_or_structured_outputs():
    with pytest.raises(ValueError, match="json_schema and structured_outputs cannot be combined"):
        GENERATOR.generate("x", json_schema=PERSON, structured_outputs={"regex": "a"})


def nested(depth, key):
    text = "{}"
    for _ in range(depth):
        text = f'{{"{key}": {text}}}'
    return text


def test_thousands_of_choices():
    choices = [f"number {number} of many" for number in range(2500)] + ["number", "é", "日本", "😀"]
    (completion,) = GENERATOR.generate("x", structured_outputs={"choice": choices}, seed=1)
    assert completion.text in choices
    form = {"choice": choices}
    assert all(accepts(form, text) for text in ("number", "number 17 of many", "é", "日本", "😀"))
    assert not any(accepts(form, text) for text in ("numbe", "number 2500 of many", "éé", ""))


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(a{1000}){1000}"},
        {"json": {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b"} for n in range(12)]}},
        {"json": nested(200, "items")},
        {"grammar": "start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(60))},
        {"grammar": "start: " + "(" * 20000},
        {"grammar": "start: " + '"a"? ' * 8000},
    ],
)
def test_hostile_grammars_are_refused_soon(form, monkeypatch):
    monkeypatch.setattr(structured, "_CPU_SECONDS", 0.02)  # too little on the fastest CPU
    with pytest.raises(ValueError, match="structured_outputs"):
        GENERATOR.generate("x", structured_outputs=form, max_new_tokens=4)


def test_a_long_chain_of_rules_does_not_end_the_process():
    """With a stack of 8 MB it did."""
    script = """
from xlstm7b.config import ModelConfig
from xlstm7b.generate.structured import compile_grammar
from xlstm7b.tokenizer import ByteTokenizer
lark = "start: a0\\n" + "\\n".join(f"a{n}: a{n + 1}" for n in range(4500)) + '\\na4500: "x"'
config = ModelConfig(64, 1, 1, vocab_size=320)
try:
    compile_grammar({"grammar": lark}, config, ByteTokenizer())
except ValueError:
    pass
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "alive\n", done.stderr


@pytest.fixture
def compiling(monkeypatch):
    """Compiles no grammar whose form says "slow" until it is set."""
    released, compile_form = threading.Event(), structured._compile

    def slow(vocabulary, form, value):
        if "slow" in str(value):
            assert released.wait(20)
        return compile_form(vocabulary, form, value)

    monkeypatch.setattr(structured, "_compile", slow)
    yield released
    released.set()
    wait_until(lambda: not structured._Place._of_client)
    assert not structured._Place._taken


def wait_until(is_true):
    ends = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_a_grammar_that_takes_too_long(monkeypatch, compiling):
    """Its place is free when nobody waits for it any more, though it cannot be stopped."""
    monkeypatch.setattr(structured, "_SECONDS", 0.05)
    message = "structured_outputs.regex is too complex: it takes too long to compile"
    for number in range(6):
        with pytest.raises(StructuredOutputError, match=message):
            grammar({"regex": f"slow{number}"})
    monkeypatch.setattr(structured, "_SECONDS", 20)
    assert accepts({"regex": "unique-to-this-test"}, "unique-to-this-test")


def test_a_grammar_without_a_place_in_time(monkeypatch, compiling):
    with ThreadPoolExecutor(5) as threads:
        running = [threads.submit(grammar, {"regex": f"(slow){{{n}}}"}) for n in range(4)]
        wait_until(lambda: structured._Place._taken == 4)
        waiting = threads.submit(grammar, {"regex": "another-that-waits"})
        wait_until(lambda: structured._Place._changed._waiters)
        monkeypatch.setattr(structured, "_PLACE_SECONDS", 0.05)
        with pytest.raises(GrammarsBusyError, match=r"^too many other grammars are being compiled"):
            grammar({"regex": "a-valid-one"})
        assert not waiting.done()
        compiling.set()
        assert all(future.result() for future in [*running, waiting])


def test_one_client_does_not_take_all_places(monkeypatch, compiling):
    def of(client, regex):
        with compiling_for(client):
            return grammar({"regex": regex})

    with ThreadPoolExecutor(8) as threads:
        for name in ("_SECONDS", "_PLACE_SECONDS"):
            monkeypatch.setattr(structured, name, 0.5)
        hostile = [threads.submit(of, "hostile", f"slow{{{n}}}") for n in range(6)]
        assert of("other", "one-of-another-client")
        errors = [type(future.exception()) for future in hostile]
        assert errors.count(StructuredOutputError) == errors.count(GrammarsBusyError) == 3
        assert not structured._Place._taken
        with pytest.raises(GrammarsBusyError):  # its three have not ended yet
            of("hostile", "its-next-one")
        assert of("other", "the-next-one-of-another-client")
    compiling.set()
    wait_until(lambda: not structured._Place._of_client)
    monkeypatch.setattr(structured, "_SECONDS", 20)
    assert of("hostile", "its-next-one")


def test_without_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"needs llguidance: pip install 'xlstm7b\[serve\]'"):
        GENERATOR.generate("x", structured_outputs={"regex": "a"})
    assert GENERATOR.generate("x", max_new_tokens=2)
