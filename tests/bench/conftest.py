"""A model that takes no time."""

from typing import Any

import pytest

from xlstm7b.config import SIZES


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a plan that name it."""
    shape = {"embedding_dim": 64, "num_blocks": 2, "num_heads": 2, "vocab_size": 320}
    monkeypatch.setitem(SIZES, "small", shape)
    return {"size": "small", "device": "cpu", "dtype": "float32"}
