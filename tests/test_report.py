"""Tables, figures and the description of the machine."""

from pathlib import Path

import pytest
from train_processes import full_disk

from xlstm7b import report


def test_table_aligns_its_columns() -> None:
    rows = [("a", 1, "x"), ("longer", 12345, None)]
    assert report.table(("name", "count", "y"), rows).splitlines() == [
        "name    count  y",
        "a           1  x",
        "longer  12345",
    ]


def test_a_number_has_the_right_form_of_its_noun() -> None:
    found = [report.counted(count, "token") for count in (0, 1, 2, 2000)]
    assert found == ["0 tokens", "1 token", "2 tokens", "2,000 tokens"]


def test_a_full_disk_names_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    with (
        full_disk(room=100),
        pytest.raises(OSError, match=rf"^{path} could not be written \("),
        report.figure(path) as axes,
    ):
        axes.plot([1, 2])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("a", b"\x89PNG")],
)
def test_the_suffix_chooses_the_format_of_a_figure(tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    with report.figure(tmp_path / name) as axis:
        axis.plot([0, 512, 4096], [1, 2, 3])
        report.token_ticks(axis, [4096, 0, 512, 512])
        assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "512", "4K"]
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_figure_is_saved_to_several_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "a.svg", tmp_path / "a.png"]
    with report.figure(*paths, columns=2) as axes:
        axes[0].set_title("Title")
    assert [path.read_bytes()[:4] for path in paths] == [b"<?xm", b"\x89PNG"]
    with pytest.raises(ValueError, match=r"cannot draw .*a\.xyz"):
        report.figure(paths[0], tmp_path / "a.xyz").__enter__()


def test_an_unknown_format_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.check_figure(tmp_path / "a.PDF")
    with (
        pytest.raises(ValueError, match=r"cannot draw .*a\.xyz: a figure is a \.png, \.pdf or"),
        report.figure(tmp_path / "a.xyz"),
    ):
        raise AssertionError
    assert not list(tmp_path.iterdir())


def test_figures_and_results_replace_only_their_own_kind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, check, kept in (
        ("a.png", report.check_figure, b"a letter"),
        ("a.json", report.check_results_file, b'{"architectures": ["xLSTM"]}'),
        ("b.json", report.check_results_file, b'"results"'),
        ("c.json", report.check_results_file, b"\xff"),
    ):
        path = tmp_path / name
        check(path)
        path.touch()
        check(path)
        path.write_bytes(kept)
        with pytest.raises(ValueError, match=f"{name} exists and (is no figure|holds no results):"):
            check(path)
    with report.figure(tmp_path / "b.svg") as axis:
        axis.plot([0, 1])
    report.check_figure(tmp_path / "b.svg")
    (tmp_path / "d.json").write_text('{"results": []}')
    report.check_results_file(tmp_path / "d.json")


def test_a_failed_figure_leaves_no_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ZeroDivisionError), report.figure(tmp_path / "a.png"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
