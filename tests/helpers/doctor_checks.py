"""Checks that take no time, for tests of `xlstm7b doctor`."""

import pytest
import torch

from xlstm7b import doctor
from xlstm7b.bench.checks import Case, Check

SPEEDS = {"copy": 1e10, "float32": 1e11}


def check(family: str, got: float, want: float = 1.0) -> Check:
    """A check that gets one number, and wants another."""
    mine, right = ({"x": torch.tensor([value])} for value in (got, want))
    return Check(family, "a number", lambda place: Case(lambda: mine, lambda: right, 1e-3))


def set_checks(monkeypatch: pytest.MonkeyPatch, *found: Check) -> None:
    monkeypatch.setattr(doctor, "cpu_checks", lambda: [*found])
    monkeypatch.setattr(doctor, "measure_speeds", lambda device: SPEEDS)
