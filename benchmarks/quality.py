"""What quantised weights and bfloat16 states cost in quality: the loss of a text that is decoded.

    python benchmarks/quality.py books-160m data/books/valid.jsonl.gz --json quality.jsonl

Parts of the text are decoded token by token, each time with the text's own next token (teacher
forcing), by replay, as a generator decodes many sequences on a GPU. So weights and states are
rounded as in generation. Weights are quantised in memory. bfloat16 weights with float32 states are
the reference.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from drift import decoded_loss
from processes import Call, Json
from xlstm7b.bench.results import Results, Shape
from xlstm7b.checkpoint import open_checkpoint
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, Device, listed, option
from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_device, to_dtype
from xlstm7b.evaluate.perplexity import read_documents
from xlstm7b.generate.fused import FusedModel
from xlstm7b.model import XLSTM
from xlstm7b.report import counted
from xlstm7b.tokenizer import AnyTokenizer, model_tokenizer

QUANTIZED = ("fp8", "int8", "int4")
WEIGHTS = ("float32", "bfloat16", *QUANTIZED)

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def quality(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder of a trained model.")],
    text: Annotated[Path, typer.Argument(help="Text file or folder, as `xlstm7b prepare` reads.")],
    weights: Annotated[
        str, option("Weights, with commas between them: float32, bfloat16, fp8, int8, int4.")
    ] = "bfloat16,fp8,int8,int4",
    tokens: Annotated[int, option("Tokens of each part of the text.")] = 2048,
    rows: Annotated[int, option("Parts of the text, which are decoded at the same time.")] = 256,
    device: Device = None,
    json: Json = None,
    call: Call = None,
) -> None:
    """Measure the loss with several kinds of weights and states."""
    kinds, on = listed(weights), to_device(device)
    for kind in kinds:
        if kind not in WEIGHTS:
            raise ValueError(f"--weights takes {', '.join(WEIGHTS)}, not {kind!r}")
    if tokens < 1 or rows < 1:
        raise ValueError("--tokens and --rows must be at least 1")
    config = open_checkpoint(folder).config
    parts = read_parts(text, model_tokenizer(folder, config), config, tokens, rows).to(on)
    results = Results("quality", str(on), file=json, call=call)
    for kind in kinds:
        shapes: list[Shape] = [
            {"model": folder.name, "weights": kind, "states": states, "tokens": tokens}
            for states in ("float32", "bfloat16")
        ]
        left = [shape for shape in shapes if not results.has("loss", shape)]
        if not left:
            continue
        quantize = kind if kind in QUANTIZED else None
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        model = FusedModel(XLSTM.from_pretrained(folder, dtype=dtype, device=on, quantize=quantize))
        for shape in left:
            loss = decoded_loss(model, parts, to_dtype(str(shape["states"])), replay=True)
            results.add("loss", shape, loss, "nats")
        del model  # before the next one is read


def read_parts(
    text: Path, tokenizer: AnyTokenizer, config: ModelConfig, tokens: int, rows: int
) -> Tensor:
    """Parts of the documents [rows, tokens + 1], evenly spread. Each begins with the first token.

    `ValueError` if the text has fewer parts.
    """
    first = [config.bos_token_id] if config.force_bos_token_insert else []
    size = tokens + 1 - len(first)
    parts: list[list[int]] = []
    for document in read_documents([text]):
        ids = tokenizer.encode(document)
        starts = range(0, len(ids) - size + 1, size)
        parts += [[*first, *ids[start : start + size]] for start in starts]
    if len(parts) < rows:
        raise ValueError(
            f"{text} has only {counted(len(parts), 'part')} of {counted(tokens, 'token')}: give a "
            "longer text, or lower --rows or --tokens"
        )
    return torch.tensor([parts[row * len(parts) // rows] for row in range(rows)])


if __name__ == "__main__":
    main(app)
