"""A process that can open few files more, as a busy server can."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """Inside, only `left` files can be opened at a time; more are an OSError (EMFILE)."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 64, before[1]))
    try:
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(left):
                os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
