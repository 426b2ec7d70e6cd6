"""`xlstm7b eval`: tasks, perplexity, RULER and comparisons from the command line."""

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import names_in
from commands import Cli, refused, succeeded, write_config
from harness_tasks import add_answered, add_choices, add_last_words, machine_info
from naive_scoring import save_byte_model
from ruler_cases import write_datasets

from xlstm7b.cli import main
from xlstm7b.config import ModelConfig
from xlstm7b.evaluate.scoring import Scorer
from xlstm7b.files import lock_folder
from xlstm7b.generate import Generator


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
    kept.write_bytes(before + b'["half')
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


@pytest.mark.usefixtures("no_weights", "offline")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("MODEL", "--tasks NAME,NAME or --tasks-dir FOLDER"),
        ("MODEL --tasks a --batch-size 0", "--batch-size must be auto or at least 1, not 0"),
        ("MODEL --tasks a --limit 0", "--limit must be at least 1, not 0"),
        ("MODEL --tasks a --num-fewshot -1", "--num-fewshot must be at least 0, not -1"),
        ("MODEL --tasks a --dtype int8", "'int8'"),
        ("MODEL --tasks a --output no/a.json", "no folder"),
        ("MODEL --tasks a --output a.jsonl", "a.jsonl exists and holds no results"),
        ("MODEL --tasks a --log-samples", "--log-samples needs --output"),
        ("MODEL --tasks-dir no", "tasks folder no"),
        ("MODEL --tasks-dir tasks --apply-chat-template", "--apply-chat-template"),
        ("MODEL --tasks-dir tasks --num-fewshot 6", "num_fewshot is 6"),
        ("nowhere --tasks a", "'nowhere'"),
        ("runn MODEL", "eval runn"),
        ("ppl MODEL nothing.txt", "nothing.txt"),
        ("ppl MODEL a.jsonl --column body", "'body'"),
        ("ppl MODEL empty.jsonl", "no text"),
        ("ppl MODEL b.txt --output b.txt", "--output b.txt is one of the texts"),
        ("ppl MODEL b.txt --output link", "--output link is one of the texts"),
        ("ppl MODEL b.txt --output MODEL/config.json", "config.json exists and holds no results"),
        ("ppl MODEL b.txt --plot a.xyz", "a.xyz"),
        ("ppl MODEL b.txt --reference MODEL --load-state a", "--reference cannot be combined with"),
        ("ppl MODEL b.txt --reference other", "--reference other has a vocabulary of 384"),
        ("compare a.jsonl", "at least two results files"),
        ("compare a.jsonl a.jsonl", "a.jsonl is not a results file"),
        ("compare a.json b.json", "a.json"),
        ("ruler a/hub-id --output run --tasks niah", "'niah'"),
        ("ruler a/hub-id --output run --lengths 4k", "--lengths must be numbers"),
        ("ruler a/hub-id --output run --seed -1", "the seed"),
        ("ruler a/hub-id --output run --samples 0", "samples must be at least 1, not 0"),
        ("ruler a/hub-id --output run --squad nothing", "nothing"),
        ("ruler a/hub-id --output run --haystack binary", "binary is not UTF-8 text"),
        ("ruler MODEL --output run --tasks qa_1", "no --squad"),
        ("ruler MODEL --output run --lengths 256 --tasks fwe", "256 is too short for fwe"),
        ("ruler MODEL --output run --batch-size 0", "batch_size must be at least 1, not 0"),
        ("ruler MODEL --output tasks --tasks fwe", "tasks has files, but not of a RULER run"),
        ("ruler MODEL --output b.txt --tasks fwe", "b.txt is a file"),
        ("ruler MODEL --output b.txt/run --tasks fwe", "b.txt is not a folder"),
        ("ruler-plot results.json", "results.json has no RULER scores"),
        ("ruler-plot a.jsonl", "a.jsonl is not a results file"),
    ],
)
def test_wrong_arguments_are_refused_before_weights_are_loaded(
    cli: Cli,
    byte_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("MODEL").symlink_to(byte_model)
    Path("a.jsonl").write_text('{"text": "a"}\n')
    Path("empty.jsonl").write_text('{"text": ""}\n')
    Path("b.txt").write_text("a text")
    Path("link").symlink_to("b.txt")
    Path("binary").write_bytes(b"\xff\xfe")
    Path("results.json").write_text('{"results": {"ppl": {"loss,none": 1}}}')
    Path("tasks").mkdir()
    add_choices(Path("tasks"), "choices", questions=2, shots=1, words=3)
    write_config(Path("other"), ModelConfig(32, 1, 2, vocab_size=384))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, out, err = cli("eval", *arguments.split())
    assert (code, out) == (2, "")
    assert named in err.splitlines()[-1]  # the harness may print more above
    assert {path: path.read_bytes() for path in before} == before
    assert not Path("run").exists()


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


def test_a_missing_matplotlib_is_named(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments in (
        ("ppl", "a/hub-id", tmp_path, "--plot", tmp_path / "a.png"),
        ("ruler", "a/hub-id", "--output", tmp_path / "run", "--plot"),
    ):
        message = refused(cli("eval", *arguments))
        assert message == "drawing a figure needs matplotlib: pip install 'xlstm7b[train]'"


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


# RULER

SMALL = ("--lengths", "1536,2048", "--samples", 2, "--tasks", "fwe,niah_single_1")


def test_a_ruler_run_writes_answers_and_is_not_repeated(
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
    assert scores["versions"]["fwe"] == "2025-01"
    assert scores["tasks"] == ["fwe", "niah_single_1"]
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


def test_ruler_scores_are_drawn(cli: Cli, speller: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    called = ("eval", "ruler", speller, "--lengths", 1024, "--samples", 1, "--tasks", "fwe")
    succeeded(cli(*called, "--output", tmp_path / "run", "--plot"))
    assert (tmp_path / "run" / "ruler.png").read_bytes().startswith(b"\x89PNG")
    scores, drawn = tmp_path / "run" / "scores.json", tmp_path / "both.png"
    printed = succeeded(cli("eval", "ruler-plot", scores, scores, "--output", drawn))
    assert printed == f"wrote {drawn}\n"
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_help_lists_the_commands(cli: Cli) -> None:
    code, out, _ = cli("eval", "--help")
    assert code == 0
    for command in ("run", "ppl", "compare", "ruler", "ruler-plot"):
        assert f" {command} " in out
