"""Killed runs, full disks, non-finite numbers: a saved checkpoint is never lost."""

import json
import math
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from train_processes import fails_on_a_full_disk, in_processes, run, start_processes
from train_runs import losses, recipe, spoil_loss, weights

from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.processes import process_group
from xlstm7b.train.run_checkpoints import best_step, saved_steps
from xlstm7b.train.trainer import Trainer

# A save is running almost all the time, and checkpoints are deleted all the time.
STEPS = 8
BUSY = [f"run.steps={STEPS}", "run.save_every=1", "run.validate_every=2", "run.keep_last=1"]


def killed(world: int, chosen, folder: Path, moment: str, delay: float) -> bool:
    """Kills the run shortly after a folder `moment…` appears. False if it had ended before."""
    before = set(folder.glob("checkpoints/*"))
    started = start_processes(world, run, chosen, folder)
    waited = time.monotonic() + 60
    while any(process.is_alive() for process in started.processes):
        assert time.monotonic() < waited, "it hangs"
        now = set(folder.glob("checkpoints/*")) - before
        if any(path.name.startswith(moment) for path in now):
            time.sleep(delay)
            break
        time.sleep(0.001)
    alive = [process for process in started.processes if process.is_alive()]
    for process in alive:
        process.kill()
    for process in started.processes:
        process.join()
    return bool(alive)


@pytest.mark.long
@pytest.mark.parametrize(("world", "kills"), [(1, 3), (2, 1)])
def test_a_killed_run_continues_bit_for_bit(data, tmp_path, world, kills):
    chosen, draw = recipe(data, *BUSY), random.Random(world)
    in_processes(world, run, chosen, tmp_path / "whole")
    folder, deaths, within_a_save = tmp_path / "killed", 0, 0
    for number in range(kills):
        moment, latest = (("writing-", 0.01), ("step-", 0.05))[number % 2]
        deaths += killed(world, chosen, folder, moment, draw.uniform(0, latest))
        within_a_save += any(folder.glob("checkpoints/writing-*"))
        found = saved_steps(folder / "checkpoints")
        if found and (best := best_step(folder / "checkpoints")):
            assert best in found
    assert deaths == kills
    assert within_a_save
    in_processes(world, run, chosen, folder)
    lines, others = (
        [
            {k: v for k, v in line.items() if k not in ("tokens_per_second", "seconds")}
            for line in read_metrics(path)
        ]
        for path in (folder / "metrics.jsonl", tmp_path / "whole" / "metrics.jsonl")
    )
    assert lines == others
    assert [line["step"] for line in lines] == list(range(STEPS))
    again, once = weights(folder, chosen), weights(tmp_path / "whole", chosen)
    assert all(torch.equal(again[name], once[name]) for name in once)
    left = [
        sorted(p.name for p in (f / "checkpoints").iterdir()) for f in (folder, tmp_path / "whole")
    ]
    assert left[0] == left[1]


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_of_one_process_stops_all(data, tmp_path, full):
    chosen = recipe(data, "run.save_every=1", "run.validate_every=0")
    in_processes(2, fails_on_a_full_disk, full, chosen, tmp_path)
    in_processes(2, run, chosen, tmp_path)
    assert len(losses(tmp_path)) == 8
    assert saved_steps(tmp_path / "checkpoints") == [7, 8]


def test_twenty_non_finite_steps_in_a_row_end_the_run(data, tmp_path):
    chosen = recipe(data, "run.steps=40", "run.save_every=2", "run.validate_every=0")
    with process_group("cpu"):
        trainer = Trainer(chosen, tmp_path, "cpu")
        bad = [1, *range(6, 40)]
        spoil_loss(trainer, math.inf, bad)
        words = (
            "at step 25, the last of 20 such steps in a row; the last good checkpoint is of step 6"
        )
        with pytest.raises(FloatingPointError, match=words):
            trainer.train(lambda line: None)
    assert trainer.skipped == 21
    assert saved_steps(tmp_path / "checkpoints") == [4, 6]  # good checkpoints are not deleted
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 25
    assert json.loads(lines[1], parse_constant=pytest.fail)["loss"] is None
    assert [json.loads(line)["applied"] for line in lines] == [n not in bad for n in range(25)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_save_is_completed_after_any_error(data, tmp_path, error):
    with process_group("cpu"):
        trainer = Trainer(recipe(data), tmp_path, "cpu")
        trainer.checkpoints.finish_save = lambda wait=True: None

        def fail(line: dict) -> None:
            if line["step"] == 3:  # after the save of step 3, which is not finished yet
                assert not saved_steps(tmp_path / "checkpoints")
                raise error

        with pytest.raises(error):
            trainer.train(fail)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    run(0, recipe(data), tmp_path)
    assert len(losses(tmp_path)) == 8


def test_a_second_interrupt_stops_at_once(data, tmp_path):
    with process_group("cpu"):
        trainer = Trainer(recipe(data), tmp_path, "cpu")

        def interrupt(line: dict) -> None:
            if line["step"] == 3:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            trainer.train(interrupt)
    assert saved_steps(tmp_path / "checkpoints") == [3]
