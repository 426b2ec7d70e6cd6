"""Which source each sample of a run comes from: named sources with weights."""

import heapq
import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

LONGEST_PERIOD = 65_536


class Mixture:
    """A periodic schedule: the source of sample s depends on s alone.

    For every n, a source with share p gives more than p·n − 1 and fewer than p·n + 1 of the first n
    samples. Weights need not sum to 1 and are taken as written (0.1 is exactly a tenth). If the
    shares have no common denominator up to 65,536, each is rounded to a multiple of 1/65,536;
    `shares` holds the shares that are used.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        if not weights:
            raise ValueError("a mixture needs at least one source")
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"source {name!r} has weight {weight}; a weight must be above 0")
        self.names = tuple(weights)
        exact = [Fraction(str(weight)) for weight in weights.values()]
        quotas = _quotas([weight / sum(exact) for weight in exact])
        period = sum(quotas)
        for name, quota in zip(self.names, quotas, strict=True):
            if not quota:
                raise ValueError(
                    f"source {name!r} has less than 1/{period} of the total weight: raise its "
                    "weight or remove the source"
                )
        self.shares = {
            name: Fraction(quota, period) for name, quota in zip(self.names, quotas, strict=True)
        }
        self._quotas = np.array(quotas)
        self._sources, self._ranks = _schedule(quotas)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each sample: the number of its source in `names`, and its index in that source."""
        periods, slots = np.divmod(samples, len(self._sources))
        sources = self._sources[slots]
        return sources, periods * self._quotas[sources] + self._ranks[slots]


def _quotas(shares: list[Fraction]) -> list[int]:
    """Samples of each source per period. Largest remainders get what rounding down leaves."""
    period = min(math.lcm(*(share.denominator for share in shares)), LONGEST_PERIOD)
    quotas = [math.floor(share * period) for share in shares]
    remainders = [quota - share * period for quota, share in zip(quotas, shares, strict=True)]
    by_remainder = sorted(range(len(shares)), key=remainders.__getitem__)
    for source in by_remainder[: period - sum(quotas)]:
        quotas[source] += 1
    return quotas


def _schedule(quotas: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One period: the source of each slot, and how often that source was drawn before it.

    To stay within one sample of its share, draw j (from 0) of a source must be in slots
    ⌊j/p⌋ … ⌈(j+1)/p⌉ − 1. Choosing the open draw with the earliest deadline meets every deadline
    (P-fair scheduling: Baruah et al. 1996; Tijdeman's chairman assignment, 1980).
    """
    period = sum(quotas)
    sources, ranks = np.empty(period, np.int64), np.empty(period, np.int64)
    drawn = [0] * len(quotas)
    waiting = [(0, source) for source in range(len(quotas))]  # by the first slot allowed
    ready: list[tuple[int, int]] = []  # by deadline
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            source = heapq.heappop(waiting)[1]
            deadline = -(-(drawn[source] + 1) * period // quotas[source])
            heapq.heappush(ready, (deadline, source))
        deadline, source = heapq.heappop(ready)
        assert slot < deadline
        sources[slot], ranks[slot] = source, drawn[source]
        drawn[source] += 1
        heapq.heappush(waiting, (drawn[source] * period // quotas[source], source))
    return sources, ranks
