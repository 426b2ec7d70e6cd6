"""Kernels are compiled ahead, in parallel, by what would launch them. No GPU is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment

pytest.importorskip("triton", reason="Triton is not installed")

# A kernel's source must be in a file. The driver is that of tests/every_kernel.py.
PROGRAM = """
import sys
import torch, triton
import triton.language as tl
from every_kernel import LAUNCHED, NoGPU
from xlstm7b.compiling import compile_ahead, when_compiled

triton.runtime.driver.set_active(NoGPU(90))

@triton.jit
def double_kernel(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, 2 * tl.load(x + at))

@triton.jit
def broken_kernel(x, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 0)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        double_kernel[(1,)](grad, SIZE=128)
        return grad

x, several = torch.ones(128, requires_grad=True), torch.ones(128)
calls = []

def call(size):
    calls.append(size)
    double_kernel[(1,)](several, SIZE=size)

def work():
    yield lambda: call(16)
    yield lambda: call(32)
    yield lambda: call(16)
    yield lambda: broken_kernel[(1,)](several, SIZE=8)
    yield lambda: Double.apply(x).sum().backward()

names = []
with when_compiled(names.append):
    count = compile_ahead(work(), threads=2)
    assert not LAUNCHED and several.eq(1).all(), LAUNCHED
    assert sorted(names) == ["double_kernel"] * count, names
    call(16)
    assert len(names) == count and LAUNCHED == {"double_kernel"}
    call(64)
    assert len(names) == count + 1
    try:
        broken_kernel[(1,)](several, SIZE=8)
    except triton.CompilationError as error:
        assert "static_assert" in str(error)
    else:
        raise AssertionError
    calls.clear()
    compile_ahead(work(), threads=2, seconds=-1)
    assert calls == [16]
print(count)
"""


@pytest.mark.long
def test_kernels_are_compiled_ahead_and_not_launched(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = environment() | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    variables["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, program], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"  # sizes 16, 32 and 128
