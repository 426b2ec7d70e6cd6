"""`xlstm7b quantize`, and every other command with the folder that it writes."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from checkpoint_files import names_in
from commands import Cli, loses_the_race, refused, succeeded
from models import spelling_model
from rounding import rounded_inputs
from train_processes import full_disk

from xlstm7b import files
from xlstm7b.checkpoint import open_checkpoint
from xlstm7b.model import XLSTM


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speller") / "speller"
    spelling_model("abcdefghijklmnopqrstuvwxyz").to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the sea was calm and the ship lay still " * 40)
    return path


@pytest.mark.parametrize("bits", ["8", "4", "fp8"])
def test_a_quantised_folder_works_with_every_command(
    cli: Cli, speller: Path, text: Path, tmp_path: Path, bits: str
) -> None:
    folder = tmp_path / "small"
    printed = succeeded(cli("quantize", speller, folder, "--bits", bits))
    scheme = {"8": "int8", "4": "int4 in groups of 64", "fp8": "fp8"}[bits]
    rows = [line for line in printed.splitlines() if "mlstm_layer.q.weight" in line]
    assert len(rows) == 2
    assert all(scheme in row and "%" in row for row in rows)
    assert printed.splitlines()[-1].startswith(f"wrote {folder}: ")
    assert "files match" in succeeded(cli("verify", folder))
    shown = succeeded(cli("info", folder))
    assert scheme in shown
    assert "lm_head" in shown
    assert scheme in json.loads(succeeded(cli("info", folder, "--json")))["quantization"].values()

    back = tmp_path / "back"
    succeeded(cli("convert", folder, back, "--dtype", "float32"))
    assert not open_checkpoint(back).schemes
    tokens = torch.tensor([[0, 104, 101, 108]])
    exact = XLSTM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        floats = XLSTM.from_pretrained(back, dtype=torch.float64)(tokens)[0]
        assert relative_error(floats, exact(tokens)[0]) < 1e-4
        got = XLSTM.from_pretrained(folder, dtype=torch.float32)(tokens)[0]
        with rounded_inputs(exact):
            assert relative_error(got, exact(tokens)[0]) < 5e-2

    options = ("--temperature", 0, "--max-new-tokens", 8, "--device", "cpu")
    outcome = cli("generate", folder, "The sea", *options)
    assert outcome.code == 0
    assert outcome.out.strip()
    losses = []
    for model in (folder, back):
        results = tmp_path / f"{model.name}.json"
        measured = cli("eval", "ppl", model, text, "--device", "cpu", "--output", results)
        assert measured.code == 0, measured.err
        losses.append(json.loads(results.read_text()))
    assert losses[0] != losses[1]


def test_gptq_with_a_text(cli: Cli, speller: Path, text: Path, tmp_path: Path) -> None:
    errors = []
    for options in ((), ("--method", "gptq"), ("--method", "gptq", "--act-order")):
        target = tmp_path / str(len(errors))
        common = ("--bits", 4, "--calibration", text, "--head", 16, "--device", "cpu")
        printed = succeeded(cli("quantize", speller, target, *common, *options))
        row = next(line for line in printed.splitlines() if "blocks.0.mlstm_layer.q" in line)
        errors.append(float(row.rstrip("│ ").rstrip().rstrip("%").split()[-1]))
        assert "lm_head" not in printed
    assert max(errors[1:]) < errors[0]


def test_quantize_mistakes(cli: Cli, speller: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    before = names_in(tmp_path)

    def message(*options: object, source: Path = speller) -> str:
        said = refused(cli("quantize", source, target, *options))
        assert names_in(tmp_path) == before
        return said

    assert message("--bits", 3) == "--bits must be 8, 4 or fp8, not '3'"
    assert message("--bits", 4, "--group-size", 48).startswith("the group size must be one of 32")
    assert message("--bits", 8, "--head", 5) == "the head has 4, 8 or 16 bits, not '5'"
    assert message("--bits", 8, "--method", "gptq").endswith("needs --calibration with a text")
    assert message("--bits", 8, "--act-order") == "--act-order needs --method gptq"
    assert message("--bits", 8, "--group-size", 32).startswith("--group-size needs --bits 4 or")
    assert message("--bits", 8, "--tokenizer", "x").startswith("--tokenizer reads the text of")
    assert message("--bits", 8, "--method", "awq").startswith("unknown method 'awq'")
    missing = message("--bits", 8, "--method", "gptq", "--calibration", tmp_path / "no.txt")
    assert "no.txt" in missing
    gptq = ("--bits", 4, "--method", "gptq", "--calibration", text)
    for length, words in ((0, "0 tokens"), (1, "1 token"), (510, "510 tokens")):
        text.write_text("a" * length)
        assert message(*gptq) == (
            f"the calibration text has only {words}: give a text of at least 512 tokens, better "
            "65,536"
        )
    text.write_text("a" * 511)
    succeeded(cli("quantize", speller, tmp_path / "gptq", *gptq))
    before = names_in(tmp_path)
    assert "neither a folder nor" in message("--bits", 8, source=tmp_path / "nothing")

    succeeded(cli("quantize", speller, target, "--bits", 8))
    before = names_in(tmp_path)
    assert message("--bits", 8).endswith("--overwrite replaces the checkpoint in it")
    (tmp_path / ".texts.quantizing").mkdir()  # of a killed command, before others were put there
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").touch()
    other = refused(cli("quantize", speller, tmp_path / "texts", "--bits", 8))
    assert other == f"{tmp_path / 'texts'} holds other files: choose a new or an empty folder"
    again = refused(cli("quantize", target, tmp_path / "again", "--bits", 4))
    assert again.endswith("are quantised already")
    succeeded(cli("quantize", speller, target, "--bits", 4, "--overwrite"))
    assert open_checkpoint(target).schemes["lm_head.weight"].name == "int8"


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_full_disk_names_the_target_and_the_same_command_goes_on(
    cli: Cli, speller: Path, text: Path, tmp_path: Path, calibrated: bool
) -> None:
    target = tmp_path / "small"
    command = ["quantize", speller, target, "--bits", "8"]
    command += ["--calibration", text] if calibrated else []
    with full_disk(room=2048):  # the file of the job, but no matrix
        said = refused(cli(*command))
    assert re.fullmatch(rf"{target} could not be written \(.*File too large\)", said)
    assert names_in(tmp_path) == {"text.txt", ".small.quantizing"}
    assert f"wrote {target}: " in succeeded(cli(*command))
    assert names_in(tmp_path) == {"text.txt", "small"}


def test_a_folder_that_cannot_be_made_names_the_target(
    cli: Cli, speller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "small"

    def full(path: Path, *given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "mkdir", full)
    said = refused(cli("quantize", speller, target, "--bits", "8"))
    assert said == f"[Errno 28] No space left on device: '{target}'"


def test_what_a_killed_command_left_is_named(
    cli: Cli, speller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after the target has its name, and before the hidden folder is removed."""
    target, left = tmp_path / "small", tmp_path / ".small.quantizing"
    command = ("quantize", speller, target, "--bits", 8)
    with monkeypatch.context() as killed:
        killed.setattr("xlstm7b.model.quantizer.shutil.rmtree", lambda path, **_: None)
        succeeded(cli(*command))
    kept = names_in(left)
    said = refused(cli(*command))
    assert said == (
        f"{target} exists already; --overwrite replaces the checkpoint in it; a killed command "
        f"left {left}: remove it, or continue with --overwrite"
    )
    with files.lock_folder(left, "quantising to"):
        said = refused(cli(*command))
        assert said == f"another process is quantising to {target} right now"
    assert names_in(left) == kept
    succeeded(cli(*command, "--overwrite"))
    assert names_in(tmp_path) == {"small"}


def test_a_target_that_another_process_writes_loses_no_work(
    cli: Cli, speller: Path, tmp_path: Path
) -> None:
    command = ("quantize", speller, tmp_path / "small", "--bits", 8)
    loses_the_race(lambda: cli(*command), tmp_path / "small")
    kept = names_in(tmp_path / ".small.quantizing")
    assert len(kept) > 10
    (tmp_path / "small").rename(tmp_path / "theirs")
    succeeded(cli(*command))
    assert names_in(tmp_path) == {"small", "theirs"}


def test_a_busy_target_is_named_as_it_was_given(
    cli: Cli, speller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work = tmp_path / ".small.quantizing"
    work.mkdir()
    with files.lock_folder(work, "quantising to"):
        said = refused(cli("quantize", speller, "small", "--bits", 8))
    assert said == "another process is quantising to small right now"
    assert names_in(tmp_path) == {work.name}


def test_a_quantised_model_is_not_trained(cli: Cli, speller: Path, tmp_path: Path) -> None:
    from xlstm7b.train import load_recipe
    from xlstm7b.train.sharded_model import first_weights

    succeeded(cli("quantize", speller, tmp_path / "small", "--bits", 8))
    with pytest.raises(ValueError, match="are quantised, and cannot be trained: start from"):
        first_weights(load_recipe("quickstart"), str(tmp_path / "small"), torch.device("cpu"))


def test_compare_with_transformers(cli: Cli, speller: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    succeeded(cli("quantize", speller, tmp_path / "small", "--bits", 4))
    options = ("--max-new-tokens", 2, "--speed-length", 8, "--device", "cpu", "--json")
    outcome = cli("compare", tmp_path / "small", *options)
    assert outcome.code == 0, outcome.err
    prompts = json.loads(outcome.out)["prompts"]
    exact = XLSTM.from_pretrained(tmp_path / "small", dtype=torch.float64)
    for prompt in prompts:
        tokens = torch.tensor([[0, *prompt["prompt"].encode()]])
        with torch.no_grad():
            want = exact(tokens)[0]
            with rounded_inputs(exact):
                cost = relative_error(exact(tokens)[0], want)
        assert tokens.numel() == prompt["tokens"]
        assert prompt["relative_difference"] < cost + 0.1


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())
