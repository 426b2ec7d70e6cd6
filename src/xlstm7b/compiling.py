"""Triton's compiler: reports when it compiles a kernel, and compiles many at once ahead of time.

A kernel is compiled when it is first launched, once for each combination of dtypes and sizes that
it is written for. The result is kept on disk, so this happens once on a machine.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from importlib.util import find_spec
from threading import Semaphore
from time import monotonic
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


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

    So what the calls compute is garbage. No call is made after `seconds`. Returns how many
    kernels were compiled. One that does not compile is left out: its first launch says why.
    """
    from triton import AsyncCompileMode, FutureKernel, JITFunction

    compiled, kernels = list[str](), dict[int, Any]()
    launch, until = JITFunction.run, monotonic() + seconds
    with (
        when_compiled(compiled.append),
        _Bounded(threads) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        context = copy_context()

        def compile_only(kernel: Any, *given: Any, **options: Any) -> Any:
            kernels[id(kernel)] = kernel
            # Another thread, as that of a backward pass, does not have the mode.
            return context.copy().run(launch, kernel, *given, **options | {"warmup": True})

        with mock.patch.object(JITFunction, "run", compile_only):
            for call in work:
                call()
                if monotonic() > until:
                    break
    for kernel in kernels.values():
        for cache, *_ in kernel.device_caches.values():
            # Triton 3.6 keeps those that did not compile. Their launch would not say why.
            for key in [key for key, each in cache.items() if isinstance(each, FutureKernel)]:
                del cache[key]
    return len(compiled)


class _Bounded(ThreadPoolExecutor):
    """Has at most two tasks for each thread, and waits with another one."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._room = Semaphore(2 * threads)

    def submit(self, call: Callable[..., T], /, *given: Any, **named: Any) -> Future[T]:
        self._room.acquire()
        future = super().submit(call, *given, **named)
        future.add_done_callback(lambda _: self._room.release())
        return future
