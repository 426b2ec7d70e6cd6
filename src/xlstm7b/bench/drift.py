"""How far states in bfloat16 are from float32 after many tokens, with and without replay decoding.

A text is decoded token by token, each time with the text's own next token (teacher forcing). The
loss with float32 states is the reference.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.bench.cases import Result
from xlstm7b.bench.measure import capture
from xlstm7b.bench.plans import Generation
from xlstm7b.bench.texts import read_text
from xlstm7b.checkpoint import read_config
from xlstm7b.devices import to_dtype
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.replay import Rings
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.report import counted
from xlstm7b.tokenizer import model_tokenizer

_ROWS = 4  # parts of the text that are decoded at the same time


def read_tokens(plan: Generation) -> list[int]:
    """The tokens of the text. Reads no weights. `ValueError` if the text is too short."""
    assert plan.folder is not None
    assert plan.text is not None
    folder = Path(plan.folder)
    tokenizer = model_tokenizer(folder, read_config(folder))
    ids = tokenizer.encode(read_text(Path(plan.text)))
    if len(ids) < plan.drift_tokens + 1:
        raise ValueError(
            f"{plan.text} has {counted(len(ids), 'token')}: give a longer text or fewer "
            "--drift-tokens"
        )
    return ids


def results(plan: Generation) -> Iterator[Result]:
    """One row for each dtype of C, with and without replay."""
    assert plan.folder is not None
    ids = read_tokens(plan)
    model = XLSTM.from_pretrained(plan.folder, dtype=to_dtype(plan.dtype), device=plan.device)
    rows = min(_ROWS, len(ids) // (plan.drift_tokens + 1))
    tokens = torch.tensor(ids[: rows * (plan.drift_tokens + 1)], device=plan.device)
    fused, reference = FusedModel(model), None
    for dtype in (torch.float32, torch.bfloat16):
        for replay in (False, True):
            loss = decoded_loss(fused, tokens.view(rows, -1), dtype, replay=replay)
            reference = reference or loss
            work = f"C in {str(dtype).removeprefix('torch.')}, replay {'on' if replay else 'off'}"
            figures = {"loss": loss, "change": 100 * (loss / reference - 1)}
            yield Result("drift", work=work, batch=rows, length=plan.drift_tokens, figures=figures)


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
