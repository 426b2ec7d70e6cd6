"""Processes that lose torchrun, or do not find each other, end."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from commands import environment

from xlstm7b.train import processes
from xlstm7b.train.processes import process_group

QUICKLY = 10  # seconds


def wait(holds: Callable[[], bool], seconds: float) -> bool:
    """Waits until `holds()`. Returns False if that takes too long."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def status(process: int) -> tuple[str, int]:
    """The state of a process, Z for a dead one, and the id of its parent."""
    try:
        state, parent, *_ = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "Z", 0
    return state, int(parent)


def is_running(process: int) -> bool:
    return status(process)[0] not in "ZX"


def children(process: int) -> list[int]:
    found = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [child for child in found if status(child)[1] == process]


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"ready\\n"
print(child.pid, flush=True)
child.wait()
"""
CHILD = """
import time
from xlstm7b.train.orphans import end_with_torchrun
end_with_torchrun()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("by_torchrun", [True, False])
def test_only_processes_of_torchrun_end_with_their_parent(by_torchrun: bool) -> None:
    """Others outlive it, such as those that nohup or a notebook started."""
    given = environment() | ({"TORCHELASTIC_RUN_ID": "1"} if by_torchrun else {})
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], env=given, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        assert wait(lambda: not is_running(child), QUICKLY if by_torchrun else 1) == by_torchrun
    finally:
        parent.stdout.close()
        if is_running(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_processes_of_a_killed_torchrun_end(data: Path, tmp_path: Path) -> None:
    settings = [
        f'data.sources={{noise={{path="{data}"}}}}',
        "data.validation=",
        "data.context_length=32",
        "batch.sequences=2",
        "run.validate_every=0",
        "run.steps=1000000",
    ]
    more = [word for setting in settings for word in ("--set", setting)]
    run = tmp_path / "run"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "--", "xlstm7b", "train", "quickstart", "--device", "cpu", "--run", str(run)]
    torchrun = subprocess.Popen(
        [*start, *command, *more],
        env=environment() | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    workers: list[int] = []
    try:
        metrics = run / "metrics.jsonl"
        assert wait(lambda: metrics.exists() and metrics.stat().st_size > 0, 120)
        workers = children(torchrun.pid)
        assert len(workers) == 2
        torchrun.kill()
        torchrun.wait()
        assert wait(lambda: not any(map(is_running, workers)), QUICKLY)
    finally:
        for process in (torchrun.pid, *workers):
            if is_running(process):
                os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_wait_for_each_other_for_a_limited_time(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(processes, "_CONNECT", timedelta(seconds=1))
    sentence = rf"process {rank} of 2 could not connect to the others at 127\.0\.0\.1:{port} \(.+\)"
    with pytest.raises(OSError, match=sentence), process_group("cpu"):
        pytest.fail("there is no other process")
