"""Classes that a config chooses by name: blocks, layers, norms and gates.

    from xlstm7b.registry import register

    @register("norm", "my_norm")
    class MyNorm(nn.Module): ...

A config with `norm = "my_norm"` then has this norm in training, generation, accounting and
checkpoints. docs/extending.md says what a class of each kind must have.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

# The kinds of classes, which are fields of `ModelConfig`, and the names of the released model's.
STANDARD = {
    "block": "mlstm",
    "layer": "mlstm",
    "norm": "rms_norm",
    "head_norm": "layer_norm",
    "gate": "linear",
}
PLUGINS = "XLSTM7B_PLUGINS"  # an environment variable: files or modules that register classes


class PluginError(ValueError):
    """A plugin cannot be loaded. It is not the mistake of the config that names a class of it."""


_Class = TypeVar("_Class", bound=type)
_classes: dict[tuple[str, str], Any] = {}
_loaded: set[str] = set()


def register(kind: str, name: str) -> Callable[[_Class], _Class]:
    """A decorator that makes a class the one that `kind = name` in a config chooses.

    A class may be defined again under its own name, as notebooks do. Another class under a name
    that is taken is a `ValueError`, also if it has the same name in another file. The names of the
    package's own classes are always taken.
    """
    if kind not in STANDARD:
        raise ValueError(f"there is no kind {kind!r}; choose from {', '.join(STANDARD)}")

    def add(cls: _Class) -> _Class:
        if not isinstance(cls, type):
            raise ValueError(f"{kind} {name!r} must be a class, not {cls!r}")
        taken = _classes.get((kind, name))
        is_ours = taken is not None and taken.__module__.startswith("xlstm7b.")
        if taken is not None and (is_ours or not _is_defined_again(taken, cls)):
            raise ValueError(
                f"{kind} {name!r} is {taken.__module__}.{taken.__qualname__} already: "
                f"give {cls.__module__}.{cls.__qualname__} another name"
            )
        _classes[kind, name] = cls
        return cls

    return add


def _is_defined_again(one: type, two: type) -> bool:
    """True if two classes have one name and one file. Those of a notebook have no file."""
    modules = (sys.modules.get(cls.__module__) for cls in (one, two))
    files = {getattr(module, "__file__", None) for module in modules} - {None}
    return one.__qualname__ == two.__qualname__ and len(files) <= 1


def find(kind: str, name: str) -> Any:
    """The class of this name. If it is not known yet, plugins are loaded first."""
    import_module("xlstm7b.model")  # registers the standard classes
    if (kind, name) not in _classes:
        for plugin in filter(None, os.environ.get(PLUGINS, "").split(",")):
            _load(plugin.strip())
    if (kind, name) not in _classes:
        known = ", ".join(sorted(own for of, own in _classes if of == kind))
        raise ValueError(
            f"there is no {kind} {name!r}, only {known}: set {PLUGINS} to the Python file that "
            f"registers it"
        )
    return _classes[kind, name]


def _load(plugin: str) -> None:
    """Imports a file, if the name ends in .py, or a module; once."""
    if plugin in _loaded:
        return
    _loaded.add(plugin)
    try:
        if not plugin.endswith(".py"):
            import_module(plugin)
            return
        path = Path(plugin).resolve(strict=True)
        files = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
        if str(path) in files:  # the caller's own program, or imported by it
            return
        load_file(path, f"xlstm7b_plugin_{path.stem}")
    except (Exception, SystemExit) as error:  # `sys.exit` would end the command without a word
        _loaded.discard(plugin)
        raise PluginError(f"{PLUGINS}: {plugin} cannot be loaded: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{error.filename} line {error.lineno}: {error.msg}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def load_file(path: Path, name: str) -> ModuleType:
    """Runs a Python file as the module `name`."""
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and `inspect` look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
