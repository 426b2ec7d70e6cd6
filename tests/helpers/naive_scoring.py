"""The evaluators' results computed the slow way: the whole text is read again for every token."""

from collections.abc import Sequence
from pathlib import Path

import torch

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM


@torch.no_grad()
def open_gates(model: XLSTM) -> XLSTM:
    """Changes a fresh model as training does: gates depend on their input, logits differ more."""
    for name, parameter in model.named_parameters():
        if "gate_preact" in name:
            parameter.normal_(std=0.1)
    model.lm_head.weight.mul_(8)
    return model


def small_model(vocab_size: int = 24, dtype: torch.dtype = torch.float64) -> XLSTM:
    torch.manual_seed(0)
    return open_gates(XLSTM(ModelConfig(32, 2, 2, vocab_size=vocab_size)).to(dtype))


def save_byte_model(folder: Path) -> Path:
    """A model for the byte tokenizer, as a checkpoint folder."""
    torch.manual_seed(0)
    open_gates(XLSTM(ModelConfig(64, 2, 2, vocab_size=320))).save_pretrained(folder)
    return folder


@torch.no_grad()
def naive_score(
    model: XLSTM, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """Log-probability of a continuation and whether it is greedy, with id 0 before the context."""
    text = [*context] if context[:1] == [0] else [0, *context]
    total, greedy = 0.0, True
    for token in continuation:
        logits, _ = model(torch.tensor([text]), logits="last")
        total += float(logits[0].log_softmax(0)[token])
        greedy &= int(logits[0].argmax()) == token
        text.append(token)
    return total, greedy
