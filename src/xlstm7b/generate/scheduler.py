"""Scheduler: which requests get slots, which prompt chunks to read, and which states to store.

Plain Python over requests: no tensors, no model. The engine calls it at every step and runs what it
returns.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from xlstm7b.generate.request import BLOCK, HashedTokens, Request, RequestStatus, digest


@dataclass(frozen=True)
class PrefillLimits:
    """How much prompt one step reads.

    Prompts are cut at multiples of `chunk_tokens` only, so that a stored state continues exactly
    where an uncached prompt would have been cut. While requests generate, a step reads at most
    `chunk_tokens`, to keep the gaps between their tokens short. When none does, it reads up to
    `idle_tokens`, in chunks of up to `idle_chunk_tokens`. It also does so when many requests wait,
    but only for a share of `long_gaps` of all gaps between tokens, which become longer. At most
    `max_rows` prompts are read together, 1 on a CPU. However short they are, they cost as much as
    `pass_tokens`, because the weights must be read.
    """

    chunk_tokens: int
    idle_chunk_tokens: int
    idle_tokens: int
    max_rows: int
    pass_tokens: int = 1
    long_gaps: float = 0.01


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens start … end − 1 of a request. `store`: the prefix cache keeps the state."""

    request: Request
    start: int
    end: int
    store: bool

    def __len__(self) -> int:
        return self.end - self.start


class Scheduler:
    """The queue, the slots, and the next work of each request. Not thread-safe.

    With `store_all`, states are stored at every multiple of `cache_interval`, where a prompt
    differs from an earlier one, and at the ends of prompts. Without, only the state after a whole
    prompt that other requests start with.
    """

    def __init__(
        self, slots: int, limits: PrefillLimits, *, cache_interval: int, store_all: bool
    ) -> None:
        self.slots, self._limits = slots, limits
        self._interval, self.store_all = cache_interval, store_all
        self._recent, self._unread = RecentPrompts(), UnreadPrompts()
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[Request] = deque()  # in the order in which they read
        self.running: list[Request] = []
        self._free = set(range(slots))
        self._admitted = 0
        self._budget = 0  # tokens that this step may still read
        self._chunk_limit = 0  # tokens that one request may read in this step
        self._turn_ends: dict[Request, int] = {}  # how far requests may read in this step
        self._spare_gaps = float(slots)  # gaps that may still be made longer

    @property
    def active(self) -> list[Request]:
        """Requests that hold a slot."""
        return [*self.prefilling, *self.running]

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        if request.hashed is not None and not self.store_all:
            self._unread.add(request.hashed)

    def admit(self) -> list[Request]:
        """Gives free slots to waiting requests, first come, first served.

        The lowest free slot is taken: a decode step computes all slots up to the highest in use.
        """
        admitted = []
        while self.waiting and self._free:
            request = self.waiting.popleft()
            request.slot = min(self._free)
            self._free.remove(request.slot)
            self._admitted += 1
            request.order, request.status = self._admitted, RequestStatus.PREFILL
            if self.store_all and request.hashed is not None:
                request.shared_prefix_len = self._recent.add(request.hashed)
            self.prefilling.append(request)
            admitted.append(request)
        return admitted

    def start_step(self) -> None:
        """Sets the token budget of a new step."""
        limits, running = self._limits, len(self.running)
        self._turn_ends.clear()
        self._budget = self._chunk_limit = limits.chunk_tokens
        # Limited, so that long steps do not follow each other after hours of even load.
        self._spare_gaps = min(self._spare_gaps + limits.long_gaps * running, 4.0 * self.slots)
        if not running:
            self._budget, self._chunk_limit = limits.idle_tokens, limits.idle_chunk_tokens
        elif 4 * len(self.prefilling) >= self.slots and self._spare_gaps >= running:
            # A quarter of the slots waits for prefill: one long step fills them sooner.
            self._budget = limits.idle_tokens
            self._spare_gaps -= running

    def next_prefill(self, restore: Callable[[Request], None]) -> list[PrefillChunk]:
        """The next chunks to read together, one per request; empty when the step has enough.

        `restore(request)` loads the longest stored prefix into the request's slot and sets its
        position. Rows are padded to the longest, so a batch costs rows × longest tokens. Call it
        until it returns nothing, and read each batch before the next call.
        """
        batch: list[PrefillChunk] = []
        longest = 0
        for _ in range(len(self.prefilling)):
            request = self.prefilling[0]
            chunk = None
            if not self._should_wait_for_prefix(request):
                restore(request)
                chunk = self._chunk(request)
                if chunk is not None and not self._fits(batch, longest, chunk):
                    break
            self.prefilling.rotate(-1)
            if chunk is not None:
                batch.append(chunk)
                longest = max(longest, len(chunk))
                if not self._may_join(batch):
                    break
        if longest:
            self._budget -= max(len(batch) * longest, self._limits.pass_tokens)
        for chunk in batch:
            chunk.request.position = chunk.end
        return batch

    def _fits(self, batch: list[PrefillChunk], longest: int, chunk: PrefillChunk) -> bool:
        if not len(chunk):
            return not batch  # nothing to read: it does not join a batch
        if self._budget <= 0:
            return False
        if len(batch) >= self._limits.max_rows and max(longest, len(chunk)) > 1:
            return False  # only single tokens may exceed it
        cost = max((len(batch) + 1) * max(longest, len(chunk)), self._limits.pass_tokens)
        whole_budget = self._budget >= self._limits.chunk_tokens
        return cost <= self._budget or (not batch and whole_budget)

    def _may_join(self, batch: list[PrefillChunk]) -> bool:
        """True if another row may be added. Single tokens are read as in decoding, on CPUs too."""
        if not len(batch[-1]):
            return False
        if all(len(chunk) == 1 for chunk in batch):
            return True
        return len(batch) < self._limits.max_rows

    def _should_wait_for_prefix(self, request: Request) -> bool:
        """True if an earlier request is about to cache a longer prefix of this prompt.

        Waiting for it is cheaper than prefilling the same tokens twice.
        """
        if request.hashed is None:
            return False
        if request.waits_for is not None:
            other, end = request.waits_for
            if not other.finished and other.position < end:
                return True
        request.waits_for = None
        for other in self.prefilling:
            if other.order < request.order and other.hashed is not None:
                end = min(self._next_stored(other), len(other.read_token_ids))
                if max(request.position, other.position) < end and request.hashed.has_prefix(
                    other.hashed, end
                ):
                    request.waits_for = other, end
                    return True
        return False

    def _next_stored(self, request: Request) -> int:
        """The next position at which this request's state is stored on the way."""
        if not self.store_all or request.hashed is None:
            return len(request.read_token_ids)
        position = max(request.position, 0)
        due = (position // self._interval + 1) * self._interval
        shared = request.shared_prefix_len
        return min(due, shared) if shared > position else due

    def _chunk(self, request: Request) -> PrefillChunk | None:
        """The next chunk of this request; None if it has read its share of this step.

        A chunk ends where a state is stored; the request may read another one in the same step. A
        short rest joins the chunk before it: alone it would cost a whole pass over the weights.
        """
        position, length = request.position, len(request.read_token_ids)
        if request not in self._turn_ends:
            size, end = self._limits.chunk_tokens, length
            if length > position + self._chunk_limit + size // 4:
                chunks = max(1, min(self._chunk_limit, self._budget) // size)
                end = (position // size + chunks) * size
            self._turn_ends[request] = end
        elif position >= self._turn_ends[request] < length:
            return None
        end = min(self._turn_ends[request], self._next_stored(request))
        return PrefillChunk(request, position, end, self._is_stored(request, end))

    def _is_stored(self, request: Request, end: int) -> bool:
        if request.hashed is None or end == request.position:
            return False
        is_whole = end == len(request.read_token_ids)
        if self.store_all:
            return is_whole or end % self._interval == 0 or end == request.shared_prefix_len
        return is_whole and self._unread.starts_another(request.hashed)

    def start_decoding(self, request: Request) -> None:
        """Marks the prompt as read: the request generates from now on."""
        self.prefilling.remove(request)
        self._drop_unread(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING

    def to_decode(self) -> list[Request]:
        """Running requests that still need a decode step, in no order.

        A step is launched before the results of the previous one are known, but never past
        `max_new_tokens`. The last token is read only if the final state is wanted.
        """
        return [request for request in self.running if request.reads < self.reads_needed(request)]

    def reads_needed(self, request: Request) -> int:
        """Decode steps for max_new_tokens tokens; the first token comes from the prefill."""
        if request.prefill_only:
            return 0
        return request.params.max_new_tokens - 1 + self.wants_final_state(request)

    def wants_final_state(self, request: Request) -> bool:
        """True if the state after the last token will be returned or stored."""
        return request.keep_state or (self.store_all and request.hashed is not None)

    def move_to_front(self, bucket: Callable[[int], int]) -> tuple[Request, int] | None:
        """The running request in the highest slot and a lower free slot, if moving saves work.

        It does if fewer slots are then computed per step; `bucket(n)` is how many are computed for
        n slots.
        """
        last = max(self.running, key=lambda request: request.slot)
        if bucket(last.slot + 1) == bucket(len(self.running)):
            return None
        lowest = min(self._free, default=last.slot)
        if lowest >= last.slot:
            return None
        self._free.remove(lowest)
        self._free.add(last.slot)
        return last, lowest

    def remove(self, request: Request) -> None:
        """Removes a request from the queue or from its slot, which becomes free."""
        if request.status is RequestStatus.WAITING:
            if request in self.waiting:
                self.waiting.remove(request)
                self._drop_unread(request)
            return
        if request in self.prefilling:
            self.prefilling.remove(request)
            self._drop_unread(request)
        elif request in self.running:
            self.running.remove(request)
        else:
            return
        self._free.add(request.slot)

    def _drop_unread(self, request: Request) -> None:
        if request.hashed is not None and not self.store_all:
            self._unread.remove(request.hashed)


class RecentPrompts:
    """Recent prompts; finds the length of the shared prefix.

    Where two prompts differ for the first time, a third is likely to differ too (the end of a
    system prompt), so a state is stored there.
    """

    def __init__(self, max_hashes: int = 1 << 16) -> None:
        self._max_hashes = max_hashes
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def add(self, tokens: HashedTokens) -> int:
        """Adds a prompt; returns how many tokens, in whole blocks, it shares with a different one.

        A prompt that is known as a whole shares nothing: its own end is stored already.
        """
        hashes = tokens.block_hashes()[::-1]
        whole = digest(*tokens.key(len(tokens)))
        shared = 0
        if whole not in self._hashes:
            matches = (index for index, known in enumerate(hashes) if known in self._hashes)
            shared = BLOCK * (len(hashes) - next(matches, len(hashes)))
        for block_hash in (whole, *hashes):  # the first blocks come last, so they are kept longest
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._max_hashes:
            self._hashes.popitem(last=False)
        return shared


class UnreadPrompts:
    """The prompts of waiting requests and of those in prefill, sorted.

    Prompts that start with the same tokens are neighbours. So the cost of a search hardly grows
    with their number, which may be that of a whole data set.
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[bytes, bytes]] = []
        self._is_sorted = True

    def add(self, tokens: HashedTokens) -> None:
        self._sorted.append(self._entry(tokens))
        self._is_sorted = False

    def remove(self, tokens: HashedTokens) -> None:
        del self._sorted[self._find(self._entry(tokens))]

    def starts_another(self, tokens: HashedTokens) -> bool:
        """True if a prompt besides this one, which was added too, starts with all of its tokens."""
        salt, content = self._entry(tokens)
        following = self._find((salt, content)) + 1
        if following == len(self._sorted):
            return False
        other_salt, other = self._sorted[following]
        return other_salt == salt and other.startswith(content)

    def _find(self, entry: tuple[bytes, bytes]) -> int:
        if not self._is_sorted:
            self._sorted.sort()
            self._is_sorted = True
        return bisect_left(self._sorted, entry)

    @staticmethod
    def _entry(tokens: HashedTokens) -> tuple[bytes, bytes]:
        return tokens.salt, tokens.prefix_bytes(len(tokens))
