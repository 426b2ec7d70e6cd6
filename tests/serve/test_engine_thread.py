"""EngineThread with a fake engine: queue, aborts, failures, drain and stop."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from live_server import wait_for

from xlstm7b.generate import Completion, EngineStats, Request, RequestOutput, RequestStatus
from xlstm7b.generate.params import SamplingParams
from xlstm7b.serve.engine_thread import EngineFailed, EngineStopped, EngineThread, QueueFull


class FakeEngine:
    """Gives every request that holds a slot one token per step."""

    def __init__(self, slots: int = 2) -> None:
        self.slots, self.steps, self.closed = slots, 0, False
        self.waiting: list[Request] = []
        self.running: dict[Request, int] = {}  # and how many tokens it has
        self.may_step, self.is_warm = threading.Event(), threading.Event()
        self.may_step.set()
        self.is_warm.set()
        self.failure: Exception | None = None

    def warm_up(self) -> None:
        self.is_warm.wait(10)

    def add_request(self, request: Request) -> Request:
        if request.prompt == "bad":
            raise ValueError("a bad prompt")
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        self.running.pop(request, None)
        if not request.finished:
            request.status = RequestStatus.ABORTED

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[RequestOutput]:
        assert self.may_step.wait(10)
        if self.failure is not None:
            raise self.failure
        self.steps += 1
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.pop(0)
            request.status = RequestStatus.RUNNING
            self.running[request] = 0
        return [self._advance(request) for request in [*self.running]]

    def stats(self) -> EngineStats:
        running = len(self.running)
        return EngineStats(self.slots, running, 99, 0, 0, 0, {}, {}, self.steps, 0.0, 0.0, 7.0)

    def close(self) -> None:
        self.closed = True

    def _advance(self, request: Request) -> RequestOutput:
        self.running[request] += 1
        count, completion = self.running[request], None
        if count == request.params.max_new_tokens:
            del self.running[request]
            request.status = RequestStatus.FINISHED
            completion = Completion("x" * count, [*range(count)], "length", 1, 1.0, 1.0, 0)
        return RequestOutput(request, "x", (count - 1,), completion=completion)


class Receiver:
    """Collects the outputs of one request."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.ended = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        assert not self.ended.is_set()
        self.outputs.append(output)
        if output.finished:
            self.ended.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    def error(self) -> Exception | None:
        assert self.ended.wait(10)
        return self.outputs[-1].error


def request(tokens: int = 3, prompt: str = "a") -> Request:
    return Request(prompt, SamplingParams(max_new_tokens=tokens))


@contextmanager
def running(engine: FakeEngine, max_waiting: int = 256) -> Iterator[EngineThread]:
    thread = EngineThread(engine, max_waiting)  # type: ignore[arg-type]
    thread.start()
    try:
        yield thread
    finally:
        engine.may_step.set()
        thread.stop()
    assert engine.closed
    assert not engine.has_requests or thread.failure is not None


def assert_complete(receiver: Receiver, tokens: int = 3) -> None:
    assert receiver.error() is None
    assert receiver.token_ids == [*range(tokens)]
    assert [output.finished for output in receiver.outputs] == [False] * (tokens - 1) + [True]


def test_every_request_gets_all_its_outputs_in_order() -> None:
    receivers = [Receiver() for _ in range(9)]
    with running(FakeEngine()) as thread:
        for tokens, receiver in enumerate(receivers, 1):
            submitted = request(tokens)
            assert thread.submit(submitted, receiver) is submitted
        for tokens, receiver in enumerate(receivers, 1):
            assert_complete(receiver, tokens)


def test_an_event_loop_is_woken_once_per_step() -> None:
    batches: list[int] = []

    class Loop:
        def call_soon_threadsafe(self, call: Callable, outputs: list) -> None:
            batches.append(len(outputs))
            call(outputs)

    engine, loop = FakeEngine(slots=64), Loop()
    engine.may_step.clear()
    receivers = [Receiver() for _ in range(64)]
    with running(engine) as thread:
        for receiver in receivers:
            thread.submit(request(5), receiver, loop=loop)  # type: ignore[arg-type]
        wait_for(lambda: len(engine.waiting) > 0)  # a step that waits has only some of them
        engine.may_step.set()
        for receiver in receivers:
            assert_complete(receiver, 5)
    assert len(batches) == engine.steps
    assert sum(batches) == 64 * 5


def test_receivers_are_called_in_their_event_loop() -> None:
    async def tokens() -> list[int]:
        loop, ended, found = asyncio.get_running_loop(), asyncio.Event(), list[int]()

        def receive(output: RequestOutput) -> None:
            assert asyncio.get_running_loop() is loop
            found.extend(output.token_ids)
            if output.finished:
                ended.set()

        thread.submit(request(4), receive, loop=loop)
        await asyncio.wait_for(ended.wait(), 10)
        return found

    closed, later = asyncio.new_event_loop(), Receiver()
    closed.close()
    with running(FakeEngine()) as thread:
        assert asyncio.run(tokens()) == [0, 1, 2, 3]
        thread.submit(request(), later, loop=closed)  # nobody waits for its outputs
        thread.submit(request(), later)
        assert_complete(later)


def test_an_idle_thread_takes_no_steps() -> None:
    engine, receiver = FakeEngine(), Receiver()
    with running(engine) as thread:
        thread.submit(request(), receiver)
        assert_complete(receiver)
        time.sleep(0.05)
        assert engine.steps == 3


def test_the_queue_is_bounded_and_recovers() -> None:
    engine = FakeEngine()
    engine.may_step.clear()
    receivers = [Receiver() for _ in range(5)]
    with running(engine, max_waiting=3) as thread:
        requests = [thread.submit(request(), receiver) for receiver in receivers[:3]]
        assert thread.stats().waiting == 3
        with pytest.raises(QueueFull) as full:
            thread.submit(request(), receivers[3])
        assert full.value.retry_after == (1 + 3 / 2) * 7  # rounds × seconds per request
        thread.abort(requests[1])  # there is room at once, before the next step
        assert thread.stats().waiting == 2
        thread.submit(request(), receivers[3])
        engine.may_step.set()
        for receiver in (receivers[0], receivers[2], receivers[3]):
            assert_complete(receiver)
        thread.submit(request(), receivers[4])
        assert_complete(receivers[4])
    assert receivers[1].outputs == []


def test_requests_that_belong_together_are_queued_together_or_not_at_all() -> None:
    engine = FakeEngine()
    engine.may_step.clear()
    first, refused, others = Receiver(), Receiver(), [Receiver(), Receiver()]
    with running(engine, max_waiting=3) as thread:
        thread.submit(request(), first)
        with pytest.raises(QueueFull):
            thread.submit_all({request(): refused for _ in range(3)})
        assert thread.stats().waiting == 1
        thread.submit_all({request(): receiver for receiver in others})
        assert thread.stats().waiting == 3
        engine.may_step.set()
        for receiver in (first, *others):
            assert_complete(receiver)
    assert refused.outputs == []


@pytest.mark.parametrize(("seconds", "retry_after"), [(0.0, 1.0), (1e6, 60.0)])
def test_retry_after_is_between_1_and_60_seconds(
    seconds: float, retry_after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    stats = EngineStats(2, 0, 0, 0, 0, 0, {}, {}, 0, 0.0, 0.0, seconds)
    monkeypatch.setattr(engine, "stats", lambda: stats)
    thread = EngineThread(engine, max_waiting=1)  # type: ignore[arg-type]
    thread.submit(request(), Receiver())
    with pytest.raises(QueueFull) as full:
        thread.submit(request(), Receiver())
    assert full.value.retry_after == retry_after


def test_an_aborted_request_has_no_more_output_and_frees_its_slot() -> None:
    engine, first, other = FakeEngine(slots=1), Receiver(), Receiver()
    with running(engine) as thread:
        endless = thread.submit(request(10**9), first)
        waiting = thread.submit(request(), other)
        wait_for(lambda: len(first.outputs) > 3)
        assert (endless.status, waiting.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
        thread.abort(endless)
        assert_complete(other)
        seen = len(first.outputs)
        thread.abort(endless)  # again, and of a finished one: nothing happens
        thread.abort(waiting)
        assert (endless.status, waiting.status) == (RequestStatus.ABORTED, RequestStatus.FINISHED)
        assert thread.drain(10)
        assert len(first.outputs) == seen
    assert not first.ended.is_set()


def test_a_request_aborted_in_the_inbox_never_reaches_the_engine() -> None:
    engine, receiver = FakeEngine(), Receiver()
    thread = EngineThread(engine)  # type: ignore[arg-type]
    submitted = thread.submit(request(), receiver)
    thread.abort(submitted)
    thread.start()
    thread.stop()
    assert (submitted.status, engine.steps, receiver.outputs) == (RequestStatus.ABORTED, 0, [])


def test_a_receiver_that_fails_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    def fail(output: RequestOutput) -> None:
        raise KeyError("not at home")

    receiver = Receiver()
    with running(FakeEngine()) as thread:
        failing = thread.submit(request(10**9), fail)
        thread.submit(request(), receiver)
        assert_complete(receiver)
        wait_for(lambda: failing.status is RequestStatus.ABORTED)
    assert "a request is aborted: its receiver failed" in caplog.text
    assert "not at home" in caplog.text


def test_a_request_that_the_engine_refuses_ends_with_the_reason() -> None:
    refused, receiver = Receiver(), Receiver()
    with running(FakeEngine()) as thread:
        submitted = thread.submit(request(prompt="bad"), refused)
        thread.submit(request(), receiver)
        assert str(refused.error()) == "a bad prompt"
        assert submitted.status is RequestStatus.FAILED
        assert_complete(receiver)


def test_a_failure_ends_every_request() -> None:
    engine = FakeEngine()
    engine.may_step.clear()
    engine.failure = ZeroDivisionError("division by zero")
    receivers = [Receiver() for _ in range(4)]
    with running(engine) as thread:
        requests = [thread.submit(request(), receiver) for receiver in receivers]
        engine.may_step.set()
        for submitted, receiver in zip(requests, receivers, strict=True):
            assert isinstance(receiver.error(), EngineFailed)
            assert submitted.status is RequestStatus.FAILED
        wait_for(lambda: engine.closed)
        assert thread.failure == "ZeroDivisionError: division by zero"
        assert not thread.healthy
        with pytest.raises(EngineStopped, match=r"^the engine failed$"):
            thread.submit(request(), Receiver())
        assert not thread.drain(10)


def test_it_is_healthy_once_it_is_warm() -> None:
    engine, receiver = FakeEngine(), Receiver()
    engine.is_warm.clear()
    with running(engine) as thread:
        thread.submit(request(), receiver)  # it waits
        assert not thread.healthy
        engine.is_warm.set()
        assert_complete(receiver)
        assert thread.healthy
    assert (thread.healthy, thread.failure) == (False, None)


def test_drain_finishes_everything() -> None:
    receivers = [Receiver() for _ in range(5)]
    with running(FakeEngine(slots=1)) as thread:
        for receiver in receivers:
            thread.submit(request(30), receiver)
        assert thread.drain(10)
        for receiver in receivers:
            assert_complete(receiver, 30)
        with pytest.raises(EngineStopped, match=r"^the server is shutting down$"):
            thread.submit(request(), Receiver())


def test_drain_gives_up_after_its_time() -> None:
    receivers = [Receiver() for _ in range(3)]
    engine = FakeEngine(slots=1)
    thread = EngineThread(engine)  # type: ignore[arg-type]
    thread.start()
    for receiver in receivers:
        thread.submit(request(10**9), receiver)
    assert not thread.drain(0.05)
    for receiver in receivers:
        assert isinstance(receiver.error(), EngineStopped)
    assert str(receivers[0].error()) == "the server was stopped"
    thread.stop()  # a second time does no harm
    assert engine.closed


def test_stop_ends_requests_of_a_thread_that_never_started() -> None:
    thread, receiver = EngineThread(FakeEngine()), Receiver()  # type: ignore[arg-type]
    thread.submit(request(), receiver)
    thread.stop()
    assert isinstance(receiver.error(), EngineStopped)


def test_many_threads_submit_and_abort() -> None:
    """A request that is not aborted is complete; an aborted one gets nothing after the abort."""
    wrong: list[str] = []

    def client(number: int) -> None:
        draw = random.Random(number)
        for _ in range(100):
            receiver, tokens = Receiver(), draw.randrange(1, 9)
            submitted = thread.submit(request(tokens), receiver)
            if draw.random() < 0.5:
                receiver.ended.wait(draw.random() * 0.002)
                thread.abort(submitted)
            elif receiver.error() is not None or receiver.token_ids != [*range(tokens)]:
                wrong.append(f"{receiver.outputs}")

    with running(FakeEngine(slots=3)) as thread:
        clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        assert thread.drain(10)
        assert thread.stats().waiting == 0
    assert not wrong
