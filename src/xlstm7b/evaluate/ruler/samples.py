"""Samples of a task at a given length: how much text fits into a prompt, as the benchmark finds it.

Random numbers are drawn in the benchmark's order, so that the same seed gives the same prompts.
This is why also those prompts must be drawn that only serve to find the size.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

import numpy as np

from xlstm7b.evaluate.ruler.datasets import Datasets

VERSIONS = ("2025-01", "2026-07")
_MAX_TRIES = 100  # of the smallest prompt


@dataclass(frozen=True)
class Sample:
    prompt: str
    references: list[str]
    length: int  # tokens of the prompt and the longest answer, as the benchmark counts them


@dataclass(frozen=True)
class Draft:
    """A prompt whose random numbers are drawn. Its text is built on demand."""

    render: Callable[[], str]
    references: list[str]
    written: str = ""  # the answer as 2025-01 appends it while it looks for the size


@dataclass(frozen=True)
class Setting:
    """What the samples of a task depend on."""

    task: str
    version: str
    length: int  # in tokens, with the answer
    seed: int
    datasets: Datasets
    count_tokens: Callable[[str], int]


class Numbers:
    """The benchmark's two sources of random numbers."""

    def __init__(self, seed: int) -> None:
        self.rng, self.numpy = Random(seed), np.random.RandomState(seed)

    def save(self) -> Callable[[], None]:
        """Returns a function that goes back to the present state."""
        python, numpy = self.rng.getstate(), self.numpy.get_state()

        def restore() -> None:
            self.rng.setstate(python)
            self.numpy.set_state(numpy)

        return restore


class Builder(ABC):
    """Builds the samples of one task, one after the other. The size is in lines, words, documents.

    Each sample continues with the random numbers where the one before stopped.
    """

    step: int  # by which the size grows and shrinks
    least = 1  # the smallest size that can be drawn
    largest = last_drawn = sys.maxsize  # 2025-01: if sizes end, the last one, and the last drawn
    margin = 0.02  # 2025-01: closer to the limit, the tokens of every prompt are counted
    example_tokens = 0  # of an example that is not in the draft's prompt yet

    def __init__(self, setting: Setting, limit: int, answer_tokens: int, numbers: Numbers) -> None:
        self.setting, self.limit, self.answer_tokens = setting, limit, answer_tokens
        self.numbers, self.rng = numbers, numbers.rng

    @abstractmethod
    def draw(self, size: int, index: int) -> Draft:
        """Draws the prompt of a sample."""

    def complete(self, draft: Draft) -> Draft:
        """Adds an example, if there is one; this may draw more random numbers."""
        return draft

    def check(self, samples: int) -> None:
        """`ValueError` if the smallest prompt does not fit. Draws random numbers."""
        self.check_tokens(self.count(self.draw(self.step, 0)) + self.example_tokens)

    def check_tokens(self, tokens: int) -> None:
        """`ValueError` if a prompt that is as small as possible does not fit."""
        room = self.limit - self.answer_tokens
        if tokens > room:
            raise ValueError(
                f"a length of {self.setting.length} is too short for {self.setting.task}: the "
                f"shortest prompt has {tokens} tokens, and {max(room, 0)} are left for it"
            )

    def samples(self) -> Iterator[Sample]:
        """All samples, without end."""
        size = self.find_size()
        for index in count():
            yield self.fit(size, index)

    def find_size(self) -> int:
        return self._grow() if self.setting.version == "2025-01" else self._bisect()

    def fit(self, size: int, index: int) -> Sample:
        """A sample of the given size; a smaller one if it is too long."""
        late = self.setting.version == "2025-01"  # an example is added when the rest fits
        tries = 0
        while True:
            draft = self.draw(size, index)
            if not late:
                draft = self.complete(draft)
            tokens = self.count(draft) + (self.example_tokens if late else 0)
            if tokens + self.answer_tokens <= self.limit:
                break
            # The benchmark draws again without end if the smallest prompt never fits.
            if size > self.step:
                size = max(size - self.step, self.least)
            elif (tries := tries + 1) == _MAX_TRIES:
                self.check_tokens(tokens)
        if late:
            draft = self.complete(draft)
        return Sample(draft.render(), draft.references, tokens + self.answer_tokens)

    def count(self, draft: Draft) -> int:
        return self.setting.count_tokens(draft.render())

    def _grow(self) -> int:
        """2025-01: one step more until a prompt is too long.

        The benchmark counts the tokens of each of these prompts, which takes minutes for long ones.
        Here, prompts that are much too short are only drawn: the next prompt to be counted is half
        way to the limit, less a margin. If it is too long all the same, we go back.
        """
        room = self.limit - self.answer_tokens - self.example_tokens
        size, jump = self.step, 1
        while True:
            start, restore = size, self.numbers.save()
            jump = max(1, min(jump, (self.last_drawn - size) // self.step + 1))
            for _ in range(jump - 1):
                self.draw(size, 0)
                size += self.step
            draft = self.draw(size, 0)
            tokens = self.setting.count_tokens(draft.render() + draft.written)
            if tokens >= room and jump > 1:
                restore()
                size, jump = start, jump // 2
                continue
            if tokens > room:
                return max(size - self.step, self.step)
            size += self.step
            if size > self.last_drawn:
                return self.largest
            if tokens == room:  # one step too far, as in the benchmark: `fit` goes back
                return size
            jump = int((room / tokens - 1 - self.margin) / 2 * size / self.step)

    def _bisect(self) -> int:
        """2026-07: the largest size that fits, by bisection."""
        low, high = self.step, max(self.estimate_most(), 2 * self.step)
        best = self.step
        while low <= high:
            middle = (low + high) // 2
            tokens = self.count(self.draw(middle, 0)) + self.example_tokens
            if tokens + self.answer_tokens <= self.limit:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def estimate_most(self) -> int:
        """2026-07: a size that is too large for sure. Draws random numbers."""
        per_unit = self.count(self.draw(self.step, 0)) / self.step
        return int(self.limit / per_unit * 3)
