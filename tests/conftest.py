"""For all tests: fixed random seeds, hypothesis settings, and no GPU tests without a GPU."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch
import triton_interpreter
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the processes would have more threads than there are cores

# All tests are imported first. Hardly anything of that is garbage.
gc.disable()

if not torch.cuda.is_available():
    # Must be set before a kernel is imported: Triton's interpreter then runs it on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"
    triton_interpreter.speed_up()

settings.register_profile(
    "repo",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repo")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _freeze_what_stays() -> Iterator[None]:
    """The garbage collector does not visit what earlier files left, such as imported modules."""
    yield
    _freeze()


@pytest.fixture(autouse=True)
def _freeze_imports() -> Iterator[None]:
    """Nor what a test imports late."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 100:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long tests start first. If one started last, the other processes would wait for it.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_collection_finish() -> None:
    # Most objects are those of imported modules. The garbage collector need not visit them.
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
