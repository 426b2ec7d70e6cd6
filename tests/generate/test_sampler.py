"""Sampler: tokens are drawn from exactly the distribution that each row's parameters name."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xlstm7b.generate.params import SamplingParams
from xlstm7b.generate.request import BAD_LOGITS
from xlstm7b.generate.sampler import (
    Needs,
    Sampler,
    _kept,
    _kept_by_cpu,
    draw,
    scramble,
    token_logprobs,
    uniform,
)

EVERYTHING = Needs(True, True, True, True, True, True, 5)
MASK = 2**64 - 1


def set_rows(*rows: SamplingParams, vocab: int, device="cpu", prompts=None) -> Sampler:
    """A sampler whose rows have these parameters. Row r's seed is r if they have none."""
    sampler = Sampler(len(rows), vocab, device)
    for row, params in enumerate(rows):
        seed = row if params.seed is None else params.seed
        params.check(vocab)
        sampler.set_row(row, params, seed=seed, prompt=prompts[row] if prompts else ())
    return sampler


def step(sampler: Sampler, logits: Tensor, needs: Needs | None = None) -> list[int]:
    sampler(logits, sampler.needs if needs is None else needs)
    return sampler.tokens.tolist()


def weights(sampler: Sampler, logits: Tensor, needs: Needs | None = None) -> Tensor:
    needs = sampler.needs if needs is None else needs
    scores = sampler._scores(logits, needs)
    return sampler._weights(scores, scores.amax(-1, keepdim=True), needs)


def probabilities(logits: Tensor, **changes) -> list[float]:
    """Those of one row's first token."""
    w = weights(set_rows(SamplingParams(**changes), vocab=len(logits)), logits[None])[0]
    return (w / w.sum()).tolist()


def random_logits(seed: int, *shape: int, scale: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


# The reference: one row, one parameter after the other, in float64 and Python's integers.


def reference_scores(logits: Tensor, row: SamplingParams, prompt, generated) -> np.ndarray:
    biased = logits.numpy().copy()
    for token, bias in row.logit_bias.items():
        biased[token] += np.float32(bias)
    scores = biased.astype(np.float64)
    for token in {*prompt, *generated}:
        s, penalty = scores[token], row.repetition_penalty
        scores[token] = s / penalty if s > 0 else s * penalty
    for token in set(generated):
        scores[token] -= row.presence_penalty
        scores[token] -= row.frequency_penalty * generated.count(token)
    if len(generated) < row.min_new_tokens:
        scores[list(row.eos_token_ids)] = -np.inf
    return scores


def reference_probabilities(scores: np.ndarray, row: SamplingParams) -> np.ndarray:
    w = np.exp((scores - scores.max()) / row.temperature)
    likeliest = np.argsort(-scores, kind="stable")[: row.top_k or None]
    reached, kept = 0.0, []
    for token in likeliest:
        if reached < row.top_p * w[likeliest].sum() and w[token] >= row.min_p * w.max():
            kept.append(token)
        reached += w[token]
    p = np.zeros_like(w)
    p[kept] = w[kept] / w[kept].sum()
    return p


def splitmix64(state: int, count: int) -> list[int]:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        out.append(mix(state))
    return out


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def reference_token(scores: np.ndarray, row: SamplingParams, index: int) -> int:
    if row.temperature == 0:
        return int(scores.argmax())
    fraction = (splitmix64(mix(row.seed), index + 1)[-1] >> 11) / 2**53
    return int(np.argmax(reference_probabilities(scores, row).cumsum() > fraction))


VOCAB = 37
tokens = st.integers(0, VOCAB - 1)
row_params = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(3, 5),
    min_new_tokens=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 36, 37, 99]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3, 5.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.6, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-math.inf, -100.0, 4.0, 9.5]), max_size=4),
    seed=st.integers(0, MASK),
    eos_token_id=st.none() | tokens | st.lists(tokens, max_size=3),
    logprobs=st.none() | st.integers(0, 20),
)


@given(
    rows=st.lists(st.tuples(row_params, st.lists(tokens, max_size=9)), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    grid=st.sampled_from([0.0, 0.5]),
    needs=st.sampled_from([Needs(), EVERYTHING]),
)
def test_every_parameter_against_the_reference(rows, seed, grid, needs):
    """Outputs of five tokens: scores, distributions, tokens and ends; with equal logits, too."""
    sampler = set_rows(*[s for s, _ in rows], vocab=VOCAB, prompts=[prompt for _, prompt in rows])
    outputs, ended = [[] for _ in rows], [False for _ in rows]
    for index in range(6):
        logits = random_logits(seed + index, len(rows), VOCAB)
        logits = (logits / grid).round() * grid if grid else logits
        logits[:, 11] = -torch.inf
        asked = Needs.union([sampler.needs, needs])
        got_scores, got_weights = sampler._scores(logits, asked), weights(sampler, logits, asked)
        drawn = step(sampler, logits, asked)
        for r, (row, prompt) in enumerate(rows):
            if ended[r] or len(outputs[r]) == row.max_new_tokens:
                assert drawn[r] == sampler.pending[r] == -1
                continue
            scores = reference_scores(logits[r], row, prompt, outputs[r])
            np.testing.assert_allclose(got_scores[r], scores, rtol=1e-12)
            if row.temperature:
                p = reference_probabilities(scores, row)
                got = got_weights[r] / got_weights[r].sum()
                np.testing.assert_allclose(got, p, atol=1e-13)
                # A weight below 2^-47 of the largest becomes 0.
                assert ((p > 0) >= (got.numpy() > 0)).all()
                assert (p[got == 0] < 2**-46).all()
            assert drawn[r] == reference_token(scores, row, len(outputs[r]))
            outputs[r].append(drawn[r])
            ended[r] = drawn[r] in row.eos_token_ids
            assert sampler.pending[r] == (-1 if ended[r] else drawn[r])
        assert sampler.index.tolist() == [len(output) for output in outputs]


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"min_p": 0.1},
        {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
        {"temperature": 1.7, "top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "temperature": 0.8, "top_k": 90, "top_p": 0.97, "min_p": 0.01},
    ],
)
def test_hugging_face_agrees(changes):
    transformers = pytest.importorskip("transformers")
    row = SamplingParams(**changes)
    processors = [
        transformers.RepetitionPenaltyLogitsProcessor(row.repetition_penalty),
        transformers.TemperatureLogitsWarper(row.temperature),
        *([transformers.TopKLogitsWarper(row.top_k)] if row.top_k else []),
        transformers.TopPLogitsWarper(row.top_p),
        transformers.MinPLogitsWarper(row.min_p),
    ]
    for seed in range(20):
        logits = random_logits(seed, 1, 300, scale=2.0)
        prompt = torch.randint(300, (1, 40), generator=torch.Generator().manual_seed(seed))
        want = logits.double()
        for processor in processors:
            want = processor(prompt, want)
        got = weights(set_rows(row, vocab=300, prompts=prompt.tolist()), logits)
        torch.testing.assert_close(got / got.sum(), want.softmax(-1), rtol=1e-9, atol=1e-12)
        assert torch.equal(got > 0, want > -torch.inf)


def test_the_bias_comes_before_the_penalties():
    """As in vLLM: token 0 of the prompt has (−1 + 3) / 2 = 1, and not 3 − 1 · 2."""
    row = {"logit_bias": {0: 3.0}, "repetition_penalty": 2.0}
    logits = torch.tensor([[-1.0, 0.5, 4.0]])
    want = torch.tensor([1.0, 0.5, 4.0]).double().softmax(-1)
    got = weights(set_rows(SamplingParams(**row), vocab=3, prompts=[[0]]), logits)
    torch.testing.assert_close((got / got.sum())[0], want, rtol=1e-9, atol=1e-12)


def test_top_p_is_reached_within_top_k():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # 0.4 / 0.7 reaches 0.5; 0.4 alone does not.
    assert probabilities(logits, top_k=2, top_p=0.5) == [1, 0, 0, 0]
    assert probabilities(logits, top_p=0.5) == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_equal_tokens_are_kept_in_order():
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0, 2.0, 2.0])
    assert probabilities(logits, top_k=1) == [0, 1, 0, 0, 0, 0]
    assert probabilities(logits, top_k=3) == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3, 0])
    assert probabilities(torch.zeros(4), top_p=0.5) == [0.5, 0.5, 0, 0]
    assert probabilities(torch.zeros(5), top_p=0.5) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])
    assert probabilities(logits, min_p=1.0) == [0, 0.25, 0.25, 0, 0.25, 0.25]
    sampler = set_rows(SamplingParams(temperature=0), vocab=6)
    assert step(sampler, logits[None]) == [1]


@given(
    rows=st.lists(
        st.builds(
            SamplingParams,
            top_k=st.sampled_from([0, 1, 4, 15, 36]),
            top_p=st.sampled_from([1.0, 1e-9, 0.3, 0.6, 0.9]),
        ),
        min_size=1,
        max_size=5,
    ),
    positions=st.sampled_from([0, 1, 3]),
    few=st.sampled_from([1, 2, 5, 16, 36, 37]),
    seed=st.integers(0, 2**32),
    grid=st.sampled_from([0.0, 0.5, 3.0]),
    scale=st.sampled_from([0.0, 0.3, 3.0]),
    idle=st.integers(-1, 4),
    bad=st.sampled_from([None, -math.inf, math.nan]),
)
def test_a_cpu_keeps_the_same_tokens_without_sorting_all(
    rows, positions, few, seed, grid, scale, idle, bad
):
    sampler = set_rows(*rows, vocab=VOCAB)
    shape = (len(rows), positions, VOCAB) if positions else (len(rows), VOCAB)
    scores = random_logits(seed, *shape, scale=scale)
    if grid:
        scores = (scores / grid).round() * grid  # equal scores
    if bad is not None:
        scores[0, ..., seed % VOCAB] = bad
    weights = ((scores - scores.amax(-1, keepdim=True)).exp() * 2.0**40).double().round()
    limits = sampler._top_p, sampler._last_rank[:, None]
    if positions:
        limits = tuple(limit[:, None] for limit in limits)
    asked = torch.arange(len(rows)).view(-1, *[1] * (len(shape) - 1)) != idle
    with mock.patch("xlstm7b.generate.sampler._FEW", few):
        got = _kept_by_cpu(scores, weights, *limits, asked)
    where = asked.expand(shape)
    torch.testing.assert_close(
        got[where], _kept(scores, weights, *limits)[where], rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("top_p", [5e-324, 0.3, 0.89])
def test_top_p_keeps_the_most_likely_token_whatever_p_is(top_p):
    assert probabilities(torch.tensor([0.05, 0.9, 0.05]).log(), top_p=top_p) == [0, 1, 0]


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-300, 1e-30, 1e-5])
@pytest.mark.parametrize("changes", [{}, {"top_k": 7, "top_p": 0.9, "min_p": 0.1}])
def test_a_temperature_near_0_takes_the_most_likely_token(temperature, changes):
    logits = random_logits(0, 200, 50, scale=30)
    logits[:, 3] = -torch.inf
    row = SamplingParams(temperature=temperature, **changes)
    sampler = set_rows(*[row] * 200, vocab=50)
    assert step(sampler, logits) == logits.argmax(-1).tolist()


def test_a_high_temperature_makes_all_tokens_equally_likely():
    logits = torch.tensor([-30.0, -torch.inf, 30.0, 0.0])
    assert probabilities(logits, temperature=1e300) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.6}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}]
)
def test_frequencies(changes):
    """Pearson's chi-square over 32 × 1024 draws: seeds 0 to 1023, tokens 0 to 31 of each output."""
    logits = random_logits(1, 23, scale=1.5)
    row = SamplingParams(**changes)
    p = reference_probabilities(logits.double().numpy(), row)
    sampler = set_rows(*[row] * 1024, vocab=23)
    drawn = [step(sampler, logits.expand(1024, -1)) for _ in range(32)]
    counts, expected = np.bincount(np.ravel(drawn), minlength=23), p * 32 * 1024
    assert (counts[p == 0] == 0).all()
    kept = p > 0
    degrees = kept.sum() - 1
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    # Five standard deviations above the mean.
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)
    # A token is not repeated more often than chance.
    repeated = (np.array(drawn[1:]) == np.array(drawn[:-1])).mean()
    chance = (p**2).sum()
    assert abs(repeated - chance) < 5 * math.sqrt(chance * (1 - chance) / (31 * 1024))


def test_uniform_numbers():
    # The first numbers that were published for splitmix64's state 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(1234567, 3) == published
    got = uniform(torch.tensor(1234567), torch.arange(3))
    assert got[:, 0].tolist() == [(bits >> 11) / 2**53 for bits in published]
    n = 50_000
    keys, steps, zeros = torch.arange(n), torch.arange(n), torch.zeros(n, dtype=torch.int64)
    scrambled = scramble(keys)
    assert scrambled.unique().numel() == n
    for numbers in uniform(scrambled, zeros), uniform(scrambled[7], steps):
        ordered = numbers[:, 0].sort().values
        assert 0 <= ordered[0] < ordered[-1] < 1
        # Kolmogorov and Smirnov's bound at a chance of 1e-6.
        assert (ordered - (steps + 0.5) / n).abs().max() < 2.7 / math.sqrt(n)


@pytest.mark.parametrize("vocab", [3, 320, 50304, 65537])
def test_draws_at_both_ends(vocab):
    """No token of weight 0 is drawn, neither by the lowest number nor by the highest."""
    logits = torch.full((1, vocab), -torch.inf)
    inner = torch.arange(vocab // 3, vocab - vocab // 3)
    logits[:, inner] = random_logits(2, len(inner))
    w = weights(set_rows(SamplingParams(), vocab=vocab), logits)
    assert w.sum() < 2**53
    first, last = w[0].nonzero()[[0, -1], 0].tolist()
    for fraction, want in (0.0, first), (5e-324, first), (1 - 2**-53, last):
        got = draw(w, torch.tensor([[fraction]], dtype=torch.float64))
        assert got.tolist() == [[want]]


def test_draws_at_the_border_of_two_tokens():
    w = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0, 1.0, 0.0]], dtype=torch.float64).expand(6, -1)
    below = [math.nextafter(0.25, 0), math.nextafter(0.75, 0)]
    fractions = [0.0, below[0], 0.25, below[1], 0.75, 1 - 2**-53]
    drawn = draw(w.contiguous(), torch.tensor(fractions, dtype=torch.float64)[:, None])
    assert drawn[:, 0].tolist() == [1, 1, 3, 3, 5, 5]


@settings(max_examples=30)
@given(
    rows=st.lists(row_params, min_size=2, max_size=9), seed=st.integers(0, 2**32), data=st.data()
)
def test_other_rows_do_not_matter(rows, seed, data):
    """A row in a batch, and alone with all work done that other rows may need: the same tokens."""
    row = data.draw(st.integers(0, len(rows) - 1))
    together = set_rows(*rows, vocab=VOCAB)
    alone = set_rows(rows[row], vocab=VOCAB)
    for index in range(5):
        logits = random_logits(seed + index, len(rows), VOCAB)
        step(together, logits)
        step(alone, logits[row : row + 1], EVERYTHING)
        for name in ("tokens", "pending", "index"):
            assert getattr(together, name)[row] == getattr(alone, name)[0]


@pytest.mark.parametrize("vocab", [37, 50304])
def test_work_for_other_rows_changes_no_bit(vocab):
    sampler = set_rows(*[SamplingParams(eos_token_id=0)] * 8, vocab=vocab)
    for index in range(3):
        logits = random_logits(index, 8, vocab)
        logits[:, 5], logits[:, 6] = -torch.inf, -0.0
        before = logits.clone()
        plain, all_work = sampler._scores(logits, Needs(True)), sampler._scores(logits, EVERYTHING)
        assert torch.equal(plain.double(), all_work.double())
        assert torch.equal(
            weights(sampler, logits, Needs(True)), weights(sampler, logits, EVERYTHING)
        )
        step(sampler, logits, EVERYTHING)
        assert torch.equal(logits, before)


def test_batch_size_does_not_matter():
    """At the full vocabulary, with and without filters."""
    rows = [SamplingParams(top_p=1.0 if r % 2 else 0.9, temperature=0.9) for r in range(5)]
    logits = random_logits(0, 5, 50304)
    drawn = step(set_rows(*rows, vocab=50304), logits)
    for row in range(5):
        alone = set_rows(replace(rows[row], seed=row), vocab=50304)
        assert step(alone, logits[row : row + 1]) == [drawn[row]]


def test_seeds():
    logits = random_logits(0, 1, 1000, scale=1.0).expand(4, -1)
    rows = [SamplingParams(seed=seed) for seed in (3, 4, 3, MASK)]
    sampler = set_rows(*rows, vocab=1000)
    first, other, same, last = zip(*[step(sampler, logits) for _ in range(9)], strict=True)
    assert first == same != other != last != first
    # A seed's numbers are not those of the next seed, one token later.
    assert first[1:] != other[:-1]
    assert len(set(first)) > 5


def test_end_of_text():
    a, b, c = torch.eye(5)[[2, 3, 4]] * 100
    ends = [None, 3, [3, 4], (), [4]]
    rows = [SamplingParams(temperature=0, max_new_tokens=3, eos_token_id=end) for end in ends]
    sampler = set_rows(*rows, vocab=5)
    assert sampler.pending.tolist() == [0] * 5
    assert sampler.tokens.tolist() == [-1] * 5
    seen = []
    for logits in (a, b, c, a, b):
        step(sampler, logits.expand(5, -1))
        seen.append([sampler.tokens.tolist(), sampler.pending.tolist(), sampler.index.tolist()])
    assert seen == [
        [[2, 2, 2, 2, 2], [2, 2, 2, 2, 2], [1, 1, 1, 1, 1]],
        [[3, 3, 3, 3, 3], [3, -1, -1, 3, 3], [2, 2, 2, 2, 2]],
        # The last of three tokens is still to be read, unless it is an end of text.
        [[4, -1, -1, 4, 4], [4, -1, -1, 4, -1], [3, 2, 2, 3, 3]],
        [[-1] * 5, [-1] * 5, [3, 2, 2, 3, 3]],
        [[-1] * 5, [-1] * 5, [3, 2, 2, 3, 3]],
    ]


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_end_before_min_new_tokens(temperature):
    logits = torch.tensor([[0.0, 50.0, 90.0, 1.0]]).expand(2, -1)
    row = SamplingParams(temperature=temperature, min_new_tokens=2, eos_token_id=[1, 2])
    sampler = set_rows(row, replace(row, min_new_tokens=0), vocab=4)
    drawn = [step(sampler, logits) for _ in range(4)]
    assert [second for _, second in drawn] == [2, -1, -1, -1]
    first = [token for token, _ in drawn]
    assert {*first[:2]} <= {0, 3}
    assert first[2:] == [2, -1]


def test_penalties_count_the_output():
    logits = torch.tensor([[5.0, 4.6, 4.2, -1.0]]).expand(3, -1)
    rows = [
        SamplingParams(temperature=0, presence_penalty=0.5),
        SamplingParams(temperature=0, frequency_penalty=0.5),
        SamplingParams(temperature=0, repetition_penalty=1.2),
    ]
    sampler = set_rows(*rows, vocab=4, prompts=[[0], [0], [0]])
    drawn = zip(*[step(sampler, logits) for _ in range(6)], strict=True)
    # Once each, then the best again · 5, 4.6, 4.5, 4.2, 4.1, 4.0 · 4.2 and 4.6 before 5 / 1.2.
    assert [*drawn] == [(0, 1, 0, 0, 0, 0), (0, 1, 0, 2, 1, 0), (1, 2, 0, 0, 0, 0)]


def test_a_row_that_is_cleared_and_its_neighbour():
    sampler = set_rows(*[SamplingParams(temperature=0)] * 2, vocab=3)
    logits = torch.eye(3)[[1, 2]]
    assert step(sampler, logits) == [1, 2]
    sampler.clear_row(0)
    assert sampler.pending.tolist() == [-1, 2]
    assert step(sampler, logits) == [-1, 2]
    assert sampler.index.tolist() == [1, 2]


def test_idle_rows():
    sampler = Sampler(3, 7, "cpu")
    assert sampler.needs == Needs()
    assert step(sampler, random_logits(0, 3, 7), EVERYTHING) == [-1, -1, -1]
    sampler.set_row(1, SamplingParams(top_k=3), seed=0)
    assert [token >= 0 for token in step(sampler, random_logits(0, 3, 7))] == [False, True, False]
    sampler.clear_row(1)
    assert step(sampler, random_logits(0, 3, 7), EVERYTHING) == [-1, -1, -1]
    assert sampler.needs == Needs()


@given(first=row_params, second=row_params, clear=st.booleans())
@settings(max_examples=50)
def test_a_row_that_is_used_again_keeps_nothing(first, second, clear):
    """A request in a row that another had before: as in a row that was never used."""
    used = set_rows(first, first, vocab=VOCAB, prompts=[[1, 2, 3], [4]])
    for index in range(3):
        step(used, random_logits(index, 2, VOCAB), EVERYTHING)
    if clear:
        used.clear_row(0)
        step(used, random_logits(3, 2, VOCAB), EVERYTHING)
    used.set_row(0, second, seed=5, prompt=[7, 8])
    fresh = set_rows(replace(second, seed=5), vocab=VOCAB, prompts=[[7, 8]])
    for index in range(5):
        logits = random_logits(index, 2, VOCAB)
        got, want = used._scores(logits, EVERYTHING)[0], fresh._scores(logits[:1], EVERYTHING)[0]
        assert torch.equal(got, want)
        assert step(used, logits, EVERYTHING)[0] == step(fresh, logits[:1], EVERYTHING)[0]


def test_needs_are_those_of_the_rows():
    plain = SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1, eos_token_id=1)
    cases = [
        (plain, Needs()),
        (replace(plain, temperature=1), Needs(sampling=True, filters=True)),
        (SamplingParams(), Needs(sampling=True)),
        (replace(plain, repetition_penalty=1.1), Needs(penalties=True)),
        (replace(plain, presence_penalty=-0.1), Needs(penalties=True)),
        (replace(plain, frequency_penalty=0.1), Needs(penalties=True)),
        (replace(plain, logit_bias={0: 0.5}), Needs(bias=True)),
        (replace(plain, min_new_tokens=1), Needs(minimum=True)),
        (replace(plain, structured_outputs={"regex": "a"}), Needs(grammar=True)),
        (replace(plain, logprobs=0), Needs(logprobs=0)),
        (replace(plain, logprobs=3), Needs(logprobs=3)),
    ]
    sampler = Sampler(3, 9, "cpu")
    for row, needs in cases:
        sampler.set_row(1, row, seed=0)
        assert sampler.needs == Needs.of(row) == needs
    sampler.set_row(0, replace(plain, logprobs=2, temperature=1), seed=0)
    sampler.set_row(2, replace(plain, logit_bias={0: 0.5}), seed=0)
    assert sampler.needs == Needs(sampling=True, filters=True, bias=True, logprobs=3)
    sampler.clear_row(1)
    assert sampler.needs == Needs(sampling=True, filters=True, bias=True, logprobs=2)
    sampler.set_row(0, plain, seed=0)
    assert sampler.needs == Needs(bias=True)
    assert hash(sampler.needs) == hash(Needs(bias=True))


def test_buffers_stay_where_they_are():
    sampler = set_rows(*[SamplingParams()] * 3, vocab=50)
    assert not {"_bias", "_counts", "_in_prompt", "_allowed"} & {*vars(sampler)}

    def addresses() -> dict[str, int]:
        return {k: v.data_ptr() for k, v in vars(sampler).items() if isinstance(v, Tensor)}

    before = addresses()
    row = SamplingParams(
        logit_bias={3: -1.0},
        presence_penalty=1.0,
        logprobs=4,
        structured_outputs={"regex": "a"},
    )
    sampler.set_row(1, row, seed=1)
    large = addresses()
    assert {*large} - {*before} == {"_bias", "_counts", "_in_prompt", "_allowed"}
    for index in range(3):
        step(sampler, random_logits(index, 3, 50), EVERYTHING)
        sampler.set_row(index, row, seed=1)
    assert addresses() == large
    assert before.items() <= large.items()


@given(n=st.integers(0, 20), seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0]))
def test_logprobs_are_of_the_logits_as_they_came(n, seed, temperature):
    row = SamplingParams(
        temperature=temperature, top_k=5, logit_bias={2: 8.0}, presence_penalty=1.5, logprobs=n
    )
    sampler = set_rows(*[row] * 4, vocab=VOCAB)
    for index in range(2):
        logits = random_logits(seed + index, 4, VOCAB)
        drawn = torch.tensor(step(sampler, logits))
        want = logits.double().log_softmax(-1).float()
        torch.testing.assert_close(sampler.logprob, want.gather(-1, drawn[:, None])[:, 0])
        values, ids = want.topk(n)
        torch.testing.assert_close(sampler.top_logprobs[:, :n], values)
        assert torch.equal(sampler.top_tokens[:, :n], ids)


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_token_banned(temperature):
    """Nothing is left to choose: token 0. The neighbour is not affected."""
    banned = SamplingParams(
        temperature=temperature, logit_bias=dict.fromkeys(range(9), -math.inf), logprobs=2
    )
    sampler = set_rows(banned, SamplingParams(temperature=temperature, top_k=4), vocab=9)
    alone = set_rows(SamplingParams(temperature=temperature, top_k=4, seed=1), vocab=9)
    for index in range(3):
        logits = random_logits(index, 2, 9)
        assert step(sampler, logits) == [0, *step(alone, logits[1:])]
        torch.testing.assert_close(sampler.logprob[:1], logits[:1].log_softmax(-1)[:, 0])


def test_logits_that_are_not_numbers_end_one_row():
    sampler = set_rows(*[SamplingParams(presence_penalty=1.0, top_p=0.9)] * 3, vocab=9)
    logits = random_logits(0, 3, 9)
    healthy = set_rows(*[SamplingParams(presence_penalty=1.0, top_p=0.9)] * 3, vocab=9)
    want = step(healthy, logits)
    logits[1], logits[2, 4] = torch.nan, torch.inf
    assert step(sampler, logits) == [want[0], BAD_LOGITS, BAD_LOGITS]
    assert (sampler.pending >= 0).tolist() == [True, False, False]
    assert step(sampler, random_logits(1, 3, 9))[1:] == [-1, -1]  # they have ended


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_single_logit_that_is_not_a_number_is_noticed(temperature):
    sampler = set_rows(*[SamplingParams(temperature=temperature)] * 2, vocab=9)
    logits = random_logits(0, 2, 9)
    logits[0, 3] = torch.nan
    assert [token == BAD_LOGITS for token in step(sampler, logits)] == [True, False]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_sampler_is_made_and_called_in_any_mode(mode):
    row = SamplingParams(logit_bias={1: 0.5}, presence_penalty=0.5, logprobs=1)
    with mode():
        sampler = set_rows(row, row, vocab=7)
    assert min(step(sampler, random_logits(0, 2, 7).requires_grad_())) >= 0
    sampler.set_row(0, row, seed=3)
    with mode():
        assert min(step(sampler, random_logits(1, 2, 7))) >= 0
    assert not sampler.logprob.requires_grad


def test_numbers_of_numpy_are_numbers():
    row = SamplingParams(
        temperature=np.float32(0.5), seed=np.int64(3), eos_token_id=np.int64(2), top_k=np.int32(4)
    )
    row.check(40)
    assert row.eos_token_ids == (2,)
    logits = random_logits(0, 1, 40)
    plain = SamplingParams(temperature=0.5, seed=3, eos_token_id=2, top_k=4)
    assert step(set_rows(row, vocab=40), logits) == step(set_rows(plain, vocab=40), logits)


def test_extreme_parameters_that_are_allowed():
    logits = random_logits(0, 1, 40, scale=30)
    for changes in (
        {"max_new_tokens": 2**63 - 1, "min_new_tokens": 2**63 - 1, "eos_token_id": 39},
        {"top_k": 2**70},
        {"logit_bias": {0: -1e300, 1: 100.0, 39: -math.inf}},
        {"repetition_penalty": 0.01, "frequency_penalty": -100, "presence_penalty": -100},
        {"repetition_penalty": 100, "frequency_penalty": 100.0},
        {"min_p": 1.0, "top_p": 1.0},
    ):
        sampler = set_rows(SamplingParams(seed=MASK, **changes), vocab=40)
        for _ in range(3):
            assert 0 <= step(sampler, logits)[0] < 40
            assert weights(sampler, logits).sum().isfinite()


# Some rows of a batch, and rows that move


def tensors_of(sampler: Sampler) -> dict[str, Tensor]:
    return {name: value for name, value in vars(sampler).items() if isinstance(value, Tensor)}


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(row_params, st.lists(tokens, max_size=9)), min_size=2, max_size=6),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_rows_that_are_sampled_alone(rows, seed, data):
    """The same tokens and log-probabilities as in a sampler of one row; the others stay as is."""
    together = set_rows(*[row for row, _ in rows], vocab=VOCAB, prompts=[p for _, p in rows])
    alone = []
    for index, (row, prompt) in enumerate(rows):
        one = Sampler(1, VOCAB, "cpu")
        one.set_row(0, row, seed=row.seed if row.seed is not None else index, prompt=prompt)
        alone.append(one)
    for turn in range(6):
        logits = random_logits(seed + turn, len(rows), VOCAB)
        indices = st.lists(st.sampled_from(range(len(rows))), unique=True, min_size=1)
        chosen = data.draw(indices, label="rows")
        before = {name: value.clone() for name, value in tensors_of(together).items()}
        results = together.sample_rows(logits, chosen)
        assert results.needs == Needs.union([Needs.of(rows[index][0]) for index in chosen])
        for place, index in enumerate(chosen):
            step(alone[index], logits[index : index + 1])
            count = rows[index][0].logprobs
            for name in ("tokens", "pending", "index"):
                want = getattr(alone[index], name)[0]
                assert getattr(results, name)[place] == getattr(together, name)[index] == want
            if count is not None:
                assert results.logprob[place] == alone[index].logprob[0]
                for name in ("top_logprobs", "top_tokens"):
                    got, want = getattr(results, name)[place], getattr(alone[index], name)[0]
                    assert torch.equal(got[:count], want[:count])
        others = [index for index in range(len(rows)) if index not in chosen]
        for name in ("tokens", "pending", "index", "_counts"):
            if name in before:
                assert torch.equal(getattr(together, name)[others], before[name][others])
    # All rows at once give the same as before, whatever was sampled alone.
    logits = random_logits(seed, len(rows), VOCAB)
    got = step(together, logits)
    assert got == [step(one, logits[index : index + 1])[0] for index, one in enumerate(alone)]


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(row_params, st.lists(tokens, max_size=9)), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    positions=st.integers(1, 5),
    everything=st.booleans(),
    data=st.data(),
)
def test_positions_after_drafts_are_sampled_as_one_after_the_other(
    rows, seed, positions, everything, data
):
    """Each row has as many tokens as its drafts are right, and one more."""
    together = set_rows(*[row for row, _ in rows], vocab=VOCAB, prompts=[p for _, p in rows])
    alone = []
    for row, prompt in rows:
        one = Sampler(1, VOCAB, "cpu")
        one.set_row(0, row, seed=row.seed, prompt=prompt)
        alone.append(one)
    needs = EVERYTHING if everything else together.needs
    for turn in range(3):
        logits = random_logits(seed + turn, len(rows), positions, VOCAB)
        wanted, kept, logprobs, drafts = [], [], [], []
        for row, one in enumerate(alone):
            found, draft = [], [data.draw(st.integers(-1, VOCAB - 1)) for _ in range(positions - 1)]
            count, goes_on = 0, int(one.pending[0]) >= 0
            while goes_on:
                (token,) = step(one, logits[row, count][None], needs)
                found.append(token)
                logprobs.append((row, count, one.logprob[0].clone()))
                if token == -1:  # the output has its last token
                    logprobs.pop()
                count += 1
                if count < positions and data.draw(st.integers(0, 4)):
                    draft[count - 1] = max(0, token)
                goes_on = count < positions and int(one.pending[0]) == draft[count - 1] >= 0
            wanted.append(found + [-1] * (positions - len(found)))
            kept.append(count)
            drafts.append(draft)
        given_drafts = torch.tensor(drafts, dtype=torch.long).view(len(rows), positions - 1)
        unused = torch.zeros(len(rows), positions - 1, 2, dtype=torch.int32)
        drawn = together.sample_drafts(logits, given_drafts, needs, unused)
        assert drawn.tokens.tolist() == wanted
        assert drawn.kept.tolist() == kept
        for row, one in enumerate(alone):
            assert together.pending[row] == one.pending[0]
            assert together.index[row] == one.index[0]
            if "_counts" in vars(one):
                assert torch.equal(together._counts[row], one._counts[0])
        if needs.logprobs is not None:
            token = drawn.tokens.clamp(min=0)[..., None]
            own, top_logprobs, top_tokens = token_logprobs(logits, token, needs.logprobs)
            assert top_logprobs.shape == top_tokens.shape == (*own.shape, needs.logprobs)
            for row, position, want in logprobs:
                assert own[row, position] == want


@settings(max_examples=60)
@given(
    first=row_params,
    second=row_params,
    third=row_params,
    steps=st.integers(0, 3),
    target=st.sampled_from([0, 1, 3]),
)
def test_a_row_that_moves_continues_as_if_it_had_not(first, second, third, steps, target):
    """It moves to a row that was never used, or was used before; the row that it left is idle."""
    prompts = [[1, 2], [3], [5, 6, 6]]
    moved = Sampler(4, VOCAB, "cpu")
    for row, params in enumerate((first, second, third)):
        moved.set_row(row, params, seed=row, prompt=prompts[row], output=[7, 7])
    stays = Sampler(1, VOCAB, "cpu")
    stays.set_row(0, third, seed=2, prompt=prompts[2], output=[7, 7])
    for index in range(steps):
        logits = random_logits(index, 4, VOCAB)
        step(moved, logits, EVERYTHING)
        step(stays, logits[2:3], EVERYTHING)
    moved.move_row(2, target)
    assert moved.pending[2] == -1
    assert moved.needs == Needs.union(
        [Needs.of(third), *(Needs.of(p) for n, p in enumerate((first, second)) if n != target)]
    )
    for index in range(steps, steps + 4):
        logits = random_logits(index, 4, VOCAB)
        logits[target] = logits[2]
        got = moved._scores(logits, EVERYTHING)[target]
        assert torch.equal(got, stays._scores(logits[2:3], EVERYTHING)[0])
        drawn = step(moved, logits, EVERYTHING)
        assert drawn[target] == step(stays, logits[2:3], EVERYTHING)[0]
        assert drawn[2] == -1
        assert moved.index[target] == stays.index[0]


def test_tokens_that_were_generated_before_are_counted():
    params = SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=2.0)
    logits = torch.tensor([[9.0, 9.2, 9.4, 5.0]])
    sampler = Sampler(1, 4, "cpu")
    sampler.set_row(0, params, seed=0, prompt=[0], output=[1, 1, 2])
    # Halved in the prompt and in the output, where each time costs 1, too.
    assert sampler._scores(logits, sampler.needs).tolist() == [
        pytest.approx([4.5, 4.6 - 2, 4.7 - 1, 5.0])
    ]
    assert step(sampler, logits) == [3]
    assert sampler.index.tolist() == [1]  # they do not count towards max_new_tokens


def test_a_view_of_the_first_rows():
    """Its memory is the sampler's: rows that are set in one are sampled in the other."""
    sampler = Sampler(4, VOCAB, "cpu")
    view = sampler.first(2)
    params = [SamplingParams(seed=n, presence_penalty=1.0, logit_bias={n: 3.0}) for n in range(4)]
    for row in range(4):
        sampler.set_row(row, params[row], seed=row)
    alone = set_rows(*params[:2], vocab=VOCAB)
    for index in range(4):
        logits = random_logits(index, 2, VOCAB)
        view(logits, view.needs)
        assert view.tokens.tolist() == sampler.tokens[:2].tolist() == step(alone, logits)
    assert sampler.index.tolist() == [4, 4, 0, 0]
    shared = tensors_of(view)
    for name, value in tensors_of(sampler).items():
        if value.shape[0] == 4:
            assert shared[name].data_ptr() == value.data_ptr()
            assert len(shared[name]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [320, 50304])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_cuda_graph_draws_the_cpus_tokens(batch, vocab):
    variants = [
        SamplingParams(top_p=0.9, logprobs=20),
        SamplingParams(temperature=0, repetition_penalty=1.2),
        SamplingParams(eos_token_id=[0, 5], min_new_tokens=4),
        SamplingParams(top_k=50, frequency_penalty=0.3, seed=MASK),
        SamplingParams(min_p=0.05, temperature=0.8, max_new_tokens=7),
        SamplingParams(logit_bias={7: 12.0, 9: -math.inf}, logprobs=0),
        SamplingParams(temperature=1.4),
    ]
    for rows in [variants[i : i + batch] for i in range(0, len(variants), batch)]:
        prompts = [[1, 2, 3]] * len(rows)
        host = set_rows(*rows, vocab=vocab, prompts=prompts)
        device = set_rows(*rows, vocab=vocab, prompts=prompts, device="cuda")
        logits = torch.empty(len(rows), vocab, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            device(logits.zero_(), device.needs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            device(logits, device.needs)
        for row, params in enumerate(rows):  # again: the first call only compiled
            seed = row if params.seed is None else params.seed
            device.set_row(row, params, seed=seed, prompt=prompts[row])
        for index in range(12):
            logits.copy_(random_logits(index, len(rows), vocab))
            graph.replay()
            assert device.tokens.tolist() == step(host, logits.cpu())
            for name in ("pending", "index"):
                assert torch.equal(getattr(device, name).cpu(), getattr(host, name))
            if host.needs.logprobs is not None:
                n, sampled = host.needs.logprobs, host.tokens >= 0
                torch.testing.assert_close(device.logprob.cpu()[sampled], host.logprob[sampled])
                torch.testing.assert_close(
                    device.top_logprobs[:, :n].cpu(), host.top_logprobs[:, :n]
                )
                assert torch.equal(device.top_tokens[:, :n].cpu(), host.top_tokens[:, :n])
