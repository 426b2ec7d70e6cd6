"""How mistakes are tested: their kind, and that the text names the option and the value."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(*named: object, kind: type[Exception] = ValueError) -> Iterator[None]:
    """The block raises such an error, in one line that has all of `named` in it."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text
    missing = [str(one) for one in named if str(one) not in text]
    assert not missing, f"{text!r} does not name {', '.join(missing)}"
