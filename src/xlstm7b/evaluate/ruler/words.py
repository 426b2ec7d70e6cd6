"""Random words for keys and word lists: everyday words, then invented, pronounceable ones.

The benchmark takes its words from a package. The lists here are our own, so nothing is needed.
"""

from importlib.resources import files
from random import Random


def _read_list(name: str) -> list[str]:
    return (files(__package__) / name).read_text(encoding="utf-8").split()


_ADJECTIVES, _NOUNS = _read_list("adjectives.txt"), _read_list("nouns.txt")
_EVERYDAY = sorted({*_ADJECTIVES, *_NOUNS})
_SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou"]
_INVENTED = len(_SYLLABLES) ** 3
_STRIDE = 104_729  # a prime that does not divide _INVENTED: neighbours look different


def draw_key(rng: Random) -> str:
    """A key like the benchmark's: an adjective and a noun."""
    return f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"


def draw_words(rng: Random, count: int) -> list[str]:
    """`count` distinct words: everyday words, and invented ones if there are not enough."""
    available = len(_EVERYDAY) + _INVENTED
    if count > available:
        raise ValueError(f"{count:,} words are needed, but only {available:,} are available")
    pool = range(max(len(_EVERYDAY), count))
    return [_word(number) for number in rng.sample(pool, count)]


def _word(number: int) -> str:
    """The everyday words first, then words of three open syllables. No everyday word is one."""
    if number < len(_EVERYDAY):
        return _EVERYDAY[number]
    spelling = (number - len(_EVERYDAY)) * _STRIDE % _INVENTED
    letters = ""
    for _ in range(3):
        spelling, syllable = divmod(spelling, len(_SYLLABLES))
        letters += _SYLLABLES[syllable]
    return letters
