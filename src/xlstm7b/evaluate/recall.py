"""Associative recall over long sequences: tasks on which a small model can be trained in minutes.

A sequence holds pairs of a key and a value at random positions in filler, then asks for values by
their keys. Two tasks differ in the filler and in what is around pairs and questions:

    recall   # # 7:3 # # # # 2:9 # # # 2 → 9, 7 → 3               # is a random letter
    needle   Book text. The code: 7:3. More book text. The code: 7 → 3.

A pair is one token, and so are a key and a value. So the memory of a single layer is enough, and
that memory is what is measured. (With key and value as two tokens, a model must first learn to
bind neighbours, which small models without a convolution do not do in minutes.)

    id 0         end of text, also the first token
    id 1         padding
    id 2 …       the 256 bytes of text
    id 258 …     keys, then values, then pairs

Only answers count in the loss. The length of a sequence counts the first token, as
`data.context_length` does. A model answers with the most likely value, so guessing is right once in
`values` times.
"""

import hashlib
import json
import math
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from xlstm7b.data.shards import MANIFEST, ShardWriter, write_manifest
from xlstm7b.evaluate.perplexity import read_documents
from xlstm7b.evaluate.scoring import MAX_CHUNK_LOGITS, Progress
from xlstm7b.files import json_bytes, replacing
from xlstm7b.model import XLSTM
from xlstm7b.report import counted

FIRST_BYTE, FIRST_KEY = 2, 258
_MOST_TEXT = 1 << 26  # bytes of the given text files that are used
_HELD_OUT = 10  # the last tenth of the text is for validation and evaluation

Task = Literal["recall", "needle"]
Ids = NDArray[np.int64]
Text = NDArray[np.uint8]
Positive = Annotated[int, Field(ge=1)]
Length = Annotated[int, Field(ge=16)]


class _Settings(BaseModel):
    """What the sequences are made of. Training and evaluation must agree on keys and values."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    keys: Positive = 128
    """Number of different keys, at least the pairs of a sequence."""
    values: Annotated[int, Field(ge=2)] = 16
    """Number of different values."""
    texts: tuple[str, ...] = ()
    """Files and folders with the text of the needle task, as `xlstm7b prepare` reads them. Empty:
    the sources of the Python standard library."""
    seed: Annotated[int, Field(ge=0)] = 0

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """`ValueError` with one sentence for the first mistake."""
        try:
            return cls.model_validate(_with_tuples(settings))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                raise ValueError(f"recall: unknown setting {name}; known: {known}") from error
            if first["type"] == "value_error":
                raise ValueError(f"recall: {first['ctx']['error']}") from error
            wanted = first["msg"].removeprefix("Input should be ")
            raise ValueError(f"recall: {name} must be {wanted}, not {first['input']!r}") from error

    @property
    def vocab_size(self) -> int:
        return self.first_pair + self.keys * self.values

    @property
    def first_value(self) -> int:
        return FIRST_KEY + self.keys

    @property
    def first_pair(self) -> int:
        return self.first_value + self.values


class TrainingSettings(_Settings):
    """The sequences to train on. Each context length has a folder of its own.

    Lengths are `shortest`, twice that, and so on to the context length. Each length and task has
    the same share of the tokens, so there are many short sequences, from which a model learns what
    to do. The number of pairs is drawn between 1 and the maximum, small numbers more often.
    """

    tasks: tuple[Task, ...] = get_args(Task)
    context_lengths: tuple[Length, ...] = (2048, 8192)
    shortest: Length = 64
    pairs: Positive = 64
    """The maximum of the recall task."""
    needles: Positive = 8
    """The maximum of the needle task."""
    tokens: Positive = 1 << 25
    """Tokens of each context length."""
    validation_tokens: Positive = 1 << 18

    def lengths(self, context: int) -> list[int]:
        """The lengths of sequences for a context length."""
        return [self.shortest << n for n in range((context // self.shortest).bit_length())]

    @model_validator(mode="after")
    def check(self) -> Self:
        _check_listed("tasks", self.tasks)
        _check_listed("context_lengths", self.context_lengths)
        _check_keys(self.keys, max(self.pairs, self.needles))
        for length in self.context_lengths:
            if length not in self.lengths(length):
                raise ValueError(
                    f"context length {length} is not {self.shortest} (shortest) times a power of 2"
                )
        for task in self.tasks:
            if not _most_pairs(task, self.shortest):
                least = 1 + _FRAMES[task].size
                raise ValueError(
                    f"shortest must be at least {least} for the {task} task, not {self.shortest}"
                )
        return self


class EvaluationSettings(_Settings):
    """The sequences to evaluate on. The lengths of a task are those in which its pairs fit."""

    lengths: tuple[Length, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    pairs: tuple[Positive, ...] = (16, 64)
    """Numbers of pairs of the recall task, each measured on its own. Empty: no recall task."""
    needles: Annotated[int, Field(ge=0)] = 4
    """Number of pairs of the needle task. 0: no needle task."""
    samples: Positive = 128
    """Sequences of each length."""
    batch_size: Positive = 32

    @model_validator(mode="after")
    def check(self) -> Self:
        _check_listed("lengths", self.lengths)
        if len(set(self.pairs)) < len(self.pairs):
            raise ValueError(f"pairs has a number twice: {list(self.pairs)}")
        _check_keys(self.keys, max(self.needles, *self.pairs, 0))
        if not self.series():
            raise ValueError(f"none of the tasks fits into {counted(max(self.lengths), 'token')}")
        return self

    def series(self) -> dict[str, tuple[Task, int, list[int]]]:
        """Task, number of pairs and lengths by the name that the results have."""
        named: dict[str, tuple[Task, int]] = {f"recall {n}": ("recall", n) for n in self.pairs}
        if self.needles:
            named[f"needle {self.needles}"] = "needle", self.needles
        fitting = {
            name: (task, count, [n for n in self.lengths if count <= _most_pairs(task, n)])
            for name, (task, count) in named.items()
        }
        return {name: found for name, found in fitting.items() if found[2]}


class Sample(NamedTuple):
    """A sequence without its first token and its end of text: `length` − 1 tokens."""

    tokens: Ids
    answers: Ids  # positions of the answers in `tokens`


class Sampler:
    """Draws sequences. The same seed gives the same ones; `held_out` ones have other text."""

    def __init__(self, settings: _Settings, *, held_out: bool) -> None:
        self._settings, self._held_out = settings, held_out
        self._text: Text | None = None  # read when it is needed

    def samples(self, task: Task, length: int, pairs: int, *, exactly: bool) -> Iterator[Sample]:
        """Endless sequences with `pairs` pairs, or with 1 to `pairs`, as far as they fit."""
        most = min(pairs, _most_pairs(task, length))
        sequence = [self._settings.seed, self._held_out, list(_FRAMES).index(task), length, pairs]
        rng = np.random.default_rng(sequence)
        while True:
            # Log-uniform: 1 is as likely as 64 to 127.
            count = most if exactly else int(math.exp(rng.random() * math.log(most + 1)))
            # In training a key may be asked twice. If each were asked once, a model could exclude
            # the values that were answers before, and would learn that instead of recall.
            asked = rng.permutation(count) if exactly else rng.integers(count, size=count)
            yield self._draw(rng, task, length, asked)

    def _draw(self, rng: np.random.Generator, task: Task, length: int, asked: Ids) -> Sample:
        frame, settings, count = _FRAMES[task], self._settings, len(asked)
        keys = rng.permutation(settings.keys)[:count]
        values = rng.integers(settings.values, size=count)
        # 1. The pairs and the questions with their answers.
        stated = np.tile(frame.statement, (count, 1))
        stated[:, frame.offset] = settings.first_pair + keys * settings.values + values
        questions = np.tile(frame.question, (count, 1))
        questions[:, frame.offset] = FIRST_KEY + keys[asked]
        questions[:, frame.offset + 1] = settings.first_value + values[asked]
        # 2. The filler, and the positions of the pairs in it.
        left = length - 1 - stated.size - questions.size
        if task == "needle":
            filler = self._excerpt(rng, left)
            starts = np.flatnonzero(np.isin(filler, _SPACES)) + 1
        else:
            filler = rng.choice(_LETTERS, left)
            starts = np.arange(left + 1)
        if not len(starts):
            starts = np.zeros(1, np.int64)
        chosen = np.sort(rng.choice(starts, count, replace=len(starts) < count))
        # 3. All together.
        ids = FIRST_BYTE + filler.astype(np.int64)
        body = np.insert(ids, chosen.repeat(stated.shape[1]), stated.ravel())
        answers = len(body) + frame.offset + 1 + questions.shape[1] * np.arange(count)
        return Sample(np.concatenate([body, questions.ravel()]), answers)

    def _excerpt(self, rng: np.random.Generator, size: int) -> Text:
        """Consecutive bytes of the text, from a random position; after its end, its beginning."""
        if self._text is None:
            self._text = read_text(self._settings.texts, held_out=self._held_out)
        start = int(rng.integers(len(self._text)))
        excerpt = self._text[start : start + size]
        while len(excerpt) < size:
            excerpt = np.concatenate([excerpt, self._text[: size - len(excerpt)]])
        return excerpt


class _Frame(NamedTuple):
    """A pair as it is stated and asked."""

    statement: Ids
    question: Ids
    offset: int  # of the pair and of the asked key; the answer is the token after the key

    @property
    def size(self) -> int:
        """Tokens of a pair and its question."""
        return len(self.statement) + len(self.question)


def _frame(before: bytes, after: bytes) -> _Frame:
    """`before` and `after` are around the pair, and around the key and its answer."""
    statement, question = (
        FIRST_BYTE + np.frombuffer(before + marks + after, np.uint8).astype(np.int64)
        for marks in (b"?", b"??")
    )
    return _Frame(statement, question, len(before))


_FRAMES: dict[Task, _Frame] = {
    "recall": _frame(b"", b""),
    "needle": _frame(b"The code: ", b". "),
}
_SPACES = np.frombuffer(b" \n", np.uint8)
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)


def _most_pairs(task: Task, length: int) -> int:
    """The number of pairs that fit into a sequence, with their questions."""
    return (length - 1) // _FRAMES[task].size


def read_text(texts: Sequence[str], *, held_out: bool) -> Text:
    """The bytes of the given files, or of Python's standard library; the last tenth is held out."""
    if texts:
        documents = (document.encode() for document in read_documents(texts))
    else:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        documents = (source.read_bytes() for source in sources)
    pieces, size = [], 0
    for document in documents:
        pieces.append(document)
        size += len(document) + 1
        if size > _MOST_TEXT:
            break
    text = np.frombuffer(b"\n".join(pieces)[:_MOST_TEXT], np.uint8)
    cut = len(text) - len(text) // _HELD_OUT
    part = text[cut:] if held_out else text[:cut]
    if not len(part):
        raise ValueError(
            f"recall: the text of the needle task has only {counted(len(text), 'byte')}"
        )
    return part


def check_settings(data: Mapping[str, Any] | None, evaluate: Mapping[str, Any] | None) -> None:
    """Checks the settings of training and evaluation, and that they have the same ids."""
    training = None if data is None else TrainingSettings.read(data)
    evaluation = None if evaluate is None else EvaluationSettings.read(evaluate)
    if training is None or evaluation is None:
        return
    for name in ("keys", "values"):
        trained, evaluated = getattr(training, name), getattr(evaluation, name)
        if trained != evaluated:
            raise ValueError(
                f"recall: {name} must be the same in [data] and [evaluate], not {trained} and "
                f"{evaluated}"
            )


# Training data


def write_task(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes LENGTH/train and LENGTH/valid below `folder` for each context length.

    They are folders of shards as `xlstm7b prepare` writes them, whose loss counts answers (and, as
    in every folder, ends of text). Train with `data.packing = "best-fit"`, which cuts no sequence.
    Folders that are complete are kept.
    """
    chosen = TrainingSettings.read(settings)
    for context in chosen.context_lengths:
        for part, tokens in (("train", chosen.tokens), ("valid", chosen.validation_tokens)):
            _write_folder(folder / str(context) / part, chosen, context, tokens, part == "valid")


def _write_folder(
    folder: Path, settings: TrainingSettings, context: int, tokens: int, held_out: bool
) -> None:
    about = {**settings.model_dump(mode="json"), "context_length": context, "tokens": tokens}
    digest = hashlib.sha256(json_bytes(about)).hexdigest()
    if folder.exists():
        manifest = folder / MANIFEST
        if not manifest.exists() or json.loads(manifest.read_bytes()).get("plan") != digest:
            raise ValueError(
                f"{folder} was not written with these settings: remove it, or write elsewhere"
            )
        return
    with replacing(folder, dropped=lambda name: False) as aside:
        writer = ShardWriter(aside / "00000.ds", vocab_size=settings.vocab_size, has_mask=True)
        with writer:
            for sample in _training_samples(settings, context, tokens, held_out):
                mask = np.zeros(len(sample.tokens), np.uint8)
                mask[sample.answers] = 1
                writer.add(sample.tokens, mask)
        write_manifest(
            aside,
            [writer.entry],
            vocab_size=settings.vocab_size,
            tokenizer_fingerprint=f"recall of {settings.keys} keys and {settings.values} values",
            plan=digest,
        )


def _training_samples(
    settings: TrainingSettings, context: int, tokens: int, held_out: bool
) -> Iterator[Sample]:
    """The longest first: so windows of the context length cut no sequence in this order."""
    sampler = Sampler(settings, held_out=held_out)
    lengths = settings.lengths(context)
    for length in reversed(lengths):
        for task in settings.tasks:
            most = settings.pairs if task == "recall" else settings.needles
            count = max(1, tokens // len(lengths) // len(settings.tasks) // length)
            yield from islice(sampler.samples(task, length, most, exactly=False), count)


# Evaluation


def evaluate(
    model: XLSTM, settings: Mapping[str, Any], progress: Progress | None = None
) -> dict[str, dict[str, dict[str, float | int]]]:
    """Accuracy with its 95% interval for each task and length. `chance` is that of guessing.

        {"recall 64": {"512": {"accuracy": 0.98, "low": 0.94, "high": 1.0, "chance": 0.0625,
                               "samples": 128}, …}, …}

    On a GPU the model computes in bfloat16. Sequences are read in chunks, so memory does not grow
    with the length. `progress` gets the number of sequences that were just read.
    """
    chosen = EvaluationSettings.read(settings)
    if model.config.vocab_size < chosen.vocab_size:
        raise ValueError(
            f"recall: {counted(chosen.keys, 'key')} and {counted(chosen.values, 'value')} need a "
            "vocabulary of "
            f"{chosen.vocab_size}, but the model has {model.config.vocab_size}"
        )
    sampler = Sampler(chosen, held_out=True)
    results: dict[str, dict[str, dict[str, float | int]]] = {}
    for name, (task, pairs, lengths) in chosen.series().items():
        results[name] = {}
        for length in lengths:
            samples = sampler.samples(task, length, pairs, exactly=True)
            right = 0
            for start in range(0, chosen.samples, chosen.batch_size):
                batch = [*islice(samples, min(chosen.batch_size, chosen.samples - start))]
                right += _right_answers(model, chosen, batch)
                if progress is not None:
                    progress(len(batch))
            accuracy = right / (chosen.samples * pairs)
            low, high = wilson(accuracy, chosen.samples)
            results[name][str(length)] = {
                "accuracy": accuracy,
                "low": low,
                "high": high,
                "chance": 1 / chosen.values,
                "samples": chosen.samples,
            }
    return results


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share that was measured on `count` independent samples.

    Here a sample is a sequence: its answers are not independent of each other.
    """
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


@torch.inference_mode()
def _right_answers(model: XLSTM, settings: _Settings, samples: Sequence[Sample]) -> int:
    """The number of right answers, over all samples of a batch."""
    device = model.lm_head.weight.device
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples])).to(device)
    is_answer = torch.zeros_like(tokens, dtype=torch.bool)
    answers = torch.from_numpy(np.stack([sample.answers for sample in samples])).to(device)
    is_answer.scatter_(1, answers, True)
    first = torch.full_like(tokens[:, :1], model.config.bos_token_id)
    inputs = torch.cat([first, tokens[:, :-1]], 1)  # the last answer is never read
    values = slice(settings.first_value, settings.first_pair)
    size = max(1, MAX_CHUNK_LOGITS // model.config.vocab_size // len(samples))
    right, state = torch.zeros((), dtype=torch.long, device=device), None
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for start in range(0, inputs.shape[1], size):
            chunk = slice(start, start + size)
            logits, state = model(inputs[:, chunk], state)
            chosen = settings.first_value + logits[..., values].argmax(-1)
            right += ((chosen == tokens[:, chunk]) & is_answer[:, chunk]).sum()
    return int(right)


# Checks of settings


def _with_tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    """TOML and JSON have lists where the settings have tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


def _check_listed(name: str, values: Sequence[object]) -> None:
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must have at least one value, each only once: {list(values)}")


def _check_keys(keys: int, pairs: int) -> None:
    if pairs > keys:
        raise ValueError(f"{pairs} pairs need as many keys, but keys is {keys}")
