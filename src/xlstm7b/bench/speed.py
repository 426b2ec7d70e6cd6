"""`xlstm7b experiment speed`: the paper's speed figures, beside Llama, Mamba and other xLSTMs.

Each model is measured in a process of its own, which first checks that its cached decoding agrees
with its pass over the whole text. The figures:

    context     tokens per second at batch 1, after contexts of several lengths
    first       seconds from a prompt to the first tokens
    generated   seconds and memory of generating a text without a prompt
    prefill     tokens per second of reading many short or few long prompts
    full        tokens per second of a full GPU: the largest batch that fits beside the cache
    cell        the cell's kernels beside FlashAttention and others (the run `kernels`)

`results.json` holds the rows of every model. It is written after each figure, so a run that was
stopped continues with the figures that are missing. Of a figure that was stopped halfway, the rows
are kept until it is measured again.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel

from xlstm7b import __version__, accounting
from xlstm7b.bench import cases, generation
from xlstm7b.bench.cases import Part, Result
from xlstm7b.bench.generation import (
    START_TOKENS,
    PeerTimer,
    itemsizes,
    joined,
    replay_interval,
    with_limit,
)
from xlstm7b.bench.measure import (
    GREEDY,
    attempt,
    failed,
    find_peaks,
    free_memory,
    measure_decoding,
    plan_generator,
    plan_model,
    random_prompts,
    release,
    reset_peak,
    synchronize,
    time_limit,
)
from xlstm7b.bench.peer_models import COMPILED, EAGER, MOST_STEPS, Decoder
from xlstm7b.bench.peers import in_process
from xlstm7b.bench.plans import SPEED_PARTS, Kernels, Speed
from xlstm7b.devices import to_dtype
from xlstm7b.files import lock_folder, write_json
from xlstm7b.generate.engine import peak_memory
from xlstm7b.generate.replay import INTERVAL
from xlstm7b.model import XLSTM
from xlstm7b.report import machine, read_results

NAME = "results.json"
TITLE = "Speed beside Llama, Mamba and the authors' xLSTM"
KERNELS = "kernels"
OURS: dict[str, dict[str, Any]] = {  # runs of this package: what differs from the plan
    "ours": {},
    "ours-bf16-state": {"state_dtype": "bfloat16"},
    **{f"ours-{scheme}": {"quantize": scheme} for scheme in ("int8", "int4", "fp8")},
}
RUNS = {
    "ours": "xLSTM 7B, this package",
    "ours-bf16-state": "xLSTM 7B, this package, bf16 state",
    "ours-int8": "xLSTM 7B, this package, int8",
    "ours-int4": "xLSTM 7B, this package, int4",
    "ours-fp8": "xLSTM 7B, this package, fp8",
    "xlstm": "xLSTM 7B, the authors' package",
    "transformers": "xLSTM 7B, transformers",
    "llama2": "Llama 2 7B",
    "llama3": "Llama 3.1 8B",
    "falcon-mamba": "Falcon-Mamba 7B",
    "codestral-mamba": "Codestral-Mamba 7B",
    "rwkv7": "RWKV-7 7.2B",
    KERNELS: "the cell's kernels",
}
_SMALL_PEERS = "transformers", "llama2", "llama3", "falcon-mamba", "codestral-mamba"
SMOKE_RUNS = ("ours", "ours-int4", *_SMALL_PEERS)
PARTS = {
    **{name: generation.PARTS[name] for name in ("ways", "check", "context", "first", "prefill")},
    "generated": Part("generating without a prompt", ("tokens", "s", "GB")),
    "full": Part("a full GPU", ("batch", "tokens", "ms", "± %", "tok/s")),
    "cell": Part("the cell over whole sequences, bf16", ("batch", "tokens", "ms")),
}
FIGURES = (*SPEED_PARTS, "cell")
_PACKAGES = ("transformers", "xlstm", "mlstm_kernels", "mamba_ssm", "causal_conv1d", "fla-core")
Record = dict[str, Any]


def chosen(names: str | None, smoke: bool) -> list[str]:
    """The runs of a list with commas. None: all, or those that `--smoke` can build."""
    if names is None:
        return list(SMOKE_RUNS if smoke else RUNS)
    given = [name.strip() for name in names.split(",")]
    for name in given:
        if name not in RUNS:
            raise ValueError(f"speed has no run {name!r}; choose from {', '.join(RUNS)}")
    return [name for name in RUNS if name in given]


def chosen_figures(names: str | None) -> list[str]:
    """The figures of a list with commas. None: all."""
    if names is None:
        return list(FIGURES)
    given = [name.strip() for name in names.split(",")]
    for name in given:
        if name not in FIGURES:
            raise ValueError(f"speed has no figure {name!r}; choose from {', '.join(FIGURES)}")
    return [name for name in FIGURES if name in given]


# The process that measures one model


def measure_model(
    model: str, parts: Sequence[str], options: dict[str, Any], before: Record | None = None
) -> Iterator[Result]:
    """The results of one model. A result `began` comes before each part, `ended` after it.

    `before` is the record of an earlier process, whose choices of ways to decode are used again on
    the same machine. Without it, a result `start` comes before they are made.
    """
    plan = Speed.of(**options)
    facts = {"machine": machine(plan.device), "packages": _versions()}
    choices = None
    if before is not None:
        known = {key: dict(before.get(key) or {}) for key in facts}
        known["machine"]["date"] = facts["machine"]["date"]
        choices = before.get("choices") if known == facts else None
    yield Result("machine", model, figures=facts)
    if model == KERNELS:
        yield Result("began", model, "cell")
        yield from _cell(plan)
        yield Result("ended", model, "cell")
    else:
        yield from _figures(model, parts, plan, choices)


@torch.no_grad()
def _figures(
    model: str, parts: Sequence[str], plan: Speed, choices: Record | None
) -> Iterator[Result]:
    peaks = find_peaks(plan.device, to_dtype(plan.dtype), plan.peak_tflops, plan.peak_tbs)
    plan = replace(plan, peak_tflops=peaks[0] / 1e12, peak_tbs=peaks[1] / 1e12)
    results: Callable[[str], Iterator[Result]]
    timer = None
    if model in OURS:
        results = _OurParts(model, replace(plan, **OURS[model]))
    else:
        timer = SpeedPeer(model, plan)
        results = timer.results
        if choices:
            timer.resume(choices)
        else:
            yield Result("start", model)
            yield from _until_broken(timer.start(), plan)
    for part in plan.parts:
        if part not in parts:
            continue
        yield Result("began", model, part, figures=timer.choices() if timer else {})
        yield from _until_broken(results(part), plan)
        yield Result("ended", model, part, figures=timer.choices() if timer else {})


def _until_broken(results: Iterator[Result], plan: Speed) -> Iterator[Result]:
    """The results. Raises if an error has broken the GPU's context: then all others would fail."""
    for result in results:
        yield result
        if result.error is not None:
            synchronize(plan.device)


def _versions() -> dict[str, str]:
    found = {"xlstm7b": __version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cell(plan: Speed) -> Iterator[Result]:
    from xlstm7b.bench import kernels  # needs Triton

    peers = ("sdpa", "mlstm_kernels", "fla", "gated_deltanet")
    cell = Kernels.of(sizes=["7b"], lengths=list(plan.lengths), batches=[], peers=list(peers))
    seconds = plan.timeout / (1 + len(peers))  # ours takes its share too
    for result in kernels.results(replace(cell, tokens=plan.tokens, timeout=seconds)):
        yield replace(result, part="cell")


class _OurParts:
    """This package through `Generator`, as users call it."""

    def __init__(self, name: str, plan: Speed) -> None:
        self.name, self.plan, self.model = name, plan, plan_model(plan)

    def __call__(self, part: str) -> Iterator[Result]:
        own = {"generated": _generated, "full": _full}
        if part not in own:
            return self._named(generation.our_part(part, self.model, self.plan))
        return self._named(own[part](self.model, self.plan))

    def _named(self, results: Iterator[Result]) -> Iterator[Result]:
        """The results with the run's name, and that of the engine as their work."""
        graphs = "CUDA graphs" if self.plan.device == "cuda" else ""
        plan = self.plan
        weights = plan.dtype if plan.quantize == "no" else plan.quantize
        kinds = f"{weights} weights", f"{plan.state_dtype} state"
        work = joined(f"xlstm7b {__version__}", *kinds, graphs)
        for result in results:
            yield replace(result, name=self.name, work=work)


def _generated(model: XLSTM, plan: Speed) -> Iterator[Result]:
    """Generates one text without a prompt, as users stream it, then the memory of longer ones."""
    counts, generator = plan.generated_counts, plan_generator(model, plan)
    prompt = random_prompts(plan.config.vocab_size, 1, 1)[0]
    generator.generate([prompt], max_new_tokens=4, **GREEDY)  # captures the graphs
    case = Result("generated", work="greedy", batch=1)
    reset_peak(plan.device)
    began = time.perf_counter()
    outputs = generator.stream(prompt, max_new_tokens=counts[-1], **GREEDY)
    for count, _ in enumerate(outputs, 1):
        if count in counts:
            seconds = time.perf_counter() - began
            memory = peak_memory(torch.device(plan.device))
            yield replace(case, length=count, seconds=seconds, memory=memory)
    for longer in plan.contexts:
        if longer > counts[-1]:
            memory = peak_memory(torch.device(plan.device))
            yield replace(case, length=longer, memory=memory, figures={"only_memory": True})


def _full(model: XLSTM, plan: Speed) -> Iterator[Result]:
    """The largest batch that fits. A step costs the same after any context, so it is timed once."""
    sizes = itemsizes(plan)
    per_row = accounting.state_bytes(plan.config, sizes["state_itemsize"])["total"]
    per_row += accounting.ring_bytes(plan.config, INTERVAL, to_dtype(plan.dtype).itemsize)
    per_row += _LOGIT_BYTES * plan.config.vocab_size

    def timed(case: Result) -> Result:
        generator = plan_generator(model, plan, case.batch)
        prompts = random_prompts(plan.config.vocab_size, case.batch, START_TOKENS)
        step = measure_decoding(generator, prompts, seconds=plan.seconds, **GREEDY)
        interval = replay_interval(plan, case.batch)
        return with_limit(case, plan, step, replay_interval=interval)

    case = Result("full", work="greedy", length=plan.full_contexts[0])
    result = largest_batch(case, per_row, plan, timed)
    for length in plan.full_contexts:
        yield replace(result, length=length)


class SpeedPeer(PeerTimer):
    """Times all figures of one peer."""

    plan: Speed

    def results(self, part: str) -> Iterator[Result]:
        own = {"generated": self._generated, "full": self._full}
        yield from own[part]() if part in own else super().results(part)

    def _generated(self) -> Iterator[Result]:
        """Generates texts without a prompt, then the memory of longer ones."""
        counts = self.plan.generated_counts
        case = Result("generated", self.name, self.decoding(), batch=1)
        memory = None
        try:
            for count, seconds in self._generate(counts):
                # A static cache is larger than this text needs: its memory is measured below.
                memory = None if self.peer.grows else peak_memory(self.peer.device)
                yield replace(case, length=count, seconds=seconds, memory=memory)
        except Exception as error:
            yield failed(replace(case, length=counts[-1]), error)
        if self.peer.grows:
            self.drop_decoder()
        for count in sorted({*counts, *self.plan.contexts} - {0}):
            longer = replace(case, length=count, figures={"only_memory": True})
            if self.peer.grows:
                yield attempt(longer, self._measure_memory, Exception)
            elif count > counts[-1]:
                yield replace(longer, memory=memory)

    def _generate(self, counts: Sequence[int]) -> Iterator[tuple[int, float]]:
        """The seconds after each number of tokens."""
        decoder = self.decoder
        assert decoder is not None
        decoder.prepare(0, counts[-1])
        first = self.peer.tokens(1, 1)
        release(self.plan.device)  # the models of the check too: Python has not freed them yet
        synchronize(self.plan.device)
        began = time.perf_counter()
        decoder.read(first)
        for count in range(2, counts[-1] + 1):
            decoder.step(count - 1)
            if count in counts:
                synchronize(self.plan.device)
                yield count, time.perf_counter() - began

    def _measure_memory(self, case: Result) -> Result:
        """The peak of one step with a cache for this many tokens and no more."""
        release(self.plan.device)
        cache = self.peer.new_cache(1, case.length)
        decoder = Decoder(self.peer, EAGER, cache)
        self.peer.set_length(cache, case.length - 1)
        decoder.step(case.length - 1)
        return replace(case, memory=peak_memory(self.peer.device))

    def _full(self) -> Iterator[Result]:
        """The largest batch that fits beside the cache, after contexts of several lengths."""
        self.drop_decoder()
        ways, result = self.ways, None
        for length in self.plan.full_contexts:
            case = Result("full", self.name, self.peer.engine, "", 0, length)
            if not self.peer.grows:  # a step costs the same after any context
                result = result or self._fastest(case)
                yield replace(result, length=length)
                continue
            for way in ways:  # the one that is fastest for one sequence, or else the next
                result = self._largest(case, way)
                if result.error is None:
                    ways = (way,)
                    break
            assert result is not None
            yield result

    def _fastest(self, case: Result) -> Result:
        """The largest batch of a model whose cache does not grow, in the fastest way.

        Such a model is compiled for one batch size, so that size is found without compiling. To
        compile a Mamba for any size takes four times as long.
        """
        way = next((each for each in self.ways if each != COMPILED), COMPILED)
        result = self._largest(case, way)
        if way == COMPILED or COMPILED not in self.ways or result.error is not None:
            return result
        same_batch = replace(case, batch=result.batch)
        compiled = attempt(same_batch, partial(self._time_batch, COMPILED), Exception)
        release(self.plan.device)
        if compiled.error is not None:
            return replace(result, figures=result.figures | {"compiled_error": compiled.error})
        other = {"compiled_seconds": compiled.seconds, "not_compiled_seconds": result.seconds}
        fastest = min(result, compiled, key=lambda each: each.seconds or math.inf)
        return replace(fastest, figures=fastest.figures | other)

    def _largest(self, case: Result, way: str) -> Result:
        per_row = self.peer.cache_bytes(_room(case)) + _LOGIT_BYTES * self.peer.vocab_size
        return largest_batch(case, per_row, self.plan, partial(self._time_batch, way))

    def _time_batch(self, way: str, case: Result) -> Result:
        cache = self.peer.new_cache(case.batch, _room(case))
        measured = []
        with time_limit(self.plan.compile_seconds):
            for attention in self.attentions:
                decoder = Decoder(self.peer, way, cache, batch=case.batch, attention=attention)
                step = decoder.step_time(case.length, seconds=self.plan.seconds)
                measured.append((step, attention))
        step, attention = min(measured)
        work = joined(self.peer.engine, way, attention)
        return with_limit(replace(case, work=work), self.plan, step)


def _room(case: Result) -> int:
    return case.length + 2 * MOST_STEPS


def largest_batch(
    case: Result, per_row: int, plan: Speed, timed: Callable[[Result], Result]
) -> Result:
    """`timed` with the largest batch whose rows fit into free memory: on failure a smaller one."""
    release(plan.device)
    batch = min(plan.most_rows, int(_FREE_SHARE * free_memory(plan.device) // per_row))
    result = replace(case, error="out of memory")
    for _ in range(_TRIES):
        if not batch:
            break
        result = attempt(replace(case, batch=batch), timed, Exception)
        release(plan.device)
        if result.error is None or not re.search("memory|not fit", result.error):
            break
        batch = batch * 7 // 8
    return result


_TRIES = 8
_FREE_SHARE = 0.9  # the rest is for what a step computes
_LOGIT_BYTES = 16  # of each id in a row: its logit in float32, and what is computed from it


# All models, one after another


def run_speed(
    output: Path,
    names: Sequence[str],
    plan: Speed,
    *,
    figures: Sequence[str] = FIGURES,
    again: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Record]:
    """Measures these figures of the runs that lack them; with `again` also of those that have all.

    Returns the records of all runs, by name.
    """
    plan.check()
    wanted = {name: [part for part in _parts(name, plan) if part in figures] for name in names}
    if not any(wanted.values()):
        raise ValueError(
            f"the run {KERNELS} has only the figure cell, and no other run has it: "
            "change --runs or --figures"
        )
    if wanted.get(KERNELS) and plan.device != "cuda":
        raise ValueError(f"the run {KERNELS} needs a GPU: leave it out of --runs")
    records = _Records(output, plan)
    waiting = [name for name in names if wanted[name] and (again or not records.is_done(name))]
    if not waiting:
        return records.runs
    output.mkdir(parents=True, exist_ok=True)
    with lock_folder(output, "measuring in"):
        for name in waiting:
            say(f"\n{name}: {RUNS[name]}")
            records.start(name, wanted[name])
            _measure(name, wanted[name], plan, records, say)
    return records.runs


def _parts(name: str, plan: Speed) -> Sequence[str]:
    return ("cell",) if name == KERNELS else plan.parts


def _measure(
    name: str,
    parts: Sequence[str],
    plan: Speed,
    records: "_Records",
    say: Callable[[str], None],
) -> None:
    """Measures the missing figures. A crash ends a figure; the next goes on in a new process."""
    record, began = records.runs[name], time.monotonic()
    while missing := records.missing(name, parts):
        left = plan.timeout - (time.monotonic() - began)
        if left < plan.timeout / 8:  # too little to load a model and measure a figure
            say(f"{name}: the time limit is reached; the same command continues")
            return
        current, heading, error = "", "", None
        rows: list[Record] = []
        before = {key: record.get(key) for key in ("machine", "packages", "choices")}
        job = {"model": name, "parts": missing, "options": plan.to_dict(), "before": before}
        try:
            for result in in_process(Result("end", name), measure_model, left, **job):
                match result.part:
                    case "end":
                        error = result.error
                    case "machine":
                        record |= result.figures
                    case "start":
                        record |= {"ways": [], "check": []}
                        record.pop("choices", None)
                    case "began":
                        current, rows = result.work, []
                        record["choices"] = result.figures
                    case "ended":
                        record["choices"] = result.figures
                        records.add(name, current, rows)
                        rows = []
                    case _:
                        row = result.to_dict()
                        if name != KERNELS and result.work:
                            row["engine"] = row.pop("work")
                        if result.part in ("ways", "check"):
                            record[result.part].append(row)
                        else:
                            rows.append(row)
                        if result.part != heading:
                            heading = result.part
                            seconds = time.monotonic() - began
                            say(f"{cases.heading(PARTS[heading])}  [{seconds:.0f} s]")
                        say(cases.line(result, PARTS[heading]))
        except BaseException:  # Ctrl-C
            if rows:
                records.add(name, current, rows, partial=True)
            else:
                records.write()  # the ways to decode that were chosen and checked
            raise
        if error is not None:
            say(f"{name}: {current or 'start'}: {error}")
            if not current:
                records.fail(name, error)
                return
            if error.startswith("stopped after") and current != missing[0]:
                say(f"{name}: the same command continues with this figure")
                if rows:
                    records.add(name, current, rows, partial=True)
                return
            if not rows or error.removeprefix("torch.") not in rows[-1].get("error", ""):
                rows.append(Result(current, name, error=error).to_dict())
            records.add(name, current, rows)
    records.finish(name)


class _Records:
    """`results.json`: a record for each run.

    `status` is `finished`, `failed` (no figure could be measured, for the reason `reason`) or
    `stopped`: the next call measures the figures that are missing, and those in `partial`, which
    have only their first rows, or rows of before a run was measured again.
    """

    def __init__(self, folder: Path, plan: Speed) -> None:
        self._path, self._plan = folder / NAME, plan
        self.runs: dict[str, Record] = {}
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file, not a folder: choose another --output")
        if not self._path.is_file():
            return
        content = read_records(folder)
        before, self.runs = content["plan"], content["runs"]
        for key, value in json.loads(json.dumps(plan.to_dict())).items():
            if key not in Speed.FREE and before.get(key) != value:
                raise ValueError(
                    f"the results in {folder} have {key} {before.get(key)!r}, not {value!r}: "
                    "choose another --output"
                )

    def is_done(self, name: str) -> bool:
        return self.runs.get(name, {}).get("status") in ("finished", "failed")

    def missing(self, name: str, parts: Sequence[str]) -> list[str]:
        record = self.runs.get(name, {"figures": {}})
        partial = record.get("partial", ())
        return [part for part in parts if part not in record["figures"] or part in partial]

    def start(self, name: str, parts: Sequence[str]) -> None:
        """A record to add these figures to. A finished run keeps its rows until new ones come."""
        record = self.runs.setdefault(name, {"label": RUNS[name], "figures": {}})
        if record.get("status") == "finished":
            record.pop("choices", None)
            record["partial"] = list(parts)
        record.pop("reason", None)
        record["status"] = "stopped"

    def add(self, name: str, part: str, rows: list[Record], *, partial: bool = False) -> None:
        record = self.runs[name]
        figures = record["figures"]
        figures[part] = rows
        others = [each for each in record.get("partial", ()) if each != part]
        record["partial"] = [*others, part] if partial else others
        if "generated" in figures and "context" in figures:
            figures["generated"] = with_sums(figures["generated"], figures["context"])
        self.write()

    def fail(self, name: str, reason: str) -> None:
        self.runs[name] |= {"status": "failed", "reason": reason}
        self.write()

    def finish(self, name: str) -> None:
        """If it has all its figures."""
        if not self.missing(name, _parts(name, self._plan)):
            self.runs[name]["status"] = "finished"
        self.write()

    def write(self) -> None:
        in_order = {name: self.runs[name] for name in RUNS if name in self.runs}
        about = {"experiment": "speed", "title": TITLE, "plan": self._plan.to_dict()}
        write_json(self._path, {**about, "runs": in_order})


def read_records(folder: Path) -> dict[str, Any]:
    """The content of `results.json`: the plan, and the records of all runs by name."""
    content = read_results(folder / NAME, _File, "speed")
    for name in content["runs"]:
        if name not in RUNS:
            raise ValueError(f"{folder / NAME} is damaged: speed has no run {name!r}")
    return content


class _Record(BaseModel):
    status: Literal["finished", "failed", "stopped"]
    figures: dict[str, list[dict[str, Any]]]
    partial: list[str] = []


class _File(BaseModel):
    experiment: str
    plan: dict[str, Any]
    runs: dict[str, _Record]


def with_sums(generated: Sequence[Record], contexts: Sequence[Record]) -> list[Record]:
    """The rows of `generated`, with times for those of which only the memory was measured.

    Such a time is that of the longest text that was generated, plus the time of a step after each
    further token, interpolated between the contexts. It is marked `summed`.
    """
    steps = {row["length"]: row["seconds"] for row in contexts if "seconds" in row}
    generated = [_measured(row) for row in generated]
    timed = {row["length"]: row["seconds"] for row in generated if "seconds" in row}
    if not timed or not steps:
        return list(generated)
    count, total = max(timed.items())
    sums: dict[int, float] = {}
    for longer in sorted(length for length in steps if length > count):
        earlier = max((length for length in steps if length <= count), default=longer)
        share = (count - earlier) / (longer - earlier) if longer > earlier else 1.0
        now = steps[earlier] + share * (steps[longer] - steps[earlier])
        total += (longer - count) * (now + steps[longer]) / 2
        count = longer
        sums[longer] = total
    return [
        row | {"seconds": sums[row["length"]], "summed": True}
        if "seconds" not in row and row["length"] in sums
        else row
        for row in generated
    ]


def _measured(row: Record) -> Record:
    """The row without a time that was summed."""
    dropped = ("seconds", "summed") if row.get("summed") else ()
    return {key: value for key, value in row.items() if key not in dropped}
