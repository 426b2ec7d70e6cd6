"""State tuning on the command line: prepare, train, export, and the commands that take a state."""

import json
from pathlib import Path

import pytest
import torch
from commands import Cli, refused, succeeded

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM

RECIPE = """
init_from = "base"

[state_tuning]

[data]
context_length = 64
packing = "documents"
[data.sources]
texts = { path = "data" }

[batch]
sequences = 8
micro_batch = 8

[optimizer]
lr = 1.0

[schedule]
warmup = 5

[run]
steps = 25
"""


def test_a_text_becomes_a_state_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, folder in enumerate(("base", "other")):
        torch.manual_seed(seed)
        XLSTM(ModelConfig(64, 2, 2, vocab_size=320)).save_pretrained(folder)
    texts = [{"text": "ab" * n} for n in range(12, 28)]
    Path("texts.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    Path("tune.toml").write_text(RECIPE)
    prepare = ("prepare", "texts.jsonl", "--output", "data", "--tokenizer", "bytes")
    assert cli(*prepare, "--processes", 1).code == 0
    plan = succeeded(cli("train", "tune.toml", "--dry-run"))
    assert "trained" in plan
    trained = cli("train", "tune.toml", "--device", "cpu", "--set", "run.log_every=25")
    assert trained.code == 0
    # The gradient of a state is small: its norm is shown with three digits, not as 0.00.
    metrics = map(json.loads, Path("runs/tune/metrics.jsonl").read_text().splitlines())
    norms = [line["gradient_norm"] for line in metrics]
    mean = sum(norms) / len(norms)
    assert float(trained.err.split("norm ")[-1]) == pytest.approx(mean, rel=5e-3)
    assert "cannot write no/s" in refused(cli("export", "runs/tune", "no/s"))
    narrow = refused(cli("export", "runs/tune", "s", "--dtype", "bfloat16"))
    assert narrow == "a trained state is written in float32, not bfloat16: leave --dtype out"
    said = succeeded(cli("export", "runs/tune", "ab.safetensors"))
    assert said == "wrote the state of step 25 of runs/tune to ab.safetensors\n"
    assert "exists already" in refused(cli("export", "runs/tune", "ab.safetensors"))
    assert refused(cli("generate", "runs/tune", "ab")) == (
        "runs/tune is the folder of a state-tuning run, which changes no weights: give the model "
        "that it started from, base"
    )
    # The state alone makes the model write the text.
    state = ("--load-state", "ab.safetensors")
    options = ("--temperature", 0, "--max-new-tokens", 6)
    assert {*succeeded(cli("generate", "base", *state, *options)).strip()} <= {*"ab"}
    talk = cli("chat", "base", *options, stdin="/load ab.safetensors\nhello\n")
    assert (talk.code, talk.err) == (0, "Loaded ab.safetensors.\n")
    assert "ab" in talk.out
    # Its text is less surprising.
    losses = []
    for number, extra in enumerate(((), state)):
        file = f"{number}.json"
        command = ("eval", "ppl", "base", "texts.jsonl", *extra, "--output", file)
        assert cli(*command).code == 0
        results = json.loads(Path(file).read_text())
        losses.append(results["perplexity"]["loss"])
    assert results["xlstm7b"]["model"]["state"] == "ab.safetensors"
    assert losses[1] < losses[0] - 1
    # Other weights are refused everywhere.
    for command in (
        cli("generate", "other", *state),
        cli("eval", "ppl", "other", "texts.jsonl", *state),
    ):
        assert "belongs to other weights than those in" in refused(command)
    said = cli("chat", "other", stdin="/load ab.safetensors\n").err
    assert "belongs to other weights" in said
