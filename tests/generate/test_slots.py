"""Rows that move to the front, and steps that leave the rest of the pool out, change no text."""

import time

import pytest
import torch
from engines import ROUNDING, Listener, advance, idle, random_generator
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, Request, SamplingSettings
from xlstm7b.generate.engine import Engine
from xlstm7b.generate.sampling import MOST_LOGPROBS, Needs
from xlstm7b.generate.slots import CPU_SLOTS, Slots, enough, fitting_slots, state_bytes
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

GENERATOR = random_generator()
KINDS = (
    {"temperature": 0.0},
    {"temperature": 2.0, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 5.0, "frequency_penalty": 0.5},
    {"temperature": 3.0, "logit_bias": {70: 20.0}, "min_new_tokens": 1},
)


def with_buckets(slots: int, *buckets: int) -> Engine:
    engine = Engine(GENERATOR, slots=slots, piece_tokens=8)
    engine._slots = engine._scheduler._slots = Slots(GENERATOR, slots, buckets)
    return engine


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 25), st.integers(0, 3)), min_size=1, max_size=14),
    st.integers(0, 99),
)
def test_buckets_change_no_text(work, seed):
    engine = with_buckets(8, 1, 2, 4)
    all_told = []
    for tokens, kind in work:
        request = Request(
            "x" * tokens, SamplingSettings(max_new_tokens=tokens, seed=seed, **KINDS[kind])
        )
        told = Listener()
        engine.submit(request, told)
        all_told.append((request, told))
        advance(engine, 2)
    advance(engine, 400)
    for request, told in all_told:
        (want,) = GENERATOR.run([request])
        assert told.completion().token_ids == want.token_ids
        if want.logprobs is not None:
            assert told.completion().logprobs == pytest.approx(want.logprobs, abs=ROUNDING)
    engine._scheduler.step(())
    assert idle(engine)


def test_few_rows_make_small_steps():
    engine = with_buckets(8, 1, 4)
    made = []
    for rows, decoder in engine._slots._buckets.items():
        decode_one = decoder.decode_one
        decoder.decode_one = lambda needs, rows=rows, decode=decode_one: (
            made.append(rows), decode(needs))  # fmt: skip
    for tokens in (2, 2, 2, 2, 2, 2, 40):
        settings = SamplingSettings(temperature=0, max_new_tokens=tokens, eos_token_id=())
        engine.submit(Request("A", settings), Listener())
    advance(engine, 10)
    # Seven rows at first; then one, in the last of them, comes to the front.
    assert made[0] == 8
    assert made[-1] == 1
    assert next(iter(engine._scheduler.active)).row == 0


needs = st.builds(
    Needs, *[st.booleans()] * 5, logprobs=st.one_of(st.none(), st.integers(0, MOST_LOGPROBS))
)


@given(needs)
def test_few_kinds_of_steps_are_enough(asked):
    kind = enough(asked, 320)
    assert Needs.union([asked, kind]) == kind
    assert enough(asked._replace(logprobs=None), 7).logprobs in (None, 7)
    assert enough(kind, 320) == kind


def test_a_step_that_does_more_changes_no_text(monkeypatch):
    monkeypatch.setattr(Slots, "_needs", lambda self, asked: enough(asked, 320))
    test_buckets_change_no_text.hypothesis.inner_test([(9, 0), (7, 1), (12, 2), (3, 3)], 5)


def test_memory_is_known_beforehand():
    assert state_bytes(GENERATOR) + 8 == GENERATOR.read(["A"]).nbytes  # the tokens seen, besides
    assert fitting_slots(GENERATOR, None, 0) == CPU_SLOTS
    assert fitting_slots(GENERATOR, 300, 1 << 60) == 300
    with pytest.raises(ValueError, match=r"^1,000,000,000 slots of 0.0 MB do not fit into"):
        fitting_slots(GENERATOR, 10**9, 0)


@pytest.mark.parametrize("slots", [8, 64])
def test_little_of_a_step_is_not_the_model(slots):
    """With texts that come and go; on `tiny`, where the model itself takes least."""
    config = ModelConfig(embedding_dim=256, num_blocks=4, num_heads=4, vocab_size=320)
    torch.manual_seed(0)
    generator = Generator(XLSTM(config), ByteTokenizer())
    spent = 0.0

    def timed(work):
        def call(*arguments):
            nonlocal spent
            started = time.perf_counter()
            result = work(*arguments)
            spent += time.perf_counter() - started
            return result

        return call

    for name in ("step", "read", "logits"):
        setattr(generator.model, name, timed(getattr(generator.model, name)))
    engine = Engine(generator, slots=slots)
    for number in range(2 * slots):
        chosen = SamplingSettings(seed=number, max_new_tokens=20 + number % 20, eos_token_id=())
        engine.submit(Request("What is the time?", chosen), lambda _: None)
    advance(engine, 2)
    spent, started = 0.0, time.perf_counter()
    advance(engine, 40)
    share = 1 - spent / (time.perf_counter() - started)
    print(f"{slots} slots: {share:.1%} of a step is outside the model")  # shown by pytest -rP
    assert share < 0.2
