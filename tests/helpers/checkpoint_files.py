"""Small checkpoints for the tests, and scripts run in a new Python process."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from xlstm7b.checkpoint import save_checkpoint
from xlstm7b.config import ModelConfig

CONFIG = ModelConfig(embedding_dim=64, num_blocks=2, num_heads=2, vocab_size=7)
INDEX = "model.safetensors.index.json"


def draw(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in config.parameter_shapes().items()}


def save_small(parent: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with one file of weights, and its tensors."""
    tensors = draw()
    save_checkpoint(parent / "model", CONFIG, tensors.items())
    return parent / "model", tensors


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with the fused layers of the authors' format."""
    fused = dict(tensors)
    for i in range(CONFIG.num_blocks):
        for new, old in {
            "mlstm_layer.qkv_opreact.weight": ["q", "k", "v", "ogate_preact"],
            "mlstm_layer.ifgate_preact.weight": ["igate_preact", "fgate_preact"],
            "mlstm_layer.ifgate_preact.bias": ["igate_preact", "fgate_preact"],
            "ffn.proj_up_gate_z.weight": ["proj_up_gate", "proj_up"],
        }.items():
            layer, _, kind = new.split(".")
            keys = [f"backbone.blocks.{i}.{layer}.{part}.{kind}" for part in old]
            fused[f"backbone.blocks.{i}.{new}"] = torch.cat([fused.pop(key) for key in keys])
    return fused


def assert_same_tensors(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, by its path there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def run(script: str, *arguments: object, **environment: str) -> str:
    """Runs a script in a new Python process. Returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
