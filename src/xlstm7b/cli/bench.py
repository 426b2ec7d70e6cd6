"""`xlstm7b bench SUBJECT`: a command for each benchmark, made from a class in `bench/plans.py`."""

import inspect
import shlex
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from xlstm7b.bench.plans import BENCHMARKS, Names, Numbers, Plan
from xlstm7b.cli.options import Command, listed

app = typer.Typer(
    help="Measure the speed and memory of this package, and of other libraries.",
    no_args_is_help=True,
)
_FILES = {
    "json": Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")],
    "plot": Annotated[Path | None, typer.Option(help="Draw the results in this PNG file.")],
}


def _command(subject: str, kind: type[Plan]) -> Callable[..., None]:
    """A function with the plan's fields as its parameters, which typer turns into options."""

    def run(**given: Any) -> None:
        from xlstm7b.bench import cases

        files = {name: given.pop(name) for name in _FILES}
        # Options that were not given. 0 is a value, although it equals False.
        given = {k: value for k, value in given.items() if value is not None and value is not False}
        values = {each.name: _parsed(each, given.get(each.name)) for each in fields(kind)}
        command = _command_line(subject, kind, given)
        results = cases.run(kind.of(**values), **files, command=command)
        if all(result.error for result in results):
            raise typer.Exit(1)

    types = {each.name: _option(each, each.name == kind.ARGUMENT) for each in fields(kind)} | _FILES
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=... if name == kind.ARGUMENT else None,
                annotation=annotation,
            )
            for name, annotation in types.items()
        ]
    )
    run.__annotations__, run.__doc__ = types, kind.__doc__
    return run


def _option(each: Field[Any], is_argument: bool) -> Any:
    """The typer option of a field. Tuples are written with commas; None means the default."""
    text, choices = each.metadata["help"], each.metadata["choices"]
    if is_argument:
        kind: Any = str if each.type is str else list[Path]
        return Annotated[kind, typer.Argument(help=text, show_default=False)]
    if each.type is bool:
        return Annotated[bool, typer.Option(_flag(each.name), help=text)]
    if choices:
        text = f"{text.removesuffix('.')}: {', '.join(choices)}."
    shown = "a GPU if there is one" if each.default is MISSING else _written(each.default)
    if each.metadata["on_cpu"] is not MISSING:
        shown += f"; on a CPU {_written(each.metadata['on_cpu'])}"
    variable = each.metadata["secret"] or None
    kind = str if each.type in (Names, Numbers) else each.type
    return Annotated[
        kind | None, typer.Option(help=text, show_default=shown or False, envvar=variable)
    ]


def _parsed(each: Field[Any], value: Any) -> Any:
    if value is None or each.type not in (Names, Numbers):
        return value
    try:
        return [int(part) if each.type == Numbers else part for part in listed(value)]
    except ValueError:
        raise ValueError(f"{value!r} is not a list of numbers such as 1,8,64") from None


def _command_line(subject: str, kind: type[Plan], given: dict[str, Any]) -> str:
    """The command to repeat this run, without secrets and without the files that it writes."""
    words = ["xlstm7b", "bench", subject]
    for each in fields(kind):
        value = given.get(each.name)
        if value is None or each.metadata["secret"]:
            continue
        words += [] if each.name == kind.ARGUMENT else [_flag(each.name)]
        words += map(str, value) if isinstance(value, list) else [str(value)] * (value is not True)
    return shlex.join(words)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value or "")


for _subject, _kind in BENCHMARKS.items():
    app.command(_subject, cls=Command)(_command(_subject, _kind))
