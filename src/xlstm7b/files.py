"""What a checkpoint is made of: safetensors files, a sha256 manifest, a folder replaced whole."""

import ctypes
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

Progress = Callable[[str, int], None]
"""Called with the name of a tensor or a file and how many of its bytes were just dealt with."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
MANIFEST = "SHA256SUMS"
_LONGEST_HEADER = 100_000_000  # the limit of the safetensors library


class Stored(NamedTuple):
    """One tensor as a file's header describes it."""

    file: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@contextmanager
def opened_safetensors(path: Path) -> Iterator[Any]:
    """`safe_open`, with errors that name the file; its tensors are views of the mapped file."""
    if not path.is_file():
        raise ValueError(f"{path} is {'not a file' if path.exists() else 'missing'}")
    path.open("rb").close()  # if that is forbidden, Python's OSError names the file
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged{_first_cut(path)}: {error}") from error


def _first_cut(path: Path) -> str:
    """The first tensor that a truncated file no longer holds whole, if its header can tell."""
    size = path.stat().st_size
    with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        header.pop("__metadata__", None)
        for key, part in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if 8 + length + part["data_offsets"][1] > size:
                return f", it ends within {key!r}"
    return ""


def read_headers(files: Iterable[Path]) -> list[Stored]:
    stored = []
    for file in files:
        with opened_safetensors(file) as handle:
            for key in handle.keys():  # noqa: SIM118 (the handle is no dict)
                header = handle.get_slice(key)
                code = header.get_dtype()
                if code not in DTYPES:
                    raise ValueError(
                        f"{file}: {key!r} is stored as {code}, not as one of {', '.join(DTYPES)}"
                    )
                stored.append(Stored(file, key, DTYPES[code], tuple(header.get_shape())))
    return stored


def shards(
    tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Groups tensors, in their order, into files of at most `max_bytes` or of one tensor."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def safetensors_pieces(
    tensors: dict[str, torch.Tensor],
    progress: Progress | None = None,
    described: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, piece by piece; empties `tensors` on the way.

    Not by the library's writer, so that a file is hashed as it is written and never read back.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    # Wide types first: then every tensor is aligned to its own size, as readers expect.
    keys = sorted(tensors, key=lambda key: -tensors[key].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(described or {"format": "pt"})}
    end = 0
    for key in keys:
        tensor = tensors[key]
        start, end = end, end + tensor.nbytes
        header[key] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for key in keys:
        flat = tensors.pop(key).contiguous().view(-1).view(torch.uint8)
        yield flat.numpy().data
        if progress:
            progress(key, flat.nbytes)


def write_hashed(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Writes a new file through to the disk; returns its sha256 without reading it back."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        try:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:  # which names no file
            raise OSError(f"{path} could not be written ({error})") from error
    return digest.hexdigest()


def write_safetensors(
    path: Path, tensors: dict[str, torch.Tensor], described: Mapping[str, str]
) -> None:
    """Writes a file of tensors aside, then renames it; empties `tensors` on the way."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_hashed(aside, safetensors_pieces(tensors, described=described))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    _sync(path.parent)


def write_manifest(folder: Path, sums: Mapping[str, str]) -> None:
    """Writes names and sha256 sums as `sha256sum --check` reads them."""
    lines = (f"{digest}  {name}\n".encode() for name, digest in sorted(sums.items()))
    write_hashed(folder / MANIFEST, lines)


def check_manifest(folder: Path, expected: Iterable[str], progress: Progress | None) -> int:
    """Hashes all that a folder's manifest lists, which must include the `expected` names."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{folder} has no {MANIFEST} to verify it by; a save writes one")
    sums = _read_manifest(manifest)
    for name in sorted(set(expected) - sums.keys()):
        raise ValueError(f"{folder / name} is not listed in {MANIFEST}")
    for name, digest in sums.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing, though {MANIFEST} lists it")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"{path} is damaged: its sha256 is not the one in {MANIFEST}")
            if progress:
                progress(name, file.tell())
    return len(sums)


def _read_manifest(manifest: Path) -> dict[str, str]:
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{manifest} is not a text file: {error}") from error
    sums: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)
        name = PurePosixPath(match[2] if match else "/")
        if match is None or name.is_absolute() or ".." in name.parts:
            raise ValueError(f"{manifest}: {line!r} is not the sha256 of a file in this folder")
        sums[str(name)] = match[1]
    if not sums:
        raise ValueError(f"{manifest} lists no file")
    return sums


@contextmanager
def replacing(target: Path, dropped: Callable[[str], bool]) -> Iterator[Path]:
    """Yields an empty folder that takes the place of `target` when the block succeeds.

    Files and folders in `target` that the new one lacks are carried over, except those whose name
    is `dropped`. Whoever looks, and whoever kills us, finds the old folder or the new one, whole;
    an error leaves the old one as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.saving-"
    _sweep(target.parent, prefix)
    aside = target.parent / f"{prefix}{secrets.token_hex(4)}"
    aside.mkdir()
    lock = os.open(aside, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock, and then sweep nothing
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield aside
        if target.exists():
            _carry_over(target, aside, dropped)
        for folder, _, _ in os.walk(aside):
            _sync(folder)
        _swap(aside, target)
        _sync(target.parent)
    finally:
        # What we could not finish or, after the swap, the old folder.
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path, prefix: str) -> None:
    """Removes what killed saves left behind; the folder of a living one is locked."""
    for entry in parent.iterdir():
        if entry.name.startswith(prefix):
            with suppress(OSError):
                lock = os.open(entry, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry, ignore_errors=True)
                finally:
                    os.close(lock)


def _carry_over(source: Path, destination: Path, dropped: Callable[[str], bool]) -> None:
    def left_behind(folder: str, names: list[str]) -> list[str]:
        if Path(folder) != source:
            return []
        return [name for name in names if dropped(name) or (destination / name).exists()]

    def link_or_copy(file: str, copy: str) -> None:
        # A link keeps what another process goes on writing to, a log for one.
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)

    shutil.copytree(source, destination, symlinks=True, ignore=left_behind,
                    copy_function=link_or_copy, dirs_exist_ok=True)  # fmt: skip


def _swap(aside: Path, target: Path) -> None:
    """Puts `aside` in the place of `target` and what stood there, if anything, in its own."""
    if not target.exists():
        aside.rename(target)
    elif not _exchange(aside, target):
        replaced = aside.with_name(aside.name.replace(".saving-", ".replaced-"))
        target.rename(replaced)
        try:
            aside.rename(target)
        except BaseException:
            replaced.rename(target)
            raise
        replaced.rename(aside)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one step, where the system and the file system can; says if it did."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:  # not Linux, or a C library from before 2018
        return False
    at_cwd, exchange = -100, 2
    done = renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange)
    return bool(done == 0)


def _sync(folder: str | Path) -> None:
    """Flushes a folder's own entries to the disk: renames survive a power cut only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
