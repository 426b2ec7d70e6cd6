"""What the kernels' benchmark writes; the timing itself needs a GPU."""

import json

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.bench import kernels
from xlstm7b.bench.kernels import Peaks, Result

RESULTS = [
    Result("ours", "forward", "7b", 8, 8192, 2.26, 167.0, 715.0, 22.0),
    Result("ours", "forward", "7b", 1, 65536, 2.45, 154.0, 658.0, 20.0),
    Result("sdpa", "forward", "7b", 8, 8192, None, error="no such kernel"),
    Result("ours", "step", "7b", 1, 1, 0.0058, None, 1449.0, 34.0),
]


def test_lines_carry_the_numbers_or_the_reason():
    want = "7b forward 8 × 8192 ours 2.2600 ms 167 TFLOP/s 715 GB/s 22% of the floor's speed"
    assert " ".join(kernels.line(RESULTS[0]).split()) == want
    assert kernels.line(RESULTS[2]).endswith("failed: no such kernel")
    assert "TFLOP/s" not in kernels.line(RESULTS[3])


def test_json_and_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "machine", lambda: {"gpu": "none"})
    kernels.write(RESULTS, tmp_path / "results.json", tmp_path / "results.png")
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["gpu"] == "none"
    assert [Result(**row) for row in document["results"]] == RESULTS
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_lengths_must_divide_the_tokens(monkeypatch):
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: True)
    for length in (0, 3000, 131072):
        with pytest.raises(ValueError, match=f"sequences of {length} do not divide 65536"):
            kernels.run(["7b"], 65536, [length], [], Peaks(1, 1), [])
