"""bench: what is refused where it cannot run."""

import sys

import pytest
import torch
from cli.commands import Cli, refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_bench_kernels_without_a_gpu(cli: Cli) -> None:
    assert refused(cli("bench", "kernels")).startswith("the kernels are timed on a CUDA GPU")
    assert refused(cli("bench", "kernels", "--peers", "x")).startswith("there is no peer 'x'")


def test_a_package_that_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "xlstm7b.bench.kernels", raising=False)
    monkeypatch.delattr("xlstm7b.bench.kernels", raising=False)
    assert refused(cli("bench", "kernels")) == "this needs triton, which is not installed here"
