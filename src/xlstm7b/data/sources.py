"""The files that `prepare` reads: those it is given, or those of a TOML file that lists sources.

    [gsm8k]                         # a name
    path = "gsm8k/train.jsonl"      # a file or folder, or a list of them
    format = "qa"                   # as --format; auto without it
    repeat = 3                      # write each document 3 times

Settings of a source have the names of the command's options: `format`, `text_column`,
`messages_column`, `question_column`, `answer_column`, `include` and `exclude`. A relative path
starts where the command runs.
"""

import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from xlstm7b.data.input_files import Columns, InputFiles, find_input_files

MAX_REPEAT = 100


class SourceFile(NamedTuple):
    """A file, how it is read, and how often its documents are written."""

    path: Path
    columns: Columns
    repeat: float = 1
    source: str = ""  # the sources file and the name in it

    @property
    def read_as(self) -> str:
        """The format and the repeats, in words."""
        return f"{self.columns} × {self.repeat:g}"

    def times(self, before: int) -> int:
        """How often the document is written that has this many of its source before it.

        The repeats are evenly spread.
        """
        if self.repeat == 1:  # mostly, and a fraction takes as long as to write a short document
            return 1
        return self.total(before + 1) - self.total(before)

    def total(self, documents: int) -> int:
        """How many documents the first ones of the source become."""
        return math.floor(documents * Fraction(str(self.repeat)))


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Source(BaseModel):
    """A source in a sources file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    path: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)]
    format: str = "auto"
    text_column: str = "text"
    messages_column: str = "messages"
    question_column: str = "question"
    answer_column: str = "answer"
    include: Annotated[list[str], BeforeValidator(_as_list)] = []
    exclude: Annotated[list[str], BeforeValidator(_as_list)] = []
    repeat: Annotated[float, Field(gt=0, le=MAX_REPEAT)] = 1.0

    @property
    def columns(self) -> Columns:
        return Columns(
            self.format,
            self.text_column,
            self.messages_column,
            self.question_column,
            self.answer_column,
        )


def find_sources(
    inputs: Iterable[str | Path],
    columns: Columns,
    text_endings: Sequence[str] = (),
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    output: Path | None = None,
) -> tuple[list[SourceFile], InputFiles]:
    """The files to read in order, and the same as a summary. See `find_input_files`.

    With a sources file, its settings take the place of `columns`, `include` and `exclude`.
    """
    given = [*inputs]
    files = [
        each for each in map(Path, given) if each.suffix == ".toml" and ".toml" not in text_endings
    ]
    if not files:
        found = find_input_files(
            given, text_endings, include=include, exclude=exclude, columns=columns, output=output
        )
        return [SourceFile(path, columns) for path in found.files], found
    if len(given) > 1:
        raise ValueError(f"{files[0]} lists sources: give it as the only input")
    if include or exclude or columns != Columns(columns.format) or columns.format != "auto":
        raise ValueError(
            f"{files[0]} lists sources: write format, columns, include and exclude in it"
        )
    sources, everything = list[SourceFile](), InputFiles()
    for name, source in read_sources(files[0]).items():
        try:
            found = find_input_files(
                source.path,
                text_endings,
                include=source.include,
                exclude=source.exclude,
                columns=source.columns,
                output=output,
            )
        except ValueError as error:
            raise ValueError(f"{files[0]}: {name}: {error}") from error
        sources += [
            SourceFile(path, source.columns, source.repeat, f"{files[0]}: {name}")
            for path in found.files
        ]
        everything.files += found.files
        for reason, paths in found.left_out.items():
            everything.left_out.setdefault(reason, []).extend(paths)
    for path, times in Counter(everything.files).items():
        if times > 1:
            raise ValueError(f"{path} is in two sources of {files[0]}: use repeat to repeat it")
    return sources, everything


def read_sources(path: Path) -> dict[str, Source]:
    """The sources of a TOML file by name. A mistake is a `ValueError` that names the setting."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not tables:
        raise ValueError(f"{path} lists no sources")
    sources = {}
    for name, table in tables.items():
        try:
            sources[name] = Source.model_validate(table)
            _ = sources[name].columns
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (name, *first["loc"])))
            wanted = first["msg"].removeprefix("Input should be ")
            said = {
                "missing": "it is missing",
                "too_short": "it names no file",
                "extra_forbidden": f"no such setting; choose from {', '.join(Source.model_fields)}",
                "model_type": f"it must be a table, not {first['input']!r}",
            }.get(first["type"], f"it must be {wanted}, not {first['input']!r}")
            raise ValueError(f"{path}: {where}: {said}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from error
    return sources
