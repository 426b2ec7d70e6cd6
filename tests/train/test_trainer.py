"""Runs: the same on any layout, bit for bit after a resume, and never from bad numbers."""

import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from workers import in_processes, run

from xlstm7b.data.shards import open_folder
from xlstm7b.data.writing import ShardWriter, write_manifest
from xlstm7b.generate import Generator
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer
from xlstm7b.train.checkpoint import read_model, steps
from xlstm7b.train.export import export_run, plot_runs
from xlstm7b.train.metrics import read_metrics
from xlstm7b.train.recipe import Recipe, load_recipe
from xlstm7b.train.trainer import Trainer, process_group


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Forty documents of bytes that are half a pattern and half noise."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    with ShardWriter(folder / "00000.ds", vocab_size=320) as writer:
        for _ in range(40):
            length = int(draw.integers(20, 120))
            pattern = np.arange(length) % 7 + 100
            writer.add(np.where(draw.random(length) < 0.2, draw.integers(2, 258, length), pattern))
    write_manifest(folder, [writer.entry], vocab_size=320, tokenizer_fingerprint="bytes")
    assert open_folder(folder).documents == 40
    return folder


def recipe(data: Path, *settings: str) -> Recipe:
    return load_recipe(
        "quickstart",
        [
            f'data.sources={{noise={{path="{data}"}}}}',
            f"data.validation={data}",
            "data.validation_sequences=8",
            "data.context_length=32",
            "model={embedding_dim=64,num_blocks=2,num_heads=2,vocab_size=320}",
            "batch.sequences=8",
            "batch.micro_batch=4",
            "schedule.warmup=2",
            "schedule.cooldown=2",
            "run.steps=8",
            "run.save_every=3",
            "run.validate_every=4",
            "run.log_every=4",
            *settings,
        ],
    )


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


def weights(folder: Path, chosen: Recipe) -> dict[str, torch.Tensor]:
    last = steps(folder / "checkpoints")[-1]
    return read_model(folder / f"checkpoints/step-{last:08}", chosen.model).state_dict()


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """An uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    run(0, recipe(data), folder)
    return folder


def test_a_run_learns_and_keeps_its_books(whole, data):
    lines = read_metrics(whole / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(8))
    chosen = recipe(data)
    assert [line["learning_rate"] for line in lines] == [chosen.learning_rate(s) for s in range(8)]
    assert all(line["tokens"] == 8 * 32 and line["applied"] for line in lines)
    assert lines[0]["loss"] == pytest.approx(math.log(320), rel=0.1)
    assert lines[7]["loss"] < lines[0]["loss"] - 1
    assert lines[7]["validation_loss"] < lines[3]["validation_loss"]
    assert len(lines[3]["validation_loss_by_position"]) == 8
    assert steps(whole / "checkpoints") == [6, 8]  # the last two


@pytest.mark.parametrize("stopped_at", [1, 5])
def test_a_stopped_run_goes_on_bit_for_bit(whole, data, tmp_path, stopped_at):
    with process_group("cpu"):
        trainer = Trainer(recipe(data), tmp_path, "cpu")

        def stop(line: dict) -> None:
            if line["step"] == stopped_at - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        trainer.train(stop)
    assert steps(tmp_path / "checkpoints")[-1] in (stopped_at, stopped_at + 1)
    run(0, recipe(data), tmp_path)
    assert losses(tmp_path) == losses(whole)
    again, once = weights(tmp_path, recipe(data)), weights(whole, recipe(data))
    assert all(torch.equal(again[name], once[name]) for name in once)


@pytest.mark.parametrize(
    ("world", "settings"),
    [(1, ["batch.micro_batch=2"]), (1, ["run.activation_checkpointing=block"]),
     (1, ["run.activation_checkpointing=selective"]), (2, []), (2, ["parallel.tp=2"])],
)  # fmt: skip
def test_layouts_and_micro_batches_change_nothing_but_rounding(
    whole, data, tmp_path, world, settings
):
    chosen = recipe(data, *settings)
    if world == 1:
        run(0, chosen, tmp_path)
    else:
        in_processes(world, run, chosen, tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=2e-6)
    once, other = weights(whole, chosen), weights(tmp_path, chosen)
    assert max(float((once[name] - other[name]).abs().max()) for name in once) < 1e-5


def test_a_run_goes_on_with_other_processes(whole, data, tmp_path):
    run(0, recipe(data, "run.steps=8", "run.time_limit=1e-9"), tmp_path)  # one step, then it saves
    assert steps(tmp_path / "checkpoints") == [1]
    in_processes(2, run, recipe(data), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=2e-6)


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_bad_numbers_change_nothing(data, tmp_path, monkeypatch, policy):
    with process_group("cpu"):
        trainer = Trainer(recipe(data, f"run.nan_policy={policy}"), tmp_path, "cpu")
        summed = trainer._summed_loss
        monkeypatch.setattr(
            trainer,
            "_summed_loss",
            lambda *arguments: summed(*arguments) * (math.nan if trainer.step == 1 else 1),
        )
        if policy == "stop":
            with pytest.raises(FloatingPointError, match="at step 1; the last good checkpoint"):
                trainer.train(lambda line: None)
            return
        before = {}

        def look(line: dict) -> None:
            now = {n: p.full_tensor().clone() for n, p in trainer.model.named_parameters()}
            if line["step"] == 1:
                assert not line["applied"]
                assert all(torch.equal(now[name], before[name]) for name in now)
            before.update(now)

        trainer.train(look)
        assert all(value.isfinite().all() for value in before.values())


def test_export_is_read_by_all(whole, data, tmp_path):
    assert export_run(whole, tmp_path / "model") == 8
    model = XLSTM.from_pretrained(tmp_path / "model")
    exact = weights(whole, recipe(data))
    assert all(torch.equal(tensor, exact[name]) for name, tensor in model.state_dict().items())
    text = Generator(model, ByteTokenizer()).generate("bcdefgh", max_new_tokens=8)[0]
    assert len(text.token_ids) > 0
    with pytest.raises(ValueError, match=r"no checkpoint of step 3; there are: \[6, 8\]"):
        export_run(whole, tmp_path / "other", step=3)
    plot_runs([whole], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_weights_to_start_from(whole, data, tmp_path):
    export_run(whole, tmp_path / "model")
    chosen = recipe(data, f"init_from={tmp_path / 'model'}")
    with process_group("cpu"):
        trainer = Trainer(chosen, tmp_path, "cpu")
        exact = weights(whole, chosen)
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter.full_tensor(), exact[name])
        with pytest.raises(ValueError, match="not of the recipe's shape"):
            Trainer(recipe(data, f"init_from={tmp_path / 'model'}", "model.num_blocks=3"),
                    tmp_path, "cpu")  # fmt: skip


def test_metrics_survive_a_cut_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0, "loss": 1.0}) + "\n" + '{"step": 1, "lo', "utf-8")
    assert read_metrics(path) == [{"step": 0, "loss": 1.0}]
