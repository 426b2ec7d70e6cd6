"""Tokens are drawn from exactly the distribution that the settings name."""

import math

import pytest
import torch
from torch import Tensor

from xlstm7b.generate import sample

DRAWS = 100_000


def reference(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    """The distribution, token by token in plain Python."""
    weights = [math.exp(x / temperature) for x in logits.double().tolist()]
    likeliest = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = likeliest[: top_k or None]
    total = sum(weights[token] for token in kept)
    reached, nucleus = 0.0, []
    for token in kept:
        if reached >= top_p * total:
            break
        nucleus.append(token)
        reached += weights[token]
    return [weights[token] / reached if token in nucleus else 0.0 for token in range(len(weights))]


def frequencies(logits: Tensor, seed: int = 0, **settings: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = sample(logits.expand(DRAWS, -1), generator=generator, **settings)
    return drawn.bincount(minlength=len(logits)) / DRAWS


def assert_drawn_from(got: Tensor, want: list[float]) -> None:
    """Frequencies within five standard deviations, and nothing drawn outside the support."""
    for frequency, p in zip(got.tolist(), want, strict=True):
        assert abs(frequency - p) <= 5 * math.sqrt(p * (1 - p) / DRAWS)
        assert (frequency > 0) == (p > 0)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.5, 0, 1.0),
        (1.0, 1, 1.0),
        (1.0, 4, 1.0),
        (1.3, 12, 1.0),
        (1.0, 99, 1.0),
        (1.0, 0, 0.3),
        (1.0, 0, 0.8),
        (0.7, 0, 0.95),
        # p is reached within the k likeliest, not within all: the order of the two matters.
        (1.0, 5, 0.6),
        (1.7, 3, 0.9),
    ],
)
def test_distribution(temperature, top_k, top_p):
    for seed in range(3):
        logits = torch.randn(12, generator=torch.Generator().manual_seed(seed))
        want = reference(logits, temperature, top_k, top_p)
        got = frequencies(logits, seed, temperature=temperature, top_k=top_k, top_p=top_p)
        assert_drawn_from(got, want)


def test_top_p_is_reached_within_top_k():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # 0.4 / 0.7 reaches 0.5; 0.4 alone does not.
    assert frequencies(logits, top_k=2, top_p=0.5).tolist() == [1, 0, 0, 0]
    assert_drawn_from(frequencies(logits, top_p=0.5), [4 / 7, 3 / 7, 0, 0])


def test_top_p_stops_where_it_is_reached_exactly():
    logits = torch.tensor([0.125, 0.5, 0.25, 0.125]).log()
    assert frequencies(logits, top_p=0.5).tolist() == [0, 1, 0, 0]
    assert_drawn_from(frequencies(logits, top_p=0.75), [0, 2 / 3, 1 / 3, 0])


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.89])
def test_top_p_keeps_the_likeliest_whatever_p_is(top_p):
    logits = torch.tensor([0.05, 0.9, 0.05]).log()
    assert frequencies(logits, top_p=top_p).tolist() == [0, 1, 0]


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.999999}, {"temperature": 9.0}])
def test_minus_infinity_is_never_drawn(settings):
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 1.0])
    assert_drawn_from(frequencies(logits, **settings), [0, 0.5, 0, 0.5])


def test_rows_have_their_own_distributions():
    logits = torch.tensor([[9.0, -torch.inf, -torch.inf], [-torch.inf, 0.0, 0.0]])
    drawn = sample(logits.repeat(500, 1)).view(500, 2)
    assert drawn[:, 0].unique().tolist() == [0]
    assert drawn[:, 1].unique().tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-40, 1e-5])
def test_no_temperature_takes_the_likeliest(temperature):
    logits = torch.randn(200, 50) * 30
    assert torch.equal(sample(logits, temperature=temperature), logits.argmax(-1))


def test_a_generator_alone_decides_and_the_logits_stay():
    logits = torch.randn(64, 100)
    copy, global_state = logits.clone(), torch.get_rng_state()

    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return sample(logits, top_k=50, top_p=0.9, generator=generator).tolist()

    assert draw(1) == draw(1) != draw(2)
    assert torch.equal(torch.get_rng_state(), global_state)
    assert torch.equal(logits, copy)
    sample(logits)
    assert not torch.equal(torch.get_rng_state(), global_state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature must be 0 or a positive number, not -1"),
        ({"temperature": math.inf}, "temperature must be 0 or a positive number, not inf"),
        ({"temperature": math.nan}, "temperature must be 0 or a positive number, not nan"),
        ({"top_k": -1}, r"top_k must be 0 \(all tokens\) or a positive number, not -1"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.1}, r"top_p must be above 0 and at most 1, not 1\.1"),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, not nan"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        sample(torch.zeros(1, 3), **settings)
