"""`xlstm7b compare FOLDER`: are our numbers those of `transformers` on these weights?"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlstm7b.bench.peer import (
    Runner,
    Speeds,
    our_generating_runner,
    our_runner,
    speeds,
    their_model,
    their_runner,
)
from xlstm7b.config import ModelConfig
from xlstm7b.generate.decoder import with_first_token
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer, load_tokenizer
from xlstm7b.weights import open_checkpoint

PROMPTS = (
    "In a shocking finding, scientists discovered a herd of unicorns living in a remote valley.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Q: A train travels 60 km in 45 minutes. What is its speed in km/h?\nA:",
    "It was the best of times, it was the worst of times, it was the age of wisdom, " * 8,
)


@dataclass(frozen=True)
class PromptResult:
    """How one prompt came out in both."""

    prompt: str
    tokens: int
    relative_difference: float  # ‖ours − theirs‖ / ‖theirs‖ over all logits of the prompt
    largest_difference: float
    same_greedy_tokens: int  # how many of the greedy continuation's tokens agree from its start
    greedy_tokens: int


@dataclass(frozen=True)
class Comparison:
    """Every prompt's result, and both speeds on one prompt of `speed_length` tokens."""

    dtype: str
    device: str
    prompts: tuple[PromptResult, ...]
    speed_length: int
    ours: Speeds
    theirs: Speeds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ours": self.ours._asdict(), "theirs": self.theirs._asdict()}


@torch.inference_mode()
def compare(
    folder_or_hub_id: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_new_tokens: int = 32,
    speed_length: int = 256,
) -> Comparison:
    """Runs both on the same weights, prompts and device, one after the other."""
    if min(max_new_tokens, speed_length) < 1:
        raise ValueError("max_new_tokens and the length for speeds must be at least 1")
    checkpoint = open_checkpoint(folder_or_hub_id)
    config = checkpoint.config
    prompts = _prompt_tokens(config, checkpoint.folder)
    theirs = their_runner(their_model(config, checkpoint.folder, dtype).to(device))
    model = XLSTM.from_pretrained(checkpoint.folder, dtype=dtype, device=device)
    results = []
    for text, ids in prompts.items():
        tokens = torch.tensor([ids], device=device)
        ours_logits, theirs_logits = our_runner(model)(tokens)[0], theirs(tokens)[0]
        difference = (ours_logits - theirs_logits).double()
        pairs = zip(
            _greedy(our_runner(model), tokens, max_new_tokens),
            _greedy(theirs, tokens, max_new_tokens),
            strict=True,
        )
        results.append(
            PromptResult(
                text,
                len(ids),
                float(difference.norm() / theirs_logits.double().norm()),
                float(difference.abs().max()),
                next((n for n, (a, b) in enumerate(pairs) if a != b), max_new_tokens),
                max_new_tokens,
            )
        )
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (1, speed_length), generator=draw).to(device)
    return Comparison(
        str(dtype).removeprefix("torch."),
        device,
        tuple(results),
        speed_length,
        speeds(our_generating_runner(model), prompt),
        speeds(theirs, prompt),
    )


def _prompt_tokens(config: ModelConfig, folder: Path) -> dict[str, list[int]]:
    """The fixed prompts as ids; a folder without a tokenizer gets fixed random ids instead."""
    if (folder / "tokenizer.json").exists() or config.vocab_size == ByteTokenizer.vocab_size:
        tokenizer = load_tokenizer(folder, config.vocab_size)
        return {text: with_first_token(config, tokenizer.encode(text)) for text in PROMPTS}
    draw = torch.Generator().manual_seed(0)
    return {
        f"{length} random tokens (the folder has no tokenizer)": torch.randint(
            config.vocab_size, (length,), generator=draw
        ).tolist()
        for length in (5, 64, 150)
    }


def _greedy(run: Runner, tokens: Tensor, steps: int) -> list[int]:
    picked: list[int] = []
    memory = None
    for _ in range(steps):
        logits, memory = run(tokens, memory)
        tokens = logits[:, -1:].argmax(-1)
        picked.append(int(tokens))
    return picked
