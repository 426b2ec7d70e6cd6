"""Results files: whose they are, and side by side."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_small

from xlstm7b.evaluate.results import Measured, compare, described, fingerprint, write_json
from xlstm7b.weights import open_checkpoint, save_checkpoint


def results(**metrics: Any) -> dict[str, Any]:
    return {"results": {"arc": {"alias": "arc", "sample_len": 4, **metrics}}}


def test_a_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    folder, tensors = save_small(tmp_path)
    first = fingerprint(folder)
    assert first["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    save_checkpoint(tmp_path / "same", open_checkpoint(folder).config, tensors.items())
    assert fingerprint(tmp_path / "same")["fingerprint"] == first["fingerprint"]
    trained = {name: tensor + torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_checkpoint(tmp_path / "other", open_checkpoint(folder).config, trained.items())
    assert fingerprint(tmp_path / "other")["fingerprint"] != first["fingerprint"]


def test_what_a_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = save_small(tmp_path)
    monkeypatch.setattr("sys.argv", ["/usr/bin/xlstm7b", "eval", "a b", "--tasks", "arc"])
    given = results(**{"acc,none": torch.tensor(0.5), "f,none": print})
    write_json(tmp_path / "out.json", described(given, folder))
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["results"]["arc"]["acc,none"] == 0.5
    about = read["xlstm7b"]
    assert about["command"] == "xlstm7b eval 'a b' --tasks arc"
    assert about["model"] == fingerprint(folder)
    assert about["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    class Stubborn:
        def __str__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        write_json(path, {"results": Stubborn()})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_side_by_side(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", results(**{"acc,none": 0.5, "acc_stderr,none": 0.01}))
    other = results(**{"acc,none": 0.75, "acc_stderr,none": "N/A", "em,strict": 1, "x": True})
    write_json(tmp_path / "b.json", other)
    lines = compare([tmp_path / "a.json", tmp_path / "b.json"])
    assert [(line.task, line.metric) for line in lines] == [("arc", "acc"), ("arc", "em,strict")]
    assert lines[0].values == [Measured(0.5, 0.01), Measured(0.75, None)]
    assert lines[0].differences == [0.25]
    assert lines[1].values == [None, Measured(1, None)]
    assert lines[1].differences == [None]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not a JSON file"),
        ("[]", 'is not a results file: it has no "results"'),
        ('{"results": {"arc": 1}}', "is not a results file: 'arc' has no metrics"),
        ('{"results": {}}', "there is no metric in any of these files"),
    ],
)
def test_mistakes(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        compare([tmp_path / "a.json"] * 2)
