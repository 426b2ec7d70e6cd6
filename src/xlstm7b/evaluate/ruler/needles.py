"""Needles in a haystack: sentences that give a key its value, hidden in much other text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from uuid import UUID

from xlstm7b.evaluate.ruler.fitting import Draft
from xlstm7b.evaluate.ruler.words import draw_key

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text is"
)
_SEVERAL = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n{context}\n"
    "What are all the special magic {kind}s for {query} mentioned in the provided text? "
    "The special magic {kind}s for {query} mentioned in the provided text are"
)
_DEPTHS = [step / 39 for step in range(40)]


@dataclass(frozen=True)
class Needles:
    """What is hidden, where, and how much of it is asked for."""

    haystack: str  # noise, essay or needle: of other needles
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1

    def build(self, rng: Random, size: int, essay: Sequence[str]) -> Draft:
        """A prompt with so many words of essay, or lines of another haystack."""
        taken: set[str] = set()
        keys = [_fresh(rng, self.key, taken) for _ in range(self.keys)]
        values = {key: [_fresh(rng, self.value, taken) for _ in range(self.values)] for key in keys}
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        rng.shuffle(needles)
        queried = rng.sample(keys, self.queries)
        if self.haystack == "essay":
            context = _in_essay(rng, needles, essay, size)
        else:
            lines = [NOISE] * size
            if self.haystack == "needle":
                # Its keys may come twice, but for those of the needles that count.
                lines = [
                    self._needle(_other(rng, self.key, taken), _other(rng, self.value, taken))
                    for _ in range(size)
                ]
            context = "\n".join(scattered(rng, needles, lines))
        template = _ONE if self.queries * self.values == 1 else _SEVERAL
        query = queried[0] if len(queried) == 1 else f"{', '.join(queried[:-1])}, and {queried[-1]}"
        prompt = template.format(kind=self.value, context=context, query=query)
        return Draft(prompt, tuple(value for key in queried for value in values[key]))

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.value, key=key, value=value)


def scattered(rng: Random, needles: Sequence[str], lines: Sequence[str]) -> list[str]:
    """The lines with the needles among them, in their order, at random places."""
    places = sorted(rng.sample(range(len(lines) + len(needles)), len(needles)))
    mixed = list(lines)
    for place, needle in zip(places, needles, strict=True):
        mixed.insert(place, needle)
    return mixed


def _in_essay(rng: Random, needles: Sequence[str], essay: Sequence[str], size: int) -> str:
    """The essay's first words, over again where it is too short, with the needles at depths.

    A depth is one of 40, evenly from the beginning to the end; a needle stands between sentences.
    """
    words = [*essay] * (size // len(essay)) + [*essay[: size % len(essay)]]
    sentences = re.split(r"(?<=[.!?]) ", " ".join(words))
    depths = sorted(rng.sample(_DEPTHS, len(needles)), reverse=True)
    places = [round(depth * len(sentences)) for depth in depths]
    for place, needle in zip(places, needles, strict=True):
        sentences.insert(place, needle)
    return " ".join(sentences)


def _fresh(rng: Random, kind: str, taken: set[str]) -> str:
    drawn = _other(rng, kind, taken)
    taken.add(drawn)
    return drawn


def _other(rng: Random, kind: str, taken: set[str]) -> str:
    while (drawn := _DRAW[kind](rng)) in taken:
        pass
    return drawn


_DRAW: dict[str, Callable[[Random], str]] = {
    "word": draw_key,
    "number": lambda rng: str(rng.randrange(10**6, 10**7)),
    "uuid": lambda rng: str(UUID(int=rng.getrandbits(128), version=4)),
}
