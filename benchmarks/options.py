"""What options of several scripts have in common."""

from collections.abc import Collection, Sequence

from xlstm7b.cli.options import listed


def numbers(name: str, text: str, least: int = 1) -> list[int]:
    """The numbers of an option, separated by commas. `ValueError` if one is below `least`."""
    try:
        found = [int(part) for part in listed(text)]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise ValueError(
            f"--{name} takes numbers of at least {least}, such as 1,8,64, not {text!r}"
        )
    return found


def chosen(what: str, given: Sequence[str] | None, known: Collection[str]) -> list[str]:
    """The names that were given; all of them by default. `ValueError` for one that is not known."""
    for name in given or ():
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}; choose from {', '.join(known)}")
    return list(given or known)
