"""Regular expressions from files of others, matched within a time limit."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence

_SECONDS = 10
_PROGRAM = """
import json, re, sys
patterns, names = json.load(sys.stdin)
found = [next((n for n, p in enumerate(patterns) if re.match(p, name)), None) for name in names]
json.dump(found, sys.stdout)
"""


def first_matches(
    patterns: Sequence[str], names: Sequence[str], *, form: str = "{}"
) -> list[int | None]:
    """For each name, the number of the first pattern that its beginning matches; None: none does.

    Each pattern is put into `form`, a larger regular expression.
    A pattern that is no regular expression is a `ValueError`, and so is too long a time. Matching
    runs in a process of its own: some expressions take years, and only a process can be ended.
    """
    if not patterns:
        return [None] * len(names)
    wholes = [form.format(pattern) for pattern in patterns]
    for pattern, whole in zip(patterns, wholes, strict=True):
        try:
            re.compile(whole)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROGRAM],
            input=json.dumps([wholes, names]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"the regular expressions take more than {_SECONDS} s") from error
    numbers: list[int | None] = json.loads(done.stdout)
    return numbers
