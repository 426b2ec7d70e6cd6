"""RULER's 13 tasks: how each prompt is built, and how answers are scored.

Each `build` function takes a random generator, a size (how much text to fill in: lines, words or
documents' words) and a `Spec`. The same arguments always give the same prompt.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Any
from uuid import UUID

from xlstm7b.evaluate.ruler.datasets import Datasets, Question, Questions
from xlstm7b.evaluate.ruler.words import draw_key, draw_words


@dataclass(frozen=True)
class Draft:
    """A prompt, and the strings that its answer must contain."""

    prompt: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Spec:
    """The inputs of a prompt: a length in tokens, the sample's number, the datasets."""

    length: int
    index: int
    datasets: Datasets


Build = Callable[[Random, int, Spec], Draft]


@dataclass(frozen=True)
class Task:
    name: str
    answer_tokens: int  # maximum tokens of an answer
    build: Build
    min_size: int = 1
    dataset: str | None = None  # field of `Datasets` that the task needs
    any_reference: bool = False  # one of the references is enough

    def score(self, answer: str, references: Sequence[str]) -> float:
        """The percentage of the references that the answer contains, ignoring case."""
        found = [reference.lower() in answer.lower() for reference in references]
        return 100.0 * (any(found) if self.any_reference else sum(found) / len(found))


# Needle in a haystack: sentences that give a key a value, hidden in other text.

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_ONE_VALUE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text is"
)
_SEVERAL_VALUES = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n{context}\n"
    "What are all the special magic {kind}s for {query} mentioned in the provided text? "
    "The special magic {kind}s for {query} mentioned in the provided text are"
)
_DEPTHS = [step / 39 for step in range(40)]
_DRAW: dict[str, Callable[[Random], str]] = {
    "word": draw_key,
    "number": lambda rng: str(rng.randrange(10**6, 10**7)),
    "uuid": lambda rng: str(UUID(int=rng.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class _Needles:
    """A needle task. The size is in words of the essay, or in lines of another haystack."""

    haystack: str  # noise, essay, or needle (other needles)
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1  # for each key
    queries: int = 1

    def build(self, rng: Random, size: int, spec: Spec) -> Draft:
        used: set[str] = set()
        keys = [_draw_unique(rng, self.key, used) for _ in range(self.keys)]
        values = {
            key: [_draw_unique(rng, self.value, used) for _ in range(self.values)] for key in keys
        }
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        rng.shuffle(needles)
        queried = rng.sample(keys, self.queries)
        if self.haystack == "essay":
            context = _hide_in_essay(rng, needles, spec.datasets.haystack or [], size)
        else:
            lines = [_NOISE] * size
            if self.haystack == "needle":
                # Their keys may occur twice, but never equal the key of a real needle.
                lines = [
                    self._needle(_draw(rng, self.key, used), _draw(rng, self.value, used))
                    for _ in range(size)
                ]
            context = "\n".join(_scatter(rng, needles, lines))
        template = _ONE_VALUE if self.queries * self.values == 1 else _SEVERAL_VALUES
        query = queried[0] if len(queried) == 1 else f"{', '.join(queried[:-1])}, and {queried[-1]}"
        prompt = template.format(kind=self.value, context=context, query=query)
        return Draft(prompt, tuple(value for key in queried for value in values[key]))

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.value, key=key, value=value)


def _draw(rng: Random, kind: str, used: set[str]) -> str:
    while (drawn := _DRAW[kind](rng)) in used:
        pass
    return drawn


def _draw_unique(rng: Random, kind: str, used: set[str]) -> str:
    drawn = _draw(rng, kind, used)
    used.add(drawn)
    return drawn


def _scatter(rng: Random, needles: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Inserts the needles, in their order, at random positions between the lines."""
    positions = sorted(rng.sample(range(len(lines) + len(needles)), len(needles)))
    mixed = list(lines)
    for position, needle in zip(positions, needles, strict=True):
        mixed.insert(position, needle)
    return mixed


def _hide_in_essay(rng: Random, needles: Sequence[str], essay: Sequence[str], size: int) -> str:
    """The essay's first `size` words, repeated if it is too short, with needles between sentences.

    Each needle has one of 40 depths, which are evenly spaced from the beginning to the end.
    """
    words = [*essay] * (size // len(essay)) + [*essay[: size % len(essay)]]
    sentences = re.split(r"(?<=[.!?]) ", " ".join(words))
    depths = sorted(rng.sample(_DEPTHS, len(needles)), reverse=True)
    positions = [round(depth * len(sentences)) for depth in depths]
    for position, needle in zip(positions, needles, strict=True):
        sentences.insert(position, needle)
    return " ".join(sentences)


# Variable tracking: a chain of assignments, hidden in noise.

_TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assigned the value {value}, they are:"
)
_HOPS = 4
_EXAMPLE_LINES = 10  # about 500 tokens, as in the benchmark


def _build_vt(rng: Random, size: int, spec: Spec) -> Draft:
    """A solved example with names of 3 letters, then names of 5 letters in `size` noise lines."""
    example = _chain(rng, 3, _EXAMPLE_LINES)
    question = _chain(rng, 5, size)
    solved = f"{example.prompt} {' '.join(example.references)}"
    return Draft(f"{solved}\n\n{question.prompt}", question.references)


def _chain(rng: Random, letters: int, lines: int) -> Draft:
    names: dict[str, None] = {}
    while len(names) < _HOPS + 1:
        names["".join(rng.choices(ascii_uppercase, k=letters))] = None
    first, *_ = names
    value = rng.randrange(10_000, 100_000)
    chain = [f"VAR {first} = {value}"]
    chain += [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]
    context = "\n".join(_scatter(rng, chain, [_NOISE] * lines))
    prompt = _TRACKING.format(context=context, value=value, count=len(names))
    return Draft(prompt, tuple(names))


# Aggregation: the words that occur most often.

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
_COMMON_WORDS = 10
_SHORT = 4096  # below this length, cwe repeats words less often
_ZETA_2 = math.pi**2 / 6


def _build_cwe(rng: Random, size: int, spec: Spec) -> Draft:
    """A solved example, then a list of `size` words: 10 occur 30 times, the others 3 times.

    In a short list they occur 6 times and once.
    """
    short = spec.length < _SHORT
    example = _word_list(rng, *((20, 3, 1) if short else (40, 10, 3)))
    question = _word_list(rng, size, *((6, 1) if short else (30, 3)))
    solved = f"{example.prompt} {_numbered(example.references)}"
    return Draft(f"{solved}\n{question.prompt}", question.references)


def _word_list(rng: Random, size: int, often: int, seldom: int) -> Draft:
    words = draw_words(rng, size)
    common, others = words[:_COMMON_WORDS], words[_COMMON_WORDS:]
    listed = common * often + others * seldom
    rng.shuffle(listed)
    return Draft(_COMMON.format(context=_numbered(listed)), tuple(common))


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _build_fwe(rng: Random, size: int, spec: Spec) -> Draft:
    """About `size` coded words: the word of rank r occurs size / (ζ(2) r²) times.

    The most frequent one is "...", which is noise; the answer is the next three.
    """
    coded: dict[str, None] = {"...": None}
    while len(coded) < spec.length // 50:
        coded["".join(rng.choices(ascii_lowercase, k=6))] = None
    ranked = list(coded)
    text = [
        word for rank, word in enumerate(ranked, 1) for _ in range(int(size / (_ZETA_2 * rank**2)))
    ]
    rng.shuffle(text)
    return Draft(_FREQUENT.format(context=" ".join(text)), tuple(ranked[1:4]))


# Question answering: the documents that answer a question, among many others.

_QUESTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question "
    "based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {question} Answer:"
)


def _build_qa(rng: Random, size: int, index: int, data: Questions) -> Draft:
    """The index-th question, with `size` words of other documents; the last document is cut."""
    question = data.questions[index % len(data.questions)]
    shown = [data.documents[number] for number in question.needed]
    others = _other_documents(rng, question, data.documents)
    while size > 0:
        words = next(others).split(" ")[:size]
        shown.append(" ".join(words))
        size -= len(words)
    rng.shuffle(shown)
    context = "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(shown, 1))
    return Draft(_QUESTION.format(context=context, question=question.text), question.answers)


def _other_documents(rng: Random, question: Question, documents: Sequence[str]) -> Iterator[str]:
    """The related documents, then all others, then all of them again, without end."""
    for number in rng.sample(question.related, len(question.related)):
        yield documents[number]
    seen = {*question.needed, *question.related}
    while True:
        if len(seen) == len(documents):
            seen = {*question.needed}
        number = rng.randrange(len(documents))
        if number not in seen:
            seen.add(number)
            yield documents[number]


def _needle_task(name: str, haystack: str, **settings: Any) -> Task:
    dataset = "haystack" if haystack == "essay" else None
    return Task(name, 128, _Needles(haystack, **settings).build, dataset=dataset)


def _question_task(name: str, dataset: str) -> Task:
    def build(rng: Random, size: int, spec: Spec) -> Draft:
        return _build_qa(rng, size, spec.index, getattr(spec.datasets, dataset))

    return Task(name, 32, build, min_size=0, dataset=dataset, any_reference=True)


TASKS = {
    task.name: task
    for task in (
        _needle_task("niah_single_1", "noise"),
        _needle_task("niah_single_2", "essay"),
        _needle_task("niah_single_3", "essay", value="uuid"),
        _needle_task("niah_multikey_1", "essay", keys=4),
        _needle_task("niah_multikey_2", "needle"),
        _needle_task("niah_multikey_3", "needle", key="uuid", value="uuid"),
        _needle_task("niah_multivalue", "essay", values=4),
        _needle_task("niah_multiquery", "essay", keys=4, queries=4),
        Task("vt", 30, _build_vt),
        Task("cwe", 120, _build_cwe, min_size=_COMMON_WORDS + 1),
        Task("fwe", 50, _build_fwe, min_size=100),  # ranks 3 and 4 then occur 3 and 2 times
        _question_task("qa_1", "squad"),
        _question_task("qa_2", "hotpotqa"),
    )
}
