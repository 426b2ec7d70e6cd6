"""`xlstm7b generate MODEL --jsonl IN --output OUT`: complete every line of a file."""

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xlstm7b.cli.compiling import compiling_shown
from xlstm7b.cli.options import count_progress, read_input
from xlstm7b.generate.params import SamplingParams
from xlstm7b.report import counted

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


def read_lines(path: str, defaults: SamplingParams, copied: Sequence[str] = ()) -> list[Line]:
    """Reads a JSONL file, or stdin for `-`. Lines can override the default sampling parameters.

    `copied` are other fields that a line may have.
    """
    if path == "-":
        name, content = "stdin", sys.stdin.buffer.read()
    else:
        hint = "; --jsonl takes a JSONL file, or - for stdin"
        name, content = path, read_input(Path(path), hint)
    lines = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            source = f"{name}, line {number}"
            with _naming(source):
                fields = _read_object(line)
                lines.append(Line(source, fields, _to_request(fields, defaults, copied)))
    if not lines:
        raise ValueError(f"{name} holds no prompts")
    return lines


def check_output(target: Path) -> None:
    """`ValueError` if the file holds something, except if an interrupted run may continue."""
    is_new = not target.exists() or not target.stat().st_size  # `mktemp` makes an empty file
    if not is_new and not _partial(target).exists():
        raise ValueError(f"{target} exists already: choose another file")


def _partial(target: Path) -> Path:
    """Where finished lines are until the last one is. The same command continues it."""
    return target.with_name(f"{target.name}.partial")


def complete_lines(
    opened: "OpenedModel", lines: list[Line], target: Path | None, *, token_ids: bool, verbose: bool
) -> None:
    """Generates for all lines and writes each with its result. `target` None is stdout.

    Lines that an interrupted run has finished are taken from its partial file. A summary on stderr
    closes the run.
    """
    ends = opened.end_ids()
    for line in lines:
        request = line.request
        if request.params.eos_token_id is None:
            request.params = replace(request.params, eos_token_id=ends)
        with _naming(line.source):
            request.prepare(opened.config, opened.tokenizer)
    shown = target is not None or not sys.stdout.isatty()
    with (
        _to_stdout() if target is None else _to_file(target, lines, opened, token_ids) as output,
        count_progress("generating", len(lines), shown) as advance,
    ):
        finished, write = output
        advance(len(finished))
        missing = [index for index in range(len(lines)) if index not in finished]

        def done(number: int, completion: "Completion") -> None:
            index = missing[number]
            write(index, lines[index].fields | _result(completion, token_ids))
            advance()

        start = time.perf_counter()
        requests = [lines[index].request for index in missing]
        generator = opened.load() if requests else None
        completions: list[Completion] = []
        if generator is not None:
            with compiling_shown(generator.device, bar=False):
                completions = generator.run(requests, done=done)
        seconds = time.perf_counter() - start
    _print_summary(completions, len(finished), seconds)
    if verbose and generator:
        memory = max(completion.peak_memory for completion in completions)
        print(f"peak memory  {memory / 1e9:>8,.2f} GB", file=sys.stderr)
        if generator.speculate is not None:
            print(drafted_line(completions), file=sys.stderr)


def drafted_line(completions: Sequence["Completion"]) -> str:
    """How many tokens were drafted by speculation, for --verbose."""
    drafted = sum(completion.drafted_tokens for completion in completions)
    accepted = sum(completion.accepted_tokens for completion in completions)
    return f"drafted      {drafted:>8,} tok, of which {accepted:,} were accepted"


def _read_object(line: bytes) -> dict[str, Any]:
    fields = json.loads(line.decode("utf-8-sig"))
    if not isinstance(fields, dict):
        raise ValueError('a line must be a JSON object such as {"prompt": "…"}')
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{name!a} is not valid Unicode: it has half of a surrogate pair"
            ) from None
    return fields


def _to_request(
    fields: dict[str, Any], defaults: SamplingParams, copied: Sequence[str]
) -> "Request":
    from xlstm7b.generate import Request

    if "prompt" not in fields:
        raise ValueError('"prompt" is missing')
    prompt, do_sample = fields["prompt"], fields.get("do_sample")
    speculate = fields.get("speculate")
    if not isinstance(prompt, str) and not (
        isinstance(prompt, list) and all(type(token) is int for token in prompt)
    ):
        raise ValueError("the prompt must be a string or a list of ids")
    for name, value in (("do_sample", do_sample), ("speculate", speculate)):
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {json.dumps(value)}")
    if "num_return_sequences" in fields:
        raise ValueError("a line has one output: repeat the line instead of num_return_sequences")
    for name in _RESULT_FIELDS:
        if name in fields:
            raise ValueError(f"{name!r} is a field of the result: rename it in the input")
    names = ("do_sample", "json_schema", *vars(defaults))
    for name in fields:
        if name not in ("prompt", "speculate", *names, *copied):
            raise ValueError(
                f"{name!r} is not a sampling parameter; if it should be copied to the output, name "
                "it in --copy-fields"
            )
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
    for name, value in fields.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError(
                f"{name!r} has a number that is NaN or too large for a float, which cannot be "
                "written to the output"
            ) from None
    return Request(prompt, params, speculate=speculate is not False)


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


def _print_summary(completions: "list[Completion]", before: int, seconds: float) -> None:
    reasons = Counter(completion.finish_reason for completion in completions)
    ended = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
    prompt_tokens = sum(completion.prompt_tokens for completion in completions)
    tokens = sum(len(completion.token_ids) for completion in completions)
    summary = f"{counted(len(completions), 'line')} completed{f' ({ended})' if ended else ''}"
    if before:
        summary += f", {before:,} there already"
    summary += f"; {counted(prompt_tokens, 'prompt token')}, {counted(tokens, 'generated token')}"
    summary += f" in {seconds:,.1f} s, {tokens / max(seconds, 1e-9):,.1f} tok/s"
    print(f"xlstm7b: {summary}", file=sys.stderr)


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


_Write = Callable[[int, dict[str, Any]], None]
_Output = tuple[Collection[int], _Write]
"""The lines that are finished already, and a function that writes one more."""


@contextmanager
def _to_stdout() -> Iterator[_Output]:
    with in_order() as write:
        yield (), lambda index, fields: write(index, _to_json(fields))


@contextmanager
def _to_file(
    target: Path, lines: list[Line], opened: "OpenedModel", token_ids: bool
) -> Iterator[_Output]:
    """Lines go to a partial file at once, to the target at the end, in order.

    If the run ends early, the partial file keeps finished lines, and the same command continues.
    Its first line is a hash of everything that the results depend on. The others are an index and a
    result: `[3, {"prompt": …}]`.
    """
    from xlstm7b.files import lock, write_aside, write_hashed

    partial = _partial(target)
    run = _hash_run(lines, opened, token_ids)
    # Without a buffer: closing the file would try to write what did not fit on the disk again.
    with partial.open("a+b", buffering=0) as file:
        try:
            lock(file)
        except BlockingIOError:
            raise ValueError(f"another run is writing {partial}") from None
        results = _read_partial(file, partial, run, len(lines))
        before = len(results)
        if before:
            print(
                f"xlstm7b: continuing {partial}, which holds {before} of "
                f"{counted(len(lines), 'line')}",
                file=sys.stderr,
            )

        def write(index: int, fields: dict[str, Any]) -> None:
            _append(file, partial, [index, fields])
            results[index] = fields

        try:
            yield frozenset(results), write
            with write_aside(target) as aside:
                write_hashed(
                    aside, (_to_json(line).encode() for _, line in sorted(results.items()))
                )
        except BaseException:
            if results:
                kept = f"holds {len(results)} of {counted(len(lines), 'line')}"
                print(f"xlstm7b: {partial} {kept}; the same command continues", file=sys.stderr)
            else:
                partial.unlink()
            raise
        partial.unlink()


def _append(file: FileIO, path: Path, value: Any) -> None:
    """Appends a line of JSON. An error names the file."""
    from xlstm7b.files import naming

    rest = memoryview(_to_json(value).encode())
    with naming(path):
        while rest:  # a raw file may write a part
            rest = rest[file.write(rest) :]


def _read_partial(file: FileIO, path: Path, run: str, count: int) -> dict[int, dict[str, Any]]:
    """The results in a partial file, by index. An unfinished last line is cut off."""
    file.seek(0)
    content = file.read()
    if not content:
        _append(file, path, run)
        return {}
    whole = content[: content.rfind(b"\n") + 1]
    try:
        first, *others = map(json.loads, whole.splitlines())
        results = dict[int, dict[str, Any]](others)
    except (ValueError, TypeError):
        first, results = None, {}
    if first != run or not results.keys() <= {*range(count)}:
        raise ValueError(
            f"{path} holds the results of another input, model or sampling options: repeat its "
            "command to continue it, or move the file away"
        )
    file.truncate(len(whole))
    return results


def _hash_run(lines: list[Line], opened: "OpenedModel", token_ids: bool) -> str:
    """A hash of everything that the results depend on, except for the weights' values."""
    adapter = None if opened.adapter is None else opened.adapter.fingerprint
    model = [str(opened.folder), adapter, str(opened.dtype), str(opened.state_dtype)]
    requests = [[line.fields, repr(line.request.params)] for line in lines]
    described = _to_json([model, token_ids, requests])
    return hashlib.sha256(described.encode()).hexdigest()


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
