"""RULER's 13 tasks: what each draws at random, in the benchmark's order, and how it is scored."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count, pairwise
from random import Random
from string import ascii_lowercase, ascii_uppercase
from uuid import UUID

import numpy as np

from xlstm7b.evaluate.ruler import templates
from xlstm7b.evaluate.ruler.datasets import Questions, sentence_splitter
from xlstm7b.evaluate.ruler.samples import Builder, Draft, Sample, Setting
from xlstm7b.evaluate.ruler.words import keys, shuffled_words

_SHORT = 4096  # below this length, some tasks take smaller steps


@dataclass(frozen=True)
class Task:
    name: str
    answer_tokens: int  # maximum tokens of an answer
    builder: Callable[[Setting, int], Builder]
    dataset: str | None = None  # field of `Datasets` that the task needs
    any_reference: bool = False  # one of the references is enough

    def build(self, setting: Setting) -> Builder:
        """A builder of samples, at the first one."""
        return self.builder(setting, self.answer_tokens)

    def score(self, answer: str, references: Sequence[str]) -> float:
        """The share of the references that the answer contains, ignoring case."""
        cleaned = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
        found = [reference.lower() in cleaned for reference in references]
        return float(any(found)) if self.any_reference else sum(found) / len(found)


# Needle in a haystack: sentences that give a key a value, hidden in other text.

_DEPTHS = [round(100 * step / 39) for step in range(40)]  # percent
_DRAW: dict[str, Callable[[Random], str]] = {
    "words": lambda rng: rng.choice(keys()),
    "numbers": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "uuids": lambda rng: str(UUID(int=rng.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class Needles:
    """A needle task."""

    haystack: str  # noise, essay, or needle (other needles)
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1  # for each key
    queries: int = 1


class _NeedleBuilder(Builder):
    """The size is in words of the essay, or in lines of another haystack."""

    def __init__(self, needles: Needles, setting: Setting, answer_tokens: int) -> None:
        super().__init__(setting, answer_tokens)
        self._needles = needles
        self.step = 5 if setting.length < _SHORT else 25
        if needles.haystack == "essay":
            self.step = 500
            self.largest = len(setting.datasets.haystack or [])
            self.last_drawn = self.largest + self.step
        self._sentences = lru_cache(8)(self._split_essay)
        if "words" in (needles.key, needles.value):
            keys()  # an error if they are missing

    def draw(self, size: int, index: int) -> Draft:
        drawn, needles, settings = [], [], self._needles
        for _ in range(settings.keys):
            key = _DRAW[settings.key](self.rng)
            values = [_DRAW[settings.value](self.rng) for _ in range(settings.values)]
            drawn.append((key, values))
            needles += [self._sentence(key, value) for value in values]
        Random(self.setting.seed).shuffle(needles)
        hide = self._in_essay if settings.haystack == "essay" else self._in_lines
        context = hide(needles, size)
        queried = [drawn[number] for number in self.rng.sample(range(len(drawn)), settings.queries)]
        *before, last = [key for key, _ in queried]
        several = settings.queries * settings.values > 1

        def render() -> str:
            return (templates.SEVERAL_VALUES if several else templates.ONE_VALUE).format(
                kind=settings.value if several else settings.value[:-1],
                context=context(),
                query=f"{', '.join(before)}, and {last}" if before else last,
            )

        references = [value for _, values in queried for value in values]
        return Draft(render, references, " ".join(references))

    def _sentence(self, key: str, value: str) -> str:
        return templates.NEEDLE.format(kind=self._needles.value, key=key, value=value)

    def _in_lines(self, needles: Sequence[str], size: int) -> Callable[[], str]:
        """The needles at random places between lines; the first needle comes last."""
        draw_key, draw_value = _DRAW[self._needles.key], _DRAW[self._needles.value]
        others = [
            (draw_key(self.rng), draw_value(self.rng))
            for _ in range(size if self._needles.haystack == "needle" else 0)
        ]
        places = sorted(self.rng.sample(range(size), len(needles)), reverse=True)

        def render() -> str:
            lines = [self._sentence(*other) for other in others] or [templates.NOISE] * size
            for place, needle in zip(places, needles, strict=True):
                lines.insert(place, needle)
            return "\n".join(lines)

        return render

    def _in_essay(self, needles: Sequence[str], size: int) -> Callable[[], str]:
        """The needles between sentences, each at one of 40 depths."""
        depths = sorted(self.rng.sample(_DEPTHS, len(needles)))

        def render() -> str:
            sentences = self._sentences(size)
            places = [int(len(sentences) * (depth / 100)) for depth in depths]
            parts = []
            for needle, (start, end) in zip(needles, pairwise([0, *places]), strict=True):
                parts += [" ".join(sentences[start:end]), needle]
            return " ".join([*parts, " ".join(sentences[places[-1] :])])

        return render

    def _split_essay(self, size: int) -> list[str]:
        _, split = sentence_splitter()
        return split(" ".join((self.setting.datasets.haystack or [])[:size]).strip())


# Variable tracking: a chain of assignments, hidden in noise.

_HOPS = 4
_EXAMPLE_LENGTH = 500


class _Chains(Builder):
    """A chain of assignments in `size` lines of noise."""

    step, least = 10, _HOPS + 1
    letters = 5  # of a variable's name

    def draw(self, size: int, index: int) -> Draft:
        unique: dict[str, None] = {}
        while len(unique) < _HOPS + 1:
            unique["".join(self.rng.choices(ascii_uppercase, k=self.letters))] = None
        names, value = list(unique), self.numpy.randint(10_000, 99_999)
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
        lines = [f"{templates.NOISE}\n"] * size
        if size <= len(chain):
            parts = [part for line in lines for part in line.split(".")]
            lines = [f"{part}." if part.strip() else part for part in parts]
        places = sorted(self.rng.sample(range(len(lines)), len(chain)))

        def render() -> str:
            mixed = list(lines)
            for before, (place, link) in enumerate(zip(places, chain, strict=True)):
                mixed.insert(place + before, link)
            context = " ".join(mixed).replace(". \n", ".\n")
            return templates.TRACKING.format(context=context, value=value, count=len(names))

        return Draft(render, names, f" {names}")


class _ExampleChains(_Chains):
    """The solved example that is in every prompt of vt, with short names."""

    step, letters = 5, 3


class _TrackingBuilder(_Chains):
    def __init__(self, setting: Setting, answer_tokens: int) -> None:
        super().__init__(setting, answer_tokens)
        example = _ExampleChains(replace(setting, length=_EXAMPLE_LENGTH), answer_tokens)
        example.rng, example.numpy = self.rng, self.numpy
        size = example.find_size()
        try:
            solved = example.fit(size, 0)
        except ValueError:  # with a tokenizer of bytes, no example has 500 tokens
            draft = example.draw(example.step, 0)
            solved = Sample(draft.render(), draft.references, 0)
        self._names = solved.references
        self._example = f"{solved.prompt} {' '.join(solved.references)}\n\n"
        self.example_tokens = setting.count_tokens(self._example)

    def complete(self, draft: Draft) -> Draft:
        """Puts the example in front, with new names."""
        example = self._example
        for name in self._names:
            new = "".join(self.rng.choices(ascii_uppercase, k=len(name)))
            example = example.replace(name, new)
        return Draft(lambda: f"{example}\n\n{draft.render()}", draft.references)


# Aggregation: the words that occur most often.

_COMMON_WORDS = 10
_ZETA_2 = math.pi**2 / 6


class _CommonWordsBuilder(Builder):
    """A solved example, then a list of `size` words: 10 occur 30 times, the others 3 times.

    In a prompt of less than 4096 tokens they occur 6 times and once.
    """

    step = 10

    def __init__(self, setting: Setting, answer_tokens: int) -> None:
        super().__init__(setting, answer_tokens)
        self._words = shuffled_words(setting.seed)
        self.largest = self.last_drawn = len(self._words)

    def draw(self, size: int, index: int) -> Draft:
        short = self.setting.length < _SHORT
        example, common = self._draw_list(*((20, 3, 1) if short else (40, 10, 3)))
        question, references = self._draw_list(size, *((6, 1) if short else (30, 3)))

        def render() -> str:
            solved = templates.COMMON.format(context=example()) + _numbered(common)
            return f"{solved}\n{templates.COMMON.format(context=question())}"

        return Draft(render, references, f" {_numbered(references)}")

    def _draw_list(self, size: int, often: int, seldom: int) -> tuple[Callable[[], str], list[str]]:
        words = self.rng.sample(self._words, size)
        common, others = words[:_COMMON_WORDS], words[_COMMON_WORDS:]

        def render() -> str:
            listed = common * often + others * seldom
            Random(self.setting.seed).shuffle(listed)
            return _numbered(listed)

        return render, common


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


class _FrequentWordsBuilder(Builder):
    """About `size` coded words: the word of rank r occurs size / (ζ(2) r²) times.

    The most frequent one is "...", which is noise; the answer is the next three. Unlike in other
    tasks, the answer does not count, and a prompt that is too long keeps its words.
    """

    def __init__(self, setting: Setting, answer_tokens: int) -> None:
        super().__init__(setting, 0)
        self._uncounted = answer_tokens
        self._ranks = np.arange(1, self.limit // 50 + 1)
        self.step = self.limit // 32

    def draw(self, size: int, index: int) -> Draft:
        return self._draft(self._draw_words(), size)

    def check(self, samples: int) -> None:
        if len(self._ranks) < 4:
            raise ValueError(
                f"a length of {self.limit} is too short for {self.setting.task}: there is one "
                f"coded word for 50 tokens, and 4 are needed"
            )
        self.check_tokens(self.count(self.draw(self._fewest(), 0)))

    def samples(self) -> Iterator[Sample]:
        words, size = self._draw_words(), self.limit // 6
        while self.count(self._draft(words, size)) < self.limit:
            size += self.step
        size -= self.step
        for _ in count():
            yield self._shrink(self._draw_words(), size)

    def _shrink(self, words: list[str], size: int) -> Sample:
        while (tokens := self.count(draft := self._draft(words, size))) > self.limit:
            size -= self.step
            if size < self._fewest():
                self.check_tokens(tokens)
        return Sample(draft.render(), draft.references, tokens + self._uncounted)

    def _fewest(self) -> int:
        """A size with which the last of the references occurs once."""
        return math.ceil(4**2 * _ZETA_2)

    def _draw_words(self) -> list[str]:
        unique: set[str] = set()
        while len(unique) < len(self._ranks):
            unique.add("".join(self.rng.choices(ascii_lowercase, k=6)))
        words = sorted(unique)
        Random(self.setting.seed).shuffle(words)
        return ["...", *words[1:]]

    def _draft(self, words: list[str], size: int) -> Draft:
        def render() -> str:
            repeats = (size * self._ranks**-2.0 / _ZETA_2).astype(int).tolist()
            text = [word for word, times in zip(words, repeats, strict=True) for _ in range(times)]
            Random(self.setting.seed).shuffle(text)
            return templates.FREQUENT.format(context=" ".join(text))

        return Draft(render, words[1:4])


# Question answering: the documents that answer a question, among many others.


class _QuestionBuilder(Builder):
    """A question and `size` documents. None is cut.

    They are shuffled alike in all prompts, so the documents of the question, which come first, are
    at the same places in all prompts with the same number of documents.
    """

    step = 10
    margin = 0.08  # documents differ in length

    def __init__(self, dataset: str, setting: Setting, answer_tokens: int) -> None:
        super().__init__(setting, answer_tokens)
        self._data: Questions = getattr(setting.datasets, dataset)
        self.largest = self.last_drawn = len(self._data.documents)

    def check(self, samples: int) -> None:
        for index in range(min(samples, len(self._data.questions))):
            self.check_tokens(self.count(self.draw(self.step, index)))

    def draw(self, size: int, index: int) -> Draft:
        question = self._data.questions[index % len(self._data.questions)]
        documents = self._data.documents
        missing = max(0, size - len(question.shown))
        if size >= len(documents):
            chosen = [*range(len(documents))]
        elif missing > len(question.related):
            known = {*question.shown, *question.related}
            others = [number for number in range(len(documents)) if number not in known]
            more = self.rng.sample(others, missing - len(question.related))
            chosen = [*question.shown, *question.related, *more]
        else:
            chosen = [*question.shown, *self.rng.sample(question.related, missing)]
        references = list(question.answers)

        def render() -> str:
            shown = [documents[number] for number in chosen]
            Random(self.setting.seed).shuffle(shown)
            texts = [
                templates.DOCUMENT.format(number=n, text=text) for n, text in enumerate(shown, 1)
            ]
            return templates.QUESTION.format(context="\n\n".join(texts), question=question.text)

        return Draft(render, references, f" {references}")


def _needle_task(name: str, needles: Needles) -> Task:
    dataset = "haystack" if needles.haystack == "essay" else None
    return Task(name, 128, partial(_NeedleBuilder, needles), dataset)


def _question_task(name: str, dataset: str) -> Task:
    return Task(name, 32, partial(_QuestionBuilder, dataset), dataset, any_reference=True)


TASKS = {
    task.name: task
    for task in (
        _needle_task("niah_single_1", Needles("noise")),
        _needle_task("niah_single_2", Needles("essay")),
        _needle_task("niah_single_3", Needles("essay", value="uuids")),
        _needle_task("niah_multikey_1", Needles("essay", keys=4)),
        _needle_task("niah_multikey_2", Needles("needle")),
        _needle_task("niah_multikey_3", Needles("needle", key="uuids", value="uuids")),
        _needle_task("niah_multivalue", Needles("essay", values=4)),
        _needle_task("niah_multiquery", Needles("essay", keys=4, queries=4)),
        Task("vt", 30, _TrackingBuilder),
        Task("cwe", 120, _CommonWordsBuilder),
        Task("fwe", 50, _FrequentWordsBuilder),
        _question_task("qa_1", "squad"),
        _question_task("qa_2", "hotpotqa"),
    )
}
