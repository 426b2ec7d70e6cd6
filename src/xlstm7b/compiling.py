"""Triton's compiler: is told when it compiles a kernel, and compiles many at once ahead of time.

A kernel is compiled when it is first launched, once for each combination of dtypes and sizes that
it is written for. The result is kept on disk, so this happens once on a machine.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from importlib.util import find_spec
from time import monotonic
from typing import Any
from unittest import mock


@contextmanager
def when_compiled(call: Callable[[str], None]) -> Iterator[None]:
    """Calls `call` with a kernel's name when it was compiled, not when it was read from disk."""
    if find_spec("triton") is None:
        yield
        return
    from triton import knobs

    before = knobs.compilation.listener

    def listen(**given: Any) -> None:
        if before is not None:
            before(**given)
        if not given["cache_hit"]:
            call(str(given["metadata"]["name"]))

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = before


def compile_ahead(
    work: Iterable[Callable[[], object]], *, threads: int, seconds: float = float("inf")
) -> int:
    """Compiles the kernels that these calls launch, in several threads. Nothing is launched.

    So what the calls compute is garbage. After `seconds` no further call is made. Returns how many
    kernels were compiled. One that does not compile is left out: its first launch says why.
    """
    from triton import AsyncCompileMode, JITFunction

    compiled = list[str]()
    launch, until = JITFunction.run, monotonic() + seconds
    with (
        when_compiled(compiled.append),
        ThreadPoolExecutor(threads) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        context = copy_context()

        def compile_only(kernel: Any, *given: Any, **options: Any) -> Any:
            # Another thread, as that of a backward pass, does not have the mode.
            return context.copy().run(launch, kernel, *given, **options | {"warmup": True})

        with mock.patch.object(JITFunction, "run", compile_only):
            for call in work:
                call()
                if monotonic() > until:
                    break
    return len(compiled)
