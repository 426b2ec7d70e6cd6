"""doctor: its report, and what it stores. tests/cli/test_doctor.py has the command."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import environment
from doctor_checks import SPEEDS, check, set_checks

from xlstm7b import doctor, kernel_verdicts
from xlstm7b.bench import checks
from xlstm7b.bench.checks import Case, Check
from xlstm7b.config import ModelConfig

CPU = torch.device("cpu")


def test_checks_that_find_no_time_or_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(place: checks.Place) -> Case:
        raise torch.OutOfMemoryError

    set_checks(monkeypatch, Check("loss", "large", make), check("steps", 1.0))
    said: list[str] = []
    report = doctor.examine(CPU, said.append)
    assert (report["ok"], report["left_out"]) == (True, 1)
    report = doctor.examine(CPU, said.append, seconds=0)
    assert (report["ok"], report["left_out"], report["checks"]) == (True, 2, [])


def test_nothing_is_checked_after_an_error_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    set_checks(monkeypatch, check("loss", 2.0), check("steps", 2.0), check("slots", 1.0))
    monkeypatch.setattr(doctor, "_still_works", lambda device: False)
    report = doctor.examine(CPU, lambda line: None)
    assert (report["wrong"], report["left_out"]) == (["loss"], 2)


def test_a_device_without_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda device: 2_000_000_000)
    with pytest.raises(ValueError, match=r"only 2\.0 GB are free on cuda:0"):
        doctor.examine(torch.device("cuda", 0))


def test_errors_of_what_is_only_compiled_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def used_by(config: ModelConfig, device: torch.device) -> Iterator[Callable[[], object]]:
        yield lambda: torch.zeros(2) + torch.zeros(3)
        raise ValueError("one block of it does not fit")

    monkeypatch.setattr(doctor, "used_by", used_by)
    monkeypatch.setattr(doctor, "gpu_checks", lambda: [check("steps", 1.0), check("model", 1.0)])
    failures: list[str] = []
    calls = [*doctor._work(CPU, failures)]
    for call in calls:
        call()
    assert len(calls) == 2
    kinds = {failure.partition(":")[0] for failure in failures}
    assert kinds == {"RuntimeError", "ValueError"}


def test_what_is_compiled_ahead_runs() -> None:
    """Here in plain PyTorch: on a GPU nothing of it is launched, and so no mistake shows."""
    config = ModelConfig(64, 1, 2, vocab_size=331)
    calls = 0
    for call in doctor.used_by(config, CPU):
        call()
        calls += 1
    assert calls == 4 * 6 + 2


def test_a_verdict_is_stored_and_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setenv("XLSTM7B_CACHE", str(tmp_path / "new"))
    about = {"gpu": "one"}
    monkeypatch.setattr(kernel_verdicts, "conditions", lambda device: about)
    kernel_verdicts.wrong_families.cache_clear()
    assert not kernel_verdicts.is_wrong("steps", gpu)
    path = doctor.store_verdict(about, ["model", "steps"])
    assert kernel_verdicts.wrong_families(gpu) == {"steps"}
    assert path.parent == tmp_path / "new"
    doctor.store_verdict(about, [])
    assert kernel_verdicts.wrong_families(gpu) == frozenset()
    kernel_verdicts.wrong_families.cache_clear()


def test_from_a_wrong_kernel_to_plain_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The device is one that is not here. Its kernels run in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from xlstm7b.generate.kernels import choice, gpu, plain

    device, right, here = torch.device("cuda", 7), gpu.step_cell, doctor.machine(CPU)
    heads = {"heads": 2, "d_qk": 16, "d_hv": 24}
    found = [checks._step(2, torch.float32, 1e-4, heads), checks._slots(2, torch.float32, heads)]
    monkeypatch.setenv("XLSTM7B_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_verdicts, "conditions", lambda device: {"gpu": "a new one"})
    for module in (doctor, choice):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    for name, value in {
        "as_current": lambda device: nullcontext(),
        "free_memory": lambda device: 1 << 40,
        "machine": lambda device: here,
        "measure_speeds": lambda device: SPEEDS,
        "release": lambda device: None,
        "gpu_checks": lambda: found,
        "_compile": lambda device, say: {},
        "_place": lambda device: checks.Place(CPU, "triton", gpu),
    }.items():
        monkeypatch.setattr(doctor, name, value)

    def chosen() -> Any:
        kernel_verdicts.wrong_families.cache_clear()
        choice.operations_for.cache_clear()
        return choice.operations_for(device)

    assert chosen() is gpu
    monkeypatch.setattr(gpu, "step_cell", lambda *given: 1.01 * right(*given))
    report = doctor.examine(device, lambda line: None)
    assert (report["ok"], report["wrong"]) == (False, ["steps"])
    assert chosen().step_cell is plain.step_cell
    assert chosen().gather_states is gpu.gather_states
    assert not doctor.examine(device, lambda line: None)["ok"]  # it is checked again
    monkeypatch.setattr(gpu, "step_cell", right)
    assert doctor.examine(device, lambda line: None)["ok"]
    assert chosen() is gpu
    choice.operations_for.cache_clear()


def test_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """13.9 GB of weights and states at 10 GB/s."""
    for free, fits in ((1 << 40, 4), (15_000_000_000, 3), (5_000_000_000, 1), (1_000_000, 0)):
        monkeypatch.setattr(doctor, "free_memory", lambda device, free=free: free)
        found = doctor.estimates(CPU, SPEEDS)
        assert [use["fits"] for use in found].count(True) == fits
        for use in found:
            assert (use["tokens_per_second_at_most"] is None) == (not use["fits"])
            assert use["free_bytes"] == free
    monkeypatch.setattr(doctor, "free_memory", lambda device: 1 << 40)
    decode, *_, training = doctor.estimates(CPU, SPEEDS)
    assert decode["tokens_per_second_at_most"] == pytest.approx(10 / 13.9, rel=0.05)
    assert training["bytes"] > 100e9


@pytest.mark.long
def test_it_needs_the_core_dependencies_only(tmp_path: Path) -> None:
    """The whole command on a CPU, where importing anything else fails."""
    others = (
        "triton",
        "matplotlib",
        "transformers",
        "tensorboard",
        "fastapi",
        "llguidance",
        "lm_eval",
    )
    others += "pyarrow", "datatrove", "pydantic_settings", "uvicorn", "sklearn", "scipy", "pandas"
    code = f"""
import sys
sys.modules.update(dict.fromkeys({others!r}))
from xlstm7b.cli import main
sys.argv = ["xlstm7b", "doctor", "--device", "cpu", "--json", "-"]
main()
"""
    variables = environment() | {"XLSTM7B_CACHE": str(tmp_path / "cache")}
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["ok"]
    assert not (tmp_path / "cache").exists()
    assert len(report["checks"]) + report["left_out"] == len(checks.cpu_checks())
