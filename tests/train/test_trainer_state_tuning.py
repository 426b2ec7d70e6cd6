"""State tuning in the trainer: what is trained, saved, resumed and exported."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lora_runs import base_weights
from state_tuning_runs import state_tuning_equals_one_process
from torch.distributed.checkpoint import FileSystemReader
from train_processes import in_processes, run
from train_runs import losses, recipe

from xlstm7b.checkpoint import open_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.data.loader import validation_batches
from xlstm7b.data.shards import open_folder
from xlstm7b.evaluate.scoring import Scorer
from xlstm7b.generate import Generator, SavedState
from xlstm7b.model import XLSTM
from xlstm7b.model.quantizer import quantize_checkpoint
from xlstm7b.model.saved_state import check_state_weights
from xlstm7b.quantize.config import Quantization
from xlstm7b.tokenizer import ByteTokenizer
from xlstm7b.train import Recipe, describe, load_recipe, make_plan
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.processes import process_group
from xlstm7b.train.run_checkpoints import export_run, read_initial_state, read_run, saved_steps
from xlstm7b.train.trainer import Trainer

TUNING = ("state_tuning={}", "data.packing=documents", "optimizer.lr=0.3", "run.steps=8")
QUIET = ("run.validate_every=0", "run.log_every=100")
CONFIG = ModelConfig(64, 2, 2, vocab_size=320)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folders of a model in float32 and int4."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("bases")
    model = XLSTM(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("preact.weight"):
                parameter.normal_(std=0.1)
            elif name.endswith("out_proj.weight"):
                parameter *= 4  # so that the cells matter
    model.save_pretrained(folder / "float32")
    quantize_checkpoint(folder / "float32", folder / "int4", Quantization.named("int4"))
    return folder


def state_recipe(data: Path, base: Path, *settings: str) -> Recipe:
    return recipe(data, f"init_from={base}", *TUNING, *QUIET, *settings)


@pytest.mark.parametrize(
    ("kind", "settings", "names"),
    [
        ("float32", [], {"C", "n"}),
        ("int4", [], {"C", "n"}),
        ("float32", ["state_tuning.rank=2", "state_tuning.layers=[1]"], {"A", "B", "n"}),
    ],
)
def test_only_the_state_is_trained_and_saved(kind, settings, names, bases, data, tmp_path):
    chosen = state_recipe(data, bases / kind, *settings)
    trainer = Trainer(chosen, tmp_path, "cpu")
    before = base_weights(trainer.model)
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, base_weights(trainer.model), strict=True))
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.02
    last = tmp_path / "checkpoints/step-00000008"
    saved = FileSystemReader(last).read_metadata().state_dict_metadata
    trained = {f"backbone.initial_state.{name}" for name in names}
    assert {name.removeprefix("model.") for name in saved if name.startswith("model.")} == trained
    assert read_run(last)["frozen"] == open_checkpoint(bases / kind).fingerprint()
    initial = read_initial_state(last, chosen)
    assert initial.m == trainer.model.backbone.initial_state.m
    assert all(scale < -5 for block in initial.m for scale in block)  # the gates start at −10
    plan = make_plan(chosen)
    assert plan.trained == sum(parameter.numel() for parameter in initial.parameters())


def test_a_resume_is_exact(bases, data, tmp_path):
    chosen = state_recipe(data, bases / "float32", "run.save_every=2")
    run(0, chosen, tmp_path / "whole")
    schedule = replace(chosen.schedule, decay=chosen.run.steps - 4)
    stopped = replace(chosen, run=replace(chosen.run, steps=4), schedule=schedule)
    run(0, stopped, tmp_path / "parts")
    run(0, replace(chosen, schedule=schedule), tmp_path / "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    other = state_recipe(data, bases / "float32", "state_tuning.rank=3", "run.steps=12")
    with pytest.raises(ValueError, match=r"started with state_tuning\.rank 0, not 3: choose"):
        run(0, other, tmp_path / "parts")


@pytest.mark.parametrize("rank", [0, 2])
def test_layouts_give_the_losses_of_one_process(rank, bases, data, tmp_path):
    settings = f"state_tuning.rank={rank}", "run.steps=4"
    chosen = state_recipe(data, bases / "float32", *settings)
    run(0, chosen, tmp_path / "one")
    in_processes(2, state_tuning_equals_one_process, chosen, tmp_path)


def test_every_activation_mode_gives_the_same_losses(bases, data, tmp_path):
    found = []
    with process_group("cpu"):
        for mode in ("none", "selective", "products", "block"):
            setting = f"run.activation_checkpointing={mode}"
            trainer = Trainer(state_recipe(data, bases / "float32", setting), tmp_path, "cpu")
            found.append([trainer.update().loss for _ in range(3)])
            trainer.loader.close()
    for others in found[1:]:
        assert found[0] == pytest.approx(others, rel=1e-6)


@pytest.mark.parametrize("text", ["", "A text that comes before."])
def test_the_first_loss_is_that_of_the_base_or_of_the_text_before(text, bases, data, tmp_path):
    """A document is read from the state that the run starts from."""
    model, state, settings = XLSTM.from_pretrained(bases / "float32"), None, []
    if text:
        prompt = Generator(model, ByteTokenizer()).read(text)
        prompt.save(tmp_path / "prompt.safetensors")
        state = prompt.model_state.fork(8)
        settings = [f"state_tuning.init_state={tmp_path / 'prompt.safetensors'}"]
    with process_group("cpu"):
        trainer = Trainer(state_recipe(data, bases / "float32", *settings), tmp_path, "cpu")
        batch = next(trainer.loader)
        trainer.loader.load_state_dict({**trainer.loader.state_dict(), "samples": 0})
        got = trainer.update().loss
        trainer.loader.close()
    with torch.no_grad():
        logprobs, _ = model.token_logprobs(batch.tokens, batch.targets, state)
    want = -(logprobs * batch.mask).sum() / batch.mask.sum()
    assert got == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize("has_first", [True, False])
def test_the_exported_state_has_the_loss_of_the_run(has_first, data, tmp_path):
    """Held-out text, scored from the exported state, has the run's last validation loss."""
    torch.manual_seed(5)
    config = replace(CONFIG, force_bos_token_insert=has_first)
    base = tmp_path / "base"
    XLSTM(config).save_pretrained(base)
    settings = (
        "run.validate_every=8",
        "data.validation_sequences=0",
        f"model.force_bos_token_insert={str(has_first).lower()}",
    )
    chosen = state_recipe(data, base, "data.context_length=128", *settings)
    run(0, chosen, tmp_path / "run")
    line = read_metrics(tmp_path / "run/metrics.jsonl")[7]
    file = tmp_path / "state.safetensors"
    assert export_run(tmp_path / "run", file) == 8
    state = SavedState.load(file, config)
    assert state.tokens_seen == [int(has_first)]
    assert not state.has_text
    model = XLSTM.from_pretrained(base)
    documents, counted = [], []
    for batch in validation_batches(open_folder(data), 128, 8, packing="documents", model=config):
        for targets, mask, resets in zip(batch.targets, batch.mask, batch.resets, strict=True):
            size = int(resets.int().argmax()) if resets.any() else 128
            if mask.any():
                documents.append(targets[:size].tolist())
                counted.append(mask[:size])
    assert len(documents) == 40
    found = Scorer(model, batch_size=3).logprobs(documents, state=state)
    total = sum(-(part.double() * own).sum() for part, own in zip(found, counted, strict=True))
    loss = total / sum(own.sum() for own in counted)
    assert loss.item() == pytest.approx(line["validation_loss"], rel=1e-5)
    # The generator reads the same tokens: none is added after a state.
    generator = Generator(model, ByteTokenizer())
    for document, logprobs in zip(documents[:3], found[:3], strict=True):
        first = state.logits.log_softmax(-1)[0, document[0]]
        assert first.item() == pytest.approx(logprobs[0].item(), abs=1e-5)
        after = generator.read([document[:9]], state=state).logits.log_softmax(-1)[0, document[9]]
        assert after.item() == pytest.approx(logprobs[9].item(), abs=1e-4)


def test_a_tuned_state_writes_the_phrase_it_was_trained_on(tmp_path):
    """End to end on the CPU: prepare, train, export, generate, many states in one batch."""
    from xlstm7b.data.shards import ShardWriter, write_manifest

    torch.manual_seed(0)
    model = XLSTM(CONFIG)
    model.save_pretrained(tmp_path / "base")
    files = []
    for phrase in (b"ab", b"xyz"):
        folder = tmp_path / phrase.decode()
        folder.mkdir()
        with ShardWriter(folder / "00000.ds", vocab_size=320) as writer:
            for _ in range(8):
                writer.add([byte + 2 for byte in phrase * 20])
        write_manifest(folder, [writer.entry], vocab_size=320, tokenizer_fingerprint="bytes")
        chosen = state_recipe(
            folder, tmp_path / "base", "run.steps=25", "optimizer.lr=1.0", "run.validate_every=25"
        )
        run(0, chosen, tmp_path / f"run-{phrase.decode()}")
        lines = read_metrics(tmp_path / f"run-{phrase.decode()}/metrics.jsonl")
        assert lines[-1]["validation_loss"] < lines[0]["loss"] - 1
        files.append(tmp_path / f"{phrase.decode()}.safetensors")
        export_run(tmp_path / f"run-{phrase.decode()}", files[-1])
    states = [SavedState.load(file, CONFIG) for file in files]
    generator = Generator(model, ByteTokenizer())
    both = generator.generate(state=SavedState.cat(states), temperature=0, max_new_tokens=8)
    assert {*both[0].text} <= {*"ab"}
    assert {*both[1].text} <= {*"xyz"}


def test_an_exported_state_knows_its_weights(bases, data, tmp_path, monkeypatch):
    chosen = state_recipe(data, bases / "float32", "run.steps=4")
    run(0, chosen, tmp_path / "run")
    file = tmp_path / "state.safetensors"
    export_run(tmp_path / "run", file)
    for kind in ("float32", "int4"):  # int4 is made of the same weights
        check_state_weights(file, open_checkpoint(bases / kind))
    with pytest.raises(ValueError, match="exists already"):
        export_run(tmp_path / "run", file)
    with monkeypatch.context() as patch:  # another process writes it after the first check
        late, checks = tmp_path / "late.safetensors", "xlstm7b.train.run_checkpoints"
        patch.setattr(f"{checks}.verify_checkpoint", lambda _: late.write_text("theirs"))
        with pytest.raises(FileExistsError, match="exists already: perhaps another process"):
            export_run(tmp_path / "run", late)
    assert late.read_text() == "theirs"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != tmp_path)
        with pytest.raises(ValueError, match=f"new: no write permission in {tmp_path}$"):
            export_run(tmp_path / "run", tmp_path / "new")
    with pytest.raises(ValueError, match="written in float32"):
        export_run(tmp_path / "run", tmp_path / "narrow", dtype=torch.bfloat16)
    torch.manual_seed(9)
    XLSTM(CONFIG).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"belongs to other weights than those in .*other"):
        check_state_weights(file, open_checkpoint(tmp_path / "other"))
    with pytest.raises(ValueError, match="was saved from another model"):
        SavedState.load(file, ModelConfig(64, 1, 2, vocab_size=320))
    # It can start another run, of the same weights only.
    setting = f"state_tuning.init_state={file}"
    run(0, state_recipe(data, bases / "float32", setting, "run.steps=4"), tmp_path / "again")
    assert losses(tmp_path / "again")[0] < losses(tmp_path / "run")[0]
    with pytest.raises(ValueError, match="belongs to other weights"):
        run(0, state_recipe(data, tmp_path / "other", setting), tmp_path / "third")
    assert not saved_steps(tmp_path / "third/checkpoints")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], r"\[state_tuning\] needs init_from"),
        (["init_from=x", "data.packing=windows"], 'set data.packing = "documents", not "windows"'),
        (["init_from=x", "state_tuning={rang=3}"], "unknown setting state_tuning.rang; did you"),
        (["init_from=x", "state_tuning={rank=-1}"], "state_tuning.rank must be greater than or"),
        (["init_from=x", "state_tuning={rank=17}"], "state_tuning.rank must be at most 16, not 17"),
        (["init_from=x", "state_tuning={layers=[2]}"], r"numbers from 0 to 1, not \[2\]"),
        (["init_from=x", "state_tuning={layers=[1,1]}"], r"different numbers .* not \[1, 1\]"),
        (["init_from=x", 'state_tuning={layers=[1],init_state="s"}'], "needs all layers"),
        (["init_from=x", "lora={}"], r"\[lora\] and \[state_tuning\] cannot be combined"),
        (["init_from=x", "parallel.tp=2"], r"\[state_tuning\] cannot be split"),
        (["init_from=x", "start_step=2"], r"\[state_tuning\] starts at step 0"),
    ],
)
def test_mistakes_in_a_recipe(settings, message, data):
    with pytest.raises(ValueError, match=message):
        recipe(data, *TUNING, *settings)


def test_the_plan_of_the_7b():
    settings = ["init_from=NX-AI/xLSTM-7b", "state_tuning={}", "data.packing=documents"]
    settings += ["batch={sequences=8}", "parallel={}", "data.context_length=2048"]
    plan = make_plan(load_recipe("7b", settings), gpus=1)
    assert plan.trained == 32 * 8 * (256 * 512 + 256)
    assert plan.memory["frozen"] == 2 * plan.parameters
    assert plan.memory["adamw"] == 8 * plan.trained
    assert describe(plan)["model"]["trained_parameters"] == plan.trained
    example = Path(__file__).parents[2] / "examples/state-7b.toml"
    plan = make_plan(load_recipe(str(example)), gpus=1)
    assert plan.recipe.data.context_length == 2048
    assert plan.memory["total"] < 22e9


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_compiled_blocks_change_nothing_but_rounding(kind, bases, data, tmp_path):
    base = state_recipe(data, bases / kind, "run.precision=float32", "run.compile=false")
    run(0, base, tmp_path / "eager", "cuda")
    assert losses(tmp_path / "eager")[-1] < losses(tmp_path / "eager")[0] - 0.02
    for mode in ("none", "selective", "products", "block"):
        settings = "run.precision=float32", f"run.activation_checkpointing={mode}"
        run(0, state_recipe(data, bases / kind, *settings), tmp_path / mode, "cuda")
        assert losses(tmp_path / mode) == pytest.approx(losses(tmp_path / "eager"), abs=5e-3)
    run(0, state_recipe(data, bases / kind), tmp_path / "narrow", "cuda")
    assert losses(tmp_path / "narrow") == pytest.approx(losses(tmp_path / "eager"), abs=5e-2)
