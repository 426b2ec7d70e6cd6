"""How fast an engine generates with speculation.

`drafts`: if each draft is right with a given probability. The weights are random but for the
embedding and the head: the token after t is always t + 1. So drafts can be right or wrong as often
as wanted. The engine verifies them as always, and its output is checked: no draft changes it.

`texts`: a trained model continues four kinds of text. All outputs are greedy, except prose: greedy
prose of a small model soon repeats itself.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from forced_drafts import ForcedDrafts, following, make_predictable
from options import numbers
from processes import Call, Json
from texts import make_prompts, read_sentences
from xlstm7b.bench.measure import (
    GREEDY,
    SAMPLED,
    attempt,
    make_generator,
    measure,
    measure_steps,
    random_model,
    random_prompts,
    release,
)
from xlstm7b.bench.results import Results, Shape
from xlstm7b.checkpoint import read_config
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, Device, option
from xlstm7b.devices import to_device, to_dtype
from xlstm7b.generate import Generator
from xlstm7b.generate.draft_model import Speculation, load_speculation, open_speculation
from xlstm7b.generate.drafts import MAX_DRAFT
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import model_tokenizer

_SHARES = (0.0, 0.5, 0.8, 1.0)  # of right drafts
_START = 16  # tokens of a prompt of random tokens
_PROMPTS = 16  # at least, of each kind of text: one output may be an exception

Batches = Annotated[str, option("Batch sizes.")]
DType = Annotated[str, option("Dtype of the weights: float32 or bfloat16.")]
StateDType = Annotated[str, option("Dtype of the states (of C): float32 or bfloat16.")]
app = typer.Typer(add_completion=False, no_args_is_help=True)


# Drafts that are right as often as wanted


@app.command(cls=Command)
def drafts(
    batches: Batches = "1,8",
    seconds: Annotated[float, option("Length of one timing, in seconds, about.")] = 0.3,
    size: Annotated[str, option("Size of the model.")] = "7b",
    dtype: DType = "bfloat16",
    state_dtype: StateDType = "float32",
    device: Device = None,
    json: Json = None,
    call: Call = None,
) -> None:
    """Time decoding with drafts that are right as often as wanted; weights are random."""
    sizes, on = numbers("batches", batches), str(to_device(device))
    for name in (dtype, state_dtype):
        to_dtype(name, ("float32", "bfloat16"))
    results = Results("speculation", on, file=json, call=call)
    model = random_model(size, dtype=dtype, device=on)
    make_predictable(model)
    kinds: list[dict[str, float | str]] = [{"drafts": "none"}, {"drafts": "adaptive", "right": 0.0}]
    kinds += [{"drafts": f"up to {MAX_DRAFT}", "right": share} for share in _SHARES]
    for batch in sizes:
        for kind in kinds:
            shape = {"model": size, "weights": dtype, "states": state_dtype, "batch": batch, **kind}
            work = partial(time_drafts, results, shape, model, seconds)
            # `ValueError`: too many slots
            attempt(results, "decode", shape, work, ValueError, RuntimeError)
    if results.failed:
        raise typer.Exit(1)


def time_drafts(results: Results, shape: Shape, model: XLSTM, seconds: float) -> None:
    """Adds tokens per second, and the share of accepted drafts."""
    batch, vocab_size, kind = int(shape["batch"]), model.config.vocab_size, shape["drafts"]
    generator = make_generator(
        model,
        state_dtype=str(shape["states"]),
        batch_size=batch,
        speculate=None if kind == "none" else "lookup",
    )
    drafter = partial(ForcedDrafts, vocab_size, float(shape.get("right", 0)), kind == "adaptive")
    prompts = random_prompts(vocab_size, batch, _START)
    drafted = accepted = 0

    def generate(tokens: int) -> None:
        nonlocal drafted, accepted
        outputs = generator.generate(prompts, max_new_tokens=tokens, **GREEDY)
        for prompt, done in zip(prompts, outputs, strict=True):
            if done.token_ids != following(prompt[-1], tokens, vocab_size):
                raise RuntimeError("the output is not what the model generates")
            drafted, accepted = drafted + done.drafted_tokens, accepted + done.accepted_tokens

    with patch("xlstm7b.generate.drafts.LookupText", drafter):
        step = measure_steps(generate, results.device, seconds=seconds, base=64)
    results.add("decode", shape, batch / step.seconds, "tok/s", spread=step.spread)
    if drafted:
        results.add("accepted drafts", shape, 100 * accepted / drafted, "%")


# Texts


@app.command(cls=Command)
def texts(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder of a trained model.")],
    text: Annotated[
        Path | None, option("Text file whose sentences are used.", default="a few built-in ones")
    ] = None,
    draft: Annotated[
        Path | None, option("Checkpoint folder of a draft model to measure too.", default="none")
    ] = None,
    tokens: Annotated[int, option("Tokens of each output.")] = 128,
    batches: Batches = "1,8",
    dtype: DType = "bfloat16",
    state_dtype: StateDType = "float32",
    device: Device = None,
    json: Json = None,
    call: Call = None,
) -> None:
    """Time decoding of four kinds of text, with and without speculation, by a trained model."""
    sizes, on, weights = numbers("batches", batches), to_device(device), to_dtype(dtype)
    if tokens < 2:
        raise ValueError(f"--tokens must be at least 2, not {tokens}")
    sentences, config = read_sentences(text), read_config(folder)
    tokenizer = model_tokenizer(folder, config)
    draft_model = open_speculation(draft, config, tokenizer)
    assert draft_model != "lookup"
    check_blocks(*filter(None, (folder, draft_model)))
    results = Results("speculation", str(on), file=json, call=call)
    model = XLSTM.from_pretrained(folder, dtype=weights, device=on)
    ways: dict[str, Speculation] = {"none": None, "lookup": "lookup"}
    if draft_model is not None:
        ways["draft model"] = load_speculation(draft_model, weights, on)
    for batch in sizes:
        prompts = {
            kind: [tokenizer.encode(prompt) for prompt in made]
            for kind, made in make_prompts(sentences, -(-_PROMPTS // batch) * batch).items()
        }
        plain: dict[str, list[list[int]]] = {}
        for way, speculate in ways.items():
            generator = Generator(
                model,
                tokenizer,
                state_dtype=to_dtype(state_dtype),
                batch_size=batch,
                speculate=speculate,
            )
            for kind, ids in prompts.items():
                shape: Shape = {
                    "model": folder.name,
                    "weights": dtype,
                    "states": state_dtype,
                    "batch": batch,
                    "text": kind,
                    "drafts": way,
                }
                work = partial(time_text, results, shape, generator, ids, tokens, plain)
                # `ValueError`: too many slots; `RuntimeError`: the machine is too busy
                attempt(results, "decode", shape, work, ValueError, RuntimeError)
                del work
            del generator  # frees its memory
            release(str(on))
    if results.failed:
        raise typer.Exit(1)


def check_blocks(*folders: Path) -> None:
    """`ValueError` if a model has blocks with which engines cannot speculate."""
    for folder in folders:
        if chosen := read_config(folder).other_classes():
            names = ", ".join(f"{kind} = {name!r}" for kind, name in chosen.items())
            raise ValueError(
                f"the model in {folder} has {names}, which speculation does not support"
            )


def time_text(
    results: Results,
    shape: Shape,
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    plain: dict[str, list[list[int]]],
) -> None:
    """The time of a step after the first token, as the mean of all prompts, a batch at a time.

    Without speculation `plain` gets the outputs of this kind. With it, they are compared with them.
    """
    kind, device = str(shape["text"]), results.device
    sampling: dict[str, Any] = SAMPLED if kind == "prose" else GREEDY
    generate = partial(generator.generate, prompts, **sampling)
    generate(max_new_tokens=tokens)  # a pass is captured when its shape first occurs
    done = generate(max_new_tokens=tokens)
    whole, first = (
        measure(partial(generate, max_new_tokens=count), device, repeats=9, enough=0.5)
        for count in (tokens, 1)
    )
    if whole <= first:
        raise RuntimeError(f"{tokens} tokens took no longer than one: this machine is too busy")
    steps = (tokens - 1) * len(prompts) / generator.batch_size
    results.add("decode", shape, generator.batch_size * steps / (whole - first), "tok/s")
    if drafted := sum(one.drafted_tokens for one in done):
        accepted = sum(one.accepted_tokens for one in done)
        results.add("accepted drafts", shape, 100 * accepted / drafted, "%")
    outputs = [one.token_ids for one in done]
    if generator.speculate is None:
        plain[kind] = outputs
    elif kind in plain:
        same = [ours == want for ours, want in zip(outputs, plain[kind], strict=True)]
        results.add("equal outputs", shape, 100 * sum(same) / len(same), "%")


if __name__ == "__main__":
    main(app)
