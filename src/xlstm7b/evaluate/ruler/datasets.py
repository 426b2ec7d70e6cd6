"""The data for RULER's prompts: a text to hide needles in, and datasets of questions."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Question:
    """A question. Documents are given by their number in `Questions.documents`."""

    text: str
    answers: tuple[str, ...]  # any of them is right
    needed: tuple[int, ...]  # documents that answer it
    related: tuple[int, ...]  # documents of the same article, or chosen to mislead


@dataclass(frozen=True)
class Questions:
    """A dataset's questions, in its order, and all its documents."""

    questions: list[Question]
    documents: list[str]


@dataclass(frozen=True)
class Datasets:
    """The words of the haystack, and two datasets. None: not given, so its tasks cannot run."""

    haystack: list[str] | None = None
    squad: Questions | None = None
    hotpotqa: Questions | None = None

    @classmethod
    def read(
        cls, haystack: Path | None = None, squad: Path | None = None, hotpotqa: Path | None = None
    ) -> "Datasets":
        return cls(
            None if haystack is None else _read_words(haystack),
            None if squad is None else _read_questions(squad, "SQuAD v2", _squad),
            None if hotpotqa is None else _read_questions(hotpotqa, "HotpotQA", _hotpotqa),
        )


def _read_words(path: Path) -> list[str]:
    try:
        words = path.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not words:
        raise ValueError(f"{path} contains no words")
    return words


def _read_questions(path: Path, dataset: str, parse: "_Parse") -> Questions:
    documents: dict[str, int] = {}
    try:
        questions = list(parse(json.loads(path.read_text(encoding="utf-8")), documents))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file of {dataset}: {error!r}") from error
    if not questions:
        raise ValueError(f"{path} contains no question with an answer")
    for question in questions:
        if not all(question.answers):
            raise ValueError(f"{path}: the question {question.text!r} has an empty answer")
        if len(question.needed) == len(documents):
            raise ValueError(f"{path}: the question {question.text!r} needs all documents")
    return Questions(questions, list(documents))


# Parsers yield questions, and add documents with their numbers.
_Parse = Callable[[Any, dict[str, int]], Iterator[Question]]


def _squad(content: Any, documents: dict[str, int]) -> Iterator[Question]:
    """SQuAD v2's dev-v2.0.json: the questions that have an answer."""
    for article in content["data"]:
        paragraphs = article["paragraphs"]
        numbers = [documents.setdefault(p["context"], len(documents)) for p in paragraphs]
        for paragraph, number in zip(paragraphs, numbers, strict=True):
            related = tuple(n for n in dict.fromkeys(numbers) if n != number)
            for entry in paragraph["qas"]:
                answers = dict.fromkeys(answer["text"] for answer in entry["answers"])
                if answers:
                    yield Question(entry["question"], (*answers,), (number,), related)


def _hotpotqa(content: Any, documents: dict[str, int]) -> Iterator[Question]:
    """HotpotQA's hotpot_dev_distractor_v1.json."""
    for entry in content:
        numbers = {
            title: documents.setdefault(f"{title}\n{''.join(sentences)}", len(documents))
            for title, sentences in entry["context"]
        }
        titles = {title for title, _ in entry["supporting_facts"]}
        needed = tuple(n for title, n in numbers.items() if title in titles)
        related = tuple(n for title, n in numbers.items() if title not in titles)
        yield Question(entry["question"], (entry["answer"],), needed, related)
