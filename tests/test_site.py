"""The site's references name everything, and broken links of its pages are found."""

import inspect
import re
from pathlib import Path

import pytest
import reference
import typer
from links import faults

import xlstm7b
from xlstm7b.cli import app


def test_the_api_reference_has_every_public_name_method_and_parameter() -> None:
    text = reference.api()
    for name in xlstm7b.__all__:
        value = getattr(xlstm7b, name)
        kind = "class" if inspect.isclass(value) else "function"
        assert re.search(rf"^`+{{py:{kind}}} {name}\(", text, re.M), name
    assert (
        "{py:method} generate(prompts: str | Sequence[str | Sequence[int]] | None = None, " in text
    )
    assert "{py:method} from_pretrained(folder_or_hub_id: str | Path, *, " in text
    assert "{py:property} has_requests\n:type: bool\n" in text
    assert "\n- `cache_bytes`, `host_cache_bytes`, `cache_folder`, `cache_folder_bytes`: " in text
    assert "\n- `tokens`: Token ids [B, T].\n" in text
    assert not re.search(r"xlstm7b\.\w+\.\w+\.|<|'[A-Z]|{py:\w+} _|\(self", text)


def test_the_reference_of_commands_has_every_command_and_option() -> None:
    text = reference.commands()

    def check(command: typer.core.TyperCommand, path: str) -> None:
        assert re.search(rf"^##+ {path}$", text, re.M)
        section = text.partition(f"{{program}} {path}\n")[2].partition("{program}")[0]
        options = [name for each in command.params if not each.hidden for name in each.opts]
        for option in options:
            if option.startswith("-"):
                assert re.search(rf"{{option}} (-\w, )?{option}\b", section), (path, option)
        for name, child in getattr(command, "commands", {}).items():
            check(child, f"{path} {name}")

    check(typer.main.get_command(app), "xlstm7b")


PAGE = '<h1 id="title">Title</h1><img src="a%20picture.png"><a href="https://example.com">'


@pytest.mark.parametrize(
    ("tag", "fault"),
    [
        ('<a href="#title">', None),
        ('<a href="folder/other.html#part">', None),
        ('<a href="folder/file.txt#L3">', None),
        ('<a href="mailto:someone@example.com">', None),
        ('<img src="data:image/png;base64,AA==">', None),
        ('<a href="#part">', "#part leads to an anchor that does not exist"),
        ('<a href="folder/other.html#title">', "other.html#title leads to an anchor"),
        ('<a href="folder">', "folder leads nowhere"),
        ('<a href="missing.html">', "missing.html leads nowhere"),
        ('<img src="missing.png">', "missing.png leads nowhere"),
        ('<script src="https://example.com/x.js"></script>', "x.js is from another site"),
        ('<link rel="stylesheet" href="//example.com/x.css">', "x.css is from another site"),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, tag: str, fault: str | None) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other.html").write_text('<p id="part"><a href="../index.html#title">')
    (tmp_path / "folder" / "file.txt").touch()
    (tmp_path / "a picture.png").touch()
    (tmp_path / "index.html").write_text(PAGE + tag)
    found = faults(tmp_path)
    if fault:
        assert len(found) == 1
        assert found[0].startswith("index.html: ")
        assert fault in found[0]
    else:
        assert found == []
