"""Engine: continuous batching. Call `add_request`, then `step()` until all requests are finished.

    engine = Engine(model, tokenizer, slots=8)
    engine.add_request(Request("The sea was", SamplingParams(max_new_tokens=20)))
    while engine.has_requests:
        for output in engine.step():
            print(output.text, end="")

The engine has no thread of its own. `Generator` drives one in the caller's thread, the server in a
thread (`serve/engine_thread.py`).
"""

import logging
import math
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from xlstm7b import accounting
from xlstm7b.compiling import when_compiled
from xlstm7b.config import ModelConfig
from xlstm7b.devices import as_current
from xlstm7b.generate.draft_model import (
    LONGEST,
    DraftRunner,
    ModelDrafter,
    Speculation,
    check_draft_model,
    draft_bytes,
)
from xlstm7b.generate.drafts import MAX_DRAFT, Drafter, LookupDrafter
from xlstm7b.generate.fusable import check_language_model
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.prefix_cache import DiskLevel, Level, PrefixCache, weights_fingerprint
from xlstm7b.generate.replay import ring_sizes
from xlstm7b.generate.request import (
    LOGITS_ARE_BAD,
    Completion,
    HashedTokens,
    Request,
    RequestOutput,
    RequestStatus,
)
from xlstm7b.generate.runner import (
    MAX_SLOTS,
    ModelRunner,
    PrefillRow,
    Results,
    fitting_slots,
    has_rings,
    prefill_limits,
)
from xlstm7b.generate.scheduler import PrefillChunk, Scheduler
from xlstm7b.generate.state import SavedState, StateStore, state_bytes
from xlstm7b.generate.structured import StructuredOutputError, draft_masks, next_masks
from xlstm7b.generate.unfused import UnfusedModel
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import Adapter
from xlstm7b.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_SHARED_STATES = 4  # kept even without a prefix cache, for prefixes that waiting requests share

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and the current load."""

    slots: int
    running: int  # requests that hold a slot
    waiting: int
    prompt_tokens: int  # read by the model, with the first token of each prompt
    generated_tokens: int
    cached_tokens: int  # prompt tokens that came from the prefix cache
    cache_hits: dict[Level, int]
    cache_bytes: dict[Level, int]
    steps: int
    seconds: float  # in all steps
    model_seconds: float  # of that, launching the model and waiting for it
    request_seconds: float  # how long a request holds a slot: a moving average
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of the drafted ones, those that became output


@dataclass(eq=False)
class _Step:
    """A launched step, or a pass with drafts, that draws tokens in rows."""

    results: Results
    rows: Sequence[tuple[int, Request]]
    drafts: Mapping[int, Sequence[int]] | None = None
    values: list[list[Any]] | None = None  # None until the host has received them

    def tokens(self, row: int) -> list[int]:
        """The tokens of a row. A pass may draw several."""
        assert self.values is not None
        found = self.values[0][row]
        return [token for token in (found if self.drafts else [found]) if token != -1]

    def logprobs(self, row: int, number: int) -> list[Any]:
        """The log-probabilities of one of its tokens, if they were computed."""
        assert self.values is not None
        scored = self.results.scored
        if scored is not None:
            if row not in scored:
                return []
            row = scored[row]
        return [part[row][number] if self.drafts else part[row] for part in self.values[1:]]


class Engine:
    """Generates for many requests at once. Not thread-safe: one thread calls it.

    slots: requests that run at a time. Default: as many as fit into GPU memory, 8 on a CPU.
    prefill_tokens: prompt tokens that one step reads while other requests generate. Prompts are cut
        at multiples of it.
    long_gaps: share of the gaps between tokens that may be longer, because many requests wait and
        a step reads more. 1 gives the best throughput.
    cache_bytes, host_cache_bytes, cache_folder, cache_folder_bytes: the prefix cache. It stores a
        state every `cache_interval` tokens, at the ends of prompts and outputs, and where prompts
        start to differ. Without one, only prompts that wait at the same time share their prefix.
    fused: True computes from stacked weights (`FusedModel`), and refuses a model whose layers are
        not those of `XLSTM`. False calls the model itself (`UnfusedModel`), which is slower. A
        model whose config names other classes always runs so.
    replay: whether decode steps read states without writing them (docs/generation.md). By default
        they do on a GPU in batches that are large enough, so that it saves time.
    speculate: guesses the next tokens of each request, and verifies them in one pass. The output is
        the same, and takes less time if the guesses are right. "lookup" finds them in the request's
        own text; an `XLSTM` is a small model with the same tokenizer that generates them.
    adapters: LoRA adapters. Each request may name one of them, and all run in one batch.
    """

    def __init__(
        self,
        model: XLSTM,
        tokenizer: Tokenizer,
        *,
        slots: int | None = None,
        state_dtype: torch.dtype | str = torch.float32,
        prefill_tokens: int = 512,
        long_gaps: float = 0.01,
        cache_bytes: int = 0,
        host_cache_bytes: int = 0,
        cache_folder: Path | None = None,
        cache_folder_bytes: int = 1 << 34,
        cache_interval: int = 2048,
        fused: bool = True,
        replay: bool | None = None,
        speculate: Speculation = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        sizes = {"prefill_tokens": prefill_tokens, "cache_interval": cache_interval}
        for name, size in {**sizes, "slots": 1 if slots is None else slots}.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        state_dtype = to_state_dtype(state_dtype)
        check_language_model(model)
        check_speculation(speculate, model)
        if fused and model.config.other_classes():
            _log_unfused(model.config)
            fused = False
        if adapters and not fused:
            raise ValueError("several adapters need the fused path, which this model does not have")
        self._adapters = {one.fingerprint: number for number, one in enumerate(adapters, 1)}
        computed = FusedModel(model, adapters) if fused else UnfusedModel(model)
        self.config, self.tokenizer, self.state_dtype = model.config, tokenizer, state_dtype
        self.device, self.dtype = computed.device, computed.dtype
        device_bytes = max(cache_bytes, _SHARED_STATES * state_bytes(self.config, state_dtype))
        started = len(adapters) * state_bytes(self.config, state_dtype)
        drafts, rings = 0 if speculate is None else MAX_DRAFT, 0
        if has_rings(computed, slots or MAX_SLOTS, replay, drafts):
            size = ring_sizes(drafts)["size"]
            rings = accounting.ring_bytes(self.config, size, self.dtype.itemsize)
        if drafts:  # logits of all positions of a pass
            rings += 4 * (drafts + 1) * self.config.vocab_size
        if isinstance(speculate, XLSTM):
            rings += draft_bytes(speculate)
        self.slots = fitting_slots(
            self.config, self.device, state_dtype, slots, device_bytes + started, rings
        )
        self.slot_bytes = state_bytes(self.config, state_dtype) + rings
        self._runner = ModelRunner(
            computed, self.slots, state_dtype=state_dtype, replay=replay, drafts=drafts
        )
        self._drafter: Drafter | None = None
        if isinstance(speculate, XLSTM):
            draft_runner = DraftRunner(FusedModel(speculate), self.slots)
            cost = self._runner.draft_cost(draft_runner)
            if cost.least_share(LONGEST) >= 1:
                _LOG.warning(
                    "the draft model is too slow for this model: "
                    "no draft would pay, so none is made"
                )
            self._drafter = ModelDrafter(draft_runner, prefill_tokens, cost)
        elif speculate is not None:
            self._drafter = LookupDrafter(self._runner.draft_cost())
        self._scheduler = Scheduler(
            self.slots,
            prefill_limits(self.device, prefill_tokens, long_gaps),
            cache_interval=cache_interval,
            store_all=bool(cache_bytes or host_cache_bytes or cache_folder),
        )
        disk = None
        if cache_folder is not None:
            store = StateStore(
                cache_folder, self.config, cache_folder_bytes, evict=True, prefix="prefix-"
            )
            described = [self.config.to_dict(), str(self.dtype)]
            fingerprint = weights_fingerprint(described, computed.weights(), state_dtype)
            disk = DiskLevel(store, fingerprint, self.device)
        self._cache = PrefixCache(self.device, device_bytes, host_cache_bytes, disk)
        self._prefill_tokens = prefill_tokens
        # On a GPU the results of a step are processed while the next step runs.
        self._run_ahead = self.device.type == "cuda"
        self._in_flight: deque[Callable[[], None]] = deque()  # process results, oldest first
        self._launched: list[_Step] = []  # those of them that draw tokens
        self._outputs: list[RequestOutput] = []
        self._requests: set[Request] = set()  # added and not finished
        self._finishing: dict[Request, RequestOutput] = {}  # the state lacks their last token
        self._prompt_tokens = self._generated_tokens = self._cached_tokens = self._steps = 0
        self._drafted_tokens = self._accepted_tokens = 0
        self._seconds = self._model_seconds = 0.0
        self._step_model_seconds = 0.0
        self._request_seconds = 1.0

    def add_request(self, request: Request) -> Request:
        """Queues a request. An invalid request raises a `ValueError`."""
        if request.adapter is not None and request.adapter.fingerprint not in self._adapters:
            raise ValueError(f"the engine does not have the adapter {request.adapter.folder}")
        request.prepare(self.config, self.tokenizer)
        if request.status is not RequestStatus.WAITING or request.added:
            raise ValueError("a request can be added once; build a new one")
        request.added = time.monotonic()
        self._requests.add(request)
        self._scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Drops a request and frees its slot. It has no further output.

        Nothing happens to a finished request, nor to a request of another engine.
        """
        if request in self._requests or (not request.added and not request.finished):
            self._release(request, RequestStatus.ABORTED)
        self._outputs = [output for output in self._outputs if output.request is not request]

    def finish(self, request: Request) -> None:
        """Ends a running request after its latest token. `step` returns its completion.

        With speculation, the latest token may be one that `step` has not returned yet.

        Nothing happens to a request that does not run yet, is finished, or is another engine's.
        """
        is_running = request in self._requests and request.status is RequestStatus.RUNNING
        if is_running and request not in self._finishing:
            if self._drafter is not None:
                # A pass may have read drafts that the output lacks. They become output.
                self._process_results(0)
            if not request.finished and request not in self._finishing:
                assert request.output is not None
                self._end(request, RequestOutput(request, request.output.finish("stop")))

    @property
    def has_requests(self) -> bool:
        """True while a request waits, holds a slot, or has output that `step` did not return."""
        scheduler = self._scheduler
        return bool(scheduler.waiting or scheduler.prefilling or scheduler.running or self._outputs)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Reads some prompt tokens and generates one token for every running request.

        With speculation, it generates one or several.

        Returns new outputs. On a GPU these are the results of the previous step, except for first
        tokens. If the model fails, this raises, and the engine is unusable afterwards.
        """
        with as_current(self.device):
            return self._step()

    def _step(self) -> list[RequestOutput]:
        started, self._step_model_seconds = time.perf_counter(), 0.0
        # 1. Give free slots to waiting requests.
        now = time.monotonic()
        for request in self._scheduler.admit():
            request.admitted = now
            if self._drafter is not None and request.speculate and not request.prefill_only:
                before = *request.history, *request.previous_prompt, *request.previous_output
                self._drafter.start(request, [*before, *request.prompt_token_ids])
        # 2. Read prompt chunks; draw the first token of requests whose prompt is complete.
        # 3. Generate one token for every running request. A GPU does this second, so that new
        #    requests join at once; a CPU first, so that a step returns one token of a request.
        if self._run_ahead:
            self._prefill()
            keep = self._decode()
        else:
            keep = self._decode()
            self._prefill()
        # 4. Process results; on a GPU those of the new decode step wait for the next call.
        self._process_results(keep)
        if not self._scheduler.active:
            self._drop_results()  # all of finished requests
        outputs, self._outputs = self._outputs, []
        self._steps += 1
        self._seconds += time.perf_counter() - started
        self._model_seconds += self._step_model_seconds
        return outputs

    def warm_up(self) -> None:
        """Compiles kernels and captures CUDA graphs now instead of during the first requests."""
        assert not self.has_requests
        with as_current(self.device), _compiling_logged(self.device):
            self._runner.warm_up(self._prefill_tokens)
            if self._drafter is not None:
                self._drafter.warm_up()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            slots=self.slots,
            running=len(scheduler.prefilling) + len(scheduler.running),
            waiting=len(scheduler.waiting),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            cached_tokens=self._cached_tokens,
            cache_hits=dict(self._cache.hits),
            cache_bytes=self._cache.nbytes,
            steps=self._steps,
            seconds=self._seconds,
            model_seconds=self._model_seconds,
            request_seconds=self._request_seconds,
        )

    def close(self) -> None:
        """Waits for cached states that are being written to disk."""
        self._cache.close()

    # Prefill

    def _prefill(self) -> None:
        self._scheduler.start_step()
        ready: list[Request] = []  # prompts that are complete
        while batch := self._scheduler.next_prefill(self._restore):
            rows = []
            for chunk in batch:
                request = chunk.request
                tokens = request.read_token_ids[chunk.start : chunk.end]
                fresh = request.starts_after_bos and chunk.start == 0
                self._prompt_tokens += fresh + len(tokens)
                if request.prompt_logprobs is not None and tokens:
                    self._score(chunk, tokens)
                elif tokens:
                    rows.append(PrefillRow(request.slot, tokens, fresh))
                elif fresh:
                    self._runner.load_start(request.slot)
            if rows:
                self._in_model(partial(self._runner.prefill, rows))
            for chunk in batch:
                request = chunk.request
                if chunk.store:
                    assert request.hashed is not None
                    self._cache.add(request.hashed, chunk.end, self._runner.saved(request.slot))
                if chunk.end == len(request.read_token_ids):
                    if request.prefill_only:
                        self._finish_prefill_only(request)
                    else:
                        self._scheduler.start_decoding(request)
                        ready.append(request)
        if ready:
            self._start_decoding(ready)
        if self._drafter is not None:
            self._drafter.prepare()  # while the device computes

    def _restore(self, request: Request) -> None:
        """Loads the state after the longest cached prefix into the slot, or the start state."""
        found, adapter = None, request.adapter
        self._runner.set_adapter(
            request.slot, 0 if adapter is None else self._adapters[adapter.fingerprint]
        )
        if request.hashed is not None:
            found = self._cache.longest(request.hashed, max(request.position, 0))
        if found is not None:
            length, state = found
            self._runner.load(request.slot, state)
            before = request.position + request.starts_after_bos if request.position > 0 else 0
            cached = length + request.starts_after_bos - before
            request.cached_tokens += cached
            self._cached_tokens += cached
            request.position = length
        elif request.position < 0:
            if not request.starts_after_bos:
                self._runner.load(request.slot, request.state)
            request.position = 0

    def _score(self, chunk: PrefillChunk, tokens: Sequence[int]) -> None:
        request = chunk.request
        assert request.prompt_logprobs is not None
        targets = request.prompt_token_ids[chunk.start + 1 : chunk.end + 1]
        score = partial(self._runner.score, request.slot, tokens, targets, request.prompt_logprobs)
        self._in_flight.append(partial(self._process_scores, request, self._in_model(score)))

    def _finish_prefill_only(self, request: Request) -> None:
        scored = request.prompt_logprobs is not None
        state = None
        if request.keep_state or not scored:
            state = self._runner.saved(request.slot)
        finish = partial(self._finish, request, RequestOutput(request), state)
        if scored:  # after its scores have come
            self._scheduler.start_decoding(request)  # nothing is decoded: it waits for its scores
            self._in_flight.append(finish)
        else:
            finish()

    def _start_decoding(self, ready: Sequence[Request]) -> None:
        for request in ready:
            seed, prompt = request.params.seed, request.prompt_token_ids
            self._runner.start(
                request.slot,
                request.params,
                seed=secrets.randbits(64) if seed is None else seed,
                prompt=[*request.previous_prompt, *prompt],
                output=request.previous_output,
            )
        self._set_masks(ready)
        sample = partial(self._runner.sample, [request.slot for request in ready])
        self._launch(_Step(self._in_model(sample), list(enumerate(ready))))

    # Decode

    def _decode(self) -> int:
        """Launches a decode step if one is needed; returns how many results may stay in flight."""
        scheduler = self._scheduler
        requests = scheduler.to_decode()
        # The next step would read one token more of requests that wait for their final state.
        runs_ahead = self._run_ahead and not self._finishing
        if self._wants_to_draft(requests):  # a draft continues the last token
            if any(map(self._needs_text_first, requests)):
                runs_ahead = False
            if runs_ahead:
                for step in self._launched:
                    self._receive(step)
            else:
                self._process_results(0)
            requests = scheduler.to_decode()
        if not requests:
            return 0
        move = scheduler.move_to_front(self._runner.bucket)
        if move is not None:
            moved, slot = move
            self._runner.move(moved.slot, slot)
            if self._drafter is not None:
                self._drafter.move(moved, slot)
            moved.slot = slot
        highest = max(request.slot for request in requests)
        rows = [(request.slot, request) for request in requests]
        drafts, masks = self._propose(highest, requests)
        if drafts:
            self._set_masks(requests)
        for request in requests:
            request.reads += 1
        if drafts:
            results = self._in_model(partial(self._runner.verify, highest, drafts, masks))
            self._launch(_Step(results, rows, drafts))
            return 1 if runs_ahead else 0
        if any(request.matcher is not None for request in requests):
            # A mask depends on the last token. The device computes the next logits while the host
            # processes that token and computes the masks. Only the draw waits for them.
            self._in_model(partial(self._runner.forward, highest))
            self._process_results(0)
            self._set_masks(requests)
            results = self._in_model(partial(self._runner.draw, highest))
        else:
            results = self._in_model(partial(self._runner.decode, highest))
        self._launch(_Step(results, rows))
        return 1 if self._run_ahead and not self._finishing else 0

    def _launch(self, step: _Step) -> None:
        """Notes a step that the device has been given. Its results are processed later."""
        self._launched.append(step)
        self._in_flight.append(partial(self._process_tokens, step))

    def _needs_text_first(self, request: Request) -> bool:
        """True if the text of its last tokens must be known before a pass with drafts.

        An output may end at a stop string. The next pass may fold the tokens after it into the
        state, so that the final state would be lost. A grammar must have read all tokens.
        """
        stops = request.params.stop_strings and self._scheduler.wants_final_state(request)
        return request.matcher is not None or bool(stops)

    def _wants_to_draft(self, requests: Sequence[Request]) -> bool:
        """True if drafts may be found for a request, once its last token is known."""
        if self._drafter is None:
            return False
        most = self._runner.most_drafts(max((request.slot for request in requests), default=0))
        return most > 0 and self._drafter.wants_to_draft(self._draft_lengths(requests, most))

    def _draft_lengths(self, requests: Sequence[Request], most: int) -> dict[Request, int]:
        """The longest draft that each request may have now, of at most this many tokens."""
        lengths = dict.fromkeys(requests, 0)
        for request in requests:
            if request.speculate and request not in self._finishing:
                # The last token of the output is not drafted: every position draws a token. The
                # first token was drawn after the prompt, each other one after a read.
                left = request.params.max_new_tokens - 1 - request.reads
                lengths[request] = max(0, min(most, left - 1))
        return lengths

    def _propose(
        self, highest: int, requests: Sequence[Request]
    ) -> tuple[dict[int, list[int]], dict[int, Tensor]]:
        """The drafts of a pass, and the masks after each draft of requests with a grammar, by slot.

        There are none before the host has received the last tokens.
        """
        drafts: dict[int, list[int]] = {}
        masks: dict[int, Tensor] = {}
        is_known = all(step.values is not None for step in self._launched)
        if self._drafter is None or not is_known:
            return drafts, masks
        most = self._runner.most_drafts(highest)
        lengths = self._draft_lengths(requests, most)
        found = self._in_model(partial(self._drafter.propose, lengths))
        for request, draft in found.items():
            if draft and request.matcher is not None:
                after = draft_masks(request.matcher, draft, pinned=self.device.type == "cuda")
                masks[request.slot], draft = after, draft[: len(after)]
            if draft:
                drafts[request.slot] = draft
        return drafts, masks

    def _set_masks(self, requests: Sequence[Request]) -> None:
        """Sets which tokens the grammars of these requests allow next. Ends those that allow none.

        That is an output without an end-of-text token which is complete.
        """
        requests = [
            request
            for request in requests
            if request.matcher and not request.finished and request not in self._finishing
        ]
        if not requests:
            return
        matchers = [request.matcher for request in requests if request.matcher]
        masks = next_masks(matchers, pinned=self.device.type == "cuda")
        self._runner.set_masks([request.slot for request in requests], masks)
        for request, matcher in zip(requests, matchers, strict=True):
            if matcher.error is not None:
                self._fail(request, matcher.error)
            elif matcher.is_complete:
                assert request.output is not None
                self._end(request, RequestOutput(request, request.output.finish("stop")))

    # Results

    def _process_results(self, keep: int) -> None:
        """Processes results, oldest first, until `keep` are left."""
        while len(self._in_flight) > keep:
            self._in_flight.popleft()()

    def _drop_results(self) -> None:
        self._in_flight.clear()
        self._launched.clear()

    def _receive(self, step: _Step) -> None:
        """Waits for the tokens of a step, and counts them, so that drafts can continue them."""
        if step.values is not None:
            return
        step.values = self._in_model(step.results.lists)
        if self._drafter is None:
            return
        for row, request in step.rows:
            if not request.speculate or request.finished or request in self._finishing:
                continue
            tokens = step.tokens(row)
            drafted, accepted = len((step.drafts or {}).get(row, ())), max(0, len(tokens) - 1)
            if tokens and (tokens[-1] < 0 or tokens[-1] in request.params.eos_token_ids):
                tokens.pop()
            request.reads += accepted
            request.drafted_tokens += drafted
            self._drafted_tokens += drafted
            self._drafter.record(request, tokens, drafted, accepted)

    def _process_tokens(self, step: _Step) -> None:
        """Adds the tokens of a step to their requests. After a pass there may be several each."""
        self._receive(step)
        self._launched.remove(step)
        now = time.monotonic()
        for row, request in step.rows:
            if request.finished:
                continue
            if request in self._finishing:
                self._finish_with_state(request, self._finishing.pop(request))
                continue
            text = request.output
            assert text is not None
            request.first_token = request.first_token or now
            before = len(text.token_ids)
            drawn, used, new_text = step.tokens(row), 0, ""
            try:
                while used < len(drawn) and text.finish_reason is None:
                    token = drawn[used]
                    new_text += text.push(token, *step.logprobs(row, used))
                    used += 1
                    if request.matcher is not None and text.finish_reason != "stop":
                        request.matcher.advance(token)
                        if request.matcher.is_complete:  # nothing but the end of text can follow
                            new_text += text.finish("stop")
            except (FloatingPointError, StructuredOutputError) as error:
                self._fail(request, error)
                continue
            self._generated_tokens += len(text.token_ids) - before
            unused = len(drawn) - used
            accepted = max(0, len(drawn) - 1) - unused
            request.accepted_tokens += accepted
            self._accepted_tokens += accepted
            wanted = request.params.logprobs
            output = RequestOutput(
                request,
                new_text,
                (*text.token_ids[before:],),
                () if wanted is None else (*text.logprobs[before:],),
                (*text.top_logprobs[before:],) if wanted else (),
            )
            if text.finish_reason is None:
                self._outputs.append(output)
            else:
                # The last token drawn was not read. The state has read the others.
                self._end(request, output, back=max(0, unused - 1))

    def _end(self, request: Request, output: RequestOutput, back: int = 0) -> None:
        """Ends an output. If its final state is needed, the last token must be read first.

        The state has read `back` tokens after the last one of the output: accepted drafts.
        """
        assert request.output is not None
        wants_state = self._scheduler.wants_final_state(request)
        if wants_state and request.reads < len(request.output.token_ids):
            self._finishing[request] = output
        elif wants_state:
            self._finish_with_state(request, output, back)
        else:
            self._finish(request, output, None)

    def _finish_with_state(self, request: Request, output: RequestOutput, back: int = 0) -> None:
        assert request.output is not None
        state, tokens = self._runner.saved(request.slot, back), request.output.token_ids
        if tokens and request.hashed is not None and self._scheduler.store_all:
            whole = HashedTokens(tokens, after=request.hashed)
            self._cache.add(whole, len(whole), state)
        self._finish(request, output, state if request.keep_state else None)

    def _process_scores(self, request: Request, results: Results) -> None:
        logprobs, top_logprobs, top_tokens = self._in_model(results.lists)
        if request.finished:
            return
        if any(map(math.isnan, logprobs)):
            self._fail(request, FloatingPointError(LOGITS_ARE_BAD))
        else:
            tops = zip(top_tokens, top_logprobs, strict=True)
            self._outputs.append(
                RequestOutput(
                    request,
                    prompt_logprobs=(*logprobs,),
                    prompt_top_logprobs=tuple(dict(zip(*top, strict=True)) for top in tops),
                )
            )

    def _finish(self, request: Request, output: RequestOutput, state: SavedState | None) -> None:
        if request.finished:
            return
        text, now = request.output, time.monotonic()
        assert text is not None
        first = request.first_token or now
        self._request_seconds += (now - request.admitted - self._request_seconds) / 16
        wanted = request.params.logprobs
        completion = Completion(
            text=text.text,
            token_ids=text.token_ids,
            finish_reason=text.finish_reason or "length",
            prompt_tokens=len(request.prompt_token_ids),
            prompt_tokens_per_second=len(request.prompt_token_ids)
            / max(first - request.admitted, 1e-9),
            tokens_per_second=max(0, len(text.token_ids) - 1) / max(now - first, 1e-9),
            peak_memory=peak_memory(self.device),
            logprobs=None if wanted is None else text.logprobs,
            top_logprobs=text.top_logprobs if wanted else None,
            state=state,
            cached_tokens=request.cached_tokens,
            drafted_tokens=request.drafted_tokens,
            accepted_tokens=request.accepted_tokens,
        )
        self._release(request, RequestStatus.FINISHED)
        self._outputs.append(replace(output, completion=completion))

    def _fail(self, request: Request, error: Exception) -> None:
        self._release(request, RequestStatus.FAILED)
        self._outputs.append(RequestOutput(request, error=error))

    def _release(self, request: Request, status: RequestStatus) -> None:
        """Frees a request's slot and everything it holds."""
        if request.status is RequestStatus.RUNNING:
            self._runner.stop(request.slot)
        if self._drafter is not None:
            self._drafter.stop(request)
        self._scheduler.remove(request)
        self._requests.discard(request)
        self._finishing.pop(request, None)
        if not self._scheduler.active:
            self._drop_results()  # of finished requests only
        request.status, request.state, request.waits_for = status, None, None
        request.matcher = None

    def _in_model(self, work: Callable[[], _Result]) -> _Result:
        """Calls the model, or waits for it, and counts the time."""
        started = time.perf_counter()
        result = work()
        self._step_model_seconds += time.perf_counter() - started
        return result


def to_state_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """One of the two dtypes that C may have, given as such or by its name."""
    allowed = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    for name, found in allowed.items():
        if dtype in (name, found):
            return found
    raise ValueError(f"state_dtype must be float32 or bfloat16, not {dtype!r}")


def check_speculation(speculate: object, model: XLSTM) -> None:
    """Raises a `ValueError` unless this is a way to speculate for a model, or None."""
    if isinstance(speculate, XLSTM):
        check_draft_model(speculate, model)
    elif speculate not in ("lookup", None):
        raise ValueError(f'speculate must be "lookup", a model or None, not {speculate!r}')


@contextmanager
def _compiling_logged(device: torch.device) -> Iterator[None]:
    """Logs that kernels are being compiled, when the first was: others were on disk."""
    compiled = list[str]()

    def note(name: str) -> None:
        if not compiled:
            _LOG.info("compiling kernels, once")
        compiled.append(name)

    with when_compiled(note) if device.type == "cuda" else nullcontext():
        yield


@cache  # once for each model: a Generator builds several engines
def _log_unfused(config: ModelConfig) -> None:
    chosen = [f"{kind} = {name!r}" for kind, name in config.other_classes().items()]
    _LOG.warning(
        "the fused path does not know %s: generation calls the model itself", ", ".join(chosen)
    )


def peak_memory(device: torch.device) -> int:
    """The largest number of bytes in use so far: on the GPU, or of this process. 0: not known."""
    if device.type == "cuda":
        # Not max_memory_allocated, which flattens all statistics first: 0.4 ms.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return int(stats["allocated_bytes"]["all"]["peak"])
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
