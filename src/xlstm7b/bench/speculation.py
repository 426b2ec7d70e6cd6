"""How fast an engine generates if each draft is right with a given probability.

The weights are random but for the embedding and the head: the token after t is always t + 1. So the
drafts can be right or wrong as often as wanted. The engine verifies them as always. Its output is
checked: no draft changes it.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from unittest.mock import patch

import torch

from xlstm7b.bench.cases import Result
from xlstm7b.bench.measure import (
    GREEDY,
    attempt,
    measure_steps,
    plan_generator,
    random_prompts,
    release,
)
from xlstm7b.bench.plans import Generation
from xlstm7b.generate.draft_model import Speculation
from xlstm7b.generate.drafts import MAX_DRAFT, DraftLength
from xlstm7b.model import XLSTM

_SHARES = (0.0, 0.5, 0.8, 1.0)  # of right drafts
_PROMPT_TOKENS = 16
_EMBEDDING_STD = 30.0  # all blocks together add less to the residual stream
_HIGHEST_LOGIT = 20.0  # others are a few
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 are spread evenly


def results(model: XLSTM, plan: Generation) -> Iterator[Result]:
    """For each batch size: without speculation, with drafts that adapt, with all that fit."""
    make_predictable(model)
    works = [("no speculation", None, False), ("p = 0, lengths adapt", 0.0, True)]
    works += [(f"p = {share:g}, up to {MAX_DRAFT} drafts", share, False) for share in _SHARES]
    for batch in plan.batches:
        plain = None
        for work, share, adapts in works:
            case = Result("speculation", work=work, batch=batch, length=_PROMPT_TOKENS)
            run = partial(_timed, model, plan, share, adapts, plain)
            # `ValueError`: too many slots
            result = attempt(case, run, ValueError, RuntimeError)
            plain = plain or result.seconds
            yield result
            release(plan.device)


def _timed(
    model: XLSTM,
    plan: Generation,
    share: float | None,
    adapts: bool,
    plain: float | None,
    case: Result,
) -> Result:
    vocab_size = plan.config.vocab_size
    prompts = random_prompts(vocab_size, case.batch, case.length)
    speculate: Speculation = None if share is None else "lookup"
    generator = plan_generator(model, plan, case.batch, speculate=speculate)
    drafted = accepted = 0

    def generate(tokens: int) -> None:
        nonlocal drafted, accepted
        for prompt, done in zip(
            prompts, generator.generate(prompts, max_new_tokens=tokens, **GREEDY), strict=True
        ):
            if done.token_ids != following(prompt[-1], tokens, vocab_size):
                raise RuntimeError("the output is not what the model generates")
            drafted, accepted = drafted + done.drafted_tokens, accepted + done.accepted_tokens

    drafter = partial(ForcedDrafts, vocab_size, share, adapts)
    with patch("xlstm7b.generate.drafts.LookupText", drafter):
        seconds, spread = measure_steps(generate, plan.device, seconds=plan.seconds, base=64)
    figures = {"spread": spread}
    if drafted:
        figures["accepted"] = 100 * accepted / drafted
    if plain is not None:
        figures["of_plain"] = plain / seconds
    speed = case.batch / seconds
    return Result(
        case.part,
        work=case.work,
        batch=case.batch,
        length=case.length,
        seconds=seconds,
        tokens_per_second=speed,
        figures=figures,
    )


@torch.no_grad()
def make_predictable(model: XLSTM) -> None:
    """Changes the embedding and the head so that the token after t is t + 1, with any state."""
    embedding, head = model.backbone.embeddings.weight, model.lm_head.weight
    assert isinstance(head, torch.Tensor)
    embedding.normal_(std=_EMBEDDING_STD)
    scale = _HIGHEST_LOGIT / (_EMBEDDING_STD * embedding.shape[1])
    head.copy_(embedding.roll(1, 0)).mul_(scale)


def following(token: int, count: int, vocab_size: int) -> list[int]:
    """The tokens that a predictable model generates after this one."""
    return [(token + 1 + n) % vocab_size for n in range(count)]


class ForcedDrafts:
    """Stands in for `LookupText`: each draft is right with a probability."""

    unindexed = 0

    def __init__(
        self, vocab_size: int, share: float | None, adapts: bool, tokens: Sequence[int]
    ) -> None:
        self._vocab_size, self._share, self._last = vocab_size, share or 0.0, tokens[-1]
        self._length = DraftLength() if adapts else None
        self._passes = 0

    @property
    def wanted(self) -> int:
        return MAX_DRAFT if self._length is None else self._length.next

    @property
    def accepted_share(self) -> float:
        return 1.0 if self._length is None else self._length.accepted_share

    def propose(self, most: int) -> list[int]:
        right = following(self._last, max(0, min(most, self.wanted)), self._vocab_size)
        count = self._right_tokens(len(right))
        return [*right[:count], *((token + 1) % self._vocab_size for token in right[count:])]

    def _right_tokens(self, length: int) -> int:
        """How many tokens of the next draft are right, before the first that is wrong.

        At least n are with probability pⁿ. The numbers are spread evenly, not random, and the same
        for all requests. So a few passes have their mean, and requests end together.
        """
        self._passes += 1
        if self._share in (0, 1):
            return int(length * self._share)
        level = self._passes * _GOLDEN % 1
        return min(length, int(math.log(1 - level) / math.log(self._share)))

    def record(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self._last = tokens[-1] if tokens else self._last
        if self._length is not None:
            self._length.record(drafted, accepted, len(tokens))
