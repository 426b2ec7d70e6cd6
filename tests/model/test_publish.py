"""Uploads to a stand-in for the hub, what they refuse, and the model cards."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import random_adapter
from checkpoint_files import names_in, run
from hub_stand_in import TOKEN, standing_in
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from models import random_model

from xlstm7b.checkpoint import save_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator
from xlstm7b.model.publish import NXAI, Options, Upload, prepare
from xlstm7b.model.quantizer import quantize_checkpoint
from xlstm7b.quantize.config import Quantization
from xlstm7b.tokenizer import ByteTokenizer, write_tokenizer
from xlstm7b.train import load_recipe

CONFIG = ModelConfig(128, 2, 2, vocab_size=320)
LICENSED: Options = {"license": "apache-2.0"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, the same in 4 bits, an adapter and a saved state of it."""
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    model = random_model(CONFIG, torch.float32)
    aside = tmp_path_factory.mktemp("tokenizer")
    companions = write_tokenizer(aside, ByteTokenizer(), CONFIG, "{{ messages }}")
    save_checkpoint(folder / "model", CONFIG, model.named_parameters(), companions=companions)
    quantize_checkpoint(folder / "model", folder / "int4", Quantization.named("int4"))
    random_adapter(folder / "adapter", folder / "model")
    Generator(model, ByteTokenizer()).read("The sea").save(folder / "read.safetensors")
    return folder


@pytest.fixture
def model(sources: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder."""
    for path in (sources / "model").iterdir():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "model"


# Uploads

# Uploads everything, loads it again by its name on the hub, and compares.
SCRIPT = """if True:
    import sys
    from pathlib import Path
    import torch
    from xlstm7b import XLSTM, Generator, ModelConfig, SavedState, load_tokenizer
    from xlstm7b.model.adapter import load_adapter
    from xlstm7b.model.publish import push_to_hub

    sources = Path(sys.argv[1])
    options = {"license": "apache-2.0"}
    tokens = torch.arange(2, 60)[None]
    model = XLSTM.from_pretrained(sources / "model")
    state = Generator(model, load_tokenizer(sources / "model", 320)).read("The sea")
    adapter = load_adapter(sources / "adapter", model.config)

    # 1. The model: in Python, and as a folder with its tokenizer.
    model.push_to_hub("some/model", revision="v1", subfolder="a/b", **options)
    loaded = XLSTM.from_pretrained("some/model", revision="v1", subfolder="a/b")
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])
    assert ModelConfig.from_pretrained("some/model@v1/a/b") == model.config
    print(push_to_hub(sources / "model", "some/model", **options))
    generator = Generator.from_pretrained("some/model", device="cpu")
    assert torch.equal(generator.model(tokens)[0], model(tokens)[0])
    # 2. The adapter.
    adapter.push_to_hub("some/model/adapters/one", **options)
    again = load_adapter("some/model/adapters/one", model.config)
    assert again.fingerprint == adapter.fingerprint
    assert load_adapter("some/model", model.config, subfolder="adapters/one").base == adapter.base
    Generator.from_pretrained("some/model", adapter="some/model/adapters/one", device="cpu")
    # 3. The state.
    state.push_to_hub("some/state", private=True, **options)
    saved = SavedState.from_pretrained("some/state", model.config)
    assert torch.equal(saved.logits, state.logits)
    # 4. The quantised folder, in the place of the float weights of a branch.
    push_to_hub(sources / "int4", "some/model@v1/a/b", **options)
    quantized = XLSTM.from_pretrained("some/model@v1/a/b")
    local = XLSTM.from_pretrained(sources / "int4")
    assert quantized.is_quantized and torch.equal(quantized(tokens)[0], local(tokens)[0])
"""


def test_what_was_pushed_is_loaded_again(sources: Path, tmp_path: Path) -> None:
    with standing_in() as server:
        out = run(SCRIPT, sources, **server.environment(tmp_path, TOKEN))
        model, state = server.repositories["some/model"], server.repositories["some/state"]
    main, branch = (model.commits[model.branches[name]] for name in ("main", "v1"))
    assert out.endswith(f"/some/model/commit/{[*model.commits][2]}\n")
    pushed = {name for name in main if "/" not in name}
    assert pushed == {*names_in(sources / "model"), "README.md", ".gitattributes"}
    adapter = {*names_in(sources / "adapter"), "README.md"}
    assert {name for name in main if "/" in name} == {f"adapters/one/{name}" for name in adapter}
    int4 = {*names_in(sources / "int4"), "README.md"}
    assert {name for name in branch if "/" in name} == {f"a/b/{name}" for name in int4}
    assert (model.private, state.private) == (False, True)
    assert {*state.commits[state.branches["main"]]} == {
        *(".gitattributes", "README.md", "state.safetensors")
    }


# What is refused before anything is sent


def test_files_that_do_not_belong_are_refused(model: Path) -> None:
    for name in (".git", ".cache", "__pycache__"):
        (model / name).mkdir()
        (model / name / "token").write_text("hf_secret")
    (model / ".env").write_text("HF_TOKEN=hf_secret")
    found = prepare(model, "some/model", **LICENSED)
    assert {*found.files} == {
        *("model.safetensors", "config.json", "SHA256SUMS", "README.md"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    for name in ("optimizer.pt", "token", "checkpoints/step-1", "adapter_model.safetensors"):
        path = model / name
        path.mkdir(parents=True) if "/" in name else path.touch()
        first = model / name.partition("/")[0]
        with pytest.raises(ValueError, match=rf"^{first} does not belong to what is uploaded"):
            prepare(model, "some/model", **LICENSED)
        path.rmdir() if "/" in name else path.unlink()
        if "/" in name:
            first.rmdir()


def test_damaged_files_are_refused(model: Path, sources: Path, tmp_path: Path) -> None:
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        prepare(model, "some/model", **LICENSED)
    (model / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match=r"has no SHA256SUMS .*`xlstm7b convert"):
        prepare(model, "some/model", **LICENSED)
    content = bytearray((sources / "read.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its checksum is wrong"):
        prepare(tmp_path / "damaged.safetensors", "some/state", **LICENSED)
    with pytest.raises(ValueError, match="holds no saved state"):
        prepare(model / "model.safetensors", "some/state", **LICENSED)


def test_a_run_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="give the folder that `xlstm7b export` makes of it"):
        prepare(tmp_path, "some/model", **LICENSED)


@pytest.mark.parametrize("repo", ["model", "some/model@refs/../x", "/some/model", ""])
def test_names_are_checked(model: Path, repo: str) -> None:
    with pytest.raises(ValueError, match="is not user/repo, user/repo@branch or either with"):
        prepare(model, repo, **LICENSED)
    with pytest.raises(ValueError, match=r"^'some/model@refs/pr/1' is not user/repo"):
        prepare(model, "some/model", revision="refs/pr/1", **LICENSED)


@pytest.mark.parametrize("chosen", [None, "", "other", "Apache 2.0", "x: y"])
def test_a_licence_is_asked_for(model: Path, chosen: str | None) -> None:
    with pytest.raises(ValueError, match="give an identifier of the hub, such as"):
        prepare(model, "some/model", license=chosen)
    with pytest.raises(ValueError, match="give an identifier of the hub"):  # nothing is saved
        random_model(CONFIG).push_to_hub("some/model", license=chosen)


# Cards


def parsed(upload: Upload) -> dict[str, Any]:
    """The front matter. The rest must be Markdown whose tables, headings and code are complete."""
    values: dict[str, Any] = ModelCard(upload.card).data.to_dict()
    text = upload.card.split("---\n", 2)[2]
    kinds = [token.type for token in MarkdownIt("commonmark").enable("table").parse(text)]
    assert kinds[0] == "heading_open"
    assert kinds.count("table_open") == text.count("\n| --- |") > 0
    assert "hr" not in kinds
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(code, "card", "exec")
    return values


def test_the_card_of_a_model(sources: Path, tmp_path: Path) -> None:
    upload = prepare(sources / "model", "some/model@v1/a", **LICENSED)
    assert parsed(upload) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["xlstm", "xlstm7b"],
    }
    assert upload.card.count('"some/model", revision="v1", subfolder="a"') == 3
    for line in (
        *("# a", "| embedding | 128 |", "| weights | float32 |", "xlstm7b serve some/model@v1/a"),
        'vllm serve "$(xlstm7b download some/model@v1/a)"',
    ):
        assert f"\n{line}\n" in upload.card
    assert (
        "vllm serve some/model --revision v1\n"
        in prepare(sources / "model", "some/model", revision="v1", **LICENSED).card
    )
    assert str(sources) not in upload.card


def test_the_card_of_the_released_weights_has_their_licence(model: Path) -> None:
    upload = prepare(model, "some/model", license=NXAI)
    values = parsed(upload)
    assert (values["license"], values["license_name"]) == ("other", NXAI)
    assert values["license_link"] == "https://huggingface.co/NX-AI/xLSTM-7b"
    assert "## Licence\n" in upload.card
    (model / "LICENSE").write_text("the terms")
    assert parsed(prepare(model, "some/model", license=NXAI))["license_link"] == "LICENSE"


def test_the_cards_of_other_kinds(sources: Path) -> None:
    card = {name: prepare(sources / name, "some/thing", **LICENSED) for name in names_in(sources)}
    assert parsed(card["int4"])["tags"][-1] == "quantized"
    assert "import xlstm7b.integrations.transformers" in card["int4"].card
    assert "vllm serve" not in card["int4"].card
    assert parsed(card["adapter"])["library_name"] == "peft"
    assert "| rank | 4 |\n" in card["adapter"].card
    assert "base_model" not in parsed(card["adapter"])  # it was a local folder
    assert parsed(card["read.safetensors"])["tags"][-1] == "state"
    assert "| tokens read | 8 |\n" in card["read.safetensors"].card
    assert {*card["read.safetensors"].files} == {"state.safetensors", "README.md"}


def test_the_base_of_an_adapter_is_named(sources: Path, tmp_path: Path) -> None:
    for path in (sources / "adapter").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "NX-AI/xLSTM-7b@main"
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    upload = prepare(tmp_path, "some/adapter", **LICENSED)
    values = parsed(upload)
    assert (values["base_model"], values["base_model_relation"]) == ("NX-AI/xLSTM-7b", "adapter")
    assert "xlstm7b serve NX-AI/xLSTM-7b@main --adapter some/adapter\n" in upload.card
    assert 'CausalLM.from_pretrained("NX-AI/xLSTM-7b", revision="main")\n' in upload.card


def test_a_model_that_transformers_cannot_run_says_so(tmp_path: Path) -> None:
    config = ModelConfig(64, 1, 2, vocab_size=320)
    random_model(config, torch.float32).save_pretrained(tmp_path)
    upload = prepare(tmp_path, "some/model", **LICENSED)
    assert parsed(upload)["library_name"] == "xlstm7b"
    assert "transformers cannot run this model" in upload.card
    assert "AutoModel" not in upload.card


def test_results_and_the_run_are_in_the_card(sources: Path, tmp_path: Path) -> None:
    shape = ["model.embedding_dim=128", "model.num_blocks=2", "model.num_heads=2"]
    recipe = load_recipe("quickstart", [*shape, "init_from=NX-AI/xLSTM-7b@v2/sub"])
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    results = {("lambada", "acc"): 0.51234, ("a|b", "ppl"): "3.1 ± 0.2"}
    upload = prepare(sources / "model", "some/model", results=results, run=tmp_path, license="mit")
    values = parsed(upload)
    assert (values["base_model"], values["base_model_relation"]) == ("NX-AI/xLSTM-7b", "finetune")
    for row in (
        *("recipe | quickstart", "data (weight) | python (1)", "steps | 220"),
        *("lambada | acc | 0.5123", r"a\|b | ppl | 3.1 ± 0.2"),
    ):
        assert f"\n| {row} |\n" in upload.card
    assert recipe.data.sources["python"].path not in upload.card
    with pytest.raises(ValueError, match=r"it has no recipe\.json"):
        prepare(sources / "model", "some/model", run=sources, **LICENSED)
    other = load_recipe("quickstart", ["model.num_blocks=3"])
    (tmp_path / "recipe.json").write_text(json.dumps(other.to_dict()))
    with pytest.raises(ValueError, match="trained a model of another shape"):
        prepare(sources / "model", "some/model", run=tmp_path, **LICENSED)


def test_a_card_of_ones_own_is_taken(model: Path) -> None:
    (model / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert prepare(model, "some/model").card.endswith("# Mine\n")
    with pytest.raises(ValueError, match=r"README\.md is taken as the card"):
        prepare(model, "some/model", **LICENSED)
