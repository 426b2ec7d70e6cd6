"""A small random model, and a driver that steps an engine and collects what it returns."""

from collections.abc import Callable, Iterable
from functools import lru_cache

import pytest
import torch
from hypothesis import strategies as st
from models import assert_states_match

from xlstm7b.generate import Completion, Engine, Request, RequestOutput, SamplingParams
from xlstm7b.generate import engine as engine_module
from xlstm7b.generate import runner as runner_module
from xlstm7b.generate.draft_model import DraftRunner
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.request import Prompt
from xlstm7b.generate.runner import ModelRunner
from xlstm7b.generate.scheduler import PrefillLimits
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

# In float32 the logits of `spread_model` differ by at most 2e-4 from float64's, and by another
# rounding error for each way of cutting a prompt: two ways may differ by twice that.
ROUNDING = 4e-4

# Prompts of up to 240 tokens with many shared prefixes, at block borders and elsewhere.
token_lists = st.lists(st.integers(0, 2), max_size=6).map(
    lambda parts: [token for part in parts for token in [part] * 40]
)


def new_engine(model: XLSTM, **options: object) -> Engine:
    return Engine(model, ByteTokenizer(), **options)


def greedy(prompt: Prompt, tokens: int = 12, **params: object) -> Request:
    """A new request at temperature 0. Keyword arguments are sampling parameters."""
    return Request(prompt, SamplingParams(max_new_tokens=tokens, temperature=0, **params))


def run_alone(model: XLSTM, request: Request, **options: object) -> Completion:
    """The completion of a request in an engine of one slot, without a prefix cache."""
    driver = Driver(_engine_of_one_slot(model, **options))
    driver.add(request)
    driver.finish()
    assert is_idle(driver.engine)
    return driver.completion(request)


@lru_cache(maxsize=4)
def _engine_of_one_slot(model: XLSTM, **options: object) -> Engine:
    """One engine for all requests that run alone: making an engine takes longer than they do."""
    return new_engine(model, slots=1, **options)


def copy_of(request: Request, **changes: object) -> Request:
    """A new request with the same arguments, or with some of them replaced."""
    names = (
        "prompt", "params", "state", "keep_state", "prompt_logprobs", "prefill_only",
        "previous_prompt", "previous_output", "adapter", "speculate", "history",
        "cache_salt",
    )  # fmt: skip
    options = {name: getattr(request, name) for name in names} | changes
    return Request(options.pop("prompt"), options.pop("params"), **options)


class Driver:
    """Steps an engine, and collects the outputs of each request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[Request, list[RequestOutput]] = {}

    def add(self, request: Request) -> Request:
        self.engine.add_request(request)
        self.outputs[request] = []
        return request

    def add_all(self, requests: Iterable[Request]) -> list[Request]:
        return [self.add(request) for request in requests]

    def step(self, count: int = 1) -> None:
        """Some steps, or fewer if there is nothing left to do."""
        for _ in range(count):
            if not self.engine.has_requests:
                return
            for output in self.engine.step():
                before = self.outputs[output.request]
                assert not any(earlier.finished for earlier in before), "output after the last"
                before.append(output)

    def finish(self, limit: int = 5000) -> None:
        """Steps until every request is finished."""
        for _ in range(limit):
            if not self.engine.has_requests:
                return
            self.step()
        raise AssertionError(f"the engine was not idle after {limit} steps")

    def token_ids(self, request: Request) -> list[int]:
        """The tokens returned so far."""
        return [token for output in self.outputs[request] for token in output.token_ids]

    def error(self, request: Request) -> Exception | None:
        outputs = self.outputs[request]
        return outputs[-1].error if outputs else None

    def completion(self, request: Request) -> Completion:
        """The completion; checks that the outputs add up to it."""
        merged = RequestOutput.merge(self.outputs[request])
        assert merged.error is None, merged.error
        assert merged.completion is not None
        completion = merged.completion
        assert merged.text == completion.text
        assert [*merged.token_ids] == completion.token_ids
        assert [*merged.logprobs] == (completion.logprobs or [])
        assert [*merged.top_logprobs] == (completion.top_logprobs or [])
        assert completion.cached_tokens == request.cached_tokens
        return completion


def assert_same_completion(got: Completion, want: Completion) -> None:
    """Two ways to the same output: log-probabilities and states differ by rounding."""
    assert (got.text, got.token_ids) == (want.text, want.token_ids)
    assert (got.finish_reason, got.prompt_tokens) == (want.finish_reason, want.prompt_tokens)
    assert (got.logprobs is None) == (want.logprobs is None)
    assert (got.top_logprobs is None) == (want.top_logprobs is None)
    if want.logprobs is not None:
        assert got.logprobs == pytest.approx(want.logprobs, abs=ROUNDING)
    if want.top_logprobs is not None:
        assert [[*top] for top in got.top_logprobs] == [[*top] for top in want.top_logprobs]
    assert (got.state is None) == (want.state is None)
    if want.state is not None:
        assert_states_match(got.state, want.state, ROUNDING)


def is_idle(engine: Engine) -> bool:
    """True if all slots are free and nothing of any request is left."""
    scheduler, stats = engine._scheduler, engine.stats()
    nothing_left = not engine.has_requests and not engine._in_flight and not engine._finishing
    all_free = scheduler._free == set(range(engine.slots))
    sampling = bool((engine._runner._sampler.pending >= 0).any())
    return nothing_left and all_free and not sampling and not (stats.running or stats.waiting)


class ImmediateExecutor:
    """Runs work when it is submitted. In `prefix_cache`, files are then written at once."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, work, *arguments) -> None:
        work(*arguments)

    def shutdown(self) -> None:
        pass


class GraphRunner(ModelRunner):
    """A runner that works on a CPU as it would on a GPU: buckets, padded batches, graphs.

    A graph is the work itself. As on a GPU, recording it runs the work once.
    """

    class Graph:
        def __init__(self, work: Callable[[], None]) -> None:
            self.replay = work

    def __init__(self, model: FusedModel, slots: int, **options: object) -> None:
        super().__init__(model, slots, **options)
        self._on_gpu = True
        self._make_parts(runner_module._SLOT_BUCKETS)
        inputs = runner_module._MAX_GRAPH_TOKENS + 3 * runner_module._ROWS[-1]
        self._inputs = torch.zeros(inputs, dtype=torch.long)

    def _capture(self, key: object, work: Callable[[], None]) -> None:
        work()
        self._graphs[key] = self.Graph(work)


class GraphDraftRunner(GraphRunner, DraftRunner):
    """The same of a draft model."""


def gpu_like_engine(model: XLSTM, **options: object) -> Engine:
    """An engine on a CPU that does what it does on a GPU: batches of prompts, one step ahead."""

    def limits(device: torch.device, *arguments: object) -> PrefillLimits:
        return runner_module.prefill_limits(torch.device("cuda"), *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "ModelRunner", GraphRunner)
        patch.setattr(engine_module, "DraftRunner", GraphDraftRunner)
        patch.setattr(engine_module, "prefill_limits", limits)
        engine = new_engine(model, **options)
    engine._run_ahead = True
    if options.get("replay") is None:  # from some number of slots on, as with the GPU's kernels
        engine._runner._replay_from = 16
    return engine
