import json
import math
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm7b import XLSTM
from xlstm7b.config import ModelConfig
from xlstm7b.data.pack import PackedDataset
from xlstm7b.data.shards import open_folder
from xlstm7b.evaluate.recall import (
    FIRST_BYTE,
    FIRST_KEY,
    EvaluationSettings,
    Sampler,
    TrainingSettings,
    evaluate,
    read_text,
    wilson,
    write_task,
)
from xlstm7b.experiment.file import load_experiment
from xlstm7b.experiment.runs import run_experiment
from xlstm7b.train import Trainer, load_recipe
from xlstm7b.train.run_checkpoints import read_model

SMALL = {"keys": 8, "values": 4}
FIRST_VALUE, FIRST_PAIR, VOCABULARY = FIRST_KEY + 8, FIRST_KEY + 12, FIRST_KEY + 12 + 32


def pairs_of(tokens: Any) -> dict[int, int]:
    """Value by key of all pairs in a sequence. Asserts that each key is stated once."""
    found = [divmod(int(token) - FIRST_PAIR, 4) for token in tokens if token >= FIRST_PAIR]
    assert len(dict(found)) == len(found)
    return dict(found)


@settings(max_examples=60, deadline=None)
@given(
    task=st.sampled_from(["recall", "needle"]),
    length=st.integers(64, 300),
    pairs=st.integers(1, 8),
    exactly=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_answer_is_the_value_of_its_key(
    task: Any, length: int, pairs: int, exactly: bool, seed: int
) -> None:
    chosen = EvaluationSettings.read({**SMALL, "seed": seed, "pairs": [1]})
    sampler = Sampler(chosen, held_out=False)
    for tokens, answers in islice(sampler.samples(task, length, pairs, exactly=exactly), 3):
        assert len(tokens) == length - 1
        stated = pairs_of(tokens)
        assert 1 <= len(stated) <= pairs
        if exactly:
            assert len(stated) == min(pairs, (length - 1) // (3 if task == "recall" else 27))
            assert len({int(tokens[at - 1]) for at in answers}) == len(stated)
        assert len(answers) == len(stated)
        for at in answers:
            assert stated[int(tokens[at - 1]) - FIRST_KEY] == tokens[at] - FIRST_VALUE
        # Nothing else is a key or a value, and the questions come after all pairs.
        marks = np.flatnonzero((tokens >= FIRST_KEY) & (tokens < FIRST_PAIR))
        assert sorted([*answers, *(answers - 1)]) == marks.tolist()
        assert np.flatnonzero(tokens >= FIRST_PAIR).max() < marks.min()


def test_a_needle_is_a_sentence_in_the_given_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 40)
    chosen = EvaluationSettings.read(SMALL | {"pairs": [1], "texts": [str(tmp_path / "book.txt")]})
    sampler = Sampler(chosen, held_out=True)
    tokens = next(sampler.samples("needle", 128, 1, exactly=True)).tokens

    def shown(token: int) -> str:
        if token < FIRST_KEY:
            return chr(token - FIRST_BYTE)
        return "KVP"[(token >= FIRST_VALUE) + (token >= FIRST_PAIR)]

    text = "".join(map(shown, tokens.tolist()))
    assert text.count("The code: P. ") == 1
    assert text.endswith("The code: KV. ")
    book = text.replace("The code: P. ", "").removesuffix("The code: KV. ")
    assert book in (tmp_path / "book.txt").read_text()


def test_the_same_seed_gives_the_same_sequences() -> None:
    def draw(seed: int, held_out: bool = False) -> list[list[int]]:
        sampler = Sampler(
            EvaluationSettings.read(SMALL | {"pairs": [1], "seed": seed}), held_out=held_out
        )
        samples = islice(sampler.samples("recall", 64, 4, exactly=False), 4)
        return [sample.tokens.tolist() for sample in samples]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(1) != draw(1, held_out=True)


def test_held_out_text_is_not_in_the_training_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 122)) + b"0123456789")
    texts = [str(tmp_path / "a.txt")]
    assert bytes(read_text(texts, held_out=True)) == b"0123456789"
    assert bytes(read_text(texts, held_out=False)) == bytes(range(32, 122))


TRAINING = SMALL | {
    "context_lengths": [64, 128],
    "shortest": 32,
    "pairs": 4,
    "needles": 1,
    "tokens": 4096,
    "validation_tokens": 1024,
}


def test_training_data_counts_the_answers_only(tmp_path: Path) -> None:
    write_task(tmp_path, TRAINING)
    for context in (64, 128):
        for part, tokens in (("train", 4096), ("valid", 1024)):
            folder = open_folder(tmp_path / str(context) / part, verify=True)
            assert folder.vocab_size == VOCABULARY
            assert tokens // 2 <= folder.tokens <= tokens
            for shard in folder.shards:
                assert shard.mask is not None
                start = 0
                for end in shard.ends:
                    document, mask = shard.tokens[start:end], shard.mask[start:end]
                    assert len(document) in (32, 64, 128)
                    is_value = (document >= FIRST_VALUE) & (document < FIRST_PAIR)
                    assert (mask[:-1] == is_value[:-1]).all()
                    assert document[-1] == 0  # the end of text
                    assert mask[-1] == 1
                    start = end


@pytest.mark.parametrize("packing", ["windows", "best-fit"])
def test_no_sequence_is_cut(tmp_path: Path, packing: Any) -> None:
    """Windows in the order on disk, as in validation, and best-fit in any order."""
    write_task(tmp_path, TRAINING)
    folder = open_folder(tmp_path / "128" / "train")
    seed = None if packing == "windows" else 3
    dataset = PackedDataset(folder, context_length=128, seed=seed, packing=packing)
    for index in range(folder.tokens // 128):
        sample = dataset.sample(index)
        assert sample.resets[0]
        assert sample.tokens[0] == 0
        for at in np.flatnonzero(sample.mask & (sample.targets != 0)):
            start = np.flatnonzero(sample.resets[: at + 1])[-1]
            key, value = sample.tokens[at] - FIRST_KEY, sample.targets[at] - FIRST_VALUE
            assert pairs_of(sample.tokens[start : at + 1])[key] == value


def test_complete_data_is_kept_and_other_settings_are_refused(tmp_path: Path) -> None:
    write_task(tmp_path, TRAINING)
    manifest = tmp_path / "64" / "train" / "manifest.json"
    before = manifest.stat().st_mtime_ns
    assert json.loads(manifest.read_bytes())["documents"] > 10
    write_task(tmp_path, TRAINING)
    assert manifest.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="was not written with these settings"):
        write_task(tmp_path, TRAINING | {"seed": 1})


class Reader(torch.nn.Module):
    """A model that keeps what it has read, and answers by `score`."""

    def __init__(self, score: Any) -> None:
        super().__init__()
        self.config = ModelConfig(embedding_dim=16, num_blocks=1, num_heads=1, vocab_size=320)
        self.lm_head = SimpleNamespace(weight=torch.zeros(1))
        self._score = score
        self.longest = 0

    def forward(self, tokens: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        self.longest = max(self.longest, tokens.numel())
        read = tokens if state is None else torch.cat([state, tokens], 1)
        logits = self._score(read, tokens.shape[1])
        return logits, read


def answer_from_the_sequence(read: torch.Tensor, count: int) -> torch.Tensor:
    logits = torch.zeros(len(read), count, 320)
    for row, tokens in enumerate(read.tolist()):
        pairs = pairs_of(tokens)
        for at, token in enumerate(tokens[-count:]):
            value = pairs.get(token - FIRST_KEY)
            if FIRST_KEY <= token < FIRST_VALUE and value is not None:
                logits[row, at, FIRST_VALUE + value] = 1
    return logits


EVALUATION = SMALL | {"lengths": [32, 64, 128], "pairs": [2, 8], "needles": 2, "batch_size": 16}


@pytest.mark.parametrize("chunk", [1 << 26, 320 * 16 * 10])
def test_a_model_that_looks_up_the_value_is_always_right(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xlstm7b.evaluate.recall.MAX_CHUNK_LOGITS", chunk)
    read: list[int] = []
    model = Reader(answer_from_the_sequence)
    found = evaluate(model, EVALUATION | {"samples": 20}, read.append)  # type: ignore[arg-type]
    assert {name: list(lengths) for name, lengths in found.items()} == {
        "recall 2": ["32", "64", "128"],
        "recall 8": ["32", "64", "128"],
        "needle 2": ["64", "128"],  # 32 tokens are too few
    }
    for lengths in found.values():
        for point in lengths.values():
            assert point["accuracy"] == point["high"] == 1
            assert 0.8 < point["low"] < 1
            assert point["samples"] == 20
    assert sum(read) == 8 * 20
    assert model.longest <= max(chunk // 320, 16)


def test_guessing_and_new_weights_are_right_by_chance() -> None:
    generator = torch.Generator().manual_seed(0)

    def guess(read: torch.Tensor, count: int) -> torch.Tensor:
        return torch.rand(len(read), count, 320, generator=generator)

    torch.manual_seed(0)
    new = XLSTM(ModelConfig(embedding_dim=16, num_blocks=1, num_heads=1, vocab_size=320))
    for model in (Reader(guess), new):
        found = evaluate(model, EVALUATION | {"samples": 100, "lengths": [64]})  # type: ignore[arg-type]
        point = found["recall 8"]["64"]  # 800 answers among 4 values
        assert abs(point["accuracy"] - 1 / 4) < 4 * math.sqrt(1 / 4 * 3 / 4 / 800)


def test_the_interval_is_wilsons() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0.0, 10)[0] == 0


@pytest.mark.long
def test_a_small_model_learns_to_recall(tmp_path: Path) -> None:
    write_task(
        tmp_path,
        SMALL
        | {
            "tasks": ["recall"],
            "context_lengths": [32],
            "shortest": 32,
            "pairs": 3,
            "tokens": 200 * 24 * 32,  # as many as are read
            "validation_tokens": 1024,
        },
    )
    recipe = load_recipe(
        "quickstart",
        [
            f'data.sources={{recall={{path="{tmp_path}/32/train"}}}}',
            "data.validation=",
            "data.context_length=32",
            "data.packing=best-fit",
            "model={embedding_dim=64,num_blocks=1,num_heads=1,vocab_size=320}",
            "batch.sequences=24",
            "batch.micro_batch=24",
            "schedule.warmup=20",
            "schedule.cooldown=20",
            "run.steps=200",
            "run.save_every=0",
            "run.validate_every=0",
            "run.log_every=100",
        ],
    )
    Trainer(recipe, tmp_path / "run").train()
    model = read_model(tmp_path / "run/checkpoints/step-00000200", recipe.model)
    found = evaluate(model, SMALL | {"lengths": [32], "pairs": [3], "needles": 0})
    assert found["recall 3"]["32"]["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kyes": 3}, "unknown setting kyes; known: keys"),
        ({"keys": 0}, "keys must be greater than or equal to 1, not 0"),
        ({"keys": 4, "pairs": 5, "needles": 1}, "5 pairs need as many keys, but keys is 4"),
        ({"context_lengths": [100]}, "context length 100 is not 64"),
        ({"context_lengths": []}, "context_lengths must have at least one value"),
        ({"shortest": 16, "context_lengths": [16]}, "shortest must be at least 28"),
        ({"tasks": ["ruler"]}, "tasks"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_task(tmp_path / "data", given)
    assert not (tmp_path / "data").exists()


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    model = Reader(answer_from_the_sequence)
    with pytest.raises(ValueError, match="need a vocabulary of 2450, but the model has 320"):
        evaluate(model, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["recall-heads", "recall-gate", "recall-bias"])
def test_experiment_files_fit_together(name: str) -> None:
    experiment = load_experiment(name)
    for smoke in (False, True):
        _, data = experiment.task("data", smoke=smoke) or ("", {})
        _, evaluation = experiment.task("evaluate", smoke=smoke) or ("", {})
        training, measured = TrainingSettings.read(data), EvaluationSettings.read(evaluation)
        assert training.vocab_size == measured.vocab_size
        for run, about in experiment.runs.items():
            recipe = experiment.recipe_of(run, data=Path("d"), output=Path("o"), smoke=smoke)
            assert recipe.model.vocab_size >= training.vocab_size
            assert recipe.data.context_length in training.context_lengths
            if not smoke:
                assert recipe.data.packing == "best-fit"
                assert min(recipe.model.d_qk, recipe.model.d_hv) >= 64  # the fast kernels
                assert 20e6 < sum(map(math.prod, recipe.model.parameter_shapes().values())) < 60e6
                assert recipe.data.context_length == (8192 if about.after else 2048)
                assert recipe.run.steps == (700 if about.after else 500)
                assert recipe.learning_rate(499) == 1e-3


def test_an_experiment_runs_on_a_cpu(tmp_path: Path) -> None:
    experiment = load_experiment("recall-heads")
    runs = ["heads-32-2k", "heads-32"]
    found = run_experiment(experiment, tmp_path / "out", runs=runs, smoke=True)
    assert "evaluation" not in found["heads-32-2k"]  # only the last stage is measured
    assert set(found["heads-32"]["evaluation"]) == {"recall 4", "needle 1"}
