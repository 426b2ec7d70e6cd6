"""The benchmark's 13 tasks: samples of any length, each from the seed and its number alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from xlstm7b.evaluate.ruler.counting import COMMON_WORDS, build_common, build_frequent
from xlstm7b.evaluate.ruler.fitting import Draft, Fitted, Fitting
from xlstm7b.evaluate.ruler.needles import Needles
from xlstm7b.evaluate.ruler.questions import Questions, read_hotpotqa, read_squad
from xlstm7b.evaluate.ruler.variables import build_chain


@dataclass(frozen=True)
class Sources:
    """What some tasks are made from: an essay's words, and two datasets of questions."""

    haystack: list[str] | None = None
    squad: Questions | None = None
    hotpotqa: Questions | None = None

    @classmethod
    def read(
        cls, haystack: Path | None = None, squad: Path | None = None, hotpotqa: Path | None = None
    ) -> "Sources":
        return cls(
            None if haystack is None else _read_words(haystack),
            None if squad is None else read_squad(squad),
            None if hotpotqa is None else read_hotpotqa(hotpotqa),
        )


@dataclass(frozen=True)
class Work:
    """What a prompt is built for: a wanted length, a sample's number, and the data there is."""

    length: int
    index: int
    sources: Sources


@dataclass(frozen=True)
class Task:
    """How a task's prompts are built, how long its answers may be, and how they are scored."""

    name: str
    answer_tokens: int
    build: Callable[[Random, int, Work], Draft]
    least: int = 1  # size of a prompt that makes sense
    source: str | None = None  # the name of what it can't be made without
    any_reference: bool = False  # one of the references is enough

    def score(self, answer: str, references: Sequence[str]) -> float:
        """The percentage of references that the answer has in it, in whatever case."""
        found = [reference.lower() in answer.lower() for reference in references]
        return 100.0 * (any(found) if self.any_reference else sum(found) / len(found))


@dataclass(frozen=True)
class Sample:
    prompt: str
    references: tuple[str, ...]
    length: int  # in tokens, with room for the answer


class Samples:
    """A task's samples at one length, by their number.

    Which other samples, tasks or lengths are asked for makes no difference to any of them.
    """

    def __init__(
        self, task: Task, length: int, count: Callable[[str], int], sources: Sources, seed: int
    ) -> None:
        self._task, self._length, self._count = task, length, count
        self._sources, self._seed = sources, seed

    def __getitem__(self, index: int) -> Sample:
        fitted = self._first if index == 0 else self._fitting(index).fit(self._first.size)
        draft = fitted.draft
        return Sample(draft.prompt, draft.references, fitted.tokens + self._task.answer_tokens)

    def check(self, count: int) -> None:
        """Raises a `ValueError` if the length is too short for one of the first so many samples.

        What questions need differs much in length. All else is nearly as long as the first.
        """
        first = self._fitting(0)
        if self._task.any_reference or 2 * first.shortest().tokens > first.longest:
            for index in range(count):
                self._fitting(index).shortest()

    @cached_property
    def _first(self) -> Fitted:
        """From its size every other sample's search starts, and mostly ends there."""
        return self._fitting(0).fit(self._task.least + 64)

    def _fitting(self, index: int) -> Fitting:
        task, work = self._task, Work(self._length, index, self._sources)
        seed = f"{self._seed}/{task.name}/{self._length}/{index}"
        return Fitting(
            f"{self._length} tokens for {task.name}",
            lambda size: task.build(Random(seed), size, work),
            self._count,
            task.least,
            self._length - task.answer_tokens,
        )


def _needles(name: str, haystack: str, **settings: Any) -> Task:
    needles = Needles(haystack, **settings)

    def build(rng: Random, size: int, work: Work) -> Draft:
        return needles.build(rng, size, work.sources.haystack or [])

    return Task(name, 128, build, source="haystack" if haystack == "essay" else None)


def _questions(name: str, source: str) -> Task:
    def build(rng: Random, size: int, work: Work) -> Draft:
        questions: Questions = getattr(work.sources, source)
        return questions.build(rng, size, work.index)

    return Task(name, 32, build, least=0, source=source, any_reference=True)


TASKS = {
    task.name: task
    for task in (
        _needles("niah_single_1", "noise"),
        _needles("niah_single_2", "essay"),
        _needles("niah_single_3", "essay", value="uuid"),
        _needles("niah_multikey_1", "essay", keys=4),
        _needles("niah_multikey_2", "needle"),
        _needles("niah_multikey_3", "needle", key="uuid", value="uuid"),
        _needles("niah_multivalue", "essay", values=4),
        _needles("niah_multiquery", "essay", keys=4, queries=4),
        Task("vt", 30, lambda rng, size, work: build_chain(rng, size)),
        Task(
            "cwe",
            120,
            lambda rng, size, work: build_common(rng, size, work.length),
            least=COMMON_WORDS + 1,
        ),
        Task(
            "fwe",
            50,
            lambda rng, size, work: build_frequent(rng, size, work.length),
            least=100,  # the third and the fourth word then come 3 and 2 times
        ),
        _questions("qa_1", "squad"),
        _questions("qa_2", "hotpotqa"),
    )
}


def _read_words(path: Path) -> list[str]:
    try:
        words = path.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not words:
        raise ValueError(f"{path} holds no words")
    return words
