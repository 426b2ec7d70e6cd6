"""Prompts of four kinds of text, made from a few sentences: those below, or those of a text file.

A copy of a passage with edits, code in a file with repeats, answers that quote a document, and free
prose.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from xlstm7b.report import counted

_TEXT = """
The harbour lies at the end of a narrow bay. Every morning at six the ferry leaves for the islands
with mail, bread and a few passengers. In winter it sails only twice a week. The crew knows every
rock of the coast by name. On the largest island there is a school with eleven children. Their
teacher came for one year and stayed for twenty. She keeps a list of all birds that she has seen
from her window. Last spring a storm took the roof of the old boathouse. The fishermen built a new
one in three days. They used timber from a ship that had run aground. Since then the swallows nest
under its beams. Nobody has ever thought of chasing them away.
"""
_NAMES = ("width", "height", "depth", "weight", "volume", "colour", "price")
_FUNCTION = '''def read_{0}(path):
    """Returns the {0} that is stored in a file."""
    with open(path) as file:
        values = json.load(file)
    if "{0}" not in values:
        raise ValueError("the file has no {0}")
    return values["{0}"]


'''
_SENTENCES = 12  # of a passage
_LETTERS = 1500  # most of a passage
_STEP = 5  # sentences from the start of one passage to that of the next


def read_sentences(path: Path | None) -> list[str]:
    """The sentences of a text file from its middle on, then those before; None: built-in ones."""
    if path is None:
        return _split(_TEXT)
    found = _split(read_text(path))
    if len(found) < _SENTENCES:
        has = counted(len(found), "sentence")
        raise ValueError(f"{path} has {has}: the texts need {_SENTENCES}")
    middle = len(found) // 2
    return found[middle:] + found[:middle]


def read_text(path: Path) -> str:
    """The text of a file. `ValueError` if it is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _split(text: str) -> list[str]:
    return [" ".join(one.split()) for one in re.split(r"(?<=[.!?])\s+", text) if one.strip()]


def make_prompts(sentences: Sequence[str], count: int) -> dict[str, list[str]]:
    """This many prompts of each kind of text, by kind."""
    found: dict[str, list[str]] = {"copy": [], "code": [], "question": [], "prose": []}
    for row in range(count):
        start = row * _STEP % len(sentences)
        passage = [*sentences[start:], *sentences[:start]][:_SENTENCES]
        while len(passage) > 4 and sum(map(len, passage)) > _LETTERS:
            passage.pop()
        for kind, make in _KINDS.items():
            found[kind].append(make(passage, row))
    return found


def _copy(passage: Sequence[str], row: int) -> str:
    """The passage, the passage with an edit in every third sentence, and the start of that."""
    edited = [
        one.replace(" the ", " that ", 1) if number % 3 == row % 3 else one
        for number, one in enumerate(passage)
    ]
    return "\n\n".join([" ".join(passage), " ".join(edited), edited[0]])


def _code(passage: Sequence[str], row: int) -> str:
    """Functions that differ in a name, and the start of the next one."""
    names = [_NAMES[(row + number) % len(_NAMES)] for number in range(len(_NAMES))]
    functions = "".join(map(_FUNCTION.format, names[:-1]))
    return f"import json\n\n\n{functions}def read_{names[-1]}(path):\n"


def _question(passage: Sequence[str], row: int) -> str:
    """Questions about a document whose answers quote it. The last answer is missing."""
    asked = [*range(1, len(passage) - 1, 2), 0]
    questions = [f'Question: What comes after "{passage[n]}"?\nAnswer: "' for n in asked]
    answers = [f'{passage[n + 1]}"\n\n' for n in asked[:-1]]
    pairs = [f"{question}{answer}" for question, answer in zip(questions, answers, strict=False)]
    return f"Document: {' '.join(passage)}\n\n{''.join(pairs)}{questions[-1]}"


def _prose(passage: Sequence[str], row: int) -> str:
    return " ".join(passage[:2])


_KINDS = {"copy": _copy, "code": _code, "question": _question, "prose": _prose}
