"""Markdown of the two reference pages, made from the package itself."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from typing import Any

import typer

import xlstm7b
from xlstm7b.cli import app

# The Python API


def api() -> str:
    """Every name of `xlstm7b.__all__`, by the module that has it."""
    values = {name: getattr(xlstm7b, name) for name in xlstm7b.__all__}

    def home(name: str) -> str:
        return ".".join(values[name].__module__.split(".")[:2])

    parts = ["```{py:currentmodule} xlstm7b\n```"]
    for module, names in groupby(sorted(values, key=home), key=home):
        about = inspect.getdoc(import_module(module)) or ""
        parts += [f"## {module}", about.partition("\n\n")[0]]
        parts += [_class_or_function(name, values[name]) for name in names]
    return "\n\n".join(parts)


def _class_or_function(name: str, value: Any) -> str:
    if not inspect.isclass(value):
        return _directive("py:function", name + _signature(value), _docs(value))
    members = [_member(member, raw) for member, raw in _members(value).items()]
    signature = _signature(value).removesuffix(" -> None")
    return _directive("py:class", name + signature, "\n\n".join([_docs(value), *members]))


def _members(cls: type) -> dict[str, Any]:
    """The public methods and properties of a class and of its bases in this package."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("xlstm7b.")]
    found = {name: raw for base in bases for name, raw in vars(base).items() if name[0] != "_"}
    kinds = (property, classmethod, staticmethod)
    return {
        name: raw
        for name, raw in found.items()
        if inspect.isfunction(raw) or isinstance(raw, kinds)
    }


def _member(name: str, raw: Any) -> str:
    if isinstance(raw, property):
        returned = _signature(raw.fget).partition(" -> ")[2]
        return _directive("py:property", name, _docs(raw.fget), f":type: {returned}")
    kind = {classmethod: ":classmethod:", staticmethod: ":staticmethod:"}.get(type(raw), "")
    function = getattr(raw, "__func__", raw)
    signature = _signature(function)
    if not isinstance(raw, staticmethod):
        signature = re.sub(r"^\(\w+(, )?", "(", signature)
    return _directive("py:method", name + signature, _docs(function), kind)


class _Bare(str):
    """Text that a signature shows without quotes."""

    __repr__ = str.__str__


def _signature(value: Any) -> str:
    """As in the source: types without their modules, defaults without addresses."""

    def bare(shown: Any) -> Any:
        return _Bare(shown) if isinstance(shown, str) else shown

    def default(shown: Any) -> Any:
        is_address = repr(shown).startswith("<") and shown is not inspect.Parameter.empty
        return _Bare("...") if is_address else shown

    found = inspect.signature(value)
    parameters = [
        each.replace(annotation=bare(each.annotation), default=default(each.default))
        for each in found.parameters.values()
    ]
    shown = found.replace(parameters=parameters, return_annotation=bare(found.return_annotation))
    text = str(shown).replace("NoneType", "None")
    return re.sub(r"\b(?:xlstm7b|collections|pathlib|typing)\.(?:\w+\.)*", "", text)


def _docs(value: Any) -> str:
    """A docstring as Markdown. Lines `name: description` about parameters become a list."""
    names = set(inspect.signature(value).parameters)

    def item(found: re.Match[str]) -> str:
        described = found[1].split(", ")
        shown = ", ".join(f"`{name}`" for name in described)
        return f"- {shown}: " if names.issuperset(described) else found[0]

    text = inspect.cleandoc(value.__doc__ or "").replace("\nArgs:\n", "\n")
    return re.sub(r"^(?: {4})?(\w+(?:, \w+)*): ", item, text, flags=re.M)


def _directive(kind: str, argument: str, body: str, option: str = "") -> str:
    fence = "`" * (5 if kind == "py:class" else 4)  # a class contains its methods
    return f"{fence}{{{kind}}} {argument}\n{option}\n\n{body}\n{fence}"


# The command line


def commands() -> str:
    """Every command, with its arguments and options as `--help` groups them."""
    command = typer.main.get_command(app)
    return "\n\n".join(_command(command, _context(command, "xlstm7b"), "##"))


def _command(command: Any, context: Any, heading: str) -> Iterator[str]:
    yield f"{heading} {context.command_path}"
    yield f"```{{program}} {context.command_path}\n```"
    yield f"    {' '.join([context.command_path, *command.collect_usage_pieces(context)])}"
    yield _escaped(command.help or "")
    panels: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        shown = parameter.get_help_record(context)
        if shown:
            kind = "Options" if parameter.param_type_name == "option" else "Arguments"
            panel = parameter.rich_help_panel or kind
            panels.setdefault(panel, []).append(_directive("option", shown[0], _escaped(shown[1])))
    for panel, parameters in panels.items():
        yield f"```{{rubric}} {panel}\n```"
        yield from parameters
    for name, child in getattr(command, "commands", {}).items():
        yield from _command(child, _context(child, name, context), heading + "#")


def _context(command: Any, name: str, parent: Any = None) -> Any:
    return typer.Context(command, info_name=name, parent=parent, **command.context_settings)


def _escaped(text: str) -> str:
    """Plain text as Markdown, its options as code."""
    text = re.sub(r"([\\`*_<>\[\]])", r"\\\1", text)
    return re.sub(r"(?<!\w)--[a-z][\w-]*", r"`\g<0>`", text)
