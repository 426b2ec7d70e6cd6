"""What options of several scripts have in common."""

from xlstm7b.cli.options import listed


def numbers(name: str, text: str) -> list[int]:
    """The numbers of an option, separated by commas. `ValueError` if one is below 1."""
    try:
        found = [int(part) for part in listed(text)]
    except ValueError:
        found = []
    if min(found, default=0) < 1:
        raise ValueError(f"--{name} takes numbers of at least 1, such as 1,8,64, not {text!r}")
    return found
