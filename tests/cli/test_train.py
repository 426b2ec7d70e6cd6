"""`xlstm7b train`, `export` and `plot`, on a handful of bytes."""

import json
from pathlib import Path

import pytest
from cli.commands import Cli

MODEL = "model={embedding_dim=64,num_blocks=1,num_heads=2,vocab_size=320}"


@pytest.fixture
def settings(cli: Cli, tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("so much depends upon a red wheel barrow " * 40)
    code, _, _ = cli("prepare", tmp_path / "text.txt", "--output", tmp_path / "data")
    assert code == 0
    given = [
        MODEL,
        f'data.sources={{text={{path="{tmp_path / "data"}"}}}}',
        "data.validation=",
        "data.context_length=32",
        "batch.sequences=2",
        "batch.micro_batch=2",
        "run.steps=3",
        "run.validate_every=0",
        "run.log_every=1",
        "schedule.warmup=1",
        "schedule.cooldown=1",
    ]
    return [word for setting in given for word in ("--set", setting)]


def test_from_text_to_a_folder(cli: Cli, settings: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = cli("train", "quickstart", "--run", run, "--device", "cpu", *settings)
    assert (code, out) == (0, f"{run}: trained to step 3 of 3\n")
    assert [line.split(":")[0] for line in err.splitlines()] == ["step 1", "step 2", "step 3"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    code, out, _ = cli("train", "quickstart", "--run", run, "--device", "cpu", *settings)
    assert (code, out) == (0, f"{run}: trained to step 3 of 3\n")  # there was nothing left to do
    assert cli("export", run, tmp_path / "model")[0] == 0
    code, out, _ = cli("generate", tmp_path / "model", "so much", "--max-new-tokens", 4)
    assert code == 0
    assert out.startswith("so much")
    assert cli("plot", run, "--output", tmp_path / "curves.png")[0] == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    code, _, err = cli("export", run, tmp_path / "model")
    assert (code, err) == (2, f"xlstm7b: {tmp_path / 'model'} exists already\n")
    other = [*settings, "--set", "data.context_length=16"]
    code, _, err = cli("train", "quickstart", "--run", run, "--device", "cpu", *other)
    assert code == 2
    assert err == f"xlstm7b: the run in {run} was begun with another [data]: choose another --run\n"


def test_a_plan(cli: Cli) -> None:
    code, out, _ = cli("train", "7b", "--dry-run", "--gpus", 128)
    assert code == 0
    assert "2,086,666,240,000" in out
    assert "6,865,424,896" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "8b"], "there is no recipe '8b'; there are "),
        (["train", "7b", "--set", "optimizer.lrr=1"], "there is no setting optimizer.lrr; did you"),
        (["train", "quickstart", "--device", "tpu"], "the device must be cuda or cpu, not 'tpu'"),
        (["plot", "nowhere"], "nowhere holds no metrics to draw"),
        (["export", "nowhere", "model"], "nowhere holds no checkpoint to export"),
    ],
)
def test_mistakes(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments, sentence
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert sentence in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_shard_is_named(cli: Cli, settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "data" / "00000.ds").unlink()
    run = tmp_path / "run"
    code, _, err = cli("train", "quickstart", "--run", run, "--device", "cpu", *settings)
    assert code == 2
    assert "00000.ds" in err
    assert not run.exists()
    assert json.loads((tmp_path / "data" / "manifest.json").read_text())["shards"]
