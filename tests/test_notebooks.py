"""The notebooks are clean files whose code compiles and imports public names only.

Building the documentation site runs them.
"""

import ast
import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT, python_blocks

NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@every_notebook
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    notebook = read(path)
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"] == {"language_info": {"name": "python"}}
    fields = {"cell_type", "id", "metadata", "source"}
    for cell in notebook["cells"]:
        is_code = cell["cell_type"] == "code"
        assert is_code or cell["cell_type"] == "markdown"
        assert cell.keys() == fields | ({"execution_count", "outputs"} if is_code else set())
        assert cell["metadata"] == {}
        if is_code:
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)


@every_notebook
def test_a_notebook_imports_public_names(path: Path) -> None:
    cells = [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        for module, name in imports("".join(cell["source"]), f"{path.name}:{cell['id']}"):
            is_public = name in getattr(import_module(module), "__all__", ())
            assert is_public or (module, name) in names_of_the_pages(), f"{module}.{name}"


@cache
def names_of_the_pages() -> set[tuple[str, str]]:
    """What the Python of README and docs/ imports from this package."""
    blocks = [block for page in PAGES for block in python_blocks(page)]
    return {found for block in blocks for found in imports(block.text, block.where)}


def imports(code: str, where: str) -> list[tuple[str, str]]:
    """Modules of this package and the names that are imported from them. The code must compile."""
    found = []
    for node in ast.walk(ast.parse(code, where)):
        if isinstance(node, ast.Import):
            assert not any(one.name.startswith("xlstm7b.") for one in node.names), where
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xlstm7b"):
            found += [(str(node.module), one.name) for one in node.names]
    return found
