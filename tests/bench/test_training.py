"""`bench training`: cases, figures, and that a failure is reported, not raised."""

import json
import math

import pytest

from xlstm7b.accounting import training_flops
from xlstm7b.bench import training
from xlstm7b.bench.training import Case, Result
from xlstm7b.config import ModelConfig


def test_cases():
    assert Case.parse("160m:16x4096") == Case("160m", 16, 4096)
    case = Case.parse("7b:4x8192x2:block")
    assert case == Case("7b", 4, 8192, 2, activations="block")
    assert case.tokens == 65536
    assert str(case) == "7b 4 × 8192 × 2, block"
    assert [case.size for case in training.parse_cases(None, "cuda")][:3] == [
        "160m",
        "400m",
        "1.4b",
    ]


@pytest.mark.parametrize(
    "text", ["160m", "160m:16", "160m:0x4", "160m:1x2x3x4", "160m:axb", "tiny:1x2:all", "a:1x2:b:c"]
)
def test_what_is_no_case(text):
    with pytest.raises(ValueError, match="a case is SIZE:BATCHxLENGTH"):
        Case.parse(text)


def test_figures():
    result = Result(Case("7b", 4, 8192, 2), "ours", seconds=4.0)
    assert result.tokens_per_second == 16384
    flops = training_flops(ModelConfig.named("7b"), 8192) / 8192
    assert result.mfu(1e15) == pytest.approx(flops * 16384 / 1e15)
    assert Result(Case("7b", 4, 8192), "ours").mfu(1e15) is None


def test_ours_and_a_peer_on_a_cpu(tmp_path, capsys):
    cases = training.parse_cases("tiny:2x32x2:block", "cpu")
    results = training.run(cases, ["xlstm"], steps=1, device="cpu", timeout=100)
    ours, theirs = results
    assert ours.seconds is not None
    assert len(ours.losses) == 3
    # New logits have a variance of 2/5: log 320, and half of that.
    assert ours.losses[0] == pytest.approx(math.log(320) + 0.2, abs=0.25)
    if theirs.seconds is None:  # the authors' package is not installed
        assert "xlstm" in theirs.error
    training.write(results, "cpu", tmp_path / "training.json")
    written = json.loads((tmp_path / "training.json").read_text())
    assert written["results"][0]["tokens_per_second"] == ours.tokens_per_second
    assert "tiny 2 × 32 × 2, block, ours" in capsys.readouterr().out


def test_a_case_that_fails_is_a_line(capsys):
    (result,) = training.run([Case("tiny", 1, 16)], [], steps=1, device="cpu", timeout=0.01)
    assert result.error == "stopped after 0 s"
    with pytest.raises(ValueError, match="there is no peer 'x'"):
        training.run([], ["x"], steps=1, device="cpu")
