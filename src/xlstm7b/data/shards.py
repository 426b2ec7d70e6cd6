"""Token shards on disk, in the layout that datatrove writes.

    NAME.ds        tokens, raw little-endian uint16, or uint32 for more than 65536 ids
    NAME.ds.index  each document's end, in tokens, raw little-endian uint64
    NAME.ds.loss   optional, a byte a token: 1 if the loss counts that token as a target
    manifest.json  which shards there are, how long, their sha256, and by which tokenizer

A document is its tokens and then id 0, the end of text: its end is just behind that 0. Shards are
written aside and renamed, the manifest last; what is still being written holds `unfinished.json`.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MANIFEST = "manifest.json"
UNFINISHED = "unfinished.json"
FORMAT = 1

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class TokenShard(NamedTuple):
    """One shard, mapped into memory: nothing is read before it is looked at."""

    path: Path
    tokens: Tokens
    ends: npt.NDArray[np.int64]  # strictly increasing; the last is len(tokens)
    mask: npt.NDArray[np.uint8] | None


@dataclass(frozen=True)
class ShardFolder:
    """The shards of a folder, in order; those without a document are left out.

    Of a folder that datatrove wrote and nobody adopted, neither vocabulary nor tokenizer is known.
    """

    path: Path
    shards: list[TokenShard]
    vocab_size: int | None
    tokenizer_fingerprint: str | None
    has_mask: bool

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def documents(self) -> int:
        return sum(len(shard.ends) for shard in self.shards)

    @property
    def tokens(self) -> int:
        """All of them, each document's end of text included."""
        return sum(len(shard.tokens) for shard in self.shards)


def token_size(vocab_size: int) -> int:
    """Bytes a token, as datatrove chooses them."""
    return 2 if vocab_size <= 1 << 16 else 4


def file_names(name: str, has_mask: bool) -> list[str]:
    return [name, f"{name}.index", *([f"{name}.loss"] if has_mask else [])]


def open_folder(
    path: str | Path,
    *,
    tokenizer_fingerprint: str | None = None,
    verify: bool = False,
    token_bytes: int | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> ShardFolder:
    """Maps a folder of shards; whatever is wrong with it is a `ValueError` that names it.

    Sizes and indices are always checked, every byte's sha256 with `verify`. `token_bytes`, 2 or 4,
    opens what datatrove wrote and `adopt_folder` has not seen yet.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"there is no folder of token shards at {path}")
    if (path / UNFINISHED).exists():
        raise ValueError(f"{path} is not finished: run the same `xlstm7b prepare` again")
    if not (path / MANIFEST).exists() and token_bytes is not None:
        return _open_unlisted(path, token_bytes, tokenizer_fingerprint)
    manifest = _read_manifest(path)
    fingerprint, vocab_size = manifest["tokenizer"], manifest["vocab_size"]
    if tokenizer_fingerprint not in (None, fingerprint):
        raise ValueError(
            f"{path} was prepared with another tokenizer: its fingerprint is "
            f"{fingerprint[:12]}, not {str(tokenizer_fingerprint)[:12]}"
        )
    size = token_size(vocab_size)
    if token_bytes not in (None, size):
        raise ValueError(f"{path} has tokens of {size} bytes, not of {token_bytes}")
    entries = manifest["shards"]
    for file in sorted(path.glob("*.ds")):
        # Where a process had nothing to do, datatrove leaves an empty file.
        if file.stat().st_size and file.name not in {entry["name"] for entry in entries}:
            raise ValueError(f"{file} is not listed in {MANIFEST}")
    shards = []
    for entry in entries:
        shard = _open_shard(path / entry["name"], size, entry["has_mask"])
        for count, what in ((len(shard.tokens), "tokens"), (len(shard.ends), "documents")):
            if count != entry[what]:
                raise ValueError(
                    f"{shard.path} is damaged: it holds {count} {what}, "
                    f"where {MANIFEST} says {entry[what]}"
                )
        if verify:
            _check_sums(path, entry["sha256"], progress)
        shards.append(shard)
    return _folder(path, shards, vocab_size, fingerprint)


def _open_unlisted(path: Path, token_bytes: int, fingerprint: str | None) -> ShardFolder:
    if token_bytes not in (2, 4):
        raise ValueError(f"tokens have 2 or 4 bytes, not {token_bytes}")
    if fingerprint is not None:
        raise ValueError(f"{path} has no {MANIFEST} that says which tokenizer made it: adopt it")
    shards = []
    for file in sorted(path.glob("*.ds")):
        shard = _open_shard(file, token_bytes, file.with_name(f"{file.name}.loss").exists())
        closed = shard.tokens[shard.ends - 1] == 0
        if not closed.all():
            raise ValueError(
                f"{file}: document {closed.argmin()} does not end with id 0, the end of text "
                "(datatrove writes it when told the eos_token)"
            )
        shards.append(shard)
    return _folder(path, shards, None, None)


def _folder(
    path: Path, shards: list[TokenShard], vocab_size: int | None, fingerprint: str | None
) -> ShardFolder:
    filled = [shard for shard in shards if len(shard.ends)]
    if not filled:
        raise ValueError(f"{path} holds no documents")
    masked = any(shard.mask is not None for shard in filled)
    return ShardFolder(path, filled, vocab_size, fingerprint, masked)


def _open_shard(path: Path, size: int, has_mask: bool) -> TokenShard:
    index_path = path.with_name(f"{path.name}.index")
    tokens, ends = _map(path, f"<u{size}"), _map(index_path, "<i8")
    mask = _map(path.with_name(f"{path.name}.loss"), "u1") if has_mask else None
    rising = np.diff(ends, prepend=0) > 0
    if not rising.all():
        document = int(rising.argmin())
        raise ValueError(f"{index_path} is damaged: document {document} ends before it begins")
    if (end := int(ends[-1]) if len(ends) else 0) != len(tokens):
        raise ValueError(
            f"{path} is damaged: it holds {len(tokens)} tokens, its index ends at {end}"
        )
    if mask is not None and len(mask) != len(tokens):
        raise ValueError(f"{path}.loss is damaged: {len(mask)} bytes for {len(tokens)} tokens")
    return TokenShard(path, tokens, ends, mask)


def _map(path: Path, dtype: str) -> npt.NDArray[Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    size, each = path.stat().st_size, np.dtype(dtype).itemsize
    if size % each:
        raise ValueError(f"{path} is damaged: {size} bytes are no whole number of {each}-byte ones")
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sums(
    folder: Path, sums: dict[str, str], progress: Callable[[str, int], None] | None
) -> None:
    for name, expected in sums.items():
        if sha256(folder / name) != expected:
            raise ValueError(f"{folder / name} is damaged: its sha256 is not the one in {MANIFEST}")
        if progress:
            progress(name, (folder / name).stat().st_size)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} has no {MANIFEST}: it is no folder of prepared tokens")
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        version = manifest["format"]
        wrong = "" if version != FORMAT else _wrong_part(manifest)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is garbled: {type(error).__name__}: {error}") from error
    if version != FORMAT:
        raise ValueError(f"{path} is of format {version!r}; this program reads format {FORMAT}")
    if wrong:
        raise ValueError(f"{path} is garbled: its {wrong} cannot be")
    return manifest


def _wrong_part(manifest: dict[str, Any]) -> str:
    """What in a manifest is not as `write_manifest` writes it; `LookupError` what is missing."""
    if type(manifest["vocab_size"]) is not int or manifest["vocab_size"] < 1:
        return "vocab_size"
    if type(manifest["tokenizer"]) is not str:
        return "tokenizer"
    for entry in manifest["shards"]:
        name, counts, masked = (
            entry["name"],
            (entry["documents"], entry["tokens"]),
            entry["has_mask"],
        )
        if type(name) is not str or Path(name).name != name or not name.endswith(".ds"):
            return f"shard {name!r}"
        if type(masked) is not bool or any(type(n) is not int or n < 0 for n in counts):
            return f"description of {name}"
        if list(entry["sha256"]) != file_names(name, masked):
            return f"sha256 of {name}"
    names = [entry["name"] for entry in manifest["shards"]]
    return "" if len(set(names)) == len(names) else "list of shards, with one of them twice,"
