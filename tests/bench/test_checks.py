"""The checks find what is wrong, and nothing else. Kernels run in Triton's interpreter."""

import importlib
import pkgutil
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
from triton.runtime import interpreter

import xlstm7b
from xlstm7b.bench import checks
from xlstm7b.bench.checks import Case, Check, Place, Work, run_check
from xlstm7b.generate.kernels import gpu, plain
from xlstm7b.kernel_verdicts import FAMILIES
from xlstm7b.mlstm.triton import sequence
from xlstm7b.model import head

CPU = torch.device("cpu")
HEADS = {"heads": 2, "d_qk": 16, "d_hv": 24}
# They need a GPU: torch._scaled_mm, and a matrix that is on one.
ON_GPUS = {"round_rows_kernel", "rms_norm_fp8_kernel", "head_norm_fp8_kernel"}
ON_GPUS |= {"silu_and_multiply_fp8_kernel", "dequantize_kernel"}


def kernels() -> set[str]:
    """The names of all kernels of the package."""
    names = set[str]()
    for module in pkgutil.walk_packages(xlstm7b.__path__, "xlstm7b."):
        if "kernels" in module.name or "triton" in module.name:
            names.update(vars(importlib.import_module(module.name)))
    return {name for name in names if name.endswith("_kernel")}


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_every_kernel_is_checked_and_right(monkeypatch):
    launched = set[str]()
    init = interpreter.GridExecutor.__init__

    def note(self, function, *given, **named):
        launched.add(function.__name__)
        init(self, function, *given, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__init__", note)
    monkeypatch.setattr(head, "has_kernels", lambda device: True)
    place, found = Place(CPU, "triton", gpu), checks.small_checks()
    for check in found:
        outcome = run_check(check, place, repeats=2)
        assert outcome.problem is None, outcome
    monkeypatch.setattr(sequence, "ROWS_TO_FILL", 1)  # as with many rows, which take longer
    assert run_check(found[0], place, repeats=1).problem is None
    assert kernels() - launched == ON_GPUS


def test_the_lists_name_each_check_once():
    for found in (checks.gpu_checks(), checks.cpu_checks(), checks.small_checks()):
        assert len({(check.family, check.name) for check in found}) == len(found)
        assert {check.family for check in found} <= {*FAMILIES, "model"}
    assert {check.family for check in checks.gpu_checks()} == {*FAMILIES, "model"}


def changed(change) -> Place:
    """The plain operations, with another step."""
    names = {name: getattr(plain, name) for name in gpu.__all__}
    operations = SimpleNamespace(**names)
    operations.step_cell = lambda *given: change(plain.step_cell(*given))
    return Place(CPU, operations=operations)


def fail(h: Tensor) -> Tensor:
    raise RuntimeError("a kernel does not\ncompile")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda h: h, None),
        (lambda h: h * 1.001, "h is wrong"),
        (lambda h: h.index_fill(1, torch.tensor([1]), torch.nan), "h is wrong"),
        (lambda h: h.index_fill(1, torch.tensor([1]), torch.inf), "h is wrong"),
        (lambda h: h + 1e-6 * torch.rand(()), "another run gave other bits"),
        (fail, "RuntimeError: a kernel does not compile"),
    ],
)
def test_what_is_wrong_is_found(change, problem):
    outcome = run_check(checks._step(3, torch.float32, 1e-4, HEADS), changed(change))
    assert outcome.problem == problem


def test_too_little_memory_is_no_fault():
    def make(place: Place) -> Case:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run_check(Check("steps", "large", make), Place(CPU))


def test_share_of_the_limit():
    one = {"x": torch.ones(3)}
    work = Work(lambda: torch.ones(1 << 16).sum(), 1e3, 2e3)
    check = Check("steps", "one", lambda place: Case(lambda: one, lambda: one, 0.0, work))
    for peaks, least in (((1e9, 1e9), 2e-6), ((1e6, 1e9), 1e-3)):
        outcome = run_check(check, Place(CPU), peaks)
        assert outcome.seconds is not None
        assert outcome.seconds * outcome.share_of_limit == pytest.approx(least)
    assert run_check(check, Place(CPU)).seconds is None


def test_error():
    want = torch.tensor([3.0, 4.0, -torch.inf])
    assert checks.error(want, want) == 0
    assert checks.error(torch.tensor([3.0, 4.5, -torch.inf]), want) == pytest.approx(0.1)
    assert checks.error(torch.tensor([3.0, 4.0, 5.0]), want) == float("inf")
    assert checks.error(torch.tensor([3.0, 4.0]), want) == float("inf")
    assert checks.error(torch.zeros(2), torch.zeros(2)) == 0
