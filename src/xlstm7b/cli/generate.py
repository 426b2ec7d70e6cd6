"""`xlstm7b generate MODEL PROMPT`: continue a text on the terminal, or many from a file."""

import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlstm7b.cli import options
from xlstm7b.cli.loading import OpenedModel, open_model, stopping_on_interrupt
from xlstm7b.cli.options import check_stops, checked_settings, count_progress, to_target

if TYPE_CHECKING:
    from xlstm7b.generate import Completion, Generator, TextState

_LONG = 4096  # tokens that take a while to read
_INTERRUPTED = 130  # the exit code that shells give to a program ended by Ctrl-C


def _state(explained: str) -> Any:
    return typer.Option(help=explained, rich_help_panel="State")


def _batch(*names: str, explained: str) -> Any:
    return typer.Option(*names, help=explained, rich_help_panel="Many prompts")


def generate(
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - or nothing: what is piped in.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A file to continue, less a last line break.")
    ] = None,
    echo: Annotated[bool, typer.Option("--echo/--no-echo", help="Print the prompt first.")] = True,
    num_return_sequences: Annotated[
        int, typer.Option("-n", "--num-return-sequences", help="Texts to continue it by.")
    ] = 1,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print speeds and memory, on stderr.")
    ] = False,
    peak_tbs: Annotated[
        float | None,
        typer.Option(help="What memory reads, in TB/s.", show_default="an H200's, or measured"),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 256,
    min_new_tokens: options.MinNewTokens = 0,
    temperature: options.Temperature = 0.8,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on past ends of text.", rich_help_panel="Sampling"),
    ] = False,
    load_state: Annotated[Path | None, _state("Go on from a saved state.")] = None,
    save_state: Annotated[
        Path | None, _state("Save the state, which has read prompt and text.")
    ] = None,
    jsonl: Annotated[
        str | None, _batch(explained='Lines of {"prompt": "…"}, with settings; - is stdin.')
    ] = None,
    output: Annotated[str, _batch(explained="The same lines, completed; - is stdout.")] = "-",
    token_ids: Annotated[bool, _batch("--token-ids", explained="Write token_ids as well.")] = False,
    logprobs: Annotated[
        int | None, _batch(explained="Write logprobs, and of this many likeliest tokens.")
    ] = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
    state_dtype: options.StateDType = "float32",
    batch_size: options.BatchSize = 32,
) -> None:
    """Continue a prompt, streaming to the terminal; or, with --jsonl, many from a file.

    Ctrl-C ends the text, or all that are under way; a state is saved even so.

    A line of --jsonl may have sampling settings, stop_strings and fields that go through.
    """
    settings = checked_settings(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        eos_token_id=() if ignore_eos else None,
        logprobs=logprobs,
    )
    stops = check_stops(stop)
    if num_return_sequences < 1:
        raise ValueError(f"num_return_sequences must be at least 1, not {num_return_sequences}")
    if peak_tbs is not None and not 0 < peak_tbs < float("inf"):
        raise ValueError(f"peak_tbs must be a positive number of TB/s, not {peak_tbs}")
    placed: dict[str, Any] = {
        "tokenizer": tokenizer,
        "dtype": dtype,
        "device": device,
        "state_dtype": state_dtype,
        "batch_size": batch_size,
    }
    if jsonl is not None:
        from xlstm7b.cli.batch import read_jobs, to_output, write_completions

        for name, value in (
            ("a prompt", prompt),
            ("--file", file),
            ("-n", num_return_sequences > 1 or None),
            ("--load-state", load_state),
            ("--save-state", save_state),
        ):
            if value is not None:
                raise ValueError(f"--jsonl brings its own prompts: it does not go with {name}")
        target = to_output(output)
        jobs = read_jobs(jsonl, settings, stops)
        opened = open_model(model, **placed)
        write_completions(opened, jobs, target, token_ids=token_ids, verbose=verbose)
        return
    if output != "-" or token_ids or logprobs is not None:
        raise ValueError("--output, --token-ids and --logprobs only go with --jsonl")
    if save_state is not None:
        if num_return_sequences > 1:
            raise ValueError("--save-state saves one text: it does not go with -n")
        save_state = to_target(save_state)
    text = _read_prompt(prompt, file, optional=load_state is not None)
    opened = open_model(model, **placed)
    state = None if load_state is None else opened.load_state(load_state)
    length = _check_prompt(opened, text, state)
    generator = opened.load()
    shown = text if echo and text is not None else ""
    wanted = {**settings, "state": state, "stop_strings": stops}
    interrupted = False
    if num_return_sequences > 1:
        completions, interrupted = _print_several(
            generator, text, shown, num_return_sequences, wanted
        )
    else:
        completion, interrupted = _stream(generator, text, shown, length, save_state, wanted)
        completions = [completion]
    if verbose:
        from xlstm7b.cli.speeds import print_speeds

        print_speeds(generator, completions, peak_tbs)
    if interrupted:
        raise typer.Exit(_INTERRUPTED)


def _read_prompt(prompt: str | None, file: Path | None, *, optional: bool) -> str | None:
    """The one prompt there is: the argument, a file's text, or what is piped in.

    A file's last line break is an editor's or an echo's, and not meant.
    """
    if prompt is not None and file is not None:
        raise ValueError("there are two prompts: give an argument or --file, not both")
    if file is not None:
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
        where, content = str(file), file.read_bytes()
    elif prompt == "-" or (prompt is None and not optional and not sys.stdin.isatty()):
        where, content = "what is piped in", sys.stdin.buffer.read()
    elif prompt is None and not optional:
        raise ValueError("there is no prompt: give one, name a --file, or pipe it in")
    else:
        return prompt
    try:
        return content.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from error


def _check_prompt(opened: OpenedModel, text: str | None, state: "TextState | None") -> int:
    """How many tokens there are to read."""
    from xlstm7b.generate.decoder import check_tokens, with_first_token

    ids = opened.tokenizer.encode(text or "")
    check_tokens(opened.config, ids)
    return len(with_first_token(opened.config, ids) if state is None else ids)


def _stream(
    generator: "Generator",
    text: str | None,
    shown: str,
    length: int,
    save_state: Path | None,
    wanted: dict[str, Any],
) -> "tuple[Completion, bool]":
    """Prints one text as it grows; its completion, and whether Ctrl-C ended it."""
    completion = None
    wanted = {**wanted, "keep_state": save_state is not None}
    with stopping_on_interrupt() as pressed:
        with count_progress("reading", length, shown=length > _LONG) as read:
            pieces = generator.stream(text, should_stop=pressed, progress=read, **wanted)
            first = next(pieces)
        print(shown, end="", flush=True)
        for piece in chain([first], pieces):
            print(piece.text, end="", flush=True)
            completion = piece.completion
        print()
    assert completion is not None
    if save_state is not None:
        assert completion.state is not None
        completion.state.save(save_state)
    return completion, pressed()


def _print_several(
    generator: "Generator", text: str | None, shown: str, count: int, wanted: dict[str, Any]
) -> "tuple[list[Completion], bool]":
    """Prints texts in order as they are finished; what there is of them, and if Ctrl-C ended it."""
    from xlstm7b.cli.batch import in_order

    prompts = None if text is None else [text]
    with stopping_on_interrupt() as pressed, in_order() as write:

        def done(index: int, completion: "Completion") -> None:
            write(index, f"=== {index + 1} of {count} ===\n{shown}{completion.text}\n")

        completions = generator.generate(
            prompts, num_return_sequences=count, done=done, should_stop=pressed, **wanted
        )
    return completions, pressed()
