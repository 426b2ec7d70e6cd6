"""Writes texts that teach a small model to copy: passages, each followed by edited copies.

    python examples/copies.py books/train.jsonl.gz copies.jsonl --tokenizer tokenizer.json

examples/copies-160m.toml is the recipe of such a model, and has all commands.

A small model that has only read books continues a text in its own words. Speculation by lookup
gains little there: it needs a model that repeats its prompt where it is asked to. All copies of a
passage have the same edits, so a model learns to repeat the latest copy, not the passage.

Most passages are short and have many copies: what is to be copied is near, and comes often. Every
fourth passage has its words shuffled: then nothing but copying predicts them. Every fourth one has
random tokens instead, so that a model also copies tokens that are rare in the texts. There are many
texts, because a model that reads few of them again and again learns them by heart instead.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from xlstm7b.data.input_files import Columns, read_batches
from xlstm7b.files import check_file, check_writable, real_path, write_aside
from xlstm7b.tokenizer import open_tokenizer

LETTERS = 1500  # of all copies of a passage, about; at least two of them


def read_documents(path: Path) -> Iterator[list[str]]:
    """The sentences of each text."""
    check_file(path)
    for batch in read_batches(path, Columns()):
        for _, document in batch.documents():
            text = "".join(text for text, _ in document.segments)
            sentences = (" ".join(one.split()) for one in re.split(r"(?<=[.!?])\s+", text))
            yield [one for one in sentences if one]


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


def read_pieces(name: str) -> list[str]:
    """The texts of a tokenizer's tokens, without those that are only a part of a character."""
    tokenizer = open_tokenizer(name)
    ids = range(tokenizer.vocab_size)
    texts = (tokenizer.token_bytes(token).decode(errors="replace") for token in ids)
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


def write_copies(given: argparse.Namespace) -> None:
    draw, target = random.Random(given.seed), real_path(given.output)
    if given.count < 1:
        raise ValueError("--count must be at least 1")
    if target.is_dir() or target == real_path(given.texts):
        raise ValueError(f"cannot write {given.output}: choose another file")
    check_writable(target)
    pieces = read_pieces(given.tokenizer)
    documents = list(read_documents(given.texts))
    if not any(documents):
        raise ValueError(f"{given.texts} has no text")
    target.parent.mkdir(parents=True, exist_ok=True)
    with write_aside(target) as partial, partial.open("w") as file:
        for passage in islice(passages(documents, draw), given.count):
            kind = draw.random()
            if kind < 1 / 4:
                passage = shuffled(passage, draw)
            elif kind < 1 / 2:
                passage = random_tokens(passage, pieces, draw)
            copy = " ".join(edited(passage, draw))
            copies = min(max(2, LETTERS // len(copy)), 8)
            text = "\n\n".join([" ".join(passage), *[copy] * copies])
            file.write(json.dumps({"text": text}) + "\n")
    print(f"{given.output}: {given.count:,} texts")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes passages with edited copies.")
    parser.add_argument("texts", type=Path, help="a file that `xlstm7b prepare` reads")
    parser.add_argument("output", type=Path, help="the .jsonl file to write")
    parser.add_argument("--tokenizer", required=True, help="as for `xlstm7b prepare`")
    parser.add_argument("--count", type=int, default=100_000, help="number of passages (100,000)")
    parser.add_argument("--seed", type=int, default=0)
    try:
        write_copies(parser.parse_args(arguments))
    except (ValueError, OSError) as error:
        print(f"copies: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
