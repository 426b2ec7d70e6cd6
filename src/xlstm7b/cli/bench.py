"""`xlstm7b bench SUBJECT`: the speed and memory of this package. All weights are random."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xlstm7b.cli.options import Command, listed, option
from xlstm7b.devices import to_device, to_dtype

if TYPE_CHECKING:
    from xlstm7b.bench.measure import RandomModel
    from xlstm7b.bench.results import Results

app = typer.Typer(
    help="Measure the speed and memory of this package, with random weights.",
    no_args_is_help=True,
)

_DTYPES, _QUANTIZED = ("float32", "bfloat16"), ("int8", "fp8", "int4")
_GENERATION_PARTS = ("context", "decode", "first", "prefill")
_ENGINE_PARTS = ("streams", "grammar", "prefix")

# Defaults on a GPU, and on a CPU.
_DEFAULTS = {
    "size": ("7b", "160m"),
    "dtype": ("bfloat16", "float32"),
    "contexts": ("0,131072,1048576", "0,128,512"),
    "batches": ("1,8,32,64,128,256", "1,4"),
    "prompts": ("1,128,512,1024,2048,4096,8192,16384", "128,512"),
    "first": ("100", "20"),
    "tokens": ("65536", "1024"),
    "lengths": ("65536,16384,8192,2048", "1024"),
    "sizes": ("400m", "tiny"),
    "batch": ("16", "4"),
    "length": ("4096", "512"),
}


def _option(name: str, help_text: str) -> object:
    return option(help_text, default="{}; on a CPU {}".format(*_DEFAULTS[name]))


def _default(name: str, device: str) -> str:
    return _DEFAULTS[name][device == "cpu"]


_Device = Annotated[str | None, option("Device: cuda or cpu.", default="a GPU if there is one")]
_Size = Annotated[str | None, _option("size", "Size of the model.")]
_DType = Annotated[str | None, _option("dtype", "Dtype of the weights: float32 or bfloat16.")]
_StateDType = Annotated[str, option("Dtype of the states (of C): float32 or bfloat16.")]
_Quantize = Annotated[
    str | None, option("Quantise the weights: int8, fp8 or int4 (groups of 64).", default="no")
]
_Json = Annotated[
    Path | None,
    option("Append every figure to this file, as a line of JSON.", "--json", default="none"),
]
_Call = Annotated[
    str | None,
    option(
        "Name of the run, for --json. Figures of one run can be compared. What the file already "
        "has of this run is not measured again.",
        default="a random one",
    ),
]


@app.command(cls=Command)
def generation(
    parts: Annotated[
        str,
        option(
            "What to measure. context: reading a prompt, then decoding and memory; decode: "
            "batches; first: first tokens; prefill: many short or few long prompts."
        ),
    ] = ",".join(_GENERATION_PARTS),
    contexts: Annotated[
        str | None, _option("contexts", "Tokens read before a sequence is decoded.")
    ] = None,
    batches: Annotated[str | None, _option("batches", "Batch sizes to decode.")] = None,
    prompts: Annotated[
        str | None, _option("prompts", "Prompt lengths for the time to the first tokens.")
    ] = None,
    first: Annotated[
        int | None, _option("first", "Also measure the time to this many tokens.")
    ] = None,
    tokens: Annotated[int | None, _option("tokens", "Tokens of all prompts in a prefill.")] = None,
    lengths: Annotated[str | None, _option("lengths", "Prompt lengths in a prefill.")] = None,
    folder: Annotated[
        Path | None,
        option(
            "Checkpoint folder: also measure the time from loading it to its first token.",
            default="none",
        ),
    ] = None,
    replay: Annotated[
        str, option("Replay decoding: on, off, or auto, which is on where it is faster.")
    ] = "auto",
    seconds: Annotated[float, option("Length of one timing of decoding, in seconds, about.")] = 0.3,
    size: _Size = None,
    dtype: _DType = None,
    state_dtype: _StateDType = "float32",
    quantize: _Quantize = None,
    device: _Device = None,
    json: _Json = None,
    call: _Call = None,
) -> None:
    """Time reading prompts, decoding and first tokens; measure memory."""
    random = _random_model(size, dtype, state_dtype, quantize, device)
    chosen = _names("parts", parts, _GENERATION_PARTS)
    on = random.device
    context_lengths = _numbers("contexts", contexts or _default("contexts", on), least=0)
    batch_sizes = _numbers("batches", batches or _default("batches", on))
    prompt_lengths = _numbers("prompts", prompts or _default("prompts", on))
    count = _at_least("first", int(_default("first", on)) if first is None else first)
    total = _at_least("tokens", int(_default("tokens", on)) if tokens is None else tokens)
    whole = _numbers("lengths", lengths or _default("lengths", on))
    if lengths is None:
        whole = [length for length in whole if total % length == 0] or [total]
    _check_divides(whole, total)
    replays = {"auto": None, "on": True, "off": False}
    (which,) = _names("replay", replay, tuple(replays))
    _above_0("seconds", seconds)
    if folder is not None and not (folder / "config.json").is_file():
        raise ValueError(f"there is no saved model in {folder}: it has no config.json")
    from xlstm7b.bench.generation import Benchmark, Limits, measure_start
    from xlstm7b.bench.measure import find_peaks
    from xlstm7b.bench.results import Results

    results = Results("generation", on, file=json, call=call)
    peaks = find_peaks(on, to_dtype(random.dtype))
    print(
        "The limit is the time to move all bytes or to compute all FLOPs, whichever is longer, at "
        f"{1e-12 * peaks[1]:.4g} TB/s and {1e-12 * peaks[0]:.4g} TFLOP/s."
    )
    if folder is not None:
        measure_start(results, folder, random)
    limits = Limits(
        random.config,
        peaks,
        dtype=random.dtype,
        state_dtype=state_dtype,
        quantize=quantize,
        device=on,
        replay=replays[which],
    )
    benchmark = Benchmark(results, random, random.make(), limits, seconds)
    if "context" in chosen:  # first: on a CPU the peak is that of the whole process
        benchmark.contexts(context_lengths)
    if "decode" in chosen:
        benchmark.decode(batch_sizes)
    if "first" in chosen:
        benchmark.first(prompt_lengths, count)
    if "prefill" in chosen:
        benchmark.prefill(whole, total)
    _finish(results)


@app.command(cls=Command)
def engine(
    parts: Annotated[
        str,
        option(
            "What to measure. streams: requests that run at the same time; grammar: the same, "
            "where every output follows a JSON schema; prefix: first tokens after a shared prefix."
        ),
    ] = "streams,prefix",
    streams: Annotated[int, option("Requests that run at the same time.")] = 64,
    requests: Annotated[int, option("Requests in all.")] = 192,
    prompt_tokens: Annotated[int, option("Tokens of each prompt.")] = 512,
    new_tokens: Annotated[
        str, option("Tokens of each output: a number, or a range such as 128-384.")
    ] = "256",
    prefill_tokens: Annotated[int, option("Prompt tokens read in one engine step.")] = 512,
    adapters: Annotated[
        int,
        option("Random LoRA adapters of rank 16, which the requests have in turn."),
    ] = 0,
    prefix_tokens: Annotated[int, option("Tokens of the shared prefix.")] = 30_000,
    cache_gb: Annotated[float, option("Device memory for the prefix cache, in GB.")] = 4.0,
    tokenizer: Annotated[
        Path | None, option("Path of a tokenizer.json.", default="a byte-level tokenizer")
    ] = None,
    size: _Size = None,
    dtype: _DType = None,
    state_dtype: _StateDType = "float32",
    quantize: _Quantize = None,
    device: _Device = None,
    json: _Json = None,
    call: _Call = None,
) -> None:
    """Time continuous batching without HTTP, and the first token after a shared prefix."""
    random = _random_model(size, dtype, state_dtype, quantize, device)
    chosen = _names("parts", parts, _ENGINE_PARTS)
    least = {"streams": streams, "requests": requests, "prompt-tokens": prompt_tokens}
    least |= {"prefill-tokens": prefill_tokens, "prefix-tokens": prefix_tokens}
    for name, value in least.items():
        _at_least(name, value)
    _at_least("adapters", adapters, least=0)
    if not 0 <= cache_gb < float("inf"):
        raise ValueError(f"--cache-gb must be at least 0, not {cache_gb:g}")
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", new_tokens)
    outputs = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not 1 <= outputs[0] <= outputs[1]:
        raise ValueError(f"--new-tokens must look like 256 or 128-384, not {new_tokens!r}")
    from xlstm7b.bench.engine import Benchmark, Load
    from xlstm7b.bench.results import Results
    from xlstm7b.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

    text: Tokenizer = ByteTokenizer()
    if tokenizer is not None:
        text = load_tokenizer(tokenizer, random.config.vocab_size)
    results = Results("engine", random.device, file=json, call=call)
    load = Load(streams, requests, prompt_tokens, outputs, prefill_tokens, adapters)
    benchmark = Benchmark(results, random, random.make(), text)
    if "streams" in chosen:
        benchmark.streams(load)
    if "grammar" in chosen:
        benchmark.grammar(load)
    if "prefix" in chosen:
        benchmark.prefix(prefix_tokens, int(cache_gb * 1e9))
    _finish(results)


@app.command(cls=Command)
def serve(
    url: Annotated[
        str, typer.Argument(help="Address of the server, such as http://127.0.0.1:8000.")
    ],
    rate: Annotated[
        float | None,
        option("Requests per second, sent at random times.", default="4, without --clients"),
    ] = None,
    clients: Annotated[
        int | None,
        option(
            "Clients that each send a request once the last one is answered, in place of --rate.",
            default="none",
        ),
    ] = None,
    seconds: Annotated[float, option("How long to send requests, in seconds.")] = 30.0,
    prompt_tokens: Annotated[str, option("Prompt lengths to draw from.")] = "32,128,512",
    new_tokens: Annotated[str, option("Output lengths to draw from.")] = "16,64,128",
    shared_tokens: Annotated[
        int, option("Length of a prefix that all prompts share, in tokens.")
    ] = 0,
    seed: Annotated[int, option("Seed of the lengths, times and prompts.")] = 0,
    timeout: Annotated[float, option("Time limit for one response, in seconds.")] = 120.0,
    api_key: Annotated[
        str | None,
        typer.Option(help="API key of the server.", envvar="XLSTM7B_API_KEY", show_default=False),
    ] = None,
    json: _Json = None,
    call: _Call = None,
) -> None:
    """Put a running server under load: time to first token, between chunks, throughput, errors.

    Ctrl-C ends the load and prints the results so far.
    """
    if clients is not None and rate is not None:
        raise ValueError("give either --rate or --clients, not both: clients have no rate")
    rate = 4.0 if rate is None else rate
    for name, value in (("rate", rate), ("seconds", seconds), ("timeout", timeout)):
        _above_0(name, value)
    from xlstm7b.bench.results import Results
    from xlstm7b.bench.serve import Load, check_server, measure_server

    load = Load(
        url=url,
        rate=rate,
        clients=0 if clients is None else _at_least("clients", clients),
        seconds=seconds,
        prompt_tokens=tuple(_numbers("prompt-tokens", prompt_tokens, least=0)),
        new_tokens=tuple(_numbers("new-tokens", new_tokens)),
        shared_tokens=_at_least("shared-tokens", shared_tokens, least=0),
        seed=seed,
        timeout=timeout,
        api_key=api_key,
    )
    check_server(load)
    results = Results("serve", "none", file=json, call=call)
    measure_server(results, load)
    _finish(results)


@app.command(cls=Command)
def training(
    sizes: Annotated[str | None, _option("sizes", "Sizes of the models.")] = None,
    batch: Annotated[int | None, _option("batch", "Sequences in a micro-batch.")] = None,
    length: Annotated[int | None, _option("length", "Tokens of a sequence.")] = None,
    micro_batches: Annotated[int, option("Micro-batches in a step.")] = 1,
    activations: Annotated[
        str,
        option("Activations that are computed again: none, block, selective or products."),
    ] = "none",
    method: Annotated[
        str, option("What is trained: full (all weights), lora (rank 16) or state.")
    ] = "full",
    quantize: Annotated[
        str | None,
        option("Quantise the frozen weights of lora and state: int8 or int4.", default="no"),
    ] = None,
    steps: Annotated[int, option("Steps to time. Their median is the result.")] = 10,
    device: _Device = None,
    json: _Json = None,
    call: _Call = None,
) -> None:
    """Time training with random text: tokens per second, MFU, memory."""
    on = _bench_device(device)
    names = listed(sizes or _default("sizes", on))
    for name in names:
        _check_size(name)
    rows = _at_least("batch", int(_default("batch", on)) if batch is None else batch)
    tokens = _at_least("length", int(_default("length", on)) if length is None else length)
    _at_least("micro-batches", micro_batches)
    _at_least("steps", steps)
    _names("activations", activations, ("none", "block", "selective", "products"))
    _names("method", method, ("full", "lora", "state"))
    if quantize is not None:
        _names("quantize", quantize, ("int8", "int4"))
        if method == "full":
            raise ValueError("--quantize needs --method lora or state: all weights are trained")
    from xlstm7b.bench.results import Results
    from xlstm7b.bench.training import Case, measure_training

    results = Results("training", on, file=json, call=call)
    for name in names:
        case = Case(name, rows, tokens, micro_batches, activations, method, quantize)
        measure_training(results, case, steps)
    _finish(results)


@app.command(cls=Command)
def kernels(
    sizes: Annotated[str, option("Sizes of the models whose heads are measured.")] = "7b,1.4b,160m",
    tokens: Annotated[int, option("Tokens of all sequences in a timing.")] = 65536,
    lengths: Annotated[
        str, option("Lengths of the sequences, in tokens.")
    ] = "2048,4096,8192,16384,32768,65536",
    batches: Annotated[str, option("Batch sizes of single steps.")] = "1,8,64",
    json: _Json = None,
    call: _Call = None,
) -> None:
    """Check the cell's GPU kernels against float64, then time them: sequences and single steps."""
    names = listed(sizes)
    for name in names:
        _check_size(name)
    whole = _numbers("lengths", lengths)
    _check_divides(whole, _at_least("tokens", tokens))
    steps = _numbers("batches", batches)
    import torch

    from xlstm7b.bench.kernels import measure_kernels
    from xlstm7b.bench.measure import find_peaks
    from xlstm7b.bench.results import Results

    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA GPU here")
    results = Results("kernels", "cuda", file=json, call=call)
    peaks = find_peaks("cuda", torch.bfloat16)
    for name in names:
        measure_kernels(results, name, peaks=peaks, tokens=tokens, lengths=whole, batches=steps)
    _finish(results)


def _random_model(
    size: str | None,
    dtype: str | None,
    state_dtype: str,
    quantize: str | None,
    device: str | None,
) -> "RandomModel":
    on = _bench_device(device)
    size = size or _default("size", on)
    dtype = dtype or _default("dtype", on)
    _check_size(size)
    for name in (dtype, state_dtype):
        to_dtype(name, _DTYPES)
    if quantize is not None:
        _names("quantize", quantize, _QUANTIZED)
    from xlstm7b.bench.measure import RandomModel

    return RandomModel(size, on, dtype, state_dtype, quantize)


def _bench_device(device: str | None) -> str:
    """cuda or cpu: one of several GPUs is chosen with CUDA_VISIBLE_DEVICES."""
    found = to_device(device)
    if str(found) not in ("cuda", "cpu"):
        raise ValueError(f"the device must be cuda or cpu, not {device!r}")
    return str(found)


def _check_size(size: str) -> None:
    from xlstm7b.config import ModelConfig

    ModelConfig.named(size)


def _numbers(name: str, text: str, *, least: int = 1) -> list[int]:
    try:
        numbers = [int(part) for part in listed(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ValueError(
            f"--{name} takes numbers of at least {least}, such as 1,8,64, not {text!r}"
        )
    return numbers


def _names(name: str, text: str, known: Sequence[str]) -> list[str]:
    names = listed(text)
    for each in names or [text]:
        if each not in known:
            raise ValueError(f"--{name} has no {each!r}; choose from {', '.join(known)}")
    return names


def _at_least(name: str, value: int, *, least: int = 1) -> int:
    if value < least:
        raise ValueError(f"--{name} must be at least {least}, not {value}")
    return value


def _above_0(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"--{name} must be above 0, not {value:g}")


def _check_divides(lengths: Sequence[int], tokens: int) -> None:
    for length in lengths:
        if tokens % length:
            raise ValueError(f"--lengths: sequences of {length} do not divide {tokens} tokens")


def _finish(results: "Results") -> None:
    """Exit code 1 if anything failed."""
    if results.failed:
        raise typer.Exit(1)
