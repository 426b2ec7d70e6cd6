"""`xlstm7b experiment`: what it prints and writes, and mistakes that it names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Cli, refused, succeeded

from xlstm7b.files import lock_folder
from xlstm7b.train import Trainer


def test_smoke_writes_results_and_figures_and_then_only_draws(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("experiment", "pre-norm", "--smoke", "--steps", 3, "--output", out)
    code, printed, err = cli(*command, "--runs", "layer-norm")
    assert code == 0
    assert err.startswith("run 1 of 1: layer-norm\n")
    assert [*json.loads((out / "results.json").read_text())["runs"]] == ["layer-norm"]
    code, printed, err = cli(*command)
    assert code == 0
    assert err.startswith("run 1 of 1: rms-norm\n")
    first, *rows, last = printed.splitlines()
    assert first.split()[:3] == ["run", "status", "parameters"]
    assert [row.split()[:2] for row in rows] == [
        ["rms-norm", "finished"],
        ["layer-norm", "finished"],
    ]
    assert last == f"wrote {out / 'results.json'} and {out / 'pre-norm'}.png and .svg"
    (out / "pre-norm.png").unlink()
    assert succeeded(cli(*command)) == printed
    assert (out / "pre-norm.png").stat().st_size > 10_000
    assert (out / "pre-norm.svg").read_text().startswith("<?xml")
    assert refused(cli(*command, "--set", "optimizer.lr=0.1")) == (
        f"the run rms-norm in {out} has optimizer.lr 0.005, not 0.1: choose another --output"
    )


def test_diverged_runs_are_named_and_failed_ones_are_an_error(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("experiment", "pre-norm", "--smoke", "--steps", 3, "--output", tmp_path / "out")
    errors: dict[str, Exception] = {
        "rms-norm": FloatingPointError("loss nan"),
        "layer-norm": torch.OutOfMemoryError("too large"),
    }

    def fail(trainer: Trainer, report: Any) -> None:
        raise errors[trainer.folder.name]

    monkeypatch.setattr(Trainer, "train", fail)
    monkeypatch.setattr("xlstm7b.cli.experiment.find_spec", lambda name: None)  # no figures
    code, printed, _ = cli(*command, "--runs", "rms-norm")
    assert (code, printed.splitlines()[-1]) == (0, "1 of 1 run diverged: rms-norm")
    code, printed, _ = cli(*command)
    assert code == 1
    assert printed.splitlines()[-2:] == [
        "1 of 2 runs diverged: rms-norm",
        "1 of 2 runs failed: layer-norm",
    ]


def test_without_matplotlib_the_results_are_kept(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("experiment", "recall-gate", "--smoke", "--runs", "fixed-0", "--output", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("xlstm7b.cli.experiment.find_spec", lambda name: None)
        code, printed, err = cli(*command)
    assert code == 0
    assert err.startswith("no figure is drawn, because matplotlib is not installed\n")
    *_, header, row, _, last = printed.splitlines()
    assert header.split() == ["run", "accuracy", "64", "128"]
    assert row.split()[0] == "fixed-0"
    assert last == f"wrote {tmp_path / 'results.json'}"
    assert not [*tmp_path.glob("*.png")]
    succeeded(cli(*command))
    assert (tmp_path / "recall-gate.png").exists()


def test_every_experiment_is_a_choice(cli: Cli) -> None:
    names = [line.split()[0] for line in succeeded(cli("experiment", "--list")).splitlines()]
    assert "speed" in names
    for options in ([], ["--list"]):
        assert refused(cli("experiment", "nowhere", *options)) == (
            f"unknown experiment 'nowhere'; choose from {', '.join(names)}, or give the path of a "
            ".toml file"
        )


def test_lists_experiments_and_runs(cli: Cli) -> None:
    lines = succeeded(cli("experiment", "--list")).splitlines()
    assert "schedule            Learning-rate schedules" in lines
    listed = succeeded(cli("experiment", "input-gate-bias", "--list"))
    assert "model.igate_bias_init_range=-10.0" in listed
    assert "all runs: recipe 160m, optimizer.lr=5e-3 " in listed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an experiment: fixed-input-gate, "),
        (["none.toml"], "there is no experiment file none.toml"),
        (["schedule", "--runs", "cosine,linear"], "schedule has no run 'linear'; choose from expo"),
        (["schedule"], "--data is missing: a folder with the prepared folders train and valid"),
        (
            ["schedule", "--data", "."],
            ". has no folder train: --data is a folder with the",
        ),
        (["schedule", "--smoke", "--data", "."], "--smoke makes its own data: leave out --data"),
        (["schedule", "--smoke", "--device", "tpu"], "the device must be cuda or cpu, not 'tpu'"),
        (["schedule", "--smoke", "--steps", "0"], "schedule, run exponential-cooldown: recipe "),
        (["schedule", "--smoke", "--set", "run.stp=1"], "schedule, run exponential-cooldown: reci"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    arguments: list[str],
    message: str,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(cli("experiment", *arguments)).startswith(message)
    assert not any(tmp_path.iterdir())


def test_refuses_folders_of_others(cli: Cli, tmp_path: Path) -> None:
    file, folder, busy = tmp_path / "file", tmp_path / "folder", tmp_path / "busy"
    file.write_text("")
    folder.mkdir()
    busy.mkdir()
    (folder / "thesis.tex").write_text("")
    command = ("experiment", "schedule", "--smoke", "--output")
    assert refused(cli(*command, file)) == (
        f"{file} is a file, not a folder: choose another --output"
    )
    assert refused(cli(*command, folder)) == (
        f"{folder} holds files that are not of this experiment: choose another --output"
    )
    with lock_folder(busy, "running an experiment in"):
        assert refused(cli(*command, busy)) == (
            f"another process is running an experiment in {busy} right now"
        )
    (folder / "thesis.tex").rename(folder / "results.json")
    assert refused(cli(*command, folder)).startswith(f"{folder / 'results.json'} is damaged: ")
