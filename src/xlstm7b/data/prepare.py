"""Text files to token shards: `prepare`, and `adopt` for shards that datatrove wrote.

Several processes tokenize batches of documents; one process writes the shards in input order. So
the files do not depend on the number of processes. A run that was killed, or that ended at a bad
record, continues after its last complete shard. Each shard notes which files and records it ends
with, and a hash of them: files may change after them, but not before.
"""

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from xlstm7b.chat_format import ChatTemplate, PlainFormat, load_chat_template
from xlstm7b.data.input_files import (
    Columns,
    Document,
    RecordBatch,
    Segment,
    check_input_file,
    detect_columns,
    read_batches,
)
from xlstm7b.data.shards import (
    MANIFEST,
    UNFINISHED,
    ShardEntry,
    ShardFolder,
    ShardWriter,
    adopt_folder,
    open_folder,
    token_size,
    write_manifest,
)
from xlstm7b.data.sources import SourceFile, find_sources
from xlstm7b.files import Progress, locked_folder, write_json
from xlstm7b.report import counted
from xlstm7b.tokenizer import (
    AnyTokenizer,
    ByteTokenizer,
    copy_tokenizer,
    open_tokenizer,
    tokenizer_file,
)

# The temporary names of `files.write_aside`, which a killed run leaves.
_HALF_WRITTEN = re.compile(r"\.(unfinished|manifest|\d{5}\.ds).*\.[0-9a-f]{8}")
_PIECE = 1 << 18  # characters that are tokenized at once: the library takes 160 bytes for each
_WORD_END = re.compile(r"(?<=[A-Za-z])\s")  # see `Tokenizer.cuts_after_words`


def prepare(
    inputs: Iterable[str | Path],
    output: str | Path,
    tokenizer: str | Path = "bytes",
    columns: Columns = Columns("auto"),  # noqa: B008 (frozen)
    *,
    text_endings: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    skip_bad: int = 0,
    special_tokens: bool = False,
    processes: int = 1,
    shard_tokens: int = 100_000_000,
    progress: Progress | None = None,
) -> ShardFolder:
    """Tokenizes the documents of files and folders into the folder `output`.

    `inputs` may also be one .toml file that lists sources, see `data.sources`. `tokenizer` is a
    tokenizer.json, its folder, a hub id, or "bytes". A copy of the file is kept with the shards,
    for `export`. Chats are written with the chat template of its folder, without one in the plain
    format. `include` and `exclude` choose files, see `find_input_files`. Up to `skip_bad` records
    that cannot be read are left out and listed in the manifest. With `special_tokens`,
    "<|endoftext|>" and the like in a text become their ids; otherwise they are ordinary text. (In
    chats they always become their ids, as in `transformers`.) A shard holds at most `shard_tokens`
    tokens, or a single longer document. Documents without tokens are left out.

    The same call continues a run that was killed or that ended with an error, and returns at once
    if nothing is left to do.
    """
    for name, value, least in (
        ("processes", processes, 1),
        ("shard_tokens", shard_tokens, 1),
        ("skip_bad", skip_bad, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    output = Path(output)
    files, found = find_sources(
        inputs, columns, text_endings, include=include, exclude=exclude, output=output
    )
    tokenizer = tokenizer_file(tokenizer) or "bytes"  # downloaded once, not in each process
    if special_tokens and isinstance(open_tokenizer(tokenizer), ByteTokenizer):
        raise ValueError("the tokenizer bytes has no special tokens: leave --special-tokens out")
    ids = _tokenizer_ids(tokenizer)
    detected = [detect_columns(file.path, file.columns, text_endings) for file in files]
    sources = [file._replace(columns=one) for file, (one, _) in zip(files, detected, strict=True)]
    has_mask = any(source.columns.has_mask for source in sources)
    has_chats = any(source.columns.is_chat for source in sources)
    template = _chat_template(tokenizer) if has_chats else None
    # `InputFile.read_as` has the format and the repeats of each file. A single format is also part
    # of the digest, as in earlier versions, which knew no others.
    columns_used = {source.columns for source in sources if source.columns.format != "auto"}
    form = vars(next(iter(columns_used))) if len(columns_used) == 1 else None
    settings: list[Any] = [ids, form, shard_tokens, list(text_endings), special_tokens]
    settings += [template.key] if template else []
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    plan = _Plan(digest, sources, text_endings, skip_bad)
    if _is_done(output, plan):
        return open_folder(output)
    for source in sources:
        check_input_file(source.path, source.columns, text_endings, template, parse=not skip_bad)
    with _begin(output, plan):
        if not (output / MANIFEST).exists():
            done = _finished_shards(output, plan)
            consumed = _Consumed(plan, done)
            batches = _read(plan, consumed, progress)
            worker = _Tokenizer(tokenizer, template, special_tokens)
            with closing(_tokenize(batches, worker, processes)) as tokenized:
                documents = _documents(tokenized, consumed, plan)
                _write(output, documents, consumed, done, ids, has_mask, shard_tokens)
            if not done:
                (output / UNFINISHED).unlink()
                raise ValueError(f"the input holds no text{_left_out(consumed.bad)}")
            copy_tokenizer(tokenizer, output)
            write_manifest(
                output,
                done,
                **ids,
                chat_template=template and template.source,
                plan=plan.digest,
                **found.summary(),
                formats=_formats(sources, [others for _, others in detected]),
                last_answer_only=sum(note.last_answer_only for note in done),
                bad=[message for note in done for message in note.bad],
                files=[file.model_dump() for file in consumed.files],
            )
        for file in output.iterdir():
            if file.name.endswith(".ds.json") or _HALF_WRITTEN.fullmatch(file.name):
                file.unlink()
        (output / UNFINISHED).unlink(missing_ok=True)  # from here on the folder can be opened
    return open_folder(output)


def read_notes(output: str | Path) -> dict[str, Any]:
    """What the manifest of a finished folder says of its input.

    formats: the formats of the files; for each the number of files, and the first of them.
    last_answer_only: the number of chats of which only the last answer counts in the loss.
    bad: the records that were left out: file, line and reason of each.
    """
    return {"formats": {}, "last_answer_only": 0, "bad": [], **_read_json(Path(output) / MANIFEST)}


def adopt(folder: str | Path, tokenizer: str | Path) -> ShardFolder:
    """Adds the manifest to a folder that datatrove wrote with this tokenizer."""
    adopted = adopt_folder(folder, **_tokenizer_ids(tokenizer))
    copy_tokenizer(tokenizer, adopted.path)
    return adopted


def _tokenizer_ids(tokenizer: str | Path) -> dict[str, Any]:
    """What the manifest says of a tokenizer. `ValueError` if it has no end of text."""
    loaded = open_tokenizer(tokenizer)
    bos, eos, _ = loaded.special
    if eos is None:
        raise ValueError(
            f"{tokenizer} names no end of text, which separates documents: put a "
            'tokenizer_config.json with "eos_token" beside it'
        )
    return {
        "vocab_size": loaded.vocab_size,
        "tokenizer_fingerprint": loaded.fingerprint,
        "eos_token_id": eos,
        "bos_token_id": bos,
    }


def _chat_template(tokenizer: str | Path) -> ChatTemplate:
    """The chat template of the tokenizer's folder, or the plain format's."""
    file, opened = tokenizer_file(tokenizer), open_tokenizer(tokenizer)
    found = None
    if file is not None and file.name == "tokenizer.json":
        to_text = opened.backend().id_to_token
        tokens = {
            f"{name}_token": to_text(token)
            for name, token in opened.special._asdict().items()
            if token is not None
        }
        found = load_chat_template(file.parent, tokens)
    return found or ChatTemplate(PlainFormat.template, {})


def _formats(
    sources: Sequence[SourceFile], others: Sequence[Sequence[Columns]]
) -> dict[str, dict[str, Any]]:
    """For the manifest: the number of files in each format, and the first of them."""
    formats: dict[str, dict[str, Any]] = {}
    for source, also in zip(sources, others, strict=True):
        group = formats.setdefault(str(source.columns), {"count": 0, "first": [], "also": []})
        group["count"] += 1
        group["first"] += [str(source.path)] if group["count"] <= 3 else []
        group["also"] = sorted({*group["also"], *map(str, also)})
    return formats


# The output folder


class _Plan(NamedTuple):
    """What a folder is prepared from."""

    digest: str  # of the tokenizer and the settings that decide the tokens
    sources: Sequence[SourceFile]
    text_endings: Sequence[str]
    skip_bad: int

    def read(self, number: int, start: int = 0) -> Iterator[RecordBatch]:
        source = self.sources[number]
        return read_batches(source.path, source.columns, start, self.text_endings)


class InputFile(BaseModel):
    """A file as it was read: its first `records` records, or all of them."""

    model_config = ConfigDict(strict=True, frozen=True)
    path: str
    size: int
    mtime_ns: int
    records: int
    sha256: str  # of these records, see `_hashed`
    read_as: str = ""  # its format, and how often it is repeated; earlier versions: empty
    documents: int = 0  # with tokens, of its source up to these records; repeats not counted

    @classmethod
    def unread(cls, source: SourceFile) -> Self:
        status = source.path.stat()
        return cls(
            path=str(source.path),
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            records=0,
            sha256="",
            read_as=source.read_as,
        )

    def check(self, plan: _Plan, number: int, *, is_all: bool) -> None:
        """`ValueError` if these records are no longer those of file `number` of the plan."""
        now = InputFile.unread(plan.sources[number])
        if (now.size, now.mtime_ns) == (self.size, self.mtime_ns):
            return
        records, total = 0, b""  # a copied or touched file has another time, but the same content
        for batch in plan.read(number):
            digests = batch.digests()[: None if is_all else self.records - records]
            records, total = records + len(digests), _hashed(total, digests)
        if (records, total.hex()) != (self.records, self.sha256):
            part = "" if is_all else f" in its first {counted(self.records, 'record')}"
            raise ValueError(
                f"{self.path} has changed{part} since its tokens were written: "
                "remove the output folder, or choose another"
            )


def _hashed(total: bytes, digests: Iterable[bytes]) -> bytes:
    """The hash of all records: each step hashes the hash so far and the next record's digest."""
    for digest in digests:
        total = hashlib.sha256(total + digest).digest()
    return total


class _Note(ShardEntry):
    """NAME.ds.json beside NAME.ds: it marks the shard as complete until the folder is finished."""

    files: list[InputFile]  # files whose last record is in this shard
    begun: InputFile | None  # the next file, of which some records are in this or earlier shards
    bad: list[str]  # the messages of the records that were left out
    last_answer_only: int = 0  # chats of which only the last answer counts


def _is_done(output: Path, plan: _Plan) -> bool:
    """True if nothing is left to do. `ValueError` if `output` holds anything else."""
    if not output.exists():
        return False
    if not output.is_dir():
        raise ValueError(f"{output} exists already and is not a folder")
    found = {file.name for file in output.iterdir() if not _HALF_WRITTEN.fullmatch(file.name)}
    if not found & {UNFINISHED, MANIFEST}:
        if found:
            raise ValueError(f"{output} holds other files: remove it, or choose another folder")
        return False
    if MANIFEST not in found:
        is_same = _read_json(output / UNFINISHED).get("plan") == plan.digest
        if not is_same and found != {UNFINISHED}:
            raise _other(output)
        return False
    manifest = _read_json(output / MANIFEST)
    files = [InputFile.model_validate(file) for file in manifest.get("files", [])]
    if manifest.get("plan") != plan.digest or len(files) != len(plan.sources):
        raise _other(output)
    _check_files(output, plan, files, None)
    _check_bad(manifest["bad"], plan.skip_bad)
    return UNFINISHED not in found


def _other(output: Path) -> ValueError:
    return ValueError(
        f"{output} was prepared from other input, with another tokenizer or with other settings: "
        "remove it, or choose another folder"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    return content if isinstance(content, dict) else {}


def _check_files(
    output: Path, plan: _Plan, files: Sequence[InputFile], begun: InputFile | None
) -> None:
    """`ValueError` if the tokens in `output` are not those of the first files of the plan."""
    read = [*files, *([begun] if begun and begun.records else [])]
    if [str(source.path) for source in plan.sources[: len(read)]] != [file.path for file in read]:
        raise _other(output)
    for number, file in enumerate(read):
        file.check(plan, number, is_all=number < len(files))
        if file.read_as not in ("", plan.sources[number].read_as):
            raise _other(output)


def _check_bad(bad: Sequence[str], allowed: int) -> None:
    if len(bad) <= allowed:
        return
    if not allowed:
        raise ValueError(
            f"{bad[0]} (correct it and run the same command again: finished shards are kept; "
            "or leave bad records out with --skip-bad N)"
        )
    raise ValueError(f"there are more bad records than --skip-bad {allowed} allows: {_first(bad)}")


def _left_out(bad: Sequence[str]) -> str:
    were = "was" if len(bad) == 1 else "were"
    return f"; {counted(len(bad), 'bad record')} {were} left out: {_first(bad)}" if bad else ""


def _first(bad: Sequence[str]) -> str:
    return "; ".join(bad[:5]) + ("; …" if len(bad) > 5 else "")


@contextmanager
def _begin(output: Path, plan: _Plan) -> Iterator[None]:
    """Creates the folder, locks it and marks it as unfinished."""
    with locked_folder(output, "preparing"):
        if not _is_done(output, plan):
            write_json(output / UNFINISHED, {"plan": plan.digest})
        yield


def _finished_shards(output: Path, plan: _Plan) -> list[_Note]:
    """The shards that earlier runs completed, in order. Removes everything else they wrote.

    `ValueError` if the input has changed where they were read from.
    """
    done: list[_Note] = []
    while (path := output / f"{len(done):05d}.ds.json").exists():
        done.append(_Note.model_validate_json(path.read_bytes()))
    if done:
        _check_files(output, plan, [file for note in done for file in note.files], done[-1].begun)
    kept = {name for note in done for name in (*note.sha256, f"{note.name}.json")}
    for file in output.iterdir():
        if file.name not in kept | {UNFINISHED}:
            file.unlink()
    return done


# Reading, tokenizing, writing


class Tokenized(NamedTuple):
    """The documents of one batch, concatenated."""

    path: Path
    first: int  # position of the batch's first record in the file
    positions: list[int]  # of each document's record in the file
    lengths: list[int]
    tokens: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8] | None
    digests: list[bytes]  # of every record
    bad: dict[int, str]  # the positions of bad records, and what is wrong
    last_answer_only: set[int]  # the positions of chats of which only the last answer counts


class _Consumed:
    """How much of the input the shards hold: whole files, and some records of the next one."""

    def __init__(self, plan: _Plan, done: Sequence[_Note]) -> None:
        self._skip_bad, self._sources = plan.skip_bad, plan.sources
        self.files = [InputFile.unread(source) for source in plan.sources]
        self.numbers = {source.path: number for number, source in enumerate(plan.sources)}
        self.number = 0  # of the file that is being read
        for file in (file for note in done for file in note.files):
            self._continue(file)
            self._end_file()
        self._continue(done[-1].begun if done else None)
        self.bad = [message for note in done for message in note.bad]
        _check_bad(self.bad, self._skip_bad)
        self._noted = self.number, len(self.bad)  # files and bad records of complete shards
        self._last_answer_only = 0  # since the last complete shard

    def _continue(self, file: InputFile | None) -> None:
        """Takes over how far a file was read."""
        self.records = file.records if file else 0
        self._total = bytes.fromhex(file.sha256) if file else b""
        self.documents = file.documents if file else 0  # see `InputFile`

    def _end_file(self) -> None:
        self.files[self.number] = self._current()
        self.number, self.records, self._total = self.number + 1, 0, b""

    def to_file(self, number: int) -> None:
        """Ends the files before this one. A source that gave no documents is a `ValueError`."""
        while self.number < number:
            self._end_file()
            ended = self._sources[self.number - 1]
            upcoming = self._sources[self.number] if self.number < len(self.files) else None
            if upcoming is None or upcoming.source != ended.source:
                if ended.source and not ended.total(self.documents):
                    raise self._nothing(ended)
                self.documents = 0

    def _nothing(self, source: SourceFile) -> ValueError:
        reason = "it holds no text"
        if self.documents:
            are = "is" if self.documents == 1 else "are"
            reason = (
                f"{counted(self.documents, 'document')} × repeat {source.repeat:g} {are} less than "
                "one; raise repeat or remove the source"
            )
        return ValueError(
            f"{source.source}: the source gives no documents: {reason}{_left_out(self.bad)}"
        )

    def to_record(self, batch: Tokenized, position: int) -> None:
        """Adds the records of a batch before this position of its file."""
        self.bad += [batch.bad[n] for n in range(self.records, position) if n in batch.bad]
        _check_bad(self.bad, self._skip_bad)
        self._last_answer_only += len(batch.last_answer_only & {*range(self.records, position)})
        new = batch.digests[self.records - batch.first : position - batch.first]
        self.records, self._total = position, _hashed(self._total, new)

    def note(self, shard: ShardEntry) -> _Note:
        """The note of a shard that holds everything since the last note."""
        files, bad = self._noted
        note = _Note(
            **shard.model_dump(),
            files=self.files[files : self.number],
            begun=self._current() if self.number < len(self.files) else None,
            bad=self.bad[bad:],
            last_answer_only=self._last_answer_only,
        )
        self._noted, self._last_answer_only = (self.number, len(self.bad)), 0
        return note

    def _current(self) -> InputFile:
        return self.files[self.number].model_copy(
            update={
                "records": self.records,
                "sha256": self._total.hex(),
                "documents": self.documents,
            }
        )


def _read(plan: _Plan, consumed: _Consumed, progress: Progress | None) -> Iterator[RecordBatch]:
    """All batches after what is consumed."""
    start, first = consumed.number, consumed.records
    for number, source in enumerate(plan.sources):
        if number < start:
            if progress:
                progress(source.path.name, source.path.stat().st_size)
            continue
        for batch in plan.read(number, first if number == start else 0):
            yield batch
            if progress:
                progress(source.path.name, batch.bytes_read)


def _tokenize(
    batches: Iterator[RecordBatch], tokenizer: "_Tokenizer", processes: int
) -> Generator[Tokenized, None, None]:
    """Tokenizes batches in order, in this process or in several others."""
    if processes == 1:
        yield from map(tokenizer.tokenize, batches)
        return
    workers, done = list[_Worker](), dict[int, Tokenized]()
    first, upcoming = 0, 0  # the batches that are yielded and sent next
    start = list(islice(batches, processes))
    try:
        for _ in start:  # all, before one is waited for
            workers.append(_Worker(tokenizer))
        batches, start = chain(start, batches), []  # a record may be long
        for batch in batches:
            min(workers, key=lambda worker: len(worker.numbers)).send(upcoming, batch)
            upcoming += 1
            if upcoming - first > 2 * processes:
                yield _collect(first, workers, done)
                first += 1
        for number in range(first, upcoming):
            yield _collect(number, workers, done)
    except (EOFError, ConnectionError) as error:
        raise OSError("a worker process died, perhaps because memory ran out") from error
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()


def _collect(number: int, workers: Sequence["_Worker"], done: dict[int, Tokenized]) -> Tokenized:
    """Takes batch `number` from `done`, and puts there all that is ready."""
    while busy := [worker for worker in workers if worker.numbers]:
        connections = [worker.connection for worker in busy]
        ready = multiprocessing.connection.wait(connections, 0 if number in done else None)
        for worker in busy:
            if worker.connection in ready:
                worker.receive(done)
        if number in done:
            break
    return done.pop(number)


class _Worker:
    """A process that tokenizes batches in the order in which they are sent."""

    def __init__(self, tokenizer: "_Tokenizer") -> None:
        context = multiprocessing.get_context("spawn")
        self.numbers = deque[int]()  # of the batches that it has
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, tokenizer), daemon=True)
        multiprocessing.resource_tracker.ensure_running()  # it would unblock the signal
        # The process inherits this. Ctrl-C reaches its parent, which ends it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.close()

    def send(self, number: int, batch: RecordBatch) -> None:
        self.connection.send(batch)
        self.numbers.append(number)

    def receive(self, done: dict[int, Tokenized]) -> None:
        result = self.connection.recv()
        if isinstance(result, Exception):
            raise result
        done[self.numbers.popleft()] = result


def _work(connection: Connection, tokenizer: "_Tokenizer") -> None:
    """Runs in a worker process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    batches = SimpleQueue[RecordBatch]()

    def receive() -> None:
        """Takes batches at any time: the parent must not wait for us while we wait for it."""
        try:
            while True:
                batches.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)  # a killed parent cannot stop us

    threading.Thread(target=receive, daemon=True).start()
    with suppress(OSError):  # the parent was killed
        while True:
            connection.send(_result(tokenizer, batches.get()))


def _result(tokenizer: "_Tokenizer", batch: RecordBatch) -> Tokenized | Exception:
    try:
        return tokenizer.tokenize(batch)
    except Exception as error:
        return error


@dataclass
class _Tokenizer:
    """Parses and tokenizes batches of records, in this process or in a worker."""

    path: str | Path
    template: ChatTemplate | None
    special_tokens: bool
    _opened: dict[bool, AnyTokenizer] = field(default_factory=dict)  # by `special_tokens`

    def tokenize(self, batch: RecordBatch) -> Tokenized:
        columns = batch.columns
        # Templates write special tokens. As in transformers, those in messages count as well.
        special = self.special_tokens or columns.is_chat
        if special not in self._opened:
            self._opened[special] = open_tokenizer(self.path, special_tokens=special)
        tokenizer = self._opened[special]
        documents, bad = list[tuple[int, Document]](), dict[int, str]()
        for position, document in batch.parse(self.template):
            if isinstance(document, ValueError):
                bad[position] = str(document)
            else:
                documents.append((position, document))
        digests = batch.digests()
        batch.records.clear()  # a record may be long
        dtype = np.dtype(f"<u{token_size(tokenizer.vocab_size)}")
        segments = (document.segments for _, document in documents)
        tokens, mask = [np.empty(0, dtype)], [np.empty(0, np.uint8)]
        if columns.has_mask:
            for each in segments:
                ids, counts = _encode_masked(each, tokenizer, dtype, is_chat=columns.is_chat)
                tokens.append(ids)
                mask.append(counts)
        else:
            tokens += _encode((text for [(text, _)] in segments), tokenizer, dtype)
        return Tokenized(
            batch.path,
            batch.first,
            [position for position, _ in documents],
            [len(ids) for ids in tokens[1:]],
            np.concatenate(tokens),
            np.concatenate(mask) if columns.has_mask else None,
            digests,
            bad,
            {position for position, document in documents if not document.has_all_answers},
        )


def _encode(
    texts: Iterable[str], tokenizer: AnyTokenizer, dtype: np.dtype[Any]
) -> Iterator[npt.NDArray[Any]]:
    """The ids of each text."""

    def encoded_pieces() -> Iterator[tuple[int, npt.NDArray[Any]]]:
        waiting, size = list[tuple[int, str, bool]](), 0
        for number, text in enumerate(texts):
            for part, piece in enumerate(_pieces(text)):
                waiting.append((number, piece, part > 0))
                size += len(piece)
                if size >= _PIECE:
                    yield from encode(waiting)
                    waiting, size = [], 0
        yield from encode(waiting)

    def encode(
        waiting: Sequence[tuple[int, str, bool]],
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        continues = [each for _, _, each in waiting]
        found = tokenizer.encode_batch([piece for _, piece, _ in waiting], continues)
        for (number, _, _), ids in zip(waiting, found, strict=True):
            yield number, np.array(ids, dtype)

    for _, parts in groupby(encoded_pieces(), key=itemgetter(0)):
        yield np.concatenate([ids for _, ids in parts])


def _encode_masked(
    segments: Sequence[Segment], tokenizer: AnyTokenizer, dtype: np.dtype[Any], *, is_chat: bool
) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """The ids of a document, and whether each counts in the loss: if one of its characters does.

    The segments are encoded together, as `transformers` does. A chat loses the first token and the
    end of text that its template writes around it: the loader and `ShardWriter` add them.
    """
    text = "".join(part for part, _ in segments)
    marks = np.concatenate([np.full(len(part), counts, np.uint8) for part, counts in segments])
    start = 0
    if is_chat and tokenizer.special.bos is not None and not isinstance(tokenizer, ByteTokenizer):
        first = tokenizer.backend().id_to_token(tokenizer.special.bos)
        start = len(first) if text.startswith(first) else 0
    ids, mask = [], []
    for number, piece in enumerate(_pieces(text[start:])):
        found, offsets = tokenizer.encode_offsets(piece, continues=number > 0)
        ids.append(np.array(found, dtype))
        mask.append(_mask(offsets, marks[start : (start := start + len(piece))]))
    has_end = is_chat and len(ids[-1]) > 0 and ids[-1][-1] == tokenizer.special.eos
    end = -1 if has_end else None
    return np.concatenate(ids)[:end], np.concatenate(mask)[:end]


def _mask(
    offsets: Sequence[tuple[int, int]], counts: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """1 for each token with a character that counts. `offsets` are those of the tokens."""
    total = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    first, end = np.array(offsets, np.int64).reshape(-1, 2).T
    return (total[end] > total[first]).astype(np.uint8)


def _pieces(text: str) -> Iterator[str]:
    """Cuts a long text after words, which changes no id if `Tokenizer.cuts_after_words`.

    With other tokenizers, and where there is no word for `_PIECE` characters, the ids at a cut may
    be others than those of the whole text.
    """
    start = 0
    while len(text) - start > 2 * _PIECE:
        found = _WORD_END.search(text, start + _PIECE, start + 2 * _PIECE)
        end = found.start() if found else start + 2 * _PIECE
        yield text[start:end]
        start = end
    yield text[start:]


class _Tokens(NamedTuple):
    """A document."""

    tokens: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8] | None
    times: int  # how often it is written


def _documents(batches: Iterable[Tokenized], consumed: _Consumed, plan: _Plan) -> Iterator[_Tokens]:
    """Non-empty documents. When one is returned, `consumed` is everything before it."""
    for batch in batches:
        number = consumed.numbers[batch.path]
        consumed.to_file(number)
        start = 0
        for position, length in zip(batch.positions, batch.lengths, strict=True):
            piece = slice(start, start := start + length)
            if not length:
                continue
            if times := plan.sources[number].times(consumed.documents):
                consumed.to_record(batch, position)
                mask = None if batch.mask is None else batch.mask[piece]
                yield _Tokens(batch.tokens[piece], mask, times)
            consumed.documents += 1
        consumed.to_record(batch, batch.first + len(batch.digests))
    consumed.to_file(len(consumed.numbers))


def _write(
    output: Path,
    documents: Iterator[_Tokens],
    consumed: _Consumed,
    done: list[_Note],
    ids: dict[str, Any],
    has_mask: bool,
    shard_tokens: int,
) -> None:
    """Writes shards, and appends the note of each one to `done`."""
    upcoming = next(documents, None)
    while upcoming is not None:
        path = output / f"{len(done):05d}.ds"
        sizes = {name: ids[name] for name in ("vocab_size", "eos_token_id")}
        with ShardWriter(path, **sizes, has_mask=has_mask) as writer:
            while upcoming is not None:
                tokens, mask, times = upcoming
                size = times * (len(tokens) + 1)  # in one shard: a run may continue after it
                if writer.tokens and writer.tokens + size > shard_tokens:
                    break
                if has_mask and mask is None:
                    mask = np.ones(len(tokens), np.uint8)
                for _ in range(times):
                    writer.add(tokens, mask)
                upcoming = next(documents, None)
        note = consumed.note(writer.entry)
        write_json(output / f"{path.name}.json", note.model_dump())
        done.append(note)
