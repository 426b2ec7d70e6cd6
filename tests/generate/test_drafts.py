"""Lookup drafts: what a brute-force search finds, in bounded memory, and only while it pays."""

import random
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlstm7b.generate.drafts import (
    MAX_DRAFT,
    MIN_MATCH,
    DraftCost,
    DraftLength,
    LookupDrafter,
    LookupText,
    SuffixIndex,
)
from xlstm7b.generate.params import SamplingParams
from xlstm7b.generate.request import Request


def searched(tokens: list[int], count: int, least: int, most: int, candidates: int) -> list[int]:
    """What `continued` returns, by comparing all earlier positions."""
    matches = []
    for position in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(most, position) and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= least:
            matches.append((length, position))
    if not matches:
        return []
    _, position = max(matches[:candidates])
    text = tokens.copy()
    for _ in range(count):
        text.append(text[position + len(text) - len(tokens)])
    return text[len(tokens) :]


def continued(index: SuffixIndex, count: int) -> list[int]:
    """The tokens that followed the longest match; none if the latest tokens are new."""
    length, position = index.longest_match()
    return index.following(position, count) if length else []


def indexed(tokens: Sequence[int]) -> LookupText:
    text = LookupText(tokens)
    assert text.index(len(tokens)) == len(tokens)
    return text


few_kinds = st.lists(st.integers(0, 2), max_size=60)
sizes = st.tuples(st.integers(1, 4), st.integers(0, 8), st.sampled_from([1, 2, 100]))


@given(start=few_kinds, rest=few_kinds, sizes=sizes, count=st.integers(0, 9))
def test_the_longest_match_is_found(start, rest, sizes, count):
    least, more, candidates = sizes
    options = {"min_match": least, "max_match": least + more, "candidates": candidates}
    index = SuffixIndex(start, **options)
    text = [*start]
    for token in rest:
        index.append(token)
        text.append(token)
        has_match = [index.has_match(length) for length in range(1, least + more + 1)]
        assert continued(index, count) == searched(text, count, least, least + more, candidates)
        longest = index.longest_match()[0]
        for found in (has_match, [index.has_match(n) for n in range(1, least + more + 1)]):
            assert found == [n <= longest for n in range(1, least + more + 1)]


@given(text=st.lists(st.integers(0, 2), max_size=100), window=st.integers(1, 12))
def test_only_the_latest_tokens_are_kept(text, window):
    index = SuffixIndex((), min_match=2, max_match=5, candidates=100, window=window)
    for end, token in enumerate(text, 1):
        index.append(token)
        kept = index._tokens.tolist()[-len(index) :]
        assert len(kept) == min(end, 2 * window - 1)
        assert len(index._tokens) == len(index._before) < 3 * window
        assert sum(map(len, index._latest)) <= len(kept)
        assert kept == text[end - len(kept) : end]
        assert continued(index, 4) == searched(kept, 4, 2, 5, 100)
    longer = SuffixIndex(text, min_match=2, max_match=5, candidates=100, window=window)
    assert longer._tokens.tolist() == text[-window:]


def test_long_prompts_are_indexed_in_pieces(monkeypatch):
    """The drafts are those of an index that was built at once; until then there are none."""
    draw, appended, append = random.Random(0), [], SuffixIndex.append
    monkeypatch.setattr(
        SuffixIndex, "append", lambda index, token: (appended.append(token), append(index, token))
    )
    prompts = [draw.choices(range(1000), k=count) for count in (3000, 100, 2500)]
    texts = [LookupText(prompt) for prompt in prompts]
    assert not appended
    requests = [Request([1], SamplingParams()) for _ in prompts]
    drafter = LookupDrafter(DraftCost())
    for request, prompt in zip(requests, prompts, strict=True):
        drafter.start(request, prompt)
    assert not appended
    most, steps = dict.fromkeys(requests, 7), 0
    while len(appended) < 5600 + 3 * steps:
        assert not drafter.wants_to_draft({requests[2]: 7})
        before = len(appended)
        drafter.prepare()
        assert 0 < len(appended) - before <= 1024
        steps += 1
        for request, prompt in zip(requests, prompts, strict=True):
            drafter.record(request, [prompt[steps]], 0, 0)
    assert steps == 6
    assert drafter.wants_to_draft(most)
    for text, prompt in zip(texts, prompts, strict=True):
        text.index(len(prompt))
        for step in range(1, steps + 1):
            text.record([prompt[step]], 0, 0)
    found = drafter.propose(most)
    for request, text, prompt in zip(requests, texts, prompts, strict=True):
        assert found[request] == text.propose(7) == prompt[7:14]


def test_a_very_long_text_is_never_indexed_anew(monkeypatch):
    """Each token costs the same, also when the window is full."""
    index = SuffixIndex(window=100)
    draw, lookups = random.Random(0), []

    class CountingDict(dict):
        def get(self, *arguments):
            lookups.append(arguments)
            return super().get(*arguments)

    index._latest = [CountingDict() for _ in index._latest]
    for _ in range(1000):
        before = len(lookups)
        index.append(draw.randrange(5))
        assert len(lookups) - before <= 2


@pytest.mark.parametrize(("cost", "least", "most"), [(0.0, 200, 200), (0.5, 15, 40), (3.0, 8, 20)])
def test_waits_that_lead_to_no_pass_become_rare(cost, least, most, monkeypatch):
    """The texts want drafts and find none. Then one finds a draft again."""

    class Hopeful:
        unindexed, wanted, accepted_share = 0, 7, 1.0
        found: ClassVar[list[int]] = []

        def __init__(self, tokens):
            pass

        def propose(self, most):
            return self.found

    monkeypatch.setattr("xlstm7b.generate.drafts.LookupText", Hopeful)
    drafter, request = LookupDrafter(DraftCost(cost)), Request([1], SamplingParams())
    drafter.start(request, [1])
    waits = 0
    for _ in range(200):
        if drafter.wants_to_draft({request: 7}):
            waits += 1
            assert drafter.propose({request: 7}) == {}
    assert least <= waits <= most
    Hopeful.found = [5] * 7
    steps = next(n for n in range(20) if drafter.wants_to_draft({request: 7}))
    assert steps <= 16
    for _ in range(9):  # from then on every step waits
        assert drafter.propose({request: 7})
        assert drafter.wants_to_draft({request: 7})


def test_a_prompt_is_copied():
    prompt = random.Random(0).sample(range(1000), 100)
    drafter = indexed([*prompt, *prompt[20:24]])
    assert drafter.propose(MAX_DRAFT) == prompt[24:31]  # the first draft is short
    drafter.record(prompt[24:32], 7, 7)
    assert drafter.propose(MAX_DRAFT) == prompt[32:46]  # the next one is twice as long
    assert drafter.propose(2) == prompt[32:34]
    assert drafter.propose(0) == []


def test_a_copy_with_edits_goes_on_near_the_edit():
    prompt = random.Random(0).sample(range(1000), 100)
    text = indexed([*prompt, *prompt[20:24]])
    assert text.propose(MAX_DRAFT) == prompt[24:31]
    text.record([*prompt[24:27], 2000], 7, 3)  # another token instead of prompt[27]
    assert text.wanted
    assert text.propose(MAX_DRAFT) == []  # it is nowhere near
    text.record(prompt[28:29], 0, 0)
    draft = text.propose(MAX_DRAFT)
    assert draft == prompt[29 : 29 + len(draft)]
    text.record([*draft[:5], prompt[36]], len(draft), 5)  # two tokens are left out
    draft = text.propose(MAX_DRAFT)
    assert draft == prompt[37 : 37 + len(draft)]
    text.record([2001], len(draft), 0)
    for token in range(3000, 3005):
        assert text.wanted
        assert text.propose(MAX_DRAFT) == []
        text.record([token], 0, 0)
    assert not text.wanted  # the copy has ended
    text.record(prompt[38:39], 0, 0)
    assert text.propose(MAX_DRAFT) == []


@given(data=st.data())
def test_any_tokens_may_follow_a_draft(data):
    """Drafts are earlier tokens, also when the index has dropped some."""
    text, known = LookupText(()), set[int]()
    text._index = SuffixIndex((), window=data.draw(st.integers(1, 20)))
    for _ in range(60):
        most = data.draw(st.integers(-1, 4))
        draft = text.propose(most)
        assert len(draft) <= max(0, most)
        assert {*draft} <= known
        accepted = data.draw(st.integers(0, len(draft)))
        tokens = [*draft[:accepted], data.draw(st.integers(0, 3))]
        text.record(tokens, len(draft), accepted)
        known |= {*tokens}


def test_a_batch_does_not_lose_more_than_drafts_gain():
    prompt = random.Random(0).sample(range(1000), 100)
    copying, other = (Request([1], SamplingParams()) for _ in range(2))
    for cost, others, is_drafted in [
        (0, 9, True),
        (0.63, 1, True),
        (0.64, 1, False),
        (0.63, 2, False),
    ]:
        drafter = LookupDrafter(DraftCost(cost))
        drafter.start(copying, [*prompt, *prompt[20:24]])
        drafter.start(other, prompt)
        drafter.prepare()
        most = {copying: 7, other: 7}
        most |= {Request([1], SamplingParams()): 0 for _ in range(others - 1)}
        assert drafter.wants_to_draft(most) == is_drafted  # else the engine need not wait
        found = drafter.propose(most)
        # The first draft has 7 tokens, of which half are expected to be right.
        assert found == ({copying: prompt[24:31]} if is_drafted else {})
        assert drafter.propose({copying: 7}) == {copying: prompt[24:31]}
        assert not drafter.wants_to_draft({copying: 0, other: 7})
        drafter._texts[copying]._length._length = 2  # half of 2 tokens gain less
        assert drafter.wants_to_draft(most) == (cost == 0)
        assert bool(drafter.propose(most)) == (cost == 0)


@pytest.mark.parametrize(("copies", "is_drafted"), [(1, False), (2, False), (3, False), (4, True)])
def test_requests_with_drafts_lose_time_too(copies, is_drafted):
    """A pass takes 2.6 steps longer. Half of 7 tokens are expected to be right."""
    prompt = random.Random(0).sample(range(1000), 100)
    requests = [Request([1], SamplingParams()) for _ in range(4)]
    drafter = LookupDrafter(DraftCost(2.6))
    for number, request in enumerate(requests):
        drafter.start(request, [*prompt, *prompt[20 : 24 * (number < copies)]])
    drafter.prepare()
    most = dict.fromkeys(requests, 7)
    assert drafter.wants_to_draft(most) == is_drafted
    assert len(drafter.propose(most)) == copies * is_drafted


@pytest.mark.parametrize(
    ("cost", "batch", "copies"), [(0.4, 8, 4), (0.9, 8, 6), (2.4, 8, 8), (2.4, 1, 1)]
)
def test_after_wrong_drafts_a_long_copy_is_drafted_again(cost, batch, copies):
    """Drafts that are not read are compared with what comes, so they are known to be right."""
    draw = random.Random(0)
    passage = draw.sample(range(1000), 300)
    requests = [Request([1], SamplingParams()) for _ in range(batch)]
    drafter = LookupDrafter(DraftCost(cost))
    for request in requests:
        drafter.start(request, passage)
    for _ in requests:
        drafter.prepare()
    misses = [token for n in range(0, 60, 4) for token in (*passage[n : n + 4], 2000 + n)]
    drafted = 0
    for token in (*misses, *passage):
        found = drafter.propose(dict.fromkeys(requests, 7))
        for number, request in enumerate(requests):
            new = token if number < copies else draw.randrange(3000, 9000)
            draft = found.get(request, [])
            is_right = draft[:1] == [new]  # the pass is counted as if it had drafted one token
            drafter.record(request, [new], min(1, len(draft)), int(is_right))
        drafted += token not in misses and bool(found.get(requests[0]))
    assert drafted > 150


def test_short_matches_that_lead_nowhere_are_ignored():
    """Phrases of 4 tokens occur again and again, each time with other tokens after them."""
    draw = random.Random(0)
    phrases = [[*range(10 * n, 10 * n + 4)] for n in range(5)]
    text = LookupText(())
    waits = []
    for place in range(200):
        for token in (*draw.choice(phrases), 1000 + place):
            waits.append(text.wanted > 0)
            text.record([token], 0, 0)
    assert 1 <= sum(waits) <= 4
    assert not any(waits[100:])


def test_a_draft_that_is_all_right_makes_short_matches_count_again():
    prompt = random.Random(0).sample(range(1000), 100)
    text = indexed([*prompt, *prompt[20 : 20 + MIN_MATCH]])
    assert text.wanted
    text.record([2000], 0, 0)  # the match ends where a draft could follow it

    def copied(start: int) -> int:
        """How many tokens are copied from the prompt until there is a draft."""
        count = 0
        while not text.propose(1):
            text.record([prompt[start + count]], 0, 0)
            count += 1
        return count

    assert copied(30) == MIN_MATCH + 1
    draft = text.propose(MAX_DRAFT)
    text.record([2001], len(draft), 0)
    assert copied(50) == MIN_MATCH + 2
    draft = text.propose(MAX_DRAFT)
    text.record([*draft, 2002], len(draft), len(draft))
    assert copied(90) == MIN_MATCH  # not near the last draft


def test_a_repetition_is_continued():
    index = SuffixIndex([7, 1, 2, 1, 2, 1, 2], min_match=2)
    assert continued(index, 5) == [1, 2, 1, 2, 1]
    assert continued(SuffixIndex([4] * 9), 3) == [4, 4, 4]


def test_nothing_is_known():
    for tokens in ([], [1], [1, 2, 3, 4], [1, 2, 9, 1, 2]):
        assert continued(SuffixIndex(tokens), 5) == []


def test_wrong_sizes():
    for options in ({"min_match": 0}, {"max_match": 2}, {"candidates": 0}, {"window": 0}):
        with pytest.raises(ValueError, match="at least"):
            SuffixIndex((), **options)


def drafted_share(accepts, tokens: int = 20_000) -> float:
    """Rejected drafts for each token, if every pass drafts as much as it may."""
    length, generated, rejected = DraftLength(), 0, 0
    while generated < tokens:
        drafted = length.next
        assert 0 <= drafted <= MAX_DRAFT
        accepted = accepts(drafted, generated)
        length.record(drafted, accepted, accepted + 1)
        generated += accepted + 1
        rejected += drafted - accepted
    return rejected / generated


def test_drafts_stop_when_they_do_not_pay():
    assert drafted_share(lambda drafted, _: 0) < 0.01
    draw = random.Random(0)

    def rarely(drafted: int, _: int) -> int:
        return next((n for n in range(drafted) if draw.random() > 0.05), drafted)

    assert drafted_share(rarely) < 0.1


def test_drafts_are_long_when_all_are_accepted():
    length = DraftLength()
    seen = []
    for _ in range(4):
        seen.append(length.next)
        length.record(length.next, length.next, length.next + 1)
    assert seen == [7, 14, MAX_DRAFT, MAX_DRAFT]


def test_a_wrong_draft_hardly_shortens_the_next_if_most_were_right():
    length = DraftLength()
    for _ in range(10):
        length.record(length.next, length.next, length.next + 1)
    length.record(MAX_DRAFT, 2, 3)
    assert length.next >= MAX_DRAFT * 2 / 3
    for _ in range(4):
        length.record(length.next, 0, 1)
    assert length.next < MAX_DRAFT / 2


def test_costly_drafts_are_shorter():
    length = DraftLength(8, DraftCost())
    seen = []
    for accepted in (4, 8, 8, 2, 3, 0):
        seen.append(length.next)
        length.record(length.next, accepted, accepted + 1)
    assert seen == [4, 8, 8, 8, 3, 6]
    assert length.next == 1


def costly_share(cost: DraftCost, p: float, tokens: int = 20_000) -> float:
    """How many times as fast drafts are than none, each token right with probability p."""
    draw, length = random.Random(0), DraftLength(8, cost)
    generated, steps = 0, 0.0
    while generated < tokens:
        drafted = length.next
        if not cost.is_paid_by([(drafted, length.accepted_share)], 1):
            drafted = 0
        accepted = next((n for n in range(drafted) if draw.random() > p), drafted)
        length.record(drafted, accepted, accepted + 1)
        generated += accepted + 1
        steps += 1 + bool(drafted) * cost.fixed + drafted * cost.per_token
    return generated / steps


@pytest.mark.parametrize(
    ("cost", "p", "least", "most"),
    [
        (DraftCost(0.65, 0.07), 0.0, 0.98, 1.0),  # a 7B with a 160M
        (DraftCost(0.65, 0.07), 0.8, 1.6, 2.0),
        (DraftCost(0.65, 0.07), 1.0, 3.9, 4.1),
        (DraftCost(3.8, 0.29), 0.0, 0.98, 1.0),  # a 160M with a 29M
        (DraftCost(3.8, 0.29), 0.8, 0.9, 1.0),
        (DraftCost(3.8, 0.29), 1.0, 1.2, 1.3),
        (DraftCost(0.5, 1.0), 1.0, 1.0, 1.0),  # a draft model as slow as the model
    ],
)
def test_drafts_of_a_model_pay_for_their_time(cost, p, least, most):
    assert least <= costly_share(cost, p) <= most


@pytest.mark.parametrize(
    ("cost", "pause"), [(DraftCost(), 16), (DraftCost(0.74, 0.07), 34), (DraftCost(4.8, 0.24), 216)]
)
def test_the_pause_after_drafts_that_fail_is_longer_if_they_take_longer(cost, pause):
    length, waited = DraftLength(8, cost), 0
    while length.next:
        length.record(length.next, 0, 1)
    while not length.next:
        length.record(0, 0, 1)
        waited += 1
    assert waited == pause


def test_drafts_pay_for_the_whole_batch():
    cost = DraftCost(0.2, 0.02)
    assert cost.is_paid_by([(5, 0.5)], batch=3)
    assert not cost.is_paid_by([(5, 0.5)], batch=4)
    assert cost.is_paid_by([(5, 0.5), (1, 0.5)], batch=4)
    assert not cost.is_paid_by([(5, 0.5), (8, 0.05)], batch=4)  # all wait for the longest


def test_requests_without_drafts_are_not_slowed_down_much():
    """6 of 8 requests generate 8 tokens in a pass, which takes four steps."""
    cost, drafts = DraftCost(3.0), [(7, 1.0)] * 6
    assert not cost.is_paid_by(drafts, batch=8)  # two generate one token in four steps
    assert not cost.is_paid_by(drafts, batch=7)  # one does, though the mean time would fall
    assert not cost.is_paid_by([*drafts, (1, 0.5)], batch=7)  # 1.5 tokens in four steps
    assert cost.is_paid_by([*drafts, (1, 1.0)], batch=7)
    assert cost.is_paid_by(drafts, batch=6)
    assert DraftCost(0.5).is_paid_by(drafts[:4], batch=8)  # as with a 7B: in 1.5 steps
    assert not DraftCost(0.5).is_paid_by(drafts[:3], batch=8)


def test_drafts_are_tried_again():
    """A text that begins to repeat itself after 5,000 tokens."""
    length, generated, accepted_tokens = DraftLength(), 0, 0
    while generated < 10_000:
        drafted = length.next
        accepted = drafted if generated > 5000 else 0
        length.record(drafted, accepted, accepted + 1)
        generated += accepted + 1
        accepted_tokens += accepted
    assert accepted_tokens > 0.8 * 5000


def test_a_pass_without_a_draft_does_not_count_as_a_failure():
    length = DraftLength()
    for _ in range(1000):
        length.record(0, 0, 1)
    assert length.next > 0
