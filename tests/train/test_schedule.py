"""Learning rate, batch ramp and tokens at every corner, against numbers worked out by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlstm7b.train.schedule import BatchRamp, Decay, LearningRate, micro_batches

# Appendix B: 3000 + 540,000 + 7000 steps; a tenth after 500,000 of the decay's.
PAPER = LearningRate(5e-4, "exponential", 3000, 540_000, 7000, factor=0.1, reference=500_000)
# Its ablations: to 10% at step 75,000, to zero at 76,000.
ABLATION = LearningRate(5e-4, "cosine", 3000, 72_000, 1000)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (1, 5e-4 / 3000),
        (1500, 2.5e-4),
        (2999, 5e-4 * 2999 / 3000),
        (3000, 5e-4),
        (3001, 5e-4 * 0.9999953948404178),  # 10^(−1/500,000)
        (253_000, 1.5811388300841898e-4),  # halfway: 10^(−1/2)
        (503_000, 5e-5),
        (543_000, 4.158818916837e-5),  # 10^(−1.08) = 0.0831763771
        (546_500, 2.0794094584185e-5),  # half of that
        (549_999, 4.158818916837e-5 / 7000),
        (550_000, 0.0),
        (600_000, 0.0),
    ],
)
def test_the_papers_schedule(step: int, expected: float) -> None:
    assert PAPER(step) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (3000, 5e-4),
        (21_000, 5e-4 * (0.1 + 0.9 * 0.8535533905932737)),  # a quarter: (1 + √½) / 2
        (39_000, 2.75e-4),  # halfway between the peak and its tenth
        (75_000, 5e-5),
        (75_500, 2.5e-5),
        (75_999, 5e-8),
        (76_000, 0.0),
    ],
)
def test_the_ablations_schedule(step: int, expected: float) -> None:
    assert ABLATION(step) == pytest.approx(expected, rel=1e-9)


def test_corners_are_exact_and_the_curve_has_no_jumps() -> None:
    for curve in (PAPER, ABLATION):
        assert curve(curve.warmup) == curve.peak
        end = curve.warmup + curve.decay + curve.cooldown
        assert (curve(0), curve(end)) == (0.0, 0.0)
        for corner in curve.corners()[1:]:
            before, at = curve(corner - 1), curve(corner)
            assert abs(before - at) <= curve.peak / 2999
    assert PAPER.corners() == (0, 3000, 503_000, 543_000, 550_000)
    assert ABLATION.corners() == (0, 3000, 75_000, 76_000)


def test_the_authors_code_reaches_a_tenth_after_495_000_steps() -> None:
    theirs = LearningRate(4e-4, "exponential", 3000, 540_000, 7000, 0.1, 495_000)
    assert theirs(498_000) == pytest.approx(4e-5, rel=1e-12)
    assert theirs(543_000) / 4e-4 == pytest.approx(0.0811, abs=5e-5)


def test_linear_and_constant() -> None:
    linear = LearningRate(1.0, "linear", 10, 100, 0, factor=0.5)
    assert [linear(step) for step in (5, 10, 60, 110, 500)] == [0.5, 1.0, 0.75, 0.5, 0.5]
    constant = LearningRate(1.0, "constant", 0, 100, 50)
    assert [constant(step) for step in (0, 100, 125, 150, 151)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    flat = LearningRate(1.0, "constant", 4, 0, 0)
    assert [flat(step) for step in (0, 1, 4, 99)] == [0.0, 0.25, 1.0, 1.0]


def test_without_a_reference_the_factor_is_reached_at_the_decays_end() -> None:
    curve = LearningRate(1.0, "exponential", 0, 200, 0, factor=0.01)
    assert curve(100) == pytest.approx(0.1)
    assert curve(200) == 0.01


@given(
    kind=st.sampled_from(["exponential", "cosine"]),
    warmup=st.integers(0, 20),
    decay=st.integers(1, 50),
    cooldown=st.integers(0, 20),
    factor=st.floats(0.01, 1),
)
def test_both_decays_with_and_without_a_cool_down(
    kind: Decay, warmup: int, decay: int, cooldown: int, factor: float
) -> None:
    curve = LearningRate(1.0, kind, warmup, decay, cooldown, factor)
    rates = [curve(step) for step in range(warmup + decay + cooldown + 2)]
    assert rates[warmup] == 1
    assert all(one < two for one, two in pairwise(rates[: warmup + 1]))
    assert all(one >= two for one, two in pairwise(rates[warmup:]))
    assert rates[warmup + decay] == pytest.approx(factor)
    assert rates[-1] == (0 if cooldown else pytest.approx(factor))


def test_the_batch_ramp_of_the_paper() -> None:
    ramp = BatchRamp(((0, 128), (2000, 256), (4000, 512)))
    at = {0: 128, 1999: 128, 2000: 256, 3999: 256, 4000: 512, 549_999: 512}
    assert {step: ramp.sequences(step) for step in at} == at
    before = {
        0: 0,
        1: 128,
        2000: 256_000,
        2001: 256_256,
        4000: 768_000,
        4001: 768_512,
        550_000: 280_320_000,  # 256,000 + 512,000 + 546,000 × 512
    }
    assert {step: ramp.sequences_before(step) for step in before} == before
    assert ramp.sequences_before(550_000) * 8192 == 2_296_381_440_000  # the paper's 2.3T tokens


def test_the_closed_form_is_the_sum_over_steps() -> None:
    ramp, total = BatchRamp(((0, 3), (4, 5), (9, 7))), 0
    for step in range(20):
        assert ramp.sequences_before(step) == total
        total += ramp.sequences(step)


@pytest.mark.parametrize(
    ("sequences", "at_most", "expected"),
    [(4, 4, (4, 1)), (1, 4, (1, 1)), (6, 4, (3, 2)), (7, 4, (1, 7)), (32, 16, (16, 2))],
)
def test_micro_batches(sequences: int, at_most: int, expected: tuple[int, int]) -> None:
    assert micro_batches(sequences, at_most) == expected
