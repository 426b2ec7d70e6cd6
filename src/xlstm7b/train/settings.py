"""Strict settings: TOML tables, `a.b=c` overrides and frozen dataclasses that check themselves.

Nothing is dropped or guessed: an unknown key, a wrong type or a value out of range is a
`ValueError` of one sentence that names the setting.
"""

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from xlstm7b.config import ModelConfig

T = TypeVar("T")


class Rule(NamedTuple):
    """What a value must be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("a whole number of at least 1", lambda value: value >= 1)]
Tally = Annotated[int, Rule("a whole number of at least 0", lambda value: value >= 0)]
Seed = Annotated[int, Rule("a whole number from 0 to 2**64 - 1", lambda value: 0 <= value < 2**64)]
Positive = Annotated[float, Rule("a number above 0", lambda value: 0 < value < math.inf)]
PositiveOrInf = Annotated[float, Rule("a number above 0, or inf", lambda value: value > 0)]
NonNegative = Annotated[float, Rule("a number of at least 0", lambda value: 0 <= value < math.inf)]
Fraction = Annotated[float, Rule("a number from 0 to below 1", lambda value: 0 <= value < 1)]

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Settings:
    """Base of every section: each instance has passed its fields' types and ranges."""

    SECTION: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            if get_origin(hint) is not ClassVar:
                _check(hint, getattr(self, name), _join(self.SECTION, name))


def _check(hint: Any, value: object, where: str) -> None:
    wanted = _wanted(hint, value)
    if wanted:
        raise ValueError(f"{where} must be {wanted}, not {value!r}")


def _wanted(hint: Any, value: object) -> str:
    """What the hint asks for, in words, where the value is not that; else nothing."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base, rule = arguments
        return "" if not _wanted(base, value) and rule.holds(value) else rule.words
    if origin is Literal:
        return "" if value in arguments else f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple:
        if arguments[-1] is ...:
            inner, right_length = arguments[:1] * len(_items(value)), True
        else:
            inner, right_length = arguments, len(_items(value)) == len(arguments)
        parts = zip(inner, _items(value), strict=False)
        if isinstance(value, tuple) and right_length and not any(_wanted(h, v) for h, v in parts):
            return ""
        return _list_words(arguments)
    if hint is float:
        return "" if type(value) in (int, float) else _WORDS[float]
    if hint in _WORDS:
        return "" if type(value) is hint else _WORDS[hint]
    kind = origin or hint  # a section, the model, or the table of sources
    return "" if isinstance(value, kind) else "a table"


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, tuple) else ()


def _list_words(arguments: tuple[Any, ...]) -> str:
    if arguments[-1] is ...:
        return f"a list of items that are {_words(arguments[0])} each"
    return f"[{', '.join(map(_words, arguments))}]"


def _words(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        words: str = get_args(hint)[1].words
        return words
    return _list_words(get_args(hint)) if get_origin(hint) is tuple else _WORDS[hint]


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


# From tables


def build(cls: type[T], table: object, where: str) -> T:
    """A section, and those within it, from a TOML table or what `asdict` made of one."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} must be a table, not {table!r}")
    known = [field for field in fields(cls) if field.init]  # type: ignore[arg-type]
    _refuse_unknown(table, [field.name for field in known], where)
    hints = get_type_hints(cls, include_extras=True)
    values = {}
    for field in known:
        name = _join(where, field.name)
        if field.name in table:
            value = values[field.name] = _read(hints[field.name], table[field.name], name)
            _check(hints[field.name], value, name)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{name} is missing")
    return cls(**values)


def _read(hint: Any, value: Any, where: str) -> Any:
    """A table's value in the form a field holds it; whether it is right is checked after."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is ModelConfig:
        return _read_model(value)
    if is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    if origin is Annotated:
        return _read(arguments[0], value, where)
    if origin is tuple and isinstance(value, list | tuple):
        each = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        read = [_read(h, v, where) for h, v in zip(each, value, strict=False)]
        return tuple(read + list(value[len(each) :]))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: _read(arguments[1], part, _join(where, key)) for key, part in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    return value


def _read_model(table: Any) -> ModelConfig:
    """`size = "7b"`, the fields of a `ModelConfig`, or a size with some of its fields changed."""
    if isinstance(table, ModelConfig):
        return table
    if not isinstance(table, Mapping):
        raise ValueError(f"model must be a table, not {table!r}")
    names = [field.name for field in fields(ModelConfig)]
    _refuse_unknown(table, ["size", *names], "model")
    values = {name: table[name] for name in names if name in table}
    try:
        if "size" in table:
            size = table["size"]
            if not isinstance(size, str):
                raise ValueError(f"size must be a text, not {size!r}")
            config = ModelConfig.named(size)
            return ModelConfig(**{name: getattr(config, name) for name in names} | values)
        for needed in ("embedding_dim", "num_blocks", "num_heads"):
            if needed not in values:
                raise ValueError(f"{needed} is missing, and so is a size to take it from")
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"model: {error}") from error


def _refuse_unknown(table: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=3)
            meant = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"there is no setting {_join(where, str(key))}; {meant}")


# Files and overrides


def read_tables(name_or_path: str | Path) -> tuple[str, dict[str, Any]]:
    """A recipe's name and its tables, laid over those of the recipes that it extends."""
    tables: dict[str, Any] = {}
    wanted, folder = str(name_or_path), None
    seen: list[str] = []
    while wanted:
        label, folder, text = _find(wanted, folder)
        if label in seen:
            raise ValueError(f"recipes extend each other: {' → '.join([*seen, label])}")
        seen.append(label)
        try:
            below = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"recipe {label} is not a TOML file: {error}") from error
        extended = below.pop("extends", "")
        if not isinstance(extended, str):
            raise ValueError(f"recipe {label}: extends must be a text, not {extended!r}")
        if "sources" in _table(tables, "data"):
            _table(below, "data").pop("sources", None)  # a mixture is replaced, not added to
        tables, wanted = laid_over(below, tables), extended
    return Path(seen[0]).name.removesuffix(".toml"), tables


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(
        file.name.removesuffix(".toml")
        for file in (files("xlstm7b") / "recipes").iterdir()
        if file.name.endswith(".toml")
    )


def _find(wanted: str, folder: Path | None) -> tuple[str, Path | None, str]:
    """A label, where relative paths start from, and the text of a named recipe or a file."""
    if "/" not in wanted and not wanted.endswith(".toml"):
        if wanted not in recipe_names():
            raise ValueError(
                f"there is no recipe {wanted!r}; there are {', '.join(recipe_names())}, "
                "or give the path of a .toml file"
            )
        text = (files("xlstm7b") / "recipes" / f"{wanted}.toml").read_text(encoding="utf-8")
        return wanted, None, text
    path = ((folder or Path()) / wanted).resolve()
    if not path.is_file():
        raise ValueError(f"there is no recipe file {path}")
    try:
        return str(path), path.parent, path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"recipe {path} is not a text file: {error}") from error


def _table(tables: dict[str, Any], key: str) -> dict[str, Any]:
    found = tables.get(key)
    return found if isinstance(found, dict) else {}


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One table over another, recursively; anything but a table replaces what is below it."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(under, Mapping) and isinstance(value, Mapping)
        merged[key] = laid_over(under, value) if both else value  # type: ignore[arg-type]
    return merged


def parse_overrides(settings: Iterable[str]) -> list[tuple[list[str], Any]]:
    """`["optimizer.lr=4e-4", "data.validation=books/valid"]` as keys and values.

    Values are TOML; what is not TOML is text, so that paths and words need no quotes.
    """
    parsed = []
    for setting in settings:
        name, equals, text = setting.partition("=")
        keys = [key.strip() for key in name.split(".")]
        if not equals or not all(keys):
            raise ValueError(f"a setting is written a.b=c, not {setting!r}")
        try:
            read = tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError:
            read = {}
        value = read.get("value")
        plain = len(read) == 1 and isinstance(value, bool | int | float | str | list | dict)
        parsed.append((keys, value if plain else text.strip()))
    return parsed


def overridden(tables: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Tables with some values replaced, a whole table if one is given: the last setting wins."""
    result = laid_over(tables, {})
    for (*outer, last), value in parse_overrides(settings):
        table = result
        for key in outer:
            inner = table.get(key)
            table[key] = dict(inner) if isinstance(inner, Mapping) else {}
            table = table[key]
        table[last] = value
    return result
