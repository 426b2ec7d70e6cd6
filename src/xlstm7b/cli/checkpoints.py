"""`xlstm7b info | verify | convert | compare`: look at checkpoints, and rewrite them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from xlstm7b.cli.options import Device, Model, byte_progress, to_device, to_dtype
from xlstm7b.cli.sections import print_sections


def info(
    model: Annotated[
        str,
        typer.Argument(help="A size (tiny, 160m, 400m, 1.4b, 2.7b, 7b) or a checkpoint folder."),
    ],
    context_length: Annotated[int, typer.Option(help="Sequence length that FLOPs are for.")] = 8192,
    chunk_size: Annotated[int, typer.Option(help="Chunk length that FLOPs are for.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model's shape, parameters, state, FLOPs and memory."""
    from xlstm7b.accounting import summary
    from xlstm7b.config import SIZES, ModelConfig

    if model.lower() in SIZES:
        config = ModelConfig.named(model)
    elif Path(model).is_dir():
        from xlstm7b.weights import read_config

        config = read_config(Path(model))
    else:
        raise ValueError(
            f"{model!r} is neither a checkpoint folder nor a size; sizes: {', '.join(SIZES)}"
        )
    result = summary(config, context_length, chunk_size)
    if as_json:
        print(json.dumps({"model": model, **result}, indent=2))
    else:
        print_sections(f"xLSTM {model}", result)


def verify(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder with a SHA256SUMS file.")],
) -> None:
    """Check a folder's files against its SHA256SUMS: else a flipped bit loads in silence."""
    from xlstm7b import weights

    total = sum(p.stat().st_size for p in folder.iterdir()) if folder.is_dir() else 0
    with byte_progress("verifying", total) as report:
        count = weights.verify(folder, report)
    print(f"{folder}: {count} files are as they were saved")


def convert(
    source: Model,
    target: Annotated[Path, typer.Argument(help="Folder to write, in Hugging Face layout.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="as stored")
    ] = None,
    max_shard_size: Annotated[float, typer.Option(help="Largest weights file, in GB.")] = 5.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is in TARGET.")
    ] = False,
) -> None:
    """Write a checkpoint in another dtype, sharding or, from the authors' own, folder format.

    The tokenizer and licence files beside it go along.
    """
    from xlstm7b.weights import open_checkpoint, save_checkpoint

    wanted = None if dtype is None else to_dtype(dtype)
    if not 0 < max_shard_size < float("inf"):
        raise ValueError(f"max_shard_size must be a positive number of GB, not {max_shard_size}")
    if target.is_dir() and not overwrite and any(target.iterdir()):
        raise ValueError(f"{target} exists already; --overwrite replaces the checkpoint in it")
    checkpoint = open_checkpoint(source)
    narrowed = (wanted or checkpoint.dtype).itemsize / checkpoint.dtype.itemsize
    with byte_progress("writing", int(checkpoint.nbytes * narrowed)) as report:
        save_checkpoint(
            target,
            checkpoint.config,
            checkpoint.tensors(),
            dtype=wanted,
            max_shard_bytes=int(max_shard_size * 1e9),
            companions=checkpoint.companions(),
            progress=report,
        )
    print(f"wrote {target}")


def compare(
    model: Model,
    max_new_tokens: Annotated[int, typer.Option(help="Greedy tokens to compare.")] = 32,
    speed_length: Annotated[int, typer.Option(help="Prompt tokens for the speeds.")] = 256,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run transformers' xLSTM and this package on the same weights and prompts, side by side."""
    from rich.console import Console
    from rich.table import Table

    from xlstm7b.bench.compare import compare as run

    result = run(
        model,
        dtype=to_dtype(dtype),
        device=to_device(device),
        max_new_tokens=max_new_tokens,
        speed_length=speed_length,
    )
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    table = Table(title=f"ours against transformers, {result.dtype} on {result.device}")
    for heading in ("prompt", "tokens", "relative diff.", "largest diff.", "same greedy"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right", no_wrap=True)
    for row in result.prompts:
        table.add_row(
            repr(row.prompt)[:20],
            str(row.tokens),
            f"{row.relative_difference:.1e}",
            f"{row.largest_difference:.1e}",
            f"{row.same_greedy_tokens}/{row.greedy_tokens}",
        )
    speeds = Table(title="tokens per second")
    for heading in ("", f"prefill of {result.speed_length}", "decode"):
        speeds.add_column(heading, justify="right")
    for name, speed in (("ours", result.ours), ("transformers", result.theirs)):
        speeds.add_row(name, f"{speed.prefill:.1f}", f"{speed.decode:.1f}")
    Console().print(table, speeds)
