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
    answer: str = ""  # as the benchmark appends it while it looks for the size


@dataclass(frozen=True)
class Setting:
    """What the samples of a task depend on."""

    task: str
    length: int  # in tokens, with the answer
    seed: int
    datasets: Datasets
    count_tokens: Callable[[str], int]


class Builder(ABC):
    """Builds the samples of one task, one after the other. The size is in lines, words, documents.

    Each sample continues with the random numbers where the one before stopped.
    """

    step: int  # by which the size grows and shrinks
    least = 1  # the smallest size that can be drawn
    largest = last_drawn = sys.maxsize  # if the data ends: the largest size, and the last one drawn
    margin = 0.02  # closer to the limit, the tokens of every prompt are counted
    example_tokens = 0  # of an example that is not in the draft's prompt yet

    def __init__(self, setting: Setting, answer_tokens: int) -> None:
        self.setting, self.limit, self.answer_tokens = setting, setting.length, answer_tokens
        # The benchmark's two sources of random numbers.
        self.rng, self.numpy = Random(setting.seed), np.random.RandomState(setting.seed)

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
                f"a length of {self.limit} is too short for {self.setting.task}: the shortest "
                f"prompt has {tokens} tokens, and {max(room, 0)} are left for it"
            )

    def samples(self) -> Iterator[Sample]:
        """All samples, without end."""
        size = self.find_size()
        for index in count():
            yield self.fit(size, index)

    def fit(self, size: int, index: int) -> Sample:
        """A sample of the given size; a smaller one if it is too long."""
        tries = 0
        while True:
            draft = self.draw(size, index)
            tokens = self.count(draft) + self.example_tokens
            if tokens + self.answer_tokens <= self.limit:
                break
            # The benchmark draws again without end if the smallest prompt never fits.
            if size > self.step:
                size = max(size - self.step, self.least)
            elif (tries := tries + 1) == _MAX_TRIES:
                self.check_tokens(tokens)
        draft = self.complete(draft)
        return Sample(draft.render(), draft.references, tokens + self.answer_tokens)

    def count(self, draft: Draft) -> int:
        return self.setting.count_tokens(draft.render())

    def find_size(self) -> int:
        """The size of the samples: one step more until a prompt is too long.

        The benchmark counts the tokens of each of these prompts, which takes minutes for long ones.
        Here, prompts that are much too short are only drawn: the next prompt to be counted is half
        way to the limit, less a margin. If it is too long all the same, we go back.
        """
        room = self.limit - self.answer_tokens - self.example_tokens
        size, jump = self.step, 1
        while True:
            start, python, numpy = size, self.rng.getstate(), self.numpy.get_state()
            jump = max(1, min(jump, (self.last_drawn - size) // self.step + 1))
            for _ in range(jump - 1):
                self.draw(size, 0)
                size += self.step
            draft = self.draw(size, 0)
            tokens = self.setting.count_tokens(draft.render() + draft.answer)
            if tokens >= room and jump > 1:
                self.rng.setstate(python)
                self.numpy.set_state(numpy)
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
