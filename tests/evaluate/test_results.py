"""Results files: what they say about a run, and how they compare."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import save_small

from xlstm7b.checkpoint import open_checkpoint, save_checkpoint
from xlstm7b.evaluate.results import (
    Metric,
    compare,
    comparison_table,
    fingerprint,
    run_info,
    setting_differences,
)
from xlstm7b.files import write_json


def results(**metrics: Any) -> dict[str, Any]:
    return {"results": {"arc": {"alias": "arc", "sample_len": 4, **metrics}}}


def test_fingerprints_differ_between_models(tmp_path: Path) -> None:
    folder, tensors = save_small(tmp_path)
    first = fingerprint(folder)
    assert first["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    save_checkpoint(tmp_path / "same", open_checkpoint(folder).config, tensors.items())
    assert fingerprint(tmp_path / "same")["fingerprint"] == first["fingerprint"]
    trained = {name: tensor + torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_checkpoint(tmp_path / "other", open_checkpoint(folder).config, trained.items())
    assert fingerprint(tmp_path / "other")["fingerprint"] != first["fingerprint"]


def test_a_file_says_what_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = save_small(tmp_path)
    monkeypatch.setattr("sys.argv", ["/usr/bin/xlstm7b", "eval", "a b", "--tasks", "arc"])
    given = results(**{"acc,none": torch.tensor(0.5), "f,none": print})
    write_json(tmp_path / "out.json", {**given, "xlstm7b": run_info(folder)})
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["results"]["arc"]["acc,none"] == 0.5
    info = read["xlstm7b"]
    assert info["command"] == "xlstm7b eval 'a b' --tasks arc"
    assert info["model"] == fingerprint(folder)
    assert info["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
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


def test_files_are_compared_with_the_first(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", results(**{"acc,none": 0.5, "acc_stderr,none": 0.01}))
    other = results(**{"acc,none": 0.75, "acc_stderr,none": "N/A", "em,strict": 1, "x": True})
    write_json(tmp_path / "b.json", other)
    lines = compare([tmp_path / "a.json", tmp_path / "b.json"])
    assert [(line.task, line.metric) for line in lines] == [("arc", "acc"), ("arc", "em,strict")]
    assert lines[0].values == [Metric(0.5, 0.01), Metric(0.75, None)]
    assert lines[0].differences == [0.25]
    assert lines[1].values == [None, Metric(1, None)]
    assert lines[1].differences == [None]
    assert comparison_table([tmp_path / "a.json", tmp_path / "b.json"]).splitlines() == [
        "task     metric                a       b  difference",
        "arc         acc  0.5000 ± 0.0100  0.7500     +0.2500",
        "arc   em,strict                –  1.0000           –",
    ]


HARNESS = {
    "results": {"arc": {"acc,none": 0.5}, "boolq": {"acc,none": 0.5}},
    "n-shot": {"arc": 5, "boolq": 0},
    "versions": {"arc": 1.0, "boolq": 2.0},
    "n-samples": {"arc": {"original": 9, "effective": 9}, "boolq": {"effective": 9}},
    "config": {"limit": None, "random_seed": 0, "fewshot_seed": 1234, "batch_size": 1},
    "xlstm7b": {"settings": {"tokenizer": "a" * 64, "chat_template": None}, "command": "x"},
}
PERPLEXITY = {
    "results": {"a.txt": {"loss,none": 0.5}},
    "perplexity": {"text_sha256": "c" * 64},
    "xlstm7b": {"settings": {"tokenizer": "a" * 64}},
}
RULER = {
    "results": {"vt": {"4096,none": 1.5}, "average": {"4096,none": 1.5}},
    "lengths": [4096],
    "samples": 500,
    "seed": 42,
    "tokenizer": "bytes",
    "haystack": "d" * 64,
}


def changed(content: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(content))
    *parents, last = path.split("/")
    found = copy
    for name in parents:
        found = found[name]
    found[last] = value
    return copy


@pytest.mark.parametrize(
    ("content", "path", "value", "said"),
    [
        (HARNESS, "config/limit", 100, "limit none and 100"),
        (HARNESS, "config/fewshot_seed", 1, "fewshot seed 1234 and 1"),
        (HARNESS, "n-shot/arc", 25, "few-shot examples of arc 5 and 25"),
        (
            HARNESS,
            "n-shot",
            {"arc": 0, "boolq": 1},
            "few-shot examples of arc 5 and 0, and of 1 more task",
        ),
        (HARNESS, "versions/boolq", 3, "version of boolq 2.0 and 3"),
        (HARNESS, "n-samples/arc/effective", 8, "number of questions of arc 9 and 8"),
        (HARNESS, "xlstm7b/settings/tokenizer", "bytes", "tokenizer aaaaaaaaaaaa and bytes"),
        (
            HARNESS,
            "xlstm7b/settings/chat_template",
            "b" * 64,
            "chat template none and bbbbbbbbbbbb",
        ),
        (PERPLEXITY, "perplexity/text_sha256", "e" * 64, "text cccccccccccc and eeeeeeeeeeee"),
        (RULER, "seed", 43, "seed 42 and 43"),
        (RULER, "samples", 50, "samples 500 and 50"),
        (RULER, "haystack", "e" * 64, "haystack dddddddddddd and eeeeeeeeeeee"),
        (RULER, "tokenizer", "a" * 64, "tokenizer bytes and aaaaaaaaaaaa"),
        (
            RULER,
            "results/cwe",
            {"4096,none": 2.5},
            "average over other tasks: only one of the files has cwe",
        ),
        (RULER, "results/cwe", {"8192,none": 2.5}, None),
        (HARNESS, "config/batch_size", 8, None),
        (HARNESS, "xlstm7b/command", "y", None),
        (HARNESS, "n-shot", {"other": 1}, None),
        (HARNESS, "config", None, None),
        (HARNESS, "xlstm7b", {}, None),  # written by lm_eval
    ],
)
def test_results_that_are_not_comparable_say_why(
    tmp_path: Path, content: dict[str, Any], path: str, value: Any, said: str | None
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"]
    for file, written in zip(files, (content, changed(content, path, value), content), strict=True):
        write_json(file, written)
    lines = comparison_table(files).splitlines()
    assert [line for line in lines if "comparable" in line] == (
        [] if said is None else [f"a and b are not comparable: {said}"]
    )


def test_a_limit_explains_the_number_of_questions(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", HARNESS)
    other = changed(changed(HARNESS, "config/limit", 2), "n-samples/arc/effective", 2)
    write_json(tmp_path / "b.json", other)
    assert setting_differences(tmp_path / "a.json", tmp_path / "b.json") == ["limit none and 2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a JSON file"),
        ("[]", 'is not a results file: it has no "results"'),
        ('{"results": {"arc": 1}}', "is not a results file: 'arc' has no metrics"),
        ('{"results": {}}', "none of these files contains a metric"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        compare([tmp_path / "a.json"] * 2)
