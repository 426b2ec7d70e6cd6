"""Mixtures: every prefix has each source's share, and sources are read in order."""

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm7b.data.mixture import LONGEST_PERIOD, Mixture

STAGE_2 = {"dclm": 40, "edu": 15, "cosmopedia": 10, "proof": 15, "stack": 15, "sft": 5}
LONG_CONTEXT = {**STAGE_2, "dclm": 20, "long": 15, "align": 1, "antihaystack": 1, "alpaca": 2}


def assert_fair(mixture: Mixture, samples: int, start: int = 0) -> None:
    """Every prefix has each source within one sample of its share, read without gaps."""
    sources, indices = mixture.locate(np.arange(start, start + samples))
    for number, share in enumerate(mixture.shares.values()):
        mine = sources == number
        before = np.cumsum(mine) - mine  # since `start`
        if mine.any():
            drawn = int(indices[mine.argmax()]) + before
            assert (indices[mine] == drawn[mine]).all()
            ahead = drawn * share.denominator - np.arange(start, start + samples) * share.numerator
            assert (abs(ahead) < share.denominator).all()


@pytest.mark.parametrize(
    ("weights", "period"), [(STAGE_2, 20), (LONG_CONTEXT, 99), ({"one": 0.3}, 1)]
)
def test_the_papers_mixtures(weights, period):
    mixture = Mixture(weights)
    assert mixture.names == tuple(weights)
    total = sum(Fraction(str(weight)) for weight in weights.values())
    assert list(mixture.shares.values()) == [Fraction(str(w)) / total for w in weights.values()]
    assert_fair(mixture, 5 * period)
    assert_fair(mixture, 5 * period, start=10**12 + 7)


def test_the_schedule_never_changes():
    sources, indices = Mixture(STAGE_2).locate(np.arange(22))
    assert sources.tolist() == [
        0, 1, 0, 3, 4, 0, 2, 0, 1, 3, 0, 4, 0, 1, 2, 0, 3, 0, 4, 5, 0, 1,
    ]  # fmt: skip
    assert indices.tolist() == [
        0, 0, 1, 0, 0, 2, 0, 3, 1, 1, 4, 1, 5, 2, 1, 6, 2, 7, 2, 0, 8, 3,
    ]  # fmt: skip


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.sampled_from([1, 0.1, 1e-9, 1e20]))
def test_weights_with_a_short_period_are_exact(weights, scale):
    mixture = Mixture({str(n): float(f"{w * scale:.12g}") for n, w in enumerate(weights)})
    assert list(mixture.shares.values()) == [Fraction(w, sum(weights)) for w in weights]
    assert_fair(mixture, 2 * sum(weights))


@settings(max_examples=10)
@given(st.lists(st.floats(1e-3, 1), min_size=2, max_size=12))
def test_other_weights_are_rounded(weights):
    mixture = Mixture({str(n): weight for n, weight in enumerate(weights)})
    assert sum(mixture.shares.values()) == 1
    for share, weight in zip(mixture.shares.values(), weights, strict=True):
        assert abs(share - Fraction(weight) / sum(map(Fraction, weights))) < 1 / LONGEST_PERIOD
    assert_fair(mixture, LONGEST_PERIOD + 100)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_bad_weights_are_refused_by_name(weight):
    with pytest.raises(
        ValueError, match=re.escape(f"'books' has weight {weight}; a weight must be above 0")
    ):
        Mixture({"web": 1, "books": weight})


def test_a_weight_too_small_to_be_drawn_is_refused():
    with pytest.raises(ValueError, match="source 'books' has less than 1/65536 of the total"):
        Mixture({"web": 1, "books": 1e-7})
    with pytest.raises(ValueError, match="at least one source"):
        Mixture({})
