"""Files that are never half written: JSON, safetensors, manifests, and folders replaced at once.

`xlstm7b prepare` uses it without torch, which takes seconds to load.
"""

import ctypes
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

try:
    import fcntl
except ModuleNotFoundError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, int], None]
"""Called with the name of a tensor or file and the number of its bytes that were just processed."""

MANIFEST = "SHA256SUMS"
_LONGEST_HEADER = 100_000_000  # the limit of the safetensors library
_NOT_WRITTEN = " could not be written ("

# Single files


def real_path(path: str | Path) -> Path:
    """An output path with links resolved. `ValueError` if it cannot exist, or be read later.

    For links that lead in a circle, `Path.resolve` raises a `RuntimeError`, and from Python 3.13 on
    nothing.
    """
    check_utf8(path)
    found = Path(os.path.realpath(path))
    if found.is_symlink():
        raise ValueError(f"cannot write {path}: its links lead in a circle; choose another path")
    above = next(parent for parent in found.parents if os.path.lexists(parent))
    if not above.is_dir():
        raise ValueError(f"cannot write {path}: {above} is not a folder")
    return found


def check_writable(target: Path) -> None:
    """`ValueError` if nothing can be written beside `target`, or where its folder would be made."""
    above = next(parent for parent in target.parents if parent.exists())
    if not os.access(above, os.W_OK):
        raise ValueError(f"cannot write {target}: no write permission in {above}")


def check_file(path: Path, hint: str = "") -> None:
    """`ValueError` if an input file is missing or a folder. It may be a pipe."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a file{hint}")
    if not path.exists():
        raise ValueError(f"there is no file {path}{hint}")


def check_format(path: Path, found: Any, newest: int) -> None:
    """`ValueError` if a file has a newer format than the newest that this version reads."""
    if str(found).isdecimal() and int(found) > newest:
        raise ValueError(
            f"{path} has format {found}, and this version of xlstm7b reads formats up to {newest}: "
            "upgrade xlstm7b"
        )


def check_utf8(path: str | Path) -> None:
    """`ValueError` if a path is not UTF-8: safetensors cannot open it, and JSON cannot hold it."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the path {str(path)!a} is not UTF-8: give it another name") from error


@contextmanager
def write_aside(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yields a temporary path in the same folder. At the end that file is renamed to `path`.

    So `path` is never half written, and an error leaves the old file unchanged. A process that is
    killed leaves the temporary one. Folders with many or large files remove such leftovers
    themselves (`StateStore`, `data/prepare.py`). Without `overwrite`, a file that is there by then
    stays, and a `FileExistsError` says so.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with naming_target(aside, path):
        try:
            yield aside
            if not overwrite:
                _take_name(aside, path)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    _sync(path.parent)


def _take_name(aside: Path, path: Path) -> None:
    """Makes `path` a second name of the file `aside`. `FileExistsError` if it is there already."""
    try:
        os.link(aside, path)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:  # a file system without hard links
        if path.exists():
            raise _exists(path) from error


def _exists(target: Path) -> FileExistsError:
    return FileExistsError(f"{target} exists already: perhaps another process has just written it")


@contextmanager
def naming_target(aside: Path, target: Path) -> Iterator[None]:
    """Names `target` in an error of the system that names the temporary `aside`, or a file in it.

    The user knows only `target`, for example on a file system that is full.
    """
    try:
        yield
    except OSError as error:
        named = str(error) if error.errno is None else str(error.filename)  # by `naming`, or not
        if not named.startswith(str(aside)):
            raise
        if error.errno is None:
            _, said, reason = named.partition(_NOT_WRITTEN)
            raise OSError(f"{target}{said}{reason}") from error
        raise OSError(error.errno, error.strerror, str(target)) from error


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file with `write_aside`."""
    with write_aside(path) as aside:
        write_hashed(aside, [json_bytes(value)])


def json_bytes(value: Any) -> bytes:
    """The content of a JSON file. NumPy scalars become numbers, other types strings.

    A path that is not UTF-8 has halves of surrogate pairs, which are written as their escapes.
    """

    def plain(value: Any) -> Any:
        return value.item() if hasattr(value, "item") else str(value)

    text = json.dumps(value, indent=2, ensure_ascii=False, default=plain) + "\n"
    return text.encode(errors="backslashreplace")


def write_hashed(path: Path, pieces: Iterable[bytes | memoryview], *, mode: int = 0o666) -> str:
    """Writes a new file with `write_new`, and returns its sha256."""
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for piece in pieces:
            digest.update(piece)
            yield piece

    write_new(path, hashed(), mode=mode)
    return digest.hexdigest()


def write_new(path: Path, pieces: Iterable[bytes | memoryview], *, mode: int = 0o666) -> None:
    """Writes a new file, and flushes it to the disk.

    `mode` is the mode of the file, less the process's umask.
    """
    opener = functools.partial(os.open, mode=mode)
    with naming(path), open(path, "xb", opener=opener) as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names the file in an error of writing, which has only a number and "No space left …".

    The file must be closed inside: closing tries to write again, and fails again.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:  # it names a file already
            raise
        raise OSError(f"{path}{_NOT_WRITTEN}{error})") from error


def complete_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file. A last line without its end is removed: its process was killed."""
    with path.open("rb+") as file:
        size = 0
        for line in file:
            if line.endswith(b"\n"):
                size += len(line)
                yield line
        file.truncate(size)


def lock(file: int | IO[Any] | None, *, shared: bool = False, wait: bool = False) -> None:
    """Locks an open file or folder until it is closed. Does nothing on Windows.

    `BlockingIOError` if another process has locked it, unless `wait`; another `OSError` if the file
    system has no locks. Several processes can have a `shared` lock.
    """
    if fcntl is not None and file is not None:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)


@contextmanager
def lock_folder(folder: Path, action: str, *, name: str | Path | None = None) -> Iterator[None]:
    """Locks a folder or a file. If another process has the lock, a `ValueError` says so.

    `action` is for the message: "another process is training in FOLDER right now". A folder that
    the user does not know needs `name`: the message has it instead of the folder.
    """
    with _descriptor(folder) as descriptor:
        try:
            lock(descriptor)
        except BlockingIOError as error:
            raise ValueError(f"another process is {action} {name or folder} right now") from error
        except OSError:
            pass  # some network file systems have no locks
        yield


@contextmanager
def locked_folder(folder: Path, action: str) -> Iterator[None]:
    """Creates and locks a folder. At the end, what it created is removed if it is still empty."""
    made = real_path(folder)
    if made.is_file():
        raise ValueError(f"{folder} is a file, not a folder: choose another folder")
    missing = [path for path in (made, *made.parents) if not path.exists()]
    try:
        made.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror}") from error
    if not os.access(made, os.W_OK):
        raise ValueError(f"cannot write {folder}: no write permission in it")
    with lock_folder(folder, action):
        try:
            yield
        finally:
            with suppress(OSError):  # a folder that is not empty stays
                for path in missing:
                    path.rmdir()


@contextmanager
def _descriptor(folder: Path) -> Iterator[int | None]:
    """An open folder. None on Windows, where folders cannot be opened."""
    if fcntl is None:
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# Safetensors


@functools.cache
def float_dtypes() -> "dict[str, torch.dtype]":
    """The dtypes of weights and states, by their names in a safetensors file."""
    import torch

    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
    }


@functools.cache
def quantized_dtypes() -> "dict[str, torch.dtype]":
    """Other dtypes of the files of a checkpoint with quantised weights."""
    import torch

    return {
        "I8": torch.int8,
        "I32": torch.int32,
        "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn,
    }


class Stored(NamedTuple):
    """One tensor as the header of a file describes it."""

    file: Path
    key: str
    dtype: "torch.dtype"
    shape: tuple[int, ...]


@contextmanager
def opened_safetensors(path: Path) -> Iterator[Any]:
    """`safe_open` with errors that name the file. Its tensors are views of the mapped file."""
    check_file(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    check_utf8(path)
    path.open("rb").close()  # without permission, this OSError names the file
    try:
        try:
            opened = safe_open(path, framework="pt")
        except RuntimeError as error:  # of PyTorch, which opens and maps the file once more
            raise OSError(f"{path} could not be read ({error})") from error
        with opened as handle:
            yield handle
    except SafetensorError as error:
        if not _may_be_safetensors(path):
            raise ValueError(f"{path} is not a safetensors file") from error
        raise ValueError(f"{path} is damaged{_first_cut(path)}: {error}") from error


def _may_be_safetensors(path: Path) -> bool:
    """True if it starts with the length of a header and a brace, as far as it is long enough."""
    with path.open("rb") as file:
        start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    return length <= _LONGEST_HEADER and start[8:] in (b"", b"{")


def _first_cut(path: Path) -> str:
    """If the file is truncated and its header readable: the first tensor that is incomplete."""
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


def read_headers(
    files: Iterable[Path], dtypes: "Mapping[str, torch.dtype] | None" = None
) -> list[Stored]:
    """The tensors in these files, which must have one of `dtypes`. No tensor is read."""
    dtypes = dtypes or float_dtypes()
    stored = []
    for file in files:
        with opened_safetensors(file) as handle:
            for key in handle.keys():  # noqa: SIM118 (the handle is not a dict)
                header = handle.get_slice(key)
                code = header.get_dtype()
                if code not in dtypes:
                    raise ValueError(
                        f"{file}: {key!r} is stored as {code}, not as one of {', '.join(dtypes)}"
                    )
                stored.append(Stored(file, key, dtypes[code], tuple(header.get_shape())))
    return stored


def write_safetensors(
    path: Path,
    tensors: "dict[str, torch.Tensor]",
    metadata: Mapping[str, str],
    *,
    mode: int = 0o666,
) -> None:
    """Writes a safetensors file with `write_aside`. Removes the tensors from `tensors`."""
    with write_aside(path) as aside:
        write_new(aside, safetensors_pieces(tensors, metadata=metadata), mode=mode)


def safetensors_pieces(
    tensors: "dict[str, torch.Tensor]",
    progress: Progress | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, part by part. Removes each tensor from `tensors`.

    The library's own writer does not return the bytes, so the file would have to be read again to
    compute its hash.
    """
    import torch

    codes = {dtype: code for code, dtype in (float_dtypes() | quantized_dtypes()).items()}
    # Wide dtypes first: then every tensor is aligned to its own element size.
    keys = sorted(tensors, key=lambda key: -tensors[key].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
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


def shards(
    tensors: "Iterable[tuple[str, torch.Tensor]]", max_bytes: int
) -> "Iterator[dict[str, torch.Tensor]]":
    """Groups tensors, in order, into shards of at most `max_bytes`, or of one larger tensor."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


# Folders


def write_manifest(folder: Path, sums: Mapping[str, str]) -> None:
    """Writes names and sha256 sums in the format of `sha256sum --check`."""
    write_hashed(folder / MANIFEST, [manifest_bytes(sums)])


def manifest_bytes(sums: Mapping[str, str]) -> bytes:
    """The content of a manifest."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode()


def read_manifest(folder: Path, expected: Iterable[str]) -> dict[str, str]:
    """The sha256 of each file, by name. An expected name that is missing is a `ValueError`."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{folder} has no {MANIFEST}, so it cannot be verified")
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
    for missing in sorted(set(expected) - sums.keys()):
        raise ValueError(f"{folder / missing} is not listed in {MANIFEST}")
    return sums


def check_sha256(path: Path, digest: str, manifest: str = MANIFEST) -> None:
    """Raises a `ValueError` if a file is missing or its sha256 is not that of the manifest."""
    if not path.is_file():
        raise ValueError(f"{path} is missing, though {manifest} lists it")
    if file_sha256(path) != digest:
        raise ValueError(f"{path} is damaged: its sha256 is not the one in {manifest}")


def file_sha256(path: Path) -> str:
    """The sha256 of a file, which is read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacing(
    target: Path, dropped: Callable[[str], bool], *, overwrite: bool = True
) -> Iterator[Path]:
    """Yields an empty folder. It replaces `target` when the block ends without an error.

    Files and folders that are only in `target` are kept, unless `dropped(name)` is true. `target`
    is always the whole old folder or the whole new one, even if the process is killed. An error
    leaves the old one unchanged.

    Without `overwrite`, a `FileExistsError` says that `target` holds something, then or at the end,
    or that another process is writing it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.saving-"
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise _exists(target)
    if _sweep(target.parent, prefix) and not overwrite:
        raise FileExistsError(f"another process is writing {target} right now")
    aside = target.parent / f"{prefix}{secrets.token_hex(4)}"
    with naming_target(aside, target):
        aside.mkdir()
    with naming_target(aside, target), _descriptor(aside) as descriptor:
        try:
            with suppress(OSError):  # without locks, `_sweep` removes nothing
                lock(descriptor, shared=True, wait=True)
            yield aside
            if target.exists():
                _carry_over(target, aside, dropped)
            for folder, _, _ in os.walk(aside):
                _sync(Path(folder))
            _swap(aside, target, overwrite)
            _sync(target.parent)
        finally:
            # The unfinished folder or, after the swap, the old one.
            shutil.rmtree(aside, ignore_errors=True)


def _sweep(parent: Path, prefix: str) -> bool:
    """Removes the temporary folders of killed processes. A running process has locked its own.

    True if there is one of a running process.
    """
    is_busy = False
    for entry in parent.iterdir():
        if entry.name.startswith(prefix):
            with suppress(OSError), _descriptor(entry) as descriptor:
                try:
                    lock(descriptor)
                except BlockingIOError:
                    is_busy = True
                else:
                    shutil.rmtree(entry, ignore_errors=True)
    return is_busy


def _carry_over(source: Path, destination: Path, dropped: Callable[[str], bool]) -> None:
    def ignored(folder: str, names: list[str]) -> list[str]:
        if Path(folder) != source:
            return []
        return [name for name in names if dropped(name) or (destination / name).exists()]

    def link_or_copy(file: str, copy: str) -> None:
        # A hard link: another process may still be writing to the file, such as a log.
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)

    shutil.copytree(
        source,
        destination,
        symlinks=True,
        ignore=ignored,
        copy_function=link_or_copy,
        dirs_exist_ok=True,
    )


def _swap(aside: Path, target: Path, overwrite: bool) -> None:
    """Exchanges `aside` and `target`; just renames `aside` if `target` is missing or empty.

    `FileExistsError` if `target` holds something and `overwrite` is false.
    """
    try:
        aside.rename(target)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if not overwrite:
            raise _exists(target) from error
    if not _exchange(aside, target):
        replaced = aside.with_name(aside.name.replace(".saving-", ".replaced-"))
        target.rename(replaced)
        try:
            aside.rename(target)
        except BaseException:
            replaced.rename(target)
            raise
        replaced.rename(aside)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders atomically. False if the system or the file system cannot do that."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, TypeError):  # not Linux, or glibc before 2.28; Windows
        return False
    at_cwd, exchange = -100, 2
    done = renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange)
    return bool(done == 0)


def _sync(folder: Path) -> None:
    """Flushes a folder's entries to the disk, so that a rename survives a power failure."""
    with _descriptor(folder) as descriptor:
        if descriptor is not None:
            os.fsync(descriptor)
