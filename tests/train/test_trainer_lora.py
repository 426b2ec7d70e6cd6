"""LoRA in the trainer: what is trained, saved and resumed, on float and quantised weights."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lora_runs import base_weights, lora_equals_one_process
from torch.distributed.checkpoint import FileSystemReader
from train_processes import in_processes, run
from train_runs import losses, recipe

from xlstm7b.checkpoint import open_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.data.loader import validation_batches
from xlstm7b.data.shards import open_folder
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import check_base, load_adapter, merge_checkpoint
from xlstm7b.model.lora import lora_layers
from xlstm7b.model.quantizer import quantize_checkpoint
from xlstm7b.quantize.config import Quantization, Scheme, named_schemes
from xlstm7b.tokenizer import tokenizer_fingerprint
from xlstm7b.train import Recipe, describe, load_recipe, make_plan
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.processes import process_group
from xlstm7b.train.run_checkpoints import export_run, read_run, saved_steps
from xlstm7b.train.sharded_model import build_model, open_base
from xlstm7b.train.trainer import Trainer, check_init_from

LORA = ("lora={rank=4,alpha=8.0}", "optimizer.lr=1e-2", "optimizer.weight_decay=0.0")
QUIET = ("run.validate_every=0", "run.log_every=100")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folders of a model in float32, int8 and int4."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("bases")
    model = XLSTM(ModelConfig(64, 2, 2, vocab_size=320))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("preact.weight"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder / "float32")
    for bits in ("int8", "int4"):
        quantize_checkpoint(folder / "float32", folder / bits, Quantization.named(bits))
    return folder


def lora_recipe(data: Path, base: Path, *settings: str) -> Recipe:
    return recipe(data, f"init_from={base}", *LORA, *QUIET, *settings)


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_only_the_adapter_is_trained_and_saved(kind, bases, data, tmp_path):
    chosen = lora_recipe(data, bases / kind)
    trainer = Trainer(chosen, tmp_path, "cpu")
    before = base_weights(trainer.model)
    first = {path: layer.lora_A.full_tensor().clone() for path, layer in lora_layers(trainer.model)}
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, base_weights(trainer.model), strict=True))
    for path, layer in lora_layers(trainer.model):
        assert layer.lora_B.full_tensor().any(), path
        assert not torch.equal(layer.lora_A.full_tensor(), first[path]), path
    found = losses(tmp_path)
    assert found[-1] < found[0] - 0.1
    last = tmp_path / "checkpoints/step-00000008"
    saved = FileSystemReader(last).read_metadata().state_dict_metadata
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    weights = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert weights == set(trained)
    assert all(".lora_" in name for name in trained)
    frozen = read_run(last)["frozen"]
    assert frozen == open_checkpoint(bases / kind).fingerprint()
    assert (kind in frozen["quantization"]) == (kind != "float32")


def test_a_resume_is_exact_with_dropout(bases, data, tmp_path):
    chosen = lora_recipe(data, bases / "int8", "lora.dropout=0.3", "run.save_every=2")
    run(0, chosen, tmp_path / "whole")
    stopped = replace(chosen, run=replace(chosen.run, steps=4))
    # The same schedule, cut short.
    schedule = replace(chosen.schedule, decay=chosen.run.steps - 4)
    run(0, replace(stopped, schedule=schedule), tmp_path / "parts")
    run(0, replace(chosen, schedule=schedule), tmp_path / "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    without = lora_recipe(data, bases / "int8", "run.steps=5")
    run(0, without, tmp_path / "without")
    assert losses(tmp_path / "without")[1:] != losses(tmp_path / "whole")[1:5]


@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_every_activation_mode_gives_the_same_losses(kind, bases, data, tmp_path):
    found = []
    with process_group("cpu"):
        for mode in ("none", "selective", "products", "block"):
            setting = f"run.activation_checkpointing={mode}"
            trainer = Trainer(lora_recipe(data, bases / kind, setting), tmp_path, "cpu")
            found.append([trainer.update().loss for _ in range(4)])
            trainer.loader.close()
    for others in found[1:]:
        assert found[0] == pytest.approx(others, rel=1e-6)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_layouts_give_the_losses_of_one_process(kind, bases, data, tmp_path):
    """Two processes that share the frozen weights, and two that each have them all."""
    chosen = lora_recipe(data, bases / kind, "run.steps=4")
    run(0, chosen, tmp_path / "one")
    in_processes(2, lora_equals_one_process, chosen, tmp_path)


def test_frozen_weights_have_the_dtype_of_the_computation(bases, data, tmp_path):
    chosen = lora_recipe(data, bases / "float32", "run.precision=bfloat16", "run.steps=4")
    trainer = Trainer(chosen, tmp_path, "cpu")
    kinds = {(p.requires_grad, p.dtype) for p in trainer.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    trainer.train()
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_the_first_values_do_not_depend_on_the_base(bases, data):
    with process_group("cpu"):
        models = []
        for kind in ("float32", "int4"):
            chosen = lora_recipe(data, bases / kind)
            device = torch.device("cpu")
            models.append(build_model(chosen, chosen.layout(1), device, init_from=chosen.init_from))
        pairs = zip(*(dict(lora_layers(model)).values() for model in models), strict=True)
        for one, two in pairs:
            assert torch.equal(one.lora_A.full_tensor(), two.lora_A.full_tensor())


def test_a_resume_refuses_another_base_or_adapter(bases, data, tmp_path):
    chosen = lora_recipe(data, bases / "float32", "run.steps=4")
    run(0, chosen, tmp_path / "run")
    assert saved_steps(tmp_path / "run/checkpoints") == [3, 4]
    longer = ["run.steps=6"]
    with pytest.raises(ValueError, match=r"that were in .*float32, and .*int8 holds others: give"):
        run(0, lora_recipe(data, bases / "int8", *longer), tmp_path / "run")
    with pytest.raises(ValueError, match=r"with lora\.rank 4, not 3: choose another --run$"):
        run(0, lora_recipe(data, bases / "float32", "lora.rank=3", *longer), tmp_path / "run")
    with pytest.raises(ValueError, match=r"with \[lora\], and this recipe has none: choose"):
        run(0, recipe(data, f"init_from={bases / 'float32'}", *QUIET, *longer), tmp_path / "run")
    # The same weights in another place and dtype are the same base.
    XLSTM.from_pretrained(bases / "float32").bfloat16().save_pretrained(tmp_path / "copy")
    run(0, lora_recipe(data, tmp_path / "copy", *longer), tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lora={}"], r"\[lora\] needs init_from"),
        (["lora={rang=3}"], "unknown setting lora.rang; did you mean rank"),
        (["lora={rank=0}"], "lora.rank must be greater than or equal to 1, not 0"),
        (["lora=3"], "lora must be a table, not 3"),
        (["init_from=x", "lora={targets=[]}"], "lora.targets is empty"),
        (["init_from=x", 'lora={targets=["qq"]}'], "lora.targets: no layer .* called 'qq'"),
        (["init_from=x", "lora={}", "parallel.tp=2"], r"\[lora\] cannot be split .*tp = 1, not 2"),
        (["init_from=x", "lora={}", "start_step=2"], r"\[lora\] starts at step 0"),
    ],
)
def test_mistakes_in_a_recipe(settings, message, data):
    with pytest.raises(ValueError, match=message):
        recipe(data, *settings)


ON_ONE_GPU = ["batch={sequences=8}", "parallel={}"]


def test_the_plan_knows_what_is_trained():
    full = make_plan(load_recipe("7b", ON_ONE_GPU), gpus=1)
    settings = ["init_from=NX-AI/xLSTM-7b", "lora={rank=16}", *ON_ONE_GPU]
    plan = make_plan(load_recipe("7b", settings), gpus=1)
    # Rank 16 of q, k, v, õ, out, two up-projections and down, in 32 blocks.
    widths = 2 * (2048 + 4096) + 3 * (4096 + 4096) + 3 * (10944 + 4096)
    assert plan.trained == 16 * 32 * widths
    assert plan.memory["adamw"] == 8 * plan.trained
    assert plan.memory["frozen"] == 2 * plan.parameters
    assert plan.flops < 0.68 * full.flops
    # Frozen weights are shared among shards.
    sharded = make_plan(load_recipe("7b", settings), gpus=8)
    assert sharded.memory["frozen"] == -(-plan.memory["frozen"] // 8)


def test_the_plan_knows_quantised_weights(tmp_path):
    for bits, size in (("int8", 7.1e9), ("int4", 4.05e9)):
        config = ModelConfig.named("7b").to_dict("bfloat16")
        config["quantization_config"] = Quantization.named(bits).to_dict()
        (tmp_path / "config.json").write_text(json.dumps(config))
        settings = [f"init_from={tmp_path}", "lora={}", *ON_ONE_GPU]
        plan = make_plan(load_recipe("7b", settings), gpus=1)
        assert plan.memory["frozen"] == pytest.approx(size, rel=0.01)
        assert describe(plan)["model"]["frozen_weights"].startswith(bits)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("re:(.*)*(.*)*!", "quantization_config: the regular expressions take more than 1 s"),
        ("re:(", r"quantization_config: '\(' is no regular expression"),
        (5, r"quantization_config, group_0: targets is \[5\], not a list of names"),
    ],
)
def test_targets_that_cannot_be_matched_are_refused(target, message, tmp_path, monkeypatch):
    monkeypatch.setattr("xlstm7b.patterns._SECONDS", 1)
    config = ModelConfig.named("7b").to_dict("bfloat16")
    config["quantization_config"] = Quantization.named("int8").to_dict()
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = [target]
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = load_recipe("7b", [f"init_from={tmp_path}", "lora={}", *ON_ONE_GPU])
    with pytest.raises(ValueError, match=message):
        make_plan(chosen, gpus=1)


def test_schemes_by_names_patterns_and_all_layers():
    group = {"weights": Scheme("int8").to_dict()}
    layers = ["backbone.blocks.0.mlstm_layer.q", "lm_head", "lm_head2"]
    for targets, ignore, expected in (
        (["Linear"], ["lm_head"], [True, False, True]),
        (["lm_head"], None, [False, True, False]),
        (["re:.*blocks", "re:lm"], ["re:.*2$"], [True, True, False]),
        ([], [], [False, False, False]),
    ):
        values = {"config_groups": {"a": {**group, "targets": targets}}, "ignore": ignore}
        found = named_schemes(values, layers)
        assert found == [Scheme("int8") if one else None for one in expected]


def test_the_examples_fit_on_one_gpu(tmp_path, monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    lora = make_plan(load_recipe(str(examples / "lora-7b.toml")), gpus=1)
    assert lora.recipe.data.context_length == 8192
    assert lora.recipe.lora.rank == 16
    assert lora.memory["total"] < 40e9
    assert "NX-AI/xLSTM-7b, which is not here" in describe(lora)["model"]["frozen_weights"]
    monkeypatch.chdir(tmp_path)
    Path("xlstm-7b-int4").mkdir()
    config = ModelConfig.named("7b").to_dict("bfloat16")
    config["quantization_config"] = Quantization.named("int4").to_dict()
    Path("xlstm-7b-int4/config.json").write_text(json.dumps(config))
    qlora = make_plan(load_recipe(str(examples / "qlora-7b.toml")), gpus=1)
    assert qlora.recipe.data.context_length == 2048
    assert qlora.memory["total"] < 16e9
    words = describe(qlora)["model"]["frozen_weights"]
    assert words == "int4 in groups of 64, head int8"


def test_the_export_of_a_run_is_an_adapter(bases, data, tmp_path, monkeypatch):
    chosen = lora_recipe(data, bases / "float32", "run.validate_every=4", "run.log_every=4")
    run(0, chosen, tmp_path / "run")
    assert export_run(tmp_path / "run", tmp_path / "adapter", dtype=torch.float32) == 8
    with pytest.raises(FileExistsError, match="exists already"):
        export_run(tmp_path / "run", tmp_path / "adapter", overwrite=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != tmp_path)
        with pytest.raises(ValueError, match=f"new: no write permission in {tmp_path}$"):
            export_run(tmp_path / "run", tmp_path / "new")
    config = ModelConfig(64, 2, 2, vocab_size=320)
    adapter = load_adapter(tmp_path / "adapter", config)
    check_base(adapter, open_checkpoint(bases / "float32"))
    assert adapter.base_name == str(bases / "float32")
    assert {layer.scale for layer in adapter.layers.values()} == {2.0}
    assert tokenizer_fingerprint(tmp_path / "adapter") == "bytes"
    # Neither the run nor the adapter can be trained further. The errors say what can.
    words = "is the folder of a LoRA run: make an adapter .* `xlstm7b export`, .* `xlstm7b merge"
    for name, message in (("run", words), ("adapter", "is an adapter, not .* `xlstm7b merge")):
        with pytest.raises(ValueError, match=message):
            open_base(chosen, str(tmp_path / name))
    later = recipe(data, f"init_from={tmp_path / 'run'}", "start_step=8", "run.steps=9", *QUIET)
    with pytest.raises(ValueError, match=f"^start_step continues a run that trained .*{words}"):
        check_init_from(later, tmp_path / "new")
    with process_group("cpu"), pytest.raises(ValueError, match=r"^start_step continues a run that"):
        Trainer(later, tmp_path / "new", "cpu")
    # The validation loss at the end of the run is that of the merged model.
    merge_checkpoint(bases / "float32", tmp_path / "adapter", tmp_path / "merged")
    open_base(chosen, str(tmp_path / "merged"))
    line = read_metrics(tmp_path / "run/metrics.jsonl")[7]
    for batch in validation_batches(open_folder(data), 32, 8, rank=0, world_size=1, model=config):
        model = XLSTM.from_pretrained(tmp_path / "merged")
        logprobs, _ = model.token_logprobs(batch.tokens, batch.targets, resets=batch.resets)
        loss = -(logprobs * batch.mask).sum() / batch.mask.sum()
        assert loss.item() == pytest.approx(line["validation_loss"], rel=1e-5)
        break


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_compiled_blocks_change_nothing_but_rounding(kind, bases, data, tmp_path):
    base = lora_recipe(data, bases / kind, "run.precision=float32", "run.compile=false")
    run(0, base, tmp_path / "eager", "cuda")
    for mode in ("none", "selective", "products", "block"):
        settings = "run.precision=float32", f"run.activation_checkpointing={mode}"
        run(0, lora_recipe(data, bases / kind, *settings), tmp_path / mode, "cuda")
        assert losses(tmp_path / mode) == pytest.approx(losses(tmp_path / "eager"), abs=1e-3)
    run(0, lora_recipe(data, bases / kind), tmp_path / "narrow", "cuda")
    assert losses(tmp_path / "narrow") == pytest.approx(losses(tmp_path / "eager"), abs=5e-2)
