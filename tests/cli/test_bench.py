"""bench: what is refused where it cannot run."""

import sys
from pathlib import Path

import pytest
import torch
from cli.commands import Cli, refused
from serve.live import serving, speller

from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_bench_kernels_without_a_gpu(cli: Cli) -> None:
    assert refused(cli("bench", "kernels")).startswith("the kernels are timed on a CUDA GPU")
    assert refused(cli("bench", "kernels", "--peers", "x")).startswith("there is no peer 'x'")


def test_a_package_that_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "xlstm7b.bench.kernels", raising=False)
    monkeypatch.delattr("xlstm7b.bench.kernels", raising=False)
    assert refused(cli("bench", "kernels")) == "this needs triton, which is not installed here"


def test_bench_loader(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("so much depends upon a red wheel barrow " * 40)
    assert cli("prepare", tmp_path / "text.txt", "--output", tmp_path / "data")[0] == 0
    options = ["--lengths", "16,32", "--batches", "4", "--seconds", "0.05"]
    code, out, _ = cli("bench", "loader", tmp_path / "data", *options)
    rows = [line.split() for line in out.splitlines()[1:]]
    assert code == 0
    assert [row[:3] for row in rows] == [
        ["stream", "16", "4"], ["stream", "32", "4"], ["best_fit", "16", "4"],
        ["best_fit", "32", "4"],
    ]  # fmt: skip
    assert all(int(row[3].replace(",", "")) > 100 for row in rows)
    assert "no folder" in refused(cli("bench", "loader", tmp_path / "nowhere"))


def test_bench_serve_where_nobody_answers(cli: Cli) -> None:
    load = ["--rate", "20", "--seconds", "0.3"]
    with serving(Generator(speller("ab"), ByteTokenizer()), keys=("key",)) as live:
        code, out, _ = cli("bench", "serve", live.url, *load, "--api-key", "another")
        assert code == 1
        assert "status 401" in out
    told = refused(cli("bench", "serve", live.url, *load))
    assert told.startswith(f"{live.url} does not answer: ")
