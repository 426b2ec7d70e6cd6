"""What several commands share: options, output paths, progress bars and Ctrl-C."""

import functools
import inspect
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from xlstm7b.generate.params import HELP, SamplingParams

if TYPE_CHECKING:
    from xlstm7b.files import Progress


class Command(typer.core.TyperCommand):
    """A command whose help has no line breaks within a paragraph, and which refuses empty paths.

    For `Path`, "" is the current folder.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # After the first paragraph, typer would print the docstring's line breaks.
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(args=[*args])
        parsed: list[str] = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # the shell completes a line
            return parsed
        assert self.callback is not None
        parameters = inspect.signature(self.callback).parameters
        for param in self.params:
            value = given.get(param.name)
            is_empty = "" in (value if isinstance(value, list | tuple) else [value])
            if is_empty and _takes_paths(parameters[param.name].annotation):
                name = max(param.opts, key=len)
                name = name if name.startswith("-") else str(param.metavar or name).upper()
                raise ValueError(f"{name} is empty: give a path")
        return parsed


def _takes_paths(annotation: Any) -> bool:
    return annotation is Path or any(map(_takes_paths, get_args(annotation)))


def option(
    help_text: str,
    *names: str,
    panel: str | None = None,
    default: bool | str = True,
    metavar: str | None = None,
) -> Any:
    """A typer option. A `default` text is shown in place of the default value."""
    return typer.Option(
        *names, help=help_text, rich_help_panel=panel, show_default=default, metavar=metavar
    )


_model_option = functools.partial(option, panel="Model")
Model = Annotated[
    str,
    typer.Argument(
        help="Checkpoint folder, or hub id: user/repo, user/repo@revision, either with /subfolder."
    ),
]
Target = Annotated[Path, typer.Argument(help="Folder to write, in Hugging Face layout.")]
Overwrite = Annotated[bool, option("Replace the checkpoint in TARGET.", "--overwrite")]
Device = Annotated[
    str | None, _model_option("Device: cpu, cuda, cuda:1, …", default="a GPU if there is one")
]
DType = Annotated[
    str | None,
    _model_option(
        "Dtype of the weights: float32, bfloat16 or float16.",
        default="bfloat16 on a GPU, else as stored",
    ),
]
StateDType = Annotated[str, _model_option("Dtype of the state (of C): float32 or bfloat16.")]
BatchSize = Annotated[int, _model_option("Maximum number of outputs generated at once.")]
Speculate = Annotated[
    str,
    _model_option(
        "Guess tokens and verify several at once. lookup finds them in the text so far; the folder "
        "or hub id of a small model with the same tokenizer generates them; off does not guess. "
        "The output is the same. It takes less time if the guesses are right."
    ),
]
Adapter = Annotated[
    list[str] | None,  # one; several are a mistake that `open_model` names
    _model_option(
        "LoRA adapter of the model: a folder in PEFT's format, or a hub id.",
        default="none",
        metavar="<str>",
    ),
]
TokenizerPath = Annotated[
    Path | None,
    _model_option(
        "A tokenizer.json, its folder, or a hub id.",
        "--tokenizer",
        default="the one in the folder",
    ),
]


def sampling_options(
    *, without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds one option for each field of `SamplingParams` to a command that takes `params`.

    Names, types, defaults and help texts are those of `SamplingParams`. `defaults` overrides
    defaults by field name; `without` leaves out fields. Three fields look different on a command
    line: `--stop` can be repeated (`stop_strings`), `--ignore-eos` is an empty `eos_token_id`, and
    `--json-schema` is a file for `structured_outputs`. `logit_bias` has no option.
    """
    added = [
        _sampling_option(field.name, defaults.get(field.name, field.default))
        for field in fields(SamplingParams)
        if field.name not in ("logit_bias", *without)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {parameter.name: values.pop(parameter.name) for parameter in added}
            given["stop_strings"] = tuple(given.get("stop_strings") or ())
            given["eos_token_id"] = () if given.get("eos_token_id") else None
            if (schema := given.get("structured_outputs")) is not None:
                given["structured_outputs"] = {"json": _read_schema(schema)}
            params = SamplingParams(**given)
            params.check()  # as far as possible without the model, which takes long to load
            command(params=params, **values)

        signature, parameters = inspect.signature(command), list[inspect.Parameter]()
        for parameter in signature.parameters.values():
            parameters += added if parameter.name == "params" else [parameter]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


_SHOWN_DEFAULTS = {
    "seed": "another one each time",
    "stop_strings": "none",
    "logprobs": "none",
    "structured_outputs": "none",
}


def _sampling_option(name: str, default: Any) -> inspect.Parameter:
    kind: Any = get_type_hints(SamplingParams)[name]
    arguments, shown = [HELP[name]], _SHOWN_DEFAULTS.get(name, True)
    if name == "stop_strings":
        kind, default = list[str] | None, None
        arguments = [f"{HELP[name]} Can be given several times.", "--stop"]
    elif name == "eos_token_id":
        kind, default = bool, False
        arguments = ["Do not stop at an end-of-text token.", "--ignore-eos"]
    elif name == "structured_outputs":
        kind = Path | None
        arguments = ["File with a JSON schema that the output must match.", "--json-schema"]
    annotation = Annotated[kind, option(*arguments, panel="Sampling", default=shown)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _read_schema(path: Path) -> str:
    text = to_text(read_input(path, "; --json-schema takes a file with a JSON schema"), path)
    try:
        _check_schema(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return text


def read_input(path: Path, hint: str = "") -> bytes:
    """The content of a file, which may be a pipe, as in `--file <(command)`."""
    from xlstm7b.files import check_file

    check_file(path, hint)
    return path.read_bytes()


def to_text(content: bytes, source: str | Path) -> str:
    """UTF-8 as text, without the mark that some editors put at the start of a file."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}") from error


def _check_schema(text: str) -> None:
    """Compiles a schema for its mistakes alone. They do not depend on the model's tokenizer."""
    from xlstm7b.config import ModelConfig
    from xlstm7b.generate.structured import compile_grammar
    from xlstm7b.tokenizer import ByteTokenizer

    params = SamplingParams(structured_outputs={"json": text})
    params.check()
    assert params.structured_outputs is not None
    compile_grammar(params.structured_outputs, ModelConfig.named("tiny"), ByteTokenizer())


def listed(text: str) -> list[str]:
    """The items of an option that takes several, separated by commas: a,b,c."""
    return [part.strip() for part in text.split(",") if part.strip()]


def to_target(path: Path) -> Path:
    """The output file of an option, with links resolved. `ValueError` if it cannot be written.

    Links are resolved because the file is written under a temporary name, then renamed.
    """
    from xlstm7b.files import check_writable, real_path

    path = real_path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"cannot write {path}: it exists and is not a regular file")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    check_writable(path)
    return path


def to_state_target(path: Path) -> Path:
    """As `to_target`, for a saved state. It replaces an older state, but no other file."""
    path = to_target(path)
    if path.exists() and path.stat().st_size:  # `mktemp` makes an empty file
        from xlstm7b.model.saved_state import SavedState

        try:
            SavedState.read_notes(path)
        except ValueError:
            raise ValueError(f"{path} exists and is no saved state: choose another file") from None
    return path


def check_new(target: Path, overwrite: bool) -> None:
    """Raises a `ValueError` if the folder holds something and `--overwrite` is not given."""
    if target.is_dir() and not overwrite and any(target.iterdir()):
        if not (target / "config.json").exists():
            raise ValueError(f"{target} holds other files: choose a new or an empty folder")
        raise ValueError(f"{target} exists already; --overwrite replaces the checkpoint in it")


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True once Ctrl-C was pressed.

    The generator calls it after every engine step and then ends outputs after their latest token.
    A prompt is still read to its end. A second Ctrl-C raises `KeyboardInterrupt` at once.
    """
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def byte_progress(what: str, total: int) -> "Iterator[Progress]":
    """A progress bar over bytes, on stderr. It disappears at the end."""
    from rich.markup import escape
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda name, count: bar.update(
            task, advance=count, description=f"{what} {escape(name)}"
        )


@contextmanager
def count_progress(what: str, total: int | None, shown: bool) -> "Iterator[Any]":
    """A progress bar over items, on stderr. Yields a function that advances it, by 1 or by N."""
    from rich.progress import MofNCompleteColumn

    with _bar(MofNCompleteColumn(), shown=shown) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count=1: bar.advance(task, count)


def _bar(*columns: Any, shown: bool = True) -> Any:
    from rich.console import Console
    from rich.progress import Progress, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(
        *Progress.get_default_columns()[:2],
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # it would print stdout's lines on stderr
        disable=not (shown and console.is_terminal),  # in a log file every update would stay
    )
