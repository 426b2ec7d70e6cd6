"""Small checkpoints for the tests, and a fresh interpreter for what needs one."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.weights import save_checkpoint

CONFIG = ModelConfig(embedding_dim=64, num_blocks=2, num_heads=2, vocab_size=7)
INDEX = "model.safetensors.index.json"


def draw(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in config.parameter_shapes().items()}


def save_small(parent: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint in one file, and what it holds."""
    tensors = draw()
    save_checkpoint(parent / "model", CONFIG, tensors.items())
    return parent / "model", tensors


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run(script: str, *arguments: object, **environment: str) -> str:
    """Runs a script in a fresh interpreter; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
