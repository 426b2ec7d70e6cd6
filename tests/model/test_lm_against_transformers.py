"""The numbers match those of `transformers`: its xLSTM loads our folders, and ours loads its."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from measure import error

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SHAPES = {
    "2 blocks, heads of 32/64": ModelConfig(128, 2, 2, vocab_size=300),
    "3 blocks, heads of 16/32": ModelConfig(128, 3, 4, vocab_size=131),
    "1 block, heads of 96/192": ModelConfig(768, 1, 4, vocab_size=300),
    "2 blocks, 3 heads of 64/128": ModelConfig(384, 2, 3, vocab_size=200),
}


@torch.no_grad()
def redraw(model: torch.nn.Module) -> None:
    """Random weights, at a scale where gates, norms and soft-caps have an effect."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("fgate_preact.bias"):
            parameter.uniform_(1, 5)
        elif name.endswith("igate_preact.bias"):
            parameter.uniform_(-6, 1)
        elif parameter.dim() == 2:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)


def theirs_from(folder) -> torch.nn.Module:
    model = transformers.xLSTMForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def their_greedy(model, tokens, steps):
    picked, cache = [], None
    for _ in range(steps):
        out = model(tokens, cache_params=cache, use_cache=True)
        cache, tokens = out.cache_params, out.logits[:, -1].argmax(-1, keepdim=True)
        picked.append(tokens)
    return torch.cat(picked, dim=1)


def our_greedy(model, tokens, steps):
    picked, state = [], None
    for _ in range(steps):
        logits, state = model(tokens, state, logits="last")
        tokens = logits.argmax(-1, keepdim=True)
        picked.append(tokens)
    return torch.cat(picked, dim=1)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_logits_and_greedy_tokens_match_in_both_directions(shape, tmp_path):
    config = SHAPES[shape]
    ours = XLSTM(config)
    redraw(ours)
    ours.save_pretrained(tmp_path / "ours")
    theirs = theirs_from(tmp_path / "ours")
    redraw(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(0, config.vocab_size, (2, 100))  # not a multiple of their chunk of 64
    pairs = [
        (ours, theirs_from(tmp_path / "ours")),
        (XLSTM.from_pretrained(tmp_path / "theirs"), theirs),
    ]
    for our_model, their_model in pairs:
        assert error(our_model(tokens)[0], their_model(tokens).logits) < 1e-4
        our_tokens = our_greedy(our_model, tokens, 32)
        assert torch.equal(our_tokens, their_greedy(their_model, tokens, 32))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A 160m with a small vocabulary and the training initialisation: our model and theirs."""
    torch.manual_seed(0)
    model = XLSTM(replace(ModelConfig.named("160m"), vocab_size=5000))
    folder = tmp_path_factory.mktemp("160m")
    model.save_pretrained(folder)
    return model, theirs_from(folder), torch.randint(0, 5000, (1, 80))


@torch.no_grad()
def test_the_error_to_float64_is_at_most_twice_theirs_at_160m(large):
    ours, theirs, tokens = large
    want, _ = deepcopy(ours).double()(tokens)
    assert error(ours(tokens)[0], want) <= 2 * error(theirs(tokens).logits, want)


@torch.no_grad()
def test_bfloat16_weights_are_close_to_float32_at_160m(large):
    ours, _, tokens = large
    want, _ = ours(tokens)
    got, state = deepcopy(ours).bfloat16()(tokens)
    assert error(got, want) < 6e-2
    assert got.dtype == state.blocks[0].C.dtype == torch.float32
