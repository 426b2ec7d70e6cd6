"""Checkpoints: every format is read and written bit for bit."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from checkpoint_files import (
    CONFIG,
    INDEX,
    assert_same_tensors,
    draw,
    fuse,
    names_in,
    run,
    save_small,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from xlstm7b.checkpoint import open_checkpoint, resolve, save_checkpoint, verify
from xlstm7b.config import ModelConfig

LAYER = "backbone.blocks.1.mlstm_layer."


# Writing and reading back


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors, folder = draw(dtype=dtype), tmp_path / "new" / "model"
    save_checkpoint(folder, CONFIG, tensors.items())
    assert names_in(folder) == {"model.safetensors", "config.json", "SHA256SUMS"}
    assert_same_tensors(load_file(folder / "model.safetensors"), tensors)
    with safe_open(folder / "model.safetensors", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    opened = open_checkpoint(folder)
    assert (opened.folder, opened.config, opened.dtype) == (folder, CONFIG, dtype)
    assert opened.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert_same_tensors(dict(opened.tensors()), tensors)
    written = json.loads((folder / "config.json").read_text())
    assert written == CONFIG.to_dict(str(dtype).removeprefix("torch."))
    assert verify(folder) == 2
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)


def test_shards_stay_below_the_limit(tmp_path: Path) -> None:
    tensors, limit = draw(), 40_000
    save_checkpoint(tmp_path, CONFIG, tensors.items(), max_shard_bytes=limit)
    index = json.loads((tmp_path / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [
        f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))
    ]
    assert len(shards) > 5
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name in shards:
        held = load_file(tmp_path / name)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= limit
        assert all(index["weight_map"][key] == name for key in held)
    assert_same_tensors(dict(open_checkpoint(tmp_path).tensors()), tensors)
    assert verify(tmp_path) == len(shards) + 2


def test_mixed_dtypes_keep_their_bits_and_alignment(tmp_path: Path) -> None:
    tensors = draw()
    for number, name in enumerate(tensors):
        tensors[name] = tensors[name].to([torch.bfloat16, torch.float32][number % 2])
    save_checkpoint(tmp_path, CONFIG, tensors.items())
    opened = open_checkpoint(tmp_path)
    assert opened.dtype == torch.float32
    for name, tensor in opened.tensors():
        assert torch.equal(tensor, tensors[name])
        assert tensor.data_ptr() % tensor.itemsize == 0


def test_saving_casts_and_handles_views_and_strides(tmp_path: Path) -> None:
    tensors = draw()
    store = torch.randn(64 * 64 * 2)
    tensors[LAYER + "q.weight"] = store[: 64 * 32].view(64, 32).T
    tensors[LAYER + "k.weight"] = store[: 64 * 32].view(32, 64)
    tensors[LAYER + "v.weight"] = torch.nn.Parameter(store.view(64, 128)[:, ::2])
    tensors["lm_head.weight"] = torch.ones(1).expand(7, 64)
    seen: list[tuple[str, int]] = []
    save_checkpoint(
        tmp_path,
        CONFIG,
        tensors.items(),
        dtype=torch.bfloat16,
        progress=lambda *step: seen.append(step),
    )
    want = {name: tensor.detach().bfloat16() for name, tensor in tensors.items()}
    assert_same_tensors(dict(open_checkpoint(tmp_path).tensors()), want)
    assert seen == [(name, tensor.nbytes) for name, tensor in want.items()]


def test_copy_casts_into_any_destination(tmp_path: Path) -> None:
    folder, tensors = save_small(tmp_path)
    places: dict[str, Tensor]
    places = {
        name: torch.nn.Parameter(torch.zeros_like(t, dtype=torch.bfloat16))
        for name, t in tensors.items()
    }
    places[LAYER + "q.weight"] = torch.zeros(64, 32, dtype=torch.float64).T
    before = {name: place.data_ptr() for name, place in places.items()}
    seen: list[tuple[str, int]] = []
    opened = open_checkpoint(str(folder))
    opened.copy_into(places, progress=lambda *step: seen.append(step))
    for name, place in places.items():
        assert torch.equal(place, tensors[name].to(place.dtype))
        assert place.data_ptr() == before[name]
    assert {name for name, _ in seen} == set(tensors)
    assert sum(nbytes for _, nbytes in seen) == opened.nbytes


@pytest.mark.parametrize("fault", ["missing", "extra", "misshapen"])
def test_a_wrong_destination_is_refused_before_any_copy(tmp_path: Path, fault: str) -> None:
    folder, tensors = save_small(tmp_path)
    places = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    if fault == "missing":
        del places["lm_head.weight"]
    else:
        places["lm_head.weight" if fault == "misshapen" else "lm_head.bias"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"lm_head\..* in the checkpoint, but .* in the model"):
        open_checkpoint(folder).copy_into(places)
    assert not any(place.any() for place in places.values())


# The other formats


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_authors_format_is_read(tmp_path: Path, fused: bool, shards: int) -> None:
    values = {
        "embedding_dim": 12,
        "num_blocks": 2,
        "num_heads": 2,
        "vocab_size": 7,
        "ffn_round_up_to_multiple_of": 1,
        "weight_mode": "fused",
    }
    (tmp_path / "config.yaml").write_text(yaml.dump(values))
    # The defaults of the authors' code.
    config = ModelConfig(
        12,
        2,
        2,
        7,
        mlstm_round_up_to_multiple_of=1,
        ffn_proj_factor=2.6667,
        ffn_round_up_to_multiple_of=1,
    )
    assert (config.qk_dim, config.v_dim, config.ffn_dim) == (6, 12, 32)
    tensors = draw(config)
    theirs = fuse(tensors) if fused else dict(tensors)
    theirs["embedding.weight"] = theirs.pop("backbone.embeddings.weight")
    keys = list(theirs)
    for n in range(shards):
        name = "model.safetensors" if shards == 1 else f"model_{n}.safetensors"
        save_file({key: theirs[key] for key in keys[n::shards]}, tmp_path / name)
    opened = open_checkpoint(tmp_path)
    assert opened.config == config
    assert_same_tensors(dict(opened.tensors()), tensors)
    if shards > 1:
        (tmp_path / "model_1.safetensors").unlink()
        with pytest.raises(ValueError, match=r"there is no file .*model_1\.safetensors"):
            open_checkpoint(tmp_path)


def test_fused_keys_are_split_into_views(tmp_path: Path) -> None:
    folder, tensors = save_small(tmp_path)
    save_file(fuse(tensors), folder / "model.safetensors")
    got = dict(open_checkpoint(folder).tensors())
    assert_same_tensors(got, tensors)
    q, k = got[LAYER + "q.weight"], got[LAYER + "k.weight"]
    assert k.data_ptr() == q.data_ptr() + q.nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "a: [",
        "num_heads: !!bool x",
        "a: &a [1]\nb: *a",
        "\0",
        "x: 2024-13-45",
        "embedding_dim: 12",
        "!!python/object:os.system {}",
        "[" * 999,
    ],
)
def test_bad_yaml_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml: ."):
        open_checkpoint(tmp_path)


def test_other_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("7b", "/no/such/folder", "../up/there", "a/b/../c", "a b/c", "a/b\n"):
        with pytest.raises(ValueError, match="is neither a folder nor the id of a hub repository"):
            resolve(name)
    with pytest.raises(ValueError, match="file is a file, not a folder"):
        resolve(tmp_path / "file")
    with pytest.raises(ValueError, match=r"a folder or hub id is needed, and .* is empty"):
        resolve("")
    with pytest.raises(ValueError, match=r"neither config\.json nor config\.yaml"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


# Memory


def test_copying_takes_no_more_memory_than_the_tensors(tmp_path: Path) -> None:
    config = ModelConfig(embedding_dim=1024, num_blocks=8, num_heads=4, vocab_size=4096)
    numbers = torch.randn(4096 * 1024)
    save_checkpoint(
        tmp_path,
        config,
        (
            (name, numbers[: shape.numel()].view(shape))
            for name, shape in ((n, torch.Size(s)) for n, s in config.parameter_shapes().items())
        ),
    )
    assert (tmp_path / "model.safetensors").stat().st_size > 400_000_000
    script = """if True:
        import sys, threading, time
        import torch
        from xlstm7b.checkpoint import open_checkpoint
        def anonymous():
            for line in open("/proc/self/status"):
                if line.startswith("RssAnon"):
                    return int(line.split()[1]) * 1024
        def watch():
            while not done:
                samples.append(anonymous())
                time.sleep(0.0005)
        dtype, done, samples = getattr(torch, sys.argv[2]), False, []
        opened = open_checkpoint(sys.argv[1])
        shapes = opened.config.parameter_shapes()
        before = anonymous()
        # One allocation: many small ones can take 15 % more (mimalloc, on ARM).
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        flat = torch.empty(sum(sizes), dtype=dtype).split(sizes)
        places = {name: part.view(shapes[name]) for name, part in zip(shapes, flat)}
        thread = threading.Thread(target=watch)
        thread.start()
        opened.copy_into(places)
        done = True
        thread.join()
        peak = max(*samples, anonymous()) - before
        print(peak / sum(place.nbytes for place in places.values()), len(samples))
        assert all(torch.equal(places[name], t.to(dtype)) for name, t in opened.tensors())
    """
    for dtype in ("float32", "bfloat16"):
        ratio, samples = map(float, run(script, tmp_path, dtype).split())
        assert 0.9 < ratio < 1.05
        assert samples > 20
    shutil.rmtree(tmp_path)  # pytest keeps the folders of its last runs


def test_the_fingerprint_is_that_of_the_weights_not_of_the_files(tmp_path: Path) -> None:
    folder, tensors = save_small(tmp_path)
    want = open_checkpoint(folder).fingerprint()
    assert want["quantization"] == ""
    # In several files, in another dtype, and with the authors' fused layers.
    save_checkpoint(tmp_path / "shards", CONFIG, tensors.items(), max_shard_bytes=20_000)
    save_checkpoint(tmp_path / "narrow", CONFIG, tensors.items(), dtype=torch.bfloat16)
    (tmp_path / "fused").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "fused")
    save_file(fuse(tensors), tmp_path / "fused" / "model.safetensors")
    for name in ("shards", "narrow", "fused"):
        assert open_checkpoint(tmp_path / name).fingerprint() == want, name
    # Any matrix, and anything else, that is trained a little.
    for name, kind in (
        ("backbone.blocks.1.ffn.proj_down.weight", "matrices"),
        ("backbone.blocks.0.mlstm_layer.igate_preact.bias", "others"),
    ):
        changed = {**tensors, name: tensors[name] + 0.01}
        save_checkpoint(tmp_path / "changed", CONFIG, changed.items())
        found = open_checkpoint(tmp_path / "changed").fingerprint()
        assert {key for key in want if found[key] != want[key]} == {kind}
