"""A run over tasks and lengths: answers line by line into a folder, scores beside them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from xlstm7b.evaluate.results import write_json
from xlstm7b.evaluate.ruler.tasks import TASKS, Samples, Sources, Task

if TYPE_CHECKING:
    from xlstm7b.generate import Generator

SCORES, AVERAGE = "scores.json", "average"
_MOST_TOKENS = 1 << 19  # of prompts between two writes: an interruption loses no more than that


class Model(Protocol):
    """What answers prompts."""

    def answer(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]: ...


@dataclass(frozen=True)
class GreedyModel:
    """A generator that takes the likeliest token. Its own memory doesn't grow with a prompt."""

    generator: "Generator"

    def answer(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        completions = self.generator.generate(
            prompts, max_new_tokens=max_new_tokens, do_sample=False
        )
        return [completion.text for completion in completions]


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int  # of every task at every length
    seed: int

    def check(self) -> None:
        """Raises a `ValueError` with one sentence on the first thing that can't be done."""
        for name in self.tasks:
            if name not in TASKS:
                raise ValueError(f"there is no task {name!r}; there are: {', '.join(TASKS)}")
        for what, numbers in (("length", self.lengths), ("number of samples", (self.samples,))):
            for number in numbers:
                if number < 1:
                    raise ValueError(f"a {what} must be at least 1, not {number}")
        for what, values in (("task", self.tasks), ("length", self.lengths)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"name every {what} once, and at least one")


class Run:
    """A folder that answers go to. It is gone on with where it was left, by the same model only.

    `identity` is what must not change from one time to the next, None where it plays no part;
    `about` is what else the scores should tell.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        sources: Sources,
        count: Callable[[str], int],
        *,
        identity: Mapping[str, Any],
        about: Mapping[str, Any],
    ) -> None:
        plan.check()
        self._folder, self._plan, self._about = folder, plan, about
        self._identity = _same_identity(folder, identity)
        self.left_out: dict[str, str] = {}
        for name in plan.tasks:
            source = TASKS[name].source
            if source is not None and getattr(sources, source) is None:
                self.left_out[name] = f"no --{source} is given"
        self._cells = {
            (TASKS[name], length): Samples(TASKS[name], length, count, sources, plan.seed)
            for length, name in product(plan.lengths, plan.tasks)
            if name not in self.left_out
        }
        if not self._cells:
            raise ValueError(f"nothing can be made: {next(iter(self.left_out.values()))}")
        for samples in self._cells.values():
            samples.check(plan.samples)

    @property
    def total(self) -> int:
        """Samples in all, those answered before included."""
        return len(self._cells) * self._plan.samples

    def answer(
        self,
        load: Callable[[], Model],
        *,
        batch_size: int = 32,
        progress: Callable[[int], None] = lambda count: None,
    ) -> dict[str, Any]:
        """Has a model answer what is not answered yet; returns the scores.

        The model is only loaded if there is something left. `progress` is told how many more
        samples are done.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        results: dict[str, dict[str, float]] = {name: {} for name in self._plan.tasks}
        document = self._write(results)
        model = None
        for (task, length), samples in self._cells.items():
            path = self._folder / f"{task.name}-{length}.jsonl"
            scores = read_scores(path)[: self._plan.samples]
            progress(len(scores))
            rows = max(1, min(batch_size, _MOST_TOKENS // length))
            while len(scores) < self._plan.samples:
                model = model or load()
                indices = range(len(scores), min(len(scores) + rows, self._plan.samples))
                scores += _answer(path, model, task, samples, indices)
                progress(len(indices))
            results[task.name][to_metric(length)] = sum(scores) / len(scores)
            document = self._write(results)
        return document

    def _write(self, results: dict[str, dict[str, float]]) -> dict[str, Any]:
        """The scores so far; an average only of a length at which every task is done."""
        rows = [row for name, row in results.items() if name not in self.left_out]
        lengths = [str(length) for length in self._plan.lengths]
        metrics = [to_metric(length) for length in self._plan.lengths]
        average = {
            metric: sum(row[metric] for row in rows) / len(rows)
            for metric in metrics
            if all(metric in row for row in rows)
        }
        whole = {**results, AVERAGE: average}
        document = {
            "results": whole,
            "versions": dict.fromkeys(whole, 1),
            "higher_is_better": {name: dict.fromkeys(lengths, True) for name in whole},
            "left_out": self.left_out,
            "lengths": self._plan.lengths,
            "samples": self._plan.samples,
            **self._identity,
            **self._about,
        }
        write_json(self._folder / SCORES, document)
        return document


def to_metric(length: int) -> str:
    """A length's name in the harness's layout, in which every length is a metric."""
    return f"{length},none"


def _answer(
    path: Path, model: Model, task: Task, samples: Samples, indices: Sequence[int]
) -> list[float]:
    """Answers some samples and adds them to a file."""
    asked = [samples[index] for index in indices]
    answers = model.answer([sample.prompt for sample in asked], task.answer_tokens)
    reached = []
    with path.open("a", encoding="utf-8") as file:
        for index, sample, answer in zip(indices, asked, answers, strict=True):
            reached.append(task.score(answer, sample.references))
            line = {
                "index": index,
                "prompt": sample.prompt,
                "references": sample.references,
                "length": sample.length,
                "answer": answer,
                "score": reached[-1],
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
    return reached


def read_scores(path: Path) -> list[float]:
    """The scores of a file's lines in their order; a last line that was cut is removed."""
    scores: list[float] = []
    if not path.exists():
        return scores
    with path.open("rb+") as file:
        whole = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                answered = json.loads(line)
                assert answered["index"] == len(scores)
                scores.append(float(answered["score"]))
            except (ValueError, LookupError, TypeError, AssertionError) as error:
                raise ValueError(f"{path} is damaged in line {len(scores) + 1}") from error
            whole += len(line)
        file.truncate(whole)
    return scores


def _same_identity(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity, with what an earlier time has added to it; a `ValueError` if they differ."""
    path, before = folder / SCORES, {}
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            before["results"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is damaged: choose another --output") from error
    elif folder.exists() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise ValueError(f"{folder} holds something else than a run: choose another --output")
    merged = {}
    for name, value in identity.items():
        earlier = before.get(name)
        if value is not None and earlier is not None and value != earlier:
            raise ValueError(
                f"{folder} was begun with another {name.replace('_', ' ')}: choose another --output"
            )
        merged[name] = earlier if value is None else value
    return merged
