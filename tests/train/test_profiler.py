"""Profiles of a run: which steps are recorded, and that recording changes nothing."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from train_runs import losses, recipe, weights

from xlstm7b.train import Trainer
from xlstm7b.train.profiler import steps_to_profile


def recorded(folder: Path) -> dict[str, list[str]]:
    """The steps in the trace of each file."""
    found = {}
    for path in sorted((folder / "profile").iterdir()):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert "aten::mm" in names
        found[path.name] = [name for name in dict.fromkeys(names) if name.startswith("step ")]
    return found


def test_a_profile_changes_no_bit(data, tmp_path, capsys):
    for name, profile in (("plain", False), ("profiled", True)):
        Trainer(recipe(data), tmp_path / name, "cpu").train(profile=profile)
    said = capsys.readouterr().err
    assert f"{tmp_path}/profiled/profile/trace-steps-3-5.json.gz: open it at " in said
    assert recorded(tmp_path / "profiled") == {
        "trace-steps-3-5.json.gz": ["step 3", "step 4", "step 5"]
    }
    assert not (tmp_path / "plain/profile").exists()
    assert losses(tmp_path / "plain") == losses(tmp_path / "profiled")
    once, other = (weights(tmp_path / name, recipe(data)) for name in ("plain", "profiled"))
    assert all(torch.equal(once[name], other[name]) for name in once)


@pytest.mark.parametrize(
    ("chosen", "step", "end", "found"),
    [
        (True, 0, 100, range(3, 6)),
        (True, 50, 100, range(53, 56)),
        (True, 0, 6, range(3, 6)),
        (True, 0, 4, range(1, 4)),
        (True, 7, 9, range(7, 9)),
        (range(7, 9), 5, 9, range(7, 9)),
        (False, 0, 100, None),
    ],
)
def test_the_steps_of_a_profile(chosen, step, end, found):
    assert steps_to_profile(chosen, step, end) == found


@pytest.mark.parametrize("steps", [range(6, 9), range(1, 3), range(5, 5)])
def test_steps_that_the_run_does_not_have_cannot_be_profiled(steps):
    with pytest.raises(ValueError, match=r"cannot be profiled: from here the run has steps 2-7$"):
        steps_to_profile(steps, 2, 8)


@pytest.mark.parametrize(("stop", "found"), [(3, None), (5, ["step 4", "step 5"])])
def test_a_run_that_ends_early_keeps_what_was_recorded(data, tmp_path, capsys, stop, found):
    trainer = Trainer(recipe(data, "run.validate_every=0"), tmp_path, "cpu")
    trainer.train(
        lambda line: trainer.stop() if line["step"] == stop - 1 else None, profile=range(4, 8)
    )
    assert trainer.step == stop + 1
    if found is None:
        assert not (tmp_path / "profile").exists()
        assert "no step was profiled: the run ended before step 4" in capsys.readouterr().err
    else:
        assert recorded(tmp_path) == {f"trace-steps-4-{stop}.json.gz": found}


def test_a_profile_that_cannot_be_written_is_a_warning(data, tmp_path, capsys):
    (tmp_path / "profile").write_text("a file")
    trainer = Trainer(recipe(data, "run.validate_every=0"), tmp_path, "cpu")
    trainer.train(profile=range(1))
    assert trainer.step == 8
    assert "the profile could not be written (FileExistsError: " in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_recorded_too(data, tmp_path):
    Trainer(recipe(data), tmp_path, "cuda").train(profile=True)
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["memory-steps-3-5.pickle", "trace-steps-3-5.json.gz"]
