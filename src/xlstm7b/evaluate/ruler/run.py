"""A RULER run: a folder with answers, line by line, and scores; then table and plot."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlstm7b.evaluate.results import MISSING, read_file, read_metrics
from xlstm7b.evaluate.ruler.datasets import Datasets
from xlstm7b.evaluate.ruler.samples import Sample, Setting
from xlstm7b.evaluate.ruler.tasks import TASKS, Task
from xlstm7b.files import complete_lines, real_path, write_json
from xlstm7b.report import figure, table, token_ticks

if TYPE_CHECKING:
    from xlstm7b.generate import Generator

VERSION = "2025-01"  # of the benchmark's code, which has changed since: other versions score others
SCORES, AVERAGE = "scores.json", "average"
_MAX_BATCH_TOKENS = 1 << 19  # of prompts between two writes: an interruption loses no more

Answer = Callable[[Sequence[str], int], list[str]]
"""Takes prompts and the maximum tokens of each answer; returns the answers."""


def greedy_answers(generator: "Generator", ends: Sequence[int] | None = None) -> Answer:
    """Answers with the most likely token at each step.

    `ends` are the end-of-text ids; None means the model's own.
    """

    def answer(prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        completions = generator.generate(
            prompts, max_new_tokens=max_new_tokens, temperature=0, eos_token_id=ends
        )
        return [completion.text for completion in completions]

    return answer


@dataclass(frozen=True)
class Plan:
    """What to run: every task at every length, with `samples` samples each."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int

    def __post_init__(self) -> None:
        """`ValueError` for the first mistake."""
        for name in self.tasks:
            if name not in TASKS:
                raise ValueError(f"RULER has no task {name!r}; its tasks: {', '.join(TASKS)}")
        for what, number in (*(("a length", n) for n in self.lengths), ("samples", self.samples)):
            if number < 1:
                raise ValueError(f"{what} must be at least 1, not {number}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"the seed must be from 0 to {(1 << 32) - 1}, not {self.seed}")
        for what, values in (("task", self.tasks), ("length", self.lengths)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"give at least one {what}, and each {what} only once")


class Run:
    """A run in a folder. If the folder holds an earlier run of the same model, it continues it.

    `identity` must be equal each time: an entry that differs is a `ValueError`, an entry that is
    None is not compared. `about` is added to the scores file.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        datasets: Datasets,
        count_tokens: Callable[[str], int],
        *,
        identity: Mapping[str, Any],
        about: Mapping[str, Any],
    ) -> None:
        self._folder, self._plan, self._about = folder, plan, about
        self._identity = _checked_identity(folder, identity)
        self.left_out: dict[str, str] = {}  # a task -> why
        for name in plan.tasks:
            dataset = TASKS[name].dataset
            if dataset is not None and getattr(datasets, dataset) is None:
                self.left_out[name] = f"no --{dataset} is given"
        self._tasks = [TASKS[name] for name in plan.tasks if name not in self.left_out]
        if not self._tasks:
            reasons = dict.fromkeys(self.left_out.values())
            raise ValueError(f"none of these tasks can be run: {', '.join(reasons)}")
        self._cells: dict[tuple[Task, int], Setting] = {}
        for length, task in product(plan.lengths, self._tasks):
            setting = Setting(task.name, length, plan.seed, datasets, count_tokens)
            task.build(setting).check(plan.samples)
            self._cells[task, length] = setting

    @property
    def total(self) -> int:
        """The number of samples, with those that are already answered."""
        return len(self._cells) * self._plan.samples

    def answer(
        self,
        load: Callable[[], Answer],
        *,
        batch_size: int = 32,
        progress: Callable[[int], None] = lambda count: None,
    ) -> dict[str, Any]:
        """Answers all samples that have no answer yet. Returns the content of the scores file.

        `load` loads the model; it is not called if every sample has an answer. `progress` is called
        with the number of samples that were just finished.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        results: dict[str, dict[str, float]] = {name: {} for name in self._plan.tasks}
        document = self._write_scores(results)
        answer = None
        for (task, length), setting in self._cells.items():
            path = self._folder / str(length) / f"{task.name}.jsonl"
            scores = read_scores(path)[: self._plan.samples]
            progress(len(scores))
            if len(scores) < self._plan.samples:
                answer = answer or load()
                path.parent.mkdir(exist_ok=True)
                rows = max(1, min(batch_size, _MAX_BATCH_TOKENS // length))
                # Each sample depends on those before it, so also answered ones are built again.
                samples = islice(task.build(setting).samples(), len(scores), self._plan.samples)
                while batch := [*islice(samples, rows)]:
                    scores += _answer_samples(path, answer, task, batch, len(scores))
                    progress(len(batch))
            # In percent, rounded like the benchmark's own.
            results[task.name][_metric(length)] = round(sum(scores) / len(scores) * 100, 2)
            document = self._write_scores(results)
        return document

    def _write_scores(self, results: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Writes the scores so far; the average of a length only if all its tasks are done."""
        average = {}
        for metric in map(_metric, self._plan.lengths):
            scores = [results[task.name].get(metric) for task in self._tasks]
            done = [score for score in scores if score is not None]
            if len(done) == len(scores):
                average[metric] = sum(done) / len(done)
        with_average = {**results, AVERAGE: average}
        lengths = [str(length) for length in self._plan.lengths]
        document = {
            "results": with_average,
            "versions": dict.fromkeys(with_average, VERSION),
            "higher_is_better": {name: dict.fromkeys(lengths, True) for name in with_average},
            "left_out": self.left_out,
            "lengths": self._plan.lengths,
            "samples": self._plan.samples,
            "tasks": sorted(task.name for task in self._tasks),
            **self._identity,
            **self._about,
        }
        write_json(self._folder / SCORES, document)
        return document


def _metric(length: int) -> str:
    """The harness's layout has one metric for each length."""
    return f"{length},none"


def _answer_samples(
    path: Path, answer: Answer, task: Task, samples: Sequence[Sample], first: int
) -> list[float]:
    """Answers samples, appends them to a file, and returns their scores.

    The benchmark's own evaluate.py reads such a file. `first` is the number of the first sample.
    """
    answers = answer([sample.prompt for sample in samples], task.answer_tokens)
    scores = []
    with path.open("a", encoding="utf-8") as file:
        for index, (sample, text) in enumerate(zip(samples, answers, strict=True), first):
            scores.append(task.score(text, sample.references))
            line = {
                "index": index,
                "pred": text,
                "input": sample.prompt,
                "outputs": sample.references,
                "others": {"score": scores[-1]},
                "truncation": -1,
                "length": sample.length,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
    return scores


def read_scores(path: Path) -> list[float]:
    """The scores in a file of answers. An incomplete last line is removed from the file."""
    scores: list[float] = []
    for line in complete_lines(path) if path.exists() else ():
        try:
            answered = json.loads(line)
            assert answered["index"] == len(scores)
            scores.append(float(answered["others"]["score"]))
        except (ValueError, LookupError, TypeError, AssertionError) as error:
            raise ValueError(
                f"{path} is damaged in line {len(scores) + 1}; delete the file to answer its "
                f"samples again"
            ) from error
    return scores


def _checked_identity(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity; entries that are None are taken from the folder's earlier run, if any."""
    if real_path(folder).is_file():
        raise ValueError(f"{folder} is a file, not a folder; choose another --output")
    earlier: dict[str, Any] = {}
    if (folder / SCORES).exists():
        earlier = read_file(folder / SCORES)
    elif folder.exists() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise ValueError(f"{folder} has files, but not of a RULER run; choose another --output")
    merged = {}
    for name, value in identity.items():
        before = earlier.get(name)
        if value is not None and before is not None and value != before:
            raise ValueError(
                f"{folder} holds a run with {name.replace('_', ' ')} {before}, not {value}; choose "
                f"another --output"
            )
        merged[name] = before if value is None else value
    return merged


def score_table(document: Mapping[str, Any]) -> str:
    """A row for each task and one for the average, then the tasks that are not in the average."""
    lengths = document["lengths"]
    rows = []
    for name, scores in document["results"].items():
        values = [scores.get(_metric(length)) for length in lengths]
        rows.append([name, *(MISSING if value is None else f"{value:.1f}" for value in values)])
    left_out = [
        f"{MISSING} {name} is not in the average: {reason}"
        for name, reason in document["left_out"].items()
    ]
    return "\n".join([table(["", *map(str, lengths)], rows), *left_out])


def plot_scores(paths: Sequence[Path], output: Path) -> None:
    """Draws the average over the length, one line for each scores.json: the paper's figure."""
    curves: dict[str, dict[int, float]] = {}
    for path, name in zip(paths, model_names(paths), strict=True):
        metrics = read_metrics(path)
        averages = {int(n): score for (task, n), (score, _) in metrics.items() if task == AVERAGE}
        if not averages:
            raise ValueError(f"{path} has no RULER scores to draw")
        tasks = len({task for task, _ in metrics} - {AVERAGE})
        of_tasks = "" if tasks == len(TASKS) else f" ({tasks} of {len(TASKS)} tasks)"
        curves[name + of_tasks] = averages
    with figure(output) as axes:
        for label, averages in curves.items():
            axes.plot(*zip(*sorted(averages.items()), strict=True), marker="o", label=label)
        token_ticks(axes, [length for averages in curves.values() for length in averages])
        axes.set(title="RULER", xlabel="length in tokens", ylabel="average score, %", ylim=(0, 100))
        axes.grid(alpha=0.3)
        axes.legend()


def model_names(paths: Sequence[Path]) -> list[str]:
    """The model of each scores.json; with the folder's name if several have the same model."""
    names = [Path(str(read_file(path).get("model"))).name for path in paths]
    return [
        name if names.count(name) == 1 else f"{name}, {path.absolute().parent.name}"
        for name, path in zip(names, paths, strict=True)
    ]
