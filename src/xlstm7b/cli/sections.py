"""Nested numbers as a table, for `info` and `train --dry-run`."""

from typing import Any


def print_sections(title: str, sections: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title=Text(title), show_header=False)
    for section, values in sections.items():
        table.add_section()
        table.add_row(f"[bold]{section}", "")
        for name, value in values.items():
            parts = value if isinstance(value, dict) else {name: value}
            if value is parts:
                table.add_row(f"  {_words(name)}", "")
            for key, number in parts.items():
                indent = "    " if value is parts else "  "
                table.add_row(indent + _words(key), _readable(section, key, number))
    Console().print(table)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _readable(section: str, key: str, number: float | str) -> str:
    """Bytes with their unit (powers of 1000, as in the paper), FLOPs as powers of ten."""
    if isinstance(number, str):
        return number
    if "bytes" in key:
        unit, size = ("GB", 1e9) if number >= 1e9 else ("MB", 1e6)
        return f"{number / size:,.1f} {unit}"
    if section == "flops" and number >= 1e6:
        return f"{number:.3e}"
    if 0 < abs(number) < 1:
        return f"{number:.4g}"
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"
