"""`xlstm7b compare FOLDER`: this package and `transformers` on the same weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlstm7b.bench.measure import GREEDY, measure, random_prompts
from xlstm7b.checkpoint import open_checkpoint, read_quantization, transformers_limits
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer, load_tokenizer, with_first_token

PROMPTS = (
    "In a shocking finding, scientists discovered a herd of unicorns living in a remote valley.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Q: A train travels 60 km in 45 minutes. What is its speed in km/h?\nA:",
    "It was the best of times, it was the worst of times, it was the age of wisdom, " * 8,
)
_STEPS = 8  # tokens of a timing of decoding

Forward = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""Takes tokens [B, T] and a state or None; returns logits [B, T, V] and the new state."""


@dataclass(frozen=True)
class Speeds:
    """Tokens per second."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class PromptResult:
    """The results of one prompt in both implementations."""

    prompt: str
    tokens: int
    relative_difference: float  # ‖ours − theirs‖ / ‖theirs‖ over all logits of the prompt
    largest_difference: float
    same_greedy_tokens: int  # before the two greedy continuations first differ
    greedy_tokens: int


@dataclass(frozen=True)
class Comparison:
    """The results of all prompts, and both speeds on one prompt of `speed_length` tokens."""

    dtype: str
    device: str
    prompts: tuple[PromptResult, ...]
    speed_length: int
    ours: Speeds
    theirs: Speeds


@torch.inference_mode()
def compare(
    folder_or_hub_id: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_new_tokens: int = 32,
    speed_length: int = 256,
) -> Comparison:
    """Runs both packages on the same weights, prompts and device, one after the other."""
    if min(max_new_tokens, speed_length) < 1:
        raise ValueError("max_new_tokens and speed_length must be at least 1")
    checkpoint = open_checkpoint(folder_or_hub_id)
    config, folder = checkpoint.config, checkpoint.folder
    prompts = _prompt_tokens(config, folder)
    theirs = _forward_of(_load_transformers(config, folder, dtype, device))
    model = XLSTM.from_pretrained(folder, dtype=dtype, device=device)
    results = []
    for text, ids in prompts.items():
        tokens = torch.tensor([ids], device=device)
        our_logits, their_logits = model(tokens)[0], theirs(tokens, None)[0]
        difference = (our_logits - their_logits).double()
        pairs = zip(
            _greedy(model, tokens, max_new_tokens),
            _greedy(theirs, tokens, max_new_tokens),
            strict=True,
        )
        results.append(
            PromptResult(
                prompt=text,
                tokens=len(ids),
                relative_difference=float(difference.norm() / their_logits.double().norm()),
                largest_difference=float(difference.abs().max()),
                same_greedy_tokens=next(
                    (n for n, (a, b) in enumerate(pairs) if a != b), max_new_tokens
                ),
                greedy_tokens=max_new_tokens,
            )
        )
    prompt = random_prompts(config.vocab_size, 1, speed_length)
    return Comparison(
        str(dtype).removeprefix("torch."),
        device,
        tuple(results),
        speed_length,
        _our_speeds(model, prompt),
        _their_speeds(theirs, torch.tensor(prompt, device=device)),
    )


def _load_transformers(
    config: ModelConfig, folder: Path, dtype: torch.dtype, device: str
) -> torch.nn.Module:
    """The model of transformers, with native kernels whichever the folder's own config names."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError("this needs transformers: pip install 'xlstm7b[bench]'") from error
    if limits := transformers_limits(config):
        raise ValueError("; ".join(limits))
    named = config.to_dict(str(dtype).removeprefix("torch."))
    if (quantization := read_quantization(folder)) is not None:
        import xlstm7b.integrations.transformers  # noqa: F401 (needed for int4)

        named["quantization_config"] = quantization
    factory: Any = transformers.xLSTMForCausalLM
    theirs = transformers.xLSTMConfig(**named)
    try:
        model = factory.from_pretrained(folder, config=theirs, dtype=dtype).to(device)
    except (RuntimeError, OSError) as error:
        # It cannot read the authors' own format, which `xlstm7b convert` turns into one that it
        # reads.
        reason = " ".join(str(error).split())
        raise ValueError(f"transformers does not load {folder}: {reason}") from error
    module: torch.nn.Module = model.eval()
    return module


def _forward_of(model: torch.nn.Module) -> Forward:
    """A transformers model with the signature of ours."""

    def forward(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        out = model(tokens, cache_params=state, use_cache=True)
        return out.logits, out.cache_params

    return forward


def _our_speeds(model: XLSTM, prompt: list[list[int]]) -> Speeds:
    """The speeds of `Generator`."""
    generator = Generator(model, ByteTokenizer(), batch_size=1)
    prefill = measure(lambda: generator.read(prompt), generator.device)
    state = generator.read(prompt)
    generate = partial(generator.generate, None, state=state, max_new_tokens=_STEPS, **GREEDY)
    return Speeds(len(prompt[0]) / prefill, _STEPS / measure(generate, generator.device))


def _their_speeds(forward: Forward, prompt: Tensor) -> Speeds:
    """Reads the prompt [1, T], then decodes after it."""
    prefill = measure(lambda: forward(prompt, None), prompt.device)
    state = forward(prompt, None)[1]
    decode = measure(lambda: _greedy(forward, prompt[:, -1:], _STEPS, state), prompt.device)
    return Speeds(prompt.numel() / prefill, _STEPS / decode)


def _prompt_tokens(config: ModelConfig, folder: Path) -> dict[str, list[int]]:
    """The fixed prompts as token ids, or random ids if the folder has no tokenizer."""
    if (folder / "tokenizer.json").exists() or config.vocab_size == ByteTokenizer.vocab_size:
        tokenizer = load_tokenizer(folder, config.vocab_size)
        return {text: with_first_token(config, tokenizer.encode(text)) for text in PROMPTS}
    return {
        f"{length} random tokens (the folder has no tokenizer)": random_prompts(
            config.vocab_size, 1, length
        )[0]
        for length in (5, 64, 150)
    }


def _greedy(
    forward: Callable[..., tuple[Tensor, Any]], tokens: Tensor, steps: int, state: Any = None
) -> list[int]:
    output = []
    for _ in range(steps):
        logits, state = forward(tokens, state)
        tokens = logits[:, -1:].argmax(-1)
        output.append(tokens)
    return [int(token) for token in output]  # here, not in the loop: it waits for a GPU
