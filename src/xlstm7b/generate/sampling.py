"""From logits to the next token."""

import torch
from torch import Tensor


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token a row from logits [B, V]; temperature 0 takes the likeliest.

    `top_k` (0: all) keeps the k likeliest tokens, `top_p` the fewest likeliest ones whose
    probabilities reach p, in that order, as Hugging Face's `generate` does.
    """
    check_settings(temperature=temperature, top_k=top_k, top_p=top_p)
    if temperature == 0:
        return logits.argmax(-1)
    # Not below 1e-30: the quotient has to stay within float32's range.
    ordered, tokens = (logits / max(temperature, 1e-30)).sort(-1, descending=True)
    if top_k:
        ordered[..., top_k:] = -torch.inf
    if top_p < 1:
        probabilities = ordered.softmax(-1)
        reached_before = probabilities.cumsum(-1) - probabilities
        # The likeliest token stays whatever p is: nothing was reached before it.
        ordered = ordered.masked_fill(reached_before >= top_p, -torch.inf)
    rank = torch.multinomial(ordered.softmax(-1), 1, generator=generator)
    return tokens.gather(-1, rank).squeeze(-1)


def check_settings(*, temperature: float, top_k: int, top_p: float) -> None:
    """Raises a `ValueError` that names the first setting outside its range."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or a positive number, not {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k must be 0 (all tokens) or a positive number, not {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
