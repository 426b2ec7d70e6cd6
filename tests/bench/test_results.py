import json
import sys

import pytest

from xlstm7b.bench.results import Results, command_line, read_rows, shown_number


def test_figures_are_printed_and_appended(tmp_path, capsys):
    file = tmp_path / "speed.jsonl"
    results = Results("speed", "cpu", file=file, call="a")
    results.add("decode", {"batch": 8}, 1956.123, "tok/s", limit=2000.0, spread=0.001)
    results.add("decode", {"batch": 8}, 0.5, "s", system="other", limit=0.25)
    results.fail("decode", {"batch": 64}, "out of\nmemory")
    rows = read_rows(file)
    assert [row["system"] for row in rows] == ["xlstm7b", "other", "xlstm7b"]
    assert rows[0]["value"] == 1956.1
    assert rows[2]["error"] == "out of memory"
    assert results.failed
    assert {"subject", "machine", "date", "versions", "command", "call"} <= rows[0].keys()
    printed = capsys.readouterr().out
    assert "97.8% of 2,000" in printed
    assert "50.0% of 0.250" in printed
    assert "failed: out of memory" in printed


def test_a_run_is_continued_by_its_call(tmp_path):
    file = tmp_path / "speed.jsonl"
    Results("speed", "cpu", file=file, call="a").add("decode", {"batch": 8}, 1.0, "s")
    again = Results("speed", "cpu", file=file, call="a")
    assert again.has("decode", {"batch": 8})
    assert not again.has("decode", {"batch": 8}, "other")
    assert not Results("speed", "cpu", file=file, call="b").has("decode", {"batch": 8})


@pytest.mark.parametrize("points", [1, 2, 99, 100, 101, 1000])
def test_curves_are_thinned(tmp_path, points):
    file = tmp_path / "loss.jsonl"
    x = list(range(points))
    Results("loss", "cpu", file=file).add_curve("loss", {}, x, x, "nat", x_unit="steps")
    (row,) = read_rows(file)
    assert len(row["x"]) == len(row["y"]) <= 100
    assert row["x"][0] == 0
    assert row["x"][-1] == points - 1


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "notes.txt"
    for text in ("hello", "[1]", json.dumps({"a": 1})):
        file.write_text(text)
        with pytest.raises(ValueError, match="holds no results"):
            Results("speed", "cpu", file=file)
        assert file.read_text() == text
    with pytest.raises(ValueError, match="there is no folder"):
        Results("speed", "cpu", file=tmp_path / "none" / "a.jsonl")
    with pytest.raises(ValueError, match="nan"):
        Results("speed", "cpu").add("decode", {}, float("nan"), "s")


def test_the_command_has_no_secret(monkeypatch):
    words = ["bench", "serve", "--api-key", "secret", "--api-key=secret", "--clients", "2"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/xlstm7b", *words])
    assert command_line() == "xlstm7b bench serve --clients 2"
    monkeypatch.setattr(sys, "argv", ["/clone/benchmarks/speed.py", "two words"])
    assert command_line() == "python benchmarks/speed.py 'two words'"


def test_numbers():
    assert [shown_number(x) for x in (0.5, 3.541, 28.26, 9657.2, 0, 12, 0.00123)] == [
        *("0.500", "3.54", "28.3", "9,657", "0", "12", "0.00123")
    ]
