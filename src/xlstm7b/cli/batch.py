"""`xlstm7b generate MODEL --jsonl IN --output OUT`: complete every line of a file."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xlstm7b.cli.options import count_progress, to_target
from xlstm7b.generate.params import SamplingParams

if TYPE_CHECKING:
    from xlstm7b.cli.loading import OpenedModel
    from xlstm7b.generate import Completion, Request

_RESULT_FIELDS = (
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "token_ids",
    "top_logprobs",
)


class Line(NamedTuple):
    """One line of the input: file and line number, its JSON fields, and the request they make."""

    source: str
    fields: dict[str, Any]
    request: "Request"


def read_lines(path: str, defaults: SamplingParams) -> list[Line]:
    """Reads a JSONL file, or stdin for `-`. Lines can override the default sampling parameters."""
    name = "stdin" if path == "-" else path
    if path != "-" and (not Path(path).exists() or Path(path).is_dir()):
        raise ValueError(f"there is no file {path}; --jsonl takes a JSONL file, or - for stdin")
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    lines = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            source = f"{name}, line {number}"
            with _naming(source):
                fields = _read_object(line)
                lines.append(Line(source, fields, _to_request(fields, defaults)))
    if not lines:
        raise ValueError(f"{name} holds no prompts")
    return lines


def check_output(output: str) -> Path | None:
    """The file to write, None for `-`. `ValueError` if it cannot be written."""
    if output == "-":
        return None
    target = to_target(Path(output))
    if _partial(target).exists():
        raise ValueError(
            f"{_partial(target)} holds the results of an interrupted run: move it away first"
        )
    return target


def complete_lines(
    opened: "OpenedModel", lines: list[Line], target: Path | None, *, token_ids: bool, verbose: bool
) -> None:
    """Generates for all lines and writes each with its result. `target` None is stdout."""
    for line in lines:
        with _naming(line.source):
            line.request.prepare(opened.config, opened.tokenizer)
    generator = opened.load()
    start = time.perf_counter()
    shown = target is not None or not sys.stdout.isatty()
    with (
        count_progress("generating", len(lines), shown) as advance,
        in_order() if target is None else _to_file(target, len(lines)) as write,
    ):

        def done(index: int, completion: "Completion") -> None:
            fields = lines[index].fields | _result(completion, token_ids)
            write(index, json.dumps(fields, ensure_ascii=False) + "\n")
            advance()

        completions = generator.run([line.request for line in lines], done=done)
    if verbose:
        _print_totals(completions, time.perf_counter() - start)


def _read_object(line: bytes) -> dict[str, Any]:
    fields = json.loads(line.decode("utf-8-sig"))
    if not isinstance(fields, dict):
        raise ValueError('a line must be a JSON object such as {"prompt": "…"}')
    json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair cannot be written back
    return fields


def _to_request(fields: dict[str, Any], defaults: SamplingParams) -> "Request":
    from xlstm7b.generate import Request

    if "prompt" not in fields:
        raise ValueError('"prompt" is missing')
    prompt, do_sample = fields["prompt"], fields.get("do_sample")
    if not isinstance(prompt, str) and not (
        isinstance(prompt, list) and all(type(token) is int for token in prompt)
    ):
        raise ValueError("the prompt must be a string or a list of ids")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ValueError(f"do_sample must be true or false, not {do_sample}")
    if "num_return_sequences" in fields:
        raise ValueError("a line has one output: repeat the line instead of num_return_sequences")
    for name in _RESULT_FIELDS:
        if name in fields:
            raise ValueError(f"{name!r} is a field of the result: rename it in the input")
    names = ("do_sample", "json_schema", *vars(defaults))
    own = {name: value for name, value in fields.items() if name in names}
    if "json_schema" in own:
        own.setdefault("structured_outputs", None)  # it replaces that of --json-schema
    if isinstance(own.get("logit_bias"), dict):  # JSON has strings for keys
        own["logit_bias"] = {
            int(token) if token.isdecimal() else token: bias
            for token, bias in own["logit_bias"].items()
        }
    if do_sample is False:  # the default temperature would contradict it
        own.setdefault("temperature", 0.0)
    params = SamplingParams.from_options(**(vars(defaults) | own))
    params.check()
    return Request(prompt, params)


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Puts file and line number in front of an error."""
    try:
        yield
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{source}: {error}") from error


def _result(completion: "Completion", token_ids: bool) -> dict[str, Any]:
    result = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "token_ids": completion.token_ids if token_ids else None,
        "logprobs": completion.logprobs,
        "top_logprobs": completion.top_logprobs,
    }
    return {name: value for name, value in result.items() if value is not None}


def _print_totals(completions: "list[Completion]", seconds: float) -> None:
    prompt_tokens = sum(completion.prompt_tokens for completion in completions)
    tokens = sum(len(completion.token_ids) for completion in completions)
    for line in (
        f"prompts      {len(completions):>8,}, {prompt_tokens:,} tokens",
        f"generated    {tokens:>8,} tokens {tokens / seconds:>12,.1f} tok/s, prompts included",
        f"peak memory  {max(c.peak_memory for c in completions) / 1e9:>8,.2f} GB",
    ):
        print(line, file=sys.stderr)


@contextmanager
def in_order() -> Iterator[Callable[[int, str], None]]:
    """Yields `write(index, text)`: prints texts in order, each as soon as all before it are there.

    Texts that still wait for an earlier one at the end are printed then.
    """
    waiting: dict[int, str] = {}
    first = 0

    def write(index: int, text: str) -> None:
        nonlocal first
        waiting[index] = text
        while first in waiting:
            print(waiting.pop(first), end="", flush=True)
            first += 1

    try:
        yield write
    finally:
        for _, text in sorted(waiting.items()):
            print(text, end="")


@contextmanager
def _to_file(target: Path, count: int) -> Iterator[Callable[[int, str], None]]:
    """Yields `write(index, line)`: lines go to a partial file at once, to the target at the end.

    The target has them in order. If the run ends early, the partial file keeps finished lines.
    """
    from xlstm7b.files import write_aside

    lines: dict[int, str] = {}
    partial = _partial(target)
    file = partial.open("x", encoding="utf-8")

    def write(index: int, line: str) -> None:
        lines[index] = line
        file.write(line)
        file.flush()

    try:
        with file:
            yield write
        with write_aside(target) as aside:
            aside.write_text("".join(line for _, line in sorted(lines.items())), encoding="utf-8")
    except BaseException:
        if lines:
            kept = f"{partial} holds the {len(lines)} of {count} lines that were finished"
            print(f"xlstm7b: {kept}", file=sys.stderr)
        else:
            partial.unlink()
        raise
    partial.unlink()


def _partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")
