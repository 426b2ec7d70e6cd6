"""`process_files`: generation and scoring of many JSONL files by Ray Data, on one machine or many.

A part is some consecutive lines of one input file. Each worker has one `Generator` and processes
one part at a time. The results of a part are one file, which gets its name when it is complete. So
an interrupted part leaves no file, a part that ran twice leaves one, and a second run processes
only the parts whose files are missing.

Workers read the inputs and write the results themselves: all machines need the same file system.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from xlstm7b.files import lock_folder, naming, write_aside, write_json
from xlstm7b.generate import Generator, Request, SamplingParams
from xlstm7b.model.saved_state import SavedState
from xlstm7b.tokenizer import with_first_token

_RUN_FILE = "run.json"
_RESULT_FIELDS = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "logprob")
_KEPT_STATES = 8  # of shared prompts, in a worker


@dataclass(frozen=True)
class Work:
    """What is done with each line.

    A line is a JSON object with a `prompt`. It may have a `prefix`, a text that comes before the
    prompt. Other lines may share it: each worker reads it once and keeps the state. Other fields
    are copied to the result.

    Args:
        model: Checkpoint folder or hub id.
        score: Compute the log-probability of the prompt after the prefix, instead of continuing it.
        sampling: Fields of `SamplingParams`.
        batch_size: Lines that a worker processes at the same time.
        device: Of the weights: "cuda" or "cpu". None: a GPU if there is one.
    """

    model: str
    score: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    device: str | None = None


@dataclass(frozen=True)
class Part:
    """Lines of one file, and the name of the file with their results."""

    name: str
    file: str
    first_byte: int
    lines: int


def process_files(
    files: Sequence[str | Path],
    output: str | Path,
    work: Work,
    *,
    workers: int = 1,
    gpus_per_worker: float = 0,
    lines_per_part: int = 256,
) -> list[Path]:
    """Processes every line of these files; returns the files with the results, in order.

    The files are checked first: a `ValueError` names the first bad line. `output` is a folder. If
    it holds results of an earlier run with the same arguments, only the missing parts are done.
    `workers` and `gpus_per_worker` may differ from that run.
    """
    if workers < 1 or lines_per_part < 1 or work.batch_size < 1:
        raise ValueError("workers, lines_per_part and batch_size must be at least 1")
    SamplingParams.from_options(**work.sampling).check()
    parts, digest = _plan(files, lines_per_part)
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    with lock_folder(output, "writing results to"):
        _check_run(output, {"work": asdict(work), "lines": lines_per_part, "input": digest})
        missing = [part for part in parts if not (output / part.name).exists()]
        if missing:
            import ray.data

            # Workers may run in another folder. What is no folder is a hub id.
            folder = Path(work.model)
            model = str(folder.resolve()) if folder.is_dir() else work.model
            items = [asdict(part) for part in missing]
            options = {"num_gpus": gpus_per_worker} if gpus_per_worker else {}
            done = ray.data.from_items(items, override_num_blocks=len(items)).map(
                Worker,
                fn_constructor_args=(replace(work, model=model), str(output.resolve())),
                compute=ray.data.ActorPoolStrategy(size=min(workers, len(items))),
                **options,
            )
            for _ in done.iter_rows():
                pass
        for left in output.glob(".*.jsonl.*"):  # of workers that were killed while they wrote
            left.unlink()
    return [output / part.name for part in parts]


class Worker:
    """One process of the run: a model, and the states of the prefixes that it saw last."""

    def __init__(self, work: Work, output: str) -> None:
        self.work, self.output = work, Path(output)
        self.generator = Generator.from_pretrained(
            work.model, device=work.device, batch_size=work.batch_size
        )
        self.params = SamplingParams.from_options(**work.sampling)
        self._read = lru_cache(_KEPT_STATES)(lambda prefix: self.generator.read([prefix]))

    def __call__(self, part: dict[str, Any]) -> dict[str, Any]:
        """Processes a part and writes its file. Returns its name."""
        lines = list(_read(Part(**part)))
        results = (self.score if self.work.score else self.generate)(lines)
        target = self.output / part["name"]
        with (
            write_aside(target) as aside,
            naming(target),
            aside.open("w", encoding="utf-8") as file,
        ):
            for line, result in zip(lines, results, strict=True):
                file.write(json.dumps(line | result, ensure_ascii=False) + "\n")
        return {"name": part["name"]}

    def generate(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        requests = [
            Request(line["prompt"], self.params, state=self.state_after(line.get("prefix", "")))
            for line in lines
        ]
        return [
            {
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "prompt_tokens": completion.prompt_tokens,
                "completion_tokens": len(completion.token_ids),
            }
            for completion in self.generator.run(requests)
        ]

    def score(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The sum of the log-probabilities of the prompt's tokens, and how many there are."""
        results: list[dict[str, Any]] = []
        for start in range(0, len(lines), self.work.batch_size):
            results += self._score_batch(lines[start : start + self.work.batch_size])
        return results

    @torch.inference_mode()
    def _score_batch(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        generator, rows = self.generator, len(lines)
        states = [self.state_after(line.get("prefix", "")) or self._first_state for line in lines]
        texts = [
            generator.tokenizer.encode(line["prompt"], continues=state.has_text)
            for line, state in zip(lines, states, strict=True)
        ]
        # 1. The first token of each text: the states have the logits before it.
        lengths = torch.tensor([len(text) for text in texts])
        tokens = torch.zeros(rows, max(int(lengths.max()), 2), dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text, dtype=torch.long)
        tokens = tokens.to(generator.device)
        state = SavedState.cat([state.to(generator.device) for state in states])
        first = state.logits.float().log_softmax(-1).gather(1, tokens[:, :1]).squeeze(1)
        total = first.masked_fill((lengths == 0).to(generator.device), 0)
        # 2. The others: each is a target of the token before it.
        others, _ = generator.model.token_logprobs(
            tokens[:, :-1],
            tokens[:, 1:],
            state.model_state,
            lengths=(lengths - 1).clamp(min=0).to(generator.device),
        )
        total = total + others.sum(1)
        return [
            {"logprob": logprob, "prompt_tokens": len(text)}
            for logprob, text in zip(total.tolist(), texts, strict=True)
        ]

    def state_after(self, prefix: str) -> SavedState | None:
        """The state after this text, which is read once. None for no text."""
        return self._read(prefix) if prefix else None

    @cached_property
    def _first_state(self) -> SavedState:
        """The state after the model's first token."""
        return self.generator.read([with_first_token(self.generator.config, [])])


def _plan(files: Sequence[str | Path], lines_per_part: int) -> tuple[list[Part], str]:
    """The parts of all files, which are checked line by line, and a hash of their content."""
    if not files:
        raise ValueError("there are no files to process")
    parts, digest = [], hashlib.sha256()
    for number, file in enumerate(map(Path, files)):
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
        first_byte = position = line_number = 0
        with file.open("rb") as opened:
            for line in opened:
                if line_number and line_number % lines_per_part == 0:
                    parts.append(_part(number, file, line_number, first_byte, lines_per_part))
                    first_byte = position
                position += len(line)
                line_number += 1
                digest.update(line)
                _to_fields(line, f"{file}, line {line_number}")
        if line_number:
            rest = line_number % lines_per_part or lines_per_part
            parts.append(_part(number, file, line_number, first_byte, rest))
        digest.update(b"\0")
    if not parts:
        raise ValueError("the files hold no lines")
    return parts, digest.hexdigest()


def _part(number: int, file: Path, end: int, first_byte: int, lines: int) -> Part:
    """`lines` lines before line `end`. Sorted names are in the order of the input."""
    name = f"{number:05}-{end - lines:09}.jsonl"
    return Part(name, str(file.resolve()), first_byte, lines)


def _read(part: Part) -> Iterator[dict[str, Any]]:
    with Path(part.file).open("rb") as file:
        file.seek(part.first_byte)
        for number in range(part.lines):
            yield _to_fields(file.readline(), f"{part.name}, line {number + 1}")


def _to_fields(line: bytes, source: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
        json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair cannot be written
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise ValueError(f'{source} must be a JSON object such as {{"prompt": "…"}}')
    if not isinstance(fields.get("prefix", ""), str):
        raise ValueError(f"{source}: the prefix must be a string, not {fields['prefix']!r}")
    for name in _RESULT_FIELDS:
        if name in fields:
            raise ValueError(f"{source}: {name!r} is a field of the result: rename it in the input")
    return fields


def _check_run(output: Path, run: dict[str, Any]) -> None:
    """Writes what the results depend on, or compares it with what an earlier run has written."""
    path = output / _RUN_FILE
    if not path.exists():
        if any(output.glob("*.jsonl")):
            raise ValueError(f"{output} holds .jsonl files of something else: give a new folder")
        write_json(path, run)
    elif json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(run)):
        raise ValueError(
            f"{output} holds the results of another input, model or options: repeat the command "
            "of that run to continue it, or give a new folder"
        )
