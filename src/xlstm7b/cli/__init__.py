"""The command line. Commands import what they need when they run, so that --help is fast."""

import sys

import typer

from xlstm7b.cli import (
    bench,
    chat,
    checkpoints,
    evaluate,
    experiment,
    generate,
    prepare,
    quantize,
    serve,
    train,
)

app = typer.Typer(
    help="xLSTM 7B: a recurrent large language model with constant memory and constant cost "
    "per token.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (
    generate.generate,
    chat.chat,
    serve.serve,
    prepare.prepare,
    train.train,
    train.export,
    train.plot,
    experiment.experiment,
    checkpoints.info,
    checkpoints.verify,
    checkpoints.convert,
    checkpoints.merge,
    checkpoints.compare,
    quantize.quantize,
):
    app.command()(command)
app.add_typer(evaluate.app, name="eval")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Runs the command line. A user's mistake prints one sentence and exits with code 2."""
    try:
        app()
    except BrokenPipeError:  # the reader of our output, such as `head`, has exited
        sys.stderr.close()
        sys.exit(1)
    except (ValueError, OSError) as error:
        _fail(str(error), 2)
    except FloatingPointError as error:  # a model or a run that diverged: not the user's mistake
        _fail(str(error), 1)
    except ModuleNotFoundError as error:
        # A package's own check gives no name, but a message of several lines.
        missing = f"this command needs the package {error.name}, which is not installed"
        _fail(missing if error.name else " ".join(str(error).split()), 2)


def _fail(message: str, code: int) -> None:
    print(f"xlstm7b: {message}", file=sys.stderr)
    sys.exit(code)
