"""The data for RULER's prompts: a text to hide needles in, and datasets of questions."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from xlstm7b.files import check_file

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Question:
    """A question. Documents are given by their number in `Questions.documents`."""

    text: str
    answers: tuple[str, ...]  # any of them is right
    shown: tuple[int, ...]  # documents that are in every prompt: the answer is in them
    related: tuple[int, ...] = ()  # documents that are added first


@dataclass(frozen=True)
class Questions:
    """A dataset's questions, in its order, and all its documents, sorted."""

    questions: list[Question]
    documents: list[str]


@dataclass(frozen=True)
class Datasets:
    """None: not given, so the tasks that need it cannot run."""

    haystack: list[str] | None = None  # words
    squad: Questions | None = None
    hotpotqa: Questions | None = None

    @classmethod
    def read(
        cls, haystack: Path | None = None, squad: Path | None = None, hotpotqa: Path | None = None
    ) -> "Datasets":
        for path in (haystack, squad, hotpotqa):
            if path is not None:
                check_file(path)
        return cls(
            None if haystack is None else _read_haystack(haystack),
            None if squad is None else _read_questions(squad, "SQuAD v2", _squad),
            None if hotpotqa is None else _read_questions(hotpotqa, "HotpotQA", _hotpotqa),
        )


@cache
def sentence_splitter() -> tuple[str, Callable[[str], list[str]]]:
    """Name and function: NLTK's punkt, as in the benchmark, if its data is there; else "simple".

    The data comes with `nltk.download("punkt_tab")`. "simple" also splits after "Dr.".
    """
    try:
        from nltk.tokenize import sent_tokenize

        sent_tokenize("One. Two.")
    except (ImportError, LookupError):
        return "simple", re.compile(r"(?<=[.!?]) ").split
    return "punkt", sent_tokenize


def _read_haystack(path: Path) -> list[str]:
    """The words of a text file, or of the benchmark's PaulGrahamEssays.json."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix == ".json":
        text = _parsed(path, 'a JSON file with a "text"', lambda content: str(content["text"]))
    if not text.split():
        raise ValueError(f"{path} contains no words")
    return re.sub(r"\s+", " ", text).split(" ")


def _read_questions(path: Path, dataset: str, parse: Callable[[Any], Questions]) -> Questions:
    parsed = _parsed(path, f"a JSON file of {dataset}", parse)
    if not parsed.questions:
        raise ValueError(f"{path} contains no question with an answer")
    for question in parsed.questions:
        if not all(question.answers):
            raise ValueError(f"{path}: the question {question.text!r} has an empty answer")
    return parsed


def _parsed(path: Path, what: str, parse: Callable[[Any], Parsed]) -> Parsed:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not {what}: {error}") from error
    try:
        return parse(content)
    except KeyError as error:
        raise ValueError(f"{path} is not {what}: it has no field {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not {what}") from error


def _squad(content: Any) -> Questions:
    """SQuAD v2's dev-v2.0.json: the questions that have an answer."""
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    numbers = {text: number for number, text in enumerate(documents)}
    questions = []
    for article in articles:
        for paragraph in article:
            gold = numbers[paragraph["context"]]
            others = [numbers[other["context"]] for other in article]
            related = tuple(number for number in others if number != gold)
            for entry in paragraph["qas"]:
                answers = tuple(answer["text"] for answer in entry["answers"])
                if answers:
                    questions.append(Question(entry["question"], answers, (gold,), related))
    return Questions(questions, documents)


def _hotpotqa(content: Any) -> Questions:
    """HotpotQA's hotpot_dev_distractor_v1.json: ten paragraphs for each question."""
    paragraphs = [
        [f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]]
        for entry in content
    ]
    documents = sorted({text for texts in paragraphs for text in texts})
    numbers = {text: number for number, text in enumerate(documents)}
    questions = [
        Question(entry["question"], (entry["answer"],), tuple(numbers[text] for text in texts))
        for entry, texts in zip(content, paragraphs, strict=True)
    ]
    return Questions(questions, documents)
