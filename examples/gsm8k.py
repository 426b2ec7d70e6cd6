"""Test-time compute on GSM8K (grade-school maths): several samples for each question.

    python examples/gsm8k.py MODEL QUESTIONS.jsonl --method vote --n 8 --limit 50

MODEL is a checkpoint folder or a hub id. Each line of QUESTIONS.jsonl is an object with a
"question" and an "answer" that ends in "#### 42". The few-shot examples are read once into a state.
Each question is read on a copy of that state, and each sample starts from a copy of the result.
Methods:

    greedy   the most likely token at each step; many questions in one batch
    best     n samples; the one with the highest log-probability per token
    vote     n samples; the answer that most of them give
    tree     n samples of each line; the best few texts are continued

A model with random weights answers nothing right but runs through every step.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from xlstm7b.devices import to_device
from xlstm7b.generate import Generator
from xlstm7b.generate.search import best_of_n, self_consistency, tree_search

# Used if no --demonstrations file is given.
DEMONSTRATIONS = (
    (
        "A baker fills 6 trays with 8 rolls each and sells 30 rolls. How many rolls are left?",
        "The baker makes 6 * 8 = 48 rolls.\nAfter the sale 48 - 30 = 18 rolls are left.\n#### 18",
    ),
    (
        "Mina reads 15 pages a day. Her book has 180 pages, and she has read a third of it. How "
        "many more days does she need?",
        "She has read 180 / 3 = 60 pages.\nThere are 180 - 60 = 120 pages to go.\n"
        "That takes her 120 / 15 = 8 days.\n#### 8",
    ),
    (
        "A tent costs $240 and a lamp costs a quarter of that. What do two tents and one lamp "
        "cost in dollars?",
        "The lamp costs 240 / 4 = $60.\nTwo tents cost 2 * 240 = $480.\n"
        "Together that is 480 + 60 = $540.\n#### 540",
    ),
    (
        "Of 50 birds on a lake 20% are swans, and half of the others are ducks. How many ducks "
        "are there?",
        "There are 50 * 20 / 100 = 10 swans.\nThe others are 50 - 10 = 40 birds.\n"
        "Half of them, 40 / 2 = 20, are ducks.\n#### 20",
    ),
)

# A minus between two numbers is not a sign: the last number of "9-4" is 4.
_NUMBER = re.compile(
    r"((?<!\w)[-−])?(?:\$([-−])?)?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII
)
_STOP_STRINGS = ("\n\n", "Question:")  # the model has begun another question


class Question(NamedTuple):
    text: str
    solution: str
    answer: str


class Outcome(NamedTuple):
    """The answer to one question, and its cost: samples, and tokens generated in them."""

    answer: str | None
    samples: int
    tokens: int


def find_answer(text: str) -> str | None:
    """The number after "####", else the last number. In one notation: 1,234.50 becomes 1234.5."""
    before, marked, after = text.partition("####")
    found = _NUMBER.search(after) if marked else None
    found = found or next(reversed([*_NUMBER.finditer(before)]), None)
    if found is None:
        return None
    digits = found[3].replace(",", "")
    number = format(Decimal(digits), "f")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"-{number}" if (found[1] or found[2]) and number != "0" else number


def parse_question(line: str) -> Question:
    try:
        fields = json.loads(line)
        text, solution = fields["question"], fields["answer"]
    except (ValueError, KeyError, TypeError):
        text = solution = None
    if not isinstance(text, str) or not isinstance(solution, str):
        raise ValueError('this is not an object with a "question" and an "answer"')
    _, mark, after = solution.partition("####")
    answer = find_answer(mark + after)
    if answer is None:
        raise ValueError('the answer has no number after "####"')
    return Question(text, solution, answer)


def read_questions(path: Path, limit: int | None) -> list[Question]:
    """The first `limit` questions of a file. A `ValueError` names the line that is wrong."""
    questions: list[Question] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if len(questions) == limit:
            break
        if not line.strip():
            continue
        try:
            questions.append(parse_question(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not questions:
        raise ValueError(f"{path} contains no questions")
    return questions


def demonstrations(path: Path | None, count: int) -> str:
    """Few-shot examples: questions with solutions."""
    shown: Sequence[tuple[str, str]] = DEMONSTRATIONS
    if path is not None:
        shown = [(text, solution) for text, solution, _ in read_questions(path, count)]
    if count > len(shown):
        where = path or "the built-in list"
        raise ValueError(f"{where} has {len(shown)} demonstrations, not {count}")
    # GSM8K's calculator notes (<<6*8=48>>) are removed: no other text looks like that.
    return "\n\n".join(
        f"Question: {text}\nAnswer: {re.sub('<<.*?>>', '', solution)}"
        for text, solution in shown[:count]
    )


def to_prompt(question: Question) -> str:
    # The line breaks are here, not at the end of the examples: this way the two parts give the
    # same tokens as the whole text.
    return f"\n\nQuestion: {question.text}\nAnswer:"


def is_done(text: str) -> bool:
    """True if the text contains its last line completely."""
    return bool(re.search("####.*\n", text)) or any(stop in text for stop in _STOP_STRINGS)


class Solver:
    """The methods, on a generator that has read the few-shot examples."""

    def __init__(self, generator: Generator, shown: str, options: argparse.Namespace) -> None:
        self.generator, self.options = generator, options
        self.start = generator.read([shown])
        self.sampling = {"temperature": options.temperature, "seed": options.seed}
        self.length = {"max_new_tokens": options.max_new_tokens, "stop_strings": _STOP_STRINGS}

    def greedy(self, questions: Sequence[Question]) -> Iterator[Outcome]:
        size = self.generator.batch_size
        for first in range(0, len(questions), size):
            prompts = [*map(to_prompt, questions[first : first + size])]
            state = self.start.fork(len(prompts))
            for completion in self.generator.generate(
                prompts, state=state, temperature=0, **self.length
            ):
                yield Outcome(find_answer(completion.text), 1, len(completion.token_ids))

    def best(self, questions: Sequence[Question]) -> Iterator[Outcome]:
        n = self.options.n
        for prompt in map(to_prompt, questions):
            ranked = best_of_n(
                self.generator, prompt, n, state=self.start, **self.sampling, **self.length
            )
            tokens = sum(len(completion.token_ids) for _, completion in ranked)
            yield Outcome(find_answer(ranked[0][1].text), n, tokens)

    def vote(self, questions: Sequence[Question]) -> Iterator[Outcome]:
        n = self.options.n
        for prompt in map(to_prompt, questions):
            settings = {**self.sampling, **self.length, "answer": find_answer}
            vote = self_consistency(self.generator, prompt, n, state=self.start, **settings)
            tokens = sum(len(completion.token_ids) for completion in vote.completions)
            yield Outcome(vote.winner, n, tokens)

    def tree(self, questions: Sequence[Question]) -> Iterator[Outcome]:
        """Each step of the tree is a line, of at most max_new_tokens / depth tokens."""
        options = self.options
        settings = {
            "width": options.width,
            "depth": options.depth,
            "expand": max(1, options.n // options.width),
            "stop_strings": "\n",
            "max_new_tokens": max(1, options.max_new_tokens // options.depth),
            "done": is_done,
        }
        for prompt in map(to_prompt, questions):
            tree = tree_search(
                self.generator, prompt, state=self.start, **settings, **self.sampling
            )
            yield Outcome(find_answer(tree.best.text), tree.samples, tree.tokens)


METHODS: dict[str, Callable[[Solver, Sequence[Question]], Iterator[Outcome]]] = {
    "greedy": Solver.greedy,
    "best": Solver.best,
    "vote": Solver.vote,
    "tree": Solver.tree,
}


def solve(options: argparse.Namespace) -> None:
    """Answers the questions and prints the accuracy and the cost. Progress goes to stderr."""
    questions = read_questions(options.questions, options.limit)
    shown = demonstrations(options.demonstrations, options.shots)
    generator = Generator.from_pretrained(
        options.model, device=to_device(options.device), batch_size=options.batch_size
    )
    started = time.perf_counter()
    solver = Solver(generator, shown, options)
    right = samples = tokens = 0
    few_shot = solver.start.tokens_seen[0]
    read = few_shot  # tokens read: the examples once, and each question once
    without_states = 0  # tokens to read if each sample read its whole prompt again
    for number, (question, outcome) in enumerate(
        zip(questions, METHODS[options.method](solver, questions), strict=True), 1
    ):
        length = len(generator.tokenizer.encode(to_prompt(question)))
        right += outcome.answer == question.answer
        samples, tokens = samples + outcome.samples, tokens + outcome.tokens
        read += length
        without_states += outcome.samples * (few_shot + length)
        seconds = time.perf_counter() - started
        progress = f"\r{number}/{len(questions)} questions, {right} right, {seconds:.0f} s "
        print(progress, end="", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    print(file=sys.stderr)
    print(f"accuracy       {right / len(questions):.1%} ({right} of {len(questions)})")
    print(f"generated      {tokens:,} tokens in {samples:,} samples, {tokens / seconds:,.1f} tok/s")
    print(f"prompts        {read:,} tokens read; reuse saved {without_states - read:,}")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line. A user's mistake ends the program with one sentence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint folder or a hub id")
    add("questions", metavar="QUESTIONS", type=Path, help="JSONL file in GSM8K's format")
    add("--method", choices=METHODS, default="vote")
    add("--n", type=positive, default=8, help="samples per question; with tree, per line (8)")
    add("--limit", type=positive, help="answer only the first N questions")
    add("--shots", type=positive, default=4, help="number of few-shot examples (4)")
    add("--demonstrations", type=Path, metavar="FILE", help="JSONL file with the few-shot examples")
    add("--max-new-tokens", type=positive, default=256, help="maximum tokens of an answer (256)")
    add("--temperature", type=float, default=0.7, help="for all methods but greedy (0.7)")
    add("--seed", type=int, default=0)
    add("--width", type=positive, default=2, help="tree: number of texts that are continued (2)")
    add("--depth", type=positive, default=8, help="tree: maximum lines of an answer (8)")
    add("--batch-size", type=positive, default=32, help="sequences in a batch (32)")
    add("--device", help="cpu, cuda, cuda:1, … (a GPU if there is one)")
    try:
        solve(parser.parse_args(arguments))
    except (ValueError, OSError) as error:
        print(f"gsm8k: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
