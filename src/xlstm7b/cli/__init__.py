"""The command line. Commands import what they need when they run, so that --help is fast."""

import atexit
import gc
import os
import re
import select
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from xlstm7b import __version__
from xlstm7b.cli import (
    bench,
    chat,
    checkpoints,
    doctor,
    evaluate,
    generate,
    hub,
    prepare,
    quantize,
    serve,
    train,
)
from xlstm7b.cli.options import Command
from xlstm7b.cli.settings import ConfigurableCommand


class _Commands(typer.core.TyperGroup):
    """All commands. If the reader of their output has exited, as `head` does, they just end."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        match args:
            case ["--install-completion" | "--show-completion" as name, argument, *_]:
                raise ValueError(  # typer would ignore it, and write the file of another shell
                    f"{name} is for the shell that runs it and takes no argument, not {argument!r}"
                )
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            if not _is_stdout_closed():  # another pipe: an error
                raise
            # Python flushes stdout when it exits.
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
            raise typer.Exit from None


def _is_stdout_closed() -> bool:
    stdout = select.poll()
    stdout.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in stdout.poll(0))


app = typer.Typer(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="xLSTM 7B: a recurrent large language model with constant memory and constant cost "
    "per token.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    generate.generate,
    chat.chat,
    serve.serve,
    prepare.prepare,
    train.train,
    train.export,
    train.plot,
    checkpoints.info,
    checkpoints.verify,
    checkpoints.convert,
    checkpoints.merge,
    checkpoints.compare,
    quantize.quantize,
    hub.download,
    hub.push,
    doctor.doctor,
):
    app.command(cls=ConfigurableCommand if command is serve.serve else Command)(command)
app.add_typer(evaluate.app, name="eval")
app.add_typer(bench.app, name="bench")


def _print_version(chosen: bool) -> None:
    if chosen:
        print(f"xlstm7b {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def main(app: typer.Typer = app) -> None:
    """Runs a command line. A user's mistake prints one sentence and exits with code 2.

    The scripts of benchmarks/ and experiments/ run theirs with it too.
    """
    # The shell has closed a stream that is None, as `>&-` does.
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    if sys.stdout is None:
        _fail("stdout is closed, so the output would be lost: use >/dev/null to discard it", 2)
    if os.environ.get("COLUMNS") == "0":  # unknown; rich would print nothing
        del os.environ["COLUMNS"]
    if isinstance(sys.stdout, TextIOWrapper):  # a path may not be UTF-8, and a terminal ASCII only
        sys.stdout.reconfigure(errors="backslashreplace")
    atexit.register(_exit_at_once)
    try:
        app()
    except SystemExit as end:
        # rich and typer exit with code 1 if the reader of a help text has exited, as `true` does.
        if isinstance(end.__context__, BrokenPipeError):
            sys.exit(0)
        raise
    except (ValueError, OSError) as error:
        _fail(str(error), 2)
    except FloatingPointError as error:  # a model or a run that diverged: not the user's mistake
        _fail(str(error), 1)
    except ModuleNotFoundError as error:
        # A package's own check gives no name, but a message of several lines.
        _fail(_missing(error.name) if error.name else " ".join(str(error).split()), 2)


def _missing(module: str) -> str:
    """Says that a module's package is missing, and which extra of the package's metadata has it."""
    # Here: 0.1 s that only this error needs.
    from importlib.metadata import PackageNotFoundError, requires

    missing = f"this command needs the package {module}, which is not installed"
    with suppress(PackageNotFoundError):  # the package may be a folder in PYTHONPATH
        for line in requires("xlstm7b") or ():
            found = re.match(r'([\w.-]+).*; extra == "(\w+)"$', line)
            if found and found[2] != "dev" and _as_module(found[1]) == module.partition(".")[0]:
                return f"{missing}: pip install 'xlstm7b[{found[2]}]'"
    return missing


def _as_module(package: str) -> str:
    return {"markdown-it-py": "markdown_it"}.get(package, package.lower().replace("-", "_"))


def _exit_at_once() -> None:
    """Python's last garbage collections skip all objects: with PyTorch, they take half a second."""
    if "triton" not in sys.modules:  # its bindings would print that they leaked
        gc.freeze()


def _fail(message: str, code: int) -> None:
    print(f"xlstm7b: {message}", file=sys.stderr)
    sys.exit(code)
