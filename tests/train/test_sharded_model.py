"""Every layout gives the one-process loss and gradients."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from train_processes import in_processes, layouts_agree

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.train.recipe import Layout, load_recipe
from xlstm7b.train.sharded_model import build_mesh, compiled, parallelize


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (1, [Layout(1, 1, 1)]),
        (2, [Layout(1, 2, 1), Layout(2, 1, 1), Layout(1, 1, 2)]),
        (4, [Layout(2, 2, 1), Layout(1, 2, 2), Layout(1, 1, 4)]),
    ],
)
def test_every_layout_has_the_one_process_gradients(world, layouts):
    in_processes(world, layouts_agree, layouts)


def test_the_previous_block_is_sharded_and_replicated():
    factors = {"qk_dim_factor": 2.0, "v_dim_factor": 2.0}
    config = ModelConfig(20, 2, 4, vocab_size=40, block="previous", **factors)
    in_processes(2, layouts_agree, [Layout(1, 2, 1), Layout(2, 1, 1)], config)


def test_the_papers_layout_on_128_processes():
    """As rank 0 of 128 that do not exist, without memory: 16 copies of 8 shards."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=128)
    try:
        recipe = load_recipe("7b")
        layout = recipe.layout(128)
        assert layout == Layout(16, 8, 1)
        with torch.device("meta"):
            model = XLSTM(recipe.model)
        parallelize(model, build_mesh(layout, "cpu"), torch.bfloat16)
        local = sum(parameter.to_local().numel() for parameter in model.parameters())
        whole = sum(parameter.numel() for parameter in model.parameters())
        assert whole == 6_865_424_896
        assert local == pytest.approx(whole / 8, rel=1e-6)
    finally:
        dist.destroy_process_group()


def test_blocks_are_compiled_for_any_number_of_shapes(monkeypatch):
    """Ramps of batch and length, last batches and validation: PyTorch itself refuses a ninth."""
    torch._dynamo.reset()
    compiler = CompileCounter()
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        monkeypatch.setattr(torch._dynamo.config, name, getattr(torch._dynamo.config, name))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    model = XLSTM(ModelConfig(64, 2, 2, vocab_size=40))
    for block in model.backbone.blocks:
        block.forward = compiled(block.forward)
    for rows, length in product((1, 2, 3), (16, 32, 48, 64)):
        model(torch.zeros(rows, length, dtype=torch.long))
    assert compiler.frame_count == 12
