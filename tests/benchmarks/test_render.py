"""Pages equal their figures, and the rules of tables and pictures hold."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import render
from drawing import THEMES, Line, Picture, apart, draw, drawn_source
from figures import (
    ROOT,
    Cell,
    Row,
    Table,
    fastest,
    listed,
    number,
    percent,
    pick,
    ratio,
    shown,
    value,
)
from figures import read_figures as read
from render import app
from tables import readme


def figure(
    amount: float, call: str = "a", system: str = "xlstm7b", unit: str = "tok/s", **shape: Any
) -> dict[str, Any]:
    """A line as `bench/results.py` writes it."""
    return {
        "subject": "speed",
        "what": "decode",
        "shape": shape,
        "system": system,
        "value": amount,
        "unit": unit,
        "limit": 2 * amount,
        "machine": "a GPU",
        "date": "2026-11-19",
        "versions": {"torch": "2.11.0"},
        "command": "python benchmarks/speed.py --json x.jsonl --call a",
        "call": call,
    }


def our_speedup(rows: list[Row]) -> Table:
    def of(system: str) -> Row:
        return pick(rows, "speed", "decode", system, batch=1)

    ours, peer = of("xlstm7b"), of("other")
    return Table(
        ("batch", "ours", "other", "×"), [["1", value(ours), number(peer), ratio(ours, peer)]]
    )


def line(rows: list[Row]) -> Picture:
    y = [row["value"] for row in rows]
    return Picture("Speed", "One GPU.", 'A "line"', "x", "y", [Line("ours", [0, 1], y, ours=True)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page with a table and a picture, and the figures of both."""
    monkeypatch.setattr(render, "TABLES", {"speed": our_speedup})
    monkeypatch.setattr(render, "PICTURES", {"line": line})
    (tmp_path / "images").mkdir()
    (tmp_path / "page.md").write_text(
        "# Title\n\n<!-- table speed -->\n<!-- /table -->\n\ntext | with | bars\n"
        "<!-- picture line -->\nold\n<!-- /picture -->\nthe end"
    )
    write(tmp_path, figure(300.0, batch=1), figure(150.0, system="other", batch=1))
    return tmp_path


def write(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "results").mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "results" / "speed.jsonl").write_text(lines)


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code, and what was printed or the error."""
    given = [*arguments, str(folder / "page.md"), "--results", str(folder / "results")]
    result = CliRunner().invoke(app, [*given, "--images", str(folder / "images")])
    if isinstance(result.exception, ValueError):
        return 2, str(result.exception)
    return result.exit_code, result.output


def test_the_pages_show_their_figures() -> None:
    result = CliRunner().invoke(app, ["--check"])
    assert result.exit_code == 0, result.output or result.exception


def test_the_cells_of_the_readme_are_short() -> None:
    table = readme(read())
    cells = [Cell(cell).text if isinstance(cell, str) else cell.text for cell in
             (*table.header, *(cell for row in table.rows for cell in row))]  # fmt: skip
    long = [cell for cell in cells if len(cell.replace(" / ", " ").split()) > 8]
    assert not long, f"over eight words: {long}"


def test_the_pictures_are_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "docs" / "images").iterdir()) < 2e6


def test_a_page_is_rendered_once(folder: Path) -> None:
    assert run(folder, "--check")[0] == 1
    assert run(folder)[0] == 0
    page = (folder / "page.md").read_text()
    assert "| 1 | 300 tok/s | 150 | 2 × |" in page
    assert "<sub>a GPU, 2026-11-19, torch 2.11.0: `python benchmarks/speed.py`</sub>" in page
    assert 'srcset="images/line-dark.png"' in page
    assert "A &quot;line&quot;" in page
    assert page.startswith("# Title\n\n<!-- table speed -->\n| batch")
    assert "<!-- /table -->\n\ntext | with | bars\n<!-- picture line -->\n<picture>" in page
    assert page.endswith("</picture>\n<!-- /picture -->\nthe end")
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert run(folder) == (0, "")
    assert run(folder, "--check") == (0, "")
    assert times == {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}


def test_a_difference_is_named(folder: Path) -> None:
    run(folder)
    write(folder, figure(301.0, batch=1), figure(150.0, system="other", batch=1))
    code, text = run(folder, "--check")
    assert code == 1
    names = "page.md: table speed", "line-light.png", "line-dark.png"
    assert all(name in text for name in names)
    run(folder)
    page = folder / "page.md"
    page.write_text(page.read_text().replace("2.01 ×", "2.02 ×"))
    code, text = run(folder, "--check")
    assert code == 1
    assert text.count("differs") == 1


def test_what_cannot_be_shown_leaves_the_page_as_it_was(folder: Path) -> None:
    page = (folder / "page.md").read_text()
    ours, peer = figure(300.0, batch=1), figure(150.0, system="other", batch=1)
    other_call = peer | {"call": "b"}
    failed = {key: peer[key] for key in peer if key != "value"} | {"error": "out of memory"}
    for rows, message in (
        ([ours], "not measured: speed: decode of other, batch 1"),
        ([ours, other_call], "figures of different calls are compared"),
        ([ours, failed], "out of memory"),
        ([ours, peer, figure(1.0, batch=1, context=2)], "fits several"),
        ([ours, peer | {"unit": "s"}], "in tok/s"),
    ):
        write(folder, *rows)
        code, text = run(folder)
        assert code == 2
        assert "page.md: table speed: " in text
        assert message in text
        assert (folder / "page.md").read_text() == page
    (folder / "page.md").write_text("<!-- table speeds -->\n<!-- /table -->")
    assert "is not defined: speed are" in run(folder)[1]
    (folder / "page.md").write_text("<!-- table speed -->\ntext\n")
    assert "has no end" in run(folder)[1]


def test_rows_of_several_calls_may_only_stand_in_a_table_that_does_not_compare_them() -> None:
    rows = [["1", number(figure(1.0, "a"))], ["2", number(figure(2.0, "b"))]]
    assert "| 2 | 2 |" in Table(("batch", "tok/s"), rows).markdown()
    with pytest.raises(ValueError, match="different calls"):
        Table(("batch", "tok/s"), rows, one_call=True).markdown()
    with pytest.raises(ValueError, match="has 1 cells"):
        Table(("batch", "tok/s"), [["1"]]).markdown()


def test_the_newest_figure_is_picked() -> None:
    old, new = figure(1.0, "a", batch=1), figure(2.0, "b", batch=1)
    later = figure(3.0, "c", batch=1) | {"date": "2026-11-20"}
    assert pick([old, new], "speed", "decode", batch=1) is new
    assert pick([later, old, new], "speed", "decode") is later
    without = figure(4.0, batch=2)
    assert pick([old | {"shape": {"batch": 2, "text": "code"}}, without], "speed", "decode",
                batch=2, text=None) is without  # fmt: skip


def test_of_several_batches_the_fastest_of_the_newest_call_is_picked() -> None:
    old = [figure(9.0, "a", batch=1), figure(8.0, "a", batch=2)]
    new = [figure(3.0, "b", batch=1), figure(4.0, "b", batch=4)]
    assert fastest([*old, *new], "speed", "decode") is new[1]
    assert fastest([*new, *old], "speed", "decode") is old[0]
    with pytest.raises(ValueError, match="not measured"):
        fastest(new, "speed", "decode", batch=3)


def test_cells() -> None:
    seconds = figure(0.0135, unit="s")
    assert value(seconds).text == "13.5 ms"
    assert ratio(seconds, figure(0.027, unit="s")).text == "2 ×"
    assert percent(figure(50.0)).text == "50%"
    assert listed([figure(281.0), figure(279.9)]).text == "281 / 280 tok/s"
    assert [shown(x) for x in (9657, 15081, 456000, 1.2e6, 3.541)] == [
        *("9,657", "15.1K", "456K", "1.20M", "3.54")
    ]
    with pytest.raises(ValueError, match="has no limit"):
        percent(figure(1.0) | {"limit": None})


def test_files_of_results_have_a_limit(folder: Path) -> None:
    curve = figure(1.0) | {"x": list(range(101)), "y": list(range(101))}
    write(folder, curve)
    with pytest.raises(ValueError, match="101 points"):
        read(folder / "results")
    write(folder, *[figure(1.0)] * 4001)
    with pytest.raises(ValueError, match="4001 lines"):
        read(folder / "results")


def test_a_picture_is_drawn_again_only_if_it_changes(folder: Path) -> None:
    run(folder)
    shutil.rmtree(folder / "images")
    (folder / "images").mkdir()
    assert run(folder, "--check")[0] == 1
    run(folder)
    sources = {drawn_source(folder / "images" / f"line-{theme}.png") for theme in THEMES}
    assert len(sources) == 1
    assert None not in sources


def test_a_text_must_fit_its_picture(tmp_path: Path) -> None:
    picture = Picture("word " * 40, "", "", "x", "y", [Line("ours", [0, 1], [1, 2])])
    with pytest.raises(ValueError, match="wider than the picture: 'word word"):
        draw(picture, tmp_path / "a.png", "light")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_has_few_lines() -> None:
    lines = [Line("", [0], [0])] * 5
    limits = [Line("", [0], [0], limit=True)]
    Picture("", "", "", "", "", [*lines, *limits])
    with pytest.raises(ValueError, match="has 6 lines"):
        Picture("", "", "", "", "", [*lines, *lines[:1]])


@given(st.lists(st.floats(0, 500), max_size=8))
def test_labels_do_not_overlap(heights: list[float]) -> None:
    moved = apart(heights, 10)
    ordered = sorted(moved)
    assert all(b - a > 10 - 1e-6 for a, b in itertools.pairwise(ordered))
    if all(abs(a - b) >= 10 for i, a in enumerate(heights) for b in heights[:i]):
        assert moved == pytest.approx(heights)


def test_a_cell_without_a_figure_is_text() -> None:
    assert "| the paper | 157 |" in Table(("", ""), [["the paper", Cell("157")]]).markdown()
