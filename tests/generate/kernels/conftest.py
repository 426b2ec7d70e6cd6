"""For the tests of kernels."""

import pytest
from kernel_cases import fill_new_memory_with_nan


@pytest.fixture
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_new_memory_with_nan(monkeypatch)
