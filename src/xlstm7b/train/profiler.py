"""A profile of a few steps of a run: a trace of operators and kernels, and on a GPU the memory."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from xlstm7b.train.hooks import describe_error

_WARM_UP, _STEPS = 3, 3  # by default; the first steps compile
_MOST_EVENTS = 100_000  # of the memory snapshot: each takes kilobytes of the host's memory


def steps_to_profile(chosen: bool | range, step: int, end: int) -> range | None:
    """The steps to record of those from `step` to `end` − 1, or None.

    True stands for three steps after the first three, or the last three if there are fewer.
    """
    if chosen is False:
        return None
    if chosen is True:
        first = max(step, min(step + _WARM_UP, end - _STEPS))
        return range(first, min(first + _STEPS, end))
    if not step <= chosen.start < chosen.stop <= end:
        raise ValueError(
            f"steps {chosen.start}-{chosen.stop - 1} cannot be profiled: from here the run has "
            f"steps {step}-{end - 1}"
        )
    return chosen


class StepProfiler:
    """Records these steps in the first process, and says where the files are.

    `begin` is the first step of this start. A profile that cannot be written is a warning.
    """

    def __init__(self, folder: Path, steps: range | None, begin: int, *, on_gpu: bool) -> None:
        self._folder, self._on_gpu = folder, on_gpu
        self._steps = steps if dist.get_rank() == 0 else None
        self._prepared_at = max(begin, self._steps.start - 1) if self._steps else None
        self._profile: profile | None = None
        self._recorded: list[int] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds every step of the run."""
        if self._steps is None:
            yield
            return
        if number == self._prepared_at:  # a step early if it can be: the profiler takes its time
            self._profile = profile(record_shapes=True)
            self._profile.prepare_trace()
        if self._profile is None or number not in self._steps:
            yield
            return
        if not self._recorded:
            self._profile.start_trace()
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self._recorded.append(number)
        with record_function(f"step {number}"):
            yield
        if number == self._steps[-1]:
            self.end()

    def end(self) -> None:
        """Writes what was recorded. The run may end before the last step that was chosen."""
        if self._steps is None:
            return
        if self._profile is not None:
            if not self._recorded:  # what is prepared has to be started to be stopped
                self._profile.start_trace()
            self._profile.stop_trace()
        if self._profile is not None and self._recorded:
            try:
                self._write(self._profile)
            except (OSError, RuntimeError) as error:
                _say(f"the profile could not be written ({describe_error(error)})")
        else:
            _say(f"no step was profiled: the run ended before step {self._steps.start}")
        self._steps = self._profile = None

    def _write(self, recorded: profile) -> None:
        self._folder.mkdir(exist_ok=True)
        steps = f"steps-{self._recorded[0]}-{self._recorded[-1]}"
        with TemporaryDirectory(dir=self._folder) as aside:
            trace = Path(aside) / f"trace-{steps}.json.gz"
            recorded.export_chrome_trace(str(trace))
            trace = trace.replace(self._folder / trace.name)
            _say(f"a trace is in {trace}: open it at https://ui.perfetto.dev or chrome://tracing")
            if self._on_gpu:
                snapshot = Path(aside) / f"memory-{steps}.pickle"
                torch.cuda.memory._dump_snapshot(str(snapshot))
                torch.cuda.memory._record_memory_history(enabled=None)
                snapshot = snapshot.replace(self._folder / snapshot.name)
                _say(f"allocations are in {snapshot}: open it at https://pytorch.org/memory_viz")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
