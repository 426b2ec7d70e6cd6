"""The scheduler without a model: slots, prompt chunks, token budgets, and what is stored."""

import random
from collections.abc import Sequence

import pytest
from engines import token_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm7b.config import ModelConfig
from xlstm7b.generate.params import SamplingParams
from xlstm7b.generate.request import BLOCK, HashedTokens, Request, RequestStatus
from xlstm7b.generate.scheduler import (
    PrefillChunk,
    PrefillLimits,
    RecentPrompts,
    Scheduler,
    UnreadPrompts,
)
from xlstm7b.tokenizer import ByteTokenizer

# Without a first token: a prompt's length is what is read.
CONFIG = ModelConfig(64, 1, 1, vocab_size=320, force_bos_token_insert=False)
LONG = random.Random(0).choices(range(2, 258), k=5000)
CPU = PrefillLimits(16, 16, 16, max_rows=1)
GPU = PrefillLimits(16, idle_chunk_tokens=64, idle_tokens=256, max_rows=4, long_gaps=0.0)


def request_of(
    prompt: Sequence[int] | int, tokens: int = 1, *, shareable: bool = True, **options: object
) -> Request:
    """A prepared request. A number is the length of a prompt that shares nothing with others."""
    if isinstance(prompt, int):
        prompt, shareable = [5] * prompt, False
    made = Request(prompt, SamplingParams(max_new_tokens=tokens), **options)
    return made.prepare(CONFIG, ByteTokenizer(), shareable=shareable)


class Simulation:
    """Does what an engine does, but reads no token; checks every chunk on the way."""

    def __init__(
        self,
        slots: int = 8,
        limits: PrefillLimits = GPU,
        *,
        store_all: bool = False,
        cache_interval: int = 32,
        keeps_stored: bool = True,
    ) -> None:
        self.limits, self.interval = limits, cache_interval
        self.scheduler = Scheduler(
            slots, limits, cache_interval=cache_interval, store_all=store_all
        )
        self.keeps_stored = keeps_stored
        self.stored: set[tuple[int, ...]] = set()
        self.chunks: dict[Request, list[tuple[int, int]]] = {}
        self.at: dict[Request, int] = {}  # how far each request's state is
        self.requests: list[Request] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests.append(request)
            self.chunks[request], self.at[request] = [], -1

    def restore(self, request: Request) -> None:
        """The fake of `Engine._restore`."""
        tokens = tuple(request.read_token_ids)
        found = [
            len(prefix)
            for prefix in self.stored
            if request.hashed is not None and tokens[: len(prefix)] == prefix
        ]
        if max(found, default=0) > max(request.position, 0):
            request.position = max(found)
        elif request.position < 0:
            request.position = 0
        self.at[request] = request.position

    def step(self) -> list[list[PrefillChunk]]:
        """One step: the batches that were read. Requests generate one token after it."""
        scheduler = self.scheduler
        scheduler.admit()
        scheduler.start_step()
        batches = []
        while batch := scheduler.next_prefill(self.restore):
            self._check(batch)
            batches.append(batch)
            for chunk in batch:
                request, tokens = chunk.request, tuple(chunk.request.read_token_ids)
                self.at[request] = chunk.end
                self.chunks[request].append((chunk.start, chunk.end))
                if chunk.store and self.keeps_stored:
                    self.stored.add(tokens[: chunk.end])
                if chunk.end == len(tokens):
                    if request.prefill_only:
                        self.finish(request)
                    else:
                        scheduler.start_decoding(request)
            assert len(batches) < 1000
        for request in scheduler.to_decode():
            assert request.status is RequestStatus.RUNNING
            request.reads += 1
        for request in [*scheduler.running]:
            if request.reads >= scheduler.reads_needed(request):
                self.finish(request)
        self._check_slots()
        return batches

    def run(self, limit: int = 2000) -> int:
        """Steps until nothing is left; returns how many."""
        for step in range(limit):
            if not self.scheduler.waiting and not self.scheduler.active:
                return step
            self.step()
        raise AssertionError("some requests are never read")

    def finish(self, request: Request, status: RequestStatus = RequestStatus.FINISHED) -> None:
        self.scheduler.remove(request)
        request.status = status

    def _check(self, batch: list[PrefillChunk]) -> None:
        limits = self.limits
        assert len({chunk.request for chunk in batch}) == len(batch)
        for chunk in batch:
            request, length = chunk.request, len(chunk.request.read_token_ids)
            assert request.status is RequestStatus.PREFILL
            assert chunk.start == self.at[request]  # nothing is read twice or skipped
            assert request.position == chunk.end
            assert chunk.start < chunk.end <= length or chunk.start == chunk.end == length
            assert len(chunk) <= limits.idle_chunk_tokens + limits.chunk_tokens // 4
            at_store = chunk.end % self.interval == 0 or chunk.end == request.shared_prefix_len
            at_cut = chunk.end % limits.chunk_tokens == 0 or chunk.end == length
            assert at_cut or (self.scheduler.store_all and request.hashed is not None and at_store)
            assert not chunk.store or (request.hashed is not None and len(chunk))
        if any(len(chunk) != 1 for chunk in batch):
            assert len(batch) <= limits.max_rows
        assert len(batch) == 1 or all(len(chunk) for chunk in batch)

    def _check_slots(self) -> None:
        slots = [request.slot for request in self.scheduler.active]
        assert len({*slots}) == len(slots)
        assert {*slots} | self.scheduler._free == {*range(self.scheduler.slots)}
        assert not {*slots} & self.scheduler._free


# Slots


def test_first_come_first_served_in_the_lowest_free_slot():
    scheduler = Scheduler(3, GPU, cache_interval=32, store_all=False)
    first, second, third, fourth, fifth = requests = [request_of(4) for _ in range(5)]
    for request in requests:
        scheduler.add(request)
    assert scheduler.admit() == [first, second, third]
    assert [request.slot for request in requests[:3]] == [0, 1, 2]
    assert [request.status for request in requests] == (
        [RequestStatus.PREFILL] * 3 + [RequestStatus.WAITING] * 2
    )
    assert first.order < second.order < third.order
    assert scheduler.admit() == []
    scheduler.remove(third)
    scheduler.remove(second)
    assert scheduler.admit() == [fourth, fifth]
    assert (fourth.slot, fifth.slot) == (1, 2)
    assert scheduler.active == [first, fourth, fifth]


@pytest.mark.parametrize("status", ["waiting", "prefill", "running"])
def test_remove_frees_the_slot_once(status):
    simulation = Simulation(slots=2)
    scheduler = simulation.scheduler
    request, other = request_of(60, 9), request_of(60, 9)
    simulation.add(other, request)
    if status != "waiting":
        scheduler.admit()
    if status == "running":
        simulation.step()
        assert request.status is RequestStatus.RUNNING
    for _ in range(2):
        simulation.finish(request, RequestStatus.ABORTED)
        assert request not in (*scheduler.waiting, *scheduler.active)
        assert len(scheduler._free) == (2 if status == "waiting" else 1)
    simulation.run()
    assert simulation.at[other] == 60
    assert scheduler._free == {0, 1}
    scheduler.remove(request_of(3))  # one that was never added
    assert scheduler._free == {0, 1}


def test_the_last_running_request_moves_to_a_lower_slot_if_that_saves_work():
    simulation = Simulation(slots=8)
    scheduler = simulation.scheduler
    requests = [request_of(4, 99) for _ in range(6)]
    simulation.add(*requests)
    simulation.step()

    def bucket(slots: int) -> int:
        return next(n for n in (1, 2, 4, 8) if n >= slots)

    assert scheduler.move_to_front(bucket) is None  # no lower slot is free
    for request in requests[:3]:
        simulation.finish(request)
    # Three are left, in slots 3, 4, 5: four slots are enough.
    request, slot = scheduler.move_to_front(bucket)
    assert (request, slot) == (requests[5], 0)
    request.slot = slot
    request, slot = scheduler.move_to_front(bucket)
    assert (request, slot) == (requests[4], 1)
    request.slot = slot
    assert scheduler.move_to_front(bucket) is None  # slots 0, 1 and 3: a step computes 4 anyway
    assert scheduler._free == {2, 4, 5, 6, 7}
    simulation.finish(requests[3])
    assert scheduler.move_to_front(bucket) is None
    simulation.finish(requests[5])
    assert scheduler.move_to_front(bucket) == (requests[4], 0)
    requests[4].slot = 0
    simulation._check_slots()


# How many tokens a step reads


def lengths(batches: list[list[PrefillChunk]]) -> list[list[int]]:
    return [[len(chunk) for chunk in batch] for batch in batches]


@pytest.mark.parametrize(
    ("length", "ends"),
    [
        (1, [1]),
        (16, [16]),
        (20, [20]),  # a rest of a quarter is read with the chunk before it
        (21, [16, 21]),
        (36, [16, 36]),
        (100, [16, 32, 48, 64, 80, 100]),
        (101, [16, 32, 48, 64, 80, 96, 101]),
    ],
)
@pytest.mark.parametrize("limits", [CPU, GPU])
def test_prompts_are_cut_at_multiples_of_the_chunk(limits, length, ends):
    """While another request generates: one chunk per step."""
    simulation = Simulation(limits=limits)
    simulation.add(request_of(1, 1000))
    simulation.step()
    request = request_of(length)
    simulation.add(request)
    for start, end in zip([0, *ends], ends, strict=False):
        assert lengths(simulation.step()) == [[end - start]]
    assert simulation.chunks[request] == [*zip([0, *ends], ends, strict=False)]
    assert request.finished


def test_a_step_reads_more_while_nothing_generates():
    simulation = Simulation()
    simulation.add(request_of(1000, 3))
    # One prompt reads up to 64 tokens and a rest, several prompts 256 in all.
    assert lengths(simulation.step()) == [[64]]
    simulation.add(request_of(68), request_of(69), request_of(1000))
    # 3 × 68 tokens and no fourth: that would be 272. The last chunk may exceed the budget.
    assert lengths(simulation.step()) == [[64, 68, 64], [64]]
    assert simulation.scheduler.running == []


def test_a_batch_costs_its_rows_times_the_longest():
    simulation = Simulation(limits=PrefillLimits(16, 64, 64, max_rows=8))
    simulation.add(*[request_of(n) for n in (16, 16, 16, 16, 16)])
    assert lengths(simulation.step()) == [[16] * 4]  # 4 × 16, although nothing generates
    simulation = Simulation(limits=PrefillLimits(16, 64, 64, max_rows=8))
    simulation.add(*[request_of(n) for n in (2, 3, 20, 10, 3)])
    # 3 × 20 tokens; then no fourth row, and 4 tokens are left.
    assert lengths(simulation.step()) == [[2, 3, 20]]
    assert lengths(simulation.step()) == [[10, 3]]


def test_a_pass_over_the_weights_costs_some_tokens():
    """However short prompts are, a batch of them takes a pass over the model's weights."""
    simulation = Simulation(limits=PrefillLimits(16, 64, 64, 2, pass_tokens=24))
    simulation.add(*[request_of(4) for _ in range(8)])
    assert lengths(simulation.step()) == [[4, 4], [4, 4], [4]]  # 24 + 24, and 16 are left
    assert lengths(simulation.step()) == [[4, 4], [4]]


def test_while_requests_generate_a_step_reads_one_chunk_of_tokens():
    simulation = Simulation(slots=40)  # few of which wait for prefill
    simulation.add(request_of(1, 1000))
    simulation.step()
    simulation.add(*[request_of(n, 1000) for n in (5, 5, 5, 40, 4)])
    # 3 × 5 of 16 tokens; one token is left, which is not enough for a chunk of 16.
    assert lengths(simulation.step()) == [[5, 5, 5]]
    assert lengths(simulation.step()) == [[16]]
    assert lengths(simulation.step()) == [[4]]  # its turn, before the rest of the long prompt
    assert lengths(simulation.step()) == [[16]]
    assert lengths(simulation.step()) == [[8]]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 1.0])
def test_many_waiting_prompts_make_a_share_of_the_gaps_longer(share):
    """A long step fills the slots sooner, but delays the next token of all running requests."""
    limits = PrefillLimits(16, 64, 256, max_rows=16, long_gaps=share)
    simulation = Simulation(slots=16, limits=limits)
    simulation.add(*[request_of(1, 10**6) for _ in range(4)])
    simulation.step()
    gaps = long_gaps = 0
    for _ in range(500):
        simulation.add(request_of(160))
        running = len(simulation.scheduler.running)
        read = sum(map(sum, lengths(simulation.step())))
        gaps += running
        long_gaps += running * (read > 16 + 4)
    assert long_gaps <= share * gaps + 16
    if share:
        assert long_gaps >= min(share, 0.5) * gaps / 2


def test_a_cpu_reads_one_prompt_at_a_time_but_single_tokens_together():
    simulation = Simulation(limits=CPU)
    simulation.add(*[request_of(n) for n in (3, 4, 1, 1, 1, 2, 1)])
    assert lengths(simulation.step()) == [[3], [4], [1, 1, 1], [2], [1]]


def test_single_tokens_do_not_make_a_batch_longer_than_its_limit():
    """They are read as in decoding, any number at a time; but not together with a longer chunk."""
    simulation = Simulation(slots=40)
    simulation.add(*[request_of(1) for _ in range(30)], request_of(6))
    assert lengths(simulation.step()) == [[1] * 30, [6]]
    simulation.add(*[request_of(1) for _ in range(2)], request_of(6), request_of(1), request_of(1))
    assert lengths(simulation.step()) == [[1, 1, 6, 1], [1]]


# Prefixes


def test_a_prompt_waits_for_an_earlier_one_with_the_same_prefix():
    simulation = Simulation()
    first, second, longer, other = (
        request_of(prompt) for prompt in (LONG[:100], LONG[:100], LONG[:120], LONG[1:30])
    )
    simulation.add(first, second, longer, other)
    simulation.step()
    assert simulation.chunks[second] == simulation.chunks[longer] == []
    assert simulation.chunks[other] == [(0, 29)]
    simulation.run()
    assert simulation.chunks[first] == [(0, 64), (64, 100)]
    assert simulation.chunks[second] == [(100, 100)]  # it has nothing to read
    assert simulation.chunks[longer] == [(100, 120)]


def test_a_prompt_does_not_wait_for_a_prefix_that_it_has_read():
    """The later of two prompts may be ahead: it has found a longer prefix in the cache."""
    simulation = Simulation(limits=CPU, store_all=True)
    simulation.stored.add(tuple(LONG[:64]))
    ahead = request_of([*LONG[:64], *[7] * 50])
    behind = request_of([*LONG[:60], *[8] * 50])
    simulation.add(behind, ahead)
    simulation.run()
    assert simulation.chunks[ahead][0][0] == 64


@pytest.mark.parametrize("store_all", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_prompt_does_not_wait_for_one_that_was_aborted(steps, store_all):
    simulation = Simulation(store_all=store_all, cache_interval=1024)
    first, second, third = (request_of(LONG[:300]) for _ in range(3))
    simulation.add(first, second, third)
    for _ in range(steps):
        simulation.step()
    assert simulation.chunks[second] == []
    simulation.finish(first, RequestStatus.ABORTED)
    simulation.run()
    assert simulation.chunks[second][0][0] == 0
    assert simulation.chunks[third] == [(300, 300)]


def test_a_prompt_does_not_wait_for_a_state_that_was_not_kept():
    """A cache that is too small: what was waited for is not there."""
    simulation = Simulation(keeps_stored=False)
    requests = [request_of(LONG[:100]) for _ in range(3)]
    simulation.add(*requests)
    simulation.run()
    for request in requests:
        assert simulation.chunks[request] == [(0, 64), (64, 100)]


def test_prompts_that_cannot_be_shared_wait_for_none():
    simulation = Simulation()
    requests = [request_of(LONG[:20], shareable=False) for _ in range(3)]
    simulation.add(*requests)
    assert lengths(simulation.step()) == [[20] * 3]
    assert simulation.stored == set()


def test_without_a_cache_only_prompts_that_others_start_with_are_stored():
    simulation = Simulation(slots=2, cache_interval=16)
    simulation.add(*[request_of(prompt) for prompt in (LONG[:40], LONG[1:50], LONG[:70])])
    simulation.run()
    assert simulation.stored == {tuple(LONG[:40])}  # the third prompt, which waited, has it
    simulation.add(request_of(LONG[:70]))
    simulation.run()
    assert simulation.stored == {tuple(LONG[:40])}


def test_with_a_cache_states_are_stored_on_the_way():
    """At multiples of the interval, at the ends, and where a prompt differs from an earlier one."""
    simulation = Simulation(store_all=True, cache_interval=100)
    simulation.add(request_of(LONG[:250]))
    simulation.run()
    assert {*map(len, simulation.stored)} == {100, 200, 250}
    different = request_of([*LONG[:150], *[7] * 30])
    simulation.add(different)
    simulation.run()
    assert different.shared_prefix_len == 128  # in blocks of 64
    assert simulation.chunks[different][0][0] == 100
    assert {*map(len, simulation.stored)} == {100, 128, 180, 200, 250}
    third = request_of([*LONG[:150], *[8] * 30])
    simulation.add(third)
    simulation.run()
    assert simulation.chunks[third][0][0] == 128


def test_a_stored_state_does_not_end_a_turn():
    simulation = Simulation(limits=CPU, store_all=True, cache_interval=6)
    simulation.add(request_of(1, 1000))
    simulation.step()
    request = request_of(LONG[:20])
    simulation.add(request)
    assert lengths(simulation.step()) == [[6], [6]]  # 12 of 16 tokens; 8 more do not fit
    assert lengths(simulation.step()) == [[6], [2]]
    assert simulation.chunks[request] == [(0, 6), (6, 12), (12, 18), (18, 20)]


def test_a_prompt_that_is_cached_as_a_whole_costs_nothing():
    simulation = Simulation(limits=CPU)
    simulation.stored.add(tuple(LONG[:100]))
    simulation.add(request_of(1, 1000))
    simulation.step()
    simulation.add(request_of(16), *[request_of(LONG[:100]) for _ in range(3)])
    assert lengths(simulation.step()) == [[16], [0], [0], [0]]


# Decode


@pytest.mark.parametrize("store_all", [False, True])
@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("shareable", [False, True])
def test_the_last_token_is_read_only_for_a_state_that_is_wanted(store_all, keep_state, shareable):
    scheduler = Scheduler(4, GPU, cache_interval=32, store_all=store_all)
    for tokens in (1, 2, 7):
        request = request_of([5] * 3, tokens, shareable=shareable, keep_state=keep_state)
        wanted = keep_state or (store_all and shareable)
        assert scheduler.wants_final_state(request) == wanted
        assert scheduler.reads_needed(request) == tokens - 1 + wanted


def test_no_request_decodes_past_max_new_tokens():
    simulation = Simulation()
    requests = [request_of(3, tokens, keep_state=tokens == 4) for tokens in (1, 2, 3, 4)]
    simulation.add(*requests)
    scheduler = simulation.scheduler
    scheduler.admit()
    scheduler.start_step()
    while batch := scheduler.next_prefill(simulation.restore):
        for chunk in batch:
            scheduler.start_decoding(chunk.request)
    for expected in ([2, 3, 4], [3, 4], [4], [4], []):
        due = scheduler.to_decode()
        assert [request.params.max_new_tokens for request in due] == expected
        for request in due:
            request.reads += 1
    assert [request.reads for request in requests] == [0, 1, 2, 4]


# Prompts that start like earlier ones


@given(texts=st.lists(token_lists, max_size=8))
def test_how_much_a_prompt_shares_with_earlier_ones(texts):
    recent = RecentPrompts()
    for index, text in enumerate(texts):
        ends = range(BLOCK, len(text) + 1, BLOCK)
        known = [end for end in ends if any(text[:end] == other[:end] for other in texts[:index])]
        # The end of a prompt that came before is stored already.
        shared = 0 if text in texts[:index] else max(known, default=0)
        assert recent.add(HashedTokens(text)) == shared


def test_the_ends_of_old_prompts_are_forgotten_first():
    recent = RecentPrompts(max_hashes=5)
    for start in (0, 200):
        assert recent.add(HashedTokens(LONG[start : start + 192])) == 0
    assert recent.add(HashedTokens(LONG[:192])) == 64


# Any sequence of arrivals and aborts

prompts = st.one_of(
    st.integers(1, 120),  # tokens that none shares
    st.tuples(st.integers(0, 150), st.sampled_from([(), (), (7,), (8, 9), (7,) * 40])),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.integers(1, 6), st.booleans(), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 40)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    max_size=40,
)
all_limits = st.builds(
    PrefillLimits,
    chunk_tokens=st.sampled_from([1, 4, 16]),
    idle_chunk_tokens=st.sampled_from([16, 64]),
    idle_tokens=st.sampled_from([16, 100, 256]),
    max_rows=st.sampled_from([1, 2, 16]),
    pass_tokens=st.sampled_from([1, 8, 300]),
    long_gaps=st.sampled_from([0.0, 0.01, 1.0]),
)


@settings(max_examples=300)
@given(
    events=events,
    limits=all_limits,
    slots=st.integers(1, 6),
    store_all=st.booleans(),
    cache_interval=st.sampled_from([1, 7, 16, 32]),
    keeps_stored=st.booleans(),
)
def test_every_request_is_read_completely(
    events, limits, slots, store_all, cache_interval, keeps_stored
):
    """The simulation checks each chunk and each slot on the way."""
    simulation = Simulation(
        slots,
        limits,
        store_all=store_all,
        cache_interval=cache_interval,
        keeps_stored=keeps_stored,
    )
    for kind, *event in events:
        if kind == "add":
            prompt, tokens, keep_state, prefill_only = event
            if not isinstance(prompt, int):
                length, end = prompt
                prompt = [*LONG[:length], *end] or [3]
            simulation.add(
                request_of(prompt, tokens, keep_state=keep_state, prefill_only=prefill_only)
            )
        elif kind == "abort":
            (index,) = event
            if index < len(simulation.requests) and not simulation.requests[index].finished:
                simulation.finish(simulation.requests[index], RequestStatus.ABORTED)
                simulation._check_slots()
        else:
            for _ in range(event[0]):
                simulation.step()
    simulation.run()
    for request in simulation.requests:
        assert request.finished
        if request.status is RequestStatus.FINISHED:
            assert simulation.at[request] == request.position == len(request.read_token_ids)
            if not request.prefill_only:
                assert request.reads == simulation.scheduler.reads_needed(request)
    assert simulation.scheduler._free == {*range(slots)}


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    limits=all_limits,
    others=st.integers(0, 3),
)
def test_requests_that_arrive_first_start_first(lengths, limits, others):
    simulation = Simulation(5, limits)
    simulation.add(*[request_of(1, 10**6) for _ in range(others)])
    if others:
        simulation.step()
    requests = [request_of(length) for length in lengths]
    simulation.add(*requests)
    started: list[Request] = []
    for _ in range(3000):
        if all(request.finished for request in requests):
            break
        for batch in simulation.step():
            started += [chunk.request for chunk in batch if chunk.request not in started]
    assert [request for request in started if request in requests] == requests


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=4), st.sampled_from([b"", b"adapter"])),
        max_size=12,
    ),
    data=st.data(),
)
def test_unread_prompts_know_which_prompt_others_start_with(prompts, data):
    unread, left = UnreadPrompts(), [HashedTokens(ids, salt=salt) for ids, salt in prompts]
    for tokens in left:
        unread.add(tokens)
    while left:
        for tokens in left:
            others = [each for each in left if each is not tokens]
            want = any(each.has_prefix(tokens, len(tokens)) for each in others)
            assert unread.starts_another(tokens) == want
        removed = left.pop(data.draw(st.integers(0, len(left) - 1)))
        unread.remove(removed)
