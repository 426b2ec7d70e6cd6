"""`xlstm7b eval ruler MODEL --lengths 4096,8192 --output FOLDER`, `eval ruler-plot SCORES…`."""

import hashlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from xlstm7b.cli import options
from xlstm7b.cli.loading import open_model
from xlstm7b.cli.options import count_progress, listed, to_target


def _data(explained: str) -> Any:
    return typer.Option(help=explained, rich_help_panel="Data")


def ruler(
    model: options.Model,
    output: Annotated[Path, typer.Option(help="Folder of answers and scores; gone on with.")],
    lengths: Annotated[
        str, typer.Option(help="In tokens, answers included.")
    ] = "4096,8192,16384,32768,65536,131072",
    tasks: Annotated[
        str | None, typer.Option(help="As niah_single_1,vt.", show_default="all 13")
    ] = None,
    samples: Annotated[int, typer.Option(help="Of every task at every length.")] = 500,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts.")] = 42,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the average over length: ruler.png in the folder.")
    ] = False,
    haystack: Annotated[Path | None, _data("A text to hide needles in.")] = None,
    squad: Annotated[Path | None, _data("SQuAD v2's dev-v2.0.json, for qa_1.")] = None,
    hotpotqa: Annotated[
        Path | None, _data("HotpotQA's hotpot_dev_distractor_v1.json, for qa_2.")
    ] = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
    state_dtype: options.StateDType = "float32",
    batch_size: options.BatchSize = 32,
) -> None:
    """Ask how much of a long text a model uses, by RULER's 13 tasks. Run again, it goes on.

    Without --haystack, --squad or --hotpotqa the tasks that are made from it are left out.
    """
    if plot:
        import matplotlib  # noqa: F401 (missed now rather than after all the work)
    from xlstm7b.data.tokenising import tokenizer_fingerprint
    from xlstm7b.evaluate.results import described
    from xlstm7b.evaluate.ruler.report import plot_scores, to_table
    from xlstm7b.evaluate.ruler.runner import SCORES, GreedyModel, Plan, Run
    from xlstm7b.evaluate.ruler.tasks import TASKS, Sources
    from xlstm7b.generate.decoder import with_first_token

    plan = Plan(
        tuple(TASKS) if tasks is None else tuple(listed(tasks)), _numbers(lengths), samples, seed
    )
    plan.check()
    files = {"haystack": haystack, "squad": squad, "hotpotqa": hotpotqa}
    sources = Sources.read(**files)
    opened = open_model(
        model, tokenizer=tokenizer, dtype=dtype, device=device, state_dtype=state_dtype,
        batch_size=batch_size,
    )  # fmt: skip
    about = described({"model": model}, opened.folder)
    run = Run(
        output,
        plan,
        sources,
        lambda text: len(with_first_token(opened.config, opened.tokenizer.encode(text))),
        identity={
            "model_fingerprint": about["xlstm7b"]["model"]["fingerprint"],
            "tokenizer": tokenizer_fingerprint(tokenizer or _tokenizer_in(opened.folder)),
            "seed": seed,
            "dtype": str(opened.dtype or "as stored").removeprefix("torch."),
            "state_dtype": state_dtype,
            **{name: None if path is None else _sha256(path) for name, path in files.items()},
        },
        about=about,
    )
    for name, reason in run.left_out.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    with count_progress("answering", run.total, shown=True) as advance:
        document = run.answer(
            lambda: GreedyModel(opened.load()), batch_size=batch_size, progress=advance
        )
    print(to_table(document))
    if plot:
        plot_scores([output / SCORES], output / "ruler.png")


def ruler_plot(
    scores: Annotated[list[Path], typer.Argument(help="A scores.json for each model.")],
    output: Annotated[Path, typer.Option(help="PNG to write.")] = Path("ruler.png"),
) -> None:
    """Draw RULER's average over length, of one or more models."""
    from xlstm7b.evaluate.ruler.report import plot_scores

    plot_scores(scores, to_target(output))
    print(f"wrote {output}")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in listed(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of lengths, as 4096,8192") from None


def _tokenizer_in(folder: Path) -> Path | str:
    return folder if (folder / "tokenizer.json").is_file() else "bytes"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
