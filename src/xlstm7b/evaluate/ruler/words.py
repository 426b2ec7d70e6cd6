"""The benchmark's random words: the lists of the package wonderwords, version 2.2.0.

Other versions have other lists, and so give other prompts.
"""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
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
    """Every "adjective-noun", sorted, without building the list: it has 6 million entries.

    The keys of one adjective are neighbours and form a row, except where "old-" is the beginning of
    "old-fashioned-": the rows of such adjectives are sorted together. No key must occur twice.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted({*nouns})
        self._beginnings = sorted({f"{adjective}-" for adjective in adjectives})
        self._mixed: dict[int, list[str]] = {}  # row -> its keys
        first = 0  # the beginnings of a group start with that of its first row
        for row, beginning in enumerate([*self._beginnings[1:], ""], 1):
            if beginning.startswith(self._beginnings[first]):
                continue
            if row > first + 1:
                group = self._beginnings[first:row]
                mixed = iter(sorted(start + noun for start in group for noun in self._nouns))
                for n in range(first, row):
                    self._mixed[n] = [next(mixed) for _ in self._nouns]
            first = row

    def __len__(self) -> int:
        return len(self._beginnings) * len(self._nouns)

    def __getitem__(self, index: int) -> str:
        row, column = divmod(index, len(self._nouns))
        if row in self._mixed:
            return self._mixed[row][column]
        return self._beginnings[row] + self._nouns[column]


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
