"""Drafts: tokens that requests may generate next. The model verifies them: none changes a token.

An engine that speculates has one `Drafter`. `LookupDrafter` finds where a text has had its latest
tokens before, and proposes what followed there. It costs no model, and pays when an output repeats
its prompt or itself: copies with edits, code, answers that quote a document. `ModelDrafter` asks a
small model (`draft_model.py`).
"""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from xlstm7b.generate.request import Request

MAX_DRAFT = 15  # tokens of one draft
MIN_MATCH = 3  # latest tokens that must have occurred before
MAX_MATCH = 32  # longer ones are not compared further
_MOST_NEEDED = 8  # tokens of a match, after drafts that were wrong
_NEAR = 8  # tokens after the position where a copy broke off: the latest token is searched in them
_PATIENCE = 6  # tokens after a copy broke off until this search ends
_CANDIDATES = 16  # earlier positions that are compared
WINDOW = 1 << 16  # latest tokens of a prompt that are searched
_LONGEST_PAUSE = 16  # steps that do not wait for the last tokens, after waits without a draft
_DICTS = 16  # a power of 2
_INDEXED = 1024  # tokens of prompts that a step adds to indices: about 1.5 ms

_NO_MATCH = 0, -1

_FIRST_LENGTH, _FIRST_COSTLY_LENGTH = 7, 4
_MOST_STEPS = 2  # that a request of a batch may take for a token, because others have drafts
_LEAST_RATE = 0.15  # of accepted drafts; below it, drafting costs more than it saves
_FIRST_REST, _LONGEST_REST = 16, 512  # tokens without drafts, after drafts that did not pay
_TRY_SHARE = 0.03  # of the time may be taken by drafts of a model that are all wrong


class SuffixIndex:
    """A text that grows, and where its latest tokens occurred before.

    Every position is linked to the latest one before it with the same `min_match` tokens. Appending
    a token is one lookup. A long text takes another one, which forgets the oldest token: the latest
    2 · `window` − 1 tokens are kept. A position is the number of all tokens before it.
    """

    def __init__(
        self,
        tokens: Sequence[int] = (),
        *,
        min_match: int = MIN_MATCH,
        max_match: int = MAX_MATCH,
        candidates: int = _CANDIDATES,
        window: int = WINDOW,
    ) -> None:
        if not 1 <= min_match <= max_match or candidates < 1 or window < 1:
            raise ValueError("sizes must be at least 1, and max_match at least min_match")
        self._min_match, self._max_match = min_match, max_match
        self._key_bits = (1 << 32 * min_match) - 1
        self._candidates, self._window = candidates, window
        self._tokens = array("i")
        self._before = array("i")  # by position: the one before it with the same tokens, or −1
        self._offset = 0  # the position of the first token in these
        self._first = 0  # the position of the first token that is kept
        # Positions by key. One dict of all would take 10 ms whenever it grows.
        self._latest: list[dict[int, int]] = [{} for _ in range(_DICTS)]
        self._key = 0  # the latest `min_match` tokens as one number of 32 bits each
        self._match: tuple[int, int] | None = _NO_MATCH  # of the latest tokens; None: not known
        self._asked = 0, False  # the latest question of `has_match`, and its answer
        for token in tokens[-window:]:
            self.append(token)

    def append(self, token: int) -> None:
        end = self._offset + len(self._tokens) + 1
        if end - self._first >= 2 * self._window:
            self._forget_first()
        self._tokens.append(token)
        self._key = key = (self._key << 32 | token) & self._key_bits
        before = -1
        if end - self._first >= self._min_match:
            latest = self._latest[token % _DICTS]
            before = latest.get(key, -1)
            latest[key] = end
        self._before.append(before)
        self._match, self._asked = (_NO_MATCH if before < 0 else None), (0, False)

    def _forget_first(self) -> None:
        """Forgets the oldest token, and the position that is reached from it."""
        start, key = self._first - self._offset, 0
        for token in self._tokens[start : start + self._min_match]:
            key = key << 32 | token
        latest = self._latest[key % _DICTS]
        if latest.get(key) == self._first + self._min_match:
            del latest[key]
        self._first += 1
        if start >= self._window:  # now and then, because all others are moved
            del self._tokens[: start + 1], self._before[: start + 1]
            self._offset = self._first

    def __len__(self) -> int:
        """The number of tokens that are kept."""
        return self._offset + len(self._tokens) - self._first

    def following(self, position: int, count: int) -> list[int]:
        """The tokens from this position on. At the end of the text they are repeated from there."""
        start = position - self._offset
        period = len(self._tokens) - start
        followed = self._tokens[start : start + count].tolist()
        return [followed[n % period] for n in range(count)]

    def find_latest(self, start: int, count: int) -> int | None:
        """The position after the latest token's first occurrence in `count` tokens from `start` on.

        None: it is not among them.
        """
        last = len(self._tokens) - 1
        places = start - self._offset, start + count - self._offset
        for place in range(max(places[0], self._first - self._offset), min(places[1], last)):
            if self._tokens[place] == self._tokens[last]:
                return self._offset + place + 1
        return None

    def longest_match(self) -> tuple[int, int]:
        """Its length and its position; of equally long matches, the latest. (0, −1): there is none.

        Of the positions that end with the last `min_match` tokens, the latest `candidates` are
        compared.
        """
        if self._match is not None:
            return self._match
        longest, best = _NO_MATCH
        position, least = self._before[-1], self._first + self._min_match
        for _ in range(self._candidates):
            if position < least or longest == self._max_match:
                break
            if self._matches(position, longest + 1):
                longest, best = self._match_length(position), position
            position = self._before[position - self._offset - 1]
        self._match = longest, best
        return self._match

    def has_match(self, length: int) -> bool:
        """True if the longest match has at least this many tokens: 1 to `max_match`.

        Every step asks this of every request. It is cheaper than to look for the longest match.
        """
        if self._match is not None:
            return self._match[0] >= length
        if self._asked[0] != length:
            self._asked = length, self._is_among_candidates(length)
        return self._asked[1]

    def _is_among_candidates(self, length: int) -> bool:
        position, least = self._before[-1], self._first + self._min_match
        for _ in range(self._candidates):
            if position < least:
                break
            if self._matches(position, length):
                return True
            position = self._before[position - self._offset - 1]
        return False

    def _matches(self, position: int, length: int) -> bool:
        """True if the `length` tokens before this position are the latest ones."""
        tokens, start = self._tokens, max(self._first, position - length)
        return tokens[start - self._offset : position - self._offset] == tokens[-length:]

    def _match_length(self, position: int) -> int:
        """How many tokens before this position are the latest ones, up to `max_match`."""
        tokens, end, place = self._tokens, len(self._tokens), position - self._offset
        length = self._min_match
        most = min(self._max_match, position - self._first)
        if tokens[place - most : place] == tokens[end - most :]:  # as in most copies
            return most
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class DraftCost(NamedTuple):
    """By how many steps a pass with drafts takes longer than a step, with all that is needed."""

    fixed: float = 0.0
    per_token: float = 0.0  # for each token of the longest draft

    def is_paid_by(self, drafts: Iterable[tuple[int, float]], batch: int) -> bool:
        """True if drafts are expected to pay in a batch of this size.

        Each has a length and the share that is expected to be right. A request whose draft has g
        right tokens takes 1 / (1 + g) passes for a token, one without a draft takes a whole pass.
        The mean time of a token must not rise, and no request may take more than twice as long:
        its user gains nothing from the drafts of others. At the first request that would take
        longer, the others are not looked at any more.
        """
        total = slowest = 0.0  # passes for a token: of all requests, of the slowest one
        longest, without_draft = 0, batch
        for length, share in drafts:
            passes = 1 / (1 + length * share)
            if (1 + self.fixed) * passes > _MOST_STEPS:
                return False
            total, slowest = total + passes, max(slowest, passes)
            longest, without_draft = max(longest, length), without_draft - 1
        if without_draft:
            total, slowest = total + without_draft, 1.0
        steps = 1 + self.fixed + self.per_token * longest  # that a pass takes
        return longest > 0 and steps * total <= batch and steps * slowest <= _MOST_STEPS

    def least_share(self, longest: int) -> float:
        """The share of the longest draft that must be right. From 1 on, no draft pays."""
        return self.fixed / longest + self.per_token

    def least_length(self, share: float) -> float:
        """How long a draft must be to pay alone, if this share of it is right."""
        gain = share - self.per_token
        return self.fixed / gain if gain > 0 else math.inf


class DraftLength:
    """How many tokens to draft next for one request, from how many were accepted lately.

    A draft that is all right doubles the length. After a wrong one the length is one more than were
    right, or that share of the longest which was accepted lately. When too few are accepted,
    nothing is drafted for some tokens, then a short draft is tried. After each such try that fails,
    the next one comes twice as late.

    cost: that of drafts, if each of their tokens takes time, as with a draft model. Then drafts
        start shorter, and after a wrong one the length is that of the tokens that were right and
        one more. But drafts are at least as long as it takes to pay, and if none can pay, nothing
        is drafted. The next try comes the later, the longer it takes. If the batch does not let a
        request draft for some time, it tries again.
    """

    def __init__(self, longest: int = MAX_DRAFT, cost: DraftCost | None = None) -> None:
        self._longest, self._cost = longest, cost
        self._least_rate = _LEAST_RATE
        if cost is not None:
            self._least_rate = max(_LEAST_RATE, cost.least_share(longest))
        self._good_rate = max(0.5, self._least_rate)
        self._rate = self._good_rate  # share of accepted drafts: a moving average
        self._first_rest = _FIRST_REST
        self._resting = 0  # tokens to generate before the next draft
        self._idle = 0  # tokens that were generated since then without a draft
        self._length: int
        self._expected: float  # share of the next draft
        self._prepare_try(_FIRST_LENGTH if cost is None else _FIRST_COSTLY_LENGTH)
        if cost is not None:
            steps = cost.fixed + cost.per_token * self._length  # that a try takes
            self._first_rest = max(_FIRST_REST, min(_LONGEST_REST, math.ceil(steps / _TRY_SHARE)))
        self._rest = self._first_rest

    @property
    def next(self) -> int:
        return 0 if self._resting or self._least_rate >= 1 else self._length

    @property
    def accepted_share(self) -> float:
        """The share of the next draft that is expected to be accepted."""
        return self._expected

    def record(self, drafted: int, accepted: int, generated: int) -> None:
        """Counts a pass that generated tokens. `drafted` may be 0."""
        was_resting, self._resting = self._resting, max(0, self._resting - generated)
        if not drafted:
            self._idle += 0 if was_resting else generated
            if self._cost is not None and self._idle >= self._rest:
                self._idle, self._rest = 0, min(2 * self._rest, _LONGEST_REST)
                self._prepare_try(2)
            return
        self._idle = 0
        self._rate += (accepted / drafted - self._rate) / 4
        self._expected = self._rate
        if self._rate >= self._good_rate:
            self._rest = self._first_rest
        elif self._rate < self._least_rate:
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
            self._rate = self._least_rate
            self._prepare_try(2)
            return
        if accepted == drafted:
            self._length = self._at_least(2 * self._length)
        else:
            usual = 0 if self._cost is not None else math.ceil(self._rate * self._longest)
            self._length = self._at_least(max(accepted + 1, usual))

    def _prepare_try(self, length: int) -> None:
        """The next draft may be all right, whatever was accepted before."""
        self._expected = self._rate if self._cost is None else 1.0
        self._length = self._at_least(length)

    def _at_least(self, length: int) -> int:
        """This length, or that of a draft that pays if it is longer."""
        if self._cost is not None:
            paying = self._cost.least_length(self._expected)
            length = max(length, math.ceil(min(paying, self._longest)))
        return min(length, self._longest)


class Drafter(Protocol):
    """Drafts for the requests of one engine."""

    def start(self, request: "Request", tokens: Sequence[int]) -> None:
        """The request got a slot. It will generate when its prompt has been read.

        `tokens` are those of the text so far that are known. After a loaded state they may be few.
        """

    def prepare(self) -> None:
        """Does a part of the host's work that new texts need. The engine calls it in each step."""

    def wants_to_draft(self, most: Mapping["Request", int]) -> bool:
        """True if `propose` may find drafts for this batch once the last tokens are known.

        The engine asks this before it knows them. It waits for them only if this is True.
        """

    def propose(self, most: Mapping["Request", int]) -> dict["Request", list[int]]:
        """The next drafts of the requests of a batch, each of at most this many tokens.

        0: the request has no drafts, and need not have started. A request without a draft has an
        empty list in the result, or none.
        """

    def record(
        self, request: "Request", tokens: Sequence[int], drafted: int, accepted: int
    ) -> None:
        """Adds the tokens that a pass generated, with a draft of which some were accepted."""

    def move(self, request: "Request", slot: int) -> None:
        """The request moves to another slot. `request.slot` is still the old one."""

    def stop(self, request: "Request") -> None:
        """Forgets a request. It may not have started."""

    def warm_up(self) -> None:
        """Prepares what the first drafts need."""


class LookupDrafter(Drafter):
    """Drafts by lookup in each request's own prompt and output.

    They are read only if they are expected to pay (`DraftCost.is_paid_by`). To find them, the
    engine waits for the last tokens, which takes time too. So after waits that led to no pass, some
    steps do not wait: the more, the more often that was so and the more drafts cost.
    """

    def __init__(self, cost: DraftCost) -> None:
        self._cost = cost
        self._vain_waits = 0  # since the latest pass
        self._pause = 0  # steps that do not wait
        self._texts: dict[Request, LookupText] = {}

    def start(self, request: "Request", tokens: Sequence[int]) -> None:
        self._texts[request] = LookupText(tokens)

    def prepare(self) -> None:
        """Indexes some tokens of new texts. A text has no drafts before all are indexed."""
        left = _INDEXED
        for text in self._texts.values():
            if text.unindexed and left:
                left -= text.index(left)

    def wants_to_draft(self, most: Mapping["Request", int]) -> bool:
        if self._pause:
            self._pause -= 1
            return False
        texts = ((self._texts[one], count) for one, count in most.items() if count > 0)
        drafts = ((min(text.wanted, count), text.accepted_share) for text, count in texts)
        pays = self._cost.is_paid_by(drafts, len(most))
        if pays:  # in vain, until `propose` finds drafts
            self._vain_waits += 1
            self._pause = min(int(self._cost.fixed * self._vain_waits), _LONGEST_PAUSE)
        return pays

    def propose(self, most: Mapping["Request", int]) -> dict["Request", list[int]]:
        asked = {request: count for request, count in most.items() if count > 0}
        found = {request: self._texts[request].propose(count) for request, count in asked.items()}
        found = {request: draft for request, draft in found.items() if draft}
        drafts = ((len(draft), self._texts[one].accepted_share) for one, draft in found.items())
        if not self._cost.is_paid_by(drafts, len(most)):
            return {}
        self._vain_waits = self._pause = 0
        return found

    def record(
        self, request: "Request", tokens: Sequence[int], drafted: int, accepted: int
    ) -> None:
        self._texts[request].record(tokens, drafted, accepted)

    def move(self, request: "Request", slot: int) -> None:
        pass  # nothing is kept by slot

    def stop(self, request: "Request") -> None:
        self._texts.pop(request, None)

    def warm_up(self) -> None:
        pass  # there is nothing to prepare


class LookupText:
    """One text of `LookupDrafter`: its tokens that are known, and how many to draft next.

    A draft needs a match of some tokens, at first `MIN_MATCH`. One more is needed after a match
    that ended before a draft could follow it, and after a draft of which nothing was right. A draft
    that was all right sets this back. So free prose, whose matches are short, has few drafts.

    A text that copies another one with edits goes on near the position where the copy broke off. So
    for some tokens after a draft a match of one token is enough, if it is there.

    A draft that no pass reads, because it would not pay, is compared with the tokens that come. It
    counts as if it had been read. So drafts are read again when a text begins to repeat itself.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """There are no drafts before `index` has added these tokens."""
        self._index, self._length = SuffixIndex(), DraftLength()
        self._unindexed = deque(tokens[-WINDOW:])
        self._needed = MIN_MATCH
        self._source = 0  # position of the first token of the latest draft
        self._broke_off = 0  # position of the first token that was not copied
        self._patience = 0  # tokens until this position does not count any more
        self._unread, self._right = list[int](), 0  # a draft that is not read; how many were right

    @property
    def unindexed(self) -> int:
        """How many tokens are not in the index yet."""
        return len(self._unindexed)

    def index(self, most: int) -> int:
        """Adds up to this many of them to the index; returns how many."""
        count = min(most, len(self._unindexed))
        for _ in range(count):
            self._index.append(self._unindexed.popleft())
        return count

    @property
    def wanted(self) -> int:
        """How long the next draft may be. 0 while drafts do not pay, and outside of repetitions.

        So the engine waits for the last token only within a repetition.
        """
        if self._unindexed:
            return 0
        return self._length.next if self._patience > 0 or self._has_match else 0

    @property
    def accepted_share(self) -> float:
        """The share of drafts that were accepted lately."""
        return self._length.accepted_share

    @property
    def _has_match(self) -> bool:
        return self._index.has_match(self._needed)

    def propose(self, most: int) -> list[int]:
        """The next draft, of at most this many tokens. It may be empty."""
        length, position = min(most, self.wanted), self._position()
        if length <= 0 or position is None:
            return []
        self._source = position
        return self._index.following(position, length)

    def _position(self) -> int | None:
        """The position after an earlier occurrence of the latest tokens."""
        if self._has_match:
            return self._index.longest_match()[1]
        return self._index.find_latest(self._broke_off, _NEAR) if self._patience else None

    def record(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        """Adds the tokens that a pass generated, with a draft of which some were accepted."""
        if self._unindexed:
            self._unindexed += tokens
            self._length.record(0, 0, len(tokens))
            return
        has_match = self._has_match
        if not (has_match or drafted or self._unread or self._patience):  # the usual case
            for token in tokens:
                self._index.append(token)
            self._length.record(0, 0, len(tokens))
            return
        waited = has_match and self._length.next > 0
        if drafted:
            self._unread = []
        elif not self._unread and self.wanted and (position := self._position()) is not None:
            self._unread, self._right = self._index.following(position, self.wanted), 0
        for token in tokens:
            self._compare_unread(token)
            self._index.append(token)
        self._length.record(drafted, accepted, len(tokens))
        if drafted and accepted == drafted:
            self._needed = MIN_MATCH
        elif not accepted and waited and (drafted or not self._has_match):
            self._needed = min(self._needed + 1, _MOST_NEEDED)
        if accepted > 1 or (accepted and self._patience):  # more than chance
            self._broke_off, self._patience = self._source + accepted, _PATIENCE
        else:
            self._patience = max(0, self._patience - len(tokens))

    def _compare_unread(self, token: int) -> None:
        """Compares the draft that was not read with the next token. Counts it where it ends."""
        if not self._unread:
            return
        is_right = token == self._unread[self._right]
        self._right += is_right
        if not is_right or self._right == len(self._unread):
            self._length.record(len(self._unread), self._right, 0)
            self._unread = []
