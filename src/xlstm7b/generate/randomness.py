"""Random numbers that a seed and a place decide, on any device and in any batch."""

import torch
from torch import Tensor


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token [B, 1] at which the weights [B, V] so far exceed the fraction `uniform` [B, 1].

    A fraction below 1 times the total is below the total, in float64, too: there is such a token,
    and its weight is not 0.
    """
    reached = weights.cumsum(-1)
    token = torch.searchsorted(reached, uniform * reached[:, -1:], right=True)
    # Only an idle row or one of NaN gets past the end, and it may not stop the device for all.
    return token.clamp(max=weights.shape[1] - 1)


def uniform(key: Tensor, index: Tensor) -> Tensor:
    """Numbers in [0, 1) of 53 bits [B, 1], the index-th of each key's: splitmix64's sequence."""
    bits = scramble(key + (index + 1) * signed(0x9E3779B97F4A7C15))
    return (_shift_right(bits, 11).double() * 2**-53)[:, None]


def scramble(x: Tensor) -> Tensor:
    """splitmix64's mixing of 64 bits; int64 multiplication wraps around."""
    x = (x ^ _shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """int64's own shift copies the sign bit; this one lets zeros in."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def signed(bits: int) -> int:
    """The int64 of these 64 bits."""
    return bits - (bits >> 63 << 64)
