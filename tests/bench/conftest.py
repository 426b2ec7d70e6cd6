"""What benchmarks are tried on."""

import pytest

from xlstm7b.config import SIZES


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options that name a model which takes no time."""
    shape = {"embedding_dim": 64, "num_blocks": 2, "num_heads": 2, "vocab_size": 320}
    monkeypatch.setitem(SIZES, "small", shape)
    return ["--size", "small", "--device", "cpu", "--dtype", "float32"]
