"""doctor: what it prints, its files and its exit code."""

import json
from pathlib import Path

import pytest
import torch
from commands import Cli, refused
from doctor_checks import check, set_checks

from xlstm7b import kernel_verdicts


def test_a_report(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_checks(monkeypatch, check("steps", 1.0), check("model", 1.0))
    code, out, err = cli("doctor", "--device", "cpu", "--json", tmp_path / "report.json")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("ok: 2 checks")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"]
    assert (report["wrong"], report["left_out"]) == ([], 0)
    assert [one["ok"] for one in report["checks"]] == [True, True]
    assert report["versions"]["torch"] == torch.__version__
    assert report["machine"]["memory"] > 0
    assert {"train", "serve", "eval"} <= report["extras"].keys()
    code, out, err = cli("doctor", "--device", "cpu", "--json", "-")
    assert (code, err) == (0, "")
    assert json.loads(out).keys() == report.keys()
    assert str(Path.home()) not in out


@pytest.mark.parametrize("got", [1.01, float("nan"), float("inf")])
def test_wrong_numbers(got: float, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    set_checks(monkeypatch, check("steps", 1.0), check("int4", got))
    code, out, err = cli("doctor", "--device", "cpu")
    assert (code, err) == (1, "")
    assert kernel_verdicts.FAMILIES["int4"] in out.splitlines()[-1]
    code, out, _ = cli("doctor", "--device", "cpu", "--json", "-")
    assert code == 1
    report = json.loads(out)
    assert report["wrong"] == ["int4"]
    assert [one["ok"] for one in report["checks"]] == [True, False]


def test_mistakes(cli: Cli, tmp_path: Path) -> None:
    assert "no folder" in refused(cli("doctor", "--json", tmp_path / "none" / "a.json"))
    assert "nowhere" in refused(cli("doctor", "--device", "nowhere"))
    assert "meta" in refused(cli("doctor", "--device", "meta"))
    assert "empty" in refused(cli("doctor", "--json", ""))
