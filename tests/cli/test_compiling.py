"""Whoever waits for kernels to be compiled is told so, and nobody else."""

import io
import sys
from collections.abc import Iterator

import pytest
import torch

from xlstm7b.cli.compiling import after_compiling, compiling_shown

knobs = pytest.importorskip("triton", reason="Triton is not installed").knobs
GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def compile_kernel(*, cache_hit: bool = False) -> None:
    """As Triton reports it, if someone listens."""
    if knobs.compilation.listener is not None:
        knobs.compilation.listener(
            src=None, metadata={"name": "a_kernel"}, metadata_group={}, times=None,
            cache_hit=cache_hit,
        )  # fmt: skip


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replaces stderr."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    return shown


def test_a_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with compiling_shown(GPU) as compiled:
        for _ in range(3):
            compile_kernel()
        compile_kernel(cache_hit=True)
        assert compiled() == 3
    assert capsys.readouterr().err == "compiling kernels, once\n"
    assert knobs.compilation.listener is None


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    with compiling_shown(GPU):
        compile_kernel()
    assert "compiling kernels, once" in shown.getvalue()
    assert "\x1b[" in shown.getvalue()


def test_a_line_on_a_terminal_that_has_another_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    with compiling_shown(GPU, bar=False):
        compile_kernel()
    assert shown.getvalue() == "compiling kernels, once\n"


@pytest.mark.parametrize("device", [GPU, CPU])
def test_nothing_if_all_is_on_disk(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    with compiling_shown(device):
        compile_kernel(cache_hit=device.type == "cuda")
    assert capsys.readouterr().err == ""


def test_outputs_come_when_their_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    made: list[int] = []

    def outputs() -> Iterator[int]:
        for number in range(5):
            if number in (0, 1, 3):
                compile_kernel()
            made.append(number)
            yield number

    stream = after_compiling(outputs(), GPU)
    assert next(stream) == 0
    assert made == [0, 1, 2]  # the third step compiled nothing
    assert [*stream] == [1, 2, 3, 4]
    assert [*after_compiling(iter([1]), GPU)] == [1]
    assert [*after_compiling(iter([]), GPU)] == []
    made.clear()
    stream = after_compiling(outputs(), CPU)
    assert next(stream) == 0
    assert made == [0]
