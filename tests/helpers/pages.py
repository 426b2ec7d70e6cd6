"""README and the other pages: their blocks of Python, and the commands that they show."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "[a-z]*/README.md")
    for path in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: .+ -->\n+\Z")


@dataclass
class Code:
    """A block of Python, or a command."""

    where: str  # page:line
    text: str
    is_whole: bool = True  # False: not to be run, or a command that prose mentions


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def python_blocks(page: Path) -> list[Code]:
    """The ```python blocks. `<!-- not run: why -->` before one says that it cannot be run here."""
    text = text_of(page)
    return [
        Code(_where(page, found.start(2)), found[2], not _NOT_RUN.search(text[: found.start()]))
        for found in _FENCE.finditer(text)
        if found[1] == "python"
    ]


def commands(page: Path) -> Iterator[Code]:
    """Lines of shell blocks and indented blocks, and what stands in backquotes."""
    text = text_of(page)
    for found in _FENCE.finditer(text):
        if found[1] in ("bash", "sh", "console"):
            yield from _lines(page, found.start(2), found[2])
    text = _FENCE.sub(_blank, text)
    for found in re.finditer(r"(?<=\n\n)(?: {4}.*\n| *\n)+", text):
        yield from _lines(page, found.start(), found[0])
    for found in re.finditer(r"`([^`]+)`", re.sub(r"(?<=\n) {4}.*\n", _blank, text)):
        yield Code(_where(page, found.start()), " ".join(found[1].split()), is_whole=False)


def _lines(page: Path, start: int, block: str) -> Iterator[Code]:
    """The lines of a block. One that ends with a backslash goes on in the next."""
    for found in re.finditer(r"(?:.*\\\n)*.*\n", block):
        line = found[0].replace("\\\n", " ").strip().removeprefix("$ ")
        yield Code(_where(page, start + found.start()), line)


def _where(page: Path, position: int) -> str:
    return f"{page.relative_to(ROOT)}:{text_of(page).count(chr(10), 0, position) + 1}"


def _blank(found: re.Match[str]) -> str:
    """White space of the same length and with the same lines."""
    return re.sub(r"\S", " ", found[0])
