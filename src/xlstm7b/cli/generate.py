"""`xlstm7b generate MODEL PROMPT`: continue a prompt on the terminal, or many prompts in a file.

The command is one long function, because it declares every option.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlstm7b.cli import options
from xlstm7b.cli.compiling import after_compiling, compiling_shown
from xlstm7b.cli.loading import open_model
from xlstm7b.cli.options import (
    count_progress,
    option,
    read_input,
    sampling_options,
    stop_on_interrupt,
    to_state_target,
    to_target,
    to_text,
)
from xlstm7b.generate.params import SamplingParams

if TYPE_CHECKING:
    from xlstm7b.generate import Completion, Generator

_MAX_OUTPUTS = 1_000_000  # of -n: about 3 GB of host memory
_LONG_PROMPT = 4096  # tokens; reading more than this shows a progress bar
_INTERRUPTED = 130  # exit code of a program that Ctrl-C ended
_H200_BANDWIDTH = 4.27e12  # bytes per second, measured

_state_option = partial(option, panel="State")
_batch_option = partial(option, panel="Many prompts")


@sampling_options(temperature=0.8, top_p=0.95)
def generate(
    model: options.Model,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue. Without it, or with -, stdin is read; with --load-state only "
            "with -."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        option("File with the prompt. A line break at its end is dropped.", default="none"),
    ] = None,
    echo: Annotated[bool, option("Print the prompt first.", "--echo/--no-echo")] = True,
    num_return_sequences: Annotated[
        int, option("Number of outputs to generate.", "-n", "--num-return-sequences")
    ] = 1,
    verbose: Annotated[bool, option("Print speeds and memory on stderr.", "--verbose")] = False,
    peak_tbs: Annotated[
        float | None,
        option(
            "Memory bandwidth in TB/s, for --verbose.", default="an H200's on a GPU, else measured"
        ),
    ] = None,
    *,
    params: SamplingParams,
    load_state: Annotated[
        Path | None, _state_option("File with a saved state to continue from.", default="none")
    ] = None,
    save_state: Annotated[
        Path | None,
        _state_option("File to save the state after prompt and output in.", default="none"),
    ] = None,
    jsonl: Annotated[
        str | None,
        _batch_option(
            'File with a {"prompt": "…"} in each line; - is stdin.', default="one prompt, no file"
        ),
    ] = None,
    output: Annotated[
        str,
        _batch_option(
            "File for the completed lines of --jsonl; - is stdout. After an interruption, the same "
            "command continues it."
        ),
    ] = "-",
    copy_fields: Annotated[
        str,
        _batch_option(
            "Fields of the lines of --jsonl to copy to the output, separated by commas. Other "
            "fields that are no sampling parameters are refused."
        ),
    ] = "id",
    token_ids: Annotated[
        bool, _batch_option("Write the token ids of each output of --jsonl.", "--token-ids")
    ] = False,
    adapter: options.Adapter = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
    state_dtype: options.StateDType = "float32",
    batch_size: options.BatchSize = 32,
    speculate: options.Speculate = "off",
) -> None:
    """Continue a prompt and stream the output to the terminal.

    With --jsonl, complete every line of a file. A line can hold sampling parameters of its own,
    which override the options. --output, --copy-fields, --token-ids and --logprobs need --jsonl.

    Ctrl-C ends the output; --save-state still saves the state. A second Ctrl-C quits at once.
    """
    opening = partial(
        open_model, model, tokenizer, dtype, device, state_dtype, batch_size, adapter, speculate
    )
    if num_return_sequences < 1:
        raise ValueError(f"num_return_sequences must be at least 1, not {num_return_sequences}")
    if num_return_sequences > _MAX_OUTPUTS:
        raise ValueError(
            f"num_return_sequences must be at most {_MAX_OUTPUTS:,}, not {num_return_sequences:,}: "
            "all outputs are kept in memory until the last is there"
        )
    if peak_tbs is not None and not 0 < peak_tbs < float("inf"):
        raise ValueError(f"peak_tbs must be a positive number of TB/s, not {peak_tbs}")
    for name, path in (("--jsonl", jsonl), ("--output", output)):
        if path == "":
            raise ValueError(f"{name} is empty: give a path")
    if jsonl is not None:
        from xlstm7b.cli.batch import check_output, complete_lines, read_lines

        for name, given in {
            "a prompt argument": prompt is not None,
            "--file": file is not None,
            "-n": num_return_sequences > 1,
            "--load-state": load_state is not None,
            "--save-state": save_state is not None,
        }.items():
            if given:
                raise ValueError(f"--jsonl cannot be combined with {name}")
        target = None if output == "-" else to_target(Path(output))
        if target is not None and jsonl != "-" and target == Path(os.path.realpath(jsonl)):
            raise ValueError(f"--output {output} is the input of --jsonl: choose another file")
        if target is not None:
            check_output(target)
        lines = read_lines(jsonl, params, options.listed(copy_fields))
        complete_lines(opening(), lines, target, token_ids=token_ids, verbose=verbose)
        return
    if output != "-" or copy_fields != "id" or token_ids or params.logprobs is not None:
        raise ValueError("--output, --copy-fields, --token-ids and --logprobs need --jsonl")
    if save_state is not None:
        if num_return_sequences > 1:
            raise ValueError("--save-state saves one state: it cannot be combined with -n")
        save_state = to_state_target(save_state)
    text = _read_prompt(prompt, file, optional=load_state is not None)
    opened = opening()
    if params.eos_token_id is None:
        params = replace(params, eos_token_id=opened.end_ids())
    from xlstm7b.generate import Request, SavedState

    state = None
    if load_state is not None:
        opened.check_state(load_state)
        state = SavedState.load(load_state, opened.config, device=opened.device)
    request = Request(text or "", params, state=state).prepare(opened.config, opened.tokenizer)
    generator = opened.load()
    shown = text if echo and text is not None else ""
    with stop_on_interrupt() as interrupted:
        sampling = {**vars(params), "state": state, "should_stop": interrupted}
        if num_return_sequences > 1:
            completions = _print_several(generator, text, shown, num_return_sequences, sampling)
        else:
            count = len(request.prompt_token_ids)
            completions = [_stream(generator, text, shown, count, sampling, save_state is not None)]
            if save_state is not None:
                assert completions[0].state is not None
                completions[0].state.save(save_state, **opened.state_notes())
    if verbose:
        _print_speeds(generator, completions, peak_tbs)
    if interrupted():
        raise typer.Exit(_INTERRUPTED)


def _read_prompt(prompt: str | None, file: Path | None, *, optional: bool) -> str | None:
    """The prompt: the argument, a file's text or stdin. None if it is optional and not given."""
    if prompt is not None and file is not None:
        raise ValueError("two prompts are given: use an argument or --file, not both")
    if file is not None:
        return _without_last_break(to_text(read_input(file), file))
    if prompt == "-" or (prompt is None and not optional and not sys.stdin.isatty()):
        return _without_last_break(to_text(sys.stdin.buffer.read(), "stdin"))
    if prompt is None and not optional:
        raise ValueError("no prompt is given: use an argument or --file, or pipe it to stdin")
    return prompt


def _without_last_break(text: str) -> str:
    """Drops a line break at the end, LF or CR LF: it comes from an editor or from `echo`."""
    return re.sub(r"\r?\n\Z", "", text)


def _stream(
    generator: "Generator",
    prompt: str | None,
    shown: str,
    prompt_tokens: int,
    sampling: dict[str, Any],
    keep_state: bool,
) -> "Completion":
    """Prints one output while it is generated, after `shown`."""
    is_long = prompt_tokens > _LONG_PROMPT
    with count_progress("reading", prompt_tokens, shown=is_long) as read:
        outputs = generator.stream(prompt, keep_state=keep_state, progress=read, **sampling)
        outputs = after_compiling(outputs, generator.device, bar=not is_long)
        first = next(outputs)
    print(shown, end="", flush=True)
    for output in chain([first], outputs):
        print(output.text, end="", flush=True)
    print()
    completion = output.completion
    assert completion is not None
    return completion


def _print_several(
    generator: "Generator", prompt: str | None, shown: str, count: int, sampling: dict[str, Any]
) -> "list[Completion]":
    """Prints several outputs of one prompt, in order, each as soon as it is finished."""
    from xlstm7b.cli.batch import in_order

    with in_order() as write:

        def done(index: int, completion: "Completion") -> None:
            write(index, f"=== {index + 1} of {count} ===\n{shown}{completion.text}\n")

        prompts = None if prompt is None else [prompt]
        with compiling_shown(generator.device, bar=False):
            return generator.generate(prompts, num_return_sequences=count, done=done, **sampling)


def _print_speeds(
    generator: "Generator", completions: "Sequence[Completion]", peak_tbs: float | None
) -> None:
    """Prints tokens per second, and bytes per second compared with the memory bandwidth."""
    from xlstm7b.accounting import decode_bytes
    from xlstm7b.cli.batch import drafted_line
    from xlstm7b.generate.replay import default_interval

    # Speeds count from the first token to the last. The longest output ran for the most steps.
    longest = max(completions, key=lambda completion: len(completion.token_ids))
    batch = min(len(completions), generator.batch_size)
    interval = None
    if generator.fused:
        interval = default_interval(generator.config, batch, generator.device.type)
    # An accepted draft takes no pass of its own.
    passes = 1 - longest.accepted_tokens / max(1, len(longest.token_ids))
    moved = (
        passes
        * longest.tokens_per_second
        * decode_bytes(
            generator.config,
            batch,
            weight_itemsize=generator.dtype.itemsize,
            state_itemsize=generator.state_dtype.itemsize,
            replay_interval=interval,
            ring_itemsize=generator.dtype.itemsize,
        )
    )
    limit = _bandwidth(generator.device.type) if peak_tbs is None else peak_tbs * 1e12
    generated = sum(len(completion.token_ids) for completion in completions)
    speed, together = batch * longest.tokens_per_second, f", {batch} at a time" if batch > 1 else ""
    is_drafted = generator.speculate not in (None, "lookup")
    draft = ", without what the draft model moves" if is_drafted else ""
    lines = [
        f"generated    {generated:>8,} tok {speed:>12,.1f} tok/s{together}",
        f"memory moved {moved / 1e9:>8,.2f} GB/s, {moved / limit:.1%} of the bandwidth of "
        f"{limit / 1e9:,.1f} GB/s{draft}",
        f"peak memory  {max(c.peak_memory for c in completions) / 1e9:>8,.2f} GB",
    ]
    if longest.prompt_tokens:
        tokens, speed = longest.prompt_tokens, longest.prompt_tokens_per_second
        lines.insert(0, f"prompt       {tokens:>8,} tok {speed:>12,.1f} tok/s")
    if generator.speculate is not None:
        lines.append(drafted_line(completions))
    print("\n".join(lines), file=sys.stderr)


def _bandwidth(device_type: str) -> float:
    """Bytes per second: an H200's on a GPU, else measured on more memory than caches hold."""
    if device_type == "cuda":
        return _H200_BANDWIDTH
    import torch
    from torch.utils.benchmark import Timer

    memory = torch.ones(64 << 20)
    timer = Timer("memory.sum()", globals={"memory": memory}, num_threads=torch.get_num_threads())
    return memory.nbytes / min(timer.blocked_autorange(min_run_time=0.3).times)
