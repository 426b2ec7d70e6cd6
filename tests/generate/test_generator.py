"""Generator: the same text however it is requested, ended where it should be."""

import copy
import json
import re
from dataclasses import replace

import pytest
import torch
from checkpoint_files import run as run_script
from engines import Driver, copy_of, greedy, is_idle, new_engine
from measure import error
from models import spread_model

from xlstm7b.config import ModelConfig
from xlstm7b.generate import (
    Completion,
    Engine,
    Generator,
    Request,
    RequestOutput,
    SamplingParams,
    SavedState,
)
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.generator import _Copies
from xlstm7b.model import XLSTM, MLSTMStack
from xlstm7b.tokenizer import ByteTokenizer

PROMPTS = ["Once upon a time", "A", "é", "The quick brown fox jumps over the lazy dog.", "A b"]
GREEDY = {"temperature": 0, "max_new_tokens": 12}
SAMPLED = {"temperature": 1.5, "max_new_tokens": 12, "seed": 7}

MODEL = spread_model(gate_std=0.5)
EXACT_MODEL = copy.deepcopy(MODEL).double()
GENERATOR = Generator(MODEL, ByteTokenizer())


def ids(prompt: str, completion: Completion | None = None) -> list[int]:
    return [0, *ByteTokenizer().encode(prompt), *(completion.token_ids if completion else ())]


def same(got: Completion, want: Completion) -> bool:
    return (got.text, got.token_ids, got.finish_reason) == (
        want.text,
        want.token_ids,
        want.finish_reason,
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, {**SAMPLED, "top_p": 0.9, "top_k": 50}])
def test_one_text_in_many_ways(tmp_path, sampling):
    alone = [GENERATOR.generate(prompt, **sampling)[0] for prompt in PROMPTS]
    assert len({completion.text for completion in alone}) == len(PROMPTS)
    assert all(len(set(completion.token_ids)) > 4 for completion in alone)
    for completion, prompt in zip(alone, PROMPTS, strict=True):
        assert completion.text == ByteTokenizer().decode(completion.token_ids)
        assert completion.prompt_tokens == len(ids(prompt))

    for batch_size in (1, 2, 3, 32):
        other = Generator(MODEL, ByteTokenizer(), batch_size=batch_size)
        assert all(map(same, other.generate(PROMPTS, **sampling), alone))
    # As ids, with the first token and without; in another order.
    as_ids = [ids(prompt)[index % 2 :] for index, prompt in enumerate(PROMPTS)]
    assert all(map(same, GENERATOR.generate(as_ids[::-1], **sampling), alone[::-1]))
    state = GENERATOR.read(PROMPTS)
    assert state.tokens_seen == [len(ids(prompt)) for prompt in PROMPTS]
    assert all(map(same, GENERATOR.generate(state=state, **sampling), alone))
    state.save(tmp_path / "state")
    loaded = SavedState.load(tmp_path / "state", MODEL.config)
    some = GENERATOR.generate(state=loaded.select([4, 0]), **sampling)
    assert all(map(same, some, [alone[4], alone[0]]))
    forks = GENERATOR.generate(state=state.fork(2), **sampling)
    assert all(map(same, forks, [one for one in alone for _ in "ab"]))
    for prompt, want in zip(PROMPTS, alone, strict=True):
        *outputs, last = GENERATOR.stream(prompt, **sampling)
        assert same(last.completion, want)
        assert all(output.completion is None for output in outputs)
        assert "".join(output.text for output in [*outputs, last]) == want.text
        tokens = [output.token_ids for output in [*outputs, last]]
        # An output for each token; the end of text is none.
        assert tokens == [(t,) for t in want.token_ids] + [()] * (want.finish_reason == "stop")
    # A prompt read in two parts, the second on top of a state.
    start = GENERATOR.read([prompt[:1] for prompt in PROMPTS])
    rest = [prompt[1:] for prompt in PROMPTS]
    assert all(map(same, GENERATOR.generate(rest, state=start, **sampling), alone))


def test_several_sequences_have_consecutive_seeds():
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


def test_several_sequences_wait_for_the_device_only_for_their_tokens(monkeypatch):
    """No logits are looked at. If they are no numbers, the first draw says so."""
    want = GENERATOR.generate(PROMPTS, num_return_sequences=2, **SAMPLED)
    add, looked = _Copies.add, []

    def adding(copies: _Copies, request: Request, read: Completion) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__bool__", lambda _: looked.append(1) or True)
            add(copies, request, read)

    monkeypatch.setattr(_Copies, "add", adding)
    assert all(map(same, GENERATOR.generate(PROMPTS, num_return_sequences=2, **SAMPLED), want))
    assert not looked


def test_several_sequences_share_one_state_and_are_reported_when_done(monkeypatch):
    """A 7B's state takes 0.14 GB: there is one per prompt, not one per sequence."""
    want = GENERATOR.generate(PROMPTS[:2], num_return_sequences=4, **SAMPLED)
    generator, reported, started = Generator(MODEL, ByteTokenizer(), batch_size=3), [], []
    add_request = Engine.add_request
    monkeypatch.setattr(
        Engine,
        "add_request",
        lambda engine, request: (started.append(request.state), add_request(engine, request))[1],
    )
    several = {"num_return_sequences": 4, "done": lambda *news: reported.append(news), **SAMPLED}
    texts = generator.generate(PROMPTS[:2], **several)
    assert all(map(same, texts, want))
    # The second prompt is read when fewer copies of the first wait than there are slots.
    assert [state is None for state in started] == [True, *[False] * 4] * 2
    first, second = started[1:5], started[6:]
    assert all(state is first[0] for state in first)
    assert all(state is second[0] for state in second)
    assert first[0] is not second[0]
    assert sorted(index for index, _ in reported) == list(range(8))
    assert all(completion == texts[index] for index, completion in reported)
    # Three at a time, in order: the first two are done before the last two start.
    position = {index: place for place, (index, _) in enumerate(reported)}
    assert max(position[0], position[1]) < min(position[6], position[7])


@pytest.mark.parametrize(("batch_size", "count"), [(1, 2), (2, 3), (4, 2)])
def test_several_sequences_of_many_prompts_keep_few_states(monkeypatch, batch_size, count):
    prompts = [[70 + n, 80, 90] for n in range(12)]
    several = {"num_return_sequences": count, **SAMPLED}
    want = GENERATOR.generate(prompts, **several)
    added, kept = [], []
    add_request, step = Engine.add_request, Engine.step

    def counted_step(engine):
        kept.append(len({id(request.state) for request in added if request.state is not None}))
        return step(engine)

    monkeypatch.setattr(
        Engine,
        "add_request",
        lambda engine, request: (added.append(request), add_request(engine, request))[1],
    )
    monkeypatch.setattr(Engine, "step", counted_step)
    generator = Generator(MODEL, ByteTokenizer(), batch_size=batch_size)
    assert all(map(same, generator.generate(prompts, **several), want))
    assert sum(request.prefill_only for request in added) == 12  # each prompt is read once
    assert max(kept) <= 2 * batch_size


def test_no_prompt_is_read_after_should_stop():
    generator, polls = Generator(MODEL, ByteTokenizer(), batch_size=3), iter([False] * 4)
    several = {"num_return_sequences": 3, **SAMPLED}
    want = generator.generate(PROMPTS, **several)
    some = generator.generate(PROMPTS, should_stop=lambda: next(polls, True), **several)
    assert [text.token_ids for text in some] == [text.token_ids[:4] for text in want[:3]]
    assert generator.generate(PROMPTS, should_stop=lambda: True, **several) == []


def test_should_stop_ends_running_sequences_and_drops_waiting_ones():
    # The first poll comes after the prompt was read.
    generator, polls = Generator(MODEL, ByteTokenizer(), batch_size=3), iter([False] * 3)
    several = {"num_return_sequences": 4, **SAMPLED}
    want = generator.generate("A", **several)
    some = generator.generate("A", should_stop=lambda: next(polls, True), **several)
    assert [(len(text.token_ids), text.finish_reason) for text in some] == [(3, "stop")] * 3
    assert [text.token_ids for text in some] == [text.token_ids[:3] for text in want[:3]]


def test_several_sequences_know_their_prompt():
    sampling = {**SAMPLED, "repetition_penalty": 90.0, "temperature": 5.0}
    prompt = [*range(10, 250)]
    one, other = GENERATOR.generate([prompt], num_return_sequences=2, **sampling)
    assert same(one, GENERATOR.generate([prompt], **sampling)[0])
    assert one.prompt_tokens == other.prompt_tokens == 241


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 50.0}, {"presence_penalty": 90.0}, {"frequency_penalty": 90.0}],
)
def test_a_text_continues_under_penalties_that_count_its_start(penalty):
    params = SamplingParams(temperature=0, eos_token_id=(), max_new_tokens=24, **penalty)
    prompt = [0, 70, 80, 90]
    [first] = GENERATOR.run([Request(prompt, params, keep_state=True)])
    rest = Request(
        "", params, state=first.state, previous_prompt=prompt, previous_output=first.token_ids
    )
    [second] = GENERATOR.run([rest])
    [whole] = GENERATOR.run([Request(prompt, replace(params, max_new_tokens=48))])
    assert first.token_ids + second.token_ids == whole.token_ids
    [unaware] = GENERATOR.run([Request("", params, state=first.state)])
    assert unaware.token_ids != second.token_ids


def model_with_nan() -> XLSTM:
    model = spread_model(gate_std=0.5)
    with torch.no_grad():
        model.lm_head.weight[200, 3] = torch.nan
    return model


NO_NUMBERS = "^the model's logits are not numbers: its weights are damaged, or overflow in"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, {**GREEDY, "logprobs": 2}])
def test_logits_that_are_not_numbers_raise(sampling):
    generator = Generator(model_with_nan(), ByteTokenizer())
    with pytest.raises(FloatingPointError, match=NO_NUMBERS):
        generator.generate(PROMPTS[:2], **sampling)
    with pytest.raises(FloatingPointError, match=NO_NUMBERS):
        generator.generate("A", num_return_sequences=2, **sampling)
    with pytest.raises(FloatingPointError, match=NO_NUMBERS):
        list(generator.stream("A", eos_token_id=(), **sampling))


def test_a_read_raises_if_the_logits_after_it_are_not_numbers():
    with pytest.raises(FloatingPointError, match=NO_NUMBERS):
        Generator(model_with_nan(), ByteTokenizer()).read(PROMPTS[:2])
    model = spread_model(gate_std=0.5)
    with torch.no_grad():
        model.backbone.embeddings.weight[2 + ord("B")] = torch.nan
    generator = Generator(model, ByteTokenizer())
    state = generator.read(["A", "A A"])
    with pytest.raises(FloatingPointError, match=NO_NUMBERS):
        generator.read(["A", "AB"])
    with pytest.raises(FloatingPointError, match=NO_NUMBERS):
        generator.read(["BAA", "A"], state=state)
    generator.read(["A", "A"], state=state)


def test_beam_search_raises_if_logits_are_not_numbers():
    from xlstm7b.generate import beam_search

    generator = Generator(model_with_nan(), ByteTokenizer())
    with pytest.raises(FloatingPointError, match=NO_NUMBERS):
        beam_search(generator, "A", num_beams=2, max_new_tokens=4)


def test_without_a_seed_every_text_is_another():
    texts = GENERATOR.generate(["A"] * 4, temperature=2.0, max_new_tokens=9)
    texts += GENERATOR.generate("A", num_return_sequences=3, temperature=2.0, max_new_tokens=9)
    assert len({tuple(completion.token_ids) for completion in texts}) == 7


@torch.no_grad()
def assert_state_has_read(completion: Completion, tokens: list[int]) -> None:
    assert completion.state.tokens_seen == [len(tokens)]
    want, model_state = MODEL(torch.tensor([tokens]), logits="last")
    assert error(completion.state.logits, want) < 3e-5
    blocks = completion.state.model_state.blocks
    for block, want_block in zip(blocks, model_state.blocks, strict=True):
        assert error(block.C, want_block.C) < 3e-5
    (continued,) = GENERATOR.generate(state=completion.state, **GREEDY)
    assert same(continued, GENERATOR.generate([tokens], **GREEDY)[0])


@pytest.mark.parametrize("batch_size", [1, 32])
def test_kept_states_have_read_all_tokens_however_a_text_ended(batch_size):
    """Requests that finish early do not change while the others go on."""
    generator = Generator(MODEL, ByteTokenizer(), batch_size=batch_size)
    long = SamplingParams(**{**GREEDY, "max_new_tokens": 20}, eos_token_id=())
    full = generator.run([Request(prompt, long) for prompt in PROMPTS])
    eos, stop = full[1].token_ids[6], full[2].text[3:5]
    all_params = [
        replace(long, max_new_tokens=5),
        replace(long, eos_token_id=[eos, 1]),
        replace(long, stop_strings=(stop,)),
        long,
        replace(long, max_new_tokens=1),
    ]
    requests = [
        Request(prompt, params, keep_state=True)
        for prompt, params in zip(PROMPTS, all_params, strict=True)
    ]
    reported = {}
    completions = generator.run(requests, done=reported.__setitem__)
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
    assert reported == dict(enumerate(completions))
    if batch_size == 32:
        assert next(iter(reported)) == 4  # as soon as it was done
    without = generator.run([copy_of(request, keep_state=False) for request in requests])
    assert all(completion.state is None for completion in without)


def test_should_stop_ends_a_stream():
    polls = iter([False, False])
    outputs = [
        *GENERATOR.stream("A", keep_state=True, should_stop=lambda: next(polls, True), **GREEDY)
    ]
    (whole,) = GENERATOR.generate("A", **GREEDY)
    completion = outputs[-1].completion
    assert completion.finish_reason == "stop"
    assert completion.token_ids == whole.token_ids[:3]
    assert [token for output in outputs for token in output.token_ids] == completion.token_ids
    assert "".join(output.text for output in outputs) == completion.text
    assert_state_has_read(completion, ids("A", completion))


def test_a_stream_that_is_left_alone_frees_its_slot():
    generator = Generator(MODEL, ByteTokenizer())
    stream = generator.stream("é", **GREEDY)
    next(stream)
    want = generator.generate("A", **GREEDY)[0]
    stream.close()
    assert same(generator.generate("A", **GREEDY)[0], want)
    unread = generator.stream("é", **GREEDY)  # never started
    del unread
    left = generator.stream("é", **GREEDY)
    next(left)
    del left
    assert [*generator._idle] == [1]
    assert is_idle(generator._idle[1])
    assert same(generator.generate("A", **GREEDY)[0], want)


def test_two_streams_in_turn():
    streams = [GENERATOR.stream(prompt, **GREEDY) for prompt in "AB"]
    outputs = [*zip(*streams, strict=True)]
    for index, prompt in enumerate("AB"):
        want = GENERATOR.generate(prompt, **GREEDY)[0].token_ids
        assert [pair[index].token_ids for pair in outputs] == [(token,) for token in want]


def test_two_idle_engines_are_kept():
    generator = Generator(MODEL, ByteTokenizer())
    for count in (2, 1, 3, 4):
        generator.read(["A"] * count)
    assert sorted(generator._idle) == [1, 4]


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("work", ["step", "read"])
def test_a_generator_can_be_used_after_a_fault(monkeypatch, fault, work):
    generator = Generator(MODEL, ByteTokenizer())
    want = generator.generate(PROMPTS, **GREEDY)
    method, calls = getattr(FusedModel, work), iter([False, False, True])

    def broken(*arguments, **options):
        if next(calls, False):
            raise fault
        return method(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FusedModel, work, broken)
        with pytest.raises(fault):
            generator.generate(PROMPTS, **GREEDY)
    assert all(map(same, generator.generate(PROMPTS, **GREEDY), want))


@pytest.mark.parametrize("prompts", ["A", PROMPTS, ["A prompt"] * 3])
def test_a_generator_uses_the_weights_as_they_are(prompts):
    """A model may be trained between two calls. No state of the old weights is used then."""
    model = spread_model()
    generator, logprobs = Generator(model, ByteTokenizer()), {**GREEDY, "logprobs": 0}
    before = generator.generate(prompts, **logprobs)
    optimizer, tokens = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(2, 40)[None]
    (-model.token_logprobs(tokens[:, :-1], tokens[:, 1:])[0].mean()).backward()
    optimizer.step()
    after = generator.generate(prompts, **logprobs)
    want = Generator(model, ByteTokenizer()).generate(prompts, **logprobs)
    assert [one.logprobs for one in after] == [one.logprobs for one in want]
    assert all(map(same, after, want))
    assert [one.logprobs for one in after] != [one.logprobs for one in before]


@torch.no_grad()
def replaced_data(model: XLSTM) -> None:
    """As code does that copies weights in from elsewhere: no version counts it."""
    for parameter in model.parameters():
        parameter.data = parameter.data + torch.randn_like(parameter) / 20


def other_end(model: XLSTM) -> None:
    model.config = replace(
        model.config, eos_token_id=GENERATOR.generate("A", **GREEDY)[0].token_ids[4]
    )


def other_cap(model: XLSTM) -> None:
    model.config = replace(model.config, output_logit_soft_cap=2.0)


def written_through_another_name(model: XLSTM) -> None:
    model.backbone.embeddings.weight.data.mul_(-1)


def other_eps(model: XLSTM) -> None:
    for block in model.backbone.blocks:
        block.norm_mlstm.eps = 10


def results(generator: Generator, prompts: list[str]) -> list[tuple[list[int], list[float]]]:
    completions = generator.generate(prompts, **GREEDY, logprobs=0)
    return [(completion.token_ids, completion.logprobs) for completion in completions]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("prompts", [["A"], ["A prompt"] * 3])
@pytest.mark.parametrize("change", [replaced_data, other_end, other_cap])
def test_replaced_weights_and_configs_are_seen(change, prompts, fused):
    model = spread_model(gate_std=0.5)
    generator = Generator(model, ByteTokenizer(), fused=fused)
    before = results(generator, prompts)
    change(model)
    after = results(generator, prompts)
    assert after != before
    assert after == results(Generator(model, ByteTokenizer(), fused=fused), prompts)
    engine = generator._idle[len(prompts)]
    assert results(generator, prompts) == after
    assert generator._idle[len(prompts)] is engine  # it is built anew only after a change


@pytest.mark.parametrize("change", [written_through_another_name, other_eps])
def test_a_refreshed_generator_uses_the_model_as_it_is(change):
    model = spread_model()
    generator = Generator(model, ByteTokenizer(), fused=False)
    before = results(generator, ["A prompt"] * 3)
    change(model)
    generator.refresh()
    after = results(generator, ["A prompt"] * 3)
    assert after != before
    assert after == results(Generator(model, ByteTokenizer(), fused=False), ["A prompt"] * 3)


def test_a_refreshed_generator_compares_the_model_again():
    model = spread_model()
    generator = Generator(model, ByteTokenizer())
    generator.generate("A", **GREEDY)
    other_eps(model)
    generator.refresh()
    with pytest.raises(ValueError, match=r"^backbone\.blocks\.0\.norm_mlstm has eps = 10 instead"):
        generator.generate("A", **GREEDY)


def test_a_model_that_was_cast_after_a_call():
    model = spread_model()
    generator = Generator(model, ByteTokenizer())
    generator.generate("A", **GREEDY)
    model.double()
    assert generator.dtype == torch.float64
    want = Generator(model, ByteTokenizer()).generate("A", **GREEDY, logprobs=0)[0].logprobs
    assert generator.generate("A", **GREEDY, logprobs=0)[0].logprobs == want


@torch.no_grad()
def test_a_stream_that_was_open_while_the_weights_changed():
    """Its engine is not used again: it holds states of the old weights."""
    model = spread_model()
    generator = Generator(model, ByteTokenizer())
    stream = generator.stream("A", **GREEDY)
    next(stream)
    model.backbone.embeddings.weight.normal_()
    want = generator.generate("A", **GREEDY)[0]
    stream.close()
    assert same(generator.generate("A", **GREEDY)[0], want)


def test_a_request_that_runs_elsewhere_is_left_alone():
    driver = Driver(new_engine(MODEL, slots=1))
    request = driver.add(greedy("A"))
    driver.step(2)
    with pytest.raises(ValueError, match=r"^a request can be added once; build a new one$"):
        GENERATOR.run([request])
    driver.finish()
    assert same(driver.completion(request), GENERATOR.generate("A", **GREEDY)[0])


def test_prompts_may_be_any_iterable():
    want = GENERATOR.generate(PROMPTS, **GREEDY)
    assert all(map(same, GENERATOR.generate(iter(PROMPTS), **GREEDY), want))


def test_a_callback_that_fails_does_not_break_the_generator():
    generator = Generator(MODEL, ByteTokenizer())
    want = generator.generate(PROMPTS, **GREEDY)
    with pytest.raises(ZeroDivisionError):
        generator.generate(PROMPTS, done=lambda *_: 1 / 0, **GREEDY)
    with pytest.raises(ZeroDivisionError):
        generator.generate(PROMPTS, should_stop=lambda: 1 / 0, **GREEDY)
    assert all(map(same, generator.generate(PROMPTS, **GREEDY), want))


@torch.no_grad()
def test_logprobs_are_the_models_own():
    """Of the logits as they are, whatever temperature and bias the text was drawn with."""
    sampling = {**SAMPLED, "logprobs": 3, "logit_bias": {70: 5.0, 71: -torch.inf}}
    for prompt, completion in zip(PROMPTS, GENERATOR.generate(PROMPTS, **sampling), strict=True):
        tokens = ids(prompt, completion)
        logits = EXACT_MODEL(torch.tensor([tokens]))[0][0, len(ids(prompt)) - 1 : -1]
        want = logits.log_softmax(-1)
        chosen = want.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert error(torch.tensor(completion.logprobs), chosen) < 1e-5
        best = want.topk(3)
        assert [[*top] for top in completion.top_logprobs] == best.indices.tolist()
        values = torch.tensor([[*top.values()] for top in completion.top_logprobs])
        assert error(values, best.values) < 1e-5
    of_tokens = GENERATOR.generate(PROMPTS, **{**sampling, "logprobs": 0})
    assert of_tokens[4].logprobs == completion.logprobs
    assert of_tokens[4].top_logprobs is None


def test_every_request_gets_as_many_logprobs_as_it_wants():
    rows = [SamplingParams(**GREEDY, logprobs=count) for count in (2, None, 5, 0)]
    completions = GENERATOR.run([Request("A", row) for row in rows])
    assert completions[1].logprobs is completions[1].top_logprobs is None
    assert [len(completions[row].top_logprobs[0]) for row in (0, 2)] == [2, 5]


def test_requests_with_states_of_their_own():
    """`run` takes requests of any kind, in one batch."""
    states = [GENERATOR.read(prompt[:1]) for prompt in PROMPTS]
    params = SamplingParams(**GREEDY)
    requests = [
        Request(prompt[1:], params, state=state)
        for prompt, state in zip(PROMPTS, states, strict=True)
    ]
    got = GENERATOR.run([*requests, *(Request(prompt, params) for prompt in PROMPTS)])
    assert all(map(same, got[:5], got[5:]))
    with pytest.raises(ValueError, match=r"^a request can be added once; build a new one$"):
        GENERATOR.run(requests[:1])


def test_speeds():
    for completion in GENERATOR.generate(PROMPTS, **GREEDY):
        assert 0 < completion.prompt_tokens_per_second < 1e6
        assert 0 < completion.tokens_per_second < 1e6
        assert completion.peak_memory > 10_000_000
    for completion in GENERATOR.generate(PROMPTS, num_return_sequences=2, **GREEDY):
        assert 0 < completion.prompt_tokens_per_second < 1e6
    (short,) = GENERATOR.generate("A", **{**GREEDY, "max_new_tokens": 1})
    assert short.tokens_per_second == 0


def test_from_pretrained(tmp_path):
    MODEL.save_pretrained(tmp_path / "model")
    loaded = Generator.from_pretrained(tmp_path / "model", device="cpu", batch_size=2)
    want = GENERATOR.generate(PROMPTS, **SAMPLED)
    assert all(map(same, loaded.generate(PROMPTS, **SAMPLED), want))


def test_nothing_to_do_and_the_shortest_prompt():
    assert GENERATOR.run([]) == []
    assert same(GENERATOR.generate("", **GREEDY)[0], GENERATOR.generate([[0]], **GREEDY)[0])


def test_progress_counts_every_prompt_token_once():
    reported = []
    GENERATOR.read([*PROMPTS, "x" * 2000], progress=reported.append)
    assert sum(reported) == sum(len(ids(prompt)) for prompt in PROMPTS) + 2001
    assert all(0 < tokens <= 512 + 256 for tokens in reported)
    reported.clear()
    outputs = GENERATOR.stream("a prompt", max_new_tokens=5, progress=reported.append)
    assert reported == []
    next(outputs)
    assert sum(reported) == 1 + len("a prompt")
    assert all(isinstance(output, RequestOutput) for output in outputs)
    assert all(reported)  # nothing is reported of steps that read no prompt
    assert sum(reported) == 1 + len("a prompt")


# Mistakes raise one clear sentence, before anything runs.

STATE = GENERATOR.read(["A", "B"])
BARE = Generator(spread_model(force_bos_token_insert=False), ByteTokenizer())


@pytest.mark.parametrize(
    ("prompts", "sampling", "sentence"),
    [
        (
            "A",
            {"max_tokens": 5},
            "there is no sampling parameter 'max_tokens'; there are: max_new_tokens, ",
        ),
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
        *(
            (prompts, {}, "prompts must be a list of strings or of lists of ids")
            for prompts in ([5, 6], 5, ["A", None], [[1.5]], b"A", [b"A"], torch.tensor([[5, 6]]))
        ),
        ([], {}, "there are no prompts"),
        (None, {}, "there is nothing to continue: give a prompt or a state"),
        (["A"], {"state": STATE}, "prompts: 1, but the state's rows: 2"),
        (["A"] * 3, {"state": STATE}, "prompts: 3, but the state's rows: 2"),
        ("A", {"num_return_sequences": 0}, "num_return_sequences must be at least 1, not 0"),
    ],
)
def test_mistakes(prompts, sampling, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        GENERATOR.generate(prompts, **sampling)
    if "num_return_sequences" not in sampling and (prompts is None or isinstance(prompts, str)):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            GENERATOR.stream(prompts, **sampling)  # at once, not at the first output


def test_do_sample_may_be_given_where_it_agrees():
    text = GENERATOR.generate("A", do_sample=False, max_new_tokens=12)[0]
    assert same(text, GENERATOR.generate("A", **GREEDY)[0])
    text = GENERATOR.generate("A", do_sample=True, **SAMPLED)[0]
    assert same(text, GENERATOR.generate("A", **SAMPLED)[0])


def test_mistakes_about_models_and_states():
    with pytest.raises(ValueError, match=r"^the prompt is empty, and this model has no first"):
        BARE.generate(["A", ""])
    other_model = (
        "^this state was saved by another model: it has force_bos_token_insert True, "
        "the loaded model False$"
    )
    with pytest.raises(ValueError, match=other_model):
        BARE.generate(["A", "B"], state=STATE)
    with pytest.raises(ValueError, match=r"^one request can be streamed, not 2$"):
        GENERATOR.stream(state=STATE)
    with pytest.raises(ValueError, match=r"^batch_size must be at least 1, not 0$"):
        Generator(MODEL, ByteTokenizer(), batch_size=0)
    with pytest.raises(ValueError, match=r"^state_dtype must be float32 or bfloat16, not torch"):
        Generator(MODEL, ByteTokenizer(), state_dtype=torch.float16)


def test_dtypes_by_name(tmp_path):
    MODEL.save_pretrained(tmp_path)
    generator = Generator.from_pretrained(
        tmp_path, device="cpu", dtype="float64", state_dtype="bfloat16"
    )
    assert generator.dtype == torch.float64
    assert generator.read("A").model_state.blocks[0].C.dtype == torch.bfloat16
    assert Generator(MODEL, ByteTokenizer(), state_dtype="float32").state_dtype == torch.float32


# Where texts end


def spelling_generator(text: str, **changes: object) -> Generator:
    """Its model writes the bytes of the text in a circle. All bytes must differ."""
    model, written = XLSTM(ModelConfig(320, 1, 1, vocab_size=320, **changes)), text.encode()
    assert len(set(written)) == len(written)
    with torch.no_grad():
        model.backbone.blocks[0].mlstm_layer.out_proj.weight.zero_()
        model.backbone.blocks[0].ffn.proj_down.weight.zero_()
        model.backbone.embeddings.weight.copy_(torch.eye(320))
        model.lm_head.weight.zero_()
        for byte, successor in zip(written, written[1:] + written[:1], strict=True):
            model.lm_head.weight[successor + 2, byte + 2] = 100
    return Generator(model, ByteTokenizer())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [Generator, Engine])
def test_only_a_language_model_generates(kind, fused):
    for wrong, name in ((MLSTMStack(64, 2, 1), "MLSTMStack"), ("NX-AI/xLSTM-7b", "str")):
        with pytest.raises(TypeError, match=rf"^the model must be an XLSTM, .* not {name}$"):
            kind(wrong, ByteTokenizer(), fused=fused)


def test_ids_that_the_tokenizer_does_not_have_add_no_text():
    """The vocabulary has 320 ids, bytes have 258."""
    generator = Generator(spread_model(), ByteTokenizer())
    for token in (258, 319):
        bias = {token: 100.0}
        done = generator.generate("A", max_new_tokens=3, logit_bias=bias, logprobs=2)[0]
        assert (done.token_ids, done.text) == ([token] * 3, "")


def test_end_of_text():
    generator = spelling_generator("abc", eos_token_id=ord("c") + 2)
    (completion,) = generator.generate("a", **GREEDY)
    assert (completion.text, completion.finish_reason) == ("b", "stop")
    (completion,) = generator.generate("b", **GREEDY)
    assert (completion.text, completion.token_ids, completion.tokens_per_second) == ("", [], 0)
    (completion,) = generator.generate("a", **GREEDY, eos_token_id=())
    assert (completion.text, completion.finish_reason) == ("bcabcabcabca", "length")
    (completion,) = generator.generate("a", **GREEDY, eos_token_id=[5, ord("a") + 2])
    assert (completion.text, completion.finish_reason) == ("bc", "stop")
    # Not before min_new_tokens: the token that is chosen instead has no successor, so 0 follows.
    (completion,) = generator.generate("a", **GREEDY, min_new_tokens=12)
    assert completion.token_ids == [ord("b") + 2] + [0] * 11
    assert completion.finish_reason == "length"


def streamed(generator: Generator, prompt: str, **sampling: object) -> list[str]:
    outputs = [*generator.stream(prompt, **{**GREEDY, **sampling})]
    completion = generator.generate(prompt, **{**GREEDY, **sampling})[0]
    assert outputs[-1].completion.token_ids == completion.token_ids
    texts = [output.text for output in outputs]
    assert "".join(texts) == completion.text
    return texts


def test_stop_strings_are_never_shown():
    """The model writes aé€b😀 in a circle: 11 bytes, most of them parts of characters."""
    generator = spelling_generator("aé€b😀")
    assert streamed(generator, "a") == ["", "é", "", "", "€", "b", "", "", "", "😀", "a", "\ufffd"]
    shown = streamed(generator, "a", stop_strings="b😀")
    assert shown == ["", "é", "", "", "€", "", "", "", "", ""]
    shown = streamed(generator, "a", stop_strings=["😀a", "€c"])
    assert shown == ["", "é", "", "", "", "€b", "", "", "", "", ""]
    assert streamed(generator, "a", stop_strings=["b", "é€"]) == [""] * 5
    assert streamed(generator, "a", stop_strings=("😀", "€b")) == ["", "é", "", "", "", ""]
    assert streamed(generator, "a", stop_strings="bc", max_new_tokens=6)[4:] == ["€", "b"]
    (completion,) = generator.generate("a", stop_strings="é€", **GREEDY)
    assert (completion.text, len(completion.token_ids)) == ("", 5)
    assert completion.finish_reason == "stop"


# Memory


@pytest.mark.long
def test_a_long_prompt_in_constant_memory():
    """In a process of its own: the peak of this one may be higher already.

    Forget gates of σ(3) leave nothing of tokens that are 2000 back, so the logits are known.
    """
    script = """
import json, resource, torch
from xlstm7b.config import ModelConfig
from xlstm7b.generate.engine import Engine
from xlstm7b.generate.request import Request
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

torch.manual_seed(0)
fields = dict(vocab_size=40, v_dim_factor=0.5, ffn_proj_factor=0.5, ffn_round_up_to_multiple_of=1)
model = XLSTM(ModelConfig(32, 1, 1, **fields))
engine = Engine(model, ByteTokenizer(), slots=1, prefill_tokens=4096)
prompt = torch.randint(1, 40, (250_000,)).tolist()

def read(request):
    engine.add_request(request)
    while engine.has_requests:
        outputs = engine.step()
    return outputs[-1].completion.state

requests = [
    Request(tokens, prefill_only=True).prepare(model.config, engine.tokenizer)
    for tokens in (prompt[:8192], prompt)
]
read(requests[0])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
state = read(requests[1])
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
with torch.no_grad():
    want = model(torch.tensor([prompt[-3000:]]), logits="last")[0]
finite = all(tensor.isfinite().all() for tensor in [*state.model_state.blocks[0], state.logits])
error = (state.logits - want).norm() / want.norm()
print(json.dumps([state.tokens_seen, grown * 1024, bool(finite), float(error)]))
"""
    seen, grown, finite, off = json.loads(run_script(script))
    assert seen == [250_001]
    assert grown < 4 << 20  # the prompt's vectors of one block would take 32 MB
    assert finite
    assert off < 1e-5
