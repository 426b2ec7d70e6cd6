"""ModelRunner: the model's work for a fixed number of slots. On a GPU each call is one CUDA graph.

All memory is allocated at the start. No call waits for the device. `UnfusedModel` has no graphs: it
is called directly and allocates as it likes.
"""

import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate.drafts import MAX_DRAFT, DraftCost
from xlstm7b.generate.fused import FusedModel, Slots
from xlstm7b.generate.kernels import MAX_ROWS
from xlstm7b.generate.params import MAX_LOGPROBS, SamplingParams
from xlstm7b.generate.replay import (
    Rings,
    StepWay,
    default_replay_slots,
    folded_copy,
    ring_sizes,
)
from xlstm7b.generate.sampler import (
    Needs,
    Sampler,
    copy_to,
    mask_words,
    on_device,
    token_logprobs,
)
from xlstm7b.generate.scheduler import PrefillLimits
from xlstm7b.generate.state import SavedState, state_bytes, to_device
from xlstm7b.generate.unfused import UnfusedModel
from xlstm7b.mlstm.replay import Pass
from xlstm7b.model import ModelState
from xlstm7b.report import counted, shown_bytes

MAX_SLOTS, CPU_SLOTS = 256, 8
_FREE_SHARE = 0.7  # of free GPU memory for slots; the rest is for prefill, graphs, saved states

# Decode graphs exist for these numbers of slots, and for a few kinds of sampling.
_SLOT_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, MAX_SLOTS)
_NEEDS = (
    Needs(),
    Needs(sampling=True),
    Needs(sampling=True, filters=True),
    Needs(True, True, True, True, True),
)
# The same with grammars, if they can be used.
_GRAMMAR_NEEDS = tuple(needs._replace(grammar=True) for needs in _NEEDS)
# Passes with drafts have one kind for all requests with grammars: a pass is a graph of the whole
# model, and `decode` has separate ones for the model and for the draw.
_GRAMMAR_PASS_NEEDS = (_GRAMMAR_NEEDS[-1],)
# Log-probabilities have graphs of their own, for these numbers of rows: the rows that want them.
_SCORED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Graphs that verify drafts exist for these numbers of positions: a token and the drafts after it.
_POSITIONS = (2, 4, 8, 16)
# Prefill graphs exist for these shapes: one row of these lengths, or rows × tokens. Larger batches
# are launched kernel by kernel: only there does the GPU take longer than the launches.
_ONE_ROW = (*range(64, 768, 64), 768, 896, 1024, 1280, 1536, 1792, 2048, 2304)
_ROWS, _ROW_TOKENS = (2, 3, 4, 6, 8, 12, 16), (64, 128, 256, 384, 512)
_MAX_GRAPH_TOKENS = 2304
_SCORED = 512  # prompt tokens whose logits are held at a time


def prefill_limits(
    device: torch.device, chunk_tokens: int, long_gaps: float = 0.01
) -> PrefillLimits:
    """The limits for a device. On a CPU larger batches are not faster."""
    if device.type != "cuda":
        return PrefillLimits(chunk_tokens, chunk_tokens, chunk_tokens, 1, 1, long_gaps)
    return PrefillLimits(
        chunk_tokens,
        idle_chunk_tokens=max(chunk_tokens, 2048),
        idle_tokens=max(chunk_tokens, 8192),
        max_rows=_ROWS[-1],
        pass_tokens=256,  # an H200 reads the weights of a 7B in the time of this many tokens
        long_gaps=long_gaps,
    )


def fitting_slots(
    config: ModelConfig,
    device: torch.device,
    state_dtype: torch.dtype,
    slots: int | None,
    other_bytes: int,
    ring_bytes: int = 0,
) -> int:
    """The given number of slots, by default as many as fit next to `other_bytes`.

    `ring_bytes` are those of a slot's rings. `ValueError` if the given number does not fit into
    memory.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        memory = torch.cuda.mem_get_info(device)[0]
        memory += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    elif not hasattr(os, "sysconf"):  # Windows: not known
        memory = sys.maxsize
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # The sampler holds a few vectors of the vocabulary's length per slot.
    slot = state_bytes(config, state_dtype) + ring_bytes + 16 * config.vocab_size
    if slots is None:
        fitting = int((memory * _FREE_SHARE - other_bytes) // slot) - 1
        return max(1, min(MAX_SLOTS, fitting)) if on_gpu else CPU_SLOTS
    if (slots + 1) * slot > memory:  # one more row holds the state that prompts start from
        raise ValueError(
            f"{counted(slots, 'slot')} of {shown_bytes(slot)} {'does' if slots == 1 else 'do'} "
            f"not fit into {shown_bytes(memory)}; at most {max(0, memory // slot - 1):,} do"
        )
    return slots


def replay_slots(
    model: FusedModel | UnfusedModel, replay: bool | None, drafts: int = 0
) -> int | None:
    """From how many slots on decode steps go by replay; None if none does."""
    if drafts:
        if isinstance(model, UnfusedModel):
            raise ValueError("speculation needs the fused path, which this model does not have")
        if replay is False:
            raise ValueError("speculation needs replay decoding, which replay=False turns off")
    if replay and isinstance(model, UnfusedModel):
        raise ValueError("replay decoding needs the fused path, which this model does not have")
    if replay is None:
        return default_replay_slots(model.config) if model.uses_kernels else None
    return 1 if replay else None


def has_rings(
    model: FusedModel | UnfusedModel, slots: int, replay: bool | None, drafts: int
) -> bool:
    """True if a runner has rings: for passes with drafts, or for steps by replay."""
    least = replay_slots(model, replay, drafts)
    return drafts > 0 or (least is not None and slots >= least)


class PrefillRow(NamedTuple):
    """Prompt tokens for a slot. `fresh`: they start a prompt; whatever the slot held is dropped."""

    slot: int
    tokens: Sequence[int]
    fresh: bool = False


class _Part(NamedTuple):
    """The first slots: views of their memory."""

    state: ModelState
    logits: Tensor
    sampler: Sampler
    rings: Rings | None


class _Drafting(NamedTuple):
    """Drafts of all slots, and what the latest pass found for them."""

    drafts: Tensor  # [slots, K]; −1: none
    allowed: Tensor  # [slots, K, words]: the masks of grammars after each draft
    logits: Tensor  # [slots, K + 1, V], kept until the next pass: a state may be saved as of any
    # As in `Drawn`.
    kept: Tensor  # [slots]
    tokens: Tensor  # [slots, K + 1]

    @classmethod
    def zeros(cls, logits: Tensor, drafts: int) -> Self:
        """For the slots that have these logits [slots, V]."""
        slots, vocab_size = logits.shape
        device = logits.device
        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        return cls(
            integers(slots, drafts),
            torch.zeros(slots, drafts, mask_words(vocab_size), dtype=torch.int32, device=device),
            logits.new_zeros(slots, drafts + 1, vocab_size),
            integers(slots),
            integers(slots, drafts + 1),
        )


class _Scored(NamedTuple):
    """Log-probabilities of drawn tokens: see `Sampler.logprob`."""

    rows: Tensor  # what they are of
    logprob: Tensor
    top_logprobs: Tensor
    top_tokens: Tensor

    @classmethod
    def zeros(cls, slots: int, vocab_size: int, device: torch.device) -> Self:
        # A pass on a GPU has at most as many rows, on a CPU more.
        rows = max(slots * (MAX_DRAFT + 1) if device.type == "cpu" else slots, MAX_ROWS)
        top = min(MAX_LOGPROBS, vocab_size)
        integers, reals = (
            partial(torch.zeros, dtype=dtype, device=device)
            for dtype in (torch.int64, torch.float32)
        )
        return cls(integers(rows), reals(rows), reals(rows, top), integers(rows, top))


class _NoGraph(NamedTuple):
    """The work itself in place of a CUDA graph."""

    replay: Callable[[], None]


class ModelRunner:
    """States, logits and sampling of `slots` requests.

    replay: whether decode steps use replay decoding. By default those of `default_replay_slots` or
        more do, on a GPU.
    drafts: the most tokens of a draft that `verify` reads.

    With replay, slots between `start` and `stop` may have tokens in their rings. Prefill never
    touches these slots, so it knows of no ring. After a pass with drafts, and before steps that
    write the states, one step folds the rings: see `_way`.
    """

    def __init__(
        self,
        model: FusedModel | UnfusedModel,
        slots: int,
        *,
        state_dtype: torch.dtype = torch.float32,
        replay: bool | None = None,
        drafts: int = 0,
    ) -> None:
        self.model, self.config, self.slots = model, model.config, slots
        self.device = device = model.device
        self._on_gpu = device.type == "cuda"
        self._replay_from = replay_slots(model, replay, drafts)
        self._rings: Rings | None = None
        if has_rings(model, slots, replay, drafts):
            self._rings = Rings.zeros(
                self.config, slots, dtype=model.dtype, device=device, **ring_sizes(drafts)
            )
        self._decoding = set[int]()  # slots between `start` and `stop`
        self._replaying = False  # whether rings of live slots may have tokens
        self._after_pass = False  # whether no step has followed the latest pass
        self._replayed = set[int]()  # slots whose ring may have tokens
        # The last rows are not slots. They hold the states that prompts start from, after the
        # model's first token: without an adapter, and with each of them. Unused rows of a prefill
        # graph read 0 tokens from the first of them and write it back.
        rows = slots + 1 + model.adapter_count
        self._start = slots
        self._adapters = [0] * slots + [*range(1 + model.adapter_count)]  # number of each row
        self._adapter_of: Tensor | None = None  # the same on the device
        if model.adapter_count:
            self._adapter_of = torch.tensor(self._adapters, device=device)
        self._state = ModelState.zeros(self.config, rows, dtype=state_dtype, device=device)
        self._logits = torch.zeros(
            rows,
            self.config.vocab_size,
            dtype=torch.promote_types(model.dtype, torch.float32),
            device=device,
        )
        self._drafting = _Drafting.zeros(self._logits[:slots], drafts) if drafts else None
        self._start_logits = [*self._logits[slots:].clone().split(1)]
        self._sampler = Sampler(slots, self.config.vocab_size, device)
        self._scored = _Scored.zeros(slots, self.config.vocab_size, device)
        # Made once: slicing the 97 tensors of a 7B's state takes long next to a step.
        self._slot_states = [self._state.rows(row, row + 1) for row in range(rows)]
        # A CPU always computes all slots: then a request's tokens do not depend, to the bit, on
        # which other requests are running.
        self._make_parts(_SLOT_BUCKETS if self._on_gpu else ())
        self._single_tokens = torch.full((slots,), -1, device=device)
        self._graphs: dict[Any, torch.cuda.CUDAGraph | _NoGraph] = {}
        # Zeros are right without a first token.
        self._has_start = [not self.config.force_bos_token_insert] * (1 + model.adapter_count)
        if self._on_gpu:
            self._graph_memory = torch.cuda.graph_pool_handle()
            self._capture_stream = stream_for(self, device)
            # Tokens, lengths, source and target slots of a prefill batch: one copy from the host.
            inputs = _MAX_GRAPH_TOKENS + 3 * _ROWS[-1]
            self._inputs = torch.zeros(inputs, dtype=torch.long, device=device)

    def _make_parts(self, buckets: Sequence[int]) -> None:
        """Views of the first n slots, for each of these n and for all slots; tables of sizes."""
        sizes = [*(n for n in buckets if n < self.slots), self.slots]
        self._parts = {n: self._part(n) for n in sizes}
        # By number of slots, because every step needs them.
        self._buckets = [min(n for n in sizes if n >= used) for used in range(self.slots + 1)]
        self._most_drafts = {n: self._longest_draft(n) for n in sizes}

    def _part(self, n: int) -> _Part:
        sampler = self._sampler if n == self.slots else self._sampler.first(n)
        rings = None if self._rings is None else self._rings.rows(0, n)
        return _Part(self._state.rows(0, n), self._logits[:n], sampler, rings)

    # Slots

    @torch.inference_mode()
    def set_adapter(self, slot: int, number: int) -> None:
        """Sets the adapter of a slot: 0 is none. It stays until the next call."""
        if self._adapters[slot] != number:
            assert self._adapter_of is not None
            self._adapters[slot] = number
            self._adapter_of[slot : slot + 1].fill_(number)

    def _adapter_rows(self, start: int, end: int) -> Tensor | None:
        """The numbers of these rows' adapters."""
        return None if self._adapter_of is None else self._adapter_of[start:end]

    @torch.inference_mode()
    def load(self, slot: int, state: SavedState | None) -> None:
        """Sets the state of a slot; None is the state before any token."""
        if state is None:
            self._slot_states[slot].zero_()
        else:
            self._slot_states[slot].copy_(state.model_state)
            self._logits[slot : slot + 1].copy_(state.logits)

    @torch.inference_mode()
    def load_start(self, slot: int) -> None:
        """Sets a slot to the state that prompts start from, as `prefill` does with `fresh`."""
        number = self._adapters[slot]
        self._compute_start(number)
        self._slot_states[slot].copy_(self._slot_states[self._start + number])
        self._logits[slot : slot + 1].copy_(self._start_logits[number])

    @torch.inference_mode()
    def saved(self, slot: int, back: int = 0) -> SavedState:
        """A copy of a slot's state, as it was before the last `back` tokens.

        These must be tokens of the latest pass of `verify`, and not its first: tokens before them
        may have been folded.
        """
        if back:
            assert self._drafting is not None
            position = self._drafting.kept[slot : slot + 1] - 1 - back
            logits = self._drafting.logits[slot].index_select(0, position)
        else:
            logits = self._logits[slot : slot + 1].clone()
        return SavedState(self.config, self._copy_of(slot, back), logits)

    def _copy_of(self, slot: int, back: int = 0) -> ModelState:
        """A copy of a slot's state, with the tokens of its ring but the last `back`."""
        if slot in self._replayed:
            assert self._rings is not None
            return folded_copy(self._slot_states[slot], self._rings.rows(slot, slot + 1), back)
        assert not back
        return self._slot_states[slot].clone()

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Moves a running request to another slot."""
        self.set_adapter(target, self._adapters[source])
        self._slot_states[target].copy_(self._copy_of(source))
        self._logits[target].copy_(self._logits[source])
        self._sampler.move_row(source, target)
        self._stop_ring(source)
        self._start_ring(target)

    def stop(self, slot: int) -> None:
        """Stops decoding in a slot: later steps do not change it."""
        self._sampler.clear_row(slot)
        self._stop_ring(slot)

    def _start_ring(self, slot: int) -> None:
        """From now on the slot is decoded, from the state that it has."""
        self._decoding.add(slot)
        if self._rings is not None:
            self._rings.folded[slot : slot + 1].copy_(self._state.tokens_seen[slot : slot + 1])

    def _stop_ring(self, slot: int) -> None:
        """From now on the slot is not decoded."""
        self._decoding.discard(slot)
        self._replayed.discard(slot)

    def _replays(self, n: int) -> bool:
        """True if steps of this many slots go by replay. With drafts, those of a CPU do not."""
        if self._rings is None or self._replay_from is None or n < self._replay_from:
            return False
        return self._on_gpu or self._drafting is None

    def _note_replay(self) -> None:
        """Notes that the next launch adds tokens to the rings."""
        self._replaying = True
        self._replayed |= self._decoding

    def _way(self, n: int) -> StepWay:
        """How the next step of this many slots reads its tokens.

        The first step after a pass with drafts folds all rings: they may hold more tokens than a
        step by replay expects. So does the first step that does not go by replay. Later ones write
        the states.
        """
        after_pass, self._after_pass = self._after_pass, False
        if self._replays(n) and not after_pass:
            self._note_replay()
            return "replay"
        way: StepWay = "fold" if self._replaying else "write"
        self._replaying = False
        return way

    def _ways(self, n: int) -> list[StepWay]:
        """All ways in which steps of this many slots may read."""
        if self._replays(n):
            return ["replay"] if self._drafting is None else ["replay", "fold"]
        return ["write"] if self._rings is None else ["write", "fold"]

    # Prefill

    @torch.inference_mode()
    def prefill(self, rows: Sequence["PrefillRow"]) -> None:
        """Reads tokens into slots, each slot at most once."""
        longest = max(len(row.tokens) for row in rows)
        single = longest == 1 and self._is_cheaper_as_step(rows)
        if single or not self._on_gpu:
            for row in rows:
                if row.fresh:
                    self.load_start(row.slot)
        if single:
            self._read_single({row.slot: row.tokens[0] for row in rows})
            return
        if not self._on_gpu:
            for row in rows:
                tokens, state = torch.tensor([row.tokens]), self._slot_states[row.slot]
                adapter = self._adapter_rows(row.slot, row.slot + 1)
                vectors = self.model.read(tokens, state, None, None, adapter)
                self._logits[row.slot : row.slot + 1] = self.model.logits(vectors)
            return
        for row in rows:
            if row.fresh:
                self._compute_start(self._adapters[row.slot])
        count, size, has_graph = _prefill_bucket(len(rows), longest)
        unused = PrefillRow(self._start, (), fresh=True)
        padded = [*rows, *[unused] * (count - len(rows))]
        inputs = [
            token for row in padded for token in (*row.tokens, *[0] * (size - len(row.tokens)))
        ]
        inputs += [len(row.tokens) for row in padded]
        starts = [self._start + self._adapters[row.slot] for row in padded]
        inputs += [
            start if row.fresh else row.slot for row, start in zip(padded, starts, strict=True)
        ]
        inputs += [row.slot for row in padded]
        if not has_graph:
            self._prefill(on_device(inputs, self.device), count, size)
            return
        if ("prefill", count, size) not in self._graphs:
            self._capture_prefill(count, size)
        copy_to(self._inputs[: len(inputs)], inputs)
        self._graphs["prefill", count, size].replay()

    def _is_cheaper_as_step(self, rows: Sequence[PrefillRow]) -> bool:
        """True if single tokens should be read as in decoding, which computes unused slots too."""
        computed = self.bucket(max(row.slot for row in rows) + 1)
        return not self._on_gpu or len(rows) > _ROWS[-1] or computed <= 4 * len(rows)

    def _prefill(self, inputs: Tensor, count: int, size: int) -> None:
        tokens, lengths, *slots = inputs.split([count * size, count, count, count])
        adapter = self._adapter_of
        if adapter is not None:
            adapter = adapter.index_select(0, slots[1])
        tokens = tokens.view(count, size)
        vectors = self.model.read(tokens, self._state, lengths, Slots(*slots), adapter)
        self._logits.index_copy_(0, slots[1], self.model.logits(vectors))

    def _capture_prefill(self, count: int, size: int) -> None:
        inputs = self._inputs[: count * (size + 3)]
        inputs.zero_()  # lengths of 0: states stay as they are
        inputs[-2 * count :].fill_(self._start)
        self._capture(("prefill", count, size), partial(self._prefill, inputs, count, size))

    def _compute_start(self, number: int) -> None:
        """Reads the model's first token into the start row of an adapter, once."""
        if not self._has_start[number]:
            row = self._start + number
            token = torch.tensor([[self.config.bos_token_id]], device=self.device)
            adapter = self._adapter_rows(row, row + 1)
            vectors = self.model.read(token, self._slot_states[row], None, None, adapter)
            self._start_logits[number] = self.model.logits(vectors)
            self._has_start[number] = True

    def _read_single(self, tokens: dict[int, int]) -> None:
        """One token per slot, computed as in decoding but without sampling."""
        n = self.bucket(max(tokens) + 1)
        if self._on_gpu and ("single", n) not in self._graphs:
            self._single_tokens.fill_(-1)
            self._capture(("single", n), partial(self._single_step, n))
        copy_to(self._single_tokens[:n], [tokens.get(slot, -1) for slot in range(n)])
        if self._on_gpu:
            self._graphs["single", n].replay()
        else:
            self._single_step(n)

    def _single_step(self, n: int) -> None:
        # These slots are not decoded, so their rings do not count.
        self._step(self._parts[n]._replace(rings=None), self._single_tokens[:n], "write")

    def _step(self, part: _Part, tokens: Tensor, way: StepWay) -> None:
        inputs = tokens, part.state, self._adapter_rows(0, len(tokens))
        if part.rings is None:
            self.model.step(*inputs, out=part.logits)
        else:
            assert isinstance(self.model, FusedModel)
            self.model.step(*inputs, part.rings, way, out=part.logits)

    @torch.inference_mode()
    def score(
        self, slot: int, tokens: Sequence[int], targets: Sequence[int], top: int
    ) -> "Results":
        """Reads tokens into a slot and scores the tokens that follow them: all, or all but one.

        The results: log-probabilities of the targets, then values and ids of the `top` most likely
        tokens at each position.
        """
        size = _padded(len(tokens)) if self._on_gpu else len(tokens)
        inputs = on_device([*tokens, *[0] * (size - len(tokens))], self.device)
        lengths = on_device([len(tokens)], self.device) if self._on_gpu else None
        unknown = [0] * (len(tokens) - len(targets))
        wanted = on_device([*targets, *unknown], self.device)
        adapter = self._adapter_rows(slot, slot + 1)
        state = self._slot_states[slot]
        vectors = self.model.vectors(inputs[None], state, lengths, None, adapter)
        vectors = vectors[0, : len(tokens)]
        scores = []
        for x, target in zip(vectors.split(_SCORED), wanted.split(_SCORED), strict=True):
            logits = self.model.logits(x)
            log_total = logits.logsumexp(-1, keepdim=True)
            most_likely = logits.topk(top)
            own = (logits.gather(-1, target[:, None]) - log_total)[:, 0]
            scores.append((own, most_likely.values - log_total, most_likely.indices))
            self._logits[slot : slot + 1] = logits[-1:]
        return Results([torch.cat(parts)[: len(targets)] for parts in zip(*scores, strict=True)])

    # Decode

    def start(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
    ) -> None:
        """Starts sampling in a slot. `sample` then draws its first token."""
        self._sampler.set_row(slot, params, seed=seed, prompt=prompt, output=output)
        self._start_ring(slot)

    def sample(self, slots: Sequence[int]) -> "Results":
        """Draws a token in these slots from their logits. Results are in the order of `slots`."""
        part = self._sampler.sample_rows(self._logits, slots)
        return Results.of(part)

    @torch.inference_mode()
    def decode(self, highest_slot: int) -> "Results":
        """Reads the last token of every running slot and draws the next. Results are by slot."""
        n, needs = self.bucket(highest_slot + 1), self._needs()
        part, way = self._parts[n], self._way(n)
        self._run(("decode", n, needs, way), partial(self._decode, part, needs, way))
        return self._results(n)

    def _decode(self, part: _Part, needs: Needs, way: StepWay) -> None:
        self._step(part, part.sampler.pending, way)
        part.sampler(part.logits, needs)

    def most_drafts(self, highest_slot: int) -> int:
        """How many drafts of a slot the next pass may read. In large batches none pays."""
        return self._most_drafts[self.bucket(highest_slot + 1)]

    def _longest_draft(self, n: int) -> int:
        """How many drafts of a slot a pass that computes n slots may read."""
        if self._drafting is None:
            return 0
        most = self._drafting.drafts.shape[1]
        if not self._on_gpu:
            return most
        # As many tokens as the products for few rows take: most of the time of a pass is that of
        # reading the weights.
        positions = MAX_ROWS // n
        return min(most, max((size for size in _POSITIONS if size <= positions), default=1) - 1)

    def draft_cost(self, drafting: "ModelRunner | None" = None) -> DraftCost:
        """About what drafts cost, with 8 slots, from times on an H200.

        A pass takes longer than a step by 0.5 steps for a 7B in bfloat16, and by 3 for a 160M. That
        includes the time in which the host waits for the last tokens and finds drafts. The runner
        `drafting` of a draft model takes a step for each token of a draft, and a pass to read what
        was accepted. On a CPU the cost is not known, and 0.
        """
        if not self._on_gpu:
            return DraftCost()
        step, longer = self._step_seconds()
        if drafting is None:
            return DraftCost(longer / step)
        draft_step, draft_longer = drafting._step_seconds()
        return DraftCost((longer + draft_step + draft_longer) / step, draft_step / step)

    def _step_seconds(self) -> tuple[float, float]:
        """About the time of a step, and by how much longer a pass takes."""
        weights = sum(weight.nbytes for weight in self.model.weights())
        blocks = self.config.num_blocks
        return weights / 4e12 + 17e-6 * blocks, 250e-6 + 50e-6 * blocks

    @torch.inference_mode()
    def verify(
        self,
        highest_slot: int,
        drafts: Mapping[int, Sequence[int]],
        masks: Mapping[int, Tensor] | None = None,
    ) -> "Results":
        """As `decode`, and also reads drafts, by slot: tokens that may come after the last one.

        Each position is drawn as `decode` would draw it. A draft is accepted if it equals the token
        drawn at the position before it; then the position after it counts too. Results are those
        of `decode` by slot, then by position. The token −1 comes after a slot's last position.

        `masks`, by slot, say which tokens may be drawn after each draft in slots with a grammar.
        Those after the last token are set by `set_masks`.
        """
        assert self._drafting is not None
        n, needs = self.bucket(highest_slot + 1), self._needs(in_pass=True)
        part = self._parts[n]
        self._note_replay()
        self._after_pass = True
        most = self._drafting.drafts.shape[1]
        positions = 1 + max(map(len, drafts.values()), default=0)
        if self._on_gpu:
            positions = min(most + 1, next(size for size in _POSITIONS if size >= positions))
        given = (drafts.get(slot, ()) for slot in range(n))
        padded = [[*draft, *[-1] * (most - len(draft))] for draft in given]
        copy_to(self._drafting.drafts[:n], padded)
        for slot, mask in (masks or {}).items():
            self._drafting.allowed[slot, : len(mask)] = to_device(mask, self.device)
        key = "verify", n, positions, needs
        self._run(key, partial(self._verify, part, positions, needs))
        return self._results(n, positions)

    def _verify(self, part: _Part, positions: int, needs: Needs) -> None:
        assert self._drafting is not None
        assert part.rings is not None
        assert isinstance(self.model, FusedModel)
        sampler, n, found = part.sampler, len(part.logits), self._drafting
        drafts = found.drafts[:n, : positions - 1]
        # 1. Read the last token and the drafts.
        tokens, lengths = self.model.operations.pass_tokens(sampler.pending, drafts)
        rows = Pass(part.rings.folded, part.state.tokens_seen, lengths, part.rings.interval)
        adapter = self._adapter_rows(0, n)
        logits = self.model.read_drafts(tokens, part.state, rows, part.rings, adapter)
        # 2. Draw the tokens.
        allowed = found.allowed[:n, : positions - 1]
        drawn = sampler.sample_drafts(logits, drafts, needs, allowed)
        found.kept[:n] = drawn.kept
        found.tokens[:n, :positions] = drawn.tokens
        # 3. Keep the logits: those after the last token that was right, and all for `saved`.
        every = found.logits[:n, :positions]
        self.model.operations.keep_logits(logits, drawn.kept, part.logits, every)
        # 4. Count the tokens that were right. The others stay in the ring until they are replaced.
        self.model.advance(rows, drawn.kept)

    # `decode` in two parts, for batches with grammars: the masks are computed in between.

    @torch.inference_mode()
    def forward(self, highest_slot: int) -> None:
        """Reads the last token of every running slot."""
        n = self.bucket(highest_slot + 1)
        part, way = self._parts[n], self._way(n)
        self._run(("forward", n, way), partial(self._step, part, part.sampler.pending, way))

    def set_masks(self, slots: Sequence[int], masks: Tensor) -> None:
        """Sets which tokens may be drawn next in slots with a grammar: see `Sampler.set_masks`."""
        self._sampler.set_masks(slots, masks)

    @torch.inference_mode()
    def draw(self, highest_slot: int) -> "Results":
        """Draws the next token of every running slot after `forward`. Results are by slot."""
        n, needs = self.bucket(highest_slot + 1), self._needs(grammar=True)
        part = self._parts[n]
        self._run(("draw", n, needs), partial(part.sampler, part.logits, needs))
        return self._results(n)

    def _results(self, n: int, positions: int = 0) -> "Results":
        """The tokens of the first n slots, and log-probabilities of those slots that want them.

        With `positions`, those of the latest pass.
        """
        tokens = self._sampler.tokens[:n]
        if positions:
            assert self._drafting is not None
            tokens = self._drafting.tokens[:n, :positions]
        slots = self._sampler.scored_rows(n)
        if not slots:
            return Results([tokens])
        rows, count = slots, self._sampler.needs.logprobs
        if positions:
            assert self._drafting is not None
            width = self._drafting.tokens.shape[1]
            rows = [slot * width + position for slot in slots for position in range(positions)]
        self._score_rows(rows, in_pass=bool(positions))
        found = self._scored
        parts = [found.logprob, found.top_logprobs[:, :count], found.top_tokens[:, :count]]
        parts = [part[: len(rows)] for part in parts]
        if positions:
            parts = [part.unflatten(0, (len(slots), positions)) for part in parts]
        return Results([tokens, *parts], slots)

    def _score_rows(self, rows: Sequence[int], *, in_pass: bool) -> None:
        """Log-probabilities of the tokens drawn in these rows; of a pass, slot by slot."""
        size = len(rows)
        if self._on_gpu:
            size = min(n for n in (*_SCORED_ROWS, len(self._scored.rows)) if n >= size)
        copy_to(self._scored.rows[:size], [*rows, *[0] * (size - len(rows))])
        self._run(("logprobs", size, in_pass), partial(self._score_drawn, size, in_pass))

    def _score_drawn(self, size: int, in_pass: bool) -> None:
        logits, tokens = self._logits, self._sampler.tokens
        if in_pass:
            assert self._drafting is not None
            logits, tokens = self._drafting.logits.flatten(0, 1), self._drafting.tokens.flatten()
        rows = self._scored.rows[:size]
        drawn = tokens.index_select(0, rows).clamp(min=0)[:, None]  # some rows drew none
        most = self._scored.top_tokens.shape[1]
        own, top_logprobs, top_tokens = token_logprobs(logits.index_select(0, rows), drawn, most)
        self._scored.logprob[:size] = own
        self._scored.top_logprobs[:size] = top_logprobs
        self._scored.top_tokens[:size] = top_tokens

    def _run(self, key: Any, work: Callable[[], None]) -> None:
        """Runs work that changes only live slots, on a GPU as a graph, captured if it is new."""
        if not self._on_gpu:
            work()
            return
        if key not in self._graphs:
            pending = self._sampler.pending.clone()
            self._sampler.pending.fill_(-1)  # no slot is live while capturing: nothing changes
            self._capture(key, work)
            self._sampler.pending.copy_(pending)
        self._graphs[key].replay()

    def bucket(self, slots: int) -> int:
        """How many slots a decode step computes if the first `slots` are in use."""
        return self._buckets[slots]

    def _needs(self, *, grammar: bool = False, in_pass: bool = False) -> Needs:
        """The sampling work of the next step: what the slots need, or a graph that covers it.

        Without log-probabilities: `_results` computes those. `grammar`: a graph for grammars, also
        if the last request with one has just ended.
        """
        needs = self._sampler.needs._replace(logprobs=None)
        if not self._on_gpu:
            return needs
        return _covering(needs._replace(grammar=grammar or needs.grammar), in_pass=in_pass)

    # CUDA graphs

    @torch.inference_mode()
    def warm_up(self, chunk_tokens: int) -> None:
        """Compiles kernels and captures the graphs that serving needs. No slot may be in use."""
        for number in range(len(self._has_start)):
            self._compute_start(number)
        if not self._on_gpu:
            return
        self._single_tokens.fill_(-1)
        grammars = find_spec("llguidance") is not None
        for n, part in self._parts.items():
            self._capture(("single", n), partial(self._single_step, n))
            for needs in _NEEDS:
                for way in self._ways(n):
                    work = partial(self._decode, part, needs, way)
                    self._capture(("decode", n, needs, way), work)
            for needs in (*_NEEDS, *(_GRAMMAR_PASS_NEEDS if grammars else ())):
                for positions in _POSITIONS:
                    if positions <= self.most_drafts(n - 1) + 1:
                        work = partial(self._verify, part, positions, needs)
                        self._capture(("verify", n, positions, needs), work)
            if grammars:
                for way in self._ways(n):
                    work = partial(self._step, part, part.sampler.pending, way)
                    self._capture(("forward", n, way), work)
                for needs in _GRAMMAR_NEEDS:
                    self._capture(("draw", n, needs), partial(part.sampler, part.logits, needs))
        self._scored.rows.zero_()
        for in_pass in (False, True) if self._drafting is not None else (False,):
            largest = max(n * (self.most_drafts(n - 1) + 1) if in_pass else n for n in self._parts)
            for size in {min(n, len(self._scored.rows)) for n in _SCORED_ROWS}:
                if size < 2 * largest:
                    work = partial(self._score_drawn, size, in_pass)
                    self._capture(("logprobs", size, in_pass), work)
        longest = max(chunk_tokens + chunk_tokens // 4, _MAX_GRAPH_TOKENS)
        self._capture_prefills(longest, _ROW_TOKENS[-1])
        torch.cuda.synchronize(self.device)

    def _capture_prefills(self, alone: int, together: int) -> None:
        """Those of one row of up to `alone` tokens, and of several of up to `together` each."""
        for size in _ONE_ROW:
            if size <= alone:
                self._capture_prefill(1, size)
        for count in _ROWS if self.slots > 1 else ():
            for size in _ROW_TOKENS:
                if size <= together and count * size <= _MAX_GRAPH_TOKENS:
                    self._capture_prefill(count, size)

    def _capture(self, key: Any, work: Callable[[], None]) -> None:
        """Runs the work once, which compiles its kernels, then records it as a graph."""
        if not self.model.uses_graphs:
            self._graphs[key] = _NoGraph(work)
            return
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=self._graph_memory,
            stream=self._capture_stream,
            capture_error_mode="thread_local",  # other threads may use the device meanwhile
        ):
            work()
        self._graphs[key] = graph


@cache  # for every step
def _covering(needs: Needs, *, in_pass: bool = False) -> Needs:
    """The first kind of sampling graph that covers these needs, which are without logprobs."""
    kinds: tuple[Needs, ...] = _NEEDS
    if needs.grammar:
        kinds = _GRAMMAR_PASS_NEEDS if in_pass else _GRAMMAR_NEEDS
    return next(kind for kind in kinds if Needs.union([kind, needs]) == kind)


_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def stream_for(owner: object, device: torch.device) -> torch.cuda.Stream:
    """A stream for captures that no other living owner has.

    For every stream with a matrix product PyTorch keeps a cuBLAS workspace of 32 MiB, forever. So
    the streams of owners that are gone are used again. Living owners do not share one: their
    graphs may run at the same time, and graphs of one stream share counters.
    """
    idle = _idle_streams.setdefault(device, [])
    stream = idle.pop() if idle else torch.cuda.Stream(device)
    weakref.finalize(owner, idle.append, stream)
    return stream


def _prefill_bucket(rows: int, tokens: int) -> tuple[int, int, bool]:
    """Rows and tokens that this batch is padded to, and whether there is a graph for that shape."""
    counts, sizes = ((1,), _ONE_ROW) if rows == 1 else (_ROWS, _ROW_TOKENS)
    count = next((n for n in counts if n >= rows), None)
    size = next((n for n in sizes if n >= tokens), None)
    if count is None or size is None or count * size > _MAX_GRAPH_TOKENS:
        return rows, _padded(tokens), False
    return count, size, True


def _padded(tokens: int) -> int:
    """Rounds up to a multiple of 64: Triton would compile the kernels again for odd lengths."""
    return -(-tokens // 64) * 64


class Results:
    """Tensors on their way to the host.

    `scored` are the rows of the first tensor, the tokens, that the others have. None: all rows.
    """

    def __init__(self, tensors: Sequence[Tensor], scored: Sequence[int] | None = None) -> None:
        self.scored = None if scored is None else {row: n for n, row in enumerate(scored)}
        on_gpu = tensors[0].is_cuda
        self._copies = [to_device(t, "cpu") if on_gpu else t.clone() for t in tensors]
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record()

    @classmethod
    def of(cls, sampler: Sampler) -> "Results":
        """The sampled tokens, and their log-probabilities if some row wants them."""
        tensors, count = [sampler.tokens], sampler.needs.logprobs
        if count is not None:
            best = sampler.top_logprobs[:, :count], sampler.top_tokens[:, :count]
            tensors += [sampler.logprob, *best]
        return cls(tensors)

    def lists(self) -> list[list[Any]]:
        """The values. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return [copy.tolist() for copy in self._copies]
