"""How fast a trained model generates with and without speculation, for four kinds of text.

A copy of a passage with edits, code in a file with repeats, answers that quote a document, and free
prose. The prompts are made from a few sentences: those below, or those of a text file. All outputs
are greedy, except prose: greedy prose of a small model soon repeats itself.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from xlstm7b.bench.cases import Result
from xlstm7b.bench.measure import GREEDY, SAMPLED, attempt, measure, release
from xlstm7b.bench.plans import Generation
from xlstm7b.checkpoint import read_config
from xlstm7b.devices import to_dtype
from xlstm7b.generate import Generator
from xlstm7b.generate.draft_model import Speculation, load_speculation, open_speculation
from xlstm7b.model import XLSTM
from xlstm7b.report import counted
from xlstm7b.tokenizer import AnyTokenizer, model_tokenizer

_TEXT = """
The harbour lies at the end of a narrow bay. Every morning at six the ferry leaves for the islands
with mail, bread and a few passengers. In winter it sails only twice a week. The crew knows every
rock of the coast by name. On the largest island there is a school with eleven children. Their
teacher came for one year and stayed for twenty. She keeps a list of all birds that she has seen
from her window. Last spring a storm took the roof of the old boathouse. The fishermen built a new
one in three days. They used timber from a ship that had run aground. Since then the swallows nest
under its beams. Nobody has ever thought of chasing them away.
"""
_NAMES = ("width", "height", "depth", "weight", "volume", "colour", "price")
_FUNCTION = '''def read_{0}(path):
    """Returns the {0} that is stored in a file."""
    with open(path) as file:
        values = json.load(file)
    if "{0}" not in values:
        raise ValueError("the file has no {0}")
    return values["{0}"]


'''
_PROMPTS = 16  # at least, of each kind: one output may be an exception
_SENTENCES = 12  # of a passage
_LETTERS = 1500  # most of a passage
_STEP = 5  # sentences from the start of one passage to that of the next


class _Outputs(NamedTuple):
    """Outputs without speculation, and the time of a step."""

    token_ids: list[list[int]]
    seconds: float


class Inputs(NamedTuple):
    """What a plan names, but for the weights."""

    sentences: list[str]
    tokenizer: AnyTokenizer
    draft: Path | None


def read_inputs(plan: Generation) -> Inputs:
    """`ValueError` if the text is too short, or a model cannot speculate or draft for the other."""
    assert plan.folder is not None
    sentences = read_sentences(None if plan.text is None else Path(plan.text))
    folder = Path(plan.folder)
    config = read_config(folder)
    tokenizer = model_tokenizer(folder, config)
    draft = open_speculation(plan.draft and Path(plan.draft), config, tokenizer)
    assert draft != "lookup"
    for path in filter(None, (folder, draft)):
        if chosen := read_config(path).other_classes():
            names = ", ".join(f"{kind} = {name!r}" for kind, name in chosen.items())
            raise ValueError(f"the model in {path} has {names}, which speculation does not support")
    return Inputs(sentences, tokenizer, draft)


def results(plan: Generation) -> Iterator[Result]:
    """For each batch size: without speculation, by lookup, by a draft model, each kind of text."""
    assert plan.folder is not None
    sentences, tokenizer, draft = read_inputs(plan)
    dtype, device = to_dtype(plan.dtype), torch.device(plan.device)
    model = XLSTM.from_pretrained(plan.folder, dtype=dtype, device=device)
    ways: dict[str, Speculation] = {"no speculation": None, "lookup": "lookup"}
    if draft is not None:
        ways["draft model"] = load_speculation(draft, dtype, device)
    for batch in plan.batches:
        count = -(-_PROMPTS // batch) * batch
        prompts = {
            kind: [tokenizer.encode(prompt) for prompt in texts]
            for kind, texts in make_prompts(sentences, count).items()
        }
        plain: dict[str, _Outputs] = {}
        for way, speculate in ways.items():
            generator = Generator(
                model,
                tokenizer,
                state_dtype=to_dtype(plan.state_dtype),
                batch_size=batch,
                speculate=speculate,
            )
            for kind, ids in prompts.items():
                case = Result("speculation", work=f"{kind}, {way}", batch=batch, length=len(ids[0]))
                run = partial(_timed, generator, kind, ids, plan, plain)
                # `ValueError`: too many slots; `RuntimeError`: the machine is too busy
                yield attempt(case, run, ValueError, RuntimeError)
                del run
            del generator  # frees its memory
            release(plan.device)


def _timed(
    generator: Generator,
    kind: str,
    prompts: Sequence[Sequence[int]],
    plan: Generation,
    plain: dict[str, _Outputs],
    case: Result,
) -> Result:
    """The time of a step after the first token, as the mean of all prompts, a batch at a time.

    Without speculation `plain` gets the outputs of this kind. With it, they are compared with them.
    """
    tokens = plan.text_tokens
    sampling = SAMPLED if kind == "prose" else GREEDY
    generate = partial(generator.generate, prompts, **sampling)
    generate(max_new_tokens=tokens)  # a pass is captured when its shape first occurs
    done = generate(max_new_tokens=tokens)
    whole, first = (
        measure(partial(generate, max_new_tokens=count), plan.device, repeats=9, enough=0.5)
        for count in (tokens, 1)
    )
    if whole <= first:
        raise RuntimeError(f"{tokens} tokens took no longer than one: this machine is too busy")
    seconds = (whole - first) / (tokens - 1) * case.batch / len(prompts)
    figures: dict[str, Any] = {}
    if drafted := sum(one.drafted_tokens for one in done):
        figures["accepted"] = 100 * sum(one.accepted_tokens for one in done) / drafted
    outputs = [one.token_ids for one in done]
    if (want := plain.get(kind)) is not None:
        same = [got == one for got, one in zip(outputs, want.token_ids, strict=True)]
        figures |= {"of_plain": want.seconds / seconds, "same": 100 * sum(same) / len(same)}
    if generator.speculate is None:
        plain[kind] = _Outputs(outputs, seconds)
    return Result(
        case.part,
        work=case.work,
        batch=case.batch,
        length=case.length,
        seconds=seconds,
        tokens_per_second=case.batch / seconds,
        figures=figures,
    )


def read_sentences(path: Path | None) -> list[str]:
    """The sentences of a text file from its middle on, then those before; None: built-in ones."""
    if path is None:
        return _split(_TEXT)
    found = _split(read_text(path))
    if len(found) < _SENTENCES:
        has = counted(len(found), "sentence")
        raise ValueError(f"{path} has {has}: the texts need {_SENTENCES}")
    middle = len(found) // 2
    return found[middle:] + found[:middle]


def read_text(path: Path) -> str:
    """The text of a file. `ValueError` if it is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _split(text: str) -> list[str]:
    return [" ".join(one.split()) for one in re.split(r"(?<=[.!?])\s+", text) if one.strip()]


def make_prompts(sentences: Sequence[str], count: int) -> dict[str, list[str]]:
    """This many prompts of each kind of text, by kind."""
    found: dict[str, list[str]] = {"copy": [], "code": [], "question": [], "prose": []}
    for row in range(count):
        start = row * _STEP % len(sentences)
        passage = [*sentences[start:], *sentences[:start]][:_SENTENCES]
        while len(passage) > 4 and sum(map(len, passage)) > _LETTERS:
            passage.pop()
        for kind, make in _KINDS.items():
            found[kind].append(make(passage, row))
    return found


def _copy(passage: Sequence[str], row: int) -> str:
    """The passage, the passage with an edit in every third sentence, and the start of that."""
    edited = [
        one.replace(" the ", " that ", 1) if number % 3 == row % 3 else one
        for number, one in enumerate(passage)
    ]
    return "\n\n".join([" ".join(passage), " ".join(edited), edited[0]])


def _code(passage: Sequence[str], row: int) -> str:
    """Functions that differ in a name, and the start of the next one."""
    names = [_NAMES[(row + number) % len(_NAMES)] for number in range(len(_NAMES))]
    functions = "".join(map(_FUNCTION.format, names[:-1]))
    return f"import json\n\n\n{functions}def read_{names[-1]}(path):\n"


def _question(passage: Sequence[str], row: int) -> str:
    """Questions about a document whose answers quote it. The last answer is missing."""
    asked = [*range(1, len(passage) - 1, 2), 0]
    questions = [f'Question: What comes after "{passage[n]}"?\nAnswer: "' for n in asked]
    answers = [f'{passage[n + 1]}"\n\n' for n in asked[:-1]]
    pairs = [f"{question}{answer}" for question, answer in zip(questions, answers, strict=False)]
    return f"Document: {' '.join(passage)}\n\n{''.join(pairs)}{questions[-1]}"


def _prose(passage: Sequence[str], row: int) -> str:
    return " ".join(passage[:2])


_KINDS = {"copy": _copy, "code": _code, "question": _question, "prose": _prose}
