"""Checksums of a run's checkpoints: damage is named before anything is read or trained."""

import json
import math
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from train_processes import in_processes, refuses_to_resume, run, sees_its_own_folder
from train_runs import recipe

from xlstm7b.train import run_checkpoints
from xlstm7b.train.processes import process_group
from xlstm7b.train.run_checkpoints import (
    best_step,
    export_run,
    read_run,
    saved_steps,
    verify_checkpoint,
)
from xlstm7b.train.trainer import Trainer

FILES = [".metadata", "SHA256SUMS", "__0_0.distcp", "run.json"]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    """A run with checkpoints of steps 6 and 8."""
    folder = tmp_path_factory.mktemp("trained")
    run(0, recipe(data), folder)
    return folder


@pytest.fixture
def stopped(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to damage."""
    return shutil.copytree(trained, tmp_path / "run")


def flip(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


@pytest.mark.parametrize(("holder", "delay"), [(0, None), (0, 1.0), (1, None)])
def test_the_first_process_decides_from_which_step_all_continue(
    trained, data, holder, delay, tmp_path
):
    """Without a shared file system, or with a slow one, they would wait for each other forever."""
    chosen = recipe(data, "run.steps=10")
    in_processes(2, sees_its_own_folder, chosen, trained, tmp_path, holder, delay)


def test_the_checksums_are_those_of_sha256sum(trained):
    checkpoint = trained / "checkpoints/step-00000008"
    assert sorted(path.name for path in checkpoint.iterdir()) == FILES
    assert verify_checkpoint(checkpoint)["step"] == 8
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(command, cwd=checkpoint, check=True)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_named_and_nothing_is_unpickled(stopped, data, name, monkeypatch):
    """Also in the metadata, the checksums themselves, and with bytes added or cut off."""
    checkpoint, draw = stopped / "checkpoints/step-00000008", random.Random(name)
    file = checkpoint / name
    whole, named = file.read_bytes(), rf"^{checkpoint} is damaged \(.*\): remove it to continue"
    for _ in range(200):
        flip(file, draw)
        with pytest.raises(ValueError, match=named):
            verify_checkpoint(checkpoint)
        file.write_bytes(whole)
    ends = [whole[:-1], whole[: len(whole) // 2], b"", whole + b"\n", whole + b"\0", whole * 2]
    monkeypatch.setattr(run_checkpoints, "load", pytest.fail)
    for damaged in ends:
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=named):
            verify_checkpoint(checkpoint)
        with pytest.raises(ValueError, match=named):
            export_run(stopped, stopped / "model")
    with process_group("cpu"):
        trainer = Trainer(recipe(data, "run.steps=10"), stopped, "cpu")
        with pytest.raises(ValueError, match=named):
            trainer.resume()
        file.unlink()
        with pytest.raises(ValueError, match=named):
            trainer.resume()
        trainer.loader.close()
    assert not (stopped / "model").exists()


@pytest.mark.parametrize("cause", [KeyboardInterrupt, MemoryError])
def test_a_load_that_is_interrupted_does_not_speak_of_damage(trained, data, cause, monkeypatch):
    def fail(*_arguments):
        raise cause

    monkeypatch.setattr(FileSystemReader, "read_data", fail)
    with process_group("cpu"):
        trainer = Trainer(recipe(data, "run.steps=10"), trained, "cpu")
        with pytest.raises(cause):
            trainer.resume()
        trainer.loader.close()
    with pytest.raises(cause):
        export_run(trained, trained / "model")


def test_damage_that_another_process_finds_stops_all(data, tmp_path):
    """With two processes each checks a part of the files."""
    chosen = recipe(data, "run.validate_every=0", "run.keep_last=3")
    in_processes(2, run, chosen, tmp_path)
    assert (tmp_path / "checkpoints/step-00000008/__1_0.distcp").exists()
    for step, name in ((8, "__0_0.distcp"), (6, "__1_0.distcp")):
        flip(tmp_path / f"checkpoints/step-{step:08}" / name, random.Random(step))
    in_processes(2, refuses_to_resume, recipe(data, "run.steps=10"), tmp_path)


def test_the_best_step_is_read_from_an_undamaged_file(stopped):
    file = stopped / "checkpoints/step-00000008/run.json"
    best = json.loads(file.read_text())["best"]["step"]
    assert best == 8
    file.write_text(file.read_text().replace('"step": 8', '"step": 6'))
    with pytest.raises(ValueError, match=r"run\.json is damaged: its sha256 is not the one in"):
        best_step(stopped / "checkpoints")


def test_the_format_of_a_newer_version_is_refused(stopped):
    checkpoint = stopped / "checkpoints/step-00000008"
    assert read_run(checkpoint)["format"] == 1
    without_checksums(checkpoint)
    path = checkpoint / "run.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match=r"run\.json has format 2, .* up to 1: upgrade xlstm7b$"):
        read_run(checkpoint)


def without_checksums(checkpoint: Path) -> None:
    """The checkpoint as earlier versions wrote it."""
    (checkpoint / "SHA256SUMS").unlink()
    content = json.loads((checkpoint / "run.json").read_text())
    assert content.pop("has_checksums")
    (checkpoint / "run.json").write_text(json.dumps(content))


def test_a_checkpoint_of_an_earlier_version_is_read_with_a_warning(stopped, data, capfd):
    checkpoint = stopped / "checkpoints/step-00000008"
    without_checksums(checkpoint)
    warning = (
        f"{checkpoint} was saved by an earlier version, without checksums: it is not verified\n"
    )
    run(0, recipe(data, "run.steps=10"), stopped)
    assert capfd.readouterr().err == warning
    assert saved_steps(stopped / "checkpoints") == [8, 9, 10]  # 8 is the best
    assert export_run(stopped, stopped / "model", step=8) == 8
    assert capfd.readouterr().err == warning


def spoil(trainer: Trainer, value: float, *, average: bool) -> None:
    """Sets one number of the weights or of AdamW's averages.

    It is in the embedding of a token that the data does not have, so that losses stay finite.
    """
    weight = trainer.model.backbone.embeddings.weight
    state = trainer.optimizer.state[weight]["exp_avg"] if average else weight
    with torch.no_grad():
        state.to_local()[300, 5] = value


@pytest.mark.parametrize(
    ("value", "average"), [(math.nan, False), (-math.inf, False), (math.inf, True)]
)
def test_weights_that_are_not_finite_are_never_saved(data, tmp_path, value, average):
    chosen = recipe(data, "run.keep_last=1", "run.validate_every=0")
    with process_group("cpu"):
        trainer = Trainer(chosen, tmp_path, "cpu")

        def damage(line: dict) -> None:
            if line["step"] == 4:
                spoil(trainer, value, average=average)
            assert line["applied"]

        sentence = "not finite after step 6, .* not saved; the last good checkpoint is of step 3$"
        with pytest.raises(FloatingPointError, match=sentence):
            trainer.train(damage)
        trainer.loader.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    run(0, chosen, tmp_path)
    assert saved_steps(tmp_path / "checkpoints") == [8]


def test_a_saved_weight_that_is_not_finite_is_refused(data, tmp_path, monkeypatch):
    """Earlier versions saved them."""
    with process_group("cpu"), monkeypatch.context() as earlier:
        trainer = Trainer(recipe(data), tmp_path, "cpu")
        earlier.setattr(run_checkpoints, "_all_finite", lambda tensors: True)
        trainer.train(lambda line: spoil(trainer, math.nan, average=False))
    sentence = r"/step-00000008 holds weights that are not finite: remove it to continue"
    with process_group("cpu"):
        trainer = Trainer(recipe(data, "run.steps=10"), tmp_path, "cpu")
        with pytest.raises(ValueError, match=sentence):
            trainer.resume()
        trainer.loader.close()
    with pytest.raises(ValueError, match=sentence):
        export_run(tmp_path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu, id="cuda")])
def test_one_number_that_is_not_finite_is_found(device):
    draw = random.Random(0)
    for shape in ((), (1,), (7, 3), (300, 401), (100_003,)):
        tensor = torch.full(shape, torch.finfo(torch.float32).max, device=device)
        others = [torch.empty(0, device=device), torch.zeros(5, device=device)]
        assert run_checkpoints._all_finite([*others, tensor, -tensor])
        for value in (math.nan, math.inf, -math.inf):
            spoiled = tensor.clone()
            spoiled.view(-1)[draw.randrange(tensor.numel())] = value
            assert not run_checkpoints._all_finite([*others, spoiled])
