"""The benchmark's random words: the lists of the package wonderwords, version 2.2.0.

Other versions have other lists, and so give other prompts.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from itertools import accumulate
from pathlib import Path
from random import Random

_VERSION = "2.2.0"


@cache
def keys() -> "Keys":
    """The keys of needles: 910 adjectives with 6,786 nouns (two adjectives are listed twice)."""
    return Keys(_read_list("adjectivelist.txt"), _read_list("nounlist.txt"))


def shuffled_words(seed: int) -> list[str]:
    """The 8,169 words of cwe's lists: nouns, adjectives and verbs."""
    names = ("nounlist.txt", "adjectivelist.txt", "verblist.txt")
    words = sorted({word for name in names for word in _read_list(name)})
    Random(seed).shuffle(words)
    return words


class Keys:
    """Every "adjective-noun" once, sorted, without building the list: it has 6 million entries.

    All keys with one adjective are neighbours, except where "old-" is the beginning of
    "old-fashioned-": such adjectives form a block, whose keys are sorted together.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted({*nouns})
        self._blocks: list[list[str]] = []  # the beginnings "adjective-" of a block
        for beginning in sorted({f"{adjective}-" for adjective in adjectives}):
            if self._blocks and beginning.startswith(self._blocks[-1][0]):
                self._blocks[-1].append(beginning)
            else:
                self._blocks.append([beginning])
        self._mixed = {
            number: sorted({beginning + noun for beginning in block for noun in self._nouns})
            for number, block in enumerate(self._blocks)
            if len(block) > 1
        }
        sizes = [len(self._mixed.get(number, self._nouns)) for number, _ in enumerate(self._blocks)]
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._starts, index) - 1
        offset = index - self._starts[number]
        if number in self._mixed:
            return self._mixed[number][offset]
        return self._blocks[number][0] + self._nouns[offset]


def _read_list(name: str) -> list[str]:
    """Reads one of the package's files, without running its code."""
    try:
        package = distribution("wonderwords")
    except PackageNotFoundError:
        package = None
    installed = "none" if package is None else package.version
    if package is None or installed != _VERSION:
        raise ValueError(
            f"RULER's niah and cwe tasks use the words of wonderwords {_VERSION}, installed is "
            f"{installed}: pip install wonderwords=={_VERSION}"
        )
    path = Path(str(package.locate_file(f"wonderwords/assets/{name}")))
    return [line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()]
