"""Prefill in pieces and decode one token at a time: what a recomputation of the text would give."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from checkpoints import run
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate import decoder as module
from xlstm7b.generate.decoder import Decoder, check_tokens, with_first_token
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.sampler import Sampler
from xlstm7b.generate.sampling import SamplingSettings
from xlstm7b.generate.states import TextState
from xlstm7b.model import XLSTM


def config(**changes) -> ModelConfig:
    fields = {"embedding_dim": 64, "num_blocks": 2, "num_heads": 2, "vocab_size": 40}
    return ModelConfig(**{**fields, **changes})


def random_model() -> XLSTM:
    """float64, with gates that listen to their input: near ties are out of the question."""
    model = XLSTM(config(eos_token_id=39)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name:
                parameter.normal_(std=0.5)
        model.lm_head.weight *= 20
        model.lm_head.weight[39] = 0  # end of text: possible, not likely
    return model


def draw(*lengths: int) -> list[list[int]]:
    return [torch.randint(1, 39, (length,)).tolist() for length in lengths]


@torch.no_grad()
def assert_has_read(decoder: Decoder, texts: list[list[int]]) -> None:
    """Row by row: tokens seen, logits and memory are those of one pass over the row's text."""
    assert decoder.state.tokens_seen.tolist() == [len(text) for text in texts]
    for row, text in enumerate(texts):
        want, state = MODEL(torch.tensor([text]), logits="last")
        assert error(decoder.logits[row], want[0]) < 1e-7  # they are kept in float32
        for block, want_block in zip(decoder.state.blocks, state.blocks, strict=True):
            for part, want_part in zip(block, want_block, strict=True):
                assert error(part[row], want_part[0]) < 1e-11


torch.manual_seed(0)
MODEL = random_model()
FUSED = FusedModel(MODEL)
FLOAT32 = copy.deepcopy(MODEL).float()
FUSED_FLOAT32 = FusedModel(FLOAT32)


def exact_decoder(batch: int) -> Decoder:
    return Decoder(FUSED, batch, state_dtype=torch.float64)


def held(decoder: Decoder, rows: list[int]) -> list[Tensor]:
    """A copy of all that the decoder knows of these rows."""
    return [tensor[rows] for tensor in (*decoder.state._tensors(), decoder.logits)]


@pytest.mark.parametrize(
    "lengths", [(1,), (15,), (16,), (17,), (131,), (33,) * 3, (70, 16, 1), (300, 3, 2, 1)]
)
def test_prefill_in_pieces(monkeypatch, lengths):
    monkeypatch.setattr(module, "PIECE", 16)
    monkeypatch.setattr(module, "MOST_TOKENS", 40)
    decoder, prompts, told = exact_decoder(len(lengths)), draw(*lengths), []
    decoder.prefill(prompts, told.append)
    decoder.decode_one()  # no row has begun to say anything: none moves
    assert_has_read(decoder, prompts)
    assert sum(told) == sum(lengths)
    assert all(0 < tokens <= 40 for tokens in told)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    more=st.lists(st.integers(1, 30), min_size=5, max_size=5),
    piece=st.integers(1, 30),
    most=st.integers(1, 90),
)
def test_any_prompts_in_any_pieces_on_top_of_each_other(lengths, more, piece, most):
    lengths, more = sorted(lengths)[::-1], sorted(more[: len(lengths)])[::-1]
    first, second = draw(*lengths), draw(*more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        patch.setattr(module, "MOST_TOKENS", most)
        decoder = exact_decoder(len(lengths))
        decoder.prefill(first)
        decoder.prefill(second)
    assert_has_read(decoder, [a + b for a, b in zip(first, second, strict=True)])


@pytest.mark.parametrize(
    ("lengths", "pieces"),
    [
        ((10_000,), [(1, 4096), (1, 4096), (1, 1808)]),
        ((100,), [(1, 100)]),
        ((5000, 4100, 9), [(3, 4096), (2, 904)]),
        ((6000,) * 3 + (2,) * 4, [(7, 2304), (3, 3696)]),  # a multiple of 256 within 16,384
        ((40,) * 1000, [(1000, 16), (1000, 16), (1000, 8)]),
        ((2,) * 17_000, [(17_000, 1)] * 2),
    ],
)
def test_pieces_are_bounded_and_every_token_is_read_once(monkeypatch, lengths, pieces):
    decoder = exact_decoder(len(lengths))
    texts, shapes = [[] for _ in lengths], []

    def read(piece: Tensor, taken: list[int]) -> Tensor:
        shapes.append(tuple(piece.shape))
        for text, tokens, count in zip(texts, piece.tolist(), taken, strict=False):
            text += tokens[:count]
        return torch.zeros(len(piece), 64)

    monkeypatch.setattr(decoder, "_read", read)
    prompts = draw(*lengths)
    decoder.prefill(prompts)
    assert shapes == pieces
    assert texts == prompts


def test_prefill_of_fewer_rows_leaves_the_others_alone():
    decoder, prompts = exact_decoder(3), draw(20, 12, 5)
    decoder.prefill(prompts)
    before, more = held(decoder, [1, 2]), draw(7)
    decoder.prefill(more)
    assert all(map(torch.equal, held(decoder, [1, 2]), before))
    assert_has_read(decoder, [prompts[0] + more[0], *prompts[1:]])


def test_start_from_a_place_or_from_nothing():
    decoder, (text, more) = exact_decoder(2), draw(30, 11)
    decoder.prefill([text, text[:9]])
    place = TextState(MODEL.config, decoder.state, decoder.logits).clone()
    other = exact_decoder(2)
    other.start(place.select([1, 0]))
    assert_has_read(other, [text[:9], text])
    other.prefill([more, more[:1]])
    assert_has_read(other, [text[:9] + more, text + more[:1]])
    assert_has_read(decoder, [text, text[:9]])
    decoder.start(None)
    decoder.prefill([more, more])
    assert_has_read(decoder, [more, more])


def test_a_million_tokens_in_constant_memory():
    """In a process of its own: the peak of this one may be higher already.

    Forget gates of σ(3) leave nothing of what lies 2000 tokens back: the logits are known.
    """
    script = """
import json, resource, torch
from xlstm7b.config import ModelConfig
from xlstm7b.generate.decoder import Decoder
from xlstm7b.generate.fused import FusedModel
from xlstm7b.model import XLSTM

torch.manual_seed(0)
fields = dict(vocab_size=40, v_dim_factor=0.5, ffn_proj_factor=0.5, ffn_round_up_to_multiple_of=1)
model = XLSTM(ModelConfig(32, 1, 1, **fields))
decoder = Decoder(FusedModel(model), 1)
prompt = torch.randint(0, 40, (1_000_000,)).tolist()
decoder.prefill([prompt[:8192]])
decoder.start(None)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
decoder.prefill([prompt])
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
with torch.no_grad():
    want = model(torch.tensor([prompt[-3000:]]), logits="last")[0]
finite = all(tensor.isfinite().all() for tensor in [*decoder.state.blocks[0], decoder.logits])
error = (decoder.logits - want).norm() / want.norm()
print(json.dumps([decoder.state.tokens_seen.tolist(), grown * 1024, bool(finite), float(error)]))
"""
    seen, grown, finite, off = json.loads(run(script))
    assert seen == [1_000_000]
    assert grown < 4 << 20  # the prompt's vectors of one block would take 128 MB
    assert finite
    assert off < 1e-5


@torch.no_grad()
def recomputed(prompt: list[int], row: SamplingSettings, steps: int, seed: int) -> list[int]:
    """Every token from the whole text before it, with no state."""
    sampler, text = Sampler(1, 40, "cpu"), list(prompt)
    sampler.set_row(0, row, seed=seed, prompt=prompt)
    for _ in range(steps):
        logits, _ = FLOAT32(torch.tensor([text]), logits="last")
        sampler(logits, sampler.needs)
        text.append(int(sampler.tokens))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    "row", [{"temperature": 0}, {}, {"temperature": 2.0, "top_k": 9},
            {"temperature": 3.0, "top_p": 0.9}, {"repetition_penalty": 3.0, "min_new_tokens": 9}]
)  # fmt: skip
def test_decoding_equals_recomputation(row):
    row, prompts = SamplingSettings(eos_token_id=39, **row), draw(70, 31, 1)
    decoder = Decoder(FUSED_FLOAT32, 3)
    decoder.prefill(prompts)
    for index, prompt in enumerate(prompts):
        decoder.sampler.set_row(index, row, seed=3 + index, prompt=prompt)
    decoder.sample()
    tokens = [decoder.sampler.tokens.tolist()]
    for _ in range(15):
        decoder.decode_one()
        tokens.append(decoder.sampler.tokens.tolist())
    for index, (prompt, *got) in enumerate(zip(prompts, *tokens, strict=True)):
        if 39 in got:
            end = got.index(39) + 1
            assert got[end:] == [-1] * (16 - end)
            got = got[:end]
        assert got == recomputed(prompt, row, len(got), seed=3 + index)
        assert len(set(got)) > 2


def test_a_row_that_is_over_stays_where_it_ended():
    greedy, prompts = SamplingSettings(temperature=0), draw(12, 9, 5)
    first, second, _ = (recomputed(prompt, greedy, 6, seed=0) for prompt in prompts)
    end = first[2]
    assert end not in (*first[:2], *second)
    decoder = Decoder(FUSED_FLOAT32, 3)
    decoder.prefill(prompts)
    for row in (0, 1):  # row 2 never starts
        decoder.sampler.set_row(row, replace(greedy, eos_token_id=end), seed=0)
    decoder.sample()
    steps = [decoder.sampler.tokens.tolist()]
    for _ in range(5):
        before = held(decoder, [0, 2])
        decoder.decode_one()
        steps.append(decoder.sampler.tokens.tolist())
    assert [*map(list, zip(*steps, strict=True))] == [[*first[:3], -1, -1, -1], second, [-1] * 6]
    assert decoder.state.tokens_seen.tolist() == [14, 14, 5]
    assert all(map(torch.equal, held(decoder, [0, 2]), before))
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_one_token_a_step_in_the_same_memory():
    """Nothing is read again, and no tensor that the decoder holds moves."""
    decoder, steps = Decoder(FUSED_FLOAT32, 2), []
    fused_step = FUSED_FLOAT32.step

    def places() -> list[int]:
        tensors = (*decoder.state._tensors(), decoder.logits, decoder.sampler.pending)
        return [tensor.data_ptr() for tensor in tensors]

    before = places()
    decoder.prefill(draw(9, 4))
    for row in (0, 1):
        decoder.sampler.set_row(row, SamplingSettings(), seed=row)
    decoder.sample()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FUSED_FLOAT32, "step", lambda *x: steps.append(x[0].shape) or fused_step(*x))
        for _ in range(20):
            decoder.decode_one()
    assert steps == [(2,)] * 20
    assert decoder.state.tokens_seen.tolist() == [29, 24]
    assert places() == before


def test_a_float64_model_decodes():
    decoder, (prompt,) = exact_decoder(1), draw(9)
    decoder.prefill([prompt])
    decoder.sampler.set_row(0, SamplingSettings(temperature=0), seed=0)
    decoder.sample()
    token = int(decoder.sampler.tokens)
    decoder.decode_one()
    assert_has_read(decoder, [[*prompt, token]])


def test_first_token():
    assert with_first_token(config(), [5, 0]) == [0, 5, 0]
    assert with_first_token(config(), [0, 5]) == [0, 5]
    assert with_first_token(config(), []) == [0]
    assert with_first_token(config(bos_token_id=2), (0, 5)) == [2, 0, 5]
    bare = config(force_bos_token_insert=False)
    assert with_first_token(bare, [5, 0]) == [5, 0]
    with pytest.raises(ValueError, match=r"^the prompt is empty, and this model has no"):
        with_first_token(bare, [])


@pytest.mark.parametrize("token", [-1, 40, 50_000])
def test_ids_outside_the_vocabulary(token):
    check_tokens(config(), [0, 39])
    with pytest.raises(ValueError, match=f"^token {token} is outside the vocabulary of 40$"):
        check_tokens(config(), [5, token, -7])
