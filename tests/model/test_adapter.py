"""Adapters: PEFT loads ours, we load PEFT's; merged weights; files that do not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapters import TARGETS, adapted_model, random_adapter, write_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from models import open_gates
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from xlstm7b.checkpoint import open_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import (
    check_base,
    load_adapter,
    merge_adapter,
    merge_checkpoint,
)
from xlstm7b.model.quantizer import quantize_checkpoint
from xlstm7b.quantize.config import Quantization

CONFIG = ModelConfig(128, 2, 2, vocab_size=320)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = open_gates(XLSTM(CONFIG), 0.2)
    folder = tmp_path_factory.mktemp("models") / "base"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(tmp_path_factory.mktemp("adapters") / "adapter", base)


def tokens() -> torch.Tensor:
    return torch.arange(2 * 33).view(2, 33) * 7 % 320


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (got - want).norm() <= tolerance * want.norm()


@settings(max_examples=6, deadline=None)
@given(
    targets=st.lists(
        st.sampled_from([*TARGETS, "igate_preact", "fgate_preact"]), min_size=1, unique=True
    ),
    rank=st.integers(1, 7),
    alpha=st.floats(0.5, 20),
)
@torch.no_grad()
def test_merged_weights_compute_what_the_adapter_does(targets, rank, alpha, base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged")
    wide = torch.float64
    model = adapted_model(base, targets, rank=rank, alpha=alpha, dtype=wide)
    saved = write_adapter(model, folder / "adapter", base)
    merged = XLSTM.from_pretrained(base, dtype=wide)
    merge_adapter(merged, load_adapter(saved, CONFIG))
    want = model(tokens())[0]
    close(merged(tokens())[0], want, 1e-10)
    plain = XLSTM.from_pretrained(base)
    assert (plain(tokens())[0] - want).norm() > 1e-5 * want.norm()
    merge_checkpoint(base, saved, folder / "written")
    written = XLSTM.from_pretrained(folder / "written")
    merge_adapter(plain, load_adapter(saved, CONFIG))
    for one, two in zip(written.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)


def on_transformers(folder: Path) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "xLSTMForCausalLM"
    return model.eval()


@torch.no_grad()
def test_peft_loads_ours(base, adapter):
    peft = pytest.importorskip("peft")
    theirs = peft.PeftModel.from_pretrained(on_transformers(base), adapter).eval()
    ours = XLSTM.from_pretrained(base)
    merge_adapter(ours, load_adapter(adapter, CONFIG))
    close(theirs(tokens()).logits, ours(tokens())[0])
    merged = theirs.merge_and_unload()
    close(merged(tokens()).logits, ours(tokens())[0])


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "target_modules": TARGETS},
        {
            "r": 4,
            "target_modules": ["q", "v", "igate_preact", "proj_down", "lm_head"],
            "rank_pattern": {"q": 2},
            "alpha_pattern": {"mlstm_layer.v": 3},
        },
        {"r": 5, "lora_alpha": 3, "use_rslora": True, "target_modules": r".*blocks\.1.*proj_up"},
    ],
    ids=["all", "patterns", "rslora"],
)
@torch.no_grad()
def test_we_load_those_of_peft(options, base, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(init_lora_weights=False, **options)
    theirs = peft.get_peft_model(on_transformers(base), config).eval()
    theirs.save_pretrained(tmp_path)
    ours = XLSTM.from_pretrained(base, dtype=torch.float64)
    adapter = load_adapter(tmp_path, CONFIG)
    check_base(adapter, open_checkpoint(base))  # it holds no fingerprint
    merge_adapter(ours, adapter)
    want = theirs.double()(tokens()).logits  # in float32, rounding alone can exceed the bound
    close(ours(tokens())[0], want)
    assert (XLSTM.from_pretrained(base)(tokens())[0] - want).norm() > 1e-3 * want.norm()


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"target_modules": ["q", "embeddings"]}, "embedding_A' is not supported, only .* lora_B"),
    ],
    ids=["bias", "modules_to_save", "dora", "embeddings"],
)
@torch.no_grad()
def test_peft_merges_those_that_we_refuse(options, refused, base, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q", "v"], **options})
    theirs = peft.get_peft_model(on_transformers(base), config).eval()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"{refused}: merge the adapter with PEFT first, by "):
        load_adapter(tmp_path / "adapter", CONFIG)
    loaded = peft.PeftModel.from_pretrained(on_transformers(base), tmp_path / "adapter")
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    want = theirs(tokens()).logits
    close(XLSTM.from_pretrained(tmp_path / "merged")(tokens())[0], want)
    assert (XLSTM.from_pretrained(base)(tokens())[0] - want).norm() > 1e-3 * want.norm()


def test_an_adapter_knows_its_base(base, adapter, tmp_path):
    loaded = load_adapter(adapter, CONFIG)
    check_base(loaded, open_checkpoint(base))
    # The same weights in bfloat16, and quantised, are the same base. A copy in float16 is not.
    XLSTM.from_pretrained(base).bfloat16().save_pretrained(tmp_path / "narrow")
    check_base(loaded, open_checkpoint(tmp_path / "narrow"))
    quantize_checkpoint(base, tmp_path / "int4", Quantization.named("int4"))
    check_base(loaded, open_checkpoint(tmp_path / "int4"))
    XLSTM.from_pretrained(base).half().save_pretrained(tmp_path / "half")
    with pytest.raises(ValueError, match=r"trained on other weights than those in .*half"):
        check_base(loaded, open_checkpoint(tmp_path / "half"))
    with pytest.raises(ValueError, match=r"int4 are quantised, .*: merge it into the float"):
        merge_checkpoint(tmp_path / "int4", adapter, tmp_path / "no")
    # A model that it is already merged into is another base.
    merge_checkpoint(base, adapter, tmp_path / "merged")
    with pytest.raises(ValueError, match=rf"trained on other weights .*trained on, {base}"):
        merge_checkpoint(tmp_path / "merged", adapter, tmp_path / "no")
    with pytest.raises(ValueError, match="is also read; choose another folder"):
        merge_checkpoint(base, adapter, base)
    assert not (tmp_path / "no").exists()


def test_the_fingerprint_is_of_both_sides_and_the_scale(base, adapter, tmp_path):
    before = load_adapter(adapter, CONFIG).fingerprint
    change(adapter, tmp_path / "a", lambda settings, tensors: settings.update(lora_alpha=9.0))
    change(adapter, tmp_path / "b", lambda settings, tensors: next(iter(tensors.values())).neg_())
    found = {load_adapter(tmp_path / name, CONFIG).fingerprint for name in "ab"}
    assert len(found | {before}) == 3


def change(source: Path, target: Path, edit: Callable[[dict, dict], object]) -> None:
    """A copy of an adapter with other settings or tensors."""
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    edit(config, tensors)
    target.mkdir()
    (target / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, target / "adapter_model.safetensors")


Q = "base_model.model.backbone.blocks.0.mlstm_layer.q."


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c, t: c.update(peft_type="IA3"), "the peft_type 'IA3' is not supported"),
        (lambda c, t: c.update(use_dora=True), "use_dora = True is not supported"),
        (lambda c, t: c.update(bias="all"), "bias = 'all' is not supported"),
        (lambda c, t: c.update(modules_to_save=["q"]), "modules_to_save = .* is not supported"),
        (lambda c, t: c.update(init_lora_weights="pissa"), "'pissa' changes the base's weights"),
        (lambda c, t: c.update(lora_alpha="4"), "lora_alpha is '4', not a finite number"),
        (lambda c, t: c.update(lora_alpha=torch.inf), "lora_alpha is inf, not a finite number"),
        (lambda c, t: c.update(lora_alpha=10**400), "not a finite number"),
        (lambda c, t: c.update(alpha_pattern={"q": None}), "lora_alpha is None, not a finite"),
        (lambda c, t: c.update(alpha_pattern=["q"]), r"alpha_pattern is \['q'\], not an object"),
        (lambda c, t: c.update(alpha_pattern={"(": 1}), r"alpha_pattern: '\(' is no regular expr"),
        (lambda c, t: c.update(r=99), "the rank of .* is 99, but A and B have"),
        (lambda c, t: c.update(rank_pattern={"q": 9}), r"the rank of .*\.q is 9, but"),
        (lambda c, t: t.clear(), "holds no adapter"),
        (lambda c, t: t.pop(Q + "lora_B.weight"), r"A and B of .*\.q have the shapes \{'A'"),
        (lambda c, t: t.update({Q + "lora_A.weight": torch.ones(4, 3)}), r"of .*\.q have the shap"),
        (lambda c, t: t.update({Q + "lora_A.weight": torch.tensor(1.0)}), r"\.q have the shapes"),
        (
            lambda c, t: t.update({Q + "lora_A.default.weight": torch.ones(4, 128)}),
            r"holds lora_A of .*\.q twice",
        ),
        (lambda c, t: t.update({Q + "lora_C.weight": torch.ones(1)}), "only lora_A and lora_B"),
        (lambda c, t: t.update({"x.lora_A.weight": torch.ones(1)}), "for no matrix of this model"),
        (lambda c, t: t[Q + "lora_A.weight"].fill_(torch.inf), "not finite numbers"),
        (
            lambda c, t: t.update({Q + "lora_A.weight": torch.ones(4, 128, dtype=torch.int64)}),
            r"lora_A\.weight' is of type int64, not of a floating-point type",
        ),
    ],
)
def test_adapters_that_do_not_fit(edit, message, adapter, tmp_path):
    change(adapter, tmp_path / "changed", edit)
    with pytest.raises(ValueError, match=message):
        load_adapter(tmp_path / "changed", CONFIG)


def test_a_pattern_that_takes_years_is_refused(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr("xlstm7b.patterns._SECONDS", 1)
    years = {"(.*)*(.*)*!": 3}
    change(adapter, tmp_path / "changed", lambda c, t: c.update(alpha_pattern=years))
    with pytest.raises(ValueError, match=r"alpha_pattern: the regular expressions take .* 1 s"):
        load_adapter(tmp_path / "changed", CONFIG)


def test_a_config_that_is_no_object(adapter, tmp_path):
    change(adapter, tmp_path / "changed", lambda c, t: None)
    (tmp_path / "changed" / "adapter_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"adapter_config\.json holds a JSON list, not an object"):
        load_adapter(tmp_path / "changed", CONFIG)


@pytest.mark.parametrize("fingerprint", ["[1]", '"x"', "[" * 100_000, "{"])
def test_damaged_fingerprints_of_the_base(fingerprint, adapter, tmp_path):
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"base": fingerprint})
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged: "):
        load_adapter(tmp_path, CONFIG)


def test_the_format_is_written_and_that_of_a_newer_version_is_refused(adapter, tmp_path):
    path = adapter / "adapter_model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["xlstm7b_format"] == "1"
    shutil.copytree(adapter, tmp_path / "newer")
    path = tmp_path / "newer" / path.name
    save_file(load_file(path), path, metadata=metadata | {"xlstm7b_format": "2"})
    with pytest.raises(ValueError, match=r"has format 2, .* reads formats up to 1: upgrade"):
        load_adapter(tmp_path / "newer", CONFIG)


def test_weights_of_8_bits_are_read(adapter, tmp_path):
    def narrow(_: dict, tensors: dict) -> None:
        tensors.update({key: part.to(torch.float8_e4m3fn) for key, part in tensors.items()})

    change(adapter, tmp_path / "narrow", narrow)
    assert load_adapter(tmp_path / "narrow", CONFIG).layers


def test_folders_that_are_no_adapters(base, adapter, tmp_path):
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json"):
        load_adapter(base, CONFIG)
    advice = r"is an adapter, not a model: give the model that it adapts \(generate, chat, eval and"
    with pytest.raises(ValueError, match=advice):
        open_checkpoint(adapter)
    (tmp_path / "several" / "a").mkdir(parents=True)
    shutil.copytree(adapter, tmp_path / "several" / "b")
    with pytest.raises(ValueError, match=r"not an adapter; give \S*several/b$"):
        load_adapter(tmp_path / "several", CONFIG)
    (tmp_path / "checkpoints").mkdir()
    for read in (open_checkpoint, lambda folder: load_adapter(folder, CONFIG)):
        with pytest.raises(ValueError, match="give the folder that `xlstm7b export` makes of"):
            read(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match="there is no file"):
        load_adapter(tmp_path, CONFIG)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ValueError, match="holds a pickle"):
        load_adapter(tmp_path, CONFIG)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        load_adapter(tmp_path, CONFIG)
    with pytest.raises(ValueError, match=r"A and B of .* for a matrix of"):
        load_adapter(adapter, ModelConfig(64, 2, 2, vocab_size=320))
