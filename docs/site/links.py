"""Checks a site's links, and that its pages load nothing from other sites."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


def faults(site: Path) -> list[str]:
    """One sentence for each link to a page, file or anchor that the site does not have.

    Links to other sites are not followed, but scripts, styles, fonts and pictures from there are
    faults: the site works without a network.
    """
    pages = {path.resolve(): _Page(path) for path in site.glob("**/*.html")}
    return sorted(
        f"{path.relative_to(site.resolve())}: {link} {fault}"
        for path, page in pages.items()
        for link in page.links | page.loaded
        if (fault := _fault(link, path, pages))
    )


def _fault(link: str, path: Path, pages: dict[Path, "_Page"]) -> str:
    url = urlsplit(link)
    if url.scheme or url.netloc:
        is_loaded = link in pages[path].loaded and url.scheme != "data"
        return "is from another site" if is_loaded else ""
    target = (path.parent / unquote(url.path)).resolve() if url.path else path
    if target not in pages:
        return "" if target.is_file() else "leads nowhere"
    is_there = not url.fragment or unquote(url.fragment) in pages[target].anchors
    return "" if is_there else "leads to an anchor that does not exist"


class _Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if not value:
                continue
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src"):
                (self.links if tag == "a" else self.loaded).add(value)
