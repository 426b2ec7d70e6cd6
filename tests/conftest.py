"""For all tests: fixed random seeds, hypothesis settings, and no GPU tests without a GPU."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Must be set before a kernel is imported: Triton's interpreter then runs it on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "repo", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repo")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_collection_finish() -> None:
    # Most objects are those of imported modules. The garbage collector need not visit them.
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
