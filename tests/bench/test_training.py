"""`bench training`: cases, figures, and that a failure is reported, not raised."""

import math
from dataclasses import asdict, replace

import pytest

from xlstm7b.accounting import training_flops
from xlstm7b.bench import cases, generation
from xlstm7b.bench.cases import Result
from xlstm7b.bench.plans import Cpu, Training, TrainingCase
from xlstm7b.bench.training import train, with_speed
from xlstm7b.config import ModelConfig


def test_cases() -> None:
    assert TrainingCase.parse("160m:16x4096") == TrainingCase("160m", 16, 4096)
    case = TrainingCase.parse("7b:4x8192x2:block")
    assert case == TrainingCase("7b", 4, 8192, 2, "block")
    assert case.tokens == 65536
    case = TrainingCase.parse("7b:1x8192:products:lora-int4")
    assert case == TrainingCase("7b", 1, 8192, 1, "products", "lora-int4")
    sizes = [TrainingCase.parse(text).size for text in Training.of(device="cuda").cases]
    assert sizes == ["160m", "400m", "1.4b", "7b", "7b"]
    Training.of(device="cuda").check()


@pytest.mark.parametrize(
    "text", ["160m", "160m:16", "160m:0x4", "160m:1x2x3x4", "160m:axb", "tiny:1x2:all", "a:1x2:b:c"]
)
def test_a_malformed_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a case is SIZE:BATCHxLENGTH or"):
        Training.of(device="cpu", cases=[text]).check()


def test_the_figures_follow_from_the_time() -> None:
    case = TrainingCase("7b", 4, 8192, 2)
    result = with_speed(Result("training"), case, 4.0, has_mfu=True)
    assert result.tokens_per_second == 16384
    flops = training_flops(ModelConfig.named("7b"), 8192) / 8192
    assert result.figures["mfu"] == pytest.approx(flops * 16384 / 989e12)
    assert "mfu" not in with_speed(Result("training"), case, 4.0, has_mfu=False).figures


@pytest.mark.usefixtures("same_process")
def test_ours_and_peers_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    plan = Training.of(
        device="cpu",
        cases=["tiny:2x64x2:block"],
        steps=1,
        peers=["xlstm", "transformers"],
        timeout=200.0,
    )
    ours, theirs, others = cases.run(plan)
    assert (ours.name, ours.work, ours.size) == ("ours", "recomputes block", "tiny")
    assert (ours.batch, ours.length, ours.figures["micro_batches"]) == (2, 64, 2)
    # New logits have a variance of 2/5: log 320, and half of that.
    assert len(ours.figures["losses"]) == 3
    assert ours.figures["losses"][0] == pytest.approx(math.log(320) + 0.2, abs=0.25)
    if theirs.seconds is None:  # the authors' package is not installed
        assert theirs.error is not None
        assert "xlstm" in theirs.error
    assert (others.name, others.error) == ("transformers", None)
    assert others.ratio is not None
    assert "ours, tiny, recomputes block" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "work"),
    [
        ("tiny:1x64:lora", "lora"),
        ("tiny:2x64:state", "state"),
        ("tiny:1x64:products:lora-int4", "lora-int4, recomputes products"),
    ],
)
def test_lora_on_a_cpu(text: str, work: str) -> None:
    (result,) = train("ours", asdict(TrainingCase.parse(text)), 1, "cpu")
    assert result.work == work
    assert all(math.isfinite(loss) for loss in result.figures["losses"])


def test_a_case_that_fails_is_a_line() -> None:
    plan = Training.of(device="cpu", cases=["tiny:1x16"], steps=1, timeout=0.01)
    (result,) = cases.run(plan)
    blank = Result("training", size="tiny", batch=1, length=16, figures={"micro_batches": 1})
    assert result == replace(blank, error="stopped after 0 s")


@pytest.mark.long
@pytest.mark.usefixtures("same_process", "small")
def test_the_cpu_benchmark_compares_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    # Its decoding is checked in test_peer_models.py, which takes longer than all of this.
    monkeypatch.setattr(generation, "check", lambda *_: {"equal_tokens": 16})
    monkeypatch.setattr(generation, "find_peaks", lambda *_: (1e12, 1e11))  # see test_cases.py
    plan = Cpu.of(size="small", length=64, cases=["small:1x64"], steps=1)
    results = cases.run(plan)
    assert [result.error for result in results] == [None] * len(results)
    rows = [(result.part, result.name, result.work) for result in results]
    engine = f"transformers {transformers.__version__}, native kernels"
    assert rows == [
        ("decode", "ours", "greedy, float32"),
        ("decode", "ours", "temperature 0.8, top_p 0.95, float32"),
        ("prefill", "ours", "float32"),
        ("decode", "transformers", f"{engine}, eager, float32"),
        ("prefill", "transformers", f"{engine}, prompts eager, float32"),
        ("decode", "ours", "greedy, bfloat16"),
        ("decode", "ours", "temperature 0.8, top_p 0.95, bfloat16"),
        ("prefill", "ours", "bfloat16"),
        ("training", "ours", ""),
        ("training", "transformers", ""),
    ]
    ratios = [result.ratio for result in results if result.name == "transformers"]
    assert None not in ratios
