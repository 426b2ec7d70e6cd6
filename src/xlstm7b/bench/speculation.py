"""How fast an engine generates if each draft is right with a given probability.

The weights are random but for the embedding and the head: the token after t is always t + 1. So the
drafts can be right or wrong as often as wanted. The engine verifies them as always. Its output is
checked: no draft changes it.
"""

import math
from collections.abc import Sequence

import torch

from xlstm7b.generate.drafts import MAX_DRAFT, DraftLength
from xlstm7b.model import XLSTM

_EMBEDDING_STD = 30.0  # all blocks together add less to the residual stream
_HIGHEST_LOGIT = 20.0  # others are a few
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 are spread evenly


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
