"""Drafts by a small model with the same vocabulary.

The draft model keeps a state for each slot of the engine: that after the text without any draft. A
draft continues it greedily. The draft's own tokens are read into rings (see `mlstm/replay.py`) that
are not folded before the draft ends. So the state does not change, and a rejected draft needs no
way back. The tokens that were accepted are read into the state before the next draft, in one pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from xlstm7b import accounting
from xlstm7b.checkpoint import read_config, resolve
from xlstm7b.config import ModelConfig
from xlstm7b.devices import as_current
from xlstm7b.generate.drafts import DraftCost, Drafter, DraftLength
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.replay import INTERVAL
from xlstm7b.generate.request import Request
from xlstm7b.generate.runner import ModelRunner, PrefillRow, Results
from xlstm7b.generate.sampler import copy_to
from xlstm7b.generate.state import state_bytes
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.tokenizer import AnyTokenizer, model_tokenizer

Speculation = Literal["lookup"] | XLSTM | None
CONTEXT = 4096  # tokens of a text that the draft model reads when an output starts: the latest
LONGEST = 8  # tokens of one draft: each takes a step of the draft model
_ROWS, _SHORT = 16, 64  # texts that are read together, and the most tokens of each


def open_speculation(
    speculate: str | Path | None,
    config: ModelConfig,
    tokenizer: AnyTokenizer,
    chosen: str | Path | None = None,
) -> Literal["lookup"] | Path | None:
    """Checks "lookup", None, or the folder or hub id of a draft model, and returns its folder.

    Reads no weights. `ValueError` if the folder is missing, or if its vocabulary or tokenizer is
    not that of the model. `chosen` is a tokenizer for a folder that holds none.
    """
    if speculate is None:
        return None
    if speculate == "lookup":  # the folder of that name is ./lookup
        return "lookup"
    if not isinstance(speculate, str | Path):  # from Python: True, or a model
        kind = type(speculate).__name__
        raise ValueError(f'speculate must be "lookup", a folder, a hub id or None, not {kind}')
    try:
        folder = resolve(speculate)
    except ValueError as error:
        raise ValueError(
            f'there is no draft model: {error} (to guess from the text so far, use "lookup")'
        ) from error
    try:
        own = read_config(folder)
        _check_vocabulary(own, config)
        chosen = None if (folder / "tokenizer.json").exists() else chosen
        text = model_tokenizer(folder, own, chosen)
    except ValueError as error:
        raise ValueError(f"{folder} cannot be the draft model: {error}") from error
    if text.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{folder} cannot be the draft model: it has another tokenizer than the model "
            f"(fingerprints {text.fingerprint[:12]} and {tokenizer.fingerprint[:12]})"
        )
    return folder


def load_speculation(
    opened: Literal["lookup"] | Path | None, dtype: torch.dtype | None, device: torch.device
) -> Speculation:
    """Reads the weights of a draft model that `open_speculation` found."""
    if not isinstance(opened, Path):
        return opened
    try:
        draft = XLSTM.from_pretrained(opened, dtype=dtype, device=device)
    except ValueError as error:
        raise ValueError(f"{opened} cannot be the draft model: {error}") from error
    for name, tensor in draft.named_parameters():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{opened} cannot be the draft model: {name} has values that are not finite"
            )
    return draft


def check_draft_model(draft: XLSTM, model: XLSTM) -> None:
    """Raises a `ValueError` if a model cannot draft for another."""
    _check_vocabulary(draft.config, model.config)
    if chosen := draft.config.other_classes():
        names = ", ".join(f"{kind} = {name!r}" for kind, name in chosen.items())
        raise ValueError(f"a draft model needs the fused path, which does not know {names}")
    devices = [next(one.parameters()).device for one in (draft, model)]
    if devices[0] != devices[1]:
        raise ValueError(f"the draft model is on {devices[0]}, the model on {devices[1]}")


def _check_vocabulary(draft: ModelConfig, model: ModelConfig) -> None:
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens, the model one of "
            f"{model.vocab_size}: a draft model needs the same"
        )


def draft_bytes(draft: XLSTM) -> int:
    """What a slot of the draft model takes."""
    config, itemsize = draft.config, next(draft.parameters()).dtype.itemsize
    rings = accounting.ring_bytes(config, INTERVAL, itemsize)
    return state_bytes(config) + rings + 16 * config.vocab_size  # the last: as in `fitting_slots`


class DraftRunner(ModelRunner):
    """A `ModelRunner` that also continues slots without changing their states."""

    def __init__(self, model: FusedModel, slots: int) -> None:
        super().__init__(model, slots, replay=True)
        if not self._first_logits().isfinite().all():
            raise ValueError(
                "the draft model's logits are not numbers: its weights are damaged, or overflow in "
                "this dtype"
            )
        # Row r is folded when the number of its tokens plus r is a multiple of `INTERVAL`. So a
        # ring that starts with these numbers is not folded for that many tokens.
        assert LONGEST < INTERVAL
        self._empty = -torch.arange(slots, device=self.device) % INTERVAL
        self._seen = self._empty.clone()  # tokens of each row, counted from there
        self._left = torch.zeros_like(self._seen)  # tokens of each row to draft yet
        # The latest tokens are in the last column. −1: the row drafts no more.
        self._drafts = torch.full((slots, LONGEST), -1, device=self.device)

    @torch.inference_mode()
    def _first_logits(self) -> Tensor:
        """The logits after the first token of every text."""
        state = ModelState.zeros(self.config, 1, device=self.device)
        token = torch.tensor([[self.config.bos_token_id]], device=self.device)
        with as_current(self.device):
            return self.model.logits(self.model.read(token, state))

    @torch.inference_mode()
    def draft(self, lengths: Mapping[int, int]) -> dict[int, list[int]]:
        """Greedy continuations of these slots, by slot. Their states and logits stay."""
        n, longest = self.bucket(max(lengths) + 1), max(lengths.values())
        if self._on_gpu and ("draft", n, False) not in self._graphs:
            self._capture_drafts(n)
        left = [lengths.get(slot, 0) for slot in range(n)]
        copy_to(self._left[:n], left)
        for number in range(longest):
            is_first = number == 0
            self._run(("draft", n, is_first), partial(self._draft, n, is_first))
        (found,) = Results([self._drafts[:n, LONGEST - longest :]]).lists()
        return {slot: found[slot][:length] for slot, length in lengths.items()}

    def _draft(self, n: int, is_first: bool) -> None:
        """The next token of rows that have tokens left to draft."""
        part, last = self._parts[n], self._drafts[:n, -1]
        assert part.rings is not None
        logits: Tensor
        if is_first:
            self._seen[:n] = self._empty[:n]
            part.rings.folded.copy_(self._empty[:n])
            logits = part.logits
        else:
            assert isinstance(self.model, FusedModel)
            state = part.state._replace(tokens_seen=self._seen[:n])
            logits = self.model.step(last, state, rings=part.rings)
        token = torch.where(self._left[:n] > 0, logits.argmax(-1), -1)
        self._left[:n] -= 1
        self._drafts[:n] = torch.cat([self._drafts[:n, 1:], token[:, None]], 1)

    def _capture_drafts(self, n: int) -> None:
        self._left.zero_()  # no row drafts while capturing
        for is_first in (True, False):
            self._capture(("draft", n, is_first), partial(self._draft, n, is_first))

    @torch.inference_mode()
    def warm_up(self, chunk_tokens: int) -> None:
        """Captures the graphs that drafts need. No slot may be in use."""
        self._compute_start(0)
        if not self._on_gpu:
            return
        self._single_tokens.fill_(-1)
        for n in self._parts:
            self._capture(("single", n), partial(self._single_step, n))
            self._capture_drafts(n)
        self._capture_prefills(chunk_tokens, _SHORT)
        torch.cuda.synchronize(self.device)


@dataclass
class _Text:
    """A text that the draft model continues."""

    unread: list[int]  # tokens that its state has not read
    length: DraftLength
    is_new: bool = True  # it has read none
    drafted: int = 0  # tokens of the latest draft, until its pass is recorded


class ModelDrafter(Drafter):
    """Drafts by a model. Slots are those of the engine.

    A prompt is read when the output starts, `chunk_tokens` in each step, also if the engine took
    its state from a cache. Until it is read, the request has no drafts. Drafts are made only if
    they are expected to pay (`DraftCost.is_paid_by`).
    """

    def __init__(self, runner: DraftRunner, chunk_tokens: int, cost: DraftCost) -> None:
        self._runner, self._chunk_tokens, self._cost = runner, chunk_tokens, cost
        self._texts: dict[Request, _Text] = {}

    def start(self, request: Request, tokens: Sequence[int]) -> None:
        config = self._runner.config
        unread = [*tokens[-CONTEXT:]]
        if config.force_bos_token_insert and unread[:1] == [config.bos_token_id]:
            del unread[0]  # every text starts from the state after it
        self._texts[request] = _Text(unread, DraftLength(LONGEST, self._cost))

    def prepare(self) -> None:
        pass  # `propose` reads new texts, on the device

    def wants_to_draft(self, most: Mapping[Request, int]) -> bool:
        return bool(self._lengths(most))

    def propose(self, most: Mapping[Request, int]) -> dict[Request, list[int]]:
        lengths = self._lengths(most)
        self._read([*lengths])
        lengths = {one: n for one, n in lengths.items() if not self._texts[one].unread}
        if not lengths or not self._pays(lengths, len(most)):
            return {}
        for request, length in lengths.items():
            self._texts[request].drafted = length
        found = self._runner.draft({request.slot: length for request, length in lengths.items()})
        return {request: found[request.slot] for request in lengths}

    def _lengths(self, most: Mapping[Request, int]) -> dict[Request, int]:
        """How many tokens to draft for each request; for none, if that would not pay."""
        asked = {one: min(n, self._texts[one].length.next) for one, n in most.items() if n > 0}
        lengths = {request: length for request, length in asked.items() if length > 0}
        return lengths if self._pays(lengths, len(most)) else {}

    def _pays(self, lengths: Mapping[Request, int], batch: int) -> bool:
        drafts = ((n, self._texts[one].length.accepted_share) for one, n in lengths.items())
        return self._cost.is_paid_by(drafts, batch)

    def _read(self, requests: Sequence[Request]) -> None:
        """Reads what the draft model lacks of these texts. Of long parts, a chunk in all."""
        budget, short = self._chunk_tokens, []
        for request in requests:
            text = self._texts[request]
            count = len(text.unread)
            if count > _SHORT:
                count = min(count, budget)
                budget -= count
            if not count:
                continue
            row = PrefillRow(request.slot, text.unread[:count], fresh=text.is_new)
            if count > _SHORT:
                self._runner.prefill([row])
            else:
                short.append(row)
            del text.unread[:count]
            text.is_new = False
        for start in range(0, len(short), _ROWS):
            self._runner.prefill(short[start : start + _ROWS])

    def record(self, request: Request, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        text = self._texts[request]
        text.unread += tokens
        # A grammar may have cut the draft. It cost as much as a whole one.
        text.length.record(text.drafted, accepted, len(tokens))
        text.drafted = 0

    def move(self, request: Request, slot: int) -> None:
        if request in self._texts:
            self._runner.load(slot, self._runner.saved(request.slot))

    def stop(self, request: Request) -> None:
        self._texts.pop(request, None)

    def warm_up(self) -> None:
        self._runner.warm_up(self._chunk_tokens)
