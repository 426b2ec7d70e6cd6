"""Questions with documents: those that answer a question stand among many that don't."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from xlstm7b.evaluate.ruler.fitting import Draft

_TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question "
    "based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {question} Answer:"
)


@dataclass(frozen=True)
class Question:
    """A question, the texts of which any is an answer, and documents, all by their number."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]  # to answer it
    related: tuple[int, ...]  # of the same article, or chosen to mislead: they come first


@dataclass(frozen=True)
class Questions:
    """The questions of a dataset in their order, and all its documents."""

    questions: list[Question]
    documents: list[str]

    def build(self, rng: Random, size: int, index: int) -> Draft:
        """A prompt for the index-th question, with so many words of other documents.

        The last of these is cut where the words end.
        """
        question = self.questions[index % len(self.questions)]
        shown = [self.documents[number] for number in question.needed]
        others = self._others(rng, question)
        while size > 0:
            words = next(others).split(" ")[:size]
            shown.append(" ".join(words))
            size -= len(words)
        rng.shuffle(shown)
        context = "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(shown, 1))
        prompt = _TEMPLATE.format(context=context, question=question.text)
        return Draft(prompt, question.answers)

    def _others(self, rng: Random, question: Question) -> Iterator[str]:
        """Related documents, then all others, then over again."""
        for number in rng.sample(question.related, len(question.related)):
            yield self.documents[number]
        seen = {*question.needed, *question.related}
        while True:
            if len(seen) == len(self.documents):
                seen = {*question.needed}
            number = rng.randrange(len(self.documents))
            if number not in seen:
                seen.add(number)
                yield self.documents[number]


def read_squad(path: Path) -> Questions:
    """The questions of SQuAD v2's dev-v2.0.json that have an answer."""
    documents: dict[str, int] = {}
    questions: list[Question] = []
    with _reading(path, "SQuAD v2"):
        for article in _read(path)["data"]:
            paragraphs = article["paragraphs"]
            numbers = [documents.setdefault(p["context"], len(documents)) for p in paragraphs]
            for paragraph, number in zip(paragraphs, numbers, strict=True):
                related = tuple(n for n in dict.fromkeys(numbers) if n != number)
                for asked in paragraph["qas"]:
                    answers = dict.fromkeys(answer["text"] for answer in asked["answers"])
                    if answers:
                        question = asked["question"]
                        questions.append(Question(question, (*answers,), (number,), related))
    return _checked(path, questions, documents)


def read_hotpotqa(path: Path) -> Questions:
    """The questions of HotpotQA's hotpot_dev_distractor_v1.json."""
    documents: dict[str, int] = {}
    questions: list[Question] = []
    with _reading(path, "HotpotQA"):
        for asked in _read(path):
            numbers = {
                title: documents.setdefault(f"{title}\n{''.join(sentences)}", len(documents))
                for title, sentences in asked["context"]
            }
            titles = {title for title, _ in asked["supporting_facts"]}
            needed = tuple(n for title, n in numbers.items() if title in titles)
            related = tuple(n for title, n in numbers.items() if title not in titles)
            questions.append(Question(asked["question"], (asked["answer"],), needed, related))
    return _checked(path, questions, documents)


@contextmanager
def _reading(path: Path, dataset: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not {dataset}'s JSON file: {error!r}") from error


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _checked(path: Path, questions: list[Question], documents: dict[str, int]) -> Questions:
    for question in questions:
        if not all(question.answers) or len(question.needed) == len(documents):
            raise ValueError(f"{path}: {question.text!r} has an empty answer or no other documents")
    if not questions:
        raise ValueError(f"{path} holds no question with an answer")
    return Questions(questions, list(documents))
