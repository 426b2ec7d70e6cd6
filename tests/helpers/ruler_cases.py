"""For RULER's tests: small datasets, two tokenizers, and models that solve every prompt or none."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from xlstm7b.evaluate.ruler.datasets import Datasets
from xlstm7b.evaluate.ruler.samples import Builder, Sample, Setting
from xlstm7b.evaluate.ruler.tasks import TASKS
from xlstm7b.tokenizer import ByteTokenizer, FileTokenizer

ESSAY = " ".join(
    f"On day {day} the ferry came {'late' if day % 3 else 'early'}, and {day * 7} people waited!"
    f" Was it the {('fog', 'tide', 'wind')[day % 3]}? Nobody said."
    for day in range(40)
)


def write_datasets(folder: Path) -> dict[str, Path]:
    """Writes an essay, and questions in both datasets' formats. Some have no answer."""
    paths = {name: folder / f"{name}.txt" for name in ("haystack", "squad", "hotpotqa")}
    paths["haystack"].write_text(ESSAY)
    articles = []
    for article in range(3):
        paragraphs = []
        for town in range(4):
            facts = f"The tower of town {article}{town} has {article}{town}7 steps. " * 6
            question = {"question": f"How many steps are there in town {article}{town}?"}
            answers = [{"text": f"{article}{town}7"}, {"text": f"{article}{town}7 steps"}]
            none = {"question": "Who counted?", "answers": [], "is_impossible": True}
            paragraphs.append({"context": facts, "qas": [none, {**question, "answers": answers}]})
        articles.append({"title": str(article), "paragraphs": paragraphs})
    paths["squad"].write_text(json.dumps({"data": articles}))
    hops = []
    for number in range(5):
        context = [[f"Person {number}", [f"Person {number} lives in City {number}. "] * 5]]
        context += [[f"City {number}", [f"City {number} lies on River {number}."] * 5]]
        context += [[f"Lake {number}{n}", [f"Lake {number}{n} is deep."] * 8] for n in range(4)]
        facts = [[f"Person {number}", 0], [f"City {number}", 0]]
        question = {"question": f"On what river does Person {number} live?"}
        hops.append({**question, "answer": f"River {number}", "supporting_facts": facts})
        hops[-1]["context"] = context
    paths["hotpotqa"].write_text(json.dumps(hops))
    return paths


@cache
def datasets() -> Datasets:
    with TemporaryDirectory() as folder:
        return Datasets.read(**write_datasets(Path(folder)))


def count_bytes(text: str) -> int:
    return len(ByteTokenizer().encode(text))


@cache
def count_bpe() -> Callable[[str], int]:
    """Counts tokens of a small byte-level BPE vocabulary."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        [ESSAY, "One of the special magic numbers for grass is: 12."], trainer
    )
    with TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        tokenizer = FileTokenizer(Path(folder) / "tokenizer.json")
    return lambda text: len(tokenizer.encode(text))


def builder(
    name: str,
    length: int = 8192,
    seed: int = 42,
    count: Callable[[str], int] = count_bytes,
    data: Datasets | None = None,
) -> Builder:
    return TASKS[name].build(Setting(name, length, seed, data or datasets(), count))


def build(
    name: str,
    number: int,
    length: int = 8192,
    seed: int = 42,
    count: Callable[[str], int] = count_bytes,
    data: Datasets | None = None,
) -> list[Sample]:
    """The first samples of a task."""
    return [*islice(builder(name, length, seed, count, data).samples(), number)]


def solve(prompt: str) -> str:
    """The right answer to a prompt of any task, found in the prompt alone."""
    if "special magic" in prompt:
        query = re.findall(r"magic \w+ for (.+?) mentioned in the provided", prompt)[-1]
        found = [needles_of(prompt).get(key, []) for key in re.split(r", and |, ", query)]
        return "; ".join(value for values in found for value in values)
    if "chain(s)" in prompt:
        question = prompt[prompt.rindex("Memorize and track") :]
        value = re.findall(r"assigned the value (\d+)", question)[0]
        assigned = assignments(question)
        return " ".join(name for name in assigned if resolved(assigned, name) == value)
    if "numbered list" in prompt:
        return ", ".join(word for word, _ in listed_words(prompt).most_common(10))
    if "coded text" in prompt:
        return " ".join(word for word, _ in coded_words(prompt).most_common(4)[1:])
    town = re.findall(r"in town (\d+)\? Answer:$", prompt)
    person = re.findall(r"does Person (\d+) live\? Answer:$", prompt)
    if town:
        return re.findall(rf"The tower of town {town[0]} has (\d+) steps", prompt)[0]
    city = re.findall(rf"Person {person[0]} lives in (City \d+)", prompt)[0]
    return re.findall(rf"{city} lies on (River \d+)", prompt)[0]


def needles_of(prompt: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"One of the special magic \w+s for (.+?) is: (\S+)\.", prompt):
        found.setdefault(key, []).append(value)
    return found


def assignments(text: str) -> dict[str, str]:
    return dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))


def resolved(assigned: dict[str, str], name: str) -> str:
    while name in assigned:
        name = assigned[name]
    return name


def listed_words(prompt: str) -> Counter[str]:
    question = prompt[prompt.rindex("Below is") :].split("\n")[1]
    return Counter(re.split(r" ?\d+\. ", question)[1:])


def coded_words(prompt: str) -> Counter[str]:
    return Counter(prompt.split("coded words. ")[1].split("\n")[0].split(" "))


class PerfectModel:
    """Answers every prompt right, and counts the prompts."""

    def __init__(self) -> None:
        self.prompts = 0

    def __call__(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        self.prompts += len(prompts)
        return [solve(prompt) for prompt in prompts]


class EmptyModel:
    """Answers every prompt with nothing."""

    def __call__(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        return [""] * len(prompts)
