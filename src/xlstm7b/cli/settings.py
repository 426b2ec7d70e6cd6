"""Options of a command that are set by environment variables or in a TOML file."""

import os
import re
import sys
import tomllib
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import typer

from xlstm7b.cli.options import Command, read_input, to_text

_PREFIX = "XLSTM7B_"
_FILE = "config"  # the option that names the file
_SECRET = "api_key"  # its value is not shown


def variable_of(name: str) -> str:
    """The variable that sets an option: XLSTM7B_MAX_WAITING for `max_waiting`."""
    return _PREFIX + name.upper()


class ConfigurableCommand(Command):
    """A command whose options, and arguments, can also be set by variables and by a TOML file.

    Its option `--config`, or the variable of it, names the file. A flag wins over a variable, a
    variable over the file, and the file over the default. An empty variable counts as not set.
    Several values in a variable are separated by spaces.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        param: Any  # an option or an argument
        for param in self.params:
            param.envvar = variable_of(param.name)
            param.show_envvar = False  # the help's first part says what the variables are called

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(args=[*args])
        if not (ctx.resilient_parsing or given.get("help")):
            self._warn_of_misspelt_variables()
            if file := given.get(_FILE) or os.environ.get(variable_of(_FILE)):
                ctx.default_map = self._read(Path(file))
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = getattr(error.param, "name", None)
            if name is None or (source := _source(ctx, name)) is None:
                raise
            message = error.message.removeprefix("Value error, ").removesuffix(".")
            raise ValueError(f"{source}: {message}") from error

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. If it refuses an option, the error says what has set the option."""
        try:
            return super().invoke(ctx)
        except ValueError as error:
            sources = {
                option: _source(ctx, option[2:].replace("-", "_"))
                for option in re.findall(r"--[a-z-]+", str(error))
            }
            added = [f"{option} is set by {by}" for option, by in sources.items() if by]
            if not added:
                raise
            raise ValueError(f"{error} ({', '.join(added)})") from error

    def _warn_of_misspelt_variables(self) -> None:
        """Only of names that are close to an option's: other parts of the package have some, too.

        So does Kubernetes, for a service called xlstm7b: XLSTM7B_SERVICE_HOST, for example.
        """
        known = [param.name.upper() for param in self.params]
        for name in sorted(os.environ):
            rest = name.removeprefix(_PREFIX)
            if rest == name or rest in known:
                continue
            for near in get_close_matches(rest, known, n=1, cutoff=0.8):
                warning = f"no option has the variable {name}; did you mean {_PREFIX}{near}?"
                print(f"xlstm7b: warning: {warning}", file=sys.stderr, flush=True)

    def _read(self, file: Path) -> dict[str, Any]:
        """The values of a file by parameter. Its keys are the options' names, with - or _."""
        try:
            tables = tomllib.loads(to_text(read_input(file), file))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"--config: {file} is not a TOML file: {error}") from error
        except OSError as error:
            raise ValueError(f"--config: cannot read {file}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"--config: {error}") from error
        hints = get_type_hints(self.callback)
        names = [param.name for param in self.params if param.name != _FILE]
        values: dict[str, Any] = {}
        for key, value in tables.items():
            name = key.replace("-", "_")
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]}?" if near else "--help lists the options"
                raise ValueError(f"{file}: there is no option {key!r}; {hint}")
            if name in values:
                raise ValueError(f"{file}: {name} is given twice, with - and with _")
            if wrong := _mistake(hints[name], value):
                shown = "" if name == _SECRET else f", not {value!r}"
                raise ValueError(f"{file}: {key} must be {wrong}{shown}")
            values[name] = value
        return values


def _source(ctx: Any, name: str) -> str | None:
    """The variable or the file that has set an option; None if it is a flag or the default."""
    match getattr(ctx.get_parameter_source(name), "name", None):
        case "ENVIRONMENT":
            return variable_of(name)
        case "DEFAULT_MAP":
            return str(ctx.params[_FILE])
    return None


def _mistake(annotation: Any, value: Any) -> str | None:
    """What a TOML value must be for an option of this type, if it is not."""
    from pydantic import TypeAdapter, ValidationError

    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    (kind,) = (kind for kind in kinds if kind is not NoneType)
    if kind is Path and value == "":
        return "a path"
    try:
        TypeAdapter[Any](str if kind is Path else kind).validate_python(value, strict=True)
    except ValidationError as error:
        wanted = error.errors(include_input=False)[0]["msg"].removeprefix("Input should be ")
        return "a list of strings" if kind == list[str] else wanted
    return None
