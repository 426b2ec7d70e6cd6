"""What `bench/generation.py` measures and how it is shown: plan, limits, table, JSON, plot."""

import json
import platform
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Self

import torch

from xlstm7b import accounting
from xlstm7b.config import ModelConfig

# In the order in which they run. Memory is first: on a CPU the peak is that of the whole process.
PARTS = {
    "memory": "peak memory, batch 1",
    "decode": "decoding, one token for every row",
    "context": "decoding behind a text, batch 1",
    "first": "from a prompt to its tokens on the host, batch 1",
    "prefill": "reading prompts",
}
START = {"start": "from a saved folder to the first token"}
PEERS = ("transformers", "xlstm", "llama2", "llama3")
DTYPES = ("float32", "bfloat16")
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "size": "7b", "dtype": "bfloat16", "batches": (1, 8, 32, 64, 128, 256),
        "contexts": (0, 2048, 8192, 16384, 32768, 131072),
        "prompts": (1, 128, 512, 2048, 8192, 16384), "generated": 1000,
        "tokens": 65536, "lengths": (65536, 16384, 8192, 2048),
    },
    "cpu": {
        "size": "160m", "dtype": "float32", "batches": (1, 4), "contexts": (0, 128, 512),
        "prompts": (128, 512), "generated": 100, "tokens": 1024, "lengths": (1024,), "first": 20,
    },
}  # fmt: skip
LIMIT = (
    "limit: all bytes that must move at the memory's speed, or all FLOPs at the processor's,\n"
    "whichever takes longer; of memory, the weights and the state"
)


@dataclass(frozen=True)
class Plan:
    """What to measure, and where."""

    device: str
    size: str
    dtype: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]  # tokens read before decoding, or before memory is looked at
    prompts: tuple[int, ...]  # lengths, on the way to the first tokens
    generated: int  # tokens before memory is looked at again
    tokens: int  # of a prefill in all
    lengths: tuple[int, ...]
    state_dtype: str = "float32"
    parts: tuple[str, ...] = tuple(PARTS)
    folder: str | None = None
    first: int = 100  # the time to as many tokens is taken, beside that to the first
    seconds: float = 0.3  # that one timing of decoding takes, about
    peak_flops: float | None = None  # None: an H200's on an H200, measured elsewhere
    peak_bytes: float | None = None

    @classmethod
    def of(cls, device: str | None = None, **given: Any) -> Self:
        """A plan with the device's defaults for all that is None or not given."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device not in DEFAULTS:
            raise ValueError(f"the device must be cuda or cpu, not {device!r}")
        chosen = DEFAULTS[device] | {k: v for k, v in given.items() if v is not None}
        if given.get("lengths") is None and chosen["tokens"] > 0:
            whole = [n for n in chosen["lengths"] if chosen["tokens"] % n == 0]
            chosen["lengths"] = whole or [chosen["tokens"]]
        return cls.from_dict({"device": device, **chosen})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """A plan of its fields, in which tuples may have become lists, as in JSON."""
        tuples: dict[str, Any] = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
        return cls(**values | tuples)

    def check(self) -> None:
        """Raises a `ValueError` with one sentence on the first thing that can't be measured."""
        ModelConfig.named(self.size)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA GPU here; the CPU is measured with --device cpu")
        for name in (self.dtype, self.state_dtype):
            if name not in DTYPES:
                raise ValueError(f"the dtype must be float32 or bfloat16, not {name!r}")
        check_names("part", self.parts, PARTS)
        least = {"batches": 1, "contexts": 0, "prompts": 1, "lengths": 1}
        for name, low in least.items():
            for number in getattr(self, name):
                if number < low:
                    raise ValueError(f"{name} must be at least {low}, not {number}")
        for name in ("tokens", "generated", "first"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for length in self.lengths:
            if self.tokens % length:
                raise ValueError(f"prompts of {length} do not divide {self.tokens} tokens")
        for peak in (self.peak_flops, self.peak_bytes):
            if peak is not None and not peak > 0:
                raise ValueError(f"a peak must be a positive number, not {peak:g}")
        if self.folder is not None and not (Path(self.folder) / "config.json").is_file():
            raise ValueError(f"there is no saved model in {self.folder}: it has no config.json")

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.named(self.size)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def itemsizes(self) -> dict[str, int]:
        """Bytes of a weight and of a number of the state, as `accounting` wants them."""
        names = {"weight_itemsize": self.dtype, "state_itemsize": self.state_dtype}
        return {key: getattr(torch, name).itemsize for key, name in names.items()}


def check_names(what: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}; the {what}s are {', '.join(known)}")


@dataclass(frozen=True)
class Result:
    """One figure. The limit is in tokens per second where there are any, else in its own unit."""

    part: str
    name: str  # ours, or the peer's
    work: str
    batch: int
    length: int  # tokens that were read before, or of each prompt
    seconds: float | None = None  # of one step, or all of a prompt's
    tokens_per_second: float | None = None
    gigabytes_per_second: float | None = None
    memory: int | None = None  # bytes
    limit: float | None = None
    percent_of_limit: float | None = None
    ratio: float | None = None  # speed over the speed behind the shortest context
    error: str | None = None  # it failed, and so

    def stepped(self, plan: Plan, time: float, *, limited: bool = True) -> "Result":
        """With the time of one decoding step; `limited` if the model is an xLSTM."""
        done = replace(self, seconds=time, tokens_per_second=self.batch / time)
        if not limited or plan.peak_flops is None or plan.peak_bytes is None:
            return done
        peaks = plan.peak_flops, plan.peak_bytes
        least = accounting.least_decode_seconds(plan.config, *peaks, self.batch, **plan.itemsizes)
        moved = accounting.decode_bytes(plan.config, self.batch, **plan.itemsizes)
        return replace(
            done, gigabytes_per_second=moved / time / 1e9, limit=self.batch / least,
            percent_of_limit=100 * least / time,
        )  # fmt: skip

    def read(self, plan: Plan, time: float, *, decoded: int = 0, limited: bool = True) -> "Result":
        """With the time of a prefill, and of as many decoding steps."""
        tokens = self.batch * self.length if self.part == "prefill" else None
        done = replace(self, seconds=time, tokens_per_second=tokens and tokens / time)
        if not limited or plan.peak_flops is None or plan.peak_bytes is None:
            return done
        config, peaks, sizes = plan.config, (plan.peak_flops, plan.peak_bytes), plan.itemsizes
        least = accounting.least_prefill_seconds(config, *peaks, self.length, self.batch, **sizes)
        least += decoded * accounting.least_decode_seconds(config, *peaks, self.batch, **sizes)
        limit = least if tokens is None else tokens / least
        return replace(done, limit=limit, percent_of_limit=100 * least / time)


@dataclass(frozen=True)
class Report:
    """A plan and what came of it."""

    plan: Plan
    results: list[Result]


def heading(part: str) -> str:
    blank = Result(part, "", "", 0, 0)
    columns = "".join(f"{title:>11}" for title in _cells(blank))
    return f"{(PARTS | START)[part]}\n{'':38}{'batch':>6}{'tokens':>8}{columns}"


def line(result: Result) -> str:
    head = f"{result.name + ', ' + result.work if result.work else result.name:38}"
    if result.batch:
        head += f"{result.batch:6}{result.length:8}"
    if result.error is not None:
        return f"{head}  failed: {result.error}"
    return head + "".join(f"{cell:>11}" for cell in _cells(result).values())


def _cells(result: Result) -> dict[str, str]:
    """A row's figures by their column's title."""
    percent = {"% of limit": _number(result.percent_of_limit, 1, 0)}
    if result.part == "memory":
        both = {"GB": result.memory, "limit, GB": result.limit}
        return {title: _number(value, 1e-9, 2) for title, value in both.items()} | percent
    if result.part in ("first", "start"):
        both = {"ms": result.seconds, "limit, ms": result.limit}
        return {title: _number(value, 1e3, 2) for title, value in both.items()} | percent
    cells = {"ms": _number(result.seconds, 1e3, 2), "tok/s": _number(result.tokens_per_second)}
    if result.part != "prefill":
        cells["GB/s"] = _number(result.gigabytes_per_second, 1, 0)
    cells |= {"limit": _number(result.limit), **percent}
    return cells | ({"speed, ×": _number(result.ratio, 1, 3)} if result.part == "context" else {})


def _number(value: float | None, scale: float = 1, digits: int = 1) -> str:
    return "" if value is None else f"{value * scale:,.{digits}f}"


def machine(device: str) -> dict[str, str]:
    """Where and when this is."""
    here = {"date": date.today().isoformat(), "torch": torch.__version__}
    if device == "cpu":
        return here | {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    import triton

    return here | {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__}


def write(report: Report, json_path: Path | None, plot_path: Path | None) -> None:
    """The results as JSON, with the machine and the plan they are from, and as a plot."""
    if json_path:
        document = (
            machine(report.plan.device) | {"limit": LIMIT.replace("\n", " ")} | asdict(report)
        )
        json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plot_path:
        plot(report, plot_path)


def plot(report: Report, path: Path) -> None:
    """A panel for each part that has figures over something, a line for each library."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = {
        "decode": ("batch", "tokens_per_second", 1, "tok/s"),
        "context": ("length", "tokens_per_second", 1, "tok/s"),
        "first": ("length", "seconds", 1e3, "ms"),
        "memory": ("length", "memory", 1e-9, "GB"),
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for panel, (part, (over, value, scale, unit)) in zip(axes.flat, panels.items(), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for result in report.results:
            if result.part == part and getattr(result, value) is not None:
                label = result.name if part == "memory" else f"{result.name}, {result.work}"
                place = getattr(result, over)
                lines.setdefault(label, []).append((place, getattr(result, value) * scale))
                if result.limit is not None and part != "first":
                    lines.setdefault("limit", []).append((place, result.limit * scale))
        for label, points in lines.items():
            style = {"ls": "--", "color": "gray"} if label == "limit" else {"marker": "o"}
            panel.plot(*zip(*sorted(points), strict=True), label=label, **style)
        places = sorted({place for points in lines.values() for place, _ in points})
        shortest = min((place for place in places if place), default=1)
        panel.set_xscale("symlog", base=2, linthresh=shortest)  # 0 tokens have their place, too
        panel.set_xticks(places, [f"{n // 1024}K" if n >= 1024 else str(n) for n in places])
        panel.minorticks_off()
        title = "tokens read" if over == "length" else over
        panel.set(title=PARTS[part], xlabel=title, ylabel=unit)
        if part == "first":
            panel.set_yscale("log")
        else:
            panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
        if lines:
            panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)
