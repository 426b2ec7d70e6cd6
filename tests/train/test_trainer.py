"""Runs: equal on any layout, bit for bit after a resume, unharmed by non-finite numbers."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import save_chat_model
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from train_processes import counts_positions, in_processes, refuses_damaged_data, run
from train_runs import losses, recipe, spoil_loss, weights

from xlstm7b.data.loader import Batch
from xlstm7b.data.pack import Sample
from xlstm7b.generate import Generator
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer
from xlstm7b.train.metrics_log import plot_runs, read_metrics
from xlstm7b.train.processes import process_group
from xlstm7b.train.run_checkpoints import export_run, read_model, saved_steps
from xlstm7b.train.trainer import Trainer, _unpadded


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """An uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    run(0, recipe(data), folder)
    return folder


def test_a_run_learns_and_writes_metrics_and_checkpoints(whole, data):
    lines = read_metrics(whole / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(8))
    chosen = recipe(data)
    assert [line["learning_rate"] for line in lines] == [chosen.learning_rate(s) for s in range(8)]
    assert all(line["tokens"] == 8 * 32 and line["applied"] for line in lines)
    assert lines[0]["loss"] == pytest.approx(math.log(320), rel=0.1)
    assert lines[7]["loss"] < lines[0]["loss"] - 1
    assert lines[7]["validation_loss"] < lines[3]["validation_loss"]
    assert len(lines[3]["validation_loss_by_position"]) == 8
    assert saved_steps(whole / "checkpoints") == [6, 8]  # the last two, of which one is the best


@pytest.mark.parametrize(
    ("stopped_at", "by"), [(1, signal.SIGTERM), (5, signal.SIGTERM), (5, signal.SIGINT)]
)
def test_a_stopped_run_continues_bit_for_bit(whole, data, tmp_path, capfd, stopped_at, by):
    with process_group("cpu"):
        trainer = Trainer(recipe(data), tmp_path, "cpu")

        def stop(line: dict) -> None:
            if line["step"] == stopped_at - 1:
                os.kill(os.getpid(), by)

        trainer.train(stop)
    message = "\nsaving after this step; Ctrl-C again to stop at once\n"
    assert (message in capfd.readouterr().err) == (by == signal.SIGINT)
    assert saved_steps(tmp_path / "checkpoints")[-1] in (stopped_at, stopped_at + 1)
    run(0, recipe(data), tmp_path)
    assert losses(tmp_path) == losses(whole)
    again, once = weights(tmp_path, recipe(data)), weights(whole, recipe(data))
    assert all(torch.equal(again[name], once[name]) for name in once)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, ["batch.micro_batch=2"]),
        (1, ["run.activation_checkpointing=block"]),
        (1, ["run.activation_checkpointing=selective"]),
        (2, []),
        (2, ["parallel.tp=2"]),
        (2, ["batch.micro_batch=2", "parallel.dp_shard=1", "parallel.dp_replicate=2"]),
    ],
)
def test_layouts_and_micro_batches_change_nothing_but_rounding(
    whole, data, tmp_path, world, settings
):
    chosen = recipe(data, *settings)
    if world == 1:
        run(0, chosen, tmp_path)
    else:
        in_processes(world, run, chosen, tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=2e-6)
    gates, others = (
        [line[name] for name in line if "gate_" in name]
        for line in (read_metrics(path / "metrics.jsonl")[7] for path in (whole, tmp_path))
    )
    assert_close(gates, others, rtol=1e-5, atol=1e-5)
    assert [len(gate) for gate in gates] == [2] * 4  # blocks
    once, other = weights(whole, chosen), weights(tmp_path, chosen)
    assert max(float((once[name] - other[name]).abs().max()) for name in once) < 1e-5


def test_a_run_continues_on_other_processes(whole, data, tmp_path):
    run(0, recipe(data, "run.steps=8", "run.time_limit=1e-9"), tmp_path)  # one step, then it saves
    assert saved_steps(tmp_path / "checkpoints") == [1]
    in_processes(2, run, recipe(data), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=2e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu, id="cuda")])
def test_in_bfloat16_the_loss_is_float32(data, tmp_path, device):
    """The loss of the first batch agrees with a plain bfloat16 model to float32 precision."""
    chosen = recipe(data, "run.precision=bfloat16", "batch.sequences=6", "batch.micro_batch=2")
    with process_group(device):
        trainer = Trainer(chosen, tmp_path, device)
        first = next(trainer.loader)
        trainer.loader.load_state_dict(trainer.loader.state_dict() | {"samples": 0})
        model = XLSTM(chosen.model).to(device, torch.bfloat16)
        model.load_state_dict({n: p.full_tensor() for n, p in trainer.model.named_parameters()})
        tokens, targets, resets = (part.to(device) for part in first[:3])
        with torch.no_grad():
            logprobs, _ = model.token_logprobs(tokens, targets, resets=resets)
        update = trainer.update()
        assert update.tokens == 6 * 32
        assert update.loss == pytest.approx(-logprobs.double().mean().item(), rel=2e-6)


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_non_finite_step_changes_no_weight(data, tmp_path, policy):
    with process_group("cpu"):
        trainer = Trainer(recipe(data, f"run.nan_policy={policy}"), tmp_path, "cpu")
        spoil_loss(trainer, math.nan, [1])
        if policy == "stop":
            with pytest.raises(FloatingPointError, match="at step 1; no checkpoint is saved yet"):
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


def test_a_short_run_without_a_finite_step_fails(data, tmp_path):
    with process_group("cpu"):
        trainer = Trainer(recipe(data, "run.steps=4"), tmp_path, "cpu")
        spoil_loss(trainer, math.nan, range(4))
        message = "at step 3, the last of 4 such steps in a row; no checkpoint is saved yet"
        with pytest.raises(FloatingPointError, match=message):
            trainer.train()


def test_a_run_continues_with_the_recipes_optimizer_settings(data, tmp_path):
    run(0, recipe(data, "run.time_limit=1e-9"), tmp_path)
    changed = ["optimizer.weight_decay=0.3", "optimizer.betas=[0.8, 0.7]", "optimizer.eps=1e-5"]
    with process_group("cpu"):
        trainer = Trainer(recipe(data, *changed), tmp_path, "cpu")
        assert trainer.resume()
        for group, decay in zip(trainer.optimizer.param_groups, (0.3, 0.0), strict=True):
            assert group["weight_decay"] == decay
            assert (tuple(group["betas"]), group["eps"]) == ((0.8, 0.7), 1e-5)
        states = [state["step"].item() for state in trainer.optimizer.state.values()]
        assert set(states) == {1.0}


def test_an_export_is_read_by_the_model_and_the_generator(whole, data, tmp_path):
    assert export_run(whole, tmp_path / "model") == 8
    model = XLSTM.from_pretrained(tmp_path / "model")
    exact = weights(whole, recipe(data))
    assert all(torch.equal(tensor, exact[name]) for name, tensor in model.state_dict().items())
    text = Generator(model, ByteTokenizer()).generate("bcdefgh", max_new_tokens=8)[0]
    assert len(text.token_ids) > 0
    with pytest.raises(
        ValueError, match=r"no checkpoint of step 3; its checkpoints are of the steps \[6, 8\]"
    ):
        export_run(whole, tmp_path / "other", step=3)
    plot_runs([whole], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    plot_runs([whole], tmp_path / "curves.pdf")
    assert (tmp_path / "curves.pdf").read_bytes()[:4] == b"%PDF"
    with pytest.raises(ValueError, match=r"a figure is a \.png, \.pdf or \.svg file"):
        plot_runs([whole], tmp_path / "curves.doc")
    assert not list(tmp_path.glob(".*"))


def test_init_from_takes_the_weights_of_a_folder(whole, data, tmp_path):
    export_run(whole, tmp_path / "model")
    chosen = recipe(data, f"init_from={tmp_path / 'model'}")
    with process_group("cpu"):
        trainer = Trainer(chosen, tmp_path, "cpu")
        exact = weights(whole, chosen)
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter.full_tensor(), exact[name])
        larger = recipe(data, f"init_from={tmp_path / 'model'}", "model.num_blocks=3")
        with pytest.raises(ValueError, match="model has num_blocks 2, the recipe 3: change"):
            Trainer(larger, tmp_path, "cpu")


def test_every_field_that_does_not_fit_init_from_is_named(whole, data, tmp_path, monkeypatch):
    """Before memory is allocated, for the weights of a folder and for a later stage."""
    export_run(whole, tmp_path / "model")
    different = ["model.num_heads=4", "model.ffn_proj_factor=4.0", "model.eps=1e-5"]
    monkeypatch.setattr(XLSTM, "to_empty", None)
    both = "has num_heads 2, the recipe 4; it has ffn_proj_factor 2.667, the recipe 4.0; "
    both += "it has eps 1e-06, the recipe 1e-05: change \\[model\\]$"
    starts = [[f"init_from={tmp_path / 'model'}"], [f"init_from={whole}", "start_step=6"]]
    with process_group("cpu"):
        for start in starts:
            with pytest.raises(ValueError, match=both):
                Trainer(recipe(data, *start, *different), tmp_path / "run", "cpu")


def test_a_fine_tuning_run_continues_without_the_weights_of_init_from(whole, data, tmp_path):
    export_run(whole, tmp_path / "base")
    tuned = [f"init_from={tmp_path / 'base'}", "run.steps=4"]
    run(0, recipe(data, *tuned), tmp_path / "once")
    run(0, recipe(data, *tuned, "run.time_limit=1e-9"), tmp_path / "twice")
    shutil.rmtree(tmp_path / "base")
    run(0, recipe(data, *tuned), tmp_path / "twice")
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")
    assert len(losses(tmp_path / "twice")) == 4


@pytest.fixture(scope="module")
def others(data, tmp_path_factory) -> Path:
    """The same ids, from another tokenizer."""
    folder = shutil.copytree(data, tmp_path_factory.mktemp("others") / "data")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": "other"}))
    return folder


def test_data_of_another_tokenizer_is_refused(whole, data, others, tmp_path):
    export_run(whole, tmp_path / "model")
    file = save_chat_model(tmp_path / "other") / "tokenizer.json"
    shutil.copy(file, tmp_path / "model")
    refusals = {
        f"data.validation={others}": "'noise' and 'data.validation' were prepared with different",
        f"init_from={tmp_path / 'model'}": "the tokenizer bytes, but .*/model holds the tokenizer",
    }
    with process_group("cpu"):
        for setting, sentence in refusals.items():
            with pytest.raises(ValueError, match=sentence):
                Trainer(recipe(data, setting), tmp_path / "run", "cpu")
        stage = [f"init_from={whole}", "start_step=6", "run.steps=11", "data.validation="]
        late = Trainer(recipe(others, *stage, "run.validate_every=0"), tmp_path / "run", "cpu")
        with pytest.raises(
            ValueError, match="trained with another tokenizer than that of this data"
        ):
            late.resume()


def test_damaged_data_is_named(data, tmp_path):
    """An id above the vocabulary always, everything else if the run asks for it."""
    damaged = shutil.copytree(data, tmp_path / "data")
    tokens = np.memmap(damaged / "00000.ds", np.uint16, "r+")
    tokens[tokens == 103] = 104
    chosen = recipe(damaged, "run.validate_every=0")
    run(0, chosen, tmp_path / "trusted")
    asked = recipe(damaged, "run.validate_every=0", "data.verify=true")
    in_processes(2, refuses_damaged_data, asked, tmp_path / "run")
    tokens[50] = 320
    with (
        process_group("cpu"),
        pytest.raises(
            ValueError, match=r"00000.ds is damaged: token 50 is the id 320, but the ids"
        ),
    ):
        Trainer(chosen, tmp_path / "run", "cpu").train()
    # The same run may be continued with the option or without it.
    run(0, recipe(data, "data.verify=true", "run.steps=9"), tmp_path / "trusted")
    assert len(losses(tmp_path / "trusted")) == 9


def test_a_later_stage_continues_with_an_order_of_its_own(whole, data, tmp_path):
    stage = [f"init_from={whole}", "start_step=6", "run.steps=11"]
    chosen = recipe(data, *stage)
    with process_group("cpu"):
        trainer = Trainer(chosen, tmp_path / "once", "cpu")
        assert not trainer.resume()
        exact = read_model(whole / "checkpoints/step-00000006", chosen.model).state_dict()
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter.full_tensor(), exact[name])
            assert float(trainer.optimizer.state[parameter]["step"]) == 6
        own = next(trainer.loader).tokens
        first = next(Trainer(recipe(data), tmp_path / "before", "cpu").loader).tokens
        assert not torch.equal(own, first)
    run(0, chosen, tmp_path / "once")
    lines = read_metrics(tmp_path / "once" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [6, 7, 8, 9, 10]
    run(0, recipe(data, *stage, "run.time_limit=1e-9"), tmp_path / "twice")
    assert saved_steps(tmp_path / "twice" / "checkpoints") == [7]
    run(0, chosen, tmp_path / "twice")
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")
    again, once = weights(tmp_path / "twice", chosen), weights(tmp_path / "once", chosen)
    assert all(torch.equal(again[name], once[name]) for name in once)
    with process_group("cpu"), pytest.raises(ValueError, match="with stage 6, this one with 0"):
        Trainer(recipe(data, "run.steps=11"), tmp_path / "once", "cpu").resume()


def test_a_cut_last_line_of_metrics_is_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0, "loss": 1.0}) + "\n" + '{"step": 1, "lo', "utf-8")
    assert read_metrics(path) == [{"step": 0, "loss": 1.0}]
    path.write_text(path.read_text() + "\n", "utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged in line 2: Unterminated"):
        read_metrics(path)


def test_positions_of_tensor_parallel_processes_are_counted_once(data, tmp_path):
    in_processes(2, counts_positions, recipe(data, "parallel.tp=2"), tmp_path, 8 * 32)


@given(st.data())
def test_padding_is_told_from_text(draws):
    """Whatever the padding's token is, and with masked documents."""
    length, pad = draws.draw(st.integers(2, 12)), draws.draw(st.integers(0, 3))
    rows, unpadded = [], 0
    for _ in range(draws.draw(st.integers(1, 3))):
        sample = Sample.empty(length)
        sample.tokens[:], sample.targets[:] = pad, pad
        filled = draws.draw(st.integers(1, length))
        at = 0
        while at < filled:  # documents of words 1 … 3, each ended by 0
            size = draws.draw(st.integers(1, filled - at))
            words = [draws.draw(st.integers(1, 3)) for _ in range(size - 1)]
            sample.targets[at : at + size] = [*words, 0]
            sample.tokens[at : at + size] = [0, *words]
            sample.mask[at : at + size] = size == 1 or draws.draw(st.booleans())
            sample.resets[at] = True
            at += size
        sample.resets[filled : filled + 1] = True
        rows.append(sample)
        unpadded += filled
    parts = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
    assert _unpadded(Batch(*parts)) == unpadded
