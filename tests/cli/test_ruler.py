"""`xlstm7b eval ruler`: from a checkpoint to answers, a table and a plot."""

import json
from pathlib import Path

import pytest
from checkpoint_files import names_in
from commands import Cli, refused, succeeded
from ruler_cases import write_datasets

from xlstm7b.files import lock_folder
from xlstm7b.generate import Generator

SMALL = ("--lengths", "1536,2048", "--samples", 2, "--tasks", "fwe,niah_single_1")


def test_a_run_writes_answers_and_is_not_repeated(
    cli: Cli, speller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    called = ("eval", "ruler", speller, *SMALL, "--output", folder, "--batch-size", 2)
    table = succeeded(cli(*called))
    assert [line.split() for line in table.splitlines()] == [
        ["1536", "2048"],
        ["fwe", "0.0", "0.0"],
        ["niah_single_1", "0.0", "0.0"],
        ["average", "0.0", "0.0"],
    ]
    assert names_in(folder) == {"scores.json", "1536", "2048"}
    for length in ("1536", "2048"):
        assert names_in(folder / length) == {"fwe.jsonl", "niah_single_1.jsonl"}
    generator = Generator.from_pretrained(speller)
    for line in map(json.loads, (folder / "1536" / "niah_single_1.jsonl").open()):
        (wanted,) = generator.generate([line["input"]], max_new_tokens=128, temperature=0)
        assert line["pred"] == wanted.text
        assert line["length"] == wanted.prompt_tokens - 1 + 128  # without the first token
        assert line["length"] <= 1536
    scores = json.loads((folder / "scores.json").read_text())
    assert (scores["seed"], scores["samples"], scores["lengths"]) == (42, 2, [1536, 2048])
    assert (scores["model"], scores["tokenizer"]) == (str(speller), "bytes")
    assert scores["version"] == "2025-01"
    assert scores["xlstm7b"]["model"]["fingerprint"] == scores["model_fingerprint"]
    assert "torch" in scores["xlstm7b"]["versions"]
    assert "ruler" in scores["xlstm7b"]["command"]

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded, although every sample has an answer")

    monkeypatch.setattr(Generator, "__init__", load)
    with lock_folder(folder, "answering in"):
        assert refused(cli(*called)) == f"another process is answering in {folder} right now"
    assert succeeded(cli(*called)) == table
    message = refused(cli(*called, "--seed", 1))
    assert message == f"{folder} holds a run with seed 42, not 1; choose another --output"
    message = refused(cli(*called, "--version", "2026-07"))
    assert message.startswith(f"{folder} holds a run with version 2025-01, not 2026-07; ")


def test_tasks_without_data_are_left_out_and_named(cli: Cli, speller: Path, tmp_path: Path) -> None:
    paths = write_datasets(tmp_path)
    options = {
        "--output": tmp_path / "run",
        "--lengths": 4096,
        "--samples": 1,
        "--haystack": paths["haystack"],
        "--hotpotqa": paths["hotpotqa"],
        "--tasks": "niah_single_2,qa_1,qa_2",
    }
    called = ("eval", "ruler", speller, *(part for option in options.items() for part in option))
    code, out, err = cli(*called)
    assert code == 0
    assert err.endswith("qa_1 is left out: no --squad is given\n")
    splitter = json.loads((tmp_path / "run" / "scores.json").read_text())["sentences"]
    assert ("python -m nltk.downloader punkt_tab\n" in err) == (splitter == "simple")
    lines = [line.split() for line in out.splitlines()]
    assert lines[1:5] == [
        ["niah_single_2", "0.0"],
        ["qa_1", "–"],
        ["qa_2", "0.0"],
        ["average", "0.0"],
    ]
    assert out.splitlines()[5] == "– qa_1 is not in the average: no --squad is given"
    code, table, _ = cli(*called, "--squad", paths["squad"])
    assert (code, "–" in table) == (0, False)


def test_scores_are_drawn(cli: Cli, speller: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    called = ("eval", "ruler", speller, "--lengths", 1024, "--samples", 1, "--tasks", "fwe")
    succeeded(cli(*called, "--output", tmp_path / "run", "--plot"))
    assert (tmp_path / "run" / "ruler.png").read_bytes().startswith(b"\x89PNG")
    scores, drawn = tmp_path / "run" / "scores.json", tmp_path / "both.png"
    printed = succeeded(cli("eval", "ruler-plot", scores, scores, "--output", drawn))
    assert printed == f"wrote {drawn}\n"
    assert drawn.read_bytes().startswith(b"\x89PNG")
    newer = tmp_path / "newer" / "scores.json"
    succeeded(cli(*called, "--output", newer.parent, "--version", "2026-07"))
    drawn.unlink()
    message = refused(cli("eval", "ruler-plot", scores, newer, "--output", drawn))
    assert message == (
        f"{scores} has scores of RULER 2025-01, {newer} of 2026-07: draw each version by itself"
    )
    assert not drawn.exists()
    (tmp_path / "other.json").write_text("{}")
    message = refused(cli("eval", "ruler-plot", tmp_path / "other.json", "--output", drawn))
    assert message == f'{tmp_path / "other.json"} is not a results file: it has no "results"'
    (tmp_path / "other.json").write_text('{"results": {"ppl": {"loss,none": 1}}}')
    message = refused(cli("eval", "ruler-plot", scores, tmp_path / "other.json"))
    assert message == f"{tmp_path / 'other.json'} has no RULER scores"


def test_wrong_arguments_are_refused_before_a_download(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object) -> None:
        raise AssertionError("the model was downloaded")

    monkeypatch.setattr("xlstm7b.checkpoint.resolve", download)
    for options, message in (
        (("--tasks", "niah"), "RULER has no task 'niah'"),
        (("--haystack", tmp_path / "nothing"), f"there is no file {tmp_path / 'nothing'}"),
    ):
        outcome = cli("eval", "ruler", "a/hub-id", "--output", tmp_path / "run", *options)
        assert refused(outcome).startswith(message)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", "niah"), "RULER has no task 'niah'; its tasks: niah_single_1, niah_single_2"),
        (("--version", "2024"), "RULER's version must be 2025-01 or 2026-07, not '2024'"),
        (("--peer", "HERE"), "give either a model or --peer FOLDER"),
        (("--english-words", "HERE/list"), "HERE/list is not a JSON object of words, like RULER's"),
        (("--lengths", "4k"), "--lengths must be numbers such as 4096,8192, not '4k'"),
        (
            ("--lengths", "256"),
            "a length of 256 is too short for fwe: the shortest prompt has 469 tokens, and "
            "256 are left for it",
        ),
        (("--lengths", "1", "--tasks", "niah_single_1"), "a length of 1 is too short for niah_si"),
        (("--seed", -1), "the seed must be from 0 to 4294967295, not -1"),
        (("--samples", 0), "the number of samples must be at least 1, not 0"),
        (("--batch-size", 0), "batch_size must be at least 1, not 0"),
        (("--tasks", "qa_1"), "none of these tasks can be run: no --squad is given"),
        (("--squad", "HERE/nothing.json"), "there is no file HERE/nothing.json"),
        (("--squad", "HERE/text"), "HERE/text is not a JSON file of SQuAD v2: Expecting"),
        (("--squad", "HERE"), "HERE is a folder, not a file"),
        (
            ("--squad", "HERE/object"),
            "HERE/object is not a JSON file of SQuAD v2: it has no field 'data'",
        ),
        (("--hotpotqa", "HERE/list"), "HERE/list is not a JSON file of HotpotQA"),
        (("--hotpotqa", "HERE/empty"), "HERE/empty contains no question with an answer"),
        (("--haystack", "HERE/blank"), "HERE/blank contains no words"),
        (("--haystack", "HERE/binary"), "HERE/binary is not UTF-8 text: "),
        (("--output", "HERE"), "HERE has files, but not of a RULER run; choose another --output"),
        (("--output", "HERE/text"), "HERE/text is a file, not a folder; choose another --output"),
        (("--output", "HERE/text/run"), "cannot write HERE/text/run: HERE/text is not a folder"),
    ],
)
def test_wrong_arguments_are_refused_before_weights_are_loaded(
    cli: Cli, speller: Path, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    files = {"text": b"x", "list": b"[1]", "empty": b"[]", "blank": b" \n", "binary": b"\xff\xfe"}
    files["object"] = b"{}"
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    given = [str(option).replace("HERE", str(tmp_path)) for option in options]
    outcome = cli("eval", "ruler", speller, "--output", tmp_path / "run", *SMALL, *given)
    said = refused(outcome)
    assert said.startswith(message.replace("HERE", str(tmp_path)))
    assert " and -" not in said  # no negative room
    assert not (tmp_path / "run").exists()
