"""`info`, `verify`, `convert` and `compare`: what they print and write, and their errors."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from checkpoint_files import CONFIG, INDEX, assert_same_tensors, draw, fuse, names_in, save_small
from commands import Cli, loses_the_race, refused, succeeded, write_config
from safetensors.torch import load_file, save_file

from xlstm7b.checkpoint import open_checkpoint, read_config, save_checkpoint, verify
from xlstm7b.config import SIZES, ModelConfig
from xlstm7b.hub import CONFIG_FILES, HubName
from xlstm7b.model import XLSTM

# info


def test_info_prints_a_table(cli: Cli) -> None:
    lines = succeeded(cli("info", "7B")).splitlines()
    cells = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in lines if "│" in line
    }
    assert lines[0].strip() == "xLSTM 7B"
    assert cells["total"] == "6,865,424,896"
    assert cells["C bytes float32"] == "134.2 MB"
    assert cells["kv cache equivalent tokens"] == "128"
    assert cells["cell forward per layer"] == "4.130e+10"
    assert cells["forward per sequence"] == "1.1380e+14"  # of "paper count", the last of the name
    assert cells["forward with printed sizes"] == "1.1348e+14"
    assert cells["transformer parameters"] == "6,863,196,160"
    assert cells["weight bytes float32"] == "27.5 GB"


@pytest.mark.parametrize(
    ("heads", "megabytes", "tokens", "flops"),
    [
        (4, "268.4", 256, "7.6e+10"),
        (8, "134.2", 128, "4.1e+10"),
        (16, "67.1", 64, "2.4e+10"),
        (32, "33.6", 32, "1.5e+10"),
    ],
)
def test_info_reproduces_the_papers_table_from_folders(
    cli: Cli, tmp_path: Path, heads: int, megabytes: str, tokens: int, flops: str
) -> None:
    folder = write_config(tmp_path / "heads", ModelConfig(4096, 32, heads))
    got = json.loads(succeeded(cli("info", folder, "--json")))
    assert got["model"] == str(folder)
    assert got["shape"]["num_heads"] == heads
    assert f"{got['state']['C_bytes_float32'] / 1e6:.1f}" == megabytes
    assert got["state"]["kv_cache_equivalent_tokens"] == tokens
    assert (got["flops"]["context_length"], got["flops"]["chunk_size"]) == (8192, 64)
    assert f"{got['flops']['cell_forward_per_layer']:.1e}" == flops
    assert f"{megabytes} MB" in succeeded(cli("info", folder))


def test_info_json_of_sizes_and_lengths(cli: Cli) -> None:
    seven = json.loads(succeeded(cli("info", "7b", "--json")))
    assert seven["parameters"]["total"] == 6_865_424_896
    assert seven["state"]["C_bytes_float32"] == 134_217_728
    assert seven["memory"]["weight_bytes_float32"] == 4 * 6_865_424_896
    small = json.loads(succeeded(cli("info", "160m", "--json")))
    assert small["parameters"]["total"] == 162_303_840
    long = json.loads(succeeded(cli("info", "7b", "--json", "--context-length", 16384)))
    for key in ("cell_forward_per_layer", "forward_per_sequence"):
        assert long["flops"][key] == 2 * seven["flops"][key]
    chunk = json.loads(succeeded(cli("info", "7b", "--json", "--chunk-size", 256)))
    assert chunk["flops"]["cell_forward_per_layer"] > seven["flops"]["cell_forward_per_layer"]


def test_info_and_plans_name_what_differs_from_the_released_model(cli, tmp_path):
    config = ModelConfig(64, 2, 2, vocab_size=320, norm="layer_norm", gate_soft_cap=None)
    words = succeeded(cli("info", write_config(tmp_path / "model", config))).split()
    assert "layer_norm" in words
    assert words[words.index("soft") + 1 :][:3] == ["cap", "│", "none"]
    settings = ["model.norm=layer_norm", "model.gate_soft_cap=none"]
    options = [word for setting in settings for word in ("--set", setting)]
    words = succeeded(cli("train", "quickstart", "--dry-run", *options)).split()
    assert "layer_norm" in words
    assert words[words.index("soft") + 1 :][:3] == ["cap", "│", "none"]


def test_info_of_a_folder_whose_name_looks_like_markup(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "[").mkdir()
    folder = write_config(tmp_path / "[" / "b]", CONFIG)
    out = succeeded(cli("info", folder))
    assert "".join(out.partition("┌")[0].split()) == f"xLSTM{folder}"


def test_info_of_a_hub_id_reads_only_the_config(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config(tmp_path / "local", CONFIG)

    def download(name: HubName, patterns: Sequence[str]) -> Path:
        assert (str(name), patterns) == ("someone/small@v1/sub", CONFIG_FILES)
        return folder

    monkeypatch.setattr("xlstm7b.hub.download", download)
    got = json.loads(succeeded(cli("info", "someone/small@v1/sub", "--json")))
    assert got["parameters"] == json.loads(succeeded(cli("info", folder, "--json")))["parameters"]


def test_info_errors(cli: Cli, tmp_path: Path) -> None:
    assert refused(cli("info", "8b")).startswith("'8b' is neither a checkpoint folder nor a size")
    assert refused(cli("info", tmp_path / "none")).endswith(
        "none' is neither a checkpoint folder nor a size; sizes: " + ", ".join(SIZES)
    )
    want = f"{tmp_path} holds neither config.json nor config.yaml: not a checkpoint"
    assert refused(cli("info", tmp_path)) == want
    for option in ("context", "chunk"):
        name = "context_length" if option == "context" else "chunk_size"
        assert refused(cli("info", "7b", "--" + name.replace("_", "-"), 0)) == (
            f"{name} must be at least 1, not 0"
        )
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "add_qk_norm": true}')
    want = f"{tmp_path / 'config.json'}: add_qk_norm = True is not supported, "
    assert refused(cli("info", tmp_path)) == want + "only add_qk_norm = False"


# verify


def test_verify_finds_damage(cli: Cli, tmp_path: Path) -> None:
    folder, _ = save_small(tmp_path)
    (folder / "broken").symlink_to("nothing")  # not one of the checkpoint's files
    assert succeeded(cli("verify", folder)) == f"{folder}: 2 files match SHA256SUMS\n"
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1  # in a tensor: it loads without an error
    file.write_bytes(content)
    open_checkpoint(folder)
    want = f"{file} is damaged: its sha256 is not the one in SHA256SUMS"
    assert refused(cli("verify", folder)) == want
    file.unlink()
    assert refused(cli("verify", folder)) == f"{file} is missing, though SHA256SUMS lists it"
    (folder / "SHA256SUMS").unlink()
    want = f"{folder} has no SHA256SUMS, so it cannot be verified"
    assert refused(cli("verify", folder)) == want
    assert refused(cli("verify", file)) == f"there is no folder '{file}'"


# convert


def test_convert_to_bfloat16_and_back(cli: Cli, tmp_path: Path) -> None:
    source, tensors = save_small(tmp_path)
    target = tmp_path / "deeper" / "bfloat16"
    out = succeeded(cli("convert", source, target, "--dtype", "bfloat16"))
    assert out == f"wrote {target}\n"
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert_same_tensors(load_file(target / "model.safetensors"), narrow)
    written = json.loads((target / "config.json").read_text())
    assert written == CONFIG.to_dict("bfloat16")
    assert written["dtype"] == "bfloat16"
    succeeded(cli("convert", target, tmp_path / "wide", "--dtype", "float32"))
    wide = {name: tensor.float() for name, tensor in narrow.items()}
    assert_same_tensors(load_file(tmp_path / "wide" / "model.safetensors"), wide)
    assert read_config(tmp_path / "wide") == CONFIG


def test_convert_refuses_values_that_the_dtype_cannot_hold(cli: Cli, tmp_path: Path) -> None:
    source, tensors = save_small(tmp_path)
    tensors["lm_head.weight"][3, 5] = 1e5
    tensors["backbone.out_norm.weight"][0] = torch.inf  # also in the source
    save_checkpoint(source, CONFIG, tensors.items())
    got = refused(cli("convert", source, tmp_path / "half", "--dtype", "float16"))
    assert got == "lm_head.weight has values that are too large for torch.float16"
    assert names_in(tmp_path) == {"model"}
    succeeded(cli("convert", source, tmp_path / "wide", "--dtype", "bfloat16"))


def test_convert_shards(cli: Cli, tmp_path: Path) -> None:
    source, tensors = save_small(tmp_path)
    target = tmp_path / "shards"
    succeeded(cli("convert", source, target, "--max-shard-size", 40e-6))
    shards = sorted(target.glob("model-*.safetensors"))
    assert len(shards) > 5
    assert names_in(target) == {p.name for p in shards} | {INDEX, "config.json", "SHA256SUMS"}
    for shard in shards:
        held = load_file(shard)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 40_000
    assert_same_tensors(dict(open_checkpoint(target).tensors()), tensors)
    assert verify(target) == len(shards) + 2


def standalone(folder: Path, config: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    """Writes a folder in the authors' format, with fused layers. Returns its tensors."""
    tensors = draw(config)
    theirs = fuse(tensors)
    theirs["embedding.weight"] = theirs.pop("backbone.embeddings.weight")
    folder.mkdir()
    save_file(theirs, folder / "model_0.safetensors")
    values = {**asdict(config), "weight_mode": "fused"}
    (folder / "config.yaml").write_text(yaml.dump(values))
    return tensors


def test_convert_reads_the_authors_format_and_copies_companions(cli: Cli, tmp_path: Path) -> None:
    source, target = tmp_path / "theirs", tmp_path / "ours"
    tensors = standalone(source)
    companions = {"tokenizer.json": "{}", "tokenizer_config.json": "[1]", "LICENSE": "NXAI\n"}
    for name, text in {**companions, "notes.txt": "stay"}.items():
        (source / name).write_text(text)
    (source / "tokenizer_old").mkdir()
    succeeded(cli("convert", source, target))
    assert names_in(target) == {"model.safetensors", "config.json", "SHA256SUMS", *companions}
    assert_same_tensors(load_file(target / "model.safetensors"), tensors)
    assert json.loads((target / "config.json").read_text()) == CONFIG.to_dict("float32")
    assert {name: (target / name).read_text() for name in companions} == companions
    assert succeeded(cli("verify", target)) == f"{target}: 5 files match SHA256SUMS\n"


def test_convert_replaces_only_with_overwrite(cli: Cli, tmp_path: Path) -> None:
    source, tensors = save_small(tmp_path)
    target = tmp_path / "taken"
    succeeded(cli("convert", source, target))
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    again = ("convert", source, target, "--dtype", "bfloat16", "--max-shard-size", 20e-6)
    want = f"{target} exists already; --overwrite replaces the checkpoint in it"
    assert refused(cli(*again)) == want
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    succeeded(cli(*again, "--overwrite"))
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert_same_tensors(dict(open_checkpoint(target).tensors()), narrow)
    assert not (target / "model.safetensors").exists()
    # A checkpoint can replace itself.
    succeeded(cli("convert", source, source, "--dtype", "bfloat16", "--overwrite"))
    assert_same_tensors(load_file(source / "model.safetensors"), narrow)


def test_convert_keeps_what_another_process_writes(cli: Cli, tmp_path: Path) -> None:
    source, _ = save_small(tmp_path)
    target = tmp_path / "target"
    loses_the_race(lambda: cli("convert", source, target), target)
    assert names_in(tmp_path) == {"model", "target"}


def test_convert_errors(cli: Cli, tmp_path: Path) -> None:
    source, _ = save_small(tmp_path)
    target = tmp_path / "target"
    want = "unknown dtype 'int8'; choose from float32, bfloat16, float16"
    assert refused(cli("convert", source, target, "--dtype", "int8")) == want
    for size in ("0", "-1", "nan", "inf"):
        sentence = refused(cli("convert", source, target, "--max-shard-size", size))
        assert sentence == f"--max-shard-size must be a positive number of GB, not {float(size)}"
    sentence = refused(cli("convert", tmp_path / "no" / "such" / "folder", target))
    assert sentence.endswith("is neither a folder nor the id of a hub repository")
    file = tmp_path / "file"
    file.write_text("mine")
    for options in ([], ["--overwrite"]):
        want = f"{file} is a file; a checkpoint is a folder"
        assert refused(cli("convert", source, file, *options)) == want
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    sentence = refused(cli("convert", source, folder, "--overwrite"))
    assert sentence.startswith(f"{folder} holds other files and no config.json")
    assert names_in(tmp_path) == {"model", "file", "folder"}
    assert file.read_text() == (folder / "thesis.tex").read_text() == "mine"


# compare


@pytest.mark.usefixtures("quiet_transformers")
def test_compare_prints_json(cli: Cli, speller: Path) -> None:
    short = ("--max-new-tokens", 6, "--speed-length", 8)
    got = json.loads(succeeded(cli("compare", speller, *short, "--device", "cpu", "--json")))
    assert (got["dtype"], got["device"], got["speed_length"]) == ("float32", "cpu", 8)
    assert len(got["prompts"]) == 4
    for row in got["prompts"]:
        assert row["tokens"] == 1 + len(row["prompt"].encode())
        assert row["relative_difference"] < 1e-4
        assert row["largest_difference"] < 1e-2
        assert row["same_greedy_tokens"] == row["greedy_tokens"] == 6
    for name in ("ours", "theirs"):
        assert got[name]["prefill"] > 0
        assert got[name]["decode"] > 0


@pytest.mark.usefixtures("quiet_transformers")
def test_compare_without_a_tokenizer_prints_a_table(cli: Cli, tmp_path: Path) -> None:
    XLSTM(ModelConfig(128, 1, 2, vocab_size=50)).save_pretrained(tmp_path)
    out = succeeded(cli("compare", tmp_path, "--max-new-tokens", 2, "--speed-length", 4))
    assert out.count("2/2") == 3
    assert "xlstm7b and transformers, float32 on " in out
    assert "prefill of 4" in out


@pytest.mark.usefixtures("quiet_transformers")
def test_compare_names_a_folder_that_transformers_cannot_load(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    standalone(folder, replace(CONFIG, embedding_dim=128))
    sentence = refused(cli("compare", folder))
    assert sentence.startswith(f"transformers does not load {folder}: ")


@pytest.mark.usefixtures("quiet_transformers")
def test_compare_names_widths_that_transformers_cannot_run(cli: Cli, tmp_path: Path) -> None:
    XLSTM(ModelConfig(64, 1, 2, vocab_size=320)).save_pretrained(tmp_path)
    want = "transformers cannot run this model: qk_dim_factor gives its queries and keys a width "
    assert refused(cli("compare", tmp_path)) == f"{want}of 32, which is not a multiple of 64"


@pytest.mark.parametrize(
    "variant", [{"norm": "layer_norm"}, {"gate_soft_cap": None}, {"input_gate": "fixed"}]
)
def test_compare_refuses_variants_that_transformers_does_not_compute(
    cli: Cli, tmp_path: Path, variant: dict[str, str | None]
) -> None:
    XLSTM(ModelConfig(128, 1, 2, vocab_size=320, **variant)).save_pretrained(tmp_path)
    [(name, value)] = variant.items()
    want = f"transformers cannot load this model: it has {name} = {value!r}"
    assert refused(cli("compare", tmp_path)) == want


def test_compare_errors(cli: Cli, speller: Path) -> None:
    for options in (["--max-new-tokens", 0], ["--speed-length", 0]):
        sentence = refused(cli("compare", speller, *options))
        assert sentence == "max_new_tokens and speed_length must be at least 1"
    assert refused(cli("compare", "7b")).startswith("'7b' is neither a folder nor")
    assert refused(cli("compare", speller, "--dtype", "x")).startswith("unknown dtype 'x'")
