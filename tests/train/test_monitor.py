"""What a run measures: gates, validation; the best checkpoint is always kept."""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from train_processes import full_disk, run
from train_runs import losses, recipe, spoil_loss, weights

from xlstm7b.config import ModelConfig
from xlstm7b.data.loader import Loader
from xlstm7b.data.shards import ShardWriter, open_folder, write_manifest
from xlstm7b.model import XLSTM
from xlstm7b.registry import find, register
from xlstm7b.train import run_checkpoints, trainer
from xlstm7b.train.metrics_log import MetricsLog, plot_runs, read_metrics
from xlstm7b.train.monitor import validation_loss
from xlstm7b.train.processes import process_group
from xlstm7b.train.recipe import Layout
from xlstm7b.train.run_checkpoints import (
    best_step,
    export_run,
    read_model,
    read_run,
    saved_steps,
)

GATES = ("input_gate_mean", "input_gate_max", "forget_gate_mean", "forget_gate_min")


@torch.no_grad()
def gates_of(model: XLSTM, data: Path) -> list[list[float]]:
    """The four statistics of every block, computed from the block's equations."""
    order = Loader({"noise": (open_folder(data), 1.0)}, context_length=32, global_batch=1)
    batch = next(order)
    x, found = model.backbone.embeddings(batch.tokens), []
    for block in model.backbone.blocks:
        normed, layer = block.norm_mlstm(x), block.mlstm_layer
        i, f = (
            15 * torch.tanh((normed @ gate.weight.T + gate.bias) / 15)
            for gate in (layer.igate_preact, layer.fgate_preact)
        )
        found.append([part.item() for part in (i.mean(), i.max(), f.mean(), f.min())])
        x, _ = block(x, resets=batch.resets)
    return [list(column) for column in zip(*found, strict=True)]


class Last(NamedTuple):
    x: Tensor


@register("block", "without_gates")
class WithoutGates(nn.Module):
    """A block of one's own, which has no mLSTM layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = find("norm", config.norm)(config.embedding_dim, config.norm_eps)

    @classmethod
    def from_config(cls, config: ModelConfig) -> "WithoutGates":
        return cls(config)

    def forward(self, x, state=None, *, resets=None, lengths=None):
        return x + self.norm(x), Last(x[:, -1])

    @staticmethod
    def zero_state(config, batch, *, dtype=torch.float32, device=None):
        return Last(torch.zeros(batch, config.embedding_dim, dtype=dtype, device=device))

    @staticmethod
    def flops(config: ModelConfig, tokens: int, cell: int) -> dict[str, int]:
        return {"norm": tokens * 4 * config.embedding_dim}


def test_a_block_without_gates_is_trained_and_logged(data, tmp_path):
    chosen = recipe(data, "run.log_every=2", "model.block=without_gates")
    run(0, chosen, tmp_path)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert len(lines) == 8
    assert not any(name in line for line in lines for name in GATES)


def test_the_mean_of_the_log_after_a_resume_is_that_of_a_whole_run(data, tmp_path):
    """Also with a step whose loss is not finite, which is null in the file."""
    settings = ["run.save_every=1", "run.validate_every=0", "run.log_every=4"]
    reports: dict[str, list[dict[str, Any]]] = {"whole": [], "resumed": []}

    def train(name: str, last: int) -> None:
        def report(line: dict[str, Any]) -> None:
            reports[name].append(line)
            if line["step"] == last:
                started.stop()  # after the next step

        with process_group("cpu"):
            started = trainer.Trainer(recipe(data, *settings), tmp_path / name, "cpu")
            spoil_loss(started, math.inf, [5])
            started.train(report)

    train("whole", 8)
    for last in (1, 4, 8):
        train("resumed", last)
    assert [line["step"] for line in reports["resumed"]] == [*range(8)]
    for name in ("loss_mean", "loss_max", "gradient_norm_mean", "gradient_norm_max"):
        found, expected = (
            [line[name] for line in lines if name in line]
            for lines in (reports["resumed"], reports["whole"])
        )
        assert len(found) == 2
        assert found[0] == pytest.approx(expected[0])
        if name.endswith("mean"):
            assert not math.isfinite(expected[1])
            assert not math.isfinite(found[1])


def test_gate_statistics_at_intervals_follow_the_equations(data, tmp_path):
    settings = ["run.steps=6", "run.save_every=2", "run.keep_last=3", "run.validate_every=0"]
    run(0, recipe(data, *settings, "run.log_every=2"), tmp_path / "watched")
    lines = read_metrics(tmp_path / "watched" / "metrics.jsonl")
    for line in lines:
        assert (GATES[0] in line) == (line["step"] % 2 == 1)
        assert not {"peak_memory_gb", "mfu"} & set(line)  # of a GPU
    for step in (2, 4, 6):
        path = tmp_path / f"watched/checkpoints/step-{step:08}"
        want = gates_of(read_model(path, recipe(data).model), data)
        assert_close([lines[step - 1][name] for name in GATES], want, rtol=1e-5, atol=1e-6)
    assert lines[5]["input_gate_mean"] != lines[1]["input_gate_mean"]

    run(0, recipe(data, *settings, "run.log_every=6"), tmp_path / "unwatched")
    assert losses(tmp_path / "unwatched") == losses(tmp_path / "watched")
    once, other = (weights(tmp_path / name, recipe(data)) for name in ("watched", "unwatched"))
    assert all(torch.equal(once[name], other[name]) for name in once)


def test_metrics_that_cannot_be_written_are_named(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", start=0, interval=1)
    message = r"metrics\.jsonl could not be written \(.*File too large"
    with full_disk(room=0), pytest.raises(OSError, match=message):
        metrics.write(step=0, loss=1.0)
    metrics.close()  # does not try to write again
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.fixture
def validation_losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The validation losses that a test wants, step by step."""
    given: list[float] = []

    def look_up(model: XLSTM, *_: object) -> dict:
        return {"validation_loss": given.pop(0)}

    monkeypatch.setattr(trainer, "validation_loss", look_up)
    return given


def train(chosen, folder: Path, report: Callable[[dict], None] = lambda line: None) -> None:
    folder.mkdir(exist_ok=True)
    with process_group("cpu"):
        run = trainer.Trainer(chosen, folder, "cpu")
        run.resume()
        run.train(report)


def test_the_best_checkpoint_is_always_kept(data, tmp_path, validation_losses, monkeypatch):
    chosen = recipe(data, "run.validate_every=1", "run.save_every=2", "run.keep_last=1")
    folder, remove = tmp_path / "checkpoints", run_checkpoints.shutil.rmtree

    def look_before(path: str | Path, **options: Any) -> None:
        """A kill at this point leaves the last checkpoint and the best."""
        name = Path(path).name
        if name.startswith("step-"):
            assert int(name[5:]) not in (best_step(folder), saved_steps(folder)[-1])
            assert best_step(folder) in saved_steps(folder)
        remove(path, **options)

    monkeypatch.setattr(run_checkpoints.shutil, "rmtree", look_before)

    def stop(line: dict) -> None:
        if line["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    validation_losses[:] = [5.0, 3.0, float("nan"), 4.0, 2.5]
    train(chosen, tmp_path, stop)  # it ends with the step after the signal
    assert saved_steps(folder) == [5]
    best = read_run(folder / "step-00000005")["best"]
    assert (best["step"], best["validation_loss"]) == (5, 2.5)
    validation_losses[:] = [2.5, 6.0, 6.0]
    train(chosen, tmp_path)
    assert saved_steps(folder) == [5, 8]  # 6 is as good, but no better
    assert export_run(tmp_path, tmp_path / "best", step="best") == 5
    exact = read_model(folder / "step-00000005", chosen.model).state_dict()
    exported = XLSTM.from_pretrained(tmp_path / "best").state_dict()
    assert all(torch.equal(tensor, exact[name]) for name, tensor in exported.items())
    assert export_run(tmp_path, tmp_path / "last") == 8


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Held-out text of the same tokenizer that the training data says little about."""
    folder = tmp_path_factory.mktemp("other")
    with ShardWriter(folder / "00000.ds", vocab_size=320) as writer:
        writer.add(np.random.default_rng(1).integers(2, 258, 300))
    write_manifest(folder, [writer.entry], vocab_size=320, tokenizer_fingerprint="bytes")
    return folder


def test_each_validation_set_has_its_own_loss(data, other, tmp_path):
    """Equal to the loss of a run with that set alone, which is what it was before."""
    sets = {"noise": data, "other set": other}
    for name, folder in sets.items():
        run(0, recipe(data, f"data.validation={folder}", "run.save_every=0"), tmp_path / name)
    table = ", ".join(f'"{name}" = "{folder}"' for name, folder in sets.items())
    chosen = recipe(data, f"data.validation={{{table}}}")
    run(0, chosen, tmp_path / "both")
    alone = [read_metrics(tmp_path / name / "metrics.jsonl") for name in sets]
    both = read_metrics(tmp_path / "both" / "metrics.jsonl")
    for step in range(8):
        line = both[step]
        measured = {name for name in line if name.startswith("validation")}
        if step not in (3, 7):
            assert not measured
            continue
        for at, name in enumerate(sets):
            for key in ("validation_loss", "validation_loss_by_position"):
                assert line[f"{key}/{name}"] == alone[at][step][key]
        assert line["validation_loss"] == line["validation_loss/noise"]
        assert line["validation_loss/other set"] > line["validation_loss"] + 0.1
        assert len(measured) == 5
    assert losses(tmp_path / "both") == losses(tmp_path / "noise")
    best = read_run(tmp_path / "both/checkpoints/step-00000008")["best"]
    assert (best["step"], best["validation_loss"]) == (8, both[7]["validation_loss"])
    plot_runs([tmp_path / "both"], tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert all(f"both, validation {name}" in drawn for name in sets)


def test_the_loss_of_some_sequences_does_not_depend_on_the_micro_batch(data):
    model = XLSTM(recipe(data).model)
    with process_group("cpu"):
        found = [
            validation_loss(
                model,
                open_folder(data),
                recipe(data, f"data.validation_sequences={count}", f"batch.micro_batch={micro}"),
                Layout(1, 1, 1),
                torch.device("cpu"),
            )["validation_loss"]
            for count, micro in ((5, 1), (5, 4), (5, 8), (8, 4))
        ]
    assert found[0] == pytest.approx(found[1], rel=1e-6) == pytest.approx(found[2], rel=1e-6)
    assert found[0] != pytest.approx(found[3], rel=1e-6)


def test_positions_without_targets_have_no_loss(data, tmp_path):
    """Documents of four targets in rows of 12 positions: the other parts hold padding."""
    with ShardWriter(tmp_path / "00000.ds", vocab_size=320) as writer:
        writer.add([5, 6, 7])
    write_manifest(tmp_path, [writer.entry], vocab_size=320, tokenizer_fingerprint="bytes")
    settings = f"data.validation={tmp_path}", "data.packing=documents", "data.context_length=12"
    chosen = recipe(data, *settings, "run.steps=4")
    run(0, chosen, tmp_path / "run")
    measured = read_metrics(tmp_path / "run/metrics.jsonl")[3]
    parts = measured["validation_loss_by_position"]
    assert sum(parts[:2]) / 2 == pytest.approx(measured["validation_loss"])
    assert parts[2:] == [None] * 6


def test_another_first_validation_set_chooses_a_new_best(
    data, other, tmp_path, validation_losses, capsys
):
    settings = ["run.validate_every=1", "run.save_every=1", "run.keep_last=1"]
    sets = {"a": data, "b": other}

    def chosen(*names: str, steps: int):
        table = ", ".join(f'{name} = "{sets[name]}"' for name in names)
        return recipe(data, *settings, f"data.validation={{{table}}}", f"run.steps={steps}")

    validation_losses[:] = [1.0, 2.0, 2.0, 2.0]
    train(recipe(data, *settings, "run.steps=4"), tmp_path)  # one set without a name, as before
    train(chosen("a", "b", steps=4), tmp_path)  # nothing is left to do
    assert saved_steps(tmp_path / "checkpoints") == [1, 4]
    validation_losses[:] = [4.0, 1.5]
    train(chosen("a", "b", steps=5), tmp_path)
    assert saved_steps(tmp_path / "checkpoints") == [1, 5]
    assert capsys.readouterr().err == ""
    validation_losses[:] = [9.0, 1.0]
    train(chosen("b", "a", steps=6), tmp_path)
    assert saved_steps(tmp_path / "checkpoints") == [6]
    assert capsys.readouterr().err == (
        f"the best checkpoint, of step 1, was chosen on other text than that of {other}, which "
        "decides from now on; that checkpoint is kept no longer\n"
    )
    validation_losses[:] = [9.0]
    same_name = f"data.validation={{b = '{data}'}}"
    train(recipe(data, *settings, same_name, "run.steps=7"), tmp_path)
    assert saved_steps(tmp_path / "checkpoints") == [7]
    assert f"of step 6, was chosen on other text than that of {data}" in capsys.readouterr().err


def test_without_keep_best_only_the_last_is_kept(data, tmp_path, validation_losses):
    validation_losses[:] = [1.0, 2.0]
    train(recipe(data, "run.keep_best=false", "run.keep_last=1"), tmp_path)
    assert saved_steps(tmp_path / "checkpoints") == [8]
    with pytest.raises(ValueError, match="has no best checkpoint: it kept none by validation loss"):
        export_run(tmp_path, tmp_path / "best", step="best")
