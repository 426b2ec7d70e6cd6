"""Families of kernels that a verdict names are not used any more."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from xlstm7b import kernel_verdicts
from xlstm7b.kernel_verdicts import FAMILIES, ignored, is_wrong, verdict_file, wrong_families
from xlstm7b.mlstm import mlstm_sequence, mlstm_step
from xlstm7b.mlstm.recurrent import MLSTMState
from xlstm7b.model import head
from xlstm7b.quantize import gpu
from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.weight import QuantizedWeight

GPU = torch.device("cuda", 0)
HERE = {"gpu": "H200", "driver": "580.1", "torch": "2", "triton": "3", "xlstm7b": "0"}
Verdict = Callable[[str], None]


@pytest.fixture(autouse=True)
def _a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLSTM7B_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_verdicts, "conditions", lambda device: HERE)
    forget()


def forget() -> None:
    wrong_families.cache_clear()
    kernel_verdicts._warn.cache_clear()


def write(content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    verdict_file(HERE).write_text(text)


def test_no_kernel_is_wrong_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then not even the driver is asked."""
    monkeypatch.setattr(kernel_verdicts, "conditions", lambda device: pytest.fail("asked"))
    assert not any(is_wrong(family, GPU) for family in FAMILIES)


def test_a_verdict_is_read_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    write({"conditions": HERE, "wrong": ["steps", "int4", "a later family"]})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [name for name in FAMILIES if is_wrong(name, GPU)] == ["steps", "int4"]
    assert len(caplog.records) == 2
    assert FAMILIES["int4"] in caplog.text
    assert not is_wrong("steps", torch.device("cpu"))


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "7", "[" * 100_000, "\x00"),
        {"wrong": ["steps"]},
        {"conditions": HERE | {"driver": "579"}, "wrong": ["steps"]},
        {"conditions": HERE, "wrong": 3},
        {"conditions": HERE, "wrong": None},
        {"conditions": HERE, "wrong": [{"steps": 1}, 4]},
    ],
    ids=lambda content: str(content)[:30],
)
def test_a_damaged_or_foreign_file_says_nothing(content: object) -> None:
    write(content)
    assert not is_wrong("steps", GPU)


def test_another_driver_has_another_file() -> None:
    assert verdict_file(HERE) == verdict_file(dict(reversed(HERE.items())))
    assert verdict_file(HERE) != verdict_file(HERE | {"driver": "579"})


def test_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kernel_verdicts.cache_folder() == tmp_path
    monkeypatch.delenv("XLSTM7B_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert kernel_verdicts.cache_folder() == Path("/there/xlstm7b")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert kernel_verdicts.cache_folder() == Path("/home/someone/.cache/xlstm7b")


def test_doctor_ignores_verdicts() -> None:
    write({"conditions": HERE, "wrong": ["steps"]})
    with ignored():
        assert not is_wrong("steps", GPU)
    assert is_wrong("steps", GPU)


def test_torch_compile_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_verdicts, "wrong_families", lambda device: {"steps"})

    @torch.compile(backend="eager", fullgraph=True)
    def double(x: Tensor) -> Tensor:
        return x * 2 if is_wrong("steps", x.device) else x

    assert double(torch.ones(2)).tolist() == [2, 2]


# Where it is asked. A tensor on the meta device stands for one on a GPU.


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """Sets the family that is wrong on every device."""
    return lambda family: monkeypatch.setattr(
        kernel_verdicts, "wrong_families", lambda device: {family}
    )


class Launched(Exception):  # noqa: N818
    """Instead of a kernel."""


def launch(*_: object, **__: object) -> None:
    raise Launched


def test_the_cell(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from xlstm7b.mlstm.triton import sequence, step

    monkeypatch.setattr(sequence, "triton_sequence", launch)
    monkeypatch.setattr(step, "triton_step", launch)
    x, gate = torch.empty(1, 3, 2, 16, device="meta"), torch.empty(1, 3, 2, device="meta")
    state = MLSTMState(torch.empty(1, 2, 16, 16, device="meta"), x[:, 0], gate[:, 0])
    calls = {
        "sequences": lambda: mlstm_sequence(x, x, x, gate, gate),
        "steps": lambda: mlstm_step(*(part[:, 0] for part in (x, x, x, gate, gate)), state),
    }
    for call in calls.values():
        with pytest.raises(Launched):
            call()
    for family, call in calls.items():
        verdict(family)
        assert call()[0].shape[-2:] == (2, 16)
        with pytest.raises(Launched):
            calls["sequences" if family == "steps" else "steps"]()


def test_the_loss(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from xlstm7b.model import head_kernels

    monkeypatch.setattr(head, "has_kernels", lambda device: True)
    for name in ("log_sums", "gradients"):
        monkeypatch.setattr(head_kernels, name, launch)
    x, W = torch.randn(3, 8), torch.randn(5, 8)
    arguments = x, W, torch.tensor([1, 4, 0]), torch.ones(3), 30.0
    with pytest.raises(Launched):
        head.head_loss(*arguments)
    verdict("loss")
    assert head.head_loss(*arguments).isfinite()


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_quantised_weights(name: str, monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from xlstm7b.quantize import kernels

    monkeypatch.setattr(QuantizedWeight, "is_cuda", True)
    monkeypatch.setattr(gpu, "has_kernels", lambda device: True)
    monkeypatch.setattr(kernels, "dequantize", launch)
    scheme = Scheme(name, 32) if name == "int4" else Scheme(name)
    stored = QuantizedWeight.quantize(torch.randn(6, 128), scheme)
    weight = gpu.prepare(stored)
    with pytest.raises(Launched):
        weight.dequantize()
    verdict("int8" if name == "int4" else "int4")
    with pytest.raises(Launched):
        weight.dequantize()
    verdict(name)
    assert torch.equal(weight.dequantize(), stored.dequantize())


@pytest.mark.gpu
def test_the_sampler(verdict: Verdict) -> None:
    from xlstm7b.generate.sampler import Sampler

    assert Sampler(1, 9, "cuda")._uses_kernels
    verdict("sampling")
    assert not Sampler(1, 9, "cuda")._uses_kernels
