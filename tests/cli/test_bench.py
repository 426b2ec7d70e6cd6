"""bench: options, what is refused, and one small run of every subject."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Cli, refused
from live_server import serving
from models import spelling_model

from xlstm7b.bench import generation, measure
from xlstm7b.bench.results import read_rows
from xlstm7b.config import SIZES
from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer

SUBJECTS = ("generation", "engine", "serve", "training", "kernels")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks in a "tiny". Decoding is not timed: tests/bench/test_measure.py does that."""
    monkeypatch.setitem(SIZES, "tiny", SIZES["tiny"] | {"num_blocks": 2})
    monkeypatch.setattr(measure, "find_peaks", lambda *_: (1e12, 1e11))
    timing = measure.Timing(0.01, 0.0)
    monkeypatch.setattr(generation, "measure_decoding", lambda *_, **__: timing)


def run(cli: Cli, file: Path, *arguments: object) -> list[dict[str, Any]]:
    """The lines of the file after a run without an error."""
    code, out, err = cli("bench", *arguments, "--json", file)
    assert (code, err) == (0, "")
    assert "CPU" in out or "core" in out
    return read_rows(file)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_subject_has_help(cli: Cli, subject: str) -> None:
    code, out, _ = cli("bench", subject, "--help")
    assert code == 0
    assert "--json" in out
    assert "--call" in out


def test_defaults_follow_the_device(cli: Cli) -> None:
    out = " ".join(cli("bench", "generation", "--help").out.replace("│", "").split())
    assert "7b; on a CPU 160m" in out
    assert "0,131072,1048576; on a CPU 0,128,512" in out


def test_generation(cli: Cli, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--size", "tiny", "--contexts", "0,20", "--batches", "1,3"]
    options += ["--prompts", "1", "--first", 3, "--tokens", 64]
    rows = run(cli, tmp_path / "a.jsonl", "generation", *options, "--call", "one")
    assert {row["what"] for row in rows} == {
        *("read", "peak memory", "decode", "first token", "first 3 tokens", "prefill")
    }
    assert {row["call"] for row in rows} == {"one"}
    words = rows[0]["command"].split()
    assert words[:3] == ["xlstm7b", "bench", "generation"]
    # The default lengths that divide the tokens: none, so it is one prompt.
    assert [row["shape"]["prompt"] for row in rows if row["what"] == "prefill"] == [64]
    again = run(cli, tmp_path / "a.jsonl", "generation", *options, "--call", "one")
    assert again == rows


def test_engine(cli: Cli, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--size", "tiny", "--streams", 2, "--requests", 3]
    options += ["--prompt-tokens", 5, "--new-tokens", "2-4", "--prefill-tokens", 16]
    rows = run(cli, tmp_path / "a.jsonl", "engine", *options, "--prefix-tokens", 40)
    assert rows[0]["shape"]["output"] == "2-4"
    assert rows[-1]["shape"]["prefix"] == 40


def test_training(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "other", SIZES["tiny"] | {"embedding_dim": 128})
    options = ["--device", "cpu", "--sizes", "tiny,other", "--batch", 1, "--length", 32]
    rows = run(cli, tmp_path / "a.jsonl", "training", *options, "--steps", 1)
    assert [(row["what"], row["shape"]["model"]) for row in rows] == [
        *(("first step", "tiny"), ("training", "tiny")),
        *(("first step", "other"), ("training", "other")),
    ]


def test_serve(cli: Cli, tmp_path: Path) -> None:
    load = ["--rate", "20", "--seconds", "0.3"]
    with serving(Generator(spelling_model("ab"), ByteTokenizer()), keys=("key",)) as live:
        rows = run(cli, tmp_path / "a.jsonl", "serve", live.url, *load, "--api-key", "key")
        assert "output" in {row["what"] for row in rows}
        assert "key" not in rows[0]["command"]
        code, out, _ = cli("bench", "serve", live.url, *load, "--api-key", "another")
        assert code == 1
        assert "status 401" in out
    message = refused(cli("bench", "serve", live.url, *load))
    assert message.startswith(f"{live.url} does not answer: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generation --size 8b", "unknown model size '8b'; choose from tiny, 160m"),
        ("generation --parts decode,x", "--parts has no 'x'; choose from context, decode, first"),
        ("generation --batches 1,x", "--batches takes numbers of at least 1, such as 1,8,64, not"),
        ("generation --batches 1,0", "--batches takes numbers of at least 1"),
        ("generation --batches ,", "--batches takes numbers of at least 1"),
        ("generation --contexts -1", "--contexts takes numbers of at least 0"),
        ("generation --tokens 0", "--tokens must be at least 1, not 0"),
        ("generation --first 0", "--first must be at least 1, not 0"),
        ("generation --tokens 100 --lengths 64", "--lengths: sequences of 64 do not divide 100"),
        ("generation --dtype float8", "unknown dtype 'float8'; choose from float32, bfloat16"),
        ("generation --state-dtype int8", "unknown dtype 'int8'; choose from float32, bfloat16"),
        ("generation --quantize int2", "--quantize has no 'int2'; choose from int8, fp8, int4"),
        ("generation --replay maybe", "--replay has no 'maybe'; choose from auto, on, off"),
        ("generation --seconds 0", "--seconds must be above 0, not 0"),
        ("generation --folder /nowhere", "there is no saved model in /nowhere: it has no config"),
        ("generation --device meta", "the device 'meta' cannot be used here"),
        ("generation --json /nowhere/a.jsonl", "cannot write /nowhere/a.jsonl: there is no folder"),
        ("generation --json /", "cannot write /: it is a folder"),
        ("engine --streams 0", "--streams must be at least 1, not 0"),
        ("engine --adapters -1", "--adapters must be at least 0, not -1"),
        ("engine --cache-gb -1", "--cache-gb must be at least 0, not -1"),
        ("engine --new-tokens a", "--new-tokens must look like 256 or 128-384, not 'a'"),
        ("engine --new-tokens 9-3", "--new-tokens must look like 256 or 128-384, not '9-3'"),
        ("engine --new-tokens 0", "--new-tokens must look like 256 or 128-384, not '0'"),
        ("serve a", "'a' is not a server address"),
        ("serve http://a --rate 0", "--rate must be above 0, not 0"),
        ("serve http://a --rate nan", "--rate must be above 0, not nan"),
        ("serve http://a --seconds -1", "--seconds must be above 0, not -1"),
        ("serve http://a --rate 4 --clients 2", "give either --rate or --clients, not both"),
        ("serve http://a --clients 0", "--clients must be at least 1, not 0"),
        ("serve http://a --new-tokens 0", "--new-tokens takes numbers of at least 1"),
        ("serve http://a --shared-tokens -1", "--shared-tokens must be at least 0, not -1"),
        ("training --sizes 160m,8b", "unknown model size '8b'"),
        ("training --batch 0", "--batch must be at least 1, not 0"),
        ("training --activations all", "--activations has no 'all'; choose from none, block"),
        ("training --method dora", "--method has no 'dora'; choose from full, lora, state"),
        ("training --quantize int8", "--quantize needs --method lora or state"),
        ("kernels --sizes 8b", "unknown model size '8b'"),
        ("kernels --lengths 3000", "--lengths: sequences of 3000 do not divide 65536 tokens"),
    ],
)
def test_mistakes_are_one_sentence_before_any_work(
    cli: Cli, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "random_model", lambda *_, **__: pytest.fail("it began"))
    on_cpu = [] if arguments.startswith(("serve", "kernels")) else ["--device", "cpu"]
    subject, *options = arguments.split()
    assert refused(cli("bench", subject, *on_cpu, *options)).startswith(message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_kernels_without_a_gpu(cli: Cli) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert refused(cli("bench", "kernels")) == "there is no CUDA GPU here"


def test_a_missing_package_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "xlstm7b.bench.kernels", raising=False)
    monkeypatch.delattr("xlstm7b.bench.kernels", raising=False)
    assert (
        refused(cli("bench", "kernels"))
        == "this command needs the package triton, which is not installed"
    )


@pytest.mark.parametrize(
    ("module", "extra"), [("lm_eval.api", "eval"), ("markdown_it", "serve"), ("pyarrow", "data")]
)
def test_the_extra_of_a_missing_package_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    def fail(*_: object) -> None:
        raise ModuleNotFoundError(name=module)

    monkeypatch.setattr("xlstm7b.bench.serve.check_server", fail)
    assert refused(cli("bench", "serve", "http://127.0.0.1:1")) == (
        f"this command needs the package {module}, which is not installed: "
        f"pip install 'xlstm7b[{extra}]'"
    )
