"""The data for RULER's prompts."""

import json
from pathlib import Path

import pytest
from ruler_cases import ESSAY, datasets, write_datasets

from xlstm7b.evaluate.ruler.datasets import Datasets, sentence_splitter


def test_the_haystack_may_be_the_benchmarks_own_file(tmp_path: Path) -> None:
    text, essays = tmp_path / "essays.txt", tmp_path / "PaulGrahamEssays.json"
    text.write_text("One  two.\n\nThree\tfour.\n")
    essays.write_text(json.dumps({"text": text.read_text()}))
    words = ["One", "two.", "Three", "four.", ""]
    assert Datasets.read(haystack=text).haystack == Datasets.read(essays).haystack == words


def test_questions_of_both_datasets() -> None:
    found = datasets()
    assert " ".join(found.haystack or []) == ESSAY
    squad, hotpotqa = found.squad, found.hotpotqa
    assert squad is not None
    assert hotpotqa is not None
    assert (len(squad.questions), len(squad.documents)) == (12, 12)
    for number, question in enumerate(squad.questions):
        town = f"{number // 4}{number % 4}"
        assert question.text == f"How many steps are there in town {town}?"
        assert question.answers == (f"{town}7", f"{town}7 steps")
        (gold,) = question.shown
        assert f"town {town} " in squad.documents[gold]
        shown = {squad.documents[n].split()[4] for n in question.related}
        assert shown == {f"{town[0]}{n}" for n in range(4)} - {town}
    assert (len(hotpotqa.questions), len(hotpotqa.documents)) == (5, 30)
    for number, question in enumerate(hotpotqa.questions):
        assert (question.answers, question.related) == ((f"River {number}",), ())
        titles = [hotpotqa.documents[n].split("\n")[0] for n in question.shown]
        lakes = [f"Lake {number}{n}" for n in range(4)]
        assert titles == [f"Person {number}", f"City {number}", *lakes]
    assert hotpotqa.documents == sorted(hotpotqa.documents)


def test_datasets_that_are_not_given_are_none(tmp_path: Path) -> None:
    paths = write_datasets(tmp_path)
    assert Datasets.read() == Datasets()
    assert Datasets.read(hotpotqa=paths["hotpotqa"]).squad is None


def test_sentences_are_split_by_nltk_if_it_has_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize = pytest.importorskip("nltk.tokenize", reason="nltk is not installed")

    def split(text: str) -> list[str]:
        return text.split("; ")

    def no_data(text: str) -> list[str]:
        raise LookupError("punkt_tab is not there")

    for function, name in ((split, "punkt"), (no_data, "simple")):
        monkeypatch.setattr(tokenize, "sent_tokenize", function)
        sentence_splitter.cache_clear()
        assert sentence_splitter()[0] == name
        assert sentence_splitter()[1]("One. Two; three.") == (
            ["One. Two", "three."] if name == "punkt" else ["One.", "Two; three."]
        )
    sentence_splitter.cache_clear()
