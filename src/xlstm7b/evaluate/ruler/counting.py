"""Common and frequent words: which of many words come most often."""

import math
from random import Random
from string import ascii_lowercase

from xlstm7b.evaluate.ruler.fitting import Draft
from xlstm7b.evaluate.ruler.words import draw_words

_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common "
    "words in the above list? Answer: The top 10 words that appear most often in the list are:"
)
_FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text? Answer: According to the coded text above, the three most frequently appeared words are:"
)
COMMON_WORDS = 10
_SHORT = 4096  # below this length common words come less often
_ZETA = math.pi**2 / 6  # of 2, the exponent by which words get rarer


def build_common(rng: Random, size: int, length: int) -> Draft:
    """A solved example, then a list in which 10 of so many words come more often than the others.

    They come 30 times and others 3 times; in a short list, 6 times and once.
    """
    short = length < _SHORT
    example = _common(rng, *((20, 3, 1) if short else (40, 10, 3)))
    asked = _common(rng, size, *((6, 1) if short else (30, 3)))
    return Draft(
        f"{example.prompt} {_numbered(example.references)}\n{asked.prompt}", asked.references
    )


def _common(rng: Random, size: int, often: int, seldom: int) -> Draft:
    words = draw_words(rng, size)
    common, others = words[:COMMON_WORDS], words[COMMON_WORDS:]
    listed = common * often + others * seldom
    rng.shuffle(listed)
    return Draft(_COMMON.format(context=_numbered(listed)), tuple(common))


def _numbered(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def build_frequent(rng: Random, size: int, length: int) -> Draft:
    """About so many coded words; the one of rank r comes size / (ζ(2) r²) times.

    The most frequent of them is made dots, which are noise; the next three are asked for.
    """
    coded: dict[str, None] = {"...": None}
    while len(coded) < length // 50:
        coded["".join(rng.choices(ascii_lowercase, k=6))] = None
    ranked = list(coded)
    text = [
        word for rank, word in enumerate(ranked, 1) for _ in range(int(size / (_ZETA * rank**2)))
    ]
    rng.shuffle(text)
    return Draft(_FREQUENT.format(context=" ".join(text)), tuple(ranked[1:4]))
