"""Small models for the tests."""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.tokenizer import ByteTokenizer

SMALL = ModelConfig(64, 2, 2, vocab_size=97)


@torch.no_grad()
def random_model(
    config: ModelConfig = SMALL, dtype: torch.dtype = torch.float64, *, gate_std: float = 0.5
) -> XLSTM:
    """A model with the training initialisation, but with random gates and norms.

    The training initialisation sets the gates' weights to 0. With it, a test would not notice an
    error in how the gates depend on the input.
    """
    model = XLSTM(config).to(dtype)
    for name, parameter in model.named_parameters():
        if "gate_preact" in name:
            parameter.normal_(std=gate_std)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def spelling_model(letters: str) -> XLSTM:
    """A byte-level model that writes these letters; every other token has the logit 0."""
    torch.manual_seed(0)
    model = XLSTM(ModelConfig(128, 2, 2, vocab_size=320))
    for name, parameter in model.named_parameters():
        if "gate_preact" in name:
            parameter.normal_(std=0.5)
    ids = torch.tensor(ByteTokenizer().encode(letters))
    rows = 20 * model.lm_head.weight[ids]
    model.lm_head.weight.zero_()
    model.lm_head.weight[ids] = rows
    return model


@torch.no_grad()
def bigram_model(followers: Mapping[str, str]) -> XLSTM:
    """A byte-level model that writes, after a letter, the first follower that it may write.

    The follower "\\0" is the end of text. After other letters, every token is as likely.
    """
    model = XLSTM(ModelConfig(128, 1, 2, vocab_size=320))
    for name, parameter in model.named_parameters():
        if "out_proj" in name or "proj_down" in name or "lm_head" in name or "embeddings" in name:
            parameter.zero_()  # so that only the last letter counts
    embeddings, head = model.backbone.embeddings.weight, model.lm_head.weight
    embeddings[:, -1] = 1
    for number, (letter, after) in enumerate(followers.items()):
        (token,) = ByteTokenizer().encode(letter)
        embeddings[token] = torch.eye(128)[number]
        for follower, logit in zip(after, (50, 20, 10, 5), strict=False):
            target = 0 if follower == "\0" else ByteTokenizer().encode(follower)[0]
            head[target, number] += logit / 128**0.5
    return model


def random_tokens(batch: int, length: int, config: ModelConfig = SMALL) -> Tensor:
    """Token ids [batch, length]."""
    return torch.randint(0, config.vocab_size, (batch, length))


def assert_states_match(got: ModelState, want: ModelState, tolerance: float) -> None:
    """Each tensor is within `tolerance` of the wanted one, relative to its norm; 0 means equal."""
    assert torch.equal(got.tokens_seen, want.tokens_seen)
    for got_block, want_block in zip(got.blocks, want.blocks, strict=True):
        for got_part, want_part in zip(got_block, want_block, strict=True):
            assert (got_part - want_part).norm() <= tolerance * want_part.norm()
