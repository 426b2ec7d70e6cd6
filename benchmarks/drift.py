"""How far bfloat16 states drift from float32 over many tokens, with and without replay decoding.

A text is decoded token by token, each time with the text's own next token (teacher forcing).
"""

from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from processes import Call, Json
from texts import read_text
from xlstm7b.bench.measure import capture
from xlstm7b.bench.results import Results, Shape
from xlstm7b.checkpoint import read_config
from xlstm7b.cli import main
from xlstm7b.cli.options import Command, Device, option
from xlstm7b.devices import to_device, to_dtype
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.replay import Rings
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.report import counted
from xlstm7b.tokenizer import model_tokenizer

_ROWS = 4  # parts of the text that are decoded at the same time

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def drift(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder of a trained model.")],
    text: Annotated[Path, typer.Argument(help="Text file whose loss is measured.")],
    tokens: Annotated[int, option("Tokens of each part of the text.")] = 8192,
    dtype: Annotated[str, option("Dtype of the weights: float32 or bfloat16.")] = "bfloat16",
    device: Device = None,
    json: Json = None,
    call: Call = None,
) -> None:
    """Measure how far bfloat16 states drift from float32 over many tokens."""
    weights, on = to_dtype(dtype, ("float32", "bfloat16")), to_device(device)
    ids = read_tokens(folder, text, tokens)
    results = Results("drift", str(on), file=json, call=call)
    model = FusedModel(XLSTM.from_pretrained(folder, dtype=weights, device=on))
    rows = min(_ROWS, len(ids) // (tokens + 1))
    parts = torch.tensor(ids[: rows * (tokens + 1)], device=on).view(rows, -1)
    for states, replay in product(("float32", "bfloat16"), (False, True)):
        shape: Shape = {
            "model": folder.name,
            "weights": dtype,
            "tokens": tokens,
            "states": states,
            "replay": "on" if replay else "off",
        }
        if not results.has("loss", shape):
            loss = decoded_loss(model, parts, to_dtype(states), replay=replay)
            results.add("loss", shape, loss, "nats")


def read_tokens(folder: Path, text: Path, tokens: int) -> list[int]:
    """The tokens of the text. Reads no weights. `ValueError` if the text is too short."""
    if tokens < 1:
        raise ValueError(f"--tokens must be at least 1, not {tokens}")
    ids = model_tokenizer(folder, read_config(folder)).encode(read_text(text))
    if len(ids) < tokens + 1:
        has = counted(len(ids), "token")
        raise ValueError(f"{text} has {has}: give a longer text or fewer --tokens")
    return ids


@torch.inference_mode()
def decoded_loss(model: FusedModel, tokens: Tensor, dtype: torch.dtype, *, replay: bool) -> float:
    """The mean loss of tokens [B, T + 1], decoded one at a time from states with C in `dtype`."""
    batch, device = len(tokens), tokens.device
    state = ModelState.zeros(model.config, batch, dtype=dtype, device=device)
    rings = Rings.zeros(model.config, batch, dtype=model.dtype, device=device) if replay else None
    live = torch.ones(batch, dtype=torch.bool, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    at = torch.zeros(1, dtype=torch.long, device=device)

    def step() -> None:
        token, target = (tokens.index_select(1, at + shift)[:, 0] for shift in (0, 1))
        logits = model.step(torch.where(live, token, -1), state, rings=rings)
        total.add_(F.cross_entropy(logits, target, reduction="sum"))
        at.add_(live[:1])

    run = step
    if device.type == "cuda":
        live.fill_(False)  # capturing must not change the state
        run = capture(step)
        live.fill_(True)
        total.zero_()
    count = tokens.shape[1] - 1
    for _ in range(count):
        run()
    return float(total) / (batch * count)


if __name__ == "__main__":
    main(app)
