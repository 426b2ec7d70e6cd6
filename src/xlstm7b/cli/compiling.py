"""Says that kernels are being compiled: the first use on a machine would wait in silence."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from xlstm7b.cli.options import count_progress

if TYPE_CHECKING:
    import torch

_SAID = "compiling kernels, once"
T = TypeVar("T")


@contextmanager
def compiling_shown(device: "torch.device", *, bar: bool = True) -> Iterator[Callable[[], int]]:
    """Shows a bar on stderr from the first kernel on that is compiled, not read from disk.

    Without `bar`, or if stderr is no terminal, it is a line. Yields a function that returns the
    number of kernels so far.
    """
    compiled = 0
    if device.type != "cuda":
        yield lambda: compiled
        return
    from xlstm7b.compiling import when_compiled

    with ExitStack() as stack:
        advance: Callable[[], None] | None = None

        def count(name: str) -> None:
            nonlocal compiled, advance
            compiled += 1
            if advance is None:
                is_shown = bar and sys.stderr.isatty()
                if not is_shown:
                    print(_SAID, file=sys.stderr, flush=True)
                advance = stack.enter_context(count_progress(_SAID, None, shown=is_shown))
            advance()

        stack.enter_context(when_compiled(count))
        yield lambda: compiled


def after_compiling(
    outputs: Iterator[T], device: "torch.device", *, bar: bool = True
) -> Iterator[T]:
    """The outputs. Those of steps that compile kernels are held back, so that the bar is alone.

    The text of an output on the terminal would be on the bar's line.
    """
    held = list[T]()
    with compiling_shown(device, bar=bar) as compiled:
        before = None
        while before != compiled():
            before = compiled()
            try:
                held.append(next(outputs))
            except StopIteration:
                break
    yield from held
    yield from outputs
