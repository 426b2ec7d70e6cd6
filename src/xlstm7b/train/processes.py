"""The processes of a run: how they meet, and how all of them learn that the first one failed."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from xlstm7b.data.writing import alone_in

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextmanager
def process_group(device_type: str) -> Iterator[None]:
    """The one that `torchrun` describes, or one of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    try:
        yield
        dist.barrier()  # nobody hangs up while another still talks
    finally:
        dist.destroy_process_group()


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Where a run is, and no other meanwhile; made if need be, and gone again if nothing comes."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as stack:

        def enter() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone_in(folder, "training in"))

        in_first_process(enter)
        try:
            yield
        finally:
            if dist.get_rank() == 0:
                with suppress(OSError):  # there is something in it
                    for path in missing:
                        path.rmdir()


def in_first_process(
    work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Result | None:
    """The first process does this while all wait; where it cannot, all raise."""
    result = failure = None
    if dist.get_rank() == 0:
        try:
            result = work(*arguments, **named)
        except Exception as error:
            failure = error
    if any_process(failure is not None):
        raise failure or OSError("the first process failed: it says why")
    return result


def any_process(holds: bool) -> bool:
    """Whether something holds in any of the processes; all of them ask."""
    answer = torch.tensor(int(holds))
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer)
