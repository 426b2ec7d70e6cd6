"""Prompts of a wanted length: how much text goes in is found by search with the tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass

_AIM, _ENOUGH = 0.99, 0.975  # shares of the wanted length: tried for, and good enough


@dataclass(frozen=True)
class Draft:
    """A prompt and what its answer has to name."""

    prompt: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Fitted:
    """The draft of some size, and its length in tokens."""

    draft: Draft
    size: int
    tokens: int


@dataclass(frozen=True)
class Fitting:
    """Drafts of one sample, which `build` makes of any size from `least` on, and their limit."""

    name: str
    build: Callable[[int], Draft]
    count: Callable[[str], int]  # a prompt's tokens
    least: int
    longest: int  # in tokens

    def shortest(self) -> Fitted:
        """The smallest draft, or a `ValueError` if that is too long already."""
        first = self._measured(self.least)
        if first.tokens > self.longest:
            raise ValueError(
                f"{self.name} are too few: {first.tokens} for the shortest prompt, "
                f"and {self.longest} are left to it"
            )
        return first

    def fit(self, start: int) -> Fitted:
        """A draft of at most `longest` tokens and nearly as many, by a search from a size on.

        Length grows about evenly with size, so a line through the last size tried tells the next.
        Where one more piece of text would be too much, the largest draft that fits is taken.
        """
        first = best = self.shortest()
        size, too_large = max(start, self.least + 1), None
        while best.tokens < _ENOUGH * self.longest and best.size + 1 != too_large:
            tried = self._measured(size)
            if tried.tokens > self.longest:
                too_large = size
            else:
                best = tried
            per_size = max(1, tried.tokens - first.tokens) / (size - self.least)
            size = self.least + int((_AIM * self.longest - first.tokens) / per_size)
            size = max(size, best.size + 1)
            if too_large is not None:
                size = min(size, too_large - 1)
        return best

    def _measured(self, size: int) -> Fitted:
        draft = self.build(size)
        return Fitted(draft, size, self.count(draft.prompt))
