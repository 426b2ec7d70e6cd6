"""The sampling kernels draw exactly the tokens of the sampler's PyTorch code.

Without a GPU the kernels run in Triton's interpreter. The oracle is on the same device: exp may
differ between two devices.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xlstm7b.generate.params import SamplingParams
from xlstm7b.generate.request import BAD_LOGITS
from xlstm7b.generate.sampler import Needs, Sampler, draw, uniform

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLING = Needs(sampling=True, filters=True)
VOCABS = [1, 2, 15, 16, 17, 37, 64, 70]
row_params = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 2),
    temperature=st.sampled_from([0.0, 5e-324, 1e-30, 0.05, 0.7, 1.0, 2.5, 1e300]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 5, 16, 36, 69, 2**70]),
    top_p=st.sampled_from([1.0, 1.0, 5e-324, 1e-9, 0.1, 0.3, 0.5, 0.9, 0.999, 1 - 2**-53]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
penalised = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-14, 0.3, 1.0]),
    top_k=st.sampled_from([0, 3, 20]),
    top_p=st.sampled_from([1.0, 0.5, 0.95]),
    repetition_penalty=st.sampled_from([0.7, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 1e-15, 0.1]),
    logit_bias=st.dictionaries(st.integers(0, 36), st.sampled_from([-math.inf, 0.3]), max_size=4),
    seed=st.integers(0, 2**64 - 1),
)


@contextmanager
def blocks_of(block: int) -> Iterator[None]:
    """Small blocks: a short row then has several chunks."""
    with mock.patch.object(sampling, "_BLOCK", block):
        yield


def samplers(rows: list[SamplingParams], vocab: int, ends: list[int]) -> tuple[Sampler, Sampler]:
    """The oracle, and a sampler that uses the kernels."""
    both = Sampler(len(rows), vocab, DEVICE), Sampler(len(rows), vocab, DEVICE)
    for sampler, uses_kernels in zip(both, (False, True), strict=True):
        sampler._uses_kernels = uses_kernels
        for row, params in enumerate(rows):
            sampler.set_row(row, params, seed=params.seed or 0)
            sampler._ends[row, ends] = True
    return both


def make_scores(seed: int, shape: tuple[int, ...], grid: float, scale: float) -> Tensor:
    """Random scores; with a grid many are equal. 0.0 and −0.0 are among them."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return ((scores / grid).round() * grid if grid else scores).to(DEVICE)


def spoil(scores: Tensor, bad: list[str]) -> Tensor:
    """Some rows with infinite scores or NaN."""
    vocab = scores.shape[-1]
    for row, kind in zip(scores.view(-1, vocab), bad, strict=False):
        if kind == "banned":
            row[::2] = -torch.inf
        elif kind == "all banned":
            row[:] = -torch.inf
        elif kind == "zeros":
            row[:] = 0.0
            row[::3] = -0.0
        elif kind != "good":
            row[vocab // 2] = float(kind)
    return scores


def assert_same_sampling(oracle: Sampler, sampler: Sampler) -> None:
    for name in ("tokens", "pending", "index"):
        assert getattr(sampler, name).tolist() == getattr(oracle, name).tolist(), name


some_scores = {
    "vocab": st.sampled_from(VOCABS),
    "block": st.sampled_from([16, 64, 2048]),
    "seed": st.integers(0, 2**32),
    "grid": st.sampled_from([0.0, 0.5, 3.0]),
    "scale": st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    "bad": st.lists(
        st.sampled_from(["good", "good", "banned", "all banned", "zeros", "nan", "inf", "-inf"]),
        max_size=4,
    ),
}


@settings(max_examples=40)
@given(
    rows=st.lists(row_params, min_size=1, max_size=4),
    idle=st.sets(st.integers(0, 3)),
    ends=st.lists(st.integers(0, 69), max_size=3),
    all_work=st.booleans(),
    bfloat16=st.booleans(),
    **some_scores,
)
def test_tokens_are_those_of_pytorch(
    rows, idle, ends, all_work, bfloat16, vocab, block, seed, grid, scale, bad
):
    """Also `pending` and `index`, until all rows have ended."""
    both = samplers(rows, vocab, [end for end in ends if end < vocab])
    for row in idle & {*range(len(rows))}:
        for sampler in both:
            sampler.clear_row(row)
    needs = Needs.union([both[0].needs, SAMPLING]) if all_work else both[0].needs
    for turn in range(3):
        scores = spoil(make_scores(seed + turn, (len(rows), vocab), grid, scale), bad)
        scores = scores.bfloat16() if bfloat16 else scores
        both[0](scores, needs)
        with blocks_of(block):
            both[1](scores, needs)
        assert_same_sampling(*both)


@settings(max_examples=20)
@given(
    rows=st.lists(row_params, min_size=1, max_size=3),
    positions=st.sampled_from([1, 2, 3, 9]),
    ends=st.lists(st.integers(0, 69), max_size=3),
    data=st.data(),
    **some_scores,
)
def test_drafts_are_verified_as_by_pytorch(
    rows, positions, ends, data, vocab, block, seed, grid, scale, bad
):
    both = samplers(rows, vocab, [end for end in ends if end < vocab])
    shape = len(rows), positions
    for turn in range(2):
        scores = spoil(make_scores(seed + turn, (*shape, vocab), grid, scale), bad)
        # Most drafts are the most likely tokens: many are accepted.
        drafts = scores.nan_to_num().argmax(-1)[:, :-1]
        size = drafts.numel()
        right = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        drafts = drafts.where(
            torch.tensor(right, dtype=torch.bool, device=DEVICE).view(drafts.shape), -1
        )
        drafts = torch.nn.functional.pad(drafts, (0, 2))[:, : positions - 1]  # rows have gaps
        unused = torch.zeros(*drafts.shape, 1, dtype=torch.int32, device=DEVICE)
        want = both[0].sample_drafts(scores, drafts, SAMPLING, unused)
        with blocks_of(block):
            got = both[1].sample_drafts(scores, drafts, SAMPLING, unused)
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.kept.tolist() == want.kept.tolist()
        assert_same_sampling(*both)


@settings(max_examples=10)
@given(
    rows=st.lists(penalised, min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    grid=st.sampled_from([0.0, 0.5]),
)
def test_penalties_make_scores_of_64_bits(rows, seed, grid):
    both = samplers(rows, 37, [])
    for turn in range(3):
        scores = make_scores(seed + turn, (len(rows), 37), grid, 3.0)
        both[0](scores, both[0].needs)
        with blocks_of(16):
            both[1](scores, both[1].needs)
        assert_same_sampling(*both)
        assert torch.equal(both[0]._counts, both[1]._counts)


@pytest.mark.parametrize(("grid", "vocab"), [(0.0, 50304), (1.0, 8209)])
def test_large_vocabularies(grid, vocab):
    """Candidates fill several blocks if the temperature is high."""
    rows = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(min_p=0.01),
        SamplingParams(top_p=0.95),
        SamplingParams(top_p=0.95, temperature=20.0),
        SamplingParams(top_k=50),
        SamplingParams(top_k=vocab * 2 // 5, top_p=0.9, temperature=3.0),
    ]
    both = samplers(rows, vocab, [])
    scores = make_scores(0, (len(rows), vocab), grid, 3.0)
    for sampler in both:
        sampler(scores, sampler.needs)
    assert_same_sampling(*both)


def test_some_rows_and_the_first_rows():
    rows = [SamplingParams(top_p=0.9), SamplingParams(), SamplingParams(top_k=5)]
    both = samplers(rows, 37, [])
    for turn in range(2):
        scores = make_scores(turn, (3, 37), 0.0, 3.0)
        for sampler in both:
            sampler.sample_rows(scores, [2, 0])
            sampler.first(2)(scores[:2], sampler.needs)
        assert_same_sampling(*both)
    assert both[1].index.tolist() == [4, 2, 2]


def test_kernels_are_for_gpus():
    assert not Sampler(1, 9, "cpu")._uses_kernels


@pytest.mark.gpu
def test_a_gpu_uses_kernels():
    assert Sampler(1, 9, "cuda")._uses_kernels


def test_scores_that_are_no_numbers_end_a_row():
    both = samplers([SamplingParams(top_p=0.9), SamplingParams(temperature=0)], 9, [])
    for sampler in both:
        scores = torch.zeros(2, 9, device=sampler.tokens.device)
        scores[0, 3], scores[1, 4] = torch.nan, torch.inf
        sampler(scores, sampler.needs)
        assert sampler.tokens.tolist() == [BAD_LOGITS, BAD_LOGITS]
        assert sampler.pending.tolist() == [-1, -1]


@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
    index=st.integers(0, 2**40),
)
@settings(max_examples=40)
def test_random_numbers_are_those_of_pytorch(keys, index):
    """64 equally likely tokens show the first 6 bits of the number."""
    rows = [SamplingParams(max_new_tokens=2**62) for _ in keys]
    sampler = samplers(rows, 64, [])[1]
    sampler._key.copy_(torch.tensor(keys))
    sampler.index.fill_(index)
    sampler(torch.zeros(len(keys), 64, device=DEVICE), sampler.needs)
    fractions = uniform(torch.tensor(keys), torch.full((len(keys),), index))
    want = draw(torch.ones(len(keys), 64, dtype=torch.float64), fractions)
    assert sampler.tokens.tolist() == want[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_have_the_order_of_the_scores(dtype):
    tiny, big = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max
    ordered = [-math.inf, -big, -1.5, -1.0, -tiny, 0.0, tiny, 1.0, 1.5, big, math.inf, math.nan]
    scores = torch.tensor([[-0.0, *ordered]], dtype=dtype, device=DEVICE)
    keys = torch.empty(1, scores.shape[1], dtype=torch.int64, device=DEVICE)
    ids = torch.empty(1, scores.shape[1], dtype=torch.int32, device=DEVICE)
    low = torch.empty(1, dtype=torch.float64, device=DEVICE)
    for number in range(scores.shape[1]):  # one at a time: the kernel writes a block's highest key
        one = scores[:, number : number + 1].contiguous()
        sampling.best_kernel[(1, 1)](one, keys[:, number], ids, low, 1, 1, BLOCK=16, OVERLAP=False)
    zero, *rest = keys[0].tolist()
    assert rest == sorted({*rest})
    assert zero == rest[ordered.index(0.0)] == 0
