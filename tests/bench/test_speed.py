"""`xlstm7b experiment speed`: what it measures of each model, and how it goes on after failures."""

import gc
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import ANY

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
from xlstm7b.bench import generation, speed, speed_figures
from xlstm7b.bench.cases import Result
from xlstm7b.bench.measure import Timing
from xlstm7b.bench.peer_models import COMPILED, EAGER, GRAPH, PEERS, check
from xlstm7b.bench.plans import SPEED_PARTS, Speed
from xlstm7b.bench.speed_figures import draw
from xlstm7b.report import figure

PLAN = Speed.of(device="cpu", peak_tflops=1.0, peak_tbs=0.1)


@cache
def measured(name: str) -> list[Result]:
    """The results of a model that transformers alone can build, or of ours.

    Without the check of its decoding, which has tests of its own and takes most of the time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "check", lambda *_: {"equal_tokens": 16})
        return list(speed.measure_model(name, SPEED_PARTS, PLAN.to_dict()))


@pytest.mark.parametrize("name", [*speed.SMOKE_RUNS, "ours-bf16-state"])
def test_every_figure_is_complete(name: str) -> None:
    results = measured(name)
    assert [result.error for result in results if result.error] == []
    assert {result.name for result in results} == {name}
    begun = [(r.part, r.work) for r in results if r.part in ("began", "ended")]
    assert begun == [(p, part) for part in SPEED_PARTS for p in ("began", "ended")]
    if name != "ours":
        assert all(r.figures["equal_tokens"] == 16 for r in results if r.part == "check")
    rows = {part: [r for r in results if r.part == part] for part in SPEED_PARTS}
    assert [(r.batch, r.length) for r in rows["context"]] == [(1, 0), (1, 40), (1, 80)]
    lengths = [(r.length, r.figures["new"]) for r in rows["first"]]
    assert lengths == [(1, 1), (1, 3), (20, 1), (20, 3)]
    if name in PEERS:  # both times are of the same outputs; ours are of outputs of their own
        seconds = [r.seconds or 0 for r in rows["first"]]
        assert seconds[0] < seconds[1]
        assert seconds[2] < seconds[3]
    assert [(r.batch, r.length) for r in rows["prefill"]] == [(1, 64), (2, 32)]
    assert [(r.batch, r.length) for r in rows["full"]] == [(2, 20), (2, 40)]
    timed = [(r.length, r.seconds) for r in rows["generated"] if r.seconds is not None]
    assert [length for length, _ in timed] == [4, 20]
    assert timed[0][1] < timed[1][1]
    assert {r.length for r in rows["generated"] if r.memory} == {4, 20, 40, 80}
    for result in [*rows["context"], *rows["first"], *rows["prefill"], *rows["full"]]:
        assert result.seconds is not None
        assert result.seconds > 0
        assert result.work  # the engine
        assert ("slow path" in result.work) == ("mamba" in name)
    for result in (*rows["context"], *rows["full"]):
        assert result.tokens_per_second == pytest.approx(result.batch / result.seconds)


def test_a_second_process_uses_the_choices_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It neither times the ways to decode nor checks them again; on another machine it does."""
    first = measured("llama3")
    facts = next(r.figures for r in first if r.part == "machine")
    choices = [r.figures for r in first if r.part == "ended"][-1]
    assert choices == {"ways": (EAGER,), "attentions": ANY, "compiled_prompts": False}
    assert sorted(choices["attentions"]) == ["flash", "sdpa"]
    before = json.loads(json.dumps(facts | {"choices": choices}))
    before["machine"]["date"] = "2026-01-01"
    monkeypatch.setattr(generation, "check", lambda *_: {"equal_tokens": 16})
    for known, starts in ((before, False), (before | {"machine": {"gpu": "other"}}, True)):
        found = list(speed.measure_model("llama3", SPEED_PARTS, PLAN.to_dict(), known))
        assert any(r.part in ("start", "ways", "check") for r in found) == starts
        for part in SPEED_PARTS:
            lengths = [(r.batch, r.length) for r in first if r.part == part]
            assert [(r.batch, r.length) for r in found if r.part == part] == lengths
        assert not any(r.error for r in found)


def test_a_broken_gpu_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal memory access every call fails: the next figure needs a new process."""

    def results(self: object, part: str) -> Iterator[Result]:
        yield Result(part, "ours", length=8, seconds=1.0)
        yield Result(part, "ours", length=16, error="AcceleratorError: CUDA error: illegal access")
        yield Result(part, "ours", length=32, error="AcceleratorError: CUDA error: illegal access")

    def synchronize(device: str) -> None:
        raise RuntimeError("CUDA error: illegal access")

    monkeypatch.setattr(speed._OurParts, "__call__", results)
    monkeypatch.setattr(speed, "synchronize", synchronize)
    found = speed.measure_model("ours", SPEED_PARTS, PLAN.to_dict())
    assert [next(found).part for _ in range(2)] == ["machine", "began"]
    assert [next(found).length for _ in range(2)] == [8, 16]
    with pytest.raises(RuntimeError, match="illegal access"):
        next(found)


@torch.no_grad()
def test_prompts_are_compiled_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    timer = speed.SpeedPeer.__new__(speed.SpeedPeer)
    timer.name, timer.plan, timer._room = "llama3", PLAN, 256
    timer.peer = peer = PEERS["llama3"](PLAN, 1)

    def compile_prompts() -> None:
        peer.reader = torch.compile(peer.prompt_logits, dynamic=True, backend=counter)

    monkeypatch.setattr(peer, "compile_prompts", compile_prompts)
    timer._try_compiled_prompts(Result("ways", "llama3"))
    assert counter.frame_count == 1
    compile_prompts()  # that one, whichever was faster
    for room, length in ((1024, 128), (1024, 600), (512, 512)):
        cache = peer.new_cache(1, room)
        peer.set_length(cache, 0)
        peer.reader(peer.tokens(1, length), cache)
    assert counter.frame_count == 1


class _Decoder:
    """Its steps take the time in `times`."""

    way, attention = EAGER, ""

    def __init__(self, times: dict[tuple[str, int], float]) -> None:
        self.times, self.timed = times, list[tuple[str, int]]()

    def step_time(self, length: int, *, seconds: float) -> Timing:
        self.timed.append((self.attention, length))
        return Timing(self.times[self.attention, length], 0.0)


def test_a_much_slower_way_to_attend_is_not_timed_again() -> None:
    lengths = (0, 2048, 4096, 8192)
    flash = {("flash", length): 1.0 for length in lengths}
    times = {("sdpa", 0): 2.0, ("sdpa", 2048): 0.9, ("sdpa", 4096): 1.5}
    timer = speed.SpeedPeer.__new__(speed.SpeedPeer)
    timer.name, timer.plan, timer._room = "llama3", replace(PLAN, contexts=lengths), 1 << 14
    timer.peer = PEERS["llama3"](PLAN, 1)
    timer.attentions = timer.peer.attentions
    decoder = _Decoder(flash | times)
    timer.decoder = cast(Any, decoder)
    rows = list(timer.results("context"))
    assert [row.seconds for row in rows] == [1.0, 0.9, 1.0, 1.0]
    assert [row.work.rpartition(", ")[2] for row in rows] == ["flash", "sdpa", "flash", "flash"]
    assert [case for case in decoder.timed if case[0] == "sdpa"] == list(times)


def test_all_ways_to_attend_have_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = speed.SpeedPeer("llama3", replace(PLAN, compile_seconds=0.05))
    timed = []

    def compiles(decoder: Any, length: int, *, seconds: float) -> Timing:
        timed.append(decoder.attention)
        time.sleep(30)
        return Timing(1.0, 0.0)

    monkeypatch.setattr(generation.Decoder, "step_time", compiles)
    result = timer._try(EAGER, Result("ways", "llama3", batch=1, length=16))
    assert result.error == "TimeoutError: stopped after 0 s"
    assert timed == ["flash"]


def test_a_full_gpu_is_not_tried_in_a_way_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = speed.SpeedPeer("llama3", PLAN)
    tried = []
    monkeypatch.setattr(generation, "decoding_ways", lambda device: (COMPILED, GRAPH, EAGER))
    monkeypatch.setattr(generation, "check", lambda *_: {})

    def attempted(way: str, case: Result) -> Result:
        tried.append(way)
        timer.decoder = cast(Any, _Decoder({}))
        if way == COMPILED:
            raise TimeoutError("stopped after 150 s")
        return replace(case, seconds=1.0)

    monkeypatch.setattr(timer, "_try", attempted)
    list(timer.start())
    assert tried == [COMPILED, GRAPH]
    ways = []

    def largest(case: Result, way: str) -> Result:
        ways.append(way)
        return replace(case, batch=2, tokens_per_second=1.0)

    monkeypatch.setattr(timer, "_largest", largest)
    list(timer.results("full"))
    assert set(ways) == {GRAPH}


def test_a_recurrent_model_is_compiled_for_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the largest that fits, which is found without compiling. The faster way counts."""
    timer = speed.SpeedPeer("codestral-mamba", replace(PLAN, full_contexts=(20, 40)))
    timer.ways, tried, seconds = (COMPILED, GRAPH), [], {GRAPH: 2.0}

    def timed(way: str, case: Result) -> Result:
        tried.append((way, case.batch))
        if case.batch > 1:
            raise torch.OutOfMemoryError("out of memory")
        return replace(case, work=way, seconds=seconds[way])

    monkeypatch.setattr(timer, "_time_batch", timed)
    for compiled, fastest in ((1.0, COMPILED), (3.0, GRAPH)):
        seconds[COMPILED] = compiled
        tried.clear()
        rows = list(timer.results("full"))
        assert tried == [(GRAPH, 2), (GRAPH, 1), (COMPILED, 1)]
        assert [(row.length, row.batch, row.work) for row in rows] == [
            (20, 1, fastest),
            (40, 1, fastest),
        ]
        both = {"compiled_seconds": compiled, "not_compiled_seconds": 2.0}
        assert all(row.figures == both for row in rows)
    del seconds[COMPILED]
    (row, _) = timer.results("full")
    assert (row.work, row.figures) == (GRAPH, {"compiled_error": f"KeyError: '{COMPILED}'"})


def test_only_a_cache_that_grows_is_compiled_for_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda _, **options: compiled.append(options["dynamic"]))
    for name in ("llama3", "codestral-mamba"):
        peer = PEERS[name](PLAN, 1)
        peer.compiled_step(False)
        peer.compiled_step(True)
    assert compiled == [False, True, False, False]


def test_memory_is_that_of_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the models that the check has made, which Python keeps until it collects garbage."""
    timer = speed.SpeedPeer("codestral-mamba", PLAN)
    made = []

    def make(plan: Speed, layers: int | None = None) -> Any:
        peer = PEERS["codestral-mamba"](plan, layers)
        made.append(weakref.ref(peer.model))
        return peer

    gc.disable()
    try:
        decoder = timer._make_decoder(EAGER)
        with torch.no_grad():
            check(make, timer.peer, decoder)
            list(timer.results("generated"))
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


Script = dict[str, list[tuple[list[str], str | None]]]


def pretend(monkeypatch: pytest.MonkeyPatch, script: Script) -> list[tuple[str, list[str]]]:
    """Processes that follow a script: the parts each one ends, then why it crashes, if it does."""
    calls = []

    def process(
        case: Result, function: Callable[..., Any], timeout: float, /, **job: Any
    ) -> Iterator[Result]:
        name, parts = job["model"], job["parts"]
        calls.append((name, list(parts)))
        ended, error = script[name].pop(0)
        yield Result("machine", name, figures={"machine": {"gpu": "none"}})
        for part in ended:
            yield Result("began", name, part)
            yield Result(part, name, "engine", batch=1, length=8, seconds=1.0)
            yield Result("ended", name, part)
        rest = [part for part in parts if part not in ended]
        if error and rest and error != "at once":
            yield Result("began", name, rest[0])
        if error:
            yield Result("end", name, error=error)

    monkeypatch.setattr(speed, "in_process", process)
    return calls


def run(
    output: Path,
    *names: str,
    plan: Speed = PLAN,
    figures: Sequence[str] = speed.FIGURES,
    again: bool = False,
) -> dict[str, Any]:
    return speed.run_speed(output, names, plan, figures=figures, again=again, say=lambda line: None)


def test_a_crash_ends_one_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(SPEED_PARTS)
    calls = pretend(monkeypatch, {"llama2": [(every[:2], "Segfault"), (every[3:], None)]})
    found = run(tmp_path, "llama2")["llama2"]
    assert calls == [("llama2", every), ("llama2", every[3:])]
    assert found["status"] == "finished"
    assert found["figures"][every[2]] == [
        {"part": every[2], "name": "llama2", "batch": 0, "length": 0, "error": "Segfault"}
    ]
    assert all("error" not in row for part in every[3:] for row in found["figures"][part])
    assert found["figures"]["context"][0]["engine"] == "engine"
    saved = json.loads((tmp_path / speed.NAME).read_text())
    assert saved["runs"]["llama2"] == found
    run(tmp_path, "llama2")  # nothing is missing
    assert len(calls) == 2


def test_the_reason_of_a_crash_is_in_its_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, reason = list(SPEED_PARTS), "CUDA error: an illegal memory access"
    calls = []

    def process(case: Result, *_: Any, **job: Any) -> Iterator[Result]:
        calls.append(job)
        yield Result("machine", "llama2", figures={"machine": {"gpu": "one"}})
        for part in job["parts"]:
            yield Result("began", "llama2", part, figures={"ways": ["graph"]})
            if part == every[0]:
                error = f"AcceleratorError: {reason} Search for it"
                yield Result(part, "llama2", batch=1, length=8, error=error)
                yield Result("end", "llama2", error=f"torch.AcceleratorError: {reason}")
                return
            yield Result("ended", "llama2", part, figures={"ways": ["graph"]})

    monkeypatch.setattr(speed, "in_process", process)
    found = run(tmp_path, "llama2")["llama2"]
    assert [row["length"] for row in found["figures"][every[0]]] == [8]
    assert [call["parts"] for call in calls] == [every, every[1:]]
    assert calls[0]["before"]["choices"] is None
    assert calls[1]["before"]["choices"] == {"ways": ["graph"]}
    assert calls[1]["before"]["machine"] == {"gpu": "one"}
    run(tmp_path, "llama2", again=True)
    assert calls[2]["before"]["choices"] is None  # they are made again


def test_a_figure_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails if it had all the time, and is measured again if others before it took the time."""
    every, late = list(SPEED_PARTS), "stopped after 480 s"
    script: Script = {"llama2": [(every[:2], late), ([], late), (every[3:], None)]}
    calls = pretend(monkeypatch, script)
    assert run(tmp_path, "llama2")["llama2"]["status"] == "stopped"
    found = run(tmp_path, "llama2")["llama2"]
    assert calls == [("llama2", every), ("llama2", every[2:]), ("llama2", every[3:])]
    assert found["status"] == "finished"
    assert found["figures"][every[2]][0]["error"] == late


def test_a_model_that_cannot_start_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pretend(monkeypatch, {"xlstm": [([], "at once")], "ours": [(list(SPEED_PARTS), None)]})
    found = run(tmp_path, "xlstm", "ours")
    assert (found["xlstm"]["status"], found["xlstm"]["reason"]) == ("failed", "at once")
    assert found["ours"]["status"] == "finished"
    run(tmp_path, "xlstm", "ours")
    assert len(calls) == 2


def test_a_run_that_cannot_start_again_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, late = list(SPEED_PARTS), "stopped after 480 s"
    script: Script = {"llama2": [(every[:2], late), ([], "at once"), (every[2:], None)]}
    calls = pretend(monkeypatch, script)
    run(tmp_path, "llama2")
    failed = run(tmp_path, "llama2")["llama2"]
    assert (failed["status"], failed["reason"]) == ("failed", "at once")
    assert list(failed["figures"]) == every[:2]
    found = run(tmp_path, "llama2", again=True)["llama2"]
    assert calls[-1] == ("llama2", every[2:])
    assert (found["status"], found.get("reason"), list(found["figures"])) == (
        "finished",
        None,
        every,
    )


def test_figures_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some, others, every = ["first", "full"], ["context", "generated", "prefill"], [*SPEED_PARTS]
    script: Script = {"ours": [(some, None), (others, None), (["first"], None)]}
    calls = pretend(monkeypatch, script)
    record = run(tmp_path, "ours", "kernels", figures=some)["ours"]
    assert (record["status"], list(record["figures"])) == ("stopped", some)
    assert run(tmp_path, "ours")["ours"]["status"] == "finished"
    run(tmp_path, "ours", figures=some)  # it has them
    assert calls == [("ours", some), ("ours", others)]
    record = run(tmp_path, "ours", figures=["first"], again=True)["ours"]
    assert calls[2:] == [("ours", ["first"])]
    assert (record["status"], sorted(record["figures"])) == ("finished", sorted(every))


def test_one_model_is_measured_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(SPEED_PARTS)
    script: Script = {"ours": [(every, None), (every, None)], "llama2": [(every, None)]}
    calls = pretend(monkeypatch, script)
    first = run(tmp_path, "ours", "llama2")
    before = json.dumps(first["llama2"])
    second = run(tmp_path, "ours", again=True)
    assert calls == [("ours", every), ("llama2", every), ("ours", every)]
    assert json.dumps(second["llama2"]) == before


@pytest.mark.parametrize("reason", ["at once", "Ctrl-C"])
def test_a_finished_run_keeps_its_rows_until_they_are_replaced(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be measured again on a machine where it cannot start, or be stopped early."""
    every = list(SPEED_PARTS)
    pretend(monkeypatch, {"llama2": [(every, None), ([], reason)]})
    before = json.loads(json.dumps(run(tmp_path, "llama2")["llama2"]))
    if reason == "at once":
        assert run(tmp_path, "llama2", again=True)["llama2"]["status"] == "failed"
    else:

        def stopped(case: Result, *_: Any, **job: Any) -> Iterator[Result]:
            yield Result("start", "llama2")
            raise KeyboardInterrupt

        monkeypatch.setattr(speed, "in_process", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "llama2", again=True)
    kept = speed.read_records(tmp_path)["runs"]["llama2"]
    assert (kept["figures"], kept["partial"]) == (before["figures"], every)
    calls = pretend(monkeypatch, {"llama2": [(every, None)]})
    found = run(tmp_path, "llama2", again=True)["llama2"]
    assert calls == [("llama2", every)]
    assert (found["status"], found["partial"]) == ("finished", [])


def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = list(SPEED_PARTS)

    def stopped(case: Result, *_: Any, **job: Any) -> Iterator[Result]:
        yield Result("machine", "llama3", figures={})
        yield Result("began", "llama3", every[0])
        yield Result(every[0], "llama3", batch=1, length=8, seconds=1.0)
        yield Result("ended", "llama3", every[0])
        yield Result("began", "llama3", every[1])
        yield Result(every[1], "llama3", batch=1, length=128, seconds=1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "in_process", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "llama3")
    kept = speed.read_records(tmp_path)["runs"]["llama3"]
    assert [row["length"] for row in kept["figures"][every[1]]] == [128]
    assert kept["partial"] == [every[1]]
    calls = pretend(monkeypatch, {"llama3": [(every[1:], None)]})
    found = run(tmp_path, "llama3", again=True)["llama3"]
    assert calls == [("llama3", every[1:])]
    assert (found["status"], list(found["figures"])) == ("finished", every)
    assert [row["length"] for row in found["figures"][every[1]]] == [8]
    assert found["partial"] == []


@pytest.mark.parametrize("checked", [True, False])
def test_a_run_that_is_stopped_before_its_first_row(
    checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the ways to decode that were checked, and no others."""
    jobs = []

    def stopped(case: Result, *_: Any, **job: Any) -> Iterator[Result]:
        jobs.append(job)
        yield Result("machine", "llama3", figures={"machine": {"gpu": "one"}})
        yield Result("start", "llama3")
        yield Result("ways", "llama3", batch=1, length=16, seconds=1.0)
        if checked or len(jobs) == 1:
            yield Result("began", "llama3", SPEED_PARTS[0], figures={"ways": ["graph"]})
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "in_process", stopped)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "llama3", again=True)
    kept = speed.read_records(tmp_path)["runs"]["llama3"]
    assert (kept["status"], kept["figures"], len(kept["ways"])) == ("stopped", {}, 1)
    choices = [job["before"]["choices"] for job in jobs]
    assert choices == [None, {"ways": ["graph"]}, {"ways": ["graph"]} if checked else None]


def test_other_settings_need_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {"ours": [(list(SPEED_PARTS), None)]})
    run(tmp_path, "ours")
    with pytest.raises(ValueError, match=r"have first 3, not 5: choose another --output"):
        run(tmp_path, "llama2", plan=Speed.of(device="cpu", first=5, peak_tflops=1.0, peak_tbs=0.1))


def test_settings_that_change_no_figure_need_no_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {name: [(list(SPEED_PARTS), None)] for name in ("ours", "llama2")})
    run(tmp_path, "ours")
    path = tmp_path / speed.NAME
    content = json.loads(path.read_text())
    content["plan"] |= {"text_tokens": 999, "batches": [7], "timeout": 1.0}
    path.write_text(json.dumps(content))
    run(tmp_path, "llama2")
    assert set(speed.read_records(tmp_path)["runs"]) == {"ours", "llama2"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is damaged: it is not JSON "),
        ("[]", "is damaged: the file must be an object"),
        ('{"experiment": "speed", "plan": [], "runs": {}}', "is damaged: plan must be an object"),
        (
            '{"experiment": "speed", "plan": {}, "runs": {"ours": {"status": "finished"}}}',
            r"is damaged: runs\.ours\.figures is missing",
        ),
        (
            '{"experiment": "speed", "plan": {}, '
            '"runs": {"llama4": {"status": "stopped", "figures": {}}}}',
            "is damaged: speed has no run 'llama4'",
        ),
        ('{"experiment": "soft-cap", "runs": {}}', "holds the experiment soft-cap, not speed: "),
    ],
)
def test_damaged_results_are_named(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / speed.NAME).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        run(tmp_path, "ours")
    assert (tmp_path / speed.NAME).read_text() == content


@given(
    step=st.floats(1e-4, 1.0),
    slope=st.floats(0, 1e-3),
    counts=st.lists(st.integers(2, 64), min_size=1, max_size=4, unique=True),
)
def test_sums_of_steps(step: float, slope: float, counts: list[int]) -> None:
    """Steps that grow linearly: the sum is exact but for the last step's half."""
    contexts = [0, 64, 128, 1024]
    rows = [{"length": n, "seconds": step + slope * n} for n in contexts]
    real = [{"length": n, "seconds": n * step + slope * n * n / 2} for n in sorted(counts)]
    longer = [{"length": n, "memory": 1} for n in (128, 1024)]
    *measured, a, b = speed.with_sums([*real, *longer], rows)
    assert measured == real
    for row in (a, b):
        n = row["length"]
        assert row["summed"]
        assert row["memory"] == 1
        assert row["seconds"] == pytest.approx(n * step + slope * n * n / 2, rel=1e-6)


def test_sums_follow_steps_that_are_measured_again() -> None:
    rows = [{"length": 4, "seconds": 4.0}, {"length": 8, "memory": 1}]
    first = speed.with_sums(rows, [{"length": n, "seconds": 1.0} for n in (0, 8)])
    again = speed.with_sums(first, [{"length": n, "seconds": 2.0} for n in (0, 8)])
    assert [row["seconds"] for row in first] == [4.0, 8.0]
    assert [row["seconds"] for row in again] == [4.0, 12.0]


def test_nothing_is_summed_without_steps() -> None:
    rows = [{"length": 4, "seconds": 1.0}, {"length": 128, "memory": 1}]
    assert speed.with_sums(rows, [{"length": 128, "error": "out of memory"}]) == rows


def test_the_largest_batch_shrinks_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "free_memory", lambda device: 1000)
    tried = []

    def timed(case: Result) -> Result:
        tried.append(case.batch)
        if case.batch > 70:
            raise torch.OutOfMemoryError
        return Result("full", batch=case.batch, seconds=1.0)

    plan = Speed.of(device="cpu", most_rows=500)
    result = speed.largest_batch(Result("full"), 10, plan, timed)
    assert tried == [90, 78, 68]
    assert result.batch == 68
    none = speed.largest_batch(Result("full"), 2000, plan, timed)
    assert none.error == "out of memory"


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([], ""),
        (["a 1.0, b"], "a 1.0, b"),
        (["a, b", "a, c", "a, b"], "a, b or c"),
        (["a, b, c", "d"], "a, b, c or d"),
        (["a", "a, b"], "a, b"),
    ],
)
def test_a_caption_names_what_engines_share_once(engines: list[str], expected: str) -> None:
    rows = [{"length": 8, "engine": each} for each in engines] or [{"length": 8}]
    caption = speed_figures._caption({"ours": {"figures": {"first": rows}}}, "first")
    assert caption == f"Random weights. {speed.RUNS['ours']}: {expected}."


def test_a_caption_says_when_and_where() -> None:
    runs: dict[str, Any] = {
        name: {
            "figures": {"first": [{"length": 8, "engine": "a"}]},
            "machine": {"gpu": "G1", "date": f"2026-01-0{day}"},
        }
        for name, day in (("ours", 2), ("llama2", 1), ("llama3", 3))
    }
    runs["rwkv7"] = {"figures": {}, "machine": {"gpu": "G2", "date": "2026-02-01"}}  # not in it
    assert speed_figures._caption(runs, "first").startswith("G1, 2026-01-01 to 2026-01-03. Random")


def test_a_caption_names_the_shortest_length_that_failed() -> None:
    rows = [
        {"length": 512, "engine": "a"},
        *({"length": n, "engine": "a", "error": "out of memory"} for n in (4096, 2048, 8192)),
        {"length": 0, "error": "Segfault"},
    ]
    caption = speed_figures._caption({"llama3": {"figures": {"prefill": rows}}}, "prefill")
    assert ": a; from 2,048 tokens on: out of memory; Segfault. The Llamas" in caption


def test_the_caption_of_the_cell_says_what_failed() -> None:
    case = {"work": "forward + backward", "batch": 4}
    rows: list[dict[str, Any]] = [
        {"name": name, "length": length, "error": "no Triton", **case}
        for name in ("fla", "gated_deltanet")
        for length in (512, 1024)
    ]
    rows.append({"name": "ours", "length": 1024, "seconds": 1e-3, **case})
    record = {
        "figures": {"cell": rows},
        "machine": {"gpu": "G1", "date": "2026-01-01", "torch": "2.0"},
        "packages": {"fla-core": "0.6", "transformers": "5.0"},
    }
    assert speed_figures._caption({"kernels": record}, "cell") == (
        "G1, 2026-01-01. 4,096 random tokens of the 7B's width, bf16. torch 2.0, fla-core 0.6. "
        "simple GLA, FLA; gated delta rule, FLA, forward + backward: no Triton."
    )


def test_figures_from_results_with_failures(tmp_path: Path) -> None:
    runs: dict[str, Any] = {}
    for name in ("ours", "llama2"):
        figures = {
            part: [r.to_dict() | {"engine": r.work} for r in measured(name) if r.part == part]
            for part in SPEED_PARTS
        }
        runs[name] = {"figures": figures, "machine": {"gpu": "a GPU"}}
    runs["llama2"]["figures"]["context"][-1] = {"length": 80, "error": "out of memory"}
    runs["xlstm"] = {"figures": {}, "status": "failed", "reason": "not installed"}
    cell = [
        {"name": name, "work": work, "batch": 64 // length, "length": length, "seconds": 1e-3}
        for name in ("ours", "sdpa")
        for work in ("forward", "forward + backward")
        for length in (32, 64)
    ]
    runs["kernels"] = {"figures": {"cell": cell}}
    drawn = draw(runs, tmp_path)
    assert sorted(drawn) == sorted(f"speed-{part}" for part in (*SPEED_PARTS, "cell"))
    assert len(list(tmp_path.glob("*.png"))) == len(list(tmp_path.glob("*.svg"))) == 6
    assert "not vLLM" in speed_figures._caption(runs, "context")
    assert "vLLM" in (tmp_path / "speed-context.svg").read_text()  # in lines of any length


def test_models_differ_by_more_than_colour() -> None:
    """Lines may coincide, and then only their markers show that there are two."""
    models = [name for name in speed.RUNS if name != "kernels"]
    assert len({speed_figures._MARKERS[name] for name in models}) == len(models)
    peers = {speed_figures._style(name)["color"] for name in models if name not in speed.OURS}
    assert len(peers) == len(models) - len(speed.OURS)
    assert speed_figures._style("ours")["color"] not in peers


def test_numbers_of_sequences_do_not_lie_on_the_lines(tmp_path: Path) -> None:
    batches = {"ours": [900] * 4, "llama2": [101, 27, 7, 1], "llama3": [394, 107, 27, 6]}
    runs = {}
    for name, each in batches.items():
        rows = [
            {"batch": batch, "length": 2048 * 4**index, "tokens_per_second": 30.0 * batch}
            for index, batch in enumerate(each)
        ]
        runs[name] = {"figures": {"full": rows}}
    with figure(tmp_path / "full.png") as axis:
        speed_figures._full(axis, runs)
        axis.figure.canvas.draw()
        numbers = [text.get_text() for text in axis.texts]
        assert numbers == [str(batch) for batch in batches["llama2"] + batches["llama3"]]
        paths = [line.get_transform().transform_path(line.get_path()) for line in axis.lines]
        for text in axis.texts:
            box = text.get_window_extent()
            assert not any(path.intersects_bbox(box, filled=False) for path in paths)
