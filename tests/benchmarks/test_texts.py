"""Prompts of four kinds of text."""

from pathlib import Path

import pytest

import texts


def test_prompts_of_texts(tmp_path: Path) -> None:
    """Each row of a batch has its own; a file gives other sentences."""
    file = tmp_path / "book.txt"
    file.write_text("".join(f"This is the sentence of the number {n}.\n" for n in range(40)))
    for path in (None, file):
        sentences = texts.read_sentences(path)
        prompts = texts.make_prompts(sentences, 4)
        for kind, rows in prompts.items():
            assert len(set(rows)) == 4
            assert all(row == row.rstrip(" ") for row in rows)
            assert (path is None) or (kind == "code") or ("number 20." in rows[0])
        copied, question = prompts["copy"][0], prompts["question"][0]
        passage, edited, start = copied.split("\n\n")
        assert passage != edited
        assert edited.startswith(start)
        assert question.count("Question: ") == question.count("Answer: ") > 2
        assert question.endswith(f'after "{sentences[0]}"?\nAnswer: "')
        assert prompts["prose"][0] == " ".join(sentences[:2])
    file.write_text("One. Two.")
    with pytest.raises(ValueError, match="has 2 sentences: the texts need 12"):
        texts.read_sentences(file)
