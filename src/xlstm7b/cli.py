"""`xlstm7b …`: the command line. Every command imports what it needs when it runs."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from xlstm7b.files import Progress

app = typer.Typer(
    help="xLSTM 7B: a recurrent large language model with constant memory and constant cost "
    "per token.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Model = Annotated[str, typer.Argument(help="Checkpoint folder, or Hugging Face hub id.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, …  [default: a GPU if there is one]")
]
DType = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16.  [default: bfloat16 on a GPU, else as stored]"
    ),
]


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
    except ModuleNotFoundError as error:
        print(f"xlstm7b: this needs {error.name}, which is not installed here", file=sys.stderr)
        sys.exit(2)


@app.command()
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
        _print_sections(f"xLSTM {model}", result)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder with a SHA256SUMS file.")],
) -> None:
    """Check a folder's files against its SHA256SUMS: else a flipped bit loads in silence."""
    from xlstm7b import weights

    total = sum(p.stat().st_size for p in folder.iterdir()) if folder.is_dir() else 0
    with _progress("verifying", total) as report:
        count = weights.verify(folder, report)
    print(f"{folder}: {count} files are as they were saved")


@app.command()
def convert(
    source: Model,
    target: Annotated[Path, typer.Argument(help="Folder to write, in Hugging Face layout.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.  [default: as stored]")
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

    wanted = None if dtype is None else _dtype(dtype)
    if not 0 < max_shard_size < float("inf"):
        raise ValueError(f"max_shard_size must be a positive number of GB, not {max_shard_size}")
    if target.is_dir() and not overwrite and any(target.iterdir()):
        raise ValueError(f"{target} exists already; --overwrite replaces the checkpoint in it")
    checkpoint = open_checkpoint(source)
    narrowed = (wanted or checkpoint.dtype).itemsize / checkpoint.dtype.itemsize
    with _progress("writing", int(checkpoint.nbytes * narrowed)) as report:
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


@app.command()
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
        dtype=_dtype(dtype),
        device=_device(device),
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


bench = typer.Typer(
    help="Measure this package, beside its peers where asked.", no_args_is_help=True
)
app.add_typer(bench, name="bench")


@bench.command()
def kernels(
    sizes: Annotated[str, typer.Option(help="Head sizes to time, by model.")] = "7b,1.4b,160m",
    tokens: Annotated[int, typer.Option(help="Tokens in every timing.")] = 65536,
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths.")
    ] = "2048,4096,8192,16384,32768,65536",
    batches: Annotated[str, typer.Option(help="Batch sizes of single steps.")] = "1,8,64",
    peak_tflops: Annotated[float, typer.Option(help="The GPU's bf16 peak (an H200's).")] = 768,
    peak_tbs: Annotated[float, typer.Option(help="Its copy speed in TB/s (an H200's).")] = 4.2,
    peers: Annotated[
        str, typer.Option(help="Libraries to time too: mlstm_kernels, fla, sdpa.")
    ] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results, as PNG.")] = None,
) -> None:
    """Check and time the cell's GPU kernels over sequence lengths, and single steps."""
    from xlstm7b.bench import kernels as bench_kernels

    others = _listed(peers)
    for peer in others:
        if peer not in bench_kernels.PEERS:
            raise ValueError(
                f"there is no peer {peer!r}; there are: {', '.join(bench_kernels.PEERS)}"
            )
    results = bench_kernels.run(
        _listed(sizes),
        tokens,
        [int(length) for length in _listed(lengths)],
        [int(batch) for batch in _listed(batches)],
        bench_kernels.Peaks(peak_tflops * 1e12, peak_tbs * 1e12),
        others,
    )
    bench_kernels.write(results, json_path, plot)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest that reach p.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json.  [default: the one in the folder]")
    ] = None,
    dtype: DType = None,
    device: Device = None,
) -> None:
    """Continue a prompt, streaming to the terminal."""
    from xlstm7b.generate import check_request, stream_tokens
    from xlstm7b.model import XLSTM
    from xlstm7b.tokenizer import StreamDecoder, load_tokenizer
    from xlstm7b.weights import read_config, resolve

    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    check_request(**settings)  # here too: loading a model takes long
    where, wanted = _device(device), None if dtype is None else _dtype(dtype)
    folder = resolve(model)
    text = load_tokenizer(tokenizer or folder, read_config(folder).vocab_size)
    if wanted is None and where.startswith("cuda"):
        wanted = _dtype("bfloat16")
    network = XLSTM.from_pretrained(folder, dtype=wanted, device=where)
    decoder = StreamDecoder(text)
    tokens = stream_tokens(network, text.encode(prompt), **settings)
    print(prompt, end="", flush=True)
    for token in tokens:
        print(decoder.push(token), end="", flush=True)
    print(decoder.flush())


def _dtype(name: str) -> "torch.dtype":
    import torch

    known = {
        str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)
    }
    if name not in known:
        raise ValueError(f"there is no dtype {name!r} here; there are: {', '.join(known)}")
    return known[name]


def _device(name: str | None) -> str:
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


@contextmanager
def _progress(what: str, total: int) -> "Iterator[Progress]":
    """A bar on stderr, over bytes, that vanishes when done."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # a log would keep what should vanish
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda name, count: bar.update(
            task, advance=count, description=f"{what} {escape(name)}"
        )


def _print_sections(title: str, sections: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title=Text(title), show_header=False)
    for section, values in sections.items():
        table.add_section()
        table.add_row(f"[bold]{section}", "")
        for name, value in values.items():
            parts = value if isinstance(value, dict) else {name: value}
            if value is parts:
                table.add_row(f"  {_words(name)}", "")
            for key, number in parts.items():
                indent = "    " if value is parts else "  "
                table.add_row(indent + _words(key), _readable(section, key, number))
    Console().print(table)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _readable(section: str, key: str, number: float) -> str:
    """Bytes with their unit (powers of 1000, as in the paper), FLOPs as powers of ten."""
    if "bytes" in key:
        unit, size = ("GB", 1e9) if number >= 1e9 else ("MB", 1e6)
        return f"{number / size:,.1f} {unit}"
    if section == "flops" and number >= 1e6:
        return f"{number:.3e}"
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"
