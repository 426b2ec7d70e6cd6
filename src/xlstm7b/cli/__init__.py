"""`xlstm7b …`: the command line. Every command imports what it needs when it runs."""

import sys

import typer

from xlstm7b.cli import bench, chat, checkpoints, evaluate, generate, prepare, serve, train

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
    checkpoints.info,
    checkpoints.verify,
    checkpoints.convert,
    checkpoints.compare,
):
    app.command()(command)
app.add_typer(evaluate.app, name="eval")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Runs the command line; a user's mistake is one sentence and exit code 2."""
    try:
        app()
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        sys.stderr.close()
        sys.exit(1)
    except (ValueError, OSError) as error:
        print(f"xlstm7b: {error}", file=sys.stderr)
        sys.exit(2)
    except FloatingPointError as error:  # a run that must not go on, by nobody's mistake
        print(f"xlstm7b: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        needed = f"this needs {error.name}, which is not installed here"
        told = needed if error.name else " ".join(str(error).split())  # by a package's own check
        print(f"xlstm7b: {told}", file=sys.stderr)
        sys.exit(2)
