"""The same text however it is asked for, ended where it should be, with what is known of it."""

import re
from dataclasses import replace

import pytest
import torch
from measure import error

from xlstm7b.config import ModelConfig
from xlstm7b.generate import (
    Completion,
    Generator,
    Request,
    SamplingSettings,
    TextState,
    beam_search,
)
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

PROMPTS = ["Once upon a time", "A", "é", "The quick brown fox jumps over the lazy dog.", "A b"]
GREEDY = {"temperature": 0, "max_new_tokens": 12}
SAMPLED = {"temperature": 1.5, "max_new_tokens": 12, "seed": 7}


def random_model(**changes) -> XLSTM:
    """Gates that listen to their input, logits far apart: near ties are out of the question."""
    fields = {"embedding_dim": 64, "num_blocks": 2, "num_heads": 2, "vocab_size": 320}
    model = XLSTM(ModelConfig(**{**fields, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name:
                parameter.normal_(std=0.5)
        model.lm_head.weight *= 15
        model.lm_head.weight[0] = 0  # end of text: possible, not likely
    return model


torch.manual_seed(0)
MODEL = random_model()
GENERATOR = Generator(MODEL, ByteTokenizer())


def ids(prompt: str, completion: Completion | None = None) -> list[int]:
    return [0, *ByteTokenizer().encode(prompt), *(completion.token_ids if completion else ())]


def same(got: Completion, want: Completion) -> bool:
    return (got.text, got.token_ids, got.finish_reason) == (
        want.text, want.token_ids, want.finish_reason)  # fmt: skip


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED, {**SAMPLED, "top_p": 0.9, "top_k": 50}])
def test_one_text_by_many_ways(tmp_path, settings):
    alone = [GENERATOR.generate(prompt, **settings)[0] for prompt in PROMPTS]
    assert len({completion.text for completion in alone}) == len(PROMPTS)
    assert all(len(set(completion.token_ids)) > 4 for completion in alone)
    for completion, prompt in zip(alone, PROMPTS, strict=True):
        assert completion.text == ByteTokenizer().decode(completion.token_ids)
        assert completion.prompt_tokens == len(ids(prompt))

    for batch_size in (1, 2, 3, 32):
        other = Generator(MODEL, ByteTokenizer(), batch_size=batch_size)
        assert all(map(same, other.generate(PROMPTS, **settings), alone))
    # As ids, with the first token and without; order and neighbours do not matter.
    as_ids = [ids(prompt)[index % 2 :] for index, prompt in enumerate(PROMPTS)]
    assert all(map(same, GENERATOR.generate(as_ids[::-1], **settings), alone[::-1]))
    state = GENERATOR.read(PROMPTS)
    assert state.tokens_seen == [len(ids(prompt)) for prompt in PROMPTS]
    assert all(map(same, GENERATOR.generate(state=state, **settings), alone))
    state.save(tmp_path / "state")
    loaded = TextState.load(tmp_path / "state", MODEL.config)
    assert all(map(same, GENERATOR.generate(state=loaded.select([4, 0]), **settings),
                   [alone[4], alone[0]]))  # fmt: skip
    forks = GENERATOR.generate(state=state.fork(2), **settings)
    assert all(map(same, forks, [one for one in alone for _ in "ab"]))
    for prompt, want in zip(PROMPTS, alone, strict=True):
        *pieces, last = GENERATOR.stream(prompt, **settings)
        assert same(last.completion, want)
        assert all(piece.completion is None for piece in pieces)
        assert "".join(piece.text for piece in [*pieces, last]) == want.text
        tokens = [piece.token_id for piece in [*pieces, last]]
        assert tokens == want.token_ids + [0] * (want.finish_reason == "stop")
    # A prompt read in two parts, on top of a state.
    begun = GENERATOR.read([prompt[:1] for prompt in PROMPTS])
    rest = [prompt[1:] for prompt in PROMPTS]
    assert all(map(same, GENERATOR.generate(rest, state=begun, **settings), alone))


def test_several_sequences_have_seeds_one_after_the_other():
    several = GENERATOR.generate(PROMPTS[:2], num_return_sequences=3, **SAMPLED)
    want = [
        GENERATOR.generate(prompt, **{**SAMPLED, "seed": 7 + n})[0]
        for prompt in PROMPTS[:2]
        for n in range(3)
    ]
    assert all(map(same, several, want))
    assert len({completion.text for completion in several}) == 6
    last = GENERATOR.generate("A", num_return_sequences=2, **{**SAMPLED, "seed": 2**64 - 1})
    assert same(last[1], GENERATOR.generate("A", **{**SAMPLED, "seed": 0})[0])
    greedy = GENERATOR.generate("A", num_return_sequences=2, **GREEDY)
    assert same(*greedy)


def test_several_sequences_are_forked_and_told_of_a_batch_at_a_time(monkeypatch):
    want = GENERATOR.generate(PROMPTS[:2], num_return_sequences=4, **SAMPLED)
    generator, told, selected = Generator(MODEL, ByteTokenizer(), batch_size=3), [], []
    select = TextState.select
    monkeypatch.setattr(
        TextState, "select", lambda state, rows: (selected.append(rows), select(state, rows))[1]
    )
    several = {"num_return_sequences": 4, "done": lambda *news: told.append(news), **SAMPLED}
    texts = generator.generate(PROMPTS[:2], **several)
    assert all(map(same, texts, want))
    assert selected[-3:] == [[0, 0, 0], [0, 1, 1], [1, 1]]
    assert sorted(index for index, _ in told) == list(range(8))
    assert all(completion is texts[index] for index, completion in told)
    assert [index // 3 for index, _ in told] == [0] * 3 + [1] * 3 + [2] * 2
    asked = iter([False, False, True, True])
    some = generator.generate("A", should_stop=lambda: next(asked), **{**several, "done": None})
    assert [(len(text.token_ids), text.finish_reason) for text in some] == [(3, "stop")] * 3


def test_several_sequences_know_their_prompt():
    settings = {**SAMPLED, "repetition_penalty": 90.0, "temperature": 5.0}
    prompt = [*range(10, 250)]
    one, other = GENERATOR.generate([prompt], num_return_sequences=2, **settings)
    assert same(one, GENERATOR.generate([prompt], **settings)[0])
    assert one.prompt_tokens == other.prompt_tokens == 241


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 50.0}, {"presence_penalty": 90.0}, {"frequency_penalty": 90.0}],
)
def test_a_text_goes_on_under_penalties_that_know_its_beginning(penalty):
    settings = SamplingSettings(temperature=0, eos_token_id=(), max_new_tokens=24, **penalty)
    prompt = [0, 70, 80, 90]
    [first] = GENERATOR.run([Request(prompt, settings)], keep_state=True)
    rest = Request("", settings, already_read=(*prompt,), already_generated=(*first.token_ids,))
    [second] = GENERATOR.run([rest], state=first.state)
    [whole] = GENERATOR.run([Request(prompt, replace(settings, max_new_tokens=48))])
    assert first.token_ids + second.token_ids == whole.token_ids
    [unaware] = GENERATOR.run([Request("", settings)], state=first.state)
    assert unaware.token_ids != second.token_ids


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED, {**GREEDY, "logprobs": 2}])
@torch.no_grad()
def test_a_model_without_numbers_does_not_pass_for_one(settings):
    model = random_model()
    model.lm_head.weight[200, 3] = torch.nan
    generator = Generator(model, ByteTokenizer())
    sentence = "^the model's logits are not numbers: its weights are damaged, or overflow in"
    with pytest.raises(FloatingPointError, match=sentence):
        generator.generate(PROMPTS[:2], **settings)
    with pytest.raises(FloatingPointError, match=sentence):
        list(generator.stream("A", eos_token_id=(), **settings))
    with pytest.raises(FloatingPointError, match=sentence):
        beam_search(generator, "A", num_beams=2, max_new_tokens=4)


def test_without_a_seed_every_text_is_another():
    texts = GENERATOR.generate(["A"] * 4, temperature=2.0, max_new_tokens=9)
    texts += GENERATOR.generate("A", num_return_sequences=3, temperature=2.0, max_new_tokens=9)
    assert len({tuple(completion.token_ids) for completion in texts}) == 7


@torch.no_grad()
def assert_state_has_read(completion: Completion, text: list[int]) -> None:
    assert completion.state.tokens_seen == [len(text)]
    want, memory = MODEL(torch.tensor([text]), logits="last")
    assert error(completion.state.logits, want) < 3e-5
    for block, want_block in zip(completion.state.memory.blocks, memory.blocks, strict=True):
        assert error(block.C, want_block.C) < 3e-5
    (goes_on,) = GENERATOR.generate(state=completion.state, **GREEDY)
    assert same(goes_on, GENERATOR.generate([text], **GREEDY)[0])


@pytest.mark.parametrize("batch_size", [1, 32])
def test_kept_states_have_read_all_tokens_however_a_text_ended(batch_size):
    """Rows that end early keep their places while the others go on."""
    generator = Generator(MODEL, ByteTokenizer(), batch_size=batch_size)
    long = SamplingSettings(**{**GREEDY, "max_new_tokens": 20}, eos_token_id=())
    full = generator.run([Request(prompt, long) for prompt in PROMPTS])
    eos, stop = full[1].token_ids[6], full[2].text[3:5]
    requests = [
        Request(PROMPTS[0], replace(long, max_new_tokens=5)),
        Request(PROMPTS[1], replace(long, eos_token_id=[eos, 1])),
        Request(PROMPTS[2], long, (stop,)),
        Request(PROMPTS[3], long),
        Request(PROMPTS[4], replace(long, max_new_tokens=1)),
    ]
    told = {}
    completions = generator.run(requests, keep_state=True, done=told.__setitem__)
    reasons = [completion.finish_reason for completion in completions]
    assert reasons == ["length", "stop", "stop", "length", "length"]
    assert completions[0].token_ids == full[0].token_ids[:5]
    assert completions[1].token_ids == full[1].token_ids[: full[1].token_ids.index(eos)]
    assert completions[2].text == full[2].text[: full[2].text.index(stop)]
    assert 0 < len(completions[2].token_ids) < 20
    assert same(completions[3], full[3])
    assert completions[4].token_ids == full[4].token_ids[:1]
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert_state_has_read(completion, ids(prompt, completion))
    assert told == dict(enumerate(completions))
    if batch_size == 32:
        assert next(iter(told)) == 4  # told as soon as it was there
        read = [completion.state.tokens_seen[0] for completion in completions]
        assert sorted(generator._idle[5].state.tokens_seen.tolist()) == sorted(read)  # no further
    assert all(completion.state is None for completion in generator.run(requests))


def test_should_stop_ends_a_stream():
    asked = iter([False, False, True])
    stream = GENERATOR.stream("A", keep_state=True, should_stop=lambda: next(asked), **GREEDY)
    pieces = [*stream]
    (whole,) = GENERATOR.generate("A", **GREEDY)
    completion = pieces[-1].completion
    assert len(pieces) == 3
    assert completion.finish_reason == "stop"
    assert completion.token_ids == whole.token_ids[:3]
    assert "".join(piece.text for piece in pieces) == completion.text
    assert_state_has_read(completion, ids("A", completion))


def test_a_stream_left_alone_is_no_trouble():
    stream = GENERATOR.stream("é", **GREEDY)
    next(stream)
    want = GENERATOR.generate("A", **GREEDY)[0]
    stream.close()
    assert same(GENERATOR.generate("A", **GREEDY)[0], want)


def test_two_streams_at_once():
    streams = [GENERATOR.stream(prompt, **GREEDY) for prompt in "AB"]
    pieces = [*zip(*streams, strict=True)]
    for index, prompt in enumerate("AB"):
        want = GENERATOR.generate(prompt, **GREEDY)[0].token_ids
        assert [pair[index].token_id for pair in pieces] == want


def test_few_decoders_are_kept():
    generator = Generator(MODEL, ByteTokenizer())
    for count in (2, 1, 3, 4):
        generator.read(["A"] * count)
    assert sorted(generator._idle) == [1, 4]


@torch.no_grad()
def test_logprobs_are_the_models_own():
    """Of the logits themselves, whatever temperature and bias the text was drawn with."""
    settings = {**SAMPLED, "logprobs": 3, "logit_bias": {70: 5.0, 71: -torch.inf}}
    for prompt, completion in zip(PROMPTS, GENERATOR.generate(PROMPTS, **settings), strict=True):
        text = ids(prompt, completion)
        logits = MODEL(torch.tensor([text]))[0][0, len(ids(prompt)) - 1 : -1]
        want = logits.double().log_softmax(-1)
        chosen = want.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert error(torch.tensor(completion.logprobs), chosen) < 1e-5
        best = want.topk(3)
        assert [[*top] for top in completion.top_logprobs] == best.indices.tolist()
        values = torch.tensor([[*top.values()] for top in completion.top_logprobs])
        assert error(values, best.values) < 1e-5
    of_tokens = GENERATOR.generate(PROMPTS, **{**settings, "logprobs": 0})
    assert of_tokens[4].logprobs == completion.logprobs
    assert of_tokens[4].top_logprobs is None


def test_every_request_gets_as_many_logprobs_as_it_asked_for():
    rows = [SamplingSettings(**GREEDY, logprobs=count) for count in (2, None, 5, 0)]
    completions = GENERATOR.run([Request("A", row) for row in rows])
    assert completions[1].logprobs is completions[1].top_logprobs is None
    assert [len(completions[row].top_logprobs[0]) for row in (0, 2)] == [2, 5]


def test_speeds():
    for completion in GENERATOR.generate(PROMPTS, **GREEDY):
        assert 0 < completion.prompt_tokens_per_second < 1e6
        assert 0 < completion.tokens_per_second < 1e6
        assert completion.peak_memory > 10_000_000


def test_from_pretrained(tmp_path):
    MODEL.save_pretrained(tmp_path / "model")
    loaded = Generator.from_pretrained(tmp_path / "model", device="cpu", batch_size=2)
    want = GENERATOR.generate(PROMPTS, **SAMPLED)
    assert all(map(same, loaded.generate(PROMPTS, **SAMPLED), want))


def test_nothing_to_read_and_nothing_read():
    assert GENERATOR.run([]) == []
    told = []
    GENERATOR.read(PROMPTS, progress=told.append)
    assert sum(told) == sum(len(ids(prompt)) for prompt in PROMPTS)
    assert same(GENERATOR.generate("", **GREEDY)[0], GENERATOR.generate([[0]], **GREEDY)[0])


# Mistakes are one clear sentence, before anything runs.

STATE = GENERATOR.read(["A", "B"])
BARE = Generator(random_model(force_bos_token_insert=False), ByteTokenizer())


@pytest.mark.parametrize(
    ("prompts", "settings", "sentence"),
    [
        ("A", {"max_tokens": 5}, "there is no setting 'max_tokens'; there are: max_new_tokens, "),
        ("A", {"do_sample": False, "temperature": 0.7}, "do_sample=False contradicts temperature"),
        ("A", {"do_sample": True, "temperature": 0}, "do_sample=True contradicts temperature 0"),
        ("A", {"min_new_tokens": 5, "max_new_tokens": 3}, "min_new_tokens (5) must not exceed max"),
        ("A", {"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ("A", {"logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
        ("A", {"eos_token_id": 320}, "eos_token_id 320 is outside the vocabulary of 320"),
        ("A", {"seed": -1}, "seed must be between 0 and 2^64 - 1, not -1"),
        ("A", {"stop_strings": ""}, "a stop string must not be empty"),
        ("A", {"stop_strings": ["a", ""]}, "a stop string must not be empty"),
        ([[5, 320]], {}, "token 320 is outside the vocabulary of 320"),
        ([[5], [-1]], {}, "token -1 is outside the vocabulary of 320"),
        ([5, 6], {}, "prompts must be a list of strings or of lists of ids"),
        ([], {}, "there are no prompts"),
        (None, {}, "there is nothing to continue: give a prompt or a state"),
        (["A"], {"state": STATE}, "prompts: 1, but the state's rows: 2"),
        (["A"] * 3, {"state": STATE}, "prompts: 3, but the state's rows: 2"),
        ("A", {"num_return_sequences": 0}, "num_return_sequences must be at least 1, not 0"),
    ],
)  # fmt: skip
def test_mistakes(prompts, settings, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        GENERATOR.generate(prompts, **settings)
    if "num_return_sequences" not in settings and (prompts is None or isinstance(prompts, str)):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            GENERATOR.stream(prompts, **settings)  # at once, not at the first piece


def test_do_sample_may_be_said_where_it_agrees():
    text = GENERATOR.generate("A", do_sample=False, max_new_tokens=12)[0]
    assert same(text, GENERATOR.generate("A", **GREEDY)[0])
    text = GENERATOR.generate("A", do_sample=True, **SAMPLED)[0]
    assert same(text, GENERATOR.generate("A", **SAMPLED)[0])


def test_mistakes_about_models_and_states():
    with pytest.raises(ValueError, match=r"^the prompt is empty, and this model has no first"):
        BARE.generate(["A", ""])
    with pytest.raises(ValueError, match=r"^the state is of another model$"):
        BARE.generate(["A", "B"], state=STATE)
    with pytest.raises(ValueError, match=r"^one text can be streamed, not 2$"):
        GENERATOR.stream(state=STATE)
    with pytest.raises(ValueError, match=r"^batch_size must be at least 1, not 0$"):
        Generator(MODEL, ByteTokenizer(), batch_size=0)
    with pytest.raises(ValueError, match=r"^state_dtype must be float32 or bfloat16, not torch"):
        Generator(MODEL, ByteTokenizer(), state_dtype=torch.float16)


def test_a_stream_tells_how_much_of_its_prompt_it_has_read():
    told = []
    pieces = GENERATOR.stream("a prompt", max_new_tokens=2, progress=told.append)
    assert told == []
    next(pieces)
    assert sum(told) == 1 + len("a prompt")
