"""Token shards: what is written can be read, and damage is refused with the name of the file."""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_processes import full_disk

from xlstm7b.data.shards import (
    ShardFolder,
    ShardWriter,
    adopt_folder,
    open_folder,
    write_manifest,
)
from xlstm7b.files import write_json

DOCUMENTS = [[[5, 6, 7], [9]], [[8, 8], [], [319]]]


def write(folder: Path, shards=DOCUMENTS, *, vocab_size=320, masked=False) -> Path:
    """Shards of documents, with every second token in the mask."""
    folder.mkdir(exist_ok=True)
    entries = []
    for number, documents in enumerate(shards):
        path = folder / f"{number:05d}.ds"
        with ShardWriter(path, vocab_size=vocab_size, has_mask=masked) as writer:
            for document in documents:
                mask = [index % 2 for index in range(len(document))]
                writer.add(document, mask if masked else None)
        entries.append(writer.entry)
    write_manifest(folder, entries, vocab_size=vocab_size, tokenizer_fingerprint="bytes")
    return folder


def read(folder: ShardFolder) -> list[list[list[int]]]:
    return [
        [piece.tolist() for piece in np.split(shard.tokens, shard.ends)[:-1]]
        for shard in folder.shards
    ]


def refused(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        open_folder(*arguments, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_the_bytes_on_disk(tmp_path):
    write(tmp_path, masked=True)
    assert (tmp_path / "00000.ds").read_bytes() == bytes([5, 0, 6, 0, 7, 0, 0, 0, 9, 0, 0, 0])
    assert (tmp_path / "00000.ds.index").read_bytes() == bytes([4, *[0] * 7, 6, *[0] * 7])
    assert (tmp_path / "00000.ds.loss").read_bytes() == bytes([0, 1, 0, 1, 0, 1])
    assert (tmp_path / "00001.ds").read_bytes()[-4:] == bytes([0x3F, 1, 0, 0])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["documents"], manifest["tokens"]) == (5, 12)
    assert [s["tokens"] for s in manifest["shards"]] == [6, 6]
    assert not list(tmp_path.glob(".*"))


@given(
    documents=st.lists(st.lists(st.integers(0, 65_535), max_size=9), min_size=1, max_size=9),
    wide=st.booleans(),
    masked=st.booleans(),
)
def test_round_trip(tmp_path_factory, documents, wide, masked):
    vocab_size = 65_537 if wide else 65_536
    folder = tmp_path_factory.mktemp("shards")
    write(folder, [documents[:4], documents[4:]], vocab_size=vocab_size, masked=masked)
    opened = open_folder(folder, tokenizer_fingerprint="bytes", verify=True)
    kept = [part for part in (documents[:4], documents[4:]) if part]
    assert read(opened) == [[[*document, 0] for document in part] for part in kept]
    assert opened.documents == len(documents)
    assert opened.tokens == sum(len(document) + 1 for document in documents)
    assert (opened.vocab_size, opened.has_mask) == (vocab_size, masked)
    assert opened.path == folder
    for shard, part in zip(opened.shards, kept, strict=True):
        assert shard.tokens.dtype == (np.uint32 if wide else np.uint16)
        assert shard.ends.dtype == np.int64
        assert not shard.tokens.flags.owndata  # but mapped
        assert not shard.tokens.flags.writeable
        if masked:
            expected = [[*(p % 2 for p in range(len(d))), 1] for d in part]
            assert shard.mask.tolist() == [*chain(*expected)]
        else:
            assert shard.mask is None


def test_a_failure_leaves_no_file_behind(tmp_path):
    with pytest.raises(
        ValueError, match=r"a.ds: a document has ids from 0 to 9, but the vocabulary ends at 8$"
    ):
        with ShardWriter(tmp_path / "a.ds", vocab_size=9) as writer:
            writer.add([9])
    with pytest.raises(ValueError, match=r"ids from -1 to 0, but the vocabulary ends at 8$"):
        with ShardWriter(tmp_path / "a.ds", vocab_size=9) as writer:
            writer.add([-1])
    problem = r"/\.?a\.(ds|json).* could not be written \(.*File too large"
    for tokens in 10, 100_000:  # written at the end, or at once
        with full_disk(room=8), pytest.raises(OSError, match=problem):
            with ShardWriter(tmp_path / "a.ds", vocab_size=9) as writer:
                writer.add([1] * tokens)
    with full_disk(room=8), pytest.raises(OSError, match=problem):
        write_json(tmp_path / "a.json", ["a long text"])
    assert list(tmp_path.iterdir()) == []


def test_missing_and_unknown_shards(tmp_path):
    assert refused(tmp_path / "none") == f"there is no folder of token shards at {tmp_path}/none"
    assert "has no manifest.json" in refused(tmp_path)
    write(tmp_path, masked=True)
    for name in ("00001.ds", "00001.ds.index", "00001.ds.loss"):
        (tmp_path / name).rename(tmp_path / "away")
        assert refused(tmp_path) == f"there is no file {tmp_path / name}"
        (tmp_path / "away").rename(tmp_path / name)
    (tmp_path / "other.ds").write_bytes(b"12")
    assert refused(tmp_path) == f"{tmp_path}/other.ds is not listed in manifest.json"
    (tmp_path / "other.ds").unlink()
    (tmp_path / "unfinished.json").touch()
    assert "is not finished: run the same `xlstm7b prepare` again" in refused(tmp_path)


@pytest.mark.parametrize("name", ["00001.ds", "00001.ds.index", "00001.ds.loss"])
@pytest.mark.parametrize("change", [-9, -8, -2, -1, 1, 2, 8])
def test_lengths_are_always_checked(tmp_path, name, change):
    path = write(tmp_path, masked=True) / name
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    message = refused(tmp_path)
    assert "00001.ds" in message
    assert "is damaged: " in message


def test_a_missing_document_is_noticed(tmp_path):
    write(tmp_path)
    (tmp_path / "00000.ds").write_bytes((tmp_path / "00000.ds").read_bytes()[:8])
    (tmp_path / "00000.ds.index").write_bytes((tmp_path / "00000.ds.index").read_bytes()[:8])
    assert refused(tmp_path) == (
        f"{tmp_path}/00000.ds is damaged: it holds 4 tokens, but manifest.json lists 6"
    )


@pytest.mark.parametrize("ends", [[0, 6], [6, 6], [4, 3], [-1, 6], [2**63, 6], [4, 7], [4, 5]])
def test_indices_are_always_checked(tmp_path, ends):
    write(tmp_path)
    values = np.array([end % 2**64 for end in ends], "<u8")
    (tmp_path / "00000.ds.index").write_bytes(values.tobytes())
    assert re.search(r"00000\.ds(\.index)? is damaged: ", refused(tmp_path))


@pytest.mark.parametrize("name", ["00000.ds", "00000.ds.index", "00001.ds.loss"])
def test_verify_checks_every_bit(tmp_path, name):
    path = write(tmp_path, [[[5, 6, 7]], [[8]]], masked=True) / name
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    message = refused(tmp_path, verify=True)
    assert message.startswith(f"{path} is damaged: ") or name.endswith(".index")
    assert "is damaged" in message


def test_a_part_of_the_shards_is_verified(tmp_path):
    path = write(tmp_path, [[[5]], [[8]], [[9]]]) / "00001.ds"
    path.write_bytes(bytes([9, 0, 0, 0]))
    checked = []
    for first in (0, 2):
        part = slice(first, None, 2)
        open_folder(tmp_path, verify=True, part=part, progress=lambda *each: checked.append(each))
    sizes = [(".ds", 4), (".ds.index", 8)]
    assert checked == [(f"0000{n}{end}", size) for n in (0, 2, 2) for end, size in sizes]
    assert f"{path} is damaged: its sha256" in refused(tmp_path, verify=True, part=slice(1, None))


def test_another_tokenizer_is_refused(tmp_path):
    write(tmp_path)
    assert refused(tmp_path, tokenizer_fingerprint="56ac4821e129d2c520fd") == (
        f"{tmp_path} was prepared with another tokenizer: its fingerprint is bytes, "
        "not 56ac4821e129"
    )
    assert refused(tmp_path, token_bytes=4) == f"{tmp_path} has tokens of 2 bytes, not of 4"


MISTAKES = [
    lambda m: [],
    lambda m: "text",
    lambda m: {},
    lambda m: m | {"format": 2},
    lambda m: m | {"shards": 5},
    lambda m: m | {"shards": [5]},
    lambda m: m | {"shards": []},
    lambda m: m | {"shards": m["shards"] * 2},
    lambda m: m | {"vocab_size": "320"},
    lambda m: m | {"vocab_size": 0},
    lambda m: m | {"tokenizer": None},
    *[
        lambda m, c=change: m | {"shards": [m["shards"][0] | c]}
        for change in (
            {"name": "../00000.ds"},
            {"name": 5},
            {"name": "00000"},
            {"tokens": -1},
            {"tokens": 6.0},
            {"documents": None},
            {"has_mask": 1},
            {"sha256": {}},
            {"sha256": 5},
        )
    ],
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_damaged_manifest_is_named(tmp_path, mistake):
    path = write(tmp_path, DOCUMENTS[:1]) / "manifest.json"
    path.write_text(json.dumps(mistake(json.loads(path.read_text()))))
    assert str(tmp_path) in refused(tmp_path)


def test_a_manifest_of_a_newer_version(tmp_path):
    path = write(tmp_path, DOCUMENTS[:1]) / "manifest.json"
    newer = json.loads(path.read_text()) | {"format": 2, "shards": "elsewhere"}
    path.write_text(json.dumps(newer))
    sentence = "has format 2, and this version of xlstm7b reads formats up to 1: upgrade xlstm7b"
    assert refused(tmp_path) == f"{path} {sentence}"


@given(content=st.binary(max_size=50))
def test_a_manifest_of_random_bytes_is_named(tmp_path_factory, content):
    path = write(tmp_path_factory.mktemp("noise")) / "manifest.json"
    path.write_bytes(content)
    assert refused(path.parent).startswith(f"{path} is damaged: ")


@given(cut=st.integers(0, 10_000))
def test_a_truncated_manifest_is_named(tmp_path_factory, cut):
    path = write(tmp_path_factory.mktemp("cut")) / "manifest.json"
    content = path.read_bytes()
    path.write_bytes(content[: cut % (len(content) - 2)])
    assert refused(path.parent).startswith(f"{path} is damaged: ")


def bare(folder: Path, **options: Any) -> Path:
    """A folder as datatrove leaves it."""
    write(folder, **options)
    for file in folder.glob("*.json"):
        file.unlink()
    (folder / "00000.ds.metadata").write_text("gpt2|2\n6\n6 T")
    return folder


def test_a_folder_of_datatroves_opens_with_the_size_of_its_tokens(tmp_path):
    bare(tmp_path, masked=True)
    (tmp_path / "00002.ds").touch()  # of a task that had no input
    (tmp_path / "00002.ds.index").touch()
    (tmp_path / "00002.ds.loss").touch()
    assert "has no manifest.json" in refused(tmp_path)
    opened = open_folder(tmp_path, token_bytes=2)
    assert read(opened) == [[[*document, 0] for document in part] for part in DOCUMENTS]
    assert (opened.vocab_size, opened.tokenizer_fingerprint) == (None, None)
    assert opened.has_mask
    assert "token_bytes must be 2 or 4, not 3" in refused(tmp_path, token_bytes=3)
    assert "00000.ds is damaged" in refused(tmp_path, token_bytes=4)
    assert (
        "has no manifest.json, so its tokenizer is unknown: adopt it with `xlstm7b prepare --adopt`"
        in refused(tmp_path, token_bytes=2, tokenizer_fingerprint="bytes")
    )


def test_adopting_checks_tokens_and_adds_the_manifest(tmp_path):
    bare(tmp_path)
    with pytest.raises(
        ValueError, match=r"00001.ds holds id 319, but the tokenizer's ids end at 318$"
    ):
        adopt_folder(tmp_path, vocab_size=319, tokenizer_fingerprint="bytes")
    for _ in range(2):  # the second time nothing is left to do
        adopted = adopt_folder(tmp_path, vocab_size=320, tokenizer_fingerprint="bytes")
        assert (adopted.documents, adopted.tokens, adopted.vocab_size) == (5, 12, 320)
    with pytest.raises(ValueError, match="was prepared with another tokenizer"):
        adopt_folder(tmp_path, vocab_size=320, tokenizer_fingerprint="other")
    assert open_folder(tmp_path, tokenizer_fingerprint="bytes", verify=True).tokens == 12


def test_shards_with_another_end_of_text(tmp_path):
    with ShardWriter(tmp_path / "00000.ds", vocab_size=320, eos_token_id=7) as writer:
        writer.add([3, 4])
        writer.add([5])
    about = {"vocab_size": 320, "tokenizer_fingerprint": "gpt2"}
    with pytest.raises(ValueError, match="document 0 does not end with id 0, the end of text"):
        adopt_folder(tmp_path, **about)
    assert open_folder(tmp_path, token_bytes=2, eos_token_id=7).eos_token_id == 7
    adopted = adopt_folder(tmp_path, **about, eos_token_id=7, bos_token_id=None)
    assert adopted.shards[0].tokens.tolist() == [3, 4, 7, 5, 7]
    for folder in (adopted, open_folder(tmp_path)):
        assert (folder.eos_token_id, folder.bos_token_id) == (7, None)


def test_documents_without_an_end_of_text_are_refused(tmp_path):
    bare(tmp_path)
    (tmp_path / "00001.ds.index").write_bytes(np.array([2, 4, 6], "<u8").tobytes())
    assert refused(tmp_path, token_bytes=2) == (
        f"{tmp_path}/00001.ds: document 0 does not end with id 0, the end of text "
        "(set eos_token in datatrove's DocumentTokenizer)"
    )
    for file in tmp_path.glob("*.ds*"):
        file.unlink()
    assert refused(tmp_path, token_bytes=2) == f"{tmp_path} holds no documents"
