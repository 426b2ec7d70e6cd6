"""Documents out of files: `.txt`, `.jsonl` and `.parquet`, the first two also `.gz` and `.zst`.

A `.txt` is one document; a line of a `.jsonl` and a row of a `.parquet` are one each. What is wrong
is a `ValueError` that names the file and the line.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

FORMATS = ("text", "chat", "qa")
_PACKED = (".gz", ".zst")
_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 1024

Segment = tuple[str, bool]
"""A piece of a document, and whether the loss counts it. Each is turned to tokens by itself."""


@dataclass(frozen=True)
class Columns:
    """Which columns make a document, and how.

    text: one column, all of which counts in the loss.
    chat: a list of {"role": "system" | "user" | "assistant", "content": "…"}, written as
        `xlstm7b chat` writes it for a model without a template. The answers count, and the end.
    qa: a question and an answer, as a chat of two turns.
    """

    format: str = "text"
    text: str = "text"
    messages: str = "messages"
    question: str = "question"
    answer: str = "answer"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"there is no format {self.format!r}; there are: {', '.join(FORMATS)}")

    @property
    def has_mask(self) -> bool:
        return self.format != "text"

    @property
    def names(self) -> list[str]:
        two = [self.question, self.answer]
        return {"text": [self.text], "chat": [self.messages], "qa": two}[self.format]

    def segments(self, record: Any) -> list[Segment]:
        """The document that a record is; `ValueError` without the place, which its caller knows."""
        if not isinstance(record, dict):
            raise ValueError("this is no JSON object")
        for name in self.names:
            if name not in record:
                raise ValueError(f"there is no column {name!r}; there are: {', '.join(record)}")
        if self.format == "chat":
            return _turns(record[self.messages])
        texts = [_text(record[name], name) for name in self.names]
        if self.format == "text":
            return [(texts[0], True)]
        roles = zip(("user", "assistant"), texts, strict=True)
        return _turns([{"role": role, "content": text} for role, text in roles])


def _turns(messages: Any) -> list[Segment]:
    """As `generate.chat.PlainTurns`; what follows the last answer is left out.

    The prompt ends at "Assistant:", as it does when the model is asked, and " …" is the answer.
    """
    if not isinstance(messages, list):
        raise ValueError(f"the messages are {type(messages).__name__}, not a list")
    segments: list[Segment] = []
    prompt, separator = "", ""
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f'message {place + 1} has no "role" and "content"')
        role, content = message["role"], _text(message["content"], "content")
        if role == "system" and place == 0:
            prompt, separator = f"{content}\n\n", ""
        elif role == "user":
            prompt, separator = f"{prompt}{separator}User: {content}", "\n"
        elif role == "assistant":
            segments += [(f"{prompt}{separator}Assistant:", False), (f" {content}", True)]
            prompt, separator = "", "\n"
        else:
            raise ValueError(f"message {place + 1} is by {role!r}, out of place or unknown")
    if not segments:
        raise ValueError("no message is by the assistant")
    return segments


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {type(value).__name__}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which is no character
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def find_sources(inputs: Iterable[str | Path], text_endings: Sequence[str] = ()) -> list[Path]:
    """The files to read, in order: those named, and in folders, sorted, all that can be read.

    `text_endings` (".py", …) are texts like `.txt`.
    """
    found: dict[Path, None] = {}
    for given in map(Path, inputs):
        if not given.exists():
            raise ValueError(f"there is no file or folder {given}")
        files = [given.absolute()]  # not resolved: links may lack the ending
        if given.is_dir():
            files = sorted(
                file
                for folder, _, names in os.walk(given.absolute())
                for file in (Path(folder) / name for name in names)
                if _kind(file, text_endings) and not file.name.startswith(".")
            )
        for file in files:
            if not _kind(file, text_endings):
                raise ValueError(
                    f"{file} is none of .txt, .jsonl (also .gz, .zst) and .parquet"
                    + "".join(f", nor {ending}" for ending in text_endings)
                )
            if file in found:
                raise ValueError(f"{file} is given twice")
            found[file] = None
        if not files:
            raise ValueError(f"{given} holds no .txt, .jsonl (also .gz, .zst) or .parquet")
    if not found:
        raise ValueError("no input is given")
    return list(found)


def _kind(path: Path, text_endings: Sequence[str] = ()) -> str:
    name = path.name.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    if name.endswith((".txt", *text_endings)):
        return "text"
    if name.endswith(".jsonl"):
        return "jsonl"
    return "parquet" if path.name.lower().endswith(".parquet") else ""


class Batch(NamedTuple):
    """Some records of a file, as they are in it: making documents of them is left to others."""

    path: Path
    first: int  # the place of its first record in the file
    records: list[Any]  # bytes, or a dict
    kind: str
    read: int  # how much of the file was read for it, in bytes

    def documents(self, columns: Columns) -> Iterator[tuple[int, list[Segment]]]:
        """Each document with its record's place; blank lines are none."""
        for place, record in enumerate(self.records, self.first):
            if self.kind == "jsonl" and not record.strip():
                continue
            try:
                if self.kind == "text":
                    yield place, columns.segments({columns.text: str(record, "utf-8-sig")})
                    continue
                parsed = json.loads(record) if self.kind == "jsonl" else record
                yield place, columns.segments(parsed)
            except (ValueError, RecursionError) as error:
                where = {"jsonl": f" line {place + 1}", "parquet": f" row {place + 1}"}
                raise ValueError(f"{self.path}{where.get(self.kind, '')}: {error}") from error


def read_batches(
    path: Path, columns: Columns, start: int = 0, text_endings: Sequence[str] = ()
) -> Iterator[Batch]:
    """A file's records from place `start`, in batches of about a megabyte."""
    kind = _kind(path, text_endings)
    if kind == "text" and columns.format != "text":
        raise ValueError(f"{path} has no columns, which the format {columns.format!r} needs")
    records, first, size, seen = list[Any](), start, 0, 0
    with _naming(path):
        reader = _rows(path, columns, start) if kind == "parquet" else _lines(path, kind, start)
        for record, length, position in reader:
            records.append(record)
            size += length
            if size >= _BATCH_BYTES or len(records) >= _BATCH_RECORDS:
                yield Batch(path, first, records, kind, position - seen)
                records, first, size, seen = [], first + len(records), 0, position
    yield Batch(path, first, records, kind, path.stat().st_size - seen)


def check_source(path: Path, columns: Columns, text_endings: Sequence[str] = ()) -> None:
    """Raises what is wrong with a file as far as its first record; of a text, if it has none."""
    if columns.format == "text" and _kind(path, text_endings) == "text":
        path.open("rb").close()
        return
    batch = next(read_batches(path, columns, text_endings=text_endings))
    next(batch._replace(records=batch.records[:1]).documents(columns), None)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _lines(path: Path, kind: str, start: int) -> Iterator[tuple[bytes, int, int]]:
    """Records from `start`, their lengths, and how far into the file they reach."""
    with path.open("rb") as file:
        content: IO[bytes] | gzip.GzipFile | io.BufferedReader = file
        if path.suffix.lower() == ".gz":
            content = gzip.GzipFile(fileobj=file)
        elif path.suffix.lower() == ".zst":
            content = io.BufferedReader(_Zstandard(file), 1 << 20)
        lines: Iterable[bytes] = [content.read()] if kind == "text" else content
        for place, line in enumerate(lines):
            if place >= start:
                yield line, len(line), file.tell()


class _Zstandard(io.RawIOBase):
    """The library's own reader takes a file that was cut off for one that ends."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._library = file, import_module("zstandard")
        self._frame: Any = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(1 << 17)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(self._packed)
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from error
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _rows(path: Path, columns: Columns, start: int) -> Iterator[tuple[Any, int, int]]:
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is no readable parquet file: {error}") from error
    with file:
        there = file.schema_arrow.names
        for name in set(columns.names) - set(there):
            there = ", ".join(there)
            raise ValueError(f"{path}: there is no column {name!r}; there are: {there}")
        whole, place = path.stat().st_size, 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if place + rows <= start:
                place += rows
                continue
            batches = file.iter_batches(256, row_groups=[group], columns=columns.names)
            try:
                for batch in batches:
                    each = batch.nbytes // max(1, batch.num_rows)
                    for row in batch.to_pylist():
                        if place >= start:
                            yield row, each, whole * (place + 1) // file.metadata.num_rows
                        place += 1
            except (pyarrow.ArrowException, OSError) as error:
                raise ValueError(f"{path} is damaged: {error}") from error
