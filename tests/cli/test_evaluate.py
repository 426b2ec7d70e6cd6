"""`xlstm7b eval`: tasks, perplexity and comparisons from the command line."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from commands import Cli, refused, succeeded
from harness_tasks import add_choices
from naive_scoring import save_byte_model


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("bytes") / "model")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("offline")
def test_results_of_tasks_can_be_compared(cli: Cli, byte_model: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    add_choices(tmp_path / "tasks", "choices", questions=4, shots=1, words=3)
    common = ["--tasks-dir", tmp_path / "tasks", "--device", "cpu"]
    first = ["--output", tmp_path / "a.json", "--batch-size", 2]
    code, out, _ = cli("eval", "--tasks", "choices", byte_model, *common, *first)
    assert code == 0
    assert "|choices|" in out
    second = ["--limit", 2, "--num-fewshot", 3, "--output", tmp_path / "b.json"]
    code, _, _ = cli("eval", "run", byte_model, *common, *second)
    assert code == 0
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert (a["n-shot"]["choices"], b["n-shot"]["choices"]) == (1, 3)
    assert [x["n-samples"]["choices"]["effective"] for x in (a, b)] == [4, 2]
    assert a["config"]["model"] == "xlstm7b"
    assert a["config"]["batch_size"] == 2
    assert a["xlstm7b"]["model"] == b["xlstm7b"]["model"]
    assert a["xlstm7b"]["command"].startswith("xlstm7b eval --tasks choices")
    lines = succeeded(cli("eval", "compare", tmp_path / "a.json", tmp_path / "b.json")).splitlines()
    accuracies = [x["results"]["choices"]["acc,none"] for x in (a, b)]
    assert lines[0].split() == ["task", "metric", "a", "b", "difference"]
    assert lines[1].split()[:3] == ["choices", "acc", f"{accuracies[0]:.4f}"]
    assert lines[1].endswith(f"{accuracies[1] - accuracies[0]:+.4f}")


def test_perplexity_is_printed_written_and_drawn(
    cli: Cli, byte_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "a.txt").write_text("so much depends upon a red wheel barrow " * 10)
    (tmp_path / "b.jsonl").write_text('{"text": "glazed with rain water"}\n')
    texts = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    options = ["--output", tmp_path / "out.json", "--plot", tmp_path / "out.png", "--device", "cpu"]
    out = succeeded(cli("eval", "ppl", byte_model, *texts, *options))
    read = json.loads((tmp_path / "out.json").read_text())
    measured = read["perplexity"]
    assert (measured["documents"], measured["tokens"]) == (2, 422)
    assert out.splitlines()[0] == "2 documents, 422 tokens, 422 bytes"
    assert f"loss {measured['loss']:.4f} nats per token" in out
    assert out.splitlines()[2].split() == ["position", "tokens", "loss", "perplexity"]
    rows = [line.split() for line in out.splitlines()[3:]]
    assert [row[:2] for row in rows] == [["0–127", "150"], ["128–255", "128"], ["256–511", "144"]]
    assert [row[2] for row in rows] == [f"{bucket['loss']:.4f}" for bucket in measured["buckets"]]
    assert read["results"]["a.txt, b.jsonl"]["loss,none"] == measured["loss"]
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "no tasks are given; use --tasks NAME,NAME or --tasks-dir FOLDER"),
        (
            ["model", "--tasks", "a", "--batch-size", "0"],
            "--batch-size must be auto or at least 1, not 0",
        ),
        (["model", "--tasks", "a", "--limit", "0"], "--limit must be at least 1, not 0"),
        (["model", "--tasks", "a", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["model", "--tasks", "a", "--output", "no/a.json"], "there is no folder "),
        (["nowhere", "--tasks", "a"], "'nowhere' is neither a folder nor"),
        (["ppl", "model", "nothing.txt"], "there is no file or folder nothing.txt"),
        (["ppl", "model", "a.jsonl", "--column", "body"], "the column 'body' is missing"),
        (["compare", "a.jsonl"], "there is nothing to compare; give at least two results files"),
        (["compare", "a.jsonl", "a.jsonl"], "a.jsonl is not a results file"),
        (["compare", "a.json", "b.json"], "No such file or directory: 'a.json'"),
    ],
)
def test_wrong_arguments_are_refused_before_weights_are_loaded(
    cli: Cli,
    byte_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(byte_model, "model")
    Path("a.jsonl").write_text('{"text": "a"}\n')
    assert message in refused(cli("eval", *arguments))


@pytest.mark.usefixtures("offline", "no_weights")
def test_a_missing_folder_of_tasks_is_refused(cli: Cli, byte_model: Path, tmp_path: Path) -> None:
    code, _, err = cli("eval", byte_model, "--tasks-dir", tmp_path / "no")
    assert (code, err) == (2, f"xlstm7b: the tasks folder {tmp_path / 'no'} does not exist\n")


@pytest.mark.usefixtures("offline", "no_weights")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-fewshot", 6], "6 examples are too many for the task 'choices': it has 5"),
        (["--apply-chat-template"], "model has no chat template; leave --apply-chat-template out"),
    ],
)
def test_wrong_options_for_tasks_are_refused(
    cli: Cli, byte_model: Path, tmp_path: Path, options: list[object], message: str
) -> None:
    add_choices(tmp_path, "choices", questions=2, shots=1, words=3)
    code, _, err = cli("eval", byte_model, "--tasks-dir", tmp_path, *options)
    assert code == 2
    assert err.splitlines()[-1].endswith(message)


@pytest.mark.usefixtures("offline", "no_weights")
def test_a_missing_package_of_a_task_is_named(
    cli: Cli, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness raises an error that says what to install but has no module name."""

    def load(*_: object) -> None:
        raise ModuleNotFoundError("`math-verify` is required.   Please install it")

    monkeypatch.setattr("xlstm7b.evaluate.harness.load_tasks", load)
    code, _, err = cli("eval", byte_model, "--tasks", "leaderboard-v2")
    assert (code, err) == (2, "xlstm7b: `math-verify` is required. Please install it\n")


def test_files_with_equal_names_are_shown_by_path(cli: Cli, tmp_path: Path) -> None:
    paths = [tmp_path / name / "scores.json" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text('{"results": {"vt": {"4096,none": 1.5}}}')
    heading = succeeded(cli("eval", "compare", *paths)).splitlines()[0]
    assert heading.split() == ["task", "metric", *map(str, paths), "difference"]


@pytest.mark.usefixtures("no_weights")
def test_texts_are_checked_before_the_model_is_loaded(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    ppl = ("eval", "ppl", "a/hub-id", tmp_path / "a.jsonl")
    assert refused(cli(*ppl)) == "there is no text to measure"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refused(cli(*ppl, "--plot", tmp_path / "a.png"))
    assert message == "drawing a figure needs matplotlib: pip install matplotlib"


def test_results_are_named_after_the_folder(
    cli: Cli, byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("so much")
    monkeypatch.chdir(tmp_path)
    succeeded(cli("eval", "ppl", byte_model, ".", "--output", "out.json", "--device", "cpu"))
    assert next(iter(json.loads(Path("out.json").read_text())["results"])) == tmp_path.name


def test_help_lists_the_commands(cli: Cli) -> None:
    code, out, _ = cli("eval", "--help")
    assert code == 0
    for command in ("run", "ppl", "compare", "ruler", "ruler-plot"):
        assert f" {command} " in out
