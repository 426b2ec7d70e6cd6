"""`xlstm7b eval`: tasks, perplexity and comparisons from the command line."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from cli.commands import Cli, refused, succeeded
from naive import save_byte_model
from tasks import add_choices


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
def test_tasks_then_compared(cli: Cli, byte_model: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    add_choices(tmp_path / "tasks", "choices", questions=4, shots=1, words=3)
    common = ["--tasks-dir", tmp_path / "tasks", "--device", "cpu"]
    code, out, _ = cli("eval", "--tasks", "choices", byte_model, *common,
                       "--output", tmp_path / "a.json", "--batch-size", 2)  # fmt: skip
    assert code == 0
    assert "|choices|" in out
    code, _, _ = cli("eval", "run", byte_model, *common, "--limit", 2, "--num-fewshot", 3,
                     "--output", tmp_path / "b.json")  # fmt: skip
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


def test_perplexity(cli: Cli, byte_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "a.txt").write_text("so much depends upon a red wheel barrow " * 10)
    (tmp_path / "b.jsonl").write_text('{"text": "glazed with rain water"}\n')
    out = succeeded(cli("eval", "ppl", byte_model, tmp_path / "a.txt", tmp_path / "b.jsonl",
                        "--output", tmp_path / "out.json", "--plot", tmp_path / "out.png",
                        "--device", "cpu"))  # fmt: skip
    read = json.loads((tmp_path / "out.json").read_text())
    measured = read["perplexity"]
    assert (measured["documents"], measured["tokens"]) == (2, 422)
    assert out.splitlines()[0] == "2 documents, 422 tokens, 422 bytes"
    assert f"loss {measured['loss']:.4f} nats a token" in out
    assert [line.split()[:3] for line in out.splitlines()[3:]] == [
        ["0", "127", "150"], ["128", "255", "128"], ["256", "511", "144"],
    ]  # fmt: skip
    assert read["results"]["a.txt, b.jsonl"]["loss,none"] == measured["loss"]
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model"], "no task is given: --tasks NAME,… or --tasks-dir FOLDER"),
        (["model", "--tasks", "a", "--batch-size", "0"], "--batch-size must be auto or at least 1"),
        (["model", "--tasks", "a", "--limit", "0"], "--limit must be at least 1, not 0"),
        (["model", "--tasks", "a", "--dtype", "int8"], "there is no dtype 'int8' here"),
        (["model", "--tasks", "a", "--output", "no/a.json"], "there is no folder "),
        (["nowhere", "--tasks", "a"], "there is no folder 'nowhere'"),
        (["ppl", "model", "nothing.txt"], "there is no file or folder nothing.txt"),
        (["ppl", "model", "a.jsonl", "--column", "body"], "there is no column 'body'"),
        (["compare", "a.jsonl"], "give two or more results files"),
        (["compare", "a.jsonl", "a.jsonl"], "a.jsonl is not a results file"),
        (["compare", "a.json", "b.json"], "No such file or directory: 'a.json'"),
    ],
)
def test_mistakes(
    cli: Cli, byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], sentence: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    shutil.copytree(byte_model, "model")
    Path("a.jsonl").write_text('{"text": "a"}\n')
    assert sentence in refused(cli("eval", *arguments))


@pytest.mark.usefixtures("offline", "no_weights")
def test_no_folder_of_tasks(cli: Cli, byte_model: Path, tmp_path: Path) -> None:
    code, _, err = cli("eval", byte_model, "--tasks-dir", tmp_path / "no")
    assert (code, err) == (2, f"xlstm7b: there is no folder {tmp_path / 'no'} of tasks\n")


@pytest.mark.usefixtures("offline", "no_weights")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--num-fewshot", 6], "choices has 5 examples, not the 6 asked for"),
        (["--apply-chat-template"], "model holds no chat template to apply"),
    ],
)
def test_mistakes_with_tasks(
    cli: Cli, byte_model: Path, tmp_path: Path, options: list[object], sentence: str
) -> None:
    add_choices(tmp_path, "choices", questions=2, shots=1, words=3)
    code, _, err = cli("eval", byte_model, "--tasks-dir", tmp_path, *options)
    assert code == 2
    assert err.splitlines()[-1].endswith(sentence)


@pytest.mark.usefixtures("offline", "no_weights")
def test_a_package_that_a_task_needs(
    cli: Cli, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness's own check says what to install, and names no module."""

    def load(*_: object) -> None:
        raise ModuleNotFoundError("`math-verify` is required.   Please install it")

    monkeypatch.setattr("xlstm7b.evaluate.harness.load_tasks", load)
    code, _, err = cli("eval", byte_model, "--tasks", "leaderboard-v2")
    assert (code, err) == (2, "xlstm7b: `math-verify` is required. Please install it\n")


def test_files_of_one_name_are_told_apart(cli: Cli, tmp_path: Path) -> None:
    paths = [tmp_path / name / "scores.json" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text('{"results": {"vt": {"4096,none": 1.5}}}')
    heading = succeeded(cli("eval", "compare", *paths)).splitlines()[0]
    assert heading.split() == ["task", "metric", *map(str, paths), "difference"]


@pytest.mark.usefixtures("no_weights")
def test_texts_are_looked_at_before_the_model(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    ppl = ("eval", "ppl", "a/hub-id", tmp_path / "a.jsonl")
    assert refused(cli(*ppl)) == "there is no text to measure"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib" in refused(cli(*ppl, "--plot", tmp_path / "a.png"))


def test_a_folder_is_named_by_its_own_name(
    cli: Cli, byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("so much")
    monkeypatch.chdir(tmp_path)
    succeeded(cli("eval", "ppl", byte_model, ".", "--output", "out.json", "--device", "cpu"))
    assert next(iter(json.loads(Path("out.json").read_text())["results"])) == tmp_path.name


def test_help(cli: Cli) -> None:
    code, out, _ = cli("eval", "--help")
    assert code == 0
    for command in ("run", "ppl", "compare", "ruler"):
        assert f" {command} " in out
