"""Damaged checkpoints: known faults, then random ones."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import CONFIG, INDEX, draw, save_small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from xlstm7b.checkpoint import open_checkpoint, save_checkpoint, verify
from xlstm7b.config import ModelConfig

BLOCK = "backbone.blocks.1."
LAYER = BLOCK + "mlstm_layer."


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        open_checkpoint(folder)
    return str(caught.value)


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop(LAYER + "q.weight"), LAYER + "q.weight is missing"),
    "extra": (lambda t: t.update(more=torch.ones(1)), "'more' is not in a model of this config"),
    "bias": (lambda t: t.update({LAYER + "qkv_opreact.bias": torch.ones(1)}), "qkv_opreact.bias"),
    "deeper": (
        lambda t: t.update({BLOCK.replace("1", "2") + "norm_ffn.weight": torch.ones(64)}),
        "'backbone.blocks.2.norm_ffn.weight' is not in a model",
    ),
    "misshapen": (
        lambda t: t.update({LAYER + "q.weight": torch.ones(64, 63)}),
        LAYER + "q.weight has the shape (64, 63), the config says (32, 64)",
    ),
    "twice": (
        lambda t: t.update({"embedding.weight": torch.ones(7, 64)}),
        "embedding.weight holds backbone.embeddings.weight, and so does",
    ),
    "integers": (
        lambda t: t.update({"lm_head.weight": torch.ones(7, 64, dtype=torch.int32)}),
        "'lm_head.weight' is stored as I32",
    ),
    "8 bits": (
        lambda t: t.update({"lm_head.weight": torch.ones(7, 64).to(torch.float8_e5m2)}),
        "'lm_head.weight' is stored as F8_E5M2",
    ),
    "empty": (lambda t: t.clear(), "num_blocks = 2, but the number of tensors in the weights is 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_tensors_are_named(tmp_path: Path, fault: str) -> None:
    change, message = FAULTS[fault]
    folder, tensors = save_small(tmp_path)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    refused = refusal(folder)
    assert message in refused
    assert str(folder) in refused


def test_a_truncated_file_is_named_with_its_first_missing_tensor(tmp_path: Path) -> None:
    folder, tensors = save_small(tmp_path)
    file = folder / "model.safetensors"
    whole, *_, last = file.read_bytes(), *tensors
    for length, found in (len(whole) - 1, f", it ends within '{last}'"), (7, ""), (0, ""):
        file.write_bytes(whole[:length])
        assert f"{file} is damaged{found}: " in refusal(folder)


def test_a_file_of_another_format_is_called_so(tmp_path: Path) -> None:
    folder, _ = save_small(tmp_path)
    path = folder / "model.safetensors"
    for content in (
        b"version https://git-lfs.github.com/spec/v1\n",
        b"PK\3\4\x14\0",
        b"\2" + b"\0" * 9,
    ):
        path.write_bytes(content)
        assert refusal(folder) == f"{path} is not a safetensors file"


def test_a_damaged_number_of_blocks_allocates_nothing(tmp_path: Path) -> None:
    values = CONFIG.to_dict() | {"num_blocks": 1 << 24, "num_hidden_layers": 1 << 24}
    folder, _ = save_small(tmp_path)
    (folder / "config.json").write_text(json.dumps(values))
    assert "num_blocks = 16777216, but the number of tensors in the weights is 33" in refusal(
        folder
    )


def test_a_faulty_index_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIG, draw().items(), max_shard_bytes=200_000)
    index, key = json.loads((tmp_path / INDEX).read_text()), "lm_head.weight"
    files = sorted(set(index["weight_map"].values()))
    last, other = index["weight_map"][key], files[0]
    assert last != other
    outside = "which is not a file of this folder"
    for name, message in {
        "../" + last: outside,
        str(tmp_path / last): outside,
        "..": outside,
        "config.json": outside,
        "a\0.safetensors": outside,
        "none.safetensors": "has no file 'none.safetensors', which",
        other: f"{other} does not hold '{key}', but {INDEX} lists it there",
    }.items():
        changed = {"weight_map": {**index["weight_map"], key: name}}
        (tmp_path / INDEX).write_text(json.dumps(changed))
        refused = refusal(tmp_path)
        assert message in refused
        assert key in refused
    for text in ("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ValueError, match="index"):
            open_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    save_file(load_file(tmp_path / other) | load_file(tmp_path / last), tmp_path / other)
    with pytest.raises(ValueError, match=f"{other} holds '.*', but {INDEX} does not list it there"):
        open_checkpoint(tmp_path)


def test_an_unreadable_file_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = save_small(tmp_path)
    ordinary = Path.open

    def forbidden(self: Path, *arguments: object, **options: object) -> object:
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return ordinary(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(PermissionError, match=r"model\.safetensors"):
        open_checkpoint(folder)


# Random faults

SMALL = ModelConfig(
    embedding_dim=8,
    num_blocks=1,
    num_heads=1,
    vocab_size=3,
    mlstm_round_up_to_multiple_of=8,
    ffn_round_up_to_multiple_of=8,
)
ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 2, 8, 1 << 24, 1 << 31, 1 << 63, 1 << 64, 10**400, 0.5, 1e308,
         float("nan"), float("inf"), "", "8", "F16", "I32", "F4", "../x", "\ud800", "\0", [], {},
         [0], [8], [8, 8], [0, 0], [0, 1 << 62], [1 << 62, 4], [-1, 8], "model.safetensors"]
    ),
    st.text(max_size=4),
    st.integers(),
    st.integers(1, 3000).map(lambda depth: Nested("[" * depth + "]" * depth)),
)  # fmt: skip


class Nested(str):
    """JSON that is inserted as it is, because the encoder cannot nest that deep."""


def encode(value: Any) -> bytes:
    nested: list[str] = []

    def mark(item: Any) -> Any:
        if isinstance(item, Nested):
            nested.append(item)
            return f"<{len(nested) - 1}>"
        if isinstance(item, dict):
            return {key: mark(part) for key, part in item.items()}
        return [mark(part) for part in item] if isinstance(item, list) else item

    text = json.dumps(mark(value))
    return re.sub(r'"<(\d+)>"', lambda match: nested[int(match[1])], text).encode()


def damage_json(value: Any, data: st.DataObject) -> Any:
    """Replaces, deletes, renames or adds one thing somewhere in a JSON value."""
    if isinstance(value, dict) and value:
        key = data.draw(st.sampled_from(sorted(value)))
        deed = data.draw(
            st.sampled_from(["inside", "inside", "replace", "delete", "rename", "add"])
        )
        if deed == "add":
            return {**value, data.draw(st.text(max_size=3)): data.draw(ODD)}
        rest = {name: part for name, part in value.items() if name != key}
        if deed == "delete":
            return rest
        if deed == "rename":
            return {**rest, data.draw(st.sampled_from([key + "x", "", *value])): value[key]}
        return {**rest, key: damage_json(value[key], data) if deed == "inside" else data.draw(ODD)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], data.draw(ODD), *value[at + 1 :]]
    return data.draw(ODD)


def damage_bytes(content: bytes, data: st.DataObject) -> bytes:
    at = data.draw(st.one_of(st.integers(0, 40), st.integers(0, len(content) - 1)))
    match data.draw(st.sampled_from(["cut", "extend", "flip", "overwrite", "insert", "garbage"])):
        case "cut":
            return content[:at]
        case "extend":
            return content + data.draw(st.binary(min_size=1, max_size=9))
        case "flip":
            bit = 1 << data.draw(st.integers(0, 7))
            return content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
        case "overwrite":
            new = data.draw(st.binary(min_size=1, max_size=9))
            return content[:at] + new + content[at + len(new) :]
        case "insert":
            return content[:at] + data.draw(st.binary(min_size=1, max_size=9)) + content[at:]
    return data.draw(st.binary(max_size=64))


def damage_header(content: bytes, data: st.DataObject) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = encode(damage_json(json.loads(content[8 : 8 + length]), data))
    header += b" " * data.draw(st.integers(0, 7))
    said = len(header) + data.draw(
        st.sampled_from([0, 0, 0, 0, 1, -1, 1 << 20, (1 << 63) - (1 << 20)])
    )
    return said.to_bytes(8, "little") + header + content[8 + length :]


def peak_memory() -> int:
    """Without files that the process has mapped, such as PyTorch's libraries.

    If other processes need the memory, their pages are dropped and read again.
    """
    status = Path("/proc/self/status").read_text()
    peak, files = (int(status.split(key)[1].split()[0]) for key in ("VmHWM:", "RssFile:"))
    return (peak - files) * 1024


@pytest.mark.parametrize(
    ("file", "shard_bytes", "damage"),
    [
        ("config.json", 1 << 30, "json"),
        ("config.json", 1 << 30, "bytes"),
        (INDEX, 1 << 10, "json"),
        (INDEX, 1 << 10, "bytes"),
        ("model.safetensors", 1 << 30, "header"),
        ("model.safetensors", 1 << 30, "bytes"),
        ("model-00002-of-*.safetensors", 1 << 10, "header"),
        ("model-00002-of-*.safetensors", 1 << 10, "bytes"),
    ],
)
def test_random_damage_is_refused_or_harmless(
    tmp_path: Path, file: str, shard_bytes: int, damage: str
) -> None:
    original = draw(SMALL)
    save_checkpoint(tmp_path, SMALL, original.items(), max_shard_bytes=shard_bytes)
    (path,) = tmp_path.glob(file)
    content = path.read_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_memory()

    @settings(max_examples=100, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        if damage == "json":
            damaged = encode(damage_json(json.loads(content), data))
        else:
            damaged = (damage_header if damage == "header" else damage_bytes)(content, data)
        path.write_bytes(damaged)
        loaded = {name: torch.empty_like(tensor) for name, tensor in original.items()}
        refused = ""
        try:
            open_checkpoint(tmp_path).copy_into(loaded)
        except (ValueError, OSError) as error:
            refused = str(error)
            refused.encode()  # it can be printed: there is no lone surrogate in it
        same = all(torch.equal(loaded[name], tensor) for name, tensor in original.items())
        assert refused or same or damage in {"header", "bytes"}
        if damaged != content:
            with pytest.raises(ValueError, match=path.name):
                verify(tmp_path)

    check()
    assert peak_memory() - before < 100_000_000
