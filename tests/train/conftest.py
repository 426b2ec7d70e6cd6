"""Data to train on."""

from pathlib import Path

import numpy as np
import pytest

from xlstm7b.data.shards import ShardWriter, open_folder, write_manifest


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of bytes: a pattern, with a fifth of it replaced by noise."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    with ShardWriter(folder / "00000.ds", vocab_size=320) as writer:
        for _ in range(40):
            length = int(draw.integers(20, 120))
            pattern = np.arange(length) % 7 + 100
            writer.add(np.where(draw.random(length) < 0.2, draw.integers(2, 258, length), pattern))
    write_manifest(folder, [writer.entry], vocab_size=320, tokenizer_fingerprint="bytes")
    assert open_folder(folder).documents == 40
    return folder
