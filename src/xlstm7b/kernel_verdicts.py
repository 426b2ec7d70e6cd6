"""Which GPU kernels gave wrong numbers on this machine, as `xlstm7b doctor` found.

A compiler, a driver or a GPU may have faults that no test on another machine shows. `doctor` writes
the families of kernels that are wrong here to a small file. Where the package chooses between a
kernel and plain PyTorch it asks `is_wrong`, which reads that file once. Without a file, or with one
that is damaged or was written for other versions, no kernel is known to be wrong.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import CDLL, create_string_buffer
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

# Families of kernels, each with a form in plain PyTorch, and what they compute.
FAMILIES = {
    "sequences": "the cell over sequences",
    "steps": "the cell, one token at a time",
    "replay": "replay decoding",
    "passes": "passes over drafts",
    "loss": "the loss",
    "products": "products with float weights",
    "int8": "products with int8 weights",
    "fp8": "products with fp8 weights",
    "int4": "products with int4 weights",
    "pointwise": "norms, gates and embeddings",
    "slots": "copies of states",
    "sampling": "sampling",
}

_LOG = logging.getLogger(__name__)
_ignores = False


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_wrong(family: str, device: torch.device) -> bool:
    """True if this family's kernels gave wrong numbers on this device. Says so once in the log."""
    if _ignores or family not in wrong_families(device):
        return False
    _warn(family, device)
    return True


@contextmanager
def ignored() -> Iterator[None]:
    """No kernel is known to be wrong meanwhile: `doctor` checks them all again."""
    global _ignores
    before, _ignores = _ignores, True
    try:
        yield
    finally:
        _ignores = before


@cache
def wrong_families(device: torch.device) -> frozenset[str]:
    """Those that the file of this device names. The file is read once in a process."""
    if device.type != "cuda":
        return frozenset()
    with suppress(OSError, ValueError, RuntimeError, AttributeError, LookupError, TypeError):
        if any(cache_folder().glob("doctor-*.json")):  # else the driver need not be asked
            about = conditions(device)
            verdict = json.loads(verdict_file(about).read_text(encoding="utf-8"))
            if verdict.get("conditions") == about:
                return frozenset(FAMILIES.keys() & {*map(str, verdict["wrong"])})
    return frozenset()


@cache
def _warn(family: str, device: torch.device) -> None:
    _LOG.warning(
        "`xlstm7b doctor` found that GPU kernels for %s give wrong numbers on %s: plain PyTorch "
        "computes them instead, which is slower",
        FAMILIES[family],
        device,
    )


def conditions(device: torch.device) -> dict[str, str]:
    """What a verdict holds for: the GPU, its driver, and the versions of what makes the kernels."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "triton": installed_version("triton"),
        "xlstm7b": installed_version("xlstm7b"),
    }


def verdict_file(about: Mapping[str, str]) -> Path:
    """The file of the verdict that holds under these conditions."""
    key = json.dumps(about, sort_keys=True).encode()
    return cache_folder() / f"doctor-{hashlib.sha256(key).hexdigest()[:16]}.json"


def cache_folder() -> Path:
    """`XLSTM7B_CACHE`, or xlstm7b in `XDG_CACHE_HOME`, which is ~/.cache by default."""
    if own := os.environ.get("XLSTM7B_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xlstm7b"


def driver_version() -> str:
    """The version of NVIDIA's driver; empty if its library cannot be asked."""
    text = create_string_buffer(96)
    try:
        library = CDLL("libnvidia-ml.so.1")
        library.nvmlInit_v2()
        library.nvmlSystemGetDriverVersion(text, len(text))
    except (OSError, AttributeError):
        return ""
    return text.value.decode(errors="replace")


def installed_version(package: str) -> str:
    """Empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
