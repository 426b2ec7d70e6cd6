"""Documents from text, JSON and parquet files; all but parquet also as `.gz` and `.zst`.

A `.txt` or `.md` file is one document. So is each line of a `.jsonl` or `.ndjson`, each row of a
`.parquet`, and each line of a `.json` or, if that holds a JSON array, each item of the array. Bad
input is a `ValueError` that names the file and the line.
"""

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from xlstm7b.chat_format import ChatTemplate
from xlstm7b.files import check_utf8

FORMATS = ("auto", "text", "chat", "sharegpt", "alpaca", "qa", "completion")
_READABLE = ".txt, .md, .jsonl, .ndjson, .json (also .gz, .zst) or .parquet"
BATCH_BYTES = 1 << 20
BATCH_RECORDS = 1024
MAX_RECORD_BYTES = 1 << 30  # a longer line or text file is refused, so that memory is bounded
_PACKED = (".gz", ".zst")
_BLANK = re.compile(r"[ \t\r\n]*")

Segment = tuple[str, bool]
"""A part of a document, and whether it counts in the loss."""


class Document(NamedTuple):
    segments: list[Segment]
    has_all_answers: bool = True  # False: see `chat_format.Conversation`


# The roles of messages with "role", and of ShareGPT's, with "from".
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}


@dataclass(frozen=True)
class Columns:
    """How a record becomes a document, and the names of the columns.

    text: one column; all of it counts in the loss.
    chat: a list of messages, {"role": "user", "content": "…"} or {"from": "human", "value": "…"}.
    sharegpt: the same in the column "conversations".
    alpaca: "instruction", "input" (may be missing or empty) and "output".
    qa: a question and an answer.
    completion: "prompt" and "completion", two texts that are joined as they are.
    auto: the first of these that fits, see `detect_columns`.

    In all but text, only what the assistant writes counts in the loss, and the end of text. chat,
    sharegpt, alpaca and qa are written with a chat template; the last two have two messages.
    """

    format: str = "text"
    text: str = "text"
    messages: str = "messages"
    question: str = "question"
    answer: str = "answer"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"unknown format {self.format!r}; choose from {', '.join(FORMATS)}")
        for name, form in self._renamed.items():
            if not getattr(self, name):
                raise ValueError(f"the name of the {name} column is empty")
            if self.format not in ("auto", form):
                raise ValueError(
                    f"the {name} column {getattr(self, name)!r} is for the format {form}, not for "
                    f"{self.format}"
                )
        if len({*self._renamed.values()}) > 1:
            named = [f"the {name} column for {form}" for name, form in self._renamed.items()]
            raise ValueError(f"name the columns of one format, not of several: {', '.join(named)}")

    @property
    def _renamed(self) -> dict[str, str]:
        """The columns that have another name than usual, and their formats."""
        formats = {"text": "text", "messages": "chat", "question": "qa", "answer": "qa"}
        return {name: form for name, form in formats.items() if getattr(self, name) != name}

    @property
    def has_mask(self) -> bool:
        return self.format not in ("text", "auto")

    @property
    def is_chat(self) -> bool:
        """True if a chat template writes the documents."""
        return self.has_mask and self.format != "completion"

    @property
    def names(self) -> list[str]:
        """The columns that a record must have."""
        return {
            "auto": [],
            "text": [self.text],
            "chat": [self.messages],
            "sharegpt": ["conversations"],
            "alpaca": ["instruction", "output"],
            "qa": [self.question, self.answer],
            "completion": ["prompt", "completion"],
        }[self.format]

    @property
    def optional_names(self) -> list[str]:
        """Columns that are read if a record has them."""
        return ["input"] if self.format == "alpaca" else []

    def __str__(self) -> str:
        names = ", ".join(self.names)
        return f"{self.format} ({names})" if names else self.format

    def of_format(self, form: str) -> "Columns":
        """The same for another format. Columns that it does not have get their usual names."""
        usual = Columns()
        others = [name for name, other in self._renamed.items() if other != form]
        return replace(self, format=form, **{name: getattr(usual, name) for name in others})

    def candidates(self, names: Iterable[str]) -> list["Columns"]:
        """The formats that a record with these columns has, the best one first.

        A renamed column says which format is meant, also if the record lacks the column.
        Preference pairs are a `ValueError`.
        """
        if self._renamed:
            return [self.of_format(next(iter(self._renamed.values())))]
        usual = [Columns(form) for form in ("chat", "sharegpt", "completion", "alpaca", "qa")]
        usual += [Columns("qa", question="query", answer="response"), Columns("text")]
        given = set(names)
        if {"chosen", "rejected"} <= given:
            raise ValueError(
                "these are preference pairs (chosen, rejected), for which xlstm7b has no trainer: "
                "give the JSONL file itself to TRL's DPOTrainer; or prepare the chosen answers "
                "alone, with --messages-column chosen if they are messages, or with "
                "--question-column prompt --answer-column chosen if they are texts"
            )
        return [each for each in usual if given.issuperset(each.names)]

    def document(self, record: Any, template: ChatTemplate | None = None) -> Document:
        """The document of one record. The caller adds file and line to a `ValueError`.

        Chats need a `template`.
        """
        if not isinstance(record, dict):
            raise ValueError("this is not a JSON object")
        if self.format == "auto":
            raise ValueError(
                f"the columns are {', '.join(record)}, which no format has: name the columns to "
                "read, such as --text-column NAME"
            )
        for name in self.names:
            if name not in record:
                raise ValueError(
                    f"the column {name!r} is missing; the columns are {', '.join(record)}"
                )
        match self.format:
            case "chat" | "sharegpt":
                messages = _check_messages(record[self.names[0]])
            case _:
                texts = [_check_text(record[name], name) for name in self.names]
                if self.format == "text":
                    return Document([(texts[0], True)])
                if self.format == "completion":
                    return Document([(texts[0], False), (texts[1], True)])
                if record.get("input") and self.format == "alpaca":
                    texts[0] += f"\n\n{_check_text(record['input'], 'input')}"
                roles = zip(("user", "assistant"), texts, strict=True)
                messages = [{"role": role, "content": text} for role, text in roles]
        assert template is not None
        return Document(*template.conversation(messages))


def _check_messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list):
        raise ValueError(f"the messages are {type(messages).__name__}, not a list")
    checked = []
    for number, message in enumerate(messages, 1):
        given = message.keys() if isinstance(message, dict) else set[str]()
        keys = ("from", "value") if {"from", "value"} <= given else ("role", "content")
        if not given >= {*keys}:
            raise ValueError(f'message {number} has no "role" and "content"')
        named, content = (message[key] for key in keys)
        role = _ROLES.get(named) if isinstance(named, str) else None
        if role is None or (role == "system" and number > 1):
            raise ValueError(
                f"message {number} has the role {named!r}; allowed are user, assistant, and "
                "system for the first message"
            )
        if isinstance(content, list):
            content = _join_parts(content, number)
        checked.append({"role": role, "content": _check_text(content, keys[1])})
    return checked


def _join_parts(parts: list[Any], number: int) -> str:
    """The text of a content in parts, as in OpenAI's API: {"type": "text", "text": "…"}."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"message {number} has a part of the type {kind!r}, not text")
    return "".join(_check_text(part.get("text"), "text") for part in parts)


def _check_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {type(value).__name__}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair
        wrong = value[error.start]
        raise ValueError(
            f"{name!r} is not valid Unicode: {wrong!r} at character {error.start}"
        ) from error
    return value


# Finding files


@dataclass
class InputFiles:
    """The files to read, and everything else that the given folders hold."""

    files: list[Path] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # the reason, and the paths

    def summary(self) -> dict[str, Any]:
        """For the manifest: the number of files by ending and by reason, and their first names."""
        read: dict[str, list[str]] = {}
        for file in self.files:
            ending = "".join(file.suffixes[-2:] if file.suffix.lower() in _PACKED else file.suffix)
            read.setdefault(ending, []).append(str(file))

        def counted(groups: dict[str, list[str]]) -> dict[str, Any]:
            ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
            return {name: {"count": len(paths), "first": paths[:3]} for name, paths in ordered}

        return {"read": counted(read), "left_out": counted(self.left_out)}

    def __str__(self) -> str:
        """One line for the files to read, and one for each reason to leave something out."""
        summary = self.summary()
        read = ", ".join(f"{group['count']} {name}" for name, group in summary["read"].items())
        lines = [f"read: {read}"]
        for reason, group in summary["left_out"].items():
            more = ", …" if group["count"] > len(group["first"]) else ""
            lines.append(
                f"left out, {reason}: {group['count']} ({', '.join(group['first'])}{more})"
            )
        return "\n".join(lines)


def find_input_files(
    inputs: Iterable[str | Path],
    text_endings: Sequence[str] = (),
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    columns: Columns = Columns(),  # noqa: B008 (frozen)
    output: Path | None = None,
) -> InputFiles:
    """The files to read: named files in the given order, files of a folder sorted.

    Files that end in one of `text_endings` (".py", …) are read like `.txt`; an ending that no file
    has is a `ValueError`. `include` and `exclude` are glob patterns for names and paths of files
    and folders. In a folder, hidden files and folders, and the folder `output`, are left out. Links
    to folders are followed.
    """
    if "" in text_endings:
        raise ValueError("--as-text needs an ending, such as .py")
    inputs = [*inputs]
    if "" in inputs:  # it would be the current folder
        raise ValueError("a file or folder is needed, and one of those given is empty")
    search = _Search(text_endings, include, exclude, columns, output)
    for given in map(Path, inputs):
        if not given.exists():
            raise ValueError(f"there is no file or folder {given}")
        search.found.files += search.folder(given) if given.is_dir() else search.file(given)
    for pattern in search.unused:
        raise ValueError(f"the pattern {pattern!r} matches no file or folder of the input")
    if not search.found.files:
        raise ValueError("all input is left out" if search.found.left_out else "no input is given")
    for ending in text_endings:
        if not any(_unpacked(file).endswith(ending.lower()) for file in search.found.files):
            raise ValueError(f"no file of the input ends in {ending!r}, which --as-text names")
    for file, times in Counter(search.found.files).items():
        check_utf8(file)  # the manifest lists it
        if times > 1:
            raise ValueError(f"{file} is given twice")
    return search.found


@dataclass
class _Search:
    """Collects the files to read in `found`, and what is left out, with the reason."""

    endings: Sequence[str]
    include: Sequence[str]
    exclude: Sequence[str]
    columns: Columns
    output: Path | None
    found: InputFiles = field(default_factory=InputFiles)

    def __post_init__(self) -> None:
        self.readable = ", ".join((*self.endings, _READABLE))
        # Patterns that have matched nothing.
        self.unused = dict.fromkeys((*self.include, *self.exclude))

    def file(self, given: Path) -> list[Path]:
        if not _kind(given, self.endings):
            raise ValueError(f"{given.absolute()} is not {self.readable}")
        if not given.is_file():  # a pipe would be waited for
            raise ValueError(f"{given.absolute()} is not a regular file")
        if reason := self._reason_by_pattern(given, Path(given.name)):
            self._leave_out(reason, given)
            return []
        return [given.absolute()]  # not resolved: the target of a link may lack the ending

    def folder(self, given: Path) -> list[Path]:
        found, seen, waiting = list[Path](), set[tuple[int, int]](), [given]
        while waiting:
            for name, folders, files in os.walk(waiting.pop(0), onerror=_raise):
                folder = Path(name)
                status = folder.stat()
                if (status.st_dev, status.st_ino) in seen:
                    self._leave_out("links to a folder that is read already", folder, "/")
                    folders.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                folders.sort()  # which of two links is followed must not depend on the disk
                for path in [folder / each for each in folders]:
                    if reason := self._reason_for_folder(path, path.relative_to(given)):
                        self._leave_out(reason, path, "/")
                        folders.remove(path.name)
                    elif path.is_symlink():  # os.walk does not follow it
                        waiting.append(path)
                for path in (folder / each for each in sorted(files)):
                    if reason := self._reason_for_file(path, path.relative_to(given)):
                        self._leave_out(reason, path)
                    else:
                        found.append(path.absolute())
        if not found:
            chosen = " that the patterns choose" if self.include or self.exclude else ""
            raise ValueError(f"{given} holds no {self.readable}{chosen}")
        return sorted(found)

    def _reason_for_folder(self, path: Path, below: Path) -> str:
        if self._matches(self.exclude, path, below):
            return "excluded"
        if path.name.startswith("."):
            return "hidden"
        is_output = self.output and self.output.exists() and path.samefile(self.output)
        return "the output folder" if is_output else ""

    def _reason_for_file(self, path: Path, below: Path) -> str:
        if reason := self._reason_by_pattern(path, below):
            return reason
        if path.name.startswith("."):
            return "hidden"
        if not path.is_file():
            return "broken links, or not files"
        kind = _kind(path, self.endings)
        if kind == "text" and self.columns.has_mask:
            return f"text, which has no columns for the format {self.columns.format}"
        return "" if kind else "of other types"

    def _reason_by_pattern(self, path: Path, below: Path) -> str:
        if self._matches(self.exclude, path, below):
            return "excluded"
        if self.include and not self._matches(self.include, path, below):
            return "not included"
        return ""

    def _matches(self, patterns: Sequence[str], path: Path, below: Path) -> bool:
        """True if a pattern matches the path, the path below the given folder, or a part of it."""
        texts = {str(path), str(below), *map(str, below.parents[:-1]), *below.parts}
        hits = [
            each
            for each in patterns
            if any(fnmatchcase(text, each.removesuffix("/")) for text in texts)
        ]
        for hit in hits:
            self.unused.pop(hit, None)
        return bool(hits)

    def _leave_out(self, reason: str, path: Path, mark: str = "") -> None:
        shown = f"{path}{mark}".encode(errors="backslashreplace").decode()  # it may not be UTF-8
        self.found.left_out.setdefault(reason, []).append(shown)


def _raise(error: OSError) -> None:
    raise error


def _kind(path: Path, text_endings: Sequence[str] = ()) -> str:
    """How a file is read, by its name: text, jsonl, json, parquet, or "" for not at all."""
    if path.name.lower().endswith(".parquet"):
        return "parquet"
    name = _unpacked(path)
    if name.endswith((".txt", ".md", *map(str.lower, text_endings))):
        return "text"
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    return "json" if name.endswith(".json") else ""


def _unpacked(path: Path) -> str:
    """A file's name in lower case, without .gz and .zst."""
    name = path.name.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return name


# Reading files


class RecordBatch(NamedTuple):
    """Consecutive records of a file. Worker processes parse them."""

    path: Path
    first: int  # position of the first record in the file
    records: list[Any]  # bytes of a line or a file, a row (see `_values`), or the item of an array
    kind: str  # text, jsonl, array or parquet
    bytes_read: int  # bytes of the file that were read for this batch
    columns: Columns

    def documents(self, template: ChatTemplate | None = None) -> Iterator[tuple[int, Document]]:
        """The position of each record, and its document. Blank lines are skipped.

        Chats need a `template`.
        """
        for position, document in self.parse(template):
            if isinstance(document, ValueError):
                raise document
            yield position, document

    def parse(
        self, template: ChatTemplate | None = None
    ) -> Iterator[tuple[int, Document | ValueError]]:
        """Like `documents`, with the error of a bad record in place of its document."""
        for position, record in enumerate(self.records, self.first):
            if self.kind == "jsonl" and not record.strip():
                continue
            try:
                yield position, self.columns.document(self._value(record), template)
            except (ValueError, RecursionError) as error:
                where, hint = _WHERE[self.kind].format(position + 1), ""
                if isinstance(error, json.JSONDecodeError) and error.pos == len(error.doc):
                    hint = _CUT_LINE
                yield position, ValueError(f"{self.path}{where}: {error}{hint}")

    def _value(self, record: Any) -> Any:
        """One of the `records`, parsed."""
        if self.kind == "text":
            return {self.columns.text: str(record, "utf-8-sig")}
        if self.kind == "jsonl":
            return json.loads(record.rstrip())  # else an open string has a newline
        if isinstance(record, ValueError):  # see `_values`
            raise record
        return record

    def digests(self) -> list[bytes]:
        """The sha256 of each record."""
        return [
            sha256(record if isinstance(record, bytes) else repr(record).encode()).digest()
            for record in self.records
        ]


_TOO_LONG = f"more than {MAX_RECORD_BYTES:,} bytes are too many for one document"
_CUT_LINE = (
    "; the line ends before its JSON object: write each object on one line, or all objects as one "
    "JSON array in a .json file"
)
_WHERE = {"text": "", "jsonl": " line {}", "array": " item {}", "parquet": " row {}"}


def read_batches(
    path: Path, columns: Columns, start: int = 0, text_endings: Sequence[str] = ()
) -> Iterator[RecordBatch]:
    """The records of a file from position `start`, in batches of about 1 MB."""
    kind = _kind(path, text_endings)
    if kind == "text" and columns.has_mask:
        raise ValueError(f"{path} has no columns, which the format {columns.format!r} needs")
    records, first, size, seen = list[Any](), start, 0, 0
    with _name_damage(path):
        if kind == "json":
            kind = _json_kind(path)
        reader = _rows(path, columns, start) if kind == "parquet" else _records(path, kind, start)
        for record, length, offset in reader:
            records.append(record)
            size += length
            if size >= BATCH_BYTES or len(records) >= BATCH_RECORDS:
                batch = RecordBatch(path, first, records, kind, offset - seen, columns)
                records, first, size, seen = [], first + len(records), 0, offset
                yield batch
    yield RecordBatch(path, first, records, kind, path.stat().st_size - seen, columns)


def detect_columns(
    path: Path, columns: Columns, text_endings: Sequence[str] = ()
) -> tuple[Columns, list[Columns]]:
    """The columns of a file for the format auto, and the other formats that it also has.

    They are those of the first record that has a known format. Without such a record, the format
    stays auto, and each record is an error. Preference pairs are a `ValueError`.
    """
    kind = _kind(path, text_endings)
    if columns.format != "auto":
        return columns, []
    if kind == "text":
        return columns.of_format("text"), []
    for names in _names_in(path, kind):
        try:
            found = columns.candidates(names)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if found:
            return found[0], found[1:]
    return columns, []


def _names_in(path: Path, kind: str) -> Iterator[Iterable[str]]:
    """The columns of a parquet file, or of the first records of a JSON file."""
    if kind == "parquet":
        with _parquet_file(path) as file:
            yield file.schema_arrow.names
        return
    with _name_damage(path):
        kind = _json_kind(path) if kind == "json" else kind
        for record, _, _ in islice(_records(path, kind, 0), BATCH_RECORDS):
            with suppress(ValueError, RecursionError):
                value = json.loads(record) if kind == "jsonl" else record
                if isinstance(value, dict):
                    yield value


def check_input_file(
    path: Path,
    columns: Columns,
    text_endings: Sequence[str] = (),
    template: ChatTemplate | None = None,
    *,
    parse: bool = True,
) -> None:
    """Raises a `ValueError` if the first record of a file is bad. A text file is only opened.

    Without `parse`, the first record is only read.
    """
    if not columns.has_mask and _kind(path, text_endings) == "text":
        path.open("rb").close()
        return
    batch = next(read_batches(path, columns, text_endings=text_endings))
    if parse:
        next(batch._replace(records=batch.records[:1]).documents(template), None)


@contextmanager
def _name_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the operating system, not of a decompressor
        raise ValueError(f"{path} is damaged: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, BinaryIO]]:
    """The unpacked content of a file, and the file itself, whose offset is the progress."""
    with path.open("rb") as file:
        content: Any = file
        if path.suffix.lower() == ".gz":
            content = gzip.GzipFile(fileobj=file)
        elif path.suffix.lower() == ".zst":
            pyarrow = import_module("pyarrow")  # unlike zstandard, it notices a truncated file
            unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
            content = io.BufferedReader(unpacked, 1 << 20)
        if content.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            content = io.BufferedReader(_FromUTF16(content), 1 << 20)
        yield content, file


class _FromUTF16(io.RawIOBase):
    """A UTF-16 file, which begins with a byte order mark, as UTF-8."""

    def __init__(self, content: BinaryIO) -> None:
        self._text, self._left = io.TextIOWrapper(content, "utf-16", newline=""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            self._left = self._left or self._text.read(len(buffer)).encode()
        except UnicodeDecodeError as error:
            raise OSError(str(error)) from error  # see `_name_damage`
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


def _json_kind(path: Path) -> str:
    """What a `.json` file holds: "array" for one JSON array, else "jsonl" for JSON lines."""
    with _opened(path) as (content, _):
        return "array" if content.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[" else "jsonl"


def _records(path: Path, kind: str, start: int) -> Iterator[tuple[Any, int, int]]:
    """Records from `start`, their lengths, and the file's read offset after each."""
    with _opened(path) as (content, file):
        read = _items(path, content) if kind == "array" else _lines(path, content, kind)
        for position, (record, length) in enumerate(read):
            if position >= start:
                yield record, length, file.tell()


def _lines(path: Path, content: Any, kind: str) -> Iterator[tuple[bytes, int]]:
    """The lines of a file, or all of a text file, and their lengths."""
    if kind == "text":
        records: Iterable[bytes] = [_read_all(content)]
    else:
        records = iter(lambda: content.readline(MAX_RECORD_BYTES + 1), b"")
    for number, record in enumerate(records, 1):
        if len(record) > MAX_RECORD_BYTES:
            raise ValueError(f"{path}{_WHERE[kind].format(number)}: {_TOO_LONG}")
        yield record, len(record)


def _read_all(content: Any) -> bytes:
    """A whole file; only its start if it is too long. `read(n)` would allocate n bytes at once."""
    parts, size = list[bytes](), 0
    while size <= MAX_RECORD_BYTES and (part := content.read(BATCH_BYTES)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _items(path: Path, content: Any) -> Iterator[tuple[Any, int]]:
    """The items of a JSON array, and their lengths. Only one item, or 1 MB, is in memory."""
    text = io.TextIOWrapper(content, "utf-8-sig", newline="")
    decode, number = json.JSONDecoder().raw_decode, 0
    try:
        buffer = text.read(BATCH_BYTES).lstrip(" \t\r\n")
        at, is_all = 1, False  # after the "["
        while True:
            at = _skip_blank(buffer, at)
            if number == 0 and buffer[at : at + 1] == "]":
                at += 1
                break
            try:
                item, end = decode(buffer, at)
                end = _skip_blank(buffer, end)
                if end < len(buffer) or is_all:
                    if buffer[end : end + 1] not in (",", "]"):
                        raise json.JSONDecodeError("Expecting ',' or ']'", buffer, end)
                    yield item, end - at
                    number, at = number + 1, end + 1
                    if buffer[end] == "]":
                        break
                    continue
            except json.JSONDecodeError as error:
                # An error far from the end of the buffer is not because the buffer ends.
                is_open = error.pos > len(buffer) - 16 or error.msg.startswith("Unterminated")
                if is_all or not is_open:
                    raise ValueError(_array_mistake(error, at)) from error
            # The item continues after the buffer.
            if len(buffer) - at > MAX_RECORD_BYTES:
                raise ValueError(_TOO_LONG)
            more = text.read(max(BATCH_BYTES, len(buffer) - at))
            buffer, at, is_all = buffer[at:] + more, 0, not more
        rest = buffer[at:]
        while rest or (rest := text.read(BATCH_BYTES)):
            if rest.strip():
                raise ValueError("there is something after the array")
            rest = ""
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} item {number + 1}: {error}") from error


def _array_mistake(error: json.JSONDecodeError, start: int) -> str:
    """What is wrong with an array, of which an item begins at `start` of the text."""
    ends = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
    if ends:
        return "the file ends before its JSON array does"
    reason = error.msg.removesuffix(" at").rstrip(": ")
    return f"{reason} (character {error.pos - start + 1} of the item)"


def _skip_blank(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    assert match is not None
    return match.end()


def _rows(path: Path, columns: Columns, start: int) -> Iterator[tuple[Any, int, int]]:
    """Rows from `start` as dicts, their sizes, and the approximate file offset of each."""
    pyarrow = import_module("pyarrow")
    with _parquet_file(path) as file:
        names = file.schema_arrow.names
        for name in columns.names:
            if name not in names:
                raise ValueError(
                    f"{path}: the column {name!r} is missing; the columns are {', '.join(names)}"
                )
        wanted = [*columns.names, *(name for name in columns.optional_names if name in names)]
        whole, position = path.stat().st_size, 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if position + rows <= start:
                position += rows
                continue
            batches = file.iter_batches(256, row_groups=[group], columns=wanted or None)
            try:
                for batch in batches:
                    size = batch.nbytes // max(1, batch.num_rows)
                    for row in _values(batch):
                        if position >= start:
                            yield row, size, whole * (position + 1) // file.metadata.num_rows
                        position += 1
            except (pyarrow.ArrowException, OSError) as error:
                raise ValueError(f"{path} is damaged: {error}") from error


def _values(batch: Any) -> list[Any]:
    """The rows as dicts, with the error of a row that is not UTF-8 in its place."""
    try:
        rows: list[Any] = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [error]
        return [row for n in range(batch.num_rows) for row in _values(batch.slice(n, 1))]
    return rows


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    with file:
        yield file
