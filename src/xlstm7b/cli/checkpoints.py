"""`xlstm7b info | verify | convert | merge | compare`: inspect and convert checkpoints."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from xlstm7b.cli.options import Device, Model, Overwrite, Target, byte_progress, check_new, option
from xlstm7b.cli.sections import print_sections
from xlstm7b.devices import to_device, to_dtype
from xlstm7b.report import counted, table


def info(
    model: Annotated[
        str,
        typer.Argument(
            help="A size (tiny, 160m, 400m, 1.4b, 2.7b, 7b, 160m-previous, …), "
            "a checkpoint folder, or a hub id."
        ),
    ],
    context_length: Annotated[int, option("Tokens per sequence, for FLOPs.")] = 8192,
    chunk_size: Annotated[int, option("Tokens per chunk of the cell, for FLOPs.")] = 64,
    as_json: Annotated[bool, option("Print JSON instead of a table.", "--json")] = False,
) -> None:
    """Show a model's shape, parameters, state size, FLOPs and memory."""
    from xlstm7b.accounting import summary
    from xlstm7b.config import SIZES, ModelConfig
    from xlstm7b.hub import CONFIG_FILES, parse

    quantized: dict[str, str] = {}
    if model.lower() in SIZES:
        config = ModelConfig.named(model)
    elif Path(model).is_dir() or parse(model):
        from xlstm7b.checkpoint import read_config, read_quantization, resolve
        from xlstm7b.quantize.config import described

        folder = resolve(model, CONFIG_FILES)
        config = read_config(folder)
        quantized = described(read_quantization(folder))
    else:
        raise ValueError(
            f"{model!r} is neither a checkpoint folder nor a size; sizes: {', '.join(SIZES)}"
        )
    result = summary(config, context_length, chunk_size)
    if quantized:
        result["quantization"] = quantized
    if as_json:
        print(json.dumps({"model": model, **result}, indent=2))
    else:
        print_sections(f"xLSTM {model}", result)


def verify(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder with a SHA256SUMS file.")],
) -> None:
    """Check the files of a checkpoint against its SHA256SUMS. Loading does not check them."""
    from xlstm7b import checkpoint

    total = sum(p.stat().st_size for p in folder.glob("*") if p.is_file())
    with byte_progress("verifying", total) as report:
        count = checkpoint.verify(folder, report)
    match = "matches" if count == 1 else "match"
    print(f"{folder}: {counted(count, 'file')} {match} SHA256SUMS")


def convert(
    source: Model,
    target: Target,
    dtype: Annotated[
        str | None,
        option("Dtype of the weights: float32, bfloat16 or float16.", default="the stored dtype"),
    ] = None,
    max_shard_size: Annotated[float, option("Maximum size of a weights file, in GB.")] = 5.0,
    overwrite: Overwrite = False,
) -> None:
    """Write a checkpoint in the Hugging Face layout, with another dtype or shard size.

    SOURCE may be a folder in the format of the xLSTM authors. Tokenizer and licence files are
    copied too.
    """
    from xlstm7b.checkpoint import open_checkpoint, save_checkpoint

    wanted = None if dtype is None else to_dtype(dtype)
    if not 0 < max_shard_size < float("inf"):
        raise ValueError(f"--max-shard-size must be a positive number of GB, not {max_shard_size}")
    check_new(target, overwrite)
    checkpoint = open_checkpoint(source)
    narrowed = (wanted or checkpoint.dtype).itemsize / checkpoint.dtype.itemsize
    with byte_progress("writing", int(checkpoint.nbytes * narrowed)) as report:
        save_checkpoint(
            target,
            checkpoint.config,
            checkpoint.tensors(dtype=wanted),
            dtype=wanted,
            max_shard_bytes=int(max_shard_size * 1e9),
            companions=checkpoint.companions(),
            progress=report,
            overwrite=overwrite,
        )
    print(f"wrote {target}")


def merge(
    base: Annotated[str, typer.Argument(help="Checkpoint folder or hub id that was adapted.")],
    adapter: Annotated[str, typer.Argument(help="Folder in PEFT's format, or a hub id.")],
    target: Target,
    overwrite: Overwrite = False,
) -> None:
    """Add a LoRA adapter to the weights of its base, and write them as a checkpoint.

    The result is an ordinary model of the base's size and dtype. Tokenizer and chat template come
    from the adapter's folder if it has them, else from the base.
    """
    check_new(target, overwrite)
    from xlstm7b.model.adapter import merge_checkpoint

    merge_checkpoint(base, adapter, target, overwrite=overwrite)
    print(f"wrote {target}")


def compare(
    model: Model,
    max_new_tokens: Annotated[int, option("Greedy tokens per prompt to compare.")] = 32,
    speed_length: Annotated[
        int, option("Length of the prompt in the speed test, in tokens.")
    ] = 256,
    dtype: Annotated[
        str, option("Dtype of the weights: float32, bfloat16 or float16.")
    ] = "float32",
    device: Device = None,
    as_json: Annotated[bool, option("Print JSON instead of a table.", "--json")] = False,
) -> None:
    """Compare this package with transformers on the same weights: logits, greedy tokens, speed."""
    from xlstm7b.compare import compare as run

    result = run(
        model,
        dtype=to_dtype(dtype),
        device=str(to_device(device)),
        max_new_tokens=max_new_tokens,
        speed_length=speed_length,
    )
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return
    rows = [
        (
            repr(row.prompt)[:20],
            row.tokens,
            f"{row.relative_difference:.1e}",
            f"{row.largest_difference:.1e}",
            f"{row.same_greedy_tokens}/{row.greedy_tokens}",
        )
        for row in result.prompts
    ]
    speeds = [
        (name, f"{speed.prefill:.1f}", f"{speed.decode:.1f}")
        for name, speed in (("xlstm7b", result.ours), ("transformers", result.theirs))
    ]
    print(f"xlstm7b and transformers, {result.dtype} on {result.device}: difference of the logits")
    print(table(("prompt", "tokens", "relative", "largest", "same greedy"), rows))
    print("\ntokens per second")
    print(table(("", f"prefill of {result.speed_length}", "decode"), speeds))
