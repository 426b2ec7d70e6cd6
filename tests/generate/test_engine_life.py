"""Texts that are given up, queues that are full, faults and ends: nothing stays behind."""

import gc
import random
import threading
import tracemalloc

import pytest
import torch
from engines import Listener, advance, idle, random_generator, running

from xlstm7b.generate import Request, SamplingSettings
from xlstm7b.generate.engine import Engine, EngineFailed, EngineStopped, QueueFull

GENERATOR = random_generator()


def greedy(prompt, tokens: int = 12, **more) -> Request:
    return Request(prompt, SamplingSettings(max_new_tokens=tokens, temperature=0, **more))


def assert_complete(told: Listener, request: Request) -> None:
    (want,) = GENERATOR.run([request])
    got = told.completion()
    assert (got.text, got.token_ids, got.finish_reason) == (
        want.text, want.token_ids, want.finish_reason)  # fmt: skip
    assert told.token_ids == want.token_ids


def test_a_thousand_cancels_leave_nothing_behind():
    chance = random.Random(0)
    engine = Engine(GENERATOR, slots=8, piece_tokens=16, cache_bytes=1 << 16, most_waiting=64)

    def round_of_cancels(count: int) -> None:
        for _ in range(count):
            jobs = [
                engine.submit(greedy("x" * chance.randrange(40), 50), lambda _: None)
                for _ in range(10)
            ]
            advance(engine, chance.randrange(12))
            for job in jobs:
                job.cancel()
            engine._scheduler.step(())
            assert idle(engine)

    tracemalloc.start()  # first: what replaces something unseen would count as more
    round_of_cancels(20)
    gc.collect()
    before = tracemalloc.take_snapshot()
    round_of_cancels(80)
    gc.collect()
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    grown = sum(line.size_diff for line in after.compare_to(before, "filename"))
    assert grown < 100_000
    assert engine.stats().cache_bytes["device"] <= 1 << 16


def test_cancel_is_the_last_word():
    told = Listener()
    with running(GENERATOR, slots=1) as engine:
        other, started = Listener(), threading.Event()

        def receive(news):
            told(news)
            started.set()

        job = engine.submit(greedy("A", 100_000, eos_token_id=()), receive)
        waiting = engine.submit(greedy("B"), other)
        assert started.wait(10)
        assert (job.running, waiting.waiting) == (True, True)
        assert 0 < job.created <= job.first_token
        job.cancel()
        count = len(told.pieces)
        assert_complete(other, greedy("B"))
        assert len(told.pieces) == count
        assert (job.finished, waiting.finished) == (True, True)
    assert idle(engine)


def test_the_queue_is_bounded_and_recovers():
    engine = Engine(GENERATOR, slots=2, most_waiting=3)
    many = [Listener() for _ in range(5)]
    for told in many[:3]:
        engine.submit(greedy("A"), told)
    with pytest.raises(QueueFull) as full:
        engine.submit(greedy("A"), many[3])
    assert 1 <= full.value.retry_after <= 60
    with pytest.raises(ValueError, match="max_new_tokens"):  # a mistake is told all the same
        engine.submit(greedy("A", 0), many[3])
    advance(engine)
    engine.submit(greedy("A"), many[3])
    advance(engine, 60)
    for told in many[:4]:
        assert_complete(told, greedy("A"))
    waiting = [engine.submit(greedy("A"), Listener()) for _ in range(3)]
    waiting[1].cancel()
    engine.submit(greedy("A"), many[4])
    advance(engine, 60)
    assert_complete(many[4], greedy("A"))


def test_a_receiver_that_fails_is_dropped(caplog):
    def fails(news):
        raise KeyError("not at home")

    told = Listener()
    with running(GENERATOR, slots=2) as engine:
        job = engine.submit(greedy("A", 1000, eos_token_id=()), fails)
        engine.submit(greedy("B"), told)
        assert_complete(told, greedy("B"))
        assert job.finished
    assert "not at home" in caplog.text
    assert idle(engine)


def test_a_fault_fails_what_is_in_flight(monkeypatch):
    engine = Engine(random_generator(), slots=2)
    many = [Listener() for _ in range(4)]
    for told in many:
        engine.submit(greedy("A", 50, eos_token_id=()), told)
    advance(engine, 3)
    model = engine._generator.model
    monkeypatch.setattr(model, "step", lambda *_: 1 / 0)
    engine.start()
    for told in many:
        assert told.ended.wait(10)
        assert isinstance(told.error, EngineFailed)
    assert not engine.healthy
    assert engine.failure == "ZeroDivisionError: division by zero"
    with pytest.raises(EngineStopped, match="it failed"):
        engine.submit(greedy("A"), Listener())
    engine.stop()


@torch.no_grad()
def test_a_text_without_numbers_ends_alone():
    generator = random_generator()
    generator.model.embedding[ord("~") + 2] = torch.nan
    broken, later, sound = (Listener() for _ in range(3))
    with running(generator, slots=2) as engine:
        engine.submit(greedy("a~b"), broken)
        engine.submit(greedy("B"), sound)
        assert_complete(sound, greedy("B"))
        assert broken.ended.wait(10)
        assert isinstance(broken.error, FloatingPointError)
        assert broken.pieces == []
        engine.submit(greedy("A"), later)
        assert_complete(later, greedy("A"))
        engine.drain(10)
    assert idle(engine)


def test_drain_waits_and_stop_does_not():
    engine = Engine(GENERATOR, slots=1)
    engine.start()
    assert engine.healthy
    many = [Listener() for _ in range(3)]
    for told in many:
        engine.submit(greedy("A", 30), told)
    assert engine.drain(30)
    for told in many:
        assert_complete(told, greedy("A", 30))
    with pytest.raises(EngineStopped, match="shutting down"):
        engine.submit(greedy("A"), Listener())
    assert (engine.healthy, engine.failure) == (False, None)

    engine = Engine(GENERATOR, slots=1)
    engine.start()
    many = [Listener() for _ in range(3)]
    for told in many:
        engine.submit(greedy("A", 10**9, eos_token_id=()), told)
    assert not engine.drain(0.05)
    assert all(isinstance(told.error, EngineStopped) for told in many)
    engine.stop()  # once more does no harm

    never_started, told = Engine(GENERATOR), Listener()
    never_started.submit(greedy("A"), told)
    never_started.stop()
    assert isinstance(told.error, EngineStopped)


def test_mistakes_are_named():
    for name in ("slots", "piece_tokens", "cache_interval"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            Engine(GENERATOR, **{name: 0})


def test_many_threads_at_once():
    """Whoever is not cancelled gets a whole text; whoever is, hears no more."""
    requests = [greedy("Text " * (n % 7), 5 + n % 9) for n in range(12)]
    want = [GENERATOR.run([request])[0].token_ids for request in requests]
    wrong = []

    def client(number: int) -> None:
        chance = random.Random(number)
        for _ in range(15):
            n = chance.randrange(12)
            told = Listener()
            job = engine.submit(requests[n], told)
            if chance.random() < 0.5:
                told.ended.wait(chance.random() * 0.05)
                job.cancel()
                heard = len(told.pieces)
                told.ended.wait(0.01)
                if len(told.pieces) != heard:
                    wrong.append("it was told of a text that it cancelled")
            elif told.completion().token_ids != want[n]:
                wrong.append(requests[n])

    with running(GENERATOR, slots=3, piece_tokens=8, cache_bytes=1 << 15) as engine:
        clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        assert engine.drain(10)
    assert not wrong
    assert idle(engine)
