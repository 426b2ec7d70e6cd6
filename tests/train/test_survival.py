"""Runs that are killed, and disks that are full: nothing is lost, nobody waits for the dead."""

import random
import time
from pathlib import Path

import pytest
import torch
from small_runs import losses, recipe, weights
from workers import fails_on_a_full_disk, in_processes, run, start_processes

from xlstm7b.train.checkpoint import best_step, steps
from xlstm7b.train.metrics import read_metrics

# Almost every moment is one of saving, and checkpoints are deleted all the time.
BUSY = ["run.steps=12", "run.save_every=1", "run.validate_every=2", "run.keep_last=1"]


def killed(world: int, chosen, folder: Path, moment: str, delay: float) -> bool:
    """Whether the run was killed, a little after that moment, or had ended before."""
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


@pytest.mark.parametrize(("world", "kills"), [(1, 5), (2, 1)])
def test_killed_runs_end_as_if_nothing_had_been(data, tmp_path, world, kills):
    chosen, draw = recipe(data, *BUSY), random.Random(world)
    in_processes(world, run, chosen, tmp_path / "whole")
    folder, deaths, within_a_save = tmp_path / "killed", 0, 0
    for number in range(kills):
        moment, latest = (("writing-", 0.01), ("step-", 0.05))[number % 2]
        deaths += killed(world, chosen, folder, moment, draw.uniform(0, latest))
        within_a_save += any(folder.glob("checkpoints/writing-*"))
        found = steps(folder / "checkpoints")
        if found and (best := best_step(folder / "checkpoints")):
            assert best in found
    assert deaths == kills
    assert within_a_save
    in_processes(world, run, chosen, folder)
    lines, others = (
        [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in read_metrics(path)]
        for path in (folder / "metrics.jsonl", tmp_path / "whole" / "metrics.jsonl")
    )
    assert lines == others
    assert [line["step"] for line in lines] == list(range(12))
    again, once = weights(folder, chosen), weights(tmp_path / "whole", chosen)
    assert all(torch.equal(again[name], once[name]) for name in once)
    left = [
        sorted(p.name for p in (f / "checkpoints").iterdir()) for f in (folder, tmp_path / "whole")
    ]
    assert left[0] == left[1]


@pytest.mark.parametrize("full", [0, 1])
def test_one_full_disk_stops_all(data, tmp_path, full):
    chosen = recipe(data, "run.save_every=1", "run.validate_every=0")
    in_processes(2, fails_on_a_full_disk, full, chosen, tmp_path)
    in_processes(2, run, chosen, tmp_path)
    assert len(losses(tmp_path)) == 8
    assert steps(tmp_path / "checkpoints") == [7, 8]
