"""Training on a GPU: compiled or not, with or without recomputation, stopped and continued."""

from itertools import product

import pytest
import torch
import train_processes
from train_processes import run
from train_runs import losses, recipe, weights

from xlstm7b.accounting import peak_flops
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.processes import process_group
from xlstm7b.train.sharded_model import build_model

pytestmark = pytest.mark.gpu
MODEL = "model={embedding_dim=256,num_blocks=2,num_heads=2,vocab_size=320}"


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An uninterrupted run in float32, not compiled."""
    folder = tmp_path_factory.mktemp("whole")
    run(0, recipe(data, MODEL, "run.precision=float32"), folder, "cuda")
    return folder


@pytest.mark.parametrize("activations", ["none", "block", "selective"])
def test_compiled_blocks_change_nothing_but_rounding(whole, data, tmp_path, activations):
    settings = "run.compile=true", f"run.activation_checkpointing={activations}"
    run(0, recipe(data, MODEL, "run.precision=float32", *settings), tmp_path / "wide", "cuda")
    assert losses(tmp_path / "wide") == pytest.approx(losses(whole), abs=1e-4)
    run(0, recipe(data, MODEL, *settings), tmp_path / "narrow", "cuda")
    assert losses(tmp_path / "narrow") == pytest.approx(losses(whole), abs=3e-2)


def test_blocks_are_compiled_for_ten_shapes(data):
    chosen = recipe(data, MODEL, "run.compile=true")
    with process_group("cuda"):
        model = build_model(chosen, chosen.layout(1), torch.device("cuda"))
        for rows, length in product((1, 2), (16, 32, 48, 64, 80)):
            tokens = torch.zeros(rows, length, dtype=torch.long, device="cuda")
            model.loss(tokens, tokens, torch.ones(rows, length, device="cuda")).backward()


def test_a_custom_loss_runs_with_compiled_blocks(whole, data, tmp_path):
    hooks = f'run.hooks=["{train_processes.__file__}:TwoCalls"]'
    settings = "run.compile=true", "run.precision=float32"
    run(0, recipe(data, MODEL, *settings, hooks), tmp_path, "cuda")
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=1e-4)


def test_a_stopped_run_continues_bit_for_bit(data, tmp_path):
    chosen = recipe(data, MODEL, "run.compile=true")
    run(0, chosen, tmp_path / "once", "cuda")
    stopped = recipe(data, MODEL, "run.compile=true", "run.time_limit=1e-9")
    for _ in range(3):  # one step each
        run(0, stopped, tmp_path / "parts", "cuda")
    run(0, chosen, tmp_path / "parts", "cuda")
    assert losses(tmp_path / "parts") == losses(tmp_path / "once")
    once, parts = weights(tmp_path / "once", chosen), weights(tmp_path / "parts", chosen)
    assert all(torch.equal(once[name], parts[name]) for name in once)


def test_metrics_have_memory_and_mfu(data, tmp_path):
    run(0, recipe(data, MODEL, "run.compile=false"), tmp_path, "cuda")
    known = peak_flops(torch.cuda.get_device_name()) is not None
    total = torch.cuda.get_device_properties(0).total_memory / 1e9
    for line in read_metrics(tmp_path / "metrics.jsonl"):
        assert 0 < line["peak_memory_gb"] < total
        assert ("mfu" in line) == known
        assert 0 < line.get("mfu", 0.5) < 1
