"""Documents from `.txt`, `.jsonl` and `.parquet` files; the first two also as `.gz` and `.zst`.

A `.txt` file is one document; so is each line of a `.jsonl` and each row of a `.parquet`. Bad input
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

from xlstm7b.chat_format import PlainFormat

FORMATS = ("text", "chat", "qa")
_READABLE = ".txt, .jsonl (also .gz, .zst) or .parquet"
BATCH_BYTES = 1 << 20
BATCH_RECORDS = 1024

Segment = tuple[str, bool]
"""A part of a document, and whether it counts in the loss. Each part is tokenized by itself."""


@dataclass(frozen=True)
class Columns:
    """How a record becomes a document, and the names of the columns.

    text: one column; all of it counts in the loss.
    chat: a list of {"role": "system" | "user" | "assistant", "content": "…"}, written in
        `chat_format.PlainFormat`. Only the answers, and the end of text, count in the loss.
    qa: a question and an answer, written as a chat of two messages.
    """

    format: str = "text"
    text: str = "text"
    messages: str = "messages"
    question: str = "question"
    answer: str = "answer"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"unknown format {self.format!r}; choose from {', '.join(FORMATS)}")

    @property
    def has_mask(self) -> bool:
        return self.format != "text"

    @property
    def names(self) -> list[str]:
        """The columns that this format reads."""
        both = [self.question, self.answer]
        return {"text": [self.text], "chat": [self.messages], "qa": both}[self.format]

    def segments(self, record: Any) -> list[Segment]:
        """The document of one record. The caller adds file and line to a `ValueError`."""
        if not isinstance(record, dict):
            raise ValueError("this is not a JSON object")
        for name in self.names:
            if name not in record:
                raise ValueError(
                    f"the column {name!r} is missing; the columns are {', '.join(record)}"
                )
        if self.format == "chat":
            return _chat_segments(record[self.messages])
        texts = [_check_text(record[name], name) for name in self.names]
        if self.format == "text":
            return [(texts[0], True)]
        roles = zip(("user", "assistant"), texts, strict=True)
        return _chat_segments([{"role": role, "content": text} for role, text in roles])


def _chat_segments(messages: Any) -> list[Segment]:
    """The conversation up to the last answer."""
    if not isinstance(messages, list):
        raise ValueError(f"the messages are {type(messages).__name__}, not a list")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f'message {index + 1} has no "role" and "content"')
        role = message["role"]
        if role not in ("user", "assistant") and not (role == "system" and index == 0):
            raise ValueError(
                f"message {index + 1} has the role {role!r}; allowed are user, assistant, and "
                "system for the first message"
            )
        checked.append({"role": role, "content": _check_text(message["content"], "content")})
    segments = list(PlainFormat().segments(checked))
    while segments and not segments[-1][1]:
        segments.pop()
    if not segments:
        raise ValueError("no message has the role 'assistant'")
    return segments


def _check_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {type(value).__name__}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can hold half of a surrogate pair
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def find_input_files(inputs: Iterable[str | Path], text_endings: Sequence[str] = ()) -> list[Path]:
    """The files to read: named files in the given order, files of a folder sorted.

    Files that end in one of `text_endings` (".py", …) are read like `.txt`.
    """
    found: dict[Path, None] = {}
    for given in map(Path, inputs):
        if not given.exists():
            raise ValueError(f"there is no file or folder {given}")
        files = [given.absolute()]  # not resolved: the target of a link may lack the ending
        if given.is_dir():
            files = sorted(
                file
                for folder, _, names in os.walk(given.absolute())
                for file in (Path(folder) / name for name in names)
                if _kind(file, text_endings) and not file.name.startswith(".")
            )
        for file in files:
            if not _kind(file, text_endings):
                raise ValueError(f"{file} is not {', '.join((*text_endings, _READABLE))}")
            if file in found:
                raise ValueError(f"{file} is given twice")
            found[file] = None
        if not files:
            raise ValueError(f"{given} holds no {', '.join((*text_endings, _READABLE))}")
    if not found:
        raise ValueError("no input is given")
    return list(found)


def _kind(path: Path, text_endings: Sequence[str] = ()) -> str:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return "parquet"
    name = name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith((".txt", *text_endings)):
        return "text"
    return "jsonl" if name.endswith(".jsonl") else ""


class RecordBatch(NamedTuple):
    """Consecutive records of a file. Worker processes parse them."""

    path: Path
    first: int  # position of the first record in the file
    records: list[Any]  # bytes of a line or a file, or the dict of a row
    kind: str
    bytes_read: int  # bytes of the file that were read for this batch

    def documents(self, columns: Columns) -> Iterator[tuple[int, list[Segment]]]:
        """The position of each record, and its document. Blank lines are skipped."""
        for position, record in enumerate(self.records, self.first):
            if self.kind == "jsonl" and not record.strip():
                continue
            try:
                if self.kind == "text":
                    yield position, columns.segments({columns.text: str(record, "utf-8-sig")})
                    continue
                parsed = json.loads(record) if self.kind == "jsonl" else record
                yield position, columns.segments(parsed)
            except (ValueError, RecursionError) as error:
                where = {"jsonl": f" line {position + 1}", "parquet": f" row {position + 1}"}
                raise ValueError(f"{self.path}{where.get(self.kind, '')}: {error}") from error


def read_batches(
    path: Path, columns: Columns, start: int = 0, text_endings: Sequence[str] = ()
) -> Iterator[RecordBatch]:
    """The records of a file from position `start`, in batches of about 1 MB."""
    kind = _kind(path, text_endings)
    if kind == "text" and columns.format != "text":
        raise ValueError(f"{path} has no columns, which the format {columns.format!r} needs")
    records, first, size, seen = list[Any](), start, 0, 0
    with _name_damage(path):
        reader = _rows(path, columns, start) if kind == "parquet" else _lines(path, kind, start)
        for record, length, offset in reader:
            records.append(record)
            size += length
            if size >= BATCH_BYTES or len(records) >= BATCH_RECORDS:
                yield RecordBatch(path, first, records, kind, offset - seen)
                records, first, size, seen = [], first + len(records), 0, offset
    yield RecordBatch(path, first, records, kind, path.stat().st_size - seen)


def check_input_file(path: Path, columns: Columns, text_endings: Sequence[str] = ()) -> None:
    """Raises a `ValueError` if the first record of a file is bad. A text file is only opened."""
    if columns.format == "text" and _kind(path, text_endings) == "text":
        path.open("rb").close()
        return
    batch = next(read_batches(path, columns, text_endings=text_endings))
    next(batch._replace(records=batch.records[:1]).documents(columns), None)


@contextmanager
def _name_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the operating system, not of a decompressor
        raise ValueError(f"{path} is damaged: {error}") from error


def _lines(path: Path, kind: str, start: int) -> Iterator[tuple[bytes, int, int]]:
    """Records from `start`, their lengths, and the file's read offset after each."""
    with path.open("rb") as file:
        content: IO[bytes] | gzip.GzipFile | io.BufferedReader = file
        if path.suffix.lower() == ".gz":
            content = gzip.GzipFile(fileobj=file)
        elif path.suffix.lower() == ".zst":
            pyarrow = import_module("pyarrow")  # unlike zstandard, it notices a truncated file
            unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
            content = io.BufferedReader(unpacked, 1 << 20)
        lines: Iterable[bytes] = [content.read()] if kind == "text" else content
        for position, line in enumerate(lines):
            if position >= start:
                yield line, len(line), file.tell()


def _rows(path: Path, columns: Columns, start: int) -> Iterator[tuple[Any, int, int]]:
    """Rows from `start` as dicts, their sizes, and the approximate file offset of each."""
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    with file:
        names = file.schema_arrow.names
        for name in columns.names:
            if name not in names:
                raise ValueError(
                    f"{path}: the column {name!r} is missing; the columns are {', '.join(names)}"
                )
        whole, position = path.stat().st_size, 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if position + rows <= start:
                position += rows
                continue
            batches = file.iter_batches(256, row_groups=[group], columns=columns.names)
            try:
                for batch in batches:
                    size = batch.nbytes // max(1, batch.num_rows)
                    for row in batch.to_pylist():
                        if position >= start:
                            yield row, size, whole * (position + 1) // file.metadata.num_rows
                        position += 1
            except (pyarrow.ArrowException, OSError) as error:
                raise ValueError(f"{path} is damaged: {error}") from error
