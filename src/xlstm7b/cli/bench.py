"""`xlstm7b bench …`: measure this package, beside its peers where asked."""

from pathlib import Path
from typing import Annotated

import typer

from xlstm7b.cli.options import listed

app = typer.Typer(help="Measure this package, beside its peers where asked.", no_args_is_help=True)


@app.command()
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

    others = listed(peers)
    for peer in others:
        if peer not in bench_kernels.PEERS:
            raise ValueError(
                f"there is no peer {peer!r}; there are: {', '.join(bench_kernels.PEERS)}"
            )
    results = bench_kernels.run(
        listed(sizes),
        tokens,
        [int(length) for length in listed(lengths)],
        [int(batch) for batch in listed(batches)],
        bench_kernels.Peaks(peak_tflops * 1e12, peak_tbs * 1e12),
        others,
    )
    bench_kernels.write(results, json_path, plot)


@app.command()
def generation(
    size: Annotated[str | None, typer.Option(help="Model.  [default: 7b; on a CPU 160m]")] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu.  [default: a GPU if there is one]")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights.  [default: bfloat16; on a CPU float32]")
    ] = None,
    state_dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    parts: Annotated[
        str | None, typer.Option(help="Of memory, decode, context, first, prefill.  [default: all]")
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes to decode.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Tokens read before decoding.")] = None,
    prompts: Annotated[str | None, typer.Option(help="Lengths, to the first tokens.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Of a prefill in all.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Of its prompts.")] = None,
    folder: Annotated[
        str | None, typer.Option(help="A saved model, to time the start with.")
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="The processor's peak.  [default: an H200's, or measured]")
    ] = None,
    peak_tbs: Annotated[float | None, typer.Option(help="TB/s read: likewise.")] = None,
    peers: Annotated[
        str, typer.Option(help="To time too: transformers, xlstm, llama2, llama3.")
    ] = "",
    timeout: Annotated[float, typer.Option(help="Of a peer, in seconds.")] = 300,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results, as PNG.")] = None,
) -> None:
    """Time generation with random weights: memory, decoding, first tokens, prefill."""
    from xlstm7b.bench.generation import Plan, check_outputs, run, write

    check_outputs(json_path, plot)
    plan = Plan.of(
        device,
        size=size,
        dtype=dtype,
        state_dtype=state_dtype,
        parts=None if parts is None else listed(parts),
        batches=_numbers(batches),
        contexts=_numbers(contexts),
        prompts=_numbers(prompts),
        tokens=tokens,
        lengths=_numbers(lengths),
        folder=folder,
        peak_flops=None if peak_tflops is None else peak_tflops * 1e12,
        peak_bytes=None if peak_tbs is None else peak_tbs * 1e12,
    )
    write(run(plan, listed(peers), timeout=timeout), json_path, plot)


@app.command()
def training(
    cases: Annotated[
        str | None,
        typer.Option(help="SIZE:BATCHxLENGTH[xN][:block|:selective], with commas.",
                     show_default="160m to 7b; on a CPU tiny"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu.", show_default="a GPU if there is one")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="To take the median of.")] = 10,
    peers: Annotated[str, typer.Option(help="To time too: xlstm.")] = "",
    timeout: Annotated[float, typer.Option(help="Of a case, in seconds.")] = 300,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results.")] = None,
) -> None:  # fmt: skip
    """Time training with random text: tokens per second, MFU, memory."""
    import torch

    from xlstm7b.bench.generation import check_outputs
    from xlstm7b.bench.training import parse_cases, run, write

    check_outputs(json_path, None)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = parse_cases(cases, where)
    results = run(chosen, listed(peers), steps=steps, device=where, timeout=timeout)
    write(results, where, json_path)


@app.command()
def loader(
    folders: Annotated[list[Path], typer.Argument(help="Prepared folders, mixed evenly.")],
    lengths: Annotated[str, typer.Option(help="Context lengths.")] = "2048,8192",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "8,64",
    seconds: Annotated[float, typer.Option(help="That each timing takes.")] = 3,
) -> None:
    """Time how fast training's batches come from prepared shards."""
    from xlstm7b.bench.loader import run

    run(folders, _numbers(lengths) or [], _numbers(batches) or [], seconds)


@app.command()
def serve(
    url: Annotated[str, typer.Argument(help="The server's address, as http://127.0.0.1:8000.")],
    rate: Annotated[float, typer.Option(help="Requests a second, at random times.")] = 4.0,
    clients: Annotated[
        int, typer.Option(help="Instead: so many that wait for an answer, then ask again.")
    ] = 0,
    seconds: Annotated[float, typer.Option(help="In which requests come.")] = 30.0,
    prompt_tokens: Annotated[str, typer.Option(help="Lengths to draw from.")] = "32,128,512",
    new_tokens: Annotated[str, typer.Option(help="Of answers, likewise.")] = "16,64,128",
    shared_tokens: Annotated[
        int, typer.Option(help="With which all prompts begin: a server may have them at hand.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of lengths, times and prompts.")] = 0,
    timeout: Annotated[float, typer.Option(help="Of an answer, in seconds.")] = 120.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="XLSTM7B_API_KEY", help="The server's key.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results, as PNG.")] = None,
) -> None:
    """Put a running server under load: first tokens, times between tokens, throughput, errors.

    Ctrl-C ends it with what was answered by then.
    """
    from xlstm7b.bench.generation import check_outputs
    from xlstm7b.bench.serve import Load, check_server, run, show, write

    check_outputs(json_path, plot)
    load = Load(
        url,
        rate=rate,
        clients=clients,
        seconds=seconds,
        prompt_tokens=tuple(_numbers(prompt_tokens) or ()),
        new_tokens=tuple(_numbers(new_tokens) or ()),
        shared_tokens=shared_tokens,
        seed=seed,
        timeout=timeout,
    )
    check_server(load)
    report = run(load, api_key)
    show(report)
    write(report, json_path, plot)
    if report.interrupted:
        raise typer.Exit(130)
    if not report.requests_per_second:
        raise typer.Exit(1)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in listed(text)]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers, as 1,8,64") from None
