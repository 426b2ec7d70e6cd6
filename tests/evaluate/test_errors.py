"""What the package refuses: the type of the error, and the value or option that it names."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness_tasks import add_answered, add_choices
from naive_scoring import small_model
from ruler_cases import count_bytes

from xlstm7b.config import ModelConfig
from xlstm7b.evaluate.perplexity import perplexity, read_documents
from xlstm7b.evaluate.results import comparison_table
from xlstm7b.evaluate.ruler.datasets import Datasets
from xlstm7b.evaluate.ruler.run import Plan, Run
from xlstm7b.evaluate.scoring import Continuation, Scorer
from xlstm7b.model import XLSTM
from xlstm7b.model.saved_state import SavedState
from xlstm7b.tokenizer import ByteTokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

from xlstm7b.evaluate import harness
from xlstm7b.evaluate.harness import XLSTM7B, KeptResponses, expand_presets, load_tasks

MODEL = small_model()
SCORER = Scorer(MODEL)
WITHOUT_FIRST = Scorer(XLSTM(ModelConfig(32, 1, 2, vocab_size=24, force_bos_token_insert=False)))


def state(rows: int = 1, layers: int = 2) -> SavedState:
    """The state of a text, by the model above or by another one."""
    from xlstm7b.generate import Generator

    model = XLSTM(ModelConfig(32, layers, 2, vocab_size=24))
    return Generator(model, ByteTokenizer()).read([[1, 2]]).fork(rows)


def plan(folder: Path, *settings: Any, data: Datasets | None = None) -> Run:
    about: dict[str, Any] = {"identity": {}, "about": {}}
    return Run(folder / "run", Plan(*settings), data or Datasets(), count_bytes, **about)


def choices(folder: Path, shots: int, examples: str | None = None) -> None:
    add_choices(folder, "choices", questions=2, shots=1, words=1)
    if examples is not None:
        (folder / "choices_dev.json").write_text(examples)
    load_tasks(["choices"], folder, shots)


def answered(folder: Path, old: str, new: str) -> None:
    """A task of answers, with a change of its YAML file."""
    add_answered(folder, "answered", {"a": "b"})
    path = folder / "answered.yaml"
    path.write_text(path.read_text().replace(old, new))
    load_tasks(["answered"], folder)


def unknown_task(folder: Path) -> None:
    add_choices(folder, "choices", questions=1, shots=0, words=1)
    with pytest.MonkeyPatch.context() as patch:
        few = partial(harness.TaskManager, include_defaults=False)  # listing all takes long
        patch.setattr(harness, "TaskManager", few)
        load_tasks(["choices", "chioces"], folder)


def written(folder: Path, content: Any) -> Path:
    path = folder / "file"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


Case = tuple[Callable[[Path], Any], str]
CASES: dict[str, list[Case]] = {
    "scoring": [
        (lambda _: SCORER.score([Continuation([1], [])]), "continuation"),
        (lambda _: SCORER.score([Continuation([1], [24])]), "token 24"),
        (lambda _: SCORER.score([Continuation([-1], [2])]), "token -1"),
        (lambda _: SCORER.logprobs([[3, 99]]), "token 99"),
        (lambda _: SCORER.logprobs([[3]], state=state(2)), "one state, not 2"),
        (lambda _: SCORER.logprobs([[3]], state=state(layers=1)), "another model"),
        (lambda _: SCORER.divergence(XLSTM(ModelConfig(32, 1, 2, vocab_size=9)), []), "of 9"),
        (lambda _: SCORER.divergence(MODEL, [[24]]), "token 24"),
        (lambda _: WITHOUT_FIRST.score([Continuation([], [5])]), "prompt is empty"),
    ],
    "perplexity": [
        (lambda _: perplexity(SCORER, ByteTokenizer(), ["", ""]), "no text"),
        (
            lambda _: perplexity(SCORER, ByteTokenizer(), [], state=state(), reference=MODEL),
            "reference cannot be combined with a state",
        ),
        (lambda folder: [*read_documents([written(folder, "")])], "file"),
    ],
    "results": [
        (lambda folder: comparison_table([folder / "none"]), "none"),
        (lambda folder: comparison_table([folder]), "no results file"),
        (lambda folder: comparison_table([written(folder, "{")]), "not a JSON file"),
        (lambda folder: comparison_table([written(folder, [])]), '"results"'),
        (lambda folder: comparison_table([written(folder, {"results": 1})]), '"results"'),
        (lambda folder: comparison_table([written(folder, {"results": {"a": 1}})]), "'a'"),
        (lambda folder: comparison_table([written(folder, {"results": {}})]), "metric"),
    ],
    "harness": [
        (lambda _: XLSTM7B("nowhere"), "nowhere"),
        (lambda _: expand_presets(["leaderboard-v1", "piqa"]), "'piqa' is given twice"),
        (lambda _: expand_presets([]), "leaderboard-v1, leaderboard-v2"),
        (lambda folder: load_tasks([], folder / "none"), "none does not exist"),
        (lambda folder: load_tasks([], folder), "contains no task"),
        (lambda folder: answered(folder, "task: ", "task: ["), "answered.yaml is not a YAML file"),
        (lambda folder: answered(folder, "do_sample: false", "num_beams: 4"), "'num_beams'"),
        (lambda folder: answered(folder, "temperature: 0.0", "top_p: 7"), "top_p"),
        (lambda folder: choices(folder, 6), "num_fewshot is 6, but the task 'choices' has 5"),
        (lambda folder: choices(folder, 1, "{"), "data of task 'choices'"),
        (unknown_task, "'chioces'"),
        (lambda folder: KeptResponses(written(folder, "[]x\n"), {}), "damaged"),
        (lambda folder: KeptResponses(written(folder, "[1]\n"), {}), "damaged"),
    ],
    "ruler": [
        (lambda _: Plan(("nia",), (4096,), 1, 42), "'nia'"),
        (lambda _: Plan(("vt",), (4096, 0), 1, 42), "length must be at least 1, not 0"),
        (lambda _: Plan(("vt",), (4096,), 0, 42), "samples must be at least 1, not 0"),
        (lambda _: Plan(("vt",), (4096,), 1, -1), "seed must be from 0 to 4294967295, not -1"),
        (lambda _: Plan(("vt",), (4096,), 1, 1 << 32), "not 4294967296"),
        (lambda _: Plan(("vt",), (4096, 4096), 1, 42), "each length only once"),
        (lambda _: Plan((), (4096,), 1, 42), "at least one task"),
        (lambda folder: plan(folder, ("qa_1",), (4096,), 1, 42), "no --squad"),
        (lambda folder: plan(folder, ("vt",), (600,), 1, 42), "600 is too short for vt"),
        (lambda folder: plan(folder, ("fwe",), (199,), 1, 42), "199 is too short for fwe"),
        (lambda folder: plan(written(folder, "").parent / "file", ("vt",), (8192,), 1, 42), "file"),
    ],
    "ruler data": [
        (lambda folder: Datasets.read(squad=folder / "none"), "none"),
        (lambda folder: Datasets.read(squad=folder), "is a folder"),
        (lambda folder: Datasets.read(squad=written(folder, "x")), "SQuAD v2"),
        (lambda folder: Datasets.read(squad=written(folder, {})), "no field 'data'"),
        (lambda folder: Datasets.read(hotpotqa=written(folder, [1])), "HotpotQA"),
        (lambda folder: Datasets.read(hotpotqa=written(folder, [])), "no question"),
        (
            lambda folder: Datasets.read(
                hotpotqa=written(folder, [{"question": "Why?", "answer": "", "context": []}])
            ),
            "'Why?' has an empty answer",
        ),
        (lambda folder: Datasets.read(haystack=written(folder, " \n")), "no words"),
        (
            lambda folder: Datasets.read(haystack=written(folder, "[]").rename(folder / "a.json")),
            '"text"',
        ),
    ],
}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        pytest.param(*case, id=f"{module}: {case[1]}")
        for module, cases in CASES.items()
        for case in cases
    ],
)
def test_refused(call: Callable[[Path], Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (what it names is compared below)
        call(tmp_path)
    assert named in str(raised.value)
    assert not (tmp_path / "run").exists()
