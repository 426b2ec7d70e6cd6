"""Writes texts that teach a small model to copy: passages, each followed by edited copies.

    python examples/copies.py books/train.jsonl.gz copies.jsonl --tokenizer tokenizer.json
    xlstm7b prepare copies.jsonl --output data/copies --tokenizer tokenizer.json
    python examples/copies_model.py copies-first
    xlstm7b train examples/copies-160m.toml

A small model that has only read books continues a text in its own words. Speculation by lookup
gains little there: it needs a model that repeats its prompt where it is asked to. All copies of a
passage have the same edits, so a model learns to repeat the latest copy, not the passage.

Most passages are short and have many copies: what is to be copied is near, and comes often. Every
fourth passage has its words shuffled: then nothing but copying predicts them. Every fourth one has
random tokens instead, so that a model also copies tokens that are rare in the texts. There are many
texts, because a model that reads few of them again and again learns them by heart instead.
"""

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

LETTERS = 1500  # of all copies of a passage, about; at least two of them


def read_documents(path: Path) -> Iterator[str]:
    """The texts of a .jsonl or .jsonl.gz file."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            yield json.loads(line)["text"]


def passages(documents: Sequence[list[str]], draw: random.Random) -> Iterator[list[str]]:
    """Random runs of 1 to 14 sentences, mostly short. Longer documents are drawn more often."""
    weights = [len(sentences) for sentences in documents]
    while True:
        (sentences,) = draw.choices(documents, weights)
        start, count = draw.randrange(len(sentences)), round(14 ** draw.random())
        yield sentences[start : start + count]


def shuffled(passage: Sequence[str], draw: random.Random) -> list[str]:
    """Sentences of as many words, in random order."""
    words = " ".join(passage).split()
    draw.shuffle(words)
    following = iter(words)
    return [" ".join(islice(following, len(sentence.split()))) for sentence in passage]


def random_tokens(passage: Sequence[str], pieces: Sequence[str], draw: random.Random) -> list[str]:
    """As many sentences, made from random pieces. A piece is the text of a token."""
    # About every second piece starts with a space.
    texts = ("".join(draw.choices(pieces, k=2 * len(sentence.split()))) for sentence in passage)
    return [" ".join(text.split()) for text in texts]


def read_pieces(path: Path) -> list[str]:
    """The texts of a tokenizer's tokens, without those that are only a part of a character."""
    tokenizer = Tokenizer.from_file(str(path))
    texts = (tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))
    return [text for text in texts if text.strip() and "\ufffd" not in text]


def edited(passage: Sequence[str], draw: random.Random) -> list[str]:
    """A word of about every third sentence is replaced by another word of the passage."""
    words = " ".join(passage).split()
    result = []
    for sentence in passage:
        own = sentence.split()
        if draw.random() < 1 / 3:
            own[draw.randrange(len(own))] = draw.choice(words)
        result.append(" ".join(own))
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes passages with edited copies.")
    parser.add_argument("texts", type=Path, help="a .jsonl or .jsonl.gz file with a field text")
    parser.add_argument("output", type=Path, help="the .jsonl file to write")
    parser.add_argument("--tokenizer", type=Path, required=True, help="its tokenizer.json")
    parser.add_argument("--count", type=int, default=100_000, help="number of passages")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    for path in (given.texts, given.tokenizer):
        if not path.is_file():
            parser.error(f"{path} is not a file")
    draw, pieces = random.Random(given.seed), read_pieces(given.tokenizer)
    documents = []
    for text in read_documents(given.texts):
        sentences = [" ".join(one.split()) for one in re.split(r"(?<=[.!?])\s+", text)]
        documents.append([one for one in sentences if one])
    if not any(documents):
        parser.error(f"{given.texts} has no text")
    partial = given.output.with_name(f"{given.output.name}.partial")
    with partial.open("w") as file:
        for _, passage in zip(range(given.count), passages(documents, draw), strict=False):
            kind = draw.random()
            if kind < 1 / 4:
                passage = shuffled(passage, draw)
            elif kind < 1 / 2:
                passage = random_tokens(passage, pieces, draw)
            copy = " ".join(edited(passage, draw))
            copies = min(max(2, LETTERS // len(copy)), 8)
            text = "\n\n".join([" ".join(passage), *[copy] * copies])
            file.write(json.dumps({"text": text}) + "\n")
    partial.replace(given.output)
    print(f"{given.output}: {given.count:,} texts")


if __name__ == "__main__":
    main()
