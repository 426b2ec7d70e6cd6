"""One process without FSDP has the numbers of FSDP in one process, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from train_processes import CONFIG
from train_runs import recipe

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.model.initial_state import InitialState, add_initial_state
from xlstm7b.model.layers import MLSTMBlock, MLSTMLayer
from xlstm7b.registry import register
from xlstm7b.train import one_device, sharded_model
from xlstm7b.train.one_device import as_dtensors, compute_blocks_in, compute_in
from xlstm7b.train.processes import process_group
from xlstm7b.train.recipe import LARGE, Layout
from xlstm7b.train.sharded_model import (
    SHARD,
    build_mesh,
    checkpoint_activations,
    parallelize,
)
from xlstm7b.train.trainer import Trainer

ON_BOTH = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu, id="cuda")], indirect=True
)


@pytest.fixture
def device(request) -> str:
    return getattr(request, "param", "cpu")


@pytest.fixture(autouse=True)
def _processes(device):
    with process_group(device):
        yield


@register("layer", "with_shared_gradients")
class SharedGradients(MLSTMLayer):
    """Two parameters get one gradient, and that of the third repeats one element."""

    def __init__(self, dim: int, num_heads: int = 4, **options) -> None:
        super().__init__(dim, num_heads, **options)
        self.delta = nn.Parameter(torch.empty_like(self.q.weight))
        self.scale = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.delta.zero_()
        self.scale.fill_(1 / len(self.scale))

    def qkv(self, x, heads):
        x = x * self.scale.sum()
        q = F.linear(x, self.q.weight + self.delta)
        return tuple(y.unflatten(-1, heads) for y in (q, self.k(x), self.v(x)))


@register("block", "with_positions")
class WithPositions(MLSTMBlock):
    """Adds parameters to its input and to its output.

    With one row in a micro-batch, those of neighbouring blocks get the same tensor as gradient.
    """

    def __init__(self, dim: int, num_heads: int = 4, **options) -> None:
        super().__init__(dim, num_heads, **options)
        self.before, self.after = (nn.Parameter(torch.empty(1, 70, dim)) for _ in range(2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for one in (self.before, self.after):
            nn.init.normal_(one)

    def forward(self, x, state=None, **options):
        y, state = super().forward(x + self.before, state, **options)
        return y + self.after, state


def pair(
    dtype: torch.dtype,
    device: str = "cpu",
    mode: str = "none",
    *,
    config: ModelConfig = CONFIG,
    by_blocks: bool = False,
    rank: int | None = None,
) -> tuple[XLSTM, XLSTM]:
    """A model without FSDP and one with it. With a rank, only the initial state is trained."""
    torch.manual_seed(0)
    plain, sharded = XLSTM(config).to(device), XLSTM(config).to(device)
    if rank is not None:
        for model in (plain, sharded):
            add_initial_state(model, InitialState(config, rank=rank))
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
        for parameter in plain.backbone.initial_state.parameters():
            nn.init.normal_(parameter)
    sharded.load_state_dict(plain.state_dict())
    mesh = build_mesh(Layout(1, 1, 1), device)
    for block in sharded.backbone.blocks:
        checkpoint_activations(block, mode)
    parallelize(sharded, mesh, dtype, keep_gathered=not by_blocks)
    as_dtensors(plain, mesh[SHARD])

    def prepare(block, during):
        block.forward = during(block.forward)
        checkpoint_activations(block, mode)

    if by_blocks:
        compute_blocks_in(plain, dtype, prepare)
    else:
        assert mode == "none"
        compute_in(plain, dtype)
    return plain, sharded


@ON_BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_losses_and_gradients_are_those_of_fsdp(dtype, device):
    check_same(*pair(dtype, device))


def check_same(plain: XLSTM, sharded: XLSTM, rows: int = 3) -> None:
    for _ in range(3):  # micro-batches, whose gradients are added up
        device = plain.lm_head.weight.device
        tokens, targets = torch.randint(0, 40, (2, rows, 70)).to(device)
        weights = torch.rand(rows, 70).to(device)
        losses = [model.loss(tokens, targets, weights) for model in (plain, sharded)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for got, want in zip(plain.parameters(), sharded.parameters(), strict=True):
            if not got.requires_grad:
                continue
            assert isinstance(got.grad, DTensor)
            assert got.grad.placements == want.grad.placements == got.placements
            assert torch.equal(got.grad.to_local(), want.grad.to_local())
    with torch.no_grad():
        for method in ("__call__", "token_logprobs"):
            arguments = (tokens,) if method == "__call__" else (tokens, targets)
            got, _ = getattr(plain, method)(*arguments)
            want, _ = getattr(sharded, method)(*arguments)
            assert got.dtype == torch.float32
            assert torch.equal(got, want)


@ON_BOTH
@pytest.mark.parametrize("mode", ["none", "block", "selective", "products"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_that_cast_their_weights_have_the_numbers_of_fsdp(dtype, mode, device):
    check_same(*pair(dtype, device, mode, by_blocks=True))


@pytest.mark.parametrize(("mode", "by_blocks"), [("none", False), ("none", True), ("block", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_that_share_memory(dtype, mode, by_blocks):
    config = replace(CONFIG, layer="with_shared_gradients")
    check_same(*pair(dtype, mode=mode, config=config, by_blocks=by_blocks))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("mode", "by_blocks"), [("none", False), ("none", True), ("block", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_a_class_of_ones_own(dtype, mode, by_blocks, rows):
    config = replace(CONFIG, block="with_positions")
    check_same(*pair(dtype, mode=mode, config=config, by_blocks=by_blocks), rows)


def test_gradients_are_cast_in_parts(monkeypatch):
    monkeypatch.setattr(one_device, "_CAST_AT_ONCE", 10_000)
    plain, sharded = pair(torch.bfloat16)
    assert sum(one.numel() for one in plain.parameters()) > 30_000
    check_same(plain, sharded)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("by_blocks", [False, True])
def test_an_initial_state_stays_float32(by_blocks, rank):
    check_same(*pair(torch.bfloat16, by_blocks=by_blocks, rank=rank))


def test_blocks_are_compiled_once():
    """The copies are other tensors in every call, and no reason to compile again."""
    torch._dynamo.reset()
    plain, _ = pair(torch.bfloat16)
    compiler = CompileCounter()
    for block in plain.backbone.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=compiler)
    tokens = torch.randint(0, 40, (2, 20))
    for _ in range(3):
        plain.loss(tokens, tokens, torch.ones(2, 20)).backward()
    assert compiler.frame_count == 1


def test_a_parameter_that_is_not_used_gets_no_gradient():
    plain, _ = pair(torch.bfloat16)
    backbone = plain.backbone.forward
    head = plain.lm_head.weight

    def detached(*arguments, **options):
        x, state = backbone(*arguments, **options)
        return x.detach(), state

    plain.backbone.forward = detached
    tokens = torch.randint(0, 40, (1, 8))
    plain.loss(tokens, tokens, torch.ones(1, 8)).backward()
    assert head.grad is not None
    assert all(p.grad is None for p in plain.parameters() if p is not head)


def test_between_calls_the_model_has_its_float32_parameters():
    plain, _ = pair(torch.bfloat16)
    before = list(plain.parameters())
    assert all(p.dtype == torch.float32 and isinstance(p, DTensor) for p in before)
    seen = []
    plain.lm_head.register_forward_hook(lambda layer, *_: seen.append(layer.weight.dtype))
    plain(torch.zeros(1, 4, dtype=torch.long))
    assert seen == [torch.bfloat16]
    with pytest.raises(ValueError, match="tokens must be integers"):
        plain(torch.zeros(1, 4))
    assert all(a is b for a, b in zip(before, plain.parameters(), strict=True))
    assert plain.state_dict().keys() == XLSTM(CONFIG).state_dict().keys()


@pytest.mark.parametrize(
    ("activations", "large", "copies"),
    [("none", LARGE, True), ("none", 0, False), ("block", LARGE, False)],
)
def test_one_process_does_without_fsdp(
    data: Path, tmp_path, monkeypatch, activations, large, copies
):
    """Small models copy their weights, if nothing is computed again."""
    monkeypatch.setattr(sharded_model, "LARGE", large)
    calls = []
    monkeypatch.setattr(sharded_model, "compute_in", lambda *_: calls.append(True))
    chosen = recipe(data, f"run.activation_checkpointing={activations}")
    trainer = Trainer(chosen, tmp_path, "cpu")
    assert calls == [True] * copies
    assert not isinstance(trainer.model, FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    trainer.loader.close()
