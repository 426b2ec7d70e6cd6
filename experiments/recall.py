"""Recall over long sequences: how many of the pairs that it has read a small model remembers.

    python experiments/recall.py --list
    python experiments/recall.py recall-gate --smoke          # on a CPU, in seconds
    python experiments/recall.py recall-gate                  # on a GPU, in minutes

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
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from variants import (
    SMOKE,
    Changes,
    Listed,
    Name,
    Output,
    Settings,
    Shape,
    Smoke,
    Steps,
    Variants,
    changes_of,
    check_same,
    choose,
    failures_recorded,
    known,
    open_results,
    print_list,
    recipe_of,
    shape_of,
    show,
    train,
)
from xlstm7b.bench.results import Results
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, option
from xlstm7b.cli.train import Device, to_training_device
from xlstm7b.data.shards import MANIFEST, ShardWriter, write_manifest
from xlstm7b.evaluate.perplexity import read_documents
from xlstm7b.evaluate.scoring import MAX_CHUNK_LOGITS
from xlstm7b.files import json_bytes, replacing
from xlstm7b.model import XLSTM
from xlstm7b.report import counted
from xlstm7b.train import Recipe
from xlstm7b.train.run_checkpoints import read_model, step_folder

FIRST_BYTE, FIRST_KEY = 2, 258
_MOST_TEXT = 1 << 26  # bytes of the given text that are used
_HELD_OUT = 10  # the last tenth of the text is for validation and evaluation

Ids = NDArray[np.int64]
Text = NDArray[np.uint8]


@dataclass(frozen=True)
class Task:
    """What sequences are made of, and how many there are."""

    keys: int = 128  # different keys, at least as many as the pairs of a sequence
    values: int = 16
    text: str | None = None  # file or folder for the needles; None: Python's standard library
    seed: int = 0
    # To train on: lengths are `shortest`, twice that, and so on to the context length. Each length
    # and task has the same share of the tokens, so there are many short sequences, from which a
    # model learns what to do. The number of pairs is drawn, small numbers more often.
    context_lengths: tuple[int, ...] = (2048, 8192)
    shortest: int = 128
    most_pairs: int = 64
    most_needles: int = 8
    tokens: int = 1 << 24  # for each context length
    validation_tokens: int = 1 << 18
    # To evaluate on: each number of pairs at each length in which they fit.
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    pairs: tuple[int, ...] = (16, 64)
    needles: int = 4
    samples: int = 128  # sequences of each length
    batch_size: int = 32

    @property
    def vocab_size(self) -> int:
        return self.first_pair + self.keys * self.values

    @property
    def first_value(self) -> int:
        return FIRST_KEY + self.keys

    @property
    def first_pair(self) -> int:
        return self.first_value + self.values

    def training_lengths(self, context: int) -> list[int]:
        return [self.shortest << n for n in range((context // self.shortest).bit_length())]

    def series(self) -> dict[str, tuple[str, int, list[int]]]:
        """Kind, number of pairs and lengths of what is measured, by the name of the result."""
        kinds = {f"recall {count}": ("recall", count) for count in self.pairs}
        kinds[f"needle {self.needles}"] = "needle", self.needles
        return {
            name: (kind, count, [n for n in self.lengths if count <= _most_pairs(kind, n)])
            for name, (kind, count) in kinds.items()
        }


_SMALL = Task(
    keys=8,
    values=4,
    context_lengths=(64,),
    shortest=64,
    most_pairs=4,
    most_needles=1,
    tokens=4096,
    validation_tokens=512,
    lengths=(64, 128),
    pairs=(4,),
    needles=1,
    samples=8,
)


class Sample(NamedTuple):
    """A sequence without its first token and its end of text: `length` − 1 tokens."""

    tokens: Ids
    answers: Ids  # positions of the answers in `tokens`


class Sampler:
    """Draws sequences. The same seed gives the same ones; `held_out` ones have other text."""

    def __init__(self, task: Task, *, held_out: bool) -> None:
        self._task, self._held_out = task, held_out
        self._text: Text | None = None  # read when it is needed

    def samples(self, kind: str, length: int, pairs: int, *, exactly: bool) -> Iterator[Sample]:
        """Endless sequences with `pairs` pairs, or with 1 to `pairs`, as far as they fit."""
        most = min(pairs, _most_pairs(kind, length))
        sequence = [self._task.seed, self._held_out, list(_FRAMES).index(kind), length, pairs]
        rng = np.random.default_rng(sequence)
        while True:
            # Log-uniform: 1 is as likely as 64 to 127.
            count = most if exactly else int(math.exp(rng.random() * math.log(most + 1)))
            # In training a key may be asked twice. If each were asked once, a model could exclude
            # the values that were answers before, and would learn that instead of recall.
            asked = rng.permutation(count) if exactly else rng.integers(count, size=count)
            yield self._draw(rng, kind, length, asked)

    def _draw(self, rng: np.random.Generator, kind: str, length: int, asked: Ids) -> Sample:
        frame, task, count = _FRAMES[kind], self._task, len(asked)
        keys = rng.permutation(task.keys)[:count]
        values = rng.integers(task.values, size=count)
        # 1. The pairs and the questions with their answers.
        stated = np.tile(frame.statement, (count, 1))
        stated[:, frame.offset] = task.first_pair + keys * task.values + values
        questions = np.tile(frame.question, (count, 1))
        questions[:, frame.offset] = FIRST_KEY + keys[asked]
        questions[:, frame.offset + 1] = task.first_value + values[asked]
        # 2. The filler, and the positions of the pairs in it.
        left = length - 1 - stated.size - questions.size
        if kind == "needle":
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
            self._text = read_text(self._task.text, held_out=self._held_out)
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


def _frame(before: bytes, after: bytes) -> _Frame:
    """`before` and `after` are around the pair, and around the key and its answer."""
    statement, question = (
        FIRST_BYTE + np.frombuffer(before + marks + after, np.uint8).astype(np.int64)
        for marks in (b"?", b"??")
    )
    return _Frame(statement, question, len(before))


_FRAMES = {"recall": _frame(b"", b""), "needle": _frame(b"The code: ", b". ")}
_SPACES = np.frombuffer(b" \n", np.uint8)
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)


def _most_pairs(kind: str, length: int) -> int:
    """The number of pairs that fit into a sequence, with their questions."""
    return (length - 1) // (len(_FRAMES[kind].statement) + len(_FRAMES[kind].question))


def read_text(path: str | None, *, held_out: bool) -> Text:
    """The bytes of the given files, or of Python's standard library; the last tenth is held out."""
    if path is not None:
        documents = (document.encode() for document in read_documents([path]))
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
        raise ValueError(f"the text for the needles has only {counted(len(text), 'byte')}")
    return part


# Training data


def write_data(folder: Path, task: Task) -> None:
    """Writes LENGTH/train and LENGTH/valid below `folder` for each context length.

    They are folders of shards as `xlstm7b prepare` writes them, whose loss counts answers (and, as
    in every folder, ends of text). Train with `data.packing = "best-fit"`, which cuts no sequence.
    Folders that are complete are kept.
    """
    for context in task.context_lengths:
        for part, tokens in (("train", task.tokens), ("valid", task.validation_tokens)):
            _write_folder(folder / str(context) / part, task, context, tokens, part == "valid")


def _write_folder(folder: Path, task: Task, context: int, tokens: int, held_out: bool) -> None:
    digest = hashlib.sha256(json_bytes({**asdict(task), "context": context})).hexdigest()
    if folder.exists():
        manifest = folder / MANIFEST
        if not manifest.exists() or json.loads(manifest.read_bytes()).get("plan") != digest:
            raise ValueError(f"{folder} was written with other settings: choose another --output")
        return
    with replacing(folder, dropped=lambda name: False) as aside:
        with ShardWriter(aside / "00000.ds", vocab_size=task.vocab_size, has_mask=True) as writer:
            for sample in _training_samples(task, context, tokens, held_out):
                mask = np.zeros(len(sample.tokens), np.uint8)
                mask[sample.answers] = 1
                writer.add(sample.tokens, mask)
        write_manifest(
            aside,
            [writer.entry],
            vocab_size=task.vocab_size,
            tokenizer_fingerprint=f"recall of {task.keys} keys and {task.values} values",
            plan=digest,
        )


def _training_samples(task: Task, context: int, tokens: int, held_out: bool) -> Iterator[Sample]:
    """The longest first: so windows of the context length cut no sequence in this order."""
    sampler = Sampler(task, held_out=held_out)
    lengths = task.training_lengths(context)
    for length in reversed(lengths):
        for kind, most in (("recall", task.most_pairs), ("needle", task.most_needles)):
            count = max(1, tokens // len(lengths) // 2 // length)
            yield from islice(sampler.samples(kind, length, most, exactly=False), count)


# Evaluation


def accuracies(model: XLSTM, task: Task) -> dict[str, dict[int, float]]:
    """The share of right answers by name of the result and by length.

    On a GPU the model computes in bfloat16. Sequences are read in chunks, so memory does not grow
    with the length.
    """
    sampler = Sampler(task, held_out=True)
    found: dict[str, dict[int, float]] = {}
    for name, (kind, pairs, lengths) in task.series().items():
        found[name] = {}
        for length in lengths:
            samples = sampler.samples(kind, length, pairs, exactly=True)
            right = 0
            for start in range(0, task.samples, task.batch_size):
                batch = [*islice(samples, min(task.batch_size, task.samples - start))]
                right += _right_answers(model, task, batch)
            found[name][length] = right / (task.samples * pairs)
    return found


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share that was measured on `count` independent samples.

    Here a sample is a sequence: its answers are not independent of each other.
    """
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


@torch.inference_mode()
def _right_answers(model: XLSTM, task: Task, samples: Sequence[Sample]) -> int:
    """The number of right answers, over all samples of a batch."""
    device = model.lm_head.weight.device
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples])).to(device)
    is_answer = torch.zeros_like(tokens, dtype=torch.bool)
    answers = torch.from_numpy(np.stack([sample.answers for sample in samples])).to(device)
    is_answer.scatter_(1, answers, True)
    first = torch.full_like(tokens[:, :1], model.config.bos_token_id)
    inputs = torch.cat([first, tokens[:, :-1]], 1)  # the last answer is never read
    values = slice(task.first_value, task.first_pair)
    size = max(1, MAX_CHUNK_LOGITS // model.config.vocab_size // len(samples))
    right, state = torch.zeros((), dtype=torch.long, device=device), None
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for start in range(0, inputs.shape[1], size):
            chunk = slice(start, start + size)
            logits, state = model(inputs[:, chunk], state)
            chosen = task.first_value + logits[..., values].argmax(-1)
            right += ((chosen == tokens[:, chunk]) & is_answer[:, chunk]).sum()
    return int(right)


# The experiments

_SETTINGS = {  # 43M parameters; heads of at least 64: the sizes of the fast kernels
    "model.embedding_dim": 1024,
    "model.num_blocks": 2,
    "model.qk_dim_factor": 2.0,
    "model.v_dim_factor": 2.0,
    "model.num_heads": 8,
    "model.vocab_size": 2496,
    "data.packing": "best-fit",
    "optimizer.lr": 1e-3,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.clip": 1.0,
    "schedule.kind": "constant",
    "schedule.warmup": 50,
    "run.save_every": 0,
    "run.keep_last": 1,
    "run.keep_best": False,
    "run.log_every": 100,
    "run.seed": 0,
}
# Each model is trained in two stages. In the second, the learning rate falls to 0 at the end.
_STAGES: tuple[Settings, Settings] = (
    {
        "data.context_length": 2048,
        "batch.sequences": 32,
        "batch.micro_batch": 32,
        "schedule.cooldown": 0,
        "run.steps": 500,
    },
    {
        "data.context_length": 8192,
        "batch.sequences": 8,
        "batch.micro_batch": 8,
        "schedule.cooldown": 150,
        "run.steps": 200,
    },
)
_SMALL_STAGE: Settings = {
    "model.vocab_size": 320,
    "data.context_length": 64,
    "batch.sequences": 4,
    "batch.micro_batch": 4,
    "schedule.cooldown": 0,
    "run.steps": 3,
}
TITLES = {
    "recall-heads": "Number of heads: recall over length",
    "recall-gate": "Learnable and fixed input gate: recall over length",
    "recall-bias": "First value of the input gate's bias: recall over length",
}
EXPERIMENTS: dict[str, dict[str, Settings]] = {
    "recall-heads": {f"heads-{count}": {"model.num_heads": count} for count in (4, 8, 16, 32)},
    "recall-gate": {
        "learnable": {"model.igate_bias_init_range": -10.0},
        "fixed-0": {"model.input_gate": "fixed", "model.igate_bias_init_range": 0.0},
        "fixed-10": {"model.input_gate": "fixed", "model.igate_bias_init_range": -10.0},
    },
    "recall-bias": {
        f"bias-{-value}": {"model.igate_bias_init_range": float(value)}
        for value in (0, -2, -5, -10)
    },
}

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]}, pretty_exceptions_enable=False
)


@app.command(cls=Command)
def recall(
    name: Name = None,
    data: Annotated[
        Path | None,
        option("Text file or folder to hide needles in.", default="Python's standard library"),
    ] = None,
    output: Output = None,
    variants: Variants = None,
    steps: Steps = None,
    changes: Changes = None,
    smoke: Smoke = False,
    device: Device = None,
    listed: Listed = False,
) -> None:
    """Train small models to recall, and measure how much they recall at lengths up to 16,384.

    The same command continues what was stopped: variants with results are skipped. The exit code
    is 1 if a variant diverged or did not fit into memory; that is recorded, and not tried again.
    """
    if listed:
        print_list(name, TITLES, EXPERIMENTS)
        return
    name = known(name, EXPERIMENTS)
    if data is not None and not data.exists():
        raise ValueError(f"there is no {data}")
    target = output or Path("runs") / name
    chosen = choose(variants, EXPERIMENTS[name])
    where = to_training_device(device, prefers_cpu=smoke)
    task = replace(_SMALL if smoke else Task(), text=None if data is None else str(data))
    given = changes_of(changes, steps)
    stages = {each: stages_of(name, each, target, given, smoke=smoke) for each in chosen}
    for recipes in stages.values():
        for folder, recipe in recipes.items():
            check_same(folder, recipe)
    results = open_results("recall", name, target, where)
    write_data(target / "data", task)
    try:
        for variant, recipes in stages.items():
            *_, last = recipes.values()
            run_variant(results, shape_of(name, variant, last), recipes, task, where)
    finally:
        show(results, [*task.series()], target / f"{name}.png")
    if any("error" in row for row in results.rows):
        raise typer.Exit(1)


def stages_of(
    name: str, variant: str, target: Path, changes: Sequence[str], *, smoke: bool
) -> dict[Path, Recipe]:
    """The recipes of both stages, by the folders of their runs."""
    first, second = (
        recipe_of(
            *(("quickstart", SMOKE) if smoke else ("160m", _SETTINGS)),
            EXPERIMENTS[name][variant],
            stage,
            name=f"{name}-{variant}",
            data=target / "data" / str(stage["data.context_length"]),
            changes=changes,
        )
        for stage in ((_SMALL_STAGE, _SMALL_STAGE) if smoke else _STAGES)
    )
    start, steps = first.run.steps, first.run.steps + second.run.steps
    second = replace(
        second,
        init_from=str(target / variant / "stage-1"),
        start_step=start,
        run=replace(second.run, steps=steps, validate_every=steps),
    )
    return {target / variant / "stage-1": first, target / variant / "stage-2": second}


def run_variant(
    results: Results, shape: Shape, stages: Mapping[Path, Recipe], task: Task, device: str
) -> None:
    """Trains a variant and records its accuracies, if that is not done yet."""
    *_, last = task.series()
    if results.has(last, shape):
        return
    with failures_recorded(results, last, shape, next(iter(stages)).parent):
        for folder, recipe in stages.items():
            train(recipe, folder, device)
        model = read_model(step_folder(folder / "checkpoints", recipe.run.steps), recipe.model)
        for what, found in accuracies(model.to(device).eval(), task).items():
            ends = [wilson(share, task.samples) for share in found.values()]
            widest = max(high - low for low, high in ends) / 2
            note = f"95% interval: ±{widest:.2f} at most; guessing: {1 / task.values:.2f}"
            lengths, shares = [*found], [*found.values()]
            results.add_curve(what, shape, lengths, shares, "", x_unit="tokens", note=note)


if __name__ == "__main__":
    main(app)
