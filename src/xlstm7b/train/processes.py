"""The processes of a run: how they connect, and how one process's error reaches all of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.rendezvous import rendezvous

from xlstm7b.files import locked_folder, real_path
from xlstm7b.train.orphans import end_with_torchrun

_CONNECT = timedelta(minutes=5)  # for all processes to find each other
_COMMUNICATE = timedelta(minutes=10)  # for each collective
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_locked: set[Path] = set()  # folders of runs that this process has locked


@contextmanager
def process_group(device_type: str) -> Iterator[None]:
    """The process group that `torchrun` describes, or one of this process alone.

    Processes that do not find each other in time are an `OSError`. If torchrun is killed, its
    processes end too.
    """
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ:
        end_with_torchrun()
        try:
            store, rank, world = next(rendezvous("env://", timeout=_CONNECT))
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=_COMMUNICATE
            )
        except dist.DistError as error:
            where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise OSError(
                f"process {os.environ['RANK']} of {os.environ.get('WORLD_SIZE')} could not connect "
                f"to the others at {where} ({first_line(error)}): start all processes again"
            ) from error
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    try:
        yield
        if dist.get_world_size() > 1:
            dist.barrier()  # no process leaves while another still communicates
    finally:
        dist.destroy_process_group()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if there is none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Creates and locks the folder of a run. Removes it at the end if nothing was written.

    Inside another `run_folder` of the same folder it does nothing.
    """
    path = real_path(folder)
    if path in _locked:
        yield
        return
    with ExitStack() as stack:
        in_first_process(stack.enter_context, locked_folder(folder, "training in"))
        _locked.add(path)
        try:
            yield
        finally:
            _locked.remove(path)


def in_first_process(
    work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Result | None:
    """Calls `work` in the first process while all wait. If it fails, all processes raise."""
    with fail_together(OSError("the first process failed; its own message says why")):
        return work(*arguments, **named) if dist.get_rank() == 0 else None


@contextmanager
def fail_together(other: Exception) -> Iterator[None]:
    """If the block fails in one process, all raise: that one its own error, the others `other`."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    if any_process(failure is not None):
        raise failure or other


def any_process(holds: bool) -> bool:
    """True if `holds` is true in any process. A collective: every process must call it."""
    answer = torch.tensor(int(holds))
    all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer)


def all_reduce(values: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
    """Reduces over all processes, in place. One process alone has nothing to do."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values, operation)
