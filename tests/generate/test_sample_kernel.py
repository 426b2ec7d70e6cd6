"""The kernels of sampling draw the tokens of `Sampler`'s PyTorch code, whatever the parameters are.

Without a GPU they run in Triton's interpreter, mostly with small blocks, so that a few hundred
tokens fill several of them. The exponential of the interpreter may round differently, which changes
a weight by 1 in 2^37 or more, and no token here. On a GPU both are the same to the bit.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from xlstm7b.generate.params import SamplingParams
from xlstm7b.generate.request import BAD_LOGITS
from xlstm7b.generate.sampler import Needs, Sampler, mask_words

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import sample as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERYTHING = Needs(True, True, True, True, True, True, 1)
SMALL = {"_BLOCK": 32, "_TILE": 64, "_LISTED": 32}
COARSE = {**SMALL, "_BINS": 16, "_BINS_PER_UNIT": 1}  # many tokens share a bin
full_size = pytest.mark.parametrize("vocab", [50_304, 50_257])


@pytest.fixture(autouse=True)
def _forget_unused_memory():
    """A kernel that read memory which nothing wrote would then see garbage, not zeros."""
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def pair(
    rows: list[SamplingParams], vocab: int, device: str = DEVICE, prompts: list[list[int]] = ()
) -> tuple[Sampler, Sampler]:
    """Two samplers with the same rows: with kernels, and with PyTorch."""
    samplers = Sampler(len(rows), vocab, device), Sampler(len(rows), vocab, device)
    for sampler, uses_kernels in zip(samplers, (True, False), strict=True):
        sampler.uses_kernels = uses_kernels
        for row, params in enumerate(rows):
            params.check(vocab)
            seed = row if params.seed is None else params.seed
            prompt = prompts[row] if prompts else ()
            sampler.set_row(row, params, seed=seed, prompt=prompt)
    return samplers


def assert_same(got: Sampler, want: Sampler, needs: Needs) -> None:
    """The same results and histories. A row that ends with bad logits may end in either way."""
    assert got.tokens.tolist() == want.tokens.tolist()
    bad = want.tokens == BAD_LOGITS
    assert (got.pending[bad] < 0).all()
    assert got.pending[~bad].tolist() == want.pending[~bad].tolist()
    assert got.index.tolist() == want.index.tolist()
    if needs.penalties:
        assert torch.equal(got._counts[~bad], want._counts[~bad])
    if needs.logprobs is not None:
        exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(got.logprob[~bad], want.logprob[~bad], **exactly)
        assert torch.equal(got.top_tokens, want.top_tokens)


def make_logits(kind: str, seed: int, *shape: int) -> Tensor:
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    logits = {
        "usual": normal * 3,
        "flat": normal * 0.01,
        "peaked": normal * 40,
        "ties": (normal * 3).round(),
        "equal": torch.zeros(shape),
        "neighbours": 7 + (normal * 5).round() * 2**-21,  # the next numbers in float32
        "two": torch.where(normal > 0, 1.0, -0.0),
        "huge": normal * 3e37,
        "few": torch.where(normal > 1.5, normal, -torch.inf),
        "one": torch.full(shape, -torch.inf),
        "none": torch.full(shape, -torch.inf),
    }[kind]
    if kind in ("few", "one"):
        logits[..., -1] = 0.5
    return logits


KINDS = (
    "usual", "flat", "peaked", "ties", "equal", "neighbours", "two", "huge", "few", "one", "none",
)  # fmt: skip
VOCAB = 133
token_ids = st.integers(0, VOCAB - 1)
row_params = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(2, 3),
    min_new_tokens=st.integers(0, 2),
    temperature=st.sampled_from([0.0, 1e-300, 0.05, 0.7, 1.0, 1.0, 2.5, 1e300]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 20, 64, 132, 133, 999]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 1.5]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-math.inf, -9.0, 9.5]), max_size=4),
    structured_outputs=st.none() | st.just({"regex": "a"}),
    seed=st.integers(0, 2**64 - 1),
    eos_token_id=st.none() | st.lists(token_ids, max_size=3),
)


@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(row_params, st.lists(token_ids, max_size=9)), min_size=1, max_size=4),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    sizes=st.sampled_from([SMALL, COARSE]),
    everything=st.booleans(),
    density=st.sampled_from([0.0, 0.1, 0.9]),
)
def test_all_parameters_in_one_batch(rows, kind, seed, sizes, everything, density):
    """Three steps, so that rows end and penalties count."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(kernels, name, value)
        params, prompts = [params for params, _ in rows], [prompt for _, prompt in rows]
        got, want = pair(params, VOCAB, prompts=prompts)
        needs = EVERYTHING if everything else got.needs
        grammars = [row for row, p in enumerate(params) if p.structured_outputs]
        for turn in range(3):
            logits = make_logits(kind, seed + turn, len(rows), VOCAB).to(DEVICE)
            if grammars:
                masks = random_masks(seed + turn, len(grammars), density)
                got.set_masks(grammars, masks)
                want.set_masks(grammars, masks)
            got(logits, needs)
            want(logits, needs)
            assert_same(got, want, needs)


def random_masks(seed: int, rows: int, density: float) -> Tensor:
    """Bits of tokens, of which about this share is set, and at least one in each row."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.rand(rows, mask_words(VOCAB), 32, generator=generator) < density
    bits[:, 3, 17] = True
    powers = torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)])
    return (bits * powers).sum(-1).int()


@settings(max_examples=20)
@given(
    temperature=st.sampled_from([0.3, 1.0, 50.0]),
    top_k=st.integers(0, 140),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.2]),
    kind=st.sampled_from(["usual", "flat", "ties", "equal", "neighbours", "two"]),
    seed=st.integers(0, 2**32),
    sizes=st.sampled_from([SMALL, COARSE]),
)
@example(50.0, 100, 0.9, 0.0, "usual", 0, COARSE)  # all tokens are in one bin
@example(1.0, 67, 0.5, 0.0, "equal", 0, COARSE)
def test_the_cut(temperature, top_k, top_p, min_p, kind, seed, sizes):
    """Eight draws from one distribution. A wrong cut shifts most of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(kernels, name, value)
        row = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        got, want = pair([row] * 8, VOCAB)
        logits = make_logits(kind, seed, VOCAB).expand(8, -1).to(DEVICE)
        got(logits, got.needs)
        want(logits, want.needs)
        assert_same(got, want, want.needs)


@pytest.mark.parametrize("vocab", [1, 2, 31, 1023, 1024, 1025, 9001])
def test_vocabularies_with_the_blocks_that_a_gpu_uses(vocab):
    variants = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=700, top_p=0.9, temperature=5.0, min_p=0.01),
    ]
    got, want = pair(variants, vocab)
    penalised = pair([replace(row, presence_penalty=0.5) for row in variants], vocab)
    for turn, kind in enumerate(["usual", "ties", "equal", "flat"]):
        logits = make_logits(kind, turn, len(variants), vocab).to(DEVICE)
        for sampler in (got, want, *penalised):
            sampler(logits, sampler.needs)
        assert_same(got, want, want.needs)
        assert_same(*penalised, penalised[1].needs)


@settings(max_examples=20)
@given(
    rows=st.lists(row_params, min_size=1, max_size=4),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    positions=st.integers(1, 4),
    density=st.sampled_from([0.1, 0.9]),
)
def test_positions_after_drafts(rows, kind, seed, positions, density):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(kernels, name, value)
        got, want = pair(rows, VOCAB)
        needs = want.needs
        for turn in range(2):
            logits = make_logits(kind, seed + turn, len(rows), positions, VOCAB).to(DEVICE)
            drafts = logits[:, : positions - 1].argmax(-1)
            drafts[:, 1:] = torch.where(drafts[:, 1:] % 5 == 0, -1, drafts[:, 1:])
            masks = random_masks(seed, len(rows) * (positions - 1), density).to(DEVICE)
            masks = masks.view(len(rows), positions - 1, mask_words(VOCAB))
            found = got.sample_drafts(logits, drafts, needs, masks)
            wanted = want.sample_drafts(logits, drafts, needs, masks)
            assert found.tokens.tolist() == wanted.tokens.tolist()
            assert found.kept.tolist() == wanted.kept.tolist()
            assert got.pending.tolist() == want.pending.tolist()
            assert got.index.tolist() == want.index.tolist()
            if needs.penalties:
                assert torch.equal(got._counts, want._counts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_one_row(temperature):
    row = SamplingParams(temperature=temperature, top_p=0.9, logit_bias={4: -math.inf})
    for rows in ([row] * 4, [replace(row, logit_bias={})] * 4):
        got, want = pair(rows, 9)
        logits = make_logits("usual", 0, 4, 9)
        logits[1], logits[2, 5], logits[3, 5] = torch.nan, torch.inf, torch.nan
        for sampler in (got, want):
            sampler(logits.to(DEVICE), sampler.needs)
        assert got.tokens[1:].tolist() == [BAD_LOGITS] * 3
        assert_same(got, want, want.needs)


def test_a_grammar_hides_what_it_does_not_allow():
    """Also a logit that is not a number. Where all that it allows is banned, bans have no say."""
    banned = dict.fromkeys(range(5), -math.inf)
    rows = [SamplingParams(structured_outputs={"regex": "a"}, logit_bias=banned)] * 2
    got, want = pair(rows, 40)
    logits = make_logits("usual", 0, 2, 40)
    logits[0, 20], logits[1, 2] = torch.nan, torch.nan
    for sampler in (got, want):
        sampler.set_masks([0, 1], torch.tensor([[0b11110, 0]] * 2, dtype=torch.int32))
        sampler(logits.to(DEVICE), sampler.needs)
    assert 1 <= got.tokens[0] <= 4
    assert got.tokens[1] == BAD_LOGITS
    assert_same(got, want, want.needs)


def test_some_rows_of_a_sampler_and_a_view_of_it():
    rows = [
        SamplingParams(top_p=0.9, presence_penalty=0.5 * (row % 2), logit_bias={row: 3.0})
        for row in range(5)
    ]
    got, want = pair(rows, VOCAB)
    views = got.first(3), want.first(3)
    for turn in range(3):
        logits = make_logits("usual", turn, 5, VOCAB).to(DEVICE)
        for sampler in (got, want):
            sampler.sample_rows(logits, [4, 1])
        for view in views:
            view(logits[:3], view.needs)
        assert_same(got, want, want.needs)


def test_idle_rows_keep_the_parameters_of_their_last_request():
    """A batch without top_p does not list tokens, and still steps over such rows."""
    got, want = pair([SamplingParams(top_p=0.9), SamplingParams(), SamplingParams(top_k=2)], 5000)
    for turn in range(2):
        logits = make_logits("usual", turn, 3, 5000).to(DEVICE)
        for sampler in (got, want):
            sampler.clear_row(0)
            sampler.clear_row(2)
            assert sampler.needs == Needs(sampling=True)
            sampler(logits, sampler.needs)
        assert_same(got, want, want.needs)


def test_float64_logits():
    got, want = pair([SamplingParams(top_p=0.7), SamplingParams(logit_bias={1: 0.1})], VOCAB)
    logits = make_logits("usual", 0, 2, VOCAB).double().to(DEVICE) + 1e-12
    for sampler in (got, want):
        sampler(logits, sampler.needs)
    assert_same(got, want, want.needs)


@pytest.mark.gpu
@full_size
@pytest.mark.parametrize("kind", ["usual", "flat", "peaked", "ties", "equal", "few"])
@pytest.mark.parametrize("temperature", [0.8, 100.0])
def test_a_cuda_graph_at_full_size(vocab, kind, temperature):
    """Two graphs with the same rows draw the tokens of PyTorch on the same GPU."""
    changes = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.95},
        {"top_k": 50},
        {"top_k": 40_000, "top_p": 0.5},
        {"top_k": 1000, "top_p": 0.9, "min_p": 0.02},
        {"min_p": 0.1},
        {"top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {3: 4.0}},
    ]
    rows = [SamplingParams(**{"temperature": temperature, **change}) for change in changes]
    for batch in (rows[:7] * 9, rows * 8, *([row] for row in rows)):
        prompts = [[1, 2, 3]] * len(batch)
        got, want = pair(batch, vocab, "cuda", prompts)
        again, _ = pair(batch, vocab, "cuda", prompts)
        needs = got.needs
        logits = torch.empty(len(batch), vocab, device="cuda")
        graphs = capture(got, logits, needs), capture(again, logits, needs)
        for sampler in (got, again):
            for row, params in enumerate(batch):  # again: capturing has drawn a token
                sampler.set_row(row, params, seed=row, prompt=prompts[row])
        for turn in range(3):
            logits.copy_(make_logits(kind, turn, len(batch), vocab))
            for graph in graphs:
                graph.replay()
            want(logits, needs)
            assert_same(got, want, needs)
            assert_same(again, want, needs)


def capture(sampler: Sampler, logits: Tensor, needs: Needs) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sampler(logits.zero_(), needs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler(logits, needs)
    return graph


@pytest.mark.gpu
@full_size
def test_drafts_at_full_size(vocab):
    rows = [SamplingParams(top_p=0.9), SamplingParams(top_k=20, presence_penalty=0.3)] * 2
    for batch in (rows, rows[:1]):
        got, want = pair(batch, vocab, "cuda")
        for turn in range(4):
            logits = make_logits("usual", turn, len(batch), 9, vocab).cuda()
            drafts = logits[:, :8].argmax(-1)
            unused = torch.zeros(len(batch), 8, mask_words(vocab), dtype=torch.int32, device="cuda")
            found, wanted = (
                sampler.sample_drafts(logits, drafts, want.needs, unused) for sampler in (got, want)
            )
            assert found.tokens.tolist() == wanted.tokens.tolist()
            assert got.pending.tolist() == want.pending.tolist()


@pytest.mark.gpu
def test_weights_have_the_bits_of_pytorchs():
    """All exponents that have a weight, through the cut of top_p at every place."""
    vocab = 50_304
    logits = torch.linspace(-27, 0, vocab, device="cuda").flip(0).expand(200, -1)
    rows = [SamplingParams(top_p=(n + 1) / 200, temperature=0.5 + n / 100) for n in range(200)]
    got, want = pair(rows, vocab, "cuda")
    seen = []
    launch = kernels.draw_kernel.__class__.run

    def keep(self, *args, **options):
        if self is kernels.draw_kernel:
            seen.append(args[3].clone())
        return launch(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.draw_kernel.__class__, "run", keep)
        got(logits, got.needs)
    want(logits, want.needs)
    scores = want._scores(logits, want.needs)
    plain = want._weights(scores, scores.amax(-1, keepdim=True), Needs(sampling=True))
    assert torch.equal(seen[0], plain)
    assert_same(got, want, want.needs)
