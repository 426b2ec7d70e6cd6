"""Options that several commands share, what they stand for, and progress bars."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from xlstm7b.files import Progress

_DTYPES = ("float32", "bfloat16", "float16")
ANY_VOCABULARY = 1 << 63  # larger than any: for checks before the model is known


def _sampling(*names: str, explained: str) -> Any:
    return typer.Option(*names, help=explained, rich_help_panel="Sampling")


def _loading(*names: str, explained: str, default: bool | str = True) -> Any:
    return typer.Option(*names, help=explained, rich_help_panel="Model", show_default=default)


Model = Annotated[str, typer.Argument(help="Checkpoint folder, or Hugging Face hub id.")]
Device = Annotated[
    str | None,
    _loading(explained="cpu, cuda, cuda:1, …", default="a GPU if there is one"),
]
DType = Annotated[
    str | None,
    _loading(
        explained="float32, bfloat16 or float16.", default="bfloat16 on a GPU, else as stored"
    ),
]
StateDType = Annotated[
    str, _loading(explained="float32 or bfloat16: what the recurrent state is kept in.")
]
BatchSize = Annotated[int, _loading(explained="Most texts generated at once.")]
TokenizerPath = Annotated[
    Path | None,
    _loading("--tokenizer", explained="A tokenizer.json.", default="the one in the folder"),
]

MaxNewTokens = Annotated[int, _sampling(explained="Most tokens to generate.")]
MinNewTokens = Annotated[int, _sampling(explained="No end of text before this many tokens.")]
Temperature = Annotated[float, _sampling(explained="0 takes the likeliest token.")]
TopK = Annotated[int, _sampling(explained="Sample from the k likeliest; 0: from all.")]
TopP = Annotated[float, _sampling(explained="Sample from the likeliest that reach p.")]
MinP = Annotated[
    float, _sampling(explained="Sample from those at least this many times as likely as the best.")
]
RepetitionPenalty = Annotated[
    float, _sampling(explained="Above 1: tokens of prompt and answer become less likely.")
]
PresencePenalty = Annotated[
    float, _sampling(explained="Taken off the score of tokens generated before.")
]
FrequencyPenalty = Annotated[
    float, _sampling(explained="The same, once for every time that they were.")
]
Seed = Annotated[int | None, _sampling(explained="Same seed, same text.")]
Stop = Annotated[
    list[str] | None, _sampling("--stop", explained="Ends the text where it appears; repeatable.")
]


def checked_settings(**settings: Any) -> dict[str, Any]:
    """Sampling settings, checked as far as they can be without a model: loading one takes long."""
    from xlstm7b.generate.sampling import SamplingSettings

    SamplingSettings(**settings).check(ANY_VOCABULARY)
    return settings


def check_stops(stops: list[str] | None) -> tuple[str, ...]:
    if stops and not all(stops):
        raise ValueError("a stop string must not be empty")
    return tuple(stops or ())


def listed(text: str) -> list[str]:
    """The parts of an option that names several things, as a,b,c."""
    return [part.strip() for part in text.split(",") if part.strip()]


def to_dtype(name: str, known: tuple[str, ...] = _DTYPES) -> "torch.dtype":
    import torch

    if name not in known:
        raise ValueError(f"there is no dtype {name!r} here; there are: {', '.join(known)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def to_device(name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        holds_numbers = not torch.empty(0, device=name).is_meta
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the device {name!r} cannot be used here: {reason}") from error
    if not holds_numbers:
        raise ValueError(f"the device {name!r} cannot be used here: it holds no numbers")
    return name


def to_target(path: Path) -> Path:
    """Where a file is to be written, through links: it will be written aside, then renamed."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is there already, and is not a file to replace")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path.parent} does not let {path.name} be written there")
    return path


@contextmanager
def byte_progress(what: str, total: int) -> "Iterator[Progress]":
    """A bar on stderr, over bytes, that vanishes when done."""
    from rich.markup import escape
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda name, count: bar.update(
            task, advance=count, description=f"{what} {escape(name)}"
        )


@contextmanager
def count_progress(what: str, total: int | None, shown: bool) -> "Iterator[Any]":
    """A bar on stderr, over things; called for each that is done, or with how many are."""
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
        redirect_stdout=False,  # it would send what is printed to stderr as well
        disable=not (shown and console.is_terminal),  # a log would keep what should vanish
    )
