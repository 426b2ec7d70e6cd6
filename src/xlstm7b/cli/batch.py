"""`xlstm7b generate MODEL --jsonl IN --output OUT`: many prompts from one file into another."""

import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xlstm7b.cli.options import ANY_VOCABULARY, count_progress, to_target

if TYPE_CHECKING:
    from xlstm7b.cli.loading import OpenedModel
    from xlstm7b.generate import Completion, Request

_WHOLE = ("max_new_tokens", "min_new_tokens", "top_k", "seed", "logprobs")
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
         "frequency_penalty")  # fmt: skip
_NULLABLE = ("seed", "logprobs", "eos_token_id", "do_sample")
_OUTCOMES = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "token_ids",
             "top_logprobs")  # fmt: skip


class Job(NamedTuple):
    """One line of the input: all its fields, and what they ask for."""

    where: str
    fields: dict[str, Any]
    request: "Request"


def read_jobs(source: str, settings: dict[str, Any], stops: tuple[str, ...]) -> list[Job]:
    """The lines of a file, or of stdin for `-`. What a line does not set is as in `settings`."""
    name = "stdin" if source == "-" else source
    content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    jobs = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            where = f"{name}, line {number}"
            with _located(where):
                fields = _read_object(line)
                jobs.append(Job(where, fields, _to_request(fields, settings, stops)))
    if not jobs:
        raise ValueError(f"{name} holds no prompts")
    return jobs


def encoded(jobs: list[Job], opened: "OpenedModel") -> "list[Request]":
    """The jobs' requests with prompts as ids, checked against the model."""
    from xlstm7b.generate.decoder import check_tokens, with_first_token

    requests = []
    for job in jobs:
        with _located(job.where):
            prompt = job.request.prompt
            ids = opened.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            check_tokens(opened.config, ids)
            with_first_token(opened.config, ids)
            job.request.settings.check(opened.config.vocab_size)
            requests.append(replace(job.request, prompt=ids))
    return requests


def to_output(output: str) -> Path | None:
    """The file to write, None for `-`; what an interrupted run left beside it is not replaced."""
    if output == "-":
        return None
    target = to_target(Path(output))
    if _partial(target).exists():
        raise ValueError(f"{_partial(target)} holds what an earlier run finished: move it first")
    return target


def write_completions(
    opened: "OpenedModel", jobs: list[Job], target: Path | None, *, token_ids: bool, verbose: bool
) -> None:
    """Completes all jobs; each job's line is its fields and what came of it."""
    requests = encoded(jobs, opened)
    generator = opened.load()
    start = time.perf_counter()
    shown = target is not None or not sys.stdout.isatty()
    with (
        count_progress("generating", len(jobs), shown) as advance,
        in_order() if target is None else _to_file(target, len(jobs)) as write,
    ):

        def done(index: int, completion: "Completion") -> None:
            fields = jobs[index].fields | _outcome(completion, token_ids)
            write(index, json.dumps(fields, ensure_ascii=False) + "\n")
            advance()

        completions = generator.run(requests, done=done)
    if verbose:
        _print_totals(completions, time.perf_counter() - start)


def _print_totals(completions: "list[Completion]", seconds: float) -> None:
    read = sum(completion.prompt_tokens for completion in completions)
    written = sum(len(completion.token_ids) for completion in completions)
    for line in (
        f"prompts      {len(completions):>8,}, {read:,} tokens",
        f"generated    {written:>8,} tokens {written / seconds:>12,.1f} tok/s, prompts included",
        f"peak memory  {max(c.peak_memory for c in completions) / 1e9:>8,.2f} GB",
    ):
        print(line, file=sys.stderr)


def _outcome(completion: "Completion", token_ids: bool) -> dict[str, Any]:
    outcome: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
    }
    if token_ids:
        outcome["token_ids"] = completion.token_ids
    if completion.logprobs is not None:
        outcome["logprobs"] = completion.logprobs
    if completion.top_logprobs is not None:
        outcome["top_logprobs"] = completion.top_logprobs
    return outcome


@contextmanager
def in_order() -> Iterator[Callable[[int, str], None]]:
    """Prints in order, each as soon as those before it are there; in the end all that are left."""
    waiting: dict[int, str] = {}
    first = 0

    def write(index: int, line: str) -> None:
        nonlocal first
        waiting[index] = line
        while first in waiting:
            print(waiting.pop(first), end="", flush=True)
            first += 1

    try:
        yield write
    finally:
        for _, line in sorted(waiting.items()):
            print(line, end="")


@contextmanager
def _to_file(target: Path, count: int) -> Iterator[Callable[[int, str], None]]:
    """Lines into a partial file as they come, and in order into the target when all are there.

    Whatever ends us before, the partial file has all that was finished.
    """
    lines: dict[int, str] = {}
    partial, aside = _partial(target), target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    file = partial.open("x", encoding="utf-8")

    def write(index: int, line: str) -> None:
        lines[index] = line
        file.write(line)
        file.flush()

    try:
        with file:
            yield write
        aside.write_text("".join(line for _, line in sorted(lines.items())), encoding="utf-8")
        aside.replace(target)
    except BaseException:
        if lines:
            share = f"{len(lines)} of {count} texts"
            print(f"xlstm7b: {partial} holds what was finished, {share}", file=sys.stderr)
        else:
            partial.unlink()
        raise
    finally:
        aside.unlink(missing_ok=True)
    partial.unlink()


def _partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


@contextmanager
def _located(where: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from error


def _read_object(line: bytes) -> dict[str, Any]:
    fields = json.loads(line.decode("utf-8-sig"))
    if not isinstance(fields, dict):
        raise ValueError('not an object, as in {"prompt": "…"}')
    json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair cannot be written back
    return fields


def _to_request(
    fields: dict[str, Any], settings: dict[str, Any], stops: tuple[str, ...]
) -> "Request":
    from dataclasses import fields as fields_of

    from xlstm7b.generate import SamplingSettings
    from xlstm7b.generate.requests import common_requests

    if "prompt" not in fields:
        raise ValueError('there is no "prompt"')
    prompt, own_stops = fields["prompt"], fields.get("stop_strings", stops)
    if not isinstance(prompt, str) and not _is_list_of(prompt, int):
        raise ValueError("the prompt must be a text or a list of ids")
    if isinstance(own_stops, str):
        own_stops = [own_stops]
    if own_stops is not stops and not (_is_list_of(own_stops, str) and all(own_stops)):
        raise ValueError("stop_strings must be a text or a list of texts, none of them empty")
    if "num_return_sequences" in fields:
        raise ValueError("a line has one text: for more, repeat it instead of num_return_sequences")
    for name in _OUTCOMES:
        if name in fields:
            raise ValueError(f"{name!r} is a field of the result: give this one another name")
    known = ["do_sample", *(field.name for field in fields_of(SamplingSettings))]
    own = {name: _setting(name, value) for name, value in fields.items() if name in known}
    if own.get("do_sample") is False:
        own.setdefault("temperature", 0.0)
    [request] = common_requests([prompt], own_stops, settings | own)
    request.settings.check(ANY_VOCABULARY)
    return request


def _setting(name: str, value: Any) -> Any:
    """A sampling setting from its JSON value, of the type that it should be of."""
    if value is None and name in _NULLABLE:
        return None
    if name == "logit_bias" and isinstance(value, dict):
        if all(_is_number(bias) and token.isdecimal() for token, bias in value.items()):
            return {int(token): float(bias) for token, bias in value.items()}
    elif name in _REAL and _is_number(value):
        return float(value)
    elif name in (*_WHOLE, "eos_token_id") and _is_number(value, int):
        return value
    elif name == "eos_token_id" and _is_list_of(value, int):
        return tuple(value)
    elif name == "do_sample" and isinstance(value, bool):
        return value
    wanted = {
        "logit_bias": "numbers by token",
        "eos_token_id": "an id or a list of ids",
        "do_sample": "true or false",
    }
    kind = wanted.get(name, "a whole number" if name in _WHOLE else "a number")
    raise ValueError(f"{name} must be {kind}, not {json.dumps(value)}")


def _is_number(value: Any, kind: type = float) -> bool:
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )
