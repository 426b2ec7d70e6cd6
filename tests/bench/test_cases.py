"""What all benchmarks share: plans, tables, files, plots, and processes for peers."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from xlstm7b.bench import cases
from xlstm7b.bench import measure as measure_module
from xlstm7b.bench.cases import Column, Part, Result, heading, line
from xlstm7b.bench.measure import (
    UnsteadyError,
    attempt,
    failed,
    find_peaks,
    measure,
    measure_decoding,
    measure_steps,
    percentile,
)
from xlstm7b.bench.peers import in_process
from xlstm7b.bench.plans import BENCHMARKS, Engine, Generation, Kernels, Loader, Serve, Tune
from xlstm7b.generate import Generator

TABLE = Part(
    "decoding",
    ("batch", "tokens", "ms", "tok/s", "limit", Column("first, ms", "first", 1e3, 1)),
    plot=("tokens", "tok/s"),
)
RESULTS = [
    Result("decode", work="greedy", batch=1, length=8, seconds=0.004, tokens_per_second=250.0),
    Result("decode", work="sampled", batch=1, length=8, seconds=0.005, tokens_per_second=200.0),
    Result("decode", "peer", "greedy", batch=1, length=8, seconds=0.008, tokens_per_second=125.0),
    Result("decode", "peer", "other", batch=1, length=8, seconds=0.02, tokens_per_second=50.0),
    Result("decode", "peer", "greedy", batch=2, length=8, seconds=0.02, tokens_per_second=100.0),
    Result("decode", batch=1, length=64, limit=314.2, figures={"first": 0.5, "runs": [1, 2]}),
    Result("decode", batch=8, length=64, error="out of memory"),
    Result("peer", "another", error="exit code 1"),
]


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark that yields `RESULTS`, in the place of the loader's."""
    module: Any = ModuleType("xlstm7b.bench.loader")
    module.PARTS, module.results = {"decode": TABLE}, lambda plan: iter(RESULTS)
    monkeypatch.setitem(sys.modules, "xlstm7b.bench.loader", module)
    return module


PLAN = Loader.of(folders=[Path("folder")])


def test_rows_carry_the_figures_or_the_reason() -> None:
    titles = "decoding batch tokens ms tok/s limit first, ms"
    assert " ".join(heading(TABLE).split()) == titles
    assert " ".join(line(RESULTS[0], TABLE).split()) == "ours, greedy 1 8 4.00 250.0"
    assert " ".join(line(RESULTS[5], TABLE).split()) == "ours 1 64 314.2 500.0"
    assert " ".join(line(RESULTS[6], TABLE).split()) == "ours 8 64 failed: out of memory"
    assert " ".join(line(RESULTS[7], None).split()) == "another failed: exit code 1"
    cells = line(RESULTS[0], TABLE)
    assert heading(TABLE).splitlines()[1].index("batch") + len("batch") == cells.index(" 1 ") + 2


def test_results_are_printed_compared_saved_and_drawn(
    loader: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"json": tmp_path / "results.json", "plot": tmp_path / "results.png"}
    done = cases.run(PLAN, **files, command="xlstm7b bench loader x")
    # Beside a peer stands ours of the same case: the same work, else the first.
    assert [result.ratio for result in done[2:5]] == [2.0, 5.0, None]
    assert [replace(result, ratio=None) for result in done] == RESULTS
    printed = capsys.readouterr().out
    assert printed.count("decoding") == 1
    assert printed.splitlines()[-1] == line(RESULTS[-1], None)

    document = json.loads((tmp_path / "results.json").read_text())
    assert {"date", "torch", "cpu"} < set(document)
    assert document["command"] == "xlstm7b bench loader x"
    assert document["plan"]["batches"] == [8, 64]
    assert [Result.from_dict(row) for row in document["results"]] == done
    assert document["results"][5]["runs"] == [1, 2]
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_other_kinds_are_kept(loader: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text("a letter")
    with pytest.raises(ValueError, match=r"results\.json exists and holds no results"):
        cases.run(PLAN, json=file)
    assert file.read_text() == "a letter"


def test_an_interrupted_benchmark_saves_what_it_has(loader: Any, tmp_path: Path) -> None:
    def results(plan: Loader) -> Iterator[Result]:
        yield RESULTS[0]
        raise KeyboardInterrupt

    loader.results = results
    with pytest.raises(KeyboardInterrupt):
        cases.run(PLAN, json=tmp_path / "results.json")
    rows = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [Result.from_dict(row) for row in rows] == RESULTS[:1]


def test_a_closed_pipe_loses_no_measured_row(
    loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe is closed when the heading of the first row is printed."""
    said: list[str] = []

    def say(text: str, flush: bool = False) -> None:
        if said:
            raise BrokenPipeError
        said.append(text)

    monkeypatch.setattr("builtins.print", say)
    with pytest.raises(BrokenPipeError):
        cases.run(PLAN, json=tmp_path / "results.json")
    rows = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [Result.from_dict(row) for row in rows] == RESULTS[:1]


def test_files_that_cannot_be_written_are_found_before_the_work(
    monkeypatch: pytest.MonkeyPatch, loader: Any, tmp_path: Path
) -> None:
    loader.results = lambda plan: pytest.fail("it began")
    for file in ("json", "plot"):
        with pytest.raises(ValueError, match=f"cannot write {tmp_path}: it is a folder$"):
            cases.run(PLAN, **{file: tmp_path})
    with pytest.raises(
        ValueError, match=r"cannot write /nowhere/at/.*: there is no folder /nowhere/at$"
    ):
        cases.run(PLAN, json=Path("/nowhere/at/all.json"))
    monkeypatch.setattr("xlstm7b.report.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="drawing a figure needs matplotlib"):
        cases.run(PLAN, plot=Path("plot.png"))


def test_secrets_are_not_saved() -> None:
    plan = Serve.of(url="http://a", api_key="key")
    assert plan.api_key == "key"
    assert "key" not in plan.to_dict().values()


@pytest.mark.parametrize("subject", BENCHMARKS)
def test_every_benchmark_has_a_module(subject: str) -> None:
    if subject in ("kernels", "tune"):
        pytest.importorskip("triton", reason="Triton is not installed")
    module: Any = __import__(f"xlstm7b.bench.{subject}", fromlist=["PARTS"])
    assert callable(module.results)
    for part in module.PARTS.values():
        assert part.columns
        assert len(part.plot) in (0, 2)
    assert hasattr(module, "draw") or any(part.plot for part in module.PARTS.values())


# Plans


def test_defaults_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Generation.of() == Generation.of(device="cpu", size=None)
    assert (Generation.of().size, Generation.of().lengths) == ("160m", (1024,))
    on_gpu = Generation.of(device="cuda")
    assert (on_gpu.size, on_gpu.dtype, on_gpu.batches) == (
        "7b",
        "bfloat16",
        (1, 8, 32, 64, 128, 256),
    )
    assert on_gpu.prompts == (1, 128, 512, 1024, 2048, 4096, 8192, 16384)
    assert Generation.of(device="cuda", tokens=8192).lengths == (8192, 2048)
    assert Generation.of(device="cuda", tokens=100).lengths == (100,)
    assert Engine.of(device="cpu").size == "tiny"


def test_plans_travel_as_json() -> None:
    plan = Generation.of(device="cpu", batches=(1, 3), peers=("xlstm",))
    assert Generation.of(**json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Generation.of(device="cpu", size="8b"), "unknown model size '8b'; choose from tiny, 160m"),
        (
            Generation.of(device="cpu", parts=["decode", "speed"]),
            "unknown part 'speed'; choose from memory, decode, context, first, prefill",
        ),
        (
            Generation.of(device="cpu", peers=["vllm"]),
            "unknown peer 'vllm'; choose from transformers, xlstm, llama2, llama3",
        ),
        (Generation.of(device="cpu", batches=[1, 0]), "batches must be at least 1, not 0"),
        (Generation.of(device="cpu", contexts=[-1]), "contexts must be at least 0, not -1"),
        (Generation.of(device="cpu", prompts=[0]), "prompts must be at least 1, not 0"),
        (Generation.of(device="cpu", lengths=[0]), "lengths must be at least 1, not 0"),
        (Generation.of(device="cpu", tokens=0), "tokens must be at least 1, not 0"),
        (
            Generation.of(device="cpu", tokens=100, lengths=[64]),
            "prompts of 64 do not divide 100 tokens",
        ),
        (
            Generation.of(device="cpu", dtype="float8"),
            "unknown dtype 'float8'; choose from float32, bfloat16",
        ),
        (
            Generation.of(device="cpu", state_dtype="int8"),
            "unknown state_dtype 'int8'; choose from float32, bfloat16",
        ),
        (Generation.of(device="cpu", peak_tflops=0.0), "peak_tflops must be above 0, not 0"),
        (
            Generation.of(device="cpu", folder="/nowhere"),
            "there is no saved model in /nowhere: it has no config.json",
        ),
        (Generation.of(device="tpu"), "unknown device 'tpu'; choose from cuda, cpu"),
        (Kernels.of(lengths=[0]), "lengths must be at least 1, not 0"),
        (Kernels.of(lengths=[3000]), "sequences of 3000 do not divide 65536 tokens"),
        (Kernels.of(lengths=[131072]), "sequences of 131072 do not divide 65536 tokens"),
        (Kernels.of(sizes=["7b", "8b"]), "unknown model size '8b'; choose from tiny, 160m"),
        (
            Tune.of(kernels=["dx"]),
            "unknown kernel 'dx'; choose from states, state_gradients",
        ),
        (Engine.of(device="cpu", new_tokens="a"), "new_tokens must look like 256 or 128-384, not"),
        (
            Engine.of(device="cpu", new_tokens="9-3"),
            "new_tokens must look like 256 or 128-384, not",
        ),
        (Engine.of(device="cpu", new_tokens="0"), "new_tokens must look like 256 or 128-384, not"),
    ],
)
def test_mistakes_are_one_sentence_before_any_work(plan: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        cases.run(plan)
    assert "\n" not in str(caught.value)


def test_a_missing_gpu_is_one_sentence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA GPU here; measure the CPU with --device cpu"):
        cases.run(Generation.of(device="cuda"))


# Measuring


@pytest.fixture(autouse=True)
def _short_timings() -> None:
    """Replaces that of conftest.py: here the timers are as they are."""


def test_only_the_failures_named_are_results() -> None:
    def fails(error: Exception, case: Result) -> Result:
        raise error

    case = Result("decode", work="greedy", batch=512, length=16)
    full = attempt(case, lambda r: fails(torch.OutOfMemoryError("CUDA\nout of memory"), r))
    assert full == replace(case, error="out of memory")
    named = attempt(case, lambda r: fails(RuntimeError("a\nb"), r), Exception)
    assert named.error == "RuntimeError: a b"
    with pytest.raises(RuntimeError):
        attempt(case, lambda r: fails(RuntimeError("a bug of ours"), r))


def test_the_time_of_a_step_leaves_out_what_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run(steps: int) -> None:
        nonlocal now
        now += 0.5 + 0.002 * steps

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert measure_steps(run, "cpu", seconds=1, base=8) == pytest.approx((0.002, 0), abs=1e-9)


def test_first_steps_that_do_less_work_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first 30 steps the sequences start one after another: a step of few costs less."""
    now = 0.0

    def run(steps: int) -> None:
        nonlocal now
        now += sum(0.02 * min(1.0, 0.5 + step / 60) for step in range(steps))

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    timing = measure_steps(run, "cpu", seconds=0.3, base=8)
    assert timing.seconds == pytest.approx(0.02, rel=0.003)
    assert timing.spread <= 0.03


@pytest.mark.parametrize("noise", [0.0, 0.004, 0.1])
def test_decoding_is_timed_in_one_call(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 sequences, 16 start in each step, and every 16th step takes twice as long."""
    now, ran, draw = 0.0, 0, random.Random(0)

    class Fake:
        device, batch_size = "cpu", 512

        def generate(
            self,
            prompts: None,
            *,
            max_new_tokens: int,
            should_stop: Callable[[], bool] = lambda: False,
            **sampling: object,
        ) -> None:
            nonlocal now, ran
            for step in range(max_new_tokens):
                started = min(1.0, (step + 1) / 32)
                now += (0.01 + 0.01 * started) * (2 if step % 16 == 9 else 1)
                now += noise * draw.random()
                ran += 1
                if should_stop():
                    break

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    generator = cast(Generator, Fake())
    if noise > 0.01:
        monkeypatch.setattr(measure_module, "MOST_SPREAD", 1e-9)
        with pytest.raises(UnsteadyError, match="differ by"):
            measure_decoding(generator, None, seconds=0.3)
        return
    timing = measure_decoding(generator, None, seconds=0.3)
    assert timing.seconds == pytest.approx(0.02 * 17 / 16 + noise / 2, rel=0.01)
    assert timing.spread <= (0.01 if noise else 1e-9)
    assert ran < 700


@pytest.mark.parametrize("base", [0, 8])
@pytest.mark.parametrize("noise", [0.003, 1.0])
def test_unsteady_steps_are_repeated_then_refused(
    base: int, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, draw = 0.0, random.Random(0)

    def run(steps: int) -> None:
        nonlocal now
        now += 0.002 * steps + draw.random() * noise

    def timed(case: Result) -> Result:
        timing = measure_steps(run, "cpu", seconds=0.1, base=base)
        return replace(case, seconds=timing.seconds, figures={"spread": timing.spread})

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    result = attempt(Result("decode", batch=1), timed)
    if noise < 0.1:  # 3 ms are 3% of the first 50 steps, and less than 1% of 500
        assert result.seconds == pytest.approx(0.002, rel=0.02)
        assert 0 < result.figures["spread"] <= 0.01
    else:
        assert result.seconds is None
        assert "differ by" in (result.error or "")


def test_percentiles() -> None:
    values = [n / 100 for n in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 90, 99)] == [0.5, 0.9, 0.99]
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("seconds", "counted"), [(0.25, 3), (0.5, 2), (1.5, 1)])
def test_long_calls_are_timed_less_often(
    seconds: float, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, calls = [0.0], [0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call() -> None:
        calls[0] += 1
        now[0] += 60 if calls[0] == 1 else seconds  # the first one compiles

    assert measure(call, "cpu", enough=1.0) == seconds
    assert calls[0] == 1 + counted


def test_a_reason_has_no_advice() -> None:
    cuda = torch.AcceleratorError("CUDA error: misaligned address\nSearch for it in the manual")
    compiler = RuntimeError("the compiler failed:\n  no such register")
    assert failed(RESULTS[0], cuda).error == "AcceleratorError: CUDA error: misaligned address"
    want = "RuntimeError: the compiler failed: no such register"
    assert failed(RESULTS[0], compiler).error == want


def test_measured_peaks_fill_what_was_not_given() -> None:
    flops, bandwidth = find_peaks("cpu", torch.float32, None, 0.1)
    assert bandwidth == 1e11
    assert flops > 0


# Processes


def counted(upto: int, then: str) -> Iterator[Result]:
    """What a process does: some results, then its end."""
    print("something that the library prints")
    for n in range(upto):
        yield Result("decode", "peer", batch=n, figures={"process": os.getpid()})
    if then == "raises":
        raise RuntimeError("too long\nfor this")
    if then == "crashes":
        os._exit(7)
    if then == "hangs":
        time.sleep(600)


@pytest.fixture
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """`counted` is found by another process."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    monkeypatch.setattr(counted, "__module__", Path(__file__).stem)


CASE = Result("peer", "peer")


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize(
    ("then", "reason"),
    [("ends", None), ("raises", "RuntimeError: too long"), ("crashes", "exit code 7")],
)
def test_results_of_another_process(then: str, reason: str | None) -> None:
    results = list(in_process(CASE, counted, 60.0, upto=3, then=then))
    if reason is not None:
        assert results.pop() == replace(CASE, error=reason)
    assert [result.batch for result in results] == [0, 1, 2]
    assert {result.figures["process"] for result in results} != {os.getpid()}


@pytest.mark.usefixtures("_importable")
def test_the_process_of_a_peer_ends_when_its_reader_stops() -> None:
    results = in_process(CASE, counted, 60.0, upto=1, then="hangs")
    process = next(results).figures["process"]
    os.kill(process, 0)  # it is there
    results.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.usefixtures("_importable")
def test_the_process_of_a_peer_ends_when_its_parent_is_killed() -> None:
    code = (
        f"from {counted.__module__} import CASE, counted, in_process\n"
        "for result in in_process(CASE, counted, 60.0, upto=1, then='hangs'):\n"
        "    print(result.figures['process'], flush=True)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        process = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    for _ in range(100):
        if not _is_running(process):
            return
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
    pytest.fail("it went on")


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_process_of_a_peer_ends_after_its_timeout() -> None:
    (result,) = in_process(CASE, counted, 0.01, upto=1, then="hangs")
    assert result == replace(CASE, error="stopped after 0 s")
