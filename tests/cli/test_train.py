"""`xlstm7b train`, `export` and `plot`, on a few bytes of text."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_files import contents
from commands import (
    Cli,
    Outcome,
    environment,
    loses_the_race,
    refused,
    save_chat_model,
    succeeded,
)
from train_processes import full_disk

from xlstm7b.cli.train import progress
from xlstm7b.config import ModelConfig
from xlstm7b.files import lock_folder
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer, tokenizer_fingerprint
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.recipe import Recipe, load_recipe
from xlstm7b.train.run_checkpoints import read_run
from xlstm7b.train.trainer import Trainer, Update

# With queries and keys of 64, transformers can run it: exports print no warning.
MODEL = "model={embedding_dim=64,num_blocks=1,num_heads=2,qk_dim_factor=1.0,vocab_size=320}"
ONE_PROCESS = ("--processes", 1)  # starting others takes longer than their work


@pytest.fixture
def settings(cli: Cli, tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("so much depends upon a red wheel barrow " * 40)
    prepare = ["prepare", tmp_path / "text.txt", "--output", tmp_path / "data", *ONE_PROCESS]
    assert cli(*prepare).code == 0
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


def test_from_text_to_an_exported_model(cli: Cli, settings: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = cli("train", "quickstart", "--run", run, "--device", "cpu", *settings)
    assert (code, out) == (0, f"{run}: trained to step 3 of 3\n")
    assert [line.split(":")[0] for line in err.splitlines()] == ["step 1", "step 2", "step 3"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    code, out, _ = cli("train", "quickstart", "--run", run, "--device", "cpu", *settings)
    assert (code, out) == (0, f"{run}: already finished, nothing trained (step 3 of 3)\n")
    assert cli("export", run, tmp_path / "model")[0] == 0
    code, out, _ = cli("generate", tmp_path / "model", "so much", "--max-new-tokens", 4)
    assert code == 0
    assert out.startswith("so much")
    assert cli("plot", run, "--output", tmp_path / "curves.png")[0] == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    code, _, err = cli("export", run, tmp_path / "model")
    assert (code, err) == (
        2,
        f"xlstm7b: {tmp_path / 'model'} exists already: choose another folder\n",
    )
    other = [*settings, "--set", "data.context_length=16"]
    code, _, err = cli("train", "quickstart", "--run", run, "--device", "cpu", *other)
    assert code == 2
    started = f"the run in {run} was started with data.context_length 32, not 16"
    assert err == f"xlstm7b: {started}: choose another --run\n"


def test_the_previous_block_is_trained_exported_measured_and_generates(
    cli: Cli, settings: list[str], tmp_path: Path
) -> None:
    model = "model={embedding_dim=32,num_blocks=2,num_heads=2,vocab_size=320,"
    model += 'block="previous",qk_dim_factor=2.0,v_dim_factor=2.0}'
    run, folder = tmp_path / "run", tmp_path / "model"
    assert train(cli, run, *settings, "--set", model).code == 0
    lines = read_metrics(run / "metrics.jsonl")
    assert [len(line["input_gate_mean"]) for line in lines] == [2] * 3
    capped = 15 * math.tanh(-10 / 15)
    assert lines[0]["input_gate_mean"] == pytest.approx([capped] * 2, abs=1e-2)
    assert cli("export", run, folder).code == 0
    assert json.loads((folder / "config.json").read_text())["model_type"] == "xlstm7b"
    assert "previous" in succeeded(cli("info", folder))
    out = succeeded(cli("eval", "ppl", folder, tmp_path / "text.txt", "--device", "cpu"))
    assert out.startswith("1 document, 1,600 tokens, 1,600 bytes")
    options = ["--max-new-tokens", 4, "--temperature", 0, "--device", "cpu"]
    assert succeeded(cli("generate", folder, "so much", *options)).startswith("so much")
    said = refused(train(cli, tmp_path / "other", *settings, "--set", "model.block=previous"))
    assert "needs qk_dim_factor = v_dim_factor = 2, not 1.0 and 1.0" in said


def test_an_empty_name_is_no_recipe(cli: Cli) -> None:
    assert refused(cli("train", "")).startswith("unknown recipe ''; choose from 1.4b, ")


def test_dry_run_without_clipping(cli: Cli) -> None:
    code, out, _ = cli("train", "7b", "--dry-run", "--gpus", 128, "--set", "optimizer.clip=inf")
    assert code == 0
    assert re.search(r"clip\W+inf", out)


def test_options_of_the_plan_are_refused_without_it(cli: Cli, tmp_path: Path) -> None:
    for given in (["--gpus", 2], ["--mfu", 0.5]):
        said = refused(cli("train", "quickstart", "--run", tmp_path / "run", *given))
        assert said.startswith("--gpus and --mfu are for --dry-run. To train on several GPUs")
    for more in ([], ["--dry-run"]):
        said = refused(cli("train", "quickstart", "--device", "foo", *more))
        assert said == "the device must be cuda or cpu, not 'foo'"
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_the_plan(cli: Cli) -> None:
    code, out, _ = cli("train", "7b", "--dry-run", "--gpus", 128)
    assert code == 0
    assert "2,086,666,240,000" in out
    assert "6,865,424,896" in out


@pytest.mark.parametrize(("gb", "warns"), [(40, True), (47.5, True), (48, False)])
def test_dry_run_warns_of_a_plan_that_hardly_fits_the_gpu(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, gb: float, warns: bool
) -> None:
    plan = ("train", "1.4b", "--dry-run", "--gpus", 32)
    assert cli(*plan).err == ""
    device = SimpleNamespace(total_memory=int(gb * 1e9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: device)
    code, out, err = cli(*plan)
    assert code == 0
    assert re.search(r"total bytes\W+45.4 GB", out)  # it is to fit GPUs of 80 GB
    expected = f"warning: the plan needs 45.4 GB of the {gb:.1f} GB of this machine's GPU, and may"
    assert err.startswith(expected) if warns else err == ""


def test_a_failing_hook_is_named_below_its_traceback(
    cli: Cli, settings: list[str], tmp_path: Path
) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(
        "from xlstm7b.train import Hook\n"
        "class Mine(Hook):\n"
        "    def on_step(self, trainer, metrics):\n"
        "        if trainer.step == 3: 1 / 0\n"
    )
    hooks = ["--set", f'run.hooks=["{file}:Mine"]', "--set", "run.save_every=2"]
    code, out, err = train(cli, run, *settings, *hooks)
    assert (code, out, err.count("Traceback")) == (1, "", 1)
    assert f'File "{file}", line 4, in on_step' in err
    assert err.splitlines()[-1] == (
        f"xlstm7b: hook {file}:Mine failed in on_step at step 3: ZeroDivisionError: division by "
        "zero; the last good checkpoint is of step 2"
    )
    hooks[1] = 'run.hooks=["mine.py"]'
    said = refused(train(cli, run, *settings, *hooks))
    assert said.endswith('"file.py:Class" or "package.module:Class" in its list, not \'mine.py\'')
    code, out, _ = train(cli, run, *settings)
    assert (code, out) == (0, f"{run}: trained to step 3 of 3\n")


def test_a_file_of_hooks_that_exits_is_named(cli: Cli, settings: list[str], tmp_path: Path) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text("import sys\nsys.exit(0)\n")
    said = refused(train(cli, run, *settings, "--set", f'run.hooks=["{file}:Mine"]'))
    assert said == f"hook {file}:Mine cannot be loaded: SystemExit: 0"
    assert not run.exists()


def test_profiles_of_a_run(cli: Cli, settings: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = refused(train(cli, run, *settings, "--profile-steps", "3-4"))
    assert said == "steps 3-4 cannot be profiled: from here the run has steps 0-2"
    for wrong in ("2", "2-1", "a-b", "-1"):
        said = refused(train(cli, run, *settings, f"--profile-steps={wrong}"))
        assert said == f"--profile-steps must be FIRST-LAST, such as 100-102, not {wrong!r}"
    assert not run.exists()
    for name, given in (("alone", ["--profile"]), ("chosen", ["--profile-steps", "1-1"])):
        assert train(cli, tmp_path / name, *settings, *given).code == 0
    files = [file.name for file in sorted(tmp_path.glob("*/profile/*"))]
    assert files == ["trace-steps-0-2.json.gz", "trace-steps-1-1.json.gz"]


def test_progress_shows_mfu_and_memory_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"step": 4, "loss": 1.5, "tokens_per_second": 2000.0, "loss_mean": 2.0}
    line |= {"gradient_norm_mean": 0.5}
    with progress(load_recipe("quickstart"), 0) as report:
        report(line | {"mfu": 0.374, "peak_memory_gb": 71.26})
        report(line)
    assert capsys.readouterr().err.splitlines() == [
        "step 5: loss 1.500  2,000 tok/s  MFU 37.4%  71.3 GB, mean 2.0000, norm 0.5",
        "step 5: loss 1.500  2,000 tok/s, mean 2.0000, norm 0.5",
    ]


def test_each_validation_set_is_printed(cli: Cli, settings: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    sets = f'data.validation={{"[b]a" = "{folder}", "a long name of a set" = "{folder}"}}'
    more = ["--set", sets, "--set", "run.validate_every=2"]
    code, _, err = cli(
        "train", "quickstart", "--run", tmp_path / "run", "--device", "cpu", *settings, *more
    )
    loss = read_metrics(tmp_path / "run" / "metrics.jsonl")[1]["validation_loss"]
    line = f"step 2: validation loss [b]a {loss:.4f}, a long name of a set {loss:.4f}"
    assert (code, err.splitlines()[1]) == (0, line)


def test_reference_needs_no_recipe_and_is_the_page_of_the_docs(cli: Cli) -> None:
    page = Path(__file__).parents[2] / "docs" / "recipes.md"
    assert succeeded(cli("train", "--reference")) == page.read_text(encoding="utf-8")


def test_dry_run_finds_what_does_not_fit_init_from(
    cli: Cli, settings: list[str], trained: Path, tmp_path: Path
) -> None:
    """The sentence is that of a real start."""
    base, small, run = tmp_path / "base", tmp_path / "small", tmp_path / "new"
    succeeded(cli("export", trained, base))
    succeeded(cli("quantize", base, small, "--bits", 8))
    state = tmp_path / "state.safetensors"
    XLSTM(ModelConfig(64, 2, 2, vocab_size=320)).save_pretrained(tmp_path / "other")
    succeeded(
        cli("generate", tmp_path / "other", "a", "--max-new-tokens", 1, "--save-state", state)
    )
    for changes, message in (
        ([f"init_from={base}", "model.num_heads=1"], "has num_heads 2, the recipe 1: change"),
        ([f"init_from={base}", "model.num_heads=1", "lora={}"], "has num_heads 2, the recipe 1"),
        ([f"init_from={state}"], "is a file, not a folder"),
        ([f"init_from={small}"], "are quantised, and cannot be trained"),
        (
            [f"init_from={trained}", "start_step=3", "run.steps=9", "model.num_heads=1"],
            "has num_heads 2, the recipe 1: change [model]",
        ),
        (
            [
                f"init_from={base}",
                f'state_tuning={{init_state="{state}"}}',
                "data.packing=documents",
            ],
            "other weights",
        ),
    ):
        wrong = [part for change in changes for part in ("--set", change)]
        said = refused(cli("train", "quickstart", *settings, *wrong, "--dry-run"))
        assert message in said
        assert refused(train(cli, run, *settings, *wrong)) == said
        assert not run.exists()
    # What is not here cannot be compared.
    for missing in (["init_from=runs/none"], ["init_from=runs/none", "start_step=2"]):
        away = [part for change in missing for part in ("--set", change)]
        assert cli("train", "quickstart", *settings, *away, "--dry-run").code == 0


@pytest.mark.parametrize("kind", ["lora={}", "state_tuning={}"])
def test_dry_run_needs_the_folder_of_frozen_weights(cli: Cli, tmp_path: Path, kind: str) -> None:
    """They may be quantised. Those of a hub id count as floats, and the plan says so."""
    folder = tmp_path / "int4"
    plan = ("train", "quickstart", "--dry-run", "--set", kind, "--set", "data.packing=documents")
    assert refused(cli(*plan, "--set", f"init_from={folder}")) == (
        f"there is no folder {folder}, and the plan depends on whether its weights are quantised: "
        f"make it first, for weights of 4 bits with `xlstm7b quantize MODEL {folder} --bits 4`"
    )
    code, out, _ = cli(*plan, "--set", "init_from=NX-AI/xLSTM-7b")
    assert code == 0
    assert "(unless NX-AI/xLSTM-7b, which" in out


def test_dry_run_prints_names_with_brackets_as_they_are(cli: Cli) -> None:
    sources = 'data.sources={"[b]" = { path = "z[/x]q" }}'
    code, out, _ = cli("train", "quickstart", "--dry-run", "--set", sources)
    assert code == 0
    assert "[b]" in out
    assert "z[/x]q" in out


def test_a_file_is_not_a_run(cli: Cli, settings: list[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    said = refused(train(cli, file, *settings))
    assert said == f"{file} is a file, not the folder of a run: choose another --run"
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "8b"], "unknown recipe '8b'; choose from "),
        (["train", "7b", "--set", "optimizer.lrr=1"], "unknown setting optimizer.lrr; did you"),
        (["train", "quickstart", "--device", "tpu"], "the device must be cuda or cpu, not 'tpu'"),
        pytest.param(
            ["train", "quickstart", "--device", "cuda"],
            "the device cuda cannot be used here: PyTorch finds no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["plot", "nowhere"], "nowhere holds no metrics to plot"),
        (["export", "nowhere", "model"], "nowhere holds no checkpoint to export"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments, sentence
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert sentence in err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def trained(cli: Cli, settings: list[str], tmp_path: Path) -> Path:
    """A finished run with checkpoints of steps 2 and 3."""
    run = tmp_path / "run"
    assert train(cli, run, *settings, "--set", "run.save_every=2").code == 0
    return run


def train(cli: Cli, run: Path, *arguments: object) -> Outcome:
    return cli("train", "quickstart", "--run", run, "--device", "cpu", *arguments)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("data.context_length=1000000", "less than one context of 1,000,000"),
        ("data.validation=nowhere", "there is no folder of token shards at nowhere"),
        ("init_from=nowhere", "nowhere"),
        ("init_from=data", "data"),
        ("data.sources.text.path=elsewhere", "there is no folder of token shards at elsewhere"),
        ("parallel.dp_replicate=2", "the number of processes is 1, but dp_replicate 2"),
        ("model.vocab_size=256", "a vocabulary of 320 tokens, but the model has 256"),
        ("run.keep_bst=true", "unknown setting run.keep_bst; did you mean keep_best"),
    ],
)
def test_a_run_that_cannot_start_leaves_no_file(
    cli: Cli, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong, sentence
) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    said = refused(train(cli, tmp_path / "run", *settings, "--set", wrong))
    assert sentence in said
    assert contents(tmp_path) == before
    assert not (tmp_path / "run").exists()


def test_a_batch_that_does_not_divide_is_refused(cli: Cli, settings: list[str]) -> None:
    plan = ["train", "quickstart", *settings, "--dry-run", "--gpus", 3]
    assert "the batch of 2 sequences from step 0 does not divide" in refused(cli(*plan))


def test_a_stage_needs_its_earlier_run(cli: Cli, settings: list[str], trained: Path) -> None:
    stage = ["--set", f"init_from={trained}", "--set", "start_step=1"]
    run = trained.with_name("stage")
    said = refused(train(cli, run, *settings, *stage))
    assert said == f"{trained}/checkpoints has no checkpoint of step 1"
    assert not run.exists()


def test_a_run_folder_cannot_be_a_file(cli: Cli, settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    assert str(tmp_path / "file") in refused(train(cli, tmp_path / "file" / "run", *settings))
    assert str(tmp_path / "file") in refused(train(cli, tmp_path / "file", *settings))
    assert (tmp_path / "file").read_text() == "here"


def damage_missing(file: Path) -> None:
    file.unlink()


def damage_truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 4])


@pytest.mark.parametrize("damage", [damage_missing, damage_truncated])
def test_a_damaged_shard_is_named(cli: Cli, settings: list[str], tmp_path: Path, damage) -> None:
    damage(tmp_path / "data" / "00000.ds")
    said = refused(train(cli, tmp_path / "run", *settings))
    assert str(tmp_path / "data" / "00000.ds") in said
    assert not (tmp_path / "run").exists()


def test_an_export_keeps_what_another_process_writes(
    cli: Cli, trained: Path, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    loses_the_race(lambda: cli("export", trained, target), target)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "run.json"])
@pytest.mark.parametrize("damage", [damage_missing, damage_truncated])
def test_a_damaged_checkpoint_is_named(
    cli: Cli, settings: list[str], trained: Path, file: str, damage
) -> None:
    damage(trained / "checkpoints" / "step-00000003" / file)
    before = contents(trained)
    more = ["--set", "run.steps=4"]
    for said in (
        refused(train(cli, trained, *settings, *more)),
        refused(cli("export", trained, trained.with_name("model"))),
    ):
        assert said.startswith(f"{trained}/checkpoints/step-00000003 is damaged (")
        assert said.endswith("): remove it to continue from an earlier one")
    assert contents(trained) == before
    shutil.rmtree(trained / "checkpoints" / "step-00000003")
    assert train(cli, trained, *settings, *more).code == 0


def test_flipped_bits_are_named_and_nothing_is_trained(
    cli: Cli, settings: list[str], trained: Path
) -> None:
    checkpoint, draw = trained / "checkpoints" / "step-00000003", random.Random(0)
    files = sorted(checkpoint.iterdir())
    lengths = [file.stat().st_size for file in files]
    for _ in range(5):
        (file,) = draw.choices(files, lengths)
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        before = contents(trained)
        for said in (
            refused(train(cli, trained, *settings, "--set", "run.steps=4")),
            refused(train(cli, trained, *settings)),  # there is nothing left to train
            refused(cli("export", trained, trained.with_name("model"))),
        ):
            assert said == (
                f"{checkpoint} is damaged ({file} is damaged: its sha256 is not the one in "
                "SHA256SUMS): remove it to continue from an earlier one"
            )
        assert contents(trained) == before
        file.write_bytes(whole)
    assert train(cli, trained, *settings, "--set", "run.steps=4").code == 0


def test_a_run_whose_weights_are_not_finite_fails(
    cli: Cli, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that no batch uses: every step is finite, up to the last one."""
    update = Trainer.update

    def spoil(trainer: Trainer) -> Update:
        if trainer.step == 2:
            trainer.model.backbone.embeddings.weight.data.to_local()[319, 0] = torch.nan
        return update(trainer)

    monkeypatch.setattr(Trainer, "update", spoil)
    code, out, err = train(cli, tmp_path / "run", *settings, "--set", "run.save_every=1")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == (
        "xlstm7b: the weights or AdamW's averages are not finite after step 3, and are not saved; "
        "the last good checkpoint is of step 2"
    )


def test_a_damaged_recipe_of_a_run_is_named(cli: Cli, settings: list[str], trained: Path) -> None:
    (trained / "recipe.json").write_text('{"model": ')
    before = contents(trained)
    assert refused(train(cli, trained, *settings)).startswith(f"{trained}/recipe.json is damaged: ")
    assert contents(trained) == before


def test_a_run_that_is_older_than_a_field_of_the_model_is_continued(
    cli: Cli, settings: list[str], trained: Path
) -> None:
    recipe = json.loads((trained / "recipe.json").read_text())
    for name in ("head_norm", "input_gate"):
        del recipe["model"][name]
    (trained / "recipe.json").write_text(json.dumps(recipe))
    more = ["--set", "run.steps=4"]
    sentence = refused(train(cli, trained, *settings, *more, "--set", "model.input_gate=fixed"))
    assert "was started with model.input_gate '', not 'fixed': choose another --run" in sentence
    code, out, _ = train(cli, trained, *settings, *more)
    assert (code, out) == (0, f"{trained}: trained to step 4 of 4\n")
    del recipe["model"]["num_heads"]
    (trained / "recipe.json").write_text(json.dumps(recipe))
    sentence = refused(train(cli, trained, *settings, *more))
    assert sentence.startswith(f"{trained}/recipe.json is damaged: model: num_heads is missing")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("model.num_heads=4", "was started with model.num_heads 2, not 4: choose another --run"),
        ("batch.sequences=4", "was started with batch.sequences 2, not 4: choose another --run"),
        ("data.packing=best-fit", "started with data.packing 'windows', not 'best-fit': choose"),
        ("data.sources.more={path='data'}", "with text 1/2 of 1601 tokens; more 1/2 of 1601"),
        (
            "run.seed=1",
            "read its data with seed 0, this one with 1: it would repeat some samples and skip "
            "others; choose another --run",
        ),
        ("run.steps=2", r"is already at step 3, after run.steps (2)"),
    ],
)
def test_settings_that_a_run_cannot_change(
    cli: Cli, settings: list[str], trained: Path, monkeypatch: pytest.MonkeyPatch, changed, sentence
) -> None:
    monkeypatch.chdir(trained.parent)
    before = contents(trained)
    more = ["--set", "run.steps=4", "--set", changed]
    assert sentence in refused(train(cli, trained, *settings, *more))
    assert contents(trained) == before


def test_settings_that_a_run_can_change(
    cli: Cli, settings: list[str], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another path of the same data, other micro-batches, validation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").rename(tmp_path / "moved")
    changed = [
        "data.sources.text.path=moved",
        "batch.micro_batch=1",
        "data.validation=moved",
        "run.validate_every=1",
        "run.steps=4",
    ]
    more = [word for setting in changed for word in ("--set", setting)]
    assert train(cli, trained, *settings, *more).out == f"{trained}: trained to step 4 of 4\n"
    lines = read_metrics(trained / "metrics.jsonl")
    assert ["validation_loss" in line for line in lines] == [False, False, False, True]


def test_a_finished_run_is_not_changed_by_a_sweep(
    cli: Cli, settings: list[str], trained: Path
) -> None:
    before = contents(trained)
    swept = ["--set", "optimizer.lr=0.002", "--set", "schedule.kind=linear"]
    code, out, err = train(cli, trained, *settings, *swept, "--set", "run.save_every=2")
    assert (code, out) == (0, f"{trained}: already finished, nothing trained (step 3 of 3)\n")
    assert err == (
        f"{trained} was trained with optimizer.lr 0.005; this recipe has 0.002\n"
        f"{trained} was trained with schedule.kind 'cosine'; this recipe has 'linear'\n"
    )
    assert contents(trained) == before


def test_changed_settings_are_named_and_the_record_of_the_start_is_kept(
    cli: Cli, settings: list[str], trained: Path
) -> None:
    record = (trained / "recipe.json").read_bytes()
    lower = ["--set", "optimizer.lr=0.0001", "--set", "run.save_every=2"]
    code, out, err = train(cli, trained, *settings, *lower, "--set", "run.steps=4")
    assert (code, out) == (0, f"{trained}: trained to step 4 of 4\n")
    first, *steps = err.splitlines()
    assert first == f"{trained} was trained with optimizer.lr 0.005; this recipe has 0.0001"
    assert len(steps) == 1
    assert (trained / "recipe.json").read_bytes() == record
    # The same command again changes nothing; every checkpoint has the whole history.
    more = train(cli, trained, *settings, *lower, "--set", "run.steps=5")
    assert [line.split(":")[0] for line in more.err.splitlines()] == ["step 5"]
    saved = read_run(trained / "checkpoints/step-00000005")
    assert saved["recipe"]["optimizer"]["lr"] == 0.0001
    assert saved["changes"] == [
        {"step": 3, "settings": {"optimizer.lr": [0.005, 0.0001], "run.steps": [3, 4]}},
        {"step": 4, "settings": {"run.steps": [4, 5]}},
    ]
    assert (trained / "recipe.json").read_bytes() == record


def test_a_rate_that_rises_again_is_pointed_out(
    cli: Cli, settings: list[str], trained: Path
) -> None:
    """The cosine of 3 steps has ended; that of 9 steps is still near its peak."""
    outcome = train(cli, trained, *settings, "--set", "run.steps=9")
    chosen = Recipe.from_dict(json.loads((trained / "recipe.json").read_text()))
    longer = replace(chosen, run=replace(chosen.run, steps=9))
    assert outcome.code == 0
    assert outcome.err.splitlines()[0] == (
        f"the learning rate rises again: {chosen.learning_rate(2):.3g} at step 2, "
        f"{longer.learning_rate(3):.3g} at step 3; schedule.decay sets the length of the decay"
    )


def test_sweeps_have_folders_of_their_own(
    cli: Cli, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`settings` has prepared the data. Settings of `run`, paths and layout share a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(
        """
        model = { embedding_dim = 64, num_blocks = 1, num_heads = 2, vocab_size = 320 }
        data = { context_length = 32, sources = { text = { path = "data" } } }
        batch = { sequences = 2, micro_batch = 2 }
        schedule = { kind = "constant", warmup = 1 }
        run = { steps = 1 }
        """
    )

    def train(*chosen: str) -> str:
        more = [word for setting in chosen for word in ("--set", setting)]
        code, out, err = cli("train", "small.toml", "--device", "cpu", *more)
        assert (code, err) == (0, "")
        return out

    assert train() == "runs/small: trained to step 1 of 1\n"
    for rate in ("0.001", "2e-3"):
        folder = f"runs/small-optimizer.lr={float(rate)}"
        assert train(f"optimizer.lr={rate}") == f"{folder}: trained to step 1 of 1\n"
    longer = ["run.steps=2", "batch.micro_batch=1", "parallel.dp_shard=1", "run.nan_policy=stop"]
    out = train("optimizer.lr=1e-3", *longer, f"data.sources.text.path={tmp_path / 'data'}")
    assert out == "runs/small-optimizer.lr=0.001: trained to step 2 of 2\n"
    found = {path.name for path in (tmp_path / "runs").iterdir()}
    assert found == {"small", "small-optimizer.lr=0.001", "small-optimizer.lr=0.002"}


def test_a_run_without_a_checkpoint_starts_again(
    cli: Cli, settings: list[str], trained: Path
) -> None:
    shutil.rmtree(trained / "checkpoints")
    outcome = train(cli, trained, *settings, "--set", "data.context_length=16")
    assert outcome.out == f"{trained}: trained to step 3 of 3\n"
    assert [line["tokens"] for line in read_metrics(trained / "metrics.jsonl")] == [32] * 3


def test_only_one_process_trains_in_a_folder(cli: Cli, settings: list[str], trained: Path) -> None:
    before = contents(trained)
    with lock_folder(trained, "training in"):
        said = refused(train(cli, trained, *settings, "--set", "run.steps=4"))
        assert said == f"another process is training in {trained} right now"
    assert contents(trained) == before
    assert train(cli, trained, *settings, "--set", "run.steps=4").code == 0
    with lock_folder(trained, "training in"):  # the lock was released
        pass


def test_a_stopped_run_says_how_to_continue(
    cli: Cli, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    unread = ["--set", f"data.validation={tmp_path / 'data'}", "--set", "run.time_limit=1e-9"]
    outcome = train(cli, run, *settings, *unread)
    assert outcome.out == f"{run}: trained to step 1 of 3; the same command continues\n"
    first, *_ = outcome.err.splitlines()
    assert first == "data.validation is never read: run.validate_every is 0"
    loss = XLSTM.loss
    monkeypatch.setattr(XLSTM, "loss", lambda *a, **options: loss(*a, **options) * torch.nan)
    out = train(cli, run, *settings).out
    skipped = "steps skipped because a number was not finite: 2"
    assert out == f"{run}: trained to step 3 of 3; {skipped}\n"


def test_a_run_does_not_continue_with_other_data(
    cli: Cli, settings: list[str], trained: Path, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "text.txt").write_text("glazed with rain water " * 40)
    prepare = ["prepare", tmp_path / "text.txt", "--output", tmp_path / "data", *ONE_PROCESS]
    assert cli(*prepare).code == 0
    before = contents(trained)
    said = refused(train(cli, trained, *settings, "--set", "run.steps=4"))
    assert said == (
        "the saved run read its data with sources text 1 of 1601 tokens, this one with text 1 of "
        "921 tokens: it would repeat some samples and skip others; choose another --run"
    )
    assert contents(trained) == before


def test_a_full_disk_names_the_last_checkpoint(
    cli: Cli, settings: list[str], trained: Path
) -> None:
    more = [*settings, "--set", "run.steps=4", "--set", "run.log_every=9"]
    with full_disk(room=8192):
        said = refused(train(cli, trained, *more))
    assert said.startswith(
        f"the checkpoint of step 4 could not be written to {trained}/checkpoints, where "
    )
    assert said.endswith("; the last good checkpoint is of step 3")
    assert sorted(path.name for path in (trained / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]
    assert train(cli, trained, *more).code == 0
    assert [line["step"] for line in read_metrics(trained / "metrics.jsonl")] == [0, 1, 2, 3]


def test_the_best_checkpoint_is_exported(cli: Cli, settings: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    held_out = ["--set", f"data.validation={tmp_path / 'data'}", "--set", "run.validate_every=1"]
    assert train(cli, run, *settings, *held_out).code == 0
    heights = [line["validation_loss"] for line in read_metrics(run / "metrics.jsonl")]
    best = 1 + heights.index(min(heights))
    out = succeeded(cli("export", run, tmp_path / "model", "--step", "best"))
    assert out == f"wrote step {best} of {run} to {tmp_path / 'model'}\n"
    said = refused(cli("export", run, tmp_path / "other", "--step", "worst"))
    assert said == "--step must be a number or best, not 'worst'"
    out = succeeded(cli("export", run, tmp_path / "third", "--step", "3"))
    assert out == f"wrote step 3 of {run} to {tmp_path / 'third'}\n"


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose file has another name."""
    folder = save_chat_model(tmp_path_factory.mktemp("tokenizers") / "model")
    return (folder / "tokenizer.json").rename(folder / "neox.json")


def test_an_export_has_the_tokenizer(cli: Cli, settings: list[str], neox: Path, tmp_path) -> None:
    data = ["--output", tmp_path / "words", "--tokenizer", neox]
    assert cli("prepare", tmp_path / "text.txt", *data, *ONE_PROCESS).code == 0
    words = [*settings, "--set", f"data.sources.text.path={tmp_path / 'words'}"]
    base, model, tuned = (tmp_path / name for name in ("base", "model", "tuned"))
    assert train(cli, base, *words).code == 0
    succeeded(cli("export", base, model, "--tokenizer", neox))
    written = (model / "tokenizer.json").read_bytes()
    before, after = json.loads(neox.read_bytes()), json.loads(written)
    assert {name for name in before if before[name] != after[name]} == {"post_processor"}
    assert not (model / "neox.json").exists()
    succeeded(cli("verify", model))
    assert cli("generate", model, "so much", "--max-new-tokens", 2).code == 0
    # Fine-tuned weights take the tokenizer of init_from; --tokenizer may also name its folder.
    assert train(cli, tmp_path / "tune", *words, "--set", f"init_from={model}").code == 0
    succeeded(cli("export", tmp_path / "tune", tuned))
    assert (tuned / "tokenizer.json").read_bytes() == written
    succeeded(cli("export", base, tmp_path / "again", "--tokenizer", model))
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == written
    # Data of bytes does not fit this tokenizer.
    bytes_run = tmp_path / "bytes"
    said = refused(train(cli, bytes_run, *settings, "--set", f"init_from={model}"))
    fingerprint = tokenizer_fingerprint(neox)[:12]
    assert said == (
        f"the data was prepared with the tokenizer bytes, but {model} holds the tokenizer "
        f"{fingerprint}: prepare it with --tokenizer {model}"
    )
    assert train(cli, bytes_run, *settings).code == 0
    other = f"the run was trained with the tokenizer bytes, but {neox} is the tokenizer"
    wrong = {
        neox: f"{other} {fingerprint}",
        tmp_path / "text.txt": f"{tmp_path / 'text.txt'} is not a readable tokenizer.json: ",
        "nowhere": "there is no tokenizer at nowhere",
    }
    for tokenizer, sentence in wrong.items():
        said = refused(cli("export", bytes_run, tmp_path / "wrong", "--tokenizer", tokenizer))
        assert said.startswith(sentence)
    assert not (tmp_path / "wrong").exists()
    succeeded(cli("export", bytes_run, tmp_path / "right", "--tokenizer", "bytes"))


def test_an_export_knows_a_tokenizer_that_was_not_found(
    cli: Cli, settings: list[str], neox: Path, tmp_path: Path
) -> None:
    run, model, words = tmp_path / "run", tmp_path / "model", tmp_path / "words"
    data = ["--output", words, "--tokenizer", neox]
    assert cli("prepare", tmp_path / "text.txt", *data, *ONE_PROCESS).code == 0
    assert train(cli, run, *settings, "--set", f"data.sources.text.path={words}").code == 0
    (words / "tokenizer.json").unlink()
    _, _, err = cli("export", run, model)
    assert err == "warning: the run's tokenizer was not found: give it with --tokenizer\n"
    fingerprint = tokenizer_fingerprint(neox)[:12]
    said = refused(cli("generate", model, "so much"))
    assert said == (
        f"{model} was trained with the tokenizer {fingerprint}, but holds no tokenizer.json: give "
        "it with --tokenizer"
    )
    some = ["so much", "--max-new-tokens", 2]
    assert cli("generate", model, *some, "--tokenizer", neox).code == 0


def test_transformers_reads_the_tokenizer_of_a_byte_level_export(
    cli: Cli, settings: list[str], trained: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = tmp_path / "model"
    succeeded(cli("export", trained, model))
    succeeded(cli("verify", model))
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    assert theirs("Grüße").input_ids == [0, *ByteTokenizer().encode("Grüße")]
    # Such a model can be fine-tuned on data of bytes.
    tune = ["--set", f"init_from={model}"]
    assert train(cli, tmp_path / "tune", *settings, *tune).code == 0


def test_an_export_that_transformers_cannot_run_says_so(
    cli: Cli, settings: list[str], tmp_path: Path
) -> None:
    narrow = ["--set", "model.qk_dim_factor=0.5"]
    assert train(cli, tmp_path / "run", *settings, *narrow).code == 0
    code, out, err = cli("export", tmp_path / "run", tmp_path / "model")
    assert (code, out) == (0, f"wrote step 3 of {tmp_path / 'run'} to {tmp_path / 'model'}\n")
    assert err == (
        "warning: transformers cannot run this model: qk_dim_factor gives its queries and keys a "
        "width of 32, which is not a multiple of 64\n"
    )


@pytest.mark.long
def test_torchrun_starts_two_processes(settings: list[str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = ["-m", "--", "xlstm7b", "train", "quickstart", "--run", str(tmp_path / "run")]
    done = subprocess.run(
        [*torchrun, *command, "--device", "cpu", *settings],
        env=environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'run'}: trained to step 3 of 3\n")
    written = {path.name for path in (tmp_path / "run/checkpoints/step-00000003").iterdir()}
    parts = {"__0_0.distcp", "__1_0.distcp"}
    assert written == {".metadata", "run.json", "SHA256SUMS", *parts}
