"""Prefill and decode: read a prompt once, then one token at a time from the state alone."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate.sampling import check_settings, sample
from xlstm7b.model import XLSTM


def with_first_token(config: ModelConfig, prompt: Sequence[int]) -> list[int]:
    """The prompt with id 0 in front where the model was trained with it and the prompt lacks it."""
    for token in prompt:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {config.vocab_size}")
    first = [config.bos_token_id]
    if config.force_bos_token_insert and list(prompt[:1]) != first:
        return first + list(prompt)
    if not prompt:
        raise ValueError("the prompt is empty, and this model has no first token of its own")
    return list(prompt)


def check_request(
    *, max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int | None
) -> None:
    """Raises a `ValueError` that names the first setting outside its range."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    check_settings(temperature=temperature, top_k=top_k, top_p=top_p)
    if seed is not None and not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be between 0 and 2^64 - 1, not {seed}")


def stream_tokens(
    model: XLSTM,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Iterator[int]:
    """Yields up to `max_new_tokens` ids that follow the prompt, ending before end of text.

    A bad setting or prompt raises here, not when the first id is asked for.
    """
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    check_request(max_new_tokens=max_new_tokens, seed=seed, **sampling)
    device = model.lm_head.weight.device
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    tokens = torch.tensor([with_first_token(model.config, prompt)], device=device)
    return _stream(model, tokens, max_new_tokens, partial(sample, generator=generator, **sampling))


@torch.inference_mode()
def _stream(
    model: XLSTM, tokens: Tensor, max_new_tokens: int, pick: Callable[[Tensor], Tensor]
) -> Iterator[int]:
    state = None
    for _ in range(max_new_tokens):
        logits, state = model(tokens, state, logits="last")
        tokens = pick(logits)[:, None]
        token = int(tokens)
        if token == model.config.eos_token_id:
            return
        yield token
