"""For all tests: fixed random seeds, hypothesis settings, and no GPU tests without a GPU."""

import gc
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Must be set before a kernel is imported: Triton's interpreter then runs it on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"


def patch_triton_once() -> None:
    """Makes Triton's interpreter faster: a third of its time goes into patching its language.

    It replaces the functions of `triton.language` by its own before every kernel and every call of
    a `triton.jit` function inside a kernel, and restores some of them. Here it does so once for
    each module.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:  # no Triton on this system: the tests of kernels are skipped
        return
    patch, patched = interpreter._patch_lang, set()
    scope = SimpleNamespace(restore=lambda: None)

    def patch_once(function: Callable[..., Any]) -> SimpleNamespace:
        if function.__module__ not in patched:
            patch(function)
            patched.add(function.__module__)
        return scope

    interpreter._patch_lang = patch_once


if not torch.cuda.is_available():
    patch_triton_once()

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
