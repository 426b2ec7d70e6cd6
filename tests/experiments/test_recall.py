"""experiments/recall.py: its sequences, its recipes, and what it measures of a model."""

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from recall import (
    EXPERIMENTS,
    FIRST_BYTE,
    FIRST_KEY,
    Sampler,
    Task,
    accuracies,
    app,
    read_text,
    stages_of,
    wilson,
    write_data,
)
from xlstm7b import XLSTM
from xlstm7b.bench.results import read_rows
from xlstm7b.config import ModelConfig
from xlstm7b.data.pack import PackedDataset
from xlstm7b.data.shards import open_folder
from xlstm7b.train import Trainer, load_recipe
from xlstm7b.train.run_checkpoints import read_model

SMALL = Task(keys=8, values=4, pairs=(1,))
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
    sampler = Sampler(replace(SMALL, seed=seed), held_out=False)
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
    sampler = Sampler(replace(SMALL, text=str(tmp_path / "book.txt")), held_out=True)
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
        sampler = Sampler(replace(SMALL, seed=seed), held_out=held_out)
        samples = islice(sampler.samples("recall", 64, 4, exactly=False), 4)
        return [sample.tokens.tolist() for sample in samples]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(1) != draw(1, held_out=True)


def test_held_out_text_is_not_in_the_training_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 122)) + b"0123456789")
    text = str(tmp_path / "a.txt")
    assert bytes(read_text(text, held_out=True)) == b"0123456789"
    assert bytes(read_text(text, held_out=False)) == bytes(range(32, 122))


TRAINING = replace(
    SMALL,
    context_lengths=(64, 128),
    shortest=32,
    most_pairs=4,
    most_needles=1,
    tokens=4096,
    validation_tokens=1024,
)


def test_training_data_counts_the_answers_only(tmp_path: Path) -> None:
    write_data(tmp_path, TRAINING)
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
    write_data(tmp_path, TRAINING)
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
    write_data(tmp_path, TRAINING)
    manifest = tmp_path / "64" / "train" / "manifest.json"
    before = manifest.stat().st_mtime_ns
    assert json.loads(manifest.read_bytes())["documents"] > 10
    write_data(tmp_path, TRAINING)
    assert manifest.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="was written with other settings"):
        write_data(tmp_path, replace(TRAINING, seed=1))


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


EVALUATION = replace(
    SMALL, lengths=(32, 64, 128), pairs=(2, 8), needles=2, batch_size=16, samples=20
)


@pytest.mark.parametrize("chunk", [1 << 26, 320 * 16 * 10])
def test_a_model_that_looks_up_the_value_is_always_right(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recall.MAX_CHUNK_LOGITS", chunk)
    model = Reader(answer_from_the_sequence)
    found = accuracies(model, EVALUATION)  # type: ignore[arg-type]
    assert found == {
        "recall 2": {32: 1, 64: 1, 128: 1},
        "recall 8": {32: 1, 64: 1, 128: 1},
        "needle 2": {64: 1, 128: 1},  # 32 tokens are too few
    }
    assert model.longest <= max(chunk // 320, 16)


def test_guessing_and_new_weights_are_right_by_chance() -> None:
    generator = torch.Generator().manual_seed(0)

    def guess(read: torch.Tensor, count: int) -> torch.Tensor:
        return torch.rand(len(read), count, 320, generator=generator)

    torch.manual_seed(0)
    new = XLSTM(ModelConfig(embedding_dim=16, num_blocks=1, num_heads=1, vocab_size=320))
    for model in (Reader(guess), new):
        task = replace(EVALUATION, samples=100, lengths=(64,))
        share = accuracies(model, task)["recall 8"][64]  # type: ignore[arg-type]
        # 800 answers among 4 values
        assert abs(share - 1 / 4) < 4 * math.sqrt(1 / 4 * 3 / 4 / 800)


def test_the_interval_is_wilsons() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0.0, 10)[0] == 0


@pytest.mark.long
def test_a_small_model_learns_to_recall(tmp_path: Path) -> None:
    task = replace(
        SMALL,
        context_lengths=(32,),
        shortest=32,
        most_pairs=3,
        tokens=2 * 200 * 24 * 32,  # half of them are of the task recall
        validation_tokens=1024,
        lengths=(32,),
        pairs=(3,),
    )
    write_data(tmp_path, task)
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
    assert accuracies(model, task)["recall 3"][32] > 0.9


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_variant_has_recipes_that_fit_the_task(name: str) -> None:
    for variant in EXPERIMENTS[name]:
        stages = stages_of(name, variant, Path("out"), [], smoke=False)
        for (folder, recipe), length in zip(stages.items(), Task().context_lengths, strict=True):
            assert folder.parent == Path("out") / variant
            assert recipe.model.vocab_size >= Task().vocab_size
            assert recipe.data.packing == "best-fit"
            assert recipe.data.context_length == length
            assert recipe.data.sources["data"].path == f"out/data/{length}/train"
            assert min(recipe.model.d_qk, recipe.model.d_hv) >= 64  # the fast kernels
            assert 20e6 < sum(map(math.prod, recipe.model.parameter_shapes().values())) < 60e6
            assert recipe.run.steps == {2048: 500, 8192: 700}[length]
            assert recipe.learning_rate(499) == 1e-3
            assert (recipe.start_step, recipe.init_from) == (
                (0, "") if length == 2048 else (500, f"out/{variant}/stage-1")
            )


def test_smoke_trains_both_stages_and_draws_the_figure(script: Any, tmp_path: Path) -> None:
    command = (app, "recall-heads", "--smoke", "--output", tmp_path, "--variants", "heads-8")
    stop = ("--set", "run.time_limit=1e-9")
    for stage, step in ((1, 1), (1, 2), (2, 4)):  # stage 1 ends with step 3
        printed = script(*command, *stop).out
        assert f"{tmp_path / 'heads-8'}/stage-{stage}: stopped at step {step}; " in printed
    code, printed, _ = script(*command)
    assert code == 0
    assert printed.endswith(f"wrote {tmp_path / 'recall-heads.png'}\n")
    rows = read_rows(tmp_path / "results.jsonl")
    assert [(row["what"], row["x"]) for row in rows] == [
        ("recall 4", [64, 128]),
        ("needle 1", [64, 128]),
    ]
    assert all(0 <= share <= 1 for row in rows for share in row["y"])
    assert rows[0]["shape"]["steps"] == 6
    assert rows[0]["note"].endswith("; guessing: 0.25")
    assert not [*tmp_path.rglob("checkpoints")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["soft-cap"], "unknown experiment 'soft-cap'; choose from recall-heads, "),
        (["recall-gate", "--smoke", "--data", "nowhere.txt"], "there is no nowhere.txt"),
        (["recall-gate", "--smoke", "--variants", "x"], "there is no variant 'x'; choose from "),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    arguments: list[str],
    message: str,
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(script(app, *arguments)).startswith(message)
    assert not any(tmp_path.iterdir())
