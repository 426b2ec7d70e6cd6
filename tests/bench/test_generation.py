"""What the generation benchmark measures on a CPU, its limits and its errors; never a speed."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from xlstm7b import accounting
from xlstm7b.bench import generation, generation_peers
from xlstm7b.bench.generation import Plan, Report, Result
from xlstm7b.bench.generation_ours import START_TOKENS, attempt, our_model
from xlstm7b.bench.generation_results import heading, line
from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM

SEVEN = ModelConfig.named("7b")
SMALL = Plan.of(
    "cpu", size="tiny", batches=[1, 3], contexts=[0, 20], prompts=[1, 70], tokens=64,
    lengths=[64, 32], first=3, generated=4, seconds=0.001, peak_flops=1e12, peak_bytes=1e11,
)  # fmt: skip


@pytest.fixture(scope="module")
def report() -> Report:
    return generation.run(SMALL)


def test_every_part_is_complete(report: Report) -> None:
    rows = [(r.part, r.work, r.batch, r.length) for r in report.results]
    assert rows == [
        ("memory", "loaded", 1, 0),
        ("memory", "prompt read", 1, 20),
        ("memory", "4 tokens generated", 1, 20),
        ("decode", "greedy", 1, START_TOKENS),
        ("decode", "temperature 0.8, top_p 0.95", 1, START_TOKENS),
        ("decode", "greedy", 3, START_TOKENS),
        ("context", "greedy", 1, 0),
        ("context", "greedy", 1, 20),
        ("first", "1 token", 1, 1),
        ("first", "3 tokens", 1, 1),
        ("first", "1 token", 1, 70),
        ("first", "3 tokens", 1, 70),
        ("prefill", "", 1, 64),
        ("prefill", "", 2, 32),
    ]
    for result in report.results:
        assert result.error is None
        assert result.limit is not None
        assert result.percent_of_limit is not None
        if result.part == "memory":
            assert result.memory is not None
            assert result.percent_of_limit == pytest.approx(100 * result.limit / result.memory)
            continue
        assert result.seconds is not None
        assert result.seconds > 0
        if result.part == "first":
            assert result.percent_of_limit == pytest.approx(100 * result.limit / result.seconds)
            continue
        tokens = result.batch * (result.length if result.part == "prefill" else 1)
        assert result.tokens_per_second == pytest.approx(tokens / result.seconds)
        share = 100 * result.tokens_per_second / result.limit
        assert result.percent_of_limit == pytest.approx(share)
    ratios = [r.ratio for r in report.results if r.part == "context"]
    assert ratios[0] == 1
    assert ratios[1] is not None


def test_limits_of_the_7b_on_an_h200() -> None:
    peaks = 768e12, 4.27e12
    plan = Plan.of("cuda", peak_flops=peaks[0], peak_bytes=peaks[1])
    step = Result("decode", "ours", "greedy", 1, 16).stepped(plan, 1 / 250)
    assert step.tokens_per_second == 250
    assert step.limit == pytest.approx(accounting.decode_limit(SEVEN, 4.27e12))
    assert step.limit == pytest.approx(314, rel=0.01)
    assert step.percent_of_limit == pytest.approx(100 * 250 / step.limit)
    moved = accounting.decode_bytes(SEVEN)
    assert step.gigabytes_per_second == pytest.approx(250 * moved / 1e9)
    half = replace(plan, state_dtype="bfloat16")
    many = Result("decode", "ours", "greedy", 256, 16).stepped(half, 1)
    narrow = accounting.decode_bytes(SEVEN, 256, state_itemsize=2)
    assert many.limit == pytest.approx(256 * 4.27e12 / narrow)

    read = Result("prefill", "ours", "", 8, 8192).read(plan, 1.5)
    least = accounting.least_prefill_seconds(SEVEN, *peaks, 8192, 8)
    assert read.tokens_per_second == pytest.approx(65536 / 1.5)
    assert read.limit == pytest.approx(65536 / least)
    assert read.limit == pytest.approx(59_000, rel=0.02)  # 768 TFLOP/s over 13 GFLOPs a token
    hundred = Result("first", "ours", "100 tokens", 1, 2048).read(plan, 0.5, decoded=99)
    both = accounting.least_prefill_seconds(SEVEN, *peaks, 2048) + 99 * moved / 4.27e12
    assert hundred.limit == pytest.approx(both)
    assert hundred.tokens_per_second is None

    llama = Result("context", "llama2", "eager", 1, 0).stepped(plan, 1 / 100, limited=False)
    assert (llama.tokens_per_second, llama.limit, llama.percent_of_limit) == (100, None, None)


def test_lines_carry_the_numbers_or_the_reason() -> None:
    result = Result(
        "context", "ours", "greedy", 1, 2048, 0.004, 250.0, 3400.0, None, 314.2, 79.6, 1
    )
    titles = "decoding behind a text, batch 1 batch tokens ms tok/s GB/s limit % of limit speed, ×"
    assert " ".join(heading("context").split()) == titles
    want = "ours, greedy 1 2048 4.00 250.0 3,400 314.2 80 1.000"
    assert " ".join(line(result).split()) == want
    peak = Result("memory", "ours", "loaded", 1, 0, memory=14_210_000_000, limit=13.73e9)
    assert " ".join(line(peak).split()) == "ours, loaded 1 0 14.21 13.73"
    failed = Result("prefill", "ours", "", 8, 64, error="out of memory")
    assert " ".join(line(failed).split()) == "ours 8 64 failed: out of memory"


def test_json_and_plot(report: Report, tmp_path: Path) -> None:
    generation.write(report, tmp_path / "results.json", tmp_path / "results.png")
    document = json.loads((tmp_path / "results.json").read_text())
    assert {"date", "torch", "cpu", "limit"} < set(document)
    again = Report(Plan.from_dict(document["plan"]), [Result(**row) for row in document["results"]])
    assert again == report
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_saved_model_starts(tmp_path: Path) -> None:
    XLSTM(ModelConfig.named("tiny")).save_pretrained(tmp_path)
    report = generation.run(replace(SMALL, parts=(), folder=str(tmp_path)))
    assert [(result.part, result.error) for result in report.results] == [("start", None)]


def test_weights_are_random_in_their_dtype_and_the_default_stays() -> None:
    model = our_model(replace(SMALL, dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    assert all(block.gates.abs().sum() > 0 for block in model.blocks)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "8b"}, "there is no size '8b'; the sizes are tiny, 160m"),
        ({"parts": ["decode", "speed"]}, "there is no part 'speed'; the parts are memory, decode"),
        ({"batches": [1, 0]}, "batches must be at least 1, not 0"),
        ({"contexts": [-1]}, "contexts must be at least 0, not -1"),
        ({"prompts": [0]}, "prompts must be at least 1, not 0"),
        ({"lengths": [0]}, "lengths must be at least 1, not 0"),
        ({"tokens": 0}, "tokens must be at least 1, not 0"),
        ({"tokens": 100, "lengths": [64]}, "prompts of 64 do not divide 100 tokens"),
        ({"dtype": "float8"}, "the dtype must be float32 or bfloat16, not 'float8'"),
        ({"state_dtype": "int8"}, "the dtype must be float32 or bfloat16, not 'int8'"),
        ({"peak_flops": 0.0}, "a peak must be a positive number, not 0"),
        ({"folder": "/nowhere"}, "there is no saved model in /nowhere"),
        ({"device": "tpu"}, "the device must be cuda or cpu, not 'tpu'"),
    ],
)
def test_mistakes_are_one_sentence_before_any_work(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(generation, "our_results", lambda plan: pytest.fail("it began"))
    with pytest.raises(ValueError, match=message) as caught:
        generation.run(Plan.of(**{"device": "cpu", "size": "tiny", **given}))
    assert "\n" not in str(caught.value)


def test_unknown_peers_and_missing_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no peer 'vllm'; the peers are transformers"):
        generation.run(SMALL, ["vllm"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no CUDA GPU here"):
        generation.run(Plan.of("cuda"))


def test_defaults_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Plan.of() == Plan.of("cpu", size=None)
    assert (Plan.of().size, Plan.of().lengths) == ("160m", (1024,))
    assert Plan.of("cuda", tokens=8192).lengths == (8192, 2048)
    assert Plan.of("cuda", tokens=100).lengths == (100,)


def test_measured_peaks_fill_what_was_not_given() -> None:
    plan = generation.with_peaks(replace(SMALL, peak_flops=None))
    assert plan.peak_bytes == 1e11
    assert plan.peak_flops is not None
    assert plan.peak_flops > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "1,x"], "'1,x' is not a list of numbers"),
        (["--size", "8b"], "there is no size '8b'"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at to write into"),
    ],
)
def test_the_command_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["generation", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit):
        generation.main()
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_plot_needs_matplotlib_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--plot needs matplotlib"):
        generation.check_outputs(None, Path("plot.png"))
    generation.check_outputs(Path("results.json"), None)


def test_only_the_failures_named_are_results() -> None:
    def fails(error: Exception, blank: Result) -> Result:
        raise error

    blank = Result("decode", "ours", "greedy", 512, 16)
    full = attempt(blank, lambda r: fails(torch.OutOfMemoryError("CUDA\nout of memory"), r))
    assert full == replace(blank, error="out of memory")
    named = attempt(blank, lambda r: fails(RuntimeError("a\nb"), r), Exception)
    assert named.error == "RuntimeError: a b"
    with pytest.raises(RuntimeError):
        attempt(blank, lambda r: fails(RuntimeError("a bug of ours"), r))


# Peers. Theirs is not asked to be fast, only to be called as it wants to be.


@pytest.mark.parametrize("peer", ["transformers", "xlstm", "llama2", "llama3"])
def test_peers_run_on_a_cpu(peer: str) -> None:
    pytest.importorskip("xlstm.xlstm_large.model" if peer == "xlstm" else "transformers")
    with torch.no_grad():
        results = list(generation_peers.results(peer, SMALL))
    assert [result for result in results if result.error or not result.seconds] == []
    decoding = [(r.batch, r.length) for r in results if r.part in ("decode", "context")]
    assert decoding == ([(1, 0), (1, 20)] if peer.startswith("llama") else [(1, START_TOKENS)])
    reading = [(r.part, r.batch, r.length) for r in results if r.part in ("first", "prefill")]
    assert reading == [("first", 1, 1), ("first", 1, 70), ("prefill", 1, 64), ("prefill", 2, 32)]
    assert all((r.limit is None) == peer.startswith("llama") for r in results)


def test_llamas_of_the_7b_are_the_real_ones() -> None:
    seven = replace(SMALL, size="7b")
    two, three = (generation_peers.llama_shape(peer, seven) for peer in ("llama2", "llama3"))
    assert (two["intermediate_size"], two["num_key_value_heads"]) == (11008, 32)
    assert (three["intermediate_size"], three["num_key_value_heads"]) == (14336, 8)


FAKE = """
import torch

class xLSTMLargeConfig:
    def __init__(self, **fields):
        self.__dict__ |= fields

class xLSTMLarge(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.calls = 0

    def forward(self, tokens, state=None):
        self.calls += 1
        if self.config.num_blocks == 4 and tokens.shape[1] == 70:
            raise RuntimeError("too long\\nfor this")
        return torch.zeros(*tokens.shape, self.config.vocab_size), {}
"""


def peers_from(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """Makes the folder the place where `xlstm` comes from."""
    package = folder / "xlstm" / "xlstm_large"
    package.mkdir(parents=True)
    (folder / "xlstm" / "__init__.py").write_text("")
    if text is not None:
        (package / "model.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_peer_reports_from_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers_from(tmp_path, monkeypatch, FAKE)
    results = generation.run(SMALL, ["xlstm"], ours=False).results
    assert [(r.part, r.length, r.error) for r in results] == [
        ("decode", START_TOKENS, None),
        ("first", 1, None),
        ("first", 70, "RuntimeError: too long for this"),
        ("prefill", 64, None),
        ("prefill", 32, None),
    ]


def test_a_missing_peer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers_from(tmp_path, monkeypatch, None)
    (result,) = generation.run(SMALL, ["xlstm"], ours=False).results
    reason = "ModuleNotFoundError: No module named 'xlstm.xlstm_large.model'"
    assert result == Result("peer", "xlstm", "", 0, 0, error=reason)
    assert capsys.readouterr().out.splitlines()[-3].split() == f"xlstm failed: {reason}".split()


def test_a_peer_that_takes_too_long_is_stopped() -> None:
    (result,) = generation.peer_results("xlstm", SMALL, 0.01)
    assert result.error == "stopped after 0 s"


def test_plans_travel_as_json() -> None:
    assert Plan.from_dict(json.loads(json.dumps(asdict(SMALL)))) == SMALL
