"""Renders the tables and pictures of the pages from the figures in docs/results.

A page marks where they go. `<!-- table NAME -->` begins a table that tables.py defines, and
`<!-- /table -->` ends it. `<!-- picture NAME -->` and `<!-- /picture -->` do the same for a picture
of pictures.py. What stands between is replaced; the rest of the page stays.
"""

import os
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from drawing import THEMES, Picture, draw, drawn_source
from figures import RESULTS, ROOT, Row, read_figures
from pictures import PICTURES
from tables import TABLES
from xlstm7b.cli import main
from xlstm7b.cli.options import Command
from xlstm7b.files import write_aside

IMAGES = ROOT / "docs" / "images"
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>table|picture) (?P<name>[\w-]+) -->\n)"
    r"(?P<content>.*?)(?P<end><!-- /(?P=kind) -->)",
    re.DOTALL,
)
MARKER = re.compile(r"<!-- /?(?:table|picture)\b.*?-->")

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def render(
    pages: Annotated[
        list[Path] | None, typer.Argument(help="Pages to render. By default README.md and docs.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if something differs.")
    ] = False,
    results: Annotated[Path, typer.Option(help="Folder of the figures.")] = RESULTS,
    images: Annotated[Path, typer.Option(help="Folder of the pictures.")] = IMAGES,
) -> None:
    """Render the tables and pictures of README.md and docs/*.md from docs/results."""
    rows = read_figures(results)
    different = []
    for page in pages or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        different += list(render_page(page, rows, images, write=not check))
    for name in different:
        print(f"{'differs from its figures' if check else 'rendered'}: {name}")
    if check and different:
        print("run python benchmarks/render.py")
        raise typer.Exit(1)


def render_page(page: Path, rows: list[Row], images: Path, *, write: bool) -> Iterator[str]:
    """Renders a page and its pictures. Yields the names of what differs from what was there."""
    old = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(old))
    if len(MARKER.findall(old)) != 2 * len(blocks):
        raise ValueError(f"{page}: a table or picture has no end, or stands in another one")
    new, at = [], 0
    for block in blocks:
        kind, name = block["kind"], block["name"]
        known = TABLES if kind == "table" else PICTURES
        try:
            if name not in known:
                raise ValueError(f"is not defined: {', '.join(known)} are")
            if kind == "table":
                content = f"{TABLES[name](rows).markdown()}\n"
            else:
                picture = PICTURES[name](rows)
                content = picture_element(name, picture, os.path.relpath(images, page.parent))
                yield from _render_files(name, picture, images, write=write)
        except ValueError as error:
            raise ValueError(f"{page}: {kind} {name}: {error}") from error
        if content != block["content"]:
            yield f"{page}: {kind} {name}"
        new += [old[at : block.start()], block["begin"], content, block["end"]]
        at = block.end()
    text = "".join([*new, old[at:]])
    if write and text != old:
        with write_aside(page) as aside:
            aside.write_text(text, encoding="utf-8")


def picture_element(name: str, picture: Picture, folder: str) -> str:
    """The light or the dark version, as the reader's browser prefers."""
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.png">\n'
        f'  <img src="{folder}/{name}-light.png" alt="{escape(picture.alt)}">\n'
        "</picture>\n"
    )


def _render_files(name: str, picture: Picture, images: Path, *, write: bool) -> Iterator[str]:
    for theme in THEMES:
        path = images / f"{name}-{theme}.png"
        if drawn_source(path) != picture.source():
            if write:
                draw(picture, path, theme)
            yield str(path)


if __name__ == "__main__":
    main(app)
