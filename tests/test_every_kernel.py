"""Every GPU kernel is compiled to machine code, without a GPU. The interpreter does not do that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.parametrize("options", ["90", "120", "86 --products"])
def test_every_kernel_compiles_for_a_gpu(options, tmp_path):
    program = Path(__file__).with_name("every_kernel.py")
    # Without optimisation the last step, from PTX to machine code, takes half the time.
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "DISABLE_PTXAS_OPT": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, program, "--compile", *options.split()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("compiled ")
