"""Generator: prompts in, completions out. It drives an `Engine` in the caller's thread."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from xlstm7b.checkpoint import read_config, resolve
from xlstm7b.config import ModelConfig
from xlstm7b.devices import default_dtype, float_dtype, to_device
from xlstm7b.generate.draft_model import Speculation, load_speculation, open_speculation
from xlstm7b.generate.engine import Engine, check_speculation, to_state_dtype
from xlstm7b.generate.fusable import check_language_model, difference
from xlstm7b.generate.params import SamplingParams
from xlstm7b.generate.request import (
    LOGITS_ARE_BAD,
    Completion,
    Prompt,
    Request,
    RequestOutput,
    RequestStatus,
    is_prompt,
)
from xlstm7b.generate.state import SavedState
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import load_adapted
from xlstm7b.quantize.config import Quantization
from xlstm7b.tokenizer import Tokenizer, model_tokenizer

ShouldStop = Callable[[], bool]
Progress = Callable[[int], None]


class Generator:
    """A model and its tokenizer, ready to generate.

    At most `batch_size` requests run at a time. C of the state is kept in `state_dtype`. The
    model's weights are stacked in place (`FusedModel`); it can still be trained and saved. A model
    with adapters, hooks or other layers needs `fused=False`, which calls the model itself. `replay`
    and `speculate` are those of `Engine`.
    """

    def __init__(
        self,
        model: XLSTM,
        tokenizer: Tokenizer,
        *,
        state_dtype: torch.dtype | str = torch.float32,
        batch_size: int = 32,
        fused: bool = True,
        replay: bool | None = None,
        speculate: Speculation = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.state_dtype = to_state_dtype(state_dtype)
        check_language_model(model)
        check_speculation(speculate, model)
        _check_decoding(model, fused, replay, speculate)
        self.model, self.tokenizer = model, tokenizer
        self.batch_size, self.fused = batch_size, fused
        self.replay, self.speculate = replay, speculate
        self._idle: dict[int, Engine] = {}
        self._layers: _Layers | None = None  # of the model that the idle engines have
        self._model_version = 0

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        tokenizer: str | Path | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        quantize: str | Quantization | None = None,
        adapter: str | Path | None = None,
        state_dtype: torch.dtype | str = torch.float32,
        batch_size: int = 32,
        speculate: str | Path | None = None,
    ) -> Self:
        """Loads a checkpoint folder or hub id with its tokenizer.

        By default on a GPU in bfloat16 if there is one; else on the CPU in the stored dtype.
        `revision`, `subfolder` and `quantize` are those of `XLSTM.from_pretrained`. `adapter` is a
        LoRA adapter of the weights: a folder in PEFT's format, or a hub id. `speculate` is
        "lookup", or the folder or hub id of a draft model.
        """
        where = to_device(device)
        weights_dtype = default_dtype(where) if dtype is None else float_dtype(dtype)
        to_state_dtype(state_dtype)  # before anything is read
        folder = resolve(folder_or_hub_id, revision=revision, subfolder=subfolder)
        config = read_config(folder)
        text = model_tokenizer(folder, config, tokenizer)
        opened = open_speculation(speculate, config, text, tokenizer)
        model = load_adapted(folder, adapter, dtype=weights_dtype, device=where, quantize=quantize)
        return cls(
            model,
            text,
            state_dtype=state_dtype,
            batch_size=batch_size,
            speculate=load_speculation(opened, weights_dtype, where),
        )

    def generate(
        self,
        prompts: str | Sequence[Prompt] | None = None,
        *,
        state: SavedState | None = None,
        num_return_sequences: int = 1,
        keep_state: bool = False,
        done: Callable[[int, Completion], None] | None = None,
        should_stop: ShouldStop | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Continues every prompt, `num_return_sequences` times each, in the prompts' order.

        `sampling` are fields of `SamplingParams`, or `do_sample=False` for temperature 0. With
        `state`, prompt r is read on top of its row r; without prompts, its rows are continued as
        they are. With `keep_state` each completion carries its final state. `done` and
        `should_stop` are as in `run`.
        """
        requests = self._requests(prompts, state, SamplingParams.from_options(**sampling))
        if num_return_sequences < 1:
            raise ValueError(f"num_return_sequences must be at least 1, not {num_return_sequences}")
        for request in requests:
            request.keep_state = keep_state
        if num_return_sequences > 1:
            return self._run_copies(requests, num_return_sequences, done, should_stop)
        return self.run(requests, done=done, should_stop=should_stop)

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        state: SavedState | None = None,
        keep_state: bool = False,
        should_stop: ShouldStop | None = None,
        progress: Progress | None = None,
        history: Sequence[int] = (),
        **sampling: Any,
    ) -> Iterator[RequestOutput]:
        """Continues one prompt; an output for each step, the last with the completion.

        A step adds one token; with speculation, one or several.

        A mistake raises here, not at the first output. `should_stop` is polled at every step: True
        ends the text after its latest token. `progress` is called with the number of prompt tokens
        just read. `history` is that of `Request`. Closing the iterator aborts the request.
        """
        prompts = None if prompt is None else [prompt]
        requests = self._requests(prompts, state, SamplingParams.from_options(**sampling))
        if len(requests) != 1:
            raise ValueError(f"one request can be streamed, not {len(requests)}")
        requests[0].keep_state, requests[0].history = keep_state, history
        return (output for _, output in self._outputs(requests, should_stop, progress))

    def read(
        self,
        prompts: str | Sequence[Prompt],
        *,
        state: SavedState | None = None,
        progress: Progress | None = None,
    ) -> SavedState:
        """Reads prompts, on top of a state if there is one; returns the state after them.

        `progress` is called with the number of tokens just read.
        """
        return SavedState.cat(
            self._read(self._requests(prompts, state, SamplingParams()), progress)
        )

    def run(
        self,
        requests: Sequence[Request],
        *,
        done: Callable[[int, Completion], None] | None = None,
        should_stop: ShouldStop | None = None,
    ) -> list[Completion]:
        """Completes requests, at most `batch_size` at a time; completions in the same order.

        `done` is called with a request's index and completion as soon as it is there.
        `should_stop` is polled at every step. True ends running requests after their latest token
        and drops waiting ones, which then have no completion.
        """
        completed: dict[int, Completion] = {}
        for index, output in self._outputs(requests, should_stop):
            if output.completion is not None:
                completed[index] = output.completion
                if done is not None:
                    done(index, output.completion)
        return [completed[index] for index in sorted(completed)]

    def refresh(self) -> None:
        """The next call uses the model as it is then.

        Calls notice by themselves that the config, a module, a hook or a parameter or its `data`
        was replaced, and that a parameter was changed in place, as optimizers do. Call this after a
        change that leaves no such trace: values written in place through `parameter.data` or
        another tensor of the same memory, and changed attributes of modules, such as `norm.eps`. A
        stream that is open must be read to its end, or closed, before the model is changed.
        """
        self._layers = None
        self._idle.clear()
        self._model_version += 1

    def _run_copies(
        self,
        requests: Sequence[Request],
        count: int,
        done: Callable[[int, Completion], None] | None,
        should_stop: ShouldStop | None,
    ) -> list[Completion]:
        """Completes `count` copies of each request, in order."""
        prepare = partial(Request.prepare, config=self.config, tokenizer=self.tokenizer)
        for request in requests:
            request.prefill_only = True
            prepare(request, shareable=len(requests) > 1)
        copies = _Copies(requests, count, self.batch_size, prepare)
        copies.read_prompts()
        completed: dict[int, Completion] = {}
        slots = min(count * len(requests), self.batch_size)
        for _, output in self._steps(copies.queue, should_stop, None, slots):
            if output.completion is not None:
                if output.request.prefill_only:
                    copies.add(output.request, output.completion)
                else:
                    index, completion = copies.complete(output.request, output.completion)
                    completed[index] = completion
                    if done is not None:
                        done(index, completion)
            copies.read_prompts()
        return [completed[index] for index in sorted(completed)]

    def _read(self, requests: Sequence[Request], progress: Progress | None) -> list[SavedState]:
        """The state after each prompt. One look at the logits after them waits for the device."""
        reads = [
            Request(request.prompt, request.params, state=request.state, prefill_only=True)
            for request in requests
        ]
        states: dict[int, SavedState] = {}
        for index, output in self._outputs(reads, None, progress):
            assert output.completion is not None
            assert output.completion.state is not None
            states[index] = output.completion.state
        found = [states[index] for index in range(len(reads))]
        largest = torch.stack([state.logits.amax() for state in found])  # NaN, if there is one
        if not (largest < torch.inf).all():
            raise FloatingPointError(LOGITS_ARE_BAD)
        return found

    def _requests(
        self,
        prompts: str | Sequence[Prompt] | None,
        state: SavedState | None,
        params: SamplingParams,
    ) -> list[Request]:
        """One request per prompt, each with its row of the state."""
        if prompts is None:
            if state is None:
                raise ValueError("there is nothing to continue: give a prompt or a state")
            prompts = [()] * len(state)
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            prompts = [prompts]
        prompts = list(prompts)
        if not prompts:
            raise ValueError("there are no prompts")
        if not all(map(is_prompt, prompts)):
            raise ValueError("prompts must be a list of strings or of lists of ids")
        if state is None:
            return [Request(prompt, params) for prompt in prompts]
        state.check_model(self.config)
        if len(state) != len(prompts):
            raise ValueError(f"prompts: {len(prompts)}, but the state's rows: {len(state)}")
        rows = [state] if len(state) == 1 else [state.select([row]) for row in range(len(state))]
        return [
            Request(prompt, params, state=row) for prompt, row in zip(prompts, rows, strict=True)
        ]

    def _outputs(
        self,
        requests: Sequence[Request],
        should_stop: ShouldStop | None,
        progress: Progress | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Checks the requests now; then, when iterated, runs them to the end."""
        for request in requests:
            # A single prompt shares its prefix with no other.
            request.prepare(self.config, self.tokenizer, shareable=len(requests) > 1)
        return self._steps(requests, should_stop, progress, min(len(requests), self.batch_size))

    def _steps(
        self,
        requests: Sequence[Request],
        should_stop: ShouldStop | None,
        progress: Progress | None,
        slots: int,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Runs requests to the end. The caller may append more of them after each output."""
        if not requests:
            return
        indices: dict[Request, int] = {}
        with self._engine(slots) as engine:
            try:
                read, is_stopping = 0, False
                while True:
                    for request in () if is_stopping else requests[len(indices) :]:
                        indices[request] = len(indices)
                        engine.add_request(request)
                    if not engine.has_requests:
                        break
                    outputs = engine.step()
                    if progress is not None:
                        position = sum(_prompt_tokens_read(request) for request in requests)
                        if position > read:
                            progress(position - read)
                        read = position
                    for output in outputs:
                        if output.error is not None:
                            raise output.error
                        yield indices[output.request], output
                    if should_stop is not None and should_stop():
                        is_stopping = True
                        for request in requests:
                            if request.status is RequestStatus.WAITING:
                                engine.abort(request)
                            elif request.output is not None and request.output.token_ids:
                                engine.finish(request)
            finally:
                for request in requests:
                    engine.abort(request)

    @contextmanager
    def _engine(self, slots: int) -> Iterator[Engine]:
        """An engine with this many slots that no other call uses: two streams may be read in turn.

        Two idle engines are kept: one with one slot, and the last one with more. An engine that
        raised an error, or was interrupted, is not used again. No engine is after the model has
        changed: engines keep states that were computed with it, and are fused with its layers.
        """
        if self._layers is not None and self._layers.have_changed():
            self.refresh()
        version = self._model_version
        engine = self._idle.pop(slots, None)
        if engine is None:
            # Freed first, to make room for the new one.
            self._idle = {rows: kept for rows, kept in self._idle.items() if rows == 1}
            engine = Engine(
                self.model,
                self.tokenizer,
                slots=slots,
                state_dtype=self.state_dtype,
                long_gaps=1.0,  # all outputs are for one caller: throughput counts
                fused=self.fused,
                replay=self.replay,
                speculate=self.speculate,
            )
            self._layers = _Layers(self.model)  # now: the engine has moved weights to stack them
        try:
            yield engine
        except GeneratorExit:  # the caller closed the stream
            self._keep(slots, engine, version)
            raise
        self._keep(slots, engine, version)

    def _keep(self, slots: int, engine: Engine, version: int) -> None:
        if version == self._model_version:  # else the model changed while a stream was open
            self._idle[slots] = engine


def _check_decoding(model: XLSTM, fused: bool, replay: bool | None, speculate: Speculation) -> None:
    """A `ValueError` for choices that no engine of this model can have together."""
    if speculate is not None and replay is False:
        raise ValueError(
            "speculation needs replay decoding, which replay=False turns off: leave out one of them"
        )
    chosen = model.config.other_classes()
    if (speculate is not None or replay) and (chosen or not fused):
        needy = "replay decoding" if speculate is None else "speculation"
        names = ", ".join(f"{kind} = {name!r}" for kind, name in chosen.items())
        why = f"does not know {names} of this model" if chosen else "fused=False turns off"
        raise ValueError(f"{needy} needs the fused path, which {why}: leave {needy} out")
    reason = difference(speculate) if isinstance(speculate, XLSTM) else None
    if reason is not None:
        raise ValueError(
            f"the draft model cannot be used: {reason}, which the fused path would ignore, and "
            "drafts need that path: undo this change of the draft model, or give another one"
        )


class _Copies:
    """Copies of requests, which start from the state after their prompt. It is read once.

    The next prompt is read when fewer copies wait than there are slots. So the states in memory are
    those of the next copies, however many prompts there are.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        count: int,
        slots: int,
        prepare: Callable[[Request], Request],
    ) -> None:
        """`requests` are prepared, and read their prompts only."""
        self._count, self._slots, self._prepare = count, slots, prepare
        self.queue: list[Request] = []  # prompts and copies in the order in which they run
        self._unread = deque(enumerate(requests))
        self._reading: dict[Request, int] = {}  # the number of each prompt
        self._waiting: deque[Request] = deque()  # copies without a slot
        self._copies: dict[Request, tuple[int, Completion]] = {}  # index, and what read the prompt

    def read_prompts(self) -> None:
        """Adds prompts to the queue, if their copies are needed next."""
        while self._waiting and self._waiting[0].status is not RequestStatus.WAITING:
            self._waiting.popleft()
        while self._unread:
            if len(self._waiting) + self._count * len(self._reading) >= self._slots:
                break
            number, request = self._unread.popleft()
            self._reading[request] = number
            self.queue.append(request)

    def add(self, request: Request, read: Completion) -> None:
        """Adds the copies of a request whose prompt was read."""
        assert read.state is not None
        seconds = time.monotonic() - request.admitted
        speed = len(request.prompt_token_ids) / max(seconds, 1e-9)
        index = self._count * self._reading.pop(request)
        start = Request(
            (),
            request.params,
            state=read.state,
            keep_state=request.keep_state,
            previous_prompt=request.prompt_token_ids,
        )
        self._prepare(start)  # once: a prompt may be long
        read = replace(read, state=None, prompt_tokens_per_second=speed)
        for n in range(self._count):
            copy = start.with_seed_offset(n)
            self._copies[copy] = index + n, read
            self._waiting.append(copy)
            self.queue.append(copy)

    def complete(self, copy: Request, completion: Completion) -> tuple[int, Completion]:
        """The index of a copy, and its completion with the properties of the prompt."""
        index, read = self._copies.pop(copy)
        return index, replace(
            completion,
            prompt_tokens=read.prompt_tokens,
            prompt_tokens_per_second=read.prompt_tokens_per_second,
        )


class _Layers:
    """A model's config, modules, parameters and hooks: `have_changed` later compares them.

    Every call of the generator compares all modules, 518 in the 7B, before the GPU has any work. So
    the dicts to look at are collected once, and no Python code runs for a single module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, [*model.modules()]
        self._parameters = [*model.parameters()]
        self._counting = [p for p in self._parameters if not p.is_inference()]
        attributes = [vars(module) for module in self._modules]
        children = [own[name] for own in attributes for name in ("_modules", "_parameters")]
        hooks = [own[f"_forward{kind}"] for own in attributes for kind in ("_hooks", "_pre_hooks")]
        self._sized = [*attributes, *children, *hooks]
        self._children = [*filter(None, children)]
        # Ids and addresses are safe: no new object gets those of one that is kept.
        self._kept = [*chain.from_iterable(map(dict.values, self._children))]
        self._memory = [parameter.data for parameter in self._parameters]
        self._before = self._now()

    def have_changed(self) -> bool:
        """True if the config or the memory of a weight is another one, or a weight was changed.

        Also if a module got another class, layer, weight or hook, or a `forward` of its own.
        """
        return self._now() != self._before

    def _now(self) -> list[object]:
        found: list[object] = [self._model.config]
        found += map(type, self._modules)
        found += map(len, self._sized)
        found += map(id, chain.from_iterable(map(dict.values, self._children)))
        found += map(Tensor.data_ptr, self._parameters)
        found += map(attrgetter("_version"), self._counting)
        return found


def _prompt_tokens_read(request: Request) -> int:
    """The number of prompt tokens that were read, with the first token."""
    if request.position < 0:
        return 0
    return request.position + len(request.prompt_token_ids) - len(request.read_token_ids)
