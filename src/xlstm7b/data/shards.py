"""Token shards on disk: the format, reading and writing. The layout is datatrove's.

    NAME.ds        tokens, raw little-endian uint16, or uint32 for vocabularies above 65536
    NAME.ds.index  the end of each document, counted in tokens, raw little-endian uint64
    NAME.ds.loss   optional, one byte per token: 1 if the token counts in the loss as a target
    manifest.json  the shards of the folder: lengths, sha256 sums, and the tokenizer

A document is its tokens followed by the tokenizer's end of text (id 0 for bytes and GPT-NeoX). Its
end in the index is after that id.
Each file is written under a temporary name, then renamed; the manifest comes last. While a folder
is being written it holds `unfinished.json`.
"""

import hashlib
import mmap
import os
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, ClassVar, Literal, NamedTuple, Self
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from xlstm7b.chat_format import PlainFormat
from xlstm7b.files import (
    Progress,
    check_format,
    check_sha256,
    file_sha256,
    naming,
    write_aside,
    write_json,
)
from xlstm7b.report import counted

MANIFEST = "manifest.json"
UNFINISHED = "unfinished.json"
MAX_MAPS = 48_000  # a process may have 65,530 (Linux's default vm.max_map_count)

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Ids = Sequence[int] | npt.NDArray[Any]


class TokenShard(NamedTuple):
    """One shard, mapped into memory: pages are read from the disk on first access."""

    path: Path
    tokens: Tokens
    ends: npt.NDArray[np.int64]  # strictly increasing; the last is len(tokens)
    mask: npt.NDArray[np.uint8] | None


@dataclass(frozen=True)
class ShardFolder:
    """The shards of a folder, in order, without those that hold no document.

    A folder that datatrove wrote has no known vocabulary or tokenizer until it is adopted.
    """

    path: Path
    shards: Sequence[TokenShard]
    vocab_size: int | None = None
    tokenizer_fingerprint: str | None = None
    has_mask: bool = False
    eos_token_id: int = 0  # the last token of every document
    bos_token_id: int | None = 0  # the tokenizer's first token, which is not on disk
    chat_template: str | None = None  # the template of its chats; None if it holds none

    @cached_property
    def documents(self) -> int:
        return sum(len(shard.ends) for shard in self.shards)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens, including the end of text after each document."""
        return sum(len(shard.tokens) for shard in self.shards)


def token_size(vocab_size: int) -> int:
    """Bytes per token. datatrove makes the same choice."""
    return 2 if vocab_size <= 1 << 16 else 4


# Reading


def open_folder(
    path: str | Path,
    *,
    tokenizer_fingerprint: str | None = None,
    verify: bool = False,
    part: slice = slice(None),
    token_bytes: int | None = None,
    eos_token_id: int = 0,
    progress: Progress | None = None,
) -> ShardFolder:
    """Maps the shards of a folder. A damaged or incomplete folder is a `ValueError` that says why.

    Sizes and indices are always checked; with `verify` also the sha256 of every file, or of those
    of a `part` of the shards.
    `token_bytes`, 2 or 4, opens a folder of datatrove's that has not been adopted, if all its
    documents end with `eos_token_id`.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"there is no folder of token shards at {path}")
    if (path / UNFINISHED).exists():
        raise ValueError(f"{path} is not finished: run the same `xlstm7b prepare` again")
    if not (path / MANIFEST).exists() and token_bytes is not None:
        return _open_without_manifest(path, token_bytes, tokenizer_fingerprint, eos_token_id)
    manifest = _read_manifest(path)
    if tokenizer_fingerprint not in (None, manifest.tokenizer):
        raise ValueError(
            f"{path} was prepared with another tokenizer: its fingerprint is "
            f"{manifest.tokenizer[:12]}, not {str(tokenizer_fingerprint)[:12]}"
        )
    size = token_size(manifest.vocab_size)
    if token_bytes not in (None, size):
        raise ValueError(f"{path} has tokens of {size} bytes, not of {token_bytes}")
    names = {entry.name for entry in manifest.shards}
    for file in sorted(path.glob("*.ds")):
        # datatrove leaves an empty file for a task that had no input.
        if file.stat().st_size and file.name not in names:
            raise ValueError(f"{file} is not listed in {MANIFEST}")
    shards = _shards(sum(map(_maps, manifest.shards)))
    for entry in manifest.shards:
        shard = _open_shard(path / entry.name, size, entry.has_mask)
        for what, found, listed in (
            ("token", len(shard.tokens), entry.tokens),
            ("document", len(shard.ends), entry.documents),
        ):
            if found != listed:
                raise ValueError(
                    f"{shard.path} is damaged: it holds {counted(found, what)}, "
                    f"but {MANIFEST} lists {listed}"
                )
        if entry.documents:
            shards.append(shard)
    for entry in manifest.shards[part] if verify else ():
        for name, digest in entry.sha256.items():
            check_sha256(path / name, digest, MANIFEST)
            if progress:
                progress(name, (path / name).stat().st_size)
    return _folder(
        path,
        shards,
        has_mask=any(entry.has_mask and entry.documents for entry in manifest.shards),
        vocab_size=manifest.vocab_size,
        tokenizer_fingerprint=manifest.tokenizer,
        eos_token_id=manifest.eos_token_id,
        bos_token_id=manifest.bos_token_id,
        chat_template=manifest.chat_template,
    )


def chat_template(folders: Mapping[str, ShardFolder]) -> str | None:
    """The chat template of all chats in these folders. None if they hold no chats.

    Different ones are a `ValueError`: a model can only be asked with one of them.
    """
    found = {name: each for name, folder in folders.items() if (each := folder.chat_template)}
    for name, template in found.items():
        first = next(iter(found))
        if template != found[first]:
            raise ValueError(
                f"the chats of sources {first!r} and {name!r} were prepared with different chat "
                "templates: prepare them with the same --tokenizer folder"
            )
    return next(iter(found.values()), None)


def _open_without_manifest(
    path: Path, token_bytes: int, fingerprint: str | None, eos_token_id: int
) -> ShardFolder:
    if token_bytes not in (2, 4):
        raise ValueError(f"token_bytes must be 2 or 4, not {token_bytes}")
    if fingerprint is not None:
        raise ValueError(
            f"{path} has no {MANIFEST}, so its tokenizer is unknown: "
            "adopt it with `xlstm7b prepare --adopt`"
        )
    files = sorted(path.glob("*.ds"))
    has_mask, shards = False, _shards(3 * len(files))
    for file in files:
        shard = _open_shard(file, token_bytes, file.with_name(f"{file.name}.loss").exists())
        has_end = shard.tokens[shard.ends - 1] == eos_token_id
        if not has_end.all():
            raise ValueError(
                f"{file}: document {has_end.argmin()} does not end with id {eos_token_id}, the end "
                "of text (set eos_token in datatrove's DocumentTokenizer)"
            )
        if len(shard.ends):
            has_mask |= shard.mask is not None
            shards.append(shard)
    return _folder(path, shards, has_mask=has_mask, eos_token_id=eos_token_id)


def _folder(path: Path, shards: "list[TokenShard] | _MappedOnDemand", **about: Any) -> ShardFolder:
    if not shards:
        raise ValueError(f"{path} holds no documents")
    return ShardFolder(path, shards, **about)


def _open_shard(path: Path, size: int, has_mask: bool) -> TokenShard:
    """Maps a shard and checks its sizes and its index."""
    shard = _map_shard(path, size, has_mask)
    _, tokens, ends, mask = shard
    index_path = path.with_name(f"{path.name}.index")
    rising = np.diff(ends, prepend=0) > 0
    if not rising.all():
        raise ValueError(
            f"{index_path} is damaged: document {rising.argmin()} ends before it begins"
        )
    if (end := int(ends[-1]) if len(ends) else 0) != len(tokens):
        raise ValueError(
            f"{path} is damaged: it holds {counted(len(tokens), 'token')}, but its index ends "
            f"at {end}"
        )
    if mask is not None and len(mask) != len(tokens):
        raise ValueError(
            f"{path}.loss is damaged: {counted(len(mask), 'byte')} for "
            f"{counted(len(tokens), 'token')}"
        )
    return shard


# Mapping files. A map keeps its file open, so that many shards reach the limit of open files.

_live: WeakSet[mmap.mmap] = WeakSet()  # all maps of shards in this process


def _maps(entry: "ShardEntry") -> int:
    return 3 if entry.has_mask else 2


def _most_maps(wanted: int) -> int:
    """How many maps there may be. Raises the limit of open files if `wanted` need it."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return MAX_MAPS

    def allowed(files: int) -> int:
        most = MAX_MAPS if files == resource.RLIM_INFINITY else max(files // 2, files - 1024)
        return min(most, MAX_MAPS)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed(soft) < wanted:
        with suppress(OSError, ValueError):  # macOS has another limit below an infinite one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return allowed(soft)


def _shards(maps: int) -> "list[TokenShard] | _MappedOnDemand":
    """A list for shards with this number of maps. If those are too many, it closes some of them."""
    wanted = len(_live) + maps
    return [] if wanted <= _most_maps(wanted) else _MappedOnDemand()


class _MappedOnDemand(Sequence[TokenShard]):
    """Shards of which as many are mapped as there may be. The one not used for longest is closed.

    All folders of the process share the limit: the one with the most maps closes one.
    """

    _folders: ClassVar[WeakSet["_MappedOnDemand"]] = WeakSet()
    _lock: ClassVar = threading.Lock()

    def __init__(self) -> None:
        self._files: list[tuple[Path, int, bool]] = []  # the arguments of `_map_shard`
        self._mapped: OrderedDict[int, TokenShard] = OrderedDict()  # the last one used comes last
        with self._lock:
            self._folders.add(self)

    def append(self, shard: TokenShard) -> None:
        self._files.append((shard.path, shard.tokens.itemsize, shard.mask is not None))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: Any) -> Any:
        with self._lock:
            if number in self._mapped:
                self._mapped.move_to_end(number)
            else:
                file = self._files[number]
                self._make_room()
                self._mapped[number] = _map_shard(*file)
            return self._mapped[number]

    def _make_room(self) -> None:
        wanted = len(_live) + 3
        most = _most_maps(wanted)
        while len(_live) + 3 > most:
            largest = max(self._folders, key=lambda folder: len(folder._mapped))
            if not largest._mapped:
                return
            largest._mapped.popitem(last=False)


def _map_shard(path: Path, size: int, has_mask: bool) -> TokenShard:
    return TokenShard(
        path,
        _map(path, f"<u{size}"),
        _map(path.with_name(f"{path.name}.index"), "<i8"),
        _map(path.with_name(f"{path.name}.loss"), "u1") if has_mask else None,
    )


def _map(path: Path, dtype: str) -> npt.NDArray[Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    size, item = path.stat().st_size, np.dtype(dtype).itemsize
    if size % item:
        raise ValueError(f"{path} is damaged: its size, {size}, is not a multiple of {item}")
    if not size:  # it cannot be mapped
        return np.empty(0, dtype)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _live.add(mapped)
    return np.frombuffer(mapped, dtype)  # unlike an np.memmap, it is fast to slice


# The manifest


class ShardEntry(BaseModel):
    """One shard in the manifest."""

    model_config = ConfigDict(strict=True, frozen=True)
    name: Annotated[str, Field(pattern=r"^[^/]+\.ds$")]
    documents: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=0)]
    has_mask: bool
    sha256: dict[str, str]


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True)
    format: Literal[1]
    tokenizer: str
    vocab_size: Annotated[int, Field(ge=1)]
    eos_token_id: Annotated[int, Field(ge=0)] = 0  # earlier versions knew no other
    bos_token_id: Annotated[int, Field(ge=0)] | None = 0
    chat_template: str | None = None
    shards: list[ShardEntry]

    @model_validator(mode="before")
    @classmethod
    def _plain_chats(cls, content: Any) -> Any:
        """Earlier versions wrote all chats in the plain format."""
        if isinstance(content, dict) and content.get("documents_as", "text") != "text":
            return {**content, "chat_template": PlainFormat.template}
        return content


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} has no {MANIFEST}: it is not a folder of prepared tokens")
    try:
        manifest = _Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("format",):
            check_format(path, first["input"], 1)
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{path} is damaged: {where}: {first['msg']}") from error
    times = Counter(entry.name for entry in manifest.shards)
    for entry in manifest.shards:
        if times[entry.name] > 1:
            raise ValueError(f"{path} is damaged: it lists {entry.name} twice")
        if list(entry.sha256) != _file_names(entry.name, entry.has_mask):
            raise ValueError(f"{path} is damaged: the sha256 sums of {entry.name} are incomplete")
    return manifest


def write_manifest(
    folder: Path,
    entries: Sequence[ShardEntry],
    *,
    vocab_size: int,
    tokenizer_fingerprint: str,
    eos_token_id: int = 0,
    bos_token_id: int | None = 0,
    **noted: Any,
) -> None:
    """Completes a folder of shards. `entries` are the writers' `entry`; `noted` is stored as is."""
    manifest = {
        "format": 1,
        "tokenizer": tokenizer_fingerprint,
        "vocab_size": vocab_size,
        "eos_token_id": eos_token_id,
        "bos_token_id": bos_token_id,
        "documents": sum(entry.documents for entry in entries),
        "tokens": sum(entry.tokens for entry in entries),
        **noted,
        "shards": [entry.model_dump(include={*ShardEntry.model_fields}) for entry in entries],
    }
    write_json(folder / MANIFEST, manifest)


def adopt_folder(
    path: str | Path,
    *,
    vocab_size: int,
    tokenizer_fingerprint: str,
    eos_token_id: int = 0,
    bos_token_id: int | None = 0,
) -> ShardFolder:
    """Checks every token of a folder that datatrove wrote, and adds the manifest."""
    path, entries = Path(path), []
    if (path / MANIFEST).exists():
        return open_folder(path, tokenizer_fingerprint=tokenizer_fingerprint)
    size = token_size(vocab_size)
    for shard in open_folder(path, token_bytes=size, eos_token_id=eos_token_id).shards:
        if (largest := int(shard.tokens.max())) >= vocab_size:
            raise ValueError(
                f"{shard.path} holds id {largest}, but the tokenizer's ids end at {vocab_size - 1}"
            )
        name, has_mask = shard.path.name, shard.mask is not None
        entry = ShardEntry(
            name=name,
            documents=len(shard.ends),
            tokens=len(shard.tokens),
            has_mask=has_mask,
            sha256={file: file_sha256(path / file) for file in _file_names(name, has_mask)},
        )
        entries.append(entry)
    write_manifest(
        path,
        entries,
        vocab_size=vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint,
        eos_token_id=eos_token_id,
        bos_token_id=bos_token_id,
    )
    return open_folder(path)


def _file_names(name: str, has_mask: bool) -> list[str]:
    return [name, f"{name}.index", *([f"{name}.loss"] if has_mask else [])]


# Writing


class ShardWriter:
    """Writes the shard NAME.ds at `path`. An error inside the `with` block leaves no file."""

    entry: ShardEntry  # for the manifest, after the `with` block

    def __init__(
        self, path: Path, *, vocab_size: int, has_mask: bool = False, eos_token_id: int = 0
    ) -> None:
        self.path, self.documents, self.tokens = path, 0, 0
        self._vocab_size, self._has_mask, self._eos = vocab_size, has_mask, eos_token_id
        self._dtype = np.dtype(f"<u{token_size(vocab_size)}")
        self._ends = array("Q")
        self._stack = ExitStack()
        self._files: dict[str, IO[bytes]] = {}
        self._sums = {name: hashlib.sha256() for name in _file_names(path.name, has_mask)}
        for name in self._sums:
            aside = self._stack.enter_context(write_aside(path.parent / name))
            self._files[name] = self._stack.enter_context(aside.open("wb"))

    def add(self, tokens: Ids, mask: Ids | None = None) -> None:
        """Appends a document and the end of text, which always counts in the loss."""
        ids = tokens if isinstance(tokens, np.ndarray) else np.array(tokens, dtype=np.int64)
        smallest, largest = ids.min(initial=0), ids.max(initial=0)
        if smallest < 0 or largest >= self._vocab_size:
            raise ValueError(
                f"{self.path}: a document has ids from {smallest} to {largest}, "
                f"but the vocabulary ends at {self._vocab_size - 1}"
            )
        assert (mask is not None) == self._has_mask
        self._write("", ids.astype(self._dtype, copy=False), np.full(1, self._eos, self._dtype))
        if mask is not None:
            assert len(mask) == len(tokens)
            self._write(".loss", np.asarray(mask, np.uint8), np.ones(1, np.uint8))
        self.documents += 1
        self.tokens += len(ids) + 1
        self._ends.append(self.tokens)

    def _write(self, ending: str, *parts: npt.NDArray[Any]) -> None:
        name = f"{self.path.name}{ending}"
        for values in map(np.ascontiguousarray, parts):  # not copied: a document may be long
            self._sums[name].update(values.data)
            with naming(self.path):
                self._files[name].write(values.data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            with naming(self.path):
                self._stack.__exit__(kind, error, trace)
            return
        with naming(self.path), self._stack:  # the stack renames the files at its end
            self._write(".index", np.array(self._ends, dtype="<u8"))
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        self.entry = ShardEntry(
            name=self.path.name,
            documents=self.documents,
            tokens=self.tokens,
            has_mask=self._has_mask,
            sha256={name: total.hexdigest() for name, total in self._sums.items()},
        )
