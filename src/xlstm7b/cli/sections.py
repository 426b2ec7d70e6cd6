"""Prints nested values as a table, for `info` and `train --dry-run`."""

from typing import Any

from xlstm7b.report import shown_bytes


def print_sections(title: str, sections: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title=Text(title), show_header=False)

    def add_rows(section: str, values: dict[str, Any], indent: str = "  ") -> None:
        for key, value in values.items():
            is_layer = section == "quantization"
            name = Text(indent + (key if is_layer else key.replace("_", " ")))
            if isinstance(value, dict):
                table.add_row(name, "")
                add_rows(section, value, indent + "  ")
            else:
                table.add_row(name, Text(_format(section, key, value)))

    for section, values in sections.items():
        table.add_section()
        table.add_row(Text(section.replace("_", " "), style="bold"), "")
        add_rows(section, values)
    console = Console()
    with console.capture() as captured:  # rich itself exits with code 1 if a pipe is closed
        console.print(table)
    print(captured.get(), end="")


def _format(section: str, key: str, value: float | str | None) -> str:
    """Bytes with a unit (powers of 1000, as in the paper), FLOPs as powers of ten."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    if "bytes" in key:
        return shown_bytes(value)
    if section == "flops" and value >= 1e6:
        return f"{value:.3e}"
    if section == "paper_count" and "parameters" not in key:
        return f"{value:.4e}"
    if 0 < abs(value) < 1:
        return f"{value:.4g}"
    return f"{value:,.1f}" if value % 1 else f"{value:,.0f}"
