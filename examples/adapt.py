"""Ways to adapt a model to a text that it never saw, compared on held-out text of the same kind.

    python examples/adapt.py MODEL shakespeare.txt --output runs/adapt
    python examples/adapt.py MODEL train.jsonl --held-out test.jsonl --output runs/adapt
    python examples/adapt.py --smoke

MODEL is a checkpoint folder or a hub id. The text is a .txt file, or .jsonl with one record in each
line in any format that `xlstm7b prepare` knows, such as question and answer. Without --held-out,
its last tenth is held out. The table has one row for each way:

    base             the model as it is
    prompt           the first tokens of the training text as a prompt, in a saved state
    state            state tuning from zeros
    state, prompt    state tuning from the state after the prompt
    LoRA             as many numbers as state tuning, as nearly as a rank allows
    full             all weights

All are trained on the same sequences and scored in the same way: every held-out document, or part
of one of the context length, is read from its beginning, from the exported state or by the exported
weights. The loss is in nats per token that counts, such as those of the answers.
--smoke compares on a small random model, on a CPU, in seconds.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from xlstm7b import XLSTM, ModelConfig
from xlstm7b.accounting import lora_parameters, state_tuning_parameters
from xlstm7b.checkpoint import read_config, read_quantization, resolve
from xlstm7b.data.loader import validation_batches
from xlstm7b.data.prepare import prepare
from xlstm7b.data.shards import ShardFolder
from xlstm7b.devices import default_dtype, to_device
from xlstm7b.evaluate.scoring import Scorer
from xlstm7b.files import write_json
from xlstm7b.generate import Generator, SavedState
from xlstm7b.model.adapter import load_adapted
from xlstm7b.report import table
from xlstm7b.tokenizer import model_tokenizer
from xlstm7b.train import Recipe, Trainer
from xlstm7b.train.plan import trained_parameters
from xlstm7b.train.recipe import Batch, Data, Lora, Optimizer, Run, Schedule, Source, StateTuning
from xlstm7b.train.run_checkpoints import export_run

HEADER = ("method", "held-out loss", "trained parameters", "seconds")


class Row(NamedTuple):
    method: str
    loss: float
    parameters: int
    seconds: float


class HeldOut(NamedTuple):
    """Documents as token ids, and which of them count in the loss."""

    documents: list[list[int]]
    masks: list[torch.Tensor]

    @classmethod
    def read(cls, folder: ShardFolder, length: int, config: ModelConfig, limit: int) -> "HeldOut":
        found = cls([], [])
        for batch in validation_batches(folder, length, 1, packing="documents", model=config):
            _, targets, resets, mask = (part[0] for part in batch)
            size = int(resets.int().argmax()) if resets.any() else length
            if mask.any() and len(found.documents) < limit:
                found.documents.append(targets[:size].tolist())
                found.masks.append(mask[:size])
        if not found.documents:
            raise ValueError(
                "the held-out text has no token that counts in the loss, or --held-out-documents "
                "is 0: nothing can be compared"
            )
        return found

    def loss(self, model: XLSTM, state: SavedState | None = None) -> float:
        logprobs = Scorer(model).logprobs(self.documents, state=state)
        total = count = 0.0
        for scores, mask in zip(logprobs, self.masks, strict=True):
            counted = mask[len(mask) - len(scores) :]  # a first token may have no score
            total -= float((scores.double() * counted).sum())
            count += int(counted.sum())
        return total / count


def compare(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    # 1. The data, and the model as it is.
    device = to_device(options.device)
    base = resolve(options.model)
    config = read_config(base)
    if read_quantization(base) is not None:
        raise ValueError(
            f"{base} has quantised weights, and the last row trains all weights: give the model "
            "that it was made of"
        )
    tokenizer = base if (base / "tokenizer.json").is_file() else "bytes"
    texts = split(Path(options.text), options.held_out, folder / "texts")
    train, held_out = (prepare([text], folder / text.stem, tokenizer) for text in texts)
    config = with_special_tokens(config, train)
    test = HeldOut.read(held_out, options.context_length, config, options.held_out_documents)
    model = XLSTM.from_pretrained(base, dtype=default_dtype(device), device=device)
    yield Row("base", test.loss(model), 0, 0.0)
    # 2. The prompt.
    began = time.perf_counter()
    generator = Generator(model, model_tokenizer(base, config, None))
    ids = first_tokens(train, options.prompt_tokens)
    prompt = generator.read([ids])
    prompt.save(folder / "prompt.safetensors")
    seconds = time.perf_counter() - began
    yield Row("prompt", test.loss(model, prompt), 0, seconds)
    del generator
    # 3. What is trained.
    size = state_tuning_parameters(config, rank=options.state_rank)
    every = tuple(Lora().targets)
    rank = max(1, round(size / lora_parameters(config, every, 1)))
    state = StateTuning(rank=options.state_rank)
    from_prompt = replace(state, init_state=str(folder / "prompt.safetensors"))
    ways = {
        "state": (options.state_lr, {"state_tuning": state}),
        "state, prompt": (options.state_lr, {"state_tuning": from_prompt}),
        f"LoRA, rank {rank}": (options.lora_lr, {"lora": Lora(rank=rank, alpha=2.0 * rank)}),
        "full": (options.full_lr, {}),
    }
    for name, (rate, what) in ways.items():
        place = folder / name.replace(", ", "-").replace(" ", "-")
        recipe = Recipe(
            name=place.name,
            model=config,
            data=Data(
                options.context_length, {"text": Source(str(train.path))}, packing="documents"
            ),
            batch=Batch(options.sequences, micro_batch=options.micro_batch),
            run=Run(
                options.steps,
                activation_checkpointing=options.activation_checkpointing,
                save_every=0,
                log_every=options.steps,
            ),
            optimizer=Optimizer(
                rate,
                betas=(0.9, 0.95),
                eps=1e-12 if "state_tuning" in what else 1e-8,  # a state has small gradients
                weight_decay=0.0,
                clip=1.0,
            ),
            schedule=Schedule(warmup=options.steps // 10),
            init_from=str(base),
            **what,
        )
        began = time.perf_counter()
        Trainer(recipe, place, device.type).train()
        seconds = time.perf_counter() - began
        exported = place / "exported"
        export_run(place, exported, tokenizer=tokenizer)
        loading = {"dtype": default_dtype(device), "device": device}
        if recipe.state_tuning is not None:
            loss = test.loss(model, SavedState.load(exported, model.config, device="cpu"))
        elif recipe.lora is not None:
            loss = test.loss(load_adapted(base, exported, **loading))
        else:
            loss = test.loss(XLSTM.from_pretrained(exported, **loading))
        yield Row(name, loss, trained_parameters(recipe), seconds)


def split(text: Path, held_out: str | None, folder: Path) -> tuple[Path, Path]:
    """Files with the training text and the held-out text, of which at least one is new."""
    if held_out is not None:
        return text, Path(held_out)
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    cut = len(lines) * 9 // 10
    if not 0 < cut < len(lines):
        raise ValueError(f"{text} has too few lines to hold some out: {len(lines)}")
    folder.mkdir(parents=True, exist_ok=True)
    parts = folder / f"train{text.suffix}", folder / f"held-out{text.suffix}"
    for part, content in zip(parts, (lines[:cut], lines[cut:]), strict=True):
        part.write_text("".join(content), encoding="utf-8")
    return parts


def with_special_tokens(config: ModelConfig, data: ShardFolder) -> ModelConfig:
    """The model with the end of text of its tokenizer, which a config may not name."""
    bos = data.eos_token_id if data.bos_token_id is None else data.bos_token_id
    return replace(
        config,
        eos_token_id=data.eos_token_id,
        bos_token_id=bos if config.force_bos_token_insert else data.eos_token_id,
    )


def first_tokens(data: ShardFolder, count: int) -> list[int]:
    ids: list[int] = []
    for shard in data.shards:
        ids += shard.tokens[: count - len(ids)].tolist()
    return ids


def smoke(options: argparse.Namespace, folder: Path) -> None:
    """A small random model and a text with a pattern, for a comparison within seconds."""
    torch.manual_seed(0)
    XLSTM(ModelConfig(64, 2, 2, vocab_size=320)).save_pretrained(folder / "model")
    lines = [f"{number} and {number + 1} are {2 * number + 1}.\n" for number in range(200)]
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    options.model, options.text = str(folder / "model"), str(folder / "text.txt")
    options.steps, options.sequences, options.micro_batch = 8, 8, 8
    options.context_length, options.prompt_tokens, options.device = 64, 256, "cpu"
    options.held_out_documents = 16


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="checkpoint folder or hub id")
    parser.add_argument("text", nargs="?", help="training text: .txt or .jsonl")
    parser.add_argument("--held-out", help="held-out text (default: the last tenth of the text)")
    parser.add_argument("--output", type=Path, help="new folder for data, runs and results.json")
    parser.add_argument("--smoke", action="store_true", help="a small random model on a CPU")
    for name, default, explained in (
        ("context-length", 512, "longest document, in tokens; longer ones are cut"),
        ("steps", 300, "updates of each training"),
        ("sequences", 16, "documents in an update"),
        ("micro-batch", 16, "documents at once"),
        ("prompt-tokens", 4096, "tokens of the training text in the prompt"),
        ("held-out-documents", 2000, "most documents to score"),
        ("state-rank", 0, "rank of the trained C; 0: all of it"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=explained)
    for name, rate in (("state", 1.0), ("lora", 5e-4), ("full", 1e-4)):
        parser.add_argument(f"--{name}-lr", type=float, default=rate, help="learning rate")
    parser.add_argument("--activation-checkpointing", default="none", help="as in a recipe")
    parser.add_argument("--device", help="cuda or cpu (default: a GPU if there is one)")
    options = parser.parse_args(arguments)
    try:
        with TemporaryDirectory() as temporary:
            folder = options.output or Path(temporary)
            if options.smoke:
                smoke(options, Path(temporary))
            elif options.model is None or options.text is None:
                raise ValueError("give a model and a text, or --smoke")
            if options.output is not None and folder.is_dir() and any(folder.iterdir()):
                raise ValueError(f"{folder} exists already: choose another --output")
            folder.mkdir(parents=True, exist_ok=True)
            settings = json.loads(json.dumps(vars(options), default=str))
            rows = list[Row]()
            for row in compare(options, folder):  # the table comes at the end
                print(f"{row.method}: {row.loss:.4f} ({row.seconds:.1f} s)", file=sys.stderr)
                rows.append(row)
                results = [each._asdict() for each in rows]
                write_json(folder / "results.json", {"results": results, "settings": settings})
    except (ValueError, OSError) as error:
        print(f"adapt: {error}", file=sys.stderr)
        sys.exit(2)
    shown = [(r.method, f"{r.loss:.4f}", f"{r.parameters:,}", f"{r.seconds:.1f}") for r in rows]
    print(table(HEADER, shown))


if __name__ == "__main__":
    main()
