"""bench: options, what is refused, and what is written."""

import json
import sys
from pathlib import Path

import pytest
import torch
from commands import Cli, refused, write_config
from live_server import serving
from models import spelling_model

from xlstm7b.bench.plans import BENCHMARKS
from xlstm7b.config import SIZES, ModelConfig
from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer


@pytest.mark.parametrize("subject", BENCHMARKS)
def test_every_benchmark_has_help(cli: Cli, subject: str) -> None:
    code, out, _ = cli("bench", subject, "--help")
    assert code == 0
    assert (BENCHMARKS[subject].__doc__ or "").splitlines()[0][:40] in out
    for name in ("--json", "--plot"):
        assert name in out


def test_help_of_training_names_all_parts_of_a_case(cli: Cli) -> None:
    out = cli("bench", "training", "--help").out
    for part in ("BATCHxLENGTH", "xMICRO_BATCHES", ":block", ":selective"):
        assert part in out


def test_zero_is_a_value_and_not_the_default(cli: Cli) -> None:
    for option in ("rate", "seconds"):
        message = refused(cli("bench", "serve", "http://127.0.0.1:9", f"--{option}", 0))
        assert message == f"{option} must be above 0, not 0"


@pytest.mark.parametrize("option", ["streams", "requests", "prompt-tokens"])
def test_an_option_of_0_is_not_replaced_by_the_default(cli: Cli, option: str) -> None:
    said = refused(cli("bench", "engine", "--device", "cpu", f"--{option}", 0))
    assert said == f"{option.replace('-', '_')} must be at least 1, not 0"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_bench_kernels_without_a_gpu(cli: Cli) -> None:
    assert refused(cli("bench", "kernels")) == "there is no CUDA GPU here"
    assert refused(cli("bench", "kernels", "--peers", "x")).startswith("unknown peer 'x'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "1,x"], "'1,x' is not a list of numbers such as 1,8,64"),
        (["--size", "8b"], f"unknown model size '8b'; choose from {', '.join(SIZES)}"),
        (
            ["--json", "/nowhere/at/all.json"],
            "cannot write /nowhere/at/all.json: there is no folder /nowhere/at",
        ),
    ],
)
def test_mistakes_are_one_sentence(cli: Cli, arguments: list[str], message: str) -> None:
    assert refused(cli("bench", "generation", "--device", "cpu", *arguments)) == message


def test_a_wrong_draft_model_is_refused_first(cli: Cli, tmp_path: Path) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    spelling_model("abc").save_pretrained(model)
    write_config(draft, ModelConfig(64, 1, 1, vocab_size=384))
    options = ("--device", "cpu", "--parts", "memory,speculation", "--folder", model)
    assert refused(cli("bench", "generation", *options, "--draft", draft)) == (
        f"{draft} cannot be the draft model: the draft model has a vocabulary of 384 tokens, the "
        "model one of 320: a draft model needs the same"
    )


def test_a_missing_package_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "xlstm7b.bench.kernels", raising=False)
    monkeypatch.delattr("xlstm7b.bench.kernels", raising=False)
    assert (
        refused(cli("bench", "kernels"))
        == "this command needs the package triton, which is not installed"
    )


def test_bench_engine_records_its_command(cli: Cli, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--streams", "2", "--requests", "3", "--prompt-tokens", "5"]
    options += ["--new-tokens", "2-4", "--prefill-tokens", "16,32", "--parts", "streams"]
    code, out, _ = cli("bench", "engine", *options, "--json", tmp_path / "engine.json")
    assert code == 0
    assert "concurrent requests" in out
    document = json.loads((tmp_path / "engine.json").read_text())
    command = document["command"].removeprefix("xlstm7b bench engine ").split()
    pairs = zip(options[::2], options[1::2], strict=True)
    assert dict(zip(command[::2], command[1::2], strict=True)) == dict(pairs)
    assert document["plan"]["prefill_tokens"] == [16, 32]
    assert [row["prefill_tokens"] for row in document["results"]] == [16, 32]
    assert str(tmp_path) not in json.dumps(document)


def test_bench_loader(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("so much depends upon a red wheel barrow " * 40)
    assert cli("prepare", tmp_path / "text.txt", "--output", tmp_path / "data")[0] == 0
    options = ["--lengths", "16,32", "--batches", "4", "--seconds", "0.05"]
    code, out, _ = cli("bench", "loader", tmp_path / "data", *options)
    rows = [line.split() for line in out.splitlines() if line.startswith(("windows", "best-fit"))]
    assert code == 0
    assert [row[:3] for row in rows] == [
        ["windows", "16", "4"],
        ["windows", "32", "4"],
        ["best-fit", "16", "4"],
        ["best-fit", "32", "4"],
    ]
    assert all(float(row[3].replace(",", "")) > 100 for row in rows)
    assert "no folder" in refused(cli("bench", "loader", tmp_path / "nowhere"))


def test_bench_serve_where_nobody_answers(cli: Cli) -> None:
    load = ["--rate", "20", "--seconds", "0.3"]
    with serving(Generator(spelling_model("ab"), ByteTokenizer()), keys=("key",)) as live:
        code, out, _ = cli("bench", "serve", live.url, *load, "--api-key", "another")
        assert code == 1
        assert "status 401" in out
    message = refused(cli("bench", "serve", live.url, *load))
    assert message.startswith(f"{live.url} does not answer: ")
