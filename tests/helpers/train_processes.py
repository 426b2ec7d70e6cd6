"""Work for several gloo processes on this CPU, started as torchrun would.

A new process imports these functions by name, so they are not in a test file.
"""

import gc
import multiprocessing
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Timer

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing import ProcessContext

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.train import run_checkpoints
from xlstm7b.train.hooks import Hook, HookError, LossBatch, Metrics
from xlstm7b.train.optimizer import gradient_norm
from xlstm7b.train.processes import process_group
from xlstm7b.train.recipe import Layout, Recipe
from xlstm7b.train.run_checkpoints import saved_steps
from xlstm7b.train.sharded_model import build_mesh, parallelize
from xlstm7b.train.trainer import Trainer, Update

CONFIG = ModelConfig(64, 2, 4, vocab_size=40)


def in_processes(world: int, work: Callable[..., None], *arguments: object) -> None:
    """Calls `work(rank, *arguments)` in every process. Raises the first failure."""
    started = start_processes(world, work, *arguments)
    while not started.join():
        pass


def start_processes(world: int, work: Callable[..., None], *arguments: object) -> ProcessContext:
    """Starts them without waiting. They are forks of a process that has imported the modules."""
    late = ["torch._dynamo", "fsspec.core", "pytest"]  # imported on first use
    multiprocessing.set_forkserver_preload(["xlstm7b.train.trainer", *late])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return torch.multiprocessing.start_processes(
        _process, (world, port, work, arguments), world, join=False, start_method="forkserver"
    )


def _process(rank: int, world: int, port: int, work: Callable[..., None], arguments) -> None:
    # A collection would visit all objects of the process that this is a fork of, and so copy them.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    work(rank, *arguments)
    # At the interpreter's normal exit, a gloo thread sometimes aborts the process.
    os._exit(0)


def layouts_agree(
    rank: int,
    layouts: list[Layout],
    config: ModelConfig = CONFIG,
    dtype: torch.dtype = torch.float32,
) -> None:
    with process_group("cpu"):
        torch.manual_seed(0)
        alone = XLSTM(config).to(dtype)
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                if name.endswith("preact.weight"):
                    parameter.normal_(std=0.1)
        weights = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
        tokens, resets = torch.randint(0, 40, (4, 21)), torch.rand(4, 20) < 0.1
        want = -alone.token_logprobs(tokens[:, :-1], tokens[:, 1:], resets=resets)[0].mean()
        want.backward()
        for layout, together in product(layouts, (True, False)):
            unit_parameters = 30_000_000 if together else 0  # all blocks together, or each alone
            model = XLSTM(config).to(dtype)
            model.load_state_dict(weights)
            mesh = build_mesh(layout, "cpu")
            parallelize(model, mesh, dtype, unit_parameters=unit_parameters)
            size = 4 // layout.data_parallel
            start = rank // layout.tp * size
            own, borders = tokens[start : start + size], resets[start : start + size]
            loss = -model.token_logprobs(own[:, :-1], own[:, 1:], resets=borders)[0].mean()
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert abs(total / layout.world - want) < 1e-6, layout
            names = [name for name, _ in model.named_parameters()]
            assert names == [name for name, _ in alone.named_parameters()]
            for parameter, exact in zip(model.parameters(), alone.parameters(), strict=True):
                gradient = parameter.grad
                assert isinstance(gradient, DTensor)
                error = (gradient.full_tensor() - exact.grad).norm() / exact.grad.norm()
                assert error < 2e-5, (layout, tuple(exact.shape), error)


def run(rank: int, chosen: Recipe, folder: Path, device: str = "cpu") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with process_group(device):
        trainer = Trainer(chosen, folder, device)
        trainer.resume()
        trainer.train(lambda line: None)


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file of this process can grow beyond `room` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fails_on_a_full_disk(rank: int, full: int, chosen: Recipe, folder: Path) -> None:
    """The process `full` cannot write after step 4. All processes stop with an error."""
    folder.mkdir(parents=True, exist_ok=True)
    with process_group("cpu"), ExitStack() as stack:
        with pytest.raises(ValueError, match="does not divide among 2 data-parallel processes"):
            Trainer(replace(chosen, batch=replace(chosen.batch, sequences=3)), folder, "cpu")
        trainer = Trainer(chosen, folder, "cpu")
        update = trainer.update

        def fill_the_disk() -> Update:
            if trainer.step == 4:
                trainer.checkpoints.finish_save()
                if rank == full:
                    stack.enter_context(full_disk(8192))
            return update()

        trainer.update = fill_the_disk
        words = rf"of step 5 .* written to {folder}/checkpoints, where .* is of step 4"
        with pytest.raises(OSError, match=words):
            trainer.train(lambda line: None)
        assert saved_steps(folder / "checkpoints")[-1] == 4
        assert not list((folder / "checkpoints").glob("writing-*"))


def sees_its_own_folder(
    rank: int, chosen: Recipe, saved: Path, folder: Path, holder: int, delay: float | None
) -> None:
    """Each process has its own file system. Only that of process `holder` has the checkpoints.

    After `delay`, that of the other one shows them too.
    """
    own = folder / str(rank)
    if rank == holder:
        shutil.copytree(saved, own)
    elif delay is not None:
        Timer(delay, shutil.copytree, (saved, own)).start()
    run_checkpoints._SHOW = 3.0
    with process_group("cpu"):
        if holder == 0 and delay is None:
            word = "another process" if rank == 0 else "process 1"
            with pytest.raises(ValueError, match=f"^{word} does not see .*/step-00000008: all "):
                Trainer(chosen, own, "cpu")
            return
        trainer = Trainer(chosen, own, "cpu")
        assert trainer.resume() == (holder == 0)
        assert trainer.step == (8 if holder == 0 else 0)
        trainer.loader.close()


class FailsInSecondProcess(Hook):
    def on_step(self, trainer: Trainer, metrics: Metrics) -> None:
        if dist.get_rank() == 1 and trainer.step == 5:
            raise KeyError("lost")


def fails_in_one_process(rank: int, chosen: Recipe, folder: Path) -> None:
    """A hook fails in the second process only. Both stop; the checkpoints are complete."""
    reason = "in another process, whose message says why" if rank == 0 else "KeyError: 'lost'"
    with pytest.raises(HookError, match=f"FailsInSecondProcess failed .* at step 5: {reason}"):
        Trainer(chosen, folder, "cpu", hooks=[FailsInSecondProcess()]).train()
    if rank == 0:
        assert saved_steps(folder / "checkpoints") == [3, 4]


class TwoCalls(Hook):
    """The model's own loss, as the mean of two ways to compute it."""

    def loss(self, model: XLSTM, batch: LossBatch) -> Tensor:
        logprobs, _ = model.token_logprobs(batch.tokens, batch.targets, resets=batch.resets)
        return (super().loss(model, batch) - (logprobs * batch.weights).sum()) / 2


def refuses_damaged_data(rank: int, chosen: Recipe, folder: Path) -> None:
    """The only shard is damaged, and the first process checks it."""
    with process_group("cpu"):
        words = "00000.ds is damaged: its sha256 is not the one in manifest.json"
        others = "the data cannot be used; another process says why"
        with pytest.raises(ValueError, match=others if rank else words):
            Trainer(chosen, folder, "cpu")


def refuses_to_resume(rank: int, chosen: Recipe, folder: Path) -> None:
    """The last checkpoint is damaged in one process's part, and so is the one before."""
    with process_group("cpu"):
        trainer = Trainer(chosen, folder, "cpu")
        for step in (8, 6):
            if rank == 0:
                assert saved_steps(folder / "checkpoints")[-1] == step
            dist.barrier()
            with pytest.raises(ValueError, match=f"/step-{step:08} is damaged") as caught:
                trainer.resume()
            others = "another process says why" in str(caught.value)
            dist.barrier()
            found = torch.tensor([float(others)])
            dist.all_reduce(found)
            assert found.item() == 1  # one process has found it
            if rank == 0:
                shutil.rmtree(folder / f"checkpoints/step-{step:08}")
            dist.barrier()
        trainer.loader.close()


def counts_positions(rank: int, chosen: Recipe, folder: Path, positions: int) -> None:
    with process_group("cpu"):
        trainer = Trainer(chosen, folder, "cpu")
        update = trainer.update()
        assert (update.tokens, update.positions) == (positions, positions)
        trainer.loader.close()


def autocast_equals_the_trainer(rank: int) -> None:
    """Loss and gradients under autocast are those of FSDP's mixed precision, bit for bit."""
    with process_group("cpu"):
        torch.manual_seed(0)
        alone = XLSTM(CONFIG)
        sharded = XLSTM(CONFIG)
        sharded.load_state_dict(alone.state_dict())
        parallelize(sharded, build_mesh(Layout(1, 1, 1), "cpu"), torch.bfloat16)
        tokens, targets, weights = *torch.randint(0, 40, (2, 4, 70)), torch.rand(4, 70)
        resets = torch.rand(4, 70) < 0.1
        want = sharded.loss(tokens, targets, weights, resets=resets)
        with torch.autocast("cpu", torch.bfloat16):
            got = alone.loss(tokens, targets, weights, resets=resets)
        assert torch.equal(got, want)
        want.backward()
        got.backward()
        for (name, parameter), theirs in zip(
            alone.named_parameters(), sharded.parameters(), strict=True
        ):
            assert isinstance(theirs.grad, DTensor)
            assert torch.equal(parameter.grad, theirs.grad.full_tensor()), name


def norm_is_that_of_whole_gradients(rank: int) -> None:
    with process_group("cpu"):
        torch.manual_seed(0)
        line = init_device_mesh("cpu", (2,))
        plane = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        layouts = [
            ((4, 6), line, [Shard(0)]),
            ((3, 6), line, [Shard(0)]),
            ((1, 6), line, [Shard(0)]),  # nothing on the second process
            ((4, 6), line, [Shard(1)]),
            ((5,), line, [Replicate()]),
            ((4, 6), plane, [Shard(0), Shard(1)]),
            ((4, 6), plane, [Replicate(), Shard(0)]),
        ]
        whole, parameters = [torch.randn(9)], [nn.Parameter(torch.zeros(9))]
        parameters[0].grad = whole[0].clone()
        for shape, mesh, placements in layouts:
            whole.append(torch.randn(shape))
            parameter = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
            parameter.grad = distribute_tensor(whole[-1].clone(), mesh, placements)
            parameters.append(parameter)
        halves = torch.randn(2, 3, 3)
        whole.append(halves.sum(0))
        parameter = nn.Parameter(distribute_tensor(torch.zeros(3, 3), line, [Replicate()]))
        parameter.grad = DTensor.from_local(halves[rank], line, [Partial()])
        parameters.append(parameter)
        expected = torch.cat([part.flatten() for part in whole]).norm()
        norm = gradient_norm(parameters)
        assert not isinstance(norm, DTensor)
        torch.testing.assert_close(norm, expected)
