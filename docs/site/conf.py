"""Settings of the site, which `make docs` builds with Sphinx from the pages of the repository.

The source folder is the repository's root, so a link or a picture is found where GitHub finds it.
"""

import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger
from sphinx.writers.html5 import HTML5Translator

from xlstm7b import __version__

sys.path.append(str(Path(__file__).parent))
import reference
from links import faults

# The sidebar. A page that is not listed here is an error.
PAGES = {
    "Use it": [
        "docs/installation",
        "docs/hardware",
        "docs/doctor",
        "docs/generation",
        "docs/serving",
        "docs/clients",
        "docs/deployment",
        "docs/quantisation",
        "docs/checkpoints",
        "docs/hub",
        "docs/library",
    ],
    "Train it": [
        "docs/data",
        "docs/training",
        "docs/recipes",
        "docs/finetuning",
        "docs/experiments",
        "docs/evaluation",
    ],
    "Understand it": [
        "docs/model",
        "docs/kernels",
        "docs/architecture",
        "docs/extending",
    ],
    "Figures": [
        "docs/benchmarks",
        "docs/paper",
        "benchmarks/README",
    ],
    "Reference": [
        "docs/site/commands",
        "docs/site/api",
    ],
    "Project": [
        "docs/stability",
        "SECURITY",
        "CONTRIBUTING",
        "CHANGELOG",
    ],
}
NOTEBOOKS = "examples/notebooks/*.ipynb"  # all are shown, in the order of their names

ROOT = Path(__file__).parents[2]
project = "xlstm7b"
release = __version__
root_doc = "README"
include_patterns = [
    "*.md",
    "benchmarks/README.md",
    "docs/*.md",
    "docs/site/*.md",
    NOTEBOOKS,
]
exclude_patterns = [".*", "build", "dist", "runs"]
extensions = ["myst_nb"]
myst_heading_anchors = 6
myst_enable_extensions = ["dollarmath"]  # as on GitHub
smartquotes = False  # "--option" in a text is no dash
highlight_language = "none"  # of indented blocks: commands and formulas

# A notebook runs if it has changed since the last build. Then its first exception is an error.
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "notebooks")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 600  # of a cell, in seconds
nb_merge_streams = True

html_theme = "furo"
html_title = f"xlstm7b {release}"
html_math_renderer = "mathml"  # browsers show it without a script
pygments_dark_style = "github-dark"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
maximum_signature_line_length = 88


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("source-read", on_source_read)
    app.connect("build-finished", on_build_finished)


def visit_math(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    is_block = isinstance(node, nodes.math_block)
    translator.body.append(tex2mathml(node.astext(), as_block=is_block))
    raise nodes.SkipNode


def on_source_read(app: Sphinx, page: str, source: list[str]) -> None:
    if page.startswith("examples/"):
        return
    source[0] = for_the_site(source[0], (ROOT / page).parent)
    match page:
        case "README":
            source[0] += sidebar()
        case "docs/site/api":
            source[0] += reference.api()
        case "docs/site/commands":
            source[0] += reference.commands()


def on_build_finished(app: Sphinx, error: Exception | None) -> None:
    if error:
        return
    to_readme = '<!doctype html><title>xlstm7b</title><meta http-equiv="refresh" content="0; '
    front = f'{to_readme}url=README.html"><a href="README.html">xlstm7b</a>\n'
    (app.outdir / "index.html").write_text(front, encoding="utf-8")
    for fault in faults(app.outdir):
        getLogger(__name__).warning(fault)


def sidebar() -> str:
    notebooks = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(NOTEBOOKS))
    groups = PAGES | ({"Notebooks": notebooks} if notebooks else {})
    return "\n".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in groups.items()
    )


def for_the_site(text: str, folder: Path) -> str:
    """Replaces what only GitHub shows well.

    Of two pictures in <picture>, one is for dark pages: the page's own switch chooses. A link to
    a folder is the name of the folder.
    """

    def pictures(found: re.Match[str]) -> str:
        return "\n".join(
            f"```{{image}} {found[mode]}\n:class: only-{mode}\n:alt: {found['alt']}\n```"
            for mode in ("light", "dark")
        )

    def link(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        return f"`{target.relative_to(ROOT)}`" if target.is_dir() else found[0]

    text = re.sub(
        r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)">\s*'
        r'<img src="(?P<light>[^"]+)" alt="(?P<alt>[^"]+)">\s*</picture>',
        pictures,
        text,
    )
    return re.sub(r"\[([^]]+)\]\(([\w./-]+)\)", link, text)
