"""Results files: what they say about a run, and how they compare."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import save_small

from xlstm7b.checkpoint import open_checkpoint, save_checkpoint
from xlstm7b.evaluate.results import (
    Metric,
    comparison_table,
    fingerprint,
    read_metrics,
    run_info,
)
from xlstm7b.files import write_json


def results(**metrics: Any) -> dict[str, Any]:
    return {"results": {"arc": {"alias": "arc", "sample_len": 4, **metrics}}}


def test_fingerprints_differ_between_models(tmp_path: Path) -> None:
    folder, tensors = save_small(tmp_path)
    first = fingerprint(folder)
    assert first["folder"] == str(folder)
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
    write_json(tmp_path / "out.json", {**given, "xlstm7b": run_info(fingerprint(folder))})
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["results"]["arc"]["acc,none"] == 0.5
    info = read["xlstm7b"]
    assert info["command"] == "xlstm7b eval 'a b' --tasks arc"
    assert info["model"] == fingerprint(folder)
    packages = ("xlstm7b", "torch", "triton", "tokenizers", "lm_eval", "datasets", "transformers")
    installed = {name for name in packages if find_spec(name)}
    assert info["versions"].keys() == {"python", *installed}
    assert "settings" not in info
    assert run_info({}, limit=None)["settings"] == {"limit": None}
    assert info["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.json"]


def test_files_are_compared_with_the_first(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", results(**{"acc,none": 0.5, "acc_stderr,none": 0.01}))
    other = results(**{"acc,none": 0.75, "acc_stderr,none": "N/A", "em,strict": 1, "x": True})
    write_json(tmp_path / "b.json", other)
    assert read_metrics(tmp_path / "a.json") == {("arc", "acc"): Metric(0.5, 0.01)}
    assert read_metrics(tmp_path / "b.json") == {
        ("arc", "acc"): Metric(0.75, None),
        ("arc", "em,strict"): Metric(1, None),
    }
    assert comparison_table([tmp_path / "a.json", tmp_path / "b.json"]).splitlines() == [
        "task     metric                a       b  difference",
        "arc         acc  0.5000 ± 0.0100  0.7500     +0.2500",
        "arc   em,strict                –  1.0000           –",
    ]


SEEDS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
HARNESS = {
    "results": {"arc": {"acc,none": 0.5}, "boolq": {"acc,none": 0.5}},
    "n-shot": {"arc": 5, "boolq": 0},
    "versions": {"arc": 1.0, "boolq": 2.0},
    "n-samples": {"arc": {"original": 9, "effective": 9}, "boolq": {"effective": 9}},
    "config": {"limit": None, "batch_size": 1, **dict.fromkeys(SEEDS, 1234)},
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
    "tasks": ["vt"],
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
        *((HARNESS, f"config/{name}", 1, f"{name.replace('_', ' ')} 1234 and 1") for name in SEEDS),
        (HARNESS, "n-shot/arc", 25, "few-shot examples of arc 5 and 25"),
        (
            HARNESS,
            "n-shot",
            {"arc": 0, "boolq": 1},
            "few-shot examples of arc 5 and 0; few-shot examples of boolq 0 and 1",
        ),
        (HARNESS, "versions/boolq", 3, "version of boolq 2.0 and 3"),
        (HARNESS, "n-samples/arc/effective", 8, "questions of arc 9 and 8"),
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
            "tasks",
            ["cwe", "vt"],
            "tasks vt and cwe, vt",
        ),
        (RULER, "results/vt", {"8192,none": 2.5}, None),
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


def said(tmp_path: Path, other: dict[str, Any]) -> str:
    for name, content in (("a.json", HARNESS), ("b.json", other)):
        write_json(tmp_path / name, content)
    *_, last = comparison_table([tmp_path / "a.json", tmp_path / "b.json"]).splitlines()
    return last.removeprefix("a and b are not comparable: ")


def test_a_limit_explains_the_number_of_questions(tmp_path: Path) -> None:
    other = changed(changed(HARNESS, "config/limit", 2), "n-samples/arc/effective", 2)
    assert said(tmp_path, other) == "limit none and 2"


def test_three_differences_are_shown(tmp_path: Path) -> None:
    other = changed(HARNESS, "versions", {"arc": 7, "boolq": 7})
    other = changed(other, "n-shot", {"arc": 7, "boolq": 0})
    three = "few-shot examples of arc 5 and 7; version of arc 1.0 and 7; version of boolq 2.0 and 7"
    assert said(tmp_path, other) == three
    other = changed(other, "config/limit", 9)
    assert said(tmp_path, other).startswith("limit none and 9; few-shot")
    assert said(tmp_path, other).endswith("; 1 more difference")


def test_the_chat_template_of_lm_eval_is_compared(tmp_path: Path) -> None:
    other = changed(HARNESS, "chat_template_sha", "b" * 64)
    del other["xlstm7b"]
    assert said(tmp_path, other) == "chat template none and bbbbbbbbbbbb"


def test_files_with_equal_names_are_shown_by_path(tmp_path: Path) -> None:
    paths = [tmp_path / name / "scores.json" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        write_json(path, RULER)
    heading = comparison_table(paths).splitlines()[0]
    assert heading.split() == ["task", "metric", *map(str, paths), "difference"]
