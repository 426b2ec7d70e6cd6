"""Samples of a task at a given length. The tokenizer finds how much text fits into each prompt."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from random import Random

from xlstm7b.evaluate.ruler.datasets import Datasets
from xlstm7b.evaluate.ruler.tasks import Spec, Task

_AIM, _ENOUGH = 0.99, 0.975  # of the prompt's length: what the search aims at and accepts


@dataclass(frozen=True)
class Sample:
    prompt: str
    references: tuple[str, ...]
    prompt_tokens: int
    answer_tokens: int
    size: int  # of the text that was filled in, as `Task.build` counts it

    @property
    def length(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return self.prompt_tokens + self.answer_tokens


class Samples:
    """Samples of one task at one length, by number.

    A sample depends on the task, the length, the seed and its number only. It does not matter which
    other samples are built. `count_tokens` returns the number of tokens of a prompt.
    """

    def __init__(
        self,
        task: Task,
        length: int,
        count_tokens: Callable[[str], int],
        datasets: Datasets,
        seed: int,
    ) -> None:
        self._task, self._length, self._datasets = task, length, datasets
        self._count_tokens, self._seed = count_tokens, seed
        self._max_tokens = length - task.answer_tokens

    def __getitem__(self, index: int) -> Sample:
        return self._first if index == 0 else self._fit(index, self._first.size)

    def check(self, count: int) -> None:
        """`ValueError` if one of the first `count` samples does not fit into the length.

        Documents of questions differ much in length. Other prompts are about as long as the first.
        """
        first = self._shortest(0)
        if self._task.any_reference or 2 * first.prompt_tokens > self._max_tokens:
            for index in range(count):
                self._shortest(index)

    @cached_property
    def _first(self) -> Sample:
        """The search for every other sample starts from this one's size and mostly ends there."""
        return self._fit(0, self._task.min_size + 64)

    def _fit(self, index: int, start: int) -> Sample:
        """Searches a size, from `start` on, whose prompt fits and nearly fills the length.

        The length grows about linearly with the size, so a line through the shortest prompt and the
        last one gives the next size. The search ends at the largest prompt that fits if one more
        unit of text would be too much.
        """
        smallest = self._task.min_size
        first = best = self._shortest(index)
        size, too_large = max(start, smallest + 1), None
        while best.prompt_tokens < _ENOUGH * self._max_tokens and best.size + 1 != too_large:
            tried = self._build(index, size)
            if tried.prompt_tokens > self._max_tokens:
                too_large = size
            else:
                best = tried
            slope = max(1, tried.prompt_tokens - first.prompt_tokens) / (size - smallest)
            size = smallest + int((_AIM * self._max_tokens - first.prompt_tokens) / slope)
            size = max(size, best.size + 1)
            if too_large is not None:
                size = min(size, too_large - 1)
        return best

    def _shortest(self, index: int) -> Sample:
        shortest = self._build(index, self._task.min_size)
        if shortest.prompt_tokens > self._max_tokens:
            raise ValueError(
                f"a length of {self._length} tokens is too short for {self._task.name}: the "
                f"shortest prompt has {shortest.prompt_tokens} tokens, and {self._max_tokens} are "
                f"left for it"
            )
        return shortest

    def _build(self, index: int, size: int) -> Sample:
        rng = Random(f"{self._seed}/{self._task.name}/{self._length}/{index}")
        draft = self._task.build(rng, size, Spec(self._length, index, self._datasets))
        tokens = self._count_tokens(draft.prompt)
        return Sample(draft.prompt, draft.references, tokens, self._task.answer_tokens, size)
