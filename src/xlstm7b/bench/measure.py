"""How benchmarks measure: timers, memory, the hardware's peaks, random models and prompts.

Weights and prompts are random, so nothing is downloaded. They are the same in every run.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from xlstm7b.bench.results import Results, Shape
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_dtype
from xlstm7b.model import XLSTM
from xlstm7b.model.init import drawn_parameters
from xlstm7b.model.lm import schemes_of
from xlstm7b.quantize.weight import QuantizedWeight

if TYPE_CHECKING:  # the kernel and training benchmarks do not import it
    from xlstm7b.generate import Generator, SavedState
    from xlstm7b.generate.draft_model import Speculation

# Without an end-of-text token no output ends early.
GREEDY: dict[str, Any] = {"temperature": 0.0, "eos_token_id": ()}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "eos_token_id": (), "seed": 0}
GOOD_SPREAD, MOST_SPREAD = 0.01, 0.03  # of a step's time: enough, and too much to be shown
_STARTED = 16  # short prompts that the engine reads in one step, at least
_TRIAL_SECONDS = 0.01
H200 = 768e12, 4.27e12  # measured: FLOP/s of a bf16 matrix product, bytes/s of reading weights

Module = TypeVar("Module", bound=torch.nn.Module)

# Timers


def measure(
    call: Callable[[], object],
    device: str | torch.device,
    *,
    repeats: int = 3,
    enough: float = math.inf,
    gpu_milliseconds: int = 0,
) -> float:
    """Seconds that one call takes, as the median of several, after one that is not counted.

    After `enough` seconds of counted calls there is no further one: long calls differ little.
    Normally a synchronised host clock. With `gpu_milliseconds`, CUDA events over about that much
    time, with an empty L2 cache before each call: for single kernels.
    """
    if gpu_milliseconds:
        from triton.testing import do_bench

        warmup = gpu_milliseconds // 4
        return 1e-3 * float(do_bench(call, warmup, gpu_milliseconds, return_mode="median"))
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
        if sum(times[1:]) >= enough:
            break
    return median(times[1:])


def synchronize(device: str | torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class Timing(NamedTuple):
    """The time of one step."""

    seconds: float
    spread: float  # of repeated timings, relative to `seconds`


class UnsteadyError(Exception):
    """Repeated timings differ too much for their median to be shown."""


def measure_steps(
    run: Callable[[int], object],
    device: str | torch.device,
    *,
    seconds: float,
    base: int = 0,
    most: int = 1024,
) -> Timing:
    """The time of one step, where `run(n)` does n steps.

    With `base`, it is a difference of two runs, so that what `run` does once does not count:

        1. `run` is timed with `base`, `base + n` and `base + 2 n` steps, three times each in turn.
        2. The time of a step is that of the last n of them. The spread is half the range of its
           three values, or what the first n steps differ by if that is more: `run` may start
           some of its sequences later than others, so that its first steps do less work.
        3. n starts at `seconds` of steps and doubles, up to ten times as many, until the spread is
           at most 1%.

    Without `base`, n steps are timed alone. A run has at most `most` steps. `UnsteadyError` if the
    spread stays above 3%; timings of less than 10 ms only try the code, so their spread is ignored.
    """

    def timed(steps: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        run(steps)
        synchronize(device)
        return time.perf_counter() - start

    timed(base + 4)  # compiles and captures
    once = max((timed(base + 8) - timed(base)) / 8 if base else timed(4) / 4, 1e-9)
    pieces = 2 if base else 1
    fewest = 4 if base == 0 else 16
    longest = max(1, min((most - base) // pieces, max(fewest, round(10 * seconds / once))))
    steps = min(longest, max(fewest, round(seconds / once)))
    while True:
        lengths = [base + piece * steps for piece in range(pieces + 1) if base + piece]
        times = [[timed(length) for length in lengths] for _ in range(3)]
        last = [(each[-1] - each[-2] if base else each[0]) / steps for each in times]
        step = median(last)
        differences = [(max(last) - min(last)) / 2]
        if base:
            differences.append(abs(median(each[1] - each[0] for each in times) / steps - step))
        spread = max(differences) / step if step > 0 else math.inf
        if spread <= GOOD_SPREAD or steps == longest:
            break
        steps = min(2 * steps, longest)
    return _steady(step, spread, steps, seconds)


def measure_decoding(
    generator: "Generator",
    prompts: Sequence[Sequence[int]] | None,
    *,
    state: "SavedState | None" = None,
    seconds: float = 0.3,
    **sampling: Any,
) -> Timing:
    """The time of one decoding step of the whole batch, in one call of `Generator.generate`.

    The generator asks after each step whether it should stop. The first steps, which read prompts,
    do not count. Of the others, three pieces of n steps are timed, and their median is the result.
    n starts at `seconds` of steps and doubles, up to ten times as many, until half the range of the
    three is at most 1%. It is a multiple of replay's interval: a step that folds states takes
    longer. `UnsteadyError` if the spread stays above 3%.
    """
    from xlstm7b.generate.replay import INTERVAL

    skipped = 8 + generator.batch_size // _STARTED
    times: list[float] = []
    n = longest = 0
    step, spread = 0.0, math.inf

    def should_stop() -> bool:
        nonlocal n, longest, step, spread
        times.append(time.perf_counter())
        counted = len(times) - 1 - skipped
        if counted == INTERVAL:
            intervals = seconds / max(times[-1] - times[skipped], 1e-9)
            n = INTERVAL * max(1, round(intervals))
            longest = INTERVAL * max(1, round(10 * intervals))
        if not n or counted < 3 * n:
            return False
        ends = [times[skipped + piece * n] for piece in range(4)]
        pieces = [(end - start) / n for start, end in pairwise(ends)]
        step = median(pieces)
        spread = (max(pieces) - min(pieces)) / 2 / step
        if spread > GOOD_SPREAD and n < longest:
            n = min(2 * n, longest)
            return False
        return True

    generate = partial(generator.generate, prompts, state=state, **sampling)
    generate(max_new_tokens=4)  # compiles and captures
    generate(max_new_tokens=1 << 20, should_stop=should_stop)
    return _steady(step, spread, n, seconds)


def _steady(step: float, spread: float, steps: int, seconds: float) -> Timing:
    if step <= 0 or (spread > MOST_SPREAD and seconds >= _TRIAL_SECONDS):
        raise UnsteadyError(
            f"timings of {steps} steps differ by {spread:.1%}, more than {MOST_SPREAD:.0%}: "
            "other programs may be running"
        )
    return Timing(step, spread)


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def capture(step: Callable[[], object]) -> Callable[[], None]:
    """The step as a CUDA graph. It first runs on a stream of its own, which capturing requires."""
    step()  # compiles kernels
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_: object = step) -> None:  # keeps the step's tensors alive: the graph uses them
        graph.replay()

    return replay


def attempt(
    results: Results, what: str, shape: Shape, work: Callable[[], None], *failures: type[Exception]
) -> None:
    """Does the work that adds this figure, unless the run has it. Then frees what it used.

    Out of memory, unsteady timings and `failures` are recorded in place of the figure.
    """
    if results.has(what, shape):
        return
    caught: tuple[type[Exception], ...] = (torch.OutOfMemoryError, UnsteadyError, *failures)
    try:
        work()
    except caught as error:
        results.fail(what, shape, reason(error))
    release(results.device)


def reason(error: BaseException) -> str:
    """Why something could not be measured, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = str(error)
    if isinstance(error, UnsteadyError):
        return text
    if isinstance(error, torch.AcceleratorError):
        text = text.partition("\n")[0]  # the other lines are advice
    return " ".join(f"{type(error).__name__}: {text}".split())


# Memory


def release(device: str | torch.device) -> None:
    """Frees what nothing uses any more, and resets the peak of a GPU's memory."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    reset_peak(device)


def reset_peak(device: str | torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_memory(device: str | torch.device) -> int:
    """Bytes that can still be allocated."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, StopIteration):  # Linux: what the cache of files holds can be freed
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Random models and prompts


@dataclass(frozen=True)
class RandomModel:
    """A model with random weights, and how it is run."""

    size: str
    device: str
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    quantize: str | None = None

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.named(self.size)

    def shape(self, **more: int | float | str) -> Shape:
        """What its figures depend on, for `Results`."""
        weights = self.quantize or self.dtype
        return {"model": self.size, "weights": weights, "states": self.state_dtype, **more}

    def make(self) -> XLSTM:
        """Its first generator joins weights, which takes more memory for a moment: that is over."""
        model = random_model(
            self.size, dtype=self.dtype, device=self.device, quantize=self.quantize
        )
        make_generator(model, state_dtype=self.state_dtype).read([[1]])
        release(self.device)
        return model


def random_model(
    size: str,
    *,
    dtype: str = "bfloat16",
    device: str = "cuda",
    quantize: str | None = None,
    config: ModelConfig | None = None,
) -> XLSTM:
    """A model with random weights, and gates that depend on their input.

    With `config` it has this shape, and `size` is only its name. `quantize` is int8, fp8 or int4.
    """
    torch.manual_seed(0)
    config = config or ModelConfig.named(size)
    float_dtype = to_dtype(dtype)
    schemes = schemes_of(config, quantize) if quantize else {}
    try:
        model = XLSTM.empty(config, dtype=float_dtype, device=device, quantized=schemes)
    except torch.OutOfMemoryError as error:
        raise ValueError(f"a {size} in {dtype} does not fit into this GPU") from error
    with torch.device("meta"):
        drawn = XLSTM(config).to(float_dtype)
    packed = model.packed_schemes(schemes)
    # One matrix at a time: the floats of all of them may not fit into memory. The head is the
    # largest, and comes first.
    with torch.no_grad():
        for path, part in reversed([*drawn.named_children()]):
            for own, parameter in drawn_parameters(part, torch.device(device)):
                name = f"{path}.{own}"
                if name in schemes:
                    weight = QuantizedWeight.quantize(parameter, schemes[name])
                    model.set_quantized(name, weight, packed)
                else:
                    model.get_parameter(name).copy_(parameter)
        for name, parameter in model.named_parameters():
            if name.endswith("gate_preact.weight"):
                parameter.normal_(std=0.02)
    release(device)
    return model


def random_module(make: Callable[[], Module], dtype: torch.dtype, device: str) -> Module:
    """Another library's model, made on the device in this dtype."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return make().eval()
    finally:
        torch.set_default_dtype(before)


def make_generator(
    model: XLSTM,
    *,
    state_dtype: str = "float32",
    batch_size: int = 1,
    replay: bool | None = None,
    speculate: "Speculation" = None,
) -> "Generator":
    """A generator with a byte tokenizer, which decodes any token id."""
    from xlstm7b.generate import Generator
    from xlstm7b.tokenizer import ByteTokenizer

    return Generator(
        model,
        ByteTokenizer(),
        state_dtype=to_dtype(state_dtype),
        batch_size=batch_size,
        replay=replay,
        speculate=speculate,
    )


def random_prompts(vocab_size: int, batch: int, length: int) -> list[list[int]]:
    """Random token ids. `Generator` puts the first token before them: it has its state."""
    draw = torch.Generator().manual_seed(length)
    ids: list[list[int]] = torch.randint(1, vocab_size, (batch, length), generator=draw).tolist()
    return ids


# The hardware's peaks


def find_peaks(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s and bytes/s: the known ones of an H200, else measured now."""
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu and "H200" in torch.cuda.get_device_name(device):
        return H200
    width = 8192 if is_gpu else 1024
    table = torch.randn(32 * width, 1024, device=device)  # larger than any cache
    bandwidth = table.nbytes / measure(lambda: table @ table[0], device)

    def seconds(width: int, dtype: torch.dtype) -> float:
        square = torch.randn(width, width, device=device).to(dtype)
        return measure(partial(torch.mm, square, square), device)

    # The faster dtype counts: a CPU without bf16 instructions takes a hundred times as long.
    fastest = min((torch.float32, dtype), key=partial(seconds, width // 8))
    return 2 * width**3 / seconds(width, fastest), bandwidth
