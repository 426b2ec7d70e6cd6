"""`xlstm7b eval`: tasks, perplexity and comparisons from the command line."""

import errno
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Cli, refused, succeeded
from harness_tasks import add_answered, add_choices, add_last_words, machine_info
from naive_scoring import save_byte_model

from xlstm7b.cli import main
from xlstm7b.config import ModelConfig
from xlstm7b.evaluate.scoring import Scorer
from xlstm7b.files import lock_folder
from xlstm7b.model import XLSTM


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("bytes") / "model")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", machine_info)


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
    assert lines[2:] == [
        "a and b are not comparable: limit none and 2; few-shot examples of choices 1 and 3"
    ]


@pytest.mark.usefixtures("offline")
def test_averages_of_a_leaderboard_are_printed_and_written(
    cli: Cli, byte_model: Path, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    names = ["arc_challenge", "hellaswag", "truthfulqa_mc2", "winogrande", "openbookqa", "piqa"]
    for name, questions in [*((name, 2) for name in names), ("mmlu_one", 1), ("mmlu_two", 3)]:
        add_choices(tasks, name, questions=questions, shots=0, words=3)
        with (tasks / f"{name}.yaml").open("r+") as file:
            text = file.read().replace("metric_list: [", "metric_list: [{metric: acc_norm}, ")
            file.seek(0)
            file.write(text)
    group = "group: mmlu\ntask: [mmlu_one, mmlu_two]\naggregate_metric_list: [{metric: acc}]\n"
    (tasks / "mmlu.yaml").write_text(group)
    output = tmp_path / "out.json"
    command = ["eval", byte_model, "--tasks", "leaderboard-v1", "--tasks-dir", tasks]
    command += ["--num-fewshot", 1, "--device", "cpu", "--output", output]
    code, out, _ = cli(*command)
    assert code == 0
    read = json.loads(output.read_text())
    subjects = [read["results"][name]["acc,none"] for name in ("mmlu_one", "mmlu_two")]
    assert read["results"]["mmlu"]["acc,none"] == (subjects[0] + 3 * subjects[1]) / 4
    rows = {row["name"]: row["score"] for row in read["xlstm7b"]["leaderboards"]["leaderboard-v1"]}
    assert rows["MMLU"] == 50 * sum(subjects)
    assert rows["HellaSwag"] == 100 * read["results"]["hellaswag"]["acc_norm,none"]
    assert out.splitlines()[-1].split() == ["average", "of", "all", f"{rows['average of all']:.2f}"]


class ClosedPipe(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        reader, self._writer = os.pipe()
        os.close(reader)

    def fileno(self) -> int:
        return self._writer

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.usefixtures("offline")
def test_a_closed_pipe_loses_no_results(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "tasks").mkdir()
    add_choices(tmp_path / "tasks", "choices", questions=2, shots=0, words=3)
    # The harness prints "bootstrapping …" itself for the error of a perplexity.
    add_last_words(tmp_path / "tasks", "words", ["so much depends", "upon a red"])
    (tmp_path / "a.txt").write_text("so much depends")
    for arguments, written in (
        (["eval", byte_model, "--tasks-dir", tmp_path / "tasks"], "a.json"),
        (["eval", "ppl", byte_model, tmp_path / "a.txt", "--plot", tmp_path / "a.png"], "b.json"),
    ):
        output = ["--output", tmp_path / written, "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["xlstm7b", *map(str, [*arguments, *output])])
        monkeypatch.setattr(sys, "stdout", ClosedPipe())
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert json.loads((tmp_path / written).read_text())["results"]
    assert (tmp_path / "a.png").exists()


@pytest.mark.usefixtures("offline")
def test_results_that_cannot_be_written_are_printed(
    cli: Cli, byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("so much depends")

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("xlstm7b.files.write_json", full)
    output = ["--output", tmp_path / "out.json", "--device", "cpu"]
    code, out, err = cli("eval", "ppl", byte_model, tmp_path / "a.txt", *output)
    assert (code, err) == (2, "xlstm7b: the disk is full\n")
    assert out.startswith("1 document, 15 tokens, 15 bytes\n")


@pytest.mark.usefixtures("offline")
def test_a_stopped_run_continues_and_logs_samples(
    cli: Cli, byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name in ("first", "second"):
        add_choices(tasks, name, questions=3, shots=1, words=3)
    add_answered(tasks, "third", {"alone": "no", "lonely": "no"})
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    command = ["eval", byte_model, "--tasks-dir", tasks, "--device", "cpu", "--batch-size", 2]
    command += ["--tasks", "first,second,third", "--log-samples"]
    assert cli(*command, "--output", whole).code == 0
    score, ran = Scorer.score, list[int]()

    def stopped(self: Scorer, requests: Any, *rest: Any) -> Any:
        ran.append(len(requests))
        if len(ran) == 2:
            raise KeyboardInterrupt
        return score(self, requests, *rest)

    monkeypatch.setattr(Scorer, "score", stopped)
    assert cli(*command, "--output", out).code != 0
    assert ran == [12, 12]
    kept = tmp_path / "out.json.unfinished"
    assert not out.exists()
    before = kept.read_bytes()
    kept.write_bytes(before + b'{"half')
    for options, message in (
        (["--limit", 2], "with limit none, not 2: use the same settings, or delete the file"),
        (["--num-fewshot", 2], "with num_fewshot none, not 2"),
        (["--dtype", "bfloat16"], "with dtype as stored, not bfloat16"),
    ):
        code, printed, err = cli(*command, "--output", out, *options)
        assert (code, printed) == (2, "")
        assert message in err.splitlines()[-1]
    third = ["--tasks", "third"]  # leaves out the first task, which is finished
    assert cli(*command, *third, "--output", out).code == 0
    assert kept.read_bytes().startswith(before)
    assert cli(*command, "--output", out).code == 0
    assert ran == [12, 12, 12]  # the second task only
    assert not kept.exists()
    results = [json.loads(file.read_text()) for file in (whole, out)]
    assert results[0]["results"] == results[1]["results"]
    for name in ("first", "second", "third"):
        files = [tmp_path / f"samples_{name}_{stem}.jsonl" for stem in ("whole", "out")]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert len(files[0].read_text().splitlines()) == 2
    assert json.loads(files[0].read_text().splitlines()[1])["doc"]["text"] == "lonely"
    assert "samples" not in results[0]


@pytest.mark.usefixtures("offline")
def test_only_one_process_writes_an_output(cli: Cli, byte_model: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    add_choices(tmp_path / "tasks", "choices", questions=2, shots=0, words=3)
    command = ["eval", byte_model, "--tasks-dir", tmp_path / "tasks", "--device", "cpu"]
    kept = tmp_path / "out.json.unfinished"
    kept.touch()
    with lock_folder(kept, "writing finished tasks to"):
        code, out, err = cli(*command, "--output", tmp_path / "out.json")
        assert (code, out, kept.read_bytes()) == (2, "", b"")
        said = f"xlstm7b: another process is writing finished tasks to {kept} right now"
        assert err.splitlines()[-1] == said
        assert cli(*command, "--output", tmp_path / "other.json").code == 0
    assert cli(*command, "--output", tmp_path / "out.json").code == 0
    assert not kept.exists()


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


def test_results_replace_only_results(cli: Cli, byte_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("so much depends upon a red wheel barrow")
    model = shutil.copytree(byte_model, tmp_path / "model")
    before = (model / "config.json").read_bytes()
    command = ["eval", "ppl", model, text, "--device", "cpu"]
    for name in ("config.json", "note.txt"):
        (model / "note.txt").write_text("a note")
        message = refused(cli(*command, "--output", model / name))
        assert message == f"{model / name} exists and holds no results: choose another file"
    assert ((model / "config.json").read_bytes(), (model / "note.txt").read_text()) == (
        before,
        "a note",
    )
    for _ in range(2):
        succeeded(cli(*command, "--output", tmp_path / "out.json"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/bad.yaml").write_text("task: [")
    message = refused(cli("eval", model, "--tasks-dir", tmp_path / "tasks", "--device", "cpu"))
    assert message.startswith(f"{tmp_path / 'tasks/bad.yaml'} is not a YAML file: while parsing")


def test_a_quantised_model_is_compared_with_its_source(
    cli: Cli, byte_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("so much depends upon a red wheel barrow " * 10)
    succeeded(cli("quantize", byte_model, tmp_path / "int8", "--bits", "8", "--device", "cpu"))
    command = ["eval", "ppl", tmp_path / "int8", tmp_path / "a.txt", "--device", "cpu"]
    written = ["--output", tmp_path / "out.json"]
    out = succeeded(cli(*command, "--reference", byte_model, *written))
    measured = json.loads((tmp_path / "out.json").read_text())["perplexity"]
    assert 0 < measured["kl"] < 0.01
    assert 0.9 < measured["top1_agreement"] <= 1
    assert f"beside the reference: KL {measured['kl']:.5f} nats per token" in out
    message = refused(cli(*command, "--reference", byte_model, "--load-state", "state"))
    assert message == "--reference cannot be combined with --peer or --load-state"
    small = tmp_path / "small"
    XLSTM(ModelConfig(32, 1, 2, vocab_size=384)).save_pretrained(small)
    message = refused(cli(*command, "--reference", small))
    assert message == (f"--reference {small} has a vocabulary of 384 tokens, the model has 320")


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
        (["compare", "a.json", "b.json"], "there is no results file a.json"),
        (["compare", "a.jsonl", "model"], "a.jsonl is not a results file"),
        (["compare", "model", "a.jsonl"], "there is no results file model"),
        (["model", "--tasks", "a", "--log-samples"], "--log-samples needs --output: its files are"),
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
        (["--num-fewshot", 6], "num_fewshot is 6, but the task 'choices' has 5 examples"),
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
    (tmp_path / "b.txt").write_text("a text")
    (tmp_path / "link").symlink_to(tmp_path / "b.txt")
    for output in ("b.txt", "link"):
        message = refused(cli("eval", "ppl", "a/hub-id", tmp_path, "--output", tmp_path / output))
        said = f"--output {tmp_path / output} is one of the texts to measure: choose another file"
        assert (message, (tmp_path / "b.txt").read_text()) == (said, "a text")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    message = refused(cli(*ppl, "--plot", tmp_path / "a.xyz"))
    assert message == f"cannot draw {tmp_path / 'a.xyz'}: a figure is a .png, .pdf or .svg file"
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
    Path("out.json").rename("out.html")
    code, _, err = cli("eval", "ppl", byte_model, ".", "--device", "cpu")
    assert (code, err) == (0, "read: 1 .txt\nleft out, of other types: 1 (out.html)\n")


def test_help_lists_the_commands(cli: Cli) -> None:
    code, out, _ = cli("eval", "--help")
    assert code == 0
    for command in ("run", "ppl", "compare", "ruler", "ruler-plot"):
        assert f" {command} " in out
