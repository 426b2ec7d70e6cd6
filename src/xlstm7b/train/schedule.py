"""Learning rate and batch size as functions of the step.

A step is numbered by the updates made before it: step 0 is the first update, `steps − 1` the last.
As in the authors' code the warm-up starts at 0, so the first update only fills AdamW's averages.
"""

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["exponential", "cosine", "linear", "constant"]


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, a decay, a linear cool-down to zero (paper, appendix B; figure 12).

    With peak α, warm-up W, decay of D steps, factor φ, cool-down of N steps, and t = step − W:

        step < W           α · step / W
        t < D              exponential: α · φ^(t / R), R the `reference`, or D if that is 0
                           cosine:      α · (φ + (1 − φ) (1 + cos(π t / D)) / 2)
                           linear:      α · (1 − (1 − φ) t / D);  constant: α
        t < D + N          linear from the decay's value at t = D to zero
        after              0; without a cool-down, the decay's value at t = D
    """

    peak: float
    kind: Decay
    warmup: int
    decay: int
    cooldown: int
    factor: float = 0.1
    reference: int = 0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * step / self.warmup
        t = step - self.warmup
        if t <= self.decay:
            return self._decayed(t)
        end = self._decayed(self.decay)
        if not self.cooldown:
            return end
        return end * max(0, self.decay + self.cooldown - t) / self.cooldown

    def _decayed(self, t: int) -> float:
        through = t / self.decay if self.decay else 1.0
        match self.kind:
            case "exponential":
                reference = self.reference or self.decay
                return self.peak * math.pow(self.factor, t / reference if reference else 1.0)
            case "cosine":
                half_wave = (1 + math.cos(math.pi * through)) / 2
                return self.peak * (self.factor + (1 - self.factor) * half_wave)
            case "linear":
                return self.peak * (1 - (1 - self.factor) * through)
            case "constant":
                return self.peak

    def corners(self) -> tuple[int, ...]:
        """The steps at which one phase ends and the next begins, in order."""
        at = {0, self.warmup, self.warmup + self.decay, self.warmup + self.decay + self.cooldown}
        if self.kind == "exponential" and 0 < self.reference <= self.decay:
            at.add(self.warmup + self.reference)  # where the factor is reached
        return tuple(sorted(at))


@dataclass(frozen=True)
class BatchRamp:
    """The global batch in stages of (first step, sequences). The first stage starts at step 0.

    The paper has 128, 256 and 512 sequences from steps 0, 2000 and 4000 (appendix B), and does not
    rescale the learning rate with them.
    """

    stages: tuple[tuple[int, int], ...]

    def sequences(self, step: int) -> int:
        """Sequences in the batch of this step."""
        return next(count for start, count in reversed(self.stages) if start <= step)

    def sequences_before(self, step: int) -> int:
        """Sequences in all batches before this step."""
        ends = [start for start, _ in self.stages[1:]] + [step]
        return sum(
            count * max(0, min(end, step) - start)
            for (start, count), end in zip(self.stages, ends, strict=True)
        )


def micro_batches(sequences: int, limit: int) -> tuple[int, int]:
    """Size and number of equal micro-batches for one process: the largest size up to `limit`."""
    size = next(n for n in range(min(limit, sequences), 0, -1) if sequences % n == 0)
    return size, sequences // size
